"""The faults of the field, one after the other: what each end is told, how soon, and what is left.

The README's table of words is made from what these tests print: `docker/lab test tests/rdma/test_recipes.py -s`.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ends import attributes, end_on
from nodes import NETNS, PATIENCE, Node, connected, ours
from outcome import DEADLINE_S, both, told
from test_lab_connect import wait_for_gid
from test_negotiate import LARGE, ROCE, extra_address, lost, management

import rdmaconnect
import rdmaconnect.objects.context
from rdmaconnect import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerClosed,
    PeerMismatch,
    PeerRejected,
    RemoteProtocolError,
    StateError,
)
from rdmaconnect.abi import QpState, QpType
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.objects.queuepair import QueuePair, SendRequest
from rdmaconnect.session.transceiver import Transceiver

pytestmark = pytest.mark.skipif(not NETNS, reason="the rig's two devices are in one namespace")


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """The kernel holds nothing of ours when a recipe is over."""
    yield
    assert ours() == []


def on_device(monkeypatch: pytest.MonkeyPatch, node: Node, step: str, do: Any) -> None:
    """Before a queue pair of this node takes a step, ``do(transceiver, path)`` gives the path to use."""
    real = getattr(Transceiver, step)

    def take(transceiver: Transceiver, path: Any, *ready: Any) -> None:
        if transceiver.endpoint.port.device == node.device:
            path, ready = do(transceiver, path), ()  # what was made ready is of the path as it was
        real(transceiver, path, *ready)

    monkeypatch.setattr(Transceiver, step, take)


# ---- R01 to R05: GIDs


def test_r01_the_index_of_an_address_that_is_gone(node1: Node, node2: Node) -> None:
    with extra_address(node1, "172.30.1.1/24"):
        index = wait_for_gid(node1, "::ffff:172.30.1.1")
    with node2.listening() as listener:
        here = node1.call(told, rdmaconnect.connect, listener.url, gid_index=index, deadline_s=DEADLINE_S)
        there = node2.call(told, listener.accept, deadline_s=0.5)
    here.says(DeviceError, r"gid_index \d+: that slot is empty on every port\. Seen: rxe1 port 1 .*10\.9\.0\.1", 10)
    there.says(ConnectTimeout, "nobody asked|none asked")


def test_r01_an_address_that_goes_while_connecting(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def go(transceiver: Transceiver, path: Any) -> Any:
        node1.run("ip", "addr", "del", "172.30.1.2/24", "dev", node1.netdev)
        time.sleep(0.5)
        return path

    node1.run("ip", "addr", "add", "172.30.1.2/24", "dev", node1.netdev)
    index = wait_for_gid(node1, "::ffff:172.30.1.2")
    on_device(monkeypatch, node1, "to_rtr", go)
    here, there = both(node1, node2, connect={"gid_index": index})
    here.says(ModifyError, r"ENODATA .*gid_index \d+ is an empty slot: the address was removed")
    there.says(PeerRejected, r"ENODATA .*gid_index \d+ is an empty slot: the address was removed")


def test_r02_gids_of_two_families(node1: Node, node2: Node) -> None:
    here, there = both(node1, node2, connect={"gid_index": 1}, listen={"gid_index": 0})
    words = (
        r"GIDs: none of the connector's \(gid_index 1 \(::ffff:10.9.0.1, .*\) matches .*listener's \(gid_index 0 \(fe80"
    )
    here.says(PeerMismatch, words, 10)
    there.says(PeerMismatch, words, 10)


def test_r03_the_listeners_address_does_not_answer(node1: Node, node2: Node) -> None:
    strict = f"net/ipv4/conf/{node2.netdev}/arp_ignore"  # 2: answers only those of the same subnet
    node2.setting(strict, 2)
    try:
        with extra_address(node2, "192.0.2.9/32"):
            here, there = both(node1, node2, listen={"gid_index": wait_for_gid(node2, "::ffff:192.0.2.9")})
    finally:
        node2.setting(strict, 0)
    here.says(ModifyError, r"ETIMEDOUT .*route to ::ffff:192.0.2.9 did not resolve from gid_index 1 \(::ffff:10.9.0.1")
    there.says(PeerRejected, r"ETIMEDOUT .*route to ::ffff:192.0.2.9 did not resolve")


def test_r04_no_route_to_an_ipv6_gid(node1: Node, node2: Node) -> None:
    with extra_address(node1, "fd00:77::1/64"), extra_address(node2, "fd00:88::2/64"):
        here, there = both(node1, node2, connect={"gid_index": wait_for_gid(node1, "fd00:77::1")})
    here.says(PeerRejected, r"ENETUNREACH .*There is no route to fd00:77::1 from gid_index \d+ \(fd00:88::2")
    there.says(ModifyError, r"ENETUNREACH .*There is no route to fd00:77::1 from gid_index \d+ \(fd00:88::2")


def test_r05_no_grh_on_ethernet(node1: Node) -> None:
    with end_on(node1, QpType.RC, 5) as end:
        end.climb(end, QpState.INIT)
        rtr = {"qp_state": QpState.RTR, **attributes(QpType.RC, end, end)[1]}
        here = node1.call(told, end.qp.modify, {**rtr, "ah_attr": AhAttr(port_num=1, dlid=5)})
        there = node1.call(told, end.qp.modify, {**rtr, "ah_attr": replace(rtr["ah_attr"], dgid=bytes(16))})
    here.says(ModifyError, r"EINVAL .*is_global", 10)
    there.says(ModifyError, r"EINVAL .*address families", 10)


# ---- R06 to R13: two queue pairs that do not fit

#: so that a device gives up after some 50 ms
QUICK = {"timeout": 12, "retry_cnt": 2}


def test_r06_a_network_that_carries_less(node1: Node, node2: Node) -> None:
    with lost(node1, *LARGE), lost(node2, *LARGE):
        here, there = both(node1, node2, connect=QUICK, listen=QUICK)
    words = (
        r"16 bytes arrive, 8193 do not: the network between carries less than path_mtu 4096; give a smaller path_mtu"
    )
    # on each of the ways that are tried, either end may be the one who finds it and tells the other
    for end in here, there:
        end.says((CompletionError, PeerRejected), words, 10)


def test_r08_a_psn_that_is_off_by_one(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device loses the first message, and says SUCCESS; or, if it comes to repeat it, gives up."""
    on_device(monkeypatch, node2, "to_rtr", lambda _, path: replace(path, rq_psn=(path.rq_psn + 1) & 0xFFFFFF))
    here, there = both(node1, node2)
    here.says((PeerRejected, CompletionError), "PSN")
    there.says((RemoteProtocolError, PeerRejected), "PSN")


