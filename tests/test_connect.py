"""The story of connect and listen, on hosts without a device: which way is tried after which, and what is said."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fakes import Channel, FakeListener, Front, Host, Net, Teller, connect, install, joined, tell, terms
from rdmaconnect.driver import arun
from rdmaconnect.reception import Reception
from samples import V1, V2, gid, port

from rdmaconnect import half, reception, ways
from rdmaconnect.connect import connect_story
from rdmaconnect.deadline import Deadline
from rdmaconnect.endpoint import Gid
from rdmaconnect.errors import ConnectTimeout, DeviceError, ModifyError, PeerMismatch, PeerRejected, RdmaConnectError
from rdmaconnect.messages import Bye, Hello, Ready, Reject, Reply, Target
from rdmaconnect.path import Path
from rdmaconnect.terms import check_count, make_terms, parse_qp_type
from rdmaconnect.wire import encode

PEER = "127.0.0.1:1001"
URL = f"tcp://{PEER}"
#: two addresses on each side that can reach each other, and one that cannot
HERE = port(gid("10.0.0.1", V2, 1), gid("10.0.1.1", V2, 2), gid("fe80::1", V2, 3))
THERE = port(gid("10.0.0.2", V2, 5), gid("10.0.1.2", V2, 6), name="rxe9")


class World:
    """Two hosts and a network."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.net, self.here, self.there = Net(), Host(HERE), Host(THERE)
        install(patch, lambda: self.net, self.here, self.there)
        self.listeners: list[FakeListener] = []

    def connect(self, deadline_s: float | None = 60, count: int = 1, **options: Any) -> Teller:
        story = connect_story(Front, PEER, terms(**options), count, Deadline(deadline_s, ConnectTimeout))  # type: ignore[type-var]
        return Teller(story)

    def listen(self, **options: Any) -> FakeListener:
        asked = terms(**options)
        self.listeners.append(FakeListener(URL, asked, [asked.qp_type], share_ud=False))
        return self.listeners[-1]

    def both(self, *, mine: Any = None, theirs: Any = None, **more: Any) -> tuple[Teller, Teller]:
        """Connect and accept, both told to their ends."""
        listening = self.listen(**(theirs or {}))
        tellers = self.connect(**more, **(mine or {})), Teller(listening._accept(60, tolerant=True))
        while not tellers[0].done:
            self.net.chance.choice([tellers[0].step, tellers[1].step, self.net.carry])()
        if tellers[0].error is None:
            tell(self.net, tellers[1])
        return tellers

    def all_freed(self) -> bool:
        for made in self.listeners:
            made._close()
        return self.here.all_freed() and self.there.all_freed() and all(c.closed for c in self.net.channels)

    def targets(self) -> list[tuple[str, str] | None]:
        """The pair of GIDs that each hello wanted."""
        return [
            None if hello.target is None else tuple(  # type: ignore[misc]
                str(Gid(raw).address) for raw in (hello.target.connector_gid, hello.target.listener_gid) if raw
            )
            for hello in self.net.of(Hello)
        ]  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def fails(*pairs: tuple[str, str], number: int = errno.ETIMEDOUT) -> Callable[[Path], None]:
    """A host on which RTR fails from one GID to another; for every pair if none is given."""

    def to_rtr(path: Path) -> None:
        assert path.local_gid is not None
        assert path.remote_gid is not None
        pair = str(path.local_gid.gid.address), str(path.remote_gid.gid.address)
        if pair in pairs or not pairs:
            raise ModifyError(number, f"move {pair[0]} to {pair[1]}", qp_num=1, frm=1, to=2, mask=0)

    return to_rtr


ONE, TWO = ("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.1.2")
CROSS = [("10.0.0.1", "10.0.1.2"), ("10.0.1.1", "10.0.0.2")]


def pair_of(teller: Teller) -> tuple[str, str]:
    path: Path = teller.value[0].path if isinstance(teller.value, list) else teller.value.path
    assert path.local_gid is not None
    assert path.remote_gid is not None
    return str(path.local_gid.gid.address), str(path.remote_gid.gid.address)


# ---- which way


