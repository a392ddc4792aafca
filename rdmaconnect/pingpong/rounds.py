"""The two sides of a ping-pong: the one that decides and measures, and the one that serves."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..agreement.endpoint import MTU_BYTES, RemoteRegion
from ..errors import PeerClosed, RdmaConnectError
from ..session.connection import Connection
from .contents import Buffer, PayloadError, check_memory
from .flow import flow, take
from .plan import MAX_BATCH, OPS, Answer, Plan, PlanRefused
from .result import Rate, Report, Row, Samples, describe_end
from .turns import CALLERS, SERVERS, Turn

__all__ = ["Echoed", "echo", "most_size", "ping"]

#: round trips that are made even with the largest size
FEW = 10
#: seconds between two calls of ``tick``
_TICK_S = 0.1
#: seconds that one plan's round trips are to last where a duration is given
_BATCH_S = 0.5


def most_size(conn: Connection) -> int:
    """The longest message, in bytes, that can go there and come back."""
    return min(conn.local.recv_size, conn.max_send_size)


# ---- the side that decides


def ping(
    conn: Connection | Sequence[Connection],
    *,
    op: str = "send",
    sizes: Sequence[int] = (4096,),
    iters: int = 1000,
    most_bytes: int | None = None,
    duration_s: float | None = None,
    outstanding: int = 0,
    deadline_s: float | None = 30,
    tick: Callable[[float], None] | None = None,
) -> Report:
    """Send payloads there and back (or read them), check every byte, measure each round trip.

    What is measured of a round trip is what the program sees: from the call until it has all bytes back.
    Filling and checking the payload is not in it.

    Args:
        conn: connected to a peer that runs :func:`echo`; or all connections of one ``connect_many``,
            which are used in turn.
        op: ``"send"``; ``"write"``: RDMA writes, seen by polling memory; ``"write_imm"``: RDMA writes with
            immediate, seen by their completions; ``"read"``: RDMA reads, a round trip is one.
        sizes: bytes of the payload, one after the other: 1 byte (``send``: 0) to 1 GiB; for ``send`` at
            most the smaller ``recv_size`` of both ends.
        iters: round trips with each size, at least 1.
        most_bytes: fewer with large sizes: with each size so many bytes of payload one way at most, but
            at least ``FEW`` round trips.
        duration_s: instead, seconds with each size.
        outstanding: with 1 or more, throughput is measured in place of round trips: so many payloads are on their way
            at once on each connection, one way (``send``, ``write``, ``read``; over RC). All are alike: of messages
            each is checked, of writes and reads what is there at the end. No more than ``send_depth`` are of use.
        deadline_s: seconds for each step of a round trip.
        tick: called now and then with the share that is done, 0 to 1.

    Returns:
        What was measured.

    Raises:
        ValueError: what cannot be done over such connections, or a number out of range.
        PayloadError: a payload came back changed.
        PlanRefused: the peer will not; with its reason.
        DeviceError: not enough memory.
        RdmaConnectError: as ``send``, ``recv``, ``write`` and ``read``.
    """
    conns = list(conn) if isinstance(conn, Sequence) else [conn]
    first = conns[0]
    if iters < 1:
        raise ValueError(f"iters is {iters}: give 1 or more")
    for size in sizes:  # all of them before anything is said
        _plan(op, size, len(conns), outstanding, RemoteRegion(0, 0, max(size, 0))).check(
            first.local.qp_type, most_size(first)
        )
    found: list[Row | Rate] = []
    for index, size in enumerate(sizes):
        game = _Game(conns, op, size, outstanding, deadline_s)
        report = None if tick is None else lambda share, n=index: tick((n + share) / len(sizes))
        with game:
            found.append(game.play(_fewer(iters, size, most_bytes), duration_s, report))
    _say(first, Plan(end=True).pack(), deadline_s)
    return Report(
        qp_type=str(first.local.qp_type),
        op=op,
        connections=len(conns),
        rows=tuple(row for row in found if isinstance(row, Row)),
        connect_us=round(first.connect_s * 1e6, 1),
        local=describe_end(first.local, first.path.local_gid),
        remote=describe_end(first.peer, first.path.remote_gid),
        path_mtu=MTU_BYTES[first.path.path_mtu],
        why=list(first.path.why),
        outstanding=outstanding,
        rates=tuple(row for row in found if isinstance(row, Rate)),
    )


def _fewer(iters: int, size: int, most_bytes: int | None) -> int:
    return iters if most_bytes is None or not size else min(iters, max(FEW, most_bytes // size))


def _plan(op: str, size: int, connections: int, outstanding: int, region: RemoteRegion | None = None) -> Plan:
    region = region if op.startswith("write") and not outstanding else None
    return Plan(op, size, outstanding=outstanding, connections=connections, region=region)


def _say(conn: Connection, message: bytes, deadline_s: float | None) -> None:
    """Send from memory of its own: bytes would go through staging as large as four of the peer's receives."""
    with conn.register(bytearray(message)) as mr:
        conn.send(mr, deadline_s=deadline_s)


