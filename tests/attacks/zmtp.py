"""ZMTP 3 by hand, over plain sockets: what a stranger can send, in any order and broken off anywhere.

Source: RFC 23 (ZMTP 3.0) and RFC 37 (3.1).
"""

from __future__ import annotations

import socket
import struct

__all__ = ["GREETING", "Peer", "command", "frame", "greeting", "ping", "ready"]


def greeting(mechanism: bytes = b"NULL", minor: int = 0) -> bytes:
    """The 64 bytes that come first."""
    return b"\xff" + bytes(8) + b"\x7f\x03" + bytes([minor]) + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting()


def command(body: bytes) -> bytes:
    """A command."""
    if len(body) < 256:
        return bytes([4, len(body)]) + body
    return b"\x06" + struct.pack(">Q", len(body)) + body


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """READY of the NULL mechanism."""
    properties = ((b"Socket-Type", kind), (b"Identity", identity))
    return command(b"\x05READY" + b"".join(bytes([len(n)]) + n + struct.pack(">I", len(v)) + v for n, v in properties))


def ping(context: bytes = b"", ttl: int = 0) -> bytes:
    """PING of ZMTP 3.1: whoever is asked answers with PONG."""
    return command(b"\x04PING" + struct.pack(">H", ttl) + context)


def frame(data: bytes, more: bool = False) -> bytes:
    """A message of one frame, or one of several."""
    if len(data) < 256:
        return bytes([more, len(data)]) + data
    return bytes([2 | more]) + struct.pack(">Q", len(data)) + data


class Peer:
    """A peer on a TCP connection that stands.

    Args:
        sock: the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._kept = b""

    @classmethod
    def connect(cls, port: int, **what: bytes) -> Peer:
        """Connect to a port of this host, and shake hands."""
        peer = cls(socket.create_connection(("127.0.0.1", port), timeout=5))
        peer.shake(**what)
        return peer

    def shake(self, kind: bytes = b"DEALER", identity: bytes = b"", mechanism: bytes = b"NULL", minor: int = 0) -> None:
        """Greeting and READY, both ways.

        Raises:
            OSError: the other end hung up, or is silent for 5 s.
        """
        self.sock.sendall(greeting(mechanism, minor))
        self._take(64)
        self.sock.sendall(ready(kind, identity))
        flags, _ = self._frame()
        if not flags & 4:
            raise OSError("a message where READY should be")

    def send(self, *frames: bytes) -> None:
        """Messages of one frame each."""
        self.sock.sendall(b"".join(map(frame, frames)))

    def recv(self) -> bytes:
        """The next message.

        Raises:
            OSError: the other end hung up, or is silent for 5 s.
        """
        while True:
            flags, body = self._frame()
            if not flags & 4:
                return body

    def _frame(self) -> tuple[int, bytes]:
        flags = self._take(1)[0]
        size = struct.unpack(">Q", self._take(8))[0] if flags & 2 else self._take(1)[0]
        return flags, self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._kept) < size:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionResetError("the other end hung up")
            self._kept += data
        taken, self._kept = self._kept[:size], self._kept[size:]
        return taken

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Close."""
        self.sock.close()
