"""Many hosts that call one listener at the same time."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
from nodes import NETNS, PATIENCE, Node

from rdmaconnect import Connection

HOSTS = 8
#: connectors on each host; the lab's own time is what limits it
EACH = int(os.environ.get("RDMACONNECT_LAB_CONNECTORS", "30"))


def _shell(script: str) -> None:
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def descriptors_enough() -> Iterator[None]:
    """Both ends of each connection are in this process, with about 11 descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def hosts(node1: Node) -> Iterator[list[Node]]:
    """Eight nodes: the first of the lab, and seven that are made for this test."""
    numbers = range(3, 2 + HOSTS)
    for i in numbers:
        _shell(f"""
            ip netns add n{i}; ip -n n{i} link set lo up
            ip link add h{i} type veth peer name e{i} netns n{i}; ip link set h{i} master br0 mtu 4200 up
            ip -n n{i} addr add 10.9.0.{i}/16 dev e{i}; ip -n n{i} link set e{i} mtu 4200 up
            ip netns exec n{i} rdma link add rxe{i} type rxe netdev e{i}
        """)
    made = [Node(i, threads=EACH) for i in numbers]
    try:
        for node in made:
            end = time.monotonic() + PATIENCE
            gid = Path(f"/sys/class/infiniband/{node.device}/ports/1/gids/1")
            while "ffff:0a09" not in gid.read_text():
                assert time.monotonic() < end, f"{node.device} has no address"
                time.sleep(0.1)
        yield [Node(1, threads=EACH), *made]
    finally:
        for i in numbers:
            _shell(f"ip netns exec n{i} rdma link delete rxe{i}; ip netns delete n{i}")


@pytest.mark.skipif(not NETNS, reason="a device in each network namespace carries data from kernel 7 on")
def test_eight_hosts_call_one_listener_at_once(descriptors_enough: None, hosts: list[Node], node2: Node) -> None:
    count = HOSTS * EACH
    sizes = {"recv_size": 4096, "recv_depth": 4, "send_depth": 4}
    with ExitStack() as stack:
        listener = stack.enter_context(node2.listening(**sizes))
        began = time.monotonic()
        calls: list[Future[Connection]] = [
            node.connect(listener.url, deadline_s=PATIENCE * 8, **sizes) for _ in range(EACH) for node in hosts
        ]
        theirs: list[Connection] = []
        for _ in range(count):  # all are answered in turn: the first is through when most are nearly so
            theirs.append(node2.start(listener.accept, deadline_s=PATIENCE * 8).result(PATIENCE * 9))
            stack.callback(theirs[-1].close)
            if len(theirs) == 1:
                print(f"the first after {time.monotonic() - began:.0f} s")
        mine = [call.result(PATIENCE * 2) for call in calls]
        for conn in mine:
            stack.callback(conn.close)
        print(f"{len(mine)} of {count} connected and {len(theirs)} accepted in {time.monotonic() - began:.0f} s")
        by_number = {(conn.peer.port.device, conn.peer.qp_num): conn for conn in theirs}
        assert len(by_number) == count
        for conn in mine:
            conn.send(conn.local.qp_num.to_bytes(4, "big"), deadline_s=PATIENCE)
            there = by_number[conn.local.port.device, conn.local.qp_num]
            assert there.recv(deadline_s=PATIENCE) == conn.local.qp_num.to_bytes(4, "big")
