"""A plain TCP connection within a deadline: so many bytes out, so many in. For peers that are not this library.

What other programs exchange before they use RDMA is a text or a struct of fixed length, without frames; each side knows
how much the other sends. The caller's thread waits here, and the service thread has no part in it.
"""

from __future__ import annotations

import math
import os
import socket

from ..errors import ConnectTimeout, PeerClosed, RemoteProtocolError, shown
from ..runtime.deadline import Deadline, wait_readable, wait_ready
from .dial import Dial
from .tcp import listen, local_of, peer_of, set_options
from .url import addresses, host_of, port_of

__all__ = ["Stream", "StreamListener", "dial"]


class Stream:
    """One TCP connection; a context manager.

    Args:
        tcp: connected and non-blocking; it is the stream's from here on.

    Attributes:
        local, remote: the IP addresses of both ends, as text.
    """

    def __init__(self, tcp: socket.socket) -> None:
        self._tcp = tcp
        self.local, self.remote = local_of(tcp), peer_of(tcp)

    def write(self, data: bytes, deadline: Deadline, doing: str) -> None:
        """Send all of it, as one segment where it is short: some programs read no second time.

        Args:
            data: at least one byte.
            deadline: until when.
            doing: what this is, in words.

        Raises:
            PeerClosed: the other side has closed.
            DeadlineExceeded: as the deadline has it.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[self._tcp.send(left) :]
            except BlockingIOError:
                deadline.check(doing, f"{self.remote} does not read what it is sent.")
                wait_ready((), (self._tcp.fileno(),), deadline)
            except OSError as e:
                raise PeerClosed(f"{doing}: {self.remote} is gone ({os.strerror(e.errno or 0)}).") from None

    def read(self, size: int, deadline: Deadline, doing: str) -> bytes:
        """So many bytes.

        Args:
            size: how many.
            deadline: until when.
            doing: what this is, in words.

        Raises:
            RemoteProtocolError: the other side closed before it had sent so many; with those that came.
            DeadlineExceeded: as the deadline has it; with those that came.
        """
        came = bytearray()
        while len(came) < size:
            try:
                more = self._tcp.recv(size - len(came))
            except BlockingIOError:
                deadline.check(doing, f"{self.remote} has sent {_so_far(came, size)}.")
                wait_readable((self._tcp.fileno(),), deadline)
                continue
            except OSError as e:
                raise PeerClosed(f"{doing}: {self.remote} is gone ({os.strerror(e.errno or 0)}).") from None
            if not more:
                raise RemoteProtocolError(f"{doing}: {self.remote} closed after {_so_far(came, size)}.")
            came += more
        return bytes(came)

    def close(self) -> None:
        """Close it. Twice is fine."""
        self._tcp.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _so_far(came: bytearray, size: int) -> str:
    return f"{len(came)} of {size} bytes" + (f": {shown(bytes(came))}" if came else "")


def dial(url: str, deadline: Deadline) -> Stream:
    """Connect to whoever listens, and wait for it to do so. Blocks, as does looking up its name.

    Args:
        url: ``tcp://host:port``.
        deadline: until when.

    Raises:
        ValueError: the name does not resolve.
        ConnectTimeout: nobody took the connection; says what was seen.
        VerbsError: no descriptor is left.
    """
    way = Dial(addresses(host_of(url), port_of(url)), deadline.waited_s)
    try:
        while (tcp := way.advance(deadline.waited_s)) is None:
            if deadline.left_s <= 0:
                raise ConnectTimeout(f"connect to {url.removeprefix('tcp://')}", deadline.waited_s, f"{way.seen()}.")
            due = way.due_s(deadline.waited_s)
            wait_ready((), way.filenos(), deadline, None if math.isinf(due) else math.ceil(due * 1000))
    finally:
        way.close()
    return Stream(tcp)


class StreamListener:
    """A TCP port that others connect to; a context manager.

    Args:
        url: ``tcp://host:port``; ``*`` for all addresses, port 0 for a free one.

    Attributes:
        port: the TCP port.

    Raises:
        ValueError: the name does not resolve.
        OSError: the address is taken, or none of this host; says which.
    """

    def __init__(self, url: str) -> None:
        self._socket = listen(addresses(host_of(url), port_of(url), bind=True), backlog=1)
        self.port = int(self._socket.getsockname()[1])

    def accept(self, deadline: Deadline) -> Stream:
        """The next who connects.

        Args:
            deadline: until when.

        Raises:
            DeadlineExceeded: as the deadline has it.
        """
        while True:
            try:
                tcp, _ = self._socket.accept()
                tcp.setblocking(False)
                set_options(tcp)
                return Stream(tcp)
            except (BlockingIOError, ConnectionAbortedError):
                deadline.check(f"accept on port {self.port}", "Nobody has connected.")
                wait_readable((self._socket.fileno(),), deadline)

    def close(self) -> None:
        """Take no more. Twice is fine."""
        self._socket.close()

    def __enter__(self) -> StreamListener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
