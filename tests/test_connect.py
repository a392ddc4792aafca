"""The story of connect and listen, on devices in software: which way is tried after which, and what is said."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from exchange_ends import calling, channels, until
from software import Call, Device, Hook, Port, Software
from software.gid import raw_gid
from tap import Tap, tapped

import rdmaconnect
from rdmaconnect import incoming, ways
from rdmaconnect.abi import QpState
from rdmaconnect.endpoint import Gid
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    StateError,
    VerbsError,
)
from rdmaconnect.messages import Bye, Hello, Joined, Ready, Reject, Reply, Target
from rdmaconnect.terms import check_count, make_terms, parse_qp_type
from rdmaconnect.wire import decode, encode

PATIENCE_S = 10.0
ONE, TWO = ("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.1.2")
CROSS = [("10.0.0.1", "10.0.1.2"), ("10.0.1.1", "10.0.0.2")]


class World:
    """Two hosts' devices in one process, a listener on one of them, and a tap before it."""

    def __init__(self, software: Software, stack: ExitStack) -> None:
        self.software, self._stack = software, stack
        self.threads = stack.enter_context(ThreadPoolExecutor(8))
        self.listener: rdmaconnect.Listener
        self.tap: Tap

    def listen(self, **options: Any) -> None:
        self.listener = self._stack.enter_context(
            rdmaconnect.listen("127.0.0.1:0", **{"device": "there", "probe": False} | options)
        )
        self.tap = self._stack.enter_context(tapped(self.listener.url))

    def connect(self, **options: Any) -> Any:
        given = {"device": "here", "probe": False, "deadline_s": PATIENCE_S}
        return rdmaconnect.connect(self.tap.url, **given | options)

    def both(self, theirs: dict[str, Any] | None = None, **mine: Any) -> tuple[Any, Any]:
        """Connect and accept; both ends are closed in the end."""
        self.listen(**theirs or {})
        here = self.connect(**mine)
        there = self.listener.accept(deadline_s=PATIENCE_S)
        for end in (*(here if isinstance(here, list) else [here]), there):
            self._stack.enter_context(end)
        return here, there

    def fails(
        self, error: type[Exception] = RdmaConnectError, theirs: dict[str, Any] | None = None, **mine: Any
    ) -> Any:
        """Connect in vain; the error."""
        self.listen(**theirs or {})
        with pytest.raises(error) as caught:
            self.connect(**mine)
        return caught.value

    def targets(self) -> list[tuple[str, str] | None]:
        """The pair of GIDs that each hello wanted."""
        return [
            None if hello.target is None else tuple(  # type: ignore[misc]
                str(Gid(raw).address) for raw in (hello.target.connector_gid, hello.target.listener_gid) if raw
            )
            for hello in self.hellos
        ]  # fmt: skip

    @property
    def hellos(self) -> list[Any]:
        return self.tap.of(Hello)

    def refuse(self, side: str, *pairs: tuple[str, str], number: int = errno.ETIMEDOUT, delay: float = 0.0) -> Hook:
        """RTR fails on one side from one GID to another; for every pair if none is given."""

        def hits(call: Call) -> bool:
            device = call["qp"].context.device
            if device.name != side:
                return False
            port = device.ports[call["attr"].ah_attr.port_num - 1]
            local = port.slots()[call["attr"].ah_attr.grh.sgid_index][0]
            return not pairs or any((local, call.dgid) == (raw_gid(a), raw_gid(b)) for a, b in pairs)

        return self.software.on("ibv_modify_qp", to=QpState.RTR, where=hits, fail=number, delay=delay)


@pytest.fixture
def world() -> Iterator[World]:
    """``here`` has two addresses that can reach one of ``there`` each, and one that cannot."""
    here = Device("here", [Port(gids=[None, "10.0.0.1", "10.0.1.1", "fe80::1"])])
    there = Device("there", [Port(gids=[None] * 5 + ["10.0.0.2", "10.0.1.2"])])
    with Software([here, there]) as software:
        try:
            with ExitStack() as stack:
                yield World(software, stack)
        finally:
            settle(software)
        assert software.problems() == []


