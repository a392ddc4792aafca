"""The story: how a host comes to hold one end of a connection.

    str -> Options -> Port -> Prepared (INIT) -> Endpoint -> bytes -> Endpoint (theirs) -> Agreement
    -> Path -> RTR -> RTS -> proof -> Connection

One value is handed over at each door, and each door is one line of the log at DEBUG. Where the first
choice of ports does not carry, the story is told again with the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, overload

from .abi import QpType
from .connection import AsyncConnection, Connection
from .deadline import Deadline
from .driver import Call, Story, arun, run
from .errors import (
    ConnectTimeout,
    PeerRejected,
    RdmaConnectError,
    StateError,
)
from .handshake import Handshake, Outcome, Role, State
from .joining import make_paths, prove, raise_lanes, reject_of, used_ports
from .messages import Hello, Ready, Reply
from .middle import Joint, M, Middle
from .oob import Channel
from .path import Candidate, Wish
from .prepare import Prepared
from .talk import Wire
from .terms import Terms, check_count, make_terms
from .trace import Trace
from .url import host_of, tcp_url
from .ways import Ways, ports_toward
from .wire import MAX_FRAME, decode, encode

__all__ = ["aconnect", "await_reply", "connect", "one_way"]


@overload
def connect(peer: str, *, count: None = None, **arguments: Any) -> Connection: ...
@overload
def connect(peer: str, *, count: int, **arguments: Any) -> list[Connection]: ...
def connect(
    peer: str,
    *,
    qp_type: str | QpType = "RC",
    count: int | None = None,
    deadline_s: float | None = 30,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    via: Connection | None = None,
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> Connection | list[Connection]:
    """Connect a queue pair, or many, to a listening peer.

    The peer may start later: it is tried again until the deadline. Where the first choice of ports
    does not carry, the others are tried.

    Args:
        peer: ``"host"``, ``"host:port"`` (port 18515 by default) or a ``tcp://`` url.
        qp_type: ``"RC"``, ``"UC"`` or ``"UD"``.
        count: how many connections to make in one exchange, 1 to 4096; then a list is returned. They
            share the protection domain, the completion queue and its channel.
        deadline_s: seconds for all of it, or None to wait for ever.
        regions: named memory that the peer may use: name -> anything with a buffer.
        private_data: for the peer's application, at most 4096 bytes.
        via: for UD, a connection whose queue pair is used for this peer too.
        secret: the shared secret that protects the exchange; by default RDMACONNECT_SECRET of the
            environment, if set.
        key, peer_key: instead, this side's ``.key_secret`` file and the listener's ``.key`` file.
        **options: see :class:`Options`: ``device``, ``port_num``, ``gid_index``, ``path_mtu``, ...

    Returns:
        The :class:`Connection`, its queue pair in RTS and its data path proven; a list of them if
        ``count`` was given.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        DeviceError, LibraryError, VerbsError: this host cannot.
        ModifyError: the device refused a step, often since the peer cannot be reached from the GID used.
        PeerMismatch, PeerRejected: the peer cannot, or both together cannot; with the reason.
        CompletionError: the data path is broken; says what that means.
        AuthenticationError: the two sides' keys do not fit.
        RemoteProtocolError: what listens there is not rdmaconnect, or of another version.
        ConnectTimeout: the deadline passed; says at which door.
    """
    terms = make_terms(
        qp_type, options, regions, private_data, listens=False, secret=secret, key=key, peer_key=peer_key
    )
    made = run(connect_story(Connection, peer, terms, check_count(count), Deadline(deadline_s, ConnectTimeout), via))
    return made if count is not None else made[0]


@overload
async def aconnect(peer: str, *, count: None = None, **arguments: Any) -> AsyncConnection: ...
@overload
async def aconnect(peer: str, *, count: int, **arguments: Any) -> list[AsyncConnection]: ...
async def aconnect(
    peer: str,
    *,
    qp_type: str | QpType = "RC",
    count: int | None = None,
    deadline_s: float | None = 30,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    via: AsyncConnection | None = None,
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> AsyncConnection | list[AsyncConnection]:
    """The same as :func:`connect` for asyncio; gives :class:`AsyncConnection`. Nothing blocks the event loop."""
    terms = make_terms(
        qp_type, options, regions, private_data, listens=False, secret=secret, key=key, peer_key=peer_key
    )
    deadline = Deadline(deadline_s, ConnectTimeout)
    made = await arun(connect_story(AsyncConnection, peer, terms, check_count(count), deadline, via))
    return made if count is not None else made[0]


# ---- the middle


def connect_story(
    front: type[M], peer: str, terms: Terms, count: int, deadline: Deadline, via: Middle | None = None
) -> Story[list[M]]:
    """Connect, trying one way after the other; see :func:`connect`."""
    url = tcp_url(peer)
    if via is not None and (via.closed or terms.qp_type is not QpType.UD or via.ah is None or count > 1):
        raise StateError("connect via another connection: both must be UD, the other open, and count 1.")
    ports = [via._prepared.port] if via else (yield Call(partial(ports_toward, terms.options, host_of(url))))
    trace = Trace(Role.CONNECTOR, deadline)
    trace.mark("port", "%s for %s", ports[0], url)
    channel = Channel(url, MAX_FRAME, terms.keys)
    ways = Ways(ports, terms, trace, host_of(url))
    try:
        while True:
            try:
                made = yield from one_way(front, channel, terms, ways, count, deadline, via)
                break
            except RdmaConnectError as e:
                yield Call(partial(ways.failed, e, deadline))
    except BaseException:
        channel.close()
        raise
    for connection in made:
        connection.connect_s = deadline.waited_s
        if count == 1 and via is None:
            connection._again = partial(_again, url, terms)
    trace.mark("connected", "%d in %.1f ms", count, deadline.waited_s * 1000)
    return made


def one_way(
    front: type[M],
    channel: Channel,
    terms: Terms,
    ways: Ways,
    count: int,
    deadline: Deadline,
    via: Middle | None,
) -> Story[list[M]]:
    """Prepare, attempt, prove, by the way that is tried now."""
    prepared = via._prepared if via else (yield Call(partial(ways.prepare, count), undo=Prepared.close))
    prepared.lend()
    try:
        joints = yield from _attempt(channel, prepared, terms, ways, deadline)
        made = [front(prepared, lane, joint) for lane, joint in zip(prepared.lanes, joints, strict=True)]
        yield from prove(made, terms, deadline)
        return made
    finally:
        prepared.close()


def _attempt(
    channel: Channel,
    prepared: Prepared,
    terms: Terms,
    ways: Ways,
    deadline: Deadline,
    prev: bytes | None = None,
) -> Story[list[Joint]]:
    """One hello, and what follows from it, up to RTS."""
    handshake, trace = Handshake(Role.CONNECTOR, secrets.token_bytes(16)), ways.trace
    assert handshake.id is not None
    try:
        trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
        hello = Hello(
            handshake.id, prepared.ends, Wish.of(terms.options), prepared.offered(), terms.private_data, prev,
            ways.target,
        )  # fmt: skip
        trace.mark("hello", "sent to %s", channel.url)
        channel.send(encode(handshake.send(hello)))
        yield from await_reply(channel, handshake, deadline)
        return (yield from raise_ends(channel, handshake, prepared, terms, deadline, trace, ways))
    except BaseException as e:
        if not isinstance(e, PeerRejected) and handshake.state not in (State.CLOSED, State.IDLE):
            channel.send(encode(handshake.send(reject_of(handshake, e))))
        raise


def raise_ends(
    channel: Channel,
    handshake: Handshake,
    prepared: Prepared,
    terms: Terms,
    deadline: Deadline,
    trace: Trace,
    ways: Ways | None = None,
) -> Story[list[Joint]]:
    """On reply: to RTR and RTS with the listener's values, and say that it is so."""
    reply = handshake.peer
    assert isinstance(reply, Reply)
    trace.hear(reply.doors)
    trace.mark("reply", "from %s", channel.url)
    why = ways.why() if ways is not None else ()
    paths = make_paths(prepared.ends, reply.ends, reply.agreement, terms.options, connector=True, why=why)
    if ways is not None:
        ways.theirs = reply.ports
        ways.used = Candidate(*used_ports(prepared.address, reply.ends[0].port, paths[0]))
    trace.mark("path", "%s", "; ".join(paths[0].why))
    handles = yield Call(partial(raise_lanes, prepared, paths, rts=True))
    trace.mark("joined", "RTR, RTS")
    deadline.check("move to RTS")
    channel.settle()
    assert handshake.id is not None
    trace.mark("ready", "sent to %s", channel.url)
    channel.send(encode(handshake.send(Ready(handshake.id, trace.told()))))
    wire = Wire(channel, handshake, trace)
    return [
        Joint(end, path, wire, reply.regions, reply.private_data, ah)
        for end, path, ah in zip(reply.ends, paths, handles, strict=True)
    ]


def await_reply(channel: Channel, handshake: Handshake, deadline: Deadline) -> Story[None]:
    """Until the peer's reply is there."""
    while True:
        frame = channel.recv()
        if frame is None:
            if deadline.left_s <= 0:
                raise deadline.exceeded("connect: wait for the peer's reply", channel.seen())
            yield channel.wait(deadline)
        elif handshake.receive(decode(frame)) is Outcome.MOVED:
            return


def _again(url: str, terms: Terms, connection: Middle, deadline_s: float | None) -> Story[None]:
    """Reconnect, on the side that called: the same queue pair, a new hello."""
    deadline = Deadline(deadline_s, ConnectTimeout)
    prev, trace = connection._known_as, Trace(Role.CONNECTOR, deadline)
    connection._part()
    prepared = connection._prepared
    yield Call(prepared.lanes[0].restart)
    channel = Channel(url, MAX_FRAME, terms.keys)
    try:
        joints = yield from _attempt(channel, prepared, terms, Ways([prepared.port], terms, trace), deadline, prev)
    except BaseException:
        channel.close()
        raise
    connection._join(joints[0])
    yield from prove([connection], terms, deadline, again=True)
    trace.mark("connected", "anew in %.1f ms", deadline.waited_s * 1000)
