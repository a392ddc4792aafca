"""What sysfs tells of RDMA devices and no verb does. Source: sysfs-class-infiniband of the kernel's ABI."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["device_nodes", "gid_attribute", "kernel_devices", "kernel_gids"]

_DEVICES, _NODES = "/sys/class/infiniband", "/sys/class/infiniband_verbs"


def kernel_devices() -> dict[str, int]:
    """The devices that the kernel has, whether this process can use them or not.

    Returns:
        Name -> the inode of its folder: another number for a device that was removed and made anew.
    """
    return _inodes(_DEVICES)


def device_nodes() -> dict[str, int]:
    """The devices' nodes, such as ``uverbs0``.

    One goes first when its device is removed, before the kernel waits for those who have it open.

    Returns:
        Name -> the inode of its folder in sysfs, as :func:`kernel_devices`.
    """
    return _inodes(_NODES)


def _inodes(folder: str) -> dict[str, int]:
    try:
        with os.scandir(folder) as found:
            return {entry.name: entry.stat().st_ino for entry in found}
    except OSError:
        return {}


def kernel_gids(device: str) -> set[bytes]:
    """The GIDs of a device that cannot be opened, 16 bytes each; empty if nothing tells."""
    found = set()
    for slot in Path(_DEVICES, device, "ports").glob("*/gids/*"):
        with suppress(OSError, ValueError):  # an empty slot may be an error to read
            found.add(ipaddress.IPv6Address(slot.read_text().strip()).packed)
    return found - {bytes(16)}


def gid_attribute(device: str, port_num: int, gid_index: int, kind: str) -> str:
    """What it says of a GID, "" if nothing.

    Args:
        device: the device's name.
        port_num, gid_index: which.
        kind: ``ndevs`` for its netdev by name (an index would mean another one in another network
            namespace), or ``types``.
    """
    try:
        with open(f"{_DEVICES}/{device}/ports/{port_num}/gid_attrs/{kind}/{gid_index}") as file:
            return file.read().strip()
    except OSError:
        return ""