def settle(software: Software) -> None:
    """Wait for what goes on in the background: it must not meet the next device."""
    with suppress(AssertionError):
        until(lambda: channels() == 0 and not software.left(), 5)


def pair_of(connection: Any) -> tuple[str, str]:
    path = connection.path
    return str(path.local_gid.gid.address), str(path.remote_gid.gid.address)


# ---- which way


def test_where_the_first_choice_carries_one_hello_is_enough(world: World) -> None:
    here, there = world.both()
    assert world.targets() == [None]
    until(lambda: len(world.tap.of(Joined)) == 1)
    assert [len(world.tap.of(kind)) for kind in (Hello, Reply, Ready, Reject)] == [1, 1, 1, 0]
    assert pair_of(here) == ONE == pair_of(there)[::-1]
    (reply,) = world.tap.of(Reply)
    assert len(reply.ports) == 1  # type: ignore[attr-defined]
    assert here._conversation.id == there._conversation.id
    here.send(b"there")
    assert there.recv() == b"there"


def test_hundreds_of_queue_pairs_cost_one_exchange(world: World) -> None:
    here, first = world.both(count=300)
    theirs = [first, *(world.listener.accept(deadline_s=PATIENCE_S) for _ in range(299))]
    assert [len(world.tap.of(kind)) for kind in (Hello, Reply, Ready)] == [1, 1, 1]
    for mine, other in zip(here, theirs, strict=True):
        assert mine.path.dest_qp_num == other.local.qp_num
        assert mine.path.sq_psn == other.path.rq_psn
    here[299].send(b"the last")
    assert theirs[299].recv() == b"the last"
    for end in theirs:
        end.close()


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", sorted(ways.PATH_ERRNOS))
def test_where_rtr_fails_on_either_side_the_next_pair_is_tried(world: World, side: str, number: int) -> None:
    world.refuse(side, ONE, ONE[::-1], number=number)
    here, there = world.both()
    assert world.targets() == [None, TWO]
    assert pair_of(here) == TWO == pair_of(there)[::-1]
    until(lambda: len(world.tap.of(Reject)) == 1)
    assert len({hello.id for hello in world.hellos}) == 2
    assert any(line.startswith("rejected") and "INIT->RTR" in line for line in here.path.why), here.path.why


@pytest.mark.parametrize("side", ["here", "there"])
def test_each_way_is_tried_once_and_then_it_ends_with_all_that_was_tried(world: World, side: str) -> None:
    hook = world.refuse(side)
    error = world.fails(ModifyError if side == "here" else PeerRejected)
    assert world.targets()[:2] == [None, TWO]
    assert sorted(world.targets()[2:]) == sorted(CROSS)  # type: ignore[type-var]
    assert hook.seen == 4
    assert "Tried before: " in str(error)
    for mine, theirs in [ONE, TWO, *CROSS]:
        pair = (mine, theirs) if side == "here" else (theirs, mine)
        assert all(address in str(error) for address in pair)


def test_a_partition_key_that_neither_has_is_no_reason_to_try_other_ways(world: World) -> None:
    error = world.fails(PeerRejected, pkey=0x1234)
    assert "P_Key: none in common with a full member (0x1234 wished)" in str(error)
    assert world.targets() == [None]


