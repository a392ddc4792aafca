"""One implementation, two fronts: procedures that say what they wait for, and the two ways of running them.

A procedure is a generator that yields :class:`Wait` where it has to sleep and :class:`Call` where something
blocks, and that knows neither threads nor asyncio. :func:`run` runs it in the calling thread,
:func:`arun` on an event loop: there nothing blocks, since a ``Wait`` becomes a reader on the
descriptors and a ``Call`` goes to a worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import StateError, VerbsError
from .deadline import Deadline, wait_ready
from .errand import Call, Errand
from .wakeup import Signal, lend_waker, return_waker
from .workers import here

__all__ = ["Call", "Errand", "Interrupt", "Procedure", "Wait", "arun", "call_apart", "do_apart", "run", "run_apart"]

T = TypeVar("T")


@dataclass(slots=True)
class Wait:
    """Sleep until something has changed, a descriptor is ready, the slice is over, or the deadline has passed.

    The procedure is sent the set of descriptors that are ready.

    Args:
        deadline: how long to sleep at most.
        fds: descriptors to be read.
        changes: signals, each with the count that the procedure has seen.
        writable: descriptors to be written.
        slice_ms: milliseconds after which to look again anyway.
    """

    deadline: Deadline
    fds: tuple[int, ...] = ()
    changes: tuple[tuple[Signal, int], ...] = ()
    writable: tuple[int, ...] = ()
    slice_ms: int | None = None


Procedure = Generator["Wait | Call", Any, T]


# ---- in the calling thread


class Interrupt:
    """What breaks into a procedure that another thread runs."""

    def __init__(self) -> None:
        self.signal = Signal()
        self.error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        """Have it raised in the procedure where that waits, or where it will wait next."""
        self.error = error
        self.signal.notify()

    def check(self) -> None:
        """Raise it, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def run(procedure: Procedure[T], interrupt: Interrupt | None = None) -> T:
    """Run a procedure in this thread, and return what it returns."""
    try:
        request = next(procedure)
        while True:
            try:
                answer: Any = _sleep(request, interrupt) if isinstance(request, Wait) else do(request, interrupt)
            except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
                request = procedure.throw(e)
            else:
                request = procedure.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


def run_apart(procedure: Procedure[T], undo: Callable[[T], object] | None = None) -> T:
    """Run a procedure where no signal handler can break into it, and return what it returns.

    Python runs signal handlers in the main thread, between any two of its steps; one that raises, as Ctrl-C
    does, would leave what was just made to nobody. So there a worker runs the procedure, and is told of the
    exception where it waits.

    Args:
        procedure: to be run.
        undo: takes back a result that came when the caller had been interrupted already.
    """
    if threading.current_thread() is not threading.main_thread():
        return run(procedure)
    interrupt = Interrupt()
    return _apart(partial(run, procedure, interrupt), interrupt.set, undo)


def do_apart(function: Callable[[], T]) -> T:
    """The same for a function, which waits for nothing that an interrupt could end."""
    return function() if threading.current_thread() is not threading.main_thread() else _apart(function)


def _apart(
    function: Callable[[], T],
    interrupt: Callable[[BaseException], object] | None = None,
    undo: Callable[[T], object] | None = None,
) -> T:
    apart = _Apart(function)
    try:
        here().start(apart.run)
        apart.wait()
        return apart.result()
    except BaseException as e:
        if apart.error is e or apart.give_up():
            raise
        if interrupt is not None:
            interrupt(e)
        _see_to_the_end(apart)
        if undo is not None and apart.error is None:
            undoing = _Apart(partial(undo, apart.result()))
            here().start(undoing.run)
            _see_to_the_end(undoing)
        raise


class _Apart(Generic[T]):
    """What a worker does for the main thread.

    The main thread only waits for a lock: of anything that it made or shared it could be robbed between two steps.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._done = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it, in a worker."""
        if not self.give_up():
            return
        try:
            self.value = self._function()
        except BaseException as e:  # noqa: BLE001  it is the caller's
            self.error = e
        finally:
            self._done = True
            self._over.release()

    def give_up(self) -> bool:
        """Have nobody do it from here on; False if somebody has begun to, or has given it up."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> None:
        """Until it has ended."""
        while not self._done:
            self._over.acquire()

    def result(self) -> T:
        """What it returned, or raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def _see_to_the_end(apart: _Apart[Any]) -> None:
    """Wait for its end though Ctrl-C comes once more: it is being cleaned up, and that is no quicker then."""
    while not apart._done:
        with contextlib.suppress(BaseException):
            apart.wait()


