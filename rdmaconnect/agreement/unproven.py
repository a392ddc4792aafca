"""Why nothing may arrive over a pair of GIDs, though both ends are ready: every cause that fits. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ..abi import GidType
from .endpoint import GidEntry

__all__ = ["between", "unproven"]

#: whether it may be so between two GIDs, and the words for it
_CAUSES: tuple[tuple[Callable[[GidEntry, GidEntry], bool], str], ...] = (
    (
        lambda mine, theirs: mine.gid == theirs.gid,
        "both hosts have the address {mine}, so that each means itself by it",
    ),
    (
        lambda mine, theirs: not mine.here,
        "{mine} is no address of this network namespace, so that the answers go to another one",
    ),
    (
        lambda mine, theirs: not theirs.here,
        "{theirs} is no address of the peer's network namespace, so that what is sent goes to another one",
    ),
    (
        lambda mine, theirs: mine.gid_type == GidType.ROCE_V2,
        "a firewall drops RoCE (UDP port 4791: `nft list ruleset` on both hosts)",
    ),
    (
        lambda mine, theirs: mine.gid_type == GidType.ROCE_V1,
        "something between drops RoCE v1 (EtherType 0x8915), as every router does",
    ),
    (
        lambda mine, theirs: mine.gid.is_ipv4,
        "another network device answers for one of the two addresses, as where a host has several in one subnet "
        "(arp_ignore, arp_announce and rp_filter: `rdmaconnect doctor` looks at them)",
    ),
)
_LAST = "the peer's queue pair is gone or expects another PSN"


def between(mine: GidEntry | None, theirs: GidEntry | None) -> str:
    """Two GIDs in words, with what tells them from others of their values; "" where LIDs are used."""
    if mine is None or theirs is None:
        return ""
    here, there = (f"{e.gid} ({', '.join(filter(None, [e.type_words, e.netdev]))})" for e in (mine, theirs))
    return f"{here} to {there}"


def unproven(mine: GidEntry | None, theirs: GidEntry | None) -> str:
    """Every cause that fits where nothing arrives.

    Args:
        mine, theirs: the GIDs of the path, both None where LIDs are used.
    """
    words = []
    if mine is not None and theirs is not None:
        shown = {"mine": mine.gid.address, "theirs": theirs.gid.address}
        words = [text.format(**shown) for fits, text in _CAUSES if fits(mine, theirs)]
    return f"Causes that fit: {'; '.join([*words, _LAST])}."
