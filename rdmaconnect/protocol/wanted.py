"""How a hello names the pair of ports that it wants."""

from __future__ import annotations

from typing import Any

from ..abi import GidType
from ..agreement.endpoint import GidKey
from .messages import Target
from .reading import int_of, optional_bytes, row_of, text_of

__all__ = ["put_kinds", "put_target", "take_target"]


def put_target(target: Target | None) -> list[Any] | None:
    """A hello's ``want``."""
    if target is None:
        return None
    gids = [None if key is None else key.raw for key in (target.connector_gid, target.listener_gid)]
    return [target.device, target.port_num, *gids]


def put_kinds(target: Target | None) -> list[Any]:
    """What tells the GIDs of a target from others of the same value, if it is known of both."""
    keys = (target.connector_gid, target.listener_gid) if target is not None else ()
    rows = [[int(key.gid_type), key.netdev] for key in keys if key is not None and key.gid_type is not None]
    return rows if len(rows) == 2 else []


def take_target(value: Any, kinds: list[Any]) -> Target | None:
    """A hello's ``want``, with its ``kinds``."""
    if value is None:
        return None
    device, port_num = row_of(value, str, int)
    gids = [optional_bytes({"gid": gid}, "gid", 16) for gid in value[2:4]]
    if len(gids) < 2:
        raise ValueError("want has fewer than 4 values")
    rows = [row_of(row, int, str) for row in kinds]
    if not rows or None in gids:  # they are of two GIDs
        rows = [[None, ""]] * 2
    keys = [
        None if raw is None else GidKey(raw, None if kind is None else GidType(kind), text_of({"n": name}, "n", 64))
        for raw, (kind, name) in zip(gids, rows, strict=True)
    ]
    return Target(text_of({"dev": device}, "dev", 64), int_of({"num": port_num}, "num", 254, 1), *keys)
