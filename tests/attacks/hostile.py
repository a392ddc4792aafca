"""Messages of a peer that is written by hand, as maps, so that nothing in them need be valid."""

from __future__ import annotations

import ipaddress
import os
from typing import Any

import msgpack

__all__ = ["hello", "message", "pack", "port", "reply"]


def port(address: str = "127.0.0.1") -> dict[str, Any]:
    """A port on RoCE v2 with one GID."""
    gid = bytes(10) + b"\xff\xff" + ipaddress.ip_address(address).packed
    return {
        "dev": "h0", "num": 1, "ll": 2, "lid": 0, "mtu": 3, "grh": False, "pkeys": [0xFFFF], "ord": 16, "ird": 16,
        "gids": [[gid, 2, 0, "eth0"]],
    }  # fmt: skip


def hello(ident: bytes | None = None, qps: int = 1, address: str = "127.0.0.1", **fields: Any) -> dict[str, Any]:
    """A hello as the first release sends it."""
    return {
        "v": 1, "t": "hello", "id": os.urandom(16) if ident is None else ident, "qpt": 2,
        "qps": [[0x900000 + i, 7, 0] for i in range(qps)], "port": port(address), "rsz": 4096, "mem": {}, "data": b"",
        "wish": {"mtu": 3, "sl": 0, "tc": 0, "fl": 0, "pkey": None, "probe": False},
        "prev": None, "want": None, "meet": False,
    } | fields  # fmt: skip


def reply(asked: dict[str, Any], address: str = "127.0.0.1", **fields: Any) -> dict[str, Any]:
    """A reply of the first release to a hello."""
    here = port(address)
    return {
        "v": 1, "t": "reply", "id": asked["id"], "qpt": asked["qpt"],
        "qps": [[0xA00000 + i, 9, qkey] for i, (_, _, qkey) in enumerate(asked["qps"])],
        "port": here, "rsz": 4096, "mem": {}, "data": b"", "ports": [here],
        "agree": {
            "cg": asked["port"]["gids"][0], "lg": here["gids"][0], "mtu": 3, "sl": 0, "tc": 0, "fl": 0, "pkey": 0x7FFF,
        },
    } | fields  # fmt: skip


def message(kind: str, ident: bytes, **fields: Any) -> bytes:
    """One of the short ones."""
    return pack({"v": 1, "t": kind, "id": ident} | fields)


def pack(body: Any) -> bytes:
    """Its bytes."""
    packed: bytes = msgpack.packb(body)
    return packed
