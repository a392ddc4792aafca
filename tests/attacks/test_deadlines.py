"""No call outlives its deadline by more than 0.3 s, whatever the peer, the name server or the device is at."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from software import Device, Port, Software

import rdmaconnect
from rdmaconnect.abi import QpState

from . import hostile
from .campaign import Campaign, aside, pair, scaled, until
from .children import Child
from .hostile import message, pack, reply
from .zmtp import Peer

RTR = int(QpState.RTR)


class Accepting:
    """A thread that accepts whoever comes, as long as the context lasts."""

    def __init__(self, listener: rdmaconnect.Listener) -> None:
        self.accepted: list[rdmaconnect.Connection] = []
        self._listener, self._over = listener, threading.Event()
        self._thread = threading.Thread(target=self._accept)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                self.accepted.append(self._listener.accept(deadline_s=0.1))
            except rdmaconnect.ConnectTimeout:
                continue

    def __enter__(self) -> Accepting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for connection in self.accepted:
            connection.close()


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("deadline_s", [0, 1e-9, 0.001, 0.05, 0.2])
def test_calls_that_cannot_succeed(software: Software, counted: Campaign, deadline_s: float) -> None:
    def call(what: str, function: Any, *args: Any) -> None:
        counted.call(what, function, *args, deadline_s=deadline_s, within_s=deadline_s)

    silent = socket.create_server(("127.0.0.1", 0))
    with silent, rdmaconnect.listen("127.0.0.1:0") as listener, rdmaconnect.listen("127.0.0.1:0") as other:
        for _ in range(scaled(1, 20)):
            here, there = pair(other)  # anew: who waits in reconnect has given up the connection before
            with here, there:
                call("connect, nobody", rdmaconnect.connect, nobody())
                call("connect, no route", rdmaconnect.connect, "192.0.2.1:18515")
                call("connect, a silent host", rdmaconnect.connect, f"127.0.0.1:{silent.getsockname()[1]}")
                call("accept", listener.accept)
                call("recv", here.recv)
                call("recv_imm", here.recv_imm)
                call("reconnect there", there.reconnect)
                call("meet", rdmaconnect.meet, "127.0.0.1:0", nobody())
    assert not any(what.endswith(": ok") for what in counted.counts)
    assert set(counted.failures()) == {
        "connect, nobody: ConnectTimeout", "connect, no route: ConnectTimeout",
        "connect, a silent host: ConnectTimeout", "accept: ConnectTimeout", "recv: DeadlineExceeded",
        "recv_imm: DeadlineExceeded", "reconnect there: ConnectTimeout", "meet: ConnectTimeout",
    }  # fmt: skip


HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def two_devices() -> Iterator[Software]:
    """``soft0`` on 127.0.0.1 for those who connect, and ``soft1`` on 127.0.0.2 for those who listen."""
    with Software([Device("soft0"), Device("soft1", ports=[Port(gids=[THERE])])]) as made:
        yield made
        assert until(lambda: made.left() == {}, 30)
        problems = made.problems()
    assert problems == []


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("whose", ["connector", "listener"])
def test_a_slow_device(two_devices: Software, counted: Campaign, whose: str, count: int) -> None:
    # one RTR that blocks for long, as where nobody answers ARP, or many that take their time
    delay = 2.0 if count == 1 else 0.05
    with rdmaconnect.listen("127.0.0.1:0", device="soft1") as listener, Accepting(listener):
        slow = {"connector": THERE, "listener": HERE}[whose]
        with two_devices.on("ibv_modify_qp", to=RTR, dgid=slow, delay=delay):
            for _ in range(scaled(1, 10)):
                counted.call(
                    "connect", rdmaconnect.connect_many, listener.url, count, device="soft0",
                    deadline_s=0.5, within_s=0.5,
                )  # fmt: skip
            assert until(lambda: two_devices.left() == {}, 30)
        connect = rdmaconnect.connect
        made = counted.call("connect when it is fast", connect, listener.url, device="soft0", deadline_s=10)
        made.close()
    assert set(counted.failures()) == {"connect: ConnectTimeout"}


def test_a_listener_closes_while_an_answer_blocks(two_devices: Software, counted: Campaign) -> None:
    for _ in range(scaled(1, 10)):
        listener = rdmaconnect.listen("127.0.0.1:0", device="soft1")
        accepted = aside(counted.call, "accept", listener.accept, deadline_s=20)
        with two_devices.on("ibv_modify_qp", to=RTR, dgid=HERE, delay=2.0):
            connected = aside(
                counted.call, "connect", rdmaconnect.connect, listener.url, device="soft0", deadline_s=1, within_s=1
            )
            until(lambda: two_devices.made["qp"] % 2 == 0 and two_devices.made["qp"] > 0)
            time.sleep(0.2)
            counted.call("close", listener.close, within_s=0)
            accepted.result()
            connected.result()
        assert until(lambda: two_devices.left() == {}, 10)
    assert counted.counts["accept: StateError"] == counted.counts["close: ok"] == scaled(1, 10)


def test_an_answer_that_blocks_holds_up_nobody_else(two_devices: Software, counted: Campaign) -> None:
    nowhere = "10.66.6.6"
    two_devices.on("ibv_modify_qp", dgid=nowhere, delay=1.5, fail=errno.ETIMEDOUT)
    with rdmaconnect.listen("127.0.0.1:0", device="soft1") as listener, Accepting(listener):
        for _ in range(scaled(1, 10)):
            peers = []
            for _ in range(64):
                peers.append(Peer.connect(listener.port))
                peers[-1].send(pack(hostile.hello(address=nowhere)))
            time.sleep(0.3)
            made = counted.call("connect", rdmaconnect.connect, listener.url, device="soft0", deadline_s=1, within_s=1)
            made.close()
            for peer in peers:
                peer.close()
    assert counted.failures() == {}, counted.said


def test_a_slow_name_server(software: Software, counted: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def slow(host: Any, *more: Any, **named: Any) -> Any:
        if host == "slow.example":
            time.sleep(2)
            host = "127.0.0.1"
        return real(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for _ in range(scaled(1, 10)):
        counted.call("connect", rdmaconnect.connect, "slow.example:1", deadline_s=0.3, within_s=0.3)
        counted.call("meet", rdmaconnect.meet, "127.0.0.1:0", "slow.example:1", deadline_s=0.3, within_s=0.3)
    time.sleep(2)
    assert set(counted.failures()) == {"connect: ConnectTimeout", "meet: ConnectTimeout"}


def test_a_connector_whose_listener_floods(software: Software, counted: Campaign) -> None:
    over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def flood(answers: bool) -> None:
        peer = Peer(server.accept()[0])
        peer.sock.settimeout(2)
        try:
            peer.shake()
            asked = msgpack.unpackb(peer.recv())
            if answers:
                peer.send(pack(reply(asked)))
            ident = asked["id"] if answers else bytes(16)
            while not over.is_set():
                peer.send(*[message("beat", ident)] * 500)
                counted.count("frames of the flood", 500)
        except OSError:
            return
        finally:
            peer.close()

    url = f"127.0.0.1:{server.getsockname()[1]}"
    with server:
        for _ in range(scaled(1, 10)):
            over.clear()
            flooding = aside(flood, False)
            counted.call("connect", rdmaconnect.connect, url, deadline_s=1, within_s=1)
            over.set()
            flooding.result()
            over.clear()
            flooding = aside(flood, True)
            connection = rdmaconnect.connect(url, deadline_s=5, probe=False)
            for _ in range(3):
                counted.call("recv", connection.recv, deadline_s=0.3, within_s=0.3)
                counted.call("lost", lambda made: made.lost, connection, within_s=0)
            counted.call("close", connection.close, within_s=0)
            over.set()
            flooding.result()
    # a flood is held up, or cut off where it outruns this process: each call is over in time all the same
    held_up, cut_off = (
        {"connect: ConnectTimeout", "recv: DeadlineExceeded"},
        {"connect: RemoteProtocolError", "recv: PeerClosed"},
    )
    assert counted.failures()
    assert set(counted.failures()) <= held_up | cut_off
    assert counted.counts["frames of the flood"] > 2000


def test_a_listener_whose_peers_flood(software: Software, counted: Campaign) -> None:
    over = threading.Event()

    def flood(port: int, joins: bool) -> None:
        peer = Peer.connect(port)
        peer.sock.settimeout(1)
        ident = os.urandom(16)
        try:
            if joins:
                peer.send(pack(hostile.hello(ident)))
                peer.recv()
                peer.send(message("ready", ident))
            while not over.is_set():
                peer.send(*[message("beat", ident) if joins else bytes(20)] * 500)
                counted.count("frames of the flood", 500)
        except OSError:
            return
        finally:
            peer.close()

    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        floods = [aside(flood, listener.port, True) for _ in range(2)]
        connections = [listener.accept(deadline_s=10) for _ in floods]
        floods += [aside(flood, listener.port, False) for _ in range(2)]
        for _ in range(scaled(2, 50)):
            counted.call("accept", listener.accept, deadline_s=0.3, within_s=0.3)
            for connection in connections:
                counted.call("recv", connection.recv, deadline_s=0.1, within_s=0.1)
                counted.call("lost", lambda made: made.lost, connection, within_s=0)
        for connection in connections:
            counted.call("close", connection.close, within_s=0)
        counted.call("close the listener", listener.close, within_s=0)
        over.set()
        for flooding in floods:
            flooding.result()
    assert counted.counts["accept: ConnectTimeout"] == scaled(2, 50)
    received = counted.counts["recv: DeadlineExceeded"] + counted.counts["recv: PeerClosed"]
    assert received == 2 * scaled(2, 50)


PEER = """
connection = rdmaconnect.connect(url, deadline_s=10, probe=False, **options)
say("connected")
time.sleep(100)
"""


@pytest.mark.parametrize("options", [{}, {"secret": "a secret of thirty-two characters"}], ids=["plain", "protected"])
def test_what_a_stopped_peer_does_not_take_holds_up_nobody(
    software: Software, counted: Campaign, options: dict[str, str]
) -> None:
    with rdmaconnect.listen("127.0.0.1:0", probe=False, **options) as listener:
        accepted = aside(listener.accept, deadline_s=20)
        with Child(PEER, url=listener.url, options=options) as child:
            connection = accepted.result()
            assert child.line() == "connected"
            child.signal(signal.SIGSTOP)
            channel = connection._end.conversation.channel
            assert channel is not None
            for _ in range(3000):
                channel.send(bytes(60000))
            counted.call("recv", connection.recv, deadline_s=0.3, within_s=0.3)
            counted.call("close", connection.close, within_s=0)
            counted.call("close the listener", listener.close, within_s=0)
            child.signal(signal.SIGCONT)
    assert counted.counts["close: ok"] == counted.counts["close the listener: ok"] == 1


def test_slow_peers_leave_the_event_loop_to_a_fast_one(two_devices: Software, counted: Campaign) -> None:
    # 24 connects whose RTR blocks, and the program's own use of the loop's executor beside them
    async def all_of_them() -> None:
        slow = await rdmaconnect.alisten("127.0.0.1:0", device="soft1")
        fast = await rdmaconnect.alisten("127.0.0.1:0", device="soft1")

        async def accept(listener: rdmaconnect.AsyncListener) -> None:
            while True:
                try:
                    await (await listener.accept(deadline_s=0.2)).close()
                except rdmaconnect.ConnectTimeout:
                    continue

        accepting = [asyncio.create_task(accept(listener)) for listener in (slow, fast)]
        with two_devices.on("ibv_modify_qp", to=RTR, dgid=THERE, delay=1.5, times=24):
            blocked = [rdmaconnect.aconnect(slow.url, device="soft0", deadline_s=1) for _ in range(24)]
            tasks = [asyncio.create_task(one) for one in blocked]
            await asyncio.sleep(0.6)
            began = time.monotonic()
            connection = await rdmaconnect.aconnect(fast.url, device="soft0", deadline_s=1)
            counted.took("the fast one", time.monotonic() - began, 1)
            await connection.close()
            began = time.monotonic()
            await asyncio.get_running_loop().getaddrinfo("localhost", 1)
            counted.took("the program's own look-up", time.monotonic() - began, 0.2)
            for one in await asyncio.gather(*tasks, return_exceptions=True):
                counted.count(type(one).__name__)
        for task in accepting:
            task.cancel()
        await asyncio.wait(accepting)
        await slow.close()
        await fast.close()

    for _ in range(scaled(1, 10)):
        asyncio.run(all_of_them())
    assert counted.counts["ConnectTimeout"] == 24 * scaled(1, 10)
