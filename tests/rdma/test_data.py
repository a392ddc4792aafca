"""What a connection carries: messages, remote memory, and the ends of both."""

from __future__ import annotations

import array
import random
import threading
import time

import pytest
from nodes import PATIENCE, Node, connected

from rdmaconnect import CompletionError, Connection, DeadlineExceeded, PeerClosed, RemoteRegion, StateError
from rdmaconnect.abi import AccessFlags, WcStatus

Pair = tuple[Connection, Connection]


def test_messages_keep_their_boundaries_and_order_both_ways(pair: Pair) -> None:
    for one, other in (pair, pair[::-1]):
        for i in range(10):
            one.send(b"%d" % i * (i + 1))
        assert [other.recv() for _ in range(10)] == [b"%d" % i * (i + 1) for i in range(10)]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8193, 65536])
def test_every_size_arrives_whole(pair: Pair, size: int) -> None:
    here, there = pair
    data = random.Random(size).randbytes(size)
    here.send(data)
    assert there.recv() == data


def test_a_message_longer_than_the_peers_receive_is_refused_with_both_sizes(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"recv_size": 1000}) as (here, there):
        with pytest.raises(ValueError, match="send 1001 bytes: the peer takes at most 1000"):
            here.send(bytes(1001))
        here.send(bytes(1000))
        assert there.recv() == bytes(1000)
        there.send(bytes(1001))
        assert here.recv() == bytes(1001)


def test_any_buffer_can_be_sent(pair: Pair) -> None:
    here, there = pair
    numbers = array.array("d", [1.5, 2.5])
    for data in (bytearray(b"abc"), memoryview(b"xyz")[1:], numbers):
        here.send(data)
        assert there.recv() == bytes(memoryview(data).cast("B"))
    with pytest.raises(TypeError):
        here.send("text")


def test_registered_memory_is_sent_without_a_copy(pair: Pair) -> None:
    here, there = pair
    memory = bytearray(b"one")
    with here.register(memory) as mr:
        here.send(mr)
        memory[:] = b"two"
        here.send(mr)
    assert [there.recv(), there.recv()] == [b"one", b"two"]


def test_recv_into_fills_a_buffer_and_keeps_what_does_not_fit(pair: Pair) -> None:
    here, there = pair
    here.send(b"five!")
    with pytest.raises(ValueError, match="receive 5 bytes: the buffer has 4"):
        there.recv_into(bytearray(4))
    target = bytearray(8)
    assert there.recv_into(target) == 5
    assert target == b"five!\0\0\0"


def test_recv_gives_up_at_its_deadline_and_can_go_on(pair: Pair) -> None:
    here, there = pair
    before = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="recv"):
        there.recv(deadline_s=0.5)
    assert 0.5 <= time.monotonic() - before < 5
    here.send(b"late")
    assert there.recv() == b"late"


def test_sends_wait_for_a_receiver_and_arrive_in_the_end(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"recv_depth": 2}) as (here, there):
        here.send(b"0")
        here.send(b"1")
        with pytest.raises(DeadlineExceeded, match=r"recv\(\) for each send\(\)"):
            here.send(b"2", deadline_s=0.5)
        assert [there.recv() for _ in range(3)] == [b"0", b"1", b"2"]


def test_two_threads_may_send_while_two_receive(pair: Pair) -> None:
    here, there = pair
    got: dict[str, list[bytes]] = {"here": [], "there": []}

    def send(conn: Connection, mark: bytes) -> None:
        for i in range(20):
            conn.send(mark + b"%d" % i, deadline_s=PATIENCE)

    def receive(conn: Connection, name: str) -> None:
        for _ in range(20):
            got[name].append(conn.recv(deadline_s=PATIENCE))

    threads = [
        threading.Thread(target=send, args=(here, b"a")), threading.Thread(target=receive, args=(there, "there")),
        threading.Thread(target=send, args=(there, b"b")), threading.Thread(target=receive, args=(here, "here")),
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    assert got == {"here": [b"b%d" % i for i in range(20)], "there": [b"a%d" % i for i in range(20)]}


# ---- remote memory


def test_named_regions_are_written_and_read(node1: Node, node2: Node) -> None:
    theirs, mine = bytearray(10000), bytearray(b"from here" * 100)
    with connected(node1, node2, listen={"regions": {"in": theirs}}, connect={"regions": {"out": mine}}) as pair:
        here, there = pair
        assert here.remote["in"].length == 10000
        here.write(b"hello", "in", offset=7)
        assert theirs[:13] == bytes(7) + b"hello\0"
        assert here.read("in", 5, offset=7) == b"hello"
        assert there.read("out") == bytes(mine)


def test_a_region_can_be_sent_as_bytes(pair: Pair) -> None:
    here, there = pair
    memory = bytearray(100000)
    with there.register(memory) as mr:
        there.send(mr.region.to_bytes())
        region = RemoteRegion.from_bytes(here.recv())
        data = random.Random(1).randbytes(100000)  # larger than the staging memory: registered on the way
        here.write(data, region)
        assert memory == data
        into = bytearray(50000)
        assert here.read_into(into, region, offset=50000) == 50000
        assert into == data[50000:]


def test_outside_of_a_region_is_refused_here(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"regions": {"r": bytearray(10)}}) as (here, _):
        with pytest.raises(ValueError, match="5 bytes at offset 6: the remote region has 10"):
            here.write(b"12345", "r", offset=6)
        with pytest.raises(ValueError, match="the remote region has 10"):
            here.read("r", 11)
        with pytest.raises(LookupError, match="no region 'nope'; it has r"):
            here.read("nope")
        assert here.read("r") == bytes(10)


