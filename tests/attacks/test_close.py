"""Ends that close at any moment: listeners while others accept, connections while others use them, and at once."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from software import RdmaCm, Software

import rdmaconnect

from . import hostile, zmtp
from .campaign import ADDRESSES, WHERE, Campaign, Flat, aside, pair, scaled, until
from .zmtp import Peer

MARK = 0x77


@contextmanager
def witnesses(number: int = 60) -> Iterator[None]:
    """Descriptors of the application's own, opened just after others were closed: nobody may touch them."""
    counters = [os.eventfd(MARK, os.EFD_NONBLOCK) for _ in range(number)]
    pipes = [os.pipe() for _ in range(number // 4)]
    for _, end in pipes:
        os.write(end, b"8 bytes.")
    try:
        yield
    finally:
        seen = [os.eventfd_read(fd) for fd in counters]
        kept = []
        for start, end in pipes:
            os.close(end)
            kept.append(os.read(start, 100))
            os.close(start)
        for fd in counters:
            os.close(fd)
        assert seen == [MARK] * number
        assert kept == [b"8 bytes."] * len(pipes)


@pytest.mark.parametrize(("address", "probe"), [(WHERE["tcp"], True), (WHERE["tcp"], False), (WHERE["rdma_cm"], False)])
def test_a_connection_that_is_closed_at_once_is_accepted_with_what_was_sent(
    software: Software, cm: RdmaCm, counted: Campaign, address: str, probe: bool
) -> None:
    rounds = scaled(40, 3000)
    with rdmaconnect.listen(address, probe=probe) as listener:

        def serve() -> None:
            for _ in range(rounds):
                connection = counted.call("accept", listener.accept, deadline_s=5, tolerant=False)
                if connection is None:
                    continue
                with connection:
                    counted.count("received", connection.recv(deadline_s=5) == b"all there is")

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(rounds):
            with rdmaconnect.connect(listener.url, deadline_s=10, probe=probe) as connection:
                connection.send(b"all there is")
        thread.join()
    assert counted.failures() == {}, counted.said
    assert counted.counts["received"] == rounds


@ADDRESSES
def test_listeners_and_connections_closed_while_threads_use_them(
    software: Software, cm: RdmaCm, counted: Campaign, address: str
) -> None:
    chance = random.Random(3)
    trials = scaled(7, 300)
    flat = Flat(counted, min(4, trials))
    for _ in range(trials):
        listener = rdmaconnect.listen(address)
        made: list[rdmaconnect.Connection] = []

        def accept(listener: rdmaconnect.Listener = listener, made: list[rdmaconnect.Connection] = made) -> None:
            while (connection := counted.call("accept", listener.accept, deadline_s=5, within_s=5)) is not None:
                made.append(connection)

        def connect(listener: rdmaconnect.Listener = listener, made: list[rdmaconnect.Connection] = made) -> None:
            connection = counted.call("connect", rdmaconnect.connect, listener.url, deadline_s=0.7, within_s=0.7)
            if connection is not None:
                made.append(connection)

        def use(connection: rdmaconnect.Connection) -> None:
            while counted.call("recv", connection.recv, deadline_s=3, within_s=3) is not None:
                pass

        threads = [threading.Thread(target=accept) for _ in range(3)]
        threads += [threading.Thread(target=connect) for _ in range(chance.choice((0, 1, 4)))]
        for thread in threads:
            thread.start()
        time.sleep(chance.uniform(0, 0.05))
        counted.call("close a listener", listener.close, within_s=0.5)
        with witnesses():
            for thread in threads:
                thread.join(20)
                counted.count("hangs", thread.is_alive())
            users = [threading.Thread(target=use, args=(connection,)) for connection in made for _ in (0, 1)]
            for thread in users:
                thread.start()
            time.sleep(chance.uniform(0, 0.05))
            for connection in made:
                counted.call("close a connection", connection.close, within_s=0.5)
        with witnesses():
            for thread in users:
                thread.join(20)
                counted.count("hangs", thread.is_alive())
        assert until(lambda: software.left() == {}, 15), software.left()
        flat.round()
    flat.check()
    assert counted.counts["hangs"] == 0
    allowed = {"accept: StateError", "connect: ConnectTimeout", "connect: PeerRejected", "recv: PeerClosed"}
    allowed |= {"recv: StateError", "connect: PeerClosed", "recv: CompletionError"}
    assert counted.failures().keys() <= allowed
    assert counted.counts["accept: StateError"] == 3 * trials


@ADDRESSES
def test_listeners_closed_while_tasks_use_them(software: Software, cm: RdmaCm, counted: Campaign, address: str) -> None:
    chance = random.Random(4)
    trials = scaled(7, 300)

    async def tell(what: str, awaitable: object, within_s: float) -> object:
        began = time.monotonic()
        try:
            result = await awaitable  # type: ignore[misc]
        except BaseException as e:  # noqa: BLE001  that is what is counted
            counted.raised(what, e)
            return None
        finally:
            counted.took(what, time.monotonic() - began, within_s)
        counted.count(f"{what}: ok")
        return result or True

    async def trial() -> None:
        listener = await rdmaconnect.alisten(address)
        made: list[rdmaconnect.AsyncConnection] = []

        async def accept() -> None:
            while (connection := await tell("accept", listener.accept(deadline_s=5), 5)) is not None:
                assert isinstance(connection, rdmaconnect.AsyncConnection)
                made.append(connection)

        async def connect() -> None:
            connection = await tell("connect", rdmaconnect.aconnect(listener.url, deadline_s=0.7), 0.7)
            if isinstance(connection, rdmaconnect.AsyncConnection):
                made.append(connection)

        async def use(connection: rdmaconnect.AsyncConnection) -> None:
            while await tell("recv", connection.recv(deadline_s=3), 3) is not None:
                pass

        tasks = [asyncio.create_task(accept()) for _ in range(3)]
        tasks += [asyncio.create_task(connect()) for _ in range(chance.choice((1, 2, 4)))]
        await asyncio.sleep(chance.uniform(0, 0.05))
        await tell("close a listener", listener.close(), 0.5)
        with witnesses():
            await asyncio.wait_for(asyncio.gather(*tasks), 20)
            users = [asyncio.create_task(use(connection)) for connection in made for _ in (0, 1)]
            await asyncio.sleep(chance.uniform(0, 0.02))
            for connection in made:
                await tell("close a connection", connection.close(), 0.5)
            if users:
                await asyncio.wait_for(asyncio.gather(*users), 20)
        assert until(lambda: software.left() == {}, 15), software.left()

    async def all_of_them() -> None:
        flat = Flat(counted, min(4, trials))
        for _ in range(trials):
            await trial()
            flat.round()
        flat.check()

    asyncio.run(all_of_them())
    allowed = {"accept: StateError", "connect: ConnectTimeout", "connect: PeerRejected", "recv: PeerClosed"}
    allowed |= {"recv: StateError", "connect: PeerClosed", "recv: CompletionError"}
    assert counted.failures().keys() <= allowed
    assert counted.counts["accept: StateError"] == 3 * trials


def test_a_listener_that_is_closed_while_a_long_hello_is_read(software: Software, counted: Campaign) -> None:
    # what is still under way at close ends later, when the numbers of its descriptors are others' already
    body = hostile.pack(hostile.hello())
    long_hello = bytes([body[0] + 1]) + body[1:] + b"\xa3pad\xdd" + (500000).to_bytes(4, "big") + b"\x90" * 500000
    chance = random.Random(5)
    for _ in range(scaled(5, 200)):
        listener = rdmaconnect.listen("127.0.0.1:0")
        accepted = aside(counted.call, "accept", listener.accept, deadline_s=5)
        peer = Peer.connect(listener.port)
        sent = aside(counted.call, "hello", _send, peer, long_hello)
        time.sleep(chance.uniform(0, 0.08))
        counted.call("close", listener.close, within_s=0.5)
        with witnesses():
            accepted.result()
            sent.result()
            peer.close()
            time.sleep(0.1)
    assert counted.counts["accept: StateError"] == scaled(5, 200)


def _send(peer: Peer, data: bytes) -> None:
    try:
        peer.sock.sendall(zmtp.frame(data))
    except OSError:  # it was closed: that is what is tried
        return


def test_reconnect_after_the_listener_was_closed_touches_nobodys_descriptor(
    software: Software, counted: Campaign
) -> None:
    for _ in range(scaled(5, 100)):
        listener = rdmaconnect.listen("127.0.0.1:0")
        here, there = pair(listener)
        listener.close()
        with witnesses():
            counted.call("reconnect where it listened", there.reconnect, deadline_s=0.2, within_s=0.2)
            counted.call("reconnect where it connected", here.reconnect, deadline_s=0.2, within_s=0.2)
            here.close()
            there.close()
            counted.call("accept", listener.accept, deadline_s=0.2, within_s=0)
    number = scaled(5, 100)
    assert counted.counts["reconnect where it listened: StateError"] == number
    assert counted.counts["reconnect where it connected: ConnectTimeout"] == number
    assert counted.counts["accept: StateError"] == number


def test_the_port_is_free_at_once_though_accepted_connections_live(software: Software, counted: Campaign) -> None:
    listener = rdmaconnect.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.port}"
    held: list[rdmaconnect.Connection] = []
    for _ in range(scaled(10, 200)):
        held += pair(listener, address)
        listener.close()
        listener = rdmaconnect.listen(address)
        counted.count("listened anew")
    held[0].send(b"still")
    for connection in held:
        connection.close()
    listener.close()
    assert counted.counts["listened anew"] == scaled(10, 200)
