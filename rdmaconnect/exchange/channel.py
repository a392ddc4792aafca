"""Frames to and from one peer, read by the service thread whatever the application is at."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ..errors import PeerClosed, RdmaConnectError, RemoteProtocolError, StateError
from ..runtime.fork import in_child
from . import alive, long_frames, service
from .budget import BYTES, Budget
from .curve import Keys
from .plain import LINGER_MS, SEND_QUEUE, Plain
from .relay import Outlet, Pump
from .tcp import has_unread, local_of, peer_of
from .verdicts import foreign, why_over
from .zmtp import Filter, ZmtpError

if TYPE_CHECKING:
    from .carried import Carried

__all__ = ["SMALL_FRAME", "Channel", "Receiver"]

log = logging.getLogger("rdmaconnect")

#: bytes of the longest frame of a peer that has not asked for many queue pairs at once
SMALL_FRAME = 64 * 1024
#: frames of one peer that are taken in one go, and the pause after that, seconds
_AT_ONCE, _PAUSE_S = 32, 0.01
#: seconds between a greeting that does not fit and the end
_PARTING_S = 0.1
#: what ZeroMQ and CURVE add to a frame, at most, bytes
_OVERHEAD = 64


class Receiver(Protocol):
    """Who is told what a peer says; every method is called in the service thread, and must not block."""

    def took(self, frame: bytes) -> None:
        """A frame has come."""

    def over(self, error: RdmaConnectError) -> None:
        """Nothing more will come, and why; called at most once, and beside :meth:`Channel.close` at the latest."""

    def tick(self) -> None:
        """A second has passed."""


#: those who have cost so much that they are not read for a while
_resting: set[Channel] = set()


class Channel:
    """Frames to and from one peer over a TCP connection that stands. Any thread may use it.

    Args:
        tcp: the connection, non-blocking; it belongs to the channel from here on.
        receiver: who is told what comes.
        max_frame: bytes; a peer that sends a longer frame is cut off.
        keys: to protect the exchange; None for none.
        listens: whether this is the listener's end.
        domain: for a listener with keys, what names it to the handler of authentication.

    Attributes:
        address, local: the peer's IP address, and this end's.
        user: the peer's public key as Z85 text, once its first frame has come, where it had to show one; else "".
        heard: when the last bytes of the peer came, on the monotonic clock.
        closing: whether it was closed, and what was sent last may still go out.
    """

    def __init__(
        self,
        tcp: socket.socket,
        receiver: Receiver,
        max_frame: int,
        keys: Keys | None = None,
        *,
        listens: bool = False,
        domain: str = "",
    ) -> None:
        self.address, self.local = peer_of(tcp), local_of(tcp)
        self.receiver: Receiver | None = receiver
        self.user = ""
        self._pid = os.getpid()
        self._tcp, self._keys, self._listens, self._domain = tcp, keys, listens, domain
        self.max_frame, self.heard = max_frame, time.monotonic()
        self._filter = Filter(b"CURVE" if keys else b"NULL", listens, max_frame)
        self._plain: Plain | None = None
        self._line: Plain | Carried | None = None
        #: whether what is sent can go out: the handshake is over, or ZeroMQ has come, which sees to that
        self._there = False
        #: whether who sends may do so itself, and how many frames the service thread has yet to take
        self._direct, self._queued, self._lock = False, 0, threading.Lock()
        self._inward: Pump | None = None
        self._unsent: deque[bytes] = deque()
        self._verdict: RdmaConnectError | None = None
        self._budget = Budget(self.heard)
        self._paused = self.closing = self._ended = False
        try:
            service.soon(self._open)
        except BaseException:
            tcp.close()
            raise

    @property
    def greeted(self) -> bool:
        """Whether the peer has shown that it speaks ZeroMQ."""
        return self._filter.greeted

    @property
    def ended_in_order(self) -> bool:
        """Whether the peer has closed the TCP connection, or its kernel when its process ended."""
        return self._inward is not None and self._inward.in_order

    @property
    def silent_s(self) -> float:
        """Seconds since the last bytes of the peer came."""
        return time.monotonic() - self.heard

    def lower(self, max_frame: int) -> None:
        """Take no longer frames than this from here on. For the service thread."""
        self.max_frame = self._filter.max_frame = max_frame

    def send(self, frame: bytes) -> None:
        """Send one frame. It never blocks: whether the peer is there is told by :meth:`Receiver.over`.

        Raises:
            StateError: in a process other than the one that made the channel.
        """
        if self._pid != os.getpid():
            raise StateError("use an exchange of the process that forked this one: connect or listen anew here.")
        with self._lock:
            # not in the main thread, where a signal's handler may raise between what is sent and what is kept
            direct = self._direct and not self._queued and threading.current_thread() is not threading.main_thread()
            if not direct:
                self._queued += 1
                service.soon(self._take, frame)
        if direct and self._plain is not None and not self._plain.send(frame):
            service.soon(self._does_not_read)

    def close(self) -> None:
        """Close; what was sent still has a second to go out. The receiver is told nothing more. Twice is fine."""
        self._direct = False
        if self._pid == os.getpid():
            service.soon(self._close)

    # ---- in the service thread

    def unread(self) -> bool:
        """Whether there are bytes of the peer that nobody has read yet. For the service thread."""
        return has_unread(self._tcp)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return service.loop()

    def _open(self) -> None:
        if self.closing:
            self._tcp.close()
            return
        alive.add(self)
        self._inward = Pump(self._loop, self._tcp, None, self._peer_is_done, self._checked)
        if not self._listens:
            self._join()
        self._inward.start()

    def _join(self) -> None:
        """Speak; where there are keys, let ZeroMQ in: only now it costs more than one descriptor."""
        if self._keys is None:
            outlet = Outlet(self._loop, self._tcp, SEND_QUEUE, self.hung_up)
            self._line = self._plain = Plain(self._filter, outlet)
            return
        from .carried import Carried  # and ZeroMQ with it: who has no keys does not load it

        try:
            self._line = Carried(self._loop, self._tcp, self, self.max_frame, self._keys, self._listens, self._domain)
        except RdmaConnectError as e:
            self._end(e)

    def came(self, local: socket.socket) -> None:
        """ZeroMQ has come."""
        if self._inward is not None:
            self._inward.attach(local)
        self._go_out()

    def _go_out(self) -> None:
        """From here on what is sent goes out, and first what was sent before."""
        self._there = True
        while self._unsent and not self.closing:
            self._send(self._unsent.popleft())
        if self.closing:
            self._hang_up()
        else:
            self._direct = self._plain is not None

    def _checked(self, data: bytes) -> bytes:
        """What of the peer's bytes may go on to ZeroMQ."""
        assert self._inward is not None
        try:
            passed = self._filter.take(data)
        except ZmtpError as e:
            # this side's own greeting, which says how it is protected, is let out before
            self._verdict = foreign(e, self._listens)
            self._loop.call_later(_PARTING_S, self._end, self._verdict)
            self._inward.discarding = True
            passed = e.passed
        if self.closing and self._filter.shaken:
            self._inward.discarding = True
        elif self._line is None and passed and not self.closing:
            self._join()
        self.heard = time.monotonic()
        if self._filter.unread > SMALL_FRAME + _OVERHEAD and not long_frames.begin(self):
            self._inward.hold()
        if self._plain is None:
            return passed
        self._read(self._plain)
        return b""

    def _read(self, plain: Plain) -> None:
        """Bytes of a peer have come of which ZeroMQ is not to know."""
        if self._filter.shaken and not self._there:
            self._go_out()
        if pings := len(self._filter.pings):
            self.charge(pings)
            if not plain.answer_pings():
                self._does_not_read()
        if plain.waiting:
            self.readable()
        if self._filter.refused:
            self._end(self._why())

    def readable(self) -> None:
        """Frames may have come."""
        for _ in range(_AT_ONCE):
            if self._line is None or self._paused or self._ended or self.closing:
                return
            taken = self._line.recv()
            if taken is None:
                return
            self._took(*taken)
            self.charge(1 + len(taken[0]) / BYTES)
            if self._paused:
                return
        self._pause(_PAUSE_S)

    def charge(self, cost: float) -> None:
        """The peer has cost so much (``budget``): if that is more than it may, it has to rest.

        For the service thread.
        """
        self._rest(self._budget.charge(cost, len(_resting), time.monotonic()))

    def _rest(self, seconds: float) -> None:
        if seconds and not (self._paused or self._ended or self.closing):
            _resting.add(self)
            self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        self._paused = True
        if self._inward is not None:
            self._inward.hold()
        self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        _resting.discard(self)
        self.read_on()
        self.readable()

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the network."""
        return self._inward is None or self._inward.over

    def read_on(self) -> None:
        """Read from the network again, if nothing else speaks against it. For the service thread."""
        if self._inward is not None and not (self._paused or self._ended or long_frames.waits(self)):
            self._inward.release()

    def _took(self, frame: bytes, user: str) -> None:
        self._filter.unread = self._filter.frames = 0
        self.user = self.user or user
        began = time.thread_time()
        if self.receiver is not None:
            self.receiver.took(frame)
        if len(frame) > SMALL_FRAME:
            rest_s = long_frames.cost(time.thread_time() - began)
            self._rest(rest_s * (len(_resting) + 1))
        long_frames.end(self)

    def _take(self, frame: bytes) -> None:
        self._send(frame)
        with self._lock:
            self._queued -= 1

    def _does_not_read(self) -> None:
        self._end(PeerClosed(f"the peer at {self.address} does not read what is sent to it."))

    def _send(self, frame: bytes) -> None:
        if self._ended or self.closing:
            return
        if not self._there:
            self._unsent.append(frame)
            return
        assert self._line is not None
        if not self._line.send(frame):
            self._does_not_read()
        elif self._line.waiting:
            self.readable()

    def _peer_is_done(self, pump: Pump) -> None:
        """The TCP connection ended, and ZeroMQ has been given all that came before."""
        if self._plain is not None or not self._there:
            self._end(self._why())
        if self._line is not None and self._line.over:
            self.finish()

    def hung_up(self) -> None:
        """All has gone out, or ZeroMQ has closed its end: told to, or since the peer is gone or broke its protocol."""
        if not self.closing:
            self._end(self._why())
        elif self._inward is None or self._inward.over:
            self.finish()

    def _why(self) -> RdmaConnectError:
        """Why no more will come."""
        hung_up = self._plain is None and self._inward is not None and not self._inward.over
        return self._verdict or why_over(self.address, self._filter, hung_up=hung_up, protected=self._keys is not None)

    def _end(self, error: RdmaConnectError) -> None:
        """Nothing more will come: give out what is there, and close."""
        if self._ended or self.closing:
            return
        for _ in range(4 * _AT_ONCE):
            taken = self._line.recv() if self._line is not None else None
            if taken is None or self._ended or self.closing:
                break
            self._took(*taken)
        if not (self._ended or self.closing):
            self._ended, self._direct = True, False
            receiver, self.receiver = self.receiver, None
            self.finish()
            if receiver is not None:
                receiver.over(error)

    failed = _end

    def _close(self) -> None:
        self.receiver = None
        over, self.closing = self.closing or self._ended, True
        if over or self._inward is None:  # not opened yet
            return
        # nothing is sent before the peer's handshake has come
        self._inward.discarding = self._filter.shaken
        if self._there or (self._line is not None and self._unsent):
            self._loop.call_later(LINGER_MS / 1000, self.finish)
            if self._there:
                self._hang_up()
        else:
            self.finish()

    def _hang_up(self) -> None:
        """Send what is left, and close ZeroMQ's end; the rest follows from that."""
        assert self._line is not None
        while self._unsent and self._line.send(self._unsent.popleft()):
            pass
        self._line.hang_up()
        if self._inward is not None:
            self._inward.release()

    def finish(self) -> None:
        """Free everything."""
        long_frames.end(self)
        _resting.discard(self)
        alive.remove(self)
        if self._inward is not None:
            self._inward.stop()
        if self._line is not None:
            self._line.stop()
        self._tcp.close()
        self._unsent.clear()

    def tick(self) -> None:
        """A second has passed."""
        if self.receiver is not None:
            self.receiver.tick()
        if long_frames.is_too_slow(self):
            self._end(RemoteProtocolError(f"the peer at {self.address} is too slow with a long frame: others wait."))


in_child(_resting.clear)
