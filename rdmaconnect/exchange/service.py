"""The service thread: one event loop in each process, which reads every exchange, whatever the application is at.

It is a daemon and sleeps while nothing happens. It is started by the first exchange, and at the end of the
process it lets what was said last go out. A child of ``fork`` gets one of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

from ..errors import VerbsError
from ..runtime.fork import in_child

__all__ = ["at_end", "do", "loop", "soon", "start"]

T = TypeVar("T")

#: seconds that the end of the process may take for what is still to be sent
END_S = 1.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
#: whether the process ends, so that nothing is begun any more
_over = False
#: what runs in the service thread, each until its end or that of the process
_tasks: set[asyncio.Task[Any]] = set()
#: called in the service thread when the process ends; each gives what is to be waited for
_at_end: list[Callable[[], Any]] = []


def loop() -> asyncio.AbstractEventLoop:
    """The loop of this process's service thread, which is started if need be.

    Raises:
        VerbsError: EMFILE, ENFILE.
        RuntimeError: this process can start no thread.
    """
    global _loop, _thread
    if threading.current_thread() is _thread:
        return asyncio.get_running_loop()
    with _lock:
        if _over:
            raise RuntimeError("the process ends: nothing is exchanged any more")
        if _loop is None:
            try:
                _check_room()
                made = asyncio.new_event_loop()
            except OSError as e:
                raise VerbsError("epoll_create", e.errno or 0, "open an exchange") from None
            thread = threading.Thread(target=_run, args=(made,), name="rdmaconnect-exchange", daemon=True)
            try:
                thread.start()
            except BaseException:
                made.close()
                raise
            _loop, _thread = made, thread
        return _loop


def _check_room() -> None:
    """Raise OSError if there are no three descriptors for a loop: of one that it cannot finish asyncio complains."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _run(made: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(made)
    made.run_forever()


def soon(function: Callable[..., object], *args: object) -> None:
    """Have ``function`` called in the service thread; it must not block. After the end nothing is called any more."""
    if threading.current_thread() is _thread:  # which is awake
        asyncio.get_running_loop().call_soon(function, *args)
        return
    with contextlib.suppress(RuntimeError):  # closed: the process ends
        loop().call_soon_threadsafe(function, *args)


def do(function: Callable[[], T], patience_s: float | None = None) -> T:
    """Call ``function`` in the service thread, and wait for it; it must not block.

    Args:
        function: what to call.
        patience_s: seconds after which it is called all the same, but not waited for any more; None waits for ever.

    Returns:
        Its result, or raises its exception.

    Raises:
        TimeoutError: the patience is over.
    """
    if threading.current_thread() is _thread:
        return function()
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as e:  # noqa: BLE001  it is the caller's
            future.set_exception(e)

    loop().call_soon_threadsafe(call)
    try:
        return future.result(patience_s)
    except NotDone:  # until Python 3.11 it is no TimeoutError
        raise TimeoutError from None


def start(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine in the service thread; what it raises is for nobody. The end of the process cancels it."""

    def begin() -> None:
        task = asyncio.ensure_future(coroutine)
        _tasks.add(task)
        task.add_done_callback(_forget_task)

    try:
        loop().call_soon_threadsafe(begin)
    except BaseException:
        coroutine.close()
        raise


def _forget_task(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled():
        task.exception()


def at_end(function: Callable[[], Any]) -> None:
    """Have ``function`` called in the service thread when the process ends.

    Args:
        function: gives an awaitable that is waited for, within a second for all of them.
    """
    _at_end.append(function)


async def _end() -> None:
    waiting = [asyncio.ensure_future(function()) for function in _at_end]
    for task in list(_tasks):
        task.cancel()
        waiting.append(task)
    if waiting:
        await asyncio.wait(waiting, timeout=END_S)


@atexit.register
def _stop() -> None:
    global _loop, _over
    with _lock:
        ending, thread, _loop, _over = _loop, _thread, None, True
    if ending is None or thread is None or not thread.is_alive():
        return
    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(_end(), ending).result(END_S + 0.5)
    ending.call_soon_threadsafe(ending.stop)
    thread.join(END_S)
    if not thread.is_alive():
        ending.close()


def _forget() -> None:
    """In a child: what was inherited is left alone, since to the kernel it is its parent's too."""
    global _loop, _thread, _lock
    _loop = _thread = None
    _lock = threading.Lock()
    for task in _tasks:  # they are kept, so that nothing of theirs is run at their end
        task._log_destroy_pending = False  # type: ignore[attr-defined]


in_child(_forget)
