"""What a pair of hosts came to: every port and GID here against every one there. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..agreement.candidates import Addresses, Candidate, candidates
from ..agreement.endpoint import PortAddress

__all__ = ["Attempt", "End", "Matrix", "ends", "order"]


@dataclass(frozen=True, slots=True)
class End:
    """One row or column: a port with one GID, or by its LID."""

    port: PortAddress

    @property
    def key(self) -> tuple[str, int, bytes | None]:
        """What tells it from others."""
        return self.port.device, self.port.port_num, self.port.gids[0].gid.raw if self.port.gids else None

    @property
    def words(self) -> str:
        """On one line."""
        if not self.port.gids:
            return f"{self.port} LID {self.port.lid:#x}"
        entry = self.port.gids[0]
        return f"{self.port} gid {entry.gid_index} {entry.gid} {entry.type_words} {entry.netdev}".rstrip()

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        entry = self.port.gids[0] if self.port.gids else None
        return {
            "device": self.port.device,
            "port_num": self.port.port_num,
            "lid": self.port.lid,
            "gid_index": entry.gid_index if entry else None,
            "gid": str(entry.gid) if entry else None,
            "type": entry.type_words if entry else None,
            "netdev": entry.netdev if entry else None,
        }


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one pair.

    Args:
        way: the two ports and GIDs.
        tried: whether there was time for it.
        path_mtu: bytes, if it was connected.
        latency_us: microseconds of an RDMA read, if it was connected and the device has reads.
        error: as ``connect`` would raise it, "" if it was connected.
        cause, fix: what that means, and what to do.
        route, neighbour: what the kernel here says of the way, in words.
    """

    way: Candidate
    tried: bool = True
    path_mtu: int = 0
    latency_us: float | None = None
    error: str = ""
    cause: str = ""
    fix: str = ""
    route: str = ""
    neighbour: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was connected, and data passed both ways."""
        return self.tried and not self.error

    @property
    def state(self) -> str:
        """``ok``, ``failed`` or ``untried``."""
        return "ok" if self.ok else "failed" if self.tried else "untried"

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("state", "path_mtu", "latency_us", "error", "cause", "fix", "route", "neighbour")
        ends = {"here": End(self.way.here).asdict(), "there": End(self.way.there).asdict()}
        return ends | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Matrix:
    """All pairs.

    Args:
        here, there: rows and columns.
        attempts: those pairs that can be thought of, in the order in which ``connect`` tries them.
    """

    here: tuple[End, ...]
    there: tuple[End, ...]
    attempts: tuple[Attempt, ...]

    @property
    def chosen(self) -> Attempt | None:
        """What ``connect`` comes to: the first that works."""
        return next((attempt for attempt in self.attempts if attempt.ok), None)

    def at(self, here: End, there: End) -> Attempt | None:
        """The attempt of a row and a column; None if the two can never go together."""
        for attempt in self.attempts:
            if (End(attempt.way.here).key, End(attempt.way.there).key) == (here.key, there.key):
                return attempt
        return None

    def asdicts(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [attempt.asdict() | {"chosen": attempt is self.chosen} for attempt in self.attempts]


def ends(ports: Sequence[PortAddress], ways: Sequence[PortAddress]) -> tuple[End, ...]:
    """Each port with each of its GIDs; and by its LID where a way uses that."""
    found = [End(port.only(entry)) for port in ports for entry in port.gids]
    keys = {end.key for end in found}
    by_lid = {End(port).key: End(port) for port in ways if End(port).key not in keys}
    return tuple(found + list(by_lid.values()))


def order(here: Sequence[PortAddress], there: Sequence[PortAddress], exchange: Addresses = ("", "")) -> list[Candidate]:
    """Every way, in the order in which ``connect`` tries them.

    Args:
        here, there: the ports of both hosts, those first that the routes lead to.
        exchange: the addresses that the exchange goes over.
    """
    first = candidates(here[:1], there[:1], exchange)[:1]
    return first + [way for way in candidates(here, there, exchange) if way not in first]
