"""Frames to and from one peer, over real TCP and ZeroMQ on 127.0.0.1: both sides, their ends, and what is left."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq
from exchange_ends import (
    MAX,
    End,
    Heard,
    Place,
    calling,
    channels,
    descriptors,
    dial,
    place,
    raw_listener,
    until,
)
from places import ROOT
from test_zmtp import READY, command, greeting

from rdmaconnect.errors import PeerClosed, RemoteProtocolError, StateError, VerbsError
from rdmaconnect.exchange import budget, link, long_frames, service
from rdmaconnect.exchange.channel import SMALL_FRAME, Channel
from rdmaconnect.exchange.curve import Keys, keys_for

#: frames that may be said at once, and that may be on their way at the same time ever after
BURST, UNDER_WAY = 8, 4


SECRET = "a secret of one job, long enough"
#: of the listener, and of the caller
KEYS: list[Keys | None] = [None, None]


@pytest.fixture(params=["NULL", "CURVE"])
def mechanism(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without protection, where Python speaks ZMTP, and with it, where ZeroMQ does: the same is to be seen."""
    if request.param == "CURVE":
        KEYS[:] = [keys_for(listens=listens, secret=SECRET) for listens in (True, False)]
    yield
    KEYS[:] = [None, None]


@pytest.fixture
def there() -> Iterator[Place]:
    with place(keys=KEYS[0]) as made:
        yield made


@pytest.fixture(autouse=True)
def _all_are_closed() -> Iterator[None]:
    """Whatever a test did, no channel is left a while after it."""
    yield
    until(lambda: channels() == 0)


@contextmanager
def both(max_frame: int = MAX) -> Iterator[tuple[End, End]]:
    """The caller's end, and the other, which have spoken."""
    with place(max_frame=max_frame, keys=KEYS[0]) as where, calling(where, max_frame, KEYS[1]) as here:
        here.send(b"hello")
        there = where.next()
        assert there.take() == [b"hello"]
        where.know(there)
        try:
            yield here, there
        finally:
            there.channel.close()


# ---- there and back


@pytest.mark.usefixtures("mechanism")
def test_frames_go_there_and_back_with_their_boundaries(there: Place) -> None:
    with calling(there, keys=KEYS[1]) as here:
        here.send(b"one", b"", bytes(MAX))
        end = there.next()
        assert end.take(3) == [b"one", b"", bytes(MAX)]
        assert end.channel.address == here.channel.address == "127.0.0.1"
        end.send(b"two", b"", bytes(MAX))
        assert here.take(3) == [b"two", b"", bytes(MAX)]
        assert end.channel.greeted
        assert here.channel.greeted
        assert (end.channel.user, here.channel.user) == (KEYS[1].public.decode() if KEYS[1] else "", "")
        assert here.heard.threads == end.heard.threads == {"rdmaconnect-exchange"}


@pytest.mark.usefixtures("mechanism")
def test_what_is_sent_before_zeromq_is_there_is_sent_in_its_order(there: Place) -> None:
    with calling(there, keys=KEYS[1]) as here:
        frames = [b"%d" % number for number in range(BURST)]
        here.send(*frames)
        assert there.next().take(BURST) == frames


@pytest.mark.usefixtures("mechanism")
def test_many_peers_at_once_each_have_their_own(there: Place) -> None:
    with ExitStack() as stack:
        ends = [stack.enter_context(calling(there, keys=KEYS[1])) for _ in range(20)]
        for number, here in enumerate(ends):
            here.send(b"%d" % number)
        others = {}
        for _ in ends:
            end = there.next()
            others[int(end.take()[0])] = end
        for number, end in others.items():
            end.send(b"to %d" % number)
        for number, here in enumerate(ends):
            assert here.take() == [b"to %d" % number]
            assert here.heard.all() == []


