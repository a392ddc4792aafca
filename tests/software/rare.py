"""The rarer objects: thread and parent domains, work queues, device memory, imports, steering, counters, tag lists.

No packet is steered or spread here: what is kept is what was asked for, and what must outlive what.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections import deque
from itertools import count
from typing import Any

from rdmaconnect.abi import (
    AccessFlags,
    CounterDescription,
    FlowSpecType,
    OpsFlags,
    OpsWrOpcode,
    ParentDomainInitAttrMask,
    SrqInitAttrMask,
    SrqType,
    WcOpcode,
    WcStatus,
    WqAttrMask,
    WqState,
    ibv_counters,
    ibv_dm,
    ibv_flow,
    ibv_flow_attr,
    ibv_mr,
    ibv_ops_wr,
    ibv_pd,
    ibv_rwq_ind_table,
    ibv_srq,
    ibv_td,
    ibv_wq,
)

from .arena import ALIVE, Misused, Object, Refused, find
from .calls import operations, verb
from .completion import WC, Cq
from .device import Context, Listed
from .memory import Mr, Pd, point, pointed
from .queuepair import Qp, Srq

#: of work queues: none that a queue pair has
_numbers = count(0x800001)
#: bytes of memory on a device
DM_SIZE = 1 << 16


# ---- domains


class Td(Object):
    """A thread domain."""

    kind, struct, typed = "td", ibv_td, ("ibv_td",)

    def __init__(self, world: Any, context: Context) -> None:
        super().__init__(world, context)
        self.context = context
        point(self.c, "context", context)


class ParentPd(Pd):
    """A parent domain: a domain that stands for another one."""

    kind, struct = "parent_domain", ibv_pd

    def __init__(self, world: Any, pd: Pd, td: Td | None) -> None:
        Object.__init__(self, world, pd, td)
        self.context, self.td, self._of = pd.context, td, pd
        point(self.c, "context", pd.context)

    def use(self, alloc: Any, free: Any) -> None:
        """Get a page where the caller's allocator says, and give it back at the end."""
        page = alloc(self.c, None, 4096, 64, 7 << 32)
        if not page:
            self.free("ibv_alloc_parent_domain")
            raise Refused(errno.ENOMEM)
        if page != 2**64 - 1:
            self._give_back = lambda: free(self.c, None, page, 7 << 32)

    _give_back: Any = None

    def free(self, how: str) -> None:
        if self._give_back is not None and not self.users:
            self._give_back()
        super().free(how)

    @property
    def base(self) -> Pd:
        return self._of.base


@verb
def ibv_alloc_td(world: Any, context: Context, init_attr: Any) -> Td:
    if init_attr.comp_mask:
        raise Refused(errno.EINVAL)
    return Td(world, context)


@verb
def ibv_dealloc_td(world: Any, td: Td) -> None:
    td.free("ibv_dealloc_td")


@verb
def ibv_alloc_parent_domain(world: Any, context: Context, attr: Any) -> ParentPd:
    pd = pointed(attr, "pd", "ibv_pd")
    if pd is None or attr.comp_mask & ~int(ParentDomainInitAttrMask.ALLOCATORS):
        raise Refused(errno.EINVAL)
    made = ParentPd(world, pd, pointed(attr, "td", "ibv_td"))
    if attr.comp_mask:
        # of a struct's field that is a function, ctypes gives no copy, and the struct is the caller's
        made.use(*(type(f)(ctypes.cast(f, ctypes.c_void_p).value) for f in (attr.alloc, attr.free)))
    return made


# ---- work queues


