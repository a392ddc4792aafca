"""A pair of hosts: every way from here to there, each tried for real."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ..agreement.candidates import Candidate
from ..agreement.endpoint import MTU_BYTES
from ..agreement.options import Options
from ..errors import ConnectTimeout, PeerRejected, RdmaConnectError, RemoteProtocolError
from ..exchange.url import addresses, host_of, port_of, tcp_url
from ..objects.netlink import neighbour, route
from ..protocol.handshake import Role
from ..protocol.messages import Answer, Question
from ..runtime.deadline import Deadline, wait_readable
from ..runtime.procedure import run_apart
from ..session.closing import close_ends
from ..session.connect import try_candidate
from ..session.connection import Connection
from ..session.fallback import Fallback
from ..session.outgoing import Outgoing
from ..session.ports import rank_ports
from ..session.terms import Terms, make_terms
from ..session.trace import Trace
from .causes import Ground, explain
from .finding import Finding, Verdict
from .matrix import Attempt, Matrix, ends, order
from .remedies import remedy
from .service import narrowed

__all__ = ["Visit", "visit"]

#: seconds that one pair may take
EACH_S = 20.0
_NO_DOCTOR = "ask for the ports there: what listens is rdmaconnect, but not `rdmaconnect doctor --serve`."
#: RDMA reads that are timed, of which the quickest counts
READS = 5


@dataclass(frozen=True, slots=True)
class Visit:
    """What a visit to another host came to.

    Args:
        url: where it listens.
        findings: of the exchange, and what the other host says of itself.
        here: what is wrong with this host, so that the other was not asked.
        matrix: the pairs; None if the other host did not tell its ports.
    """

    url: str
    findings: tuple[Finding, ...] = ()
    matrix: Matrix | None = None
    here: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a connection can be made."""
        return self.matrix is not None and self.matrix.chosen is not None


def visit(
    peer: str,
    options: Options,
    deadline_s: float | None,
    tell: Callable[[Attempt], None] | None = None,
    *,
    key: str | None = None,
    peer_key: str | None = None,
) -> Visit:
    """Try every way to a host on which ``rdmaconnect doctor --serve`` runs.

    Args:
        peer: as for ``connect``.
        options: ``device``, ``port_num`` and ``gid_index`` narrow what is tried here.
        deadline_s: seconds for all of it; ways for which no time is left are given as untried.
        tell: called after each attempt.
        key, peer_key: as for ``connect``.

    Returns:
        The findings and the matrix; nothing is raised for what is wrong with a host or a network.

    Raises:
        ValueError: ``peer`` cannot be meant, or no keys are in the files.
    """
    deadline = Deadline(deadline_s, ConnectTimeout)
    trace = Trace(Role.CONNECTOR, deadline)
    url = tcp_url(peer)
    terms = make_terms({"options": narrowed(options), "key": key, "peer_key": peer_key})
    try:
        where = addresses(host_of(url), port_of(url))
        asking = Outgoing(url, where, terms.keys)
        address = asking.address
        fallback = Fallback(rank_ports(terms.options, address), terms, trace)
        here = fallback.mine()
    except ValueError as e:
        return Visit(url, (Finding("name", Verdict.FAIL, str(e)),))
    except (RdmaConnectError, OSError) as e:
        return Visit(url, here=(Finding("ports", Verdict.FAIL, f"No port of this host can be used: {e}"),))
    try:
        answer = _ask(asking, deadline, trace)
        if asking.address != address:  # a name has several addresses, and another one answered
            fallback = Fallback(rank_ports(terms.options, asking.address), terms, trace)
            here = fallback.mine()
    except (RdmaConnectError, OSError) as e:
        return Visit(url, (_exchange_failed(url, e),))
    findings, there = _said(answer), answer.ports
    tried = []
    for way in order(here, there, asking.exchange):
        if deadline.left_s <= 0:
            tried.append(Attempt(way, tried=False))
            continue
        outgoing = Outgoing(url, where, terms.keys)
        tried.append(_attempt(outgoing, way, Fallback(fallback.ports, terms, trace), terms, deadline))
        if tell is not None:
            tell(tried[-1])
    matrix = Matrix(ends(here, [a.way.here for a in tried]), ends(there, [a.way.there for a in tried]), tuple(tried))
    return Visit(url, (*findings, _verdict(matrix)), matrix)


def _exchange_failed(url: str, error: RdmaConnectError | OSError) -> Finding:
    port = url.rpartition(":")[2]
    fix = remedy("serve", "open tcp", port=port) if isinstance(error, ConnectTimeout | RemoteProtocolError) else ""
    return Finding("exchange", Verdict.FAIL, str(error), fix)