@pytest.mark.parametrize("fault", ["rkey", "read-only"])
def test_what_the_peer_does_not_allow_fails_with_the_cause(pair: Pair, fault: str) -> None:
    here, there = pair
    buffer = b"read only" if fault == "read-only" else bytearray(9)
    with there.register(buffer) as mr:
        region = mr.region if fault == "read-only" else RemoteRegion(mr.addr, mr.rkey ^ 0x5500, 9)
        if fault == "read-only":
            assert here.read(region) == b"read only"
        with pytest.raises(CompletionError, match="rkey, range or access flags") as caught:
            here.write(b"x", region)
    assert caught.value.status == WcStatus.REM_ACCESS_ERR
    with pytest.raises(CompletionError):
        here.send(b"the queue pair is in ERR now")


def test_registering_refuses_what_cannot_be_meant(pair: Pair) -> None:
    here, _ = pair
    with pytest.raises(ValueError, match="read-only bytes"):
        here.register(b"abc", AccessFlags.LOCAL_WRITE)
    with pytest.raises(ValueError, match="0 bytes"):
        here.register(b"")
    with pytest.raises(TypeError, match="int has no buffer"):
        here.register(5)
    with pytest.raises(ValueError, match="not in one piece"):
        here.register(memoryview(bytearray(10))[::2])


# ---- the end


def test_close_is_told_to_the_peer_after_its_last_message(pair: Pair) -> None:
    here, there = pair
    here.send(b"last words")
    here.close()
    here.close()
    assert there.recv() == b"last words"
    with pytest.raises(PeerClosed, match="the peer closed the connection"):
        there.recv(deadline_s=PATIENCE)
    with pytest.raises((PeerClosed, CompletionError)):
        there.send(b"anyone?", deadline_s=PATIENCE)


def test_after_close_every_call_says_so(pair: Pair) -> None:
    here, _ = pair
    region = RemoteRegion(0, 0, 1)
    mr = here.register(bytearray(1))
    here.close()
    for call in (
        lambda: here.send(b"x"),
        lambda: here.recv(),
        lambda: here.write(b"x", region),
        lambda: here.read(region),
        lambda: here.register(bytearray(1)),
        lambda: mr.region,
    ):
        with pytest.raises(StateError, match="closed"):
            call()


def test_close_wakes_a_thread_that_receives(pair: Pair, node1: Node) -> None:
    here, _ = pair
    waiting = node1.start(here.recv, deadline_s=PATIENCE)
    time.sleep(0.5)
    here.close()
    with pytest.raises(StateError, match="closed"):
        waiting.result(10)


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_a_write_can_tell_the_peer(node1: Node, node2: Node, qp_type: str) -> None:
    memory = bytearray(8)
    options = {"regions": {"memory": memory}, "recv_depth": 4}  # late probes may have two of them
    with connected(node1, node2, connect={"qp_type": qp_type}, listen=options) as (here, there):
        here.write(b"1234", "memory")
        for number in (0, 7, 2**32 - 1, 8, 9):  # more than there are receives: each is given back
            here.write(number.to_bytes(4, "big"), "memory", offset=4, imm=number)
            assert there.recv_imm(deadline_s=PATIENCE) == number
            assert memory == b"1234" + number.to_bytes(4, "big")
        here.send(b"message")
        here.write(b"x", "memory", imm=5)
        assert (there.recv_imm(deadline_s=PATIENCE), there.recv(deadline_s=PATIENCE)) == (5, b"message")
        for wrong in (-1, 2**32):
            with pytest.raises(ValueError, match="32 bits"):
                here.write(b"x", "memory", imm=wrong)
        with pytest.raises(ValueError, match="at least one byte"):
            here.write(b"", "memory", imm=1)