def test_a_peer_that_does_not_use_what_was_wanted_does_not_make_it_try_for_ever(world: World) -> None:
    world.refuse("here")
    world.listen()
    world.tap.change = lambda message, connector: [
        replace(message, target=None) if isinstance(message, Hello) else message
    ]
    with pytest.raises(ModifyError):
        world.connect()
    assert len(world.hellos) == 4


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM, errno.EIO])
def test_what_no_other_pair_would_mend_is_not_tried_again(world: World, side: str, number: int) -> None:
    world.refuse(side, number=number)
    error = world.fails(ModifyError if side == "here" else PeerRejected)
    assert error.errno == number
    assert world.targets() == [None]
    until(lambda: world.tap.of(Reject))
    (reject,) = world.tap.of(Reject)
    assert isinstance(reject, Reject)
    assert (reject.errno, reject.stage) == (number, "agreed" if side == "here" else "heard")
    assert "INIT->RTR" in reject.why


def test_after_the_deadline_nothing_more_is_tried(world: World) -> None:
    hook = world.refuse("here", delay=0.5)
    before = time.monotonic()
    error = world.fails(ConnectTimeout, deadline_s=0.8)
    assert time.monotonic() - before < 0.8 + 0.3
    assert error.stage == "move to RTR"
    assert "Tried before: " in str(error)
    assert len(world.hellos) == hook.seen == 2


def test_another_port_of_this_host_is_tried(world: World) -> None:
    world.software.devices[0].ports = [Port(gids=["fe80::1"]), Port(gids=["10.0.1.1"])]
    here, _ = world.both()
    assert pair_of(here)[0] == "10.0.1.1"
    assert [hello.ends[0].port.port_num for hello in world.hellos] == [1, 2] or here.local.port.port_num == 2


def test_another_port_of_the_peer_is_tried(world: World) -> None:
    world.software.devices[1].ports = [Port(gids=["fe80::9"]), Port(gids=["10.0.1.2"])]
    world.software.devices[0].ports = [Port(gids=["10.0.1.1"])]
    here, there = world.both()
    (*_, hello) = world.hellos
    assert hello.target is None or (hello.target.device, hello.target.port_num) == ("there", 2)
    assert there.local.port.port_num == 2
    assert pair_of(here) == TWO


