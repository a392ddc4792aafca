"""The story: how two hosts come to hold the two ends of one connection.

    str -> Options -> Port -> Prepared (INIT) -> Endpoint -> bytes -> Endpoint (theirs) -> Agreement
    -> Path -> RTR -> RTS -> Connection

One value is handed over at each door, and each door is one line of the log at DEBUG.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .abi import QpType
from .connection import Connection
from .deadline import Deadline
from .device import choose_port
from .endpoint import Options
from .errors import ConnectTimeout, PeerRejected, ProtocolError, RdmaConnectError, StateError
from .handshake import NO_ID, Handshake, Outcome, Role, State
from .oob import Channel, Line, Service, tcp_url
from .path import Path, Wish, agree, make_path
from .prepare import Prepared
from .wire import MAX_FRAME, Hello, Ready, Reject, Reply, decode, encode

__all__ = ["Listener", "connect", "listen"]

log = logging.getLogger("rdmaconnect")

#: seconds that a connector may take between its hello and its ready
HALF_OPEN_S = 10.0
#: half-open connections that a listener keeps at most
HALF_OPEN_MAX = 128


def _options(qp_type: str | QpType, options: dict[str, Any]) -> tuple[QpType, Options]:
    try:
        kind = QpType[qp_type.upper()] if isinstance(qp_type, str) else QpType(qp_type)
    except KeyError:
        raise ValueError(f"qp_type is {qp_type!r}: give 'RC'") from None
    if kind is not QpType.RC:
        raise ValueError(f"qp_type is {kind}: only RC can be connected so far")
    try:
        return kind, Options(**options)
    except TypeError as e:
        known = ", ".join(Options.__dataclass_fields__)
        raise TypeError(f"{e}; the options are {known}") from None


def connect(
    peer: str,
    *,
    qp_type: str | QpType = "RC",
    deadline_s: float | None = 30,
    regions: dict[str, Any] | None = None,
    **options: Any,
) -> Connection:
    """Connect a queue pair to a listening peer.

    The peer may start later: it is tried again until the deadline.

    Args:
        peer: ``"host"``, ``"host:port"`` (port 18515 by default) or a ``tcp://`` url.
        qp_type: ``"RC"``.
        deadline_s: seconds for all of it, or None to wait for ever.
        regions: named memory that the peer may use: name -> anything with a buffer.
        **options: see :class:`Options`: ``device``, ``port_num``, ``gid_index``, ``path_mtu``, ...

    Returns:
        The connection, its queue pair in RTS.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        DeviceError, LibraryError, VerbsError: this host cannot.
        ModifyError: the device refused a step, often since the peer cannot be reached from the GID used.
        PeerMismatch, PeerRejected: the peer cannot, or both together cannot; with the reason.
        RemoteProtocolError: what listens there is not rdmaconnect, or of another version.
        ConnectTimeout: the deadline passed; says at which door.
    """
    deadline = Deadline(deadline_s, ConnectTimeout)
    kind, wishes = _options(qp_type, options)
    url = tcp_url(peer)
    context, port = choose_port(wishes, _host(url))
    log.debug("port: %s for %s", port, url)
    prepared = Prepared(context, port, kind, wishes, regions)
    channel: Channel | None = None
    handshake = Handshake(Role.CONNECTOR, secrets.token_bytes(16))
    assert handshake.id is not None
    try:
        log.debug("prepared: %s, INIT, receives posted", prepared.endpoint)
        channel = Channel(url, MAX_FRAME)
        hello = Hello(handshake.id, (prepared.endpoint,), Wish.of(wishes), prepared.offered())
        channel.send(encode(handshake.send(hello)))
        log.debug("hello: sent to %s", url)
        reply = _await_reply(channel, handshake, deadline)
        path = make_path(prepared.endpoint, reply.ends[0], reply.agreement, wishes, connector=True)
        log.debug("path: %s", "; ".join(path.why))
        prepared.to_rtr(path)
        prepared.to_rts(path)
        deadline.check("move to RTS")
        channel.send(encode(handshake.send(Ready(handshake.id))))
        log.debug("joined: RTS, ready sent")
        return Connection(prepared, reply.ends[0], path, channel, handshake, reply.regions, deadline.waited_s)
    except BaseException as e:
        prepared.close()
        if channel is not None:
            if not isinstance(e, PeerRejected) and handshake.state not in (State.CLOSED, State.IDLE):
                channel.send(encode(_reject(handshake, e)))
            channel.close()
        raise


def _await_reply(channel: Channel, handshake: Handshake, deadline: Deadline) -> Reply:
    while True:
        frame = channel.recv()
        if frame is None:
            if deadline.left_s <= 0:
                raise deadline.exceeded("connect: wait for the peer's reply", f"{channel.seen()}.")
            channel.wait(deadline)
        elif handshake.receive(decode(frame)) is Outcome.MOVED:
            assert isinstance(handshake.peer, Reply)
            return handshake.peer


def _reject(handshake: Handshake, error: BaseException) -> Reject:
    """What the other end is told of an error here."""
    number = getattr(error, "errno", None)
    words = str(error) or type(error).__name__
    return Reject(handshake.id or NO_ID, handshake.state.value, number if isinstance(number, int) else 0, words)


def _host(url: str) -> str:
    host = url.removeprefix("tcp://").rpartition(":")[0]
    return host.strip("[]")


def _peer_host(address: str) -> str:
    """ZeroMQ's peer address as a route look-up takes it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or address)


