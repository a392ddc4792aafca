"""Both sides call each other, in any order, and get one connection."""

from __future__ import annotations

import threading
from functools import partial

from ..errors import ConnectTimeout, PeerClosed, RdmaConnectError, StateError
from ..exchange.acceptor import Acceptor
from ..exchange.channel import Channel
from ..exchange.url import tcp_url
from ..protocol.codec import MAX_FRAME, decode
from ..protocol.handshake import Handshake, Role, State, counts
from ..protocol.messages import Hello
from ..runtime.deadline import Deadline
from ..runtime.peer_log import log
from ..runtime.procedure import Call, Procedure, Wait, arun, call_apart, run_apart
from ..runtime.wakeup import Signal
from ..runtime.workers import here
from ..verbs import library
from .async_connection import AsyncConnection
from .bare_end import make_end
from .connect import find_ports, look_up, patience_ms, prepare, raise_ends
from .connection import Connection
from .conversation import BEAT_MS, Conversation
from .end import End
from .incoming import LOOK_S, Incoming
from .outgoing import Outgoing
from .prepared import Prepared
from .probe import prove
from .terms import ConnectOptions, Terms, Unpack, check_alone, make_deadline, make_terms
from .trace import Trace
from .watch import attend

__all__ = ["ameet", "meet"]


def meet(local: str, peer: str, **options: Unpack[ConnectOptions]) -> Connection:
    """Connect two sides that are alike: each listens, and calls the other.

    They may start at the same time or one after the other; of the two calls one is dropped, by a rule
    that both know, and there is exactly one connection.

    Args:
        local: where this side listens, as for ``listen``.
        peer: where the other side does, as for ``connect``.
        **options: as for ``connect``; the ``qp_type`` must be the same on both.

    Returns:
        The connection, its queue pair in RTS and its data path proven.

    Raises:
        OSError: the local address is taken or not one of this host.
        RdmaConnectError, ValueError, TypeError: as ``connect`` and ``listen``.
    """
    terms = _terms(options)
    library()
    return Connection(run_apart(_procedure(local, peer, *terms, make_deadline(options)), End.close))


async def ameet(local: str, peer: str, **options: Unpack[ConnectOptions]) -> AsyncConnection:
    """The same as :func:`meet` for asyncio; gives an :class:`AsyncConnection`."""
    deadline = make_deadline(options)
    terms = await call_apart(partial(_terms, options))
    return AsyncConnection(await arun(_procedure(local, peer, *terms, deadline)))


def _terms(options: ConnectOptions) -> tuple[Terms, Terms]:
    """What is asked for as the caller, and as the one who is called: they differ in their keys."""
    calling = make_terms(options)
    check_alone(calling, "meet, whose two sides are alike")
    return calling, make_terms(options, listens=True)


def _procedure(local: str, peer: str, calling: Terms, called: Terms, deadline: Deadline) -> Procedure[End]:
    url = tcp_url(peer)
    trace = Trace(Role.CONNECTOR, deadline)
    meeting = _Meeting(called, tcp_url(local, bind=True))
    try:
        outgoing = Outgoing(url, (yield from look_up(url, deadline)), calling.keys)
        meeting.expect(outgoing)
        port = (yield from find_ports(calling, outgoing.address, deadline)).ports[0]
        trace.mark("port", "%s for %s", port, url)

        def make() -> Prepared:
            return Prepared.on(port, calling.qp_type, calling)

        prepared = yield prepare(make, deadline)
        prepared.lend()
        try:
            trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
            connection = yield from meeting.procedure(prepared, calling, trace, deadline)
        finally:
            prepared.close()
    finally:
        meeting.close()
    connection.connect_s = deadline.waited_s
    return connection


