"""Registered memory that messages are copied into, to be sent from there."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable

from ..abi import AccessFlags
from ..objects.memory import MR

__all__ = ["Place", "Staging"]


class Place:
    """A part of the memory that one message has.

    Attributes:
        start, end: bytes from the memory's start; ``end`` is that of the part itself.
        free: whether it was given back.
    """

    __slots__ = ("end", "free", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.free = start, end, False


class Staging:
    """A ring of registered memory: what is taken first is mostly given back first.

    Used under the engine's lock.

    Args:
        register: registers it.
        size: bytes; no message is longer.
        access: what the device may do with it, besides reading it.
    """

    def __init__(self, register: Callable[[mmap.mmap, AccessFlags], MR], size: int, access: AccessFlags) -> None:
        memory = mmap.mmap(-1, size)
        self.mr = register(memory, access)
        self._view, self._size = memoryview(memory), size
        self._taken: deque[Place] = deque()

    def take(self, data: bytes | bytearray | memoryview) -> Place | None:
        """Copy a message into a free part; None if there is none so long now."""
        length, taken = len(data), self._taken
        start = taken[-1].end if taken else 0
        first = taken[0].start if taken else self._size
        if taken and start > first:  # free are both ends
            if start + length > self._size:
                start = 0
            else:
                first = self._size
        if start + length > first:
            return None
        place = Place(start, start + length)
        taken.append(place)
        self._view[start : start + length] = data
        return place

    def holds(self, place: Place) -> bytes:
        """What a part holds now; ask before it is given back."""
        return bytes(self._view[place.start : place.end])

    def give_back(self, place: Place) -> None:
        """The device has done with it."""
        place.free = True
        while self._taken and self._taken[0].free:
            self._taken.popleft()
