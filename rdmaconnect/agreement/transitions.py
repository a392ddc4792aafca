"""Which attributes ``ibv_modify_qp`` needs and allows, for each queue pair type and pair of states. Pure.

``TABLE[qp_type][frm, to]`` is a :class:`Row` of required and optional bits. The required columns are
those of ibv_modify_qp(3); the optional ones those of the kernel's ``qp_state_table``
(drivers/infiniband/core/verbs.c), as is the rule that ``IBV_QP_STATE`` is always allowed, that
``IBV_QP_CUR_STATE`` only where the queue pair can have moved by itself, and that ``IBV_QP_RATE_LIMIT`` is left to
the drivers (since Linux 7.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..abi import QpAttrMask, QpState, QpType
from ..errors import StateError, shown
from .ranges import AH_RANGES, RANGES, check

__all__ = [
    "DRIVERS",
    "FIELDS",
    "TABLE",
    "Change",
    "Diagnosis",
    "Row",
    "change",
    "check_ranges",
    "diagnose",
    "due",
    "mask_of",
    "step",
]

M = QpAttrMask
NONE = M(0)
RESET, INIT, RTR, RTS, SQD, SQE, ERR = (
    QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE, QpState.ERR,
)  # fmt: skip
RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
RAW, XSEND, XRECV = QpType.RAW_PACKET, QpType.XRC_SEND, QpType.XRC_RECV

#: bits that no table speaks of: each driver says for which types and steps it takes them
DRIVERS = M.RATE_LIMIT

#: bit of the mask -> the fields of ``ibv_qp_attr`` that it makes the driver read
FIELDS: dict[QpAttrMask, tuple[str, ...]] = {
    M.STATE: ("qp_state",),
    M.CUR_STATE: ("cur_qp_state",),
    M.EN_SQD_ASYNC_NOTIFY: ("en_sqd_async_notify",),
    M.ACCESS_FLAGS: ("qp_access_flags",),
    M.PKEY_INDEX: ("pkey_index",),
    M.PORT: ("port_num",),
    M.QKEY: ("qkey",),
    M.AV: ("ah_attr",),
    M.PATH_MTU: ("path_mtu",),
    M.TIMEOUT: ("timeout",),
    M.RETRY_CNT: ("retry_cnt",),
    M.RNR_RETRY: ("rnr_retry",),
    M.RQ_PSN: ("rq_psn",),
    M.MAX_QP_RD_ATOMIC: ("max_rd_atomic",),
    M.ALT_PATH: ("alt_ah_attr", "alt_pkey_index", "alt_port_num", "alt_timeout"),
    M.MIN_RNR_TIMER: ("min_rnr_timer",),
    M.SQ_PSN: ("sq_psn",),
    M.MAX_DEST_RD_ATOMIC: ("max_dest_rd_atomic",),
    M.PATH_MIG_STATE: ("path_mig_state",),
    M.CAP: ("cap",),
    M.DEST_QPN: ("dest_qp_num",),
    M.RATE_LIMIT: ("rate_limit",),
}

#: field of ``ibv_qp_attr`` -> the bit that it goes with
_BIT_OF = {name: bit for bit, names in FIELDS.items() for name in names}


@dataclass(frozen=True, slots=True)
class Row:
    """One transition: the bits that must be given and the bits that may be."""

    required: QpAttrMask
    optional: QpAttrMask


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """How a mask differs from its row; both empty when the mask is right."""

    missing: QpAttrMask
    not_allowed: QpAttrMask

    def __bool__(self) -> bool:
        return bool(self.missing | self.not_allowed)

    def __str__(self) -> str:
        parts = [("missing", self.missing), ("not allowed", self.not_allowed)]
        return "; ".join(f"{word}: {bits}" for word, bits in parts if bits) or "nothing wrong"


_ID = "PKEY_INDEX PORT ACCESS_FLAGS"
_AV = "AV PATH_MTU DEST_QPN RQ_PSN"
_RESPONDER = "MAX_DEST_RD_ATOMIC MIN_RNR_TIMER"
_REQUESTER = "TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC"
_LIVE = "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE"
_DRAINED = "AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE"

# (frm, to) -> qp_type -> (required, optional); a type that is not named needs and allows nothing more.
_ROWS: dict[tuple[QpState, QpState], dict[QpType, tuple[str, str]]] = {
    (RESET, INIT): {
        RC: (_ID, ""), UC: (_ID, ""), XSEND: (_ID, ""), XRECV: (_ID, ""),
        UD: ("PKEY_INDEX PORT QKEY", ""), RAW: ("PORT", ""),
    },
    (INIT, INIT): {
        RC: ("", _ID), UC: ("", _ID), XSEND: ("", _ID), XRECV: ("", _ID),
        UD: ("", "PKEY_INDEX PORT QKEY"),
    },
    (INIT, RTR): {
        RC: (f"{_AV} {_RESPONDER}", "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        UC: (_AV, "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        XSEND: (_AV, "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        XRECV: (f"{_AV} {_RESPONDER}", "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        UD: ("", "PKEY_INDEX QKEY"),
    },
    (RTR, RTS): {
        RC: (_REQUESTER, f"{_LIVE} MIN_RNR_TIMER"),
        UC: ("SQ_PSN", _LIVE),
        XSEND: (_REQUESTER, _LIVE),
        XRECV: ("TIMEOUT SQ_PSN", f"{_LIVE} MIN_RNR_TIMER"),
        UD: ("SQ_PSN", "CUR_STATE QKEY"),
    },
    (RTS, RTS): {
        RC: ("", f"{_LIVE} MIN_RNR_TIMER"), UC: ("", _LIVE), XSEND: ("", _LIVE),
        XRECV: ("", f"{_LIVE} MIN_RNR_TIMER"), UD: ("", "CUR_STATE QKEY"),
    },
    (RTS, SQD): dict.fromkeys((RC, UC, UD, XSEND, XRECV), ("", "EN_SQD_ASYNC_NOTIFY")),
    (SQD, RTS): {
        RC: ("", f"{_LIVE} MIN_RNR_TIMER"), UC: ("", _LIVE), XSEND: ("", _LIVE),
        XRECV: ("", f"{_LIVE} MIN_RNR_TIMER"), UD: ("", "CUR_STATE QKEY"),
    },
    (SQD, SQD): {
        RC: ("", f"{_DRAINED} PORT TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC {_RESPONDER}"),
        UC: ("", _DRAINED),
        XSEND: ("", f"{_DRAINED} PORT TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC"),
        XRECV: ("", f"{_DRAINED} PORT TIMEOUT {_RESPONDER}"),
        UD: ("", "PKEY_INDEX QKEY"),
    },
    (SQE, RTS): {UD: ("", "CUR_STATE QKEY"), UC: ("", "CUR_STATE ACCESS_FLAGS")},
    **{(frm, RESET): {} for frm in (RESET, INIT, RTR, RTS, SQD, SQE, ERR)},
    **{(frm, ERR): {} for frm in (INIT, RTR, RTS, SQD, SQE, ERR)},
}  # fmt: skip


def _bits(names: str) -> QpAttrMask:
    mask = QpAttrMask(0)
    for name in names.split():
        mask |= QpAttrMask[name]
    return mask


def _row(frm: QpState, to: QpState, required: str, optional: str) -> Row:
    # Without IBV_QP_STATE the kernel takes the state to stay as it is, so there it is not needed.
    stays = frm == to
    return Row(
        _bits(required) | (NONE if stays else M.STATE),
        _bits(optional) | (M.STATE if stays else NONE),
    )


TABLE: dict[QpType, dict[tuple[QpState, QpState], Row]] = {
    qp_type: {(frm, to): _row(frm, to, *by_type.get(qp_type, ("", ""))) for (frm, to), by_type in _ROWS.items()}
    for qp_type in (RC, UC, UD, RAW, XSEND, XRECV)
}


def _lookup(qp_type: QpType, frm: QpState, to: QpState) -> Row:
    rows = TABLE.get(qp_type)
    if rows is None:
        raise StateError(f"move a QP of type {qp_type}: no table for it. There is one for {_names(TABLE)}.")
    row = rows.get((frm, to))
    if row is None:
        ways = _names(b for a, b in rows if a == frm) or "none"
        raise StateError(f"move {qp_type} QP {frm}->{to}: no such transition. From {frm} the ways are {ways}.")
    return row


def _names(values: object) -> str:
    return ", ".join(str(v) for v in values)  # type: ignore[attr-defined]


def diagnose(qp_type: QpType, frm: QpState, to: QpState, mask: int) -> Diagnosis:
    """How ``mask`` differs from the table's row.

    Args:
        qp_type: RC, UC, UD, RAW_PACKET, XRC_SEND or XRC_RECV.
        frm: the state the queue pair is in.
        to: the state it is to enter; the same as ``frm`` if the mask has no ``STATE`` bit.
        mask: the bits that would be given to ``ibv_modify_qp``.

    Returns:
        The bits missing and those not allowed; false if there are none.

    Raises:
        StateError: if the table has no such transition or no such type.

    Source: kernel ``ib_modify_qp_is_ok``, ibv_modify_qp(3).
    """
    row = _lookup(qp_type, frm, to)
    # integers, as the complement of an enum's flags lacks the bits that the enum does not name
    required, allowed = int(row.required), int(row.required | row.optional | M.STATE | DRIVERS)
    return Diagnosis(QpAttrMask(required & ~int(mask)), QpAttrMask(int(mask) & ~allowed))


def check_ranges(values: Mapping[str, object]) -> None:
    """Refuse values of ``ibv_qp_attr`` that are outside of what the field can mean.

    Args:
        values: field name -> value; fields without a range are passed over.

    Raises:
        ValueError: naming the field, the value seen and the range.
    """
    for name, value in values.items():
        if name in RANGES:
            check(name, value, RANGES[name])
        elif name in ("ah_attr", "alt_ah_attr"):
            for part, span in AH_RANGES.items():
                check(f"{name}.{part}", getattr(value, part, None), span)


def mask_of(names: Iterable[str]) -> QpAttrMask:
    """The bits of the mask that fields of ``ibv_qp_attr`` go with.

    Args:
        names: the fields that are given; the four of ``ALT_PATH`` only together.

    Raises:
        ValueError: a name that is not a field that can be set, or a bit with only some of its fields.
    """
    given, mask = set(names), NONE
    for name in given:
        if name not in _BIT_OF:
            raise ValueError(f"{shown(name)} is no attribute that can be set: they are {', '.join(_BIT_OF)}")
        mask |= _BIT_OF[name]
    _check_fields(given, mask)
    return mask


def _check_fields(given: set[str], mask: QpAttrMask) -> None:
    lacking = [name for bit, names in FIELDS.items() if bit & mask for name in names if name not in given]
    if lacking:
        raise ValueError(f"the mask {mask} needs {', '.join(lacking)} too: without a value it would be 0")


@dataclass(frozen=True, slots=True)
class Change:
    """What a call of ``ibv_modify_qp`` with explicit attributes would do.

    Args:
        frm: the state it starts from: ``cur_qp_state`` if given, else the one that the queue pair is in.
        to: the state it ends in.
        mask: the bits.
        wrong: how the mask differs from the table's row.
    """

    frm: QpState
    to: QpState
    mask: QpAttrMask
    wrong: Diagnosis


def change(qp_type: QpType, state: QpState, attr: Mapping[str, Any], mask: int | None = None) -> Change:
    """Look at explicit attributes before the kernel is asked.

    Args:
        qp_type: the queue pair's type.
        state: the state it is in.
        attr: field of ``ibv_qp_attr`` -> value.
        mask: the bits that are meant; by default those of the fields that are given.

    Returns:
        The change; it can succeed only if ``wrong`` is false.

    Raises:
        StateError: the table has no such transition or type.
        ValueError: an unknown field, a bit without its field, or a value outside of its range.

    Source: ibv_modify_qp(3), kernel ``ib_modify_qp_is_ok``.
    """
    bits = mask_of(attr) if mask is None else QpAttrMask(mask)
    _check_fields(set(attr), bits)
    frm = QpState(attr["cur_qp_state"]) if bits & M.CUR_STATE else state
    to = QpState(attr["qp_state"]) if bits & M.STATE else frm
    wrong = diagnose(qp_type, frm, to, bits)
    check_ranges(attr)
    return Change(frm, to, bits, wrong)


@lru_cache(maxsize=256)
def due(qp_type: QpType, frm: QpState, to: QpState, optional: QpAttrMask = NONE) -> tuple[tuple[str, ...], QpAttrMask]:
    """The fields that a step needs besides the state, and the mask of all that it gives; arguments as :func:`step`.

    Raises:
        StateError: as :func:`step`.
    """
    mask = _lookup(qp_type, frm, to).required | M.STATE | optional
    wrong = diagnose(qp_type, frm, to, mask)
    if wrong:
        raise StateError(f"move {qp_type} QP {frm}->{to}: {wrong}.")
    return tuple(name for bit, names in FIELDS.items() if bit & mask and bit is not M.STATE for name in names), mask


def step(
    qp_type: QpType, frm: QpState, to: QpState, values: object, optional: QpAttrMask = NONE
) -> tuple[dict[str, object], QpAttrMask]:
    """What to hand to ``ibv_modify_qp`` for one transition.

    Args:
        qp_type: the queue pair's type.
        frm: the state it is in.
        to: the state it is to enter.
        values: an object with an attribute for each field that the row needs, named as in ``ibv_qp_attr``.
        optional: bits of the row's optional column, or of :data:`DRIVERS`, to give as well.

    Returns:
        (field -> value, mask): the row's required bits, ``STATE`` and ``optional``.

    Raises:
        StateError: no such transition, or ``optional`` has bits that the row does not allow.
        ValueError: a value is missing, or outside of its range.

    Source: ibv_modify_qp(3), ``struct ibv_qp_attr``.
    """
    names, mask = due(qp_type, frm, to, optional)
    lacking = [name for name in names if not hasattr(values, name)]
    if lacking:
        raise ValueError(f"move {qp_type} QP {frm}->{to}: give {', '.join(lacking)} as well")
    attr: dict[str, object] = {"qp_state": to, **{name: getattr(values, name) for name in names}}
    check_ranges(attr)
    return attr, mask
