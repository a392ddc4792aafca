"""Strangers on one address: who is taken, how many, for how long, and what happens where there is no room."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from exchange_ends import LOCAL, MAX, Heard, Place, calling, channels, descriptors, place, until
from places import ROOT

from rdmaconnect.errors import PeerClosed
from rdmaconnect.exchange import acceptor, service
from rdmaconnect.exchange.acceptor import Acceptor
from rdmaconnect.exchange.channel import Channel


@pytest.fixture(autouse=True)
def _all_are_closed() -> Iterator[None]:
    yield
    until(lambda: channels() == 0)


def connected(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that say nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(count)]


def closed(sock: socket.socket) -> bool:
    """Whether the other side has hung up."""
    sock.settimeout(0.01)
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


# ---- addresses


def test_ipv6_and_all_addresses_are_served() -> None:
    with place("tcp://*:0") as where:
        for host in ["127.0.0.1", "127.0.0.2", *["::1"] * (":" in where.acceptor.host)]:
            tcp = socket.create_connection((host, where.port), 10)
            tcp.setblocking(False)
            heard = Heard()
            made = Channel(tcp, heard, MAX)
            made.send(host.encode())
            end = where.next()
            assert end.take() == [host.encode()]
            assert end.channel.address == tcp.getsockname()[0]
            end.send(b"yes")
            assert heard.next() == b"yes"
            made.close()
            end.channel.close()


def test_the_url_is_that_of_what_was_given_with_the_real_port() -> None:
    with place("tcp://localhost:0") as where:
        assert where.url == f"tcp://localhost:{where.port}"
        assert where.acceptor.host == "127.0.0.1" or ":" in where.acceptor.host
        assert where.port > 0
    with place(LOCAL) as where:
        assert where.url == f"tcp://127.0.0.1:{where.port}"
    with place("tcp://*:0") as where:
        assert where.url in (f"tcp://[::]:{where.port}", f"tcp://0.0.0.0:{where.port}")


def test_an_address_that_is_taken_is_named_with_a_way_out() -> None:
    with place() as where, pytest.raises(OSError, match="Address already in use") as caught:
        Place(where.url)
    assert caught.value.errno == errno.EADDRINUSE
    assert "Another program listens there (`ss -ltnp` names it): end it, or take another port." in str(caught.value)


def test_nobody_is_taken_before_it_is_started_and_nobody_is_lost() -> None:
    came: list[Channel] = []
    made = Acceptor(LOCAL, lambda channel: came.append(channel) or Heard(), MAX)  # type: ignore[func-returns-value]
    with ExitStack() as stack:
        connected(int(made.url.rpartition(":")[2]), 3, stack)
        time.sleep(0.05)
        assert came == []
        made.start()
        until(lambda: len(came) == 3)
        assert made.connected == 3
        made.close()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_one_that_cannot_start_leaves_its_port_free(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Acceptor(LOCAL, lambda channel: Heard(), MAX)

    def fail() -> None:
        raise error

    monkeypatch.setattr(made, "_start", fail)
    with pytest.raises(type(error)):
        made.start()
    with place(made.url):
        pass


# ---- the end


def test_once_closed_the_port_is_free_though_channels_live_on() -> None:
    with place() as where, calling(where) as here:
        here.send(b"x")
        there = where.next()
        there.take()
        where.know(there)
        where.acceptor.close()
        where.acceptor.close()
        with place(where.url) as again:
            assert again.port == where.port
            there.send(b"lives on")
            assert here.take() == [b"lives on"]
        there.channel.close()


def test_closing_hangs_up_on_strangers() -> None:
    with place() as where, ExitStack() as stack:
        silent = connected(where.port, 3, stack)
        until(lambda: where.strangers == 3)
        where.acceptor.close()
        until(lambda: all(closed(sock) for sock in silent))
        assert where.strangers == 0


def test_one_that_has_to_say_again_what_it_wants_where_nobody_listens_any_more_is_hung_up_on() -> None:
    with place() as where, calling(where) as here:
        here.send(b"x")
        there = where.next()
        there.take()
        where.know(there)
        where.acceptor.close()
        service.do(lambda: where.acceptor.expect(there.channel))
        assert isinstance(here.heard.end(), PeerClosed)


# ---- strangers


def test_who_says_nothing_is_dropped_after_its_time_and_who_is_known_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "STRANGER_S", 0.4)
    with place() as where, calling(where) as here, ExitStack() as stack:
        here.send(b"x")
        there = where.next()
        there.take()
        where.know(there)
        silent = connected(where.port, 5, stack)
        speaking = stack.enter_context(calling(where))  # greets, and asks for nothing
        until(lambda: all(closed(sock) for sock in silent), 3)
        assert isinstance(speaking.heard.end(3), PeerClosed)
        there.send(b"still")
        assert here.take() == [b"still"]
        assert where.strangers == 0
        there.channel.close()


def test_who_has_to_say_again_what_it_wants_has_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "STRANGER_S", 0.4)
    with place() as where, calling(where) as here:
        here.send(b"x")
        there = where.next()
        there.take()
        time.sleep(0.3)
        service.do(lambda: where.acceptor.expect(there.channel))
        time.sleep(0.2)
        assert not here.heard.ended
        assert isinstance(here.heard.end(3), PeerClosed)


def test_where_there_are_too_many_the_silent_are_dropped_and_others_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "SILENT_S", 0.1)
    with place() as where, ExitStack() as stack:
        where.acceptor._most = 10
        silent = connected(where.port, 30, stack)
        with calling(where) as here:
            here.send(b"hello")
            ends = [where.next() for _ in range(31)]
            (there,) = until(lambda: [end for end in ends if not end.heard.frames.empty()])
            assert there.take() == [b"hello"]
        assert sum(closed(sock) for sock in silent) >= 20
        assert where.strangers <= 10


def test_where_many_wait_the_silent_have_less_and_less_time() -> None:
    with place() as where, ExitStack() as stack:
        where.acceptor._most = 10
        connected(where.port, 500, stack)  # in tens, a second each, the last would wait for 50 s
        began = time.monotonic()
        with calling(where) as here:
            here.send(b"hello")
            until(lambda: where.acceptor.connected == 501, 8)
            ends = [where.next() for _ in range(where.came.qsize())]
            (there,) = until(lambda: [end for end in ends if not end.heard.frames.empty()])
            assert there.take() == [b"hello"]
        assert time.monotonic() - began < 8
        assert len(ends) < 501, "who said nothing while it waited got no place"
        until(lambda: where.acceptor._patience_s == acceptor.SILENT_S)


def test_one_whose_bytes_nobody_has_read_yet_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come is read before anybody is dropped."""
    monkeypatch.setattr(acceptor, "SILENT_S", 0.0)
    with place() as where, ExitStack() as stack:
        one, two = connected(where.port, 2, stack)
        until(lambda: where.strangers == 2)

        def unread() -> int:
            # within one turn of the service thread nothing is read
            one.sendall(b"\xff")
            time.sleep(0.05)
            return where.acceptor._drop_silent()

        assert service.do(unread) == 1
        until(lambda: closed(two))
        assert not closed(one)


