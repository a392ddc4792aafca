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
    CLOSED    <-- reject, bye -->     CLOSED

A doctor asks instead, and nothing follows; its other side needs no machine to answer:

    IDLE      -- question -->
    QUESTIONED
    TOLD      <-- answer --
"""

from __future__ import annotations

from enum import Enum

from ..abi import QpType
from ..errors import LocalProtocolError, PeerRejected, RemoteProtocolError
from .messages import Answer, Beat, Bye, Hello, Joined, Message, Proof, Question, Ready, Reject, Reply

__all__ = ["NO_ID", "RECEIVES", "SENDS", "Handshake", "Outcome", "Role", "State", "counts"]


class Role(Enum):
    """Which side of the conversation this is."""

    CONNECTOR = "connector"
    LISTENER = "listener"


class State(Enum):
    """Where the conversation is; see the head of this file."""

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
SENDS[_L][_S.JOINED, Joined] = RECEIVES[_C][_S.JOINED, Joined] = _S.JOINED


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
        key = (self.state, type(message))
        if key not in SENDS[self.role] or message.id != self.id:
            raise LocalProtocolError(
                f"{self.role.value}: a {type(message).__name__.lower()} may not be sent while {self.state.value}."
            )
        self.state = SENDS[self.role][key]
        if not isinstance(message, Beat | Joined):
            self.said = message
        return message

    def receive(self, message: Message) -> Outcome:
        """Take in what came.

        Returns:
            What became of it; after MOVED, ``state`` and ``peer`` tell how.

        Raises:
            PeerRejected: the peer gave up, with its stage and reason.
            RemoteProtocolError: the message may not come now, or does not fit the one that it answers.
        """
        if self.id is None and isinstance(message, Hello):
            self.id = message.id
        unread = isinstance(message, Reject) and message.id == NO_ID
        if message.id != self.id and not unread:
            return Outcome.STALE
        if message == self._heard and not isinstance(message, Bye | Beat):
            return Outcome.REPEATED
        key = (self.state, type(message))
        if key not in RECEIVES[self.role]:
            raise RemoteProtocolError(
                f"{self.role.value}: the peer sent a {type(message).__name__.lower()} while {self.state.value}."
            )
        if isinstance(message, Reply) and isinstance(self.said, Hello):
            asked, given = ([end.qp_type for end in m.ends] for m in (self.said, message))
            if asked != given:
                raise RemoteProtocolError(
                    f"connector: asked for {len(asked)} queue pairs of type {asked[0]}, "
                    f"the peer replied with {len(given)} of type {given[0]}."
                )
        self.state = RECEIVES[self.role][key]
        self.met = self.met or isinstance(message, Ready | Joined | Proof)
        if isinstance(message, Beat | Joined):
            return Outcome.MOVED
        self._heard, self.said = message, None
        if isinstance(message, Hello | Reply | Answer):
            self.peer = message
        self.proved = self.proved or isinstance(message, Proof)
        if isinstance(message, Reject):
            raise PeerRejected(message.stage, message.errno, message.why, message.ports, message.again_ms)
        return Outcome.MOVED

    @property
    def lossy(self) -> bool:
        """Whether the queue pairs' type may lose messages, so that probes are repeated."""
        return isinstance(self.peer, Hello | Reply) and self.peer.ends[0].qp_type is not QpType.RC