def test_hosts_that_nothing_joins_are_told_why_on_both_sides(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.software.devices[0].ports = [Port(gids=["10.0.1.1"])]
    world.software.devices[1].ports = [Port(gids=["fe80::9"])]
    error = world.fails(PeerRejected)
    assert "GIDs: none of the connector's" in str(error)
    assert len(world.hellos) == 1
    until(lambda: "GIDs: none of the connector's" in caplog.text)


# ---- what was asked for explicitly


@pytest.mark.parametrize("side", ["here", "there"])
def test_an_explicit_gid_index_of_the_connector_is_never_replaced(world: World, side: str) -> None:
    world.software.devices[0].ports.append(Port(gids=[None, None, "10.0.0.77"]))
    world.refuse(side)
    world.fails(gid_index=2)
    for hello in world.hellos:
        assert hello.ends[0].port.port_num == 1
        assert [entry.gid_index for entry in hello.ends[0].port.gids] == [2]
        assert hello.target is None or hello.target.connector_gid == Gid.parse("10.0.1.1").raw
    assert len(world.hellos) == 2


def test_an_explicit_gid_index_of_the_listener_is_never_replaced(world: World) -> None:
    world.software.devices[1].ports += [Port(gids=[None] * 6 + ["10.0.1.78"]), Port(gids=[])]
    world.refuse("there")
    world.fails(PeerRejected, theirs={"gid_index": 6})
    for reject in world.tap.of(Reject):
        assert isinstance(reject, Reject)
        assert [(p.port_num, [entry.gid_index for entry in p.gids]) for p in reject.ports] == [(1, [6])]
    assert len(world.hellos) == 2  # from each address that has a way there


def test_an_explicit_device_is_never_replaced() -> None:
    devices = [Device(name, [Port(gids=[gid])]) for name, gid in
               [("a", "10.0.0.1"), ("b", "10.0.0.77"), ("there", "10.0.0.2")]]  # fmt: skip
    with Software(devices) as software:
        try:
            with ExitStack() as stack:
                world = World(software, stack)
                hook = world.refuse("b")
                world.fails(ModifyError, device="b")
                assert {hello.ends[0].port.device for hello in world.hellos} == {"b"}
                assert hook.seen == 1
        finally:
            settle(software)
        assert software.problems() == []


def test_ports_of_the_listener_without_an_address_keep_nobody_out(world: World) -> None:
    world.software.devices[1].ports.append(Port(gids=[]))
    world.both()
    (reply,) = world.tap.of(Reply)
    assert isinstance(reply, Reply)
    assert [p.port_num for p in reply.ports] == [1]


# ---- strangers, and those who speak out of turn


@pytest.fixture
def hello(world: World) -> Hello:
    """What a sound connector says first; the listener is there."""
    here, there = world.both()
    here.close()
    there.close()
    found: Hello = world.hellos[0]
    return found


def port_of(world: World) -> int:
    return world.listener.port


def answer(end: Any) -> Any:
    return decode(end.heard.next())


def test_a_target_that_the_listener_does_not_have_is_refused_in_words(world: World, hello: Hello) -> None:
    with calling(port_of(world), 1 << 19) as stranger:
        stranger.send(encode(replace(hello, id=b"s" * 16, target=Target("rxe5", 1, None, None))))
        with pytest.raises(DeviceError) as caught:
            world.listener.accept(deadline_s=PATIENCE_S, tolerant=False)
        assert str(caught.value) == "use rxe5 port 1, which the peer wants: it cannot be used here."
        reject = answer(stranger)
        assert isinstance(reject, Reject)
        assert [p.device for p in reject.ports] == ["there"]
        # the same connector may ask again, on the same connection
        stranger.send(encode(replace(hello, id=b"t" * 16)))
        assert isinstance(answer(stranger), Reply)


def test_a_message_of_a_connection_that_is_over_is_nobodys_call(world: World, hello: Hello) -> None:
    with calling(port_of(world)) as stranger:
        stranger.send(*(encode(late) for late in (Bye(b"x" * 16, "close"), Ready(b"x" * 16), Bye(b"y" * 16, "close"))))
        with world.connect() as here, world.listener.accept(deadline_s=PATIENCE_S) as there:
            here.send(b"x")
            assert there.recv() == b"x"
        time.sleep(0.05)
        assert stranger.heard.all() == []
        assert not stranger.heard.ended
        assert len(world.listener._incoming) == 0


def test_messages_of_an_unknown_type_are_ignored_at_every_step(world: World, hello: Hello) -> None:
    later = encode(Bye(b"x" * 16, "")).replace(b"\xa3bye", b"\xa3new")
    with calling(port_of(world), 1 << 19) as newer:
        newer.send(later, encode(replace(hello, id=b"n" * 16)), later)
        assert isinstance(answer(newer), Reply)
        newer.send(later.replace(b"x" * 16, b"n" * 16), encode(Ready(b"n" * 16)))
        with world.listener.accept(deadline_s=PATIENCE_S) as there:
            newer.send(later.replace(b"x" * 16, b"n" * 16))
            time.sleep(0.05)
            assert there.lost is None
            assert not newer.heard.ended


def test_bytes_that_are_no_message_are_answered_with_a_reject_and_the_end(world: World, hello: Hello) -> None:
    with calling(port_of(world)) as stranger:
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
        reject = answer(stranger)
        assert isinstance(reject, Reject)
        assert reject.id == bytes(16)
        assert "not a message" in reject.why
        stranger.heard.end()
    with world.connect(), world.listener.accept(deadline_s=PATIENCE_S):
        pass


def test_a_second_hello_on_the_same_connection_begins_anew(world: World, hello: Hello) -> None:
    with calling(port_of(world), 1 << 19) as end:
        for ident in (b"a" * 16, b"b" * 16):
            end.send(encode(replace(hello, id=ident)))
            reply = answer(end)
            while not isinstance(reply, Reply) or reply.id != ident:
                reply = answer(end)
        end.send(encode(Ready(b"a" * 16)), encode(Bye(b"a" * 16, "old")), encode(Ready(b"b" * 16)))
        with world.listener.accept(deadline_s=PATIENCE_S) as there:
            assert there._conversation.id == b"b" * 16
            time.sleep(0.05)
            assert there.lost is None


# ---- room


def test_half_open_connections_are_bounded_and_who_comes_too_many_is_told_when_to_come_again(
    world: World, hello: Hello
) -> None:
    with (
        rdmaconnect.listen("127.0.0.1:0", device="there", probe=False, max_half_open=3) as listener,
        ExitStack() as all_,
    ):
        ends = [all_.enter_context(calling(listener.port, 1 << 19)) for _ in range(4)]
        for number, end in enumerate(ends[:3]):
            end.send(encode(replace(hello, id=bytes([number + 1]) * 16)))
            assert isinstance(answer(end), Reply)
        ends[3].send(encode(replace(hello, id=b"d" * 16)))
        busy = answer(ends[3])
        assert isinstance(busy, Reject)
        assert busy.why == "busy: 3 connections are half open or wait to be accepted, which is the most"
        assert 0 < busy.again_ms <= 60_000
        # a real connector obeys, and comes in when there is room
        made: Future[Any] = world.threads.submit(
            rdmaconnect.connect, listener.url, device="here", probe=False, deadline_s=PATIENCE_S
        )
        time.sleep(0.5)
        assert not made.done()
        ends[0].channel.close()
        with made.result(PATIENCE_S), listener.accept(deadline_s=PATIENCE_S):
            pass


def test_who_is_told_to_come_again_does_so_until_its_deadline_and_no_longer(world: World, hello: Hello) -> None:
    with (
        rdmaconnect.listen("127.0.0.1:0", device="there", probe=False, max_half_open=1) as listener,
        calling(listener.port, 1 << 19) as silent,
    ):
        silent.send(encode(replace(hello, id=b"s" * 16)))
        assert isinstance(answer(silent), Reply)
        before = time.monotonic()
        with pytest.raises(ConnectTimeout) as caught:
            rdmaconnect.connect(listener.url, device="here", probe=False, deadline_s=0.6)
        assert time.monotonic() - before < 0.9
        assert "it answered: busy: 1 connections are half open" in str(caught.value)


def test_queue_pairs_are_bounded_too_and_large_hellos_leave_room_for_small_ones(world: World, hello: Hello) -> None:
    with rdmaconnect.listen("127.0.0.1:0", device="there", probe=False, max_qps=400) as listener, ExitStack() as all_:
        many = tuple(replace(hello.ends[0], qp_num=number + 1) for number in range(250))
        one, two, small = (all_.enter_context(calling(listener.port, 1 << 19)) for _ in range(3))
        one.send(encode(replace(hello, id=b"a" * 16, ends=many)))
        assert isinstance(answer(one), Reply)
        two.send(encode(replace(hello, id=b"b" * 16, ends=many[:100])))
        busy = answer(two)
        assert isinstance(busy, Reject)
        assert busy.why == ("busy: 250 queue pairs are half open or wait to be accepted: there is no room for 100 more")
        small.send(encode(replace(hello, id=b"c" * 16)))
        assert isinstance(answer(small), Reply)


@pytest.mark.parametrize(
    ("name", "value"), [("max_half_open", 0), ("max_qps", -1), ("max_qps", 1.5), ("max_qps", True)]
)
def test_bounds_that_cannot_be_meant_are_refused(world: World, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}: give a number of 1 or more"):
        rdmaconnect.listen("127.0.0.1:0", **{name: value})


def test_one_that_asks_and_does_not_go_on_is_told_so_and_freed(
    world: World, hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "HALF_OPEN_S", 0.3)
    before = world.software.alive["qp"]
    with calling(port_of(world), 1 << 19) as silent:
        silent.send(encode(replace(hello, id=b"s" * 16, beat_ms=0)))
        assert isinstance(answer(silent), Reply)
        with pytest.raises(ConnectTimeout, match="It asked, and did not go on"):
            world.listener.accept(deadline_s=PATIENCE_S, tolerant=False)
        reject = answer(silent)
        assert isinstance(reject, Reject)
        assert "It asked, and did not go on." in reject.why
    until(lambda: world.software.alive["qp"] == before)


def test_one_that_says_that_it_is_there_may_take_as_long_as_it_said(
    world: World, hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "HALF_OPEN_S", 0.2)
    with calling(port_of(world), 1 << 19) as slow:
        slow.send(encode(replace(hello, id=b"s" * 16, beat_ms=1000, patience_ms=1500)))
        assert isinstance(answer(slow), Reply)
        before = time.monotonic()
        while not isinstance(message := answer(slow), Reject):
            assert type(message).__name__ == "Beat"
        assert 1.2 < time.monotonic() - before < 3
        assert "It asked, and did not go on." in message.why


def test_a_peer_that_is_hard_to_reach_holds_up_nobody_else(world: World) -> None:
    reached, blocked = threading.Event(), threading.Event()

    def wait(call: Call) -> None:
        blocked.set()
        assert reached.wait(PATIENCE_S)

    world.listen()
    hook = world.software.on("ibv_modify_qp", to=QpState.RTR, before=wait, times=1)
    slow = world.threads.submit(world.connect)
    assert blocked.wait(PATIENCE_S)
    hook.remove()
    with world.connect(), world.listener.accept(deadline_s=PATIENCE_S):
        assert not slow.done()
        with pytest.raises(ConnectTimeout, match=r"Not finished with 127\.0\.0\.1 \(heard\)"):
            world.listener.accept(deadline_s=0)
        reached.set()
        with slow.result(PATIENCE_S), world.listener.accept(deadline_s=PATIENCE_S):
            pass


def test_several_accepts_at_once_each_get_a_connection(world: World) -> None:
    world.listen()
    accepting = [world.threads.submit(world.listener.accept, deadline_s=PATIENCE_S) for _ in range(3)]
    connecting = [world.threads.submit(world.connect) for _ in range(3)]
    here, there = ([future.result(PATIENCE_S) for future in side] for side in (connecting, accepting))
    assert {end._conversation.id for end in here} == {end._conversation.id for end in there}
    assert len({end._conversation.id for end in here}) == 3
    for end in (*here, *there):
        end.close()


def test_connections_wait_to_be_accepted_in_their_order(world: World) -> None:
    world.listen()
    here = [world.connect(private_data=bytes([number])) for number in range(5)]
    there = [world.listener.accept(deadline_s=PATIENCE_S) for _ in range(5)]
    assert [end.private_data for end in there] == [bytes([number]) for number in range(5)]
    for end in (*here, *there):
        end.close()


def test_an_accept_in_vain_says_with_whom_it_failed(world: World) -> None:
    world.refuse("there", number=errno.EPERM)
    world.fails(PeerRejected)
    with pytest.raises(ConnectTimeout) as caught:
        world.listener.accept(deadline_s=0)
    assert "Failed with 127.0.0.1: " in str(caught.value)
    assert "ibv_modify_qp: EPERM" in str(caught.value)
    with pytest.raises(ConnectTimeout, match=r"nobody asked: 127\.0\.0\.1 is loopback, which only this host reaches"):
        world.listener.accept(deadline_s=0)


def test_a_connect_in_vain_to_loopback_says_that_it_is_this_host_itself(world: World) -> None:
    with pytest.raises(ConnectTimeout) as caught:
        rdmaconnect.connect("127.0.0.1:1", deadline_s=0.2)
    assert "nothing listens on that port" in str(caught.value)
    assert str(caught.value).endswith("127.0.0.1 is loopback, this host itself: a peer elsewhere has another address.")


# ---- who takes the place of whom


def test_an_older_attempt_to_take_a_connections_place_finds_nobody(world: World) -> None:
    """A hello that was delayed names a token that counts no more: it makes a new connection, and ends none."""
    world.listen()
    here = world.connect()
    there = world.listener.accept(deadline_s=PATIENCE_S)
    first = there._token
    assert len(first) == 16
    assert first != here._conversation.id
    again = world.threads.submit(there.reconnect, deadline_s=PATIENCE_S)
    here.reconnect(deadline_s=PATIENCE_S)
    again.result(PATIENCE_S)
    assert there._token != first
    (late,) = [hello for hello in world.hellos if hello.prev == first]
    with calling(port_of(world), 1 << 19) as old:
        old.send(encode(replace(late, id=b"l" * 16)))
        assert isinstance(answer(old), Reply)
        time.sleep(0.05)
        assert there.lost is None
        here.send(b"still")
        assert there.recv() == b"still"
    here.close()
    there.close()


def test_without_the_token_nobody_takes_a_connections_place(world: World) -> None:
    """The id travels over the data path in the probes: who sees it must not be able to end the connection."""
    here, there = world.both(probe=True)
    for prev in (here._conversation.id, bytes(16), b"x" * 16):
        with calling(port_of(world), 1 << 19) as other:
            other.send(encode(replace(world.hellos[0], id=b"o" * 16, prev=prev)))
            assert isinstance(answer(other), Reply)
            time.sleep(0.02)
            assert there.lost is None
    here.send(b"still")
    assert there.recv() == b"still"


def test_reconnect_takes_the_place_on_both_sides(world: World) -> None:
    here, there = world.both()
    for number in range(3):
        again = world.threads.submit(there.reconnect, deadline_s=PATIENCE_S)
        here.reconnect(deadline_s=PATIENCE_S)
        again.result(PATIENCE_S)
        here.send(b"%d" % number)
        assert there.recv() == b"%d" % number
    assert world.software.made["qp"] == 2


def test_a_peer_that_connects_anew_is_told_to_the_one_that_still_holds_the_old(world: World) -> None:
    here, there = world.both()
    anew = world.threads.submit(here.reconnect, deadline_s=PATIENCE_S)
    until(lambda: there.lost)
    assert "the peer closed the connection" in str(there.lost) or "call reconnect()" in str(there.lost)
    assert not anew.done()
    there.reconnect(deadline_s=PATIENCE_S)
    anew.result(PATIENCE_S)
    here.send(b"again")
    assert there.recv() == b"again"


# ---- the end of one side


def test_a_listener_that_closes_ends_those_under_way_and_not_those_that_stand(world: World, hello: Hello) -> None:
    here = world.connect()
    there = world.listener.accept(deadline_s=PATIENCE_S)
    waiting = world.threads.submit(world.listener.accept, deadline_s=None)
    with calling(port_of(world), 1 << 19) as half:
        half.send(encode(replace(hello, id=b"h" * 16)))
        assert isinstance(answer(half), Reply)
        unaccepted = world.connect()
        waiting.result(PATIENCE_S).close()
        waiting = world.threads.submit(world.listener.accept, deadline_s=None)
        time.sleep(0.05)
        world.listener.close()
        with pytest.raises(StateError, match=r"the listener on tcp://.* is closed"):
            waiting.result(PATIENCE_S)
        reject = answer(half)
        assert isinstance(reject, Reject)
        assert reject.why == "the listener was closed."
    here.send(b"lives on")
    assert there.recv() == b"lives on"
    for end in (here, there, unaccepted):
        end.close()


def test_what_was_prepared_when_connect_was_cancelled_is_freed(world: World) -> None:
    world.listen()
    busy = threading.Event()
    world.software.on("ibv_create_qp", before=lambda call: busy.set(), delay=0.2)

    async def main() -> None:
        task = asyncio.create_task(rdmaconnect.aconnect(world.tap.url, device="here", deadline_s=None))
        while not busy.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: world.software.made["qp"] == 1 and not world.software.alive["qp"])


