"""Both sides call each other, in any order, and get one connection."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from .abi import QpType
from .connect import raise_ends
from .connection import AsyncConnection, Connection
from .deadline import Deadline
from .device import open_device
from .driver import Call, Story, Wait, arun, run
from .errors import ConnectTimeout, PeerRejected, RdmaConnectError, StateError
from .half import HALF_OPEN_S, Half
from .handshake import Handshake, Outcome, Role, State, counts
from .joining import prove, reject_of
from .messages import Hello
from .middle import M
from .oob import Channel, Service
from .path import Wish
from .prepare import Prepared
from .terms import Terms, make_terms
from .trace import Trace
from .url import host_of, tcp_url
from .ways import ports_toward
from .wire import MAX_FRAME, decode, encode

__all__ = ["ameet", "meet"]

log = logging.getLogger("rdmaconnect")


def meet(
    local: str,
    peer: str,
    *,
    qp_type: str | QpType = "RC",
    deadline_s: float | None = 30,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    **options: Any,
) -> Connection:
    """Connect two sides that are alike: each listens, and calls the other.

    They may start at the same time or one after the other; of the two calls one is dropped, by a rule
    that both know, and there is exactly one connection.

    Args:
        local: where this side listens, as for ``listen``.
        peer: where the other side does, as for ``connect``.
        qp_type: ``"RC"``, ``"UC"`` or ``"UD"``, the same on both.
        deadline_s: seconds for all of it, or None to wait for ever.
        regions, private_data, secret: as for ``connect``.
        **options: see :class:`Options`.

    Returns:
        The connection, its queue pair in RTS and its data path proven.

    Raises:
        OSError: the local address is taken or not one of this host.
        RdmaConnectError, ValueError, TypeError: as ``connect`` and ``listen``.
    """
    return run(_story(Connection, local, peer, *_terms(qp_type, options, regions, private_data, secret), deadline_s))


async def ameet(
    local: str,
    peer: str,
    *,
    qp_type: str | QpType = "RC",
    deadline_s: float | None = 30,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    **options: Any,
) -> AsyncConnection:
    """The same as :func:`meet` for asyncio; gives an :class:`AsyncConnection`."""
    terms = _terms(qp_type, options, regions, private_data, secret)
    return await arun(_story(AsyncConnection, local, peer, *terms, deadline_s))


def _terms(
    qp_type: str | QpType,
    options: Mapping[str, Any],
    regions: Mapping[str, Any] | None,
    private_data: bytes,
    secret: str | bytes | None,
) -> tuple[Terms, Terms]:
    """What is asked for as the caller, and as the one who is called: they differ in their keys."""
    make = partial(make_terms, qp_type, options, regions, private_data, secret=secret, key=None, peer_key=None)
    return make(listens=False), make(listens=True)


def _story(front: type[M], local: str, peer: str, calling: Terms, called: Terms, deadline_s: float | None) -> Story[M]:
    deadline = Deadline(deadline_s, ConnectTimeout)
    url = tcp_url(peer)
    trace = Trace(Role.CONNECTOR, deadline)
    ports = yield Call(partial(ports_toward, calling.options, host_of(url)))
    trace.mark("port", "%s for %s", ports[0], url)
    service = Service(tcp_url(local, bind=True), MAX_FRAME, called.keys)
    meeting: _Meeting | None = None
    prepared: Prepared | None = None
    try:
        prepared = yield Call(
            lambda: Prepared(open_device(ports[0].device), ports[0], calling.qp_type, calling.options, calling.regions),
            undo=Prepared.close,
        )
        assert prepared is not None
        trace.mark("prepared", "%s, INIT, receives posted", prepared.ends[0])
        meeting = _Meeting(front, service, url, prepared, calling, called, trace)
        connection = yield from meeting.story(deadline)
    finally:
        if meeting is not None:
            meeting.close()
        elif prepared is not None:
            prepared.close()
        service.close()
    connection.connect_s = deadline.waited_s
    made: M = connection
    return made


class _Meeting:
    """Two conversations with the same peer, of which one counts."""

    def __init__(
        self,
        front: type[Any],
        service: Service,
        url: str,
        prepared: Prepared,
        calling: Terms,
        called: Terms,
        trace: Trace,
    ) -> None:
        prepared.lend()
        self._trace = trace
        self._front, self._service, self._url, self._prepared = front, service, url, prepared
        self._calling, self._called = calling, called
        self._halves: list[Half] = []
        self._answering: Half | None = None
        self._channel: Channel | None = None
        self._call()

    def _call(self) -> None:
        """Say hello on a line and with an id of its own: to the peer it is another call."""
        if self._channel is not None:
            self._channel.close()
        self._channel = Channel(self._url, MAX_FRAME, self._calling.keys)
        self.handshake = Handshake(Role.CONNECTOR, secrets.token_bytes(16))
        assert self.handshake.id is not None
        terms, prepared = self._calling, self._prepared
        hello = Hello(
            self.handshake.id, prepared.ends, Wish.of(terms.options), prepared.offered(), terms.private_data, meet=True
        )
        self._trace.mark("hello", "sent to %s, to meet", self._url)
        self._channel.send(encode(self.handshake.send(hello)))

    def story(self, deadline: Deadline) -> Story[Any]:
        """Take both conversations on until one of them stands."""
        while True:
            connection = (yield from self._as_caller(deadline)) or (yield from self._as_called())
            if connection is not None:
                return connection
            assert self._channel is not None
            if deadline.left_s <= 0:
                raise deadline.exceeded(f"meet the peer at {self._url}", self._channel.seen())
            fds = [fd for half in self._halves for fd in half.fds()]
            yield Wait((*self._channel.filenos(), *self._service.filenos(), *fds), deadline, 50)

    def _as_caller(self, deadline: Deadline) -> Story[Any]:
        channel = self._channel
        frame = channel.recv() if channel is not None else None
        if channel is None or frame is None or self._answering is not None:
            return None
        if self.handshake.receive(decode(frame)) is not Outcome.MOVED:
            return None
        try:
            joints = yield from raise_ends(
                channel, self.handshake, self._prepared, self._calling, deadline, self._trace
            )
        except BaseException as e:
            if not isinstance(e, PeerRejected):
                channel.send(encode(self.handshake.send(reject_of(self.handshake, e))))
            raise
        connection = self._front(self._prepared, self._prepared.lanes[0], joints[0])
        self._channel = None
        yield from prove([connection], self._calling, deadline)
        self._trace.mark("connected", "in %.1f ms", deadline.waited_s * 1000)
        return connection

    def _as_called(self) -> Story[Any]:
        while (line := self._service.accept()) is not None:
            self._halves.append(Half(line, self._front))
        for half in list(self._halves):
            try:
                before = half.handshake.state
                state = half.listen()
                if half.stray:
                    self._halves.remove(half)
                    half.line.close()
                elif state is State.HEARD:
                    yield from self._heard(half)
                elif state is State.JOINED:
                    if before is not State.JOINED:
                        half.join(None)
                    if half.proven():
                        self._halves.remove(half)
                        return half.done()[0]
                if half is self._answering:
                    half.deadline.check("meet: wait for the peer", "It called, and did not go on.")
            except RdmaConnectError as e:
                self._halves.remove(half)
                half.fail(e)
                log.warning("meet on %s: %s: %s", self._service.url, half.line.address, e)
                if half is self._answering:
                    self._answering = None
                    yield Call(self._prepared.lanes[0].restart)
                    self._call()
        return None

    def _heard(self, half: Half) -> Story[None]:
        """The peer called too: the smaller id counts. It may count later, when this side has called anew."""
        if not half.hello.meet:
            raise StateError("this side meets one peer, it does not listen: call meet().")
        assert self.handshake.id is not None
        if self._answering is None and counts(half.hello.id, self.handshake.id):
            self._answering = half
            half.deadline = Deadline(HALF_OPEN_S, ConnectTimeout)  # it may have waited for long
            yield Call(partial(half.answer, self._prepared, self._called, (self._prepared.address,)))

    def close(self) -> None:
        """Drop what did not come to anything."""
        for half in self._halves:
            if half is self._answering:
                half.fail(StateError("this side gave up."))
            else:
                half.line.close()  # without a word: the peer's own call counts
        if self._channel is not None:
            self._channel.close()
        self._prepared.close()
