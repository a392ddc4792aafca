"""ibv_modify_qp: every way it is used, what is refused before the kernel is asked, and what the kernel would take."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ends import QKEY, End, attributes, end_on, joined
from nodes import PATIENCE, Node

from rdmaconnect import verbs
from rdmaconnect.abi import AccessFlags, MigState, QpAttrMask, QpState, QpType, WcStatus, ibv_qp_attr
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.agreement.transitions import mask_of
from rdmaconnect.errors import ModifyError, StateError
from rdmaconnect.objects.address import ah_struct
from rdmaconnect.objects.queuepair import SendRequest

M, S = QpAttrMask, QpState
RC, UC, UD = QpType.RC, QpType.UC, QpType.UD


@pytest.fixture
def rc(node1: Node) -> Iterator[End]:
    """A queue pair connected to itself, in RTS."""
    with end_on(node1, RC, 5) as end:
        end.climb(end)
        yield end


@pytest.fixture
def new(node1: Node) -> Iterator[End]:
    with end_on(node1, RC, 5) as end:
        yield end


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel must not be asked."""

    def ask(*_: Any) -> int:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(verbs, "ibv_modify_qp", ask)


# ---- what it does


@pytest.mark.parametrize("qp_type", [RC, UC, UD], ids=str)
def test_up_and_down_and_up_again(node1: Node, node2: Node, qp_type: QpType) -> None:
    with joined(node1, node2, qp_type) as (here, there):
        to = None
        for _ in range(2):
            if qp_type == UD:
                to = here.address_of(there)
            there.recv(1, 0)
            here.qp.post_send(SendRequest().send(1, inline=b"up", to=to))
            here.wait()
            assert there.wait()[0].wr_id == 1
            for end in (here, there):
                end.qp.modify({"qp_state": S.ERR})
                assert end.qp.query().qp_state == end.qp.state == S.ERR
                end.qp.modify({"qp_state": S.RESET})
                assert end.qp.query().qp_state == end.qp.state == S.RESET
            here.climb(there)
            there.climb(here)


def test_modify_ud_qp(node1: Node) -> None:
    with end_on(node1, UD, 0x123456) as end:
        end.climb(end)
        attr = end.qp.query()
        assert (attr.qp_state, attr.sq_psn, attr.pkey_index) == (S.RTS, 0x123456, 0)
        assert attr.qkey == QKEY
        end.qp.modify({"qkey": 0x55})
        assert end.qp.query().qkey == 0x55


def test_attributes_change_without_a_change_of_state(new: End) -> None:
    new.climb(new, S.INIT)
    new.qp.modify({"qp_access_flags": AccessFlags.REMOTE_READ, "port_num": 1, "pkey_index": 0})
    assert (new.qp.state, new.qp.query().qp_access_flags) == (S.INIT, AccessFlags.REMOTE_READ)
    new.qp.modify({"qp_state": S.INIT, "qp_access_flags": AccessFlags.REMOTE_WRITE})
    assert new.qp.query().qp_access_flags == AccessFlags.REMOTE_WRITE


def test_a_live_queue_pair_changes_what_it_allows(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC) as (here, there):
        there.qp.modify({"min_rnr_timer": 30, "qp_access_flags": AccessFlags.REMOTE_WRITE})
        attr = there.qp.query()
        assert (attr.qp_state, attr.min_rnr_timer, attr.qp_access_flags) == (S.RTS, 30, AccessFlags.REMOTE_WRITE)
        here.qp.post_send(SendRequest().rdma_write(1, there.region(0, 4), inline=b"yes!"))
        here.wait()
        there.qp.modify({"qp_access_flags": AccessFlags(0)})
        here.qp.post_send(SendRequest().rdma_write(2, there.region(0, 4), inline=b"no!!"))
        here.wait(1, WcStatus.REM_ACCESS_ERR, WcStatus.REM_INV_REQ_ERR)
        assert there.memory[:4] == b"yes!"


def drained(end: End) -> None:
    limit = time.monotonic() + PATIENCE
    while end.qp.query(M.STATE).sq_draining:
        assert time.monotonic() < limit


