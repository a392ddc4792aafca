"""What threads, forgetful programs and a device that goes away do to the objects of a real device.

``RDMACONNECT_STRESS_S`` says for how many seconds the first test goes on.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import warnings
from typing import Any

import pytest
import stress
from nodes import NETNS, PATIENCE, Node, connected, enter, ours
from threads import running

from rdmaconnect import CompletionError
from rdmaconnect.abi import MwType, QpType
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.objects import context as device
from rdmaconnect.objects import owned as handle
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import MR, PD
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.srq import SRQ

SIZES = {"max_send_wr": 8, "max_recv_wr": 8}


def test_threads_that_do_everything_at_random_leave_nothing(node1: Node) -> None:
    before, open_before = sorted(ours()), set(os.listdir("/proc/self/fd"))
    pool = stress.Pool(node1.device, (lambda: enter("n1")) if NETNS else (lambda: None))
    pool.run(stress.SECONDS, stress.THREADS, seed=1)
    print(f"{stress.SECONDS} s: done {dict(pool.done)}, refused {dict(pool.refused)}")
    assert handle._kept == {}
    assert device._opened == {}
    assert sorted(ours()) == before
    assert set(os.listdir("/proc/self/fd")) <= open_before


def test_two_threads_close_each_of_many_regions_at_once(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        regions = [MR(pd, bytearray(64)) for _ in range(500)]
        step = threading.Barrier(2)

        def close_all() -> None:
            for mr in regions:
                step.wait(PATIENCE)
                mr.close()

        with running(close_all, close_all):
            pass
        assert all(mr.closed for mr in regions)


def test_parents_and_children_are_closed_at_once(node1: Node) -> None:
    for _ in range(30):
        context = open_device(node1.device)
        pd, channel = PD(context), CompChannel(context)
        cq = CQ(context, 8, channel)
        things = [context, pd, channel, cq, MR(pd, bytearray(64)), QueuePair(pd, cq, cq, QpType.RC, **SIZES)]
        with running(*(thing.close for thing in things)):
            pass
        assert all(thing.closed for thing in things)


def test_the_peer_does_not_write_to_what_is_in_the_place_of_a_forgotten_region(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        forgotten = [there.register(bytearray(1 << 16))]
        there.send(forgotten[0].region.to_bytes())
        region = RemoteRegion.from_bytes(here.recv(deadline_s=PATIENCE))
        here.write(b"while it is there", region, deadline_s=PATIENCE)
        with pytest.warns(ResourceWarning, match="MR of 65536 bytes was never closed"):
            forgotten.clear()
        gc.collect()
        others = [bytearray(1 << 16) for _ in range(16)]
        with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):
            here.write(b"x" * 100, region, deadline_s=PATIENCE)
        assert not any(any(other) for other in others)


def test_a_whole_device_that_was_forgotten_is_given_back(node1: Node) -> None:
    before = sorted(ours())

    def make() -> None:
        context = open_device(node1.device)
        pd, channel = PD(context), CompChannel(context)
        cq = CQ(context, 8, channel)
        made: list[Any] = [
            QueuePair(pd, cq, cq, QpType.UD, **SIZES), SRQ(pd, 4), MW(pd, MwType.TYPE_1), MR(pd, mmap.mmap(-1, 4096)),
        ]  # fmt: skip
        made.append(made)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        make()
        gc.collect()
    assert sorted(ours()) == before
    assert device._opened == {}
