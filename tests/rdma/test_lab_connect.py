"""One call connects two nodes: what comes out of it, and what happens when it cannot."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import msgpack
import pytest
import zmq
from nodes import NETNS, PATIENCE, Node, connected, descriptors, ours

import rdmaconnect
import rdmaconnect.objects.context
import rdmaconnect.session.incoming
from rdmaconnect import (
    Connection,
    ConnectTimeout,
    DeviceError,
    Endpoint,
    Options,
    PeerMismatch,
    PeerRejected,
    RemoteProtocolError,
    StateError,
)
from rdmaconnect.abi import Mtu, QpState, QpType
from rdmaconnect.agreement.path import Wish
from rdmaconnect.protocol.codec import encode
from rdmaconnect.protocol.messages import Hello

Pair = tuple[Connection, Connection]


def test_both_ends_are_in_rts_with_mirrored_attributes(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"probe": False}) as (here, there):
        mine, theirs = here._end.transceiver.qp.query(), there._end.transceiver.qp.query()
    assert (mine.qp_state, theirs.qp_state) == (QpState.RTS, QpState.RTS)
    assert (mine.dest_qp_num, theirs.dest_qp_num) == (there.local.qp_num, here.local.qp_num)
    assert (mine.rq_psn, theirs.rq_psn) == (there.local.psn, here.local.psn)
    assert mine.path_mtu == theirs.path_mtu == here.path.path_mtu
    assert mine.ah_attr.dgid == here.path.remote_gid.gid.raw == there.path.local_gid.gid.raw
    assert (mine.timeout, mine.retry_cnt, mine.rnr_retry, mine.min_rnr_timer) == (14, 3, 7, 12)
    assert mine.max_rd_atomic <= theirs.max_dest_rd_atomic


def test_each_node_uses_the_device_of_its_route(node1: Node, node2: Node, pair: Pair) -> None:
    here, there = pair
    assert (here.local.port.device, there.local.port.device) == ("rxe1", "rxe2")
    assert str(here.path.local_gid.gid) == f"::ffff:{node1.address}"
    assert str(here.path.remote_gid.gid) == f"::ffff:{node2.address}"
    assert node1.address in here.path.why[0]
    assert "RoCE v2" in here.path.why[0]


def test_psns_are_random_and_told_to_the_peer(node1: Node, node2: Node) -> None:
    psns = []
    for _ in range(2):
        with connected(node1, node2) as (here, there):
            assert here.peer.psn == there.local.psn
            assert there.peer.psn == here.local.psn
            psns += [here.local.psn, there.local.psn]
    assert len(set(psns)) == 4


def test_path_mtu_is_the_smaller_wish_and_the_difference_is_told(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"path_mtu": 1024}) as (here, there):
        assert here.path.path_mtu == there.path.path_mtu == Mtu.MTU_1024
        assert "path_mtu 1024" in here.path.why[1]
        here.send(bytes(range(256)) * 9)  # 2304 bytes: three packets
        assert there.recv() == bytes(range(256)) * 9


def test_rd_atomic_depth_is_what_the_other_end_can_answer(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"max_rd_atomic": 2}) as (here, there):
        assert here.path.max_rd_atomic == 2
        assert there.path.max_dest_rd_atomic == 2
        assert here._end.transceiver.qp.query().max_rd_atomic == 2


def test_traffic_class_and_flow_label_of_the_connector_count_on_both_ends(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"traffic_class": 0x60, "flow_label": 77}) as (here, there):
        for end in (here, there):
            assert (end.path.ah_attr.traffic_class, end.path.ah_attr.flow_label) == (0x60, 77)
            assert end._end.transceiver.qp.query().ah_attr.traffic_class == 0x60


def test_connector_may_start_before_the_listener(node1: Node, node2: Node) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = node1.connect(f"{node2.address}:{port}")
    time.sleep(1.5)
    assert not here.done()
    with node2.call(rdmaconnect.listen, f"{node2.address}:{port}", **node2.named) as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        with here.result(PATIENCE) as a, there.result(PATIENCE) as b:
            a.send(b"early")
            assert b.recv() == b"early"


def test_connector_may_send_before_accept_returns(node1: Node, node2: Node) -> None:
    def connect_and_send(url: str) -> Connection:
        conn = rdmaconnect.connect(url, deadline_s=PATIENCE, **node1.named)
        conn.send(b"at once")
        return conn

    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        with node1.start(connect_and_send, listener.url).result(PATIENCE), there.result(PATIENCE) as b:
            assert b.recv() == b"at once"


def test_one_listener_takes_many_connectors(node1: Node, node2: Node) -> None:
    count = 4
    with node2.listening() as listener:
        theirs = [node1.connect(listener.url) for _ in range(count)]
        ends = [node2.call(listener.accept, deadline_s=PATIENCE) for _ in range(count)]
        mine = [end.result(PATIENCE) for end in theirs]
        try:
            by_number = {end.local.qp_num: end for end in ends}
            assert len(by_number) == count
            for i, end in enumerate(mine):
                end.send(bytes([i]) * 10)
                assert by_number[end.peer.qp_num].recv() == bytes([i]) * 10
        finally:
            for end in mine + ends:
                end.close()


def test_connections_outlive_their_listener(node1: Node, node2: Node) -> None:
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        here = node1.connect(listener.url).result(PATIENCE)
        end = there.result(PATIENCE)
    with here, end:
        assert listener.closed
        end.send(b"still here")
        assert here.recv() == b"still here"


def test_closing_the_listener_ends_an_accept(node2: Node) -> None:
    with node2.listening() as listener:
        waiting = node2.start(listener.accept, deadline_s=PATIENCE)
        time.sleep(0.3)
        listener.close()
        with pytest.raises(StateError, match="closed"):
            waiting.result(10)


# ---- what cannot be


def test_accept_gives_up_at_its_deadline(node2: Node) -> None:
    with node2.listening() as listener:
        before = time.monotonic()
        with pytest.raises(ConnectTimeout, match="nobody asked") as caught:
            node2.call(listener.accept, deadline_s=0.5)
        assert 0.5 <= caught.value.waited_s < 3
        assert time.monotonic() - before < 5


def test_nobody_listens(node1: Node, node2: Node) -> None:
    with pytest.raises(ConnectTimeout, match="nothing listens on that port") as caught:
        node1.call(rdmaconnect.connect, f"{node2.address}:9", deadline_s=1.5, **node1.named)
    assert 1.5 <= caught.value.waited_s < 6


def test_a_connection_stands_before_anybody_accepts_it(node1: Node, node2: Node) -> None:
    """As with TCP."""
    with node2.listening() as listener, node1.connect(listener.url).result(PATIENCE) as here:
        here.send(b"early")
        with node2.call(listener.accept, deadline_s=PATIENCE) as there:
            assert there.recv(deadline_s=PATIENCE) == b"early"


def test_what_listens_is_not_rdmaconnect(node1: Node, node2: Node) -> None:
    server = node2.call(socket.create_server, (node2.address, 0))

    def speak() -> None:
        for _ in range(3):
            peer, _ = server.accept()
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

    with server:
        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises((ConnectTimeout, RemoteProtocolError), match=r"(?i)is it rdmaconnect"):
            node1.call(rdmaconnect.connect, f"{node2.address}:{server.getsockname()[1]}", deadline_s=3, **node1.named)


def test_a_peer_that_speaks_garbage_is_passed_over(node1: Node, node2: Node) -> None:
    def stray(address: tuple[str, int]) -> None:
        with socket.create_connection(address) as peer:
            peer.sendall(b"\x00GARBAGE\xff" * 9)

    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        node1.call(stray, (node2.address, listener.port))
        with node1.connect(listener.url).result(PATIENCE) as a, there.result(PATIENCE) as b:
            a.send(b"fine")
            assert b.recv() == b"fine"


def _say(url: str, frame: bytes) -> Any:
    """Say one frame to a listener as a stranger would; what it answers, decoded."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(url)
        stranger.send(frame)
        return msgpack.unpackb(stranger.recv()) if stranger.poll(PATIENCE * 1000) else None


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xc1 not a message", "not a message"),
        (msgpack.packb({"v": 99, "t": "hello", "id": bytes(16)}), "version 99"),
        (msgpack.packb({"v": 1, "t": "hello", "id": bytes(16)}), "invalid"),
    ],
    ids=["garbage", "version", "incomplete"],
)
def test_a_stranger_is_told_what_is_wrong(node1: Node, node2: Node, frame: bytes, words: str) -> None:
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
        answer = node1.call(_say, listener.url, frame)
        assert answer["t"] == "reject"
        assert words in answer["why"]
        with pytest.raises(RemoteProtocolError, match=words):
            there.result(PATIENCE)


