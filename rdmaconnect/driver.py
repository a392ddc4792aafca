"""One middle, two fronts: stories that say what they wait for, and the two ways of telling them.

A story is a generator that yields :class:`Wait` where it has to sleep and :class:`Call` where something
blocks, and that knows neither threads nor asyncio. :func:`run` tells it in the calling thread,
:func:`arun` on an event loop: there nothing blocks, since a ``Wait`` becomes a reader on the
descriptors and a ``Call`` goes to a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from .deadline import Deadline, wait_readable

__all__ = ["Call", "Story", "Wait", "arun", "run"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep until a descriptor can be read, the slice is over, or the deadline has passed.

    The story is sent the set of descriptors that can be read.
    """

    fds: tuple[int, ...]
    deadline: Deadline
    slice_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Call something that may block for seconds; the story is sent its result, or its exception is raised there.

    Args:
        function: what to call.
        undo: takes back a result that comes when the story was cancelled meanwhile, and so has no use for it.
    """

    function: Callable[[], Any]
    undo: Callable[[Any], None] | None = None


Story = Generator["Wait | Call", Any, T]


def run(story: Story[T]) -> T:
    """Tell a story in this thread, and return what it returns."""
    try:
        request = next(story)
        while True:
            try:
                if isinstance(request, Wait):
                    answer: Any = wait_readable(request.fds, request.deadline, request.slice_ms)
                else:
                    answer = request.function()
            except BaseException as e:  # noqa: BLE001  it is the story's to handle
                request = story.throw(e)
            else:
                request = story.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


async def arun(story: Story[T]) -> T:
    """Tell a story on the running event loop, and return what it returns.

    When cancelled, the story is told so where it waits, after a call that is under way, and cleans up.
    """
    try:
        request = next(story)
        while True:
            try:
                answer: Any = await (_readable(request) if isinstance(request, Wait) else _in_thread(request))
            except BaseException as e:  # noqa: BLE001  it is the story's to handle
                request = story.throw(e)
            else:
                request = story.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


async def _in_thread(request: Call) -> Any:
    future = asyncio.get_running_loop().run_in_executor(None, request.function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # the call still uses what the story would free now, however often it is cancelled
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if future.exception() is None and request.undo is not None:
            request.undo(future.result())
        raise


#: each loop's readers: descriptor -> those who wait for it, since a loop keeps only one callback for each
_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, set[asyncio.Future[int]]]] = (
    weakref.WeakKeyDictionary()
)


async def _readable(request: Wait) -> set[int]:
    loop = asyncio.get_running_loop()
    readers = _readers.setdefault(loop, {})
    future: asyncio.Future[int] = loop.create_future()
    limits = [request.deadline.left_s] + ([request.slice_ms / 1000] if request.slice_ms is not None else [])
    limit = min(limits)
    try:
        for fd in request.fds:
            if fd not in readers:
                loop.add_reader(fd, _wake, readers, fd)
                readers[fd] = set()
            readers[fd].add(future)
        done, _ = await asyncio.wait([future], timeout=None if math.isinf(limit) else limit)
        return {future.result()} if done else set()
    finally:
        _forget(loop, readers, request.fds, future)


def _wake(readers: dict[int, set[asyncio.Future[int]]], fd: int) -> None:
    for future in readers.get(fd, ()):
        if not future.done():
            future.set_result(fd)


def _forget(
    loop: asyncio.AbstractEventLoop,
    readers: dict[int, set[asyncio.Future[int]]],
    fds: Iterable[int],
    future: asyncio.Future[int],
) -> None:
    for fd in fds:
        waiting = readers.get(fd)
        if waiting is not None:
            waiting.discard(future)
            if not waiting:
                del readers[fd]
                loop.remove_reader(fd)
