"""Bind, bytes, connect: both ends alike, in any order, and what is refused. On devices in software."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from exchange_ends import PATIENCE_S, channels, until
from forgetting import forget
from software import Device, Message, Port, Software

import rdmaconnect
from rdmaconnect import BoundEnd, Connection, HealthState
from rdmaconnect.abi import WcStatus
from rdmaconnect.errors import (
    AuthenticationError,
    CompletionError,
    ConnectTimeout,
    DeviceError,
    LocalProtocolError,
    PeerClosed,
    PeerMismatch,
    RemoteProtocolError,
    StateError,
)
from rdmaconnect.session import bound
from rdmaconnect.session.in_band import inverted

SECRET = "a secret of one job"
TYPES = ["RC", "UC", "UD"]
types = pytest.mark.parametrize("qp_type", TYPES)


@pytest.fixture(autouse=True)
def _nothing_is_left(software: Software) -> Iterator[None]:
    yield
    until(lambda: channels() == 0 and not software.left())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def knocker_first(ends: list[BoundEnd]) -> list[BoundEnd]:
    """The one that sends first over RC, and the other one."""
    return sorted(ends, key=lambda end: end._blob.id)


class Pair:
    """Two ends, each connected with the other's bytes."""

    def __init__(self, threads: ThreadPoolExecutor, *options: dict[str, Any], **both: Any) -> None:
        self.threads = threads
        self.ends = knocker_first([rdmaconnect.bind(**{**both, **own}) for own in options or ({}, {})])

    def start(self, which: int, deadline_s: float = PATIENCE_S, call: Any = BoundEnd.connect) -> Future[Any]:
        mine, other = self.ends[which], self.ends[1 - which]
        return self.threads.submit(call, mine, other.to_bytes(), deadline_s=deadline_s)

    def connect(self, first: int = 0, delay_s: float = 0.0, call: Any = BoundEnd.connect) -> list[Any]:
        started = {first: self.start(first, call=call)}
        time.sleep(delay_s)
        started[1 - first] = self.start(1 - first, call=call)
        return [started[which].result(PATIENCE_S + 1) for which in (0, 1)]


def check(one: Connection, other: Connection) -> None:
    """Two ends of one connection."""
    for mine, theirs in ((one, other), (other, one)):
        assert mine.path.dest_qp_num == theirs.local.qp_num
        assert mine.path.rq_psn == theirs.local.psn
        assert mine.path.path_mtu == theirs.path.path_mtu
        assert mine.health.state is HealthState.ALIVE
        assert mine.lost is None
        for size in (0, 16, 32, 1000):
            mine.send(b"x" * size)
            assert theirs.recv(deadline_s=5) == b"x" * size


def close(*connections: Any) -> None:
    rdmaconnect.close_many(connections)


# ---- two ends become a connection


@types
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("delay_s", [0.0, 0.7])
def test_in_any_order(
    threads: ThreadPoolExecutor, software: Software, qp_type: str, first: int, delay_s: float
) -> None:
    ends = Pair(threads, qp_type=qp_type).connect(first, delay_s)
    check(*ends)
    assert software.made["qp"] == 2
    close(*ends)


@types
def test_a_hundred_pairs_at_once(threads: ThreadPoolExecutor, software: Software, qp_type: str) -> None:
    for _ in range(20):
        check(*(ends := Pair(threads, qp_type=qp_type).connect()))
        close(*ends)


@types
def test_without_probes_nothing_is_sent(threads: ThreadPoolExecutor, software: Software, qp_type: str) -> None:
    seen: list[Message] = []
    with software.network.lose(lambda message: seen.append(message) is not None):
        ends = Pair(threads, qp_type=qp_type, probe=False).connect()
        assert seen == []
        check(*ends)
        close(*ends)


def test_one_that_does_without_a_proof_is_enough(threads: ThreadPoolExecutor) -> None:
    ends = Pair(threads, {"probe": False}, {}).connect(0, 0.3)
    check(*ends)
    assert not any("proven" in {mark.stage for mark in end.trace} for end in ends)
    close(*ends)


@types
def test_several_queue_pairs(threads: ThreadPoolExecutor, software: Software, qp_type: str) -> None:
    many = Pair(threads, qp_type=qp_type, count=5).connect(0, 0.4, BoundEnd.connect_many)
    assert software.made["qp"] == 10
    for number, (mine, theirs) in enumerate(zip(*many, strict=True)):
        check(mine, theirs)
        mine.send(b"%d" % number)
    assert [conn.recv(deadline_s=5) for conn in many[1]] == [b"%d" % number for number in range(5)]
    close(*many[0], *many[1])


