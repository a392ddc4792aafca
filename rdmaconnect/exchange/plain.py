"""An exchange without protection: ZeroMQ's NULL mechanism needs no ZeroMQ.

The filter, which has to read every frame anyway, gives the messages; to frame others takes a few bytes. So there are
neither the local stream nor the steps between threads that :class:`~rdmaconnect.exchange.carried.Carried` has.

Source: RFC 23 and RFC 37 (ZMTP 3.0 and 3.1).
"""

from __future__ import annotations

from .relay import Outlet
from .zmtp import HANDSHAKE, Filter, framed, pong

__all__ = ["Plain"]


class Plain:
    """This side of one exchange. Any thread may :meth:`send`; all else is for the service thread.

    Args:
        filter_: what the peer sends goes through it.
        outlet: to the peer; the greeting goes out at once.
    """

    def __init__(self, filter_: Filter, outlet: Outlet) -> None:
        self._filter, self._outlet = filter_, outlet
        outlet.put(HANDSHAKE)

    @property
    def over(self) -> bool:
        """Whether all that was said has gone out after the end."""
        return self._outlet.over

    def send(self, frame: bytes) -> bool:
        """Send one frame; False if the peer has not taken those before it."""
        return self._outlet.put(framed(frame))

    def recv(self) -> tuple[bytes, str] | None:
        """The next frame, and nobody's key; None if there is none now."""
        return (self._filter.messages.popleft(), "") if self._filter.messages else None

    @property
    def waiting(self) -> bool:
        """Whether there is a frame to be read."""
        return bool(self._filter.messages)

    def answer_pings(self) -> int:
        """Say that this side is there to a peer that asks so; how often it did."""
        count = len(self._filter.pings)
        while self._filter.pings:
            self._outlet.put(pong(self._filter.pings.popleft()))
        return count

    def hang_up(self) -> None:
        """Send no more; what was sent still goes out."""
        self._outlet.finish()

    def stop(self) -> None:
        """Watch nothing any more; nothing is called after it."""
        self._outlet.stop()
