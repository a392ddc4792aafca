"""Closing many connections at once."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from exchange_ends import PATIENCE_S
from software import Software

import rdmaconnect
from rdmaconnect.errors import VerbsError


def made(listener: rdmaconnect.Listener, count: int) -> list[rdmaconnect.Connection]:
    """So many connections made together, of both ends."""
    here = rdmaconnect.connect_many(listener.url, count, deadline_s=PATIENCE_S)
    return here + [listener.accept(deadline_s=PATIENCE_S) for _ in range(count)]


def test_all_are_closed_and_nothing_of_them_is_left(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        before = software.left()
        conns = made(listener, 3) + made(listener, 1)
        conns[1].close()
        rdmaconnect.close_many(iter(conns))
        assert [conn.closed for conn in conns] == [True] * 8
        assert software.left() == before
        rdmaconnect.close_many(conns)
        rdmaconnect.close_many([])


def test_what_is_no_connection_keeps_all_open(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        conns: list[Any] = made(listener, 1)
        with pytest.raises(TypeError, match="one of connections is 'peer': give a connection"):
            rdmaconnect.close_many([*conns, "peer"])
        assert not any(conn.closed for conn in conns)
        rdmaconnect.close_many(conns)


def test_what_is_refused_is_told_and_all_else_is_closed(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        before = software.left()
        conns = made(listener, 3)
        stays = conns[1].local.qp_num
        with software.on("ibv_destroy_qp", where=lambda call: call.qp_num == stays, fail=errno.EBUSY):
            with pytest.raises(VerbsError, match="ibv_destroy_qp: EBUSY"):
                rdmaconnect.close_many(conns)
            assert all(conn.closed for conn in conns)
            assert [qp.qp_num for qp in software.objects("qp")] == [stays]
        rdmaconnect.close_many(conns)
        assert software.left() == before


def test_tasks_do_the_same(software: Software) -> None:
    async def many() -> list[bool]:
        async with await rdmaconnect.alisten("127.0.0.1:0") as listener:
            here = await rdmaconnect.aconnect_many(listener.url, 2, deadline_s=PATIENCE_S)
            there = [await listener.accept(deadline_s=PATIENCE_S) for _ in here]
            await rdmaconnect.aclose_many([*here, *there])
            return [conn.closed for conn in (*here, *there)]

    assert asyncio.run(many()) == [True] * 4