def test_of_several_queue_pairs_one_connection_is_not_made(threads: ThreadPoolExecutor) -> None:
    with rdmaconnect.bind(count=2) as end, pytest.raises(StateError, match=r"has 2 queue pairs\. Call connect_many"):
        end.connect(b"")


def test_memory_and_data_reach_the_other_end(threads: ThreadPoolExecutor) -> None:
    board = bytearray(64)
    pair = Pair(threads, {"regions": {"board": board}, "private_data": b"draw"}, {"private_data": b"me"})
    ends = sorted(pair.connect(), key=lambda end: bool(end.remote))
    assert [end.private_data for end in ends] == [b"me", b"draw"]
    ends[1].write(b"chalk", "board", imm=7)
    assert ends[0].recv_imm(deadline_s=5) == 7
    assert (ends[1].read("board", 5), bytes(board[:5])) == (b"chalk", b"chalk")
    close(*ends)


def test_both_work_out_the_same(threads: ThreadPoolExecutor) -> None:
    ends = Pair(threads, {"path_mtu": 512, "traffic_class": 96}, {"path_mtu": 1024, "flow_label": 5}).connect()
    for end in ends:
        assert (end.path.path_mtu, end.path.ah_attr.traffic_class, end.path.ah_attr.flow_label) == (2, 96, 5)
    check(*ends)
    close(*ends)


def test_of_several_ports_the_best_pair_is_used_and_the_others_are_freed(threads: ThreadPoolExecutor) -> None:
    devices = [Device("a0", [Port(["127.0.0.1"]), Port(["127.0.0.2"])]), Device("b0", [Port(["127.0.0.3"])])]
    with Software(devices) as several:
        mine, theirs = rdmaconnect.bind(), rdmaconnect.bind(device="b0")
        assert [str(port) for port in theirs.ports] == ["b0 port 1"]
        assert {str(port) for port in mine.ports} == {"a0 port 1", "a0 port 2", "b0 port 1"}
        made = threads.submit(mine.connect, theirs.to_bytes(), deadline_s=PATIENCE_S)
        other = theirs.connect(mine.to_bytes(), deadline_s=PATIENCE_S)
        one = made.result(PATIENCE_S)
        assert several.alive["qp"] == 2
        assert (one.path.remote_gid.gid, one.local.port.device) == (theirs.ports[0].gids[0].gid, "a0")
        check(one, other)
        close(one, other)
        assert several.problems() == []


def test_eight_ports_at_most_and_a_kibibyte(threads: ThreadPoolExecutor) -> None:
    devices = [Device(f"soft{n}", [Port([f"127.0.1.{n}", f"127.0.2.{n}"])]) for n in range(1, 11)]
    with Software(devices) as several:
        with rdmaconnect.bind(secret=SECRET) as end:
            assert len(end.ports) == 8
            assert len(end.to_bytes()) <= 1024
            assert end.to_bytes() is end.to_bytes()
            assert several.alive["qp"] == 8
        assert several.problems() == []


# ---- what is refused, and leaves the end as it was


@pytest.fixture
def mine() -> Iterator[BoundEnd]:
    with rdmaconnect.bind() as end:
        yield end


@pytest.fixture
def theirs() -> Iterator[BoundEnd]:
    with rdmaconnect.bind() as end:
        yield end


Spoil = Callable[[bytes], bytes]
SPOILT: dict[str, Spoil] = {
    "truncated: ": lambda data: data[:-1],
    "not an end's": lambda data: data[:7],
    "damaged: their checksum": lambda data: data[:40] + bytes([data[40] ^ 8]) + data[41:],
    "of version 9": lambda data: data[:4] + b"\x09" + data[5:],
    "0 bytes are not an end's": lambda data: b"",
}


