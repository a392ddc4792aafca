"""Frames to and from one peer, read by the service thread whatever the application is at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from typing import Protocol

from ..errors import AuthenticationError, PeerClosed, RdmaConnectError, RemoteProtocolError, StateError, VerbsError
from ..runtime.fork import in_child
from . import link, service
from .budget import BYTES, Budget
from .curve import Keys
from .link import Link
from .relay import Pump, drain_and_close
from .zmtp import Fault, Filter, ZmtpError

__all__ = ["SILENT_S", "SMALL_FRAME", "TICK_S", "Channel", "Receiver", "open_channels"]

log = logging.getLogger("rdmaconnect")

#: seconds between two calls of :meth:`Receiver.tick`
TICK_S = 1.0
#: a peer that should be heard and is silent for so long is gone, seconds
SILENT_S = 15.0
#: bytes of the longest frame of a peer that has not asked for many queue pairs at once
SMALL_FRAME = 64 * 1024
#: peers that may be in the midst of a longer frame at the same time, and for how long while others wait, seconds
LONG_FRAMES, LONG_FRAME_S = 16, 2.0
#: of the time, this part may go to long frames: after each no other is begun for so many times what it has cost
_LONG_TIMES = 4.0
#: frames of one peer that are taken in one go, and the pause after that, seconds
_AT_ONCE, _PAUSE_S = 32, 0.01
#: seconds that ZeroMQ may take to connect to this process
_ARRIVAL_S = 5.0
#: seconds between a greeting that does not fit and the end
_PARTING_S = 0.1
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


#: channels that exist: of the service thread
_open: set[Channel] = set()
#: those in the midst of a long frame since when, and those that wait to be
_long: dict[Channel, float] = {}
_waiting: deque[Channel] = deque()
#: when the next long frame may begin, on the monotonic clock
_long_from = 0.0
_letting_in = False
#: those who have cost so much that they are not read for a while
_resting: set[Channel] = set()
_ticking = False


def open_channels() -> int:
    """How many channels this process has."""
    return len(_open)


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
        self.address = _peer_of(tcp)
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
        self._paused = self._closing = self._ended = False
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
        if self._closing:
            self._tcp.close()
            return
        _open.add(self)
        _keep_ticking()
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
        while self._unsent and not self._closing:
            self._send(self._unsent.popleft())
        if self._closing:
            self._hang_up()

    def _checked(self, data: bytes) -> bytes:
        """What of the peer's bytes may go on to ZeroMQ."""
        try:
            passed = self._filter.take(data)
        except ZmtpError as e:
            # this side's own greeting, which says how it is protected, is let out before
            self._verdict = _foreign(e, self._listens)
            self._loop.call_later(_PARTING_S, self._end, self._verdict)
            assert self._inward is not None
            self._inward.discarding = True
            passed = e.passed
        if self._closing and self._filter.shaken:
            assert self._inward is not None
            self._inward.discarding = True
        elif self._link is None and passed and not self._closing:
            self._join()
        self.heard = time.monotonic()
        if self._filter.unread > SMALL_FRAME + _OVERHEAD:
            self._long_frame()
        return passed

    def _long_frame(self) -> None:
        """The peer is in the midst of a long frame: only so many may be at the same time."""
        assert self._inward is not None
        if self in _long:
            return
        now = time.monotonic()
        if len(_long) < LONG_FRAMES and not _waiting and now >= _long_from:
            _long[self] = now
        else:
            self._inward.hold()
            if self not in _waiting:
                _waiting.append(self)
                _let_in_later()

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
        if seconds and not (self._paused or self._ended or self._closing):
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
        self._read_on()
        self._readable()

    def _read_on(self) -> None:
        """Read from the network again, if nothing else speaks against it."""
        if self._inward is not None and not (self._paused or self._ended or self in _waiting):
            self._inward.release()

    def _took(self, frame: bytes, user: str) -> None:
        self._filter.unread = self._filter.frames = 0
        self.user = self.user or user
        began = time.thread_time()
        if self.receiver is not None:
            self.receiver.took(frame)
        if len(frame) > SMALL_FRAME:
            self._took_long(time.thread_time() - began)
        _let_go(self)

    def _took_long(self, cost_s: float) -> None:
        """To read a long frame takes long, whatever is in it: so little of the time is left to them."""
        global _long_from
        _long_from = max(_long_from, time.monotonic()) + _LONG_TIMES * cost_s
        self._rest(_LONG_TIMES * cost_s * (len(_resting) + 1))

    def _send(self, frame: bytes) -> None:
        if self._ended or self._closing:
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
            self._finish()

    def _link_is_done(self, pump: Pump) -> None:
        """ZeroMQ has closed its end: it was told to, or the peer is gone, or broke its protocol."""
        if not self._closing:
            self._end(self._why())
        elif self._inward is None or self._inward.over:
            self._finish()

    def _why(self) -> RdmaConnectError:
        """Why no more will come."""
        if self._verdict is not None:
            return self._verdict
        if self._filter.refused:
            return AuthenticationError(f"the listener does not know the key of this side ({self._filter.refused}).")
        hung_up = self._inward is not None and not self._inward.over
        if hung_up and not self._filter.shaken:
            failed = f"the handshake with the peer at {self.address} failed"
            if self._keys is None:
                return PeerClosed(f"{failed}, or took too long: is it rdmaconnect there?")
            hint = "it has another key than this side expects, another secret, or a key that is not known here."
            return AuthenticationError(f"{failed}: {hint}")
        if hung_up:
            return RemoteProtocolError(
                f"the peer at {self.address} broke ZeroMQ's protocol, or sent more than {self.max_frame} bytes at once."
            )
        return PeerClosed(
            f"the peer at {self.address} is gone: it closed its side, its process ended, or the network to it broke."
        )

    def _end(self, error: RdmaConnectError) -> None:
        """Nothing more will come: give out what is there, and close."""
        if self._ended or self._closing:
            return
        for _ in range(4 * _AT_ONCE):
            taken = self._link.recv() if self._link is not None else None
            if taken is None or self._ended or self._closing:
                break
            self._took(*taken)
        if not (self._ended or self._closing):
            self._ended = True
            receiver, self.receiver = self.receiver, None
            self._finish()
            if receiver is not None:
                receiver.over(error)

    def _close(self) -> None:
        self.receiver = None
        if self._closing or self._ended:
            self._closing = True
            return
        self._closing = True
        if self._inward is None:
            return  # not opened yet
        # ZeroMQ sends nothing before the peer's handshake has come
        self._inward.discarding = self._filter.shaken
        if self._local is not None or (self._link is not None and self._unsent):
            self._loop.call_later(link.LINGER_MS / 1000, self._finish)
            if self._local is not None:
                self._hang_up()
        else:
            self._finish()

    def _hang_up(self) -> None:
        """Send what is left, and close ZeroMQ's end; the rest follows from that."""
        assert self._link is not None
        while self._unsent and self._link.send(self._unsent.popleft()):
            pass
        self._leave_link(link.LINGER_MS)
        if self._inward is not None:
            self._inward.release()

    def _finish(self) -> None:
        """Free everything."""
        _let_go(self)
        _resting.discard(self)
        _open.discard(self)
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

    def _tick(self) -> None:
        if self.receiver is not None:
            self.receiver.tick()
        since = _long.get(self)
        if since is not None and _waiting and time.monotonic() - since > LONG_FRAME_S:
            self._end(RemoteProtocolError(f"the peer at {self.address} is too slow with a long frame: others wait."))