class _Game:
    """All round trips with one size, on the side that decides."""

    def __init__(
        self, conns: Sequence[Connection], op: str, size: int, outstanding: int, deadline_s: float | None
    ) -> None:
        self._conns, self._op, self._size, self._deadline_s = conns, op, size, deadline_s
        self._reads, self._outstanding, self._took_s = op == "read", outstanding, 0.0
        self._region: RemoteRegion | None = None
        self._samples = Samples()
        self._turns: list[Turn] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Game:
        one = self._reads or self._outstanding > 0
        buffers = 2 - one
        check_memory(buffers * self._size, f"{self._op} of {self._size} bytes")
        with self._stack as stack:
            self._back = stack.enter_context(Buffer(self._conns[0], self._size))
            self._out = self._back if one else stack.enter_context(Buffer(self._conns[0], self._size))
            self._back.blank()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def play(self, iters: int, duration_s: float | None, tick: Callable[[float], None] | None) -> Row | Rate:
        """So many round trips, or as many as there is time for."""
        started, done, batch = time.perf_counter(), 0, 1
        while True:
            if duration_s is None:
                batch = min(iters - done, MAX_BATCH)
                share = _shares(tick, done / iters, batch / iters)
            else:
                share = _shares(tick, min(1.0, (time.perf_counter() - started) / (duration_s or 1)), 0)
            self._ask(done, batch)
            took = (self._flow if self._outstanding else self._batch)(done, batch, share)
            done += batch
            left = iters - done if duration_s is None else duration_s - (time.perf_counter() - started)
            if left <= 0:
                if self._outstanding:
                    return Rate.of(self._size, done, self._took_s)
                return Row.of(self._size, self._samples, OPS[self._op].ways)
            if duration_s is not None:
                batch = max(1, min(MAX_BATCH, int(batch * min(left, _BATCH_S) / took)))

    def _ask(self, first: int, iters: int) -> None:
        """Say what comes, and hear whether the peer is ready for it."""
        conn, region = self._conns[0], self._back.mr.region if self._back.mr is not None else None
        plan = _plan(self._op, self._size, len(self._conns), self._outstanding, region)
        _say(conn, replace(plan, iters=iters, first=first).pack(), self._deadline_s)
        answer = Answer.unpack(conn.recv(deadline_s=self._deadline_s))
        if answer.no:
            raise PlanRefused(f"ping {self._size} bytes: the peer refuses: {answer.no}")
        self._region = answer.region
        if not (self._turns or self._outstanding):
            make = CALLERS[self._op]
            self._turns = [make(c, self._out, self._back, answer.region, self._deadline_s) for c in self._conns]

    def _batch(self, first: int, iters: int, share: Callable[[int, int], None] | None) -> float:
        """The round trips of one plan; the seconds that they took."""
        out, back, turns, reads, clock = self._out, self._back, self._turns, self._reads, time.perf_counter
        took, many = array("d"), len(turns)
        started = after = clock()
        due = after + _TICK_S
        try:
            for i in range(first, first + iters):
                if reads:
                    back.blank()
                else:
                    out.fill(i)
                turn = turns[i % many]
                before = clock()
                length = turn(i)
                after = clock()
                took.append((after - before) * 1e6)
                back.check(0 if reads else i, length)
                if share is not None and after > due:
                    share(i + 1 - first, iters)
                    due = after + _TICK_S
        finally:
            self._samples.extend(took)
        if share is not None:
            share(iters, iters)
        return clock() - started

    def _flow(self, first: int, iters: int, share: Callable[[int, int], None] | None) -> float:
        """The transfers of one plan, all one way; the seconds that they took."""
        conn, buffer, due = self._conns[0], self._back, 0.0

        def done(number: int) -> None:
            nonlocal due
            if share is not None and (now := time.perf_counter()) > due:
                share(number, iters)
                due = now + _TICK_S

        if self._reads:
            buffer.blank()
        else:
            buffer.fill(first)
        before = time.perf_counter()
        flow(self._conns, self._op, buffer, self._region, iters, self._outstanding, self._deadline_s, done)
        took = time.perf_counter() - before
        self._took_s += took
        if self._reads:
            buffer.check(0)
        if self._region is not None:
            _say(conn, Answer().pack(), self._deadline_s)  # all is there
        wrong = Answer.unpack(conn.recv(deadline_s=self._deadline_s)).no
        if wrong:
            raise PayloadError(f"the peer says: {wrong}")
        return took


def _shares(tick: Callable[[float], None] | None, before: float, more: float) -> Callable[[int, int], None] | None:
    """Tell ``tick`` of a batch's progress as a share of all."""
    if tick is None:
        return None
    report = tick
    return lambda done, of: report(before + more * done / of)


