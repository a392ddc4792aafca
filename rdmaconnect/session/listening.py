"""What both listeners are: connectors come in, and are taken as far as they get, whether anybody accepts or not."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial

from ..abi import QpType
from ..errors import ConnectTimeout, PeerMismatch, RdmaConnectError, StateError, VerbsError
from ..exchange import service
from ..exchange.acceptor import Acceptor, descriptors_are_scarce
from ..exchange.channel import SMALL_FRAME, Channel
from ..exchange.url import loopback_of
from ..protocol.codec import MAX_FRAME, MAX_PORTS, encode
from ..protocol.handshake import Handshake, Role, State
from ..protocol.messages import Hello, Reject
from ..runtime.deadline import Deadline
from ..runtime.peer_log import log
from ..runtime.procedure import Call, Procedure, Wait
from ..runtime.workers import here
from .admission import AGAIN_MS, FAILED_COST, LARGE, MAX_HALF_OPEN, MAX_QPS, SILENT_S, Busy, Room
from .backlog import Backlog
from .connector import Connector, Host
from .conversation import Conversation
from .end import End
from .incoming import LOOK_S, PATIENCE_MAX_S, Incoming
from .places import Places
from .ports import Choice, choose_ports, wanted_port
from .prepared import Prepared
from .terms import Terms
from .trace import Trace
from .watch import attend

__all__ = ["BaseListener"]


class BaseListener(Backlog, Host):
    """A backlog that connectors fill over TCP: they come in, and are taken as far as they get."""

    def __init__(
        self,
        url: str,
        terms: Terms,
        qp_types: Collection[QpType],
        share_ud: bool,
        max_half_open: int = MAX_HALF_OPEN,
        max_qps: int = MAX_QPS,
    ) -> None:
        super().__init__()
        self.terms, self._qp_types, self._share_ud = terms, tuple(qp_types), share_ud
        self._room = Room(max_half_open, max_qps)
        self.workers = here()
        #: those that are half open, with what they cost
        self._incoming: dict[Incoming, int] = {}
        self._places = Places()
        self._stood: weakref.WeakValueDictionary[bytes, Conversation] = weakref.WeakValueDictionary()
        self._shared: Prepared | None = None
        self._sharing, self._large = threading.Lock(), threading.Lock()
        self._looking = False
        self._acceptor = Acceptor(url, partial(Connector, self), MAX_FRAME, terms.keys)
        self.url = self._acceptor.url
        self._local = loopback_of(self._acceptor.host)
        if terms.keys is None and not self._local:
            logging.getLogger("rdmaconnect").warning(
                "listening on %s without protection: whoever reaches it can connect. "
                "Give secret= (or RDMACONNECT_SECRET), or key= and peer_keys=.", self.url,
            )  # fmt: skip
        self._acceptor.start()

    # ---- in the service thread: who comes, and whether there is room

    def asked(self, connector: Connector, hello: Hello) -> None:
        """A connector wants a connection, or several."""
        channel = connector.channel
        self._acceptor.know(channel)
        trace = Trace(Role.LISTENER, Deadline(None))
        conversation = Conversation(Handshake(Role.LISTENER), trace)
        conversation.attach(channel)
        with self._lock:
            words = "the listener was closed" if self._closed else self._no_room(len(hello.ends))
            overdue = self._overdue() if words and not self._closed else []
            if not words:
                incoming = Incoming(self, channel, conversation)
                self._incoming[incoming] = len(hello.ends)
        for one in overdue:
            one.stop(Busy(f"it has not gone on for {one.age_s:.0f} s, and others wait."))
        if words:
            log.info("accept on %s: %s is told to try again: %s", self.url, channel.address, words)
            again_ms = 0 if self._closed else AGAIN_MS
            channel.send(encode(Reject(hello.id, "accept", 0, f"busy: {words}", (), again_ms)))
            self._acceptor.expect(channel)
            return
        channel.lower(SMALL_FRAME)
        connector.conversation = conversation
        conversation.on_change = incoming.wake
        conversation.hear(hello)
        self._look_later()

    def is_busy_with(self, conversation: Conversation | None) -> bool:
        """Whether a conversation is still half open."""
        with self._lock:
            return any(one.conversation is conversation for one in self._incoming)

    def _no_room(self, count: int) -> str:
        """In words, why there is no room for a hello with so many queue pairs; "" if there is."""
        open_now = len(self._incoming) + len(self._ready)
        qps = sum(self._incoming.values()) + len(self._ready)
        return self._room.lacks(count, open_now, qps, scarce=descriptors_are_scarce())

    def _overdue(self) -> list[Incoming]:
        """Those that were replied to and have not gone on: in silence, or for very long.

        One that has announced beats is silent when they fail to come, which ends its conversation; and whose bytes
        lie here unread is not silent at all.
        """
        answered = [one for one in self._incoming if one.state is State.ANSWERED]
        silent = [one for one in answered if one.channel.silent_s > SILENT_S and not one.conversation.alive]
        late = [one for one in answered if one.age_s > PATIENCE_MAX_S]
        return [one for one in silent if not one.channel.unread()] + late

    def resumed(self, connector: Connector, conversation: Conversation) -> None:
        """A connection that stands has another side channel."""
        self._acceptor.know(connector.channel)
        self._stood[conversation.id] = conversation

    def gone(self, connector: Connector, error: RdmaConnectError) -> None:
        """A connector's channel has ended."""
        self._acceptor.know(connector.channel)
        if connector.conversation is None:
            self._in_vain.strange(f"{connector.channel.address or 'a stranger'}: {error}")

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            service.loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Move on those to whom the clock gives reason."""
        self._looking = False
        with self._lock:
            incoming = list(self._incoming)
        for one in incoming:
            if one.due():
                one.wake()
        if incoming:
            self._look_later()

    # ---- in worker threads: what an incoming connection asks

    def held(self, incoming: Incoming) -> End | None:
        return self._places.held(incoming)

    def claim(self, connection: End, incoming: Incoming) -> bool:
        return self._places.claim(connection, incoming)

    def prepare(self, incoming: Incoming) -> Prepared:
        """Queue pairs for it. Blocks."""
        hello = incoming.hello
        theirs = hello.ends[0]
        if theirs.qp_type not in self._qp_types:
            words = ", ".join(map(str, self._qp_types))
            raise PeerMismatch([f"qp_type: connector {theirs.qp_type}, this listener takes {words}"], ())
        if hello.meet:
            raise StateError("this side listens, it does not meet(): call connect().")
        ports, incoming.ports, _, incoming.left_out = self._choice(incoming.channel)
        port = wanted_port(ports, hello.target)
        incoming.conversation.trace.mark("port", "%s for %s", port, incoming.channel.address)
        make = partial(Prepared.on, port, theirs.qp_type, self.terms, len(hello.ends))
        if self._share_ud and theirs.qp_type is QpType.UD:
            return self._prepare_shared(make)
        if len(hello.ends) <= LARGE:
            return make()
        with self._large:
            incoming.check_wanted()
            return make()

    def _prepare_shared(self, make: Callable[[], Prepared]) -> Prepared:
        with self._sharing:
            if self._shared is None or self._shared.engine.closed:
                self._shared = make()
                self._shared.lend()
            return self._shared

    def _choice(self, channel: Channel) -> Choice:
        """Its ports toward a peer, no more than can be told."""
        ports, addresses, certain, left_out = choose_ports(self.terms.options, channel.address or None, channel.local)
        # a GID index that was asked for means one port's: nothing else is meant
        most = MAX_PORTS if self.terms.options.gid_index is None else 1
        return Choice(ports[:most], addresses[:most], certain, left_out)

    def proven(self, incoming: Incoming, again: End | None) -> None:
        """It stands: it is the next for accept, or for who waits in reconnect."""
        made = incoming.made
        with self._lock:
            self._incoming.pop(incoming, None)
            if len(made) == 1 and not self._share_ud:
                self._places.stands(made[0], incoming)
                made[0].again = self._await_again
                if self.terms.reconnect_s and again is None:
                    made[0].renew_for(self.terms.reconnect_s, self.workers)
            closed = self._closed and again is None
            incoming.conversation.stand(made, incoming.token, deaf=self._closed)
            self._stood[incoming.conversation.id] = incoming.conversation
            if again is None and not closed:
                self._ready.extend(made)
        self._changed.notify()
        attend(made)
        if closed:
            for connection in made:
                connection.close()

    def judged(self, incoming: Incoming, error: RdmaConnectError) -> RdmaConnectError:
        """What its peer is told of an error: that it may ask again, where others will give back what lacks."""
        if not isinstance(error, VerbsError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return error
        with self._lock:
            others = len(self._incoming) + len(self._ready) > 1
        return Busy(str(error)) if others else error

    def failed(self, incoming: Incoming, error: RdmaConnectError, again: End | None) -> None:
        """Nothing came of it: the connector may ask again, on the same channel."""
        if not self._closed:
            self.note(incoming.channel, error)
        with self._lock:
            self._incoming.pop(incoming, None)
            closed = self._closed
        if again is not None:
            self._places.unclaim(again, incoming)
        self._changed.notify()
        self._wake_all()
        if closed:
            incoming.channel.close()
        else:
            service.soon(self._ask_again, incoming.channel)

    def _ask_again(self, channel: Channel) -> None:
        """A connector may ask again, which costs it more than a message does. In the service thread."""
        self._acceptor.expect(channel)
        channel.charge(FAILED_COST)
        if isinstance(channel.receiver, Connector):
            channel.receiver.go_on()

    def note(self, channel: Channel, error: RdmaConnectError) -> None:
        """It failed with a peer."""
        words = f"{channel.address or 'a peer'}: {error}"
        log.warning("accept on %s: %s", self.url, words)
        self._in_vain.failed(words, error)
        self._changed.notify()

    def _wake_all(self) -> None:
        """One more may have its turn."""
        with self._lock:
            waiting = list(self._incoming) if self._places.awaited else []
        for incoming in waiting:
            incoming.wake()

    # ---- procedures

    def _seen(self) -> str:
        """Whom an accept in vain, and nobody before it, has seen."""
        with self._lock:
            incoming = list(self._incoming)
        here = f"nobody asked: {self._local} is loopback, which only this host reaches." if self._local else ""
        return self._in_vain.explain([one.explain() for one in incoming[-3:]]) or here or "nobody asked"

    def _await_again(self, connection: End, deadline_s: float | None) -> Procedure[None]:
        """Reconnect, on the side that listens: wait for the peer's new hello."""
        deadline = Deadline(deadline_s, ConnectTimeout)
        if self._closed or self._pid != os.getpid():
            raise StateError(f"reconnect: the listener on {self.url} is closed. Listen and accept anew.")
        yield Call(connection.part)
        self._places.expect(connection)
        self._wake_all()
        try:
            while True:
                seen = self._changed.count
                if connection not in self._places.awaited:
                    return
                if self._closed:
                    raise StateError(f"reconnect: the listener on {self.url} was closed.")
                connection.check_open()
                deadline.check(f"reconnect on {self.url}", "The peer did not connect anew.")
                yield Wait(deadline, changes=((self._changed, seen),))
        finally:
            claimant = self._places.forget(connection)
            if claimant is not None:
                claimant.stop(StateError("reconnect: this side gave up."))

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            incoming, ready = list(self._incoming), list(self._ready)
            self._ready.clear()
        self._acceptor.close()
        if self._pid != os.getpid():
            return
        for one in incoming:
            one.stop(StateError("the listener was closed."))
        self._changed.notify()
        for reference in self._stood.valuerefs():  # more may come meanwhile
            if (conversation := reference()) is not None:
                conversation.unlist()
        with ExitStack() as closing:  # all of them, though one may fail
            if self._shared is not None:
                closing.callback(self._shared.close)
            for connection in ready:
                closing.callback(connection.close)
