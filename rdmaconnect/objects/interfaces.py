"""Network interfaces of this network namespace, by name."""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["interface_index"]


def interface_index(name: str) -> int:
    """The index of a network interface.

    It is looked up in the list of all: for a name that is not there the kernel, asked by name, would look for a
    module to load, which takes 0.3 s and more each time.

    Raises:
        OSError: ENODEV, there is none of that name here; others, the list cannot be had.

    Source: if_nameindex(3); ``dev_load`` of the kernel.
    """
    for index, found in socket.if_nameindex():
        if found == name:
            return index
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), name)
