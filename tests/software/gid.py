"""GIDs as tests write them."""

from __future__ import annotations

from functools import lru_cache

from rdmaconnect.agreement.endpoint import Gid


@lru_cache(4096)
def raw_gid(gid: str | bytes | Gid) -> bytes:
    """The 16 bytes of a GID: of an address as text, of bytes, or of a ``Gid``."""
    if isinstance(gid, bytes):
        return gid
    return (gid if isinstance(gid, Gid) else Gid.parse(gid)).raw


@lru_cache(4096)
def is_multicast(raw: bytes) -> bool:
    """ff00::/8, or a mapped 224.0.0.0/4."""
    return Gid(raw).address.is_multicast
