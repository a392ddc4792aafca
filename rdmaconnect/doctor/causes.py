"""Why a pair of ports could not be connected, and what mends it: from an error and what the kernel says. Pure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from ..agreement.candidates import Candidate
from ..agreement.unproven import unproven
from ..errors import CompletionError, ConnectTimeout, PeerMismatch, PeerRejected, RdmaConnectError
from ..objects.netlink import Route
from .remedies import remedy

__all__ = ["Ground", "explain"]


@dataclass(frozen=True, slots=True)
class Ground:
    """What lies between two GIDs as the kernel here sees it.

    Args:
        route: from the one to the other; None where it could not be asked, or where LIDs are used.
        neighbour: the state of the next hop, "" if there is none.
    """

    route: Route | None = None
    neighbour: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """A failed attempt, taken apart."""

    way: Candidate
    error: RdmaConnectError | OSError
    ground: Ground
    port: int

    @property
    def words(self) -> str:
        return str(self.error)

    @property
    def number(self) -> int:
        return getattr(self.error, "errno", None) or 0

    @property
    def there(self) -> bool:
        """Whether the other host refused."""
        return isinstance(self.error, PeerRejected)

    @property
    def at(self) -> str:
        return "there" if self.there else "here"

    @property
    def source(self) -> str:
        """The address that could not go on, and the one that it could not reach."""
        return _address(self.way, there=self.there)

    @property
    def target(self) -> str:
        return _address(self.way, there=not self.there)

    @property
    def netdev(self) -> str:
        port = self.way.there if self.there else self.way.here
        return (port.gids[0].netdev if port.gids else "") or "NETDEV"

    @property
    def step(self) -> bool:
        """Whether a step of ``ibv_modify_qp`` failed, on either host."""
        return "ibv_modify_qp" in self.words


def _address(way: Candidate, *, there: bool) -> str:
    port = way.there if there else way.here
    return str(port.gids[0].gid.address) if port.gids else f"LID {port.lid:#x}"


#: states of a neighbour that is there; and what keeps one network device from standing in for another
_ANSWERS = ("REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT")
_STAND_IN = "net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2"


def _unreached(case: _Case) -> tuple[str, str]:
    route, where = case.ground.route, f"{case.source} ({case.netdev}, {case.at})"
    get = f"ip route get {case.target} from {case.source} oif {case.netdev}"
    if not case.there and route is not None and route.errno:
        return f"There is no route from {where} to {case.target}.", f"{get}; use a pair in one subnet, or add a route"
    if not case.there and route is not None and route.gateway:
        words = f"{case.target} is behind {route.gateway}, which does not answer on {case.netdev}."
        return words, f"{get}; ping -I {case.netdev} {route.gateway}"
    if case.ground.neighbour in _ANSWERS:
        words = (
            f"{case.target} did not answer at {where} in time, though from here the other host is on that network "
            f"(neighbour {case.ground.neighbour}): its answer was late, or another network device stood in for it."
        )
        return words, f"try again; {remedy('arp', settings=_STAND_IN)}; ping -I {case.netdev} {case.target}"
    seen = f" (neighbour {case.ground.neighbour})" if case.ground.neighbour and not case.there else ""
    words = f"{case.target} does not answer at {where}{seen}: it is not on that network."
    return words, f"ping -I {case.netdev} {case.target}; use a pair in one subnet, or join the two networks"


def _no_route(case: _Case) -> tuple[str, str]:
    words = (
        f"There is no route from {case.source} ({case.netdev}, {case.at}) to {case.target}, or {case.netdev} is down."
    )
    return words, f"ip link set {case.netdev} up; ip route get {case.target} from {case.source} oif {case.netdev}"


def _stale(case: _Case) -> tuple[str, str]:
    words = f"The GID {case.source} {case.at} went away: its address was removed or changed meanwhile."
    return words, "run the doctor again; rdmaconnect devices shows the table as it is"


def _unlike(case: _Case) -> tuple[str, str]:
    words = f"The device refused the address pair {case.source} to {case.target} {case.at}: other family, MTU or port."
    return words, "choose GIDs of one family: gid_index="


def _nothing_passes(case: _Case) -> tuple[str, str]:
    gids = [port.gids[0] if port.gids else None for port in (case.way.here, case.way.there)]
    words = f"The connection stands, but no data passes. {unproven(*gids)}"
    return words, "on both hosts: " + remedy("firewall nft", "firewall iptables", port=case.port)


def _mtu(case: _Case) -> tuple[str, str]:
    words = "Small messages pass and large ones do not: the network between carries less than the path MTU."
    return words, f"connect(path_mtu=1024), or less; or {remedy('mtu', netdev=case.netdev)}"


def _memory(case: _Case) -> tuple[str, str]:
    words = f"Memory could not be registered {case.at}: the limit of locked memory is too low."
    return words, remedy("memlock shell", "memlock container", "memlock service")


def _files(case: _Case) -> tuple[str, str]:
    return f"No file descriptor is left {case.at}.", remedy("nofile", wanted=4096)


def _exchange(case: _Case) -> tuple[str, str]:
    return case.words, f"there: rdmaconnect doctor --serve; and let TCP port {case.port} in"


def _as_said(case: _Case) -> tuple[str, str]:
    return case.words, ""


def _of(*numbers: int) -> Callable[[_Case], bool]:
    return lambda case: case.number in numbers


#: the first that holds tells the cause
RULES: tuple[tuple[Callable[[_Case], bool], Callable[[_Case], tuple[str, str]]], ...] = (
    (lambda case: "carries less than path_mtu" in case.words, _mtu),
    (lambda case: isinstance(case.error, PeerMismatch), _as_said),
    (lambda case: case.step and case.number == errno.ETIMEDOUT, _unreached),
    (lambda case: case.step and case.number in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV), _no_route),
    (lambda case: case.step and case.number == errno.ENODATA, _stale),
    (lambda case: case.step and case.number == errno.EINVAL, _unlike),
    (lambda case: isinstance(case.error, CompletionError) or "4791" in case.words, _nothing_passes),
    (_of(errno.ENOMEM), _memory),
    (_of(errno.EMFILE, errno.ENFILE), _files),
    (lambda case: isinstance(case.error, ConnectTimeout), _exchange),
    (lambda case: True, _as_said),
)


def explain(way: Candidate, error: RdmaConnectError | OSError, ground: Ground, port: int) -> tuple[str, str]:
    """The cause of a failed attempt, and what mends it.

    Args:
        way: the two ports and GIDs.
        error: what came of the attempt.
        ground: what the kernel here says of the way.
        port: TCP port of the exchange.

    Returns:
        A sentence or two, and the commands, "" if none is known.
    """
    case = _Case(way, error, ground, port)
    return next(tell(case) for holds, tell in RULES if holds(case))