@pytest.mark.usefixtures("mechanism")
def test_any_thread_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "EARNED", 1e9)
    with both() as (here, there):
        answers = [threading.Semaphore(UNDER_WAY // 4) for _ in range(4)]
        there.heard.on_frame = lambda frame: answers[frame[0]].release()

        def say(thread: int) -> None:
            for number in range(100):
                assert answers[thread].acquire(timeout=10)
                here.channel.send(bytes([thread, number]))

        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = there.take(400)
        for number in range(4):
            assert [f for f in found if f[0] == number] == [bytes([number, n]) for n in range(100)]


def test_what_each_thread_says_keeps_its_order_from_before_the_handshake_on(there: Place) -> None:
    """Some of it waits for the handshake, some goes by the service thread, some is sent by who says it."""
    with calling(there) as here:

        def say(thread: int) -> None:
            for number in range(BURST):
                here.channel.send(bytes([thread, number]))
                time.sleep(0.0005)

        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in range(BURST):
            here.channel.send(bytes([9, number]))  # in the main thread
        for thread in threads:
            thread.join()
        found = there.next().take(5 * BURST)
        for number in (0, 1, 2, 3, 9):
            assert [f for f in found if f[0] == number] == [bytes([number, n]) for n in range(BURST)]


@pytest.mark.usefixtures("mechanism")
def test_a_frame_may_be_sent_from_the_service_thread_itself() -> None:
    with both() as (here, there):
        there.heard.on_frame = lambda frame: there.channel.send(frame + b"!")
        here.send(b"a", b"b")
        assert here.take(2) == [b"a!", b"b!"]


@pytest.mark.usefixtures("mechanism")
@pytest.mark.parametrize("size", [1, 100, SMALL_FRAME, SMALL_FRAME + 1, 512 * 1024])
def test_frames_of_any_size_up_to_the_most_pass(size: int) -> None:
    with both(512 * 1024) as (here, there):
        data = os.urandom(size)
        here.send(data)
        assert there.take() == [data]
        there.send(data)
        assert here.take() == [data]


def test_each_second_a_tick_comes_on_both_sides() -> None:
    with both() as (here, there):
        before = time.monotonic()
        until(lambda: here.heard.ticks >= 2 and there.heard.ticks >= 2)
        assert 0.5 < time.monotonic() - before < 4


def test_an_older_library_with_a_router_is_spoken_with_too() -> None:
    """Peers of the releases before listened with a ROUTER, and had ZMTP's heartbeats on."""
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.set(zmq.RCVTIMEO, 10_000)
        router.set(zmq.HEARTBEAT_IVL, 100)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with calling(port) as here:
            here.send(b"hello")
            identity, frame = router.recv_multipart()
            assert frame == b"hello"
            router.send_multipart([identity, b"reply"])
            assert here.take() == [b"reply"]
            time.sleep(0.35)
            router.send_multipart([identity, b"after heartbeats"])
            assert here.take() == [b"after heartbeats"]
    finally:
        context.destroy(linger=0)


def test_an_older_library_with_a_dealer_may_call(there: Place) -> None:
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, 10_000)
        dealer.set(zmq.HEARTBEAT_IVL, 100)
        dealer.connect(there.url)
        dealer.send(b"hello")
        end = there.next()
        assert end.take() == [b"hello"]
        time.sleep(0.35)
        end.send(b"reply")
        assert dealer.recv() == b"reply"
    finally:
        context.destroy(linger=0)


# ---- the end


@pytest.mark.usefixtures("mechanism")
@pytest.mark.parametrize("closer", ["here", "there"])
def test_one_that_closes_is_known_at_once_on_the_other_side_and_told_nothing_itself(closer: str) -> None:
    with both() as ends:
        first, second = ends if closer == "here" else ends[::-1]
        first.channel.close()
        error = second.heard.end(3)
        assert isinstance(error, PeerClosed)
        assert str(error).startswith("the peer at 127.0.0.1 is gone: it closed its side, its process ended, or ")
        first.channel.close()
        second.channel.close()
        time.sleep(0.05)
        assert not first.heard.ended
        assert not second.heard.ended


@pytest.mark.usefixtures("mechanism")
def test_what_was_sent_just_before_closing_still_arrives(there: Place) -> None:
    for count in (1, 2, BURST):
        with calling(there, keys=KEYS[1]) as here:
            here.send(*[b"last words"] * count)
        end = there.next()
        assert end.take(count) == [b"last words"] * count
        assert isinstance(end.heard.end(), PeerClosed)


@pytest.mark.usefixtures("mechanism")
def test_what_came_before_the_end_is_given_out_before_it() -> None:
    for _ in range(10):
        with both() as (here, there):
            order: list[str] = []
            there.heard.on_frame = lambda frame, order=order: order.append("frame")  # type: ignore[misc]
            here.send(*[b"x"] * UNDER_WAY)
            here.channel.close()
            there.heard.end()
            assert len(order) == UNDER_WAY


LAST_WORDS = """
import socket, sys
from rdmaconnect.exchange.channel import Channel
class Nobody:
    def took(self, frame): ...
    def over(self, error): ...
    def tick(self): ...
tcp = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
tcp.setblocking(False)
channel = Channel(tcp, Nobody(), 1000)
channel.send(b"last words")
channel.close()
"""


def test_what_was_sent_just_before_the_process_ends_still_arrives(there: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LAST_WORDS, str(there.port)],
        cwd=ROOT, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert there.next().take() == [b"last words"]


def test_a_process_with_an_open_channel_ends_quietly_and_at_once(there: Place) -> None:
    code = LAST_WORDS.replace("channel.close()\n", "")
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(there.port)],
        cwd=ROOT, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - before < 8
    end = there.next()
    assert isinstance(end.heard.end(), PeerClosed)