class Wq(Object):
    """A receive queue of its own."""

    kind, struct, typed = "wq", ibv_wq, ("ibv_wq",)

    def __init__(self, world: Any, pd: Pd, cq: Cq, attr: Any) -> None:
        limit = pd.context.device.limit
        if not 0 < attr.max_wr <= limit("max_qp_wr") or not 0 < attr.max_sge <= limit("max_sge"):
            raise Refused(errno.EINVAL)
        super().__init__(world, pd, cq)
        self.pd, self.cq, self.context = pd, cq, pd.context
        self.max_wr, self.max_sge, self.flags = attr.max_wr, attr.max_sge, attr.create_flags
        self.recvs: deque[int] = deque()
        self.state = self.c.state = WqState.RESET
        self.c.wq_num = next(_numbers)
        for field, to in (("context", pd.context), ("pd", pd), ("cq", cq)):
            point(self.c, field, to)
        for field, address in operations("wq").items():
            ctypes.c_void_p.from_address(self.address + getattr(ibv_wq, field).offset).value = address


class IndTable(Object):
    """A table of work queues."""

    kind, struct, typed = "rwq_ind_table", ibv_rwq_ind_table, ("ibv_rwq_ind_table",)

    def __init__(self, world: Any, context: Context, wqs: list[Wq]) -> None:
        super().__init__(world, context, *dict.fromkeys(wqs))
        self.context, self.wqs = context, wqs
        self.c.ind_tbl_num = len(wqs)
        point(self.c, "context", context)


@verb
def ibv_create_wq(world: Any, context: Context, wq_init_attr: Any) -> Wq:
    pd, cq = pointed(wq_init_attr, "pd", "ibv_pd"), pointed(wq_init_attr, "cq", "ibv_cq")
    if pd is None or cq is None:
        raise Refused(errno.EINVAL)
    return Wq(world, pd, cq, wq_init_attr)


@verb
def ibv_modify_wq(world: Any, wq: Wq, wq_attr: Any) -> None:
    mask = wq_attr.attr_mask
    if mask & WqAttrMask.CURR_STATE and wq_attr.curr_wq_state != wq.state:
        raise Refused(errno.EINVAL)
    if mask & WqAttrMask.FLAGS:
        wq.flags = wq.flags & ~wq_attr.flags_mask | wq_attr.flags & wq_attr.flags_mask
    if mask & WqAttrMask.STATE:
        _move(wq, WqState(wq_attr.wq_state))


def _move(wq: Wq, state: WqState) -> None:
    ways = {WqState.RESET: {WqState.RDY}, WqState.RDY: {WqState.ERR, WqState.RESET}, WqState.ERR: {WqState.RESET}}
    if state not in {wq.state, *ways[wq.state]}:
        raise Refused(errno.EINVAL)
    if state == WqState.ERR:
        for wr_id in wq.recvs:
            wq.cq.add(wq.c.wq_num, _wc(wr_id, WcStatus.WR_FLUSH_ERR, WcOpcode.RECV, wq.c.wq_num), False)
    if state != WqState.RDY:
        wq.recvs.clear()
    if state == WqState.RESET:
        wq.cq.clean(wq.c.wq_num)
    wq.state = wq.c.state = state


def _wc(wr_id: int, status: int, opcode: int, number: int = 0) -> bytes:
    return WC.pack(wr_id, status, opcode, 0, 0, 0, number, 0, 0, 0, 0, 0, 0)


@verb
def ibv_post_wq_recv(world: Any, wq: Wq, recv_wr: Any, bad_recv_wr: int) -> None:
    wr = recv_wr
    while wr is not None:
        full = len(wq.recvs) >= wq.max_wr
        if full or wr.num_sge > wq.max_sge or wq.state != WqState.RDY:
            ctypes.c_void_p.from_address(bad_recv_wr).value = ctypes.addressof(wr)
            raise Refused(errno.ENOMEM if full else errno.EINVAL)
        wq.recvs.append(wr.wr_id)
        wr = wr.next.contents if wr.next else None


@verb
def ibv_destroy_wq(world: Any, wq: Wq) -> None:
    wq.free("ibv_destroy_wq")
    wq.cq.clean(wq.c.wq_num)


