"""Both sides of an exchange over real TCP and ZeroMQ on 127.0.0.1, without anything of RDMA."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.exchange import service
from rdmaconnect.exchange.acceptor import Acceptor
from rdmaconnect.exchange.alive import open_channels
from rdmaconnect.exchange.channel import Channel
from rdmaconnect.exchange.curve import Keys

T = TypeVar("T")
#: seconds that nothing here takes
PATIENCE_S = 10.0
MAX = 1000
LOCAL = "tcp://127.0.0.1:0"


class Heard:
    """What one end was told; the receiver of its channel."""

    def __init__(self) -> None:
        self.frames = queue.SimpleQueue[bytes]()
        self.ends = queue.SimpleQueue[RdmaConnectError]()
        self.ticks = 0
        self.threads: set[str] = set()
        #: called in the service thread with each frame
        self.on_frame: Callable[[bytes], None] = lambda frame: None

    def took(self, frame: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.frames.put(frame)
        self.on_frame(frame)

    def over(self, error: RdmaConnectError) -> None:
        self.threads.add(threading.current_thread().name)
        self.ends.put(error)

    def tick(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.ticks += 1

    def next(self) -> bytes:
        """The next frame."""
        return self.frames.get(timeout=PATIENCE_S)

    def all(self) -> list[bytes]:
        """The frames that have come."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self.frames.get_nowait())
        return found

    def end(self, seconds: float = PATIENCE_S) -> RdmaConnectError:
        """Why it ended."""
        return self.ends.get(timeout=seconds)

    @property
    def ended(self) -> bool:
        return not self.ends.empty()


class End:
    """A channel with what it was told."""

    def __init__(self, channel: Channel, heard: Heard) -> None:
        self.channel, self.heard = channel, heard

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.channel.send(frame)

    def take(self, count: int = 1) -> list[bytes]:
        return [self.heard.next() for _ in range(count)]


class Place:
    """An acceptor, and the ends of those who came."""

    def __init__(self, url: str = LOCAL, max_frame: int = MAX, keys: Keys | None = None) -> None:
        self.came = queue.SimpleQueue[End]()
        self.acceptor = Acceptor(url, self._welcome, max_frame, keys)
        self.url = self.acceptor.url
        self.port = int(self.url.rpartition(":")[2])
        self.acceptor.start()

    def _welcome(self, channel: Channel) -> Heard:
        heard = Heard()
        self.came.put(End(channel, heard))
        return heard

    def next(self) -> End:
        """The next one that came."""
        return self.came.get(timeout=PATIENCE_S)

    def know(self, end: End) -> None:
        service.do(lambda: self.acceptor.know(end.channel))

    @property
    def strangers(self) -> int:
        return service.do(lambda: len(self.acceptor._strangers))

    def close(self) -> None:
        """Close the acceptor and all that came."""
        self.acceptor.close()
        with suppress(queue.Empty):
            while True:
                self.came.get_nowait().channel.close()


@contextmanager
def place(url: str = LOCAL, max_frame: int = MAX, keys: Keys | None = None) -> Iterator[Place]:
    made = Place(url, max_frame, keys)
    try:
        yield made
    finally:
        made.close()


def dial(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A TCP connection, non-blocking, as a dial gives it."""
    tcp = socket.create_connection((host, port), timeout=PATIENCE_S)
    tcp.setblocking(False)
    return tcp


@contextmanager
def calling(where: Place | int, max_frame: int = MAX, keys: Keys | None = None) -> Iterator[End]:
    """The caller's end."""
    port = where if isinstance(where, int) else where.port
    heard = Heard()
    made = End(Channel(dial(port), heard, max_frame, keys), heard)
    try:
        yield made
    finally:
        made.channel.close()


@contextmanager
def raw_listener(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP listener that is no ZeroMQ: ``talk`` gets each connection, which then stays open. Gives its port."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    kept.append(listener.accept()[0])
                    with suppress(OSError):
                        talk(kept[-1])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def until(look: Callable[[], T | None], seconds: float = PATIENCE_S) -> T:
    """What ``look`` gives once it gives something that is true."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.005)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def channels() -> int:
    """How many channels there are."""
    return service.do(open_channels)


def taken(port: int) -> bool:
    """Whether somebody listens on that port of 127.0.0.1."""
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            mine.bind(("127.0.0.1", port))
        except OSError as e:
            return e.errno == errno.EADDRINUSE
        return False
