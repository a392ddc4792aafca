"""Which pair of ports and GIDs a connector tries, and which one next."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from typing import Any

from ..agreement.candidates import Addresses, Candidate, candidates, common_pkey
from ..agreement.endpoint import GidKey, PortAddress
from ..agreement.path import Path, used_ports
from ..errors import DeviceError, PeerMismatch, PeerRejected, RdmaConnectError, VerbsError, say_more
from ..objects.context import Port, open_device
from ..protocol.messages import Target
from ..runtime.deadline import Deadline
from .ports import LeftOut
from .prepared import Prepared
from .probe import path_failed
from .terms import Terms
from .trace import Trace

__all__ = ["Fallback"]

#: errors of a step to RTR that another pair of GIDs or ports may not have
PATH_ERRNOS = {
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODATA, errno.ENODEV, errno.EINVAL, errno.ENXIO,
}  # fmt: skip
#: seconds that each way has for its proof where there are others, at least and at most
LEAST_S, MOST_S = 1.0, 3.0


class Fallback:
    """Which way is tried now, and which others there are.

    Args:
        ports: of this host, the best first.
        terms: what the caller asked for.
        trace: the stages on the way.
        left_out: devices of this host that could not be looked at.

    Attributes:
        exchange: the addresses that the exchange goes over, once it does.
    """

    def __init__(self, ports: Sequence[Port], terms: Terms, trace: Trace, left_out: Sequence[LeftOut] = ()) -> None:
        self.ports, self.terms, self.trace, self._left_out = ports, terms, trace, left_out
        self.port, self.target = ports[0], None  # type: Port, Target | None
        self.gid: GidKey | None = None
        self.exchange: Addresses = ("", "")
        self.theirs: Sequence[PortAddress] = ()
        self.used: Candidate | None = None
        #: both ports and the path between them, once that is agreed on
        self.joined: tuple[PortAddress, PortAddress, Path] | None = None
        self._tried: set[tuple[Any, ...]] = set()
        self._failures: list[str] = []

    def prepare(self, count: int) -> Prepared:
        return Prepared.on(self.port, self.terms.qp_type, self.terms, count, self.gid)

    def failed(self, error: RdmaConnectError, deadline: Deadline) -> None:
        """Choose the next way, or raise the error."""
        may_help = self._may_help(error)
        left = self._left(getattr(error, "ports", None) or ()) if may_help else []
        if not left or deadline.left_s <= 0:
            before = [words for words in dict.fromkeys(self._failures) if words != str(error)]
            if before:
                say_more(error, f"Tried before: {' '.join(before)}")
            if may_help and self._left_out:
                say_more(error, f"Left out: {' '.join(map(str, self._left_out))}")
            raise error
        way = left[0]
        self._failures.append(str(error))
        self.take(way)
        self.trace.mark("again", "%s, after %s", way, str(error))

    def share_s(self, deadline: Deadline) -> float:
        """The seconds that the way tried now has for its proof: its part of the time that is left. Blocks."""
        others = len(self._left())
        return min(max(LEAST_S, deadline.left_s / (others + 1)), MOST_S) if others else deadline.left_s

    def take(self, way: Candidate) -> None:
        """Try this way now, and tell the listener so."""
        self._tried.add(_key(way))
        self.port = next(p for p in self.ports if (p.device, p.port_num) == (way.here.device, way.here.port_num))
        gids = [port.gids[0].key if port.gids else None for port in (way.here, way.there)]
        self.gid, self.used, self.joined = gids[0], way, None
        self.target = Target(way.there.device, way.there.port_num, gids[0], gids[1])

    def _left(self, told: Sequence[object] = ()) -> list[Candidate]:
        """The ways that were not tried yet, the best first; to the ports that a reject has told, if it has."""
        theirs = [p for p in told if isinstance(p, PortAddress)] or self.theirs
        mine = self.mine()
        if self.joined is not None:
            self.used = Candidate(*used_ports(*self.joined))
        if self.used is None:  # rejected without a reply: a listener with a free choice takes its first port's best
            self.used = next(iter(candidates(mine[:1], theirs[:1], self.exchange)), None)
        if self.used is not None:
            self._tried.add(_key(self.used))
        pkey = self.terms.options.pkey
        return [
            way
            for way in candidates(mine, theirs, self.exchange)
            if _key(way) not in self._tried and common_pkey(way.here, way.there, pkey) is not None
        ]

    def mine(self) -> list[PortAddress]:
        """What a peer would be before of this host's ports; those without an address are left out."""
        # a GID index that was asked for means one port's: nothing else is meant
        ports = self.ports if self.terms.options.gid_index is None else self.ports[:1]
        mine = []
        for port in ports:
            with contextlib.suppress(DeviceError), open_device(port.device) as context:
                mine.append(port.address(context.attr, self.terms.options))
        return mine

    def _may_help(self, error: RdmaConnectError) -> bool:
        """Whether another pair of ports or GIDs may do what this one did not."""
        if self.terms.own is not None and self.terms.own.spent:
            return False
        if isinstance(error, PeerRejected):
            return bool(error.ports) and error.errno in (0, *PATH_ERRNOS)
        if isinstance(error, VerbsError):
            return error.errno in PATH_ERRNOS
        if isinstance(error, PeerMismatch):
            return error.ports is None or bool(error.ports)
        return path_failed(error)

    def why(self) -> tuple[str, ...]:
        """In words, what was tried before, and what could not be."""
        before = (f"rejected: {words}" for words in self._failures)
        return (*before, *(f"left out: {words}" for words in self._left_out))


def _key(way: Candidate) -> tuple[Any, ...]:
    return tuple((p.device, p.port_num, p.gids[0].key if p.gids else None) for p in (way.here, way.there))
