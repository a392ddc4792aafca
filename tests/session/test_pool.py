"""Pools: connections made ahead, handed out once, replaced when they are lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from exchange_ends import free_port
from forking import in_a_fork
from software import Software

import rdmaconnect
from rdmaconnect import (
    AsyncPool,
    Connection,
    ConnectTimeout,
    Listener,
    PeerClosed,
    Pool,
    RdmaConnectError,
    StateError,
)
from rdmaconnect.session import pool as pools

PATIENCE_S = 20.0


class Server:
    """Answers whatever comes, on each connection until its peer closes it."""

    def __init__(self, address: str = "127.0.0.1:0", **options: Any) -> None:
        self.listener: Listener = rdmaconnect.listen(address, **options)
        self.url = self.listener.url
        self.conns: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        for conn in self.listener:
            self.conns.append(conn)
            self._threads.append(threading.Thread(target=self._answer, args=[conn]))
            self._threads[-1].start()

    def _answer(self, conn: Connection) -> None:
        with conn:
            try:
                while True:
                    conn.send(conn.recv(deadline_s=None).upper())
            except RdmaConnectError:
                return

    @property
    def open(self) -> int:
        return sum(not conn.closed for conn in self.conns)

    def close(self) -> None:
        until(lambda: not self.listener._incoming, "what was broken off is over")
        self.listener.close()
        for conn in list(self.conns):
            conn.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextmanager
def serving(*address: str, **options: Any) -> Iterator[Server]:
    server = Server(*address, **options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(software: Software) -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def settled(software: Software, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing waits for long; what was broken off is over before the device in software is asked what is left."""
    for name, seconds in (("REST_S", 0.01), ("PAUSE_S", 0.01), ("GRACE_S", 0.1)):
        monkeypatch.setattr(pools, name, seconds)
    yield
    until(lambda: software.problems() == [], "nothing is left")


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def ask(conn: Connection, words: bytes = b"words") -> None:
    conn.send(words)
    assert conn.recv() == words.upper()


# ---- what it is for


def test_connections_are_ready_and_replaced(server: Server) -> None:
    with Pool(server.url, 3) as pool:
        pool.warm()
        assert (pool.idle, pool.spare, pool.closed) == (3, 3, False)
        assert repr(pool) == f"<Pool {server.url} 3 of 3 ready>"
        with pool.acquire() as one, pool.acquire() as two:
            assert len({one.local.qp_num, two.local.qp_num}) == 2
            ask(one, b"one")
            ask(two, b"two")
            pool.warm()
            assert pool.idle == 3
            until(lambda: server.open == 5, "two in use, three ready")
        assert one.closed
        until(lambda: server.open == 3, "what is given back is closed at the peer's too")
        assert pool.idle == 3
    until(lambda: server.open == 0, "all are closed")
    assert repr(pool) == f"<Pool {server.url} closed>"


def test_one_that_is_ready_costs_no_exchange_and_no_verb_of_connecting(server: Server, software: Software) -> None:
    with Pool(server.url, 4, probe=False) as pool:
        pool.warm()
        made = dict(software.made)
        pool.spare = 0  # nothing goes on beside it
        started = time.monotonic()
        conns = [pool.acquire() for _ in range(4)]
        assert time.monotonic() - started < PATIENCE_S / 4
        assert software.made == made
        for conn in conns:
            ask(conn)
            conn.close()


def test_nothing_of_a_former_user_is_there_for_the_next(server: Server) -> None:
    with Pool(server.url, 1) as pool:
        pool.warm()
        with pool.acquire() as first:
            memory = first.register(bytearray(64))
            first.send(b"an answer that nobody takes")
            number, domain = first.local.qp_num, first._end.engine
        assert memory.closed
        with pool.acquire() as second:
            assert second.local.qp_num != number
            assert second._end.engine is not domain
            ask(second)


def test_an_empty_pool_connects(server: Server) -> None:
    with Pool(server.url, 1) as pool:
        conns = [pool.acquire(deadline_s=PATIENCE_S) for _ in range(5)]
        assert len({conn.local.qp_num for conn in conns}) == 5
        for conn in conns:
            ask(conn)
            conn.close()