class _Half:
    """A connection that the listener has been asked for and that does not stand yet."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.handshake = Handshake(Role.LISTENER)
        self.deadline = Deadline(HALF_OPEN_S, ConnectTimeout)
        self.prepared: Prepared | None = None
        self.path: Path | None = None

    def drop(self) -> None:
        if self.prepared is not None:
            self.prepared.close()
        self.line.close()

    def fail(self, error: BaseException) -> None:
        """Tell the peer why, and free everything."""
        try:
            if not isinstance(error, PeerRejected) and self.handshake.state is not State.CLOSED:
                self.line.send(encode(_reject(self.handshake, error)))
        except RdmaConnectError:
            log.debug("reject: the peer is gone")
        finally:
            self.drop()


class Listener:
    """Takes connections on one address. Made by :func:`listen`; a context manager.

    Attributes:
        url: the address bound, with the real port.
    """

    def __init__(self, url: str, options: Options, regions: dict[str, Any] | None) -> None:
        self._service = Service(url, MAX_FRAME)
        self._options, self._regions = options, regions
        self._halves: list[_Half] = []
        self._closed = False
        self.url = self._service.url

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def port(self) -> int:
        """The TCP port that is listened on."""
        return int(self.url.rpartition(":")[2])

    def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> Connection:
        """The next connection.

        Args:
            deadline_s: seconds, or None to wait for ever.
            tolerant: whether a peer with whom it fails is logged as a warning and passed over; if not,
                its error is raised.

        Returns:
            The connection, its queue pair in RTS.

        Raises:
            ConnectTimeout: nobody came in time; names those with whom it failed.
            StateError: the listener is closed.
            RdmaConnectError: with ``tolerant=False``, whatever went wrong with the first peer.
        """
        deadline = Deadline(deadline_s, ConnectTimeout)
        failures: list[str] = []
        while True:
            if self._closed:
                raise StateError(f"the listener on {self.url} is closed.")
            self._welcome()
            for half, error, connection in self._advance():
                if connection is not None:
                    return connection
                assert error is not None
                words = f"{half.line.address or 'a peer'}: {error}"
                log.warning("accept on %s: %s", self.url, words)
                failures.append(words)
                if not tolerant:
                    raise error
            if deadline.left_s <= 0:
                seen = "; ".join(failures[-3:]) or "nobody asked" * (not self._halves)
                raise deadline.exceeded(f"accept on {self.url}", f"Failed with {seen}" if failures else seen)
            self._service.wait(deadline)

    def _welcome(self) -> None:
        while (line := self._service.accept()) is not None:
            if len(self._halves) >= HALF_OPEN_MAX:
                oldest = self._halves.pop(0)
                oldest.fail(StateError(f"{HALF_OPEN_MAX} connections are half open: this one was the oldest."))
            self._halves.append(_Half(line))

    def _advance(self) -> Iterator[tuple[_Half, RdmaConnectError | None, Connection | None]]:
        """Move every half-open connection as far as its messages go; those that end are given out."""
        for half in list(self._halves):
            error: RdmaConnectError | None = None
            connection = None
            try:
                connection = self._step(half)
                if connection is None:
                    half.deadline.check("accept: wait for the peer", "It asked, and did not go on.")
            except RdmaConnectError as e:
                error = e
                half.fail(e)
            except OSError as e:  # pragma: no cover - a fault of this host, such as EMFILE
                error = StateError(f"accept: {e}")
                half.fail(error)
            except BaseException as e:
                self._halves.remove(half)
                half.fail(e)
                raise
            if error is not None or connection is not None:
                self._halves.remove(half)
                yield half, error, connection

    def _step(self, half: _Half) -> Connection | None:
        while (frame := half.line.recv()) is not None:
            outcome = half.handshake.receive(decode(frame))
            if outcome is Outcome.REPEATED and half.handshake.said is not None:
                half.line.send(encode(half.handshake.said))
            elif half.handshake.state is State.HEARD:
                self._answer(half)
            elif half.handshake.state is State.JOINED:
                return self._join(half)
        return None

    def _answer(self, half: _Half) -> None:
        """On hello: agree, go to RTR with the connector's values, reply."""
        hello = half.handshake.peer
        assert isinstance(hello, Hello)
        theirs = hello.ends[0]
        log.debug("hello: from %s, %s", half.line.address, theirs)
        if len(hello.ends) > 1 or theirs.qp_type is not QpType.RC:
            raise ProtocolError(f"asked for {len(hello.ends)} of type {theirs.qp_type}: only one RC can be had so far.")
        host = _peer_host(half.line.address) or None
        context, port = choose_port(self._options, host)
        half.prepared = Prepared(context, port, theirs.qp_type, self._options, self._regions)
        ours = half.prepared.endpoint
        log.debug("prepared: %s, INIT, receives posted", ours)
        agreement = agree(theirs, ours, hello.wish)
        half.path = make_path(ours, theirs, agreement, self._options, connector=False)
        log.debug("path: %s", "; ".join(half.path.why))
        half.prepared.to_rtr(half.path)
        reply = Reply(hello.id, (ours,), agreement, half.prepared.offered())
        half.line.send(encode(half.handshake.send(reply)))
        log.debug("reply: sent, RTR")

    def _join(self, half: _Half) -> Connection:
        """On ready: go to RTS."""
        hello = half.handshake.peer
        assert isinstance(hello, Hello)
        assert half.prepared is not None
        assert half.path is not None
        half.prepared.to_rts(half.path)
        half.line.keep()
        log.debug("joined: RTS")
        return Connection(
            half.prepared, hello.ends[0], half.path, half.line, half.handshake, hello.regions, half.deadline.waited_s
        )

    def close(self) -> None:
        """Stop listening; connections that were accepted live on. Twice is fine."""
        if not self._closed:
            self._closed = True
            for half in self._halves:
                half.fail(StateError("the listener was closed."))
            self._halves.clear()
            self._service.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Listener {self.url}{' closed' if self._closed else ''}>"


def listen(address: str = "*", *, regions: dict[str, Any] | None = None, **options: Any) -> Listener:
    """Listen for connectors.

    Args:
        address: ``"*"`` for all addresses, ``"host"``, ``"host:port"`` or a ``tcp://`` url. The port
            defaults to 18515; 0 takes a free one, see ``Listener.url``.
        regions: named memory that every peer may use: name -> anything with a buffer.
        **options: see :class:`Options`.

    Returns:
        The listener; connectors are queued from now on.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        OSError: the address is taken or not one of this host.
        DeviceError, LibraryError, VerbsError: this host has no usable RDMA device.
    """
    _, wishes = _options("RC", options)
    url = tcp_url(address, bind=True)
    choose_port(wishes)[0].close()  # better now than when the first connector asks
    return Listener(url, wishes, regions)
