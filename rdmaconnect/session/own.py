"""What an application brings to a connection: then receives and completions are its own, and nothing here polls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from ..abi import AccessFlags, QpAttrMask, QpState, QpType
from ..agreement.options import Sizes
from ..errors import DeviceError, RdmaConnectError, StateError, shown
from ..objects.borrowed import BorrowedQueuePair
from ..objects.completion import CQ
from ..objects.context import Context, open_device
from ..objects.foreign import Foreign, QueuePairLike
from ..objects.foreign_libraries import adapter_for
from ..objects.memory import MR, PD, MemoryLike
from ..objects.queuepair import QueuePair
from .admission import Busy
from .engine import Engine, queue_pairs

__all__ = ["Own", "OwnEngine", "OwnQueuePair", "OwnQueues", "own_of"]


#: (device, qp_num) of queue pairs of the application's -> the use of the device that ends with the use of one
_used = weakref.WeakValueDictionary[tuple[str, int], Context]()
_lock = threading.Lock()


class Own(Protocol):
    """What it brings.

    Attributes:
        name: the option that it was given by.
        device: the name of the device that it is on.
        port_num: the port that it must be, or None.
        qp_type: the type that it must be, or None.
        spent: whether what had been posted to it is gone, since an attempt to connect came to nothing.
    """

    name: str
    device: str
    port_num: int | None
    qp_type: QpType | None
    spent: bool

    def open(self) -> Context:
        """A use of the opened device, to be closed."""

    def lay(self, engine: OwnEngine) -> None:
        """Set the protection domain and the completion queue of an engine, as far as they are known."""

    def queue_pairs(self, engine: Engine, qp_type: QpType, count: int, sizes: Sizes, port_num: int) -> list[Any]:
        """So many queue pairs, to be connected."""

    def check(self, qp: Any, port_num: int) -> None:
        """Raise if a queue pair is not any more as it was made ready: in INIT, on that port."""

    def part(self, qp: Any, came: QpState, stood: bool) -> None:
        """A queue pair is of no use to a connection any more.

        Args:
            qp: the queue pair.
            came: the state that it came in.
            stood: whether it was a connection's.
        """

    def shown(self, qp: Any) -> Any:
        """What the application is shown of it."""


class OwnQueues:
    """Completion queues; queue pairs are made on them.

    Args:
        send_cq, recv_cq: where completions go; they stay the application's.

    Raises:
        StateError: one is closed.
        ValueError: they are of two devices.
    """

    name, spent = "send_cq", False
    port_num: int | None = None
    qp_type: QpType | None = None

    def __init__(self, send_cq: CQ, recv_cq: CQ) -> None:
        for cq in (send_cq, recv_cq):
            cq.pointer  # noqa: B018  it is open
        if not send_cq.context.is_same(recv_cq.context):
            raise ValueError(f"send_cq is the {send_cq.name}, recv_cq the {recv_cq.name}: give two of one device")
        self.send_cq, self.recv_cq = send_cq, recv_cq
        self.device = send_cq.context.name

    def open(self) -> Context:
        return self.send_cq.context.again()

    def lay(self, engine: OwnEngine) -> None:
        engine.pd, engine.cq = PD(engine.context), self.send_cq

    def queue_pairs(self, engine: Engine, qp_type: QpType, count: int, sizes: Sizes, port_num: int) -> list[Any]:
        return queue_pairs(engine.pd, self.send_cq, self.recv_cq, qp_type, count, sizes)

    def check(self, qp: Any, port_num: int) -> None:
        """Nobody else has had it."""

    def part(self, qp: Any, came: QpState, stood: bool) -> None:
        qp.close()

    def shown(self, qp: Any) -> Any:
        return qp


class OwnQueuePair:
    """A queue pair, made by whatever library. It is connected by one at a time, and never destroyed here.

    Args:
        given: a :class:`QueuePair`; one of pyverbs or ``ibverbs``; the address of a ``struct ibv_qp``; or a
            :class:`QueuePairLike`.

    Raises:
        TypeError, ValueError: it is none of these.
        StateError: it is closed, or neither in RESET nor in INIT.
        DeviceError: its device cannot be opened here.
    """

    name, spent = "qp", False
    port_num: int | None
    qp_type: QpType | None

    def __init__(self, given: Any) -> None:
        self.given = given
        self._context, self._qp = _borrow(given)
        with self._context as context:
            self.device, self.qp_type = context.name, QpType(self._qp.qp_type)
            self.port_num = self._port_of(self._qp)

    @staticmethod
    def _port_of(qp: QueuePair | Foreign) -> int | None:
        """The port that it is on; None in RESET."""
        if qp.found_in() not in (QpState.RESET, QpState.INIT):
            raise StateError(f"connect {qp.name}: it is in {qp.state}. Move it to RESET, or give one in RESET or INIT.")
        return int(qp.query(QpAttrMask.PORT).port_num) if qp.state == QpState.INIT else None

    def open(self) -> Context:
        with _lock:
            used = _used.get((self.device, self._qp.qp_num))
            if used is not None and not used.closed:
                raise Busy(f"{self._qp.name} is another connection's, or that of an end of bind().")
            self._context, self._qp = _borrow(self.given)
            _used[self.device, self._qp.qp_num] = self._context
            return self._context

    def lay(self, engine: OwnEngine) -> None:
        pd = getattr(self._qp, "pd", None)
        if pd is not None:
            engine.pd = pd

    def queue_pairs(self, engine: Engine, qp_type: QpType, count: int, sizes: Sizes, port_num: int) -> list[Any]:
        qp = self._qp
        if count > 1 or qp_type != self.qp_type:
            raise StateError(f"connect {qp.name}: {count} of type {qp_type} are asked for, and this is the only one.")
        on = self._port_of(qp)
        if on not in (None, port_num):
            raise DeviceError(
                f"connect {qp.name}: it is in INIT on port {on}, and the connection goes by port {port_num} of "
                f"{self.device}. Take it to INIT on that one, or leave it in RESET."
            )
        if on is None and self.spent:
            raise StateError(
                f"connect {qp.name}: what had been posted to it went when an attempt came to nothing. "
                "Take it to INIT and post anew."
            )
        self.spent = False
        return [qp]

    def check(self, qp: Any, port_num: int) -> None:
        on = self._port_of(qp)
        if on != port_num:
            raise StateError(
                f"connect {qp.name}: it is in {'RESET' if on is None else f'INIT on port {on}'}, and was made ready in "
                f"INIT on port {port_num}: it was moved meanwhile. Leave it alone until it is connected."
            )

    def part(self, qp: Any, came: QpState, stood: bool) -> None:
        """Leave it as it is where it was a connection's; else in the state that it came in, or in RESET."""
        if not stood and qp.state not in (QpState.RESET, came):
            self.spent = came == QpState.INIT
            with suppress(RdmaConnectError):  # it was destroyed meanwhile
                qp.move(QpState.RESET)

    def shown(self, qp: Any) -> Any:
        return qp if isinstance(self.given, int) else self.given


