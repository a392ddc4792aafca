"""Throughput: many payloads on their way at once, one way, between two ends on the device in software."""

from __future__ import annotations

import ctypes
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from software import Software, connected

import rdmaconnect
from rdmaconnect.abi import WrOpcode
from rdmaconnect.cli import main
from rdmaconnect.errors import PeerClosed, RdmaConnectError
from rdmaconnect.pingpong import Echoed, PayloadError, Plan, PlanRefused, Rate, Report, echo, ping, report

PATIENCE_S = 20


def both(
    here: rdmaconnect.Connection, there: rdmaconnect.Connection, **options: Any
) -> tuple[Report | BaseException, Echoed | BaseException]:
    """Run both sides; what comes out of each."""
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(echo, there, deadline_s=PATIENCE_S)
        found: Report | BaseException
        try:
            found = ping(here, deadline_s=PATIENCE_S, **options)
        except RdmaConnectError as e:
            found = e
            here.close()
        return found, serving.exception() or serving.result()


@pytest.mark.parametrize("op", ["send", "write", "read"])
@pytest.mark.parametrize("depth", [1, 8])
def test_each_op_is_measured_and_checked(software: Software, op: str, depth: int) -> None:
    with connected() as (here, there):
        found, served = both(here, there, op=op, sizes=[1, 5000], iters=50, outstanding=depth)
    assert isinstance(found, Report)
    assert (found.outstanding, found.rows) == (depth, ())
    for rate, size in zip(found.rates, (1, 5000), strict=True):
        assert (rate.size, rate.iters) == (size, 50)
        assert rate.mib_per_s == pytest.approx(50 * size / rate.seconds / 2**20, rel=0.01)
        assert rate.msg_per_s == pytest.approx(50 / rate.seconds, rel=0.01)
    assert served == Echoed(op, (1, 5000), 100, 1)


def test_as_many_are_on_their_way_as_was_said(software: Software) -> None:
    found: list[int] = []
    with connected(listen={"recv_depth": 4}) as (here, there):
        sent, send_depth = here._end.transceiver.sent, here._end.transceiver.sizes.send_depth
        software.on("ibv_post_send", before=lambda call: found.append(len(sent)))
        both(here, there, op="send", sizes=[100], iters=60, outstanding=7)
    assert max(found) == 7 < send_depth  # with that which is being posted


def test_a_duration_and_many_connections(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as threads:
        made = threads.submit(lambda: [listener.accept(deadline_s=PATIENCE_S) for _ in range(3)])
        here = rdmaconnect.connect_many(listener.url, 3, deadline_s=PATIENCE_S)
        there = made.result(PATIENCE_S)
        serving = threads.submit(echo, there[0], more=lambda number: there[1 : 1 + number], deadline_s=PATIENCE_S)
        found = ping(here, op="write", sizes=[64], duration_s=0.2, outstanding=2, deadline_s=PATIENCE_S)
        assert serving.result(PATIENCE_S) == Echoed("write", (64,), found.rates[0].iters, 3)
        assert found.rates[0].iters > 1
        for conn in (*here, *there):
            conn.close()


@pytest.mark.parametrize("op", ["send", "write", "read"])
def test_a_payload_that_came_changed_is_seen(software: Software, op: str) -> None:
    size, calls = 777, [0]

    def harm(call: Any) -> None:
        wr = call["wr"]
        if wr.num_sge and wr.sg_list[0].length == size:
            calls[0] += 1
            if calls[0] == 5:
                read = wr.opcode == WrOpcode.RDMA_READ
                ctypes.memset((wr.wr.rdma.remote_addr if read else wr.sg_list[0].addr) + 700, 250, 1)

    with connected() as (here, there):
        software.on("ibv_post_send", before=harm)
        found, served = both(here, there, op=op, sizes=[size], iters=20, outstanding=4)
    assert isinstance(found, PayloadError)
    assert "byte 700 of 777 went out as 198 and came back as 250" in str(found)
    assert isinstance(served, PeerClosed if op == "read" else PayloadError)


def test_what_cannot_be_is_refused(software: Software) -> None:
    with (
        connected("UC") as (here, _),
        pytest.raises(ValueError, match="send over UC one way: it takes send, write, read"),
    ):
        ping(here, outstanding=4)
    with connected() as (here, there), ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match="write_imm over RC one way"):
            ping(here, op="write_imm", outstanding=4)
        with pytest.raises(ValueError, match="outstanding is -1"):
            ping(here, outstanding=-1)
        serving = threads.submit(echo, there, deadline_s=PATIENCE_S)
        here.send(Plan("write_imm", 8, outstanding=2).pack())
        assert isinstance(serving.exception(PATIENCE_S), PlanRefused)


def test_the_figures_are_laid_out_as_those_of_ib_write_bw() -> None:
    assert report.rates([Rate.of(1 << 20, 2000, 4.0)]) == [
        "    #bytes  #iterations  BW average[MiB/sec]  MsgRate[Mpps]",
        "   1048576         2000               500.00       0.000500",
    ]


@pytest.mark.parametrize("more", [[], ["--json"], ["--csv", "-"]])
def test_the_command(software: Software, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> Echoed:
            with listener.accept(deadline_s=PATIENCE_S) as conn:
                return echo(conn, deadline_s=PATIENCE_S)

        serving = threads.submit(serve)
        argv = ["pingpong", "127.0.0.1", "-p", str(listener.port), "--bw", "--op", "write", "-s", "1000", "-n", "30"]
        assert main([*argv, "--tx-depth", "4", *more]) == 0
        assert serving.result(PATIENCE_S) == Echoed("write", (1000,), 30, 1)
    said = capsys.readouterr().out
    if more == ["--json"]:
        body = json.loads(said)
        assert (body["outstanding"], body["rows"], body["rates"][0]["iters"]) == (4, [], 30)
    elif more:
        assert said.splitlines()[0] == "qp_type,op,connections,size,iters,seconds,mib_per_s,msg_per_s"
    else:
        assert "at most 4 on their way on each connection" in " ".join(said.split())
        assert said.splitlines()[-2].split() == ["#bytes", "#iterations", "BW", "average[MiB/sec]", "MsgRate[Mpps]"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tx-depth", "4"], "--tx-depth is for --bw"),
        (["--bw", "-t", "UD"], "--bw of send over UD: it takes send, write, read over RC"),
        (["--bw", "--op", "write_imm"], "--bw of write_imm over RC"),
        (["--bw", "--plot", "x.png"], "--plot draws round trips"),
    ],
)
def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["pingpong", "127.0.0.1", *argv])
    assert e.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
