"""The other side of the story: taking connections, one after the other or many at once."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from .abi import QpType
from .address import AddressHandle
from .connect import M, Terms, abandon, make_paths, make_terms, parse_qp_type, raise_lanes, reject_of
from .connection import AsyncConnection, Connection
from .deadline import Deadline
from .device import Port, open_device, rank_ports
from .driver import Call, Story, Wait, arun, run
from .endpoint import PortAddress
from .errors import (
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    StateError,
)
from .handshake import Handshake, Outcome, Role, State
from .messages import Hello, Reply
from .middle import Joint, Middle
from .oob import Line, Service, tcp_url
from .path import Path, agree, narrow
from .prepare import Prepared
from .probe import Prober
from .talk import Wire
from .wire import MAX_FRAME, MAX_PORTS, decode, encode

__all__ = ["AsyncListener", "Listener", "alisten", "listen"]

log = logging.getLogger("rdmaconnect")

#: seconds that a connector may take between its hello and its ready
HALF_OPEN_S = 10.0
#: and for each queue pair of its hello besides
HALF_OPEN_EACH_S = 0.1
#: half-open connections that a listener keeps at most
HALF_OPEN_MAX = 128
_SLICE_MS = 50


def _peer_host(address: str) -> str | None:
    """ZeroMQ's peer address as a route look-up takes it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(parsed, "ipv4_mapped", None) or address)


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
        self.prepared: Prepared | None = None
        self.ports: tuple[PortAddress, ...] = ()
        self.made: list[Middle] = []
        #: whether its first message belongs to a conversation that is over
        self.stray = False
        #: held while it is moved on: accept may be called several times at once
        self.turn = threading.Lock()
        self._paths: list[Path] = []
        self._handles: list[AddressHandle | None] = []
        self._prober: Prober | None = None
        self._answered_after_s = 0.0

    @property
    def hello(self) -> Hello:
        """What the peer asked for."""
        assert isinstance(self.handshake.peer, Hello)
        return self.handshake.peer

    def listen(self) -> State:
        """Take one message, if there is one; where the conversation stands then."""
        frame = None if self.made else self.line.recv()
        if frame is not None:
            outcome = self.handshake.receive(decode(frame))
            self.stray = outcome is Outcome.STALE and self.handshake.state is State.IDLE
            if outcome is Outcome.REPEATED and self.handshake.said is not None:
                self.line.send(encode(self.handshake.said))
        return self.handshake.state

    def answer(self, prepared: Prepared, terms: Terms, ports: tuple[PortAddress, ...]) -> None:
        """On hello: agree, go to RTR with the connector's values, reply. Blocks."""
        self.prepared, self.ports = prepared, ports
        prepared.lend()
        hello = self.hello
        theirs, ours = hello.ends[0], prepared.ends[0]
        if hello.target is not None:
            there = narrow(theirs.port, hello.target.connector_gid)
            here = narrow(ours.port, hello.target.listener_gid)
            agreement = agree(theirs.at(there), ours.at(here), hello.wish)
        else:
            agreement = agree(theirs, ours, hello.wish)
        self._paths = make_paths(prepared.ends, hello.ends, agreement, terms.options, connector=False)
        log.debug("path: %s", "; ".join(self._paths[0].why))
        self._handles = raise_lanes(prepared, self._paths, rts=False)
        reply = Reply(hello.id, prepared.ends, agreement, prepared.offered(), terms.private_data, ports)
        self.line.send(encode(self.handshake.send(reply)))
        self._answered_after_s = self.deadline.waited_s
        self.deadline = Deadline(HALF_OPEN_S + HALF_OPEN_EACH_S * len(hello.ends), ConnectTimeout)
        log.debug("reply: sent, RTR")

    def join(self, waiting: Middle | None) -> None:
        """On ready: go to RTS, and begin the proof."""
        assert self.prepared is not None
        for lane, path in zip(self.prepared.lanes, self._paths, strict=True):
            lane.to_rts(path)
        self.line.keep()
        wire, hello = Wire(self.line, self.handshake), self.hello
        joints = [
            Joint(end, path, wire, hello.regions, hello.private_data, ah)
            for end, path, ah in zip(hello.ends, self._paths, self._handles, strict=True)
        ]
        if waiting is not None:
            waiting._join(joints[0])
            self.made = [waiting]
        else:
            self.made = [self._front(self.prepared, n, j) for n, j in zip(self.prepared.lanes, joints, strict=True)]
        self._handles = []
        log.debug("joined: RTS")
        if hello.wish.probe:
            self._prober = Prober(self.made, self.deadline)

    def proven(self) -> bool:
        """Whether the data path is proven, or nobody asked for it."""
        if self._prober is None:
            return True
        if self._prober.advance():
            self._prober.close()
            self._prober = None
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
        return self.made

    def fail(self, error: BaseException) -> None:
        """Tell the peer why, and free everything."""
        if self._prober is not None:
            self._prober.close()
        if self.made:
            abandon(self.made, error)
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