@pytest.mark.parametrize("state", [QpState.INIT, QpState.RTR, QpState.RTS], ids=str)
@pytest.mark.parametrize("side", ["here", "there"])
def test_whatever_step_fails_on_either_side_nothing_is_left(world: World, side: str, state: QpState) -> None:
    where = lambda call: call["qp"].context.device.name == side  # noqa: E731
    world.software.on("ibv_modify_qp", to=state, where=where, fail=errno.EIO)
    world.listen()
    with suppress(RdmaConnectError):
        world.connect(probe=True).close()
    with pytest.raises((ConnectTimeout, VerbsError, PeerRejected, CompletionError)):
        world.listener.accept(deadline_s=0.2, tolerant=False)
    until(lambda: not world.software.alive["qp"])


# ---- the same for asyncio


def test_for_asyncio_it_is_the_same_and_the_loop_is_never_blocked(world: World) -> None:
    world.software.on("ibv_modify_qp", to=QpState.RTR, delay=0.3)

    async def main() -> None:
        ticks, over = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not over:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with await rdmaconnect.alisten("127.0.0.1:0", device="there", probe=False) as listener:
            accepting = asyncio.create_task(listener.accept(deadline_s=PATIENCE_S))
            async with (
                await rdmaconnect.aconnect(listener.url, device="here", probe=False, deadline_s=PATIENCE_S) as here,
                await accepting as there,
            ):
                await here.send(b"there")
                assert await there.recv() == b"there"
        over = True
        await ticking
        assert ticks > 20

    asyncio.run(main())


