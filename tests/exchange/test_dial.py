"""Connecting TCP to one of several addresses: in which order and when, and what is said of each of them."""

from __future__ import annotations

import errno
import gc
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.errors import VerbsError
from rdmaconnect.exchange.dial import Dial
from rdmaconnect.exchange.tcp import listen
from rdmaconnect.exchange.url import Address, addresses

Maker = Callable[[int, int], socket.socket]
#: what a scripted address does: an errno, at once or after a time; 0 connects; None never answers
REFUSED, SILENT, STANDS = errno.ECONNREFUSED, None, 0


class Socket:
    """A socket whose connect does what the script says."""

    def __init__(self, net: Net, family: int) -> None:
        self.net, self.family, self.closed, self.began = net, family, False, math.nan
        self.answer: int | None = SILENT
        self.host, self.after = "", 0.0

    def setblocking(self, flag: bool) -> None:
        assert flag is False

    def setsockopt(self, *args: Any) -> None:
        assert not self.closed

    def fileno(self) -> int:
        return -1 if self.closed else 1000 + self.net.made.index(self)

    def connect_ex(self, address: tuple[Any, ...]) -> int:
        assert not self.closed
        if math.isnan(self.began):
            self.host, self.began = address[0], self.net.now
            self.net.begun.append((self.net.now, self.host))
            self.after, self.answer = self.net.script(self.host)
        if self.answer is None or self.net.now < self.began + self.after:
            return errno.EINPROGRESS if self.net.now == self.began else errno.EALREADY
        return self.answer

    def getsockname(self) -> tuple[str, int]:
        return ("here", 1)

    def getpeername(self) -> tuple[str, int]:
        return (self.host, 5)

    def close(self) -> None:
        self.closed = True


class Net:
    """A network in which each host answers as its script says, and a clock."""

    def __init__(self, **hosts: tuple[float, int | None] | int | None) -> None:
        self.hosts = {name: answer if isinstance(answer, tuple) else (0.0, answer) for name, answer in hosts.items()}
        self.now = 0.0
        self.made: list[Socket] = []
        self.begun: list[tuple[float, str]] = []
        self.dial = Dial([Address(socket.AF_INET, (name, 5)) for name in hosts], 0.0, cast(Maker, self.socket))

    def socket(self, family: int, kind: int) -> Socket:
        assert kind == socket.SOCK_STREAM
        self.made.append(Socket(self, family))
        return self.made[-1]

    def script(self, host: str) -> tuple[float, int | None]:
        return self.hosts[host]

    @property
    def open(self) -> list[Socket]:
        return [sock for sock in self.made if not sock.closed]

    def run(self, seconds: float) -> Socket | None:
        """Call it when it is due and when a script has an answer, as poll(2) would."""
        end = self.now + seconds
        while True:
            if (sock := self.dial.advance(self.now)) is not None:
                return cast(Socket, sock)
            ready = [s.began + s.after for s in self.open if s.answer is not None]
            step = min([self.dial.due_s(self.now), *(at - self.now for at in ready if at > self.now)])
            assert step > 0, "it asks to be called again at once, for nothing"
            if self.now + step > end:
                self.now = end
                return None
            self.now += step