@verb
def ibv_create_rwq_ind_table(world: Any, context: Context, init_attr: Any) -> IndTable:
    start = ctypes.c_void_p.from_address(ctypes.addressof(init_attr) + type(init_attr).ind_tbl.offset).value or 0
    array = (ctypes.c_void_p * (1 << init_attr.log_ind_tbl_size)).from_address(start)
    return IndTable(world, context, [find(address, "ibv_wq") for address in array])  # type: ignore[misc]


@verb
def ibv_destroy_rwq_ind_table(world: Any, rwq_ind_table: IndTable) -> None:
    rwq_ind_table.free("ibv_destroy_rwq_ind_table")


# ---- memory


class Dm(Object):
    """Memory on the device, which is this process's here."""

    kind, struct, typed = "dm", ibv_dm, ("ibv_dm",)

    def __init__(self, world: Any, context: Context, length: int) -> None:
        taken = sum(one.length for one in ALIVE.values() if isinstance(one, Dm) and one.context is context)
        if not 0 < length <= DM_SIZE - taken:
            raise Refused(errno.ENOMEM)
        super().__init__(world, context)
        self.context, self.length = context, length
        self.memory = ctypes.create_string_buffer(length)
        self.start = ctypes.addressof(self.memory)
        point(self.c, "context", context)
        for field, address in operations("dm").items():
            ctypes.c_void_p.from_address(self.address + getattr(ibv_dm, field).offset).value = address

    def within(self, offset: int, length: int) -> int:
        """The address of a part of it."""
        if offset + length > self.length:
            raise Refused(errno.EFAULT)
        return self.start + offset


class NullMr(Mr):
    """A region without memory."""

    kind, struct = "mr", ibv_mr

    def __init__(self, world: Any, pd: Pd) -> None:
        self._zeros = ctypes.create_string_buffer(1 << 16)
        super().__init__(world, pd, ctypes.addressof(self._zeros), len(self._zeros), 0, int(AccessFlags.LOCAL_WRITE))
        self.length, self.c.addr = 2**64, None

    def place(self, offset: int, length: int) -> int:
        self._zeros = ctypes.create_string_buffer(length)
        return ctypes.addressof(self._zeros)


class ImportedPd(ParentPd):
    """A protection domain that was imported: in effect the other one."""

    kind, struct = "imported_pd", ibv_pd


class ImportedMr(Object):
    """A region that was imported: another struct with the same keys."""

    kind, struct, typed = "imported_mr", ibv_mr, ("ibv_mr",)

    def __init__(self, world: Any, pd: Pd, mr: Mr) -> None:
        super().__init__(world, pd)
        self.pd, self.context = pd, pd.context
        point(self.c, "context", pd.context)
        point(self.c, "pd", pd)
        self.c.lkey, self.c.rkey, self.c.handle, self.c.length = mr.c.lkey, mr.c.rkey, mr.c.handle, mr.length


class ImportedDm(Dm):
    """Device memory that was imported: the same bytes."""

    kind, struct = "imported_dm", ibv_dm

    def __init__(self, world: Any, context: Context, dm: Dm) -> None:
        super().__init__(world, context, 1)
        self.length, self.memory, self.start = dm.length, dm.memory, dm.start
        self.c.handle = dm.c.handle


@verb
def ibv_alloc_dm(world: Any, context: Context, attr: Any) -> Dm:
    if attr.comp_mask:
        raise Refused(errno.EINVAL)
    return Dm(world, context, attr.length)


@verb
def ibv_free_dm(world: Any, dm: Dm) -> None:
    dm.free("ibv_free_dm")


@verb
def ibv_memcpy_to_dm(world: Any, dm: Dm, dm_offset: int, host_addr: int, length: int) -> None:
    ctypes.memmove(dm.within(dm_offset, length), host_addr, length)


@verb
def ibv_memcpy_from_dm(world: Any, host_addr: int, dm: Dm, dm_offset: int, length: int) -> None:
    ctypes.memmove(host_addr, dm.within(dm_offset, length), length)


