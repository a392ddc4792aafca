"""Checks of the devices: which can be used, their ports, GIDs and MTU, and which would be chosen. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from ..abi import GidType, LinkLayer, PortState
from ..agreement.candidates import merit
from ..agreement.endpoint import MTU_BYTES, GidEntry
from ..objects.port import Port
from .finding import Finding, Verdict
from .host import Device, Host
from .remedies import remedy
from .severity import grave, memlock_fix, size_words, some_netdev

__all__ = ["best_gid", "choice", "devices", "ports", "unlisted"]

OK, INFO, WARN, FAIL = Verdict.OK, Verdict.INFO, Verdict.WARN, Verdict.FAIL
#: bytes between the MTU of RoCE v2 and that of the network device: IPv4, UDP, BTH, RETH, ICRC
HEADERS = 20 + 8 + 12 + 16 + 4


def devices(host: Host) -> Iterator[Finding]:
    """The devices that cannot be used, and why."""
    if host.listing and host.core and host.uverbs:
        yield Finding("devices", FAIL, host.listing)
    if not host.devices and host.core and host.uverbs and not host.library.error:
        hidden = [node.path for node in host.nodes]
        if hidden and host.netns == "exclusive":
            words = f"There is none in this network namespace, though there is {', '.join(hidden)}: exclusive mode."
            yield Finding("devices", FAIL, words, remedy("shared mode", device="DEVICE"))
        else:
            fix = (
                remedy("load on the host")
                if host.container
                else remedy("soft device", "driver", netdev=some_netdev(host))
            )
            yield Finding("devices", FAIL, "The kernel has RDMA, but no RDMA device.", fix)
    for device in host.devices:
        driver = f" ({device.driver})" if device.driver else ""
        if not device.listed and not host.library.error and not host.listing:
            words, fix = unlisted(host, device)
            yield Finding("device", grave(host), f"{device.name}{driver}: libibverbs does not list it: {words}", fix)
        elif device.error:
            yield Finding("device", grave(host), f"{device.name}{driver} cannot be used: {device.error}")
        else:
            yield from _trials(host, device)


#: the kernel's driver -> the provider of libibverbs, where their names differ
_PROVIDERS = {
    "mlx5_core": "mlx5", "mlx4_core": "mlx4", "ib_mthca": "mthca", "bnxt_en": "bnxt_re", "ice": "irdma",
    "i40e": "irdma", "hns3": "hns", "qede": "qedr", "ib_qib": "ipathverbs", "hfi1": "hfi1verbs", "iw_cxgb4": "cxgb4",
}  # fmt: skip


def unlisted(host: Host, device: Device) -> tuple[str, str]:
    """Why libibverbs does not list a device that the kernel has, and what mends it."""
    node = next((node for node in host.nodes if node.device == device.name and node.errno == errno.ENOENT), None)
    if node is not None:
        return f"its node {node.path} is missing.", ""
    provider, found = _PROVIDERS.get(device.driver, device.driver), host.library
    if not provider or not found.providers:
        return "it lacks the provider, or the node.", remedy("provider")
    if provider not in found.providers:
        return f"its provider {provider} is not installed.", remedy("provider")
    if provider not in found.drivers.values():
        path = f"{os.path.dirname(next(iter(found.drivers), '/etc/libibverbs.d/none'))}/{provider}.driver"
        fix = remedy("driver file", provider=provider, path=path)
        return f"no .driver file, as {path}, names its provider.", fix
    return f"its provider {provider} is there, and named, but does not take it: of another version?", remedy("provider")


def _trials(host: Host, device: Device) -> Iterator[Finding]:
    for number, trial in device.trials.items():
        what = f"{device.name} port {number}"
        if not trial.error:
            pinned = f", {size_words(trial.pinned)} locked" if trial.pinned else ""
            yield Finding("queue pair", OK, f"{what}: made one, with {trial.fds} descriptors{pinned}.")
        else:
            fix = memlock_fix(host) if trial.errno == errno.ENOMEM else ""
            fix = remedy("nofile", wanted=4096) if trial.errno in (errno.EMFILE, errno.ENFILE) else fix
            yield Finding("queue pair", grave(host), f"{what}: {trial.error}", fix)


def ports(host: Host) -> Iterator[Finding]:
    """The state of each port, its GIDs, its MTU."""
    for port in host.ports:
        yield _state(host, port)
        if port.state == PortState.ACTIVE:
            yield from _gids(host, port)
            yield from _mtu(host, port)


def _state(host: Host, port: Port) -> Finding:
    words = f"{port.device} port {port.port_num}: {port.state}, {port.layer_words}"
    if port.state == PortState.ACTIVE:
        return Finding("port", OK, f"{words}, MTU {MTU_BYTES.get(port.active_mtu)}.")
    if port.link_layer == LinkLayer.INFINIBAND:
        why = "there is no subnet manager" if port.state == PortState.INIT else "no link"
        return Finding("port", grave(host), f"{words}: {why}.", remedy("subnet manager"))
    names = sorted({entry.netdev for entry in port.gids if entry.netdev})
    known = [host.netdevs[name] for name in names if name in host.netdevs]
    netdev = names[0] if names else "NETDEV"
    if known and known[0].up:
        return Finding("port", grave(host), f"{words}: {netdev} has no carrier.", remedy("carrier", netdev=netdev))
    why = f"{netdev} is down" if known else "its network device is down"
    return Finding("port", grave(host), f"{words}: {why}.", remedy("link up", netdev=netdev))


def _gids(host: Host, port: Port) -> Iterator[Finding]:
    what, names = f"{port.device} port {port.port_num}", sorted({entry.netdev for entry in port.gids if entry.netdev})
    netdev = names[0] if names else "NETDEV"
    if port.link_layer != LinkLayer.ETHERNET:
        return
    if not port.gids:
        words = f"{what}: the GID table is empty: its network device has no address, or is in another namespace."
        yield Finding("gids", grave(host), words, remedy("address", netdev=netdev))
        return
    here = [entry for entry in port.gids if entry.gid.raw in host.here]
    if not here:
        fix = remedy("network of pod" if host.kubernetes else "address here", netdev=netdev)
        words = f"{what}: none of its {len(port.gids)} GIDs is an address of this network namespace."
        # in shared mode every namespace sees the others' devices
        yield Finding("gids", INFO if host.usable else FAIL, words, fix)
    elif all(entry.gid.is_link_local for entry in here):
        words = f"{what}: only link-local GIDs (fe80::): they reach the same link, and no peer with IPv4."
        yield Finding("gids", WARN, words, remedy("address", netdev=netdev))
    elif all(entry.gid_type == GidType.ROCE_V1 for entry in here):
        words = f"{what}: only RoCE v1 GIDs: they do not cross routers, nor reach a peer with RoCE v2 alone."
        yield Finding("gids", WARN, words, remedy("roce v2"))


def _mtu(host: Host, port: Port) -> Iterator[Finding]:
    """Frames larger than the network device's are lost without a word, on some kernels."""
    entry = best_gid(port)
    netdev = host.netdevs.get(entry.netdev) if entry else None
    active = MTU_BYTES.get(port.active_mtu, 0)
    if netdev is None or port.link_layer != LinkLayer.ETHERNET:
        return
    what = f"{port.device} port {port.port_num}"
    if active + HEADERS > netdev.mtu:
        words = f"{what}: MTU {active} and its headers do not fit into the {netdev.mtu} bytes of {netdev.name}."
        yield Finding("mtu", WARN, words, remedy("mtu", netdev=netdev.name))
    elif active < MTU_BYTES.get(port.max_mtu, 0):
        words = f"{what}: MTU {active}; it could be {MTU_BYTES[port.max_mtu]} were {netdev.name}'s {netdev.mtu} larger."
        yield Finding("mtu", INFO, words, remedy("mtu", netdev=netdev.name))


