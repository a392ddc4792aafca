"""The lives of a connection: each begins when its two ends have joined, and ends with its loss."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..agreement.endpoint import RemoteRegion
from ..errors import StateError

__all__ = ["UNBORN", "Life", "LifeOver"]


_NOTHING: Mapping[str, RemoteRegion] = MappingProxyType({})


class LifeOver(StateError):
    """What was to be posted is of a life that is over: it is of no use in the next."""


class Life:
    """One life of a connection: what was posted in it, and what its peer offered, is of no use in another.

    Changed under the engine's lock.

    Args:
        generation: which it is, from 1.
        offered: the named regions of its peer.

    Attributes:
        remote: the same, each of which knows that it is of this life.
        stands: whether its data path is proven, and it is not over.
        ended: in words, why it is over; "" while it is not.
    """

    __slots__ = ("ended", "generation", "remote", "stands")

    def __init__(self, generation: int, offered: Mapping[str, RemoteRegion]) -> None:
        self.generation, self.stands, self.ended = generation, False, ""
        self.remote: Mapping[str, RemoteRegion] = (
            {name: RemoteRegion(r.addr, r.rkey, r.length, self) for name, r in offered.items()} if offered else _NOTHING
        )

    def end(self, why: str) -> None:
        """It is over; what ended it first counts."""
        self.stands, self.ended = False, self.ended or why

    def check(self, region: RemoteRegion, doing: str) -> None:
        """Refuse memory that the peer of an earlier life named, unless it names the same in this one.

        Raises:
            LifeOver: says so.
        """
        life = region.life
        if life is None or not life.ended or any(_holds(one, region) for one in self.remote.values()):
            return
        raise LifeOver(
            f"{doing}: the region is of generation {life.generation} of the connection, this is {self.generation}: "
            "its key may open other memory by now. Take the region from `remote` anew."
        )


#: that of what has not been connected yet: nothing is posted in it
UNBORN = Life(0, _NOTHING)


def _holds(whole: RemoteRegion, part: RemoteRegion) -> bool:
    end, last = whole.addr + whole.length, part.addr + part.length
    return whole.rkey == part.rkey and whole.addr <= part.addr and last <= end
