"""The out-of-band channel: frames between two hosts over ZeroMQ. With ``curve`` the only file that imports zmq.

A :class:`Channel` is the connector's DEALER, a :class:`Service` the listener's ROUTER, a :class:`Line`
one peer's part of a service. All are driven without blocking: ``recv`` takes what is there, ``wait``
sleeps on the descriptors until something may be. ZeroMQ retries an absent listener by itself; the
channel's monitor tells refused, silent and foreign listeners apart.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import struct
import threading
from collections import deque

import zmq

from .curve import Keys
from .deadline import Deadline
from .driver import Wait
from .errors import AuthenticationError, PeerClosed, RemoteProtocolError, VerbsError, hint_for

__all__ = ["Channel", "Line", "Service"]

#: frames that a line keeps before the oldest is dropped
BACKLOG = 64
#: the longest sleep between two looks at a socket that another thread may have looked at, ms
_SLICE_MS = 50
_LINGER_MS = 1000
#: a peer whose ZeroMQ is silent for so long is gone, ms
_SILENT_MS = 10000
#: handshakes that break off without a word before the keys are held to be the reason
_REFUSALS = 3
#: zmq_socket_monitor(3): what went wrong in a handshake
_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x11000002, 0x11000001

#: descriptors that ZeroMQ may need for a socket, its threads and a peer; some it ends the whole process without
_DESCRIPTORS = 12

_contexts: dict[tuple[int, int], zmq.Context[zmq.Socket[bytes]]] = {}
_contexts_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for each process and network namespace: ZeroMQ makes its sockets on I/O threads, and these
    stay in the namespace of the thread that made the context."""
    try:
        netns = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        netns = 0
    with _contexts_lock:
        key = (os.getpid(), netns)
        if key not in _contexts:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            context.set(zmq.MAX_SOCKETS, min(context.get(zmq.SOCKET_LIMIT), 65535))
            _contexts[key] = context
        return _contexts[key]


@atexit.register
def _flush() -> None:
    """Let what was said last go out before the process ends."""
    for (pid, _), context in _contexts.items():
        if pid == os.getpid():
            context.destroy(linger=_LINGER_MS)


def _check_room(url: str) -> None:
    """Are there so many descriptors?

    Raises:
        VerbsError: EMFILE, ENFILE.
    """
    held: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401 - those so far are closed
    except OSError as e:
        raise VerbsError("zmq_socket", e.errno or 0, f"open an exchange at {url}") from None
    finally:
        for fd in held:
            os.close(fd)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    fd = socket.get(zmq.FD)
    assert isinstance(fd, int)
    return fd


class _Wire:
    """A ZeroMQ socket driven by its descriptor; any thread may use it."""

    def __init__(
        self, kind: int, url: str, max_frame: int, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self.url = url
        self._lock = threading.RLock()
        self._socket: zmq.Socket[bytes] = (context or _context()).socket(kind)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, max_frame)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        # ZeroMQ's own threads answer these, whatever the application is at
        self._socket.set(zmq.HEARTBEAT_IVL, 1000)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        self._fd = _descriptor(self._socket)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._socket.closed

    def filenos(self) -> list[int]:
        """Descriptors that become readable, once, when something may have come."""
        return [self._fd]

    def wait(self, deadline: Deadline) -> Wait:
        """What to yield to sleep until something may have come, after ``recv`` gave None."""
        return Wait(tuple(self.filenos()), deadline, _SLICE_MS)


