"""Long frames take turns: to read one takes long, whatever is in it, and so little of the time is left to them.

All of this is of the service thread.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from ..runtime.fork import in_child
from . import service

__all__ = ["begin", "cost", "end", "is_too_slow", "waits"]

#: peers that may be in the midst of a longer frame at the same time, and for how long while others wait, seconds
LONG_FRAMES, LONG_FRAME_S = 16, 2.0
#: of the time, this part may go to long frames: after each no other is begun for so many times what it has cost
_LONG_TIMES = 4.0


class Reader(Protocol):
    """Who may be in the midst of a long frame."""

    @property
    def over(self) -> bool:
        """Whether it reads no more."""

    def read_on(self) -> None:
        """It may go on."""


#: those in the midst of a long frame since when, and those that wait to be
_long: dict[Reader, float] = {}
_waiting: deque[Reader] = deque()
#: when the next long frame may begin, on the monotonic clock
_long_from = 0.0
_letting_in = False


def begin(reader: Reader) -> bool:
    """Whether it may go on with its long frame: only so many may at the same time. If not, it is told later."""
    if reader in _long:
        return True
    now = time.monotonic()
    if len(_long) < LONG_FRAMES and not _waiting and now >= _long_from:
        _long[reader] = now
        return True
    if reader not in _waiting:
        _waiting.append(reader)
        _let_in_later()
    return False


def waits(reader: Reader) -> bool:
    """Whether it waits for its turn."""
    return reader in _waiting


def is_too_slow(reader: Reader) -> bool:
    """Whether it takes longer than it may while others wait."""
    since = _long.get(reader)
    return since is not None and bool(_waiting) and time.monotonic() - since > LONG_FRAME_S


def cost(seconds: float) -> float:
    """One has cost so much of the processor; for how many seconds there is to be a rest for that."""
    global _long_from
    _long_from = max(_long_from, time.monotonic()) + _LONG_TIMES * seconds
    return _LONG_TIMES * seconds


def end(reader: Reader) -> None:
    """It is through, or gone: another may begin."""
    if reader in _waiting:
        _waiting.remove(reader)
        reader.read_on()
    _long.pop(reader, None)
    _let_in_later()


def _let_in_later() -> None:
    global _letting_in
    if _waiting and not _letting_in:
        _letting_in = True
        service.loop().call_later(max(0.0, _long_from - time.monotonic()), _let_in)


def _let_in() -> None:
    """The next of those who wait may begin with a long frame, if there is room and time for it."""
    global _letting_in
    _letting_in = False
    while _waiting and len(_long) < LONG_FRAMES and time.monotonic() >= _long_from:
        following = _waiting.popleft()
        if not following.over:
            _long[following] = time.monotonic()
            following.read_on()
    if len(_long) < LONG_FRAMES:
        _let_in_later()


def _forget() -> None:
    global _letting_in, _long_from
    _letting_in, _long_from = False, 0.0
    _long.clear()
    _waiting.clear()


in_child(_forget)
