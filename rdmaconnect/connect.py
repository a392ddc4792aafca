"""The story: how a host comes to hold one end of a connection.

    str -> Options -> Port -> Prepared (INIT) -> Endpoint -> bytes -> Endpoint (theirs) -> Agreement
    -> Path -> RTR -> RTS -> proof -> Connection

One value is handed over at each door, and each door is one line of the log at DEBUG. Where the first
choice of ports does not carry, the story is told again with the next.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, overload

from .abi import QpType
from .address import AddressHandle
from .connection import AsyncConnection, Connection
from .curve import Keys, keys_for
from .deadline import Deadline
from .device import Port, open_device, rank_ports
from .driver import Call, Story, arun, run
from .endpoint import Endpoint, Options, PortAddress
from .errors import (
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    RemoteProtocolError,
    StateError,
    VerbsError,
)
from .handshake import NO_ID, Handshake, Outcome, Role, State
from .messages import Hello, Ready, Reject, Reply, Target
from .middle import Joint, Middle
from .oob import Channel, check_name, host_of, tcp_url
from .path import Agreement, Candidate, Path, Wish, candidates, make_path
from .prepare import Prepared
from .probe import Prober
from .talk import Wire
from .wire import MAX_FRAME, MAX_QPS, check_names, decode, encode

__all__ = ["aconnect", "connect"]

log = logging.getLogger("rdmaconnect")

M = TypeVar("M", bound=Middle)

#: errors of a step to RTR that another pair of GIDs or ports may not have
PATH_ERRNOS = {
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODATA, errno.ENODEV, errno.EINVAL, errno.ENXIO,
}  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """What a caller asked for, checked."""

    qp_type: QpType
    options: Options
    regions: Mapping[str, Any] = field(default_factory=dict)
    private_data: bytes = b""
    keys: Keys | None = field(default=None, repr=False)


def make_terms(
    qp_type: str | QpType,
    options: Mapping[str, Any],
    regions: Mapping[str, Any] | None,
    private_data: bytes,
    *,
    listens: bool,
    secret: str | bytes | None,
    key: str | None,
    peer_key: str | None,
) -> Terms:
    """Check what a caller asked for.

    Raises:
        ValueError, TypeError: naming what cannot be meant.
    """
    kind = parse_qp_type(qp_type)
    known = Options.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: there is no such option. The options are {', '.join(known)}")
    data = bytes(private_data)
    if len(data) > 4096:
        raise ValueError(f"private_data is {len(data)} bytes long: give at most 4096")
    check_names(regions or {})
    keys = keys_for(listens=listens, secret=secret, key=key, peer=peer_key)
    return Terms(kind, Options(**options), dict(regions or {}), data, keys)


def parse_qp_type(qp_type: str | QpType) -> QpType:
    """RC, UC or UD, by name or value.

    Raises:
        ValueError: another type.
    """
    connectable = (QpType.RC, QpType.UC, QpType.UD)
    try:
        kind = QpType[qp_type.upper()] if isinstance(qp_type, str) else QpType(qp_type)
    except KeyError:
        kind = None
    if kind in (QpType.RAW_PACKET, QpType.XRC_SEND, QpType.XRC_RECV):
        raise ValueError(
            f"qp_type is {kind}: it has no two ends to connect by this exchange; "
            "RAW_PACKET needs a device that lets raw Ethernet through, XRC one with XRC domains. Give RC, UC or UD"
        )
    if kind not in connectable:
        raise ValueError(f"qp_type is {qp_type!r}: give 'RC', 'UC' or 'UD'")
    return kind


# ---- the fronts


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


def check_count(count: int | None) -> int:
    """How many queue pairs; 1 for None.

    Raises:
        ValueError: not from 1 to 4096.
    """
    if count is not None and not 1 <= count <= MAX_QPS:
        raise ValueError(f"count is {count}: give 1 to {MAX_QPS}")
    return count or 1


# ---- the middle


def connect_story(
    front: type[M], peer: str, terms: Terms, count: int, deadline: Deadline, via: Middle | None = None
) -> Story[list[M]]:
    """Connect, trying one way after the other; see :func:`connect`."""
    url = tcp_url(peer)
    if via is not None and (via.closed or terms.qp_type is not QpType.UD or via.ah is None or count > 1):
        raise StateError("connect via another connection: both must be UD, the other open, and count 1.")
    ports = [via._prepared.port] if via else (yield Call(partial(ports_toward, terms.options, host_of(url))))
    log.debug("port: %s for %s", ports[0], url)
    channel = Channel(url, MAX_FRAME, terms.keys)
    attempts = _Attempts(ports, terms)
    try:
        while True:
            try:
                made = yield from _one_way(front, channel, terms, attempts, count, deadline, via)
                break
            except RdmaConnectError as e:
                yield Call(partial(attempts.failed, e, deadline))
    except BaseException:
        channel.close()
        raise
    for connection in made:
        connection.connect_s = deadline.waited_s
        if count == 1 and via is None:
            connection._again = partial(_again, url, terms)
    log.debug("connected: %d in %.1f ms", count, deadline.waited_s * 1000)
    return made


def _one_way(
    front: type[M],
    channel: Channel,
    terms: Terms,
    attempts: _Attempts,
    count: int,
    deadline: Deadline,
    via: Middle | None,
) -> Story[list[M]]:
    """Prepare, attempt, prove, by the way that is tried now."""
    prepared = via._prepared if via else (yield Call(partial(attempts.prepare, count), undo=Prepared.close))
    prepared.lend()
    try:
        joints = yield from _attempt(channel, prepared, terms, attempts, deadline)
        made = [front(prepared, lane, joint) for lane, joint in zip(prepared.lanes, joints, strict=True)]
        yield from prove(made, terms, deadline)
        return made
    finally:
        prepared.close()


def ports_toward(options: Options, host: str) -> list[Port]:
    """The ports that could be used toward a host, the best first.

    Raises:
        ValueError: the name of the host does not resolve.
        DeviceError, VerbsError, LibraryError: as ``rank_ports``.
    """
    check_name(host)
    return rank_ports(options, host)


class _Attempts:
    """Which way is tried now, and which others there are."""

    def __init__(self, ports: Sequence[Port], terms: Terms) -> None:
        self.ports, self.terms = ports, terms
        self.port, self.target = ports[0], None  # type: Port, Target | None
        self.gid: bytes | None = None
        self.theirs: Sequence[PortAddress] = ()
        self.used: Candidate | None = None
        self._tried: set[tuple[Any, ...]] = set()
        self._told: list[str] = []

    def prepare(self, count: int) -> Prepared:
        context = open_device(self.port.device)
        return Prepared(context, self.port, self.terms.qp_type, self.terms.options, self.terms.regions, count, self.gid)

    def failed(self, error: RdmaConnectError, deadline: Deadline) -> None:
        """Choose the next way, or raise the error."""
        left = self._left(error) if self._may_help(error) else []
        if not left or deadline.left_s <= 0:
            told = [words for words in dict.fromkeys(self._told) if words != str(error)]
            if told:
                _say_more(error, f"Tried before: {' '.join(told)}")
            raise error
        way = left[0]
        self._tried.add(_way(way))
        self._told.append(str(error))
        self.port = next(p for p in self.ports if (p.device, p.port_num) == (way.here.device, way.here.port_num))
        gids = [port.gids[0].gid.raw if port.gids else None for port in (way.here, way.there)]
        self.gid, self.used = gids[0], way
        self.target = Target(way.there.device, way.there.port_num, gids[0], gids[1])
        log.debug("again: %s, after %s", way, error)

    def _left(self, error: RdmaConnectError) -> list[Candidate]:
        """The ways that were not tried yet, the best first."""
        theirs = [p for p in getattr(error, "ports", ()) if isinstance(p, PortAddress)] or self.theirs
        mine = self._mine()
        if self.used is None:  # rejected without a reply: a listener with a free choice takes its first port's best
            self.used = next(iter(candidates(mine[:1], theirs[:1])), None)
        if self.used is not None:
            self._tried.add(_way(self.used))
        return [way for way in candidates(mine, theirs) if _way(way) not in self._tried]

    def _mine(self) -> list[PortAddress]:
        # a GID index that was asked for means one port's: nothing else is meant
        ports = self.ports if self.terms.options.gid_index is None else self.ports[:1]
        mine = []
        for port in ports:
            with contextlib.suppress(DeviceError), open_device(port.device) as context:
                mine.append(port.address(context.query_device(), self.terms.options))
        return mine

    @staticmethod
    def _may_help(error: RdmaConnectError) -> bool:
        """Whether another pair of ports or GIDs may do what this one did not."""
        if isinstance(error, PeerRejected):
            return bool(error.ports) and error.errno in (0, *PATH_ERRNOS)
        return isinstance(error, PeerMismatch) or (
            isinstance(error, ModifyError | VerbsError) and error.errno in PATH_ERRNOS
        )

    def why(self) -> tuple[str, ...]:
        """In words, what was tried before."""
        return tuple(f"rejected: {words}" for words in self._told)


def _say_more(error: RdmaConnectError, words: str) -> None:
    """Add a sentence to an error's message."""
    text = f"{error} {words}"
    if isinstance(error, OSError):
        error.args, error.strerror = (error.errno, text), text
    else:
        error.args = (text,)


