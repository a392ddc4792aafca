"""Protection domains and registered memory: anything with a buffer, or an address and a length."""

from __future__ import annotations

import ctypes
from typing import Any

from . import verbs
from .abi import AccessFlags
from .device import Context
from .endpoint import RemoteRegion
from .handle import Owned

__all__ = ["FULL_ACCESS", "MR", "PD"]

#: what a peer may do unless told otherwise
FULL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_WRITES = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's buffer protocol."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class Pinned:
    """The address of an object's buffer, which stays where it is until :meth:`release`.

    Args:
        buffer: bytes, bytearray, memoryview, array, mmap, NumPy array: anything C-contiguous.

    Attributes:
        addr: first byte's address.
        length: bytes.
        readonly: whether it may only be read.

    Raises:
        TypeError: not a buffer, or not contiguous.
    """

    def __init__(self, buffer: Any) -> None:
        self._view = _PyBuffer()
        self._held = False
        try:
            ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(self._view), 0)
        except (TypeError, BufferError) as e:
            raise TypeError(f"{type(buffer).__name__} has no contiguous buffer ({e}): give bytes-like data") from None
        self._held = True
        self.addr: int = self._view.buf or 0
        self.length: int = self._view.len
        self.readonly = bool(self._view.readonly)

    def release(self) -> None:
        """Let the buffer go. Twice is fine."""
        if self._held:
            self._held = False
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._view))

    def __del__(self) -> None:
        self.release()


class PD(Owned):
    """A protection domain.

    Args:
        context: the device.

    Raises:
        VerbsError: ENOMEM, among others.

    Source: ibv_alloc_pd(3).
    """

    def __init__(self, context: Context) -> None:
        super().__init__(verbs.ibv_alloc_pd(context.pointer), f"PD of {context.name}", (context,))
        self.context = context

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dealloc_pd(pointer)

    def register(self, buffer: Any, access: AccessFlags | None = None) -> MR:
        """Register a buffer; see :class:`MR`."""
        return MR(self, buffer, access)


class MR(Owned):
    """A registered memory region.

    Args:
        pd: its protection domain.
        buffer: anything with a C-contiguous buffer, at least one byte; it is kept alive and may not be
            resized while registered. Or a pair (address, length in bytes) that the caller keeps alive.
        access: what may be done; by default everything remote, or only remote reads for a read-only buffer.

    Attributes:
        addr: first byte's address.
        length: bytes.
        lkey, rkey: the keys for the local and the remote side, 32 bits; never printed.

    Raises:
        TypeError: not a buffer.
        ValueError: empty, or write access to a read-only buffer.
        VerbsError: ENOMEM where the locked-memory limit is too low, among others.

    Source: ibv_reg_mr(3).
    """

    def __init__(self, pd: PD, buffer: Any, access: AccessFlags | None = None) -> None:
        self._pinned: Pinned | None = None
        readonly = False
        if isinstance(buffer, tuple):
            self.addr, self.length = buffer
        else:
            self._pinned = Pinned(buffer)
            self.addr, self.length, readonly = self._pinned.addr, self._pinned.length, self._pinned.readonly
        if access is None:
            access = AccessFlags.REMOTE_READ if readonly else FULL_ACCESS
        if readonly and access & _WRITES:
            raise ValueError(
                f"register a read-only {type(buffer).__name__} for {access & _WRITES}: give a writable one"
            )
        if self.length < 1:
            raise ValueError("register a buffer of 0 bytes: give at least one byte")
        pointer = verbs.ibv_reg_mr(pd.pointer, self.addr, self.length, int(access))
        super().__init__(pointer, f"MR of {self.length} bytes", (pd,))
        self.lkey: int = pointer.contents.lkey
        self.rkey: int = pointer.contents.rkey
        self.access = access

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dereg_mr(pointer)
        if self._pinned is not None:
            self._pinned.release()

    @property
    def region(self) -> RemoteRegion:
        """What a peer needs to write or read this memory; ``to_bytes()`` of it can be sent.

        Raises:
            StateError: after close.
        """
        self.pointer  # noqa: B018
        return RemoteRegion(self.addr, self.rkey, self.length)

    def __len__(self) -> int:
        return int(self.length)