def test_options_are_those_of_connect(software: Software) -> None:
    with (
        serving(secret="a secret of both sides") as server,
        Pool(server.url, 1, qp_type="UC", recv_size=4096, secret="a secret of both sides", private_data=b"p") as pool,
    ):
        pool.warm()
        with pool.acquire() as conn:
            assert (str(conn.local.qp_type), conn.local.recv_size) == ("UC", 4096)
            ask(conn)
            assert server.conns[0].private_data == b"p"


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("127.0.0.1", 0), {}, "spare is 0: give 1 to 4096"),
        (("127.0.0.1", 1.0), {}, r"spare is 1\.0: give an integer"),
        (("127.0.0.1", True), {}, "spare is True: give an integer"),
        (("tcp://",), {}, "tcp://"),
        (("127.0.0.1",), {"devise": "x"}, r"devise \(device\?\): there is no such option"),
        (("127.0.0.1",), {"deadline_s": "soon"}, "deadline_s is 'soon'"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    software: Software, arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    before = threading.active_count()
    with pytest.raises((TypeError, ValueError), match=words):
        Pool(*arguments, **options)
    assert threading.active_count() <= before


def test_many_threads_share_one(server: Server) -> None:
    with Pool(server.url, 4) as pool, ThreadPoolExecutor(8) as threads:

        def use(number: int) -> int:
            with pool.acquire(deadline_s=PATIENCE_S) as conn:
                ask(conn, b"number %d" % number)
                return conn.local.qp_num

        numbers = list(threads.map(use, range(40)))
    assert len(numbers) == 40
    until(lambda: server.open == 0, "all are closed")


def test_pools_of_several_peers_fill_at_the_same_time(software: Software) -> None:
    # one is a peer that never answers: it holds up nobody
    with (
        serving() as one,
        serving() as two,
        Pool(f"127.0.0.1:{free_port()}", 1) as silent,
    ):
        pools_ = [Pool(server.url, 2) for server in (one, two)]
        try:
            for pool in pools_:
                pool.warm(deadline_s=PATIENCE_S)
            assert [pool.idle for pool in (*pools_, silent)] == [2, 2, 0]
        finally:
            for pool in pools_:
                pool.close()


# ---- what is lost


def test_the_lost_are_replaced_before_anybody_asks(server: Server) -> None:
    with Pool(server.url, 2) as pool:
        pool.warm()
        until(lambda: len(server.conns) == 2, "accepted")
        lost = [conn.peer.qp_num for conn in server.conns]
        for conn in list(server.conns):
            conn.close()
        until(lambda: server.open == 2 and pool.idle == 2, "others are made")
        for _ in range(2):
            with pool.acquire() as conn:
                assert conn.local.qp_num not in lost
                ask(conn)


def test_one_that_was_lost_is_not_handed_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PAUSE_S", PATIENCE_S)  # nothing is replaced meanwhile
    with Pool(server.url, 2) as pool:
        pool.warm()
        until(lambda: len(server.conns) == 2, "accepted")
        ends = list(pool._idle)
        server.conns[0].close()
        until(lambda: ends[0].lost is not None, "it is known")
        with pool.acquire() as conn:
            assert conn.local.qp_num == ends[1].local.qp_num
            ask(conn)


def test_a_peer_that_closes_whatever_it_gets_is_not_kept_busy(
    software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PAUSE_S", 0.2)
    accepted: list[float] = []

    def refuse() -> None:
        for conn in listener:
            accepted.append(time.monotonic())
            conn.close()

    with rdmaconnect.listen("127.0.0.1:0") as listener:
        thread = threading.Thread(target=refuse)
        thread.start()
        with Pool(listener.url, 2):
            time.sleep(1)
    thread.join(PATIENCE_S)
    assert 2 <= len(accepted) <= 14  # two at once, and two more at most after each pause


def test_a_server_that_comes_back_is_found(software: Software, caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{free_port()}"
    with serving(address) as server, Pool(address, 2, deadline_s=0.5) as pool:
        pool.warm()
        with caplog.at_level(logging.WARNING, "rdmaconnect.peers"):
            server.close()
            until(lambda: f"pool for {server.url}: " in caplog.text, "it is told")
        until(lambda: pool.idle == 0, "both are lost")
        with pytest.raises(ConnectTimeout):
            pool.acquire(deadline_s=0.5)
        with pytest.raises(ConnectTimeout):
            pool.warm()
        with serving(address):
            with pool.acquire(deadline_s=PATIENCE_S) as conn:
                ask(conn)
            pool.warm()
            assert pool.idle == 2


def test_waiting_for_it_to_fill_has_an_end(software: Software) -> None:
    with Pool(f"127.0.0.1:{free_port()}", 2) as pool:
        with pytest.raises(ConnectTimeout, match=r"warm the pool for .*0 of 2 are ready") as seen:
            pool.warm(deadline_s=0.1)
        assert isinstance(seen.value, TimeoutError)


def test_who_has_taken_one_goes_first(server: Server, software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REST_S", PATIENCE_S)
    started = time.monotonic()
    with Pool(server.url, 2) as pool:
        pool.warm()
        until(lambda: not pool._filling, "it is full")
        made = software.made["qp"]
        with pool.acquire() as conn:
            ask(conn)
        assert (pool.idle, software.made["qp"]) == (1, made)
        pool.acquire().close()
        assert pool.idle == 0
    assert time.monotonic() - started < PATIENCE_S / 2  # closing does not wait for that


# ---- its end


def test_a_closed_one_hands_out_nothing(server: Server) -> None:
    pool = Pool(server.url, 2)
    conn = pool.acquire()
    pool.close()
    pool.close()
    ask(conn)  # what was taken is the taker's
    conn.close()
    for use in (pool.acquire, pool.warm):
        with pytest.raises(StateError, match=f"the pool for {server.url} is closed"):
            use()
    assert (pool.idle, pool.closed) == (0, True)
    until(lambda: server.open == 0, "all are closed")


def test_closing_breaks_into_what_it_is_making(software: Software, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rdmaconnect.peers"):
        pool = Pool(f"127.0.0.1:{free_port()}", 2, deadline_s=None)
        waiting: list[BaseException] = []

        def warm() -> None:
            try:
                pool.warm(deadline_s=None)
            except StateError as e:
                waiting.append(e)

        thread = threading.Thread(target=warm)
        thread.start()
        time.sleep(0.2)
        started = time.monotonic()
        pool.close()
        thread.join(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert [str(e) for e in waiting] == [f"the pool for {pool.url} is closed."]
    assert caplog.text == ""


def test_one_that_is_forgotten_closes_what_it_has(server: Server) -> None:
    def forget() -> None:
        pool = Pool(server.url, 2)
        pool.warm()

    with pytest.warns(ResourceWarning, match=r"<Pool .* 2 of 2 ready> was never closed") as seen:  # noqa: PT031
        forget()
        until(lambda: len(server.conns) == 2 and server.open == 0, "who fills it lets it go, and all are closed")
        pool = seen[0].source
        assert isinstance(pool, Pool), "the warning keeps it"
        pool._wake()
        until(lambda: not pool._filling, "it does nothing more")
        assert len(server.conns) == 2


def test_a_child_of_fork_makes_its_own(server: Server) -> None:
    with Pool(server.url, 1) as pool:
        pool.warm()
        until(lambda: not pool._filling, "nothing is being made")

        def use() -> str:
            with pytest.raises(StateError) as seen:
                pool.acquire()
            pool.close()
            return str(seen.value)

        words = f"the pool for {server.url} belongs to the process that forked this one: make one here."
        assert in_a_fork(use) == words
        with pool.acquire() as conn:
            ask(conn)


# ---- asyncio


def test_asyncio_has_the_same(server: Server) -> None:
    async def use() -> None:
        async with AsyncPool(server.url, 2) as pool:
            await pool.warm()
            assert repr(pool) == f"<AsyncPool {server.url} 2 of 2 ready>"

            async def one(number: int) -> None:
                async with await pool.acquire() as conn:
                    await conn.send(b"number %d" % number)
                    assert await conn.recv() == b"NUMBER %d" % number

            await asyncio.gather(*map(one, range(6)))
        with pytest.raises(StateError, match="is closed"):
            await pool.acquire()

    asyncio.run(use())
    until(lambda: server.open == 0, "all are closed")


def test_one_whose_acquire_is_cancelled_loses_none(software: Software) -> None:
    async def use() -> None:
        async with AsyncPool(f"127.0.0.1:{free_port()}", 1) as pool:
            task = asyncio.create_task(pool.acquire(deadline_s=None))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(use())
    assert software.problems() == []


def test_what_the_server_hears_of_one_that_is_given_back(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, Pool(listener.url, 1) as pool:
        pool.warm()
        pool.spare = 0
        with listener.accept() as there:
            pool.acquire().close()
            with pytest.raises(PeerClosed, match="the peer closed the connection"):
                there.recv(deadline_s=PATIENCE_S)