def test_sqd_drains_lets_everything_be_changed_and_goes_on(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC) as (here, there):
        here.qp.modify({"qp_state": S.SQD, "en_sqd_async_notify": 1})
        assert here.qp.query().qp_state == here.qp.state == S.SQD
        drained(here)
        changed = {"timeout": 17, "retry_cnt": 6, "rnr_retry": 2, "max_rd_atomic": 2, "max_dest_rd_atomic": 2}
        changed |= {"min_rnr_timer": 7, "pkey_index": 0, "port_num": 1, "qp_access_flags": AccessFlags.REMOTE_WRITE}
        path = dataclasses.replace(here.path_to(there), traffic_class=0x20)
        node1.call(here.qp.modify, {**changed, "ah_attr": path})
        attr = here.qp.query()
        assert {name: getattr(attr, name) for name in changed} == changed
        assert attr.ah_attr.traffic_class == 0x20
        here.qp.modify({"qp_state": S.RTS, "cur_qp_state": S.SQD})
        assert here.qp.query().qp_state == here.qp.state == S.RTS
        here.qp.post_send(SendRequest().rdma_write(1, there.region(0, 4), inline=b"on!!"))
        here.wait()
        assert there.memory[:4] == b"on!!"


def test_the_present_state_can_be_named(rc: End) -> None:
    rc.qp.modify({"qp_state": S.RTS, "cur_qp_state": S.RTS})
    with pytest.raises(ModifyError, match=r"INIT->RTR.*not allowed: CUR_STATE") as caught:
        rc.qp.modify({"qp_state": S.RTR, "cur_qp_state": S.INIT})
    assert (caught.value.frm, caught.value.to) == (S.INIT, S.RTR)


def test_path_migration_is_taken_from_the_table(rc: End) -> None:
    rc.qp.modify({"path_mig_state": MigState.REARM})
    assert rc.qp.query().path_mig_state == MigState.REARM
    alternate = {"alt_ah_attr": rc.path_to(rc), "alt_pkey_index": 0, "alt_port_num": 1, "alt_timeout": 14}
    with pytest.raises(ModifyError, match=r"RTS->RTS: ibv_modify_qp: EINVAL.*RoCE has no alternate paths") as caught:
        rc.node.call(rc.qp.modify, alternate)
    assert (caught.value.mask, caught.value.missing, caught.value.not_allowed) == (M.ALT_PATH, 0, 0)


def test_a_queue_pair_that_moved_by_itself_is_found_out(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC) as (here, there):
        here.qp.post_send(SendRequest().rdma_write(1, RemoteRegion(there.mr.addr, 5, 4), inline=b"bad!"))
        here.wait(1, WcStatus.REM_ACCESS_ERR)
        assert here.qp.state == S.RTS
        with pytest.raises(ModifyError, match=r"RTS->SQD: ibv_modify_qp: EINVAL.*The device has it in ERR by now"):
            here.qp.modify({"qp_state": S.SQD})
        assert here.qp.state == S.ERR
        here.qp.modify({"qp_state": S.RESET})


# ---- what is refused before the kernel is asked


def test_missing_and_not_allowed_bits_are_named(new: End, unasked: None) -> None:
    with pytest.raises(ModifyError, match=r"The table says: missing: ACCESS_FLAGS; not allowed: QKEY\.$") as caught:
        new.qp.modify({"qp_state": S.INIT, "port_num": 1, "pkey_index": 0, "qkey": 5})
    error = caught.value
    assert (error.errno, error.missing, error.not_allowed) == (errno.EINVAL, M.ACCESS_FLAGS, M.QKEY)
    assert (error.qp_num, error.frm, error.to) == (new.qp.qp_num, S.RESET, S.INIT)
    assert error.mask == M.STATE | M.PORT | M.PKEY_INDEX | M.QKEY
    assert f"move {new.qp.name} RESET->INIT" in str(error)
    assert new.qp.state == S.RESET


def test_each_missing_bit_is_named(node1: Node, unasked: None) -> None:
    for qp_type in (RC, UC, UD):
        with end_on(node1, qp_type, 5) as end:
            ways = ((S.RESET, S.INIT), (S.INIT, S.RTR), (S.RTR, S.RTS))
            for (frm, to), attr in zip(ways, attributes(qp_type, end, end), strict=True):
                end.qp.state = frm
                for name in attr:
                    rest = {"qp_state": to, **{n: v for n, v in attr.items() if n != name}}
                    with pytest.raises(ModifyError) as caught:
                        end.qp.modify(rest)
                    assert caught.value.missing.bit_count() == 1, name
            end.qp.state = S.RESET


