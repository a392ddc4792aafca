"""For how many a listener has room. Pure."""

from __future__ import annotations

from ..errors import StateError, shown

__all__ = ["AGAIN_MS", "FAILED_COST", "LARGE", "MAX_HALF_OPEN", "MAX_QPS", "SILENT_S", "Busy", "Room"]

#: connections that may be half open, or made and not yet accepted; and the queue pairs of all of them
MAX_HALF_OPEN, MAX_QPS = 1024, 16384
#: a hello for more queue pairs than this is a large one: such may take three quarters of the room, one at a time
LARGE = 64
#: a connector that finds no room may ask again after so many milliseconds
AGAIN_MS = 200
#: where there is no room left, one that was answered and says nothing for so long, seconds, loses its place
SILENT_S = 6.0
#: what a connection that came to nothing costs, in messages: how often a peer may ask for one is limited by that
FAILED_COST = 8.0


class Busy(StateError):
    """There is no room for a connector, or no longer: it is told so, and may ask again after :data:`AGAIN_MS`."""

    def __init__(self, words: str) -> None:
        super().__init__(f"busy: {words}")


class Room:
    """What there is room for.

    Args:
        max_half_open: connections that may be half open, or made and not yet accepted.
        max_qps: queue pairs of all of them.

    Raises:
        ValueError: less than 1, or no number.
    """

    def __init__(self, max_half_open: int, max_qps: int) -> None:
        for name, value in (("max_half_open", max_half_open), ("max_qps", max_qps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {shown(value)}: give a number of 1 or more")
        self._max_half_open, self._max_qps = max_half_open, max_qps

    def lacks(self, count: int, open_now: int, qps: int, *, scarce: bool) -> str:
        """In words, why there is no room for one more; "" if there is.

        Args:
            count: its queue pairs.
            open_now: connections that are half open, or made and not yet accepted.
            qps: queue pairs of those.
            scarce: whether there is hardly a descriptor left.
        """
        if open_now >= self._max_half_open:
            return f"{open_now} connections are half open or wait to be accepted, which is the most"
        if open_now and scarce:
            return "this process has hardly a descriptor left (`ulimit -n` tells its limit)"
        room = self._max_qps if count <= LARGE else self._max_qps * 3 // 4
        if qps and qps + count > room:
            return f"{qps} queue pairs are half open or wait to be accepted: there is no room for {count} more"
        return ""
