"""The ping-pong on two nodes: every op over every type that has it, many connections, events, a duration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from nodes import PATIENCE, Node, connected

from rdmaconnect import Connection, PeerClosed
from rdmaconnect.abi import QpType
from rdmaconnect.pingpong import OPS, Echoed, PlanRefused, Report, echo, ping

More = Callable[[int], Sequence[Connection]]


@contextmanager
def served(node1: Node, node2: Node, count: int, **options: Any) -> Iterator[tuple[list[Connection], Connection, More]]:
    """So many connections: all at the one side, the first at the other, and how to get the rest there."""
    with ExitStack() as stack, node2.listening(**options) as listener:

        def accept() -> Connection:
            return stack.enter_context(node2.call(listener.accept, deadline_s=PATIENCE, tolerant=False))

        making = node1.connect_many(listener.url, count, **options)
        first = accept()
        here: Any = making.result(PATIENCE)
        for conn in here:
            stack.enter_context(conn)
        yield here, first, lambda number: [accept() for _ in range(number)]


def play(
    node1: Node, node2: Node, here: Any, there: Connection, more: More | None = None, **options: Any
) -> tuple[Report, Echoed]:
    serving = node2.start(echo, there, more=more, deadline_s=PATIENCE)
    report = node1.call(ping, here, deadline_s=PATIENCE, **options)
    return report, serving.result(PATIENCE)


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=str)
def test_each_op_over_each_type_that_has_it(node1: Node, node2: Node, qp_type: QpType) -> None:
    sizes = [1, 1000, 5000] if qp_type is not QpType.UD else [1, 1000]
    with connected(node1, node2, connect={"qp_type": qp_type}) as (here, there):
        for op in [name for name, what in OPS.items() if qp_type in what.qp_types]:
            report, served = play(node1, node2, here, there, op=op, sizes=sizes, iters=3)
            assert served == Echoed(op, tuple(sizes), 3 * len(sizes), 1)
            assert [(row.size, row.iters) for row in report.rows] == [(size, 3) for size in sizes]
            assert all(0 < row.min_us <= row.p50_us <= row.max_us for row in report.rows)
        if qp_type is not QpType.RC:
            with pytest.raises(ValueError, match="this type does not have it"):
                ping(here, op="read", sizes=[1])


@pytest.mark.parametrize("spin", [0, 500])
def test_many_connections_are_used_in_turn_with_events_and_without(node1: Node, node2: Node, spin: int) -> None:
    with served(node1, node2, 3, spin=spin) as (here, there, more):
        report, done = play(node1, node2, here, there, more, op="write_imm", sizes=[64], iters=7)
        assert (report.connections, done) == (3, Echoed("write_imm", (64,), 7, 3))
        assert len({conn.local.qp_num for conn in here}) == 3


def test_a_large_write_and_a_duration(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        report, _ = play(node1, node2, here, there, op="write", sizes=[2**21 + 1], iters=1)
        assert report.rows[0].mb_per_s > 0
        report, done = play(node1, node2, here, there, sizes=[64], duration_s=0.3)
        assert done.iters == report.rows[0].iters > 1
        assert report.rows[0].iters * report.rows[0].mean_us < PATIENCE * 1e6


def test_a_size_that_one_end_does_not_take_and_a_side_that_leaves(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        with pytest.raises(ValueError, match=r"these two ends take 0 to 65536 bytes .* \(-s\) too"):
            node1.call(ping, here, sizes=[65537])
        serving = node2.start(echo, there, deadline_s=PATIENCE)
        with pytest.raises(PlanRefused, match="2 connections are wanted, 1 are served here"):
            node1.call(ping, [here, here], sizes=[1], deadline_s=PATIENCE)
        with pytest.raises(PlanRefused):
            serving.result(PATIENCE)
        serving = node2.start(echo, there, deadline_s=PATIENCE)
        here.close()
        with pytest.raises(PeerClosed):
            serving.result(PATIENCE)
