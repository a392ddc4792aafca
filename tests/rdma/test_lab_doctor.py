"""The doctor on two nodes: a host, a pair that works, one with dead addresses, one behind a firewall."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from nodes import NETNS, PATIENCE, Node
from test_negotiate import ROCE, extra_address, lost

from rdmaconnect.cli import main

pytestmark = pytest.mark.skipif(not NETNS, reason="the rig's two devices are in one namespace")
PORT = "18650"


@pytest.fixture(scope="module")
def serving(node2: Node) -> Iterator[None]:
    """``rdmaconnect doctor --serve`` on node 2."""
    words = node2.command(sys.executable, "-m", "rdmaconnect", "doctor", "--serve", "-p", PORT)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        assert "listening on" in "".join(program.stderr.readline() for _ in range(2))
        try:
            yield
        finally:
            program.send_signal(signal.SIGINT)
            status = program.wait(PATIENCE)
            program.kill()
    assert status == 130


def _doctor(node: Node, *words: str) -> tuple[int, Any]:
    """Its exit status, and what it prints: lines, or an object."""
    shown = io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(shown):
            return main(["doctor", *words])

    status = node.call(run)
    text = shown.getvalue()
    return status, json.loads(text) if "--json" in words else text


def test_a_host(node1: Node) -> None:
    status, text = _doctor(node1)
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "rxe1 port 1: ACTIVE, Ethernet, MTU 4096." in flat
    assert "rxe1 port 1 with gid_index 1 (::ffff:10.9.0.1, RoCE v2) on e1 would be chosen." in flat
    assert "rxe2 port 1: none of its 2 GIDs is an address of this network namespace." in flat
    assert "RDMA netns mode: shared" in flat
    assert "A connection can be made from this host." in flat


def test_a_pair_with_a_dead_address(node1: Node, node2: Node, serving: None) -> None:
    with extra_address(node1, "fd00:77::1/64"), extra_address(node2, "fd00:88::1/64"):
        status, told = _doctor(node1, node2.address, "-p", PORT, "--json")
    assert status == 0
    ways = {(pair["here"]["gid"], pair["there"]["gid"]): pair for pair in told["pairs"]}
    good, dead = ways["::ffff:10.9.0.1", "::ffff:10.9.0.2"], ways["fd00:77::1", "fd00:88::1"]
    assert (good["state"], good["chosen"], good["path_mtu"]) == ("ok", True, 4096)
    assert good["latency_us"] > 0
    assert (dead["state"], dead["chosen"]) == ("failed", False)
    assert "no route" in dead["cause"]
    assert dead["fix"].startswith("ip ")


def test_a_pair_behind_a_firewall(node1: Node, node2: Node, serving: None) -> None:
    with lost(node1, *ROCE), lost(node2, *ROCE):
        status, text = _doctor(node1, node2.address, "-p", PORT, "-g", "1")
    assert status == 1
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "firewall drops RoCE (UDP port 4791:" in flat
    assert "nft insert rule inet filter input udp dport 4791 accept" in flat
    assert "No connection can be made." in flat


def test_nobody_serves(node1: Node, node2: Node) -> None:
    status, told = _doctor(node1, node2.address, "-p", "18651", "--deadline", "2", "--json")
    assert status == 1
    assert "nothing listens on that port" in json.dumps(told)
