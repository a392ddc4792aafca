"""Checks of limits and surroundings: memory, files, namespaces, containers, packet filters, fork. Pure."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from ..agreement.options import Options
from ..exchange.url import DEFAULT_PORT
from .finding import Finding, Verdict
from .host import Host
from .remedies import remedy
from .severity import memlock_fix, size_words

__all__ = ["container", "firewall", "fork", "memlock", "netns", "nofile"]

OK, INFO, WARN, FAIL = Verdict.OK, Verdict.INFO, Verdict.WARN, Verdict.FAIL
#: descriptors that a connection takes at most: ZeroMQ's context and channel
ZMQ_FDS = 16
#: and the device's: 2 for the context, 1 for the completion channel
DEVICE_FDS = 3


def need() -> int:
    """Bytes that one connection locks for its receives, with the default options."""
    sizes = Options().sizes()
    return sizes.recv_depth * sizes.recv_size


def memlock(host: Host) -> Iterator[Finding]:
    """The limit of locked memory, against the need."""
    limits, measured = host.limits, [t.pinned for d in host.devices for t in d.trials.values()]
    wanted = max([need(), *measured])
    if limits.memlock is None:
        yield Finding("memlock", OK, "Locked memory: no limit.")
        return
    words = f"Locked memory: {size_words(limits.memlock)} at most; one connection takes {size_words(wanted)}"
    if limits.ipc_lock:
        yield Finding("memlock", OK, f"{words}; CAP_IPC_LOCK lifts the limit.")
    elif limits.memlock < wanted:
        failed = any(t.errno == errno.ENOMEM for d in host.devices for t in d.trials.values())
        yield Finding("memlock", FAIL if failed and not host.usable else WARN, f"{words}.", memlock_fix(host))
    elif limits.memlock < 64 * wanted:
        room = limits.memlock // wanted
        words += f": room for {room}, and for no large buffers."
        yield Finding("memlock", WARN, words, memlock_fix(host))
    else:
        yield Finding("memlock", OK, f"{words}.")


def nofile(host: Host) -> Iterator[Finding]:
    """The limit of open files, against the need."""
    limits, wanted = host.limits, DEVICE_FDS + ZMQ_FDS
    if limits.nofile is None:
        yield Finding("open files", OK, "Open files: no limit.")
        return
    left = limits.nofile - limits.open_files
    words = f"Open files: {limits.nofile} at most, {limits.open_files} open; a connection takes {wanted} or fewer"
    if left < wanted:
        yield Finding("open files", FAIL, f"{words}. Devices seem absent where none is left.", _more(limits.nofile))
    elif left < 64 * DEVICE_FDS + ZMQ_FDS:
        yield Finding("open files", WARN, f"{words}, and each further one {DEVICE_FDS}.", _more(limits.nofile))
    else:
        yield Finding("open files", OK, f"{words}.")


def _more(limit: int) -> str:
    return remedy("nofile", wanted=max(4096, 2 * limit))


def netns(host: Host) -> Iterator[Finding]:
    """The RDMA network-namespace mode."""
    if host.netns == "shared":
        yield Finding("netns", OK, "RDMA netns mode: shared: every network namespace sees every device.")
    elif host.netns == "exclusive":
        words = "RDMA netns mode: exclusive: a device is seen in one network namespace only."
        yield Finding(
            "netns",
            INFO if host.devices else WARN,
            words,
            "" if host.devices else remedy("shared mode", device="DEVICE"),
        )
    elif host.core:
        yield Finding("netns", INFO, "RDMA netns mode: unknown, the kernel does not tell.")


def container(host: Host) -> Iterator[Finding]:
    """Whether this looks like a container."""
    if host.container:
        yield Finding("container", INFO, f"This looks like a container: {', '.join(host.container)}.")
    else:
        yield Finding("container", INFO, "Nothing says that this is a container.")


def firewall(host: Host) -> Iterator[Finding]:
    """What packet filters may do to RoCE: hints, since a rule's effect shows only in packets."""
    seen, rules = host.firewall, host.firewall.rules or ()
    named = [rule for rule in rules if re.search(r"\b4791\b", rule)]
    manager = next(iter(seen.managers), "nft" if any("{" in rule for rule in rules) else "iptables")
    fix = remedy(f"firewall {manager}", port=DEFAULT_PORT)
    dropping = [rule for rule in named if re.search(r"\b(drop|reject)\b", rule, re.I)]
    closed = [rule for rule in rules if re.search(r"hook input.*policy drop|^:INPUT DROP", rule)]
    if dropping:
        yield Finding("firewall", WARN, f"A rule stops RoCE (UDP 4791): {dropping[0][:200]}", fix)
    elif closed and not named:
        yield Finding("firewall", WARN, "What no rule lets in is dropped, and no rule names UDP 4791 (RoCE v2).", fix)
    elif seen.managers and not named:
        words = f"{' and '.join(seen.managers)} filters packets: UDP 4791 (RoCE v2) must be let in."
        yield Finding("firewall", WARN, words, fix)
    elif seen.rules is not None:
        yield Finding("firewall", OK, f"No rule of {len(rules)} lines seen stops UDP 4791 (RoCE v2).")
    elif seen.tables:
        yield Finding("firewall", INFO, "There are packet filters that cannot be read: UDP 4791 must pass.", fix)
    else:
        yield Finding("firewall", INFO, "No packet filter was seen (nft and iptables-save could not be asked).")


def fork(host: Host) -> Iterator[Finding]:
    """Whether memory stays registered across fork."""
    if host.copy_on_fork:
        yield Finding("fork", OK, "The kernel copies registered memory when a process forks.")
    elif host.fork_asked:
        yield Finding("fork", OK, "The environment asks libibverbs to be safe across fork.")
    elif host.core:
        words = "The kernel does not say that it copies registered memory on fork: a fork may part it from the device."
        yield Finding("fork", WARN, words, remedy("fork"))
