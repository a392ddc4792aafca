"""What is to happen later: one thread, which is there only while something is due."""

from __future__ import annotations

import _thread
import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs jobs at their times. Each holds its own locks; none may raise."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        #: the ident of the thread that runs jobs; None while there are none
        self._thread: int | None = None

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` in so many seconds."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), job))
            if self._thread is None:
                # not threading.Thread, whose start waits for the new thread: that one may be in a finaliser, which
                # waits for the device's lock, which is held here
                self._thread = _thread.start_new_thread(self._run, ())
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._thread = None
                    self._changed.notify_all()
                    return
                left = self._due[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                job = heapq.heappop(self._due)[2]
            job()

    @property
    def runs(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None

    def close(self) -> None:
        """Forget everything, and wait for the thread to end."""
        with self._changed:
            self._due.clear()
            self._changed.notify()
            if self._thread != threading.get_ident():
                self._changed.wait_for(lambda: self._thread is None)
