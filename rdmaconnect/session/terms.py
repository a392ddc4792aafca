"""What a caller asked for, checked before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..abi import QpType
from ..agreement.endpoint import Options
from ..exchange.curve import Keys, keys_for
from ..protocol.codec import MAX_QPS, check_names

__all__ = ["Terms", "check_count", "make_terms", "parse_qp_type"]


@dataclass(frozen=True)
class Terms:
    """What a caller asked for, checked."""

    qp_type: QpType
    options: Options
    regions: Mapping[str, Any] = field(default_factory=dict)
    private_data: bytes = b""
    keys: Keys | None = field(default=None, repr=False)


def make_terms(
    qp_type: str | QpType,
    options: Mapping[str, Any],
    regions: Mapping[str, Any] | None,
    private_data: bytes,
    *,
    listens: bool,
    secret: str | bytes | None,
    key: str | None,
    peer_key: str | None,
) -> Terms:
    """Check what a caller asked for.

    Raises:
        ValueError, TypeError: naming what cannot be meant.
    """
    kind = parse_qp_type(qp_type)
    known = Options.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: there is no such option. The options are {', '.join(known)}")
    data = bytes(private_data)
    if len(data) > 4096:
        raise ValueError(f"private_data is {len(data)} bytes long: give at most 4096")
    check_names(regions or {})
    keys = keys_for(listens=listens, secret=secret, key=key, peer=peer_key)
    return Terms(kind, Options(**options), dict(regions or {}), data, keys)


def parse_qp_type(qp_type: str | QpType) -> QpType:
    """RC, UC or UD, by name or value.

    Raises:
        ValueError: another type.
    """
    connectable = (QpType.RC, QpType.UC, QpType.UD)
    try:
        kind = QpType[qp_type.upper()] if isinstance(qp_type, str) else QpType(qp_type)
    except KeyError:
        kind = None
    if kind in (QpType.RAW_PACKET, QpType.XRC_SEND, QpType.XRC_RECV):
        raise ValueError(
            f"qp_type is {kind}: it has no two ends to connect by this exchange; "
            "RAW_PACKET needs a device that lets raw Ethernet through, XRC one with XRC domains. Give RC, UC or UD"
        )
    if kind not in connectable:
        raise ValueError(f"qp_type is {qp_type!r}: give 'RC', 'UC' or 'UD'")
    return kind


# ---- the fronts


def check_count(count: int | None) -> int:
    """How many queue pairs; 1 for None.

    Raises:
        ValueError: not from 1 to 4096.
    """
    if count is not None and not 1 <= count <= MAX_QPS:
        raise ValueError(f"count is {count}: give 1 to {MAX_QPS}")
    return count or 1
