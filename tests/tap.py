"""A tap on an exchange that is not protected: what both sides say, and what is changed, kept back or said again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rdmaconnect.protocol.codec import decode, encode
from rdmaconnect.protocol.messages import Message

#: is given each message and whether the connector said it, and gives what goes on instead
Change = Callable[[Message, bool], "list[Message]"]


class Tap:
    """Stands between connectors and a listener.

    Attributes:
        url: where connectors call.
        said: all messages in the order in which they came here, with whether a connector said it.
        change: see :data:`Change`.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._there = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said: list[tuple[Message, bool]] = []
        self.change: Change = lambda message, connector: [message]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def of(self, kind: type) -> list[Message]:
        """What was said of a kind."""
        return [message for message, _ in self.said if type(message) is kind]

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(self._there)
                except OSError:
                    here.close()
                    continue
                for sock in (here, there):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [here, there]
                self._start(lambda a=here, b=there: self._carry(a, b, True))  # type: ignore[misc]
                self._start(lambda a=there, b=here: self._carry(a, b, False))  # type: ignore[misc]

    def _carry(self, source: socket.socket, sink: socket.socket, connector: bool) -> None:
        with contextlib.suppress(OSError, EOFError), source.makefile("rb") as stream:
            try:
                left = 64  # the greeting, of which each side waits for a part of the other's
                while left:
                    data = stream.read1(left)
                    if not data:
                        return
                    sink.sendall(data)
                    left -= len(data)
                while True:
                    flags = _exactly(stream, 1)[0]
                    size = _exactly(stream, 8 if flags & 2 else 1)
                    body = _exactly(stream, int.from_bytes(size, "big"))
                    message = None if flags & 4 else decode(body)
                    if message is None:
                        sink.sendall(bytes([flags]) + size + body)
                        continue
                    self.said.append((message, connector))
                    for one in self.change(message, connector):
                        sink.sendall(_frame(encode(one)))
            finally:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def hang_up(self) -> None:
        """Cut all connections that there are."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _exactly(stream: object, count: int) -> bytes:
    data: bytes = stream.read(count)  # type: ignore[attr-defined]
    if len(data) < count:
        raise EOFError
    return data


def _frame(body: bytes) -> bytes:
    """RFC 23: a message."""
    return b"\x00" + bytes([len(body)]) + body if len(body) < 256 else b"\x02" + len(body).to_bytes(8, "big") + body


@contextmanager
def tapped(url: str) -> Iterator[Tap]:
    """A tap in front of a listener."""
    made = Tap(url)
    try:
        yield made
    finally:
        made.close()