def test_a_half_open_connection_ends_when_the_peer_does_not_go_on(
    node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdmaconnect.session.incoming, "HALF_OPEN_S", 2.0)

    def hello() -> bytes:
        with rdmaconnect.objects.context.open_device(node1.device) as context:
            address = context.port(1).address(context.query_device(), Options())
        return encode(Hello(bytes(range(16)), (Endpoint(QpType.RC, 17, 1, address, 100),), Wish(), {}))

    def ask(url: str, frame: bytes, over: threading.Event) -> Any:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(url)
            stranger.send(frame)
            answer = msgpack.unpackb(stranger.recv()) if stranger.poll(PATIENCE * 1000) else None
            over.wait(PATIENCE)
            return answer

    over = threading.Event()
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
        asked = node1.start(ask, listener.url, node1.call(hello), over)
        with pytest.raises(ConnectTimeout, match="It asked, and did not go on"):
            there.result(PATIENCE)
        over.set()
        assert asked.result(PATIENCE)["t"] == "reply"


def test_no_such_device(node1: Node) -> None:
    with pytest.raises(DeviceError, match=r"device rxe9: there is no such device. There is .*rxe1"):
        node1.call(rdmaconnect.connect, node1.address, device="rxe9")


def test_no_such_port(node1: Node) -> None:
    with pytest.raises(DeviceError, match=r"port 7 of rxe1: it has port 1"):
        node1.call(rdmaconnect.connect, node1.address, device="rxe1", port_num=7)