def best_gid(port: Port, gid_index: int | None = None) -> GidEntry | None:
    """The GID that a port would be known by to a peer that has just the same kinds; None where LIDs do.

    Args:
        port: the port.
        gid_index: the only slot to use, or None.
    """
    fit = [entry for entry in port.gids if gid_index in (None, entry.gid_index)]
    return min(fit, key=lambda entry: merit((entry, entry)), default=None)


def choice(host: Host) -> Iterator[Finding]:
    """The port that would be chosen, or why none."""
    if host.usable:
        device, port_num = host.usable[0]
        entry = best_gid(host.port(device, port_num), host.gid_index)
        others = f" {len(host.usable) - 1} more can be used." if len(host.usable) > 1 else ""
        by = f" with {entry} on {entry.netdev}" if entry else ""
        yield Finding("choice", OK, f"{device} port {port_num}{by} would be chosen.{others}")
        if entry is not None and not entry.here:
            netdev = entry.netdev or "its network device"
            words = f"{entry.gid} is no address of this network namespace: answers to it go to another one."
            yield Finding("choice", WARN, words, remedy("address here", netdev=netdev))
        for left in host.left_out:
            # the one that the route leads to was needed: another one may not reach the peer
            yield Finding("choice", FAIL if left.address else WARN, f"Left out: {left}")
    elif host.problem and host.core and host.uverbs and not host.library.error and host.devices:
        yield Finding("choice", FAIL, host.problem)