@pytest.mark.parametrize("words", SPOILT)
def test_spoilt_bytes_leave_the_end_as_it_was(
    threads: ThreadPoolExecutor, mine: BoundEnd, theirs: BoundEnd, words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        mine.connect(SPOILT[words](theirs.to_bytes()))
    other = threads.submit(theirs.connect, mine.to_bytes(), deadline_s=PATIENCE_S)
    check(one := mine.connect(theirs.to_bytes(), deadline_s=PATIENCE_S), other.result(PATIENCE_S))
    close(one, other.result())


def test_ones_own_bytes_are_refused(mine: BoundEnd) -> None:
    with pytest.raises(LocalProtocolError, match="the bytes of this very end"):
        mine.connect(mine.to_bytes())


def test_what_is_no_bytes_is_refused(mine: BoundEnd) -> None:
    with pytest.raises(TypeError, match=r"theirs is 'text': give the bytes of the other end's to_bytes\(\)"):
        mine.connect("text")  # type: ignore[arg-type]


def test_expired_bytes_are_refused(
    threads: ThreadPoolExecutor, mine: BoundEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.time()
    with rdmaconnect.bind(expires_s=30) as theirs, rdmaconnect.bind(expires_s=None) as lasting:
        monkeypatch.setattr(bound, "now", lambda: start + 45)
        with pytest.raises(RemoteProtocolError, match=r"expired 1[456] s ago, 30 s after they were made. Bind anew"):
            mine.connect(theirs.to_bytes())
        monkeypatch.setattr(bound, "now", lambda: start + 1e9)
        with pytest.raises(ConnectTimeout):
            mine.connect(lasting.to_bytes(), deadline_s=0.2)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"secret": SECRET}, {"secret": "another secret of it"}, "another secret, or somebody has changed"),
        ({"secret": SECRET}, {}, "not authenticated, and this end has a secret|by a secret, and this end has none"),
    ],
)
def test_secrets_that_differ_are_told_on_both_ends(one: dict[str, str], other: dict[str, str], words: str) -> None:
    with rdmaconnect.bind(**one) as mine, rdmaconnect.bind(**other) as theirs:
        for end, bytes_ in ((mine, theirs.to_bytes()), (theirs, mine.to_bytes())):
            with pytest.raises(AuthenticationError, match=words):
                end.connect(bytes_)


def test_the_same_secret_joins(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*(ends := Pair(threads, secret=SECRET).connect()))
    close(*ends)
    monkeypatch.setenv("RDMACONNECT_SECRET", SECRET)
    with rdmaconnect.bind() as mine:
        assert mine.to_bytes()[5] == 1


def test_all_differences_are_told_on_both_ends_and_each_can_try_another() -> None:
    one = {"qp_type": "RC", "sl": 3, "tag": "ring 1", "traffic_class": 4}
    other = {"qp_type": "UD", "sl": 5, "tag": "ring 2", "count": 2, "traffic_class": 4}
    with rdmaconnect.bind(**one) as mine, rdmaconnect.bind(**other) as theirs:  # type: ignore[arg-type]
        told = []
        for end, bytes_ in ((mine, theirs.to_bytes()), (theirs, mine.to_bytes())):
            with pytest.raises(PeerMismatch) as caught:
                end.connect_many(bytes_)
            told.append(caught.value.differences)
            assert "This end is the " in str(caught.value)
        assert told[0] == told[1]
        assert [words.partition(":")[0] for words in told[0]] == ["tag", "count", "sl", "qp_type"]
        assert "meant for another end" in told[0][0]
        assert mine._state == theirs._state == ""


def test_an_end_connects_once(threads: ThreadPoolExecutor) -> None:
    pair = Pair(threads)
    ends = pair.connect()
    with pytest.raises(StateError, match=r"was connected before\. Each end connects once: bind anew"):
        pair.ends[0].connect(pair.ends[1].to_bytes())
    close(*ends)
    with rdmaconnect.bind() as third:
        with pytest.raises(RemoteProtocolError, match="connected with before: they are used once"):
            third.connect(pair.ends[1].to_bytes())
        assert third._state == ""


def test_an_end_that_came_to_nothing_is_used_up(mine: BoundEnd, theirs: BoundEnd) -> None:
    with pytest.raises(ConnectTimeout):
        mine.connect(theirs.to_bytes(), deadline_s=0.1)
    with pytest.raises(StateError, match="was connected before"):
        mine.connect(theirs.to_bytes())


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch, mine: BoundEnd, theirs: BoundEnd) -> None:
    used = {bytes([n]) * 16: time.time() + (10 if n % 2 else -10) for n in range(10)}
    monkeypatch.setattr(bound, "_used", used)
    monkeypatch.setattr(bound, "_MOST_USED", 10)
    with pytest.raises(ConnectTimeout):
        mine.connect(theirs.to_bytes(), deadline_s=0.05)
    assert set(used) == {bytes([n]) * 16 for n in (1, 3, 5, 7, 9)} | {theirs._blob.id}


