"""What comes from one connector, given to the connection that it asks for."""

from __future__ import annotations

from typing import Protocol

from ..errors import PeerClosed, RdmaConnectError
from ..exchange.channel import SMALL_FRAME, Channel
from ..protocol.codec import decode, encode
from ..protocol.handshake import NO_ID
from ..protocol.messages import Beat, Hello, Question, Reject, Resume
from .admission import FAILED_COST
from .conversation import Conversation
from .liveness import standing

__all__ = ["Connector", "Host"]


class Host(Protocol):
    """Whom it comes to."""

    def is_busy_with(self, conversation: Conversation | None) -> bool:
        """Whether a conversation is still half open."""

    def asked(self, connector: Connector, hello: Hello) -> None:
        """It wants a connection, or several."""

    def gone(self, connector: Connector, error: RdmaConnectError) -> None:
        """Its channel has ended."""

    def questioned(self, channel: Channel, question: Question) -> None:
        """A doctor asks what this host is. Who serves an application does not say."""
        words = "an application listens here, and no doctor."
        channel.send(encode(Reject(question.id, "question", 0, words)))

    def resumed(self, connector: Connector, conversation: Conversation) -> None:
        """It has dialled again, for a connection that stands."""

    def note(self, channel: Channel, error: RdmaConnectError) -> None:
        """It failed."""


class Connector:
    """One connector; a :class:`~rdmaconnect.exchange.channel.Receiver`.

    Args:
        host: whom it comes to.
        channel: where from.

    Attributes:
        conversation: about what it asked for last, once that has begun.
    """

    def __init__(self, host: Host, channel: Channel) -> None:
        self._host, self.channel = host, channel
        self.conversation: Conversation | None = None
        #: what it has asked for last, while nothing is begun since what it asked for before has not ended yet
        self._next: Hello | None = None

    def took(self, frame: bytes) -> None:
        if self.conversation is not None and self.conversation.took_beat(frame):
            return
        try:
            message = decode(frame)
        except RdmaConnectError as e:
            self._broken(e)
            return
        current = self.conversation
        if isinstance(message, Hello) and (current is None or message.id != current.id):
            if current is not None:
                current.over(PeerClosed("the peer began anew."))
            self._next = message
            self.go_on()
        elif isinstance(message, Resume) and current is None:
            self._resume(message)
        elif isinstance(message, Question) and current is None:
            self._host.questioned(self.channel, message)
        elif message is not None and current is not None:
            current.hear(message)

    def _resume(self, message: Resume) -> None:
        """It says that this is another side channel of a connection: only its two ends know the token."""
        conversation = standing.get(message.token)
        if (
            not isinstance(conversation, Conversation)
            or (conversation.id, conversation.user) != (message.id, self.channel.user)
            or conversation.left is not None
            or conversation.liveness is None
        ):
            self.channel.send(encode(Reject(message.id, "resume", 0, "it is not known here.")))
            self.channel.charge(FAILED_COST)
            return
        self.channel.lower(SMALL_FRAME)
        self._host.resumed(self, conversation)
        conversation.liveness.resume(self.channel)
        self.channel.send(encode(Beat(conversation.id)))

    def go_on(self) -> None:
        """Begin with what it asks for, unless what came before it is under way."""
        if self._next is not None and not self._host.is_busy_with(self.conversation):
            asked, self._next = self._next, None
            self._host.asked(self, asked)

    def _broken(self, error: RdmaConnectError) -> None:
        """Bytes that cannot be read: say so, and hang up."""
        if self.conversation is not None:
            self.conversation.over(error)
        self.channel.send(encode(Reject(NO_ID, "decode", 0, str(error))))
        self.channel.close()
        self._host.gone(self, error)
        if self.conversation is None:
            self._host.note(self.channel, error)

    def over(self, error: RdmaConnectError) -> None:
        if self.conversation is not None:
            self.conversation.broke(error)
        self._host.gone(self, error)

    def tick(self) -> None:
        if self.conversation is not None:
            self.conversation.tick()