# ---- what is asked for


@pytest.mark.parametrize("given", ["RC", "rc", 2])
def test_a_type_is_named_or_numbered(given: Any) -> None:
    assert parse_qp_type(given).name == "RC"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("RAW_PACKET", "it has no two ends to connect by this exchange"),
        ("XRC_SEND", "one with XRC domains"),
        ("TCP", "give 'RC', 'UC' or 'UD'"),
        (99, "give 'RC', 'UC' or 'UD'"),
    ],
)
def test_a_type_that_cannot_be_connected_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_qp_type(given)


def test_what_cannot_be_meant_is_refused_by_name() -> None:
    plain: dict[str, Any] = {"listens": False, "secret": None, "key": None, "peer_key": None}
    with pytest.raises(TypeError, match=r"^gid_idx, mtu: there is no such option\. The options are device, port_num"):
        make_terms("RC", {"mtu": 1, "gid_idx": 2}, None, b"", **plain)
    with pytest.raises(ValueError, match="private_data is 4097 bytes long: give at most 4096"):
        make_terms("RC", {}, None, bytes(4097), **plain)
    for count in (0, -1, 4097):
        with pytest.raises(ValueError, match=f"count is {count}: give 1 to 4096"):
            check_count(count)
    assert (check_count(None), check_count(4096)) == (1, 4096)
    made = make_terms("RC", {}, None, b"", **plain | {"secret": "a secret of one job"})
    assert made.keys is not None
    assert made.keys.secret.decode() not in repr(made)


@pytest.mark.parametrize(
    "error", [PeerMismatch(["a difference"]), ModifyError(110, "move", qp_num=1, frm=1, to=2, mask=0)], ids=type
)
def test_more_can_be_said_on_any_error(error: RdmaConnectError) -> None:
    before = str(error)
    ways.say_more(error, "Tried before: this.")
    assert str(error) == f"{before} Tried before: this."
    assert str(error) in repr(error) or isinstance(error, OSError)
