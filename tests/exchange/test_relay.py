"""Bytes carried from one socket to another: all of them, in order, whatever each side takes at a time, and the ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmaconnect.exchange import relay
from rdmaconnect.exchange.relay import Outlet, Pump, drain_and_close

PATIENCE_S = 10.0


class Way:
    """A pump between two pairs of sockets, on a loop that this test turns: ``far`` -> source, sink -> ``near``."""

    def __init__(self, *, sink: bool = True, check: Any = bytes, buffer: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.far, self.source = socket.socketpair()
        self.sink, self.near = socket.socketpair()
        for sock in (self.far, self.source, self.sink, self.near):
            sock.setblocking(False)
        if buffer:
            self.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.ended: list[Pump] = []
        self.pump = Pump(self.loop, self.source, self.sink if sink else None, self.ended.append, check)

    def turn(self, seconds: float = 0.0) -> None:
        """Let the loop do what is due."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def came(self) -> bytes:
        """What has come out by now; b"" at the end too."""
        found = b""
        while self.near.fileno() >= 0:
            try:
                data = self.near.recv(1 << 20)
            except BlockingIOError:
                return found
            if not data:
                break
            found += data
        return found

    def at_end(self) -> bool:
        """Whether the end has come out."""
        try:
            return self.near.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False

    def until_ended(self) -> bytes:
        found = b""
        for _ in range(2000):
            if self.ended:
                break
            self.turn(0.0 if found else 0.001)
            found += self.came()
        assert self.ended == [self.pump]
        self.turn()
        return found + self.came()

    def watched(self) -> set[int]:
        loop: Any = self.loop
        return set(loop._selector.get_map()) - {loop._ssock.fileno()}

    def close(self) -> None:
        self.pump.stop()
        for sock in (self.far, self.source, self.sink, self.near):
            sock.close()
        self.loop.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Way]]:
    made: list[Way] = []

    def new(**options: Any) -> Way:
        made.append(Way(**options))
        return made[-1]

    yield new
    for way in made:
        way.close()


@pytest.fixture
def way(make: Callable[..., Way]) -> Way:
    return make()


def test_what_comes_goes_on_and_then_the_end(way: Way) -> None:
    way.pump.start()
    way.pump.start()
    way.far.send(b"one")
    way.turn()
    assert way.came() == b"one"
    assert not way.at_end()
    way.far.send(b"two")
    way.far.close()
    assert way.until_ended() == b"two"
    assert way.at_end()
    assert way.pump.over
    assert way.watched() == set()
    assert way.sink.fileno() >= 0, "the sink is its owner's to close"


@given(st.lists(st.one_of(st.integers(1, 200_000), st.just(0)), max_size=6), st.sampled_from([0, 4096, 20_000]))
@settings(max_examples=40)
def test_no_byte_is_lost_or_changed_though_the_sink_takes_only_some_at_a_time(sizes: list[int], buffer: int) -> None:
    made = Way(buffer=buffer)
    try:
        made.pump.start()
        data = b"".join(bytes((i + at) % 251 for at in range(size)) for i, size in enumerate(sizes))
        left, found = data, b""
        while left:
            try:
                left = left[made.far.send(left[:70_000]) :]
            except BlockingIOError:
                found += made.came()
            made.turn()
            assert len(made.pump._kept) <= relay.CHUNK
        made.far.shutdown(socket.SHUT_WR)
        found += made.until_ended()
        assert found == data
        assert made.at_end()
    finally:
        made.close()


def test_while_the_sink_takes_nothing_the_source_is_not_read_and_memory_is_bounded(make: Callable[..., Way]) -> None:
    made = make(buffer=4096)
    made.pump.start()
    sent = full = 0
    while full < 3:
        try:
            sent += made.far.send(bytes(relay.CHUNK))
        except BlockingIOError:
            full += 1
        assert sent < 10_000_000
        made.turn()
    assert len(made.pump._kept) <= relay.CHUNK
    assert made.watched() == {made.sink.fileno()}
    made.far.close()
    assert len(made.until_ended()) == sent