def test_where_the_first_choice_carries_one_hello_is_enough(world: World) -> None:
    connecting, accepting = world.both()
    assert connecting.error is accepting.error is None
    assert world.targets() == [None]
    assert [len(world.net.of(kind)) for kind in (Hello, Reply, Ready, Reject)] == [1, 1, 1, 0]
    assert pair_of(connecting) == ONE == pair_of(accepting)[::-1]
    assert [len(reply.ports) for reply in world.net.of(Reply)] == [1]
    (front,) = connecting.value
    assert joined(front).id == joined(accepting.value).id
    front._close()
    accepting.value._close()
    assert world.all_freed()


def test_a_thousand_queue_pairs_cost_one_exchange(world: World) -> None:
    connecting, accepting = world.both(count=1000)
    assert connecting.error is accepting.error is None
    assert len(connecting.value) == 1000
    assert [len(world.net.of(kind)) for kind in (Hello, Reply, Ready)] == [1, 1, 1]
    theirs = [accepting.value, *world.listeners[0]._ready]
    for mine, other in zip(connecting.value, theirs, strict=True):
        assert mine.path.dest_qp_num == other._lane.endpoint.qp_num
        assert mine.path.sq_psn == other.path.rq_psn
        mine._close()
    accepting.value._close()
    assert world.all_freed()


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", sorted(ways.PATH_ERRNOS))
def test_where_rtr_fails_on_either_side_the_next_pair_is_tried(world: World, side: str, number: int) -> None:
    getattr(world, side).to_rtr = fails(ONE, ONE[::-1], number=number)
    connecting, accepting = world.both()
    assert connecting.error is accepting.error is None
    assert world.targets() == [None, TWO]
    assert pair_of(connecting) == TWO == pair_of(accepting)[::-1]
    assert len(world.net.of(Reject)) == 1
    ids = {hello.id for hello in world.net.of(Hello)}
    assert len(ids) == 2
    (front,) = connecting.value
    assert any("rejected" in line and "move 10.0.0." in line for line in front.path.why), front.path.why
    front._close()
    accepting.value._close()
    assert world.all_freed()


@pytest.mark.parametrize("side", ["here", "there"])
def test_each_way_is_tried_once_and_then_it_ends_with_all_that_was_tried(world: World, side: str) -> None:
    getattr(world, side).to_rtr = fails()
    connecting, _ = world.both()
    assert isinstance(connecting.error, ModifyError if side == "here" else PeerRejected)
    assert world.targets()[:2] == [None, TWO]
    assert sorted(world.targets()[2:]) == sorted(CROSS)  # type: ignore[type-var]
    words = str(connecting.error)
    assert "Tried before: " in words
    assert not words.startswith("(")
    for mine, theirs in [ONE, TWO, *CROSS]:
        assert f"move {mine} to {theirs}" in words or f"move {theirs} to {mine}" in words
    assert world.all_freed()


def test_a_partition_key_that_neither_has_is_no_reason_to_try_other_ways(world: World) -> None:
    connecting, _ = world.both(mine={"pkey": 0x1234})
    assert isinstance(connecting.error, PeerRejected)
    assert "P_Key: none in common with a full member (0x1234 wished)" in str(connecting.error)
    assert world.targets() == [None]
    assert world.all_freed()


def test_a_peer_that_does_not_use_what_was_wanted_does_not_make_it_try_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half, "narrow", lambda port, gid: port)
    world.here.to_rtr = fails()
    connecting, _ = world.both()
    assert isinstance(connecting.error, ModifyError)
    assert len(world.net.of(Hello)) == 4
    assert world.all_freed()


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM, errno.EIO])
def test_what_no_other_pair_would_mend_is_not_tried_again(world: World, side: str, number: int) -> None:
    getattr(world, side).to_rtr = fails(number=number)
    connecting, _ = world.both()
    assert isinstance(connecting.error, ModifyError if side == "here" else PeerRejected)
    assert connecting.error.errno == number
    assert world.targets() == [None]
    (reject,) = world.net.of(Reject)
    assert (reject.errno, reject.stage) == (number, "agreed" if side == "here" else "heard")
    assert f"move {' to '.join(ONE if side == 'here' else ONE[::-1])}" in reject.why
    assert world.all_freed()


