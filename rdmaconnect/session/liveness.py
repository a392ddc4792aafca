"""Whether the peer of a connection that stands is there: what its paths show is collected, and asked for.

All of this happens in the service thread, whatever the application is at. ``protocol.health`` judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary, ref

from ..errors import PeerClosed, RdmaConnectError
from ..exchange import alive, service
from ..exchange.channel import Channel
from ..protocol.health import Evidence, HealthState, is_quiet, judge, wishes
from ..runtime.fork import in_child
from .redial import Redial
from .transfer import Sent

__all__ = ["Liveness", "Talk", "Witness", "standing"]

#: seconds between two looks at a peer that is doubted: at first, doubled each time, and at most, where so many are at
#: the same time; longer where they are more
_LOOK_S, _LOOK_MAX_S, _LOOKED_AT = 0.02, 0.1, 1000
#: those who are looked at now
_doubted: set[Liveness] = set()


class Witness(Protocol):
    """One end of the connection, as far as it can say whether the data path carries."""

    @property
    def answers(self) -> bool:
        """Whether the peer's device acknowledges what comes, without its process."""

    def look(self) -> str:
        """Take what has completed, if that need not wait; in words, how the data path failed, or ""."""

    def ask(self) -> Sent | None:
        """Have the peer's device answer; None if that cannot be asked now."""

    def arrivals(self) -> int:
        """How many messages have come."""


class Talk(Protocol):
    """The conversation that it is about."""

    channel: Channel | None
    left: str | None

    def turn(self, state: HealthState, why: str) -> None:
        """This is what is known of the peer now."""

    def attach(self, channel: Channel) -> None:
        """Say what there is to say on this channel from now on."""

    def took(self, frame: bytes) -> None:
        """A frame has come."""

    def tick(self) -> None:
        """A second has passed."""

    def ask_beat(self) -> None:
        """Have the peer say that it is there."""


#: token -> the conversation of each connection that a listener of this process has accepted and that stands
standing: WeakValueDictionary[bytes, Talk] = WeakValueDictionary()
in_child(standing.clear)
in_child(_doubted.clear)