def test_r08_a_psn_that_is_far_off(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, node2, "to_rtr", lambda _, path: replace(path, rq_psn=(path.rq_psn + 9999) & 0xFFFFFF))
    here, there = both(node1, node2, connect=QUICK)
    # what is behind the PSN that is due counts as repeated, and may be acknowledged for ever
    here.says((CompletionError, PeerRejected, ConnectTimeout), "PSN", DEADLINE_S + 2)
    # both give up in the same moment: it may just have heard that the connector did
    there.says((PeerRejected, ConnectTimeout), r"PSN|Not finished with .*\(closed\)", DEADLINE_S + 2)


def test_r09_a_key_that_does_not_fit(node1: Node, node2: Node) -> None:
    with connected(node1, node2, listen={"regions": {"r": bytearray(9)}}) as (a, b):
        region = replace(a.remote["r"], rkey=a.remote["r"].rkey ^ 0x5500)
        here = told(a.write, b"x", region, deadline_s=DEADLINE_S)
        there = told(b.recv, deadline_s=DEADLINE_S)
    here.says(CompletionError, "REM_ACCESS_ERR .*rkey, range or access flags", 10)
    there.says(CompletionError, "WR_FLUSH_ERR .*the peer asked for what this end does not allow", 10)


def test_r10_no_receive_is_posted(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"rnr_retry": 0}, listen={"recv_depth": 2}) as (a, b):
        a.send(b"one", deadline_s=DEADLINE_S)
        a.send(b"two", deadline_s=DEADLINE_S)
        here = told(a.send, b"three", deadline_s=DEADLINE_S)
        assert [b.recv(deadline_s=DEADLINE_S) for _ in range(2)] == [b"one", b"two"]
        a.close()
        there = told(b.recv, deadline_s=DEADLINE_S)
    here.says(CompletionError, "RNR_RETRY_EXC_ERR .*no receive posted", 10)
    there.says(PeerClosed, r"the peer closed the connection .*RNR_RETRY_EXC_ERR", 10)


def test_r11_the_peers_queue_pair_is_dead(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect=QUICK) as (a, b):
        b._end.transceiver.qp.modify({"qp_state": QpState.ERR})
        here = told(a.send, b"x", deadline_s=DEADLINE_S)
        there = told(b.recv, deadline_s=DEADLINE_S)
    here.says(CompletionError, "RETRY_EXC_ERR .*stopped answering: it is gone, its queue pair is not in RTR", 10)
    there.says(CompletionError, "WR_FLUSH_ERR .*The queue pair went to ERR", 10)


