"""Which pairs of ports and GIDs can carry traffic between two hosts, the best first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..abi import GidType, LinkLayer
from ..errors import PeerMismatch
from .endpoint import Gid, GidEntry, GidKey, PortAddress

__all__ = [
    "Addresses", "Candidate", "candidates", "common_pkey", "find_gid", "gid_words", "merit", "narrow", "needs_grh",
    "rank_pairs",
]  # fmt: skip

#: the addresses that the exchange goes over, as text: the connector's and the listener's; "" is one not known
Addresses = tuple[str, str]
_parse = lru_cache(1024)(Gid.parse)


def merit(pair: tuple[GidEntry, GidEntry], exchange: Addresses = ("", "")) -> tuple[int, ...]:
    """How well a pair of GIDs suits, the smaller the better; see :func:`rank_pairs`."""
    mine, theirs = pair
    over = all(exchange) and (mine.gid, theirs.gid) == (_parse(exchange[0]), _parse(exchange[1]))
    same = mine.gid.common_prefix(theirs.gid)
    return (
        # two hosts with one address do not reach each other by it; a host reaches itself
        int(same == 128 and not over) + (not mine.here) + (not theirs.here),
        -int(mine.gid_type == GidType.ROCE_V2),
        int(not over),
        int(mine.gid.is_link_local or theirs.gid.is_link_local),
        -(4 * (same - 96) if mine.gid.is_ipv4 else same),  # any two mapped IPv4 addresses share 96 bits
    )


def rank_pairs(
    connector: PortAddress, listener: PortAddress, exchange: Addresses = ("", "")
) -> list[tuple[GidEntry, GidEntry]]:
    """GID pairs that can carry traffic, the best first.

    A pair needs the same type and the same address family. Last come equal addresses on both hosts, and those of
    another network namespace. RoCE v2 comes before v1, then the pair of addresses that the exchange itself goes over,
    routable before link-local, the longer common prefix (the same subnet), and what the connector and then the
    listener names first.

    Args:
        connector, listener: the ports.
        exchange: the addresses that the exchange goes over.
    """

    pairs = [
        (a, b)
        for a in connector.gids
        for b in listener.gids
        if a.gid_type == b.gid_type and (a.gid_type == GidType.IB or _scope(a.gid) == _scope(b.gid))
    ]
    return sorted(pairs, key=lambda pair: merit(pair, exchange)) if len(pairs) > 1 else pairs


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


def candidates(
    here: Sequence[PortAddress], there: Sequence[PortAddress], exchange: Addresses = ("", "")
) -> list[Candidate]:
    """Every way between two hosts, the best first, in the order of :func:`rank_pairs`.

    Args:
        here: the connector's ports.
        there: the listener's ports.
        exchange: the addresses that the exchange goes over.
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
            found += [(merit((x.gids[0], y.gids[0]), exchange) if x.gids else (0,), Candidate(x, y)) for x, y in ways]
    return [way for _, way in sorted(found, key=lambda pair: pair[0])]


def narrow(port: PortAddress, key: GidKey | None) -> PortAddress:
    """The same port with only the GID that is meant, all of them if it is None.

    Raises:
        PeerMismatch: if the port does not have it.
    """
    if key is None:
        return port
    found = find_gid(port.gids, key)
    if found is None:
        raise PeerMismatch([f"GID {Gid(key.raw)} is not one of {port}: {gid_words(port.gids)}"])
    alike = tuple(entry for entry in port.gids if entry.gid == found.gid)
    return replace(port, gids=alike if key.gid_type is None else (found,))


def find_gid(gids: Iterable[GidEntry], key: GidKey, gid_index: int = -1) -> GidEntry | None:
    """The GID that is meant, wherever its slot is now; None if there is none of that value and type.

    Args:
        gids: the table.
        key: which; where several are alike, that of its network device.
        gid_index: the slot that it had: of those alike in all the one that is there still.
    """
    alike = [entry for entry in gids if entry.gid.raw == key.raw and key.gid_type in (None, entry.gid_type)]
    if len(alike) < 2:
        return alike[0] if alike else None
    return max(alike, key=lambda entry: (entry.netdev == key.netdev, entry.gid_index == gid_index))


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
