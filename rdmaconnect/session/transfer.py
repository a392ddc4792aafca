"""A transfer as work requests: one, or several where one message may not be so long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..abi import WrOpcode
from ..agreement.endpoint import RemoteRegion

__all__ = ["LONGEST", "Last", "Part", "parts"]

#: bytes that no device is given in one message, whatever it says that it takes: a length has 31 bits in some
LONGEST = 1 << 30


class Part(NamedTuple):
    """What one work request does of a transfer; fields as :meth:`Transceiver.post` takes them."""

    opcode: WrOpcode
    place: tuple[int, int, int]
    target: RemoteRegion | None
    imm: int | None


def parts(
    opcode: WrOpcode, place: tuple[int, int, int], target: RemoteRegion | None, imm: int | None, longest: int
) -> Iterator[Part]:
    """Divide a transfer.

    Args:
        opcode, place, target, imm: of the whole, as :meth:`Transceiver.post` takes them; without a target it is not
            divided.
        longest: bytes of the longest message.

    Yields:
        The parts in order; only the last of them tells the peer.
    """
    addr, length, lkey = place
    plain = opcode if imm is None else WrOpcode.RDMA_WRITE
    start = 0
    while target is not None and length - start > longest:
        yield Part(plain, (addr + start, longest, lkey), target.slice(start, longest), None)
        start += longest
    left = length - start
    rest = target.slice(start, left) if target is not None and start else target
    yield Part(opcode, (addr + start, left, lkey), rest, imm)


class Last:
    """Calls a function once, when the last of those that need something is done.

    Args:
        function: what to call.
        lock: held while they are counted; at first there is one.
    """

    def __init__(self, function: Callable[[], None], lock: AbstractContextManager[object]) -> None:
        self._function, self._lock, self._left = function, lock, 1

    def one_more(self) -> None:
        """Another one needs it."""
        with self._lock:
            self._left += 1

    def one_less(self) -> None:
        """One is done with it."""
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self._function()