class Reception(Generic[M]):
    """What both listeners are: connectors come in, and are taken as far as they get.

    Attributes:
        url: the address bound, with the real port.
    """

    _front: type[Middle]

    def __init__(self, url: str, terms: Terms, qp_types: Collection[QpType], share_ud: bool) -> None:
        self._service = Service(url, MAX_FRAME, terms.keys)
        self._terms, self._qp_types, self._share_ud = terms, tuple(qp_types), share_ud
        self._halves: list[Half] = []
        self._ready: deque[M] = deque()
        self._live: weakref.WeakValueDictionary[bytes, Middle] = weakref.WeakValueDictionary()
        self._awaited: set[bytes] = set()
        self._shared: Prepared | None = None
        self._closed = False
        self.url = self._service.url
        if terms.keys is None and not self.url.startswith(("tcp://127.", "tcp://[::1]")):
            log.warning(
                "listening on %s without protection: whoever reaches it can connect. "
                "Give secret= (or RDMACONNECT_SECRET), or key= and peer_key=.", self.url,
            )  # fmt: skip

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def port(self) -> int:
        """The TCP port that is listened on."""
        return int(self.url.rpartition(":")[2])

    # ---- stories

    def _accept(self, deadline_s: float | None, tolerant: bool) -> Story[M]:
        deadline = Deadline(deadline_s, ConnectTimeout)
        failures: list[str] = []
        while True:
            if self._closed:
                raise StateError(f"the listener on {self.url} is closed.")
            for half, error in (yield from self._advance()):
                words = f"{half.line.address or 'a peer'}: {error}"
                log.warning("accept on %s: %s", self.url, words)
                failures.append(words)
                if not tolerant:
                    raise error
            with contextlib.suppress(IndexError):  # nobody, or another thread was faster
                return self._ready.popleft()
            if deadline.left_s <= 0:
                seen = "; ".join(failures[-3:]) or "nobody asked" * (not self._halves)
                raise deadline.exceeded(f"accept on {self.url}", f"Failed with {seen}" if failures else seen)
            yield self._wait(deadline)

    def _wait(self, deadline: Deadline) -> Wait:
        fds = [fd for half in self._halves for fd in half.fds()]
        return Wait((*self._service.filenos(), *fds), deadline, _SLICE_MS)

    def _advance(self) -> Story[list[tuple[Half, RdmaConnectError]]]:
        """Move every half-open connection as far as its messages go; those that fail are given out."""
        self._welcome()
        failed: list[tuple[Half, RdmaConnectError]] = []
        for half in list(self._halves):
            if not half.turn.acquire(blocking=False):
                continue  # another call of accept or reconnect is at it
            try:
                if half in self._halves and (yield from self._step(half)):
                    self._halves.remove(half)
            except (RdmaConnectError, OSError, ValueError) as e:
                error = e if isinstance(e, RdmaConnectError) else StateError(f"accept: {e}")
                self._drop(half, error)
                failed.append((half, error))
            except BaseException as e:
                self._drop(half, e)
                raise
            finally:
                half.turn.release()
        return failed

    def _drop(self, half: Half, error: BaseException) -> None:
        if half in self._halves:
            self._halves.remove(half)
        half.fail(error)

    def _welcome(self) -> None:
        while (line := self._service.accept()) is not None:
            if len(self._halves) >= HALF_OPEN_MAX:
                oldest = next((half for half in self._halves if half.turn.acquire(blocking=False)), self._halves[0])
                self._drop(oldest, StateError(f"{HALF_OPEN_MAX} connections are half open: this one was the oldest."))
            self._halves.append(Half(line, self._front))

    def _step(self, half: Half) -> Story[bool]:
        """Whether the half has become a whole."""
        before = half.handshake.state
        state = half.listen()
        if half.stray:
            half.line.close()
            return True
        if state is State.HEARD:
            held = self._held(half)
            if held is not None and half.hello.prev not in self._awaited:
                held._wire.left = "the peer connects anew: call reconnect()."
                half.deadline.check("accept: wait for reconnect()", "The connection that it replaces is still held.")
                return False
            yield from self._answer(half)
        elif state is State.JOINED:
            if before is not State.JOINED:
                half.join(self._held(half))
            if half.proven():
                self._stand(half)
                return True
        half.deadline.check("accept: wait for the peer", "It asked, and did not go on.")
        return False

    def _held(self, half: Half) -> Middle | None:
        """The connection that the peer wants to have anew, if it is held here."""
        held = None if half.hello.prev is None else self._live.get(half.hello.prev)
        return None if held is None or held.closed else held

    def _stand(self, half: Half) -> None:
        prev = half.hello.prev
        again = prev in self._awaited
        made = half.done()
        for connection in made:
            self._live[half.hello.id] = connection
            if len(made) == 1 and not self._share_ud:
                connection._again = self._await_again
            if not again:
                self._ready.append(connection)  # type: ignore[arg-type]
        if again and prev is not None:
            self._awaited.discard(prev)

    def _answer(self, half: Half) -> Story[None]:
        hello = half.hello
        theirs = hello.ends[0]
        log.debug("hello: from %s, %d x %s", half.line.address, len(hello.ends), theirs)
        if theirs.qp_type not in self._qp_types:
            words = ", ".join(map(str, self._qp_types))
            raise PeerMismatch([f"qp_type: connector {theirs.qp_type}, this listener takes {words}"])
        if hello.meet:
            raise StateError("this side listens, it does not meet(): call connect().")
        again = self._held(half)
        if again is not None:
            yield Call(partial(half.answer, again._prepared, self._terms, (again._prepared.address,)))
            return
        ports = yield Call(partial(self._ports, half))
        prepared = yield Call(partial(self._prepare, half, ports), undo=self._unprepare)
        yield Call(partial(half.answer, prepared, self._terms, half.ports))

    def _ports(self, half: Half) -> list[Port]:
        ports = rank_ports(self._terms.options, _peer_host(half.line.address))
        # a GID index that was asked for means one port's: nothing else is meant
        return ports if self._terms.options.gid_index is None else ports[:1]

    def _offers(self, ports: list[Port]) -> tuple[PortAddress, ...]:
        """What a peer is told of the ports; those that have no address are left out."""
        found = []
        for port in ports[:MAX_PORTS]:
            with contextlib.suppress(DeviceError), open_device(port.device) as context:
                found.append(port.address(context.query_device(), self._terms.options))
        return tuple(found)

    def _prepare(self, half: Half, ports: list[Port]) -> Prepared:
        hello, port = half.hello, ports[0]
        half.ports = self._offers(ports)
        if hello.target is not None:
            wanted = (hello.target.device, hello.target.port_num)
            named = [port for port in ports if (port.device, port.port_num) == wanted]
            if not named:
                raise DeviceError(f"use {wanted[0]} port {wanted[1]}, which the peer wants: it cannot be used here.")
            port = named[0]
        qp_type = hello.ends[0].qp_type
        if self._shared is not None and qp_type is QpType.UD and not self._shared.engine.closed:
            return self._shared
        terms = self._terms
        prepared = Prepared(open_device(port.device), port, qp_type, terms.options, terms.regions, len(hello.ends))
        if self._share_ud and qp_type is QpType.UD:
            self._shared = prepared
            prepared.lend()
        return prepared

    def _unprepare(self, prepared: Prepared) -> None:
        if prepared is not self._shared:
            prepared.close()

    def _await_again(self, connection: Middle, deadline_s: float | None) -> Story[None]:
        """Reconnect, on the side that listens: wait for the peer's new hello."""
        deadline = Deadline(deadline_s, ConnectTimeout)
        prev = connection._wire.id
        if self._service.closed:
            raise StateError(f"reconnect: the listener on {self.url} is closed. Listen and accept anew.")
        connection._part()
        yield Call(connection._lane.restart)
        self._live[prev] = connection
        self._awaited.add(prev)
        try:
            while prev in self._awaited:
                for half, error in (yield from self._advance()):
                    log.warning("reconnect on %s: %s: %s", self.url, half.line.address, error)
                if prev in self._awaited:
                    deadline.check(f"reconnect on {self.url}", "The peer did not connect anew.")
                    yield self._wait(deadline)
        finally:
            self._awaited.discard(prev)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            for half in self._halves:
                half.fail(StateError("the listener was closed."))
            self._halves.clear()
            for connection in self._ready:
                connection._close()
            self._ready.clear()
            if self._shared is not None:
                self._shared.close()
            self._service.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' closed' if self._closed else ''}>"