class _Caller:
    """The channel of somebody who calls: gives what comes to the conversation that it belongs to."""

    def __init__(self, meeting: _Meeting, channel: Channel) -> None:
        self._meeting, self.channel = meeting, channel
        self.conversation: Conversation | None = None

    def took(self, frame: bytes) -> None:
        if self.conversation is not None and self.conversation.took_beat(frame):
            return
        try:
            message = decode(frame)
        except RdmaConnectError as e:
            self.over(e)
            self.channel.close()
            return
        current = self.conversation
        if isinstance(message, Hello) and (current is None or message.id != current.id):
            if current is not None:
                current.over(PeerClosed("the peer called anew."))
            self._meeting.called_by(self, message)
        elif message is not None and current is not None:
            current.hear(message)

    def over(self, error: RdmaConnectError) -> None:
        if self.conversation is not None:
            self.conversation.broke(error)

    def tick(self) -> None:
        if self.conversation is not None:
            self.conversation.tick()


class _Meeting:
    """Two conversations with the same peer, of which one counts.

    What the peer's own call asks for is made by :class:`Incoming`, of which this is the listening side.
    """

    def __init__(self, called: Terms, url: str) -> None:
        self.terms, self.workers = called, here()
        self._lock = threading.Lock()
        self._changed = Signal()
        self._outgoing: Outgoing | None = None
        self._peers: frozenset[str] = frozenset()
        self._early: list[tuple[_Caller, Hello]] = []
        #: the peer's calls that may count yet, and the one that is answered
        self._calls: list[Incoming] = []
        self._answering: Incoming | None = None
        self._prepared: Prepared | None = None
        self._stands: list[End] = []
        self._closed = False
        self._refused = ""
        self._acceptor = Acceptor(url, partial(_Caller, self), MAX_FRAME, called.keys)
        self._acceptor.start()

    def expect(self, outgoing: Outgoing) -> None:
        """This peer, and no other, is to be met."""
        with self._lock:
            self._outgoing = outgoing
            self._peers = frozenset(str(address.sockaddr[0]) for address in outgoing.addresses)
            early, self._early = self._early, []
        for caller, hello in early:
            self.called_by(caller, hello)

    # ---- in the service thread

    def called_by(self, caller: _Caller, hello: Hello) -> None:
        """Somebody calls."""
        channel = caller.channel
        self._acceptor.know(channel)
        with self._lock:
            late = self._closed
            if self._outgoing is None and not late:
                self._early.append((caller, hello))
                return
        if late:  # the peer has to call whoever meets it next here
            channel.close()
            return
        conversation = Conversation(Handshake(Role.LISTENER), Trace(Role.LISTENER, Deadline(None)))
        conversation.attach(channel)
        caller.conversation = conversation
        conversation.hear(hello)
        words = ""
        if channel.address not in self._peers:
            words = f"this side meets the peer at {', '.join(sorted(self._peers))}, and not {channel.address}."
        elif not hello.meet:
            words = "this side meets one peer, it does not listen: call meet()."
        if words:
            log.warning("meet on %s: %s: refused: %s", self._acceptor.url, channel.address, words)
            self._refused = f"A call of {channel.address} was refused: {words}"
            conversation.give_up(conversation.reject_of(StateError(words)))
            self._acceptor.expect(channel)
            return
        incoming = Incoming(self, channel, conversation)
        with self._lock:
            late = self._closed
            if not late:
                self._calls.append(incoming)
        if late:
            channel.close()
            return
        conversation.on_change = partial(self._hear, incoming)
        self._changed.notify()

    def _hear(self, incoming: Incoming) -> None:
        with self._lock:
            answering = incoming is self._answering
            if not answering and incoming.conversation.left is not None and incoming in self._calls:
                self._calls.remove(incoming)
        if answering:
            incoming.wake()

    # ---- in worker threads: what an incoming connection asks

    def held(self, incoming: Incoming) -> End | None:
        return None

    def claim(self, connection: End, incoming: Incoming) -> bool:
        return False

    def prepare(self, incoming: Incoming) -> Prepared:
        assert self._prepared is not None
        incoming.ports = (self._prepared.address,)
        return self._prepared

    def proven(self, incoming: Incoming, again: End | None) -> None:
        with self._lock:
            self._calls.remove(incoming)
            closed = self._closed
            if not closed:
                self._stands += incoming.made
                incoming.conversation.stand(incoming.made, incoming.token, deaf=True)
                attend(incoming.made)
        self._changed.notify()
        if closed:
            for connection in incoming.made:
                connection.close()

    def judged(self, incoming: Incoming, error: RdmaConnectError) -> RdmaConnectError:
        return error  # there are no others

    def failed(self, incoming: Incoming, error: RdmaConnectError, again: End | None) -> None:
        log.warning("meet on %s: %s: %s", self._acceptor.url, incoming.channel.address, error)
        with self._lock:
            if incoming in self._calls:
                self._calls.remove(incoming)
        incoming.channel.close()
        self._changed.notify()

    # ---- the procedure

    def procedure(self, prepared: Prepared, calling: Terms, trace: Trace, deadline: Deadline) -> Procedure[End]:
        """Take both conversations on until one of them stands."""
        self._prepared = prepared
        outgoing = self._outgoing
        assert outgoing is not None

        def hello(ident: bytes) -> Hello:
            return Hello(
                ident, prepared.ends, prepared.wish(calling.options), prepared.offered(), calling.private_data,
                meet=True, beat_ms=BEAT_MS, patience_ms=patience_ms(deadline),
            )  # fmt: skip

        while True:
            try:
                conversation = yield from outgoing.begin(hello, trace, deadline)
                answering = yield from self._await(conversation, deadline)
                if answering is not None:
                    connection = yield from self._await_answered(answering, deadline)
                    if connection is not None:
                        return connection
                    yield Call(prepared.transceivers[0].restart)  # nothing came of it: call anew
                elif conversation.state is State.AGREED:
                    return (yield from self._join(conversation, prepared, calling, deadline))
                else:
                    yield from outgoing.ask_again(conversation, deadline)
            except ConnectTimeout as e:
                if not e.stage.startswith("connect"):
                    raise
                hint = f"{outgoing.seen()} {self._refused}".rstrip()
                raise deadline.exceeded(f"meet the peer at {outgoing.url}", hint) from None

    def _await(self, conversation: Conversation, deadline: Deadline) -> Procedure[Incoming | None]:
        """Until the peer replies, or its own call is the one that counts."""
        while True:
            seen = (self._changed, self._changed.count), (conversation.changed, conversation.changed.count)
            if conversation.left is not None or conversation.state is State.AGREED:
                return None
            with self._lock:
                counting = [call for call in self._calls if counts(call.hello.id, conversation.id)]
                if counting:
                    self._answering = counting[0]
                    return self._answering
            deadline.check("connect: wait for the peer")
            yield Wait(deadline, changes=seen)

    def _await_answered(self, answering: Incoming, deadline: Deadline) -> Procedure[End | None]:
        """Until the peer's call has become a connection; None if it has come to nothing."""
        answering.renew()
        answering.wake()
        while True:
            seen = self._changed.count
            with self._lock:
                if self._stands:
                    return self._stands.pop()
                if answering not in self._calls:
                    self._answering = None
                    return None
            deadline.check("connect: answer the peer's call")
            if answering.due():
                answering.wake()
            yield Wait(deadline, changes=((self._changed, seen),), slice_ms=round(LOOK_S * 1000))

    def _join(
        self, conversation: Conversation, prepared: Prepared, calling: Terms, deadline: Deadline
    ) -> Procedure[End]:
        """On the peer's reply: this side's call is the one that counts."""
        all_established = yield from raise_ends(conversation, prepared, calling, deadline)
        connection = make_end(prepared, prepared.transceivers[0], all_established[0])
        self._outgoing = None  # its channel is the connection's now
        yield from prove([connection], deadline)
        conversation.stand([connection], connection.token, deaf=True)
        attend([connection])
        conversation.trace.mark("connected", "in %.1f ms", deadline.waited_s * 1000)
        return connection

    def close(self) -> None:
        """Drop what did not come to anything: without a word, where the peer's own call counts."""
        self._acceptor.close()
        with self._lock:
            self._closed = True
            calls, stands, early = list(self._calls), list(self._stands), list(self._early)
            self._stands.clear()
        for caller, _ in early:
            caller.channel.close()
        for call in calls:
            if call is self._answering:
                call.stop(StateError("this side gave up."))
            else:
                call.channel.close()
        for connection in stands:
            connection.close()
        if self._outgoing is not None:
            self._outgoing.close()