def _sleep(request: Wait, interrupt: Interrupt | None = None) -> set[int]:
    changes = request.changes
    if interrupt is not None:
        changes = (*changes, (interrupt.signal, interrupt.signal.count))
        interrupt.check()
    if not changes:
        return wait_ready(request.fds, request.writable, request.deadline, request.slice_ms)
    try:
        waker = lend_waker()
    except OSError as e:  # EMFILE, ENFILE
        raise VerbsError("eventfd", e.errno or 0, "wait") from None
    try:
        for signal, count in changes:
            if not signal.subscribe(waker.set, count):
                return set()
        fds = (*request.fds, waker.fileno())
        ready = wait_ready(fds, request.writable, request.deadline, request.slice_ms) - {waker.fileno()}
    finally:
        for signal, _ in changes:
            signal.unsubscribe(waker.set)
        return_waker(waker)
    if interrupt is not None:
        interrupt.check()
    return ready


def do(call: Call, interrupt: Interrupt | None = None) -> Any:
    """Make a call that a procedure asks for, in this thread or, with a deadline, in a worker."""
    if call.deadline is None:
        try:
            return call.function()
        finally:
            if call.finally_ is not None:
                call.finally_()
    errand = Errand(call)
    try:
        while not errand.done:
            _sleep(Wait(call.deadline, changes=((errand.changed, 0),)), interrupt)
            if not errand.done:
                call.deadline.check(call.stage)
        return errand.result()
    except BaseException:
        errand.give_up()
        raise


# ---- on an event loop


async def arun(procedure: Procedure[T]) -> T:
    """Run a procedure on the running event loop, and return what it returns.

    When cancelled, the procedure is told so where it waits, after a call without a deadline that is under way,
    and cleans up.
    """
    try:
        request = next(procedure)
        while True:
            try:
                answer: Any = await (ready(request) if isinstance(request, Wait) else _in_worker(request))
            except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
                request = procedure.throw(e)
            else:
                request = procedure.send(answer)
    except StopIteration as end:
        value: T = end.value
        return value


async def call_apart(function: Callable[[], T]) -> T:
    """Call what may block in a worker thread, and wait for it."""
    result: T = await _in_worker(Call(function))
    return result


async def _in_worker(call: Call) -> Any:
    errand = Errand(call)
    done = _woken_by(errand.changed)
    try:
        while not errand.done:
            await asyncio.wait([done], timeout=_seconds(call.deadline))
            if not errand.done and call.deadline is not None:
                call.deadline.check(call.stage)
        return errand.result()
    except BaseException:
        # without a deadline the call still uses what the procedure would free now, however often it is cancelled
        while call.deadline is None and not errand.done:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        errand.give_up()
        raise


def _woken_by(changed: Signal) -> asyncio.Future[None]:
    """A future of the running loop that is done once a signal is notified, or was, from any thread."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # that loop is over
            loop.call_soon_threadsafe(_set, woken)

    if not changed.subscribe(wake, 0):
        woken.set_result(None)
    return woken


def _set(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def _seconds(deadline: Deadline | None, slice_ms: int | None = None) -> float | None:
    limits = [] if slice_ms is None else [slice_ms / 1000]
    if deadline is not None and not math.isinf(deadline.left_s):
        limits.append(deadline.left_s)
    return min(limits, default=None)


async def ready(request: Wait) -> set[int]:
    """Wait on the running loop as a procedure asks for it."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[int] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # that loop is over
            loop.call_soon_threadsafe(_tell, woken, -1)

    # descriptors of its own: several tasks can watch one, and none a number that was closed and given anew
    watched: list[tuple[int, bool]] = []
    try:
        for signal, count in request.changes:
            if not signal.subscribe(wake, count):
                return set()
        for fds, add in ((request.fds, loop.add_reader), (request.writable, loop.add_writer)):
            for fd in fds:
                watched.append((_copy_of(fd), fds is request.writable))
                add(watched[-1][0], _tell, woken, fd)
        done, _ = await asyncio.wait([woken], timeout=_seconds(request.deadline, request.slice_ms))
        return {woken.result()} - {-1} if done else set()
    finally:
        for signal, _ in request.changes:
            signal.unsubscribe(wake)
        for fd, writing in watched:
            remove = loop.remove_writer if writing else loop.remove_reader
            remove(fd)
            os.close(fd)


def _copy_of(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise VerbsError("dup", e.errno, "wait on an event loop") from None
        raise StateError("wait: what was waited for is closed.") from None


def _tell(future: asyncio.Future[int], fd: int) -> None:
    if not future.done():
        future.set_result(fd)