def _borrow(given: Any) -> tuple[Context, QueuePair | Foreign]:
    """A queue pair of the application's, and a use of its device that ends with the use of it."""
    if isinstance(given, QueuePair):
        given.pointer  # noqa: B018  it is open
        return given.context.again(), given
    if isinstance(given, int) and not isinstance(given, bool):
        borrowed = BorrowedQueuePair(given)
        return borrowed.context, borrowed
    like = adapter_for(given)
    if like is None and not isinstance(given, QueuePairLike):
        raise TypeError(
            f"qp is {shown(given)}: give a QueuePair, one of pyverbs or ibverbs, the address of a struct ibv_qp, or an "
            "object with qp_num, qp_type, device, query() and modify() (rdmaconnect.QueuePairLike)"
        )
    like = like or given
    context = open_device(like.device)
    try:
        return context, Foreign(like, context)
    except BaseException:
        context.close()
        raise


class OwnEngine(Engine):
    """What queue pairs share whose completions are the application's: nothing is polled, armed or waited for.

    Args:
        context: a use of the opened device, given back on close.
        own: what the application brings.
    """

    def __init__(self, context: Context, own: Own) -> None:
        self._begin(context)
        self._registered = weakref.WeakSet[MR]()
        try:
            own.lay(self)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """What is not known of it here."""
        if name in ("pd", "cq"):
            what = "protection domain" if name == "pd" else "completion queue"
            raise StateError(
                f"the {what} of a queue pair that was given (qp) is not known here: use it by what has made the two."
            )
        raise AttributeError(name)

    @property
    def knows_pd(self) -> bool:
        return "pd" in vars(self)

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None) -> MR:
        mr = super().register(buffer, access)
        self._registered.add(mr)
        return mr

    def progress(self) -> None:
        if self.context.closed:
            raise self.gone or StateError(f"the queue pairs on {self.context.name} are closed.")

    def take(self, tries: int) -> bool:
        return False

    def arm(self) -> None:
        """There is nothing to be woken by."""

    def close(self) -> None:
        with self.lock:
            super().close()
            for mr in list(self._registered):  # in a protection domain of the application's
                mr.close()


def own_of(given: Mapping[str, Any]) -> OwnQueues | OwnQueuePair | None:
    """What is brought by the keywords of a call; None for nothing.

    Raises:
        TypeError: it is none.
        ValueError, StateError, DeviceError: as :class:`OwnQueues` and :class:`OwnQueuePair`.
    """
    queues = {name: given[name] for name in ("send_cq", "recv_cq") if given.get(name) is not None}
    for name, cq in queues.items():
        if not isinstance(cq, CQ):
            raise TypeError(f"{name} is {shown(cq)}: give a CQ of rdmaconnect.objects.completion")
    qp = given.get("qp")
    if qp is not None:
        if queues:
            raise ValueError(f"qp with {' and '.join(queues)}: a queue pair has its queues already")
        return OwnQueuePair(qp)
    if not queues:
        return None
    first, *_, last = *queues.values(), *queues.values()
    return OwnQueues(queues.get("send_cq", last), queues.get("recv_cq", first))