def test_r12_posting_in_the_wrong_state(node1: Node) -> None:
    with end_on(node1, QpType.RC, 5) as end:
        early = told(end.recv)
        end.climb(end, QpState.RTR)
        late = told(end.qp.post_send, SendRequest().send(1, inline=b"x"))
    early.says(StateError, "post a receive to RC QP .*: it is in RESET", 5)
    late.says(StateError, "post to RC QP .*: it is in RTR and sends from RTS on", 5)


# ---- R14, R20, R23, R24, R33, R34


def test_r14_a_partition_key_that_neither_has(node1: Node, node2: Node) -> None:
    here, there = both(node1, node2, connect={"pkey": 0x1234})
    here.says(PeerMismatch, r"P_Key: none in common .*0x1234 wished.*connector has 0xffff and listener has 0xffff", 10)
    there.says(PeerMismatch, r"P_Key: none in common .*0x1234 wished", 10)


def test_r14_more_than_the_device_has(node1: Node, node2: Node) -> None:
    with node2.listening() as listener:
        here = node1.call(told, rdmaconnect.connect, listener.url, send_depth=30000, recv_depth=10000, deadline_s=5)
        there = node2.call(told, listener.accept, deadline_s=0.5)
    here.says(DeviceError, r"that takes 4000[0-9] completion-queue entries, the device has 32767", 10)
    there.says(ConnectTimeout, "nobody asked|none asked")


@contextlib.contextmanager
def down(node: Node) -> Iterator[None]:
    node.run("ip", "link", "set", node.netdev, "down")
    try:
        time.sleep(0.3)
        yield
    finally:
        node.run("ip", "link", "set", node.netdev, "up")
        wait_for_gid(node, f"::ffff:{node.address}")
        for _ in range(100):
            with rdmaconnect.objects.context.open_device(node.device) as context:
                if context.port(1).state.name == "ACTIVE":
                    break
            time.sleep(0.1)


@pytest.mark.parametrize("side", ["connector", "listener"])
def test_r20_the_port_is_down(node1: Node, node2: Node, side: str) -> None:
    dead = node1 if side == "connector" else node2
    with management(node1, node2):
        listener = node2.call(rdmaconnect.listen, "10.200.0.2:0", device="rxe2")
        with listener, down(dead):
            there = node2.start(told, listener.accept, deadline_s=DEADLINE_S / 4, tolerant=False)
            here = node1.call(told, rdmaconnect.connect, listener.url, device="rxe1", deadline_s=DEADLINE_S / 4)
            there = there.result(PATIENCE)
    if side == "connector":
        here.says(DeviceError, "Seen: rxe1 port 1 DOWN.*ip link set")
        there.says(ConnectTimeout, "nobody asked|none asked")
    else:
        here.says(PeerRejected, "Seen: rxe2 port 1 DOWN.*ip link set")
        there.says(DeviceError, "Seen: rxe2 port 1 DOWN.*ip link set")


def test_r23_a_firewall_on_roce(node1: Node, node2: Node) -> None:
    with lost(node1, *ROCE), lost(node2, *ROCE):
        here, there = both(node1, node2, connect=QUICK)
    for end in here, there:
        end.says(
            (CompletionError, PeerRejected),
            "RETRY_EXC_ERR .*a firewall drops RoCE .UDP port 4791: `nft list ruleset`",
            10,
        )


def test_r33_r34_a_type_and_a_place_that_there_is_not(node1: Node) -> None:
    with end_on(node1, QpType.RC, 5, max_send_wr=8) as end:
        raw = told(QueuePair, end.pd, end.cq, end.cq, QpType.RAW_PACKET, max_send_wr=1, max_recv_wr=1)
        end.climb(end)
        end.qp.modify({"qp_state": QpState.SQD})  # nothing leaves the queue
        full = told(lambda: [end.qp.post_send(SendRequest().send(i, inline=b"x")) for i in range(99)])
    raw.says(rdmaconnect.VerbsError, "ibv_create_qp: EOPNOTSUPP .*does not have this qp_type", 5)
    full.says(rdmaconnect.errors.PostError, "ENOMEM .*send queue is full: wait for completions", 5)


def test_r24_a_q_key_that_does_not_fit(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["rdmaconnect.session.probe"], "PATIENCE_S", 3.0)

    def other(transceiver: Transceiver, path: Any) -> Any:
        transceiver.qp.modify({"qkey": transceiver.endpoint.qkey ^ 1})
        return path

    on_device(monkeypatch, node2, "to_rtr", other)
    for end in both(node1, node2, connect={"qp_type": "UD"}):
        end.says((ConnectTimeout, PeerRejected), "no success within .*UD also drops in silence .* another Q_Key")