def test_after_the_deadline_nothing_more_is_tried(world: World) -> None:
    def slow(path: Path) -> None:
        world.net.now += 7
        fails()(path)

    world.here.to_rtr = slow
    connecting, _ = world.both(deadline_s=10)
    assert isinstance(connecting.error, ModifyError)
    assert len(world.net.of(Hello)) == 2
    assert world.all_freed()


def test_another_port_of_this_host_is_tried(world: World) -> None:
    world.here.ports = [port(gid("fe80::1", V1), name="rxe0"), port(gid("10.0.1.1"), name="rxe1")]
    connecting, accepting = world.both()
    assert connecting.error is accepting.error is None
    assert pair_of(connecting) == TWO
    assert [made.address.device for made in world.here.prepared] == ["rxe0", "rxe1"]
    assert "GIDs: none of the connector's" in " ".join(connecting.value[0].path.why)


def test_another_port_of_the_peer_is_tried(world: World) -> None:
    world.there.ports = [port(gid("fe80::1", V1), name="rxe7"), port(gid("10.0.1.2"), name="rxe8", port_num=2)]
    connecting, accepting = world.both()
    assert connecting.error is accepting.error is None
    (_, hello) = world.net.of(Hello)
    assert (hello.target.device, hello.target.port_num) == ("rxe8", 2)
    assert pair_of(connecting) == TWO


def test_hosts_that_nothing_joins_are_told_why_on_both_sides(world: World) -> None:
    world.there.ports = [port(gid("fe80::1", V1), name="rxe7")]
    connecting, _ = world.both()
    assert isinstance(connecting.error, PeerRejected)
    assert "GIDs: none of the connector's" in str(connecting.error)
    assert len(world.net.of(Hello)) == 1
    assert world.all_freed()


# ---- what was asked for explicitly


@pytest.mark.parametrize("side", ["here", "there"])
def test_an_explicit_gid_index_of_the_connector_is_never_replaced(world: World, side: str) -> None:
    world.here.ports.append(port(gid("10.0.0.77", V2, 2), name="rxe1"))
    getattr(world, side).to_rtr = fails()
    connecting, _ = world.both(mine={"gid_index": 2})
    assert connecting.error is not None
    for hello in world.net.of(Hello):
        assert hello.ends[0].port.device == "rxe0"
        assert [entry.gid_index for entry in hello.ends[0].port.gids] == [2]
        assert hello.target is None or hello.target.connector_gid == Gid.parse("10.0.1.1").raw
    assert len(world.net.of(Hello)) == 2


def test_an_explicit_gid_index_of_the_listener_is_never_replaced(world: World) -> None:
    world.there.ports += [port(gid("10.0.1.78", V2, 6), name="rxe8"), port(name="rxe7")]
    world.there.to_rtr = fails()
    connecting, _ = world.both(theirs={"gid_index": 6})
    assert isinstance(connecting.error, PeerRejected)
    for reject in world.net.of(Reject):
        assert [(p.device, [entry.gid_index for entry in p.gids]) for p in reject.ports] == [("rxe9", [6])]
    assert len(world.net.of(Hello)) == 2  # from each address that has a way there


def test_an_explicit_device_is_never_replaced(world: World) -> None:
    world.here.ports.append(port(gid("10.0.0.77"), name="rxe1"))
    world.here.to_rtr = fails()
    connecting, _ = world.both(mine={"device": "rxe1"})
    assert isinstance(connecting.error, ModifyError)
    assert {hello.ends[0].port.device for hello in world.net.of(Hello)} == {"rxe1"}


def test_ports_of_the_listener_without_an_address_keep_nobody_out(world: World) -> None:
    world.there.ports.append(port(name="rxe8"))
    connecting, accepting = world.both()
    assert connecting.error is accepting.error is None
    (reply,) = world.net.of(Reply)
    assert [p.device for p in reply.ports] == ["rxe9"]