class Channel(_Wire):
    """The connector's side: one peer, retried until it is there.

    Args:
        url: ``tcp://host:port``.
        max_frame: bytes; a peer that sends a longer frame is cut off.
        keys: to protect the exchange; None for none.

    Raises:
        ValueError: if ZeroMQ cannot use the url.
    """

    def __init__(self, url: str, max_frame: int, keys: Keys | None = None) -> None:
        _check_room(url)
        super().__init__(zmq.DEALER, url, max_frame)
        self._keys = keys
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = keys.listener
        self._said: bytes | None = None
        self._seen = "nothing answers: the host is down or not there, or a firewall drops the packets"
        self._hung_up = ""
        self._meetings = self._refusals = 0
        self._settled = False
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        handshakes = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._monitor = self._socket.get_monitor_socket(events | handshakes)
        self._fds = [self._fd, _descriptor(self._monitor)]
        try:
            self._socket.connect(url)
        except zmq.ZMQError as e:
            self.close()
            raise ValueError(f"connect to {url}: {e.strerror}. Give a host name or address that resolves.") from e

    def filenos(self) -> list[int]:
        return self._fds

    def settle(self) -> None:
        """From here on a broken connection is the end, and not one more attempt."""
        self._settled = True

    def send(self, frame: bytes) -> None:
        """Hand one frame to ZeroMQ, which keeps it until the peer is there."""
        with self._lock:
            if not self._socket.closed:
                self._said = frame
                with contextlib.suppress(zmq.Again):  # ZeroMQ has given this peer up: nobody would hear it
                    self._socket.send(frame, zmq.NOBLOCK)

    def recv(self) -> bytes | None:
        """The next frame, or None if there is none now.

        Raises:
            AuthenticationError: the two sides' keys do not fit.
            RemoteProtocolError: what listens there does not speak ZeroMQ.
            PeerClosed: once settled, the connection broke.
        """
        with self._lock:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._look()
                return None

    def _look(self) -> None:
        """Read the monitor: how far did the TCP connection get?"""
        while True:
            try:
                head, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # zmq_socket_monitor(3): 16 bits of event, 32 bits of value, host order
            kind, value = struct.unpack("=HI", head)
            if kind == zmq.EVENT_CONNECTED:
                self._seen = self._hung_up or "it accepted the connection, but did not speak"
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._seen = "it is there, but did not answer: is its application in accept()?"
                self._meetings += 1
                if self._meetings > 1 and self._said is not None and not self._settled:
                    self._socket.send(self._said, zmq.NOBLOCK)  # a new process there has not heard it
            elif kind == zmq.EVENT_CONNECT_RETRIED and not self._hung_up and "did not" not in self._seen:
                gone = "it was there and is gone: its process ended, and nothing listens there now"
                self._seen = gone if self._meetings else "nothing listens there, or a firewall drops the packets"
            elif kind == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            elif kind not in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CLOSED):
                self._refused(kind, value)

    def _disconnected(self) -> None:
        if self._settled:
            raise PeerClosed(f"the peer at {self.url} is gone: its process ended, or the network to it broke.")
        self._seen = "it closed the connection"
        if not self._meetings:
            self._seen = self._hung_up = (
                "it accepts connections and closes them without a ZeroMQ greeting: is it rdmaconnect that listens?"
            )

    def _refused(self, kind: int, value: int) -> None:
        """A handshake of ZeroMQ failed."""
        self._refusals += 1
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise AuthenticationError(f"connect to {self.url}: the listener does not know the key of this side.")
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            protected = "this side's exchange is protected, the listener's is not"
            open_ = "the listener's exchange is protected, this side's is not"
            seen = protected if self._keys else open_
            raise AuthenticationError(f"connect to {self.url}: {seen}. Give both sides the same secret, or keys.")
        no_word = kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if self._keys and (value == _CRYPTOGRAPHIC or (no_word and self._refusals >= _REFUSALS)):
            raise AuthenticationError(
                f"connect to {self.url}: the listener broke the handshake off: "
                "it has another key than this side expects, another secret, or none."
            )
        if not no_word or value not in (errno.EPIPE, errno.ECONNRESET):
            raise RemoteProtocolError(
                f"connect to {self.url}: what listens there does not speak this protocol. "
                "Check host and port: is it rdmaconnect that listens?"
            )
        self._seen = self._hung_up or "it closed the connection before it spoke"

    def seen(self) -> str:
        """In words, how far the connection got: for the message when the deadline has passed."""
        with self._lock:
            self._look()
            return f"{self.url}: {self._seen}" + "." * (not self._seen.endswith("?"))

    def close(self) -> None:
        """Close; what was sent still has a second to go out. Twice is fine."""
        with self._lock:
            if not self._socket.closed:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._socket.close()


