"""A connection that a listener has been asked for, from hello to proof."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from .address import AddressHandle
from .deadline import Deadline
from .endpoint import PortAddress
from .errors import (
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
)
from .handshake import Handshake, Outcome, Role, State
from .joining import abandon, make_paths, raise_lanes, reject_of
from .messages import Hello, Message, Ready, Reply
from .middle import Joint, Middle
from .oob import Line
from .path import Path, agree, narrow
from .prepare import Prepared
from .probe import Prober
from .talk import Wire
from .terms import Terms
from .trace import Trace
from .wire import decode, encode

__all__ = ["HALF_OPEN_EACH_S", "HALF_OPEN_S", "Half"]

log = logging.getLogger("rdmaconnect")

#: seconds that a connector may take between its hello and its ready
HALF_OPEN_S = 10.0
#: and for each queue pair of its hello besides
HALF_OPEN_EACH_S = 0.1


class Half:
    """A connection that a listener has been asked for and that does not stand yet.

    Args:
        line: the peer.
        front: the class of connection to make in the end.
    """

    def __init__(self, line: Line, front: type[Middle]) -> None:
        self.line, self._front = line, front
        self.handshake = Handshake(Role.LISTENER)
        self.deadline = Deadline(HALF_OPEN_S, ConnectTimeout)
        self.trace = Trace(Role.LISTENER, Deadline(None))
        self.prepared: Prepared | None = None
        self.ports: tuple[PortAddress, ...] = ()
        self.made: list[Middle] = []
        #: the answer to its hello, while that is being made
        self.answering: Future[None] | None = None
        #: whether its first message belongs to a conversation that is over
        self.stray = False
        #: held while it is moved on: accept may be called several times at once
        self.turn = threading.Lock()
        self._paths: list[Path] = []
        self._handles: list[AddressHandle | None] = []
        self._prober: Prober | None = None
        self._again = False
        self._answered_after_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether its answer is being made: until that is done the half is not to be touched."""
        return self.answering is not None and not self.answering.done()

    def halt(self) -> bool:
        """Whether nothing is being done for it now; what has not begun yet does not begin."""
        return self.answering is None or self.answering.cancel() or self.answering.done()

    @property
    def hello(self) -> Hello:
        """What the peer asked for."""
        assert isinstance(self.handshake.peer, Hello)
        return self.handshake.peer

    def listen(self) -> State:
        """Take one message, if there is one; where the conversation stands then."""
        frame = None if self.made else self.line.recv()
        if frame is not None:
            message = decode(frame)
            outcome = self.handshake.receive(message)
            if outcome is Outcome.MOVED:
                self._came(message)
            self.stray = outcome is Outcome.STALE and self.handshake.state is State.IDLE
            if outcome is Outcome.REPEATED and self.handshake.said is not None:
                self.line.send(encode(self.handshake.said))
        return self.handshake.state

    def _came(self, message: Message) -> None:
        if isinstance(message, Hello):
            self.trace.mark("hello", "from %s, %d x %s", self.line.address, len(message.ends), message.ends[0])
        elif isinstance(message, Ready):
            self.trace.hear(message.doors)
            self.trace.mark("ready", "from %s", self.line.address)

    def answer(self, prepared: Prepared, terms: Terms, ports: tuple[PortAddress, ...]) -> None:
        """On hello: agree, go to RTR with the connector's values, reply. Blocks."""
        self.prepared, self.ports = prepared, ports
        prepared.lend()
        hello = self.hello
        self.trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
        theirs, ours = hello.ends[0], prepared.ends[0]
        if hello.target is not None:
            there = narrow(theirs.port, hello.target.connector_gid)
            here = narrow(ours.port, hello.target.listener_gid)
            agreement = agree(theirs.at(there), ours.at(here), hello.wish)
        else:
            agreement = agree(theirs, ours, hello.wish)
        self._paths = make_paths(prepared.ends, hello.ends, agreement, terms.options, connector=False)
        self.trace.mark("path", "%s", "; ".join(self._paths[0].why))
        self._handles = raise_lanes(prepared, self._paths, rts=False)
        self.trace.mark("reply", "sent, RTR")
        told = self.trace.told()
        reply = Reply(hello.id, prepared.ends, agreement, prepared.offered(), terms.private_data, ports, told)
        self.line.send(encode(self.handshake.send(reply)))
        self._answered_after_s = self.deadline.waited_s
        self.deadline = Deadline(HALF_OPEN_S + HALF_OPEN_EACH_S * len(hello.ends), ConnectTimeout)

    def join(self, waiting: Middle | None) -> None:
        """On ready: go to RTS, and begin the proof."""
        assert self.prepared is not None
        for lane, path in zip(self.prepared.lanes, self._paths, strict=True):
            lane.to_rts(path)
        self.line.keep()
        wire, hello = Wire(self.line, self.handshake, self.trace), self.hello
        joints = [
            Joint(end, path, wire, hello.regions, hello.private_data, ah)
            for end, path, ah in zip(hello.ends, self._paths, self._handles, strict=True)
        ]
        self._again = waiting is not None
        if waiting is not None:
            waiting._join(joints[0])
            self.made = [waiting]
        else:
            self.made = [self._front(self.prepared, n, j) for n, j in zip(self.prepared.lanes, joints, strict=True)]
        self._handles = []
        self.trace.mark("joined", "RTS")
        if hello.wish.probe:
            self._prober = Prober(self.made, self.deadline)

    def proven(self) -> bool:
        """Whether the data path is proven, or nobody asked for it."""
        if self._prober is None:
            return True
        if self._prober.advance():
            self._prober.close()
            self._prober = None
            self.trace.mark("proven", "the peer has our probes, and we its")
            return True
        return False

    def fds(self) -> tuple[int, ...]:
        """What to wait on besides the service."""
        return self._prober.fds() if self._prober is not None else ()

    def done(self) -> list[Middle]:
        """The connections; from here on they are the caller's."""
        assert self.prepared is not None
        for connection in self.made:
            connection.connect_s = self._answered_after_s + self.deadline.waited_s
        self.prepared.close()
        self.trace.mark("connected", "%d", len(self.made))
        return self.made

    def fail(self, error: BaseException) -> None:
        """Tell the peer why, and free everything."""
        if self._prober is not None:
            self._prober.close()
        if self.made:
            abandon(self.made, error, again=self._again)
        elif not isinstance(error, PeerRejected) and self.handshake.state is not State.CLOSED:
            helps = isinstance(error, PeerMismatch | ModifyError | DeviceError)
            try:
                self.line.send(encode(reject_of(self.handshake, error, ports=self.ports if helps else ())))
            except RdmaConnectError:
                log.debug("reject: the peer is gone")
        for handle in self._handles:
            if handle is not None:
                handle.close()
        if self.prepared is not None:
            self.prepared.close()
        self.line.close()
