"""What has changed between two connections: the second one uses what is there now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nodes import PATIENCE, Node

from rdmaconnect.abi import PortState
from rdmaconnect.agreement.options import Options
from rdmaconnect.objects.context import open_device
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.session.ports import choose_ports

NAME, NETDEV = "rxe9", "v9"


@pytest.fixture
def spare(node1: Node) -> Iterator[Node]:
    """A device of its own on node 1, whose network may be disturbed."""
    node1.run("ip", "link", "add", NETDEV, "type", "veth", "peer", "name", "w9")
    try:
        for netdev in ("w9", NETDEV):
            node1.run("ip", "link", "set", netdev, "up")
        add(node1)
        yield node1
        node1.run("rdma", "link", "delete", NAME)
    finally:
        node1.run("ip", "link", "delete", NETDEV)


def add(node: Node) -> None:
    node.run("rdma", "link", "add", NAME, "type", "rxe", "netdev", NETDEV)


def wait_for(node: Node, address: str) -> None:
    """Until the device is up and its GID table has that address, which the kernel sees to later."""

    def there() -> bool:
        with open_device(NAME) as context:
            port = context.port(1)
            return port.state == PortState.ACTIVE and any(str(g.gid) == f"::ffff:{address}" for g in port.gids)

    deadline = Deadline(PATIENCE)
    while not node.call(there):
        deadline.check(f"wait for {address} on {NAME}")


def addresses(node: Node, url: str, listener: Any) -> list[str]:
    """The two GIDs that a connection uses, after a message has gone both ways."""
    there = node.start(listener.accept, deadline_s=PATIENCE)
    here = node.connect(url, device=NAME)
    with here.result(PATIENCE * 2) as here_, there.result(PATIENCE) as there_:
        here_.send(b"to")
        assert there_.recv(deadline_s=PATIENCE) == b"to"
        assert here_.local.port.device == there_.local.port.device == NAME
        return [str(end.path.local_gid.gid.address) for end in (here_, there_)]


def test_an_address_that_moved_and_a_device_that_was_made_anew(spare: Node) -> None:
    spare.run("ip", "addr", "add", "10.77.0.1/24", "dev", NETDEV)
    wait_for(spare, "10.77.0.1")
    with spare.listening(device=NAME) as listener:
        for _ in range(2):
            assert addresses(spare, listener.url, listener) == ["10.77.0.1"] * 2
        spare.run("ip", "addr", "del", "10.77.0.1/24", "dev", NETDEV)
        spare.run("ip", "addr", "add", "10.77.0.2/24", "dev", NETDEV)
        wait_for(spare, "10.77.0.2")
        for _ in range(2):
            assert addresses(spare, listener.url, listener) == ["10.77.0.2"] * 2
        spare.run("rdma", "link", "delete", NAME)
        add(spare)
        wait_for(spare, "10.77.0.2")
        for _ in range(2):
            assert addresses(spare, listener.url, listener) == ["10.77.0.2"] * 2


def test_what_is_read_while_addresses_change_is_what_is_there_in_the_end(spare: Node) -> None:
    """Asked all the time, in the midst of the change too: nothing of before is left when it is over."""
    for number in range(1, 6):
        spare.run("ip", "addr", "add", f"10.77.{number}.1/24", "dev", NETDEV)

        def seen() -> list[str]:
            return [str(entry.gid.address) for entry in choose_ports(Options(device=NAME)).ports[0].gids]

        deadline = Deadline(PATIENCE)
        while f"10.77.{number}.1" not in spare.call(seen):
            deadline.check("see the new address")
        spare.run("ip", "addr", "del", f"10.77.{number}.1/24", "dev", NETDEV)
        deadline = Deadline(PATIENCE)
        while f"10.77.{number}.1" in spare.call(seen):
            deadline.check("see that it is gone")