def test_it_can_be_held_and_goes_on(way: Way) -> None:
    way.pump.start()
    way.pump.hold()
    way.far.send(b"later")
    way.turn(0.01)
    assert way.came() == b""
    assert way.watched() == set()
    way.pump.start()
    way.turn(0.01)
    assert way.came() == b"", "start is no release"
    way.pump.release()
    way.turn()
    assert way.came() == b"later"
    way.pump.hold()
    way.far.close()
    way.turn(0.01)
    assert way.ended == []
    way.pump.release()
    way.turn()
    assert way.ended == [way.pump]


def test_held_while_the_sink_is_full_it_is_still_held_when_that_has_room(make: Callable[..., Way]) -> None:
    made = make(buffer=4096)
    made.pump.start()
    for _ in range(50):
        try:
            made.far.send(bytes(relay.CHUNK))
        except BlockingIOError:
            break
        made.turn()
    assert made.pump._kept
    made.pump.hold()
    for _ in range(100):
        made.came()
        made.turn()
    assert not made.pump._kept, "what was read before goes on"
    assert made.watched() == set()
    made.pump.release()
    assert made.watched() == {made.source.fileno()}


def test_a_sink_that_comes_later_gets_all(make: Callable[..., Way]) -> None:
    made = make(sink=False)
    made.pump.start()
    made.far.send(b"early ")
    made.turn()
    made.far.send(b"birds")
    made.turn()
    assert made.watched() == set(), "one read is all that is kept"
    made.pump.attach(made.sink)
    made.turn()
    made.turn()
    assert made.came() == b"early birds"


@pytest.mark.parametrize("said", [b"", b"last words"])
def test_a_source_that_ended_before_there_was_a_sink_ends_it_when_that_comes(
    make: Callable[..., Way], said: bytes
) -> None:
    made = make(sink=False)
    made.pump.start()
    if said:
        made.far.send(said)
        made.turn()
    made.far.close()
    made.turn()
    made.turn()
    if said:
        assert made.ended == []
        made.pump.attach(made.sink)
    assert made.until_ended() == said


def test_what_comes_is_checked_and_only_what_may_goes_on(make: Callable[..., Way]) -> None:
    seen: list[bytes] = []
    made = make(check=lambda data: seen.append(data) or data[1:])
    made.pump.start()
    for piece in (b"abc", b"d", b"ef"):
        made.far.send(piece)
        made.turn()
    assert made.came() == b"bcf"
    assert seen == [b"abc", b"d", b"ef"]
    made.far.close()
    assert made.until_ended() == b""


def test_a_check_may_stop_it(make: Callable[..., Way]) -> None:
    made = make()

    def check(data: bytes) -> bytes:
        made.pump.stop()
        return data

    made.pump._check = check
    made.pump.start()
    made.far.send(b"x")
    made.turn()
    made.turn()
    assert made.came() == b""
    assert made.ended == []
    assert made.watched() == set()


def test_what_is_discarded_is_read_all_the_same_up_to_its_end(way: Way) -> None:
    way.pump.start()
    way.pump.discarding = True
    for _ in range(20):
        way.far.send(bytes(1000))
        way.turn()
    assert way.came() == b""
    way.far.close()
    assert way.until_ended() == b""


@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "some kept"])
def test_a_sink_that_is_gone_discards_until_the_source_ends(make: Callable[..., Way], kept: bool) -> None:
    made = make(buffer=4096 if kept else 0)
    made.pump.start()
    if kept:
        for _ in range(50):
            try:
                made.far.send(bytes(relay.CHUNK))
            except BlockingIOError:
                break
            made.turn()
    made.near.close()
    for _ in range(20):
        made.turn()
        try:
            made.far.send(b"more")
        except BlockingIOError:
            made.turn()
    made.turn()
    assert made.pump.discarding
    assert made.ended == [], "the peer may still be listening for what the other way brings"
    made.far.close()
    made.until_ended()


def test_a_source_that_is_reset_is_an_end() -> None:
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        source, _ = listener.accept()
    sink, near = socket.socketpair()
    for sock in (source, sink, near):
        sock.setblocking(False)
    ended: list[Pump] = []
    pump = Pump(loop, source, sink, ended.append, bytes)
    pump.start()
    far.send(b"before")
    loop.run_until_complete(asyncio.sleep(0.05))
    assert near.recv(100) == b"before"
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    loop.run_until_complete(asyncio.sleep(0.05))
    assert ended == [pump]
    assert near.recv(100) == b""
    for sock in (source, sink, near):
        sock.close()
    loop.close()


