"""Ends of two hosts with two ports each: both go on by the same pair, whichever carries and whoever comes first."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from exchange_ends import PATIENCE_S, channels, until
from software import Device, Message, Network, Port, Software
from software.gid import raw_gid

import rdmaconnect
from rdmaconnect import BoundEnd, Connection
from rdmaconnect.abi import QpState
from rdmaconnect.errors import ConnectTimeout, RdmaConnectError, StateError

HERE, THERE = ("127.0.0.1", "127.0.1.1"), ("127.0.0.2", "127.0.1.2")
TYPES = ["RC", "UC", "UD"]
ROUNDS = 12
types = pytest.mark.parametrize("qp_type", TYPES)
#: who calls first, and how much later the other one
orders = pytest.mark.parametrize(("first", "delay_s"), [(0, 0.0), (0, 0.3), (1, 0.3)])


@pytest.fixture
def hosts() -> Iterator[Software]:
    devices = [Device(name, [Port([gid]) for gid in gids]) for name, gids in (("here", HERE), ("there", THERE))]
    with Software(devices) as software:
        yield software
        until(lambda: channels() == 0 and not software.left())
        assert software.problems() == []


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Pair:
    """An end on each host, that which leads first."""

    def __init__(self, threads: ThreadPoolExecutor, **options: Any) -> None:
        self._threads = threads
        ends = [rdmaconnect.bind(device=name, **options) for name in ("here", "there")]
        assert [len(end.ports) for end in ends] == [2, 2]
        self.ends = sorted(ends, key=lambda end: end._blob.id)

    def start(self, which: int, deadline_s: float = PATIENCE_S, call: Any = BoundEnd.connect) -> Future[Any]:
        return self._threads.submit(call, self.ends[which], self.ends[1 - which].to_bytes(), deadline_s=deadline_s)

    def outcomes(self, first: int = 0, delay_s: float = 0.0, **how: Any) -> list[Any]:
        """A connection or an error of each."""
        started = {first: self.start(first, **how)}
        time.sleep(delay_s)
        started[1 - first] = self.start(1 - first, **how)
        return [started[which].exception(PATIENCE_S * 2) or started[which].result() for which in (0, 1)]


def check(one: Connection, other: Connection, way: int) -> None:
    """Two ends of one connection, by that pair of ports."""
    for mine, theirs in ((one, other), (other, one)):
        assert mine.local.port.port_num == way + 1
        assert mine.path.dest_qp_num == theirs.local.qp_num
        for size in (0, 16, 32, 3000 if mine.local.qp_type.name != "UD" else 300):
            mine.send(b"x" * size)
            assert theirs.recv(deadline_s=5) == b"x" * size
    rdmaconnect.close_many([one, other])


Trouble = Callable[[Software], AbstractContextManager[object]]
TROUBLES: dict[str, Trouble] = {
    "nothing arrives": lambda hosts: hosts.network.cut(HERE[0], THERE[0]),
    "nothing arrives there": lambda hosts: hosts.network.cut(HERE[0], THERE[0], both=False),
    "nothing arrives here": lambda hosts: hosts.network.cut(THERE[0], HERE[0], both=False),
    "a small MTU": lambda hosts: hosts.network.lose(
        lambda message: message.length > 200 and message.sgid in (raw_gid(HERE[0]), raw_gid(THERE[0]))
    ),
}


@types
@orders
def test_the_best_pair_is_taken_where_all_carry(
    hosts: Software, threads: ThreadPoolExecutor, qp_type: str, first: int, delay_s: float
) -> None:
    pair = Pair(threads, qp_type=qp_type)
    assert hosts.alive["qp"] == 4
    one, other = pair.outcomes(first, delay_s)
    assert hosts.alive["qp"] == 2
    assert not any("given up" in why for why in (*one.path.why, *other.path.why))
    check(one, other, 0)


@types
@orders
@pytest.mark.parametrize("trouble", TROUBLES)
def test_another_pair_is_taken_where_the_best_does_not_carry(
    hosts: Software, threads: ThreadPoolExecutor, qp_type: str, first: int, delay_s: float, trouble: str
) -> None:
    pair = Pair(threads, qp_type=qp_type, timeout=8, retry_cnt=1)
    with TROUBLES[trouble](hosts):
        one, other = pair.outcomes(first, delay_s)
        assert hosts.alive["qp"] == 2
        for end in (one, other):
            assert end.path.why[0].startswith("given up: ")
        check(one, other, 1)


@types
def test_another_pair_is_taken_where_one_host_cannot_go_by_the_best(
    hosts: Software, threads: ThreadPoolExecutor, qp_type: str
) -> None:
    def is_best(call: Any) -> bool:
        return bool(call["qp"].context.device.name == "here" and call["attr"].ah_attr.port_num == 1)

    pair = Pair(threads, qp_type=qp_type)
    if qp_type == "UD":
        hosts.network.unreachable(THERE[0])
    else:
        hosts.on("ibv_modify_qp", to=QpState.RTR, where=is_best, fail=errno.ETIMEDOUT, delay=0.3)
    one, other = pair.outcomes()
    assert "ETIMEDOUT" in "".join(one.path.why + other.path.why)
    check(one, other, 1)


def test_a_host_that_takes_long_to_find_one_pair_does_not_hold_up_the_other(
    hosts: Software, threads: ThreadPoolExecutor
) -> None:
    hosts.network.unreachable(THERE[1], 3.0)
    start = time.monotonic()
    one, other = Pair(threads).outcomes()
    assert time.monotonic() - start < 2.9
    check(one, other, 0)


@types
def test_several_queue_pairs_go_by_one_pair(hosts: Software, threads: ThreadPoolExecutor, qp_type: str) -> None:
    pair = Pair(threads, qp_type=qp_type, count=3)
    with hosts.network.cut(HERE[0], THERE[0]):
        many = pair.outcomes(call=BoundEnd.connect_many)
    assert hosts.alive["qp"] == 6
    for one, other in zip(*many, strict=True):
        check(one, other, 1)


@types
def test_where_none_carries_the_best_one_is_told_of(hosts: Software, threads: ThreadPoolExecutor, qp_type: str) -> None:
    with hosts.network.lose(lambda message: True):
        errors = Pair(threads, qp_type=qp_type).outcomes(deadline_s=1.0)
    for error in errors:
        assert isinstance(error, ConnectTimeout)
        assert error.stage == "prove the data path"
        assert "127.0.0." in str(error)


def test_without_a_proof_the_best_pair_alone_is_used(hosts: Software, threads: ThreadPoolExecutor) -> None:
    seen: list[Message] = []
    with hosts.network.lose(lambda message: seen.append(message) is not None):
        one, other = Pair(threads, probe=False).outcomes()
        assert seen == []
    check(one, other, 0)


def test_what_no_other_pair_can_help_with_is_raised_at_once(hosts: Software, threads: ThreadPoolExecutor) -> None:
    hosts.on("ibv_modify_qp", to=QpState.RTR, fail=errno.EACCES, times=1)
    pair = Pair(threads)
    with pytest.raises(rdmaconnect.ModifyError, match="EACCES"):
        pair.start(0).result(PATIENCE_S)
    pair.ends[1].close()


def test_a_connect_that_is_cancelled_amid_it_leaves_nothing(hosts: Software) -> None:
    async def give_up(after_s: float) -> None:
        ends = [await rdmaconnect.abind(device=name) for name in ("here", "there")]
        async with ends[0], ends[1]:
            task = asyncio.create_task(ends[0].connect(ends[1].to_bytes()))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    for tenths in range(6):
        asyncio.run(give_up(0.01 + tenths / 20))


@types
def test_both_are_of_one_mind_over_a_network_that_loses(qp_type: str, threads: ThreadPoolExecutor) -> None:
    dice = random.Random(qp_type)
    devices = [Device(name, [Port([gid]) for gid in gids]) for name, gids in (("here", HERE), ("there", THERE))]
    made = 0
    with Software(devices, Network()) as software:
        for _ in range(ROUNDS):
            # one pair is good, and by the other some of the messages are lost
            bad = dice.randrange(2)
            gids, share = {raw_gid(HERE[bad]), raw_gid(THERE[bad])}, dice.random()
            pair = Pair(threads, qp_type=qp_type, timeout=6, retry_cnt=1)
            with software.network.lose(lambda m, gids=gids, share=share: m.sgid in gids and dice.random() < share):  # type: ignore[misc]
                outcomes = pair.outcomes(dice.randrange(2), dice.choice((0.0, 0.0, 0.1)), deadline_s=5.0)
            if all(isinstance(outcome, Connection) for outcome in outcomes):
                one, other = outcomes
                assert one.path.dest_qp_num == other.local.qp_num
                assert other.path.dest_qp_num == one.local.qp_num
                made += 1
                rdmaconnect.close_many(outcomes)
                continue
            for outcome in outcomes:  # the last word has no answer: it is told, and by neither in silence
                assert isinstance(outcome, RdmaConnectError | Connection)
                assert not isinstance(outcome, StateError)
                if isinstance(outcome, Connection):
                    outcome.close()
        until(lambda: channels() == 0 and not software.left())
        assert software.problems() == []
    print(f"{qp_type}: {made} of {ROUNDS} connected")
    assert made >= ROUNDS - 1
