"""RC, UC and UD by the same call, blocking and asyncio; what each can carry, and what not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from nodes import PATIENCE, Node, connected

import rdmaconnect
from rdmaconnect import Connection, PeerMismatch, StateError

TYPES = ("RC", "UC", "UD")


@pytest.mark.parametrize("qp_type", TYPES)
def test_blocking(node1: Node, node2: Node, qp_type: str) -> None:
    with connected(node1, node2, connect={"qp_type": qp_type}) as (here, there):
        assert str(here.local.qp_type) == str(there.local.qp_type) == qp_type
        for one, other in ((here, there), (there, here)):
            for size in (0, 1, 1000, one.max_send_size):
                data = random.Random(size).randbytes(size)
                one.send(data)
                assert other.recv(deadline_s=PATIENCE) == data


@pytest.mark.parametrize("qp_type", TYPES)
def test_asyncio(node1: Node, node2: Node, qp_type: str) -> None:
    """The same on event loops; a ticker shows that nothing blocks them for long."""
    address = node2.call(_free_port, node2)

    async def serve() -> bytes:
        async with await rdmaconnect.alisten(address, **node2.named) as listener:
            async for conn in listener:
                async with conn:
                    got = await conn.recv(deadline_s=PATIENCE)
                    await conn.send(got[::-1], deadline_s=PATIENCE)
                    await conn.recv(deadline_s=PATIENCE)
                    return got
        raise AssertionError("no connection came")

    async def call() -> tuple[bytes, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        async with await rdmaconnect.aconnect(address, qp_type=qp_type, deadline_s=PATIENCE, **node1.named) as conn:
            await conn.send(b"forwards", deadline_s=PATIENCE)
            back = await conn.recv(deadline_s=PATIENCE)
            await conn.send(b"done", deadline_s=PATIENCE)
        ticker.cancel()
        return back, ticks

    there = node2.start(asyncio.run, asyncio.wait_for(serve(), PATIENCE * 2))
    back, ticks = node1.start(asyncio.run, call()).result(PATIENCE * 2)
    assert (there.result(PATIENCE), back) == (b"forwards", b"sdrawrof")
    assert ticks >= 5


def _free_port(node: Node) -> str:
    import socket

    with socket.socket() as probe:
        probe.bind((node.address, 0))
        return f"{node.address}:{probe.getsockname()[1]}"


def test_uc_writes_but_does_not_read(node1: Node, node2: Node) -> None:
    board = bytearray(100)
    with connected(node1, node2, connect={"qp_type": "UC"}, listen={"regions": {"board": board}}) as (here, there):
        here.write(b"chalk", "board", offset=3)
        here.send(b"look")  # over UC the order holds: what was written before has arrived
        assert there.recv(deadline_s=PATIENCE) == b"look"
        assert board[3:8] == b"chalk"
        with pytest.raises(StateError, match=r"RDMA read over UC: .* Connect with RC"):
            here.read("board")


def test_ud_is_datagrams(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"qp_type": "UD"}) as (here, there):
        assert here.ah is not None
        assert (here.peer.qp_num, here.peer.qkey) == (there.local.qp_num, there.local.qkey)
        with pytest.raises(ValueError, match=r"send 4097 bytes: a datagram carries at most the path MTU, 4096 bytes"):
            here.send(bytes(4097))
        with pytest.raises(StateError, match="RDMA write over UD"):
            here.write(b"x", rdmaconnect.RemoteRegion(0, 0, 10))


def test_one_ud_queue_pair_holds_many_peers(node1: Node, node2: Node) -> None:
    """Two connections of node 1 over one queue pair, to two listeners; each hears only its own peer."""
    with node2.listening() as first, node2.listening() as second:
        ends: list[Connection] = []
        for listener in (first, second):
            there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
            via = {"via": ends[0]} if ends else {}
            ends.append(node1.connect(listener.url, qp_type="UD", **via).result(PATIENCE * 2))
            ends.append(there.result(PATIENCE))
        a, a_there, b, b_there = ends
        try:
            assert a.local.qp_num == b.local.qp_num
            b_there.send(b"from b")
            a_there.send(b"from a")
            assert a.recv(deadline_s=PATIENCE) == b"from a"
            assert b.recv(deadline_s=PATIENCE) == b"from b"
            a.close()
            b_there.send(b"b lives on")
            assert b.recv(deadline_s=PATIENCE) == b"b lives on"
        finally:
            for end in ends:
                end.close()


def test_a_listener_can_serve_all_ud_peers_with_one_queue_pair(node1: Node, node2: Node) -> None:
    with node2.listening(share_ud=True) as listener:
        ends: list[tuple[Connection, Connection]] = []
        for _ in range(2):
            there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
            here = node1.connect(listener.url, qp_type="UD").result(PATIENCE * 2)
            ends.append((here, there.result(PATIENCE)))
        try:
            assert ends[0][1].local.qp_num == ends[1][1].local.qp_num
            for mark, (here, _) in enumerate(ends):
                here.send(b"%d" % mark)
            assert [there.recv(deadline_s=PATIENCE) for _, there in ends] == [b"0", b"1"]
        finally:
            for pair in ends:
                for end in pair:
                    end.close()


def test_a_listener_takes_only_the_types_that_it_was_told(node1: Node, node2: Node) -> None:
    with node2.listening(qp_types=("RC",)) as listener:
        there = node2.start(listener.accept, deadline_s=3)
        with pytest.raises(PeerMismatch, match="qp_type: connector UD, this listener takes RC"):
            node1.connect(listener.url, qp_type="UD").result(PATIENCE)
        with pytest.raises(rdmaconnect.ConnectTimeout, match="this listener takes RC"):
            there.result(PATIENCE)


@pytest.mark.parametrize("qp_type", ["RAW_PACKET", "XRC_SEND", "nonsense"])
def test_other_types_are_refused_in_words(qp_type: str) -> None:
    check: Callable[..., Any] = rdmaconnect.connect
    with pytest.raises(ValueError, match=r"Give RC, UC or UD|give 'RC', 'UC' or 'UD'"):
        check("127.0.0.1", qp_type=qp_type)


def test_a_hundred_datagrams_in_a_row(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"qp_type": "UD", "recv_depth": 64}, listen={"recv_depth": 64}) as (a, b):
        for i in range(100):
            a.send(i.to_bytes(4, "big"))
            assert b.recv(deadline_s=PATIENCE) == i.to_bytes(4, "big")