def test_one_that_is_gone_already_is_no_stranger_for_long() -> None:
    with place() as where:
        for _ in range(50):
            socket.create_connection(("127.0.0.1", where.port)).close()
        until(lambda: where.acceptor.connected == 50)
        for _ in range(50):
            assert isinstance(where.next().heard.end(), PeerClosed)


# ---- without descriptors

FEW = """
import resource, socket, sys, time, logging
sys.path.insert(0, "tests")
from exchange_ends import place, calling, until, channels
from rdmaconnect.exchange import acceptor, service
logging.basicConfig(stream=sys.stdout, format="%(message)s")
acceptor.SILENT_S = 0.05
with place() as where, calling(where) as first:
    first.send(b"first")
    standing = where.next()
    standing.take()
    where.know(standing)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(40)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(s.fileno() for s in clients) + 12, hard))
    for client in clients:
        client.connect(("127.0.0.1", where.port))
    time.sleep(0.5)
    standing.send(b"still")
    assert first.take() == [b"still"]
    print("connected", where.acceptor.connected)
    for client in clients:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with calling(where) as last:
        last.send(b"last")
        end = time.monotonic() + 10
        while time.monotonic() < end:
            one = where.next()
            time.sleep(0.02)
            if not one.heard.frames.empty():
                print(one.take())
                break
print("over")
"""


def test_without_descriptors_those_who_stand_go_on_and_others_come_in_later() -> None:
    done = subprocess.run([sys.executable, "-c", FEW], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any("strangers that say nothing are dropped" in line for line in lines)
    assert lines[-2:] == ["[b'last']", "over"]


SHARE = """
import os, resource
from rdmaconnect.exchange.acceptor import Acceptor
made = []
for limit in (256, len(os.listdir("/proc/self/fd")) + 20):
    assert limit >= 256 or limit < 8 * 17
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 512))
    made.append(Acceptor("tcp://127.0.0.1:0", lambda channel: None, 1000))
    print(made[-1]._most)
for one in made:
    one.close()
"""


def test_the_most_is_a_share_of_the_descriptors() -> None:
    done = subprocess.run([sys.executable, "-c", SHARE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "32\n16\n", "")


# ---- fork, and what is left


def test_a_child_closes_its_copy_and_the_parent_goes_on() -> None:
    with place() as where:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                where.acceptor.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with calling(where) as here:
            here.send(b"x")
            assert where.next().take() == [b"x"]


def test_no_descriptor_is_left_open() -> None:
    def round_trip() -> None:
        with place() as where, calling(where) as here, ExitStack() as stack:
            connected(where.port, 3, stack)
            here.send(b"x")
            until(lambda: where.strangers == 4)
        until(lambda: channels() == 0)

    round_trip()
    time.sleep(0.2)
    before = descriptors()
    for _ in range(5):
        round_trip()
    until(lambda: descriptors() <= before)
