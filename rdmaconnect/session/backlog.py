"""Connections that were made and wait to be accepted, as those in a TCP backlog do; whoever makes them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from itertools import islice

from ..errors import StateError
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, Wait
from ..runtime.wakeup import Signal
from .end import End
from .in_vain import InVain

__all__ = ["Backlog"]


class Backlog:
    """What every listener is below: connections that nobody has accepted yet. Any thread may use it.

    Attributes:
        url: the address bound, with the real port.
    """

    url: str
    #: what those who hold it call it
    _NAME = "Listener"

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = Signal()
        self._lock = threading.RLock()
        self._ready: deque[End] = deque()
        self._in_vain = InVain()
        self._closed = False

    def _seen(self) -> str:
        """Whom an accept in vain, and nobody before it, has seen."""
        raise NotImplementedError

    def _close(self) -> None:
        """Take nobody any more, and close those that wait."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def port(self) -> int:
        """The port that is listened on, of TCP or of rdma_cm."""
        return int(self.url.rpartition(":")[2])

    # ---- procedures

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StateError(f"the listener on {self.url} belongs to the process that forked this one: listen anew.")
        if self._closed:
            raise StateError(f"the listener on {self.url} is closed.")

    def _accept(self, deadline: Deadline, tolerant: bool) -> Procedure[End]:
        while True:
            seen = self._changed.count
            self._check_open()
            if not tolerant:
                with contextlib.suppress(IndexError):
                    raise self._in_vain.next_failure()
            with contextlib.suppress(IndexError):  # nobody, or another thread was faster
                return self._ready.popleft()
            if deadline.left_s <= 0:
                raise deadline.exceeded(f"accept on {self.url}", self._seen())
            yield Wait(deadline, changes=((self._changed, seen),))

    def _take_now(self, taken: list[End], tolerant: bool) -> None:
        """Take the next connection if it waits here: then no worker has to be woken for it.

        Args:
            taken: where it is put, in the step that takes it: Ctrl-C comes between two.
            tolerant: as of ``accept``; if not, a failure comes first.
        """
        if not self._closed and self._pid == os.getpid() and (tolerant or not self._in_vain.failures):
            try:
                taken.extend(islice(iter(self._ready.popleft, None), 1))
            except IndexError:
                return

    def _put_back(self, connection: End) -> None:
        """An accept was interrupted with a connection in its hand: it is the next one's."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._ready.appendleft(connection)
        if closed:
            connection.close()
        self._changed.notify()

    def _closing(self) -> Procedure[None]:
        yield Call(self._close)

    def __repr__(self) -> str:
        return f"<{self._NAME} {self.url}{' closed' if self._closed else ''}>"
