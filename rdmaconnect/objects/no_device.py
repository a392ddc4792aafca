"""Why there is no device to be used, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .. import verbs
from ..errors import VerbsError
from .sysfs import kernel_devices

__all__ = ["complaints", "why_none", "why_not_opened"]

_NODES = Path("/dev/infiniband")


def why_not_opened(name: str, node: str, error: VerbsError) -> VerbsError:
    """The library's errno is not reliable here: open the node again and see."""
    if error.errno in (errno.EMFILE, errno.ENFILE):  # which it does not make up; the node may open by now
        return error
    try:
        os.close(os.open(f"/dev/infiniband/{node}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        return VerbsError("ibv_open_device", e.errno or errno.EIO, f"open {name} (/dev/infiniband/{node})")
    return error


def why_none() -> str:
    """Why no device is listed, and what to do."""
    if kernel := kernel_devices():
        return (
            f"the kernel has {', '.join(sorted(kernel))}, but this process cannot use them: /dev/infiniband is absent "
            "or not theirs, or the devices' provider is not installed. In a container pass --device /dev/infiniband; "
            f"on a host install the provider (`apt install ibverbs-providers`).{complaints()}"
        )
    if refused := _refused_node():
        return f"there is none for this process. {refused}"
    return (
        "there is none. Load its driver (SoftRoCE: `modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0`); "
        "in a container pass /dev/infiniband and see `rdma system show`."
    )


def complaints() -> str:
    """What the library itself says, for the end of a message."""
    return "".join(f" {line.rstrip('.')}." for line in verbs.complaints())


def _refused_node() -> VerbsError | None:
    """Why the first device node here cannot be opened, or None: in exclusive mode only that tells of a device."""
    for path in sorted(_NODES.glob("uverbs*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as e:
            return VerbsError("ibv_open_device", e.errno or errno.EIO, f"open {path}")
    return None