def _ask(outgoing: Outgoing, deadline: Deadline, trace: Trace) -> Answer:
    """What the other host says of itself, and its ports.

    Raises:
        RdmaConnectError: it does not answer, or what answers is no doctor.
    """
    try:
        conversation = run_apart(outgoing.ask(Question, trace, Deadline(min(deadline.left_s, EACH_S), ConnectTimeout)))
    except PeerRejected as e:
        raise RemoteProtocolError(f"{_NO_DOCTOR} It says: {e.reason}") from None
    except ConnectTimeout as e:
        if outgoing.greeted:  # one of an earlier version says nothing to a question
            raise RemoteProtocolError(f"{_NO_DOCTOR} Or it is of an earlier version: {e}") from None
        raise
    finally:
        outgoing.close()
    answer = conversation.handshake.peer
    assert isinstance(answer, Answer)
    return answer


def _said(answer: Answer) -> list[Finding]:
    """What the other host said of itself, as findings; they are warnings here, the matrix judges."""
    found = [Finding("peer", Verdict.OK, f"rdmaconnect doctor at {answer.host}.")]
    return found + [
        Finding(
            "peer",
            Verdict.WARN,
            f"There: {remark.verdict} {remark.name}: {remark.words}",
            f"there: {remark.fix}" if remark.fix else "",
        )
        for remark in answer.remarks
    ]


def _verdict(matrix: Matrix) -> Finding:
    chosen, untried = matrix.chosen, sum(not attempt.tried for attempt in matrix.attempts)
    left = f" {untried} pairs were left untried: the deadline passed." if untried else ""
    if chosen is not None:
        words = f"{chosen.way} is what connect() uses; path MTU {chosen.path_mtu}.{left}"
        return Finding("pair", Verdict.OK, words)
    if not matrix.there:
        return Finding(
            "pair", Verdict.FAIL, "The other host has no port that can be used.", "there: rdmaconnect doctor"
        )
    if not matrix.attempts:
        words = "No GID here goes with one there: they differ in type (RoCE v1, v2), address family or scope."
        return Finding("pair", Verdict.FAIL, words, "give both hosts addresses of one family: ip addr add")
    more = "give it more time: --deadline" if untried else ""
    return Finding("pair", Verdict.FAIL, f"No pair of ports could be connected.{left}", more)


def _attempt(outgoing: Outgoing, way: Candidate, fallback: Fallback, terms: Terms, deadline: Deadline) -> Attempt:
    """Connect by one way, send the probe both ways, read once, close."""
    fallback.take(way)
    attempt = Attempt(way)
    try:
        mine = Deadline(min(deadline.left_s, EACH_S), ConnectTimeout)
        (end,) = run_apart(try_candidate(outgoing, terms, fallback, 1, mine, None), close_ends)
        with Connection(end) as connection:
            mtu = MTU_BYTES[connection.path.path_mtu]
            attempt = replace(attempt, path_mtu=mtu, latency_us=_latency(connection, mine.left_s))
    except (RdmaConnectError, OSError) as e:
        ground, words = _ground(way)
        cause, fix = explain(way, e, ground, port_of(outgoing.url))
        return replace(attempt, error=str(e), cause=cause, fix=fix, route=words, neighbour=ground.neighbour)
    finally:
        outgoing.close()
    ground, words = _ground(way)
    return replace(attempt, route=words, neighbour=ground.neighbour)


def _latency(connection: Connection, left_s: float) -> float | None:
    """The quickest of some RDMA reads, in microseconds; None where the devices have none."""
    region = connection.remote.get("doctor")
    if region is None or not connection.path.max_rd_atomic:
        return None
    into, times = bytearray(region.length), []
    for _ in range(READS):
        clock = Deadline(None)
        connection.read_into(into, region, deadline_s=left_s)
        times.append(clock.waited_s * 1e6)
    return round(min(times), 1)


def _ground(way: Candidate) -> tuple[Ground, str]:
    """Route and neighbour between the GIDs of a way, as they are after the attempt."""
    if not (way.here.gids and way.there.gids):
        return Ground(), ""
    mine, theirs = way.here.gids[0], way.there.gids[0]
    found = route(mine.gid.address, theirs.gid.address, mine.netdev)
    if found is None or found.errno:
        return Ground(found), found.words if found else ""
    hop = theirs.gid.address
    if found.gateway:
        with suppress(ValueError):
            hop = type(hop)(found.gateway)
    state = neighbour(hop, found.netdev or mine.netdev)
    if state == "INCOMPLETE":  # still being asked
        wait_readable((), Deadline(0.2))
        state = neighbour(hop, found.netdev or mine.netdev)
    return Ground(found, state), found.words
