"""ZeroMQ's end of one exchange: a DEALER that sees its peer only through a socket of this process.

ZeroMQ is never let near the network itself, since there a peer can end the whole process: a reset connection
beside a full queue, or a claimed identity, trips an assertion in it. Here each peer has a socket of its own,
which knows no identities, and which is connected to the service thread over a local stream that is never reset.

Source: zmq_ipc(7), zmq_socket(3), unix(7) (abstract names, autobind, SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import zmq

from ..errors import VerbsError
from ..runtime.fork import in_child
from .curve import Keys
from .zmtp import CURVE_ADDS

__all__ = ["LINGER_MS", "SEND_QUEUE", "Link", "close_context", "context"]

#: frames of one peer that ZeroMQ keeps before it holds the peer up; and of this side, which are short but for one,
#: before the peer counts as one that does not read: a busy machine may be a while behind
_RECV_QUEUE, SEND_QUEUE = 8, 64
#: what was sent goes out for so long after close, ms
LINGER_MS = 1000
#: descriptors of one link: the service's end, ZeroMQ's end and its mailbox, and the socket that joins the two; for
#: the first of a process those of ZeroMQ's threads besides
_DESCRIPTORS, _FIRST = 4, 12

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_lock = threading.Lock()


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's only context; its threads never touch the network, so any network namespace will do."""
    global _context
    with _lock:
        if _context is None:
            _context = zmq.Context()
            _context.set(zmq.MAX_SOCKETS, min(_context.get(zmq.SOCKET_LIMIT), 65535))
        return _context


def close_context() -> None:
    """Close every socket at once: the process ends."""
    global _context
    with _lock:
        ending, _context = _context, None
    if ending is not None:
        ending.destroy(linger=0)


def _forget() -> None:
    global _context, _lock
    # ZeroMQ has no threads in a child: what was inherited is kept, and never touched nor collected
    _inherited.append(_context)
    _context, _lock = None, threading.Lock()


_inherited: list[object] = []
in_child(_forget)


def check_descriptors(count: int, what: str) -> None:
    """Are there ``count`` descriptors? ZeroMQ ends the process where it needs one and there is none.

    Raises:
        VerbsError: EMFILE, ENFILE.
    """
    held: list[int] = []
    try:
        for _ in range(count):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - those so far are closed
    except OSError as e:
        raise VerbsError("zmq_socket", e.errno or 0, what) from None
    finally:
        for fd in held:
            os.close(fd)


class Link:
    """One DEALER, and the local stream to it. All its methods are for the service thread.

    Args:
        max_frame: bytes; a longer frame of the peer ends the link.
        keys: to protect the exchange, or None.
        listens: whether it is the listener's, which the keys make the server.
        domain: for a listener with keys, what names it to the handler of authentication.

    Attributes:
        ear: the socket on which ZeroMQ's connection arrives; None once it has.

    Raises:
        VerbsError: EMFILE, ENFILE.
    """

    def __init__(self, max_frame: int, keys: Keys | None, listens: bool, domain: str = "") -> None:
        check_descriptors(_DESCRIPTORS if _context is not None else _FIRST, "open an exchange")
        self.ear: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.ear.bind("")  # the kernel takes a name that is free
            self.ear.listen(64)
            self._socket = self._dealer(max_frame, keys, listens, domain, self.ear.getsockname())
        except BaseException:
            self.ear.close()
            raise
        fd = self._socket.get(zmq.FD)
        assert isinstance(fd, int)
        self.fd = fd
        self._listens = listens and keys is not None

    @staticmethod
    def _dealer(max_frame: int, keys: Keys | None, listens: bool, domain: str, name: bytes) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = context().socket(zmq.DEALER)
        try:
            dealer.set(zmq.LINGER, LINGER_MS)
            dealer.set(zmq.MAXMSGSIZE, max_frame + (CURVE_ADDS if keys is not None else 0))
            dealer.set(zmq.RCVHWM, _RECV_QUEUE)
            dealer.set(zmq.SNDHWM, SEND_QUEUE)
            dealer.set(zmq.HANDSHAKE_IVL, 60_000)  # who waits has a shorter patience of its own
            dealer.set(zmq.HEARTBEAT_IVL, 0)
            # with -1 ZeroMQ would drop frames that came just before the end; the link is closed long before this
            dealer.set(zmq.RECONNECT_IVL, 2**31 - 1)
            if keys is not None:
                dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
                if listens:
                    dealer.curve_server = True
                    dealer.set(zmq.ZAP_DOMAIN, domain.encode())
                    dealer.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
                else:
                    dealer.curve_serverkey = keys.listener
            dealer.connect(f"ipc://@{name[1:].decode()}")
        except BaseException:
            dealer.close(linger=0)
            raise
        return dealer

    def accept(self) -> socket.socket | None:
        """ZeroMQ's connection, if it is there: the service's end of the stream.

        A local stranger may find the name; who is not this process is turned away.
        """
        assert self.ear is not None
        try:
            end, _ = self.ear.accept()
        except (BlockingIOError, InterruptedError):
            return None
        pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid != os.getpid():
            end.close()
            return None
        end.setblocking(False)
        return end

    def close_ear(self) -> None:
        """ZeroMQ's connection is there: nobody else can connect."""
        if self.ear is not None:
            self.ear.close()
            self.ear = None

    def send(self, frame: bytes) -> bool:
        """Hand one frame over; False if the peer has not taken those before it."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self) -> tuple[bytes, str] | None:
        """The next frame and, of a protected exchange's connector, its public key; None if there is none now.

        A message of several frames is none of this protocol: it comes as an empty one.
        """
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 1:
            return b"", ""
        user = ""
        if self._listens:
            with contextlib.suppress(zmq.ZMQError):
                user = str(frames[0].get("User-Id"))
        return frames[0].bytes, user

    @property
    def waiting(self) -> bool:
        """Whether there is a frame to be read: using the socket otherwise may have swallowed the sign of it."""
        return bool(self._socket.poll(0, zmq.POLLIN))

    def close(self, linger_ms: int = 0) -> None:
        """Close; what was sent has ``linger_ms`` to go out. Twice is fine."""
        self._socket.close(linger=linger_ms)
        self.close_ear()
