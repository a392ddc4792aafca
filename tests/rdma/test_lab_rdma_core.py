"""rdma-core's own ping-pongs as the other side, in both roles: their success, and what each message holds."""

from __future__ import annotations

import subprocess
from concurrent.futures import Future

import pytest
from nodes import PATIENCE, Node

from rdmaconnect.abi import QpType
from rdmaconnect.agreement.options import Options
from rdmaconnect.pingpong.rdma_core import Game, Served, echo_tool, ping_tool

ITERS = 30


def game(node: Node, qp_type: QpType) -> Game:
    """Three packets of each message where there can be several."""
    size = 1000 if qp_type is QpType.UD else 3000
    return Game(qp_type, size, ITERS, Options(recv_size=size, path_mtu=1024, **node.named), PATIENCE)


def started(node: Node, play: Game, port: int, *more: str) -> subprocess.Popen[str]:
    """Their program; GID 1 is the node's IPv4 address."""
    mtu = [] if play.qp_type is QpType.UD else ["-m", "1024"]
    words = [play.tool, "-d", node.device, "-g", "1", "-s", str(play.size), "-n", str(ITERS), "-p", str(port), *mtu]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(node.command(*words, *more), text=True, **streams)  # type: ignore[call-overload,no-any-return]


def ended(tool: subprocess.Popen[str]) -> str:
    out, _ = tool.communicate(timeout=PATIENCE)
    assert tool.returncode == 0, out
    assert f"{ITERS} iters in" in out, out
    return out


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=str)
def test_their_program_serves(node1: Node, node2: Node, qp_type: QpType) -> None:
    play = game(node1, qp_type)
    tool = started(node2, play, 18620)
    try:
        report = node1.call(ping_tool, f"tcp://{node2.address}:18620", play)
        out = ended(tool)
    finally:
        tool.kill()
    (row,) = report.rows
    assert (row.iters, row.size) == (ITERS, play.size)
    assert report.local["gid"] == f"::ffff:{node1.address}"
    assert f"QPN {report.local['qp_num']:#08x}, PSN {report.local['psn']:#08x}" in out.partition("remote address")[2]
    print(f"{play.tool} serves: {row.p50_us:.0f} us, {out.splitlines()[-1]}")


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=str)
def test_their_program_calls(node1: Node, node2: Node, qp_type: QpType) -> None:
    play = game(node2, qp_type)
    listening: Future[int] = Future()
    done = node2.start(echo_tool, f"tcp://{node2.address}:0", play, listening=listening.set_result)
    tool = started(node1, play, listening.result(PATIENCE), node2.address)
    try:
        served: Served = done.result(PATIENCE)
        out = ended(tool)
    finally:
        tool.kill()
    assert served.echoed.iters == ITERS
    assert served.remote["gid"] == f"::ffff:{node1.address}"
    assert f"QPN {served.local['qp_num']:#08x}, PSN {served.local['psn']:#08x}" in out.partition("remote address")[2]
