"""Two hosts that are not alike: differing GID tables, devices, MTUs, limits; and broken paths, explained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
from nodes import NETNS, PATIENCE, Node, connected

import rdmaconnect
import rdmaconnect.objects.context
from rdmaconnect import CompletionError, ConnectTimeout, PeerRejected, RdmaConnectError
from rdmaconnect.abi import Mtu

pytestmark = pytest.mark.skipif(not NETNS, reason="the rig's two devices are in one namespace")


@contextlib.contextmanager
def extra_address(node: Node, address: str, netdev: str | None = None) -> Iterator[None]:
    netdev = netdev or node.netdev
    node.run("ip", "addr", "add", address, "dev", netdev, *(["nodad"] if ":" in address else []))
    try:
        _settle(node, address.partition("/")[0])
        yield
    finally:
        node.run("ip", "addr", "del", address, "dev", netdev)


def _settle(node: Node, address: str) -> None:
    wanted = rdmaconnect.Gid.parse(address)

    def there() -> bool:
        with contextlib.ExitStack() as stack:
            contexts = [
                stack.enter_context(rdmaconnect.objects.context.open_device(n))
                for n in rdmaconnect.objects.context.device_names()
            ]
            return any(g.gid == wanted for c in contexts for p in c.ports() for g in p.gids)

    for _ in range(100):
        if node.call(there):
            return
        time.sleep(0.1)
    raise AssertionError(f"{address} did not become a GID")


def test_extra_addresses_on_one_side(node1: Node, node2: Node) -> None:
    with (
        extra_address(node1, "172.30.0.1/24"),
        extra_address(node1, "fd00:1::1/64"),
        connected(node1, node2) as (here, there),
    ):
        assert str(here.path.local_gid.gid) == "::ffff:10.9.0.1"
        assert str(there.path.local_gid.gid) == "::ffff:10.9.0.2"
        here.send(b"x")
        assert there.recv() == b"x"


def test_ipv6_only(node1: Node, node2: Node) -> None:
    with extra_address(node1, "fd00:9::1/64"), extra_address(node2, "fd00:9::2/64"):
        for node in (node1, node2):
            node.run("ip", "addr", "del", f"{node.address}/16", "dev", node.netdev)
        try:
            time.sleep(1)
            listener = node2.call(rdmaconnect.listen, "[fd00:9::2]:0")
            with listener:
                there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
                with node1.connect(listener.url).result(PATIENCE) as a, there.result(PATIENCE) as b:
                    assert str(a.path.local_gid.gid) == "fd00:9::1"
                    a.send(b"six")
                    assert b.recv() == b"six"
        finally:
            for node in (node1, node2):
                node.run("ip", "addr", "add", f"{node.address}/16", "dev", node.netdev)
                _settle(node, node.address)


@contextlib.contextmanager
def second_device(node: Node, address: str) -> Iterator[str]:
    """A device on a network that nobody else is on."""
    netdev, device = f"x{node.number}", f"rxex{node.number}"
    node.run("ip", "link", "add", netdev, "type", "veth", "peer", "name", f"y{node.number}")
    try:
        for name in (netdev, f"y{node.number}"):
            node.run("ip", "link", "set", name, "up")
        node.run("ip", "addr", "add", address, "dev", netdev)
        node.run("rdma", "link", "add", device, "type", "rxe", "netdev", netdev)
        _settle(node, address.partition("/")[0])
        yield device
    finally:
        node.run("ip", "link", "del", netdev)


def test_of_several_devices_the_one_that_reaches_is_found(node1: Node, node2: Node) -> None:
    """The exchange goes over a network without RDMA of its own, so that the route tells nothing."""
    with second_device(node1, "192.168.77.1/24"), second_device(node2, "192.168.78.2/24"), management(node1, node2):
        listener = node2.call(rdmaconnect.listen, "10.200.0.2:0")
        with listener:
            there = node2.start(listener.accept, deadline_s=PATIENCE * 2)
            here = node1.connect(listener.url, deadline_s=PATIENCE * 2)
            with here.result(PATIENCE * 3) as a, there.result(PATIENCE) as b:
                assert (a.local.port.device, b.local.port.device) == ("rxe1", "rxe2")
                a.send(b"found")
                assert b.recv() == b"found"


@contextlib.contextmanager
def management(node1: Node, node2: Node) -> Iterator[None]:
    """A plain network between the two nodes: 10.200.0.1 and 10.200.0.2."""
    node1.run("ip", "link", "add", "m1", "type", "veth", "peer", "name", "m2", "netns", "n2")
    try:
        for node in (node1, node2):
            node.run("ip", "addr", "add", f"10.200.0.{node.number}/24", "dev", f"m{node.number}")
            node.run("ip", "link", "set", f"m{node.number}", "up")
        yield
    finally:
        node1.run("ip", "link", "del", "m1")


def test_differing_mtus(node1: Node, node2: Node) -> None:
    node2.run("ip", "link", "set", node2.netdev, "mtu", "1500")
    try:
        time.sleep(0.5)
        with connected(node1, node2) as (here, there):
            assert here.path.path_mtu == there.path.path_mtu == Mtu.MTU_1024
            assert "path_mtu 1024: local active 4096, remote active 1024" in here.path.why[1]
            here.send(bytes(5000))
            assert there.recv() == bytes(5000)
    finally:
        node2.run("ip", "link", "set", node2.netdev, "mtu", "4200")
        time.sleep(0.5)


def test_differing_rd_atomic_limits(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"max_rd_atomic": 3}, listen={"max_rd_atomic": 5}) as (here, there):
        assert (here.path.max_rd_atomic, here.path.max_dest_rd_atomic) == (3, 3)
        assert (there.path.max_rd_atomic, there.path.max_dest_rd_atomic) == (3, 3)


# ---- a path that does not carry


@contextlib.contextmanager
def lost(node: Node, *packets: str) -> Iterator[None]:
    """Packets that do not reach this node."""
    node.run("tc", "qdisc", "add", "dev", node.netdev, "clsact")
    try:
        for protocol, at in (("ip", "2"), ("ipv6", "4")):
            words = [at if word is LENGTH else word for word in packets]
            on = ("tc", "filter", "add", "dev", node.netdev, "ingress", "protocol", protocol)
            node.run(*on, *words, "action", "drop")
        yield
    finally:
        node.run("tc", "qdisc", "del", "dev", node.netdev, "clsact")


ROCE = ("flower", "ip_proto", "udp", "dst_port", "4791")
#: where the length is, in IPv4 and in IPv6; and packets of 4096 to 8191 bytes
LENGTH = "LENGTH"
LARGE = ("u32", "match", "u16", "0x1000", "0xf000", "at", LENGTH)


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_a_firewall_on_roce_fails_here_with_that_explanation(node1: Node, node2: Node, qp_type: str) -> None:
    with lost(node1, *ROCE), lost(node2, *ROCE), node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
        here = node1.connect(listener.url, qp_type=qp_type)
        for end in (here, there):
            with pytest.raises(RdmaConnectError, match=r"4791") as caught:
                end.result(PATIENCE * 2)
            assert isinstance(caught.value, CompletionError | ConnectTimeout | PeerRejected)


def test_without_a_probe_a_firewall_goes_unnoticed(node1: Node, node2: Node) -> None:
    quick = {"probe": False, "timeout": 12, "retry_cnt": 1}
    with (
        lost(node2, *ROCE),
        connected(node1, node2, connect=quick) as (here, _),
        pytest.raises(CompletionError, match="RETRY_EXC_ERR"),
    ):
        here.send(b"lost", deadline_s=PATIENCE)


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_a_network_that_carries_less_than_the_path_mtu_is_told_apart(node1: Node, node2: Node, qp_type: str) -> None:
    with lost(node1, *LARGE), lost(node2, *LARGE), node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE, tolerant=False)
        here = node1.connect(listener.url, qp_type=qp_type)
        for end in (here, there):
            with pytest.raises(RdmaConnectError, match=r"carries less than path_mtu 4096"):
                end.result(PATIENCE * 2)


def test_reconnect_whose_proof_fails_can_be_tried_again(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        with lost(node1, *ROCE), lost(node2, *ROCE):
            waiting = node2.start(there.reconnect, deadline_s=PATIENCE)
            with pytest.raises(RdmaConnectError, match="4791"):
                node1.call(here.reconnect, deadline_s=PATIENCE)
            assert not here.closed
            assert here.lost is not None
        node1.call(here.reconnect, deadline_s=PATIENCE)
        waiting.result(PATIENCE)
        here.send(b"at last")
        assert there.recv(deadline_s=PATIENCE) == b"at last"


def test_peers_that_are_hard_to_reach_hold_up_nobody_else(node1: Node, node2: Node) -> None:
    """To move to RTR toward an address that does not answer takes a second; the next connector does not wait for it."""
    strict, many = f"net/ipv4/conf/{node1.netdev}/arp_ignore", 6  # 2: answers only those of the same subnet
    node1.setting(strict, 2)
    try:
        with extra_address(node1, "172.31.0.1/24"), node2.listening() as listener:
            index = node1.call(_index_of, node1.device, "172.31.0.1")
            there = node2.start(listener.accept, deadline_s=PATIENCE)
            slow = [node1.connect(listener.url, gid_index=index) for _ in range(many)]
            wait(slow, 0.5)
            began = time.monotonic()
            with node1.connect(listener.url).result(PATIENCE):
                took = time.monotonic() - began
                there.result(PATIENCE).close()
            with contextlib.suppress(ConnectTimeout):
                node2.call(listener.accept, deadline_s=5)
            for one in slow:
                with pytest.raises(RdmaConnectError, match="ETIMEDOUT"):
                    one.result(PATIENCE)
            assert took < many  # s: as long as all of those take one after the other
    finally:
        node1.setting(strict, 0)


def _index_of(device: str, address: str) -> int:
    with rdmaconnect.objects.context.open_device(device) as context:
        wanted = rdmaconnect.Gid.parse(address)
        return next(g.gid_index for p in context.ports() for g in p.gids if g.gid == wanted)