# ---- the side that serves


@dataclass(frozen=True)
class Echoed:
    """What was served.

    Args:
        op: what was done.
        sizes: bytes of the payloads, in order.
        iters: round trips in all.
        connections: how many were used.
    """

    op: str
    sizes: tuple[int, ...]
    iters: int
    connections: int


def echo(
    conn: Connection,
    *,
    more: Callable[[int], Sequence[Connection]] | None = None,
    deadline_s: float | None = 30,
) -> Echoed:
    """Take part in what the peer says that it wants, until it says that this was all.

    Args:
        conn: connected to a peer that runs :func:`ping`.
        more: gives so many of the connections that were made together with ``conn``; without it one is
            served.
        deadline_s: seconds for the first plan, and for each step of a round trip.

    Returns:
        What was done.

    Raises:
        RemoteProtocolError: what came does not say what will come.
        PlanRefused: the peer wants what cannot be; it is told so.
        PayloadError: a payload does not have the contents due.
        RdmaConnectError: as ``send``, ``recv`` and ``write``.
    """
    with _Service(conn, more, deadline_s) as service:
        while service.round():
            pass
        return service.echoed


class _Service:
    """The side that serves, from one plan to the next."""

    def __init__(
        self, conn: Connection, more: Callable[[int], Sequence[Connection]] | None, deadline_s: float | None
    ) -> None:
        self._conns, self._more, self._deadline_s = [conn], more, deadline_s
        self._key: tuple[object, ...] = ()
        self._buffer: Buffer | None = None
        self._turns: list[Turn] = []
        self.echoed = Echoed("", (), 0, 1)

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, *error: object) -> None:
        if self._buffer is not None:
            self._buffer.close()

    def round(self) -> bool:
        """Serve one plan; False if there is none any more."""
        plan = self._next()
        if plan is None:
            return False
        try:
            plan.check(self._conns[0].local.qp_type, most_size(self._conns[0]))
            self._prepare(plan)
        except (ValueError, RdmaConnectError, OSError) as e:
            _say(self._conns[0], Answer(no=str(e)).pack(), self._deadline_s)
            raise PlanRefused(f"echo: the peer wants what cannot be: {e}") from e
        mr = self._buffer.mr if self._buffer is not None else None
        region = mr.region if mr is not None and plan.op != "send" else None
        _say(self._conns[0], Answer(region).pack(), self._deadline_s)
        turns, many = self._turns, len(self._turns)
        if plan.outstanding:
            self._take(plan)
        elif turns:
            for i in range(plan.first, plan.first + plan.iters):
                turns[i % many](i)
        done = self.echoed
        sizes = done.sizes if done.sizes[-1:] == (plan.size,) else (*done.sizes, plan.size)
        self.echoed = Echoed(plan.op, sizes, done.iters + plan.iters, len(self._conns))
        return True

    def _take(self, plan: Plan) -> None:
        """What comes one way; the peer is told whether it was right."""
        conn, buffer = self._conns[0], self._buffer
        assert buffer is not None
        try:
            if plan.op == "send":
                take(self._conns, plan.size, plan.first, plan.iters, self._deadline_s)
            else:
                Answer.unpack(conn.recv(deadline_s=None))  # it takes its time
                if plan.op == "write":
                    buffer.check(plan.first)
        except PayloadError as e:
            _say(conn, Answer(no=str(e)).pack(), self._deadline_s)
            raise
        _say(conn, Answer().pack(), self._deadline_s)

    def _next(self) -> Plan | None:
        """The next plan. After the first its sender may take its time: it reads meanwhile, or checks."""
        conn, begun = self._conns[0], self.echoed.iters > 0
        try:
            plan = Plan.unpack(conn.recv(deadline_s=None if begun else self._deadline_s))
        except PeerClosed:
            if begun:
                return None  # over UC and UD its last word may be lost
            raise
        return None if plan.end else plan

    def _prepare(self, plan: Plan) -> None:
        """Memory for this plan, filled as the peer expects it; that of the plan before if it is alike."""
        missing = plan.connections - len(self._conns)
        if missing > 0 and self._more is not None:
            self._conns += self._more(missing)
        if plan.connections != len(self._conns):
            raise ValueError(f"{plan.connections} connections are wanted, {len(self._conns)} are served here")
        key = (plan.op, plan.size, plan.region, plan.outstanding)
        if key == self._key and plan.first:
            return
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        check_memory(plan.size, f"{plan.op} of {plan.size} bytes")
        self._buffer, self._key = Buffer(self._conns[0], plan.size), key
        if plan.op == "read":
            self._buffer.fill(0)
        else:
            self._buffer.blank()
        make = None if plan.outstanding else SERVERS[plan.op]
        region, deadline_s = plan.region, self._deadline_s
        self._turns = [make(c, self._buffer, region, deadline_s) for c in self._conns] if make is not None else []