def rounded(begun: list[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(round(at, 3), host) for at, host in begun]


# ---- in which order, and when


def test_the_first_address_that_answers_is_taken() -> None:
    net = Net(a=STANDS, b=STANDS)
    sock = net.run(1)
    assert sock is not None
    assert (sock.host, net.begun) == ("a", [(0.0, "a")])
    assert net.open == [sock], "the caller's, and no other"


def test_the_next_address_begins_at_once_when_one_fails_and_after_a_quarter_second_when_one_is_silent() -> None:
    net = Net(a=REFUSED, b=SILENT, c=(0.1, errno.EHOSTUNREACH), d=SILENT, e=(0.01, STANDS))
    sock = net.run(2)
    assert sock is not None
    first = {host: at for at, host in reversed(rounded(net.begun))}
    assert first == {"a": 0, "b": 0, "c": 0.25, "d": 0.35, "e": 0.6}
    assert net.open == [sock]
    assert net.dial.filenos() == []


def test_a_silent_address_that_answers_late_is_taken_though_others_began() -> None:
    net = Net(a=(0.4, STANDS), b=SILENT, c=SILENT)
    sock = net.run(2)
    assert sock is not None
    assert (sock.host, round(net.now, 3), len(net.made)) == ("a", 0.4, 2)
    assert net.open == [sock]


def test_an_address_that_failed_is_tried_again_after_50_ms_doubled_up_to_a_second() -> None:
    net = Net(a=REFUSED, b=SILENT)
    net.run(5)
    times = [at for at, host in net.begun if host == "a"]
    assert [round(b - a, 3) for a, b in pairwise(times)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1]
    net.hosts["a"] = (0.0, STANDS)
    sock = net.run(1)
    assert sock is not None
    assert sock.host == "a"


def test_an_address_that_does_not_answer_is_asked_anew_every_four_seconds() -> None:
    net = Net(a=SILENT)
    net.run(10)
    assert rounded(net.begun) == [(0, "a"), (4.05, "a"), (8.15, "a")]
    assert len(net.open) == 1


def test_a_second_failure_of_the_first_address_does_not_hasten_the_third() -> None:
    net = Net(a=REFUSED, b=SILENT, c=SILENT)
    net.run(0.3)
    assert rounded(net.begun) == [(0, "a"), (0, "b"), (0.05, "a"), (0.15, "a"), (0.25, "c")]


def test_a_caller_who_comes_late_does_not_begin_with_all_at_once() -> None:
    net = Net(a=SILENT, b=SILENT, c=SILENT)
    net.dial.advance(0.0)
    net.now = 2.0
    net.dial.advance(net.now)
    assert net.begun == [(0, "a"), (2, "b")]
    assert net.dial.due_s(net.now) == 0.25


def test_at_most_eight_attempts_are_under_way() -> None:
    net = Net(**{f"h{i}": SILENT for i in range(20)})
    for _ in range(60):
        net.run(0.5)
        assert len(net.open) <= 8
        assert sorted(net.dial.filenos()) == sorted(sock.fileno() for sock in net.open)
    assert {host for _, host in net.begun} == {f"h{i}" for i in range(20)}, "each had its turn"


def test_closed_it_begins_nothing_more_and_still_tells() -> None:
    net = Net(a=REFUSED, b=SILENT, c=STANDS)
    net.run(0.1)
    net.dial.close()
    net.dial.close()
    assert net.open == []
    assert net.dial.due_s(0.2) == math.inf
    assert net.dial.advance(9.0) is None
    assert net.open == []
    assert net.dial.seen().startswith("a:5: refused: ")
    with pytest.raises(ValueError, match="no address"):
        Dial([], 0.0)


answers = st.tuples(
    st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0]), st.sampled_from([REFUSED, SILENT, errno.EHOSTUNREACH, STANDS])
)


@given(st.lists(answers, min_size=1, max_size=12), st.floats(0, 20))
def test_whatever_the_hosts_do_one_socket_at_most_is_left(
    hosts: list[tuple[float, int | None]], seconds: float
) -> None:
    net = Net(**{f"h{i}": answer for i, answer in enumerate(hosts)})
    sock = net.run(seconds)
    assert len(net.open) <= 8
    assert sorted(s.fileno() for s in net.open) == sorted([sock.fileno()] if sock else net.dial.filenos())
    net.dial.close()
    assert net.open == ([sock] if sock else [])
    stand = [after for after, answer in hosts if answer == STANDS and after < 4]
    assert sock is not None or not stand or seconds <= 0.25 * len(hosts) + 4.2 * math.ceil(len(hosts) / 8)


# ---- what is said

#: errno -> whether connect said it at once -> words
WORDS = [
    (errno.ECONNREFUSED, True, "refused: the host is there, but nothing listens on that port"),
    (errno.ECONNREFUSED, False, "refused: the host is there, but nothing listens on that port"),
    (errno.ENETUNREACH, True, "no route: this host's routing table has none there"),
    (errno.ENETUNREACH, False, "network unreachable: a router on the way has no route there"),
    (errno.EHOSTUNREACH, True, "no route: this host's routing table holds it to be unreachable"),
    (errno.EHOSTUNREACH, False, "host unreachable: nobody on its network answers to that address"),
    (errno.ETIMEDOUT, False, "no answer: the host is down or not there, or a firewall drops the packets"),
    (errno.EINVAL, True, "no route: this host's routing table discards"),
    (errno.EACCES, True, "not permitted on this host: a firewall"),
    (errno.EPERM, True, "not permitted on this host: a firewall"),
    (errno.ECONNRESET, False, "something took the connection and reset it"),
    (errno.EADDRNOTAVAIL, True, "no address or no free port to connect from"),
    (errno.EPROTO, False, os.strerror(errno.EPROTO)),
]


