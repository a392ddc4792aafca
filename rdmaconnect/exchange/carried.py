"""An exchange that ZeroMQ's CURVE protects: bytes of the peer go to ZeroMQ over a local stream, and ZeroMQ's back."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from ..errors import RdmaConnectError, StateError, VerbsError
from . import link
from .link import Link
from .relay import Pump, drain_and_close

__all__ = ["Carried"]

#: seconds that ZeroMQ may take to connect to this process
_ARRIVAL_S = 5.0


class Owner(Protocol):
    """Who is told; in the service thread."""

    def came(self, local: socket.socket) -> None:
        """ZeroMQ has come: what is for it goes into that socket."""

    def readable(self) -> None:
        """Frames may have come."""

    def failed(self, error: RdmaConnectError) -> None:
        """It cannot be carried."""

    def hung_up(self) -> None:
        """ZeroMQ has closed its end: it was told to, or the peer is gone, or broke its protocol."""


class Carried:
    """ZeroMQ's end of one exchange, and the way to it. All its methods are for the service thread.

    Args:
        loop: the service thread's.
        tcp: to the peer.
        made: ZeroMQ's end.
        owner: is told what happens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tcp: socket.socket, made: Link, owner: Owner) -> None:
        self._loop, self._tcp, self._owner = loop, tcp, owner
        self._link: Link | None = made
        self._local: socket.socket | None = None
        self._outward: Pump | None = None
        assert made.ear is not None
        loop.add_reader(made.ear.fileno(), self._arrived)
        loop.add_reader(made.fd, owner.readable)
        loop.call_later(_ARRIVAL_S, self._missed)

    @property
    def over(self) -> bool:
        """Whether ZeroMQ has said its last, and all of it went on to the peer."""
        return self._outward is not None and self._outward.over

    def _missed(self) -> None:
        if self._local is None and self._link is not None:
            try:
                link.check_descriptors(2, "open an exchange")  # without one ZeroMQ gives up, and says nothing
            except VerbsError as e:
                self._owner.failed(e)
            else:
                self._owner.failed(StateError("open an exchange: ZeroMQ did not come to it within 5 s."))

    def _arrived(self) -> None:
        assert self._link is not None
        ear = self._link.ear
        assert ear is not None
        try:
            local = self._link.accept()
        except OSError as e:
            self._owner.failed(VerbsError("accept", e.errno or 0, "open an exchange"))
            return
        if local is None:
            return
        self._loop.remove_reader(ear.fileno())
        self._link.close_ear()
        self._local = local
        self._outward = Pump(self._loop, local, self._tcp, lambda _: self._owner.hung_up(), bytes)
        self._outward.start()
        self._owner.came(local)

    def send(self, frame: bytes) -> bool:
        """Send one frame; False if the peer has not taken those before it."""
        return self._link is None or self._link.send(frame)

    def recv(self) -> tuple[bytes, str] | None:
        """The next frame and its sender's public key; None if there is none now."""
        return None if self._link is None else self._link.recv()

    @property
    def waiting(self) -> bool:
        """Whether there is a frame to be read."""
        return self._link is not None and self._link.waiting

    def hang_up(self) -> None:
        """Send no more; what was sent has a while to go out."""
        self._leave(link.LINGER_MS)

    def stop(self) -> None:
        """Free everything; nothing is called after it."""
        if self._outward is not None:
            self._outward.stop()
        self._leave(0)
        local, self._local = self._local, None
        if local is not None:
            drain_and_close(self._loop, local)

    def _leave(self, linger_ms: int) -> None:
        """Close ZeroMQ's end; its descriptors are watched no more, since their numbers may be others' soon."""
        ended, self._link = self._link, None
        if ended is not None:
            if ended.ear is not None:
                self._loop.remove_reader(ended.ear.fileno())
            self._loop.remove_reader(ended.fd)
            ended.close(linger_ms)
