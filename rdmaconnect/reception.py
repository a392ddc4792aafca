"""What both listeners are: connectors come in, and are taken as far as they get."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic

from .abi import QpType
from .deadline import Deadline
from .device import Port, open_device, rank_ports
from .driver import Call, Story, Wait
from .endpoint import PortAddress
from .errors import (
    ConnectTimeout,
    DeviceError,
    PeerMismatch,
    RdmaConnectError,
    StateError,
)
from .half import Half
from .handshake import State
from .middle import M, Middle
from .oob import Service
from .prepare import Prepared
from .terms import Terms
from .url import host_of, loopback_of
from .wire import MAX_FRAME, MAX_PORTS

__all__ = ["Reception"]

log = logging.getLogger("rdmaconnect")

#: peers that are answered at the same time
ANSWERS_MAX = 16
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
        self._sharing = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        #: an event for whoever waits in accept, when an answer is made
        self._answered = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self.url = self._service.url
        self._local = loopback_of(host_of(self.url))
        if terms.keys is None and not self._local:
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
            for half, error in self._advance():
                words = f"{half.line.address or 'a peer'}: {error}"
                log.warning("accept on %s: %s", self.url, words)
                failures.append(words)
                if not tolerant:
                    raise error
            with contextlib.suppress(IndexError):  # nobody, or another thread was faster
                return self._ready.popleft()
            if deadline.left_s <= 0:
                raise deadline.exceeded(f"accept on {self.url}", self._seen(failures))
            yield self._wait(deadline)

    def _seen(self, failures: list[str]) -> str:
        """Whom an accept in vain has seen."""
        if failures:
            return f"Failed with {'; '.join(failures[-3:])}"
        waiting = [f"{half.line.address or 'a peer'} ({half.handshake.state.value})" for half in self._halves]
        if waiting:
            return f"Not finished with {', '.join(waiting[-3:])}"
        return (
            f"nobody asked: {self._local} is loopback, which only this host reaches." if self._local else "nobody asked"
        )

    def _wait(self, deadline: Deadline) -> Wait:
        fds = [fd for half in self._halves if not half.busy for fd in half.fds()]
        return Wait((*self._service.filenos(), self._answered, *fds), deadline, _SLICE_MS)

    def _advance(self) -> list[tuple[Half, RdmaConnectError]]:
        """Move every half-open connection as far as its messages go; those that fail are given out."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self._answered)
        self._welcome()
        failed: list[tuple[Half, RdmaConnectError]] = []
        for half in list(self._halves):
            if not half.turn.acquire(blocking=False):
                continue  # another call of accept or reconnect is at it
            try:
                if half in self._halves and self._step(half):
                    self._halves.remove(half)
            except (RdmaConnectError, OSError, ValueError) as e:
                error = e if isinstance(e, RdmaConnectError) else StateError(f"accept: {e}")
                self._drop(half, error)
                failed.append((half, error))
            except BaseException as e:
                if not half.busy:
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
            self._halves.append(Half(line, self._front))
        for half in self._halves[: max(0, len(self._halves) - HALF_OPEN_MAX)]:
            if half.turn.acquire(blocking=False):
                try:
                    words = f"{HALF_OPEN_MAX} connections are half open: this one was the oldest."
                    if half.halt():
                        self._drop(half, StateError(words))
                finally:
                    half.turn.release()

    def _step(self, half: Half) -> bool:
        """Whether the half has become a whole. Does not block."""
        if half.busy:
            return False
        if half.answering is not None:
            half.answering = half.answering.result()  # that is None, or the reason why it failed is raised
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
            half.answering = self._begin(partial(self._answer, half))
            return False
        if state is State.JOINED:
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
            connection._known_as = half.hello.id
            if len(made) == 1 and not self._share_ud:
                connection._again = self._await_again
            if not again:
                self._ready.append(connection)  # type: ignore[arg-type]
        if again and prev is not None:
            self._awaited.discard(prev)

    def _begin(self, job: Callable[[], None]) -> Future[None]:
        """Do it in a thread: a peer that cannot be reached holds that up for seconds, and nobody else."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(ANSWERS_MAX, "rdmaconnect-accept")
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: os.eventfd_write(self._answered, 1))
        return future

    def _answer(self, half: Half) -> None:
        """Prepare, agree, go to RTR and reply. Blocks."""
        hello = half.hello
        theirs = hello.ends[0]
        if theirs.qp_type not in self._qp_types:
            words = ", ".join(map(str, self._qp_types))
            raise PeerMismatch([f"qp_type: connector {theirs.qp_type}, this listener takes {words}"])
        if hello.meet:
            raise StateError("this side listens, it does not meet(): call connect().")
        again = self._held(half)
        if again is not None:
            half.answer(again._prepared, self._terms, (again._prepared.address,))
            return
        prepared = self._prepare(half, self._ports(half))
        half.answer(prepared, self._terms, half.ports)

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
        half.trace.mark("port", "%s for %s", port, half.line.address)
        qp_type = hello.ends[0].qp_type
        terms = self._terms
        make = partial(Prepared, port=port, qp_type=qp_type, options=terms.options, regions=terms.regions)
        if not (self._share_ud and qp_type is QpType.UD):
            return make(open_device(port.device), count=len(hello.ends))
        with self._sharing:
            if self._shared is None or self._shared.engine.closed:
                self._shared = make(open_device(port.device), count=len(hello.ends))
                self._shared.lend()
            return self._shared

    def _await_again(self, connection: Middle, deadline_s: float | None) -> Story[None]:
        """Reconnect, on the side that listens: wait for the peer's new hello."""
        deadline = Deadline(deadline_s, ConnectTimeout)
        prev = connection._known_as
        if self._service.closed:
            raise StateError(f"reconnect: the listener on {self.url} is closed. Listen and accept anew.")
        connection._part()
        yield Call(connection._lane.restart)
        self._live[prev] = connection
        self._awaited.add(prev)
        try:
            while prev in self._awaited:
                for half, error in self._advance():
                    log.warning("reconnect on %s: %s: %s", self.url, half.line.address, error)
                    if half.prepared is connection._prepared:
                        connection._part()
                        yield Call(connection._lane.restart)
                if prev in self._awaited:
                    deadline.check(f"reconnect on {self.url}", "The peer did not connect anew.")
                    yield self._wait(deadline)
        finally:
            self._awaited.discard(prev)

    def _closing(self) -> Story[None]:
        yield Call(self._close)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            for half in self._halves:
                half.fail(StateError("the listener was closed."))
            self._halves.clear()
            for connection in self._ready:
                connection._close()
            self._ready.clear()
            if self._shared is not None:
                self._shared.close()
            self._service.close()
            os.close(self._answered)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' closed' if self._closed else ''}>"
