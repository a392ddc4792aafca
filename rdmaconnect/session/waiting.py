"""How one end of a connection waits: for what has come already, then by polling, then asleep."""

from __future__ import annotations

from collections.abc import Callable
from os import getpid
from typing import TypeVar

from ..agreement.endpoint import Endpoint
from ..errors import PeerClosed, RdmaConnectError
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure, Wait
from .conversation import Conversation
from .engine import Engine
from .transceiver import Transceiver

__all__ = ["Waiting"]

T = TypeVar("T")

#: the longest sleep: another thread may have taken the event, ms
_SLICE_MS = 1000
#: in so many seconds a device has flushed what was on its way when a queue pair failed, if it is there at all
_FLUSH_S = 1.0
_DATA_HINT = "Is the peer alive, and does it take part (recv() for each send())?"
_NUMBERS = frozenset((int, float))


class Waiting:
    """One end of a connection, as far as waiting goes.

    What is waited for is an *attempt*: a function that gives what it is about, or None while that is not there.
    Nothing is made for a wait that need not be: deadlines and procedures come after the first attempt.
    """

    local: Endpoint
    peer: Endpoint
    conversation: Conversation
    engine: Engine
    transceiver: Transceiver
    spin: int
    _closed: bool
    _pid: int

    def check_open(self) -> None:
        """Raise if it was closed, or belongs to another process."""
        raise NotImplementedError

    def _check(self, deadline_s: float | None) -> None:
        """Refuse a patience that is none, and an end that is closed, before anything is done."""
        if self._closed or self._pid != getpid():
            self.check_open()
        if not (deadline_s is None or (deadline_s.__class__ in _NUMBERS and deadline_s >= 0)):
            Deadline(deadline_s)  # says what is wrong with it, or takes it all the same

    def _until(
        self, attempt: Callable[[], T | None], deadline: Deadline, doing: str, *, flushed: bool = False
    ) -> Procedure[T]:
        """Make progress until an attempt succeeds: first by polling, then asleep on the channel.

        Args:
            attempt: see above.
            deadline: until when.
            doing: what waits, in words.
            flushed: whether it ends by itself, in its own way, when the queue pair fails: then it is given time to.
        """
        answer, flush = self._polled(attempt), None
        while answer is None:
            heard, completed = self.conversation.changed, self.engine.changed
            seen = heard.count
            self.check_open()
            self.engine.arm()
            self.engine.progress()
            count = completed.count
            self.check_open()
            answer = attempt()
            if answer is not None:
                break
            if self.transceiver.broken is not None or self.conversation.left is not None:
                self.engine.progress()  # what a peer sent before it went is there by now
                answer = attempt()
                if answer is not None:
                    break
                if flush is None and flushed:
                    flush = Deadline(_FLUSH_S)
                if flush is None or self.conversation.left is not None or flush.left_s <= 0:
                    raise self._over(doing, self.transceiver.broken)
            if deadline.left_s <= 0:
                raise deadline.exceeded(f"{doing} from {self.local} to {self.peer}", _DATA_HINT)
            changes = ((heard, seen), (completed, count))
            until = deadline if flush is None or deadline.left_s < flush.left_s else flush
            yield Wait(until, (self.engine.channel.fileno(),), changes, slice_ms=_SLICE_MS)
            answer = attempt()
        return answer

    def _polled(self, attempt: Callable[[], T | None]) -> T | None:
        """What it gives now, or after some polls: what is there already needs no event."""
        self.check_open()
        answer = attempt()
        if answer is None:
            progress = self.engine.progress
            for _ in range(self.spin or 1):
                progress()
                answer = attempt()
                if answer is not None:
                    break
        return answer

    def _over(self, doing: str, error: RdmaConnectError | None) -> RdmaConnectError:
        """Why nothing more will come: the peer's good-bye if it said one, else ``error``."""
        if self.conversation.left is not None or error is None:
            return PeerClosed(f"{doing}: {self.conversation.left}")
        return error
