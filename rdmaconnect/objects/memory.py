"""Protection domains, and registered memory.

Memory is anything with a buffer (``buffers``), or an address and a length, or a dma-buf.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .. import verbs
from ..abi import AccessFlags, AdviseMrAdvice, ReregMrFlags, ibv_sge
from ..agreement.endpoint import RemoteRegion
from ..errors import HINTS, VerbsError, shown
from . import buffers
from .buffer_like import BufferLike
from .context import Context
from .fields import bits, put
from .locks import exclusive
from .owned import Owned, open_here

__all__ = ["FULL_ACCESS", "MR", "PD", "Dmabuf", "MemoryLike", "Sge", "check_buffer"]

#: what a peer may do unless told otherwise
FULL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_WRITES = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


@dataclass(frozen=True, slots=True)
class Sge:
    """One piece of a message's local bytes; :meth:`MR.sge` makes one that is inside of its region.

    Args:
        addr: first byte's address.
        length: bytes, below 2**32; a piece of 0 bytes is left out.
        lkey: the region's local key.
        mr: the region itself, if it is known here: then it is kept, and must be open and of the queue's protection
            domain when the piece is posted.

    Raises:
        ValueError: a number that has more bits.
    """

    addr: int
    length: int
    lkey: int
    mr: MR | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.addr >> 64 or (self.length | self.lkey) >> 32:
            bits("a piece's addr", self.addr, 64)
            bits("a piece's length", self.length, 32)
            bits("a piece's lkey", self.lkey, 32)


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


#: what can be registered: anything with a buffer, a pair (address, length in bytes), or memory behind a dma-buf
MemoryLike: TypeAlias = BufferLike | tuple[int, int] | Dmabuf


class PD(Owned):
    """A protection domain.

    Args:
        context: the device.

    Raises:
        VerbsError: ENOMEM, among others.

    Source: ibv_alloc_pd(3).
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        super().__init__(lambda: verbs.ibv_alloc_pd(context.pointer), f"PD of {context.name}", (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dealloc_pd(pointer)

    @property
    def base(self) -> PD:
        """The protection domain that the kernel knows: this one, or for a parent domain the one that it stands for."""
        return self

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None, *, iova: int | None = None) -> MR:
        """Register a buffer; see :class:`MR`."""
        return MR(self, buffer, access, iova=iova)


class MR(Owned):
    """A registered memory region.

    The memory is held for as long as the device may use it: until this is closed with success, is forgotten and
    deregistered for that, or the process ends. Where it cannot be deregistered it is held for good.

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

    def __init__(
        self, pd: PD, buffer: MemoryLike, access: AccessFlags | None = None, *, iova: int | None = None
    ) -> None:
        held, access = _memory(buffer, access)
        #: the memory that the device may use: more than one buffer after a registration anew that failed
        self._held = [held]
        self.length, self.pd, self.access = held.length, pd, access
        if iova is None:
            self.addr = 0 if access & AccessFlags.ZERO_BASED and not isinstance(buffer, Dmabuf) else held.addr
        else:
            self.addr = iova
        try:
            bits("iova", self.addr, 64)
            super().__init__(lambda: self._register(buffer, iova is not None), f"MR of {held.length} bytes", (pd,))
        except BaseException as e:
            if not held.pinned:
                held.release()
            if held.device is not None and isinstance(e, VerbsError):
                raise _out_of_reach(e, held, pd) from None
            if isinstance(e, VerbsError) and e.errno == errno.ENOMEM:
                raise _over_limit(e, held.length) from None
            raise

    def _register(self, buffer: Any, elsewhere: bool) -> Any:
        (held,), pd, access = self._held, self.pd.pointer, int(self.access)
        if isinstance(buffer, Dmabuf):
            pointer = verbs.ibv_reg_dmabuf_mr(pd, held.addr, held.length, self.addr, buffer.fd, access)
        elif elsewhere:
            pointer = verbs.ibv_reg_mr_iova(pd, held.addr, held.length, self.addr, access)
        else:
            pointer = verbs.ibv_reg_mr(pd, held.addr, held.length, access)
        held.pinned = True
        self.lkey: int = pointer.contents.lkey
        self.rkey: int = pointer.contents.rkey
        return pointer

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dereg_mr(pointer)

    def _freed(self, pointer: Any) -> None:
        _let_go(self._held)

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
        return Sge(self.addr + offset, self.part_length(offset, length), self.lkey, self)

    def part_length(self, offset: int, length: int | None) -> int:
        """The length of a part, if it is inside of the region."""
        size = self.length - offset if length is None else length
        if offset < 0 or size < 0 or offset + size > self.length:
            raise ValueError(f"{size} bytes at offset {offset}: {self.name} has no more")
        return size

    @exclusive
    def reregister(self, *, buffer: Any = None, access: AccessFlags | None = None, pd: PD | None = None) -> None:
        """Change what it covers, its access or its protection domain; what is not given stays. The keys may change.

        Args:
            buffer: the new memory, as in the constructor, but no dma-buf (TypeError).
            access: the new access.
            pd: the new protection domain, of the same device.

        Raises:
            ValueError: write access to a read-only buffer, the old one too.
            VerbsError: it says whether the old or the new region is valid, or none. Both buffers stay held, until
                this is closed or registered anew with success.
            LibraryError: EOPNOTSUPP where the device cannot; the region is as it was.

        Source: ibv_rereg_mr(3).
        """
        if isinstance(buffer, Dmabuf):
            raise TypeError(f"register {self.name} again onto a dma-buf: make a new region")
        if pd is not None and not pd.context.is_same(self.pd.context):
            raise ValueError(f"move {self.name} to {pd.name}: that is of another device than {self.pd.name}")
        pointer, wanted = self.pointer, self.access if access is None else access
        if buffer is None:
            held = None
            _check_writable(self._held[-1], wanted)
        else:
            held, _ = _memory(buffer, wanted)
        change = ReregMrFlags
        given = (change.CHANGE_TRANSLATION, held), (change.CHANGE_ACCESS, access), (change.CHANGE_PD, pd)
        flags = sum(int(flag) for flag, value in given if value is not None)
        start, length = (None, 0) if held is None else (held.addr, held.length)
        try:
            if pd is not None:
                self._adopt_by(pd)
            verbs.ibv_rereg_mr(pointer, flags, pd and pd.pointer, start, length, int(access or 0))
        except VerbsError:
            self._hold(held)
            # only the fork protection of the old memory has failed where the struct tells the new
            if held is not None and (pointer.contents.addr, pointer.contents.length) == (start, length):
                self._is_now(pointer, wanted, held, pd)
            raise
        except BaseException:
            if held is not None:
                held.release()
            if pd is not None and pd is not self.pd:
                self._leave_one(pd)
            raise
        self._hold(held)
        self._is_now(pointer, wanted, held, pd)

    def _hold(self, held: buffers.Buffer | None) -> None:
        if held is not None:
            held.pinned = True
            self._held.append(held)

    def _is_now(self, pointer: Any, access: AccessFlags, held: buffers.Buffer | None, pd: PD | None) -> None:
        """Take over what the device knows by now, and let go what it has forgotten."""
        self.lkey, self.rkey, self.access = pointer.contents.lkey, pointer.contents.rkey, access
        if held is not None:
            self.addr, self.length, self.name = held.addr, held.length, f"MR of {held.length} bytes"
            _let_go(self._held[:-1])
            del self._held[:-1]
        if pd is not None:
            self._adopt_by(pd, instead_of=self.pd)
            self.pd = pd

    @exclusive
    def advise(self, advice: AdviseMrAdvice, flags: int = 0) -> None:
        """Tell the device that this on-demand memory will be used soon.

        Args:
            advice: for reading, for writing, or without faulting pages in.
            flags: ``AdviseMrFlags``; with ``FLUSH`` it returns when it is done.

        Raises:
            ValueError: longer than one piece can be, 4 GiB - 1.
            LibraryError: EOPNOTSUPP where the device cannot.

        Source: ibv_advise_mr(3).
        """
        self.pointer  # noqa: B018
        sge = put(ibv_sge(), addr=self.addr, length=self.length, lkey=self.lkey)
        verbs.ibv_advise_mr(self.pd.pointer, int(advice), int(flags), ctypes.byref(sge), 1)

    def __len__(self) -> int:
        return int(self.length)


def check_buffer(buffer: Any) -> None:
    """Whether something can be registered at all, before there is a device to do it.

    Raises:
        TypeError, ValueError: as :class:`MR`.
    """
    held, _ = _memory(buffer, None)
    held.release()


def _memory(buffer: Any, access: AccessFlags | None) -> tuple[buffers.Buffer, AccessFlags]:
    """What is to be registered (for a dma-buf ``addr`` is the offset), and for what."""
    if isinstance(buffer, Dmabuf):
        held = buffers.Buffer(buffer, buffer.offset, buffer.length)
    elif isinstance(buffer, tuple):
        if len(buffer) != 2 or not all(hasattr(part, "__index__") for part in buffer):
            raise TypeError(f"register {shown(buffer)}: as a pair, give the address and the length in bytes")
        start, length = buffer
        held = buffers.Buffer(buffer, start, length)
    else:
        held = buffers.hold(buffer)
    if access is None:
        access = AccessFlags.REMOTE_READ if held.readonly else FULL_ACCESS
    try:
        if held.length < 1:
            raise ValueError("register a buffer of 0 bytes: give at least one byte")
        if not 0 <= held.addr <= 2**64 - held.length:
            raise ValueError(f"register {held.length} bytes at {held.addr:#x}: addresses have 64 bits, without a sign")
        bits("access", int(access), 31)
        _check_writable(held, access)
    except BaseException:
        held.release()
        raise
    return held, access


def _check_writable(held: buffers.Buffer, access: AccessFlags) -> None:
    if held.readonly and access & _WRITES:
        what = type(held.owner).__name__
        raise ValueError(f"register a read-only {what} for {access & _WRITES}: give a writable one")


def _let_go(held: list[buffers.Buffer]) -> None:
    """Release what no device knows any more."""
    for buffer in held:
        buffer.pinned = False
        buffer.release()


@atexit.register
def _at_exit() -> None:
    """The interpreter frees memory before the process ends, and until then a device could write there."""
    for mr in open_here():
        if isinstance(mr, MR):
            with contextlib.suppress(ResourceWarning):  # that it was never closed, where warnings are errors
                mr.__del__()


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
