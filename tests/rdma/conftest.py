"""The two nodes as fixtures; after each test nothing may be left on their devices."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from nodes import Node, connected, descriptors

from rdmaconnect import Connection


@pytest.fixture(scope="session")
def node1() -> Node:
    return Node(1)


@pytest.fixture(scope="session")
def node2() -> Node:
    return Node(2)


@pytest.fixture
def pair(node1: Node, node2: Node) -> Iterator[tuple[Connection, Connection]]:
    """A connection with nothing asked for."""
    with connected(node1, node2) as ends:
        yield ends


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test does, it leaves no descriptor of a device open; the kernel's objects die with those."""
    before = descriptors()
    yield
    for _ in range(20):  # a worker may be reading sysfs just now
        if descriptors() <= before:
            break
        time.sleep(0.1)
    assert descriptors() <= before
