"""Threads for calls that block: verbs that wait for the network, names, files.

Unlike those of ``concurrent.futures`` they are daemons, so that a process that ends does not wait for a peer that
cannot be reached; and they stay in the network namespace of the thread that asked for them, since there the
same address may be another host.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .fork import in_child

__all__ = ["Workers", "here", "namespace"]

T = TypeVar("T")

#: threads at most: as many peers that cannot be reached hold up nobody else
THREADS_MAX = 256
#: seconds after which a thread without work ends, unless it is the last
_IDLE_S = 5.0


class Workers:
    """Threads that are started when there is work for them, and end when there is none.

    Each new one is started by another of them: so all are in the network namespace of the thread that made
    this object.

    Args:
        most: how many at the same time; more work waits its turn.

    Raises:
        RuntimeError: this process can start no thread.
    """

    def __init__(self, most: int = THREADS_MAX) -> None:
        self._most = most
        self._lock = threading.Lock()
        # its put is one step: a signal handler breaks in before or after it
        self._jobs: SimpleQueue[tuple[Future[Any] | None, Callable[[], Any]]] = SimpleQueue()
        self._threads = self._idle = 0
        self._start()

    def submit(self, job: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Have ``job`` done by one of the threads.

        Args:
            job: what to call.
            future: takes the result; by default a new one.

        Returns:
            Its result to come; one that has not begun can be cancelled.
        """
        result: Future[T] = Future() if future is None else future
        self._jobs.put((result, job))
        return result

    def start(self, job: Callable[[], object]) -> None:
        """Have ``job``, which raises nothing, done by one of the threads; nobody asks for its result."""
        self._jobs.put((None, job))

    def _start(self) -> None:
        threading.Thread(target=self._work, name="rdmaconnect-worker", daemon=True).start()
        self._threads += 1
        self._idle += 1

    def _next(self) -> tuple[Future[Any] | None, Callable[[], Any]] | None:
        """Wait for work, and see to it that another thread waits for more; None if there is none for long."""
        while True:
            try:
                taken = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._idle > 1:
                        self._threads -= 1
                        self._idle -= 1
                        return None
                continue
            with self._lock:
                self._idle -= 1
                if not self._idle and self._threads < self._most:
                    with contextlib.suppress(RuntimeError):  # no more threads here: the work waits its turn
                        self._start()
            return taken

    def _work(self) -> None:
        _mine.namespace = namespace()
        while (taken := self._next()) is not None:
            future, job = taken
            if future is None:
                job()
            elif future.set_running_or_notify_cancel():
                try:
                    result = job()
                except BaseException as e:  # noqa: BLE001  it is for whoever asks for the result
                    future.set_exception(e)
                else:
                    future.set_result(result)
                    del result
            del taken, future, job
            with self._lock:
                self._idle += 1


class _Mine(threading.local):
    """What a thread knows of itself: those here stay in one network namespace."""

    namespace: int | None = None


_mine = _Mine()
#: network namespace -> its workers
_workers: dict[int, Workers] = {}
_lock = threading.Lock()


def namespace() -> int:
    """The number of the calling thread's network namespace; 0 where the kernel does not tell."""
    if _mine.namespace is not None:
        return _mine.namespace
    try:
        return os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return 0


def here() -> Workers:
    """The workers of this process in the network namespace of the calling thread.

    Raises:
        RuntimeError: this process can start no thread.
    """
    where = namespace()
    found = _workers.get(where)
    if found is None:
        with _lock:
            found = _workers.get(where)
            if found is None:
                found = _workers[where] = Workers()
    return found


def _forget() -> None:
    """In a child, which has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _mine.namespace = None
    _workers.clear()


in_child(_forget)
