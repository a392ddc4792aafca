"""Protection domains, registered memory and windows onto it.

Memory is anything with a buffer (``buffers``), or an address and a length, or a dma-buf.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from typing import Any

from . import buffers, verbs
from .abi import AccessFlags, AdviseMrAdvice, MwType, ReregMrFlags, ibv_mw_bind_info, ibv_sge
from .device import Context
from .endpoint import RemoteRegion
from .errors import HINTS, StateError, VerbsError
from .handle import Owned

__all__ = ["FULL_ACCESS", "MR", "MW", "PD", "Dmabuf", "Sge"]

#: what a peer may do unless told otherwise
FULL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_WRITES = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
#: the same through a window
_WINDOW = FULL_ACCESS & ~AccessFlags.LOCAL_WRITE


@dataclass(frozen=True, slots=True)
class Sge:
    """One piece of a message's local bytes; :meth:`MR.sge` makes one that is inside of its region.

    Args:
        addr: first byte's address.
        length: bytes, below 2**32; a piece of 0 bytes is left out.
        lkey: the region's local key.
    """

    addr: int
    length: int
    lkey: int


@dataclass(frozen=True, slots=True)
class Dmabuf:
    """Memory behind a dma-buf descriptor, a GPU's for example.

    Args:
        fd: the descriptor; it may be closed after registration.
        length: bytes.
        offset: bytes into the dma-buf.
    """

    fd: int
    length: int
    offset: int = 0


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

    def register(self, buffer: Any, access: AccessFlags | None = None, *, iova: int | None = None) -> MR:
        """Register a buffer; see :class:`MR`."""
        return MR(self, buffer, access, iova=iova)


class MR(Owned):
    """A registered memory region.

    Args:
        pd: its protection domain.
        buffer: bytes-like, array, mmap, shared memory, NumPy array, tensor: whatever :func:`buffers.hold` takes,
            at least one byte; it is kept alive and may not be resized while registered. Memory of a GPU must be
            such that the device reaches it: for CUDA with the kernel module nvidia-peermem. What work on the
            GPU does to it is for the caller to wait for. Or a pair (address, length in bytes) that the caller
            keeps alive, or a :class:`Dmabuf`.
        access: what may be done; by default everything remote, or only remote reads for a read-only buffer.
            With ``ON_DEMAND`` the device faults pages in, and nothing is pinned.
        iova: the address that work requests and the peer use for the first byte, by default its own; its
            offset in a page must be the buffer's.

    Attributes:
        addr: the address that work requests and the peer use for the first byte: its own, ``iova``, or 0
            for ``ZERO_BASED``.
        length: bytes.
        lkey, rkey: the keys for the local and the remote side, 32 bits; never printed.
        access: as given.

    Raises:
        TypeError: not a buffer.
        ValueError: empty, not in one piece, or write access to a read-only buffer.
        VerbsError: EFAULT where the device does not reach the GPU's memory, ENOMEM where the locked-memory
            limit is too low, among others.
        LibraryError: EOPNOTSUPP where the device cannot register dma-bufs.

    Source: ibv_reg_mr(3).
    """

    def __init__(self, pd: PD, buffer: Any, access: AccessFlags | None = None, *, iova: int | None = None) -> None:
        held, access = _memory(buffer, access)
        start, length = held.addr, held.length
        try:
            if isinstance(buffer, Dmabuf):
                self.addr = start if iova is None else iova
                pointer = verbs.ibv_reg_dmabuf_mr(pd.pointer, start, length, self.addr, buffer.fd, int(access))
            elif iova is None:
                self.addr = 0 if access & AccessFlags.ZERO_BASED else start
                pointer = verbs.ibv_reg_mr(pd.pointer, start, length, int(access))
            else:
                self.addr = iova
                pointer = verbs.ibv_reg_mr_iova(pd.pointer, start, length, iova, int(access))
        except BaseException as e:
            held.release()
            if held.device is not None and isinstance(e, VerbsError):
                raise _out_of_reach(e, held, pd) from None
            if isinstance(e, VerbsError) and e.errno == errno.ENOMEM:
                raise _over_limit(e, length) from None
            raise
        super().__init__(pointer, f"MR of {length} bytes", (pd,))
        self._held, self.length, self.pd, self.access = held, length, pd, access
        self.lkey: int = pointer.contents.lkey
        self.rkey: int = pointer.contents.rkey

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dereg_mr(pointer)
        self._held.release()

    @property
    def region(self) -> RemoteRegion:
        """What a peer needs to write or read this memory; ``to_bytes()`` of it can be sent.

        Raises:
            StateError: after close.
        """
        self.pointer  # noqa: B018
        return RemoteRegion(self.addr, self.rkey, self.length)

    def sge(self, offset: int = 0, length: int | None = None) -> Sge:
        """A part of the region, as the local bytes of a work request.

        Args:
            offset: bytes from the region's start.
            length: bytes, by default up to the region's end.

        Raises:
            ValueError: not inside of the region.
            StateError: after close.
        """
        self.pointer  # noqa: B018
        return Sge(self.addr + offset, self._part(offset, length), self.lkey)

    def _part(self, offset: int, length: int | None) -> int:
        """The length of a part, if it is inside of the region."""
        size = self.length - offset if length is None else length
        if offset < 0 or size < 0 or offset + size > self.length:
            raise ValueError(f"{size} bytes at offset {offset}: {self.name} has no more")
        return size

    def reregister(self, *, buffer: Any = None, access: AccessFlags | None = None, pd: PD | None = None) -> None:
        """Change what it covers, its access or its protection domain; what is not given stays. The keys may change.

        Args:
            buffer: the new memory, as in the constructor, but no dma-buf (TypeError).
            access: the new access.
            pd: the new protection domain, of the same device.

        Raises:
            VerbsError: it says whether the old or the new region is valid, or none.
            LibraryError: EOPNOTSUPP where the device cannot; the region is as it was.

        Source: ibv_rereg_mr(3).
        """
        flags, held = ReregMrFlags(0), None
        if isinstance(buffer, Dmabuf):
            raise TypeError(f"register {self.name} again onto a dma-buf: make a new region")
        if buffer is not None:
            held, _ = _memory(buffer, access or self.access)
            flags |= ReregMrFlags.CHANGE_TRANSLATION
        if access is not None:
            flags |= ReregMrFlags.CHANGE_ACCESS
        if pd is not None:
            if pd.context is not self.pd.context:
                raise ValueError(f"move {self.name} to {pd.name}: that is of another device than {self.pd.name}")
            flags |= ReregMrFlags.CHANGE_PD
        new_pd = None if pd is None else pd.pointer
        start, length = (None, 0) if held is None else (held.addr, held.length)
        try:
            verbs.ibv_rereg_mr(self.pointer, int(flags), new_pd, start, length, int(access or 0))
        except BaseException:
            if held is not None:
                held.release()
            raise
        self.lkey, self.rkey = self.pointer.contents.lkey, self.pointer.contents.rkey
        self.access = self.access if access is None else access
        if held is not None:
            self._held.release()
            self._held, self.addr, self.length, self.name = held, held.addr, length, f"MR of {length} bytes"
        if pd is not None:
            self._adopt_by(pd, instead_of=self.pd)
            self.pd = pd

    def advise(self, advice: AdviseMrAdvice, flags: int = 0) -> None:
        """Tell the device that this on-demand memory will be used soon.

        Args:
            advice: for reading, for writing, or without faulting pages in.
            flags: ``AdviseMrFlags``; with ``FLUSH`` it returns when it is done.

        Raises:
            LibraryError: EOPNOTSUPP where the device cannot.

        Source: ibv_advise_mr(3).
        """
        self.pointer  # noqa: B018
        sge = ibv_sge(addr=self.addr, length=self.length, lkey=self.lkey)
        verbs.ibv_advise_mr(self.pd.pointer, int(advice), int(flags), ctypes.byref(sge), 1)

    def __len__(self) -> int:
        return int(self.length)


def _memory(buffer: Any, access: AccessFlags | None) -> tuple[buffers.Buffer, AccessFlags]:
    """What is to be registered (for a dma-buf ``addr`` is the offset), and for what."""
    if isinstance(buffer, Dmabuf):
        held = buffers.Buffer(buffer, buffer.offset, buffer.length)
    elif isinstance(buffer, tuple):
        start, length = buffer
        held = buffers.Buffer(buffer, start, length)
    else:
        held = buffers.hold(buffer)
    if access is None:
        access = AccessFlags.REMOTE_READ if held.readonly else FULL_ACCESS
    if (held.readonly and access & _WRITES) or held.length < 1:
        length = held.length
        held.release()
        if length < 1:
            raise ValueError("register a buffer of 0 bytes: give at least one byte")
        raise ValueError(f"register a read-only {type(buffer).__name__} for {access & _WRITES}: give a writable one")
    return held, access


def _out_of_reach(error: VerbsError, held: buffers.Buffer, pd: PD) -> VerbsError:
    """Why memory of a GPU was not registered."""
    return VerbsError(
        error.verb, error.errno or 0, f"register {held.length} bytes on {held.device} with {pd.context.name}",
        "The RDMA device does not reach that memory: for CUDA load nvidia-peermem, or export a dma-buf "
        "(cuMemGetHandleForAddressRange) and register Dmabuf(fd, length); else copy it to the CPU first.",
    )  # fmt: skip


def _over_limit(error: VerbsError, length: int) -> VerbsError:
    """What may be locked, against what was to be."""
    import resource  # Windows has none, and no RDMA either

    have, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if have == resource.RLIM_INFINITY:
        hint = "There is no locked-memory limit here: host or device are out of memory. See `free` and `rdma resource`."
    else:
        hint = f"This process may lock {have} bytes in all. {HINTS['ibv_reg_mr', 'ENOMEM']}"
    return VerbsError(error.verb, errno.ENOMEM, f"register {length} bytes of memory", hint)


class MW(Owned):
    """A memory window: a key of its own for a part of a region, bound and unbound by work requests.

    Args:
        pd: its protection domain, that of the regions it is bound to.
        mw_type: ``TYPE_1`` is bound by :meth:`QueuePair.bind_mw`, for every queue pair of the protection
            domain; ``TYPE_2`` by a ``bind_mw`` work request, for the queue pair that it was posted to.

    Attributes:
        pd, mw_type: as given.

    Raises:
        VerbsError: EINVAL for another type, ENOMEM, among others.
        LibraryError: EOPNOTSUPP where the device has no windows.

    Source: ibv_alloc_mw(3).
    """

    def __init__(self, pd: PD, mw_type: MwType) -> None:
        pointer = verbs.ibv_alloc_mw(pd.pointer, int(mw_type))
        super().__init__(pointer, f"MW {mw_type} of {pd.context.name}", (pd,))
        self.pd, self.mw_type = pd, mw_type
        self._region: RemoteRegion | None = None
        self._mr: MR | None = None

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dealloc_mw(pointer)

    @property
    def rkey(self) -> int:
        """The key, 32 bits; another one after each bind. Set it back when a bind completes with an error."""
        return int(self.pointer.contents.rkey)

    @rkey.setter
    def rkey(self, rkey: int) -> None:
        self.pointer.contents.rkey = rkey

    @property
    def next_rkey(self) -> int:
        """The key that the next bind gives: the lowest byte counts up. Source: ``ibv_inc_rkey``."""
        rkey = self.rkey
        return rkey & ~0xFF | (rkey + 1) & 0xFF

    @property
    def region(self) -> RemoteRegion:
        """What a peer needs to reach the memory through the window, once the last bind has completed.

        Raises:
            StateError: it is not bound, or closed.
        """
        rkey = self.rkey
        if self._region is None:
            raise StateError(f"use {self.name}: it is not bound to memory.")
        return RemoteRegion(self._region.addr, rkey, self._region.length)

    def bind_info(self, mr: MR, offset: int, length: int | None, access: AccessFlags | None) -> ibv_mw_bind_info:
        """The C description of a bind, checked; for the queue pairs.

        Raises:
            ValueError: outside of the region, a region without ``MW_BIND`` or of another protection domain.
        """
        size = mr._part(offset, length)
        if mr.pd is not self.pd:
            raise ValueError(f"bind {self.name} to {mr.name}: that is of another protection domain")
        if not mr.access & AccessFlags.MW_BIND:
            raise ValueError(f"bind {self.name} to {mr.name}: that was registered for {mr.access} without MW_BIND")
        chosen = _WINDOW if access is None else access
        return ibv_mw_bind_info(mr=mr.pointer, addr=mr.addr + offset, length=size, mw_access_flags=int(chosen))

    def _bound(self, mr: MR, info: ibv_mw_bind_info, rkey: int) -> None:
        """A bind was posted: from now on the region may not go before the window, the former one may."""
        self.rkey = rkey
        based = 0 if info.mw_access_flags & AccessFlags.ZERO_BASED else info.addr
        self._region = RemoteRegion(based, rkey, info.length) if info.length else None
        self._adopt_by(mr, instead_of=self._mr)
        self._mr = mr
