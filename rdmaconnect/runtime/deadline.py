"""One deadline for a whole call, spent down by each of its waits."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable

from ..errors import DeadlineExceeded, shown

__all__ = ["Deadline", "give_way", "wait_readable", "wait_ready"]

_POLL_MAX_MS = 2**31 - 1
_NO_SECONDS = "deadline_s is {}: give seconds, 0 or more, or None to wait for ever"


class Deadline:
    """A point in time, and how much of the wait for it is left.

    Args:
        seconds: patience in seconds, 0 or more; None waits for ever.
        error: the class that :meth:`check` raises.

    Raises:
        TypeError, ValueError: it is no number, or below 0.
    """

    def __init__(self, seconds: float | None, error: type[DeadlineExceeded] = DeadlineExceeded) -> None:
        self._started = time.monotonic()
        try:
            self._seconds = math.inf if seconds is None else seconds + 0.0
            sound = self._seconds >= 0
        except TypeError:
            raise TypeError(_NO_SECONDS.format(shown(seconds))) from None
        if not sound:
            raise ValueError(_NO_SECONDS.format(shown(seconds)))
        self._error = error

    @property
    def waited_s(self) -> float:
        """Seconds since this deadline was set."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0; ``math.inf`` without a limit."""
        return max(0.0, self._seconds - (time.monotonic() - self._started))

    @property
    def left_ms(self) -> int | None:
        """Milliseconds left, rounded up, at most what poll(2) takes; None without a limit."""
        return None if math.isinf(self._seconds) else math.ceil(min(self.left_s * 1000, _POLL_MAX_MS))

    def exceeded(self, stage: str, hint: str = "") -> DeadlineExceeded:
        """The error that says the wait ran out at ``stage``."""
        return self._error(stage, self.waited_s, hint)

    def check(self, stage: str, hint: str = "") -> None:
        """Raise if nothing is left.

        Raises:
            DeadlineExceeded: or the class given, with the stage and the seconds waited.
        """
        if self.left_s <= 0:
            raise self.exceeded(stage, hint)


def give_way() -> None:
    """Let threads go on that wait for what this one has just let go; it takes some dozens of microseconds."""
    time.sleep(0)


def wait_ready(
    readable: Iterable[int], writable: Iterable[int], deadline: Deadline, slice_ms: int | None = None
) -> set[int]:
    """Sleep until one of the descriptors is ready, the slice is over, or the deadline has passed.

    Args:
        readable: descriptors to be read.
        writable: descriptors to be written.
        deadline: how long to sleep at most.
        slice_ms: milliseconds after which to look again anyway.

    Returns:
        Those that are ready; empty if time was up.
    """
    poller = select.poll()
    for fd in readable:
        poller.register(fd, select.POLLIN)
    for fd in writable:
        poller.register(fd, select.POLLOUT)
    limits = [ms for ms in (deadline.left_ms, slice_ms) if ms is not None]
    return {fd for fd, _ in poller.poll(min(limits) if limits else None)}


def wait_readable(fds: Iterable[int], deadline: Deadline, slice_ms: int | None = None) -> set[int]:
    """Sleep until one of the descriptors can be read; see :func:`wait_ready`."""
    return wait_ready(fds, (), deadline, slice_ms)