@pytest.mark.usefixtures("mechanism")
def test_a_peer_whose_connection_is_reset_is_gone(there: Place) -> None:
    tcp = dial(there.port)
    heard = Heard()
    made = Channel(tcp, heard, MAX, KEYS[1])
    made.send(b"x")
    end = there.next()
    assert end.take() == [b"x"]
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    service.do(made.finish)
    assert isinstance(end.heard.end(), PeerClosed)


@pytest.mark.usefixtures("mechanism")
def test_closed_before_it_was_opened_it_leaves_nothing(there: Place) -> None:
    for _ in range(20):
        heard = Heard()
        made = Channel(dial(there.port), heard, MAX, KEYS[1])
        made.close()
    until(lambda: channels() <= there.strangers)
    assert not heard.ended


@pytest.mark.usefixtures("mechanism")
def test_after_close_nothing_is_sent_and_nothing_raised() -> None:
    with both() as (here, there):
        here.channel.close()
        here.send(b"too late")
        assert isinstance(there.heard.end(), PeerClosed)
        there.send(b"to nobody")
        assert there.heard.all() == []


# ---- peers that misbehave


@pytest.mark.usefixtures("mechanism")
def test_a_frame_above_the_limit_ends_its_own_connection_and_no_other(there: Place) -> None:
    with calling(there, keys=KEYS[1]) as good, calling(there, 1 << 20, KEYS[1]) as bad:
        good.send(b"good")
        other = there.next()
        assert other.take() == [b"good"]
        bad.send(b"first", bytes(MAX + 1))
        end = there.next()
        assert end.take() == [b"first"]
        error = end.heard.end()
        assert isinstance(error, RemoteProtocolError)
        assert "more at once than it may" in str(error)
        assert "it was cut off" in str(error)
        assert isinstance(bad.heard.end(), PeerClosed)
        other.send(b"still here")
        assert good.take() == [b"still here"]


@pytest.mark.usefixtures("mechanism")
def test_a_frame_above_the_limit_from_the_listener_is_not_taken(there: Place) -> None:
    with calling(there, keys=KEYS[1]) as here:
        here.send(b"x")
        end = there.next()
        end.take()
        end.send(bytes(MAX + 1))
        assert isinstance(here.heard.end(), RemoteProtocolError)
        assert here.heard.all() == []


@pytest.mark.usefixtures("mechanism")
def test_a_limit_that_is_lowered_counts_from_then_on() -> None:
    with both(100_000) as (here, there):
        here.send(bytes(50_000))
        assert there.take() == [bytes(50_000)]
        service.do(lambda: there.channel.lower(1000))
        here.send(bytes(1000))
        assert there.take() == [bytes(1000)]
        here.send(bytes(1001))
        assert isinstance(there.heard.end(), RemoteProtocolError)


def test_messages_of_several_parts_end_it(there: Place) -> None:
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(there.url)
        dealer.send_multipart([b"a", b"b"])
        end = there.next()
        error = end.heard.end()
        assert isinstance(error, RemoteProtocolError)
        assert "what is no message of this exchange" in str(error)
        assert end.heard.all() == []
    finally:
        context.destroy(linger=0)


FOREIGN = [
    b"x", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\xff" + bytes(9), bytes(100), b"SSH-2.0-x\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: repr(data[:8]))
