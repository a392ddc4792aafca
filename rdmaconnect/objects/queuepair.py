"""Queue pairs: made, moved from state to state by the table, posted to."""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, memmove, sizeof
from functools import lru_cache
from typing import Any

from .. import verbs
from ..abi import (
    QpAttrMask,
    QpState,
    QpType,
    ibv_qp_attr,
    ibv_recv_wr,
    ibv_send_wr,
)
from ..agreement import transitions
from ..agreement.endpoint import Gid
from ..errors import PostError, StateError, VerbsError
from .address import RemoteSrq, UdAddress
from .completion import CQ, apart_from, batch_locks
from .memory import PD
from .memory_window import MW
from .modify_error import modify_error
from .operations import check_fits, check_open, too_long_inline
from .owned import exclusive, holding
from .qp_attr import QpAttr, QpInitAttr
from .qp_init import init_attr, put_queues
from .queuepair_optional import OptionalVerbs, c_gid
from .srq import SRQ
from .transition import Transition, attr_struct
from .work_request import RecvList, RecvRequest, SendRequest, post, post_error

__all__ = ["QueuePair", "RecvList", "RecvRequest", "SendRequest"]

#: all bits that a device can be asked about; none gives the rate limit back
_QUERY = sum(transitions.FIELDS) & ~QpAttrMask.RATE_LIMIT
_words = lru_cache(maxsize=16)(lambda qp_type: f"{qp_type} QP")
#: type of queue pair -> what each of its sends names
_TARGETS: dict[QpType, type] = {QpType.UD: UdAddress, QpType.XRC_SEND: RemoteSrq}
#: looking up an enum's member costs as much as posting
_RESET, _RTS = QpState.RESET, QpState.RTS


