"""What is to happen later: one thread, which is there only while something is due."""

from __future__ import annotations

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
        self._thread: threading.Thread | None = None

    def later(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` in so many seconds."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="software device's clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._thread = None
                    return
                left = self._due[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                job = heapq.heappop(self._due)[2]
            job()

    def close(self) -> None:
        """Forget everything, and wait for the thread to end."""
        with self._changed:
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