def _way(way: Candidate) -> tuple[Any, ...]:
    return tuple((p.device, p.port_num, p.gids[0].gid.raw if p.gids else None) for p in (way.here, way.there))


def _attempt(
    channel: Channel,
    prepared: Prepared,
    terms: Terms,
    attempts: _Attempts,
    deadline: Deadline,
    prev: bytes | None = None,
) -> Story[list[Joint]]:
    """One hello, and what follows from it, up to RTS."""
    handshake = Handshake(Role.CONNECTOR, secrets.token_bytes(16))
    assert handshake.id is not None
    try:
        log.debug("prepared: %s, INIT, receives posted", prepared.ends[0])
        hello = Hello(
            handshake.id, prepared.ends, Wish.of(terms.options), prepared.offered(), terms.private_data, prev,
            attempts.target,
        )  # fmt: skip
        channel.send(encode(handshake.send(hello)))
        log.debug("hello: sent to %s", channel.url)
        yield from _await_reply(channel, handshake, deadline)
        return (yield from raise_ends(channel, handshake, prepared, terms, deadline, attempts))
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
    attempts: _Attempts | None = None,
) -> Story[list[Joint]]:
    """On reply: to RTR and RTS with the listener's values, and say that it is so."""
    reply = handshake.peer
    assert isinstance(reply, Reply)
    why = attempts.why() if attempts is not None else ()
    paths = make_paths(prepared.ends, reply.ends, reply.agreement, terms.options, connector=True, why=why)
    if attempts is not None:
        attempts.theirs = reply.ports
        attempts.used = Candidate(*used_ports(prepared.address, reply.ends[0].port, paths[0]))
    log.debug("path: %s", "; ".join(paths[0].why))
    handles = yield Call(partial(raise_lanes, prepared, paths, rts=True))
    deadline.check("move to RTS")
    channel.settle()
    assert handshake.id is not None
    channel.send(encode(handshake.send(Ready(handshake.id))))
    log.debug("joined: RTS, ready sent")
    wire = Wire(channel, handshake)
    return [
        Joint(end, path, wire, reply.regions, reply.private_data, ah)
        for end, path, ah in zip(reply.ends, paths, handles, strict=True)
    ]


