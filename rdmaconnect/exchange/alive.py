"""The channels of this process: all tick by one timer, and end with the process.

All of this is of the service thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from ..runtime.fork import in_child
from . import service

__all__ = ["TICK_S", "Alive", "add", "at_last", "open_channels", "remove"]

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
#: called when the process ends and all channels are finished
_at_last: list[Callable[[], None]] = []


def at_last(function: Callable[[], None]) -> None:
    """Have ``function`` called in the service thread when the process ends and every channel is finished."""
    _at_last.append(function)


def open_channels() -> int:
    """How many channels this process has."""
    return len(_open)


def add(channel: Alive) -> None:
    """One more ticks."""
    _open.add(channel)
    _keep_ticking()


def remove(channel: Alive) -> None:
    """It ticks no more."""
    _open.discard(channel)


def _keep_ticking() -> None:
    """One timer for all, while there are any."""
    global _ticking
    if not _ticking:
        _ticking = True
        service.loop().call_later(TICK_S, _tick)


def _tick() -> None:
    global _ticking
    _ticking = False
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
