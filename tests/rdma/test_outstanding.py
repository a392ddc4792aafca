"""Many transfers on their way at once, and receiving without a copy, on a device."""

from __future__ import annotations

import pytest
from nodes import PATIENCE, Node, connected

from rdmaconnect import CompletionError, Connection, DeadlineExceeded, RemoteRegion
from rdmaconnect.abi import WcStatus
from rdmaconnect.pingpong import echo, ping

Pair = tuple[Connection, Connection]


@pytest.mark.parametrize("size", [1, 64, 65, 4097])
def test_messages_are_on_their_way_together(pair: Pair, size: int) -> None:
    here, there = pair
    sent = [here.post_send(bytes([n]) * size) for n in range(16)]
    for n in range(16):
        with there.recv_view() as view:
            assert view == bytes([n]) * size
    for transfer in sent:
        transfer.wait()


def test_the_device_takes_64_bytes_inline(pair: Pair) -> None:
    assert pair[0]._end.transceiver.qp.max_inline_data >= 64


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_a_batch_arrives_whole_over_each_type(node1: Node, node2: Node, qp_type: str) -> None:
    with connected(node1, node2, {"qp_type": qp_type}) as (here, there):
        with here.batch() as batch:
            sent = [batch.post_send(bytes([n]) * (60 + n)) for n in range(12)]
        for transfer in sent:
            transfer.wait()
        assert [there.recv() for _ in sent] == [bytes([n]) * (60 + n) for n in range(12)]


def test_writes_and_reads_in_batches_longer_than_the_queue(node1: Node, node2: Node) -> None:
    far = bytearray(100_000)
    with connected(node1, node2, listen={"regions": {"far": far}}) as (here, there):
        with here.batch(deadline_s=PATIENCE) as batch:
            work = [batch.post_write(bytes([n]) * 2000, "far", offset=n * 2000) for n in range(50)]
            work.append(batch.post_write(b"told", "far", imm=5))
        for transfer in work:
            transfer.wait(deadline_s=PATIENCE)
        assert there.recv_imm() == 5
        assert far == b"told" + bytes(1996) + b"".join(bytes([n]) * 2000 for n in range(1, 50))
        into = [bytearray(2000) for _ in range(20)]
        reads = [here.post_read(buffer, "far", offset=n * 2000) for n, buffer in enumerate(into)]
        for transfer in reads:
            transfer.wait(deadline_s=PATIENCE)
        assert b"".join(into) == far[:40_000]


def test_the_failure_of_one_is_told_to_that_one(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"regions": {"far": bytearray(1000)}}) as (here, _):
        good = here.remote["far"]
        bad = RemoteRegion(good.addr, good.rkey ^ 0xFF00, good.length)
        with here.batch() as batch:
            sent = [batch.post_write(b"x" * 100, region) for region in (good, good, bad, good)]
        statuses = []
        for transfer in sent:
            try:
                transfer.wait(deadline_s=PATIENCE)
            except CompletionError as e:
                statuses.append(e.status)
        assert statuses == [WcStatus.REM_ACCESS_ERR, WcStatus.WR_FLUSH_ERR]


def test_a_full_queue_is_waited_for(node1: Node, node2: Node) -> None:
    with connected(node1, node2, {"send_depth": 4}, {"recv_depth": 2}) as (here, there):
        sent = [here.post_send(b"%d" % n) for n in range(6)]
        with pytest.raises(DeadlineExceeded):
            here.post_send(b"too many", deadline_s=0.2)
        assert [there.recv() for _ in sent] == [b"%d" % n for n in range(6)]
        sent[-1].wait(deadline_s=PATIENCE)


@pytest.mark.parametrize("op", ["send", "write", "read"])
def test_throughput_is_measured_and_checked(node1: Node, node2: Node, op: str) -> None:
    with connected(node1, node2) as (here, there):
        serving = node2.start(echo, there, deadline_s=PATIENCE)
        report = ping(here, op=op, sizes=[64, 65536], iters=40, outstanding=16, deadline_s=PATIENCE)
        assert [(rate.size, rate.iters) for rate in report.rates] == [(64, 40), (65536, 40)]
        assert serving.result(PATIENCE).iters == 80