def _await_reply(channel: Channel, handshake: Handshake, deadline: Deadline) -> Story[None]:
    while True:
        frame = channel.recv()
        if frame is None:
            if deadline.left_s <= 0:
                raise deadline.exceeded("connect: wait for the peer's reply", channel.seen())
            yield channel.wait(deadline)
        elif handshake.receive(decode(frame)) is Outcome.MOVED:
            return


def prove(made: Sequence[Middle], terms: Terms, deadline: Deadline) -> Story[None]:
    """Prove the data path if the hello asked for it; close everything if it fails."""
    try:
        if terms.options.probe:
            prober = Prober(made, deadline)
            try:
                yield from prober.story()
            finally:
                prober.close()
            log.debug("proven: the peer has our probes, and we its")
    except BaseException as e:
        abandon(made, e)
        raise


def abandon(made: Sequence[Middle], error: BaseException) -> None:
    """Tell the peer why the proof failed, and close everything."""
    wire = made[0]._wire
    if wire.left is None and not isinstance(error, PeerRejected):
        wire.give_up(reject_of(wire.handshake, error, "prove the data path"))
    for connection in made:
        connection._close()


def _again(url: str, terms: Terms, connection: Middle, deadline_s: float | None) -> Story[None]:
    """Reconnect, on the side that called: the same queue pair, a new hello."""
    deadline = Deadline(deadline_s, ConnectTimeout)
    prev = connection._wire.id
    connection._part()
    prepared = connection._prepared
    yield Call(prepared.lanes[0].restart)
    channel = Channel(url, MAX_FRAME, terms.keys)
    try:
        joints = yield from _attempt(channel, prepared, terms, _Attempts([prepared.port], terms), deadline, prev)
    except BaseException:
        channel.close()
        raise
    connection._join(joints[0])
    yield from prove([connection], terms, deadline)


