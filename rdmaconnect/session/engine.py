"""The engine room: one protection domain, channel and completion queue, and the memory that receives go to."""

from __future__ import annotations

import errno
import mmap
import threading
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Protocol

from ..abi import AccessFlags, QpType
from ..agreement.options import Sizes
from ..errors import RdmaConnectError, StateError, VerbsError
from ..objects.completion import CQ, CompChannel
from ..objects.context import Context
from ..objects.memory import MR, PD, MemoryLike
from ..objects.queuepair import QueuePair
from ..objects.work_request import RecvList, SendRequest
from ..runtime.wakeup import Signal

__all__ = ["PROBES", "Engine", "Ring", "queue_pairs", "spare_receives"]

#: receives that a proof of the data path takes
PROBES = 2


def spare_receives(count: int) -> int:
    """How many receives a queue pair has besides ``recv_depth``.

    One that is by itself may be connected anew while there are messages unread in all of its slots.

    Args:
        count: how many are made at once.
    """
    return PROBES if count == 1 else 0


class User(Protocol):
    """Who has a queue pair on the engine's completion queue."""

    def complete(self, wc: Any) -> None:
        """Take one completion."""

    def close(self) -> None:
        """Destroy the queue pair."""


class Engine:
    """What queue pairs that are used together share.

    Any thread may use it: whoever waits takes the completions of all.

    Args:
        context: the opened device; its use is given back on close.
        cqe: completions that may be outstanding.

    Attributes:
        lock: held while completions are taken and work is posted.
        changed: notified when completions were taken, by whoever, and when one of its users is closed.
        transceivers: queue pair number -> transceiver.
        request, requests: what is posted is written into these under the lock, alone or as a list.
        gone: why it cannot be used any more: its device is not there.
    """

    pd: PD
    channel: CompChannel
    cq: CQ

    def __init__(self, context: Context, cqe: int) -> None:
        self._begin(context)
        self.request, self.requests = SendRequest(), list[SendRequest]()
        try:
            self.pd = PD(context)
            self.channel = CompChannel(context)
            self.cq = CQ(context, cqe, self.channel)
        except BaseException:
            self.close()
            raise

    def _begin(self, context: Context) -> None:
        self.context = context
        context.removed  # noqa: B018  from here on it is known which device it is
        self.lock = threading.RLock()
        self.changed = Signal()
        self.transceivers: dict[int, User] = {}
        self.gone: RdmaConnectError | None = None

    @property
    def knows_pd(self) -> bool:
        """Whether the protection domain is known here."""
        return True

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None) -> MR:
        """Register memory; it is closed with this, or before."""
        return MR(self.pd, buffer, access)

    def queue_pairs(self, qp_type: QpType, count: int, sizes: Sizes) -> list[QueuePair]:
        """Queue pairs on its completion queue, in RESET; inline as much as is wished and the device gives."""
        return queue_pairs(self.pd, self.cq, self.cq, qp_type, count, sizes, spare_receives(count))

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.context.closed

    def progress(self) -> None:
        """Take what has completed, and give it to its transceivers.

        Raises:
            StateError: after close.
        """
        with self.lock:
            while self.take(1):
                pass

    def take(self, tries: int) -> bool:
        """As :meth:`progress`, called with the lock held; of many it may leave some.

        Args:
            tries: how often to look, until something has completed: see :meth:`CQ.busy_poll`.

        Returns:
            Whether something had.
        """
        try:
            wcs = self.cq.busy_poll(tries)
        except StateError:
            raise self.gone or StateError(f"the queue pairs on {self.context.name} are closed.") from None
        if not wcs:
            return False
        for wc in wcs:
            transceiver = self.transceivers.get(wc.qp_num)
            if transceiver is not None:
                transceiver.complete(wc)
        self.changed.notify()
        return True

    def arm(self) -> None:
        """Ask for an event at the next completion; call :meth:`progress` after it, then sleep."""
        with self.lock:
            if not self.context.closed:
                self.channel.drain()
                self.cq.arm()

    def lose(self, error: RdmaConnectError) -> None:
        """The device goes: give up all that is on it, so that the kernel need not wait for this process. Blocks."""
        with self.lock:
            if self.gone is None:
                self.gone = self.context.why_closed = error
                with suppress(RdmaConnectError):
                    self.close()
        self.changed.notify()

    def close(self) -> None:
        """Free everything, the last made first. Twice is fine.

        Raises:
            VerbsError: the library refuses; it names all that stays open. Close again later.
        """
        with self.lock:
            for transceiver in list(self.transceivers.values()):
                with suppress(RdmaConnectError):  # which is told of all at once below
                    transceiver.close()
            self.context.close()
            for transceiver in list(self.transceivers.values()):
                transceiver.close()


def queue_pairs(
    pd: PD, send_cq: CQ, recv_cq: CQ, qp_type: QpType, count: int, sizes: Sizes, spare: int = 0
) -> list[QueuePair]:
    """Queue pairs in RESET; inline as much as is wished and the device gives.

    Args:
        pd, send_cq, recv_cq, qp_type: as of :class:`QueuePair`.
        count: how many.
        sizes: how much of what.
        spare: receives of each besides.
    """
    make = partial(
        QueuePair.several, count, pd, send_cq, recv_cq, qp_type,
        max_send_wr=sizes.send_depth, max_recv_wr=sizes.recv_depth + spare,
    )  # fmt: skip
    try:
        return make(max_inline_data=sizes.max_inline_data)
    except VerbsError as e:
        if e.errno != errno.EINVAL or not sizes.max_inline_data:
            raise
    return make()


class Ring:
    """Memory for receives, registered at once for any number of transceivers.

    Args:
        pd: the protection domain.
        slots: how many receives.
        slot_size: bytes of each.
        depth: how many of them are posted together.
        spare: how many slots besides there are at the end.

    Attributes:
        spare: as given.
        mr: its region.
        memory, view: its bytes, and a view of them.
        receives: the receives of one transceiver, to be posted as one list; to be used under the engine's lock.
    """

    def __init__(self, pd: PD, slots: int, slot_size: int, depth: int, spare: int = 0) -> None:
        self.slot_size, self.spare = slot_size, spare
        memory = mmap.mmap(-1, (slots + spare) * slot_size)
        self.mr: MR = pd.register(memory, AccessFlags.LOCAL_WRITE)
        self.memory, self.view = memory, memoryview(memory)
        self.receives = RecvList(depth, slot_size, self.mr.lkey)

    @cached_property
    def again(self) -> RecvList:
        """The first of the receives of one transceiver, which a proof takes, to be posted once more; likewise."""
        return RecvList(PROBES, self.slot_size, self.mr.lkey)
