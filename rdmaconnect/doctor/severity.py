"""What several checks say alike: how grave a thing is, sizes, remedies that depend on the place. Pure."""

from __future__ import annotations

from .finding import Verdict
from .host import Host
from .remedies import remedy

__all__ = ["grave", "memlock_fix", "size_words", "some_netdev"]


def grave(host: Host) -> Verdict:
    """How bad it is that something cannot be used: only a warning where something else can."""
    return Verdict.WARN if host.usable else Verdict.FAIL


def some_netdev(host: Host) -> str:
    """A network device that SoftRoCE could stand on."""
    fit = [n.name for n in host.netdevs.values() if n.up and n.name != "lo" and not n.name.startswith("ifb")]
    return fit[0] if fit else "eth0"


def memlock_fix(host: Host) -> str:
    """How the limit of locked memory is raised where this host is."""
    if host.kubernetes:
        return remedy("memlock pod")
    return remedy("memlock container") if host.container else remedy("memlock shell", "memlock service")


def size_words(number: int) -> str:
    """Bytes in words: ``8 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} bytes"
