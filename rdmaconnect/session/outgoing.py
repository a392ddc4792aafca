"""The connector's side of the exchange: the listener is dialled until it is there, and asked until it replies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..agreement.candidates import Addresses
from ..errors import AuthenticationError, PeerClosed, PeerRejected, RdmaConnectError
from ..exchange.channel import Channel
from ..exchange.curve import Keys
from ..exchange.dial import Dial
from ..exchange.url import Address
from ..protocol.codec import MAX_FRAME
from ..protocol.handshake import Handshake, Role, State
from ..protocol.messages import Hello, Question, Resume
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Errand, Procedure, Wait
from ..runtime.wakeup import Signal
from ..runtime.workers import here, namespace
from .conversation import Conversation
from .redial import Dialler, Redial
from .trace import Trace

__all__ = ["Outgoing"]

#: a listener that hangs up before it replies is dialled again after so many seconds, doubled each time, at most
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0
#: handshakes of a protected exchange that break off without a word before the keys are held to be the reason
_BROKEN_OFF = 3
#: makes what is said first, from a new id
Asks = Callable[[bytes], Hello | Question]
#: states in which the listener has said what it was asked for
_REPLIED = (State.AGREED, State.TOLD)


class _Receiver:
    """Who is told what comes on one channel: the end of an earlier one, told late, is nothing to a later one.

    Attributes:
        conversation: what is said on it now.
        ended: why nothing more comes, if so.
    """

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.ended: RdmaConnectError | None = None

    # ---- in the service thread

    def took(self, frame: bytes) -> None:
        """A frame has come."""
        if self.conversation is not None:
            self.conversation.took(frame)

    def over(self, error: RdmaConnectError) -> None:
        """The channel has ended."""
        self.ended = error
        if self.conversation is not None:
            self.conversation.broke(error)

    def tick(self) -> None:
        """A second has passed."""
        if self.conversation is not None:
            self.conversation.tick()


class Outgoing:
    """The exchange with one listener.

    Args:
        url: where it listens, for messages.
        addresses: the same, looked up.
        keys: to protect the exchange; None for none.
    """

    def __init__(self, url: str, addresses: Sequence[Address], keys: Keys | None) -> None:
        self.url, self.addresses = url, addresses
        self._keys = keys
        #: the last one, and who is told what comes on it
        self._channel: Channel | None = None
        self._receiver = _Receiver()
        #: this host's address and the listener's, once it was reached
        self.exchange: Addresses = ("", "")
        #: the last one, and whether it is still at it
        self._dial: Dial | None = None
        self._dialling = False
        self._broken_off = 0
        self._pause_s = _PAUSE_S
        self._seen = ""

    @property
    def address(self) -> str:
        """The address that it was reached at, or the first to be tried."""
        return self._channel.address if self._channel is not None else str(self.addresses[0].sockaddr[0])

    @property
    def greeted(self) -> bool:
        """Whether somebody has spoken there, the last time that it was reached."""
        return self._channel is not None and self._channel.greeted

    # ---- procedures

    def reach(self, deadline: Deadline) -> Procedure[Channel]:
        """Have a channel: dial until somebody is there.

        Returns:
            The channel, which may end at any time.

        Raises:
            ConnectTimeout: says what was seen at each address.
            VerbsError: EMFILE, ENFILE.
        """
        try:
            while (channel := self._dialled()) is None:
                if deadline.left_s <= 0:
                    raise deadline.exceeded("connect: reach the listener", self.seen())
                yield self._wait(deadline)
        finally:
            self._hang_on()
        return channel

    def meanwhile(self, call: Call, deadline: Deadline) -> Procedure[Any]:
        """Have something done, and dial until that is over: who is there has greeted when there is something to say.

        Returns:
            The call's result; it raises its exception. That nobody is reached is for :meth:`reach` to say.
        """
        errand = Errand(call)
        try:
            while not errand.done:
                deadline.check(call.stage)
                try:
                    there = self._dialled() is not None
                except RdmaConnectError:  # no descriptors
                    there = True
                yield Wait(deadline, changes=((errand.changed, 0),)) if there else self._wait(deadline, errand.changed)
            return errand.result()
        except BaseException:
            errand.give_up()
            raise

    def _dialled(self) -> Channel | None:
        """The channel, if there is one; what is due for one is done."""
        if self._channel is not None and self._receiver.ended is None:
            return self._channel
        now = time.monotonic()
        if self._dial is None or not self._dialling:
            self._dial, self._dialling = Dial(self.addresses, now), True
        try:
            tcp = self._dial.advance(now)
        except BaseException:  # it is closed
            self._dialling = False
            raise
        if tcp is None:
            return None
        self._dialling, self._receiver = False, _Receiver()
        self._channel = Channel(tcp, self._receiver, MAX_FRAME, self._keys)
        self.exchange = self._channel.local, self._channel.address
        return self._channel

    def _wait(self, deadline: Deadline, *others: Signal) -> Wait:
        """For what dialling waits for, and for other things."""
        assert self._dial is not None
        due_ms = max(1, round(min(self._dial.due_s(time.monotonic()), 1.0) * 1000))
        changes = tuple((signal, 0) for signal in others)
        return Wait(deadline, changes=changes, writable=tuple(self._dial.filenos()), slice_ms=due_ms)

    def _hang_on(self) -> None:
        """Dial no more for now."""
        self._dialling = False
        if self._dial is not None:
            self._dial.close()

    def ask(self, hello: Asks, trace: Trace, deadline: Deadline) -> Procedure[Conversation]:
        """Say hello until the listener replies.

        A listener that goes away before it has replied is dialled anew; one that is busy is asked again when
        it said so. Each time the conversation is another one.

        Args:
            hello: makes the hello from a new id, or a doctor's question.
            trace: the stages on the way.
            deadline: for all of it.

        Returns:
            The conversation, in which the reply has come.

        Raises:
            ConnectTimeout: the deadline passed; says how far it got.
            AuthenticationError, RemoteProtocolError, PeerRejected: as ``connect``.
        """
        while True:
            conversation = yield from self.begin(hello, trace, deadline)
            try:
                yield from self._await_reply(conversation, deadline)
            except BaseException as e:
                conversation.give_up(conversation.reject_of(e))
                raise
            if conversation.state in _REPLIED:
                return conversation
            yield from self.ask_again(conversation, deadline)

    def begin(self, hello: Asks, trace: Trace, deadline: Deadline) -> Procedure[Conversation]:
        """Have a channel, and say hello on it.

        Returns:
            The conversation, whose reply is to be waited for.
        """
        channel = yield from self.reach(deadline)
        conversation = Conversation(Handshake(Role.CONNECTOR, secrets.token_bytes(16)), trace)
        conversation.attach(channel)
        self._receiver.conversation = conversation
        trace.mark("hello", "sent to %s", self.url)
        if self._receiver.ended is not None:
            conversation.over(self._receiver.ended)
        try:
            conversation.say(hello(conversation.id))
        except RdmaConnectError:
            if conversation.left is None:
                raise
        return conversation

    def _await_reply(self, conversation: Conversation, deadline: Deadline) -> Procedure[None]:
        while True:
            seen = conversation.changed.count
            if conversation.left is not None or conversation.state in _REPLIED:
                return
            if deadline.left_s <= 0:
                raise deadline.exceeded("connect: wait for the peer's reply", self.seen())
            yield Wait(deadline, changes=((conversation.changed, seen),))

    def ask_again(self, conversation: Conversation, deadline: Deadline) -> Procedure[None]:
        """A conversation ended without a reply: wait until it is worth while to ask again, or say why it is not.

        Raises:
            ConnectTimeout, AuthenticationError, RemoteProtocolError, PeerRejected: as :meth:`ask`.
        """
        error, channel = conversation.error, conversation.channel
        assert channel is not None
        if isinstance(error, PeerRejected) and error.again_ms:
            yield from self._wait_for_room(error, deadline)
            return
        if not isinstance(error, PeerClosed):
            raise error or PeerClosed(f"connect: {conversation.left}")
        if self._keys is not None and channel.greeted:
            self._broken_off += 1
            if self._broken_off >= _BROKEN_OFF:
                raise AuthenticationError(
                    f"connect to {self.url}: the listener broke the handshake off: "
                    "it has another key than this side expects, another secret, or none."
                )
        self._seen = (
            "it was there and is gone: its process ended, or it was closed"
            if channel.greeted
            else "it accepts connections and closes them without a ZeroMQ greeting: is it rdmaconnect that listens?"
        )
        yield from self._rest(deadline)

    def may_ask_again(self, error: RdmaConnectError, deadline: Deadline) -> Procedure[bool]:
        """Whether the listener, which had replied, has no room after all and is to be asked anew; after the pause.

        Raises:
            ConnectTimeout: the deadline passed meanwhile.
        """
        if not (isinstance(error, PeerRejected) and error.again_ms):
            return False
        self.part()
        yield from self._wait_for_room(error, deadline)
        return True

    def part(self) -> None:
        """What was the channel of a connection went with it: the listener is to be dialled anew."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _wait_for_room(self, error: PeerRejected, deadline: Deadline) -> Procedure[None]:
        self._seen = f"it answered: {error.reason}"
        yield from self._pause(error.again_ms / 1000 * (0.5 + secrets.randbelow(1000) / 1000), deadline)

    def _rest(self, deadline: Deadline) -> Procedure[None]:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _PAUSE_MAX_S)
        yield from self._pause(pause_s, deadline)

    def _pause(self, seconds: float, deadline: Deadline) -> Procedure[None]:
        over = Deadline(min(seconds, deadline.left_s))
        while over.left_s > 0:
            yield Wait(over)
        if deadline.left_s <= 0:
            raise deadline.exceeded("connect: wait for the peer's reply", self.seen())

    # ---- in any thread

    def redial(self, conversation: Conversation, token: bytes) -> Callable[[Dialler], Redial]:
        """What dials the same address again, to resume a conversation."""
        reached = next((one for one in self.addresses if one.sockaddr[0] == self.address), self.addresses[0])
        return partial(Redial, reached, self._keys, Resume(conversation.id, token), (namespace(), here()))

    def seen(self) -> str:
        """In words, how far it got: for the message when the deadline has passed."""
        channel = self._channel
        if channel is not None and self._receiver.ended is None:
            words = (
                "it is there, but did not answer: it is busy or stopped, or of an older version and not in accept()"
                if channel.greeted
                else "it accepted the connection, but did not speak"
            )
            words = self._seen or words
        elif self._seen and self._dial is not None:
            words = f"{self._seen}; now: {self._dial.seen()}"
        else:
            words = self._dial.seen() if self._dial is not None else "not tried yet"
        words = words.removeprefix(f"{self.url.removeprefix('tcp://')}: ")  # the only address is the url's own
        return f"{self.url}: {words}" + "." * (not words.endswith("?"))

    def close(self) -> None:
        """Hang up."""
        if self._dial is not None:
            self._dial.close()
        if self._channel is not None:
            self._channel.close()