def test_r24_a_datagram_to_an_address_that_does_not_answer(node1: Node, node2: Node) -> None:
    strict = f"net/ipv4/conf/{node1.netdev}/arp_ignore"
    node1.setting(strict, 2)
    try:
        with extra_address(node1, "10.77.0.1/24"):
            index = wait_for_gid(node1, "::ffff:10.77.")
            here, there = both(node1, node2, connect={"gid_index": index, "qp_type": "UD"})
    finally:
        node1.setting(strict, 0)
    here.says(PeerRejected, r"ibv_create_ah: ETIMEDOUT .*did not resolve")
    there.says(rdmaconnect.VerbsError, r"ibv_create_ah: ETIMEDOUT .*did not resolve")


# ---- R29: the exchange


def test_r29_strangers_cost_nobody_anything(node1: Node, node2: Node) -> None:
    """nc -z, one byte of garbage, one who says nothing, one who speaks a byte at a time, two hundred at once."""
    with node2.listening() as listener, contextlib.ExitStack() as stack:
        there = node2.start(listener.accept, deadline_s=DEADLINE_S)
        at = (node2.address, listener.port)

        def come(words: bytes = b"") -> socket.socket:
            stranger = stack.enter_context(socket.create_connection(at, timeout=5))
            stranger.sendall(words)
            return stranger

        node1.call(come).close()
        node1.call(come, b"\x99")
        slow = node1.call(come)
        for _ in range(200):
            node1.call(come)
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in b"\xff\0\0\0\0\0\0\0\x01\x7f\x03":
                    slow.sendall(bytes([byte]))
                    stop.wait(0.05)

        dripping = node1.start(drip)
        before = time.monotonic()
        with node1.connect(listener.url).result(PATIENCE) as a, there.result(PATIENCE) as b:
            assert time.monotonic() - before < DEADLINE_S
            a.send(b"fine")
            assert b.recv(deadline_s=DEADLINE_S) == b"fine"
        dripping.result(PATIENCE)


def test_r29_a_firewall_on_the_exchange(node1: Node, node2: Node) -> None:
    with node2.listening() as listener:
        drop = ("flower", "ip_proto", "tcp", "dst_port", str(listener.port))
        with lost(node2, *drop):
            there = node2.start(told, listener.accept, deadline_s=2)
            here = node1.call(told, rdmaconnect.connect, listener.url, deadline_s=2)
        there = there.result(PATIENCE)
    here.says(ConnectTimeout, "the host is down or not there, or a firewall drops the packets", 10)
    there.says(ConnectTimeout, "nobody asked|none asked", 10)


def test_r29_the_port_is_taken(node2: Node) -> None:
    with node2.listening() as listener:
        here = node2.call(told, rdmaconnect.listen, listener.url)
    here.says(OSError, "listen on 10.9.0.2:[0-9]+: Address already in use. Another program listens.*ss -ltnp", 10)
    assert here.errno == errno.EADDRINUSE


def test_r29_a_listener_on_loopback(node1: Node, node2: Node) -> None:
    """As where /etc/hosts gives a host's own name 127.0.1.1."""
    with node2.call(rdmaconnect.listen, "127.0.1.1:0") as listener:
        there = node2.start(told, listener.accept, deadline_s=2)
        here = node1.call(told, rdmaconnect.connect, f"{node2.address}:{listener.port}", deadline_s=2)
        away = node1.call(told, rdmaconnect.connect, f"127.0.1.1:{listener.port}", deadline_s=2)
        there = there.result(PATIENCE)
    here.says(ConnectTimeout, "nothing listens on that port", 10)
    there.says(ConnectTimeout, "nobody asked|none asked", 10)
    away.says(ConnectTimeout, "nothing listens on that port", 10)


# ---- R30, R31


def test_r30_closing_with_work_outstanding(node1: Node, node2: Node) -> None:
    """Flushed through ERR: through RESET they would never complete."""
    patient = {"detect_s": 20}  # longer than it takes to close
    with connected(node1, node2, connect=patient, listen=patient) as (a, b), lost(node2, *ROCE):
        sending = node1.start(told, a.send, b"x", deadline_s=DEADLINE_S)
        time.sleep(0.3)
        before = time.monotonic()
        a.close()
        assert time.monotonic() - before < 5
        here = sending.result(PATIENCE)
        there = told(b.recv, deadline_s=DEADLINE_S)
    here.says(StateError, "the connection from QP .* is closed", 10)
    there.says(PeerClosed, "the peer closed the connection", 10)


def test_r31_the_kernel_sets_the_hop_limit(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"hop_limit": 1}) as (a, _):
        assert a._end.transceiver.qp.query().ah_attr.hop_limit == 64
