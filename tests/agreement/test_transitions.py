"""The tables of ibv_modify_qp: against the man page, and against rules that a queue pair obeys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import end, gid, roce

from rdmaconnect.abi import QpAttrMask, QpState, QpType, bits, ibv_qp_attr
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import AhAttr, Wish, agree, make_path
from rdmaconnect.agreement.ranges import AH_RANGES, RANGES
from rdmaconnect.agreement.transitions import DRIVERS, FIELDS, TABLE, Diagnosis, check_ranges, diagnose, step
from rdmaconnect.errors import StateError

M = QpAttrMask
RC, UC, UD, RAW = QpType.RC, QpType.UC, QpType.UD, QpType.RAW_PACKET
XSEND, XRECV = QpType.XRC_SEND, QpType.XRC_RECV
RESET, INIT, RTR, RTS, SQD, SQE, ERR = list(QpState)[:7]

# ibv_modify_qp(3) of rdma-core, "minimum list of attributes that must be changed", written off by hand
MAN_PAGE = """
UD Init  IBV_QP_STATE, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY
UD RTR   IBV_QP_STATE
UD RTS   IBV_QP_STATE, IBV_QP_SQ_PSN
UC Init  IBV_QP_STATE, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_ACCESS_FLAGS
UC RTR   IBV_QP_STATE, IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN
UC RTS   IBV_QP_STATE, IBV_QP_SQ_PSN
RC Init  IBV_QP_STATE, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_ACCESS_FLAGS
RC RTR   IBV_QP_STATE, IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER
RC RTS   IBV_QP_STATE, IBV_QP_SQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_TIMEOUT
RAW_PACKET Init  IBV_QP_STATE, IBV_QP_PORT
RAW_PACKET RTR   IBV_QP_STATE
RAW_PACKET RTS   IBV_QP_STATE
"""  # noqa: E501
STEPS = {"Init": (RESET, INIT), "RTR": (INIT, RTR), "RTS": (RTR, RTS)}

ROWS = [(qp_type, frm, to) for qp_type, rows in TABLE.items() for frm, to in rows]
rows = st.sampled_from(ROWS)


class Anything:
    """Values that fit every field."""

    def __getattr__(self, name: str) -> int:
        return RANGES[name][0] if name in RANGES else 0


@pytest.mark.parametrize("line", MAN_PAGE.strip().splitlines(), ids=lambda line: "-".join(line.split()[:2]))
def test_required_bits_are_those_of_the_man_page(line: str) -> None:
    name, to, rest = line.split(None, 2)
    names = {bit.strip().removeprefix("IBV_QP_") for bit in rest.split(",")}
    assert {bit.name for bit in bits(TABLE[QpType[name]][STEPS[to]].required)} == names


def test_there_is_a_table_for_each_type_with_the_same_transitions() -> None:
    assert set(TABLE) == {RC, UC, UD, RAW, XSEND, XRECV}
    to_reset = {(frm, RESET) for frm in (RESET, INIT, RTR, RTS, SQD, SQE, ERR)}
    to_err = {(frm, ERR) for frm in (INIT, RTR, RTS, SQD, SQE, ERR)}
    up = {(RESET, INIT), (INIT, INIT), (INIT, RTR), (RTR, RTS), (RTS, RTS)}
    drain = {(RTS, SQD), (SQD, SQD), (SQD, RTS), (SQE, RTS)}
    for qp_type, table in TABLE.items():
        assert set(table) == to_reset | to_err | up | drain, qp_type


@pytest.mark.parametrize("frm", [RESET, INIT, RTR, RTS, SQD, SQE, ERR])
@pytest.mark.parametrize("to", [RESET, ERR])
def test_going_to_reset_or_err_takes_nothing_but_the_state(frm: QpState, to: QpState) -> None:
    if (frm, to) == (RESET, ERR):
        with pytest.raises(StateError, match="no such transition"):
            diagnose(RC, frm, to, M.STATE)
    else:
        for qp_type in TABLE:
            assert not diagnose(qp_type, frm, to, M.STATE)
            assert diagnose(qp_type, frm, to, M.STATE | M.PORT).not_allowed == M.PORT


@pytest.mark.parametrize(
    ("bit", "types"),
    [
        (M.AV, {RC, UC, XSEND, XRECV}),
        (M.RQ_PSN, {RC, UC, XSEND, XRECV}),
        (M.DEST_QPN, {RC, UC, XSEND, XRECV}),
        (M.PATH_MTU, {RC, UC, XSEND, XRECV}),
        (M.ALT_PATH, {RC, UC, XSEND, XRECV}),
        (M.ACCESS_FLAGS, {RC, UC, XSEND, XRECV}),
        (M.MAX_DEST_RD_ATOMIC, {RC, XRECV}),
        (M.MIN_RNR_TIMER, {RC, XRECV}),
        (M.MAX_QP_RD_ATOMIC, {RC, XSEND}),
        (M.RETRY_CNT, {RC, XSEND}),
        (M.RNR_RETRY, {RC, XSEND}),
        (M.TIMEOUT, {RC, XSEND, XRECV}),
        (M.QKEY, {UD}),
        (M.RATE_LIMIT, set()),
        (M.CAP, set()),
    ],
    ids=str,
)
def test_a_bit_appears_only_in_the_types_that_have_such_a_thing(bit: QpAttrMask, types: set[QpType]) -> None:
    found = {
        qp_type for qp_type, table in TABLE.items() for row in table.values() if bit & (row.required | row.optional)
    }
    assert found == types


def test_the_present_state_may_be_named_only_where_the_queue_pair_can_move_by_itself() -> None:
    found = {frm for table in TABLE.values() for (frm, _), row in table.items() if M.CUR_STATE & row.optional}
    assert found == {RTR, RTS, SQD, SQE}


def test_the_drained_event_can_be_asked_for_only_on_the_way_to_sqd() -> None:
    asked = M.EN_SQD_ASYNC_NOTIFY
    found = {
        (t, way) for t, table in TABLE.items() for way, row in table.items() if asked & (row.required | row.optional)
    }
    assert found == {(qp_type, (RTS, SQD)) for qp_type in (RC, UC, UD, XSEND, XRECV)}


def test_no_bit_is_both_required_and_optional() -> None:
    assert all(not row.required & row.optional for table in TABLE.values() for row in table.values())


def test_every_bit_names_the_fields_of_the_struct_that_it_stands_for() -> None:
    assert set(FIELDS) == set(QpAttrMask)
    names = [name for fields in FIELDS.values() for name in fields]
    assert len(names) == len(set(names))
    members = {name for name, *_ in ibv_qp_attr._fields_}
    assert members - {"sq_draining"} == set(names)
    assert set(RANGES) <= set(names)


def widths() -> dict[str, int]:
    """Bits of each integer field of ibv_qp_attr."""
    return {name: 8 * getattr(ibv_qp_attr, name).size for name, *_ in ibv_qp_attr._fields_}


def test_no_range_is_wider_than_its_field() -> None:
    for name, (least, greatest, _) in RANGES.items():
        assert 0 <= least < greatest < 2 ** widths()[name], name


# ---- diagnose


@given(rows, st.data())
@settings(max_examples=60)
def test_required_bits_with_any_optional_ones_are_right(
    row: tuple[QpType, QpState, QpState], data: st.DataObject
) -> None:
    entry = TABLE[row[0]][row[1:]]
    some = data.draw(st.sets(st.sampled_from(bits(entry.optional) or [M.STATE])))
    found = diagnose(*row, entry.required | M.STATE | sum(some, M(0)))
    assert not found
    assert found == Diagnosis(M(0), M(0))
    assert str(found) == "nothing wrong"


@pytest.mark.parametrize("qp_type", TABLE, ids=str)
def test_every_single_bit_too_few_or_too_many_is_named(qp_type: QpType) -> None:
    for way, entry in TABLE[qp_type].items():
        for bit in bits(entry.required):
            found = diagnose(qp_type, *way, entry.required & ~bit)
            assert (found.missing, found.not_allowed) == (bit, 0), way
            assert str(found) == f"missing: {bit}"
        for bit in [*QpAttrMask, M(1 << 30)]:
            if not bit & (entry.required | entry.optional | M.STATE | DRIVERS):
                found = diagnose(qp_type, *way, entry.required | bit)
                assert (found.missing, found.not_allowed) == (0, bit), way
                assert str(found) == f"not allowed: {bit}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_rate_limit_is_for_the_driver_to_judge(row: tuple[QpType, QpState, QpState]) -> None:
    """Since Linux 7.2 ``ib_modify_qp_is_ok`` lets it pass on every type and step."""
    required = TABLE[row[0]][row[1:]].required
    assert not diagnose(*row, required | M.STATE | M.RATE_LIMIT)
    attr, mask = step(*row, Anything(), M.RATE_LIMIT)
    assert mask == required | M.STATE | M.RATE_LIMIT
    assert attr["rate_limit"] == 0


@given(rows, st.integers(0, 2**26 - 1))
@settings(max_examples=60)
def test_the_diagnosis_of_any_mask_mends_it(row: tuple[QpType, QpState, QpState], mask: int) -> None:
    found = diagnose(*row, mask)
    assert not diagnose(*row, (mask | found.missing) & ~found.not_allowed)
    assert not found.missing & mask
    assert not found.not_allowed & ~mask


def test_an_unknown_transition_is_refused_with_the_ways_there_are() -> None:
    with pytest.raises(
        StateError, match=r"^move RC QP RESET->RTS: no such transition\. From RESET the ways are INIT, RESET\.$"
    ):
        diagnose(RC, RESET, RTS, M.STATE)
    with pytest.raises(StateError, match=r"From UNKNOWN the ways are none\."):
        diagnose(RC, QpState.UNKNOWN, RTS, M.STATE)


def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(StateError, match=r"type DRIVER: no table .* RC, UC, UD, RAW_PACKET, XRC_SEND, XRC_RECV\."):
        diagnose(QpType.DRIVER, RESET, INIT, M.STATE)
    with pytest.raises(StateError, match=r"type unknown \(77\)"):
        step(QpType(77), RESET, INIT, Anything())


# ---- step


@given(rows, st.data())
@settings(max_examples=60)
def test_the_mask_of_a_step_is_right_and_its_values_are_those_of_the_mask(
    row: tuple[QpType, QpState, QpState], data: st.DataObject
) -> None:
    entry = TABLE[row[0]][row[1:]]
    some = sum(data.draw(st.sets(st.sampled_from(bits(entry.optional) or [M.STATE]))), M(0))
    attr, mask = step(*row, Anything(), some)
    assert not diagnose(*row, mask)
    assert mask == entry.required | M.STATE | some
    assert set(attr) == {name for bit in bits(mask) for name in FIELDS[bit]}
    assert attr["qp_state"] is row[2]


def test_a_step_refuses_optional_bits_that_the_row_does_not_have() -> None:
    with pytest.raises(StateError, match="move RC QP RTR->RTS: not allowed: PKEY_INDEX"):
        step(RC, RTR, RTS, Anything(), M.PKEY_INDEX)
    with pytest.raises(StateError, match="no such transition"):
        step(RC, RESET, RTR, Anything())


def test_a_step_says_all_the_values_that_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"^move RC QP RESET->INIT: give qp_access_flags, pkey_index as well$"):
        step(RC, RESET, INIT, SimpleNamespace(port_num=1))
    with pytest.raises(ValueError, match="give qp_access_flags, pkey_index, port_num as well"):
        step(RC, RESET, INIT, None)


def test_a_path_can_be_walked_from_reset_to_rts() -> None:
    ours, theirs = end(roce(gid("10.0.0.1"))), end(roce(gid("10.0.0.2")), qp_num=0x22, psn=0x222222)
    path = make_path(ours, theirs, agree(ours, theirs, Wish()), Options(), connector=True)
    attr, mask = step(RC, INIT, RTR, path)
    assert mask == M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
    assert attr == {
        "qp_state": RTR, "ah_attr": path.ah_attr, "path_mtu": 3, "dest_qp_num": 0x22, "rq_psn": 0x222222,
        "max_dest_rd_atomic": 1, "min_rnr_timer": 12,
    }  # fmt: skip
    attr, mask = step(RC, RTR, RTS, path)
    assert attr == {
        "qp_state": RTS, "sq_psn": 0x111111, "timeout": 14, "retry_cnt": 3, "rnr_retry": 7, "max_rd_atomic": 1,
    }  # fmt: skip
    attr, mask = step(RC, RESET, INIT, path)
    assert set(attr) == {"qp_state", "pkey_index", "port_num", "qp_access_flags"}


B8, B16, B24, B32 = (2**bits - 1 for bits in (8, 16, 24, 32))
#: what each field can mean, by the InfiniBand specification's widths and the sizes in struct ibv_qp_attr
LIMITS = {
    "path_mtu": (1, 5), "dest_qp_num": (1, B24), "rq_psn": (0, B24), "sq_psn": (0, B24), "qkey": (0, B32),
    "timeout": (0, 31), "alt_timeout": (0, 31), "retry_cnt": (0, 7), "rnr_retry": (0, 7), "min_rnr_timer": (0, 31),
    "max_rd_atomic": (0, B8), "max_dest_rd_atomic": (0, B8), "pkey_index": (0, B16), "alt_pkey_index": (0, B16),
    "port_num": (1, 254), "alt_port_num": (1, 254), "rate_limit": (0, B32), "qp_access_flags": (0, B32),
    "path_mig_state": (0, 2), "en_sqd_async_notify": (0, 1),
}  # fmt: skip
AH_LIMITS = {
    "port_num": (1, 254), "dlid": (0, B16), "sl": (0, 15), "src_path_bits": (0, 127), "static_rate": (0, B8),
    "is_global": (0, 1), "flow_label": (0, 2**20 - 1), "sgid_index": (0, B8), "hop_limit": (0, B8),
    "traffic_class": (0, B8),
}  # fmt: skip


def test_the_ranges_are_those_of_the_fields() -> None:
    assert {name: (least, greatest) for name, (least, greatest, _) in RANGES.items()} == LIMITS
    assert {name: (least, greatest) for name, (least, greatest, _) in AH_RANGES.items()} == AH_LIMITS


@pytest.mark.parametrize("name", ["ah_attr", "alt_ah_attr"])
@pytest.mark.parametrize("part", AH_LIMITS)
def test_a_value_out_of_range_inside_of_an_address_is_refused_by_name(name: str, part: str) -> None:
    least, greatest = AH_LIMITS[part]
    for value in (least, greatest):
        check_ranges({name: AhAttr(**{"port_num": 1, part: value})})
    for value in (least - 1, greatest + 1):
        with pytest.raises(ValueError, match=rf"^{name}\.{part} is {value}: give {least} to {greatest} "):
            check_ranges({name: AhAttr(**{"port_num": 1, part: value})})


@pytest.mark.parametrize("name", RANGES)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    least, greatest, meaning = RANGES[name]
    check_ranges({name: least})
    check_ranges({name: greatest})
    for value in (least - 1, greatest + 1):
        with pytest.raises(ValueError, match=f"^{name} is {value}: give {least} to {greatest} ") as caught:
            check_ranges({name: value})
        assert meaning in str(caught.value)


@pytest.mark.parametrize("bit", bits(TABLE[RC][INIT, RTR].required | TABLE[RC][RTR, RTS].required), ids=str)
def test_a_step_refuses_a_value_out_of_range(bit: QpAttrMask) -> None:
    fields = {name: RANGES[name][1] for names in FIELDS.values() for name in names if name in RANGES}
    for name in FIELDS[bit]:
        if name in RANGES:
            frm, to = (INIT, RTR) if bit & TABLE[RC][INIT, RTR].required else (RTR, RTS)
            values = SimpleNamespace(**fields | {name: RANGES[name][1] + 1}, ah_attr=None)
            with pytest.raises(ValueError, match=f"^{name} is "):
                step(RC, frm, to, values)


def test_values_that_are_no_integers_and_fields_without_a_range_pass() -> None:
    check_ranges({"ah_attr": object(), "qp_state": RTS, "cap": 10**9})