def test_after_stop_nothing_is_called_and_nothing_is_watched(way: Way) -> None:
    way.pump.start()
    way.far.send(b"x")
    way.pump.stop()
    way.pump.stop()
    way.pump.release()
    way.pump.start()
    way.far.close()
    way.turn(0.01)
    assert way.came() == b""
    assert way.ended == []
    assert way.watched() == set()


def test_stopped_after_its_sockets_were_closed_it_watches_none_of_their_numbers(make: Callable[..., Way]) -> None:
    made = make(buffer=4096)
    made.pump.start()
    made.pump.stop()
    made.sink.close()
    made.pump.stop()
    assert made.watched() == set()


# ---- the last of a socket


def test_a_socket_is_closed_when_its_peer_has_closed_and_not_before(way: Way) -> None:
    way.sink.setblocking(False)
    fd = way.sink.fileno()
    drain_and_close(way.loop, way.sink)
    way.turn()
    assert way.near.recv(1) == b"", "the peer hears the end at once"
    for _ in range(50):
        way.near.send(bytes(1000))
        way.turn()
    assert way.sink.fileno() == fd
    way.near.close()
    way.turn()
    way.turn()
    assert way.sink.fileno() == -1
    assert way.watched() == set()


def test_one_whose_peer_is_gone_already_is_closed_too(way: Way) -> None:
    way.near.close()
    drain_and_close(way.loop, way.sink)
    way.turn()
    way.turn()
    assert way.sink.fileno() == -1
    assert way.watched() == set()


# ---- frames into one socket


class Out:
    """An outlet into a pair of sockets, on a loop that this test turns."""

    def __init__(self, most: int = 8) -> None:
        self.loop = asyncio.new_event_loop()
        self.sink, self.near = socket.socketpair()
        for sock in (self.sink, self.near):
            sock.setblocking(False)
        self.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.ends = 0
        self.outlet = Outlet(self.loop, self.sink, most, self._ended)

    def _ended(self) -> None:
        self.ends += 1

    def came(self) -> tuple[bytes, bool]:
        """What comes out while the loop is turned until nothing more does; and whether that was the end."""
        found, over = b"", False
        for _ in range(2000):
            self.loop.run_until_complete(asyncio.sleep(0))
            try:
                data = self.near.recv(3000)
            except BlockingIOError:
                if not self.outlet._kept:
                    break
                continue
            found, over = found + data, not data
            if over:
                break
        return found, over

    def close(self) -> None:
        self.outlet.stop()
        self.sink.close()
        self.near.close()
        self.loop.close()


@pytest.fixture
def out() -> Iterator[Out]:
    made = Out()
    yield made
    made.close()


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=8))
@settings(max_examples=30)
def test_frames_go_out_whole_and_in_order_however_little_the_socket_takes(sizes: list[int]) -> None:
    out = Out()
    try:
        frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
        assert all(out.outlet.put(frame) for frame in frames)
        out.outlet.finish()
        assert out.came() == (b"".join(frames), True)
        assert (out.ends, out.outlet.over) == (1, True)
    finally:
        out.close()


def test_a_peer_that_does_not_read_is_known_by_the_frames_that_are_kept(out: Out) -> None:
    taken = [out.outlet.put(bytes(40_000)) for _ in range(10)]
    assert taken == [True] * 8 + [False] * 2
    assert out.came()[0] == bytes(400_000)
    assert out.outlet.put(b"again"), "once it has read there is room"


def test_into_a_socket_that_is_gone_nothing_goes_and_the_end_is_told_once(out: Out) -> None:
    out.outlet.put(bytes(40_000))
    out.near.close()
    out.loop.run_until_complete(asyncio.sleep(0.01))
    assert out.outlet.put(b"more")
    assert (out.ends, out.outlet.over) == (0, False), "who reads there knows why"
    out.outlet.finish()
    out.outlet.finish()
    assert (out.ends, out.outlet.over) == (1, True)


def test_after_stop_an_outlet_watches_nothing(out: Out) -> None:
    out.outlet.put(bytes(40_000))
    out.outlet.stop()
    assert out.loop.remove_writer(out.sink.fileno()) is False
    assert out.outlet.put(b"late")
    assert out.ends == 0
