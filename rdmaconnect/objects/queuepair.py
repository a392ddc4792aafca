"""Queue pairs: made, moved from state to state by the table, posted to."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from ctypes import byref, memmove, sizeof
from typing import Any, NamedTuple

from .. import verbs
from ..abi import QpAttrMask, QpState, QpType, ibv_qp_attr
from ..agreement import transitions
from ..errors import StateError, VerbsError
from .address import RemoteSrq, UdAddress
from .completion import CQ
from .context import Context
from .locks import apart_from, batch_locks, exclusive, holding
from .memory import PD
from .modify_error import modify_error
from .owned import make_together
from .posting import Posting
from .qp_attr import QpAttr, QpInitAttr
from .qp_init import init_attr, put_queues
from .queuepair_optional import OptionalVerbs, c_gid
from .srq import SRQ
from .transition import Change, Transition, attr_struct
from .work_request import RecvList, RecvRequest, SendRequest

__all__ = ["QueuePair", "RecvList", "RecvRequest", "SendRequest"]

#: all bits that a device can be asked about; none gives the rate limit back
_QUERY = sum(transitions.FIELDS) & ~QpAttrMask.RATE_LIMIT
#: type of queue pair -> what each of its sends names
_TARGETS: dict[QpType, type] = {QpType.UD: UdAddress, QpType.XRC_SEND: RemoteSrq}
#: looking up an enum's member costs as much as posting
_RESET = QpState.RESET


class _Shared(NamedTuple):
    """What is alike in queue pairs that are made together, in the order of :meth:`QueuePair._share`.

    Attributes:
        name: what they are called until they have a number; ``words`` has a place for it.
        batched: the completion queues whose batches they must keep out of.
        target: what each send must name: providers read it, and some would crash without it.
    """

    name: str
    words: str
    context: Context
    qp_type: QpType
    init: Any
    pd: PD | None
    srq: SRQ | None
    batched: tuple[CQ, ...]
    target: Any


def _shared(init: Any, parents: tuple[Any, ...], qp_type: QpType, srq: SRQ | None) -> _Shared:
    first, queues = parents[0], [parent for parent in parents if isinstance(parent, CQ)]
    device = first.context.name.replace("%", "%%")
    return _Shared(
        f"{qp_type} QP of {first.context.name}", f"{qp_type} QP %#08x of {device}", first.context, qp_type, init,
        first if isinstance(first, PD) else None, srq, tuple(cq for cq in queues if cq.has_batches),
        _TARGETS.get(qp_type),
    )  # fmt: skip


class QueuePair(Posting, OptionalVerbs):
    """A queue pair, in RESET when made.

    Any thread may use it, one at a time: who posts, asks or closes waits for who moves it, which takes seconds at
    most (INIT to RTR on RoCE).

    Args:
        pd: its protection domain.
        send_cq, recv_cq: where its completions go; may be the same.
        qp_type: RC, UC, UD, ...
        max_send_wr, max_recv_wr: outstanding work requests wanted on each side.
        max_send_sge, max_recv_sge: scatter/gather entries wanted in each.
        max_inline_data: bytes wanted to be sendable inline.
        sq_sig_all: whether every send gives a completion.
        srq: where it receives from, instead of a queue of its own; then ``max_recv_*`` do not count.
        qp_context: a number of the caller's, 64 bits, which stays in ``struct ibv_qp``.

    Attributes:
        qp_num: its number, 24 bits.
        qp_type, pd, srq: as given.
        state: the state that it was last moved to or found in here; the device may have moved it to ERR since.
        cap: what the device gave, at least what was asked for (``struct ibv_qp_cap``).
        max_inline_data: the bytes of it that a work request can carry itself.
        max_tso_header: bytes of header that a TSO send may have.

    Raises:
        ValueError: an object of another device.
        VerbsError: EINVAL above the device's limits, EOPNOTSUPP for a type it lacks, among others.

    Source: ibv_create_qp(3).
    """

    max_inline_data = max_tso_header = 0
    qp_num: int
    state = _RESET
    _port_num = 0

    def __init__(
        self,
        pd: PD,
        send_cq: CQ,
        recv_cq: CQ,
        qp_type: QpType,
        *,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
        sq_sig_all: bool = False,
        srq: SRQ | None = None,
        qp_context: int = 0,
    ) -> None:
        parents = self._parents_of(pd, send_cq, recv_cq, srq)
        sizes = (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data)
        init = init_attr(qp_type, *sizes, sq_sig_all=sq_sig_all, qp_context=qp_context)

        def make() -> Any:
            put_queues(init, send_cq, recv_cq, srq)
            return verbs.ibv_create_qp(pd.pointer, init)

        self._own(make, init, parents, qp_type, srq)

    @classmethod
    def several(cls, count: int, pd: PD, send_cq: CQ, recv_cq: CQ, qp_type: QpType, **sizes: int) -> list[QueuePair]:
        """So many, made alike: all of them or none. Each costs less than one that is made alone.

        Args:
            count: how many.
            pd, send_cq, recv_cq, qp_type: as of the constructor.
            sizes: ``max_send_wr``, ``max_recv_wr``, ``max_send_sge``, ``max_recv_sge`` and ``max_inline_data``
                of each, as of the constructor.

        Raises:
            ValueError, VerbsError: as the constructor.

        Source: ibv_create_qp(3).
        """
        parents = cls._parents_of(pd, send_cq, recv_cq)
        init = init_attr(qp_type, **sizes)
        shared = _shared(init, parents, qp_type, None)
        with holding(parents):
            put_queues(init, send_cq, recv_cq, None)
            asked, size, at, on = bytes(init), sizeof(init), byref(init), pd.pointer

            def make(one: QueuePair) -> Any:
                one._share(shared)
                memmove(at, asked, size)  # the library has put there what the last one got
                return one._know(verbs.ibv_create_qp(on, init))

            made = [cls.__new__(cls) for _ in range(count)]
            make_together(made, make, shared.name, parents)
        return made

    @property
    def device(self) -> str:
        """The name of the device that it is on."""
        return self.context.name

    @staticmethod
    def _parents_of(*things: Any) -> tuple[Any, ...]:
        """What a queue pair stands on, all of one device."""
        parents = tuple(dict.fromkeys(filter(None, things)))
        first = parents[0]
        for thing in parents[1:]:
            if not thing.context.is_same(first.context):
                raise ValueError(f"make a queue pair in {first.name}: {thing.name} is of another device")
            if isinstance(thing, SRQ) and isinstance(first, PD) and thing.pd.base is not first.base:
                raise ValueError(f"make a queue pair in {first.name}: {thing.name} is of another protection domain")
        return parents

    def _own(
        self, make: Callable[[], Any], init: Any, parents: tuple[Any, ...], qp_type: QpType, srq: SRQ | None
    ) -> None:
        shared = _shared(init, parents, qp_type, srq)
        self._share(shared)
        super().__init__(lambda: self._know(make()), shared.name, parents)

    def _share(self, shared: _Shared) -> None:
        """Take what is alike in all that are made together."""
        _, self._words, self.context, self.qp_type, self._init, self.pd, self.srq, self._batched, self.target = shared
        self._mark = object()

    def _know(self, handle: Any) -> Any:
        """Note what the device gave, when it was just made."""
        self.qp_num = number = handle.contents.qp_num
        self.cap = cap = self._init.cap
        self.max_inline_data = cap.max_inline_data
        self.name = self._words % number
        return handle

    @property
    def qp_context(self) -> int:
        """As given."""
        return int(self._init.qp_context or 0)

    def _locks_before(self) -> list[Any]:
        return batch_locks(self._batched, f"close {self.name}") if self._batched else []

    def _locks_after(self) -> list[Any]:
        return [self.context.destroying(self)]

    def _release(self, handle: Any) -> None:
        while self._groups:
            gid, lid = self._groups[-1]
            verbs.ibv_detach_mcast(handle, c_gid(gid), lid)
            self._groups = self._groups[:-1]
        verbs.ibv_destroy_qp(handle)

    # ---- states and attributes

    def move(self, to: QpState, path: object = None, optional: QpAttrMask = transitions.NONE) -> None:
        """Take the next step of the state machine.

        The table says which attributes the step needs; they are read from ``path`` by their C names.
        INIT to RTR on RoCE resolves the peer's address and can block for seconds.

        Args:
            to: the state to enter.
            path: an object with the attributes that the step needs, a ``Path`` for example.
            optional: bits of the table's optional column to give as well.

        Raises:
            StateError: no such step.
            ValueError: a value outside of its range.
            ModifyError: the device refused; with all that is known.

        Source: ibv_modify_qp(3).
        """
        self.pointer  # noqa: B018
        self.take(Transition(self.qp_type, self.state, to, path, optional), path)

    def take(self, step: Transition, path: object, struct: ibv_qp_attr | None = None) -> None:
        """:meth:`move`, by a step that was made ready for many queue pairs on the same two ports.

        Args:
            step: made for queue pairs of this type, in this one's state.
            path: with this queue pair's own numbers.
            struct: the step's for that path, if there is one: see :meth:`Transition.structs`.

        Raises:
            StateError: it is a step of another type, or from another state.
            ValueError, ModifyError: as :meth:`move`.
        """
        if step.frm != self.state or step.qp_type != self.qp_type:
            raise StateError(f"move {self.name} {step.frm}->{step.to} as {step.qp_type}: it is in {self.state}.")
        self._modify(step, step.struct(path) if struct is None else struct, path)

    def modify(self, attr: Mapping[str, Any], mask: QpAttrMask | None = None) -> None:
        """Change attributes given one by one, with or without a change of state.

        Everything that the table or a value's range forbids is refused here, before the device is asked.

        Args:
            attr: field of ``ibv_qp_attr`` -> value; ``ah_attr`` and ``alt_ah_attr`` are ``AhAttr``. With
                ``cur_qp_state`` the table is asked about that state: the device may have moved it.
            mask: the bits that are meant, by default those of the fields that are given.

        Raises:
            ModifyError: EINVAL with ``missing`` and ``not_allowed`` bits, or the device refused.
            StateError: no such transition.
            ValueError: a name that is no attribute, a bit without its field, a value outside of its range.

        Source: ibv_modify_qp(3).
        """
        self.pointer  # noqa: B018
        change = transitions.change(self.qp_type, self.state, attr, mask)
        if change.wrong:
            raise modify_error(self, errno.EINVAL, change.mask, change.to, None, change)
        given = transitions.FIELDS.items()
        meant = {name: attr[name] for bit, names in given if bit & change.mask for name in names}
        self._modify(Change(change.to, change.mask, meant), attr_struct(meant), None)

    def _check_pkeys(self, attr: Mapping[str, Any]) -> None:
        """Drivers take a P_Key index outside of the port's table, and no packet arrives."""
        for index, port in (("pkey_index", "port_num"), ("alt_pkey_index", "alt_port_num")):
            wanted, port_num = attr.get(index, 0), attr.get(port, self._port_num)
            if wanted and port_num:
                size = verbs.ibv_query_port(self.context.pointer, port_num).pkey_tbl_len
                if wanted >= size:
                    raise ValueError(f"{index} is {wanted}: port {port_num} of {self.context.name} has {size} P_Keys")

    def _modify(self, change: Change, struct: ibv_qp_attr, path: object, apart: bool = False) -> None:
        to = change.to
        if self._batched and to == _RESET and not apart:  # a provider takes its completions out of the queues
            with apart_from(self._batched, f"move {self.name} to {to}"):
                self._modify(change, struct, path, apart=True)
            return
        with self._alone("move"):
            pointer = self._pointer
            if pointer is None:
                self.pointer  # noqa: B018  says why
            if change.names_pkey:
                self._check_pkeys(change.attr)
            if self._shuttable:
                self._shut()
            try:
                if number := verbs.ibv_modify_qp(pointer, struct, change.mask):
                    raise modify_error(self, number, change.mask, to, path, ah=change.attr.get("ah_attr"))
                self.state = to
            finally:
                if self._shuttable:
                    self._reopen()
            if change.port_num:
                self._port_num = change.port_num

    def _alone(self, doing: str) -> AbstractContextManager[object]:
        """To be held where no other thread may be amid something."""
        return self.lock

    def found_in(self) -> QpState:
        """Ask the device for the state, which it may have changed by itself, and note it in :attr:`state`."""
        with contextlib.suppress(VerbsError), self.lock:
            self.state = QpState(verbs.ibv_query_qp(self.pointer, int(QpAttrMask.STATE))[0].qp_state)
        return self.state

    @exclusive
    def query(self, attr_mask: QpAttrMask | None = None) -> QpAttr:
        """The attributes as the device has them now.

        Args:
            attr_mask: which are wanted, all by default; more may be filled in.

        Source: ibv_query_qp(3).
        """
        return QpAttr.of(verbs.ibv_query_qp(self.pointer, int(_QUERY if attr_mask is None else attr_mask))[0])

    @exclusive
    def query_init(self) -> QpInitAttr:
        """What it was made with, as the device has it. Source: ibv_query_qp(3)."""
        return QpInitAttr.of(verbs.ibv_query_qp(self.pointer, int(QpAttrMask.CAP))[1])
