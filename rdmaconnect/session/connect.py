"""The procedure: how a host comes to hold one end of a connection.

    str -> Options -> Port -> Prepared (INIT) -> Endpoint -> bytes -> Endpoint (theirs) -> Agreement
    -> Path -> RTR -> RTS -> proof -> Connection

One value is handed over at each stage, and each stage is one line of the log at DEBUG. Where the first
choice of ports does not carry, the procedure is told again with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..abi import QpType
from ..agreement.path import make_paths
from ..errors import ConnectTimeout, RdmaConnectError, StateError, say_more
from ..exchange.url import Address, addresses, host_of, is_address, is_rdma, loopback_of, port_of, rdma_url, tcp_url
from ..protocol.codec import MAX_MS
from ..protocol.handshake import Role
from ..protocol.messages import Hello, Ready, Reply
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, arun, call_apart, run_apart
from ..runtime.workers import here
from ..verbs import library
from .async_connection import AsyncConnection
from .bare_end import make_end
from .base import end_of
from .closing import close_ends
from .connection import Connection
from .conversation import BEAT_MS, Conversation
from .end import End, Established
from .fallback import Fallback
from .outgoing import Outgoing
from .ports import Choice, choose_ports, known_ports, ports_anew
from .prepared import Prepared, bring_up, close_handles
from .probe import prove
from .terms import ConnectOptions, Terms, Unpack, check_alone, check_count, make_deadline, make_terms
from .trace import Trace
from .watch import attend

__all__ = [
    "aconnect",
    "aconnect_many",
    "connect",
    "connect_many",
    "find_ports",
    "look_up",
    "patience_ms",
    "prepare",
    "raise_ends",
    "try_candidate",
]


def connect(peer: str, *, via: Connection | None = None, **options: Unpack[ConnectOptions]) -> Connection:
    """Connect a queue pair to a listening peer.

    The peer may start later: it is tried again until the deadline. Where the first choice of ports
    does not carry, the others are tried.

    Args:
        peer: ``"host"``, ``"host:port"`` (port 18515 by default) or a ``tcp://`` url; or an ``rdma://`` url, to connect
            by rdma_cm, which other programs speak too.
        via: for UD, a connection whose queue pair is used for this peer too.
        **options: see :class:`ConnectOptions`; ``device``, ``gid_index``, ``path_mtu`` and all else that is of the
            queue pair and its port, see :class:`Options`.

    Returns:
        The connection, its queue pair in RTS and its data path proven.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        DeviceError, LibraryError, VerbsError: this host cannot.
        ModifyError: the device refused a step, often since the peer cannot be reached from the GID used.
        PeerMismatch, PeerRejected: the peer cannot, or both together cannot; with the reason.
        CompletionError: the data path is broken; says what that means.
        AuthenticationError: the two sides' keys do not fit.
        RemoteProtocolError: what listens there is not rdmaconnect, or of another version.
        ConnectTimeout: the deadline passed; says at which stage.
    """
    return _connect(peer, 1, options, via)[0]


def connect_many(peer: str, count: int, **options: Unpack[ConnectOptions]) -> list[Connection]:
    """Connect many queue pairs to a listening peer, in one exchange.

    They share the protection domain, the completion queue and its channel.

    Args:
        peer: as for :func:`connect`.
        count: how many, 1 to 4096.
        **options: as for :func:`connect`.

    Returns:
        That many connections, as :func:`connect` gives one.

    Raises:
        ValueError, TypeError, RdmaConnectError: as :func:`connect`; then there is none.
    """
    return _connect(peer, check_count(count), options)


async def aconnect(
    peer: str, *, via: AsyncConnection | None = None, **options: Unpack[ConnectOptions]
) -> AsyncConnection:
    """The same as :func:`connect` for asyncio; gives an :class:`AsyncConnection`. Nothing blocks the event loop."""
    return (await _aconnect(peer, 1, options, via))[0]


async def aconnect_many(peer: str, count: int, **options: Unpack[ConnectOptions]) -> list[AsyncConnection]:
    """The same as :func:`connect_many` for asyncio; gives :class:`AsyncConnection`."""
    return await _aconnect(peer, check_count(count), options)


def _connect(peer: str, count: int, options: ConnectOptions, via: Connection | None = None) -> list[Connection]:
    terms = make_terms(options)
    library()  # without it there is nothing to wait for, on any system
    procedure = connect_procedure(peer, terms, count, make_deadline(options), None if via is None else end_of(via))
    made = run_apart(procedure, close_ends)
    return list(map(Connection, made))


async def _aconnect(
    peer: str, count: int, options: ConnectOptions, via: AsyncConnection | None = None
) -> list[AsyncConnection]:
    deadline = make_deadline(options)
    # a secret takes a while to be made into keys, and key files to be read
    terms = await call_apart(partial(make_terms, options))
    made = await arun(connect_procedure(peer, terms, count, deadline, None if via is None else end_of(via)))
    return list(map(AsyncConnection, made))


# ---- what both fronts share


def connect_procedure(
    peer: str, terms: Terms, count: int, deadline: Deadline, via: End | None = None
) -> Procedure[list[End]]:
    """Connect, trying one way after the other; see :func:`connect`."""
    if is_rdma(peer):
        return [(yield from _by_cm(peer, terms, count, deadline, via))]
    if terms.plain:
        raise ValueError("plain is for rdma:// urls: over tcp:// both ends are of this library.")
    url = tcp_url(peer)
    if via is not None and (via.closed or terms.qp_type is not QpType.UD or via.ah is None or count > 1):
        raise StateError("connect via another connection: both must be UD, the other open, and count 1.")
    if count > 1 or via is not None:
        check_alone(terms, "connect_many or via=, which share an exchange or a queue pair")
    outgoing = Outgoing(url, (yield from look_up(url, deadline)), terms.keys)
    trace = Trace(Role.CONNECTOR, deadline)
    try:
        choice = of_end(via) if via else (yield from find_ports(terms, outgoing.address, deadline))
        first = outgoing.address
        if via is None and len(outgoing.addresses) > 1:  # of a name's addresses another one may answer
            yield from outgoing.reach(deadline)
            if outgoing.address != first:
                choice = yield from find_ports(terms, outgoing.address, deadline)
        trace.mark("port", "%s for %s", choice.ports[0], url)
        fallback = Fallback(choice.ports, terms, trace, choice.left_out)
        while True:
            try:
                made = yield from try_candidate(outgoing, terms, fallback, count, deadline, via)
                break
            except RdmaConnectError as e:
                if not (yield from outgoing.may_ask_again(e, deadline)):
                    yield Call(partial(fallback.failed, e, deadline))
    except BaseException as e:
        if isinstance(e, ConnectTimeout) and (local := loopback_of(outgoing.address)):
            say_more(e, f"{local} is loopback, this host itself: a peer elsewhere has another address.")
        outgoing.close()
        raise
    connect_s = deadline.waited_s
    for end in made:
        end.connect_s = connect_s
        if count == 1 and via is None:
            end.again = partial(_again, url, terms)
            if terms.reconnect_s:
                end.renew_for(terms.reconnect_s, here())
    _stand(made, outgoing)
    trace.mark("connected", "%d in %.1f ms", count, deadline.waited_s * 1000)
    return made


def _by_cm(peer: str, terms: Terms, count: int, deadline: Deadline, via: End | None) -> Procedure[End]:
    """The same by rdma_cm."""
    from .cm_connect import connect_by_cm  # what most programs never load

    url = rdma_url(peer)
    if count > 1 or via is not None:
        raise ValueError(f"the peer is {url!r}: by rdma_cm one queue pair is connected at a time, and none via another")
    return (yield from connect_by_cm(url, (yield from look_up(url, deadline)), terms, deadline))


def _stand(made: Sequence[End], outgoing: Outgoing) -> None:
    """From here on they outlive their side channel, which is dialled again."""
    conversation, token = made[0].conversation, made[0].token
    conversation.stand(made, token, outgoing.redial(conversation, token))
    attend(made)


def look_up(url: str, deadline: Deadline) -> Procedure[list[Address]]:
    """The addresses of the peer; of a name they are asked for: a name server may take longer than the caller waits."""
    host, port = host_of(url), port_of(url)
    if is_address(host):
        return addresses(host, port)
    found: list[Address] = yield Call(partial(addresses, host, port), deadline, f"connect: look up {host}")
    return found


def of_end(end: End) -> Choice:
    """The port that a connection is on, as the only one that there is."""
    return Choice((end.prepared.port,), (end.prepared.address,), certain=False)


def find_ports(terms: Terms, address: str, deadline: Deadline) -> Procedure[Choice]:
    """This host's ports toward an address of the peer, the best first."""
    choice = known_ports(terms.options, address)
    if choice is None:
        choose = partial(choose_ports, terms.options, address)
        choice = yield Call(choose, deadline, "connect: find a port of this host")
    return choice


