"""Connectors whose listener is late, silent, foreign, restarted or protected otherwise: what they do and say."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from exchange_ends import PATIENCE_S, channels, free_port, place, raw_listener, until
from software import Software

import rdmaconnect
from rdmaconnect.errors import AuthenticationError, ConnectTimeout, RemoteProtocolError, VerbsError
from rdmaconnect.exchange.dial import Dial

HTTP = b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\nContent-Length: 157\r\nConnection: close\r\n\r\n<html>"


@pytest.fixture(autouse=True)
def _no_channel_is_left(software: Software) -> Iterator[None]:
    yield
    until(lambda: channels() == 0 and not software.left())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def vain(port: int, seconds: float = 1.0, **options: Any) -> str:
    """The words of a connect whose deadline passes."""
    before = time.monotonic()
    with pytest.raises(ConnectTimeout) as caught:
        rdmaconnect.connect(f"127.0.0.1:{port}", deadline_s=seconds, **options)
    assert time.monotonic() - before < seconds + 1
    return str(caught.value).removesuffix(
        " 127.0.0.1 is loopback, this host itself: a peer elsewhere has another address."
    )


def test_a_listener_that_comes_later_is_found(threads: ThreadPoolExecutor) -> None:
    port = free_port()
    connecting: Future[Any] = threads.submit(rdmaconnect.connect, f"127.0.0.1:{port}", deadline_s=PATIENCE_S)
    time.sleep(0.3)
    assert not connecting.done()
    with (
        rdmaconnect.listen(f"127.0.0.1:{port}") as listener,
        listener.accept(deadline_s=PATIENCE_S) as there,
        connecting.result(PATIENCE_S) as here,
    ):
        here.send(b"late")
        assert there.recv() == b"late"


def test_a_name_is_tried_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener is at the second address only."""
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
             (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]  # fmt: skip
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **most: found if host == "node7" else real(host, *more, **most)
    )
    with (
        rdmaconnect.listen("127.0.0.1:0") as listener,
        rdmaconnect.connect(f"node7:{listener.port}", deadline_s=PATIENCE_S) as here,
        listener.accept(deadline_s=PATIENCE_S),
    ):
        assert here.path is not None


def test_where_nothing_listens_that_is_told() -> None:
    port = free_port()
    assert vain(port).endswith(
        f"tcp://127.0.0.1:{port}: refused: the host is there, but nothing listens on that port, "
        "or a firewall rejects it."
    )


def test_a_listener_that_is_silent_is_told_apart() -> None:
    with raw_listener(lambda connection: None) as port:
        assert vain(port).endswith(f"tcp://127.0.0.1:{port}: it accepted the connection, but did not speak.")


def test_a_listener_that_speaks_zeromq_and_does_not_answer_is_told_apart() -> None:
    with place(max_frame=1 << 19) as where:
        assert "it is there, but did not answer: it is busy or stopped, or of an older version and not in accept()" in (
            vain(where.port)
        )


def test_a_listener_that_closes_at_once_is_told_apart_and_called_again() -> None:
    calls: list[int] = []

    def talk(connection: socket.socket) -> None:
        calls.append(1)
        connection.close()

    with raw_listener(talk) as port:
        words = vain(port, 3.0)
    assert "it accepts connections and closes them without a ZeroMQ greeting: is it rdmaconnect that listens?" in words
    assert 2 < len(calls) < 12, "again and again, but ever more seldom"


@pytest.mark.parametrize("data", [HTTP, b"x", bytes(80), b"SSH-2.0-OpenSSH_9.6\r\n"], ids=lambda data: repr(data[:8]))
def test_a_listener_that_speaks_something_else_is_refused_in_words_and_at_once(data: bytes) -> None:
    before = time.monotonic()
    with (
        raw_listener(lambda connection: connection.sendall(data)) as port,
        pytest.raises(RemoteProtocolError) as caught,
    ):
        rdmaconnect.connect(f"127.0.0.1:{port}", deadline_s=PATIENCE_S)
    assert time.monotonic() - before < 3
    assert "Is it rdmaconnect that listens?" in str(caught.value)


def test_a_listener_that_answers_with_what_is_no_message_is_refused_in_words() -> None:
    with place(max_frame=1 << 19) as where:

        def answer() -> None:
            end = where.next()
            end.take()
            end.send(b"what?")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RemoteProtocolError, match="not a message"):
            rdmaconnect.connect(f"127.0.0.1:{where.port}", deadline_s=PATIENCE_S)
        thread.join()


def test_a_listener_that_restarts_before_it_has_answered_is_asked_anew(threads: ThreadPoolExecutor) -> None:
    first = place(max_frame=1 << 19)
    where = first.__enter__()
    connecting = threads.submit(rdmaconnect.connect, f"127.0.0.1:{where.port}", deadline_s=PATIENCE_S)
    end = where.next()
    end.take()
    end.channel.close()
    first.__exit__(None, None, None)
    assert not connecting.done()
    with (
        rdmaconnect.listen(f"127.0.0.1:{where.port}") as listener,
        listener.accept(deadline_s=PATIENCE_S) as there,
        connecting.result(PATIENCE_S) as here,
    ):
        here.send(b"again")
        assert there.recv() == b"again"


def test_one_that_was_there_and_is_gone_is_told_with_what_is_there_now() -> None:
    with place(max_frame=1 << 19) as where:

        def hang_up() -> None:
            end = where.next()
            end.take()
            where.acceptor.close()
            end.channel.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        words = vain(where.port, 1.5)
        thread.join()
    assert "it was there and is gone: its process ended, or it was closed; now: " in words
    assert "refused" in words


