"""A connection that a listener has been asked for, from hello to proof."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Protocol

from ..agreement.candidates import narrow
from ..agreement.endpoint import PortAddress
from ..agreement.path import Path, agree, make_paths
from ..errors import (
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    StateError,
    say_more,
)
from ..exchange import service
from ..exchange.channel import Channel
from ..objects.address import AddressHandle
from ..protocol.codec import MAX_PORTS
from ..protocol.handshake import State
from ..protocol.messages import Hello, Reply
from ..runtime.deadline import Deadline
from ..runtime.peer_log import log
from ..runtime.workers import Workers
from .bare_end import make_end
from .conversation import BEAT_MS, Conversation
from .end import End, Established
from .ports import LeftOut, ports_anew, wanted_port
from .prepared import Prepared, bring_up, close_handles
from .probe import Prober, abandon, path_failed
from .renewing import all_stand
from .steps import step_to_rts
from .terms import Terms

__all__ = ["HALF_OPEN_EACH_S", "HALF_OPEN_S", "Incoming", "Listening"]


#: seconds that a connector may take for its next message
HALF_OPEN_S = 10.0
#: and for each queue pair of its hello besides
HALF_OPEN_EACH_S = 0.1
#: for one that goes on saying that it is there: where others wait for its place, and for a proof
PATIENCE_MAX_S = 120.0
#: seconds between two looks at a proof that is under way
LOOK_S = 0.2


class Listening(Protocol):
    """What an incoming connection asks of those who listen; called in worker threads."""

    terms: Terms
    workers: Workers

    def held(self, incoming: Incoming) -> End | None:
        """The connection whose place it is to take, if it is held here."""

    def claim(self, connection: End, incoming: Incoming) -> bool:
        """Have it take that connection's place, if somebody waits in its reconnect."""

    def prepare(self, incoming: Incoming) -> Prepared:
        """Queue pairs for it; sets the ports that its peer may choose from. Blocks."""

    def proven(self, incoming: Incoming, again: End | None) -> None:
        """It stands."""

    def judged(self, incoming: Incoming, error: RdmaConnectError) -> RdmaConnectError:
        """What its peer is told of an error: that it may ask again, where others will give back what lacks."""

    def failed(self, incoming: Incoming, error: RdmaConnectError, again: End | None) -> None:
        """Nothing came of it; it has told its peer, and freed everything."""


