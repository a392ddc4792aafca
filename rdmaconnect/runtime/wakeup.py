"""Waking those who wait: a count of changes that loses none, and descriptors that outlive every use of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import weakref
from collections.abc import Callable

from .fork import in_child

__all__ = ["Signal", "Waker", "lend_waker", "return_waker", "weakly"]


def weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Calls a method of an object that is not kept alive for that."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


class Signal:
    """Tells all who wait that something has changed.

    A waiter takes ``count``, looks at what it waits for, and subscribes with that count: a change between
    the look and the subscription is not lost, since the subscription is refused then. Any thread may use it.

    Attributes:
        count: how many changes there were.
    """

    __slots__ = ("_counts", "_lock", "_wake", "count")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self.count = 0
        self._counts = itertools.count(1)

    def notify(self) -> None:
        """Something has changed: wake all who wait."""
        # no lock where nobody waits, as mostly: each number is stored once, and subscribe() looks at it last
        self.count = next(self._counts)
        if self._wake:
            with self._lock:
                for wake in self._wake:
                    wake()

    def subscribe(self, wake: Callable[[], None], count: int) -> bool:
        """Have ``wake`` called at each change, from the thread that makes it.

        Args:
            wake: must not block, nor use this signal.
            count: the count of changes that the caller has seen.

        Returns:
            False if there was another change since: then nothing is subscribed.
        """
        with self._lock:
            self._wake.append(wake)  # first put down, then look: notify() does it the other way round
            if self.count != count:
                self._wake.pop()
                return False
            return True

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` no more; fine if it was never subscribed."""
        with self._lock:
            if wake in self._wake:
                self._wake.remove(wake)


class Waker:
    """A descriptor that becomes readable when it is set. One waiting call has it for itself.

    Source: eventfd(2).
    """

    __slots__ = ("_eventfd",)

    def __init__(self) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        # an object that closes the descriptor with its own end, made in one step: Ctrl-C comes between two
        self._eventfd = next(map(select.epoll.fromfd, map(os.eventfd, (0,), (flags,))))

    def fileno(self) -> int:
        """The descriptor, for poll(2)."""
        return self._eventfd.fileno()

    def set(self) -> None:
        """Make it readable."""
        os.eventfd_write(self.fileno(), 1)

    def clear(self) -> None:
        """Make it unreadable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fileno())


#: wakers that no call has now; as many are made as calls sleep at the same time, and so many are kept
_spare: list[Waker] = []
MOST_SPARE = 32


def lend_waker() -> Waker:
    """A waker for one wait; give it back with :func:`return_waker` when nothing sets it any more.

    Raises:
        OSError: EMFILE, ENFILE.
    """
    try:
        waker = _spare.pop()
    except IndexError:
        return Waker()
    waker.clear()
    return waker


def return_waker(waker: Waker) -> None:
    """Give a waker back."""
    if len(_spare) < MOST_SPARE:
        _spare.append(waker)


# a child's wakers would wake its parent
in_child(_spare.clear)
