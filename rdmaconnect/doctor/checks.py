"""All checks of one host, each a small function from a :class:`Host` to what it found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .checks_access import kernel, library, nodes
from .checks_device import choice, devices, ports
from .checks_limits import container, firewall, fork, memlock, netns, nofile
from .checks_network import arp
from .finding import Finding
from .host import Host

__all__ = ["CHECKS", "examine"]

CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    kernel, library, nodes, devices, ports, choice, memlock, nofile, netns, container, arp, firewall, fork,
)  # fmt: skip


def examine(host: Host) -> list[Finding]:
    """All that the checks find, in their order."""
    return [finding for check in CHECKS for finding in check(host)]