@pytest.mark.parametrize(("number", "at_once", "words"), WORDS)
def test_each_failure_has_words_of_its_own(number: int, at_once: bool, words: str) -> None:
    net = Net(a=(0.0 if at_once else 0.01, number))
    assert net.run(0.03) is None
    assert net.dial.seen().startswith("a:5: ")
    assert words in net.dial.seen()
    assert net.open == []


def test_what_was_seen_is_told_for_each_address_and_the_same_words_once() -> None:
    net = Net(a=REFUSED, b=(0.1, errno.EHOSTUNREACH), c=REFUSED, d=SILENT, e=SILENT)
    assert net.dial.seen() == "a:5, b:5, c:5, d:5, e:5: not tried yet"
    net.run(0.2)
    refused, unreachable, silent, fresh = net.dial.seen().split("; ")
    assert refused.startswith("a:5, c:5: refused: ")
    assert unreachable.startswith("b:5: host unreachable: ")
    assert silent == "d:5: no answer: the host is down or not there, or a firewall drops the packets"
    assert fresh == "e:5: not tried yet"


def test_what_an_address_came_to_is_told_until_there_is_more_to_tell() -> None:
    net = Net(a=REFUSED)
    net.run(0.01)
    net.hosts["a"] = (0.0, SILENT)
    net.run(1)
    assert "refused" in net.dial.seen()
    net.run(4)
    assert "no answer" in net.dial.seen()