class Liveness:
    """What is known of one peer; a :class:`~rdmaconnect.exchange.alive.Alive` while there is no side channel, and the
    receiver of each that is made anew.

    Args:
        talk: the conversation.
        ends: the ends of its connections, or some of them; they are not kept.
        redial: makes what dials the listener again; None on the listener's side.
        silent_max_s: seconds of silence that mean something.
    """

    closing = False

    def __init__(
        self,
        talk: Talk,
        ends: Sequence[Witness],
        redial: Callable[[Liveness], Redial] | None,
        silent_max_s: float,
    ) -> None:
        self._talk, self._ends = talk, [ref(end) for end in ends]
        self._redial = None if redial is None else redial(self)
        self._sent: Sent | None = None
        self._arrivals = 0
        #: takes back the look that is due
        self._cancel: Callable[[], None] | None = None
        self._pause_s = _LOOK_S
        self.evidence = Evidence(redial is not None, ends[0].answers, silent_max_s, alive.now())

    @property
    def busy(self) -> bool:
        """Whether anything is being asked or waited for."""
        return self._cancel is not None or self.evidence.broken is not None

    # ---- what the side channel shows

    def heard(self) -> None:
        """A word of the peer has come."""
        self.evidence.heard = alive.now()
        if self.evidence.failed and not self.evidence.answered:
            self.evidence.answered = True
            service.soon(self.look)

    def broke(self, error: RdmaConnectError) -> None:
        """The side channel has ended, by the peer or on the way."""
        e, channel = self.evidence, self._talk.channel
        e.in_order = channel is not None and channel.ended_in_order
        self._talk.channel, e.answered = None, False
        e.broken = e.ended = alive.now()
        lost = "it was closed" if e.in_order else "it was reset, or the network to it broke"
        e.how = lost if isinstance(error, PeerClosed) else str(error).rstrip(".")
        self._arrivals = sum(end.arrivals() for end in self._witnesses())
        alive.add(self)
        self._look_soon()

    def doubt(self, words: str) -> None:
        """The data path has failed: is the peer there?"""
        if self.evidence.failed or self._talk.left is not None:
            return
        self.evidence.failed = words
        self._talk.ask_beat()
        self._look_soon()

    def farewell(self, frame: bytes) -> None:
        """This side says good-bye: also where the listener has yet to answer to being dialled again."""
        if self._redial is not None:
            self._redial.say(frame)
        self.finish()

    def here(self, state: HealthState, why: str) -> None:
        """This is what the port and the address here have become for the connection."""
        self.evidence.here, self.evidence.here_why = state, why
        self.look()

    def unlisted(self) -> None:
        """The peer cannot be dialled any more."""
        self.evidence.deaf = True

    def resume(self, channel: Channel) -> None:
        """The peer has dialled again, or has answered to being dialled."""
        if self._talk.left is not None:
            channel.close()
            return
        self._let_go()
        channel.receiver = self
        self._talk.attach(channel)
        self.evidence.mend(alive.now())
        alive.remove(self)
        self.look()

    def _let_go(self) -> None:
        """The side channel that there was is none any more: nothing is heard of it from now on."""
        channel, self._talk.channel = self._talk.channel, None
        if channel is not None:
            channel.receiver = None
            channel.close()

    # ---- what dialling comes to

    def refused(self) -> None:
        self.evidence.refuse(alive.now())

    def unknown(self, why: str) -> None:
        self.evidence.unknown = why

    def resumed(self, channel: Channel) -> None:
        self.resume(channel)

    # ---- what comes over a side channel that was made anew

    def took(self, frame: bytes) -> None:
        self._talk.took(frame)

    def over(self, error: RdmaConnectError) -> None:
        self.broke(error)

    def tick(self) -> None:
        """A second has passed."""
        if self.evidence.broken is None:
            self._talk.tick()
        else:
            self.ticked()

    def ticked(self) -> None:
        """A second has passed, whether there is a side channel or not."""
        if self._cancel is None and is_quiet(self.evidence, alive.now()):
            self.look()

    # ---- looking

    def _look_in(self, seconds: float | None) -> None:
        """Look so much later, and not when it was due before; None for not at all."""
        if self._cancel is not None:
            self._cancel()
        self._cancel = None if seconds is None else service.loop().call_later(seconds, self.look).cancel

    def _look_soon(self) -> None:
        self._pause_s = _LOOK_S
        self._look_in(0)

    def look(self) -> None:
        """See what the paths show now, ask for what is not known, and say what that means."""
        self._look_in(None)
        if self._talk.left is not None:
            self.finish()
            return
        e = self.evidence
        wanted = wishes(e, alive.now())
        if wanted.look:
            self._witness()
        if self._redial is not None:
            if wanted.dial:
                self._redial.advance()
            else:
                self._redial.stop()
        if wanted.hang_up:
            self._hang_up()
        if wishes(e, alive.now()).ask:
            e.asked = alive.now()
        self._talk.turn(*judge(e, alive.now()))
        if self._talk.left is None and wishes(e, alive.now()).look:
            _doubted.add(self)
            self._look_in(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LOOK_MAX_S * max(1.0, len(_doubted) / _LOOKED_AT))
        else:
            _doubted.discard(self)
            self._pause_s = _LOOK_S

    def _hang_up(self) -> None:
        """So that the peer, which is silent, dials anew."""
        self._let_go()
        self.evidence.broken, self.evidence.how = alive.now(), "the peer is silent"
        alive.add(self)

    def _witnesses(self) -> list[Witness]:
        return [end for end in (there() for there in self._ends) if end is not None]

    def _witness(self) -> None:
        """What the data path shows."""
        e, ends = self.evidence, self._witnesses()
        for end in ends[:1]:
            failed = end.look()
            if failed and not e.failed:
                self.doubt(failed)
        if e.asked is not None:
            if self._sent is None and ends:
                self._sent = ends[0].ask()
            if self._sent is not None and self._sent.status is not None:
                if self._sent.status == 0:
                    e.asked, e.came = None, alive.now()
                self._sent = None
        if not e.answers:
            arrivals = sum(end.arrivals() for end in ends)
            if arrivals != self._arrivals:
                self._arrivals, e.came = arrivals, alive.now()

    def finish(self) -> None:
        """Ask for nothing any more: it is over. Twice is fine."""
        alive.remove(self)
        self._look_in(None)
        _doubted.discard(self)
        if self._redial is not None:
            self._redial.stop()