@pytest.mark.parametrize(
    ("frm", "to"), [(S.RESET, S.RTR), (S.RESET, S.ERR), (S.INIT, S.RTS), (S.RTS, S.RTR), (S.ERR, S.INIT)]
)
def test_a_way_that_does_not_exist_is_refused(new: End, unasked: None, frm: QpState, to: QpState) -> None:
    new.qp.state = frm
    with pytest.raises(StateError, match=f"^move RC QP {frm}->{to}: no such transition"):
        new.qp.modify({"qp_state": to})
    with pytest.raises(StateError, match=f"^move RC QP {frm}->{to}: no such transition"):
        new.qp.move(to)
    new.qp.state = S.RESET


@pytest.mark.parametrize(
    ("attr", "match"),
    [
        ({"qp_stat": 1}, r"'qp_stat' is no attribute that can be set"),
        ({"sq_draining": 1}, r"'sq_draining' is no attribute"),
        ({"alt_port_num": 1}, r"the mask ALT_PATH needs alt_ah_attr, alt_pkey_index, alt_timeout too"),
    ],
    ids=lambda value: str(value),
)
def test_attributes_that_do_not_make_sense_are_refused(rc: End, attr: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        rc.qp.modify(attr)


def test_a_mask_can_be_given_and_needs_its_fields(rc: End) -> None:
    rc.qp.modify({"min_rnr_timer": 9, "qp_access_flags": AccessFlags(0)}, M.MIN_RNR_TIMER)
    assert rc.qp.query().min_rnr_timer == 9
    assert rc.qp.query().qp_access_flags != AccessFlags(0)
    with pytest.raises(ValueError, match="the mask MIN_RNR_TIMER needs min_rnr_timer too"):
        rc.qp.modify({}, M.MIN_RNR_TIMER)


def test_a_closed_queue_pair_says_so(new: End) -> None:
    new.qp.close()
    with pytest.raises(StateError, match=r"^RC QP .* is closed"):
        new.qp.modify({"qp_state": S.INIT})
    with pytest.raises(StateError, match=r"^RC QP .* is closed"):
        new.qp.move(S.INIT)


#: field -> a value outside of its range, and whether rxe takes it all the same
SILENT = {
    "dest_qp_num": [(0, True), (2**24, True)],
    "rq_psn": [(2**24, True)],
    "path_mtu": [(0, True), (6, False)],
    "min_rnr_timer": [(32, True)],
    "sq_psn": [(2**24, True)],
    "retry_cnt": [(8, True)],
    "rnr_retry": [(8, True)],
    "timeout": [(32, False)],
    "pkey_index": [(1, True)],
}


@pytest.mark.parametrize(
    ("name", "value", "taken"), [(n, v, t) for n, cases in SILENT.items() for v, t in cases], ids=lambda x: str(x)
)
def test_values_that_drivers_take_silently_are_refused_by_name(new: End, name: str, value: int, taken: bool) -> None:
    steps = attributes(RC, new, new)
    index = next(i for i, step in enumerate(steps) if name in step)
    new.climb(new, (S.RESET, S.INIT, S.RTR)[index])
    to = (S.INIT, S.RTR, S.RTS)[index]
    attr = {"qp_state": to, **steps[index], name: value}
    match = rf"^{name} is {value}: " + ("port 1 of rxe1 has 1 P_Keys" if name == "pkey_index" else "give ")
    with pytest.raises(ValueError, match=match):
        new.qp.modify(attr)
    assert new.qp.query().qp_state == new.qp.state != to
    struct = ibv_qp_attr()
    for field, given in attr.items():
        setattr(struct, field, ah_struct(given) if isinstance(given, AhAttr) else given)
    number = new.node.call(verbs.ibv_modify_qp, new.qp.pointer, struct, int(mask_of(attr)))
    assert number == (0 if taken else errno.EINVAL)
    new.qp.state = to if taken else new.qp.state


def test_a_path_with_a_field_out_of_range_is_refused(new: End) -> None:
    new.climb(new, S.INIT)
    attr = attributes(RC, new, new)[1]
    for field, value in (("sl", 16), ("flow_label", 2**20), ("sgid_index", 256), ("port_num", 0)):
        path = AhAttr(**{"port_num": 1, "is_global": 1, "dgid": new.gid.gid.raw, field: value})
        with pytest.raises(ValueError, match=rf"^ah_attr\.{field} is {value}: give "):
            new.qp.modify({"qp_state": S.RTR, **attr, "ah_attr": path})
