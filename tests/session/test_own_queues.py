"""Connections whose receives and completions are the application's: completion queues of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from software import Device, Network, Software, connected

import rdmaconnect
from rdmaconnect.abi import QpState, WcOpcode, WcStatus
from rdmaconnect.errors import StateError
from rdmaconnect.objects.address import UdAddress
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import MR
from rdmaconnect.objects.work_request import RecvRequest, SendRequest
from rdmaconnect.protocol.health import HealthState

GRH = 40


@dataclass
class Mine:
    """An application with a completion queue of its own."""

    context: Context
    cq: CQ
    memory: bytearray = field(default_factory=lambda: bytearray(4096))
    mr: MR | None = None
    seen: list[tuple[int, int, int]] = field(default_factory=list)

    def post_recv(self, conn: rdmaconnect.Connection, wr_id: int = 1) -> None:
        self.mr = self.mr if self.mr is not None and not self.mr.closed else conn.register(self.memory)
        conn.qp.post_recv(RecvRequest.scatter(wr_id, self.mr.sge(0, 2048)))

    def send(self, conn: rdmaconnect.Connection, data: bytes, wr_id: int = 2) -> None:
        to = None if conn.ah is None else UdAddress(conn.ah, conn.peer.qp_num, conn.peer.qkey)
        conn.qp.post_send(SendRequest().send(wr_id, inline=data, to=to))

    def next(self) -> tuple[int, int, int]:
        """wr_id, opcode and bytes of the next completion, which succeeded."""
        end = time.monotonic() + 10
        while not self.seen:
            assert time.monotonic() < end
            taken = self.cq.busy_poll(1)
            assert {WcStatus(wc.status) for wc in taken} <= {WcStatus.SUCCESS}
            self.seen += [(wc.wr_id, wc.opcode, wc.byte_len) for wc in taken]
        return self.seen.pop(0)


@pytest.fixture
def mine(software: Software) -> Iterator[Mine]:
    with open_device("soft0") as context, CQ(context, 64) as cq:
        yield Mine(context, cq)


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
@pytest.mark.parametrize("listens", [False, True])
def test_the_application_posts_and_polls(mine: Mine, software: Software, qp_type: str, listens: bool) -> None:
    own = {"send_cq": mine.cq}
    with connected(qp_type, own if listens else {}, **({} if listens else own)) as ends:
        conn, plain = reversed(ends) if listens else ends
        assert conn.cq is mine.cq
        assert conn.context.is_same(mine.context)
        assert conn.path.why[-1].startswith("not proven: ")
        polls: list[Any] = []
        software.on("ibv_poll_cq", before=polls.append)
        mine.post_recv(conn)
        plain.send(b"to you")
        assert conn.health.state is HealthState.ALIVE
        assert conn.lost is None
        grh = GRH if qp_type == "UD" else 0
        assert mine.next() == (1, WcOpcode.RECV, 6 + grh)
        assert bytes(mine.memory[grh : grh + 6]) == b"to you"
        mine.send(conn, b"and to you")
        assert plain.recv() == b"and to you"
        assert mine.next()[:2] == (2, WcOpcode.SEND)
    assert not mine.cq.closed
    assert mine.cq.poll() == 0


def test_one_queue_for_the_connections_of_a_listener_and_of_many(mine: Mine) -> None:
    with rdmaconnect.listen("127.0.0.1:0", send_cq=mine.cq) as listener:
        plain = rdmaconnect.connect_many(listener.url, 3)
        conns = [listener.accept() for _ in range(3)]
        for conn in plain:
            conn.post_send(b"from %d" % conn.local.qp_num)
        for conn in conns:
            mine.post_recv(conn, conn.local.qp_num)
        assert {mine.next()[0] for _ in conns} == {conn.local.qp_num for conn in conns}
        rdmaconnect.close_many([*plain, *conns])


def test_sends_and_receives_may_have_a_queue_each(mine: Mine) -> None:
    with CQ(mine.context, 8) as recv_cq, connected(send_cq=mine.cq, recv_cq=recv_cq) as (conn, plain):
        mine.post_recv(conn)
        mine.send(conn, b"x")
        assert mine.next()[0] == 2
        plain.send(b"y")
        assert [wc.wr_id for wc in recv_cq.busy_poll(10**6)] == [1]
    with CQ(mine.context, 8) as recv_cq, connected(recv_cq=recv_cq) as (conn, _):
        assert conn.cq is recv_cq


@pytest.mark.parametrize(
    "call",
    [
        lambda conn: conn.send(b"x"),
        lambda conn: conn.recv(),
        lambda conn: conn.recv_into(bytearray(1)),
        lambda conn: conn.recv_view().__enter__(),
        lambda conn: conn.recv_imm(),
        lambda conn: conn.write(b"x", "m"),
        lambda conn: conn.read("m"),
        lambda conn: conn.read_into(bytearray(1), "m"),
        lambda conn: conn.fetch_add("m", 1),
        lambda conn: conn.compare_swap("m", 1, 2),
        lambda conn: conn.post_send(b"x"),
        lambda conn: conn.post_write(b"x", "m"),
        lambda conn: conn.post_read(bytearray(1), "m"),
        lambda conn: conn.batch().post_send(b"x"),
        lambda conn: conn.batch().post_write(b"x", "m"),
        lambda conn: conn.batch().post_read(bytearray(1), "m"),
    ],
)
def test_what_would_poll_is_refused_with_words(mine: Mine, call: Any) -> None:
    with connected(listen={"regions": {"m": bytearray(8)}}, send_cq=mine.cq) as (conn, _):
        with pytest.raises(StateError, match=r"the application's own \(send_cq was given\)\. Post to conn\.qp"):
            call(conn)
        assert mine.cq.poll() == 0
    with pytest.raises(StateError, match="is closed"):
        call(conn)


def test_and_so_for_asyncio(mine: Mine) -> None:
    async def main() -> None:
        async with await rdmaconnect.alisten("127.0.0.1:0") as listener:
            accepting = asyncio.create_task(listener.accept())
            async with await rdmaconnect.aconnect(listener.url, send_cq=mine.cq) as conn, await accepting:
                for refused in (conn.send(b"x"), conn.recv(), conn.fetch_add("m", 1)):
                    with pytest.raises(StateError, match=r"conn\.qp"):
                        await refused

    asyncio.run(main())


def test_meeting_with_it(mine: Mine) -> None:
    with ThreadPoolExecutor(1) as threads:
        with rdmaconnect.listen("127.0.0.1:0") as one, rdmaconnect.listen("127.0.0.1:0") as two:
            here, there = (f"127.0.0.1:{listener.port}" for listener in (one, two))
        other = threads.submit(rdmaconnect.meet, there, here)
        with rdmaconnect.meet(here, there, send_cq=mine.cq) as conn, other.result(10) as plain:
            mine.post_recv(conn)
            plain.send(b"met")
            assert mine.next() == (1, WcOpcode.RECV, 3)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"probe": True}, ValueError, "probe=True with send_cq"),
        ({"options": rdmaconnect.Options(probe=True)}, ValueError, "probe=True with send_cq"),
        ({"auto_reconnect": True}, ValueError, r"auto_reconnect with send_cq.*reconnect\(\)"),
        ({"device": "soft1"}, ValueError, "device is 'soft1', and send_cq of soft0"),
        ({"recv_cq": 7}, TypeError, "recv_cq is 7: give a CQ"),
    ],
)
@pytest.mark.parametrize("call", [rdmaconnect.connect, rdmaconnect.listen])
def test_what_does_not_go_with_it(mine: Mine, call: Any, options: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        call("127.0.0.1:0" if call is rdmaconnect.listen else "127.0.0.1:1", send_cq=mine.cq, **options)


def test_queues_that_are_closed_or_of_two_devices() -> None:
    with Software([Device("soft0"), Device("soft1")]) as software:
        with open_device("soft0") as context, open_device("soft1") as other, CQ(context, 8) as cq, CQ(other, 8) as far:
            with pytest.raises(ValueError, match="give two of one device"):
                rdmaconnect.connect("127.0.0.1:1", send_cq=cq, recv_cq=far)
            with connected(send_cq=far) as (conn, _):  # the device is that of the queue
                assert conn.local.port.device == "soft1"
            cq.close()
            with pytest.raises(StateError, match="CQ of soft0 is closed"):
                rdmaconnect.listen("127.0.0.1:0", send_cq=cq)
        assert software.problems() == []


def test_a_queue_that_is_closed_below_a_listener(mine: Mine) -> None:
    with rdmaconnect.listen("127.0.0.1:0", send_cq=mine.cq) as listener:
        mine.cq.close()
        with pytest.raises(rdmaconnect.PeerRejected, match="CQ of soft0 is closed"):
            rdmaconnect.connect(listener.url, deadline_s=5)


def test_closing_the_queue_closes_the_queue_pair_and_then_the_connection_as_ever(mine: Mine) -> None:
    with connected(send_cq=mine.cq) as (conn, _):
        mine.cq.close()
        assert conn.qp.closed
        assert not conn.pd.closed
    assert conn.pd.closed


def test_it_is_connected_anew_and_what_was_posted_is_gone(mine: Mine) -> None:
    with connected(send_cq=mine.cq) as (conn, plain), ThreadPoolExecutor(1) as threads:
        mine.post_recv(conn, 7)
        mine.post_recv(conn, 8)
        qp = conn.qp
        again = threads.submit(plain.reconnect, deadline_s=10)
        conn.reconnect(deadline_s=10)
        again.result(10)
        assert (conn.qp, conn.generation, qp.state) == (qp, 2, QpState.RTS)
        mine.post_recv(conn, 9)
        plain.send(b"new")
        assert mine.next()[0] == 9


def test_a_peer_that_goes_is_told_of_by_the_side_channel(mine: Mine) -> None:
    seen: list[rdmaconnect.Health] = []
    with connected(send_cq=mine.cq) as (conn, plain):
        conn.on_change(seen.append)
        plain.close()
        end = time.monotonic() + 10
        while conn.lost is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert isinstance(conn.lost, rdmaconnect.PeerClosed)
        assert conn.health.state is HealthState.DEAD
        with pytest.raises(StateError, match=r"conn\.qp"):
            conn.recv()
    assert seen[0].state is HealthState.DEAD


def test_a_connection_that_comes_to_nothing_leaves_nothing(mine: Mine, software: Software) -> None:
    before = software.left()
    with contextlib.suppress(rdmaconnect.RdmaConnectError):
        rdmaconnect.connect("127.0.0.1:1", send_cq=mine.cq, deadline_s=0.3)
    with rdmaconnect.listen("127.0.0.1:0", qp_types=["UC"]) as listener, pytest.raises(rdmaconnect.PeerMismatch):
        rdmaconnect.connect(listener.url, send_cq=mine.cq, deadline_s=5)
    assert software.left() == before


def test_either_end_may_do_without_a_proof() -> None:
    with Software([Device("soft0")], Network()) as software:
        with connected(listen={"probe": False}) as (here, there):
            assert "not proven" in here.path.why[-1]
            here.send(b"x")
            assert there.recv() == b"x"
        with connected() as (here, there):
            assert not any("not proven" in words for words in (*here.path.why, *there.path.why))
            assert "proven" in [mark.stage for mark in here.trace]
        assert software.problems() == []


def test_one_datagram_queue_pair_for_many_peers(mine: Mine) -> None:
    with (
        rdmaconnect.listen("127.0.0.1:0") as plain_listener,
        rdmaconnect.connect(plain_listener.url, qp_type="UD", send_cq=mine.cq) as first,
        rdmaconnect.connect(plain_listener.url, qp_type="UD", via=first) as second,
        plain_listener.accept() as one,
        plain_listener.accept() as two,
    ):
        assert first.qp is second.qp
        for number, (conn, plain) in enumerate(((first, one), (second, two))):
            mine.send(conn, b"to %d" % number)
            assert plain.recv() == b"to %d" % number
        first.close()
        mine.post_recv(second, 5)
        two.send(b"still here")
        assert [mine.next()[0] for _ in range(3)] == [2, 2, 5]
    assert second.qp.closed


def test_a_listener_whose_peers_share_one(mine: Mine) -> None:
    with (
        rdmaconnect.listen("127.0.0.1:0", share_ud=True, send_cq=mine.cq) as listener,
        rdmaconnect.connect(listener.url, qp_type="UD") as one,
        listener.accept() as first,
        rdmaconnect.connect(listener.url, qp_type="UD") as two,
        listener.accept() as second,
    ):
        assert first.qp is second.qp
        for plain in (one, two):
            mine.post_recv(first)
            plain.send(b"x")
            assert mine.next()[2] == GRH + 1


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_ends_that_nobody_introduces_are_made_on_them(mine: Mine, software: Software, qp_type: str) -> None:
    with (
        rdmaconnect.bind(qp_type=qp_type, send_cq=mine.cq, count=2) as one,
        rdmaconnect.bind(qp_type=qp_type, count=2) as other,
    ):
        conns, plains = one.connect_many(other.to_bytes()), other.connect_many(one.to_bytes())
        for conn, plain in zip(conns, plains, strict=True):
            mine.post_recv(conn)
            plain.send(b"to the application")
            assert mine.next() == (1, WcOpcode.RECV, 18 + (GRH if qp_type == "UD" else 0))
            mine.send(conn, b"and back")
            assert plain.recv() == b"and back"
            assert mine.next()[:2] == (2, WcOpcode.SEND)
        mine.post_recv(conns[0])
        rdmaconnect.close_many(plains)  # in silence
        assert mine.cq.poll() == 0
        rdmaconnect.close_many(conns)
