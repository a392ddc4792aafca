"""Lives of a connection: it is lost at any moment, in any way, and every message is delivered once, or raised."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from software import Software

import rdmaconnect
from rdmaconnect import OutcomeUnknown
from rdmaconnect.abi import QpState
from rdmaconnect.errors import PeerClosed
from rdmaconnect.protocol.health import HealthState

from .campaign import Campaign, Flat, aside, pair, scaled, until

TYPES = ("RC", "UC", "UD")


def break_side_channel(connection: Any) -> None:
    """As if the peer were known to be gone."""
    connection._end.conversation.turn(HealthState.DEAD, "the test ends this life.")


def break_data_path(connection: Any) -> None:
    """As if a transfer had failed."""
    transceiver = connection._end.transceiver
    with transceiver.engine.lock:
        if transceiver.qp.state is QpState.RTS:
            transceiver.qp.move(QpState.ERR)


WAYS: list[Callable[[Any], None]] = [break_side_channel, break_data_path]


class Account:
    """What one side has sent, what became of each, and what has come at the other."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.unknown: set[int] = set()
        self.came: list[int] = []

    def check(self, counted: Campaign, lossy: bool) -> None:
        counted.count("sent", len(self.sent))
        counted.count("unknown", len(self.unknown))
        counted.count("delivered", len(self.came))
        assert len(set(self.came)) == len(self.came)  # nothing twice
        assert set(self.came) <= set(self.sent) | self.unknown
        assert lossy or self.came == sorted(self.came)
        if not lossy:
            assert set(self.sent) <= set(self.came), sorted(set(self.sent) - set(self.came))[:5]