class QueuePair(OptionalVerbs):
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
        qp_context: as given.
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

    max_tso_header = 0
    qp_num: int

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
        handles: deque[Any] = deque()
        made: list[QueuePair] = []
        with holding(parents):
            put_queues(init, send_cq, recv_cq, None)
            asked, size, at = bytes(init), sizeof(init), byref(init)
            try:
                for _ in range(count):
                    memmove(at, asked, size)  # the library has put there what the last one got
                    handles.append(verbs.ibv_create_qp(pd.pointer, init))
                while handles:
                    one = cls.__new__(cls)
                    QueuePair._own(one, handles.popleft, init, parents, qp_type, None)
                    made.append(one)
            except BaseException:
                for one in made:
                    one.close()
                for handle in handles:
                    verbs.ibv_destroy_qp(handle)
                raise
        return made

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
        words, self.context = _words(qp_type), parents[0].context
        self.qp_type, self.state, self.cap, self.srq = qp_type, QpState.RESET, init.cap, srq
        self.pd = parents[0] if isinstance(parents[0], PD) else None
        #: whose batches it must keep out of
        self._batched = [parent for parent in parents if isinstance(parent, CQ) and parent.has_batches]
        self.max_inline_data = 0
        self._init, self.qp_context = init, int(init.qp_context or 0)
        self._port_num = 0
        self._groups: list[tuple[Gid, int]] = []
        #: what each send must name: providers read it, and some would crash without it
        self.target: Any = _TARGETS.get(qp_type)
        self._bad_send = POINTER(ibv_send_wr)()
        self._bad_recv = POINTER(ibv_recv_wr)()
        self._at_bad_send, self._at_bad_recv = byref(self._bad_send), byref(self._bad_recv)

        def made() -> Any:
            handle = make()
            self.qp_num, self.max_inline_data = handle.contents.qp_num, int(init.cap.max_inline_data)
            self.name = f"{words} {self.qp_num:#08x} of {self.context.name}"
            self._post_send, self._post_recv = self.context.op("ibv_post_send"), self.context.op("ibv_post_recv")
            return handle

        super().__init__(made, f"{words} of {self.context.name}", parents)

    def _locks_before(self) -> list[Any]:
        return batch_locks(self._batched, f"close {self.name}") if self._batched else []

    def _locks_after(self) -> list[Any]:
        return [self.context.destroying(self)]

    def _release(self, handle: Any) -> None:
        while self._groups:
            gid, lid = self._groups[-1]
            verbs.ibv_detach_mcast(handle, c_gid(gid), lid)
            self._groups.pop()
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

    def take(self, step: Transition, path: object) -> None:
        """:meth:`move`, by a step that was made ready for many queue pairs on the same two ports.

        Args:
            step: made for queue pairs of this type, in this one's state.
            path: with this queue pair's own numbers.

        Raises:
            StateError: it is a step of another type, or from another state.
            ValueError, ModifyError: as :meth:`move`.
        """
        if step.frm != self.state or step.qp_type != self.qp_type:
            raise StateError(f"move {self.name} {step.frm}->{step.to} as {step.qp_type}: it is in {self.state}.")
        move = self._modify if step.to == _RESET else self._modify_now
        move(step.struct(path), step.attr, step.mask, step.to, path)

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
        self._modify(attr_struct(meant), meant, change.mask, change.to, None)

    def _check_pkeys(self, attr: Mapping[str, Any]) -> None:
        """Drivers take a P_Key index outside of the port's table, and no packet arrives."""
        for index, port in (("pkey_index", "port_num"), ("alt_pkey_index", "alt_port_num")):
            wanted, port_num = attr.get(index, 0), attr.get(port, self._port_num)
            if wanted and port_num:
                size = verbs.ibv_query_port(self.context.pointer, port_num).pkey_tbl_len
                if wanted >= size:
                    raise ValueError(f"{index} is {wanted}: port {port_num} of {self.context.name} has {size} P_Keys")

    def _modify(
        self, struct: ibv_qp_attr, attr: Mapping[str, object], mask: QpAttrMask, to: QpState, path: object
    ) -> None:
        if to == _RESET:  # a provider takes its completions out of the queues
            with apart_from(self._batched, f"move {self.name} to {to}"):
                self._modify_now(struct, attr, mask, to, path)
        else:
            self._modify_now(struct, attr, mask, to, path)

    def _modify_now(
        self, struct: ibv_qp_attr, attr: Mapping[str, object], mask: QpAttrMask, to: QpState, path: object
    ) -> None:
        with self._alone("move"):
            pointer = self.pointer
            if struct.pkey_index or struct.alt_pkey_index:
                self._check_pkeys(attr)
            number = verbs.ibv_modify_qp(pointer, struct, int(mask))
            if number:
                raise modify_error(self, number, mask, to, path, ah=attr.get("ah_attr"))
            self.state = to
            if "port_num" in attr:
                self._port_num = struct.port_num

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

    # ---- work

    def post_send(self, request: SendRequest, *more: SendRequest) -> None:
        """Post a send work request, or several as one list.

        Raises:
            PostError: ENOMEM when the queue is full, among others; those before the first bad one were posted.
            StateError: the queue pair cannot send in its state, or an object that a request names is closed.
            ValueError: a request does not fit this queue pair, or comes twice.

        Source: ibv_post_send(3).
        """
        with self.lock:
            pointer = self._pointer
            if pointer is None:
                self.pointer  # noqa: B018  says why
            if self.state < _RTS:
                raise StateError(f"post to {self.name}: it is in {self.state} and sends from RTS on.")
            if more or request.work is not None or self.target is not None:
                self._post_checked((request, *more))
                return
            if request.inline > self.max_inline_data:
                raise too_long_inline(request.inline, self)
            number = self._post_send(pointer, request.wr, self._at_bad_send)
            if number:
                raise post_error(number, (request,), self._bad_send, "ibv_post_send", f"to {self.name}")

    def _post_checked(self, requests: tuple[SendRequest, ...]) -> None:
        works = [request.work for request in requests]
        bound: list[tuple[int, MW, int, Any]] = []
        with holding(thing for work in works if work is not None for thing in work.holds()):
            for request, work in zip(requests, works, strict=True):
                check_fits(work, self, request.inline)
            try:
                for index, work in enumerate(works):
                    if work is not None and work.bind is not None:
                        (mw, mr), (_, rkey, info) = work.bind, work.args
                        bound.append((index, mw, rkey, mw.note_bound(mr, info, rkey)))
                post(self._post_send, self.pointer, requests, "ibv_post_send", f"to {self.name} in {self.state}")
            except BaseException as e:
                posted = (e.posted if isinstance(e, PostError) else 0) or 0
                for index, mw, _, before in reversed(bound):
                    if index >= posted:
                        mw.note_unbound(before)
                bound = [one for one in bound if one[0] < posted]
                raise
            finally:
                for _, mw, rkey, _ in bound:
                    mw.rkey = rkey

    def post_recv(self, request: RecvRequest | RecvList, *more: RecvRequest) -> None:
        """Post a receive work request, or several as one list; a :class:`RecvList` comes alone.

        Raises:
            PostError: ENOMEM when the queue is full, EINVAL for too many pieces; those before it were posted.
            StateError: the queue pair is in RESET, or receives from a shared queue; or a region is closed.
            ValueError: a request comes twice, or a region of another protection domain.

        Source: ibv_post_recv(3).
        """
        with self.lock:
            pointer = self._pointer
            if pointer is None:
                self.pointer  # noqa: B018  says why
            if self.state == _RESET or self.srq is not None:
                why = "it is in RESET" if self.srq is None else f"it receives from {self.srq.name}"
                raise StateError(f"post a receive to {self.name}: {why}.")
            if more or request.regions:
                requests: tuple[Any, ...] = (request, *more)
                for region in {region for one in requests for region in one.regions}:
                    check_open(region, self)
                post(self._post_recv, self.pointer, requests, "ibv_post_recv", f"to {self.name} in {self.state}")
                return
            number = self._post_recv(pointer, request.wr, self._at_bad_recv)
            if number:
                raise post_error(number, (request,), self._bad_recv, "ibv_post_recv", f"to {self.name}")
