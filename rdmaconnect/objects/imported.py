"""What another process has made: contexts, protection domains and regions over one command descriptor.

The other process sends a duplicate of its context's ``cmd_fd`` (over a UNIX socket, ``socket.send_fds``) and the
handles of its objects; who ends an object for good is for both to agree on.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from .. import verbs
from ..abi import AccessFlags
from ..errors import LibraryError
from .context import Context, _Device
from .fields import bits
from .memory import FULL_ACCESS, PD
from .owned import Owned
from .regions import DM, Unbuffered

__all__ = ["ImportedDM", "ImportedMR", "ImportedPD", "import_device"]


def import_device(cmd_fd: int) -> Context:
    """Open a device on the command descriptor of another process's context: what that made can be imported here.

    Args:
        cmd_fd: the descriptor as it came; it stays the caller's, who may close it at once.

    Returns:
        A context of its own, not shared with those of :func:`rdmaconnect.objects.context.open_device`.

    Raises:
        ValueError: no device node.
        LibraryError: EOPNOTSUPP where the provider cannot (mlx5 can).
        VerbsError: ENODEV where the device is not seen here, among others.

    Source: ibv_import_device(3).
    """
    if not stat.S_ISCHR(os.fstat(cmd_fd).st_mode):
        raise ValueError(f"import a device: descriptor {cmd_fd} is no device node. Give a context's cmd_fd")

    def make() -> Any:
        # the context owns what it is given, also where it cannot be made: but not where nobody looked at it
        given = os.dup(cmd_fd)
        try:
            return verbs.ibv_import_device(given)
        except LibraryError:
            os.close(given)
            raise

    device = _Device(make, "imported device")
    device.name = verbs.ibv_get_device_name(device.pointer.contents.device)
    return Context(device)


class ImportedPD(PD):
    """A protection domain that another process made, on a context of the same command descriptor.

    Closing it ends this use; the domain stays with who made it.

    Args:
        context: of :func:`import_device`, or the one that it was imported from.
        handle: ``pd.pointer.contents.handle`` there.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot (mlx5 can).

    Source: ibv_import_pd(3).
    """

    def __init__(self, context: Context, handle: int) -> None:
        self.context = context
        number = bits("handle", handle, 32)
        name = f"imported PD of {context.name}"
        Owned.__init__(self, lambda: verbs.ibv_import_pd(context.pointer, number), name, (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_unimport_pd(pointer)


class ImportedMR(Unbuffered):
    """A region that another process registered, on a context of the same command descriptor.

    Closing it ends this use; the region stays with who registered it.

    Args:
        pd: the protection domain, imported as well.
        handle: ``mr.pointer.contents.handle`` there.
        addr, length, access: as they are there (``mr.addr``, ...): the kernel does not tell them.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot (mlx5 can).

    Source: ibv_import_mr(3).
    """

    def __init__(self, pd: PD, handle: int, *, addr: int, length: int, access: AccessFlags = FULL_ACCESS) -> None:
        self.addr, self.length, self.access = bits("addr", addr, 64), bits("length", length, 64), access
        number = bits("handle", handle, 32)
        self._own(lambda: verbs.ibv_import_mr(pd.pointer, number), f"imported MR of {length} bytes", pd)

    def _release(self, pointer: Any) -> None:
        verbs.ibv_unimport_mr(pointer)


class ImportedDM(DM):
    """Device memory that another process allocated, on a context of the same command descriptor.

    Closing it ends this use; the memory stays with who allocated it.

    Args:
        context: of :func:`import_device`, or the one that it was imported from.
        handle: ``dm.pointer.contents.handle`` there.
        length: bytes, as there.

    Raises:
        LibraryError: EOPNOTSUPP where the provider or the library cannot.

    Source: ibv_import_dm(3).
    """

    def __init__(self, context: Context, handle: int, *, length: int) -> None:
        self.context, self.length = context, length
        number = bits("handle", handle, 32)
        name = f"{length} imported bytes of device memory of {context.name}"
        Owned.__init__(self, lambda: verbs.ibv_import_dm(context.pointer, number), name, (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_unimport_dm(pointer)
