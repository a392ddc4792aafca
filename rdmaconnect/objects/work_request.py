"""Work requests that are kept: built once, posted many times, alone or in lists."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, byref, pointer
from functools import partial
from itertools import accumulate, pairwise, repeat
from struct import Struct
from typing import Any

from .. import verbs
from ..abi import SendFlags, WrOpcode, ibv_recv_wr, ibv_send_wr, ibv_sge
from ..agreement.endpoint import RemoteRegion
from ..errors import PostError, StateError
from .address import UdAddress
from .fields import bits
from .memory import MR, Sge
from .operations import Operation, Work, local, regions

__all__ = ["RecvList", "RecvRequest", "SendList", "SendRequest", "fill_sges", "post"]

_INLINE = int(SendFlags.INLINE)
_SIGNALED = int(SendFlags.SIGNALED)


#: fields that lie side by side, to be set at once, which takes a third of the time
_SGE = Struct("=QII")  # ibv_sge: addr, length, lkey
_HEAD = Struct("=QQQiiI")  # ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags
_RDMA = Struct("=QI")  # wr.rdma.remote_addr, wr.rdma.rkey
_RECV = Struct("=QQQi4x")  # ibv_recv_wr: wr_id, next, sg_list, num_sge
_ONE_SGE = ibv_sge * 1
_AT_RDMA = ibv_send_wr.wr.offset


def fill_sges(array: Any, pieces: Sequence[Sge]) -> None:
    """Write pieces into an array of ``struct ibv_sge`` that is long enough."""
    for sge, piece in zip(array, pieces, strict=False):
        sge.addr, sge.length, sge.lkey = piece.addr, piece.length, piece.lkey


#: opcode -> the fields of ``ibv_send_wr`` that ``Operation.args`` go to, in that order
_FIELDS: dict[WrOpcode, tuple[str, ...]] = {
    WrOpcode.SEND: (),
    WrOpcode.SEND_WITH_IMM: ("imm_data",),
    WrOpcode.SEND_WITH_INV: ("invalidate_rkey",),
    WrOpcode.RDMA_WRITE: ("wr.rdma.rkey", "wr.rdma.remote_addr"),
    WrOpcode.RDMA_WRITE_WITH_IMM: ("wr.rdma.rkey", "wr.rdma.remote_addr", "imm_data"),
    WrOpcode.RDMA_READ: ("wr.rdma.rkey", "wr.rdma.remote_addr"),
    WrOpcode.ATOMIC_CMP_AND_SWP: ("wr.atomic.rkey", "wr.atomic.remote_addr", "wr.atomic.compare_add", "wr.atomic.swap"),
    WrOpcode.ATOMIC_FETCH_AND_ADD: ("wr.atomic.rkey", "wr.atomic.remote_addr", "wr.atomic.compare_add"),
    WrOpcode.BIND_MW: ("bind_mw.mw", "bind_mw.rkey", "bind_mw.bind_info"),
    WrOpcode.LOCAL_INV: ("invalidate_rkey",),
    WrOpcode.TSO: ("tso.hdr", "tso.hdr_sz", "tso.mss"),
}
#: those that need nothing but local bytes and remote ones
_PLAIN = frozenset((WrOpcode.SEND, WrOpcode.RDMA_WRITE, WrOpcode.RDMA_READ))


class _Kept:
    """A work request that is posted again and again.

    Attributes:
        wr: ``struct ibv_send_wr *`` or ``struct ibv_recv_wr *`` as ctypes gives it.
        mark: of the queue pair that :attr:`post` posts it to; None if it must be looked at before it is posted.
        post: posts it there; answers as the verb.
        bad: the first that could not be posted, as the verb said last.
    """

    wr: Any
    bad: Any
    mark: object = None
    post: Callable[[], int]

    def keep_for(self, mark: object, post: Callable[..., int]) -> None:
        """It fits a queue pair, as long as it is not changed.

        Args:
            mark: of the queue pair.
            post: its verb.
        """
        self.bad = type(self.wr)()
        self.post = partial(post, byref(self.wr.contents), byref(self.bad))
        self.mark = mark


class SendRequest(_Kept, Work):
    """A send work request, built once and posted many times; each operation replaces what it was before.

    It is of one thread at a time, and so is a :class:`RecvRequest`.

    Attributes:
        wr: ``struct ibv_send_wr *`` as ctypes gives it.
        work: the operation, or None after :meth:`fill`.
        inline: bytes that :meth:`fill_inline` has copied, else 0.
    """

    _most = 0
    #: opcode, length and flags of what was filled in inline, or None
    _kind: tuple[int, int, int] | None = None

    def __init__(self) -> None:
        self.inline = 0
        self._sges = (ibv_sge * 1)()
        self._at_sges = ctypes.addressof(self._sges)
        self._wr = ibv_send_wr(sg_list=self._sges, num_sge=1)
        self.wr = pointer(self._wr)
        self.work: Operation | None = None

    def fill(
        self,
        wr_id: int,
        opcode: WrOpcode,
        addr: int,
        length: int,
        lkey: int,
        *,
        remote: RemoteRegion | None = None,
        flags: int = _SIGNALED,
    ) -> SendRequest:
        """Set everything for the next post: for the hot path.

        Args:
            wr_id: 64 bits, handed back in the completion.
            opcode: SEND, RDMA_WRITE or RDMA_READ.
            addr, length, lkey: the local bytes, below 2**32; a length of 0 sends an empty message.
            remote: the remote ones, for RDMA.
            flags: ``SendFlags`` without ``INLINE``.

        Raises:
            ValueError: another opcode, or inline: there is a method for it. Or a number that has more bits.
        """
        if opcode not in _PLAIN or flags & _INLINE:
            raise ValueError(f"fill in {opcode} with {SendFlags(flags)}: use the operation's own method")
        if (wr_id | addr) >> 64 or (length | lkey | flags) >> 32:
            raise _too_large(wr_id, addr, length, lkey, flags)
        wr = self._wr
        # some devices read a length of 0 as 2 GiB
        _HEAD.pack_into(wr, 0, wr_id, 0, self._at_sges, 1 if length else 0, opcode, flags)
        _SGE.pack_into(self._sges, 0, addr, length, lkey)
        if remote is not None:
            _RDMA.pack_into(wr, _AT_RDMA, remote.addr, remote.rkey)
        if self.work is not None:
            self.work = self.mark = None
        self.inline, self._kind = 0, None
        return self

    def fill_inline(
        self,
        wr_id: int,
        opcode: WrOpcode,
        data: bytes | bytearray,
        remote: RemoteRegion | None = None,
        *,
        flags: int = _SIGNALED,
    ) -> SendRequest:
        """The same with the data itself, which is copied: for the hot path.

        Args:
            wr_id: 64 bits, handed back in the completion.
            opcode: SEND or RDMA_WRITE.
            data: at least one byte, and at most ``cap.max_inline_data`` of the queue pair.
            remote: the remote bytes, for RDMA.
            flags: ``SendFlags``.

        Raises:
            ValueError: another opcode: there is a method for it. Or a number that has more bits.
        """
        length, wr = len(data), self._wr
        kind = opcode, length, flags
        if kind == self._kind and not wr_id >> 64:  # as the one before: mostly it is
            wr.wr_id = wr_id
        else:
            if opcode not in _PLAIN or wr_id >> 64:
                raise ValueError(f"fill in {opcode} inline, wr_id {wr_id}: use the operation's own method, and 64 bits")
            if length > self._most:
                self._most, self._room = length, memoryview((ctypes.c_char * length)()).cast("B")
                self._at_room = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
            _HEAD.pack_into(wr, 0, wr_id, 0, self._at_sges, 1, opcode, flags | _INLINE)
            _SGE.pack_into(self._sges, 0, self._at_room, length, 0)
            if self.work is not None or length > self.inline:
                self.work = self.mark = None
            self.inline, self._kind = length, kind
        self._room[:length] = data
        if remote is not None:
            _RDMA.pack_into(wr, _AT_RDMA, remote.addr, remote.rkey)
        return self

    def _put(self, work: Operation) -> None:
        names = _FIELDS.get(work.opcode)
        if names is None:
            raise StateError(f"{work.opcode}: ibv_post_send has no such request. Use a batch of an extended QP.")
        wr = self._wr
        wr.wr_id, wr.opcode, wr.send_flags, wr.imm_data = work.wr_id, int(work.opcode), work.flags, 0
        self._place(work)
        for name, value in zip(names, work.args, strict=False):
            holder, _, field = name.rpartition(".")
            for part in holder.split(".") if holder else ():
                wr = getattr(wr, part)
            setattr(wr, field, value)
            wr = self._wr
        if isinstance(work.to, UdAddress):
            wr.wr.ud.ah, wr.wr.ud.remote_qpn = work.to.ah.pointer, work.to.remote_qpn
            wr.wr.ud.remote_qkey = work.to.remote_qkey
        elif work.to is not None:
            wr.qp_type.xrc.remote_srqn = work.to.srqn
        self.work, self.inline, self._kind, self.mark = work, 0, None, None

    def _place(self, work: Operation) -> None:
        """The local bytes; inline data gets a copy that lives as long as this object keeps it."""
        pieces = work.pieces
        if work.inline:
            self._copy = ctypes.create_string_buffer(work.inline, len(work.inline))
            pieces = (Sge(ctypes.addressof(self._copy), len(work.inline), 0),)
        if len(pieces) > len(self._sges):
            self._sges = (ibv_sge * len(pieces))()
            self._at_sges = ctypes.addressof(self._sges)
            self._wr.sg_list = self._sges
        fill_sges(self._sges, pieces)
        self._wr.num_sge = len(pieces)


def _too_large(wr_id: int, addr: int, length: int, lkey: int, flags: int) -> ValueError:
    """Which number does not fit."""
    given = {"wr_id": (wr_id, 64), "addr": (addr, 64), "length": (length, 32), "lkey": (lkey, 32), "flags": (flags, 32)}
    try:
        for name, (value, width) in given.items():
            bits(name, value, width)
    except ValueError as e:
        return e
    raise AssertionError("all of them fit")


class RecvRequest(_Kept):
    """A receive work request, built once and posted many times.

    Args:
        wr_id: 64 bits, handed back in the completion.
        addr, length, lkey: the local bytes; a UD message needs 40 more, which come first.

    Attributes:
        wr: ``struct ibv_recv_wr *`` as ctypes gives it.
        regions: the regions of its pieces, as far as they are known.
    """

    regions: tuple[MR, ...]

    def __init__(self, wr_id: int, addr: int = 0, length: int = 0, lkey: int = 0) -> None:
        if (wr_id | addr) >> 64 or (length | lkey) >> 32:
            raise _too_large(wr_id, addr, length, lkey, 0)
        self._sges, self._wr, self.regions = _ONE_SGE(), ibv_recv_wr(), ()
        _SGE.pack_into(self._sges, 0, addr, length, lkey)
        _RECV.pack_into(self._wr, 0, wr_id, 0, ctypes.addressof(self._sges), 1 if length else 0)
        self.wr = pointer(self._wr)

    @classmethod
    def scatter(cls, wr_id: int, sge: Sge | Sequence[Sge]) -> RecvRequest:
        """A receive into one piece or several, filled in order."""
        request = cls.__new__(cls)
        request._hold(wr_id, local(sge, None)[0])
        return request

    def _hold(self, wr_id: int, pieces: Sequence[Sge]) -> None:
        self._sges = (ibv_sge * len(pieces))()
        fill_sges(self._sges, pieces)
        self.regions = tuple(set(regions(pieces)))
        self._wr = ibv_recv_wr(wr_id=bits("wr_id", wr_id, 64), sg_list=self._sges, num_sge=len(pieces))
        self.wr = pointer(self._wr)


class RecvList(_Kept):
    """Receives into slots that lie side by side in memory, posted as one list: a post costs as much as one receive.

    Args:
        count: how many slots.
        length: bytes of each; not 0.
        lkey: the key of their memory.

    Attributes:
        wr: ``struct ibv_recv_wr *``, the first of them; their ``wr_id`` count from 0.
        regions: (), as it knows none.
    """

    regions = ()

    def __init__(self, count: int, length: int, lkey: int) -> None:
        self._bytes, self._length = count * length, length
        self._sges = (ibv_sge * count)()
        self._wrs = (ibv_recv_wr * count)()
        at, size = ctypes.addressof(self._wrs), ctypes.sizeof(ibv_recv_wr)
        following = [*range(at + size, at + size * count, size), 0]
        pieces = range(ctypes.addressof(self._sges), ctypes.addressof(self._sges) + count * _SGE.size, _SGE.size)
        _fill(self._wrs, map(_RECV.pack, range(count), following, pieces, repeat(1)))
        _fill(self._sges, repeat(_SGE.pack(0, length, lkey), count))
        #: each second number of these is the address of a slot
        self._addrs = memoryview(self._sges).cast("B").cast("Q")
        self._wr = self._wrs[0]
        self.wr, self.bad = pointer(self._wr), POINTER(ibv_recv_wr)()

    def at(self, addr: int) -> RecvList:
        """The same for slots that begin at that address; what was posted is not changed by it."""
        self._addrs[::2] = array("Q", range(addr, addr + self._bytes, self._length))
        return self


class SendList(_Kept):
    """Messages that lie side by side in memory, sent by one post; only the last of them gives a completion.

    Args:
        lengths: bytes of each, in order.
        lkey: the key of their memory.

    Attributes:
        wr: ``struct ibv_send_wr *``, the first of them.
        work: None, as of a :class:`SendRequest` that is filled.
        inline: 0, likewise.
    """

    work, inline = None, 0

    def __init__(self, lengths: Sequence[int], lkey: int) -> None:
        self._starts, count, size = [0, *accumulate(lengths)][:-1], len(lengths), ctypes.sizeof(ibv_send_wr)
        self._sges, self._wrs = (ibv_sge * count)(), (ibv_send_wr * count)()
        piece, following = ctypes.addressof(self._sges), ctypes.addressof(self._wrs)
        for at, length in enumerate(lengths):
            _SGE.pack_into(self._sges, at * _SGE.size, 0, length, lkey)
            following += size
            after, flags = (following, 0) if at + 1 < count else (0, _SIGNALED)
            # some devices read a length of 0 as 2 GiB
            sges = 1 if length else 0
            _HEAD.pack_into(self._wrs, at * size, 0, after, piece + at * _SGE.size, sges, WrOpcode.SEND, flags)
        #: each second number of these is an address; and each first one of a request its wr_id
        self._addrs = memoryview(self._sges).cast("B").cast("Q")
        self._ids = memoryview(self._wrs).cast("B").cast("Q")[:: size // 8]
        self._wr = self._wrs[0]
        self.wr, self.bad = pointer(self._wr), POINTER(ibv_send_wr)()

    def at(self, addr: int, wr_id: int) -> SendList:
        """The same for messages that begin at that address; their ``wr_id`` count from the one given."""
        self._addrs[::2] = array("Q", map(addr.__add__, self._starts))
        self._ids[:] = array("Q", range(wr_id, wr_id + len(self._starts)))
        return self


def _fill(array: Any, elements: Iterable[bytes]) -> None:
    """Write the elements of a C array."""
    ctypes.memmove(array, b"".join(elements), ctypes.sizeof(array))


def post(function: Callable[..., int], queue: Any, requests: Sequence[Any], verb: str, doing: str) -> None:
    """Post requests as one list.

    Args:
        function: the provider's, as ``verbs.op`` gives it.
        queue: the C pointer of what they are posted to.
        requests: at least one, each only once.
        verb: the verb's name.
        doing: where they go, in words.

    Raises:
        ValueError: a request comes twice.
        PostError: those before the first bad one were posted.
    """
    if len({id(request) for request in requests}) < len(requests):
        raise ValueError(f"post a list {doing}: a request is in it twice")
    for request, following in pairwise(requests):
        request._wr.next = following.wr
    bad = POINTER(type(requests[0]._wr))()
    try:
        number = function(queue, requests[0].wr, byref(bad))
    finally:
        for request in requests[:-1]:
            request._wr.next = None
    if number:
        raise post_error(number, requests, bad, verb, doing)


def post_error(result: int, requests: Sequence[Any], bad: Any, verb: str, doing: str) -> PostError:
    """What went wrong, by the verb's result, and which request was the first that was not posted."""
    number, hint = verbs.errno_of(verb, result), verbs.unexplained(verb, result) or None
    address = ctypes.addressof(bad.contents) if bad else 0
    for index, request in enumerate(requests):
        if ctypes.addressof(request._wr) == address:
            wr_id = request._wr.wr_id
            which = f"post work request {index + 1} of {len(requests)} (wr_id {wr_id}) {doing}"
            return PostError(verb, number, which, posted=index, wr_id=wr_id, hint=hint)
    return PostError(verb, number, f"post {len(requests)} work requests {doing}", hint=hint)