def test_a_target_that_the_listener_does_not_have_is_refused_in_words(world: World) -> None:
    listening = world.listen(device="rxe9")
    story = connecting = world.connect()
    accepting = Teller(listening._accept(60, tolerant=False))
    while not world.net.channels or not world.net.channels[0].out:
        connecting.step()
    hello = world.net.of(Hello)[0]
    target = Target("rxe5", 1, None, None)
    stranger = Channel(world.net, URL)
    stranger.send(encode(Hello(b"s" * 16, hello.ends, hello.wish, {}, target=target)))
    world.net.channels[0].out.clear()
    tell(world.net, accepting)
    assert isinstance(accepting.error, DeviceError)
    assert str(accepting.error) == "use rxe5 port 1, which the peer wants: it cannot be used here."
    (reject,) = world.net.of(Reject)
    assert [p.device for p in reject.ports] == ["rxe9"]
    story.story.close()
    listening._close()


# ---- the listener


def test_a_message_of_a_connection_that_is_over_is_nobodys_call(world: World) -> None:
    listening = world.listen()
    stranger = Channel(world.net, URL)
    for late in (Bye(b"x" * 16, "close"), Ready(b"x" * 16), Bye(b"y" * 16, "close")):
        stranger.send(encode(late))
    accepting, connecting = Teller(listening._accept(60, tolerant=False)), world.connect()
    tell(world.net, accepting, connecting)
    assert accepting.error is connecting.error is None
    assert listening._halves == []
    assert len(world.net.of(Reject)) == 0


def test_bytes_that_are_no_message_are_answered_with_a_reject(world: World) -> None:
    listening = world.listen()
    stranger = Channel(world.net, URL)
    stranger.out.append(b"GET / HTTP/1.1\r\n\r\n")
    accepting, connecting = Teller(listening._accept(60, tolerant=True)), world.connect()
    tell(world.net, accepting, connecting)
    assert accepting.error is connecting.error is None
    (reject,) = world.net.of(Reject)
    assert reject.id == bytes(16)
    assert "not a message" in reject.why


def test_half_open_connections_are_bounded_in_number_and_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HALF_OPEN_MAX", 3)
    listening = world.listen()
    accepting, asked = Teller(listening._accept(None, tolerant=True)), world.connect()
    while not world.net.channels or not world.net.channels[0].out:
        asked.step()
    hello = world.net.of(Hello)[0]
    asked.story.close()
    for number in range(5):
        silent = Channel(world.net, URL)
        silent.send(encode(Hello(bytes(15) + bytes([number + 1]), hello.ends, hello.wish, {})))
        while world.net.carry():
            accepting.step()
        for _ in range(10):
            accepting.step()
        assert len(listening._halves) == min(number + 1, 3)
    first = [reject.why for reject in world.net.of(Reject)]
    assert "3 connections are half open: this one was the oldest." in first
    world.net.now += half.HALF_OPEN_S + half.HALF_OPEN_EACH_S
    for _ in range(5):
        accepting.step()
    assert listening._halves == []
    assert "It asked, and did not go on." in world.net.of(Reject)[-1].why
    assert not accepting.done
    accepting.story.close()
    assert world.there.all_freed()


def test_a_peer_that_is_hard_to_reach_holds_up_nobody_else(world: World) -> None:
    reached, first = threading.Event(), threading.Event()

    def to_rtr(path: Path) -> None:
        if not first.is_set():
            first.set()
            assert reached.wait(30)

    world.there.to_rtr = to_rtr
    listening = world.listen()
    listening._begin = partial(Reception._begin, listening)  # type: ignore[method-assign]
    slow, accepting = world.connect(), [Teller(listening._accept(None, tolerant=False)) for _ in range(2)]
    while not first.is_set():
        world.net.carry()
        for teller in (slow, accepting[0]):
            teller.step()
    fast = world.connect()
    while not any(teller.done for teller in accepting):
        world.net.carry()
        for teller in (slow, fast, *accepting):
            if not teller.done:
                teller.step()
        time.sleep(0.001)
    assert not slow.done
    assert "Not finished with" in listening._seen([])
    reached.set()
    while not all(teller.done for teller in (slow, fast, *accepting)):
        world.net.carry()
        for teller in (slow, fast, *accepting):
            if not teller.done:
                teller.step()
        time.sleep(0.001)
    assert [teller.error for teller in (slow, fast, *accepting)] == [None] * 4
    listening._close()


