"""Waiting for what a descriptor announces: blocking under a deadline, by poll(2), or with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..runtime.deadline import Deadline, wait_readable
from .owned import Owned

__all__ = ["Waitable"]

T = TypeVar("T")

#: the longest sleep: another thread may have taken what was announced, or closed the object, ms
_SLICE_MS = 100


class Waitable(Owned, Generic[T]):
    """An object with a descriptor that is readable when there is something to take.

    Several threads and tasks may wait on one; each thing goes to one of them. Closing wakes them all,
    with a ``StateError``.

    Args:
        make, name, parents: as :class:`Owned`.
        fd: finds the descriptor, given what ``make`` made; it is made non-blocking.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, parents: tuple[Owned, ...], fd: Callable[[Any], int]
    ) -> None:
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._fd = -1

        def made() -> Any:
            pointer = make()
            self._fd = fd(pointer)
            os.set_blocking(self._fd, False)
            return pointer

        super().__init__(made, name, parents)

    def _take(self) -> T | None:
        """What there is now; something false if there is nothing. Never blocks."""
        raise NotImplementedError

    def fileno(self) -> int:
        """The descriptor, for poll(2) and its kin; non-blocking.

        Raises:
            StateError: after close.
        """
        self.pointer  # noqa: B018
        return self._fd

    def wait(self, deadline: Deadline) -> T:
        """Sleep until there is something, and take it.

        Raises:
            DeadlineExceeded: there was nothing in time (or the class that ``deadline`` was given).
            StateError: closed, before or meanwhile.
        """
        while True:
            taken = self._take()
            if taken:
                return taken
            deadline.check(f"wait on {self.name}")
            wait_readable([self.fileno()], deadline, _SLICE_MS)

    async def wait_async(self, deadline: Deadline) -> T:
        """The same for a task: the event loop goes on meanwhile. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: there was nothing in time (or the class that ``deadline`` was given).
            StateError: closed, before or meanwhile.
        """
        while True:
            taken = self._take()
            if taken:
                return taken
            deadline.check(f"wait on {self.name}")
            await self._readable(deadline)

    async def _readable(self, deadline: Deadline) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        # a descriptor of its own: two tasks can watch, and none watches a number that was closed and given anew
        with self.lock:
            fd = os.dup(self.fileno())
        self._sleepers.add((loop, woken))
        loop.add_reader(fd, _wake, woken)
        try:
            if not self.closed:
                left = deadline.left_s
                await asyncio.wait([woken], timeout=None if math.isinf(left) else left)
        finally:
            loop.remove_reader(fd)
            self._sleepers.discard((loop, woken))
            os.close(fd)

    def _freed(self, pointer: Any) -> None:
        for loop, woken in list(self._sleepers):
            with contextlib.suppress(RuntimeError):  # that loop is over
                loop.call_soon_threadsafe(_wake, woken)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