@verb
def ibv_reg_dm_mr(world: Any, pd: Pd, dm: Dm, dm_offset: int, length: int, access: int) -> Mr:
    if not access & AccessFlags.ZERO_BASED:
        raise Refused(errno.EINVAL)
    made = Mr(world, pd, dm.within(dm_offset, length), length, 0, access)
    dm.users += 1
    made.parents = (*made.parents, dm)
    return made


@verb
def ibv_dm_export_dmabuf_fd(world: Any, dm: Dm) -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


@verb
def ibv_alloc_null_mr(world: Any, pd: Pd) -> NullMr:
    return NullMr(world, pd)


def _by_handle(world: Any, kind: type[Object], handle: int) -> Any:
    for one in ALIVE.values():
        if isinstance(one, kind) and one.world is world and one.c.handle == handle:
            return one
    raise Refused(errno.ENOENT)


@verb
def ibv_import_device(world: Any, cmd_fd: int) -> Context:
    if not stat.S_ISCHR(os.fstat(cmd_fd).st_mode):
        raise Refused(errno.EINVAL)
    listed: Listed = world.listed[0]
    made = Context(world, listed)
    world.close_fd(made.c.cmd_fd)
    made.c.cmd_fd = world.opened(cmd_fd)
    return made


@verb
def ibv_import_pd(world: Any, context: Context, pd_handle: int) -> ImportedPd:
    pd = _by_handle(world, Pd, pd_handle)
    made = ImportedPd(world, pd, None)
    made.c.handle = pd_handle
    return made


@verb
def ibv_unimport_pd(world: Any, pd: ImportedPd) -> None:
    pd.free("ibv_unimport_pd")


@verb
def ibv_import_mr(world: Any, pd: Pd, mr_handle: int) -> ImportedMr:
    return ImportedMr(world, pd, _by_handle(world, Mr, mr_handle))


@verb
def ibv_unimport_mr(world: Any, mr: ImportedMr) -> None:
    mr.free("ibv_unimport_mr")


@verb
def ibv_import_dm(world: Any, context: Context, dm_handle: int) -> ImportedDm:
    return ImportedDm(world, context, _by_handle(world, Dm, dm_handle))


@verb
def ibv_unimport_dm(world: Any, dm: ImportedDm) -> None:
    dm.free("ibv_unimport_dm")


# ---- steering


class Flow(Object):
    """A rule.

    Attributes:
        specs: (type, all bytes of it) of each spec.
    """

    kind, struct, typed = "flow", ibv_flow, ("ibv_flow",)

    def __init__(self, world: Any, qp: Qp, attr: Any) -> None:
        self.attr = ibv_flow_attr.from_buffer_copy(attr)
        self.specs, counters = _specs(attr)
        super().__init__(world, qp, *counters)
        self.context = qp.context
        point(self.c, "context", qp.context)


def _specs(attr: Any) -> tuple[list[tuple[FlowSpecType, bytes]], list[Object]]:
    """What follows the head; it must be as long as the head says."""
    at, end = ctypes.addressof(attr) + ctypes.sizeof(attr), ctypes.addressof(attr) + attr.size
    found, counters = [], []
    for _ in range(attr.num_of_specs):
        kind, size = ctypes.c_int.from_address(at).value, ctypes.c_uint16.from_address(at + 4).value
        if size < 8 or at + size > end:
            raise Refused(errno.EINVAL)
        if kind == FlowSpecType.ACTION_COUNT:
            counters.append(find(ctypes.c_void_p.from_address(at + 8).value, "ibv_counters"))
        found.append((FlowSpecType(kind), ctypes.string_at(at, size)))
        at += size
    if at != end:
        raise Refused(errno.EINVAL)
    return found, counters


class Counters(Object):
    """A set of counters; ``what`` is counted at which place. A test sets ``values``."""

    kind, struct, typed = "counters", ibv_counters, ("ibv_counters",)

    def __init__(self, world: Any, context: Context) -> None:
        super().__init__(world, context)
        self.context = context
        self.what: dict[int, CounterDescription] = {}
        self.values: dict[int, int] = {}
        point(self.c, "context", context)


