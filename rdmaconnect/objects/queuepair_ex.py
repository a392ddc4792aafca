"""Extended queue pairs: every attribute of ``ibv_create_qp_ex``, and work written straight into the queue."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from ctypes import POINTER, c_uint8, cast
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .. import verbs
from ..abi import (
    QpCreateFlags,
    QpInitAttrMask,
    QpSendOpsFlags,
    QpState,
    QpType,
    RxHashFields,
    RxHashFunctionFlags,
    WrOpcode,
    ibv_qp_init_attr_ex,
    ibv_sge,
)
from ..errors import PostError, StateError, VerbsError
from .address import UdAddress
from .completion import CQ
from .fields import bits, put
from .locks import holding, this
from .memory import MR, PD
from .memory_window import MW
from .operations import Operation, Work, check_fits
from .owned import Owned
from .qp_init import put_queues
from .queuepair import QueuePair
from .srq import SRQ, XRCD
from .work_request import SendList, SendRequest, fill_sges
from .workqueue import RwqIndTable

__all__ = ["Batch", "QueuePairEx", "RxHash"]

#: opcode -> its verb, and the bit that asks for it when the queue pair is made
_OPERATIONS: dict[WrOpcode, tuple[Callable[..., None], QpSendOpsFlags]] = {
    WrOpcode.SEND: (verbs.ibv_wr_send, QpSendOpsFlags.SEND),
    WrOpcode.SEND_WITH_IMM: (verbs.ibv_wr_send_imm, QpSendOpsFlags.SEND_WITH_IMM),
    WrOpcode.SEND_WITH_INV: (verbs.ibv_wr_send_inv, QpSendOpsFlags.SEND_WITH_INV),
    WrOpcode.TSO: (verbs.ibv_wr_send_tso, QpSendOpsFlags.TSO),
    WrOpcode.RDMA_WRITE: (verbs.ibv_wr_rdma_write, QpSendOpsFlags.RDMA_WRITE),
    WrOpcode.RDMA_WRITE_WITH_IMM: (verbs.ibv_wr_rdma_write_imm, QpSendOpsFlags.RDMA_WRITE_WITH_IMM),
    WrOpcode.RDMA_READ: (verbs.ibv_wr_rdma_read, QpSendOpsFlags.RDMA_READ),
    WrOpcode.ATOMIC_CMP_AND_SWP: (verbs.ibv_wr_atomic_cmp_swp, QpSendOpsFlags.ATOMIC_CMP_AND_SWP),
    WrOpcode.ATOMIC_FETCH_AND_ADD: (verbs.ibv_wr_atomic_fetch_add, QpSendOpsFlags.ATOMIC_FETCH_AND_ADD),
    WrOpcode.ATOMIC_WRITE: (verbs.ibv_wr_atomic_write, QpSendOpsFlags.ATOMIC_WRITE),
    WrOpcode.FLUSH: (verbs.ibv_wr_flush, QpSendOpsFlags.FLUSH),
    WrOpcode.BIND_MW: (verbs.ibv_wr_bind_mw, QpSendOpsFlags.BIND_MW),
    WrOpcode.LOCAL_INV: (verbs.ibv_wr_local_inv, QpSendOpsFlags.LOCAL_INV),
}


@dataclass(frozen=True, slots=True)
class RxHash:
    """How a queue pair spreads what it receives over a table of work queues.

    Args:
        key: the hash function's key; its length is the device's, 40 bytes for TOEPLITZ.
        fields: what of a packet enters the hash.
        function: the hash function.
    """

    key: bytes
    fields: RxHashFields
    function: RxHashFunctionFlags = RxHashFunctionFlags.TOEPLITZ


class QueuePairEx(QueuePair):
    """A queue pair with extended attributes, in RESET when made.

    Args:
        pd: its protection domain; None only for XRC_RECV, which has a domain instead.
        send_cq, recv_cq, qp_type, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data,
            sq_sig_all, srq, qp_context: as :class:`QueuePair`; XRC types have no receive queue and XRC_RECV no CQ.
        send_ops_flags: the operations that :meth:`batch` shall have; none at all by default.
        create_flags: ``QpCreateFlags``.
        xrcd: for XRC_RECV, its domain.
        max_tso_header: bytes of header wanted in a TSO send.
        rwq_ind_tbl: the table of work queues that it receives to, instead of a queue of its own.
        rx_hash_conf: how it spreads what it receives.
        source_qpn: the number that its packets carry instead of its own, for UD; 24 bits.

    Raises:
        ValueError: an object of another device, or a number outside of its range.
        VerbsError: EOPNOTSUPP for a type, flag or operation that the device lacks, EINVAL above its limits.
        LibraryError: EOPNOTSUPP where library or provider have no extended queue pairs.

    Source: ibv_create_qp_ex(3), ``struct ibv_qp_init_attr_ex``.
    """

    def __init__(
        self,
        pd: PD | None,
        send_cq: CQ | None,
        recv_cq: CQ | None,
        qp_type: QpType,
        *,
        max_send_wr: int = 0,
        max_recv_wr: int = 0,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
        sq_sig_all: bool = False,
        srq: SRQ | None = None,
        send_ops_flags: QpSendOpsFlags | None = None,
        create_flags: QpCreateFlags | None = None,
        xrcd: XRCD | None = None,
        max_tso_header: int = 0,
        rwq_ind_tbl: RwqIndTable | None = None,
        rx_hash_conf: RxHash | None = None,
        source_qpn: int | None = None,
        qp_context: int = 0,
    ) -> None:
        parents = self._parents_of(pd, xrcd, send_cq, recv_cq, srq, rwq_ind_tbl)
        init = put(ibv_qp_init_attr_ex(), qp_type=int(qp_type), sq_sig_all=int(sq_sig_all))
        init.qp_context = bits("qp_context", qp_context, 64)
        sizes = {"max_send_wr": max_send_wr, "max_recv_wr": max_recv_wr, "max_inline_data": max_inline_data}
        put(init.cap, **sizes, max_send_sge=max_send_sge, max_recv_sge=max_recv_sge)
        later = {
            "pd": pd, "xrcd": xrcd, "create_flags": create_flags, "max_tso_header": max_tso_header,
            "rwq_ind_tbl": rwq_ind_tbl, "rx_hash_conf": rx_hash_conf, "source_qpn": source_qpn,
            "send_ops_flags": send_ops_flags,
        }  # fmt: skip

        def make() -> Any:
            put_queues(init, send_cq, recv_cq, srq)
            _fill_later(init, later)
            made = verbs.ibv_create_qp_ex(parents[0].context.pointer, init)
            if self.send_ops_flags:
                try:
                    self._ex = verbs.ibv_qp_to_qp_ex(made)
                except BaseException:
                    verbs.ibv_destroy_qp(made)
                    raise
            return made

        self._batch: Batch | None = None
        #: held from the start to the end of a batch: a second thread waits here, not in the provider
        self._writing = threading.Lock()
        self.send_ops_flags = send_ops_flags or QpSendOpsFlags(0)
        self.max_tso_header = max_tso_header
        self._known: set[str] = set()
        self._own(make, init, parents, qp_type, srq)

    def batch(self) -> Batch:
        """Work requests that are written straight into the send queue and posted together.

        ::

            with qp.batch() as wr:
                wr.rdma_write(1, remote, sge=mr.sge(0, 100), flags=0)
                wr.send(2, inline=b"done")

        On leaving the block all of it is posted; if the block raises, none of it.

        Raises:
            StateError: it was made without ``send_ops_flags``, or cannot send in its state.
        """
        self.pointer  # noqa: B018
        if not self.send_ops_flags:
            raise StateError(f"begin a batch on {self.name}: it was made without send_ops_flags.")
        return Batch(self)

    def _check_has(self, verb: Callable[..., None]) -> None:
        """Refuse a verb that the provider has left out; asked at its first use."""
        if verb.__name__ not in self._known:
            verbs.op(verb.__name__, self._ex)
            self._known.add(verb.__name__)

    def _no_batch(self, doing: str) -> threading.Lock:
        """To be held where the provider may take the lock that it holds within a batch."""
        if self._batch is not None and self._batch.thread is this.thread:
            raise StateError(f"{doing} {self.name}: a batch is open on it in this thread. Leave its block first.")
        return self._writing

    def post_send(self, request: SendRequest | SendList, *more: SendRequest) -> None:
        """As :meth:`QueuePair.post_send`, and not inside of a batch; waits for another thread's."""
        with self._no_batch("post to"):
            super().post_send(request, *more)

    def bind_mw(self, wr_id: int, mw: MW, mr: MR, **options: Any) -> None:
        """As :meth:`QueuePair.bind_mw`, and not inside of a batch; waits for another thread's."""
        with self._no_batch("post to"):
            super().bind_mw(wr_id, mw, mr, **options)

    def _alone(self, doing: str) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(self._no_batch(doing))
        stack.enter_context(self.lock)
        return stack

    def _release(self, handle: Any) -> None:
        batch = self._batch
        if batch is not None:
            if batch.thread is not this.thread and batch.thread is not None and batch.thread.is_alive():
                raise StateError(f"close {self.name}: another thread is within a batch. Let it leave its block first.")
            batch._drop()
        super()._release(handle)


