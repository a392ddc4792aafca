"""The conversation as a machine without I/O: messages in, events and messages out. Pure.

Both roles follow the same two tables, ``SENDS`` and ``RECEIVES``: ``[role][state, message type] -> state``;
a key that is not there is a fault. The machine knows neither clock nor socket nor device: the caller
moves the queue pairs between ``receive`` and the answer, and hands in the random connection id.

::

    connector                         listener
    ---------                         --------
    IDLE      -- hello -->            IDLE
    ASKED                             HEARD      (queue pair to RTR, receives posted)
    AGREED    <-- reply --            ANSWERED
              (queue pair to RTR, RTS)
    JOINED    -- ready -->            JOINED     (queue pair to RTS)
              <-- joined --
              -- proof -->
              <-- proof --            (each after the other's probes have arrived)
              -- beat, beat --        (from the reply on)
              <-- unlisted --         (where the listener is closed meanwhile)
    CLOSED    <-- reject, bye -->     CLOSED

A doctor asks instead, and nothing follows; its other side needs no machine to answer:

    IDLE      -- question -->
    QUESTIONED
    TOLD      <-- answer --

Where the TCP connection ends while both are JOINED, the connector says resume on another one: the conversation is the
same as before, and stays JOINED.
"""

from __future__ import annotations

from enum import Enum

from ..abi import QpType
from ..errors import LocalProtocolError, PeerMismatch, PeerRejected, RemoteProtocolError
from .messages import Answer, Beat, Bye, Hello, Joined, Message, Proof, Question, Ready, Reject, Reply, Unlisted

__all__ = ["NO_ID", "RECEIVES", "SENDS", "Handshake", "Outcome", "Role", "State", "counts"]


class Role(Enum):
    """Which side of the conversation this is."""

    __hash__ = object.__hash__  # each is one object, and Enum's own is slow

    CONNECTOR = "connector"
    LISTENER = "listener"


class State(Enum):
    """Where the conversation is; see the head of this file."""

    __hash__ = object.__hash__

    IDLE = "idle"
    ASKED = "asked"
    HEARD = "heard"
    ANSWERED = "answered"
    AGREED = "agreed"
    JOINED = "joined"
    QUESTIONED = "questioned"
    TOLD = "told"
    CLOSED = "closed"


class Outcome(Enum):
    """What became of a message that came."""

    MOVED = "the conversation moved on"
    REPEATED = "the peer repeated itself: send `said` again if there is one"
    STALE = "it belongs to another conversation and was dropped"


#: the id of a reject that answers bytes which could not be read
NO_ID = bytes(16)

_C, _L, _S = Role.CONNECTOR, Role.LISTENER, State

#: where a message takes the role that sends it
SENDS: dict[Role, dict[tuple[State, type], State]] = {
    _C: {(_S.IDLE, Hello): _S.ASKED, (_S.AGREED, Ready): _S.JOINED, (_S.IDLE, Question): _S.QUESTIONED},
    _L: {(_S.HEARD, Reply): _S.ANSWERED},
}
#: where a message takes the role that it comes to
RECEIVES: dict[Role, dict[tuple[State, type], State]] = {
    _C: {(_S.ASKED, Reply): _S.AGREED, (_S.QUESTIONED, Answer): _S.TOLD},
    _L: {(_S.IDLE, Hello): _S.HEARD, (_S.ANSWERED, Ready): _S.JOINED},
}

#: from the reply on each side says that it is there
BEATING = (_S.ANSWERED, _S.AGREED, _S.JOINED)

for _table in (SENDS, RECEIVES):
    for _role in Role:
        _table[_role].update({(s, Reject): _S.CLOSED for s in State if s is not _S.CLOSED})
        _table[_role].update({(_S.JOINED, Proof): _S.JOINED, (_S.JOINED, Bye): _S.CLOSED})
        _table[_role].update({(s, Beat): s for s in BEATING})
for _said in (Joined, Unlisted):
    SENDS[_L][_S.JOINED, _said] = RECEIVES[_C][_S.JOINED, _said] = _S.JOINED


