"""Work requests: one vocabulary of operations for both ways of posting them.

:class:`Work` has a method for each operation. A :class:`SendRequest` keeps one to be posted with
``QueuePair.post_send``, alone or in a list; a ``Batch`` of an extended queue pair writes one straight into its
send queue. Both take the same arguments, and both refuse here what a provider would not look at.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..abi import AccessFlags, MwType, PlacementType, SelectivityLevel, SendFlags, WrOpcode
from ..agreement.endpoint import RemoteRegion
from .address import RemoteSrq, UdAddress
from .buffers import as_bytes
from .fields import bits
from .memory import MR, Sge
from .memory_window import MW

__all__ = ["Operation", "Pieces", "Target", "Work", "check_fits", "check_open", "local", "regions", "too_long_inline"]

#: the local bytes of an operation
Pieces = Sge | Sequence[Sge] | None
#: whom an operation is for
Target = UdAddress | RemoteSrq | None

_W = TypeVar("_W", bound="Work")
_SIGNALED = SendFlags.SIGNALED
_INLINE = int(SendFlags.INLINE)


@dataclass(slots=True)
class Operation:
    """One operation, checked as far as that needs no queue pair.

    Args:
        opcode: what it does.
        args: the arguments of its ``ibv_wr_*`` function after the queue pair.
        wr_id: 64 bits.
        flags: ``SendFlags``; with ``INLINE`` where there is inline data.
        pieces: the local bytes, none of 0 bytes.
        inline: or the data itself.
        to: whom it is for, on UD and XRC_SEND.
        bind: the window and the region, for a bind.
        keep: memory that ``args`` point to.
    """

    opcode: WrOpcode
    args: tuple[Any, ...]
    wr_id: int
    flags: int
    pieces: Sequence[Sge] = ()
    inline: bytes | None = None
    to: Target = None
    bind: tuple[MW, MR] | None = None
    keep: Any = None

    def __post_init__(self) -> None:
        bits("wr_id", self.wr_id, 64)
        bits("flags", int(self.flags), 32)
        if self.inline is not None:
            self.flags |= _INLINE
        elif self.flags & _INLINE:
            raise ValueError(f"{self.opcode}: give the data itself (inline=...), not the flag INLINE")

    @property
    def length(self) -> int:
        """Bytes of data."""
        return sum(piece.length for piece in self.pieces) if self.inline is None else len(self.inline)

    def holds(self) -> tuple[Any, ...]:
        """The objects that the provider reads when it is posted: they must be open then."""
        found = self.bind or ()
        return (*found, self.to.ah) if isinstance(self.to, UdAddress) else found


class Work:
    """The operations of a send queue.

    Arguments that several have:

    * ``wr_id``: 64 bits, handed back in the completion.
    * ``sge``: the local bytes, a piece or a list of pieces (:meth:`MR.sge`); none for an empty message.
    * ``inline``: instead, the data itself, bytes-like or a list of such: copied, no region needed.
    * ``remote``: the peer's bytes; not fewer than the local ones.
    * ``to``: whom it is for: a :class:`UdAddress` on a UD queue pair, a :class:`RemoteSrq` on XRC_SEND, else none.
    * ``flags``: ``SendFlags``, ``SIGNALED`` by default.

    Raises, each of them:
        ValueError: an argument outside of its range, or that does not fit the others.
        StateError: an object that it names is closed.

    Source: ibv_post_send(3), ibv_wr_post(3).
    """

    def _put(self, work: Operation) -> None:
        """Keep or write an operation."""
        raise NotImplementedError

    def send(
        self: _W, wr_id: int, *, sge: Pieces = None, inline: Any = None, to: Target = None, flags: int = _SIGNALED
    ) -> _W:
        """Send a message."""
        self._put(Operation(WrOpcode.SEND, (), wr_id, flags, *local(sge, inline), to))
        return self

    def send_imm(
        self: _W,
        wr_id: int,
        imm_data: int,
        *,
        sge: Pieces = None,
        inline: Any = None,
        to: Target = None,
        flags: int = _SIGNALED,
    ) -> _W:
        """Send a message with ``imm_data``, 32 bits, which the receive's completion shows."""
        self._put(Operation(WrOpcode.SEND_WITH_IMM, (_be32(imm_data),), wr_id, flags, *local(sge, inline), to))
        return self

    def send_inv(
        self: _W, wr_id: int, invalidate_rkey: int, *, sge: Pieces = None, inline: Any = None, flags: int = _SIGNALED
    ) -> _W:
        """Send a message that invalidates a key of the receiver, that of a type 2 window for example."""
        key = (bits("invalidate_rkey", invalidate_rkey, 32),)
        self._put(Operation(WrOpcode.SEND_WITH_INV, key, wr_id, flags, *local(sge, inline)))
        return self

    def send_tso(
        self: _W, wr_id: int, hdr: bytes, mss: int, *, sge: Pieces = None, to: Target = None, flags: int = _SIGNALED
    ) -> _W:
        """Send packets with the header ``hdr`` and ``mss`` bytes of payload each, cut out of one message."""
        head = (ctypes.c_char * len(hdr)).from_buffer_copy(hdr)
        args = (ctypes.addressof(head), bits("the header's length", len(hdr), 16), bits("mss", mss, 16))
        self._put(Operation(WrOpcode.TSO, args, wr_id, flags, *local(sge, None), to, keep=head))
        return self

    def rdma_write(
        self: _W,
        wr_id: int,
        remote: RemoteRegion,
        *,
        sge: Pieces = None,
        inline: Any = None,
        to: Target = None,
        flags: int = _SIGNALED,
    ) -> _W:
        """Write to the peer's memory; the peer is not told."""
        args = (remote.rkey, remote.addr)
        self._rdma(Operation(WrOpcode.RDMA_WRITE, args, wr_id, flags, *local(sge, inline), to), remote)
        return self

    def rdma_write_imm(
        self: _W,
        wr_id: int,
        remote: RemoteRegion,
        imm_data: int,
        *,
        sge: Pieces = None,
        inline: Any = None,
        to: Target = None,
        flags: int = _SIGNALED,
    ) -> _W:
        """Write, then complete one of the peer's receives, which shows ``imm_data``, 32 bits."""
        args = (remote.rkey, remote.addr, _be32(imm_data))
        self._rdma(Operation(WrOpcode.RDMA_WRITE_WITH_IMM, args, wr_id, flags, *local(sge, inline), to), remote)
        return self

    def rdma_read(
        self: _W, wr_id: int, remote: RemoteRegion, *, sge: Pieces = None, to: Target = None, flags: int = _SIGNALED
    ) -> _W:
        """Read the peer's memory."""
        args = (remote.rkey, remote.addr)
        self._rdma(Operation(WrOpcode.RDMA_READ, args, wr_id, flags, *local(sge, None), to), remote)
        return self

    def atomic_cmp_swp(
        self: _W,
        wr_id: int,
        remote: RemoteRegion,
        compare: int,
        swap: int,
        *,
        sge: Sge,
        to: Target = None,
        flags: int = _SIGNALED,
    ) -> _W:
        """Replace 8 bytes of the peer by ``swap`` if they are ``compare``; the old ones come to ``sge``, 8 bytes.

        The numbers have 64 bits, in the byte order of the host that has the memory; address and region of
        the peer are multiples of 8.
        """
        args = (remote.rkey, _aligned(remote.addr), bits("compare", compare, 64), bits("swap", swap, 64))
        self._atomic(Operation(WrOpcode.ATOMIC_CMP_AND_SWP, args, wr_id, flags, *local(sge, None), to), remote)
        return self

    def atomic_fetch_add(
        self: _W, wr_id: int, remote: RemoteRegion, add: int, *, sge: Sge, to: Target = None, flags: int = _SIGNALED
    ) -> _W:
        """Add to 8 bytes of the peer, modulo 2**64; the old ones come to ``sge``. As :meth:`atomic_cmp_swp`."""
        args = (remote.rkey, _aligned(remote.addr), bits("add", add % 2**64, 64))
        self._atomic(Operation(WrOpcode.ATOMIC_FETCH_AND_ADD, args, wr_id, flags, *local(sge, None), to), remote)
        return self

    def atomic_write(self: _W, wr_id: int, remote: RemoteRegion, data: bytes, *, flags: int = _SIGNALED) -> _W:
        """Write 8 bytes to the peer's memory at once; only in a batch."""
        if len(data) != 8:
            raise ValueError(f"ATOMIC_WRITE of {len(data)} bytes: give 8")
        args = (remote.rkey, _aligned(remote.addr), (ctypes.c_char * 8).from_buffer_copy(data))
        self._rdma(Operation(WrOpcode.ATOMIC_WRITE, args, wr_id, flags), remote, 8)
        return self

    def flush(
        self: _W,
        wr_id: int,
        remote: RemoteRegion,
        placement: PlacementType = PlacementType.GLOBAL,
        level: SelectivityLevel = SelectivityLevel.RANGE,
        *,
        flags: int = _SIGNALED,
    ) -> _W:
        """Make what was written to ``remote`` visible, or persistent, at the peer; only in a batch."""
        args = (remote.rkey, remote.addr, remote.length, int(placement), int(level))
        self._put(Operation(WrOpcode.FLUSH, args, wr_id, flags))
        return self

    def bind_mw(
        self: _W,
        wr_id: int,
        mw: MW,
        mr: MR,
        *,
        offset: int = 0,
        length: int | None = None,
        access: AccessFlags | None = None,
        flags: int = _SIGNALED,
    ) -> _W:
        """Open a part of a region through a type 2 window, with the key ``mw.next_rkey``.

        Once posted, ``mw.rkey`` and ``mw.region`` are the new ones; they hold once it has completed.

        Args:
            mw: the window, unbound: free it with :meth:`local_inv` before it is bound again.
            mr: a region with ``MW_BIND`` access.
            offset, length: the part, in bytes; by default all.
            access: what the peer may do, by default everything remote; ``ZERO_BASED`` counts addresses from 0.
        """
        if mw.mw_type != MwType.TYPE_2:
            raise ValueError(f"bind {mw.name}: a work request binds type 2, QueuePair.bind_mw() type 1")
        args = (mw.pointer, mw.next_rkey, mw.bind_info(mr, offset, length, access))
        self._put(Operation(WrOpcode.BIND_MW, args, wr_id, flags, bind=(mw, mr)))
        return self

    def local_inv(self: _W, wr_id: int, invalidate_rkey: int, *, flags: int = _SIGNALED) -> _W:
        """Invalidate a key of this side: the window it belongs to is free again."""
        self._put(Operation(WrOpcode.LOCAL_INV, (bits("invalidate_rkey", invalidate_rkey, 32),), wr_id, flags))
        return self

    def _rdma(self, work: Operation, remote: RemoteRegion, length: int | None = None) -> None:
        length = work.length if length is None else length
        if length > remote.length:
            raise ValueError(f"{work.opcode} of {length} bytes: the remote region has {remote.length}")
        self._put(work)

    def _atomic(self, work: Operation, remote: RemoteRegion) -> None:
        if work.length != 8:
            raise ValueError(f"{work.opcode} into {work.length} local bytes: give 8")
        self._rdma(work, remote, 8)


