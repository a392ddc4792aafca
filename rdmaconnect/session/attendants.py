"""Those who go by what is watched of this host: connections, which look for themselves what a change comes to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Protocol

from ..exchange import service
from ..objects.context import Port
from ..runtime.fork import in_child
from ..runtime.workers import Workers, here

__all__ = ["Attendant", "clear", "enter", "leave", "of", "tell"]

#: what a change comes to is looked for at once and again after so many seconds, s: tables are filled later
_LOOKS_S = (0.0, 0.05, 0.15, 0.4)


class Attendant(Protocol):
    """Whoever goes by a device and its addresses."""

    @property
    def device(self) -> str:
        """The device's name."""

    def changed(self, ports: dict[tuple[object, int], Port]) -> None:
        """Something has changed: look whether it concerns this. Called by a worker; it may block.

        Args:
            ports: what others have read just now, to be used and added to.
        """


#: network namespace -> its workers, and those who go by what is there, who are not kept
_attending: dict[int, tuple[Workers, set[weakref.ref[Attendant]]]] = {}
in_child(_attending.clear)


def enter(where: int, some: Sequence[Attendant]) -> Workers:
    """Some more; the workers of the calling thread's network namespace, ``where``."""
    workers, attendants = _attending.get(where) or _attending.setdefault(where, (here(), set()))
    attendants.update(map(weakref.ref, some, repeat(attendants.discard)))
    return workers


def leave(attendant: Attendant) -> None:
    """Tell it no more. Never blocks."""
    for _, attendants in list(_attending.values()):
        attendants.discard(weakref.ref(attendant))


def of(where: int) -> list[Attendant]:
    """All of a network namespace."""
    return _of(where)[1]


def _of(where: int) -> tuple[Workers | None, list[Attendant]]:
    """The same, and their workers. Others may come and go meanwhile: the references are copied in one step."""
    workers, attendants = _attending.get(where, (None, set[Any]()))
    return workers, [one for reference in attendants.copy() if (one := reference()) is not None]


def clear() -> None:
    """Tell nobody any more."""
    _attending.clear()


def tell(where: int, settled_s: float, watch: Callable[[], object]) -> None:
    """There is a change: have everybody look, now and until it has settled. In the service thread.

    Args:
        where: the network namespace.
        settled_s: seconds until then.
        watch: called by a worker before the last look, so that no later change is missed.
    """
    if of(where):
        for seconds in _LOOKS_S:
            service.loop().call_later(seconds, _look, where, None)
        service.loop().call_later(settled_s, _look, where, watch)


def _look(where: int, first: Callable[[], object] | None) -> None:
    workers, attendants = _of(where)

    def look() -> None:
        if first is not None:
            first()
        ports: dict[tuple[object, int], Port] = {}
        for attendant in attendants:
            attendant.changed(ports)

    if attendants and workers is not None:
        workers.submit(look)
