"""The right pair of ports, and the next one: what only a kernel shows, with its ARP, VLANs, macvlans and slots."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from nodes import NETNS, PATIENCE, Node, connected, enter
from test_negotiate import ROCE, extra_address, lost

import rdmaconnect
from rdmaconnect import Gid
from rdmaconnect.agreement.options import Options
from rdmaconnect.doctor import Verdict, examine, gather
from rdmaconnect.objects.context import device_names, open_device
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.session.ports import choose_ports

netns = pytest.mark.skipif(not NETNS, reason="the rig's two devices are in one namespace")


def wait_for(node: Node, address: str, *, there: bool = True) -> None:
    """Until some device has the address in its GID table, or none has, which the kernel sees to later."""
    wanted = Gid.parse(address)

    def is_there() -> bool:
        for name in device_names():
            with open_device(name) as context:
                if any(entry.gid == wanted for port in context.ports() for entry in port.gids):
                    return True
        return False

    deadline = Deadline(PATIENCE)
    while node.call(is_there) is not there:
        deadline.check(f"wait for {address}")


def talk(here: Any, there: Any) -> None:
    here.send(b"there")
    assert there.recv(deadline_s=PATIENCE) == b"there"
    there.send(b"here")
    assert here.recv(deadline_s=PATIENCE) == b"here"


@contextlib.contextmanager
def second_nic(node: Node) -> Iterator[str]:
    """One more network device with an RDMA device, in the subnet of the first; gives its address."""
    netdev, address = f"f{node.number}", f"10.9.0.{10 + node.number}"
    hub, device = f"g{node.number}", f"rxf{node.number}"
    root = f"ip link add {hub} type veth peer name {netdev} netns n{node.number} && ip link set {hub} master br0 up"
    _root(f"{root} mtu 4200")
    try:
        node.run("ip", "addr", "add", f"{address}/16", "dev", netdev)
        node.run("ip", "link", "set", netdev, "mtu", "4200", "up")
        node.run("rdma", "link", "add", device, "type", "rxe", "netdev", netdev)
        wait_for(node, address)
        yield address
    finally:
        node.run("rdma", "link", "delete", device, check=False)
        _root(f"ip link delete {hub}")


def _root(command: str) -> None:
    """Run it where the nodes are made."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@netns
