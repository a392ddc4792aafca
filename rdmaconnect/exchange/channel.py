"""Frames to and from one peer, read by the service thread whatever the application is at."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from typing import Protocol

from ..errors import PeerClosed, RdmaConnectError, RemoteProtocolError, StateError, VerbsError
from ..runtime.fork import in_child
from . import alive, link, long_frames, service
from .budget import BYTES, Budget
from .curve import Keys
from .link import Link
from .relay import Pump, drain_and_close
from .tcp import peer_of
from .verdicts import foreign, why_over
from .zmtp import Filter, ZmtpError

__all__ = ["SMALL_FRAME", "Channel", "Receiver"]

log = logging.getLogger("rdmaconnect")

#: bytes of the longest frame of a peer that has not asked for many queue pairs at once
SMALL_FRAME = 64 * 1024
#: frames of one peer that are taken in one go, and the pause after that, seconds
_AT_ONCE, _PAUSE_S = 32, 0.01
#: seconds that ZeroMQ may take to connect to this process; and between a greeting that does not fit and the end
_ARRIVAL_S, _PARTING_S = 5.0, 0.1
#: what ZeroMQ and CURVE add to a frame, at most, bytes
_OVERHEAD = 64


class Receiver(Protocol):
    """Who is told what a peer says; every method is called in the service thread, and must not block."""

    def took(self, frame: bytes) -> None:
        """A frame has come."""

    def over(self, error: RdmaConnectError) -> None:
        """Nothing more will come, and why; called once, and not after :meth:`Channel.close`."""

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
        address: the peer's IP address.
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
        self.address = peer_of(tcp)
        self.receiver: Receiver | None = receiver
        self.user = ""
        self._pid = os.getpid()
        self._tcp, self._keys, self._listens, self._domain = tcp, keys, listens, domain
        self.max_frame, self.heard = max_frame, time.monotonic()
        self._filter = Filter(b"CURVE" if keys else b"NULL", listens, max_frame)
        self._link: Link | None = None
        self._local: socket.socket | None = None
        self._inward: Pump | None = None
        self._outward: Pump | None = None
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
        self._check_process()
        service.soon(self._send, frame)

    def close(self) -> None:
        """Close; what was sent still has a second to go out. The receiver is told nothing more. Twice is fine."""
        if self._pid == os.getpid():
            service.soon(self._close)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StateError("use an exchange of the process that forked this one: connect or listen anew here.")

    # ---- in the service thread

    def unread(self) -> bool:
        """Whether there are bytes of the peer that nobody has read yet. For the service thread."""
        try:
            return bool(self._tcp.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

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
        """Let ZeroMQ in: only now it costs more than one descriptor."""
        try:
            self._link = Link(self.max_frame, self._keys, self._listens, self._domain)
        except RdmaConnectError as e:
            self._end(e)
            return
        except OSError as e:
            self._end(VerbsError("zmq_socket", e.errno or 0, "open an exchange"))
            return
        assert self._link.ear is not None
        self._loop.add_reader(self._link.ear.fileno(), self._arrived)
        self._loop.add_reader(self._link.fd, self._readable)
        self._loop.call_later(_ARRIVAL_S, self._missed)

    def _missed(self) -> None:
        if self._local is None and self._link is not None:
            try:
                link.check_descriptors(2, "open an exchange")  # without one ZeroMQ gives up, and says nothing
            except VerbsError as e:
                self._end(e)
            else:
                self._end(StateError("open an exchange: ZeroMQ did not come to it within 5 s."))

    def _arrived(self) -> None:
        assert self._link is not None
        ear = self._link.ear
        assert ear is not None
        try:
            local = self._link.accept()
        except OSError as e:
            self._end(VerbsError("accept", e.errno or 0, "open an exchange"))
            return
        if local is None:
            return
        self._loop.remove_reader(ear.fileno())
        self._link.close_ear()
        self._local = local
        self._outward = Pump(self._loop, local, self._tcp, self._link_is_done, bytes)
        self._outward.start()
        if self._inward is not None:
            self._inward.attach(local)
        while self._unsent and not self.closing:
            self._send(self._unsent.popleft())
        if self.closing:
            self._hang_up()

    def _checked(self, data: bytes) -> bytes:
        """What of the peer's bytes may go on to ZeroMQ."""
        try:
            passed = self._filter.take(data)
        except ZmtpError as e:
            # this side's own greeting, which says how it is protected, is let out before
            self._verdict = foreign(e, self._listens)
            self._loop.call_later(_PARTING_S, self._end, self._verdict)
            assert self._inward is not None
            self._inward.discarding = True
            passed = e.passed
        if self.closing and self._filter.shaken:
            assert self._inward is not None
            self._inward.discarding = True
        elif self._link is None and passed and not self.closing:
            self._join()
        self.heard = time.monotonic()
        if self._filter.unread > SMALL_FRAME + _OVERHEAD and not long_frames.begin(self):
            assert self._inward is not None
            self._inward.hold()
        return passed

    def _readable(self) -> None:
        """Frames may have come."""
        if self._link is None or self._paused or self._ended:
            return
        for _ in range(_AT_ONCE):
            taken = self._link.recv()
            if taken is None:
                return
            self._took(*taken)
            if self._link is None or self._ended:
                return
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
        self._readable()

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

    def _send(self, frame: bytes) -> None:
        if self._ended or self.closing:
            return
        if self._local is None:
            self._unsent.append(frame)
            return
        assert self._link is not None
        if not self._link.send(frame):
            self._end(PeerClosed(f"the peer at {self.address} does not read what is sent to it."))
        elif self._link.waiting:
            self._readable()

    def _peer_is_done(self, pump: Pump) -> None:
        """The TCP connection ended, and ZeroMQ has been given all that came before."""
        if self._local is None:
            self._end(self._why())
        elif self._outward is not None and self._outward.over:
            self.finish()

    def _link_is_done(self, pump: Pump) -> None:
        """ZeroMQ has closed its end: it was told to, or the peer is gone, or broke its protocol."""
        if not self.closing:
            self._end(self._why())
        elif self._inward is None or self._inward.over:
            self.finish()

    def _why(self) -> RdmaConnectError:
        """Why no more will come."""
        hung_up = self._inward is not None and not self._inward.over
        found = why_over(self.address, self._filter, hung_up=hung_up, protected=self._keys is not None)
        return self._verdict or found

    def _end(self, error: RdmaConnectError) -> None:
        """Nothing more will come: give out what is there, and close."""
        if self._ended or self.closing:
            return
        for _ in range(4 * _AT_ONCE):
            taken = self._link.recv() if self._link is not None else None
            if taken is None or self._ended or self.closing:
                break
            self._took(*taken)
        if not (self._ended or self.closing):
            self._ended = True
            receiver, self.receiver = self.receiver, None
            self.finish()
            if receiver is not None:
                receiver.over(error)

    def _close(self) -> None:
        self.receiver = None
        if self.closing or self._ended:
            self.closing = True
            return
        self.closing = True
        if self._inward is None:
            return  # not opened yet
        # ZeroMQ sends nothing before the peer's handshake has come
        self._inward.discarding = self._filter.shaken
        if self._local is not None or (self._link is not None and self._unsent):
            self._loop.call_later(link.LINGER_MS / 1000, self.finish)
            if self._local is not None:
                self._hang_up()
        else:
            self.finish()

    def _hang_up(self) -> None:
        """Send what is left, and close ZeroMQ's end; the rest follows from that."""
        assert self._link is not None
        while self._unsent and self._link.send(self._unsent.popleft()):
            pass
        self._leave_link(link.LINGER_MS)
        if self._inward is not None:
            self._inward.release()

    def finish(self) -> None:
        """Free everything."""
        long_frames.end(self)
        _resting.discard(self)
        alive.remove(self)
        for pump in (self._inward, self._outward):
            if pump is not None:
                pump.stop()
        self._leave_link(0)
        self._tcp.close()
        local, self._local = self._local, None
        if local is not None:
            drain_and_close(self._loop, local)
        self._unsent.clear()

    def _leave_link(self, linger_ms: int) -> None:
        """Close ZeroMQ's end; its descriptors are watched no more, since their numbers may be others' soon."""
        ended, self._link = self._link, None
        if ended is not None:
            if ended.ear is not None:
                self._loop.remove_reader(ended.ear.fileno())
            self._loop.remove_reader(ended.fd)
            ended.close(linger_ms)

    def tick(self) -> None:
        """A second has passed."""
        if self.receiver is not None:
            self.receiver.tick()
        if long_frames.is_too_slow(self):
            self._end(RemoteProtocolError(f"the peer at {self.address} is too slow with a long frame: others wait."))


def _forget() -> None:
    _resting.clear()


in_child(_forget)
