"""Many connections: in bulk, to one listener, and both sides calling each other."""

from __future__ import annotations

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from nodes import NETNS, PATIENCE, Node, enter

import rdmaconnect
from rdmaconnect import Connection
from rdmaconnect.protocol.handshake import Role
from rdmaconnect.protocol.messages import Hello, Message, Proof, Ready
from rdmaconnect.session.conversation import Conversation


def test_bulk_is_one_exchange_and_all_are_usable(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1000
    said: list[type] = []
    real = Conversation.say

    def say(self: Conversation, message: Message) -> None:
        if self.handshake.role is Role.CONNECTOR:
            said.append(type(message))
        real(self, message)

    monkeypatch.setattr(Conversation, "say", say)
    with node2.listening(recv_size=4096, recv_depth=2, send_depth=2) as listener:
        there = node2.start(listener.accept, deadline_s=PATIENCE * 5, tolerant=False)
        sizes = {"recv_size": 4096, "recv_depth": 2, "send_depth": 2}
        mine = node1.connect_many(listener.url, count, deadline_s=PATIENCE * 5, **sizes).result(PATIENCE * 6)
        theirs = [there.result(PATIENCE)] + [node2.call(listener.accept, deadline_s=PATIENCE) for _ in range(count - 1)]
        try:
            assert said == [Hello, Ready, Proof]
            assert len({c.local.qp_num for c in mine}) == count
            assert mine[0]._end.engine is mine[-1]._end.engine
            by_number = {c.local.qp_num: c for c in theirs}
            for i, conn in enumerate(mine):
                conn.send(i.to_bytes(4, "big"), deadline_s=PATIENCE)
            for i, conn in enumerate(mine):
                assert by_number[conn.peer.qp_num].recv(deadline_s=PATIENCE) == i.to_bytes(4, "big")
        finally:
            for conn in mine + theirs:
                conn.close()


def test_bulk_beyond_the_device_is_refused_with_the_numbers(node1: Node, node2: Node) -> None:
    with (
        node2.listening() as listener,
        pytest.raises(rdmaconnect.DeviceError, match=r"prepare 4096 queue pairs.*entries"),
    ):
        node1.connect_many(listener.url, 4096, recv_depth=16, send_depth=16).result(PATIENCE)


@pytest.mark.parametrize("count", [0, 4097])
def test_count_has_a_range(count: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 4096"):
        rdmaconnect.connect_many("127.0.0.1", count)


def test_meeting_from_either_order_and_at_once(node1: Node, node2: Node) -> None:
    for delays in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
        ports = [_free_port(node) for node in (node1, node2)]
        with _met(node1, node2, ports, delays) as (a, b):
            a.send(b"hello")
            assert b.recv(deadline_s=PATIENCE) == b"hello"
            b.send(b"hello yourself")
            assert a.recv(deadline_s=PATIENCE) == b"hello yourself"


class _met:
    def __init__(self, one: Node, other: Node, ports: list[int], delays: tuple[float, float]) -> None:
        urls = [f"{node.address}:{port}" for node, port in zip((one, other), ports, strict=True)]
        self._ends = [
            one.start(_meet, urls[0], urls[1], delays[0], one.named),
            other.start(_meet, urls[1], urls[0], delays[1], other.named),
        ]

    def __enter__(self) -> tuple[Connection, Connection]:
        a, b = (end.result(PATIENCE * 2) for end in self._ends)
        return a, b

    def __exit__(self, *error: Any) -> None:
        for end in self._ends:
            end.result(0).close()


def _meet(local: str, peer: str, delay: float, named: dict[str, Any], **options: Any) -> Connection:
    time.sleep(delay)
    return rdmaconnect.meet(local, peer, deadline_s=PATIENCE * 3, **named, **options)


def _free_port(node: Node) -> int:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind((node.address, 0))
            return int(probe.getsockname()[1])

    return int(node.call(find))


@pytest.mark.skipif(not NETNS, reason="one namespace: both sides would take each other's ports")
def test_pairs_meet_in_random_order(node1: Node, node2: Node) -> None:
    """In waves, since each side is a thread; each pair starts at random times, and gives exactly one connection.

    Emulation takes a second for each; RDMACONNECT_LAB_PAIRS=1000 asks for all of them.
    """
    pairs, wave, dice = int(os.environ.get("RDMACONNECT_LAB_PAIRS", "60")), 10, random.Random(4791)
    small = {"recv_size": 4096, "recv_depth": 2, "send_depth": 2, "spin": 0}
    met = 0
    pools = [ThreadPoolExecutor(wave, initializer=enter, initargs=(f"n{n.number}",)) for n in (node1, node2)]
    try:
        for base in range(0, pairs, wave):
            jobs = []
            for i in range(base, base + wave):
                urls = [f"{node.address}:{20000 + i}" for node in (node1, node2)]
                delays = [dice.random() * 0.5, dice.random() * 0.5]
                jobs += [pools[0].submit(_meet, urls[0], urls[1], delays[0], {}, **small)]
                jobs += [pools[1].submit(_meet, urls[1], urls[0], delays[1], {}, **small)]
            ends = [job.result(PATIENCE * 4) for job in jobs]
            for a, b in zip(ends[::2], ends[1::2], strict=True):
                assert (a.local.qp_num, a.local.psn) == (b.peer.qp_num, b.peer.psn)
                assert (b.local.qp_num, b.local.psn) == (a.peer.qp_num, a.peer.psn)
                met += 1
            for end in ends:
                end.close()
    finally:
        for pool in pools:
            pool.shutdown()
    assert met == pairs