class Listener(Reception[Connection]):
    """Takes connections on one address. Made by :func:`listen`; a context manager."""

    _front = Connection

    def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> Connection:
        """The next connection; those that were made together come one after the other.

        Args:
            deadline_s: seconds, or None to wait for ever.
            tolerant: whether a peer with whom it fails is logged as a warning and passed over; if not,
                its error is raised.

        Returns:
            The connection, its queue pair in RTS and its data path proven.

        Raises:
            ConnectTimeout: nobody came in time; names those with whom it failed.
            StateError: the listener is closed.
            RdmaConnectError: with ``tolerant=False``, whatever went wrong with the first peer.
        """
        return run(self._accept(deadline_s, tolerant))

    def close(self) -> None:
        """Stop listening; connections that were accepted live on. Twice is fine."""
        self._close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncListener(Reception[AsyncConnection]):
    """The same for asyncio. Made by :func:`alisten`; ``async for`` gives its connections."""

    _front = AsyncConnection

    async def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> AsyncConnection:
        """See :meth:`Listener.accept`."""
        return await arun(self._accept(deadline_s, tolerant))

    async def close(self) -> None:
        """See :meth:`Listener.close`."""
        self._close()

    async def __aiter__(self) -> AsyncIterator[AsyncConnection]:
        while not self._closed:
            yield await self.accept(deadline_s=None)

    async def __aenter__(self) -> AsyncListener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