@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_two_nics_in_one_subnet_on_both_sides(
    node1: Node, node2: Node, qp_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ARP flux: either device of a host answers for both its addresses, and drops what is for the other one."""
    stood, ways = 0, []
    with second_nic(node1), second_nic(node2) as second:
        for address in (node2.address, second) * 2:
            for node in (node1, node2):
                node.run("ip", "neigh", "flush", "all")
            listener = node2.call(rdmaconnect.listen, f"{address}:0")
            try:
                there = node2.start(listener.accept, deadline_s=PATIENCE)
                here = node1.connect(listener.url, qp_type=qp_type)
                with here.result(PATIENCE * 2) as a, there.result(PATIENCE * 2) as b:
                    talk(a, b)
                    stood += 1
                    tried = sum(line.startswith("rejected") for line in a.path.why)
                    ways.append(f"{a.path.local_gid.gid.address} to {a.path.remote_gid.gid.address}, {tried} before")
            finally:
                node2.call(listener.close)
        found = [finding for finding in examine(node1.call(gather, Options())) if finding.name == "arp"]
    with capsys.disabled():
        print(f"\ntwo NICs in one subnet, {qp_type}: connected {stood} of 4: {'; '.join(ways)}")
    assert stood == 4
    assert [finding.verdict for finding in found] == [Verdict.WARN]
    assert "e1 and f1 are in one subnet" in found[0].words
    assert "arp_ignore" in found[0].fix


@netns
@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_ends_that_nobody_introduces_go_by_the_nics_that_carry(node1: Node, node2: Node, qp_type: str) -> None:
    with second_nic(node1), second_nic(node2), contextlib.ExitStack() as stack:
        for node in (node1, node2):  # each device answers for its own address alone
            node.setting("net/ipv4/conf/all/arp_ignore", 1)
            stack.callback(node.setting, "net/ipv4/conf/all/arp_ignore", 0)
            node.run("ip", "neigh", "flush", "all")
            stack.enter_context(lost(node, *ROCE))
        ends = [stack.enter_context(node.call(rdmaconnect.bind, qp_type=qp_type)) for node in (node1, node2)]
        assert [sorted(port.device for port in end.ports) for end in ends] == [["rxe1", "rxf1"], ["rxe2", "rxf2"]]
        one = node1.start(ends[0].connect, ends[1].to_bytes(), deadline_s=PATIENCE)
        other = node2.start(ends[1].connect, ends[0].to_bytes(), deadline_s=PATIENCE)
        with one.result(PATIENCE * 2) as here, other.result(PATIENCE * 2) as there:
            assert (here.local.port.device, there.local.port.device) == ("rxf1", "rxf2")
            assert here.path.why[0].startswith("given up: ")
            talk(here, there)


@netns
def test_an_address_on_a_vlan_is_reached_over_the_vlan(node1: Node, node2: Node) -> None:
    """Beside its parent, whose link-local address it shares."""
    with contextlib.ExitStack() as stack:
        for node in (node1, node2):
            vlan = f"{node.netdev}.100"
            node.run("ip", "link", "add", "link", node.netdev, "name", vlan, "type", "vlan", "id", "100")
            stack.callback(node.run, "ip", "link", "delete", vlan)
            node.run("ip", "link", "set", vlan, "up")
            node.run("ip", "addr", "add", f"10.100.0.{node.number}/24", "dev", vlan)
            wait_for(node, f"10.100.0.{node.number}")
        listener = node2.call(rdmaconnect.listen, "10.100.0.2:0")
        stack.callback(node2.call, listener.close)
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        here = stack.enter_context(node1.connect(listener.url).result(PATIENCE * 2))
        other = stack.enter_context(there.result(PATIENCE))
        for end, number in ((here, 1), (other, 2)):
            assert str(end.path.local_gid.gid.address) == f"10.100.0.{number}"
            assert end.path.local_gid.netdev == f"e{number}.100"
        assert not any(line.startswith("rejected") for line in here.path.why)
        talk(here, other)


@netns
def test_a_pod_with_a_macvlan_takes_its_own_address(node1: Node) -> None:
    """In shared mode it sees its host's GIDs too, in front of its own."""
    _root("ip netns add n9 && ip -n n9 link set lo up")
    try:
        node1.run("ip", "link", "add", "link", node1.netdev, "name", "net1", "type", "macvlan", "mode", "bridge")
        node1.run("ip", "link", "set", "net1", "netns", "n9")
        _root("ip -n n9 link set net1 up && ip -n n9 addr add 10.9.0.99/16 dev net1")
        pod = _inside("n9")
        wait_for(pod, "10.9.0.99")
        choice = pod.call(choose_ports, Options(), "10.9.0.2")
        entries = {str(entry.gid.address): entry.here for entry in choice.addresses[0].gids}
        assert entries["10.9.0.99"] is True
        assert entries[node1.address] is False
        host = pod.call(gather, Options())
        (chosen,) = [finding for finding in examine(host) if finding.name == "choice"]
        assert "10.9.0.99" in chosen.words
    finally:
        _root("ip netns delete n9")


def _inside(namespace: str) -> Node:
    """A node of its own: threads in another namespace."""
    node = Node(1, threads=1)
    node._threads = ThreadPoolExecutor(2, initializer=enter, initargs=(namespace,))
    return node


@netns
def test_reconnect_after_the_gid_has_moved_to_another_slot(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        before = here.path.local_gid.gid_index
        node1.run("ip", "addr", "del", f"{node1.address}/16", "dev", node1.netdev)
        try:
            with extra_address(node1, "172.30.0.1/24"):
                node1.run("ip", "addr", "add", f"{node1.address}/16", "dev", node1.netdev)
                wait_for(node1, node1.address)
                waiting = node2.start(there.reconnect, deadline_s=PATIENCE)
                node1.call(here.reconnect, deadline_s=PATIENCE)
                waiting.result(PATIENCE)
                talk(here, there)
                assert str(here.path.local_gid.gid.address) == node1.address
                assert here.path.local_gid.gid_index == here.path.ah_attr.sgid_index != before
        finally:  # back to where it was, for other tests
            node1.run("ip", "addr", "del", f"{node1.address}/16", "dev", node1.netdev, check=False)
            wait_for(node1, node1.address, there=False)
            node1.run("ip", "addr", "add", f"{node1.address}/16", "dev", node1.netdev)
            wait_for(node1, node1.address)
            with open_device(node1.device) as context:
                assert [g.gid_index for g in context.port(1).gids if str(g.gid.address) == node1.address] == [before]


@pytest.mark.skipif(NETNS, reason="on kernels before 7 both devices are in one namespace, with policy routing")
def test_two_devices_with_policy_routing_need_not_be_named(node1: Node, node2: Node) -> None:
    listener = rdmaconnect.listen("10.9.0.2:0")
    try:
        there = node2.start(listener.accept, deadline_s=PATIENCE)
        here = node1.start(rdmaconnect.connect, listener.url, deadline_s=PATIENCE)
        with here.result(PATIENCE * 2) as a, there.result(PATIENCE) as b:
            print("\n".join(a.path.why))
            talk(a, b)
    finally:
        listener.close()
