"""The channels of this process: all tick by one timer, and end with the process.

All of this is of the service thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from ..runtime.fork import in_child
from . import service

__all__ = ["TICK_S", "Alive", "add", "at_last", "now", "open_channels", "remove", "skipped"]

#: seconds between two ticks
TICK_S = 1.0


class Alive(Protocol):
    """A channel.

    Attributes:
        closing: whether it was closed, and what was sent last may still go out.
    """

    closing: bool

    def tick(self) -> None:
        """A second has passed."""

    def finish(self) -> None:
        """Free everything."""


_open: set[Alive] = set()
_ticking = False
#: the clock at the last tick, and when that was
_clock, _ticked = 0.0, 0.0
#: ticks before the last one that did not come, since this process was stopped
_skipped = 0
#: seconds that it goes on by from one tick to the next, at most
_STEP_MAX_S = 2.0
#: called when the process ends and all channels are finished
_at_last: list[Callable[[], None]] = []


def at_last(function: Callable[[], None]) -> None:
    """Have ``function`` called in the service thread when the process ends and every channel is finished."""
    _at_last.append(function)


def open_channels() -> int:
    """How many channels this process has."""
    return len(_open)


def now() -> float:
    """Seconds that this process was there, while it had channels: a clock that hardly moves while it is stopped.

    One that was stopped must not blame its peers for it.
    """
    return _clock + min((time.monotonic() - _ticked) / TICK_S, _STEP_MAX_S)


def skipped() -> int:
    """How many ticks before this one did not come, since the process was stopped. For :meth:`Alive.tick`."""
    return _skipped


def add(channel: Alive) -> None:
    """One more ticks."""
    _open.add(channel)
    _keep_ticking()


def remove(channel: Alive) -> None:
    """It ticks no more."""
    _open.discard(channel)


def _keep_ticking() -> None:
    """One timer for all, while there are any."""
    global _ticking, _ticked
    if not _ticking:
        _ticking, _ticked = True, time.monotonic()
        service.loop().call_later(TICK_S, _tick)


def _tick() -> None:
    global _ticking, _clock, _skipped
    _skipped = max(0, round((time.monotonic() - _ticked) / TICK_S) - 1)
    _ticking, _clock = False, now()
    if _open:
        _keep_ticking()
    for channel in tuple(_open):
        channel.tick()


async def _flush() -> None:
    """What was said last goes out before the process ends; then ZeroMQ may go."""
    while any(channel.closing for channel in _open):
        await asyncio.sleep(0.005)


async def _last() -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_flush(), service.END_S / 2)
    for channel in tuple(_open):
        channel.finish()
    for function in _at_last:
        function()


service.at_end(_last)


def _forget() -> None:
    global _ticking
    _ticking = False
    _open.clear()


in_child(_forget)
