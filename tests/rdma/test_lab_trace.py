"""The stages of a handshake between two nodes, as both ends see them."""

from __future__ import annotations

import asyncio

from nodes import PATIENCE, Node, connected

import rdmaconnect
from rdmaconnect import AsyncConnection, Connection
from rdmaconnect.session.trace import Mark

CALLER = ["port", "prepared", "hello", "reply", "path", "joined", "ready", "proof", "proven", "connected"]
CALLED = ["hello", "port", "prepared", "path", "reply", "ready", "joined", "proof", "proven", "connected"]


def stages(marks: tuple[Mark, ...], end: str) -> list[str]:
    return [mark.stage for mark in marks if mark.end == end]


def check(here: Connection | AsyncConnection, there: Connection | AsyncConnection) -> None:
    """Both ends know their own stages, and the other's until its proof, in an order that can be."""
    for conn, mine, theirs in ((here, CALLER, CALLED), (there, CALLED, CALLER)):
        marks = conn.trace
        assert sorted(stages(marks, "local")) == sorted(mine)
        assert stages(marks, "local")[-1] == "connected"
        assert stages(marks, "peer") == theirs[: theirs.index("proof") + 1]
        assert [mark.at_s for mark in marks] == sorted(mark.at_s for mark in marks)
        at = {(mark.end, mark.stage): mark for mark in marks}
        for stage, sender in (("hello", CALLER), ("reply", CALLED), ("ready", CALLER)):
            sent, came = (("local", stage), ("peer", stage))[:: 1 if sender is mine else -1]
            assert at[sent].at_s <= at[came].at_s + at["peer", stage].within_s
        assert 0 < at["peer", "reply"].within_s < PATIENCE
    lasted = here.trace[-1].at_s
    assert 0 < lasted <= here.connect_s + 0.1


def test_both_ends_see_both_and_anew_after_reconnect(node1: Node, node2: Node) -> None:
    with connected(node1, node2) as (here, there):
        check(here, there)
        before = here.trace
        accepting = node2.start(there.reconnect, deadline_s=PATIENCE)
        node1.call(here.reconnect, deadline_s=PATIENCE)
        accepting.result(PATIENCE)
        assert stages(here.trace, "local") == [stage for stage in CALLER if stage != "port"]
        assert stages(there.trace, "local")[0] == "hello"
        assert here.trace[-1].at_s < before[-1].at_s + PATIENCE
        assert here.trace != before


def test_connections_made_together_share_one(node1: Node, node2: Node) -> None:
    with node2.listening() as listener:
        made = node1.connect_many(listener.url, 3)
        theirs = [node2.call(listener.accept, deadline_s=PATIENCE) for _ in range(3)]
        ours = made.result(PATIENCE)
        check(ours[0], theirs[2])
        assert ours[0].trace == ours[2].trace
        for conn in (*ours, *theirs):
            conn.close()
        assert stages(ours[0].trace, "local")  # it can still be read


def test_with_asyncio_it_is_the_same(node1: Node, node2: Node) -> None:
    async def call(url: str) -> AsyncConnection:
        return await rdmaconnect.aconnect(url, deadline_s=PATIENCE, **node1.named)

    with node2.listening() as listener:
        accepting = node2.start(listener.accept, deadline_s=PATIENCE)
        here = node1.call(lambda: asyncio.run(call(listener.url)))
        there = accepting.result(PATIENCE)
        check(here, there)
        node1.call(lambda: asyncio.run(here.close()))
        there.close()