def test_a_connection_that_is_reset_before_it_is_looked_at_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(sock: Socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(Socket, "getpeername", gone)
    net = Net(a=STANDS)
    assert net.run(0.01) is None
    assert net.open == []
    assert net.dial.seen() == "a:5: something took the connection and reset it at once"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_want_of_descriptors_ends_it_in_words_and_closes_all(number: int) -> None:
    net = Net(a=SILENT, b=SILENT)
    net.run(0.1)
    assert len(net.open) == 1

    def none_left(family: int, kind: int) -> Any:
        raise OSError(number, "no descriptor")

    net.dial._new_socket = none_left
    with pytest.raises(VerbsError, match=r"^connect to b:5: socket: E[MN]FILE \(\d+\), .*\. \w+") as caught:
        net.dial.advance(0.3)
    assert caught.value.errno == number
    assert net.open == []


def test_a_kernel_without_ipv6_is_no_end() -> None:
    net = Net(a=STANDS, b=STANDS)
    make = net.dial._new_socket

    def no_first(family: int, kind: int) -> socket.socket:
        net.dial._new_socket = make
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    net.dial._new_socket = no_first
    sock = net.run(0.01)
    assert sock is not None
    assert sock.host == "b"
    assert "a:5: this host's kernel has no such protocol" in net.dial.seen()


@pytest.mark.parametrize("step", ["setblocking", "setsockopt", "connect_ex"])
def test_an_error_of_any_step_leaves_nothing_open(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(a=SILENT, b=STANDS)
    net.run(0.1)

    def broken(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Socket, step, broken)
    with pytest.raises(KeyboardInterrupt):
        net.dial.advance(0.3)
    assert net.open == []
    assert net.dial.due_s(0.3) == math.inf


# ---- real sockets, on loopback


@contextmanager
def local(host: str = "127.0.0.1", backlog: int = 16) -> Iterator[tuple[socket.socket, Address]]:
    with listen(addresses(host, 0, bind=True), backlog) as listener:
        yield listener, addresses(host, listener.getsockname()[1])[0]


@pytest.fixture
def free_port() -> int:
    with local() as (listener, _):
        return int(listener.getsockname()[1])


def dialled(dial: Dial, seconds: float) -> socket.socket | None:
    """Drive it as its owner would."""
    end = time.monotonic() + seconds
    while True:
        if (sock := dial.advance(time.monotonic())) is not None:
            return sock
        left = min(end - time.monotonic(), dial.due_s(time.monotonic()))
        if end <= time.monotonic():
            return None
        poll = select.poll()
        for fd in dial.filenos():
            poll.register(fd, select.POLLOUT)
        poll.poll(math.ceil(max(0.0, left) * 1000))


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_connects_and_the_connection_carries(host: str) -> None:
    with local(host) as (listener, address):
        sock = dialled(Dial([address], time.monotonic()), 5)
        assert sock is not None
        with sock, listener.accept()[0] as far:
            assert sock.getblocking() is False
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10000
            sock.send(b"x")
            assert far.recv(1) == b"x"


def test_a_name_whose_first_address_nobody_listens_on_is_reached_by_its_second(free_port: int) -> None:
    before = descriptors()
    with local() as (_, address):
        started = time.monotonic()
        dial = Dial([*addresses("::1", free_port), *addresses("127.0.0.1", free_port), address], started)
        sock = dialled(dial, 5)
        assert sock is not None
        with sock:
            assert sock.getpeername() == address.sockaddr
        assert time.monotonic() - started < 0.45  # a quarter of a second each, had it waited for them
        assert f"[::1]:{free_port}, 127.0.0.1:{free_port}: refused: " in dial.seen()
    assert descriptors() == before


def test_a_listener_that_comes_later_is_reached(free_port: int) -> None:
    there = addresses("127.0.0.1", free_port)
    dial = Dial(there, time.monotonic())
    assert dialled(dial, 0.3) is None
    with listen(there), cast(socket.socket, dialled(dial, 5)) as sock:
        assert sock.getpeername() == ("127.0.0.1", free_port)


def test_a_silent_address_is_passed_over_after_a_quarter_second() -> None:
    with local(backlog=0) as (_, silent), local() as (_, open_):
        full = [socket.socket() for _ in range(3)]  # a listener whose queue is full drops what comes
        try:
            for sock in full:
                sock.setblocking(False)
                sock.connect_ex(silent.sockaddr)
            started = time.monotonic()
            dial = Dial([silent, open_], started)
            with cast(socket.socket, dialled(dial, 5)) as sock:
                assert sock.getpeername() == open_.sockaddr
            assert 0.25 <= time.monotonic() - started < 4
            assert f"{silent}: no answer: " in dial.seen()
        finally:
            for sock in full:
                sock.close()


def test_a_connection_to_itself_is_none_and_leaves_the_port_free(free_port: int) -> None:
    # with nobody there, the kernel may give the very port that is wanted to connect from
    made = []

    def from_that_port(family: int, kind: int) -> socket.socket:
        sock = socket.socket(family, kind)
        try:
            sock.bind(("127.0.0.1", free_port))
        except OSError:
            sock.close()
            raise
        made.append(sock)
        return sock

    there = addresses("127.0.0.1", free_port)
    alone = socket.socket()
    with alone:
        alone.bind(("127.0.0.1", free_port))
        alone.connect(("127.0.0.1", free_port))
        assert alone.getpeername() == alone.getsockname(), "this is how it comes about"
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    dial = Dial(there, time.monotonic(), from_that_port)
    assert dialled(dial, 0.2) is None
    assert len(made) >= 2
    assert {sock.fileno() for sock in made} == {-1}
    assert dial.seen().startswith(f"127.0.0.1:{free_port}: refused: ")
    dial.close()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port))  # without SO_REUSEADDR: nothing is left in TIME_WAIT


UNREACHABLE = """
from rdmaconnect.exchange.dial import Dial
from rdmaconnect.exchange.url import addresses
dial = Dial(addresses("127.0.0.1", 5), 0.0)
assert dial.advance(0.0) is None
print(dial.seen())
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not here")
def test_an_absent_route_is_no_absent_listener() -> None:
    # a new network namespace, in which not even lo is up
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-W", "error", "-c", UNREACHABLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.stderr.startswith("unshare: "):
        pytest.skip(done.stderr)
    assert done.stdout.startswith("127.0.0.1:5: no route: this host's routing table has none there"), done.stderr