L = TypeVar("L", Listener, AsyncListener)


def _open(
    kind: type[L],
    address: str,
    qp_types: Collection[str],
    share_ud: bool,
    terms: Terms,
) -> L:
    types = [parse_qp_type(name) for name in qp_types]
    url = tcp_url(address, bind=True)
    rank_ports(terms.options)  # better now than when the first connector asks
    return kind(url, terms, types, share_ud)


def listen(
    address: str = "*",
    *,
    qp_types: Collection[str] = ("RC", "UC", "UD"),
    share_ud: bool = False,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> Listener:
    """Listen for connectors.

    Args:
        address: ``"*"`` for all addresses, ``"host"``, ``"host:port"`` or a ``tcp://`` url. The port
            defaults to 18515; 0 takes a free one, see ``Listener.url``.
        qp_types: the types that a connector may ask for.
        share_ud: whether one queue pair serves all UD peers.
        regions: named memory that every peer may use: name -> anything with a buffer.
        private_data: for each peer's application, at most 4096 bytes.
        secret: the shared secret that protects the exchange; by default RDMACONNECT_SECRET of the
            environment, if set.
        key, peer_key: instead, this side's ``.key_secret`` file and the folder of the connectors' ``.key`` files.
        **options: see :class:`Options`.

    Returns:
        The listener; connectors are queued from now on.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        OSError: the address is taken or not one of this host.
        DeviceError, LibraryError, VerbsError: this host has no usable RDMA device.
    """
    terms = make_terms("RC", options, regions, private_data, listens=True, secret=secret, key=key, peer_key=peer_key)
    return _open(Listener, address, qp_types, share_ud, terms)


async def alisten(
    address: str = "*",
    *,
    qp_types: Collection[str] = ("RC", "UC", "UD"),
    share_ud: bool = False,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> AsyncListener:
    """The same as :func:`listen` for asyncio; gives an :class:`AsyncListener`."""
    terms = make_terms("RC", options, regions, private_data, listens=True, secret=secret, key=key, peer_key=peer_key)
    return _open(AsyncListener, address, qp_types, share_ud, terms)