# ---- what both sides do


def make_paths(
    local: Sequence[Endpoint],
    remote: Sequence[Endpoint],
    agreement: Agreement,
    options: Options,
    *,
    connector: bool,
    why: tuple[str, ...] = (),
) -> list[Path]:
    """One path for each queue pair of an exchange; they differ in numbers only."""
    if len(local) != len(remote):
        raise RemoteProtocolError(f"agree: {len(local)} queue pairs here, {len(remote)} at the peer.")
    first = make_path(local[0], remote[0], agreement, options, connector=connector)
    first = first.because(why)
    return [first.toward(mine, theirs) for mine, theirs in zip(local, remote, strict=True)]


def used_ports(here: PortAddress, there: PortAddress, path: Path) -> tuple[PortAddress, PortAddress]:
    """The two ports with only the GIDs that a path uses."""
    pair = (path.local_gid, path.remote_gid)
    return tuple(port.only(gid) for port, gid in zip((here, there), pair, strict=True))  # type: ignore[return-value]


def raise_lanes(prepared: Prepared, paths: Sequence[Path], *, rts: bool) -> list[AddressHandle | None]:
    """All queue pairs to RTR and, if ``rts``, to RTS; for UD, an address handle for each. Blocks."""
    handles: list[AddressHandle | None] = []
    try:
        for lane, path in zip(prepared.lanes, paths, strict=True):
            lane.to_rtr(path)
            if rts:
                lane.to_rts(path)
            handles.append(AddressHandle(prepared.engine.pd, path.ah_attr) if lane.is_ud else None)
    except BaseException:
        for handle in handles:
            if handle is not None:
                handle.close()
        raise
    return handles


def reject_of(
    handshake: Handshake, error: BaseException, stage: str = "", ports: tuple[PortAddress, ...] = ()
) -> Reject:
    """What the other end is told of an error here."""
    number = getattr(error, "errno", None)
    words = str(error) or type(error).__name__
    stage = stage or handshake.state.value
    return Reject(handshake.id or NO_ID, stage, number if isinstance(number, int) else 0, words, ports)
