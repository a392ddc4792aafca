"""Checks of what the network devices below do to RoCE: who answers ARP for whom. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from .finding import Finding, Verdict
from .host import Host, Netdev
from .remedies import remedy

__all__ = ["arp"]


class Setting(NamedTuple):
    """A setting of network devices: the values that let two in one subnet stand in for each other, and the remedy.

    Attributes:
        name: below /proc/sys/net/ipv4/conf.
        bad: values.
        words: what they do.
        better: the value that mends it.
    """

    name: str
    bad: tuple[int, ...]
    words: str
    better: int


SETTINGS = (
    Setting("arp_ignore", (0,), "each answers ARP for the other's address", 1),
    Setting("arp_announce", (0, 1), "each asks with the other's address", 2),
    Setting("rp_filter", (1,), "what comes to the one that the route does not lead to is dropped", 2),
)


def arp(host: Host) -> Iterator[Finding]:
    """Where two network devices are in one subnet, and one carries RoCE: whether packets come to the right one."""
    carry = {entry.netdev for port in host.active for entry in port.gids if entry.here}
    for one, other in combinations(host.netdevs.values(), 2):
        subnet = _common_subnet(one, other)
        if subnet and carry & {one.name, other.name}:
            yield _judge(one, other, subnet)


def _common_subnet(one: Netdev, other: Netdev) -> str:
    """In words; "" if there is none."""
    pairs = ((a.network, b.network) for a in one.addresses for b in other.addresses)
    return next((str(max(a, b, key=lambda net: net.prefixlen)) for a, b in pairs if a.overlaps(b)), "")


def _judge(one: Netdev, other: Netdev, subnet: str) -> Finding:
    names = f"{one.name} and {other.name} are in one subnet ({subnet})"
    seen = ((each, {getattr(one, each.name), getattr(other, each.name)} & {*each.bad}) for each in SETTINGS)
    wrong = [(each, min(values)) for each, values in seen if values]
    if not wrong:
        return Finding("arp", Verdict.OK, f"{names}, and each answers for its own address alone.")
    why = "; ".join(f"{each.name} {value}: {each.words}" for each, value in wrong)
    fix = remedy("arp", settings=" ".join(f"net.ipv4.conf.all.{each.name}={each.better}" for each, _ in wrong))
    return Finding("arp", Verdict.WARN, f"{names}; {why}.", fix)
