"""Bytes carried between two sockets, and frames into one, in the service thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Outlet", "Pump", "drain_and_close"]

#: bytes read at a time
CHUNK = 64 * 1024


class Pump:
    """Carries bytes from one socket to another, one way. All its methods are for the service thread.

    The source is not read while the sink does not take what was read before: so the sender is held up, and
    no more than :data:`CHUNK` bytes are kept. When the source has said its last, the sink's writing half is
    shut down, and never closed at once: who reads there reads the end in its order.

    Args:
        loop: the service thread's.
        source, sink: non-blocking stream sockets; closing them is the owner's.
        ended: called once, when the source has said its last and the sink was given all of it, or takes no more.
        check: is given what has come, and gives what may go on.

    Attributes:
        over: whether it has ended.
        discarding: whether what comes is thrown away.
        in_order: whether the source's peer has closed it, or that one's kernel when its process ended; not, whether it
            was reset or given up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket | None,
        ended: Callable[[Pump], None],
        check: Callable[[bytes], bytes],
    ) -> None:
        self._loop, self._source, self._sink, self._ended, self._check = loop, source, sink, ended, check
        self._kept = b""
        self._reading = self._last_said = self.over = self.discarding = self.in_order = False
        self.held = False

    def start(self) -> None:
        """Begin to read, or go on."""
        if not (self._reading or self.held or self._kept or self._last_said or self.over):
            self._reading = True
            self._loop.add_reader(self._source.fileno(), self._readable)  # asyncio is slow with the socket itself

    def hold(self) -> None:
        """Read no more until :meth:`release`."""
        self.held = True
        self._rest()

    def release(self) -> None:
        """Read again."""
        self.held = False
        self.start()

    def attach(self, sink: socket.socket) -> None:
        """Give the sink, where it was not there from the beginning."""
        self._sink = sink
        kept, self._kept = self._kept, b""
        self._put(kept)
        self.start()

    def stop(self) -> None:
        """Watch neither socket any more; nothing is called after it."""
        self.over = True
        self._rest()
        if self._kept and self._sink is not None and self._sink.fileno() >= 0:
            self._loop.remove_writer(self._sink.fileno())

    def _rest(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._source.fileno())

    def _readable(self) -> None:
        try:
            data = self._source.recv(CHUNK)
            self.in_order = not data
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # reset, or given up by the kernel: nothing more will come
            data = b""
        if not data:
            self._last_said = True
            self._rest()
            if not self._kept:
                self._finish()
        elif not self.discarding:
            self._put(self._check(data))

    def _put(self, data: bytes) -> None:
        if self.over or (not data and not self._last_said):
            return
        if self._sink is None:
            self._kept += data
            self._rest()
            return
        try:
            sent = self._sink.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._broken()
            return
        self._kept = data[sent:]
        if self._kept:
            self._rest()
            self._loop.add_writer(self._sink.fileno(), self._writable)
        elif self._last_said:
            self._finish()

    def _writable(self) -> None:
        assert self._sink is not None
        self._loop.remove_writer(self._sink.fileno())
        kept, self._kept = self._kept, b""
        self._put(kept)
        self.start()

    def _broken(self) -> None:
        """The sink takes no more: what comes has nowhere to go."""
        self._kept = b""
        self.discarding = True
        if self._last_said:
            self._finish()

    def _finish(self) -> None:
        if not self.over:
            self.stop()
            if self._sink is not None:
                with contextlib.suppress(OSError):
                    self._sink.shutdown(socket.SHUT_WR)
            self._ended(self)


class Outlet:
    """Sends frames into a socket, and keeps in their order those that it does not take yet.

    Any thread may :meth:`put`; all else is for the service thread.

    Args:
        loop: the service thread's.
        sink: a non-blocking stream socket; closing it is the owner's, after :meth:`stop`.
        most: frames that are kept at most.
        ended: called once, when :meth:`finish` was called and all is out, or the socket takes no more.

    Attributes:
        over: whether it has ended.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sink: socket.socket, most: int, ended: Callable[[], None]
    ) -> None:
        self._loop, self._sink, self._most, self._ended = loop, sink, most, ended
        #: held while the socket is written to, so that it is not closed meanwhile
        self._lock = threading.RLock()
        self._kept: deque[bytes] = deque()
        self._broken = self._finishing = self.over = False

    def put(self, frame: bytes) -> bool:
        """Send a frame; False if the peer has not taken too many before it."""
        with self._lock:
            if self._broken or self.over:
                return True  # who reads there knows why
            if not self._kept:
                frame = self._send(frame)
                if not frame:
                    return True
                self._loop.call_soon_threadsafe(self._watch)
            self._kept.append(frame)
            return len(self._kept) <= self._most

    def _send(self, frame: bytes) -> bytes:
        """Send what the socket takes; the rest."""
        try:
            return frame[self._sink.send(frame) :]
        except (BlockingIOError, InterruptedError):
            return frame
        except OSError:
            self._broken = True
            return b""

    def _watch(self) -> None:
        if self._kept and not self.over:
            self._loop.add_writer(self._sink.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            while self._kept:
                frame = self._send(self._kept.popleft())
                if frame:
                    self._kept.appendleft(frame)
                    return
                if self._broken:
                    self._kept.clear()
        self._loop.remove_writer(self._sink.fileno())
        if self._finishing:
            self._finish()

    def finish(self) -> None:
        """Shut the writing half down once all is out."""
        with self._lock:
            self._finishing = True
            left = bool(self._kept)
        if not left:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)
        self._ended()

    def stop(self) -> None:
        """Watch the socket no more; nothing is called after it, and no thread writes."""
        with self._lock:
            self.over = True
            if self._kept:
                self._kept.clear()
                self._loop.remove_writer(self._sink.fileno())


def drain_and_close(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Close a socket when its peer has closed its own end, and not before; what comes until then is thrown away.

    ZeroMQ aborts the process where its peer hangs up while it is held up itself.
    """

    def read() -> None:
        try:
            while sock.recv(CHUNK):
                pass
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        loop.remove_reader(sock.fileno())
        sock.close()

    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    loop.add_reader(sock.fileno(), read)