def _fill_later(init: ibv_qp_init_attr_ex, later: Mapping[str, Any]) -> None:
    """The fields after ``comp_mask``, which is derived from those that are given."""
    mask = QpInitAttrMask(0)
    comes_with = {
        "pd": QpInitAttrMask.PD, "xrcd": QpInitAttrMask.XRCD, "create_flags": QpInitAttrMask.CREATE_FLAGS,
        "max_tso_header": QpInitAttrMask.MAX_TSO_HEADER, "rwq_ind_tbl": QpInitAttrMask.IND_TABLE,
        "rx_hash_conf": QpInitAttrMask.RX_HASH, "source_qpn": QpInitAttrMask.CREATE_FLAGS,
        "send_ops_flags": QpInitAttrMask.SEND_OPS_FLAGS,
    }  # fmt: skip
    for name, value in later.items():
        if not value and not (name == "source_qpn" and value is not None):
            continue
        mask |= comes_with[name]
        if name == "rx_hash_conf":
            key = (c_uint8 * len(value.key)).from_buffer_copy(value.key)
            conf = init.rx_hash_conf
            put(conf, rx_hash_function=int(value.function), rx_hash_key_len=len(value.key))
            put(conf, rx_hash_key=cast(key, POINTER(c_uint8)), rx_hash_fields_mask=int(value.fields))
        elif name == "source_qpn":
            if not 0 <= value <= 0xFFFFFF:
                raise ValueError(f"source_qpn is {value}: give 24 bits")
            init.source_qpn, init.create_flags = value, init.create_flags | QpCreateFlags.SOURCE_QPN
        else:
            put(init, **{name: value.pointer if isinstance(value, Owned) else value})
    init.comp_mask = int(mask)


