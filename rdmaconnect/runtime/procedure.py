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
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import StateError, VerbsError
from .deadline import Deadline, wait_ready
from .wakeup import Signal, lend_waker, return_waker
from .workers import here

__all__ = ["Call", "Interrupt", "Procedure", "Wait", "arun", "call_apart", "run", "run_apart"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Call:
    """Call something that may block for seconds; the procedure is sent its result, or its exception is raised there.

    Args:
        function: what to call.
        deadline: if given, the procedure goes on without the call when it has passed, or when the procedure is
            interrupted or cancelled: then the call comes to its end in a worker thread. Without one the
            call is waited for.
        stage: for the error that says that the deadline has passed.
        undo: takes back a result that comes too late for the procedure.
        finally_: called once the call is over or will never begin, whatever became of it.
    """

    function: Callable[[], Any]
    deadline: Deadline | None = None
    stage: str = ""
    undo: Callable[[Any], None] | None = None
    finally_: Callable[[], None] | None = None


Procedure = Generator["Wait | Call", Any, T]


class _Errand:
    """A call that a worker makes for a procedure, which may go on without it."""

    def __init__(self, call: Call) -> None:
        self._call, self._lock = call, threading.Lock()
        self._over = self._given_up = False
        try:
            self.future: Future[Any] = here().submit(call.function)
        except BaseException:
            if call.finally_ is not None:
                call.finally_()
            raise
        self.future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        with self._lock:
            self._over, late = True, self._given_up
        try:
            if late:
                self._take_back()
        finally:
            if self._call.finally_ is not None:
                self._call.finally_()

    def give_up(self) -> None:
        """The procedure does not want the result any more."""
        with self._lock:
            if self._given_up:
                return
            self._given_up, over = True, self._over
        self.future.cancel()
        if over:
            self._take_back()

    def _take_back(self) -> None:
        future, undo = self.future, self._call.undo
        if undo is not None and not future.cancelled() and future.exception() is None:
            undo(future.result())


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
                answer: Any = _sleep(request, interrupt) if isinstance(request, Wait) else _do(request, interrupt)
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
    apart = _Apart(procedure)
    try:
        here().start(apart.run)
        apart.wait()
        return apart.result()
    except BaseException as e:
        if apart.error is e or apart.give_up():
            raise
        apart.interrupt.set(e)
        _see_to_the_end(apart)
        if undo is not None and apart.error is None:
            undoing = _Apart(_undo(undo, apart.value))
            here().start(undoing.run)
            _see_to_the_end(undoing)
        raise


class _Apart(Generic[T]):
    """A procedure that a worker runs for the main thread.

    The main thread only waits for a lock: of anything that it made or shared it could be robbed between two steps.
    """

    def __init__(self, procedure: Procedure[T]) -> None:
        self._procedure, self.interrupt = procedure, Interrupt()
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._done = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it, in a worker."""
        if not self.give_up():
            return
        try:
            self.value = run(self._procedure, self.interrupt)
        except BaseException as e:  # noqa: BLE001  it is the caller's
            self.error = e
        finally:
            self._done = True
            self._over.release()

    def give_up(self) -> bool:
        """Have nobody run it from here on; False if somebody has begun to, or has given it up."""
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


def _undo(undo: Callable[[Any], object], value: Any) -> Procedure[None]:
    yield Call(partial(undo, value))


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


def _do(call: Call, interrupt: Interrupt | None = None) -> Any:
    if call.deadline is None:
        try:
            return call.function()
        finally:
            if call.finally_ is not None:
                call.finally_()
    errand = _Errand(call)
    done = Signal()
    try:
        errand.future.add_done_callback(lambda _: done.notify())
        while not errand.future.done():
            _sleep(Wait(call.deadline, changes=((done, 0),)), interrupt)
            if not errand.future.done():
                call.deadline.check(call.stage)
        return errand.future.result()
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
                answer: Any = await (_ready(request) if isinstance(request, Wait) else _in_worker(request))
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
    errand = _Errand(call)
    done = _woken_by(errand.future.add_done_callback)
    try:
        while not errand.future.done():
            await asyncio.wait([done], timeout=_seconds(call.deadline))
            if not errand.future.done() and call.deadline is not None:
                call.deadline.check(call.stage)
        return errand.future.result()
    except BaseException:
        # without a deadline the call still uses what the procedure would free now, however often it is cancelled
        while call.deadline is None and not errand.future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        errand.give_up()
        raise


def _woken_by(subscribe: Callable[[Callable[[Any], None]], None]) -> asyncio.Future[None]:
    """A future of the running loop that is done when what was subscribed to calls, from any thread."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is over
            loop.call_soon_threadsafe(_set, woken)

    subscribe(wake)
    return woken


def _set(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def _seconds(deadline: Deadline | None, slice_ms: int | None = None) -> float | None:
    limits = [] if slice_ms is None else [slice_ms / 1000]
    if deadline is not None and not math.isinf(deadline.left_s):
        limits.append(deadline.left_s)
    return min(limits, default=None)


async def _ready(request: Wait) -> set[int]:
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
