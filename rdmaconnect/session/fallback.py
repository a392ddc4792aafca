"""Which pair of ports and GIDs a connector tries, and which one next."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from typing import Any

from ..agreement.candidates import Candidate, candidates, common_pkey
from ..agreement.endpoint import PortAddress
from ..agreement.path import Path, used_ports
from ..errors import DeviceError, ModifyError, PeerMismatch, PeerRejected, RdmaConnectError, VerbsError
from ..objects.context import Port, open_device
from ..protocol.messages import Target
from ..runtime.deadline import Deadline
from .prepared import Prepared
from .terms import Terms
from .trace import Trace

__all__ = ["Fallback", "say_more"]

#: errors of a step to RTR that another pair of GIDs or ports may not have
PATH_ERRNOS = {
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODATA, errno.ENODEV, errno.EINVAL, errno.ENXIO,
}  # fmt: skip


class Fallback:
    """Which way is tried now, and which others there are."""

    def __init__(self, ports: Sequence[Port], terms: Terms, trace: Trace) -> None:
        self.ports, self.terms, self.trace = ports, terms, trace
        self.port, self.target = ports[0], None  # type: Port, Target | None
        self.gid: bytes | None = None
        self.theirs: Sequence[PortAddress] = ()
        self.used: Candidate | None = None
        #: both ports and the path between them, once that is agreed on
        self.joined: tuple[PortAddress, PortAddress, Path] | None = None
        self._tried: set[tuple[Any, ...]] = set()
        self._failures: list[str] = []

    def prepare(self, count: int) -> Prepared:
        context = open_device(self.port.device)
        return Prepared(context, self.port, self.terms.qp_type, self.terms.options, self.terms.regions, count, self.gid)

    def failed(self, error: RdmaConnectError, deadline: Deadline) -> None:
        """Choose the next way, or raise the error."""
        left = self._left(error) if self._may_help(error) else []
        if not left or deadline.left_s <= 0:
            before = [words for words in dict.fromkeys(self._failures) if words != str(error)]
            if before:
                say_more(error, f"Tried before: {' '.join(before)}")
            raise error
        way = left[0]
        self._failures.append(str(error))
        self.take(way)
        self.trace.mark("again", "%s, after %s", way, str(error))

    def take(self, way: Candidate) -> None:
        """Try this way now, and tell the listener so."""
        self._tried.add(_key(way))
        self.port = next(p for p in self.ports if (p.device, p.port_num) == (way.here.device, way.here.port_num))
        gids = [port.gids[0].gid.raw if port.gids else None for port in (way.here, way.there)]
        self.gid, self.used, self.joined = gids[0], way, None
        self.target = Target(way.there.device, way.there.port_num, gids[0], gids[1])

    def _left(self, error: RdmaConnectError) -> list[Candidate]:
        """The ways that were not tried yet, the best first."""
        theirs = [p for p in getattr(error, "ports", ()) if isinstance(p, PortAddress)] or self.theirs
        mine = self.mine()
        if self.joined is not None:
            self.used = Candidate(*used_ports(*self.joined))
        if self.used is None:  # rejected without a reply: a listener with a free choice takes its first port's best
            self.used = next(iter(candidates(mine[:1], theirs[:1])), None)
        if self.used is not None:
            self._tried.add(_key(self.used))
        pkey = self.terms.options.pkey
        return [
            way
            for way in candidates(mine, theirs)
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

    @staticmethod
    def _may_help(error: RdmaConnectError) -> bool:
        """Whether another pair of ports or GIDs may do what this one did not."""
        if isinstance(error, PeerRejected):
            return bool(error.ports) and error.errno in (0, *PATH_ERRNOS)
        return isinstance(error, PeerMismatch) or (
            isinstance(error, ModifyError | VerbsError) and error.errno in PATH_ERRNOS
        )

    def why(self) -> tuple[str, ...]:
        """In words, what was tried before."""
        return tuple(f"rejected: {words}" for words in self._failures)


def say_more(error: RdmaConnectError, words: str) -> None:
    """Add a sentence to an error's message."""
    text = f"{error} {words}"
    if isinstance(error, OSError):
        error.args, error.strerror = (error.errno, text), text
    else:
        error.args = (text,)


def _key(way: Candidate) -> tuple[Any, ...]:
    return tuple((p.device, p.port_num, p.gids[0].gid.raw if p.gids else None) for p in (way.here, way.there))