class Batch(Work):
    """The operations of :class:`Work`, written straight into a send queue; see :meth:`QueuePairEx.batch`.

    Besides what :class:`Work` raises: ``StateError`` for an operation that was not in ``send_ops_flags``,
    ``LibraryError`` (EOPNOTSUPP) where the provider lacks it all the same.

    Attributes:
        count: operations written so far.
        thread: the thread that opened it, while it is open.
    """

    def __init__(self, qp: QueuePairEx) -> None:
        self._qp = qp
        self.count = 0
        self.thread: threading.Thread | None = None
        self._aborted = False
        self._kept: list[Any] = []
        self._bound: list[tuple[MW, Any]] = []

    def __enter__(self) -> Batch:
        qp = self._qp
        qp.pointer  # noqa: B018
        if qp.state < QpState.RTS:
            raise StateError(f"begin a batch on {qp.name}: it is in {qp.state} and sends from RTS on.")
        qp._no_batch("begin another batch on")
        if self.thread is not None or self.count:
            raise StateError(f"begin a batch on {qp.name}: this one was used. Ask for another one.")
        qp._writing.acquire()
        try:
            with qp.lock:
                qp.pointer  # noqa: B018
                verbs.ibv_wr_start(qp._ex)
                self.thread, qp._batch = this.thread, self
                self._wr = qp._ex.contents
        except BaseException:
            qp._writing.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.thread is None:
            if kind is None and not self._aborted:
                raise StateError(f"post a batch to {self._qp.name}: it was closed in the block.")
        elif kind is not None:
            self._drop()
        else:
            self._complete()

    def abort(self) -> None:
        """Drop all of it; nothing more can be written in the block."""
        self._aborted = True
        self._drop()

    def _drop(self) -> None:
        with self._qp.lock:
            if self.thread is not None:
                try:
                    verbs.ibv_wr_abort(self._qp._ex)
                finally:
                    self._end(undo=True)

    def _complete(self) -> None:
        posted = False
        try:
            with self._qp.lock:
                try:
                    verbs.ibv_wr_complete(self._qp._ex)
                    posted = True
                finally:
                    self._end(undo=not posted)
        except VerbsError as e:
            doing = f"post a batch of {self.count} work requests to {self._qp.name} in {self._qp.state}"
            raise PostError(e.verb, e.errno or 0, doing, posted=0, hint=e.hint) from None

    def _end(self, undo: bool) -> None:
        if undo:
            for mw, before in reversed(self._bound):
                mw.note_unbound(before)
        self.thread = self._qp._batch = None
        self._kept.clear()
        self._qp._writing.release()

    def _put(self, work: Operation) -> None:
        qp = self._qp
        with qp.lock, holding(work.holds()):
            if self.thread is not this.thread:
                why = "its batch is not open in this thread. Use it in its block."
                raise StateError(f"{work.opcode} on {qp.name}: {why}")
            verb, bit = _OPERATIONS[work.opcode]
            if not bit & qp.send_ops_flags:
                why = f"it was made without QpSendOpsFlags.{bit} in send_ops_flags."
                raise StateError(f"{work.opcode} on {qp.name}: {why}")
            check_fits(work, qp)
            calls = [(verb, work.args), *self._setters(work)]
            for each, _ in calls:
                qp._check_has(each)
            self._write(work, calls)

    def _write(self, work: Operation, calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        if work.bind is not None:
            mw, mr = work.bind
            self._bound.append((mw, mw.note_bound(mr, work.args[2], work.args[1])))
        self._wr.wr_id, self._wr.wr_flags = work.wr_id, work.flags
        for verb, args in calls:
            verb(self._wr, *args)
        if work.bind is not None:
            work.bind[0].rkey = work.args[1]
        self.count += 1
        self._kept.append(work)

    def _setters(self, work: Operation) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """What follows the operation: where its bytes are, and whom it is for."""
        found: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        if work.inline:
            data = ctypes.create_string_buffer(work.inline, len(work.inline))
            self._kept.append(data)
            found.append((verbs.ibv_wr_set_inline_data, (ctypes.addressof(data), len(work.inline))))
        elif len(work.pieces) == 1:
            piece = work.pieces[0]
            found.append((verbs.ibv_wr_set_sge, (piece.lkey, piece.addr, piece.length)))
        elif work.pieces:
            array = (ibv_sge * len(work.pieces))()
            fill_sges(array, work.pieces)
            found.append((verbs.ibv_wr_set_sge_list, (len(work.pieces), array)))
        if isinstance(work.to, UdAddress):
            to = work.to
            found.append((verbs.ibv_wr_set_ud_addr, (to.ah.pointer, to.remote_qpn, to.remote_qkey)))
        elif work.to is not None:
            found.append((verbs.ibv_wr_set_xrc_srqn, (work.to.srqn,)))
        return found
