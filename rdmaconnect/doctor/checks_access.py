"""Checks of what this process is let at: the kernel's RDMA, libibverbs, device nodes. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from .finding import Finding, Verdict
from .host import Host, Node
from .remedies import remedy
from .severity import grave, some_netdev

__all__ = ["kernel", "library", "nodes"]

OK, INFO, WARN, FAIL = Verdict.OK, Verdict.INFO, Verdict.WARN, Verdict.FAIL


def kernel(host: Host) -> Iterator[Finding]:
    """Whether the kernel has RDMA, and a device."""
    loadable = f" The modules are on disk: {', '.join(host.loadable)}." if host.loadable else ""
    if not (host.core and host.uverbs):
        lacking = "RDMA is not loaded" if not host.core else "ib_uverbs is not loaded, which programs need"
        words = f"Linux {host.kernel}: {lacking}.{loadable}"
        if host.loadable and host.modules:
            yield Finding("kernel", FAIL, words, remedy("load core", "soft device", netdev=some_netdev(host)))
        elif host.container and host.modules:
            yield Finding("kernel", FAIL, words, remedy("load on the host"))
        else:
            why = "has no such module on disk" if host.modules else "cannot load modules"
            yield Finding("kernel", FAIL, f"{words} This kernel {why}.", remedy("other kernel"))
        return
    drivers = ", ".join(host.drivers) or "no driver of a device"
    yield Finding("kernel", OK, f"Linux {host.kernel}: ib_core, ib_uverbs; {drivers}.")


def library(host: Host) -> Iterator[Finding]:
    """Whether there is libibverbs, which one, and with which providers."""
    found = host.library
    if found.error:
        yield Finding("library", FAIL, found.error.partition(" Install it")[0], remedy("library"))
        return
    version = f" {found.version}" if found.version else ""
    yield Finding("library", OK, f"libibverbs{version} at {found.path or 'an unknown place'}.")
    if found.providers:
        yield Finding("providers", OK, ", ".join(found.providers))
    elif found.path:
        yield Finding("providers", grave(host), f"There is none beside {found.path}.", remedy("provider"))
    for path, provider in found.drivers.items():
        if found.providers and provider not in found.providers:
            words = f"{path} names {provider}, and there is no such provider: the file is stale."
            yield Finding("providers", INFO if host.usable else WARN, words, remedy("stale driver file", path=path))
    if found.complaints and not host.usable:
        yield Finding("library", WARN, f"It says: {' '.join(found.complaints)[:400]}")


# ---- who may open what


def nodes(host: Host) -> Iterator[Finding]:
    """Whether the device nodes are there, and may be opened."""
    for node in host.nodes:
        what = f"{node.path} ({node.device})" if node.device else node.path
        if not node.errno:
            yield Finding("node", OK, f"{what} can be opened by {host.user} (mode {node.mode or 0:o}).")
            continue
        name = errno.errorcode.get(node.errno, str(node.errno))
        words, fix = _NODE.get(node.errno, _other)(host, node)
        yield Finding("node", grave(host), f"{what}: {name}, {words}", fix)


def _absent(host: Host, node: Node) -> tuple[str, str]:
    if host.container:
        fix = remedy("pass node to pod" if host.kubernetes else "pass node")
        return "the kernel has the device, but this container was not given the node.", fix
    return "the kernel has the device, but there is no node.", remedy("make node", node=os.path.basename(node.path))


def _denied(host: Host, node: Node) -> tuple[str, str]:
    mode = f"{node.mode:o}" if node.mode is not None else "unknown"
    words = f"{host.user} may not open it: it belongs to {node.owner}:{node.group}, mode {mode}."
    if node.mode is not None and node.mode & 0o060 == 0o060 and node.group != "root":
        return words, remedy("join group", group=node.group, user=host.user)
    return words, remedy("open node", path=node.path)


def _forbidden(host: Host, node: Node) -> tuple[str, str]:
    device = node.device or "DEVICE"
    if host.netns == "exclusive":
        return (
            "the RDMA subsystem is in exclusive mode, and the device belongs to another network namespace.",
            remedy("shared mode", device=device),
        )
    if host.container:
        fix = remedy("pass node to pod" if host.kubernetes else "pass node")
        return "the container's device rules (cgroup) forbid it.", fix
    return (
        "a device cgroup forbids it, or the RDMA subsystem is in exclusive mode (rdma system show).",
        remedy("shared mode", "pass node", device=device),
    )


def _gone(host: Host, node: Node) -> tuple[str, str]:
    return "the node is there, but no device stands behind it now.", remedy("driver")


def _no_descriptor(host: Host, node: Node) -> tuple[str, str]:
    return "no file descriptor is left.", remedy("nofile", wanted=4096)


def _other(host: Host, node: Node) -> tuple[str, str]:
    return f"{os.strerror(node.errno)}.", ""


_NODE: dict[int, Callable[[Host, Node], tuple[str, str]]] = {
    errno.ENOENT: _absent,
    errno.EACCES: _denied,
    errno.EPERM: _forbidden,
    errno.ENXIO: _gone,
    errno.ENODEV: _gone,
    errno.EMFILE: _no_descriptor,
    errno.ENFILE: _no_descriptor,
}
