"""The verbs of queue pairs, address handles and shared receive queues."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from rdmaconnect.abi import (
    LinkLayer,
    QpAttrMask,
    SrqAttrMask,
    WcStatus,
    ibv_ah_attr,
    ibv_mw_bind_info,
    ibv_qp_attr,
    ibv_recv_wr,
    ibv_send_wr,
    ibv_sge,
)

from .arena import Misused, Refused
from .calls import verb
from .device import Context, mtu_code
from .events import wait_for_acks
from .gid import is_multicast
from .grh import source_and_target
from .memory import Mw, Pd, pointed
from .network import ATOMIC_WRITE, ATOMICS, BIND_MW, FLUSH, LOCAL_INV, READ, SEND_IMM, SEND_INV, UD, WRITE, WRITE_IMM
from .queuepair import AV, CAN, CUR, ERR, INLINE, PORT, RESET, RTS, RULES, STATE, Ah, Pieces, Qp, Send, Srq

M = QpAttrMask
_SGE = ctypes.sizeof(ibv_sge)


# ---- queue pairs


@verb
def ibv_create_qp(world: Any, pd: Pd, attr: Any) -> Qp:
    return Qp(world, pd, attr)


@verb
def ibv_destroy_qp(world: Any, qp: Qp) -> None:
    wait_for_acks(world, qp)
    qp.free("ibv_destroy_qp")


@verb(locked=False)
def ibv_modify_qp(world: Any, qp: Qp, attr: ibv_qp_attr, attr_mask: int) -> None:
    with world.lock:
        _check(qp, attr, attr_mask)
        port_num = attr.port_num if attr_mask & PORT else qp.attr.port_num
    if attr_mask & AV:  # this may take a while
        world.network.resolve(qp.context, attr.ah_attr.port_num or port_num, attr.ah_attr)
    with world.lock:
        if qp.freed:
            raise Misused(f"use after free: {qp} was destroyed while it was moved", world)
        _check(qp, attr, attr_mask)
        qp.modify(attr, attr_mask)


def _check(qp: Qp, attr: ibv_qp_attr, mask: int) -> None:
    """Refuse what the kernel and the drivers refuse, with EINVAL."""
    frm = attr.cur_qp_state if mask & CUR else qp.state
    to = attr.qp_state if mask & STATE else frm
    rule = RULES.get((qp.qp_type, frm, to))
    limit, device = qp.context.device.limit, qp.context.device
    wrong = (
        rule is None
        or frm != qp.state
        or bool(rule[0] & ~mask)
        or bool(mask & ~rule[1])
        or (mask & PORT and not 1 <= attr.port_num <= len(device.ports))
        or (mask & M.MAX_QP_RD_ATOMIC and attr.max_rd_atomic > limit("max_qp_init_rd_atom"))
        or (mask & M.MAX_DEST_RD_ATOMIC and attr.max_dest_rd_atomic > limit("max_qp_rd_atom"))
    )
    if wrong:
        raise Refused(errno.EINVAL)
    port = device.ports[(attr.port_num if mask & PORT else qp.attr.port_num or 1) - 1]
    if (
        (mask & M.PKEY_INDEX and attr.pkey_index >= len(port.pkeys))
        or (mask & M.PATH_MTU and not 1 <= attr.path_mtu <= mtu_code(port.active_mtu))
        or (mask & M.TIMEOUT and attr.timeout > 31)
        or (mask & M.ALT_PATH and port.link_layer == LinkLayer.ETHERNET)
    ):
        raise Refused(errno.EINVAL)


@verb
def ibv_query_qp(world: Any, qp: Qp, attr: ibv_qp_attr, attr_mask: int, init_attr: Any) -> None:
    ctypes.memmove(ctypes.addressof(attr), ctypes.addressof(qp.attr), ctypes.sizeof(attr))
    attr.qp_state = attr.cur_qp_state = qp.head.state = qp.state
    attr.cap = init_attr.cap = qp.cap
    attr.sq_draining = int(qp.draining)
    init_attr.qp_type, init_attr.sq_sig_all = qp.qp_type, int(qp.sig_all)
    for name in ("send_cq", "recv_cq", "srq"):
        setattr(init_attr, name, getattr(qp.head, name))


@verb
def ibv_attach_mcast(world: Any, qp: Qp, gid: Any, lid: int) -> None:
    raw = bytes(gid.raw)
    if qp.qp_type != UD or not is_multicast(raw):
        raise Refused(errno.EINVAL)
    qp.groups.add(raw)


@verb
def ibv_detach_mcast(world: Any, qp: Qp, gid: Any, lid: int) -> None:
    raw = bytes(gid.raw)
    if raw not in qp.groups:
        raise Refused(errno.EINVAL)
    qp.groups.remove(raw)


# ---- posting


def _pieces(wr: Any) -> Pieces:
    start = ctypes.c_void_p.from_address(ctypes.addressof(wr) + type(wr).sg_list.offset).value or 0
    found = []
    for index in range(wr.num_sge):
        sge = ibv_sge.from_address(start + index * _SGE)
        found.append((sge.addr, sge.length, sge.lkey))
    return found


def _next(wr: Any) -> int | None:
    address: int | None = ctypes.c_void_p.from_address(ctypes.addressof(wr) + type(wr).next.offset).value
    return address


def _post(wr: Any, bad: int, post: Any) -> None:
    """Post each of a list; the first bad one is told."""
    at: int | None = ctypes.addressof(wr)
    while at:
        one = type(wr).from_address(at)
        try:
            post(one)
        except Refused:
            ctypes.c_void_p.from_address(bad).value = at
            raise
        at = _next(one)


@verb
def ibv_post_send(world: Any, qp: Qp, wr: ibv_send_wr, bad_wr: int) -> None:
    try:
        _post(wr, bad_wr, lambda one: _post_send(qp, one))
    finally:
        qp.pump()


def _post_send(qp: Qp, wr: ibv_send_wr) -> None:
    opcode, flags, cap = wr.opcode, wr.send_flags, qp.cap
    if qp.state < RTS or opcode not in CAN[qp.qp_type] or wr.num_sge > cap.max_send_sge:
        raise Refused(errno.EINVAL)
    if len(qp.sends) >= cap.max_send_wr:
        raise Refused(errno.ENOMEM)
    pieces, data = _pieces(wr), None
    if flags & INLINE:
        data = b"".join(ctypes.string_at(addr, length) for addr, length, _ in pieces)
        if len(data) > cap.max_inline_data:
            raise Refused(errno.EINVAL)
    send = Send(wr.wr_id, opcode, flags, pieces, data)
    fields = send.fields
    if qp.qp_type == UD:
        ud = wr.wr.ud
        ah = pointed(ud, "ah", "ibv_ah")
        if ah is None:
            raise Misused(f"{qp}: a send without an address handle", qp.world)
        fields["ah"], fields["remote_qpn"] = ah.attr, ud.remote_qpn
        fields["remote_qkey"] = qp.attr.qkey if ud.remote_qkey >> 31 else ud.remote_qkey
    elif opcode in (WRITE, WRITE_IMM, READ):
        fields["remote_addr"], fields["rkey"] = wr.wr.rdma.remote_addr, wr.wr.rdma.rkey
    elif opcode in ATOMICS:
        atomic = wr.wr.atomic
        fields["remote_addr"], fields["rkey"] = atomic.remote_addr, atomic.rkey
        fields["compare_add"], fields["swap"] = atomic.compare_add, atomic.swap
    elif opcode == BIND_MW:
        fields["bind"] = _binding(wr.bind_mw)
    elif opcode in (FLUSH, ATOMIC_WRITE):
        raise Refused(errno.EINVAL)
    if opcode in (SEND_IMM, WRITE_IMM, SEND_INV, LOCAL_INV):
        fields["imm"] = wr.imm_data
    qp.post(send)


def _binding(bind: Any) -> tuple[Mw, Any, ibv_mw_bind_info, int]:
    mw: Mw | None = pointed(bind, "mw", "ibv_mw")
    if mw is None or mw.c.type != 2:
        raise Refused(errno.EINVAL)
    info = ibv_mw_bind_info.from_buffer_copy(bind.bind_info)
    return mw, pointed(bind.bind_info, "mr", "ibv_mr"), info, bind.rkey


@verb
def ibv_bind_mw(world: Any, qp: Qp, mw: Mw, mw_bind: Any) -> None:
    if qp.state < RTS or mw.c.type != 1:
        raise Refused(errno.EINVAL)
    if len(qp.sends) >= qp.cap.max_send_wr:
        raise Refused(errno.ENOMEM)
    send = Send(mw_bind.wr_id, BIND_MW, mw_bind.send_flags, [], None)
    info = ibv_mw_bind_info.from_buffer_copy(mw_bind.bind_info)
    key = mw.c.rkey & ~0xFF | (mw.c.rkey + 1) & 0xFF
    send.fields["bind"] = mw, pointed(mw_bind.bind_info, "mr", "ibv_mr"), info, key
    mw.c.rkey = key
    qp.post(send)
    qp.pump()


@verb
def ibv_post_recv(world: Any, qp: Qp, wr: ibv_recv_wr, bad_wr: int) -> None:
    try:
        _post(wr, bad_wr, lambda one: _post_recv(qp, one))
    finally:
        _wake(world, qp)


def _post_recv(qp: Qp, wr: ibv_recv_wr) -> None:
    if qp.state == RESET or qp.srq is not None or wr.num_sge > qp.cap.max_recv_sge:
        raise Refused(errno.EINVAL)
    if len(qp.recvs) >= qp.cap.max_recv_wr:
        raise Refused(errno.ENOMEM)
    if qp.state == ERR:
        qp.received(wr.wr_id, WcStatus.WR_FLUSH_ERR)
    else:
        qp.recvs.append((wr.wr_id, _pieces(wr)))


def _wake(world: Any, qp: Qp) -> None:
    waiting = list(qp.waiters)
    qp.waiters.clear()  # who finds no receive for the next of its messages waits anew
    for qp_num in waiting:
        world.network.kick(qp_num)


# ---- shared receive queues


@verb
def ibv_create_srq(world: Any, pd: Pd, srq_init_attr: Any) -> Srq:
    attr = srq_init_attr.attr
    return Srq(world, pd, attr.max_wr, attr.max_sge, attr.srq_limit)


@verb
def ibv_modify_srq(world: Any, srq: Srq, srq_attr: Any, srq_attr_mask: int) -> None:
    if srq_attr_mask & SrqAttrMask.MAX_WR:
        if not len(srq.recvs) <= srq_attr.max_wr <= srq.context.device.limit("max_srq_wr"):
            raise Refused(errno.EINVAL)
        srq.max_wr = srq_attr.max_wr
    if srq_attr_mask & SrqAttrMask.LIMIT:
        if srq_attr.srq_limit > srq.max_wr:
            raise Refused(errno.EINVAL)
        srq.limit = srq_attr.srq_limit


@verb
def ibv_query_srq(world: Any, srq: Srq, srq_attr: Any) -> None:
    srq_attr.max_wr, srq_attr.max_sge, srq_attr.srq_limit = srq.max_wr, srq.max_sge, srq.limit


@verb
def ibv_destroy_srq(world: Any, srq: Srq) -> None:
    wait_for_acks(world, srq)
    srq.free("ibv_destroy_srq")


@verb
def ibv_post_srq_recv(world: Any, srq: Srq, recv_wr: ibv_recv_wr, bad_recv_wr: int) -> None:
    def post(wr: ibv_recv_wr) -> None:
        if wr.num_sge > srq.max_sge:
            raise Refused(errno.EINVAL)
        if len(srq.recvs) >= srq.max_wr:
            raise Refused(errno.ENOMEM)
        srq.recvs.append((wr.wr_id, _pieces(wr)))

    try:
        _post(recv_wr, bad_recv_wr, post)
    finally:
        for qp in list(srq.qps):
            _wake(world, qp)


# ---- address handles


@verb(locked=False)
def ibv_create_ah(world: Any, pd: Pd, attr: ibv_ah_attr) -> Ah:
    world.network.resolve(pd.context, attr.port_num, attr)
    with world.lock:
        return Ah(world, pd, attr)


@verb
def ibv_destroy_ah(world: Any, ah: Ah) -> None:
    ah.free("ibv_destroy_ah")


@verb
def ibv_init_ah_from_wc(world: Any, context: Context, port_num: int, wc: Any, grh: Any, ah_attr: ibv_ah_attr) -> None:
    _path_back(context, port_num, wc, grh, ah_attr)


def _path_back(context: Context, port_num: int, wc: Any, grh: Any, attr: ibv_ah_attr) -> None:
    ctypes.memset(ctypes.addressof(attr), 0, ctypes.sizeof(attr))
    attr.dlid, attr.sl, attr.src_path_bits, attr.port_num = wc.slid, wc.sl, wc.dlid_path_bits, port_num
    if not wc.wc_flags & 1:
        return
    raw = ctypes.string_at(ctypes.addressof(grh), 40)
    ends = source_and_target(raw)
    slots = {gid: index for index, (gid, _) in reversed(context.port(port_num).slots().items())}
    if ends is None or ends[1] not in slots:
        raise Refused(errno.EINVAL)
    attr.is_global = 1
    attr.grh.dgid.raw[:], attr.grh.sgid_index, attr.grh.hop_limit = ends[0], slots[ends[1]], 0xFF


@verb(locked=False)
def ibv_create_ah_from_wc(world: Any, pd: Pd, wc: Any, grh: Any, port_num: int) -> Ah:
    attr = ibv_ah_attr()
    _path_back(pd.context, port_num, wc, grh, attr)
    return ibv_create_ah(world, pd, attr)  # type: ignore[no-any-return]