class Incoming:
    """A connection that a listener has been asked for and that does not stand yet.

    It is moved on by a worker thread, one at a time, whenever its peer, its device or the clock gives reason.

    Args:
        listening: who listens.
        channel: to the peer.
        conversation: with it; it has taken the hello, or will at once.

    Attributes:
        prepared: the queue pairs, once there are any.
        ports: what the peer may choose from.
        left_out: devices that could not be looked at.
        made: the connections, once it has joined.
        token: by which its peer may take their place later.
    """

    def __init__(self, listening: Listening, channel: Channel, conversation: Conversation) -> None:
        self.listening, self.channel, self.conversation = listening, channel, conversation
        self.deadline = Deadline(HALF_OPEN_S, ConnectTimeout)
        self._age = Deadline(None)
        self.prepared: Prepared | None = None
        self.ports: tuple[PortAddress, ...] = ()
        self.left_out: tuple[LeftOut, ...] = ()
        self.made: list[End] = []
        self.token = os.urandom(16)
        self._answered = False
        self._again: End | None = None
        self._paths: list[Path] = []
        self._handles: list[AddressHandle | None] = []
        self._prober: Prober | None = None
        self._answered_after_s = 0.0
        self._stopped: RdmaConnectError | None = None
        self._lock = threading.Lock()
        self._running = self._wanted = self._over = False
        self._watching, self._watched = False, -1
        self._looked = Deadline(None)

    @property
    def hello(self) -> Hello:
        """What the peer asked for."""
        assert isinstance(self.conversation.handshake.peer, Hello)
        return self.conversation.handshake.peer

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return self.conversation.state

    def explain(self) -> str:
        """How far it has come, for an error that says whom a call was waiting for."""
        prober = self._prober
        how_far = self.state.value if prober is None else f"proof of the data path: {prober.explain()}"
        return f"{self.channel.address or 'a peer'} ({how_far})"

    # ---- one worker at a time

    def wake(self) -> None:
        """Have it moved on. Never blocks."""
        with self._lock:
            if self._over:
                return
            self._wanted = True
            if self._running:
                return
            self._running = True
        self.listening.workers.start(self._run)

    def stop(self, error: RdmaConnectError) -> None:
        """Give it up: at once, or when what blocks it now comes back. Never blocks."""
        self._stopped = self._stopped or error
        self.wake()

    @property
    def age_s(self) -> float:
        """Seconds since its hello came."""
        return self._age.waited_s

    def renew(self) -> None:
        """Its peer has its time from now on: it had to wait for this side."""
        self.deadline = Deadline(HALF_OPEN_S, ConnectTimeout)

    def due(self) -> bool:
        """Whether the clock gives reason to move it on."""
        prober = self._prober
        if prober is None:
            return self.deadline.left_s <= 0
        # a lost probe is sent again; of the rest the device tells, but where others take its events too
        return self._looked.waited_s >= (LOOK_S if self.conversation.handshake.lossy else 5 * LOOK_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._wanted = False
            try:
                self._looked = Deadline(None)
                if self._step():
                    return
            except (RdmaConnectError, OSError, ValueError) as e:
                self._end(e if isinstance(e, RdmaConnectError) else StateError(f"accept: {e}"))
                return
            except BaseException as e:
                log.exception("accept: %s", self.channel.address)
                self._end(StateError(f"accept: {type(e).__name__}: {e}"))
                return
            with self._lock:
                if not self._wanted:
                    self._running = False
                    break
        if self._prober is not None:
            self._watching = True
            service.soon(self._watch)

    def _step(self) -> bool:
        """Go as far as the peer's messages allow; whether the connection stands."""
        self.check_wanted()
        if self.state is State.HEARD and not self._answered:
            held = self.listening.held(self)
            if held is not None and not self.listening.claim(held, self):
                held.replaced(self.hello.prev or b"")
                self._check_time("accept: wait for reconnect()", "The connection that it replaces is still held.")
                return False
            self._again = held
            self._answer(held.prepared if held is not None else None)
        if self.state is State.JOINED or self.conversation.parted:
            if not self.made:
                self._join()
            if self._proven():
                self._stand()
                return True
        else:
            self._check_time("accept: wait for the peer", "It asked, and did not go on.")
        return False

    def _check_time(self, stage: str, hint: str) -> None:
        """One that says that it is there, and has said how long it waits, may take longer."""
        if self.deadline.left_s <= 0 and self.conversation.alive and self.age_s < self.hello.patience_ms / 1000:
            return
        self.deadline.check(stage, hint)

    def _answer(self, prepared: Prepared | None) -> None:
        """On hello: agree, go to RTR with the connector's values, reply. Blocks."""
        self._answered = True
        hello, terms, trace = self.hello, self.listening.terms, self.conversation.trace
        trace.mark("hello", "from %s, %d x %s", self.channel.address, len(hello.ends), hello.ends[0])
        if prepared is None:
            prepared = self.listening.prepare(self)
        else:
            self._renew(prepared)
        prepared.lend()
        self.prepared = prepared
        trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
        self.answer(prepared, terms)

    def _renew(self, prepared: Prepared) -> None:
        """To be connected anew: over the port that it is on, or another where the peer wants that or it is gone."""
        host, local = self.channel.address or None, self.channel.local
        choice = ports_anew(prepared.port, self.listening.terms.options, host, local)
        prepared.renew(wanted_port(choice.ports, self.hello.target).port_num)
        self.ports = choice.addresses[:MAX_PORTS] or (prepared.address,)

    def answer(self, prepared: Prepared, terms: Terms) -> None:
        """Agree, go to RTR with the connector's values, reply. Blocks."""
        hello, trace = self.hello, self.conversation.trace
        theirs, ours = hello.ends[0], prepared.ends[0]
        if hello.target is not None:
            theirs = theirs.at(narrow(theirs.port, hello.target.connector_gid))
            ours = ours.at(narrow(ours.port, hello.target.listener_gid))
        exchange = self.channel.address, self.channel.local
        agreement = agree(theirs, ours, hello.wish, exchange, prepared.wish(terms.options))
        self.conversation.proves = agreement.probe
        self._paths = make_paths(prepared.ends, hello.ends, agreement, terms.options, connector=False)
        trace.mark("path", "%s", "; ".join(self._paths[0].why))
        self._handles = bring_up(prepared, self._paths, rts=False, go_on=self.check_wanted)
        trace.mark("reply", "sent, RTR")
        stages = () if agreement.probe else trace.stages()  # a proof, which follows, tells them all
        reply = Reply(
            hello.id, prepared.ends, agreement, prepared.offered(), terms.private_data, self.ports, stages, self.token,
            BEAT_MS,
        )  # fmt: skip
        self.conversation.say(reply)
        self._answered_after_s = self._age.waited_s
        self.deadline = Deadline(HALF_OPEN_S + HALF_OPEN_EACH_S * len(hello.ends), ConnectTimeout)

    def check_wanted(self) -> None:
        """Raise why, if nobody wants it any more."""
        if self._stopped is not None:
            raise self._stopped
        # a peer that could hold the connection may have sent and gone: who accepts is to have what it sent
        if self.conversation.left is not None and not self.conversation.parted:
            raise self.conversation.failure("accept")

    def _join(self) -> None:
        """On ready: go to RTS, and begin the proof."""
        assert self.prepared is not None
        trace, hello = self.conversation.trace, self.hello
        trace.mark("ready", "from %s", self.channel.address)
        rts = step_to_rts(self._paths[0], self.prepared.qp_type)
        ready = zip(self.prepared.transceivers, self._paths, rts.structs(self._paths), strict=True)
        for transceiver, path, struct in ready:
            transceiver.to_rts(path, rts, struct)
        all_established = [
            Established(end, path, self.conversation, hello.regions, hello.private_data, ah, self.token)
            for end, path, ah in zip(hello.ends, self._paths, self._handles, strict=True)
        ]
        self._handles = []
        if self._again is not None:
            self._again.join(all_established[0])
            self.made = [self._again]
        else:
            for transceiver, established in zip(self.prepared.transceivers, all_established, strict=True):
                self.made.append(make_end(self.prepared, transceiver, established))
        trace.mark("joined", "RTS")
        if self.conversation.proves:
            self.conversation.say_joined()
            self._prober = Prober(self.made, Deadline(PATIENCE_MAX_S, ConnectTimeout))

    def _proven(self) -> bool:
        """Whether the data path is proven, or nobody asked for it."""
        if self._prober is None:
            return True
        if not self._prober.advance():
            self._prober.arm()
            if not self._prober.advance():
                return False
        self._stop_proving()
        self.conversation.trace.mark("proven", "the peer has our probes, and we its")
        return True

    def _stop_proving(self) -> None:
        prober, self._prober = self._prober, None
        if prober is not None:
            prober.close()
        if self._watching:
            service.soon(self._unwatch)

    def _stand(self) -> None:
        assert self.prepared is not None
        with self._lock:
            self._over = True
        self.conversation.on_change = None
        connect_s = self._age.waited_s
        for end in self.made:
            end.connect_s = connect_s
        all_stand(self.made)
        self.prepared.close()
        self.conversation.trace.mark("connected", "%d", len(self.made))
        self.listening.proven(self, self._again)

    def _end(self, error: RdmaConnectError) -> None:
        """Tell the peer why, and free everything."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self.conversation.on_change = None
        error = self.listening.judged(self, error)
        try:
            self._stop_proving()
            helps = isinstance(error, ModifyError | DeviceError) or path_failed(error)
            helps = helps or (isinstance(error, PeerMismatch) and error.ports is None)
            if self.left_out and (helps or isinstance(error, PeerRejected)):
                say_more(error, f"Left out: {' '.join(map(str, self.left_out))}")
            if self.made:
                abandon(self.made, error, again=self._again is not None, ports=self.ports)
            else:
                reject = self.conversation.reject_of(error, ports=self.ports if helps else ())
                self.conversation.give_up(reject)
            if self._again is not None:
                with contextlib.suppress(RdmaConnectError):  # it was closed meanwhile
                    self._again.part(self.conversation.id)
            close_handles(self._handles)
            if self.prepared is not None:
                self.prepared.close()
        finally:
            self.listening.failed(self, error, self._again)

    # ---- in the service thread: the device gives reason to go on

    def _watch(self) -> None:
        prober = self._prober
        if prober is None or self._over:
            return
        try:
            if self._watched < 0:
                self._watched = os.dup(prober.fileno())
            service.loop().add_reader(self._watched, self._completed)
        except (OSError, RdmaConnectError):  # the clock gives reason too
            return

    def _completed(self) -> None:
        service.loop().remove_reader(self._watched)
        self.wake()

    def _unwatch(self) -> None:
        if self._watched >= 0:
            service.loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = -1
