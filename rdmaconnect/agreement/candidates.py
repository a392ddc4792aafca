"""Which pairs of ports and GIDs can carry traffic between two hosts, the best first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..abi import GidType, LinkLayer
from ..errors import PeerMismatch
from .endpoint import Gid, GidEntry, PortAddress

__all__ = ["Candidate", "candidates", "common_pkey", "gid_words", "merit", "narrow", "needs_grh", "rank_pairs"]


def merit(pair: tuple[GidEntry, GidEntry]) -> tuple[int, ...]:
    """The smaller the better."""
    mine, theirs = pair
    local_only = mine.gid.is_link_local or theirs.gid.is_link_local
    same = mine.gid.common_prefix(theirs.gid)
    return (
        -int(mine.gid_type == GidType.ROCE_V2),
        int(local_only),
        -(4 * (same - 96) if mine.gid.is_ipv4 else same),  # any two mapped IPv4 addresses share 96 bits
        mine.gid_index,
        theirs.gid_index,
    )


def rank_pairs(connector: PortAddress, listener: PortAddress) -> list[tuple[GidEntry, GidEntry]]:
    """GID pairs that can carry traffic, the best first.

    A pair needs the same type and the same address family. RoCE v2 comes before v1, routable before
    link-local, then the longer common prefix (the same subnet), then the lower slots.
    """

    pairs = [
        (a, b)
        for a in connector.gids
        for b in listener.gids
        if a.gid_type == b.gid_type and (a.gid_type == GidType.IB or _scope(a.gid) == _scope(b.gid))
    ]
    return sorted(pairs, key=merit)


def _scope(gid: Gid) -> tuple[bool, bool, bool]:
    """RoCE addresses reach each other only within one family and scope; on InfiniBand fe80:: is a plain prefix."""
    return gid.is_ipv4, gid.is_link_local, gid.is_loopback


def common_pkey(connector: PortAddress, listener: PortAddress, wish: int | None) -> int | None:
    """A partition both are in, one of them at least as a full member (bit 15), by its 15 bits."""
    theirs = [p for p in listener.pkeys if p & 0x7FFF]
    for mine in connector.pkeys:
        key = mine & 0x7FFF
        if not key or (wish is not None and key != wish & 0x7FFF):
            continue
        if any(key == other & 0x7FFF and (mine | other) & 0x8000 for other in theirs):
            return key
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way from one host to another: two ports, each with the one GID to use, or none where LIDs are used."""

    here: PortAddress
    there: PortAddress

    def __str__(self) -> str:
        return " to ".join(
            f"{port} {gid_words(port.gids)}" if port.gids else str(port) for port in (self.here, self.there)
        )


def candidates(here: Sequence[PortAddress], there: Sequence[PortAddress]) -> list[Candidate]:
    """Every way between two hosts, the best first, in the order of :func:`rank_pairs`.

    Args:
        here: the connector's ports.
        there: the listener's ports.
    """
    found = []
    for a in here:
        for b in there:
            if a.link_layer != b.link_layer:
                continue
            if needs_grh(a, b):
                pairs = [(a.only(x), b.only(y)) for x, y in rank_pairs(a, b)]
                ways = [(x, y) for x, y in pairs if needs_grh(x, y)]
            else:
                ways = [(replace(a, gids=()), replace(b, gids=()))]
            found += [(merit((x.gids[0], y.gids[0])) if x.gids else (0,), Candidate(x, y)) for x, y in ways]
    return [way for _, way in sorted(found, key=lambda pair: pair[0])]


def narrow(port: PortAddress, gid: bytes | None) -> PortAddress:
    """The same port with only the GID of that value, all of them if it is None.

    Raises:
        PeerMismatch: if the port does not have it.
    """
    if gid is None:
        return port
    gids = tuple(entry for entry in port.gids if entry.gid.raw == gid)
    if not gids:
        raise PeerMismatch([f"GID {Gid(gid)} is not one of {port}: {gid_words(port.gids)}"])
    return replace(port, gids=gids)


def needs_grh(here: PortAddress, there: PortAddress) -> bool:
    """Ethernet always; InfiniBand if a port demands it or the subnets (first 64 bits) differ."""
    if LinkLayer.ETHERNET in (here.link_layer, there.link_layer) or here.grh_required or there.grh_required:
        return True
    if here.gids and there.gids:
        return here.gids[0].gid.raw[:8] != there.gids[0].gid.raw[:8]
    return False


def gid_words(gids: tuple[GidEntry, ...]) -> str:
    """Entries, or none, for people."""
    return ", ".join(map(str, gids)) or "none"