#: messages that nothing answers; that may be the same as the one before; of a peer in RTS; and that tell who it is
_UNANSWERED, _NEVER_REPEATED = (Beat, Joined, Unlisted), (Beat, Bye)
_IN_RTS, _FIRST = (Ready, Joined, Proof), (Hello, Reply, Answer)


def counts(theirs: bytes, mine: bytes) -> bool:
    """Whether the peer's call counts where both sides call each other: the one with the smaller id does.

    Args:
        theirs: the id of the peer's hello.
        mine: the id of this side's.
    """
    return theirs < mine


class Handshake:
    """One side of one conversation.

    Args:
        role: which side.
        id: the connection's 16 bytes: chosen by the connector, taken by the listener from the hello.

    Attributes:
        state: where it stands.
        peer: the hello, reply or answer that came, or None.
        proved: whether the peer said that it has received our probes.
        met: whether the peer is known to be in RTS: its silence on the data path means something.
        said: the message sent since the last one came, that is the answer to it; None while there is none.
    """

    def __init__(self, role: Role, id: bytes | None = None) -> None:
        self.role, self.id, self.state = role, id, State.IDLE
        self.peer: Hello | Reply | Answer | None = None
        self.proved = self.met = False
        self._heard: Message | None = None
        self.said: Message | None = None

    def send(self, message: Message) -> Message:
        """Take note that ``message`` goes out.

        Returns:
            The message.

        Raises:
            LocalProtocolError: if it may not be sent now.
        """
        after = SENDS[self.role].get((self.state, type(message)))
        if after is None or message.id != self.id:
            raise LocalProtocolError(
                f"{self.role.value}: a {type(message).__name__.lower()} may not be sent while {self.state.value}."
            )
        self.state = after
        if not isinstance(message, _UNANSWERED):
            self.said = message
        return message

    def receive(self, message: Message) -> Outcome:
        """Take in what came.

        Returns:
            What became of it; after MOVED, ``state`` and ``peer`` tell how.

        Raises:
            PeerRejected: the peer gave up, with its stage and reason.
            PeerMismatch: the same, since the two ends do not go together.
            RemoteProtocolError: the message may not come now, or does not fit the one that it answers.
        """
        if self.id is None and isinstance(message, Hello):
            self.id = message.id
        unread = isinstance(message, Reject) and message.id == NO_ID
        if message.id != self.id and not unread:
            return Outcome.STALE
        if message == self._heard and not isinstance(message, _NEVER_REPEATED):
            return Outcome.REPEATED
        after = RECEIVES[self.role].get((self.state, type(message)))
        if after is None:
            raise RemoteProtocolError(
                f"{self.role.value}: the peer sent a {type(message).__name__.lower()} while {self.state.value}."
            )
        if isinstance(message, Reply) and isinstance(self.said, Hello):
            asked, given = ((len(m.ends), m.ends[0].qp_type) for m in (self.said, message))  # all of one type
            if asked != given:
                raise RemoteProtocolError(
                    f"connector: asked for {asked[0]} queue pairs of type {asked[1]}, "
                    f"the peer replied with {given[0]} of type {given[1]}."
                )
        self.state = after
        self.met = self.met or isinstance(message, _IN_RTS)
        if isinstance(message, _UNANSWERED):
            return Outcome.MOVED
        self._heard, self.said = message, None
        if isinstance(message, _FIRST):
            self.peer = message
        self.proved = self.proved or isinstance(message, Proof)
        if isinstance(message, Reject):
            if message.differences:
                raise PeerMismatch(message.differences, message.ports)
            raise PeerRejected(message.stage, message.errno, message.why, message.ports, message.again_ms)
        return Outcome.MOVED

    @property
    def lossy(self) -> bool:
        """Whether the queue pairs' type may lose messages, so that probes are repeated."""
        return isinstance(self.peer, Hello | Reply) and self.peer.ends[0].qp_type is not QpType.RC