def try_candidate(
    outgoing: Outgoing,
    terms: Terms,
    fallback: Fallback,
    count: int,
    deadline: Deadline,
    via: End | None,
) -> Procedure[list[End]]:
    """Prepare, attempt, prove, by the way that is tried now."""
    making = prepare(partial(fallback.prepare, count), deadline)
    prepared = via.prepared if via else (yield from outgoing.meanwhile(making, deadline))
    prepared.lend()
    try:
        all_established = yield from _attempt(outgoing, prepared, terms, fallback, deadline)
        made = [
            make_end(prepared, transceiver, established)
            for transceiver, established in zip(prepared.transceivers, all_established, strict=True)
        ]
        try:
            yield from prove(made, deadline, share=partial(fallback.share_s, deadline))
        except BaseException:
            outgoing.part()
            raise
        return made
    finally:
        prepared.close()


def prepare(make: Callable[[], Prepared], deadline: Deadline) -> Call:
    """Make queue pairs."""
    return Call(make, deadline, "connect: make the queue pairs", undo=Prepared.close)


def _attempt(
    outgoing: Outgoing,
    prepared: Prepared,
    terms: Terms,
    fallback: Fallback,
    deadline: Deadline,
    prev: bytes | None = None,
) -> Procedure[list[Established]]:
    """One hello, and what follows from it, up to RTS."""
    trace = fallback.trace
    trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])

    def hello(ident: bytes) -> Hello:
        return Hello(
            ident, prepared.ends, prepared.wish(terms.options), prepared.offered(), terms.private_data, prev,
            fallback.target, beat_ms=BEAT_MS, patience_ms=patience_ms(deadline),
        )  # fmt: skip

    try:
        conversation = yield from outgoing.ask(hello, trace, deadline)
    finally:
        fallback.exchange = outgoing.exchange
    return (yield from raise_ends(conversation, prepared, terms, deadline, fallback))


