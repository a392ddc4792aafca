"""Extended completion queues and queue pairs: the same objects, read as an iterator and written as a batch."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from typing import Any

from rdmaconnect.abi import (
    CqInitAttrMask,
    CqWcFlags,
    QpInitAttrMask,
    QpSendOpsFlags,
    QpType,
    ibv_cq_ex,
    ibv_data_buf,
    ibv_mw_bind_info,
    ibv_qp_ex,
    ibv_sge,
)

from .arena import Misused, Object, Refused
from .calls import operations, verb
from .completion import WC, Channel, Cq
from .device import Context
from .events import PATIENCE_S
from .memory import Mw, pointed
from .network import (
    ATOMIC_WRITE,
    BIND_MW,
    CMP_SWP,
    FETCH_ADD,
    FLUSH,
    LOCAL_INV,
    READ,
    SEND,
    SEND_IMM,
    SEND_INV,
    UD,
    WRITE,
    WRITE_IMM,
)
from .queuepair import INLINE, RTS, Ah, Qp, Send

#: what an extended completion queue can tell
_TELLS = (1 << 12) - 1 & ~int(CqWcFlags.CVLAN | CqWcFlags.FLOW_TAG | CqWcFlags.TM_INFO)
#: field of the struct -> the flag without which it is NULL
_ASKED = {
    "read_byte_len": CqWcFlags.BYTE_LEN, "read_imm_data": CqWcFlags.IMM, "read_qp_num": CqWcFlags.QP_NUM,
    "read_src_qp": CqWcFlags.SRC_QP, "read_slid": CqWcFlags.SLID, "read_sl": CqWcFlags.SL,
    "read_dlid_path_bits": CqWcFlags.DLID_PATH_BITS, "read_completion_ts": CqWcFlags.COMPLETION_TIMESTAMP,
    "read_completion_wallclock_ns": CqWcFlags.COMPLETION_TIMESTAMP_WALLCLOCK,
}  # fmt: skip


def _install(thing: Object, table: str, lacks: set[str]) -> None:
    """Put the functions into an object that has its own table."""
    for field, address in operations(table).items():
        where = thing.address + getattr(thing.struct, field).offset
        ctypes.c_void_p.from_address(where).value = None if field in lacks else address


class CqEx(Cq):
    """An extended completion queue.

    Attributes:
        at: the current completion, unpacked, and when it was made in ns; None outside of a batch.
    """

    kind, struct = "cq", ibv_cq_ex

    def __init__(self, world: Any, context: Context, attr: Any, channel: Channel | None) -> None:
        if attr.wc_flags & ~_TELLS or attr.comp_mask & ~int(CqInitAttrMask.FLAGS | CqInitAttrMask.PD):
            raise Refused(errno.EOPNOTSUPP)
        super().__init__(world, context, attr.cqe, channel, attr.comp_vector)
        if attr.comp_mask & CqInitAttrMask.PD:
            domain = pointed(attr, "parent_domain", "ibv_pd")
            domain.users += 1
            self.parents = (*self.parents, domain)
        self.at: tuple[tuple[int, ...], int] | None = None
        self.batch = threading.Lock()
        _install(self, "cq_ex", {field for field, flag in _ASKED.items() if not attr.wc_flags & flag})

    def advance(self) -> int:
        """Go on to the oldest completion: 0, or ENOENT."""
        if not self.queue:
            self.at = None
            return errno.ENOENT
        _, packed, made_ns = self.queue.popleft()
        fields = WC.unpack(packed)
        self.c.wr_id, self.c.status = fields[:2]
        self.at = fields, made_ns
        return 0


@verb
def ibv_create_cq_ex(world: Any, context: Context, attr: Any) -> CqEx:
    made = CqEx(world, context, attr, pointed(attr, "channel", "ibv_comp_channel"))
    made.c.cq_context = attr.cq_context
    return made


@verb(locked=False)
def ibv_start_poll(world: Any, cq: CqEx, attr: Any) -> int:
    if not cq.batch.acquire(timeout=PATIENCE_S):
        raise Misused(f"{cq}: a batch begins within a batch: it would wait for itself", world)
    with world.lock:
        found = cq.advance()
    if found:
        cq.batch.release()
    return found


@verb
def ibv_next_poll(world: Any, cq: CqEx) -> int:
    return cq.advance()


@verb
def ibv_end_poll(world: Any, cq: CqEx) -> None:
    if not cq.batch.locked():
        raise Misused(f"{cq}: a batch ends that did not begin", world)
    cq.at = None
    cq.batch.release()


def _field(cq: CqEx, index: int) -> int:
    if cq.at is None:
        raise Misused(f"{cq}: a completion is read outside of a batch", cq.world)
    return cq.at[0][index]


@verb
def ibv_wc_read_opcode(world: Any, cq: CqEx) -> int:
    return _field(cq, 2)


@verb
def ibv_wc_read_vendor_err(world: Any, cq: CqEx) -> int:
    return _field(cq, 3)


@verb
def ibv_wc_read_byte_len(world: Any, cq: CqEx) -> int:
    return _field(cq, 4)


@verb
def ibv_wc_read_imm_data(world: Any, cq: CqEx) -> int:
    return _field(cq, 5)


@verb
def ibv_wc_read_qp_num(world: Any, cq: CqEx) -> int:
    return _field(cq, 6)


@verb
def ibv_wc_read_src_qp(world: Any, cq: CqEx) -> int:
    return _field(cq, 7)


@verb
def ibv_wc_read_wc_flags(world: Any, cq: CqEx) -> int:
    return _field(cq, 8)


@verb
def ibv_wc_read_slid(world: Any, cq: CqEx) -> int:
    return _field(cq, 10)


@verb
def ibv_wc_read_sl(world: Any, cq: CqEx) -> int:
    return _field(cq, 11)


@verb
def ibv_wc_read_dlid_path_bits(world: Any, cq: CqEx) -> int:
    return _field(cq, 12)


@verb
def ibv_wc_read_completion_ts(world: Any, cq: CqEx) -> int:
    _field(cq, 0)
    return cq.at[1] if cq.at else 0


@verb
def ibv_wc_read_completion_wallclock_ns(world: Any, cq: CqEx) -> int:
    return time.time_ns() - (time.monotonic_ns() - ibv_wc_read_completion_ts(world, cq))


@verb
def ibv_query_rt_values_ex(world: Any, context: Context, values: Any) -> None:
    values.comp_mask &= 1
    values.raw_clock.tv_sec, values.raw_clock.tv_nsec = 0, time.monotonic_ns()


# ---- queue pairs

#: operation -> what it is called in the struct
_OPERATIONS = {
    QpSendOpsFlags.RDMA_WRITE: "wr_rdma_write", QpSendOpsFlags.RDMA_WRITE_WITH_IMM: "wr_rdma_write_imm",
    QpSendOpsFlags.SEND: "wr_send", QpSendOpsFlags.SEND_WITH_IMM: "wr_send_imm",
    QpSendOpsFlags.RDMA_READ: "wr_rdma_read", QpSendOpsFlags.ATOMIC_CMP_AND_SWP: "wr_atomic_cmp_swp",
    QpSendOpsFlags.ATOMIC_FETCH_AND_ADD: "wr_atomic_fetch_add", QpSendOpsFlags.LOCAL_INV: "wr_local_inv",
    QpSendOpsFlags.BIND_MW: "wr_bind_mw", QpSendOpsFlags.SEND_WITH_INV: "wr_send_inv",
    QpSendOpsFlags.FLUSH: "wr_flush", QpSendOpsFlags.ATOMIC_WRITE: "wr_atomic_write",
}  # fmt: skip


def _known(*names: str) -> int:
    return sum(int(QpSendOpsFlags[name]) for name in names)


_RC_ONLY = ("RDMA_READ", "ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD", "FLUSH", "ATOMIC_WRITE")
_CONNECTED = ("RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "LOCAL_INV", "BIND_MW", "SEND_WITH_INV")
_BOTH = ("SEND", "SEND_WITH_IMM")
#: what each type can be asked for
_CAN = {
    QpType.RC: _known(*_BOTH, *_CONNECTED, *_RC_ONLY), QpType.UC: _known(*_BOTH, *_CONNECTED), QpType.UD: _known(*_BOTH)
}  # fmt: skip


class QpEx(Qp):
    """An extended queue pair.

    Attributes:
        batch: what was written since ``ibv_wr_start``; None outside of a batch.
        wrong: the first errno of the batch.
    """

    kind, struct = "qp", ibv_qp_ex

    def __init__(self, world: Any, init: Any) -> None:
        known = QpInitAttrMask.PD | QpInitAttrMask.SEND_OPS_FLAGS
        if init.comp_mask & ~int(known) or init.send_ops_flags & ~_CAN.get(init.qp_type, 0):
            raise Refused(errno.EOPNOTSUPP)
        super().__init__(world, pointed(init, "pd", "ibv_pd"), init)
        self.batch: list[Send] | None = None
        self.wrong = 0
        _install(self, "qp_ex", {field for flag, field in _OPERATIONS.items() if not init.send_ops_flags & flag})

    @property
    def head(self) -> Any:
        return self.c.qp_base

    def write(self, opcode: int, **fields: Any) -> None:
        """One operation more."""
        if self.batch is None:
            raise Misused(f"{self}: an operation outside of a batch", self.world)
        send = Send(self.c.wr_id, opcode, self.c.wr_flags, [], None)
        send.fields.update(fields)
        self.batch.append(send)

    def last(self) -> Send:
        """What a setter is for."""
        if not self.batch:
            raise Misused(f"{self}: a setter without an operation", self.world)
        return self.batch[-1]


@verb
def ibv_create_qp_ex(world: Any, context: Context, qp_init_attr_ex: Any) -> Qp:
    return QpEx(world, qp_init_attr_ex)


@verb
def ibv_qp_to_qp_ex(world: Any, qp: Qp) -> int:
    return qp.address if isinstance(qp, QpEx) else 0


@verb
def ibv_wr_start(world: Any, qp: QpEx) -> None:
    if qp.batch is not None:
        raise Misused(f"{qp}: a batch begins within a batch: it would wait for itself", world)
    qp.batch, qp.wrong = [], 0


@verb
def ibv_wr_abort(world: Any, qp: QpEx) -> None:
    qp.batch = None


@verb
def ibv_wr_complete(world: Any, qp: QpEx) -> None:
    batch, qp.batch = qp.batch, None
    if batch is None:
        raise Misused(f"{qp}: a batch ends that did not begin", world)
    if qp.state < RTS or qp.wrong:
        raise Refused(qp.wrong or errno.EINVAL)
    if len(qp.sends) + len(batch) > qp.cap.max_send_wr:
        raise Refused(errno.ENOMEM)
    for send in batch:
        if qp.qp_type == UD and "ah" not in send.fields:
            raise Misused(f"{qp}: a send without an address handle", world)
        qp.post(send)
    qp.pump()


@verb
def ibv_wr_send(world: Any, qp: QpEx) -> None:
    qp.write(SEND)


@verb
def ibv_wr_send_imm(world: Any, qp: QpEx, imm_data: int) -> None:
    qp.write(SEND_IMM, imm=imm_data)


@verb
def ibv_wr_send_inv(world: Any, qp: QpEx, invalidate_rkey: int) -> None:
    qp.write(SEND_INV, imm=invalidate_rkey)


@verb
def ibv_wr_rdma_write(world: Any, qp: QpEx, rkey: int, remote_addr: int) -> None:
    qp.write(WRITE, rkey=rkey, remote_addr=remote_addr)


@verb
def ibv_wr_rdma_write_imm(world: Any, qp: QpEx, rkey: int, remote_addr: int, imm_data: int) -> None:
    qp.write(WRITE_IMM, rkey=rkey, remote_addr=remote_addr, imm=imm_data)


@verb
def ibv_wr_rdma_read(world: Any, qp: QpEx, rkey: int, remote_addr: int) -> None:
    qp.write(READ, rkey=rkey, remote_addr=remote_addr)


@verb
def ibv_wr_atomic_cmp_swp(world: Any, qp: QpEx, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
    qp.write(CMP_SWP, rkey=rkey, remote_addr=remote_addr, compare_add=compare, swap=swap)


@verb
def ibv_wr_atomic_fetch_add(world: Any, qp: QpEx, rkey: int, remote_addr: int, add: int) -> None:
    qp.write(FETCH_ADD, rkey=rkey, remote_addr=remote_addr, compare_add=add)


@verb
def ibv_wr_atomic_write(world: Any, qp: QpEx, rkey: int, remote_addr: int, atomic_wr: int) -> None:
    qp.write(ATOMIC_WRITE, rkey=rkey, remote_addr=remote_addr)
    qp.last().data = ctypes.string_at(atomic_wr, 8)


@verb
def ibv_wr_flush(world: Any, qp: QpEx, rkey: int, remote_addr: int, len: int, type: int, level: int) -> None:
    qp.write(FLUSH, rkey=rkey, remote_addr=remote_addr, length=len)


@verb
def ibv_wr_bind_mw(world: Any, qp: QpEx, mw: Mw, rkey: int, bind_info: Any) -> None:
    info = ibv_mw_bind_info.from_buffer_copy(bind_info)
    qp.write(BIND_MW, bind=(mw, pointed(bind_info, "mr", "ibv_mr"), info, rkey))


@verb
def ibv_wr_local_inv(world: Any, qp: QpEx, invalidate_rkey: int) -> None:
    qp.write(LOCAL_INV, imm=invalidate_rkey)


@verb
def ibv_wr_set_sge(world: Any, qp: QpEx, lkey: int, addr: int, length: int) -> None:
    qp.last().pieces = [(addr, length, lkey)] if length else []


@verb
def ibv_wr_set_sge_list(world: Any, qp: QpEx, num_sge: int, sg_list: Any) -> None:
    if num_sge > qp.cap.max_send_sge:
        qp.wrong = qp.wrong or errno.EINVAL
        return
    sges = (ibv_sge * num_sge).from_address(ctypes.addressof(sg_list))
    qp.last().pieces = [(sge.addr, sge.length, sge.lkey) for sge in sges]


def _inline(qp: QpEx, data: bytes) -> None:
    if len(data) > qp.cap.max_inline_data:
        qp.wrong = qp.wrong or errno.EINVAL
    send = qp.last()
    send.data, send.flags = data, send.flags | INLINE


@verb
def ibv_wr_set_inline_data(world: Any, qp: QpEx, addr: int, length: int) -> None:
    _inline(qp, ctypes.string_at(addr, length))


@verb
def ibv_wr_set_inline_data_list(world: Any, qp: QpEx, num_buf: int, buf_list: Any) -> None:
    parts = (ibv_data_buf * num_buf).from_address(ctypes.addressof(buf_list))
    _inline(qp, b"".join(ctypes.string_at(part.addr, part.length) for part in parts))


@verb
def ibv_wr_set_ud_addr(world: Any, qp: QpEx, ah: Ah, remote_qpn: int, remote_qkey: int) -> None:
    qkey = qp.attr.qkey if remote_qkey >> 31 else remote_qkey
    qp.last().fields.update(ah=ah.attr, remote_qpn=remote_qpn, remote_qkey=qkey)
