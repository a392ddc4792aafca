"""Ctrl-C and cancellation at any moment of any call: nothing hangs, nothing is left, nothing foreign is raised."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from software import RdmaCm, Software, after_verbs

import rdmaconnect
from rdmaconnect.exchange.alive import open_channels
from rdmaconnect.protocol.health import HealthState

from .campaign import ADDRESSES, WHERE, Campaign, descriptors, scaled, until


def trials(counted: Campaign, what: str, least: int, most: int) -> Iterator[int]:
    """As many as the scale asks for, and some more if by chance that never happened in them."""
    number = scaled(least, most)
    for trial in range(number + 50):
        if trial >= number and counted.counts[what]:
            return
        yield trial


class Interrupt(KeyboardInterrupt):
    """What the handler raises."""


class Scene:
    """A listener, and a peer that does the other half of whatever is interrupted."""

    def __init__(self, what: str, address: str) -> None:
        self.address = address
        lasting: Any = {"auto_reconnect": 5} if what == "come back" else {}
        self.listener = rdmaconnect.listen(address, regions={"there": bytearray(2000)}, **lasting)
        self.connection: rdmaconnect.Connection | None = None
        self._over = threading.Event()
        self._box: list[rdmaconnect.Connection] = []
        half = {"accept": self._connect, "meet": self._meet, "reconnect": self._reconnect}.get(what, self._accept)
        if what == "meet":
            with socket.socket() as one, socket.socket() as other:
                one.bind(("127.0.0.1", 0))
                other.bind(("127.0.0.1", 0))
                self.addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (one, other)]
        self.thread = threading.Thread(target=half)
        self.thread.start()
        if what in ("close", "recv", "write", "batches", "reconnect", "come back"):
            self.connection = rdmaconnect.connect(self.listener.url, deadline_s=10, **lasting)
        self.pool = rdmaconnect.Pool(self.listener.url, 2) if what in ("acquire", "close a pool") else None
        self.calls: dict[str, Callable[[], Any]] = {
            "acquire": lambda: self._pool.acquire(deadline_s=3),
            "close a pool": lambda: self._pool.close(),
            "connect": lambda: rdmaconnect.connect(self.listener.url, deadline_s=3),
            "accept": lambda: self.listener.accept(deadline_s=3),
            "close": lambda: self._made.close(),
            "close a listener": lambda: self.listener.close(),
            "listen": lambda: rdmaconnect.listen(self.address),
            "recv": lambda: self._made.recv(deadline_s=0.03),
            "write": lambda: [self._made.write(bytes(2000), "there", deadline_s=1) for _ in range(30)],
            "batches": self._batches,
            "reconnect": lambda: self._made.reconnect(deadline_s=3),
            "come back": self._come_back,
            "meet": lambda: rdmaconnect.meet(*self.addresses, deadline_s=3),
        }

    @property
    def _made(self) -> rdmaconnect.Connection:
        assert self.connection is not None
        return self.connection

    @property
    def _pool(self) -> rdmaconnect.Pool:
        assert self.pool is not None
        return self.pool

    def _come_back(self) -> None:
        for _ in range(3):
            self._made._end.conversation.turn(HealthState.DEAD, "the test ends this life.")
            self._made.write(bytes(9), "there", deadline_s=3)
            self._made.read("there", deadline_s=3)

    def _batches(self) -> None:
        for _ in range(5):
            with self._made.batch() as batch:
                sent = [batch.post_write(bytes(size), "there") for size in (9, 2000, 64, 65) * 3]
            sent.append(self._made.post_write(b"short", "there"))
            for transfer in sent:
                transfer.wait(deadline_s=1)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                self._box.append(self.listener.accept(deadline_s=0.2))
            except rdmaconnect.ConnectTimeout:
                continue
            except rdmaconnect.StateError:
                return

    def _reconnect(self) -> None:
        connection = self.listener.accept(deadline_s=10)
        self._box.append(connection)
        while not self._over.is_set():
            try:
                connection.reconnect(deadline_s=0.5)
            except rdmaconnect.RdmaConnectError:
                continue

    def _connect(self) -> None:
        while not self._over.is_set():
            try:
                self._box.append(rdmaconnect.connect(self.listener.url, deadline_s=0.5))
            except rdmaconnect.RdmaConnectError:
                continue

    def _meet(self) -> None:
        try:
            self._box.append(rdmaconnect.meet(*reversed(self.addresses), deadline_s=1))
        except rdmaconnect.RdmaConnectError:
            return

    def close(self) -> None:
        if self.pool is not None:  # while there is a peer
            self.pool.close()
        self._over.set()
        self.thread.join(20)
        for one in (self.connection, *self._box, self.listener):
            if one is not None:
                one.close()


WHAT = [
    "acquire",
    "close a pool",
    "connect",
    "accept",
    "close",
    "close a listener",
    "listen",
    "recv",
    "write",
    "batches",
    "reconnect",
    "come back",
    "meet",
]
#: those that there are over TCP alone
OVER_TCP = {"acquire", "close a pool", "reconnect", "come back", "meet"}


def by_both(calls: list[str]) -> Any:
    """Each call, by each exchange that has it."""
    cases = [(what, name) for what in calls for name in WHERE if name == "tcp" or what not in OVER_TCP]
    params = [pytest.param(what, WHERE[name], id=f"{what}, {name}") for what, name in cases]
    return pytest.mark.parametrize(("what", "address"), params)


@by_both(WHAT)
def test_ctrl_c(software: Software, cm: RdmaCm, counted: Campaign, what: str, address: str) -> None:
    chance = random.Random(what)
    armed = False

    def handler(number: int, frame: object) -> None:
        if armed:
            raise Interrupt

    took: list[float] = []
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with after_verbs(signal.SIGALRM):
            for trial in trials(counted, "interrupted", 7, 115):
                scene = Scene(what, address)
                result = None
                delay_s = chance.uniform(0.00002, 1.2 * sorted(took)[len(took) // 2] if took else 0.02)
                began = time.monotonic()
                try:
                    armed = True
                    if trial >= 3:  # the first three tell how long it takes
                        signal.setitimer(signal.ITIMER_REAL, delay_s)
                    result = scene.calls[what]()
                    armed = False
                    took.append(time.monotonic() - began)
                    counted.count(f"{what}: ok")
                except Interrupt:
                    armed = False
                    counted.count("interrupted")
                except BaseException as e:  # noqa: BLE001  that is what is counted
                    armed = False
                    took.append(time.monotonic() - began)
                    counted.raised(what, e)
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                counted.took(what, time.monotonic() - began, 3)
                if isinstance(result, (rdmaconnect.Connection, rdmaconnect.Listener)):
                    result.close()
                scene.close()
                counted.count("hangs", scene.thread.is_alive())
                assert until(lambda: software.left() == {}, 10), (trial, software.left())
                if trial == 3:
                    until(lambda: open_channels() == 0)
                    counted.note(f"{descriptors()} descriptors after the third")
                    flat = descriptors()
    finally:
        signal.signal(signal.SIGALRM, before)
    back = until(lambda: open_channels() == 0 and descriptors() <= flat + 40)
    assert back, (open_channels(), descriptors(), flat)
    assert counted.counts["hangs"] == 0
    # a listener interrupted in close is closed all the same, so its peer sees that
    allowed = {"recv: DeadlineExceeded", "meet: ConnectTimeout", "come back: OutcomeUnknown"}
    assert set(counted.failures()) <= allowed
    assert counted.counts["interrupted"] > 0


@by_both(["connect", "accept", "write", "recv", "close", "reconnect"])
def test_cancelled_tasks(software: Software, cm: RdmaCm, counted: Campaign, what: str, address: str) -> None:
    chance = random.Random(what)
    took: list[float] = []

    async def one(cancels: bool) -> None:
        listener = await rdmaconnect.alisten(address, regions={"there": bytearray(2000)})
        box: list[rdmaconnect.AsyncConnection] = []
        connection: Any = None

        async def accept() -> None:
            while True:
                try:
                    box.append(await listener.accept(deadline_s=0.2))
                except rdmaconnect.ConnectTimeout:
                    continue

        async def connect() -> None:
            while True:
                try:
                    box.append(await rdmaconnect.aconnect(listener.url, deadline_s=0.5))
                except rdmaconnect.RdmaConnectError:
                    continue

        async def reconnect() -> None:
            box.append(await listener.accept(deadline_s=10))
            while True:
                try:
                    await box[0].reconnect(deadline_s=0.5)
                except rdmaconnect.RdmaConnectError:
                    await asyncio.sleep(0)

        async def write() -> None:
            for _ in range(30):
                await connection.write(bytes(2000), "there", deadline_s=1)
                await asyncio.sleep(0)  # to write what fits asks nobody to wait

        peer = asyncio.create_task({"accept": connect, "reconnect": reconnect}.get(what, accept)())
        if what in ("write", "recv", "close", "reconnect"):
            connection = await rdmaconnect.aconnect(listener.url, deadline_s=10)
        calls: dict[str, Callable[[], Any]] = {
            "connect": lambda: rdmaconnect.aconnect(listener.url, deadline_s=3),
            "accept": lambda: listener.accept(deadline_s=3),
            "write": write,
            "recv": lambda: connection.recv(deadline_s=0.03),
            "close": lambda: connection.close(),
            "reconnect": lambda: connection.reconnect(deadline_s=3),
        }
        began = time.monotonic()
        task = asyncio.create_task(calls[what]())
        if cancels:
            delay_s = chance.uniform(0, 1.2 * sorted(took)[len(took) // 2])
            for _ in range(chance.choice((1, 1, 1, 3))):
                asyncio.get_running_loop().call_later(delay_s, task.cancel)
                delay_s += chance.choice((0, 0.0005, 0.003))
        result = None
        try:
            result = await task
            took.append(time.monotonic() - began)
            counted.count(f"{what}: ok")
        except asyncio.CancelledError:
            counted.count("cancelled")
        except BaseException as e:  # noqa: BLE001  that is what is counted
            took.append(time.monotonic() - began)
            counted.raised(what, e)
        counted.took(what, time.monotonic() - began, 3)
        peer.cancel()
        await asyncio.wait([peer])
        for made in (connection, result, *box):
            if isinstance(made, rdmaconnect.AsyncConnection):
                await made.close()
        if not peer.cancelled() and peer.exception() is not None:
            counted.raised("peer", peer.exception() or Exception())
        await listener.close()
        assert until(lambda: software.left() == {}, 10), software.left()

    async def all_of_them() -> None:
        for trial in trials(counted, "cancelled", 12, 170):
            await asyncio.wait_for(one(trial >= 3), 30)

    asyncio.run(all_of_them())
    assert until(lambda: open_channels() == 0)
    assert set(counted.failures()) <= {"recv: DeadlineExceeded"}
    assert counted.counts["cancelled"] > 0


@ADDRESSES
def test_waits_that_are_given_up(software: Software, cm: RdmaCm, counted: Campaign, address: str) -> None:
    chance = random.Random(2)

    async def all_of_them() -> None:
        for _ in range(scaled(20, 300)):
            listener = await rdmaconnect.alisten(address)
            accepting = asyncio.create_task(listener.accept(deadline_s=2))
            got = []
            try:
                connecting = rdmaconnect.aconnect(listener.url, deadline_s=2)
                got.append(await asyncio.wait_for(connecting, chance.uniform(0, 0.06)))
                counted.count("connected in time")
            except asyncio.TimeoutError:
                counted.count("given up")
            accepting.cancel()
            try:
                got.append(await accepting)
            except asyncio.CancelledError:
                counted.count("accepts cancelled")
            except rdmaconnect.RdmaConnectError as e:
                counted.raised("accept", e)
            for connection in got:
                await connection.close()
            await listener.close()
            assert until(lambda: software.left() == {}, 10), software.left()

    asyncio.run(all_of_them())
    assert until(lambda: open_channels() == 0)
    assert counted.counts["given up"] > 0