class Service(_Wire):
    """The listener's side: many peers on one address.

    Args:
        url: ``tcp://host:port``; port 0 takes a free one.
        max_frame: bytes; a peer that sends a longer frame loses its connection.
        keys: to protect the exchange; None for none.

    Attributes:
        url: the address bound, with the real port.
        peers: peers that are spoken with, name -> line.

    Raises:
        OSError: the address is taken, or not one of this host; says which.
    """

    def __init__(self, url: str, max_frame: int, keys: Keys | None = None) -> None:
        _check_room(url)
        # the handler of authentication serves a whole context: so this one gets its own
        self._guard = None if keys is None else _Guard(keys)
        super().__init__(zmq.ROUTER, url, max_frame, self._guard.context if self._guard else None)
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_server = True
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self.peers: dict[bytes, Line] = {}
        self._strangers: deque[Line] = deque()
        self._users = 1
        try:
            self._socket.bind(url)
        except zmq.ZMQError as e:
            self._shut()
            hint = hint_for("bind", e.errno or 0) or "Give an address of this host."
            raise OSError(e.errno, f"listen on {url}: {os.strerror(e.errno or 0)}. {hint}") from e
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _pump(self) -> None:
        """Sort what has come to its lines."""
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            line = self.peers.get(name.bytes)
            if line is None:
                address = frames[0].get("Peer-Address") if frames else ""
                line = self._stranger(name.bytes, str(address))
            if len(frames) == 1:
                line.inbox.append(frames[0].bytes)

    def _stranger(self, name: bytes, address: str) -> Line:
        line = self.peers[name] = Line(self, name, address)
        self._strangers.append(line)
        return line

    def accept(self) -> Line | None:
        """A peer that was not here before, or None."""
        with self._lock:
            self._pump()
            return self._strangers.popleft() if self._strangers else None

    def lend(self) -> None:
        """Keep the socket open for one user more; each :meth:`close` gives one back."""
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """Give one use back; the last one closes the socket."""
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                self._shut()

    def _shut(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            if self._guard is not None:
                self._guard.close()


class _Guard:
    """A context whose sockets let only known keys in."""

    def __init__(self, keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # it brings asyncio along, which few need

        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._knows = keys.knows
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """ZeroMQ's question (RFC 27): may this public key come in?"""
        return self._knows is not None and self._knows(key)

    def close(self) -> None:
        """Let go of it, when what was sent has gone out."""
        self._authenticator.stop()
        self.context.term()


class Line:
    """One peer of a :class:`Service`; the same doors as a :class:`Channel`.

    Attributes:
        address: the peer's IP address as ZeroMQ gives it, or "".
    """

    def __init__(self, service: Service, name: bytes, address: str) -> None:
        self.service, self.name, self.address = service, name, address
        self.inbox: deque[bytes] = deque(maxlen=BACKLOG)
        self._kept = False

    def filenos(self) -> list[int]:
        """The service's descriptors."""
        return self.service.filenos()

    def send(self, frame: bytes) -> None:
        """Send one frame to this peer.

        Raises:
            PeerClosed: if it is gone.
        """
        with self.service._lock:
            try:
                self.service._socket.send_multipart([self.name, frame], zmq.NOBLOCK)
            except zmq.ZMQError as e:
                raise PeerClosed(
                    f"send to {self.address or 'the peer'}: {e.strerror}. It is gone: it closed its side, its process "
                    "ended or was stopped, or the network to it broke."
                ) from e

    def recv(self) -> bytes | None:
        """The next frame of this peer, or None if there is none now."""
        with self.service._lock:
            if not self.inbox:
                self.service._pump()
            return self.inbox.popleft() if self.inbox else None

    def keep(self) -> None:
        """Outlive the listener: the service stays open until this line is closed too."""
        if not self._kept:
            self._kept = True
            self.service.lend()

    def close(self) -> None:
        """Forget this peer; what it said and nobody read begins a new line. Twice is fine."""
        with self.service._lock:
            if self.service.peers.get(self.name) is self:
                del self.service.peers[self.name]
                if self.inbox:
                    self.service._stranger(self.name, self.address).inbox.extend(self.inbox)
                    self.inbox.clear()
        if self._kept:
            self._kept = False
            self.service.close()
