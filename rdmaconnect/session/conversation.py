"""What two ends say to each other about connections that were made together, and whether the peer is still there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol
from weakref import ref

from ..agreement.endpoint import PortAddress
from ..errors import PeerClosed, PeerMismatch, RdmaConnectError, StateError
from ..exchange import service
from ..exchange.alive import TICK_S, skipped
from ..exchange.channel import Channel
from ..protocol.codec import MAX_TEXT, decode, encode
from ..protocol.handshake import BEATING, NO_ID, Handshake, Outcome, Role, State
from ..protocol.health import SILENT_S, Health, HealthState
from ..protocol.messages import Beat, Bye, Hello, Joined, Message, Proof, Ready, Reject, Reply, Unlisted
from ..runtime.deadline import Deadline
from ..runtime.wakeup import Signal
from .admission import AGAIN_MS, Busy
from .liveness import Liveness, Witness, standing
from .redial import Redial
from .trace import Trace

__all__ = ["BEAT_MS", "Conversation", "now"]

#: ticks between two beats of this side: a thousand connections are to cost next to nothing while nothing happens
BEAT_TICKS = 5
#: the same in milliseconds
BEAT_MS = round(BEAT_TICKS * TICK_S * 1000)
#: beats that may be missing before a peer counts as gone
BEATS_MISSED = 3
#: so that not all beat at the same time
_phase = count()


def now(state: HealthState, why: str = "") -> Health:
    """A health that begins now."""
    return Health(state, why, time.monotonic())


class Holder(Witness, Protocol):
    """Who holds one end of a connection."""

    @property
    def watched(self) -> bool:
        """Whether anybody is to be told of changes."""

    def turned(self, health: Health) -> None:
        """This is what is known of the peer now; called in the service thread."""


class Conversation:
    """One exchange with one peer, driven by what comes: its messages are taken in the service thread.

    Any thread may use it. Connections that were made together share one, and the last of them closes it.

    Args:
        handshake: where the conversation stands.
        trace: the stages on the way to here.

    Attributes:
        changed: notified at each change.
        left: why nothing more will come of it, in words, or None.
        error: the same as an error, where it was one.
        parted: whether the peer went when it could hold the connection already.
        user: the connector's public key as Z85 text, on the listener's side of a connection that stands; else "".
        health: what is known of the peer; dead from when ``left`` is set on.
        liveness: what finds that out, once the connection stands and the peer can resume it; else None.
        farewell: whether its application closed the connection: then it does not come back.
        proves: whether both sides have agreed to prove the data path.
        on_change: called in the service thread after each change, besides.
    """

    def __init__(self, handshake: Handshake, trace: Trace | None = None) -> None:
        self.handshake = handshake
        self.trace = trace or Trace(handshake.role, Deadline(None))
        self.changed = Signal()
        self.left: str | None = None
        self.error: RdmaConnectError | None = None
        self.parted = self.farewell = self.proves = False
        self.on_change: Callable[[], None] | None = None
        self.channel: Channel | None = None
        self._lock = threading.RLock()
        self._users = 0
        self._beats = False
        self._beat = b""
        self._ticks, self._ticks_silent = next(_phase), 0
        self._silent_max = SILENT_S / TICK_S
        self.health = now(HealthState.ALIVE)
        self.liveness: Liveness | None = None
        self.user = ""
        self._holders: list[ref[Holder]] = []

    def attach(self, channel: Channel) -> None:
        """Say what there is to say to this peer."""
        self.channel = channel

    @property
    def id(self) -> bytes:
        """The connection's 16 bytes."""
        assert self.handshake.id is not None
        return self.handshake.id

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.handshake.state

    @property
    def alive(self) -> bool:
        """Whether the peer says that it is there, though it may not have gone on."""
        return self._beats and self.left is None

    # ---- in the service thread

    def took(self, frame: bytes) -> None:
        """A frame has come."""
        if self.took_beat(frame):
            return
        try:
            message = decode(frame)
        except RdmaConnectError as e:
            self.over(e)
            return
        if message is not None:
            self.hear(message)

    def took_beat(self, frame: bytes) -> bool:
        """Take a frame that is a beat of the connection that stands, as most are; False if it is anything else."""
        if frame != self._beat:
            return False
        with self._lock:
            if self.left is not None or self.state is not State.JOINED:
                return False
            self._heard_it()
        return True

    def hear(self, message: Message) -> None:
        """A message has come."""
        with self._lock:
            if self.left is not None:
                return
            try:
                outcome = self.handshake.receive(message)
            except RdmaConnectError as e:
                self._leave(str(e), e)
            else:
                if outcome is Outcome.STALE:
                    return
                self._heard_it()
                if outcome is Outcome.REPEATED:
                    if self.handshake.said is not None:
                        self._put(self.handshake.said)
                    return
                if isinstance(message, Beat):
                    if message.ask:
                        self._put(Beat(self.id))
                    return
                self._heard(message)
        self._changed()

    def _heard_it(self) -> None:
        """A word of the peer has come."""
        self._ticks_silent = 0
        if self.liveness is not None:
            self.liveness.heard()

    def _heard(self, message: Message) -> None:
        if isinstance(message, (Hello, Reply)) and message.beat_ms:
            self._beats = True
            self._silent_max = max(SILENT_S, BEATS_MISSED * message.beat_ms / 1000) / TICK_S
        if isinstance(message, (Reply, Ready, Proof)):
            self.trace.hear(message.stages)
        elif isinstance(message, Unlisted) and self.liveness is not None:
            self.liveness.unlisted()
        elif isinstance(message, Bye):
            self.parted, self.farewell = True, not message.lost
            self._leave(f"the peer closed the connection ({message.why}).")

    def broke(self, error: RdmaConnectError) -> None:
        """The side channel has ended: a connection that stands lives on without it."""
        with self._lock:
            liveness = self.liveness if self.left is None else None
        if liveness is None:
            self.over(error)
        else:
            liveness.broke(error)

    def over(self, error: RdmaConnectError) -> None:
        """Nothing more will come."""
        with self._lock:
            self.parted = self.parted or (isinstance(error, PeerClosed) and self.state is State.JOINED)
            self._leave(str(error), error)
        self._changed()

    def tick(self) -> None:
        """A second has passed: say now and then that this side is there, and see whether the peer is."""
        with self._lock:
            if not self._beats or self.left is not None or self.handshake.state not in BEATING:
                return
            beats = self._ticks // BEAT_TICKS
            self._ticks += 1 + skipped()
            if self._ticks // BEAT_TICKS > beats and self.channel is not None:
                self._beat = self._beat or encode(Beat(self.id))
                self.channel.send(self._beat)
            # ticks are counted and not seconds: a process that was stopped must not blame its peer
            self._ticks_silent += 1
            if self.liveness is not None:
                if self._ticks_silent > BEAT_TICKS + 1:  # else it is as it should be, and nothing need be looked at
                    self.liveness.ticked()
                return
            if self._ticks_silent <= self._silent_max:
                return
            silent = f"nothing was heard of it for {self._ticks_silent * TICK_S:g} s"
            # one that was only stopped is to know why
            if self.handshake.state is State.JOINED:
                self._put(Bye(self.id, silent, lost=True))
            else:
                self._put(Reject(self.id, self.handshake.state.value, 0, silent))
            self._leave(f"the peer is gone: {silent}: its process ended or was stopped, or the network to it broke.")
        self._changed()

    def turn(self, state: HealthState, why: str) -> None:
        """This is what is known of the peer of a connection that stands."""
        with self._lock:
            if self.left is not None or (state, why) == (self.health.state, self.health.why):
                return
            if state is HealthState.DEAD:
                if self.channel is not None:  # one that was only stopped is to know why
                    self._put(Bye(self.id, why, lost=True))
                self._leave(why)
            else:
                self._turn(state, why)
        self._changed()

    def _leave(self, why: str, error: RdmaConnectError | None = None) -> None:
        if self.left is None:
            self.left, self.error = why, error
            self._turn(HealthState.DEAD, why)
            if self.liveness is not None and self.liveness.busy:
                service.soon(self.liveness.finish)

    def _turn(self, state: HealthState, why: str) -> None:
        """The one place where health turns, whatever the reason: those who hold an end and watch it are told."""
        self.health = now(state, why)
        for there in self._holders:
            holder = there()
            if holder is not None and holder.watched:
                service.soon(holder.turned, self.health)

    def _changed(self) -> None:
        self.changed.notify()
        if self.on_change is not None:
            self.on_change()

    # ---- in any thread

    def stand(
        self,
        ends: Sequence[Holder],
        token: bytes,
        redial: Callable[[Liveness], Redial] | None = None,
        *,
        deaf: bool = False,
    ) -> None:
        """Both sides hold the connection: from here on the end of its side channel does not end it.

        A peer that announced no beats, and so does not resume one, is gone with the side channel.

        Args:
            ends: those who hold its ends; they are not kept.
            token: by which the side channel is resumed, 16 bytes.
            redial: on the connector's side, makes what dials the listener again.
            deaf: whether the listener is none any more.
        """
        with self._lock:
            self._holders = [ref(end) for end in ends]
            if self.left is not None or not (self._beats and token):
                return
            listens = self.handshake.role is Role.LISTENER
            self.user = "" if self.channel is None else self.channel.user
            self.liveness = Liveness(self, ends, None if listens else redial, self._silent_max * TICK_S)
            self.liveness.evidence.deaf = deaf
            if listens:
                standing[token] = self

    def doubt(self, words: str) -> None:
        """The data path has failed, in words: have the peer asked whether it is there. Never blocks."""
        if self.liveness is not None:
            service.soon(self.liveness.doubt, words)

    def here(self, state: HealthState, why: str) -> None:
        """This is what the port and the address here have become for the connection. Never blocks."""
        if self.liveness is not None:
            service.soon(self.liveness.here, state, why)

    @property
    def answered(self) -> bool:
        """Whether the peer has said a word since the data path failed; True too of one that cannot be asked."""
        return self.liveness is None or self.liveness.evidence.answered

    def ask_beat(self) -> None:
        """Have the peer say at once that it is there, if there is a side channel."""
        self._put(Beat(self.id, ask=True))

    def unlist(self) -> None:
        """Tell the connector that nobody listens for it any more: without a side channel it has the data path alone."""
        with self._lock, contextlib.suppress(RdmaConnectError):
            if self.liveness is not None and self.left is None:
                self.liveness.unlisted()
                self.say(Unlisted(self.id))

    def say(self, message: Message) -> None:
        """Send one message to the peer.

        Raises:
            LocalProtocolError: it may not be sent now.
            RdmaConnectError: nothing is said any more, and why.
            ValueError: it is too long.
        """
        frame = encode(message)
        with self._lock:
            if self.left is not None:
                raise self.failure(f"say {type(message).__name__.lower()}")
            self.handshake.send(message)
            if self.channel is not None:
                self.channel.send(frame)

    def _put(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(encode(message))

    def say_joined(self) -> None:
        """Tell a connector that understands it, and is still there, that this side is in RTS."""
        with self._lock:
            if self._beats and self.left is None:
                self.say(Joined(self.id))

    def give_up(self, message: Reject) -> None:
        """Tell the peer why nothing comes of it; after that nothing more is said."""
        with self._lock:
            if self.left is None:
                with contextlib.suppress(RdmaConnectError):
                    self.say(message)
                self._leave(message.why)
        self._changed()

    def reject_of(self, error: BaseException, stage: str = "", ports: tuple[PortAddress, ...] = ()) -> Reject:
        """What the peer is told of an error here."""
        number = getattr(error, "errno", None)
        number = number if isinstance(number, int) else 0
        words = str(error) or type(error).__name__
        again_ms = AGAIN_MS if isinstance(error, Busy) else 0
        differences = error.differences if isinstance(error, PeerMismatch) else ()
        return Reject(
            self.handshake.id or NO_ID, stage or self.state.value, number, words, ports, again_ms, differences
        )

    def failure(self, doing: str) -> RdmaConnectError:
        """Why nothing more will come, as an error; for when ``left`` is set."""
        if isinstance(self.error, PeerClosed) or self.error is None:
            return PeerClosed(f"{doing}: {self.left}")
        return self.error

    def is_probe(self, payload: memoryview) -> bool:
        """Whether a message is a probe that came a second time, over a type that may repeat it."""
        return self.handshake.lossy and bytes(payload[:16]) == self.handshake.id

    def lend(self) -> None:
        """One user more; each :meth:`close` takes one back."""
        with self._lock:
            self._users += 1

    def close(self, why: str = "close", *, lost: bool = False) -> None:
        """Say good-bye and close, if this was the last user.

        Args:
            why: for the peer.
            lost: whether the connection is to be connected anew.
        """
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self.left is None and self.handshake.state is State.JOINED:
                bye = Bye(self.id, why[:MAX_TEXT], lost)
                with contextlib.suppress(RdmaConnectError):  # a child of fork has nobody to say it to
                    self.say(bye)
                if self.channel is None and self.liveness is not None:
                    service.soon(self.liveness.farewell, encode(bye))
            if self.channel is not None:
                self.channel.close()
            closed = "this side was closed."
            self._leave(why if lost else closed, None if lost else StateError(closed))
