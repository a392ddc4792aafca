"""What two ends say to each other about connections that were made together, and whether the peer is still there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from itertools import count

from ..agreement.endpoint import PortAddress
from ..errors import PeerClosed, RdmaConnectError, StateError
from ..exchange.alive import TICK_S
from ..exchange.channel import Channel
from ..protocol.codec import decode, encode
from ..protocol.handshake import BEATING, NO_ID, Handshake, Outcome, State
from ..protocol.messages import Beat, Bye, Hello, Joined, Message, Proof, Ready, Reject, Reply
from ..runtime.deadline import Deadline
from ..runtime.wakeup import Signal
from .admission import AGAIN_MS, Busy
from .trace import Trace

__all__ = ["BEAT_MS", "Conversation"]

#: ticks between two beats of this side: a thousand connections are to cost next to nothing while nothing happens
BEAT_TICKS = 5
#: the same in milliseconds
BEAT_MS = round(BEAT_TICKS * TICK_S * 1000)
#: a peer that announced beats and is silent for so long is gone, seconds, at least
SILENT_S = 15.0
#: beats that may be missing before a peer counts as gone
BEATS_MISSED = 3
#: so that not all beat at the same time
_phase = count()


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
        on_change: called in the service thread after each change, besides.
    """

    def __init__(self, handshake: Handshake, trace: Trace | None = None) -> None:
        self.handshake = handshake
        self.trace = trace or Trace(handshake.role, Deadline(None))
        self.changed = Signal()
        self.left: str | None = None
        self.error: RdmaConnectError | None = None
        self.parted = False
        self.on_change: Callable[[], None] | None = None
        self.channel: Channel | None = None
        self._lock = threading.RLock()
        self._users = 0
        self._beats = False
        self._beat = b""
        self._ticks, self._ticks_silent = next(_phase), 0
        self._silent_max = SILENT_S / TICK_S

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
            self._ticks_silent = 0
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
                self._ticks_silent = 0
                if outcome is Outcome.REPEATED:
                    if self.handshake.said is not None:
                        self._put(self.handshake.said)
                    return
                if isinstance(message, Beat):
                    return
                self._heard(message)
        self._changed()

    def _heard(self, message: Message) -> None:
        if isinstance(message, Hello | Reply) and message.beat_ms:
            self._beats = True
            self._silent_max = max(SILENT_S, BEATS_MISSED * message.beat_ms / 1000) / TICK_S
        if isinstance(message, Reply | Ready | Proof):
            self.trace.hear(message.stages)
        elif isinstance(message, Bye):
            self.parted = True
            self._leave(f"the peer closed the connection ({message.why}).")

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
            self._ticks += 1
            if self._ticks % BEAT_TICKS == 0 and self.channel is not None:
                self._beat = self._beat or encode(Beat(self.id))
                self.channel.send(self._beat)
            # ticks are counted and not seconds: a process that was stopped must not blame its peer
            self._ticks_silent += 1
            if self._ticks_silent <= self._silent_max:
                return
            silent = f"nothing was heard of it for {self._ticks_silent * TICK_S:g} s"
            # one that was only stopped is to know why
            if self.handshake.state is State.JOINED:
                self._put(Bye(self.id, silent))
            else:
                self._put(Reject(self.id, self.handshake.state.value, 0, silent))
            self._leave(f"the peer is gone: {silent}: its process ended or was stopped, or the network to it broke.")
        self._changed()

    def _leave(self, why: str, error: RdmaConnectError | None = None) -> None:
        if self.left is None:
            self.left, self.error = why, error

    def _changed(self) -> None:
        self.changed.notify()
        if self.on_change is not None:
            self.on_change()

    # ---- in any thread

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
        return Reject(self.handshake.id or NO_ID, stage or self.state.value, number, words, ports, again_ms)

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

    def close(self, why: str = "close") -> None:
        """Say good-bye and close, if this was the last user.

        Args:
            why: for the peer.
        """
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self.left is None and self.handshake.state is State.JOINED:
                with contextlib.suppress(RdmaConnectError):  # a child of fork has nobody to say it to
                    self.say(Bye(self.id, why[:2048]))
            if self.channel is not None:
                self.channel.close()
            self._leave("this side was closed.", StateError("this side was closed."))
