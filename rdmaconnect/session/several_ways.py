"""Several pairs of ports at once between two ends without a side channel: both are to go on by the same one.

All are proven at the same time. The end that *leads* says its word, that the peer's probes have come, once it has the
peer's, and on one way alone: the best of those. The other end has no word on any other, and so takes that one. Nothing
else is to be agreed on, and it counts for nothing which of the two began first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import VerbsError
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure
from ..runtime.race import race
from .closing import close_ends
from .end import End
from .fallback import PATH_ERRNOS
from .probe import path_failed

__all__ = ["Leader", "best_of"]

#: a better one is waited for so long, once the peer's word has come by another, s
_BETTER_S = 0.5


class Leader:
    """The choice of the end that leads.

    Args:
        count: how many ways there are, the best first.
    """

    def __init__(self, count: int) -> None:
        self._left, self._open = set(range(count)), set[int]()
        self._patience: Deadline | None = None
        self._chosen: int | None = None

    def goes_by(self, place: int) -> bool:
        """Whether it goes on by a way that is proven but for its own word."""
        self._patience = self._patience or Deadline(_BETTER_S)
        self._open.add(place)
        best = min(self._open)
        if self._chosen is None and (best == min(self._left) or self._patience.left_s <= 0):
            self._chosen = best
        return self._chosen == place

    def lost(self, place: int) -> None:
        """Nothing comes of a way."""
        self._left.discard(place)
        self._open.discard(place)
        self._chosen = None if self._chosen == place else self._chosen


def best_of(ways: Sequence[Procedure[list[End]]], leader: Leader | None) -> Procedure[list[End]]:
    """Go by several at once, to the proof of one.

    Args:
        ways: the best first, each of which makes ends.
        leader: of the end that leads.

    Raises:
        RdmaConnectError: what the best way failed with, where all have; or what another one cannot help with.
    """
    if len(ways) == 1:
        return (yield from ways[0])
    failed: dict[int, BaseException] = {}

    def lost(place: int, error: BaseException) -> bool:
        failed[place] = error
        if leader is not None:
            leader.lost(place)
        return path_failed(error) or (isinstance(error, VerbsError) and error.errno in PATH_ERRNOS)

    place, made = yield from race(ways, lost, close_ends)
    better = tuple(f"given up: {failed.get(at, 'a pair of ports that was not proven in time')}" for at in range(place))
    for end in made if better else ():
        end.path = replace(end.path, why=(*better, *end.path.why))
    return made