@verb
def ibv_create_flow(world: Any, qp: Qp, flow_attr: Any) -> Flow:
    if not 1 <= flow_attr.port <= len(qp.context.device.ports) or flow_attr.comp_mask:
        raise Refused(errno.EINVAL)
    return Flow(world, qp, flow_attr)


@verb
def ibv_destroy_flow(world: Any, flow: Flow) -> None:
    flow.free("ibv_destroy_flow")


@verb
def ibv_create_counters(world: Any, context: Context, init_attr: Any) -> Counters:
    return Counters(world, context)


@verb
def ibv_destroy_counters(world: Any, counters: Counters) -> None:
    counters.free("ibv_destroy_counters")


@verb
def ibv_attach_counters_point_flow(world: Any, counters: Counters, attr: Any, flow: Flow | None) -> None:
    if counters.users:
        raise Refused(errno.EBUSY)
    if attr.counter_desc not in (CounterDescription.PACKETS, CounterDescription.BYTES):
        raise Refused(errno.EOPNOTSUPP)
    counters.what[attr.index] = CounterDescription(attr.counter_desc)


@verb
def ibv_read_counters(world: Any, counters: Counters, counters_value: Any, ncounters: int, flags: int) -> None:
    values = (ctypes.c_uint64 * ncounters).from_address(ctypes.addressof(counters_value))
    values[:] = [counters.values.get(index, 0) for index in range(ncounters)]


# ---- tag matching


class TmSrq(Srq):
    """A shared receive queue with a list of tagged buffers: ``tags`` has (tag, mask, receive's id) by handle."""

    kind, struct = "srq", ibv_srq

    def __init__(self, world: Any, pd: Pd, cq: Cq, attr: Any) -> None:
        super().__init__(world, pd, attr.attr.max_wr, attr.attr.max_sge, 0)
        cq.users += 1
        self.parents = (*self.parents, cq)
        self.cq, self.most = cq, attr.tm_cap.max_num_tags
        self.tags: dict[int, tuple[int, int, int]] = {}
        self.unexpected = 0


@verb
def ibv_create_srq_ex(world: Any, context: Context, srq_init_attr_ex: Any) -> TmSrq:
    attr, bits = srq_init_attr_ex, SrqInitAttrMask
    if attr.srq_type != SrqType.TM or attr.comp_mask != bits.TYPE | bits.PD | bits.CQ | bits.TM:
        raise Refused(errno.EOPNOTSUPP)
    return TmSrq(world, pointed(attr, "pd", "ibv_pd"), pointed(attr, "cq", "ibv_cq"), attr)


@verb
def ibv_post_srq_ops(world: Any, srq: Srq, op: ibv_ops_wr, bad_op: int) -> None:
    if not isinstance(srq, TmSrq):
        raise Misused(f"{srq} has no list of tags", world)
    status, opcode = WcStatus.SUCCESS, WcOpcode.TM_SYNC
    if op.opcode == OpsWrOpcode.TAG_ADD:
        if len(srq.tags) >= srq.most:
            ctypes.c_void_p.from_address(bad_op).value = ctypes.addressof(op)
            raise Refused(errno.ENOMEM)
        op.tm.handle, opcode = max(srq.tags, default=0) + 1, WcOpcode.TM_ADD
        srq.tags[op.tm.handle] = op.tm.add.tag, op.tm.add.mask, op.tm.add.recv_wr_id
    elif op.opcode == OpsWrOpcode.TAG_DEL:
        opcode = WcOpcode.TM_DEL
        status = WcStatus.SUCCESS if srq.tags.pop(op.tm.handle, None) else WcStatus.TM_ERR
    if op.flags & OpsFlags.TM_SYNC:
        srq.unexpected = op.tm.unexpected_cnt
    if op.flags & OpsFlags.SIGNALED:
        srq.cq.add(0, _wc(op.wr_id, status, opcode), False)
