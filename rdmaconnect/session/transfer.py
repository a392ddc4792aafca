"""A transfer as work requests: one, or several where one message may not be so long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..abi import WrOpcode
from ..agreement.endpoint import RemoteRegion
from ..objects.address import UdAddress
from ..objects.memory import Sge
from ..objects.work_request import SendRequest
from .life import Life

__all__ = ["LONGEST", "Part", "Piece", "Sent", "fill", "parts", "words"]

#: bytes that no device is given in one message, whatever it says that it takes: a length has 31 bits in some
LONGEST = 1 << 30
_COMPARE_SWAP = WrOpcode.ATOMIC_CMP_AND_SWP
_VERBS = {
    WrOpcode.SEND: "send", WrOpcode.RDMA_READ: "read", _COMPARE_SWAP: "compare and swap",
    WrOpcode.ATOMIC_FETCH_AND_ADD: "fetch and add to",
}  # fmt: skip


class Part(NamedTuple):
    """What one work request does of a transfer.

    Args:
        opcode: what it does.
        place: address, length in bytes and lkey of the local memory.
        target: for RDMA, the memory of the peer.
        imm: for an RDMA write, 32 bits that complete a receive of the peer.
        inline: instead of ``place``, the data itself, bytes or bytearray.
        operands: for an atomic, what is added, or what is compared with and what takes its place; 64 bits each.
    """

    opcode: WrOpcode
    place: tuple[int, int, int]
    target: RemoteRegion | None = None
    imm: int | None = None
    inline: Any = None
    operands: tuple[int, ...] = ()


def fill(request: SendRequest, wr_id: int, part: Part, to: UdAddress | None, flags: int) -> None:
    """Have a work request do what it is to do."""
    opcode, place, remote, imm, inline, operands = part
    if to is not None:
        request.send(wr_id, sge=None if inline else Sge(*place), inline=inline, to=to, flags=flags)
    elif imm is not None and remote is not None:
        sge = None if inline else Sge(*place)
        request.rdma_write_imm(wr_id, remote, imm, sge=sge, inline=inline, flags=flags)
    elif operands and remote is not None:
        atomic = request.atomic_cmp_swp if opcode == _COMPARE_SWAP else request.atomic_fetch_add
        atomic(wr_id, remote, *operands, sge=Sge(*place), flags=flags)
    elif inline is not None:
        request.fill_inline(wr_id, opcode, inline, remote=remote, flags=flags)
    else:
        request.fill(wr_id, opcode, *place, remote=remote, flags=flags)


def parts(
    opcode: WrOpcode, place: tuple[int, int, int], target: RemoteRegion | None, imm: int | None, longest: int
) -> Iterator[Part]:
    """Divide a transfer.

    Args:
        opcode, place, target, imm: of the whole, as :class:`Part` has them; without a target it is not divided.
        longest: bytes of the longest message.

    Yields:
        The parts in order; only the last of them tells the peer.
    """
    addr, length, lkey = place
    plain = opcode if imm is None else WrOpcode.RDMA_WRITE
    start = 0
    while target is not None and length - start > longest:
        yield Part(plain, (addr + start, longest, lkey), target.slice(start, longest))
        start += longest
    left = length - start
    rest = target.slice(start, left) if target is not None and start else target
    yield Part(opcode, (addr + start, left, lkey), rest, imm)


def words(opcode: WrOpcode, length: int) -> str:
    """What a transfer does, for messages."""
    return f"{_VERBS.get(opcode, 'write')} {length} bytes"


class Sent:
    """A transfer on its way: what becomes of its work requests, and what must be let go when all are done.

    Counted under the engine's lock.

    Args:
        opcode: what it does.
        length: bytes.

    Attributes:
        left: work requests that have not completed; the last one counts from the beginning.
        posted: whether the last one was posted.
        status: None while there are such; then that of the first that failed, or SUCCESS.
        failed, vendor_err, wr_id: status and the rest of the first that failed, 0 until one has.
        life: in which life of its connection a work request of it failed; None while none has.
        release: called when it is over.
    """

    # mostly it stays so, and is not to be set each time
    left, posted = 1, False
    status: int | None = None
    failed = vendor_err = wr_id = 0
    life: Life | None = None

    def __init__(self, opcode: WrOpcode, length: int, release: Callable[[], object] | None = None) -> None:
        self.opcode, self.length, self.release = opcode, length, release

    @property
    def doing(self) -> str:
        """It in words."""
        return words(self.opcode, self.length)

    def over(self) -> bool | None:
        """True when nothing more comes of it, None before."""
        return None if self.status is None else True

    def ended(self, status: int = 0, vendor_err: int = 0, wr_id: int = 0) -> None:
        """One of its work requests has completed, or the last one is never posted."""
        if status and not self.failed:
            self.failed, self.vendor_err, self.wr_id = status, vendor_err, wr_id
        self.left -= 1
        if not self.left:
            self.status = self.failed
            if self.release is not None:
                self.release()


class Piece(NamedTuple):
    """One work request of a list.

    Args:
        sent: what becomes of the transfer that it is of.
        part: what it does.
        last: whether it is the last of ``sent``.
    """

    sent: Sent
    part: Part
    last: bool
