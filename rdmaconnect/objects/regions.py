"""Regions whose memory is no buffer of this process: memory on the device, or none at all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .. import verbs
from ..abi import AccessFlags, ibv_alloc_dm_attr
from ..agreement.endpoint import RemoteRegion
from ..errors import StateError
from .buffers import as_bytes
from .context import Context
from .fields import bits, put
from .locks import exclusive
from .memory import FULL_ACCESS, MR, PD
from .owned import Owned

__all__ = ["DM", "DmMR", "NullMR", "Unbuffered"]


class Unbuffered(MR):
    """A region without a buffer here: there is nothing to keep alive."""

    def _own(self, make: Callable[[], Any], name: str, pd: PD, *more: Owned) -> None:
        def made() -> Any:
            pointer = make()
            self.lkey, self.rkey = pointer.contents.lkey, pointer.contents.rkey
            return pointer

        self._held, self.pd = [], pd
        Owned.__init__(self, made, name, (pd, *more))

    def reregister(self, **changes: Any) -> None:
        """No verb can: make a new region.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"register {self.name} again: only a region of this process's memory can be. Make a new one.")


class DM(Owned):
    """Memory on the device itself: what is sent from it, or written to it by a peer, takes no PCI transfer.

    Args:
        context: the device.
        length: bytes, up to ``max_dm_size`` of ``query_device()`` in all.
        log_align: the start is a multiple of 2 to this; atomics on it need 3.

    Attributes:
        length: as given.

    Raises:
        ValueError: a number that does not fit.
        VerbsError: ENOMEM where no more is free.
        LibraryError: EOPNOTSUPP where the provider has none (mlx5 and mana do).

    Source: ibv_alloc_dm(3).
    """

    def __init__(self, context: Context, length: int, *, log_align: int = 0) -> None:
        attr = put(ibv_alloc_dm_attr(), length=length, log_align_req=log_align)
        self.context, self.length = context, length
        name = f"{length} bytes of device memory of {context.name}"
        super().__init__(lambda: verbs.ibv_alloc_dm(context.pointer, attr), name, (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_free_dm(pointer)

    @exclusive
    def write(self, data: Any, offset: int = 0) -> None:
        """Copy bytes to it.

        Args:
            data: bytes-like.
            offset: bytes from its start.

        Raises:
            ValueError: it is not that long.
            VerbsError: among others EINVAL where the device can only be written in pieces of 4 bytes.

        Source: ibv_alloc_dm(3), ``ibv_memcpy_to_dm``.
        """
        given = as_bytes(data)
        self._check_part(offset, len(given))
        if given:
            copy = ctypes.create_string_buffer(given, len(given))
            verbs.ibv_memcpy_to_dm(self.pointer, offset, ctypes.addressof(copy), len(given))

    @exclusive
    def read(self, length: int, offset: int = 0) -> bytes:
        """Copy bytes out of it.

        Raises:
            ValueError: it is not that long.

        Source: ibv_alloc_dm(3), ``ibv_memcpy_from_dm``.
        """
        self._check_part(offset, length)
        found = ctypes.create_string_buffer(length)
        if length:
            verbs.ibv_memcpy_from_dm(ctypes.addressof(found), self.pointer, offset, length)
        return found.raw

    def _check_part(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{length} bytes at offset {offset}: {self.name} has no more")

    @exclusive
    def export(self) -> int:
        """A dma-buf descriptor of it, for another device to register (``Dmabuf``); the caller closes it.

        Raises:
            LibraryError: EOPNOTSUPP where the provider or the library cannot.

        Source: ibv_dm_export_dmabuf_fd(3).
        """
        return verbs.ibv_dm_export_dmabuf_fd(self.pointer)


class DmMR(Unbuffered):
    """Device memory as a region: work requests and the peer count addresses from 0.

    Args:
        pd: its protection domain.
        dm: the memory.
        offset: bytes from its start.
        length: bytes; by default up to its end.
        access: what may be done; ``ZERO_BASED`` is added.

    Raises:
        ValueError: not inside of the memory, or of another device.

    Source: ibv_alloc_dm(3), ``ibv_reg_dm_mr``.
    """

    def __init__(
        self, pd: PD, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags = FULL_ACCESS
    ) -> None:
        size = dm.length - offset if length is None else length
        dm._check_part(offset, size)
        if not dm.context.is_same(pd.context):
            raise ValueError(f"register {dm.name} in {pd.name}: that is of another device")
        self.addr, self.length, self.access = 0, size, access | AccessFlags.ZERO_BASED
        flags = bits("access", int(self.access), 32)
        make = lambda: verbs.ibv_reg_dm_mr(pd.pointer, dm.pointer, offset, size, flags)  # noqa: E731
        self._own(make, f"MR of {size} bytes of device memory", pd, dm)


class NullMR(Unbuffered):
    """A region without memory: what is written to it is dropped, what is read from it is 0.

    Its pieces (:meth:`sge`) stand for bytes of a message that nobody needs, or that are to be 0. It has no key for a
    peer.

    Args:
        pd: its protection domain.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none (mlx5 does).

    Source: ibv_alloc_null_mr(3).
    """

    def __init__(self, pd: PD) -> None:
        self.addr, self.length, self.access = 0, 2**64 - 1, AccessFlags.LOCAL_WRITE
        self._own(lambda: verbs.ibv_alloc_null_mr(pd.pointer), f"null MR of {pd.context.name}", pd)

    @property
    def region(self) -> RemoteRegion:
        """There is none.

        Raises:
            StateError: always.
        """
        raise StateError(f"open {self.name} to a peer: a null region has no key for one.")