def test_an_empty_gid_slot(node1: Node) -> None:
    with pytest.raises(DeviceError, match=r"gid_index 200 of rxe1 port 1: that slot is empty. There are .*10.9.0.1"):
        node1.call(rdmaconnect.connect, node1.address, device="rxe1", gid_index=200)


def test_no_active_port(node1: Node) -> None:
    node1.run("ip", "link", "add", "idle0", "type", "dummy")
    try:
        node1.run("rdma", "link", "add", "rxeidle", "type", "rxe", "netdev", "idle0")
        with pytest.raises(DeviceError, match=r"there is none. Seen: rxeidle port 1 DOWN"):
            node1.call(rdmaconnect.listen, "*:0", device="rxeidle")
    finally:
        node1.run("ip", "link", "del", "idle0")


@pytest.mark.skipif(not NETNS, reason="the rig's routing serves the first address only")
def test_gids_of_two_families_cannot_be_joined_and_both_ends_say_so(node1: Node, node2: Node) -> None:
    link_local = _index(node2, "fe80")
    with node2.listening(gid_index=link_local) as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
        here = node1.connect(listener.url, gid_index=_index(node1, "::ffff:10.9."))
        with pytest.raises(PeerMismatch, match=r"GIDs: none of the connector's .*10.9.0.1.* listener's .*fe80"):
            here.result(PATIENCE)
        with pytest.raises(PeerMismatch, match=r"GIDs: none of the connector's"):
            there.result(PATIENCE)


def _index(node: Node, start: str) -> int:
    def look() -> int:
        with rdmaconnect.objects.context.open_device(node.device) as context:
            return next(g.gid_index for g in context.port(1).gids if str(g.gid).startswith(start))

    return int(node.call(look))


@pytest.mark.skipif(not NETNS, reason="needs a network of its own on node 1")
def test_a_gid_that_the_listener_cannot_reach_is_explained_on_both_ends(node1: Node, node2: Node) -> None:
    node1.run("ip", "addr", "add", "10.77.0.1/24", "dev", node1.netdev)
    # 2: answer ARP only to those of the same subnet
    node1.run("sh", "-c", f"echo 2 > /proc/sys/net/ipv4/conf/{node1.netdev}/arp_ignore")
    try:
        with node2.listening() as listener:
            there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
            here = node1.connect(listener.url, gid_index=wait_for_gid(node1, "::ffff:10.77."))
            with pytest.raises(PeerRejected, match=r"ETIMEDOUT .*route to ::ffff:10.77.0.1 did not resolve") as caught:
                here.result(PATIENCE)
            assert caught.value.errno == 110
            with pytest.raises(rdmaconnect.ModifyError, match=r"INIT->RTR.*from gid_index \d+ \(::ffff:10.9.0.2"):
                there.result(PATIENCE)
    finally:
        node1.run("sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/{node1.netdev}/arp_ignore")
        node1.run("ip", "addr", "del", "10.77.0.1/24", "dev", node1.netdev)


def wait_for_gid(node: Node, start: str) -> int:
    for _ in range(50):
        with contextlib.suppress(StopIteration):
            return _index(node, start)
        time.sleep(0.1)
    raise AssertionError(f"no GID {start} appeared on {node.device}")


def test_a_failed_attempt_leaves_nothing_behind_while_another_connection_lives(
    node1: Node, node2: Node, pair: Pair
) -> None:
    before = ours(), descriptors()
    assert before[0]
    with pytest.raises(ConnectTimeout):
        node1.call(rdmaconnect.connect, f"{node2.address}:9", deadline_s=0.5, **node1.named)
    with node2.listening() as listener, pytest.raises(ConnectTimeout):  # to connect takes longer than that here
        node1.call(rdmaconnect.connect, listener.url, deadline_s=0.03, **node1.named)
    assert (ours(), descriptors()) == before


def test_the_default_options_are_within_the_device(node1: Node) -> None:
    def limits() -> Any:
        with rdmaconnect.objects.context.open_device(node1.device) as context:
            return context.query_device()

    attr, options = node1.call(limits), Options().sizes()
    assert options.recv_depth + options.send_depth <= min(attr.max_qp_wr, attr.max_cqe)
