"""Explicit attributes of ibv_modify_qp: the mask they stand for, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.abi import QpAttrMask, QpState, QpType, bits
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.agreement.ranges import AH_RANGES, RANGES
from rdmaconnect.agreement.transitions import FIELDS, TABLE, change, check_ranges, mask_of
from rdmaconnect.errors import StateError

M, S = QpAttrMask, QpState
RC, UD = QpType.RC, QpType.UD


@given(st.sets(st.sampled_from(list(QpAttrMask))))
def test_fields_and_mask_stand_for_one_another(some: set[QpAttrMask]) -> None:
    assert mask_of([name for bit in some for name in FIELDS[bit]]) == sum(some, M(0))


@given(st.integers(1, 14))
def test_an_alternate_path_has_all_of_its_fields(chosen: int) -> None:
    fields = FIELDS[M.ALT_PATH]
    given_ones = [name for i, name in enumerate(fields) if chosen >> i & 1]
    lacking = ", ".join(name for name in fields if name not in given_ones)
    with pytest.raises(ValueError, match=f"^the mask ALT_PATH needs {lacking} too: without a value it would be 0$"):
        mask_of(given_ones)


@pytest.mark.parametrize("name", ["sq_draining", "state", "", "ibv_qp_state"])
def test_what_is_no_attribute_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"^'{name}' is no attribute that can be set: they are qp_state, cur_qp_state"):
        mask_of([name])


def anything(mask: QpAttrMask) -> dict[str, Any]:
    return {name: RANGES[name][0] if name in RANGES else 0 for bit in bits(mask) for name in FIELDS[bit]}


@pytest.mark.parametrize("row", [(t, *way) for t, rows in TABLE.items() for way in rows], ids=str)
def test_a_row_s_required_bits_are_a_right_change(row: tuple[QpType, QpState, QpState]) -> None:
    qp_type, frm, to = row
    required = TABLE[qp_type][frm, to].required
    found = change(qp_type, frm, {**anything(required), "qp_state": to})
    assert (found.frm, found.to, found.mask) == (frm, to, required | M.STATE)
    assert not found.wrong


def test_without_a_state_it_stays_where_it_is() -> None:
    found = change(RC, S.RTS, {"min_rnr_timer": 5})
    assert (found.frm, found.to, found.mask, bool(found.wrong)) == (S.RTS, S.RTS, M.MIN_RNR_TIMER, False)
    assert change(RC, S.RTS, {"pkey_index": 0}).wrong.not_allowed == M.PKEY_INDEX
    with pytest.raises(StateError, match="RC QP RTR->RTR: no such transition"):
        change(RC, S.RTR, {"min_rnr_timer": 5})


def test_the_claimed_state_counts() -> None:
    found = change(UD, S.RTS, {"qp_state": S.RTS, "cur_qp_state": S.SQE})
    assert (found.frm, found.to, bool(found.wrong)) == (S.SQE, S.RTS, False)
    assert change(UD, S.RTS, {"qp_state": S.ERR, "cur_qp_state": S.SQE}).wrong.not_allowed == M.CUR_STATE


def test_a_given_mask_says_what_is_meant() -> None:
    attr = {"min_rnr_timer": 5, "pkey_index": 0}
    assert change(RC, S.RTS, attr, M.MIN_RNR_TIMER).mask == M.MIN_RNR_TIMER
    assert not change(RC, S.RTS, attr, M.MIN_RNR_TIMER).wrong
    with pytest.raises(ValueError, match="the mask TIMEOUT needs timeout too"):
        change(RC, S.SQD, attr, M.TIMEOUT)


@pytest.mark.parametrize("state", [7, 99])
def test_a_state_that_there_is_not_is_refused(state: int) -> None:
    with pytest.raises(StateError, match="no such transition"):
        change(RC, S.RTS, {"qp_state": state})


@pytest.mark.parametrize("holder", ["ah_attr", "alt_ah_attr"])
@pytest.mark.parametrize("field", AH_RANGES)
def test_the_fields_of_a_path_have_their_ranges(holder: str, field: str) -> None:
    least, greatest, _ = AH_RANGES[field]
    for value in (least, greatest):
        check_ranges({holder: AhAttr(**{"port_num": 1, field: value})})
    for value in (least - 1, greatest + 1):
        with pytest.raises(ValueError, match=rf"^{holder}\.{field} is {value}: give {least} to {greatest} \("):
            check_ranges({holder: AhAttr(**{"port_num": 1, field: value})})
