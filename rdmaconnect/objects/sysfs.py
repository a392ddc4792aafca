"""What sysfs tells of RDMA devices and no verb does. Source: sysfs-class-infiniband of the kernel's ABI."""

from __future__ import annotations

import os

__all__ = ["gid_attribute", "kernel_devices"]

_DEVICES = "/sys/class/infiniband"


def kernel_devices() -> dict[str, int]:
    """The devices that the kernel has, whether this process can use them or not.

    Returns:
        Name -> the inode of its folder: another number for a device that was removed and made anew.
    """
    try:
        with os.scandir(_DEVICES) as found:
            return {entry.name: entry.stat().st_ino for entry in found}
    except OSError:
        return {}


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