def test_what_is_no_zeromq_is_told_in_words_and_disturbs_nobody(there: Place, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", there.port)) as client, calling(there) as good:
        client.sendall(data)
        ends = [there.next(), there.next()]
        good.send(b"good")
        bad = until(lambda: next((end for end in ends if end.heard.ended), None))
        error = bad.heard.end()
        assert isinstance(error, RemoteProtocolError)
        assert str(error).startswith("what calls there does not speak this protocol: it does not speak ZeroMQ's")
        assert str(error).endswith("Is it rdmaconnect that calls?")
        (other,) = [end for end in ends if end is not bad]
        assert other.take() == [b"good"]
        client.settimeout(5)
        assert client.recv(100) == b""


HTTP = b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\nContent-Length: 157\r\nConnection: close\r\n\r\n<html>"


@pytest.mark.parametrize("data", [HTTP, b"x", bytes(80)], ids=lambda data: repr(data[:8]))
def test_a_listener_that_is_no_zeromq_is_told_in_words(data: bytes) -> None:
    with raw_listener(lambda connection: connection.sendall(data)) as port, calling(port) as here:
        here.send(b"x")
        error = here.heard.end()
        assert isinstance(error, RemoteProtocolError)
        assert str(error).endswith("Is it rdmaconnect that listens?")
        assert str(error).isprintable()
        assert not here.channel.greeted


def test_a_listener_that_is_silent_is_not_greeted() -> None:
    with raw_listener(lambda connection: None) as port, calling(port) as here:
        here.send(b"x")
        time.sleep(0.3)
        assert not here.heard.ended
        assert not here.channel.greeted


def test_a_listener_that_hangs_up_at_once_is_gone() -> None:
    with raw_listener(lambda connection: connection.close()) as port, calling(port) as here:
        here.send(b"x")
        assert isinstance(here.heard.end(), PeerClosed)
        assert not here.channel.greeted


def test_a_peer_that_does_not_read_ends_it_and_holds_up_nobody() -> None:
    """What it does not take is kept up to a bound; then the connection ends."""
    with both(512 * 1024) as (here, there):
        service.do(there.channel._inward.hold)  # type: ignore[union-attr]
        frame = bytes(300_000)
        for _ in range(200):
            here.send(frame)
            if here.heard.ended:
                break
            time.sleep(0.001)
        error = here.heard.end()
        assert isinstance(error, PeerClosed)
        assert "does not read what is sent to it" in str(error)


def test_a_peer_that_asks_and_does_not_read_the_answers_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to PINGs are bounded as all else that is sent."""
    monkeypatch.setattr(budget, "EACH_S", 0.0)  # the same in less time

    def ask(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(greeting() + READY)
        while True:
            connection.sendall(command(b"PING", bytes(18)) * 1000)

    with raw_listener(ask) as port:
        tcp = dial(port)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        heard = Heard()
        channel = Channel(tcp, heard, MAX)
        error = heard.end()
        channel.close()
        assert isinstance(error, PeerClosed)
        assert "does not read what is sent to it" in str(error)


def test_an_application_that_is_slow_with_frames_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "EARNED", 1e9)
    with both() as (here, there):
        room = threading.Semaphore(UNDER_WAY)
        there.heard.on_frame = lambda frame: (time.sleep(0.001), room.release())
        for number in range(300):
            assert room.acquire(timeout=10)
            here.send(b"%d" % number)
        assert there.take(300) == [b"%d" % number for number in range(300)]


def test_long_frames_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many peers may be in the midst of a long frame at the same time; the others wait, and none is lost."""
    monkeypatch.setattr(long_frames, "LONG_FRAMES", 2)
    most: list[int] = []
    with place(max_frame=512 * 1024) as where, ExitStack() as stack:
        ends = [stack.enter_context(calling(where, 512 * 1024)) for _ in range(8)]
        data = os.urandom(400_000)
        for here in ends:
            here.send(data)
        others = [where.next() for _ in ends]
        end = time.monotonic() + 10
        while any(other.heard.frames.empty() for other in others):
            most.append(service.do(lambda: len(long_frames._long)))
            assert time.monotonic() < end
        for other in others:
            assert other.take() == [data]
        assert max(most, default=0) <= 2
        until(lambda: service.do(lambda: not long_frames._long and not long_frames._waiting))


def test_one_that_is_slow_with_a_long_frame_is_cut_off_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_frames, "LONG_FRAMES", 1)
    monkeypatch.setattr(long_frames, "LONG_FRAME_S", 0.2)
    with place(max_frame=512 * 1024) as where, socket.create_connection(("127.0.0.1", where.port)) as slow:
        slow.sendall(greeting() + READY)
        bad = where.next()
        slow.sendall(b"\x02" + (400_000).to_bytes(8, "big") + bytes(100_000))
        until(lambda: service.do(lambda: bad.channel in long_frames._long))
        with calling(where, 512 * 1024) as here:
            data = os.urandom(400_000)
            here.send(data)
            good = where.next()
            assert good.take() == [data]
            error = bad.heard.end()
            assert isinstance(error, RemoteProtocolError)
            assert "too slow with a long frame: others wait" in str(error)


