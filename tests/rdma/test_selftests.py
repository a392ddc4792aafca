"""What the kernel's own tests of rxe do with devices and namespaces, here with a connection that lives meanwhile.

Source: Linux, tools/testing/selftests/rdma: rxe_ipv6.sh, rxe_netns_names.sh, rxe_rping_between_netns.sh,
rxe_sent_rcvd_bytes.sh, rxe_socket_with_netns.sh, rxe_test_NETDEV_UNREGISTER.sh.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from nodes import NETNS, PATIENCE, Node, connected

from rdmaconnect import Connection, RdmaConnectError
from rdmaconnect.abi import PortState
from rdmaconnect.objects.context import open_device
from rdmaconnect.runtime.deadline import Deadline

pytestmark = pytest.mark.skipif(not NETNS, reason="a device in each network namespace carries data from kernel 7 on")

#: by then a call that waits knows that its device is gone, s; this is emulated, and was 7.6 beside load
KNOWN_S = 20.0


@contextmanager
def host(number: int) -> Iterator[Node]:
    """A network namespace that has nothing but ``lo``, and what this process needs to play a host there."""
    name = f"self{number}"
    deadline = Deadline(20)
    while subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        deadline.check("make a namespace: the kernel has none while devices of another one go")
        time.sleep(0.5)
    node = Node(number, 4, name)
    try:
        node.run("ip", "link", "set", "lo", "up")
        node.setting("net/ipv6/conf/default/accept_dad", 0)
        yield node
    finally:
        node.close()
        subprocess.run(["ip", "netns", "delete", name], check=True)


def joined_to_itself(node: Node) -> AbstractContextManager[tuple[Connection, Connection]]:
    """A connection of the newest device with itself; the route to its own address would not name it."""
    return connected(node, node, connect={"device": node.device}, listen={"device": node.device})


@pytest.fixture
def alone() -> Iterator[Node]:
    with host(1) as made:
        yield made


@pytest.fixture
def two() -> Iterator[tuple[Node, Node]]:
    """Two hosts with a cable between them, and no addresses."""
    with host(1) as a, host(2) as b:
        a.run("ip", "link", "add", "cable1", "type", "veth", "peer", "name", "cable2", "netns", "self2")
        for number, node in enumerate((a, b), 1):
            node.run("ip", "link", "set", f"cable{number}", "up")
        yield a, b


def add(node: Node, device: str, netdev: str, address: str, kind: str = "") -> None:
    """A device over a network device, which is made if its kind is given; when it can be used."""
    if kind:
        node.run("ip", "link", "add", netdev, "type", kind)
    node.run("ip", "addr", "add", address, "dev", netdev)
    node.run("ip", "link", "set", netdev, "up")
    node.run("rdma", "link", "add", device, "type", "rxe", "netdev", netdev)
    host_part = address.partition("/")[0]
    node.device = device

    def there() -> bool:
        with open_device(device) as context:
            port = context.port(1)
            return port.state == PortState.ACTIVE and any(str(g.gid.address) == host_part for g in port.gids)

    deadline = Deadline(20)
    while not node.call(there):
        deadline.check(f"wait for {address} on {device}")
    node.address = f"[{host_part}]" if ":" in host_part else host_part


def listens(node: Node, family: str = "-4") -> bool:
    """Whether the kernel takes RoCE there: UDP port 4791."""
    return ":4791" in node.run("ss", "-Huln", family, "sport", "=", ":4791")


def talk(here: Connection, there: Connection, count: int = 3) -> None:
    """Messages both ways."""
    for number in range(count):
        here.send(b"to %d" % number, deadline_s=PATIENCE)
        assert there.recv(deadline_s=PATIENCE) == b"to %d" % number
        there.send(b"from %d" % number, deadline_s=PATIENCE)
        assert here.recv(deadline_s=PATIENCE) == b"from %d" % number


def ends_with(node: Node, connection: Connection, *command: str) -> RdmaConnectError:
    """What a receive that waits raises when a command takes its device away; neither of the two takes long."""
    waiting = node.start(connection.recv, deadline_s=PATIENCE)
    time.sleep(0.2)
    began = time.monotonic()
    node.run(*command)
    error = waiting.exception(PATIENCE)
    took = time.monotonic() - began
    assert isinstance(error, RdmaConnectError), error
    print(f"{' '.join(command)}: {took:.2f} s: {type(error).__name__}: {error}")
    assert took < KNOWN_S
    return error


def gone(node: Node, device: str) -> bool:
    """Whether the kernel has no such device any more; a removal may be finished a while after the command."""
    deadline = Deadline(10)
    while device in subprocess.run(["rdma", "link"], capture_output=True, text=True, check=True).stdout:
        if deadline.left_s <= 0:
            return False
        time.sleep(0.1)
    return True


def test_rxe_ipv6(two: tuple[Node, Node]) -> None:
    """A device with IPv6 alone; when it is deleted the connection says so, and the port is closed."""
    for number, node in enumerate(two, 1):
        add(node, f"self6{number}", f"cable{number}", f"2001:db8::{number}/64")
        assert listens(node, "-6")
    a, b = two
    with connected(a, b) as (here, there):
        assert here.path.remote_gid is not None
        assert str(here.path.remote_gid.gid.address) == "2001:db8::2"
        talk(here, there)
        ends_with(a, here, "rdma", "link", "delete", "self61")
        assert not listens(a, "-6")
        assert listens(b, "-6")


def test_rxe_netns_names(two: tuple[Node, Node]) -> None:
    """A device is named anew below a connection, which goes on; a name that is taken is refused."""
    a, b = two
    add(a, "self71", "cable1", "10.71.0.1/24")
    add(b, "self72", "cable2", "10.71.0.2/24")
    with connected(a, b) as (here, there):
        a.run("rdma", "dev", "set", "self71", "name", "self79")
        talk(here, there)
        assert a.run("rdma", "dev", "set", "self79", "name", "self72", check=False) == ""
        talk(here, there)
        # a process that knew it by its old name opens it no more: libibverbs keeps the paths of a device
        a.run("rdma", "dev", "set", "self79", "name", "self71")
        talk(here, there)


def test_rxe_rping_between_netns(two: tuple[Node, Node]) -> None:
    for number, node in enumerate(two, 1):
        add(node, f"self8{number}", f"cable{number}", f"10.72.0.{number}/24")
        assert listens(node)
    a, b = two
    for connector, listener in ((a, b), (b, a)):
        with connected(connector, listener) as (here, there):
            talk(here, there, 20)


def test_rxe_sent_rcvd_bytes(alone: Node) -> None:
    """One device that talks to itself receives what it sends, by its own counts."""
    add(alone, "self91", "dummy91", "10.73.0.1/24", "dummy")

    def counts() -> list[int]:
        words = alone.run("rdma", "statistic", "show", "link", "self91/1").split()  # bytes on newer kernels alone
        return [int(words[words.index(f"{way}_pkts") + 1]) for way in ("sent", "rcvd")]

    before = counts()
    with joined_to_itself(alone) as (here, there):
        talk(here, there, 20)
    sent, received = (after - then for after, then in zip(counts(), before, strict=True))
    print(f"sent {sent} packets, received {received}")
    assert sent == received > 0


def test_rxe_socket_with_netns(alone: Node) -> None:
    """Two devices of one namespace share its UDP port: the one that is deleted leaves the other its own."""
    add(alone, "self92", "dummy92", "10.74.0.1/24", "dummy")
    with ExitStack() as stack:
        kept = stack.enter_context(joined_to_itself(alone))
        add(alone, "self93", "dummy93", "10.75.0.1/24", "dummy")
        with joined_to_itself(alone) as (here, there):
            talk(here, there)
            ends_with(alone, here, "rdma", "link", "delete", "self93")
        assert listens(alone)
        talk(*kept)
    alone.run("rdma", "link", "delete", "self92")
    assert not listens(alone)


def test_rxe_test_netdev_unregister(alone: Node) -> None:
    """The network device is deleted below a connection: the RDMA device goes with it, and its port."""
    add(alone, "self94", "dummy94", "10.76.0.1/24", "dummy")
    with joined_to_itself(alone) as (here, _):
        ends_with(alone, here, "ip", "link", "delete", "dummy94")
        assert gone(alone, "self94")
        assert not listens(alone)
