"""What the attributes of a queue pair and of a path can be. Pure."""

from __future__ import annotations

from typing import TypeAlias

from ..errors import shown

__all__ = ["AH_RANGES", "RANGES", "Span", "check", "within"]

#: the least, the greatest, and what the number means
Span: TypeAlias = tuple[int, int, str]

#: field of ``ibv_qp_attr`` -> (least, greatest, what it is). Drivers accept some values outside silently.
RANGES: dict[str, Span] = {
    "path_mtu": (1, 5, "an ibv_mtu code: 1 is 256 bytes, 5 is 4096"),
    "dest_qp_num": (1, 0xFFFFFF, "24 bits, and 0 is the subnet manager's"),
    "rq_psn": (0, 0xFFFFFF, "24 bits"),
    "sq_psn": (0, 0xFFFFFF, "24 bits"),
    "qkey": (0, 0xFFFFFFFF, "32 bits"),
    "timeout": (0, 31, "the code of 4.096 us x 2^timeout; 0 waits for ever"),
    "alt_timeout": (0, 31, "the code of 4.096 us x 2^timeout; 0 waits for ever"),
    "retry_cnt": (0, 7, "3 bits"),
    "rnr_retry": (0, 7, "3 bits; 7 retries for ever"),
    "min_rnr_timer": (0, 31, "a code; 0 means 655.36 ms, 12 means 0.64 ms"),
    "max_rd_atomic": (0, 255, "8 bits"),
    "max_dest_rd_atomic": (0, 255, "8 bits"),
    "pkey_index": (0, 0xFFFF, "16 bits"),
    "alt_pkey_index": (0, 0xFFFF, "16 bits"),
    "port_num": (1, 254, "ports count from 1"),
    "alt_port_num": (1, 254, "ports count from 1"),
    "rate_limit": (0, 0xFFFFFFFF, "kbps, 32 bits"),
    "qp_access_flags": (0, 0xFFFFFFFF, "AccessFlags, 32 bits"),
    "path_mig_state": (0, 2, "an ibv_mig_state: MIGRATED, REARM or ARMED"),
    "en_sqd_async_notify": (0, 1, "0 or 1"),
}

#: the same for the fields of ``ah_attr`` and ``alt_ah_attr``, named as in :class:`path.AhAttr`
AH_RANGES: dict[str, Span] = {
    "port_num": (1, 254, "ports count from 1"),
    "dlid": (0, 0xFFFF, "16 bits"),
    "sl": (0, 15, "4 bits"),
    "src_path_bits": (0, 127, "7 bits"),
    "static_rate": (0, 255, "an ibv_rate code, 8 bits"),
    "is_global": (0, 1, "0 or 1"),
    "flow_label": (0, 0xFFFFF, "20 bits"),
    "sgid_index": (0, 255, "8 bits"),
    "hop_limit": (0, 255, "8 bits"),
    "traffic_class": (0, 255, "8 bits"),
}


def check(name: str, value: object, span: Span) -> None:
    """Refuse a number that is out of its range; what is no number is passed over.

    Raises:
        ValueError: naming the value seen and the range.
    """
    least, greatest, meaning = span
    if isinstance(value, int) and not least <= value <= greatest:
        raise ValueError(f"{name} is {value:d}: give {least} to {greatest}{f' ({meaning})' if meaning else ''}")


def within(name: str, value: object, least: int, greatest: int, meaning: str = "") -> None:
    """Refuse what is no integer, and one that is out of its range.

    Raises:
        TypeError, ValueError: naming the value seen and what is wanted.
    """
    if type(value) is int and least <= value <= greatest:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {shown(value)}: give an integer")
    check(name, value, (least, greatest, meaning))