def test_connectors_that_wait_for_an_answer_are_bounded_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HALF_OPEN_MAX", 3)
    monkeypatch.setattr(reception, "ANSWERS_MAX", 1)
    reached, busy = threading.Event(), threading.Event()

    def to_rtr(path: Path) -> None:
        busy.set()
        assert reached.wait(30)

    world.there.to_rtr = to_rtr
    listening = world.listen()
    listening._begin = partial(Reception._begin, listening)  # type: ignore[method-assign]
    accepting, asked = Teller(listening._accept(None, tolerant=True)), world.connect()
    while not world.net.channels or not world.net.channels[0].out:
        asked.step()
    hello = world.net.of(Hello)[0]
    asked.story.close()
    for number in range(10):
        Channel(world.net, URL).send(encode(Hello(bytes(15) + bytes([number + 1]), hello.ends, hello.wish, {})))
        while world.net.carry():
            accepting.step()
        for _ in range(5):
            accepting.step()
        assert busy.wait(30)
    assert len(listening._halves) <= 4  # the one that is being answered cannot be dropped
    reached.set()
    listening._close()
    assert world.there.all_freed()


def test_several_accepts_at_once_each_get_a_connection(world: World) -> None:
    for seed in range(50):
        world.net = Net(seed)
        listening = world.listen()
        accepting = [Teller(listening._accept(None, tolerant=False)) for _ in range(3)]
        connecting = [world.connect() for _ in range(3)]
        tell(world.net, *accepting, *connecting)
        assert [teller.error for teller in (*accepting, *connecting)] == [None] * 6, seed
        assert len(world.net.of(Reply)) == 3
        ids = [{joined(made).id for made in side} for side in (
            [teller.value for teller in accepting], [teller.value[0] for teller in connecting]
        )]  # fmt: skip
        assert ids[0] == ids[1]
        assert len(ids[0]) == 3


def test_an_accept_in_vain_says_with_whom_it_failed(world: World) -> None:
    world.there.to_rtr = fails(number=errno.EPERM)
    listening = world.listen()
    connecting, accepting = world.connect(), Teller(listening._accept(30, tolerant=True))
    tell(world.net, connecting, accepting)
    assert isinstance(accepting.error, ConnectTimeout)
    assert "move 10.0.0.2 to 10.0.0.1: ibv_modify_qp: EPERM" in str(accepting.error)
    nobody = Teller(listening._accept(0, tolerant=True))
    tell(world.net, nobody)
    assert "nobody asked: 127.0.0.1 is loopback, which only this host reaches" in str(nobody.error)
    vain = world.connect(deadline_s=0.01)
    tell(world.net, vain)
    assert isinstance(vain.error, ConnectTimeout)
    assert str(vain.error).endswith("127.0.0.1 is loopback, this host itself: a peer elsewhere has another address.")


# ---- cancelled


def test_what_was_prepared_when_connect_was_cancelled_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, here, busy = Net(), Host(HERE), threading.Event()
    install(monkeypatch, lambda: net, here, Host(THERE))

    def slow() -> None:
        busy.set()
        time.sleep(0.1)

    here.delay = slow

    async def main() -> None:
        story = connect_story(Front, PEER, terms(), 1, Deadline(None, ConnectTimeout))  # type: ignore[type-var]
        task = asyncio.create_task(arun(story))
        while not busy.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(here.prepared) == 1
    assert here.all_freed()
    assert all(channel.closed for channel in net.channels)


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
    assert (check_count(None), connect.check_count(4096)) == (1, 4096)
    made = make_terms("RC", {}, None, b"", **plain | {"secret": "a secret of one job"})
    assert made.keys is not None
    assert made.keys.secret.decode() not in repr(made)


@pytest.mark.parametrize(
    "error", [PeerMismatch(["a difference"]), ModifyError(110, "move", qp_num=1, frm=1, to=2, mask=0)], ids=type
)
def test_more_can_be_said_on_any_error(error: RdmaConnectError) -> None:
    before = str(error)
    ways._say_more(error, "Tried before: this.")
    assert str(error) == f"{before} Tried before: this."
    assert str(error) in repr(error) or isinstance(error, OSError)
