"""Connectors at a listener: who speaks out of turn, who finds no room, who takes whose place, and the end of a side."""

from __future__ import annotations

import asyncio
import errno
import re
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from exchange_ends import calling, until
from hosts import PATIENCE_S, World, world
from software import Call

import rdmaconnect
from rdmaconnect.abi import QpState
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    PeerRejected,
    RdmaConnectError,
    StateError,
    VerbsError,
)
from rdmaconnect.protocol.codec import decode, encode
from rdmaconnect.protocol.messages import Beat, Bye, Hello, Ready, Reject, Reply, Target
from rdmaconnect.session import incoming, listening

__all__ = ["world"]  # a fixture of hosts


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
    """What is said next, besides that the other side is there."""
    while isinstance(message := decode(end.heard.next()), Beat):
        pass
    return message


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
            assert there._end.conversation.id == b"b" * 16
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
        assert time.monotonic() - before < 0.6 + 3
        assert "it answered: busy: 1 connections are half open" in str(caught.value)


@pytest.mark.parametrize("stage", ["before it is ready", "reconnecting"])
def test_who_has_lost_its_place_to_others_asks_anew_and_comes_in(
    world: World, hello: Hello, stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "PATIENCE_MAX_S", 0.2)
    slow, more = threading.Event(), {"device": "here", "probe": False, "deadline_s": PATIENCE_S}
    with (
        rdmaconnect.listen("127.0.0.1:0", device="there", probe=False, max_half_open=1) as listener,
        ExitStack() as all_,
    ):
        again = stage == "reconnecting"
        if again:
            first = all_.enter_context(rdmaconnect.connect(listener.url, **more))
            there = all_.enter_context(listener.accept(deadline_s=PATIENCE_S))
            awaited = world.threads.submit(there.reconnect, deadline_s=PATIENCE_S)
        # the connector's queue pair alone is slow on the way to RTR, and so its ready does not come
        hook = world.software.on(
            "ibv_modify_qp",
            to=QpState.RTR,
            where=lambda call: call["qp"].context.device.name == "here",
            before=lambda call: slow.set(),
            delay=1.0,
        )
        made: Future[Any] = (
            world.threads.submit(first.reconnect, deadline_s=PATIENCE_S)
            if again
            else world.threads.submit(rdmaconnect.connect, listener.url, **more)
        )
        assert slow.wait(PATIENCE_S)
        time.sleep(0.3)
        hook.remove()
        with rdmaconnect.connect(listener.url, **more), listener.accept(deadline_s=PATIENCE_S):
            pass
        if again:
            made.result(PATIENCE_S)
            awaited.result(PATIENCE_S)
        else:
            first = all_.enter_context(made.result(PATIENCE_S))
            there = all_.enter_context(listener.accept(deadline_s=PATIENCE_S))
        assert len(re.findall(r"busy: it has not gone on for \d+ s, and others wait\.", caplog.text)) == 1
        first.send(b"in")
        assert there.recv(deadline_s=PATIENCE_S) == b"in"


@pytest.mark.parametrize("beats", [0, 60_000])
def test_only_who_is_silent_and_has_not_said_that_it_beats_loses_its_place_at_once(
    world: World, hello: Hello, beats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "SILENT_S", 0.1)
    with (
        rdmaconnect.listen("127.0.0.1:0", device="there", probe=False, max_half_open=1) as listener,
        calling(listener.port, 1 << 19) as silent,
        calling(listener.port, 1 << 19) as other,
    ):
        silent.send(encode(replace(hello, id=b"s" * 16, beat_ms=beats)))
        assert isinstance(answer(silent), Reply)
        time.sleep(0.3)
        other.send(encode(replace(hello, id=b"o" * 16)))
        busy = answer(other)
        assert isinstance(busy, Reject)
        assert busy.again_ms
        if beats:
            time.sleep(0.2)
            assert listener._incoming
        else:
            lost = answer(silent)
            assert isinstance(lost, Reject)
            assert re.fullmatch(r"busy: it has not gone on for \d+ s, and others wait\.", lost.why)
            assert lost.again_ms == busy.again_ms


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
        message = answer(slow)
        assert isinstance(message, Reject)
        assert 1.2 < time.monotonic() - before < 5
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


def test_want_of_descriptors_is_no_verdict_while_others_will_give_theirs_back(world: World) -> None:
    world.listen()
    with world.connect():  # which waits to be accepted
        hook = world.software.on("ibv_create_comp_channel", fail=errno.EMFILE, nth=2)  # the connector's own comes first
        with world.connect():
            assert hook.seen == 1
            for _ in range(2):
                world.listener.accept(deadline_s=PATIENCE_S).close()


def test_want_of_descriptors_is_told_where_nobody_has_any_to_give_back(world: World) -> None:
    world.listen()
    world.software.on("ibv_create_comp_channel", fail=errno.EMFILE, nth=2)
    with pytest.raises(PeerRejected, match=r"refused at heard: create a completion channel: .*EMFILE \(24\).*ulimit"):
        world.connect()


def test_several_accepts_at_once_each_get_a_connection(world: World) -> None:
    world.listen()
    accepting = [world.threads.submit(world.listener.accept, deadline_s=PATIENCE_S) for _ in range(3)]
    connecting = [world.threads.submit(world.connect) for _ in range(3)]
    here, there = ([future.result(PATIENCE_S) for future in side] for side in (connecting, accepting))
    assert {end._end.conversation.id for end in here} == {end._end.conversation.id for end in there}
    assert len({end._end.conversation.id for end in here}) == 3
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
    until(lambda: world.listener._in_vain._failures)
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
    first = there._end.token
    assert len(first) == 16
    assert first != here._end.conversation.id
    again = world.threads.submit(there.reconnect, deadline_s=PATIENCE_S)
    here.reconnect(deadline_s=PATIENCE_S)
    again.result(PATIENCE_S)
    assert there._end.token != first
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
    for prev in (here._end.conversation.id, bytes(16), b"x" * 16):
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
            assert not task.done(), task
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