# ---- what is left


def test_no_descriptor_is_left_open() -> None:
    def round_trip() -> None:
        with both() as (here, there):
            here.send(b"x")
            there.send(*there.take())
            here.take()
        with raw_listener(lambda connection: connection.sendall(HTTP)) as port, calling(port) as lost:
            lost.heard.end()

    round_trip()  # ZeroMQ's own threads open theirs once
    until(lambda: channels() == 0)
    time.sleep(0.2)
    before = descriptors()
    for _ in range(5):
        round_trip()
    until(lambda: descriptors() <= before)


def test_without_descriptors_it_says_so_and_zeromq_does_not_end_the_process(
    there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: Any, flags: int = 0, *more: Any) -> int:
        raise OSError(24, "Too many open files")

    link.context()
    tcp, heard = dial(there.port), Heard()
    monkeypatch.setattr(link.os, "open", none_left)
    made = Channel(tcp, heard, MAX, keys_for(listens=False, secret=SECRET))
    error = heard.end()
    monkeypatch.undo()
    assert isinstance(error, VerbsError)
    assert "open an exchange: zmq_socket: EMFILE (24), Too many open files" in str(error)
    assert "raise the open-file" in str(error)
    made.close()


FEW_FILES = """
import os, resource, socket, sys, time
from rdmaconnect.exchange import link, service
from rdmaconnect.exchange.alive import open_channels
from rdmaconnect.exchange.channel import Channel
from rdmaconnect.exchange.curve import keys_for

class Receiver:
    error = None
    def took(self, frame): ...
    def over(self, error): self.error = error
    def tick(self): ...

keys = keys_for(listens=False, secret=sys.argv[3]) if sys.argv[3] else None
if sys.argv[2] == "later":
    link.context().socket(1).close()
service.loop()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(1, 20):
    tcp = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    tcp.setblocking(False)
    receiver = Receiver()
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    channel = Channel(tcp, receiver, 1000, keys)
    end = time.monotonic() + 5
    while receiver.error is None and not channel.greeted and time.monotonic() < end:
        time.sleep(0.005)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(more, type(receiver.error).__name__, receiver.error)
    channel.close()
    while service.do(open_channels):
        time.sleep(0.005)
    tcp.close()
"""


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.usefixtures("mechanism")
def test_however_few_descriptors_there_are_the_process_lives(there: Place, when: str) -> None:
    protected = KEYS[1] is not None
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(there.port), when, SECRET if protected else ""],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 19
    # without keys ZeroMQ, and so a descriptor, is not needed
    assert any("zmq_socket: EMFILE (24), Too many open files" in line for line in lines) is protected
    for line in lines:
        assert " NoneType " in line or " VerbsError open an exchange: zmq_socket: EMFILE" in line, line
    assert " NoneType " in lines[-1], "with enough of them it works"


def test_a_child_cannot_use_its_parents_channel_and_does_not_harm_it() -> None:
    with both() as (here, there):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                try:
                    here.channel.send(b"from the child")
                except StateError as e:
                    code = 0 if "of the process that forked this one" in str(e) else 2
                here.channel.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        here.send(b"from the parent")
        assert there.take() == [b"from the parent"]
        there.send(b"and back")
        assert here.take() == [b"and back"]


def test_a_child_has_an_exchange_of_its_own(there: Place) -> None:
    with calling(there) as here:
        here.send(b"parent")
        assert there.next().take() == [b"parent"]
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with place() as mine, calling(mine) as end:
                    end.send(b"child")
                    code = 0 if mine.next().take() == [b"child"] else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_where_the_service_thread_cannot_start_the_connection_is_closed(
    there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*args: object) -> None:
        raise OSError(24, "Too many open files")

    tcp = dial(there.port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "soon", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            Channel(tcp, Heard(), MAX)
    assert tcp.fileno() == -1