# ---- what only the data path can tell


@types
def test_bytes_of_an_end_that_is_connected_elsewhere(threads: ThreadPoolExecutor, qp_type: str) -> None:
    pair = Pair(threads, qp_type=qp_type)
    ends = pair.connect()
    bound._used.clear()  # as in another process
    with rdmaconnect.bind(qp_type=qp_type) as third:
        with pytest.raises(ConnectTimeout) as caught:
            third.connect(pair.ends[1].to_bytes(), deadline_s=1.5)
        assert caught.value.stage == "prove the data path"
        assert "was given those of another end" in str(caught.value)
    if qp_type == "UC":  # which takes what comes, whoever sends it
        assert ends[1].recv(deadline_s=5)[:16] == bound.connection_id(third._blob.id, pair.ends[1]._blob.id, None)
    else:
        check(*ends)  # it does not suffer
    close(*ends)


@types
@pytest.mark.parametrize("which", [0, 1])
def test_a_peer_that_never_comes(threads: ThreadPoolExecutor, software: Software, qp_type: str, which: int) -> None:
    pair = Pair(threads, qp_type=qp_type)
    before = time.monotonic()
    with pytest.raises(ConnectTimeout, match=r"has not called connect\(\) with the bytes of this end") as caught:
        pair.start(which, 1.0).result(PATIENCE_S)
    assert 0.9 < time.monotonic() - before < 5
    assert caught.value.stage == "prove the data path"
    pair.ends[1 - which].close()


@types
def test_a_path_that_carries_one_way_only(threads: ThreadPoolExecutor, software: Software, qp_type: str) -> None:
    pair = Pair(threads, qp_type=qp_type)
    number = pair.ends[0]._blob.ends[0].qp_num
    with software.network.lose(lambda message: message.qp_num == number):
        futures = [pair.start(which, 2.0) for which in (0, 1)]
        errors = [future.exception(PATIENCE_S * 2) for future in futures]
    assert all(isinstance(error, CompletionError | ConnectTimeout) for error in errors)
    assert all("prove the data path" in str(error) for error in errors)


def test_a_small_mtu_on_the_way(threads: ThreadPoolExecutor, software: Software) -> None:
    pair = Pair(threads)
    with software.network.lose(lambda message: message.length > 600):
        futures = [pair.start(which, 3.0) for which in (0, 1)]
        errors = [future.exception(PATIENCE_S * 2) for future in futures]
    assert any("give a smaller path_mtu" in str(error) for error in errors)


@pytest.mark.parametrize("qp_type", ["UC", "UD"])
def test_words_that_are_lost_are_said_again(threads: ThreadPoolExecutor, software: Software, qp_type: str) -> None:
    pair = Pair(threads, qp_type=qp_type)
    ident = bound.connection_id(pair.ends[0]._blob.id, pair.ends[1]._blob.id, None)
    lost: set[int] = set()

    def first_word(message: Message) -> bool:
        word = message.data[:16] == inverted(ident) and message.qp_num not in lost
        if word:
            lost.add(message.qp_num)
        return word

    with software.network.lose(first_word):
        futures = [pair.start(which) for which in (0, 1)]
        # one has the other's word at the second time, and answers when it is asked again
        until(lambda: any(future.done() for future in futures), PATIENCE_S)
        done = next(future for future in futures if future.done()).result()
        with pytest.raises(rdmaconnect.DeadlineExceeded):
            done.recv(deadline_s=1.0)
        ends = [future.result(PATIENCE_S) for future in futures]
    assert len(lost) == 2
    check(*ends)
    close(*ends)


def test_the_first_message_comes_though_the_word_was_lost(threads: ThreadPoolExecutor, software: Software) -> None:
    pair = Pair(threads, qp_type="UC")
    ident = bound.connection_id(pair.ends[0]._blob.id, pair.ends[1]._blob.id, None)
    number = pair.ends[0]._blob.ends[0].qp_num
    with software.network.lose(lambda m: m.data[:16] == inverted(ident) and m.qp_num == number):
        futures = [pair.start(which) for which in (0, 1)]
        one = futures[0].result(PATIENCE_S)
        one.send(b"already")
        other = futures[1].result(PATIENCE_S)
        assert other.recv(deadline_s=5) == b"already"
    close(one, other)


