"""The verbs of extended queue pairs and shared receive queues, with C's tables played by Python functions."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import pytest

from rdmaconnect import abi, verbs
from rdmaconnect.errors import LibraryError, VerbsError

#: verb -> arguments after the queue pair
CALLS: dict[str, tuple[Any, ...]] = {
    "ibv_wr_start": (),
    "ibv_wr_abort": (),
    "ibv_wr_complete": (),
    "ibv_wr_send": (),
    "ibv_wr_send_imm": (0x01020304,),
    "ibv_wr_send_inv": (7,),
    "ibv_wr_send_tso": (0x1000, 14, 1500),
    "ibv_wr_rdma_write": (7, 2**64 - 1),
    "ibv_wr_rdma_write_imm": (7, 8, 9),
    "ibv_wr_rdma_read": (7, 8),
    "ibv_wr_atomic_cmp_swp": (7, 8, 2**63, 10),
    "ibv_wr_atomic_fetch_add": (7, 8, 9),
    "ibv_wr_atomic_write": (7, 8, 0x2000),
    "ibv_wr_flush": (7, 8, 2**40, 2, 1),
    "ibv_wr_local_inv": (7,),
    "ibv_wr_set_sge": (5, 2**63, 2**32 - 1),
    "ibv_wr_set_inline_data": (0x3000, 9),
    "ibv_wr_set_xrc_srqn": (3,),
    "ibv_wr_set_ud_addr": (ctypes.pointer(abi.ibv_ah(handle=6)), 0xFFFFFF, 2**32 - 1),
    "ibv_wr_set_sge_list": (2, (abi.ibv_sge * 2)((1, 2, 3), (4, 5, 6))),
    "ibv_wr_set_inline_data_list": (1, (abi.ibv_data_buf * 1)((0x10, 3))),
    "ibv_wr_bind_mw": (ctypes.pointer(abi.ibv_mw(rkey=3)), 4, abi.ibv_mw_bind_info(length=9)),
}


def plain(value: Any) -> Any:
    """A pointer by the first number of what it points to."""
    if isinstance(value, ctypes._Pointer):
        value = value.contents
    elif isinstance(value, ctypes.Array):
        value = value[0]
    if isinstance(value, ctypes.Structure):
        numbers = (getattr(value, name) for name, *_ in value._fields_)
        return [number for number in numbers if isinstance(number, int)]
    return value


def test_every_operation_of_the_builder_has_its_verb() -> None:
    assert set(CALLS) == {name for name, op in abi.OPS.items() if op.table == "qp_ex"}


@pytest.mark.parametrize("name", CALLS)
def test_a_verb_calls_its_function_with_its_arguments(name: str) -> None:
    qp, seen = abi.ibv_qp_ex(wr_id=77), []
    kind = dict(f[:2] for f in abi.ibv_qp_ex._fields_)[abi.OPS[name].field]

    def function(holder: Any, *args: Any) -> int:
        seen.append((holder.contents.wr_id, [plain(arg) for arg in args]))
        return 0

    callback = kind(function)
    setattr(qp, abi.OPS[name].field, callback)
    assert getattr(verbs, name)(ctypes.pointer(qp), *CALLS[name]) is None
    assert seen == [(77, [plain(arg) for arg in CALLS[name]])]


@pytest.mark.parametrize("name", CALLS)
def test_a_null_pointer_is_never_called(name: str) -> None:
    with pytest.raises(LibraryError, match=f"^{name}: EOPNOTSUPP, the device's provider does not have it") as caught:
        getattr(verbs, name)(ctypes.pointer(abi.ibv_qp_ex()), *CALLS[name])
    assert caught.value.errno == errno.EOPNOTSUPP


def test_completing_a_batch_tells_its_errno() -> None:
    qp = abi.ibv_qp_ex()
    kind = type(qp.wr_complete)
    qp.wr_complete = callback = kind(lambda _: errno.ENOSPC)
    with pytest.raises(VerbsError, match=r"post a batch of work requests: ibv_wr_complete: ENOSPC") as caught:
        verbs.ibv_wr_complete(ctypes.pointer(qp))
    assert caught.value.errno == errno.ENOSPC
    del callback


def test_a_domain_alone_makes_a_plain_queue_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verbs, "ibv_create_qp", lambda pd, attr: seen.append((pd, attr)))
    attr = abi.ibv_qp_init_attr_ex(qp_type=4, sq_sig_all=1, comp_mask=abi.QpInitAttrMask.PD)
    attr.pd = ctypes.pointer(abi.ibv_pd(handle=9))
    verbs.ibv_create_qp_ex(None, attr)
    [(pd, plain_attr)] = seen
    assert pd.contents.handle == 9
    assert (plain_attr.qp_type, plain_attr.sq_sig_all) == (4, 1)
    plain_attr.cap.max_send_wr = 5  # what was given comes back through it
    assert attr.cap.max_send_wr == 5


def test_a_plain_shared_queue_is_made_in_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verbs, "ibv_create_srq", lambda pd, attr: seen.append(attr))
    bits = abi.SrqInitAttrMask
    for mask, srq_type in ((bits.PD, 1), (bits.PD | bits.TYPE, 0)):
        verbs.ibv_create_srq_ex(None, abi.ibv_srq_init_attr_ex(comp_mask=mask, srq_type=srq_type))
    assert len(seen) == 2
    context = ctypes.pointer(abi.ibv_context())
    with pytest.raises(LibraryError, match="ibv_create_srq_ex"):
        verbs.ibv_create_srq_ex(context, abi.ibv_srq_init_attr_ex(comp_mask=bits.PD | bits.TYPE, srq_type=1))


def extended_context(**functions: Any) -> tuple[Any, Any]:
    """A device's context with functions in the table in front of it: (pointer, what must be kept)."""
    table = abi.verbs_context(sz=ctypes.sizeof(abi.verbs_context))
    table.context.abi_compat = ctypes.c_void_p(-1)
    kept = [table]
    for name, function in functions.items():
        kind = type(getattr(table, name))
        simple = ctypes.c_int if kind._restype_ is ctypes.c_int else ctypes.c_void_p  # a callback gives no pointer
        kept.append(ctypes.CFUNCTYPE(simple, *kind._argtypes_)(function))
        setattr(table, name, ctypes.cast(kept[-1], kind))
    return ctypes.pointer(table.context), kept


