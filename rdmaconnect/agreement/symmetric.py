"""What two ends agree on that are alike: both know all of both, and each works it out by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import PeerMismatch
from .candidates import candidates
from .endpoint import Endpoint, PortAddress
from .path import Agreement, Wish, agree

__all__ = ["agree_on_ways", "seen_from_the_other"]


def agree_on_ways(
    connector: Sequence[Endpoint], listener: Sequence[Endpoint], wish: Wish, own: Wish, others: Sequence[str] = ()
) -> list[tuple[int, int, Agreement]]:
    """Pairs of ports, the best first and each port in one at most, and what both ends do on each.

    Args:
        connector: a queue pair on each port of the one end.
        listener: the same of the other; which of them is which both have to know.
        wish: the connector's wishes.
        own: the listener's.
        others: differences that were found besides, in words.

    Returns:
        At least one, as the places in ``connector`` and ``listener``, and the agreement: the same whichever side works
        it out.

    Raises:
        PeerMismatch: with all differences of all pairs at once.
    """
    here, there = ([end.port for end in ends] for ends in (connector, listener))
    found: list[tuple[int, int, Agreement]] = []
    for way in () if others else candidates(here, there):
        mine, theirs = (_place(of, ports) for of, ports in ((way.here, here), (way.there, there)))
        if any(mine == taken or theirs == held for taken, held, _ in found):
            continue
        with suppress(PeerMismatch):
            agreement = agree(connector[mine].at(way.here), listener[theirs].at(way.there), wish, own=own)
            found.append((mine, theirs, agreement))
    if found:
        return found
    differences = dict.fromkeys(others)
    for one in connector:
        for other in listener:
            try:
                agree(one, other, wish, own=own)
            except PeerMismatch as e:
                differences |= dict.fromkeys(e.differences)
    raise PeerMismatch(list(differences), ())


def _place(narrowed: PortAddress, ports: Sequence[PortAddress]) -> int:
    """Which port a candidate is of."""
    name = narrowed.device, narrowed.port_num
    return next(at for at, port in enumerate(ports) if (port.device, port.port_num) == name)


def seen_from_the_other(agreement: Agreement) -> Agreement:
    """The same agreement with the two ends in each other's place."""
    return replace(agreement, connector_gid=agreement.listener_gid, listener_gid=agreement.connector_gid)
