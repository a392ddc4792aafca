"""An exchange without protection: ZeroMQ's NULL mechanism needs no ZeroMQ.

The filter, which has to read every frame anyway, gives the messages; to frame others takes a few bytes. So there are
neither the local stream nor the steps between threads that :class:`~rdmaconnect.exchange.carried.Carried` has.

Source: RFC 23 and RFC 37 (ZMTP 3.0 and 3.1).
"""

from __future__ import annotations

from .relay import Outlet
from .zmtp import HANDSHAKE, Filter, framed, pong

__all__ = ["LINGER_MS", "SEND_QUEUE", "Plain"]

#: frames of this side, which are short but for one, before the peer counts as one that does not read: a busy machine
#: may be a while behind
SEND_QUEUE = 64
#: what was sent goes out for so long after close, ms
LINGER_MS = 1000


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

    def answer_pings(self) -> bool:
        """Say that this side is there to a peer that asks so; False as for :meth:`send`."""
        pings = self._filter.pings
        while pings:
            if not self._outlet.put(pong(pings.popleft())):
                return False
        return True

    def hang_up(self) -> None:
        """Send no more; what was sent still goes out."""
        self._outlet.finish()

    def stop(self) -> None:
        """Watch nothing any more; nothing is called after it."""
        self._outlet.stop()
