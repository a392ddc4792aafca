"""Atomics on the peer's memory, and the objects that a connection stands on."""

from __future__ import annotations

import asyncio
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from software import Device, Software, connected

import rdmaconnect
from rdmaconnect.abi import AccessFlags, QpState, WcStatus
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import CompletionError, StateError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import Context
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair

LARGEST = 2**64 - 1


def number(memory: bytearray, offset: int = 0) -> int:
    return int.from_bytes(memory[offset : offset + 8], sys.byteorder)


def test_atomics_give_what_was_there_before(software: Software) -> None:
    memory = bytearray(64)
    struct.pack_into("=Q", memory, 8, 40)
    with connected(listen={"regions": {"m": memory}}) as (here, _):
        assert here.fetch_add("m", 2, offset=8) == 40
        assert number(memory, 8) == 42
        assert here.compare_swap("m", 41, 7, offset=8) == 42  # not as expected: it stays
        assert number(memory, 8) == 42
        assert here.compare_swap("m", 42, LARGEST, offset=8) == 42
        assert here.fetch_add("m", 1, offset=8) == LARGEST  # and round it goes
        assert here.fetch_add("m", -1, offset=8) == 0
        assert number(memory, 8) == LARGEST
        assert number(memory) == number(memory, 16) == 0


def test_counters_lose_nothing_and_the_places_of_results_are_used_anew(software: Software) -> None:
    memory = bytearray(8)
    with connected(listen={"regions": {"m": memory}}, send_depth=4) as (here, _), ThreadPoolExecutor(4) as threads:
        came = list(threads.map(lambda _: here.fetch_add("m", 1, deadline_s=20), range(800)))
        assert sorted(came) == list(range(800))
        assert number(memory) == 800
        assert software.made["mr"] <= 8


def test_the_same_for_asyncio(software: Software) -> None:
    memory = bytearray(8)

    async def main() -> tuple[int, int]:
        async with await rdmaconnect.alisten("127.0.0.1:0", regions={"m": memory}) as listener:
            accepting = asyncio.create_task(listener.accept())
            async with await rdmaconnect.aconnect(listener.url) as conn, await accepting:
                assert conn.qp.qp_num == conn.local.qp_num
                return await conn.fetch_add("m", 5), await conn.compare_swap("m", 5, 6)

    assert asyncio.run(main()) == (0, 5)
    assert number(memory) == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda conn: conn.fetch_add("m", 1, offset=4), "no multiple of 8"),
        (lambda conn: conn.fetch_add("m", 1, offset=16), "16"),
        (lambda conn: conn.fetch_add("m", 2**64), "add is 18446744073709551616: give an integer"),
        (lambda conn: conn.fetch_add("m", 1.0), "add is 1.0"),
        (lambda conn: conn.compare_swap("m", -1, 0), "compare is -1"),
        (lambda conn: conn.compare_swap("m", 0, "0"), "swap is '0'"),
    ],
)
def test_what_cannot_be_meant_is_refused(software: Software, call: Any, words: str) -> None:
    memory = bytearray(16)
    with connected(listen={"regions": {"m": memory}}) as (here, _):
        with pytest.raises(ValueError, match=words):
            call(here)
        assert here.fetch_add("m", 1) == 0  # it is as good as before


@pytest.mark.parametrize("qp_type", ["UC", "UD"])
def test_other_types_have_none(software: Software, qp_type: str) -> None:
    with connected(qp_type) as (here, _), pytest.raises(StateError, match=f"atomics over {qp_type}.*RC"):
        here.fetch_add(RemoteRegion(0, 0, 8), 1)


def test_a_device_without_atomics_says_so() -> None:
    with Software([Device("soft0", limits={"atomic_cap": 0})]) as software:
        with connected() as (here, _), pytest.raises(StateError, match=r"soft0 has none \(atomic_cap\)"):
            here.compare_swap(RemoteRegion(0, 0, 8), 0, 1)
        assert software.problems() == []


def test_none_may_be_outstanding(software: Software) -> None:
    with connected(max_rd_atomic=0) as (here, _), pytest.raises(StateError, match="max_rd_atomic is 0"):
        here.fetch_add(RemoteRegion(0, 0, 8), 1)


def test_memory_that_is_not_open_for_them(software: Software) -> None:
    with connected() as (here, there):
        mr = there.register(bytearray(8), AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
        with pytest.raises(CompletionError, match="fetch and add to 8 bytes") as caught:
            here.fetch_add(mr.region, 1)
        assert caught.value.status == WcStatus.REM_ACCESS_ERR


# ---- what a connection stands on


def test_what_a_connection_stands_on_is_there_over_its_lives_and_goes_with_it(software: Software) -> None:
    with connected() as (here, there):
        objects = here.qp, here.cq, here.pd, here.context
        assert [type(one) for one in objects] == [QueuePair, CQ, PD, Context]
        assert here.qp.qp_num == here.local.qp_num == there.qp.query().dest_qp_num
        assert here.qp.state == QpState.RTS
        assert here.context.attr.max_qp > 0
        assert here.cq.cqe >= 32
        with here.pd.register(bytearray(16)) as mr:  # as good as the connection's own
            there.write(b"by hand", mr.region)
            here.send(mr)
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(there.reconnect, deadline_s=10)
            here.reconnect(deadline_s=10)
            again.result(10)
        assert (here.qp, here.cq, here.pd, here.context) == objects
        left = here.pd.register(bytearray(16))
    assert [one.closed for one in (*objects, left)] == [True] * 5
