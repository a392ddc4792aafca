"""The out-of-band channel over real ZeroMQ on 127.0.0.1."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest
from rdmaconnect.oob import BACKLOG, Channel, Line, Service

from rdmaconnect.deadline import Deadline, wait_readable
from rdmaconnect.errors import PeerClosed, RemoteProtocolError
from rdmaconnect.wire import decode

T = TypeVar("T")
MAX = 1000
LOCAL = "tcp://127.0.0.1:0"


def until(look: Callable[[], T | None], waiter: Any = None, seconds: float = 5) -> T:
    """What ``look`` gives once it gives something."""
    deadline = Deadline(seconds)
    while (found := look()) is None:
        assert deadline.left_s > 0, "nothing came"
        if waiter is None:
            time.sleep(0.01)
        else:
            sleep(waiter, deadline)
    return found


def sleep(end: Any, deadline: Deadline) -> None:
    """Tell the wait of a socket, as a story would."""
    wait = end.wait(deadline)
    assert set(end.filenos()) <= set(wait.fds)
    assert wait.deadline is deadline
    wait_readable(wait.fds, wait.deadline, wait.slice_ms)


def take(end: Channel | Line) -> bytes:
    return until(end.recv, end if isinstance(end, Channel) else end.service)


def meet(service: Service) -> Line:
    return until(service.accept, service)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(LOCAL, MAX)
    yield made
    made.close()


@contextmanager
def channel(url: str) -> Iterator[Channel]:
    made = Channel(url, MAX)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def raw_listener(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP listener that is no ZeroMQ: ``talk`` gets each connection, which then stays open."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    kept.append(listener.accept()[0])
                    talk(kept[-1])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def patience(made: Channel, seconds: float) -> str:
    """What the channel has seen after waiting in vain, as connect() does."""
    deadline = Deadline(seconds)
    while deadline.left_s > 0:
        assert made.recv() is None
        sleep(made, deadline)
    return made.seen()


# ---- addresses


@pytest.mark.parametrize("url", ["tcp://ho st:5", "tcp://ho/st:5", "tcp://host:x"])
def test_an_address_that_zeromq_refuses_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"^connect to tcp://ho.*Give a host name or address that resolves"):
        Channel(url, MAX)


# ---- there and back


def test_frames_go_there_and_back_with_their_boundaries(service: Service) -> None:
    with channel(service.url) as made:
        for frame in (b"one", b"", bytes(MAX)):
            made.send(frame)
        line = meet(service)
        assert line.address.endswith("127.0.0.1")
        assert [take(line) for _ in range(3)] == [b"one", b"", bytes(MAX)]
        assert line.recv() is None
        for frame in (b"two", b"", bytes(MAX)):
            line.send(frame)
        assert [take(made) for _ in range(3)] == [b"two", b"", bytes(MAX)]
        assert made.recv() is None
        assert service.accept() is None


def test_two_peers_at_once_each_have_their_own_line(service: Service) -> None:
    with channel(service.url) as one, channel(service.url) as two:
        one.send(b"1")
        two.send(b"2")
        lines = {take(line): line for line in (meet(service), meet(service))}
        assert set(lines) == {b"1", b"2"}
        lines[b"2"].send(b"to 2")
        lines[b"1"].send(b"to 1")
        assert (take(one), take(two)) == (b"to 1", b"to 2")
        assert one.recv() is two.recv() is None
        one.send(b"more of 1")
        two.send(b"more of 2")
        assert take(lines[b"1"]) == b"more of 1"
        assert take(lines[b"2"]) == b"more of 2"


def test_frames_of_one_peer_wait_while_another_is_read(service: Service) -> None:
    with channel(service.url) as one, channel(service.url) as two:
        one.send(b"1")
        line_one = meet(service)
        two.send(b"2")
        line_two = meet(service)
        one.send(b"later")
        assert take(line_two) == b"2"
        assert [take(line_one), take(line_one)] == [b"1", b"later"]


def test_of_too_many_frames_the_oldest_are_dropped(service: Service) -> None:
    with channel(service.url) as made:
        for number in range(BACKLOG + 10):
            made.send(b"%d" % number)
        line = meet(service)
        last = b"%d" % (BACKLOG + 9)
        until(lambda: (service.accept(), (line.inbox and line.inbox[-1] == last) or None)[1])
        assert len(line.inbox) == BACKLOG
        assert line.recv() == b"10"


def test_ipv6() -> None:
    try:
        made = Service("tcp://[::1]:0", MAX)
    except OSError as e:
        pytest.skip(f"no IPv6 here: {e}")
    try:
        assert made.url.startswith("tcp://[::1]:")
        with channel(made.url) as peer:
            peer.send(b"six")
            line = meet(made)
            assert line.address == "::1"
            line.send(take(line) + b"!")
            assert take(peer) == b"six!"
    finally:
        made.close()


def test_all_addresses_are_served_on_one_port() -> None:
    made = Service("tcp://*:0", MAX)
    port = made.url.rpartition(":")[2]
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            with channel(f"tcp://{host}:{port}") as peer:
                peer.send(host.encode())
                assert take(meet(made)) == host.encode()
    finally:
        made.close()


def test_waiting_ends_when_something_comes_and_with_the_deadline(service: Service) -> None:
    with channel(service.url) as made:
        assert made.recv() is None
        deadline = Deadline(0.2)
        while deadline.left_s > 0:
            sleep(made, deadline)
        assert 0.2 <= deadline.waited_s < 2
        made.send(b"x")
        line = meet(service)
        take(line)
        timer = threading.Timer(0.1, line.send, (b"y",))
        timer.start()
        assert take(made) == b"y"
        timer.join()


# ---- listeners that are not there, or not ours


def test_a_listener_that_comes_later_is_found() -> None:
    port = free_port()
    with channel(f"tcp://127.0.0.1:{port}") as made:
        made.send(b"early")
        seen = patience(made, 0.3)
        assert seen == f"tcp://127.0.0.1:{port}: nothing listens there, or a firewall drops the packets."
        service = Service(f"tcp://127.0.0.1:{port}", MAX)
        try:
            line = meet(service)
            assert take(line) == b"early"
            line.send(b"late")
            assert take(made) == b"late"
        finally:
            service.close()


def test_a_listener_whose_application_does_not_accept_is_told_apart(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"x")
        assert patience(made, 0.3) == f"{service.url}: it is there, but did not answer: is its application in accept()?"


def test_a_listener_that_is_silent_is_told_apart() -> None:
    with raw_listener(lambda connection: None) as url, channel(url) as made:
        made.send(b"x")
        assert patience(made, 0.3) == f"{url}: it accepted the connection, but did not speak."


def test_a_listener_that_sends_one_byte_of_garbage_is_no_answer() -> None:
    with raw_listener(lambda connection: connection.sendall(b"x")) as url, channel(url) as made:
        made.send(b"x")
        assert "it accepted the connection" in patience(made, 0.3)


HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\nContent-Type: text/html\r\nContent-Length: 157\r\n"
    b"Connection: close\r\n\r\n<html>\r\n<head><title>400 Bad Request</title></head>\r\n<body>\r\n"
)


def test_a_listener_that_speaks_http_is_refused_in_words() -> None:
    with raw_listener(lambda connection: connection.sendall(HTTP)) as url, channel(url) as made:
        made.send(b"x")
        with pytest.raises(RemoteProtocolError, match=r"[Ii]s it rdmaconnect that listens"):
            decode(until(made.recv, made))


def test_a_listener_that_restarts_hears_what_was_said_last() -> None:
    first = Service(LOCAL, MAX)
    with channel(first.url) as made:
        made.send(b"hello")
        assert take(meet(first)) == b"hello"
        first.close()
        second = until(lambda: rebind(first.url))
        try:
            line = until(lambda: (made.recv(), second.accept())[1])
            assert take(line) == b"hello"
            line.send(b"reply")
            assert take(made) == b"reply"
        finally:
            second.close()


def rebind(url: str) -> Service | None:
    """A service on an address that ZeroMQ is still letting go."""
    try:
        return Service(url, MAX)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        return None


# ---- peers that misbehave, go and come again


def test_a_frame_above_the_limit_loses_only_its_own_connection(service: Service) -> None:
    with channel(service.url) as good, channel(service.url) as bad:
        good.send(b"good")
        line = meet(service)
        assert take(line) == b"good"
        bad.send(bytes(MAX + 1))
        until(lambda: (bad.recv(), bad._meetings > 1 or None)[1])  # it was cut off, came again and said it again
        assert service.accept() is None
        line.send(b"still here")
        assert take(good) == b"still here"
        good.send(b"and I")
        assert take(line) == b"and I"


def test_a_frame_above_the_limit_from_the_listener_is_not_taken(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"x")
        line = meet(service)
        take(line)
        line.send(bytes(MAX + 1))
        deadline = Deadline(0.5)
        while deadline.left_s > 0:
            assert made.recv() is None
            sleep(made, deadline)


@pytest.mark.parametrize("garbage", [b"x", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(9), bytes(100)], ids=repr)
def test_garbage_from_one_client_does_not_disturb_the_others(service: Service, garbage: bytes) -> None:
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client, channel(service.url) as made:
        client.sendall(garbage)
        made.send(b"good")
        line = meet(service)
        assert take(line) == b"good"
        line.send(b"yes")
        assert take(made) == b"yes"


def test_messages_of_several_parts_are_dropped(service: Service) -> None:
    with channel(service.url) as made:
        made._socket.send_multipart([b"a", b"b"])
        made.send(b"whole")
        assert take(meet(service)) == b"whole"


def test_a_peer_that_comes_again_has_a_new_line(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"first")
        old = meet(service)
        assert take(old) == b"first"
    with channel(service.url) as made:
        made.send(b"second")
        new = meet(service)
        assert take(new) == b"second"
        assert new is not old
        assert old.recv() is None


def test_sending_to_a_peer_that_is_gone_says_so(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"x")
        line = meet(service)
    with pytest.raises(PeerClosed, match=r"send to .*127\.0\.0\.1: .*It is gone: it closed its side, "):
        until(lambda: line.send(b"y"), seconds=5)


def test_a_line_that_was_closed_is_forgotten(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"x")
        line = meet(service)
        take(line)
        line.close()
        line.close()
        assert service.peers == {}
        made.send(b"y")
        assert take(meet(service)) == b"y"


@pytest.mark.parametrize("settled", [False, True])
def test_once_settled_a_listener_that_is_gone_is_the_end(settled: bool) -> None:
    service = Service(LOCAL, MAX)
    with channel(service.url) as made:
        made.send(b"hello")
        line = meet(service)
        line.send(take(line))
        take(made)
        if settled:
            made.settle()
        service.close()
        if settled:
            with pytest.raises(PeerClosed, match=r"the peer at tcp://.* is gone: its process ended, or the network to"):
                until(made.recv, made)
        else:
            assert "it was there and is gone: its process ended, and nothing listens there now" in patience(made, 0.3)


def test_once_settled_nothing_is_said_again() -> None:
    first = Service(LOCAL, MAX)
    with channel(first.url) as made:
        made.send(b"hello")
        assert take(meet(first)) == b"hello"
        made.settle()
        first.close()
        second = until(lambda: rebind(first.url))
        try:
            with pytest.raises(PeerClosed):
                until(made.recv, made)
            until(lambda: (made.recv(), made._meetings > 1 or None)[1])
            assert second.accept() is None
        finally:
            second.close()


def test_what_a_closed_line_has_not_read_is_of_a_new_peer(service: Service) -> None:
    with channel(service.url) as made:
        for frame in (b"reject", b"hello", b"more"):
            made.send(frame)
        line = meet(service)
        until(lambda: (service.accept(), len(line.inbox) == 3 or None)[1])
        assert take(line) == b"reject"
        line.close()
        new = meet(service)
        assert new is not line
        assert [take(new), take(new)] == [b"hello", b"more"]
        assert line.recv() is None
        new.close()
        assert service.accept() is None


# ---- who closes what


def test_a_kept_line_outlives_its_listener() -> None:
    service = Service(LOCAL, MAX)
    with channel(service.url) as one, channel(service.url) as two:
        lines = []
        for made in (one, two):
            made.send(b"x")
            lines.append(meet(service))
            take(lines[-1])
            lines[-1].keep()
            lines[-1].keep()
        service.close()
        for line in lines:
            assert not service.closed
            line.send(b"still")
            line.close()
            line.close()
        assert service.closed
        assert (take(one), take(two)) == (b"still", b"still")


def test_a_line_that_was_not_kept_does_not_hold_the_listener(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"x")
        meet(service)
        service.close()
        assert service.closed


def test_closing_twice_is_fine(service: Service) -> None:
    made = Channel(service.url, MAX)
    for _ in range(2):
        made.close()
        assert made.closed
        service.close()
        assert service.closed


def test_what_was_sent_just_before_closing_still_arrives(service: Service) -> None:
    with channel(service.url) as made:
        made.send(b"last words")
    assert take(meet(service)) == b"last words"


def test_what_was_sent_just_before_the_process_ends_still_arrives(service: Service) -> None:
    code = f"from rdmaconnect.oob import Channel; c = Channel({service.url!r}, 1000); c.send(b'last words')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
    assert take(meet(service)) == b"last words"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left_open() -> None:
    def round_trip() -> None:
        service = Service(LOCAL, MAX)
        with channel(service.url) as made, channel(f"tcp://127.0.0.1:{free_port()}") as lost:
            made.send(b"x")
            lost.send(b"x")
            line = meet(service)
            line.keep()
            line.send(take(line))
            take(made)
            service.close()
            line.close()
        with pytest.raises(ValueError, match="connect to"):
            Channel("tcp://ho/st:5", MAX)
        with pytest.raises(OSError, match="listen on"):
            Service("tcp://192.0.2.1:0", MAX)

    round_trip()  # ZeroMQ's own threads open theirs once
    until(lambda: stable_descriptors() or None)
    before = descriptors()
    for _ in range(5):
        round_trip()
    until(lambda: descriptors() <= before or None, seconds=10)


def stable_descriptors() -> bool:
    """Whether the number stays the same: ZeroMQ closes in the background."""
    seen = set()
    for _ in range(20):
        seen.add(descriptors())
        time.sleep(0.01)
    return len(seen) == 1


# ---- addresses that cannot be listened on


def test_an_address_that_is_taken_is_named_with_a_way_out(service: Service) -> None:
    with pytest.raises(OSError, match="Address already in use") as caught:
        Service(service.url, MAX)
    assert caught.value.errno == errno.EADDRINUSE
    assert f"listen on {service.url}: " in str(caught.value)
    assert "Another program listens there (`ss -ltnp` names it): end it, or take another port." in str(caught.value)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(OSError, match=r"Give an address of this host, or \* for all\.$") as caught:
        Service("tcp://192.0.2.1:0", MAX)
    assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


FEW_FILES = """
import os, resource, sys
from rdmaconnect.errors import VerbsError
from rdmaconnect.oob import Channel, Service

lowest = os.dup(0)
os.close(lowest)
for more in range(1, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for kind in (Channel, Service):
        try:
            kind("tcp://127.0.0.1:0" if kind is Service else "tcp://127.0.0.1:1", 1000)
            print("there were enough")
        except VerbsError as e:
            print(e.errno, e)
"""


def test_without_descriptors_it_says_so_and_zeromq_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 22
    for line in lines:
        assert line.startswith(f"{errno.EMFILE} open an exchange at tcp://127.0.0.1:")
        assert "zmq_socket: EMFILE (24), Too many open files. No file descriptor is left: raise the open-file" in line
