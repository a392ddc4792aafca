"""Bind, bytes, connect on two nodes: each type and order; nothing stays behind."""

from __future__ import annotations

import pytest
from nodes import PATIENCE, Node

import rdmaconnect
from rdmaconnect import BoundEnd, HealthState


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_each_type_in_either_order(node1: Node, node2: Node, qp_type: str) -> None:
    for first, second in ((node1, node2), (node2, node1)):
        nodes = first, second
        ends: list[BoundEnd] = [
            node.call(rdmaconnect.bind, qp_type=qp_type, secret="a secret of the lab", **node.named) for node in nodes
        ]
        print(f"{qp_type}: {len(ends[0].to_bytes())} bytes of {len(ends[0].ports[0].gids)} GIDs")
        one = first.start(ends[0].connect, ends[1].to_bytes(), deadline_s=PATIENCE)
        with pytest.raises(TimeoutError):  # it waits for the other one
            one.result(3)
        other = second.start(ends[1].connect, ends[0].to_bytes(), deadline_s=PATIENCE)
        here, there = one.result(PATIENCE * 2), other.result(PATIENCE * 2)
        here.send(b"out")
        there.send(b"back")
        assert (there.recv(deadline_s=PATIENCE), here.recv(deadline_s=PATIENCE)) == (b"out", b"back")
        assert here.health.state is HealthState.ALIVE
        here.close()
        with pytest.raises(rdmaconnect.PeerClosed, match=r"the peer closed the connection \(close\)"):
            there.recv(deadline_s=PATIENCE)
        there.close()
