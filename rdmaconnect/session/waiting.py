"""How one end of a connection waits: for what has come already, then by polling, then asleep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..abi import WcStatus
from ..agreement.endpoint import Endpoint
from ..errors import HINTS, CompletionError, DeviceError, PeerClosed, RdmaConnectError
from ..objects.context import Port
from ..protocol.health import HealthState
from ..runtime.deadline import Deadline, give_way
from ..runtime.fork import process
from ..runtime.procedure import Call, Procedure, Wait
from .conversation import Conversation
from .engine import Engine
from .transceiver import Transceiver

__all__ = ["Waiting"]

T = TypeVar("T")

#: the longest sleep: another thread may have taken the event, ms
_SLICE_MS = 1000
#: in so many seconds a device has flushed what was on its way when a queue pair failed, if it is there at all
_FLUSH_S = 1.0
#: and whether the peer is there is asked for so long before a failed transfer is blamed on anything, s
ASK_S = 1.0
#: what a peer that has gone may make of a transfer: which comes first depends on the order in which its host frees
#: queue pair and memory
OF_PEER = frozenset(
    (
        WcStatus.RETRY_EXC_ERR, WcStatus.REM_ACCESS_ERR, WcStatus.REM_OP_ERR, WcStatus.REM_INV_REQ_ERR,
        WcStatus.REM_ABORT_ERR, WcStatus.RNR_RETRY_EXC_ERR, WcStatus.RESP_TIMEOUT_ERR, WcStatus.WR_FLUSH_ERR,
    )
)  # fmt: skip
_IS_THERE = "The peer is there: it has answered over the side channel since."
_IS_SILENT = "The peer has not answered over the side channel since: either it is gone, or both paths to it broke."
_DATA_HINT = "Is the peer alive, and does it take part (recv() for each send())?"
#: polls in a row, between which nobody else comes to anything
_TRIES = 64
#: after so many of those who waits for the engine's lock gets it: else this thread mostly has it again first
_ROWS = 8


class Waiting:
    """One end of a connection, as far as waiting goes.

    What is waited for is an *attempt*: a function that gives what it is about, or None while that is not there; it is
    called with the engine's lock held. Nothing is made for a wait that need not be: deadlines and procedures come after
    the first attempt, and after polling.
    """

    local: Endpoint
    peer: Endpoint
    conversation: Conversation
    engine: Engine
    transceiver: Transceiver
    spin: int
    _closed: bool
    _process: object

    def check_open(self) -> None:
        """Raise if it was closed, or belongs to another process."""
        raise NotImplementedError

    def comes_back(self) -> bool:
        """Whether it is connected anew by itself, now that it is lost: then who waits goes on waiting."""
        return False

    def changed(self, ports: dict[tuple[object, int], Port]) -> None:
        """See what has become of this host's port. Blocks."""
        raise NotImplementedError

    def _check(self, deadline_s: float | None) -> None:
        """Refuse a patience that is none, an end that is closed, and one whose device is gone, before it begins."""
        if self._closed or self._process is not process.mark or self.engine.gone is not None:
            self.check_open()
        if deadline_s is not None and (deadline_s.__class__ is not int or deadline_s < 0):
            Deadline(deadline_s)  # says what is wrong with it, or takes it all the same

    def _until(
        self,
        attempt: Callable[[], T | None],
        deadline: Deadline,
        doing: str,
        *,
        flushed: bool = False,
        polled: bool = False,
    ) -> Procedure[T]:
        """Make progress until an attempt succeeds: first by polling, then asleep on the channel.

        Args:
            attempt: see above.
            deadline: until when.
            doing: what waits, in words.
            polled: whether it has been polled for.
            flushed: whether it ends by itself, in its own way, when the queue pair fails: then it is given time to.
        """
        self.check_open()
        answer, flush = self._now(attempt) if polled else self._polled(attempt), None
        while answer is None:
            heard, completed = self.conversation.changed, self.engine.changed
            seen = heard.count
            self.check_open()
            self.engine.arm()
            self.engine.progress()
            count = completed.count
            self.check_open()
            answer = self._now(attempt)
            if answer is not None:
                break
            if self.transceiver.broken is not None or self.conversation.left is not None:
                back = self.comes_back()  # first: where it stands just now, what has come can be read from now on
                self.engine.progress()  # what a peer sent before it went is there by now
                answer = self._now(attempt)
                if answer is not None:
                    break
                flush = None if back else flush or (Deadline(_FLUSH_S) if flushed else None)
                if not back and (flush is None or self.conversation.left is not None or flush.left_s <= 0):
                    error = self.transceiver.broken
                    if error is not None:
                        yield from self._ask_peer(error, deadline)
                    raise self._over(doing, error)
            if deadline.left_s <= 0:
                health = self.conversation.health
                hint = f"The peer is {health}." if health.why else _DATA_HINT
                raise deadline.exceeded(f"{doing} from {self.local} to {self.peer}", hint)
            changes = ((heard, seen), (completed, count))
            until = deadline if flush is None or deadline.left_s < flush.left_s else flush
            yield Wait(until, (self.engine.channel.fileno(),), changes, slice_ms=_SLICE_MS)
            answer = self._now(attempt)
        return answer

    def _polled(self, attempt: Callable[[], T | None]) -> T | None:
        """What it gives now, or after some polls: what is there already needs no event."""
        engine, left = self.engine, self.spin or 1
        while True:
            with engine.lock:
                answer = attempt()
                if answer is None and engine.take(left if left < _TRIES else _TRIES):
                    answer = attempt()
            left -= _TRIES
            if answer is not None or left <= 0:
                return answer
            if not left // _TRIES % _ROWS:
                give_way()

    def _now(self, attempt: Callable[[], T | None]) -> T | None:
        with self.engine.lock:
            return attempt()

    def _ask_peer(self, error: CompletionError, deadline: Deadline) -> Procedure[None]:
        """A transfer failed: ask whether the peer is there, before that is blamed on anything."""
        conversation = self.conversation
        if not self._doubts(error):
            return
        yield Call(partial(self.changed, {}))  # what is wrong may be on this host
        limit = Deadline(min(ASK_S, deadline.left_s))
        while limit.left_s > 0:
            seen = conversation.changed.count
            if conversation.left is not None or conversation.answered:
                return
            yield Wait(limit, changes=((conversation.changed, seen),))

    def _doubts(self, error: CompletionError) -> bool:
        """Have the peer asked, if it may have to do with an error."""
        first = self.transceiver.broken or error
        if first.status in OF_PEER:
            self.conversation.doubt(str(first.status))
        return first.status in OF_PEER

    def _over(self, doing: str, error: CompletionError | None) -> RdmaConnectError:
        """Why nothing more will come: the peer's end if that is known, else ``error`` and what is known of the peer."""
        conversation = self.conversation
        if isinstance(conversation.error, DeviceError):
            return conversation.error
        if conversation.left is not None or error is None:
            seen = "" if error is None else f" This side saw {error.status} first."
            return PeerClosed(f"{doing}: {conversation.left}{seen}")
        if conversation.liveness is None or not self._doubts(error):
            return error
        words = _IS_THERE if conversation.answered else _IS_SILENT
        if conversation.health.state is HealthState.MOVED:
            words = f"{conversation.health.why}. {words}"
        hint = f"{words} {HINTS.get(('completion', str(error.status)), '')}"
        return CompletionError(
            error.status, vendor_err=error.vendor_err, wr_id=error.wr_id, qp_num=error.qp_num, opcode=error.opcode,
            doing=f"{doing} from {self.local} to {self.peer}", hint=hint.rstrip(),
        )  # fmt: skip