def send(connection: Any, account: Account, over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        try:
            connection.send(number.to_bytes(8, "big"), deadline_s=20)
        except OutcomeUnknown:
            account.unknown.add(number)
        else:
            account.sent.append(number)
        number += 1
    connection.send(b"", deadline_s=20)


def receive(connection: Any, account: Account) -> None:
    while message := connection.recv(deadline_s=20):
        account.came.append(int.from_bytes(message, "big"))


@pytest.mark.parametrize("kind", TYPES)
def test_every_message_is_delivered_once_or_raised(software: Software, counted: Campaign, kind: str) -> None:
    chance, lives = random.Random(5), scaled(30, 1500)
    flat = Flat(counted, lives // 3)
    there_to_here, here_to_there, over = Account(), Account(), threading.Event()
    with rdmaconnect.listen("127.0.0.1:0", auto_reconnect=20) as listener:
        here, there = pair(listener, auto_reconnect=20, qp_type=kind)
        with here, there:
            users = [
                aside(send, here, here_to_there, over), aside(send, there, there_to_here, over),
                aside(receive, there, here_to_there), aside(receive, here, there_to_here),
            ]  # fmt: skip
            for _ in range(lives):
                before = here.generation, there.generation
                time.sleep(chance.uniform(0, 0.02))
                chance.choice(WAYS)(chance.choice((here, there)))
                assert until(lambda b=before: here.generation > b[0] and there.generation > b[1], 20), (here, there)
                flat.round()
            over.set()
            while kind != "RC" and not all(user.done() for user in users):  # the last word may be lost
                time.sleep(0.01)
                for one in (here, there):
                    one.send(b"", deadline_s=20)
            for user in users:
                user.result(60)
        counted.count("lives", lives)
    here_to_there.check(counted, kind != "RC")
    there_to_here.check(counted, kind != "RC")
    assert counted.counts["delivered"] > lives
    flat.check()


def test_a_peer_that_is_killed_and_comes_again(software: Software, counted: Campaign) -> None:
    """Its process is gone with all that it had; another one listens at the same address."""
    lives = scaled(6, 300)
    flat = Flat(counted, lives // 3)
    there = rdmaconnect.listen("127.0.0.1:0")
    accepted = aside(there.accept, deadline_s=10)
    with rdmaconnect.connect(there.url, auto_reconnect=20) as here:
        for number in range(lives):
            peer = accepted.result(10)
            here.send(b"%d" % number, deadline_s=10)
            counted.count("answered", peer.recv(deadline_s=10) == b"%d" % number)
            waiting = aside(here.recv, deadline_s=20)
            kill(there, peer)
            there = rdmaconnect.listen(there.url)
            accepted = aside(there.accept, deadline_s=10)
            successor = accepted.result(10)
            successor.send(b"hello", deadline_s=10)
            counted.count("waited on", waiting.result(20) == b"hello")
            flat.round()
        accepted.result(10).close()
        there.close()
        assert here.generation == lives + 1
    assert until(lambda: software.left() == {})
    flat.check()
    assert counted.counts["answered"] == counted.counts["waited on"] == lives


def kill(listener: Any, connection: Any) -> None:
    """No word is said, and nothing is left: as the kernel does with what a killed process had."""
    end = connection._end
    listener._acceptor.close()
    end.conversation.channel.close()
    end.conversation.over(PeerClosed("it was killed."))
    connection.close()
    listener.close()


@pytest.mark.parametrize("kind", TYPES)
def test_many_at_once_are_lost_and_closed_at_any_moment(software: Software, counted: Campaign, kind: str) -> None:
    """Whoever uses them has an answer in time, a connection that is closed stays closed, and nothing is left."""
    chance, trials, each = random.Random(7), scaled(3, 100), 6
    flat = Flat(counted, min(3, trials))

    def use(connection: rdmaconnect.Connection, what: str, *words: bytes) -> None:
        while True:
            try:
                getattr(connection, what)(*words, deadline_s=10)
            except OutcomeUnknown:
                counted.count("unknown")
            except rdmaconnect.DeadlineExceeded as e:
                counted.raised(what, e)
                return
            except (rdmaconnect.PeerClosed, rdmaconnect.StateError):
                return
            if not words:
                continue
            time.sleep(0.001)

    for _ in range(trials):
        with rdmaconnect.listen("127.0.0.1:0", auto_reconnect=10) as listener:
            pairs = [pair(listener, auto_reconnect=10, qp_type=kind) for _ in range(each)]
            users = [aside(use, one, *what) for ends in pairs for one in ends for what in (("recv",), ("send", b"x"))]
            for _ in range(3 * each):
                chance.choice(WAYS)(chance.choice(chance.choice(pairs)))
                time.sleep(chance.uniform(0, 0.01))
            closing = [one for ends in pairs for one in ends]
            chance.shuffle(closing)
            for one in closing:
                counted.call("close", one.close, within_s=1.5)
                time.sleep(chance.uniform(0, 0.02))
            for user in users:
                user.result(30)
            counted.count("lives", sum(one.generation for one in closing))
        assert until(lambda: software.left() == {}), software.left()
        flat.round()
    flat.check()
    assert counted.failures() == {}, counted.said
    assert counted.counts["lives"] > trials * each * 2


def test_tasks_use_them_and_are_cancelled(software: Software, counted: Campaign) -> None:
    """The same for asyncio: a task that is cancelled while its connection comes back takes nothing with it."""
    chance, lives = random.Random(9), scaled(12, 600)
    here_to_there = Account()

    async def send(connection: rdmaconnect.AsyncConnection) -> None:
        while True:
            number = len(here_to_there.sent) + len(here_to_there.unknown)
            try:
                await connection.send(number.to_bytes(8, "big"), deadline_s=20)
            except OutcomeUnknown:
                here_to_there.unknown.add(number)
            else:
                here_to_there.sent.append(number)

    async def receive(connection: rdmaconnect.AsyncConnection) -> None:
        while True:
            here_to_there.came.append(int.from_bytes(await connection.recv(deadline_s=20), "big"))

    async def main() -> None:
        async with await rdmaconnect.alisten("127.0.0.1:0", auto_reconnect=20) as listener:
            accepting = asyncio.create_task(listener.accept())
            async with await rdmaconnect.aconnect(listener.url, auto_reconnect=20) as here, await accepting as there:
                sending, receiving = asyncio.create_task(send(here)), asyncio.create_task(receive(there))
                for _ in range(lives):
                    before = here.generation, there.generation
                    chance.choice(WAYS)(chance.choice((here, there)))
                    await asyncio.sleep(chance.uniform(0, 0.01))
                    receiving.cancel()
                    await asyncio.wait([receiving])
                    receiving = asyncio.create_task(receive(there))
                    async with asyncio.timeout(20):
                        while here.generation == before[0] or there.generation == before[1]:
                            await asyncio.sleep(0.002)
                await asyncio.sleep(0.05)
                sending.cancel()
                await asyncio.wait([sending])
                await asyncio.sleep(0.1)
                receiving.cancel()
                await asyncio.wait([receiving])
                counted.count("lives", lives)

    asyncio.run(main())
    here_to_there.unknown.add(len(here_to_there.sent) + len(here_to_there.unknown))  # the one that was cancelled
    here_to_there.check(counted, lossy=False)