def test_the_one_who_knocks_does_so_until_the_other_is_there(threads: ThreadPoolExecutor, software: Software) -> None:
    pair = Pair(threads, timeout=8, retry_cnt=0)
    before = software.calls["ibv_modify_qp"]
    ends = pair.connect(0, 0.5)
    knocks = (software.calls["ibv_modify_qp"] - before - 4) / 5  # ERR, RESET, INIT, RTR, RTS
    assert knocks >= 3
    assert ends[0].local.psn == pair.ends[0]._blob.ends[0].psn
    check(*ends)
    close(*ends)


def test_one_that_waits_for_ever_knocks_again_too(threads: ThreadPoolExecutor) -> None:
    ends = Pair(threads, timeout=0).connect(0, 1.2)
    check(*ends)
    close(*ends)


# ---- a life without a side channel


@types
def test_a_good_bye_is_seen_whether_anybody_receives_or_not(threads: ThreadPoolExecutor, qp_type: str) -> None:
    one, other = Pair(threads, qp_type=qp_type).connect()
    told: list[str] = []
    other.on_change(lambda health: told.append(str(health)))
    one.send(b"last words")
    one.close()
    until(lambda: bool(told), 3)
    assert told == ["dead: the peer closed the connection (close)."]
    assert other.recv(deadline_s=1) == b"last words"
    for call in (lambda: other.recv(deadline_s=1), lambda: other.recv(deadline_s=1)):
        with pytest.raises(PeerClosed, match="the peer closed the connection"):
            call()
    other.close()


def test_the_last_of_several_says_good_bye(threads: ThreadPoolExecutor) -> None:
    mine, theirs = Pair(threads, qp_type="UC", count=3).connect(call=BoundEnd.connect_many)
    for conn in mine[:2]:
        conn.close()
    mine[2].send(b"still here")
    assert theirs[2].recv(deadline_s=5) == b"still here"
    assert theirs[0].health.state is HealthState.ALIVE
    mine[2].close()
    until(lambda: theirs[0].health.state is HealthState.DEAD, 3)
    close(*theirs)