def patience_ms(deadline: Deadline) -> int:
    """What a listener is told of how long this side waits."""
    return MAX_MS if deadline.left_ms is None else max(1, deadline.left_ms)


def raise_ends(
    conversation: Conversation,
    prepared: Prepared,
    terms: Terms,
    deadline: Deadline,
    fallback: Fallback | None = None,
) -> Procedure[list[Established]]:
    """On reply: to RTR and RTS with the listener's values, and say that it is so."""
    reply, trace = conversation.handshake.peer, conversation.trace
    assert isinstance(reply, Reply)
    try:
        trace.mark("reply", "came")
        conversation.proves = reply.agreement.probe and prepared.wish(terms.options).probe
        why = fallback.why() if fallback is not None else ()
        paths = make_paths(prepared.ends, reply.ends, reply.agreement, terms.options, connector=True, why=why)
        if fallback is not None:
            fallback.theirs = reply.ports
            fallback.joined = prepared.address, reply.ends[0].port, paths[0]
        trace.mark("path", "%s", "; ".join(paths[0].why))

        def go_on() -> None:
            deadline.check("move to RTR")
            if conversation.left is not None:
                raise conversation.failure("connect: move to RTR")

        prepared.lend()
        handles = yield Call(
            partial(bring_up, prepared, paths, rts=True, go_on=go_on), deadline, "move to RTR",
            undo=close_handles, finally_=prepared.close,
        )  # fmt: skip
        trace.mark("joined", "RTR, RTS")
        trace.mark("ready", "sent")
        try:
            deadline.check("move to RTS")
            # a proof, which follows, tells them all
            conversation.say(Ready(conversation.id, () if conversation.proves else trace.stages()))
        except BaseException:
            close_handles(handles)
            raise
    except BaseException as e:
        conversation.give_up(conversation.reject_of(e))
        raise
    token = reply.token or conversation.id
    return [
        Established(end, path, conversation, reply.regions, reply.private_data, ah, token)
        for end, path, ah in zip(reply.ends, paths, handles, strict=True)
    ]


def _again(url: str, terms: Terms, end: End, deadline_s: float | None) -> Procedure[None]:
    """Reconnect, on the side that called: the same queue pair, a new hello, over one port of its device or another."""
    deadline = Deadline(deadline_s, ConnectTimeout)
    trace = Trace(Role.CONNECTOR, deadline)
    prepared = end.prepared
    outgoing = Outgoing(url, (yield from look_up(url, deadline)), terms.keys)
    choose = partial(ports_anew, prepared.port, terms.options, outgoing.address)
    choice = yield Call(choose, deadline, "reconnect: find a port of this host")
    fallback = Fallback(choice.ports, terms, trace)
    prepared.lend()
    try:
        while True:
            yield Call(end.part)
            try:
                yield Call(partial(prepared.renew, fallback.port.port_num, fallback.gid))
                end.join((yield from _attempt(outgoing, prepared, terms, fallback, deadline, end.known_as))[0])
                yield from prove([end], deadline, again=True, share=partial(fallback.share_s, deadline))
                _stand([end], outgoing)
                break
            except RdmaConnectError as e:
                if not (yield from outgoing.may_ask_again(e, deadline)):
                    yield Call(partial(fallback.failed, e, deadline))
                    outgoing.part()
    except BaseException:
        outgoing.close()
        raise
    finally:
        prepared.close()
    trace.mark("connected", "anew in %.1f ms", deadline.waited_s * 1000)