def _let_go(channel: Channel) -> None:
    """Another may be in the midst of a long frame now."""
    if channel in _waiting:
        _waiting.remove(channel)
        channel._read_on()
    _long.pop(channel, None)
    _let_in_later()


def _let_in_later() -> None:
    global _letting_in
    if _waiting and not _letting_in:
        _letting_in = True
        service.loop().call_later(max(0.0, _long_from - time.monotonic()), _let_in)


def _let_in() -> None:
    """The next of those who wait may begin with a long frame, if there is room and time for it."""
    global _letting_in
    _letting_in = False
    while _waiting and len(_long) < LONG_FRAMES and time.monotonic() >= _long_from:
        following = _waiting.popleft()
        if following._inward is not None and not following._inward.over:
            _long[following] = time.monotonic()
            following._read_on()
    if len(_long) < LONG_FRAMES:
        _let_in_later()


def _keep_ticking() -> None:
    """One timer for all channels, while there are any."""
    global _ticking
    if not _ticking:
        _ticking = True
        service.loop().call_later(TICK_S, _tick)


def _tick() -> None:
    global _ticking
    _ticking = False
    if _open:
        _keep_ticking()
    for channel in tuple(_open):
        channel._tick()


def _peer_of(tcp: socket.socket) -> str:
    try:
        address = str(tcp.getpeername()[0])
    except OSError:  # it is gone already: reading will tell
        return ""
    return address.removeprefix("::ffff:") if "." in address else address


def _foreign(error: ZmtpError, listens: bool) -> RdmaConnectError:
    """What bytes that do not fit mean to this side."""
    here, there = ("listener", "connector") if listens else ("connector", "listener")
    both = "Give both sides the same secret, or keys."
    if error.fault is Fault.UNPROTECTED:
        return AuthenticationError(f"this {here}'s exchange is protected, the {there}'s is not. {both}")
    if error.fault is Fault.PROTECTED:
        return AuthenticationError(f"the {there}'s exchange is protected, this {here}'s is not. {both}")
    if error.fault in (Fault.TRAFFIC, Fault.LONG):
        return RemoteProtocolError(f"the {there} {error}: it was cut off.".replace("it sends", "sends"))
    verb = "calls" if listens else "listens"
    hint = f"Is it rdmaconnect that {verb}?"
    return RemoteProtocolError(f"what {verb} there does not speak this protocol: {error}. {hint}")


async def _flush() -> None:
    """What was said last goes out before the process ends; then ZeroMQ may go."""
    while any(channel._closing for channel in _open):
        await asyncio.sleep(0.005)


async def _last() -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_flush(), service.END_S / 2)
    for channel in tuple(_open):
        channel._finish()
    link.close_context()


service.at_end(_last)


def _forget() -> None:
    global _ticking, _letting_in
    _ticking = _letting_in = False
    _open.clear()
    _long.clear()
    _waiting.clear()
    _resting.clear()


in_child(_forget)