def test_over_rc_a_peer_that_vanishes_is_noticed_by_who_only_waits(
    threads: ThreadPoolExecutor, software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmaconnect.session.in_band._ASK_TICKS", 1)
    one, other = Pair(threads, timeout=8, retry_cnt=1).connect()
    time.sleep(2.2)  # it is asked, and answers
    assert other.health.state is HealthState.ALIVE
    with software.network.lose(lambda message: True):
        with pytest.raises(CompletionError, match="RETRY_EXC_ERR") as caught:
            other.recv(deadline_s=PATIENCE_S)
        assert caught.value.status == WcStatus.RETRY_EXC_ERR
        assert str(other.health) == ("dead: the data path failed (RETRY_EXC_ERR), and nothing else leads to the peer")
        assert isinstance(other.lost, CompletionError)
        close(one, other)


def test_it_cannot_be_connected_anew(threads: ThreadPoolExecutor) -> None:
    ends = Pair(threads).connect()
    with pytest.raises(StateError, match=r"goes by rdma_cm or bind\(\)\. Connect anew"):
        ends[0].reconnect()
    close(*ends)
    with pytest.raises(TypeError, match="auto_reconnect: there is no such option"):
        rdmaconnect.bind(auto_reconnect=True)  # type: ignore[call-arg]


# ---- the end itself


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"count": 0}, ValueError, "count is 0: give 1 to 4096"),
        ({"tag": 5}, TypeError, "tag is 5: give text"),
        ({"tag": "x" * 257}, ValueError, "at most 256 characters"),
        ({"expires_s": 0}, ValueError, "expires_s is 0: give 1 to"),
        ({"expires_s": "soon"}, TypeError, "expires_s is 'soon': give seconds, or None"),
        ({"secret": "short"}, ValueError, "the secret has 5 bytes"),
        ({"qp_type": "XRC_SEND"}, ValueError, "no two ends to connect"),
        ({"deadline_s": -1}, ValueError, "deadline_s is -1"),
        ({"device": "none0"}, DeviceError, "use device none0: there is no such device"),
        ({"private_data": bytes(4097)}, ValueError, "private_data is 4097 bytes long"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rdmaconnect.bind(**options)


def test_a_closed_end_says_so(software: Software, mine: BoundEnd, theirs: BoundEnd) -> None:
    assert repr(mine) == "<BoundEnd RC on soft0 port 1>"
    mine.close()
    mine.close()
    assert repr(mine) == "<BoundEnd RC on soft0 port 1 is closed>"
    with pytest.raises(StateError, match="connect: the end is closed"):
        mine.connect(theirs.to_bytes())


def test_one_that_is_forgotten_is_closed(software: Software) -> None:
    ends = [rdmaconnect.bind()]
    with pytest.warns(ResourceWarning, match="BoundEnd RC on soft0 port 1> was never closed"):
        forget(ends)
    until(lambda: software.alive["qp"] == 0)


def test_a_child_of_fork_is_told(mine: BoundEnd, theirs: BoundEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound.process, "mark", object())
    with pytest.raises(StateError, match="belongs to the process that forked this one"):
        mine.connect(theirs.to_bytes())


def test_ctrl_c_while_it_waits_for_the_other_end_leaves_nothing(
    software: Software, mine: BoundEnd, theirs: BoundEnd
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with pytest.raises(KeyboardInterrupt):
            mine.connect(theirs.to_bytes(), deadline_s=PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    theirs.close()
    assert software.left() == {}


def test_where_a_device_refuses_nothing_is_left(threads: ThreadPoolExecutor, software: Software) -> None:
    with software.on("ibv_create_qp", fail=12), pytest.raises(rdmaconnect.VerbsError, match="ENOMEM"):
        rdmaconnect.bind()
    assert software.left() == {}
    with rdmaconnect.bind() as end:
        with software.on("ibv_destroy_qp", fail=16), pytest.raises(rdmaconnect.VerbsError, match="EBUSY"):
            end.close()
        assert software.alive["qp"] == 1
    assert software.left() == {}
    pair = Pair(threads)
    with software.on("ibv_modify_qp", to=3, fail=22, times=1):
        errors = [future.exception(PATIENCE_S) for future in (pair.start(0, 1.0), pair.start(1, 1.0))]
    assert {type(error) for error in errors} == {rdmaconnect.ModifyError, ConnectTimeout}


# ---- asyncio


@types
def test_the_same_with_asyncio(qp_type: str) -> None:
    async def swap() -> list[bytes]:
        ends = [await rdmaconnect.abind(qp_type=qp_type, count=count) for count in (1, 1, 2, 2)]
        made = await asyncio.gather(ends[0].connect(ends[1].to_bytes()), ends[1].connect(ends[0].to_bytes()))
        async with made[0] as here, made[1] as there:
            await asyncio.gather(here.send(b"hi"), there.send(b"ho"))
            came = [await here.recv(), await there.recv()]
        many = await asyncio.gather(ends[2].connect_many(ends[3].to_bytes()), ends[3].connect_many(ends[2].to_bytes()))
        await rdmaconnect.aclose_many([*many[0], *many[1]])
        async with await rdmaconnect.abind() as unused:
            assert len(unused.ports) == 1
        return came

    assert asyncio.run(swap()) == [b"ho", b"hi"]


def test_a_cancelled_connect_leaves_nothing(software: Software) -> None:
    async def give_up() -> None:
        async with await rdmaconnect.abind() as one, await rdmaconnect.abind() as other:
            task = asyncio.create_task(one.connect(other.to_bytes()))
            await asyncio.sleep(0.4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())


def test_bytes_are_taken_as_any_store_gives_them(threads: ThreadPoolExecutor, mine: BoundEnd, theirs: BoundEnd) -> None:
    other = threads.submit(theirs.connect, bytearray(mine.to_bytes()), deadline_s=PATIENCE_S)
    one = mine.connect(memoryview(theirs.to_bytes()), deadline_s=PATIENCE_S)  # type: ignore[arg-type]
    close(one, other.result(PATIENCE_S))


def test_a_blob_that_was_changed_knowing_the_secret_meets_nobody(threads: ThreadPoolExecutor) -> None:
    pair = Pair(threads, secret=SECRET)
    end = pair.ends[1]
    other = replace(end._blob, id=bytes(15) + b"\1")
    evil = bound.seal(other, end._key)
    with pytest.raises(ConnectTimeout):
        pair.ends[0].connect(evil, deadline_s=0.5)
    end.close()