def test_a_work_queue_is_finished_as_the_header_does() -> None:
    wq = abi.ibv_wq(events_completed=9)
    ctypes.memset(ctypes.addressof(wq) + abi.ibv_wq.mutex.offset, 0xFF, abi.ibv_wq.mutex.size)
    destroyed: list[int] = []
    context, kept = extended_context(
        create_wq=lambda context, attr: ctypes.addressof(wq),
        modify_wq=lambda wq, attr: errno.EINVAL,
        destroy_wq=lambda wq: destroyed.append(1) or 0,
    )
    wq.context = context
    found = verbs.ibv_create_wq(context, abi.ibv_wq_init_attr(wq_context=5))
    assert ctypes.addressof(found.contents) == ctypes.addressof(wq)
    assert (wq.wq_context, wq.events_completed) == (5, 0)
    assert bytes(wq.mutex) != b"\xff" * ctypes.sizeof(wq.mutex)
    with pytest.raises(VerbsError, match="modify a work queue: ibv_modify_wq: EINVAL"):
        verbs.ibv_modify_wq(found, abi.ibv_wq_attr())
    verbs.ibv_destroy_wq(found)
    assert destroyed == [1]
    assert kept


def test_a_table_of_work_queues_is_made_and_destroyed() -> None:
    table = abi.ibv_rwq_ind_table(ind_tbl_num=3)
    context, kept = extended_context(
        create_rwq_ind_table=lambda context, attr: ctypes.addressof(table),
        destroy_rwq_ind_table=lambda table: errno.EBUSY,
    )
    table.context = context
    found = verbs.ibv_create_rwq_ind_table(context, abi.ibv_rwq_ind_table_init_attr())
    assert found.contents.ind_tbl_num == 3
    with pytest.raises(VerbsError, match="destroy a table of work queues: ibv_destroy_rwq_ind_table: EBUSY"):
        verbs.ibv_destroy_rwq_ind_table(found)
    assert kept