# ---- keys

SECRET = "a secret of one job, long enough"


@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        (SECRET, None, "the listener's exchange is protected, this connector's is not. Give both sides the"),
        (None, SECRET, "this connector's exchange is protected, the listener's is not. Give both sides the"),
        (
            SECRET, SECRET + "!",
            "the listener broke the handshake off: it has another key than this side expects, another secret, or none.",
        ),
    ],
)  # fmt: skip
def test_who_has_other_keys_is_told_so_and_who_listens_too(theirs: Any, mine: Any, words: str) -> None:
    with rdmaconnect.listen("127.0.0.1:0", secret=theirs) as listener:
        before = time.monotonic()
        with pytest.raises(AuthenticationError) as caught:
            rdmaconnect.connect(listener.url, secret=mine, deadline_s=PATIENCE_S)
        assert time.monotonic() - before < 5
        assert words in str(caught.value)
        assert SECRET not in str(caught.value)
        with pytest.raises(ConnectTimeout) as vain_:
            listener.accept(deadline_s=0.1)
        assert "Of those who connected none asked for a connection: 127.0.0.1: " in str(vain_.value)
        assert SECRET not in str(vain_.value)


def test_with_one_secret_they_connect() -> None:
    with (
        rdmaconnect.listen("127.0.0.1:0", secret=SECRET) as listener,
        rdmaconnect.connect(listener.url, secret=SECRET, deadline_s=PATIENCE_S) as here,
        listener.accept(deadline_s=PATIENCE_S) as there,
    ):
        here.send(b"protected")
        assert there.recv() == b"protected"


def test_another_key_cannot_take_a_connections_place(tmp_path: Any) -> None:
    """The token alone is not enough where each side has a key of its own."""
    from rdmaconnect.exchange.curve import keygen

    allowed = tmp_path / "allowed"
    public, own = keygen(str(tmp_path / "own"), "listener")
    keys = [keygen(str(allowed), name)[1] for name in ("a", "b")]
    with rdmaconnect.listen("127.0.0.1:0", key=own, peer_keys=str(allowed)) as listener:
        here = rdmaconnect.connect(listener.url, key=keys[0], peer_key=public, deadline_s=PATIENCE_S)
        there = listener.accept(deadline_s=PATIENCE_S)
        other = rdmaconnect.connect(listener.url, key=keys[1], peer_key=public, deadline_s=PATIENCE_S)
        second = listener.accept(deadline_s=PATIENCE_S)
        other._end.known_as = here._end.known_as
        with pytest.raises(rdmaconnect.RdmaConnectError, match="it belongs to a peer with another key"):
            other.reconnect(deadline_s=3)
        assert there.lost is None
        here.send(b"mine")
        assert there.recv() == b"mine"
        for end in (here, there, other, second):
            end.close()


# ---- dialled while the queue pair is made


def test_the_listener_is_dialled_while_the_queue_pair_is_made(software: Software, threads: ThreadPoolExecutor) -> None:
    with software.on("ibv_create_qp", delay=1.5), place(max_frame=1 << 16) as where:
        connecting = threads.submit(rdmaconnect.connect, where.url, deadline_s=3)
        before = time.monotonic()
        end = where.next()
        until(lambda: end.channel.greeted)
        assert time.monotonic() - before < 1.2
        assert end.heard.all() == []
        assert b"hello" in end.heard.next()
        assert time.monotonic() - before > 1.2
        with pytest.raises(ConnectTimeout):
            connecting.result(PATIENCE_S)


def test_what_this_host_cannot_is_told_at_once_though_nobody_listens(software: Software) -> None:
    with software.on("ibv_create_qp", fail=errno.ENOMEM, delay=0.2):
        before = time.monotonic()
        with pytest.raises(VerbsError, match="ibv_create_qp: ENOMEM"):
            rdmaconnect.connect(f"127.0.0.1:{free_port()}", deadline_s=PATIENCE_S)
        assert time.monotonic() - before < 2


@pytest.mark.parametrize("always", [True, False], ids=["always", "once"])
def test_a_dial_that_lacks_a_descriptor_is_tried_again_before_that_is_told(
    monkeypatch: pytest.MonkeyPatch, always: bool, threads: ThreadPoolExecutor
) -> None:
    real, tried = Dial.advance, []

    def advance(self: Dial, now: float) -> Any:
        tried.append(now)
        if always or len(tried) == 1:
            self.close()
            raise VerbsError("socket", errno.EMFILE, "connect to 127.0.0.1")
        return real(self, now)

    monkeypatch.setattr(Dial, "advance", advance)
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        if always:
            with pytest.raises(VerbsError, match="socket: EMFILE"):
                rdmaconnect.connect(listener.url, deadline_s=PATIENCE_S)
            return
        accepting = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        with rdmaconnect.connect(listener.url, deadline_s=PATIENCE_S), accepting.result(PATIENCE_S):
            pass


def test_one_that_hung_up_while_the_queue_pair_was_made_is_dialled_anew(
    software: Software, threads: ThreadPoolExecutor
) -> None:
    port = free_port()
    with software.on("ibv_create_qp", delay=0.5, times=1):
        with place(f"tcp://127.0.0.1:{port}") as where:
            connecting = threads.submit(rdmaconnect.connect, f"127.0.0.1:{port}", deadline_s=PATIENCE_S)
            where.next()
        with (
            rdmaconnect.listen(f"127.0.0.1:{port}") as listener,
            listener.accept(deadline_s=PATIENCE_S) as there,
            connecting.result(PATIENCE_S) as here,
        ):
            here.send(b"after all")
            assert there.recv() == b"after all"