def _be32(imm_data: int) -> int:
    return socket.htonl(bits("imm_data", imm_data, 32))


def _aligned(addr: int) -> int:
    if addr % 8:
        raise ValueError(f"an atomic on the remote address {addr:#x}: give a multiple of 8")
    return addr


def local(sge: Pieces, inline: Any) -> tuple[Sequence[Sge], bytes | None]:
    """The pieces, or the inline data in one: no provider needs it in several, and some get that wrong."""
    if inline is None:
        given = () if sge is None else (sge,) if isinstance(sge, Sge) else sge
        return tuple(piece for piece in given if piece.length), None  # some devices read a length of 0 as 2 GiB
    if sge is not None:
        raise ValueError("both sge and inline are given: give one of them")
    return (), b"".join(map(as_bytes, inline)) if isinstance(inline, list | tuple) else as_bytes(inline)


def check_fits(work: Operation | None, qp: Any, inline: int = 0) -> None:
    """Refuse an operation that a queue pair cannot carry: some providers do not look, and some would crash.

    Args:
        work: the operation; None for a plain one without a target.
        qp: the ``QueuePair``.
        inline: bytes of inline data of a plain one.

    Raises:
        ValueError: too much inline data, too many pieces, no target, something of another protection domain.
        StateError: an object that it names is closed.
    """
    to = None if work is None else work.to
    if qp.target is None and to is not None:
        raise ValueError(f"post to {qp.name}: only UD and XRC_SEND have a target (to=...)")
    if qp.target is not None and not isinstance(to, qp.target):
        raise ValueError(f"post to {qp.name}: say whom it is for (to={qp.target.__name__}(...))")
    if inline > qp.cap.max_inline_data:
        raise too_long_inline(inline, qp)
    if work is None:
        return
    for owned in (*work.holds(), *regions(work.pieces)):
        check_open(owned, qp)
    if len(work.pieces) > qp.cap.max_send_sge:
        raise ValueError(f"post {len(work.pieces)} pieces to {qp.name}: it takes {qp.cap.max_send_sge}")
    if work.inline is not None and len(work.inline) > qp.cap.max_inline_data:
        raise too_long_inline(len(work.inline), qp)
    if work.opcode == WrOpcode.TSO and work.args[1] > qp.max_tso_header:
        raise ValueError(f"post a TSO header of {work.args[1]} bytes to {qp.name}: it takes {qp.max_tso_header}")


def too_long_inline(length: int, qp: Any) -> ValueError:
    """That a queue pair takes less inline data."""
    return ValueError(f"post {length} bytes inline to {qp.name}: it takes {qp.cap.max_inline_data}")


def regions(pieces: Sequence[Sge]) -> Iterator[MR]:
    """The regions of pieces, as far as they are known."""
    return (piece.mr for piece in pieces if piece.mr is not None)


def check_open(owned: Any, queue: Any) -> None:
    """Refuse what a queue cannot use: by the completion's status nobody would see why.

    Args:
        owned: an ``MR``, ``MW`` or ``AddressHandle`` that a request names.
        queue: the ``QueuePair`` or ``SRQ`` that it is to be posted to.

    Raises:
        StateError: ``owned`` is closed.
        ValueError: it is of another protection domain.
    """
    owned.pointer  # noqa: B018
    if owned.pd.base is not queue.pd.base:
        raise ValueError(f"post to {queue.name}: {owned.name} is of another protection domain ({owned.pd.name})")
