"""The proof of the data path: between two ends whose packets are carried by hand, and on a device in software."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_ends import until
from samples import ID, end, gid, roce
from software import Software
from vectors import VALUES

import rdmaconnect
from rdmaconnect.abi import Mtu, QpState, QpType, WcStatus, WrOpcode
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    PeerClosed,
    PeerRejected,
    RdmaConnectError,
    RemoteProtocolError,
)
from rdmaconnect.protocol.handshake import Handshake, Role
from rdmaconnect.protocol.messages import Hello, Joined, Proof, Ready, Reject, Reply
from rdmaconnect.runtime import deadline
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.session import probe
from rdmaconnect.session.conversation import Conversation
from rdmaconnect.session.probe import Prober, contents
from rdmaconnect.session.transfer import Part

Carry = Callable[[bytes], bytes | None]
BASE = 0x1000


class Clock:
    """Stands in for the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadline, "time", made)
    monkeypatch.setattr(probe, "time", made)
    return made


class Link:
    """One end of a channel: what is sent is with the other's conversation at once."""

    def __init__(self) -> None:
        self.other: Conversation

    def send(self, frame: bytes) -> None:
        self.other.took(frame)

    def close(self) -> None:
        pass


class End:
    """What the prober knows of a connection; ``carry`` is the network from here to the other end."""

    def __init__(self, conversation: Conversation, engine: Any, qp_type: QpType, recv_size: int, max_send: int) -> None:
        self.conversation, self.engine, self.max_send_size, self.to = conversation, engine, max_send, None
        self.local = self.peer = end(roce(gid("10.0.0.1")), qp_type=qp_type, recv_size=recv_size)
        self.path = SimpleNamespace(path_mtu=Mtu.MTU_256, local_gid=gid("10.0.0.1"), remote_gid=gid("10.0.0.2"))
        self.transceiver, self.sizes = self, SimpleNamespace(send_depth=16)
        self.broken: CompletionError | None = None
        self.queue: list[tuple[int, int]] = []
        self.slots: list[bytes] = []
        self.reposted: list[int] = []
        self.sent_sizes: list[int] = []
        self.carry: Carry = bytes
        self.fault = WcStatus.RETRY_EXC_ERR
        self.other: End
        self.mr: Any = None

    def register(self, memory: Any, access: Any) -> Any:
        assert self.mr is None
        self.mr = SimpleNamespace(memory=memory, addr=BASE, lkey=1, closed=False, close=self._freed)
        return self.mr

    def _freed(self) -> None:
        self.mr.closed = True

    def spare(self, size: int) -> None:
        return None

    def inbox(self) -> list[tuple[int, int]]:
        return self.queue

    def post(self, sent: Any, part: Part, to: Any, *, proving: bool) -> bool:
        addr, size, _ = part.place
        memory = self.engine.mrs[0].memory
        self.sent_sizes.append(size)
        came = self.carry(bytes(memory[addr - BASE : addr - BASE + size]))
        lossy = self.local.qp_type is not QpType.RC
        sent.status = WcStatus.SUCCESS if came is not None or lossy else WcStatus.RETRY_EXC_ERR
        if came is not None:
            self.other.slots.append(came)
            self.other.queue.append((len(self.other.slots) - 1, len(came)))
        elif not lossy:
            self.broken = CompletionError(self.fault, qp_num=17, opcode="send")
        return True

    def post_probes(self, probes: Any, requests: Any, addr: int) -> bool:
        for sent in probes:
            self.post(sent, Part(WrOpcode.SEND, (addr, sent.length, 1)), None, proving=True)
            addr += sent.length
        return True

    def payload(self, slot: int, length: int) -> memoryview:
        return memoryview(self.slots[slot])[:length]

    def repost_all(self, slots: list[int]) -> None:
        self.reposted += slots


class Pair:
    """Connections made together, on two sides that have said hello, reply and ready."""

    def __init__(
        self,
        qp_type: QpType = QpType.RC,
        count: int = 1,
        recv_size: int = 4096,
        max_send: int = 4096,
        joined: bool = True,
        deadline_s: float | None = None,
    ) -> None:
        hello, reply = VALUES["hello"], VALUES["reply"]
        assert isinstance(hello, Hello)
        assert isinstance(reply, Reply)
        many = tuple(end(qp_type=qp_type, qp_num=i + 1) for i in range(count))
        hello, reply = replace(hello, ends=many), replace(reply, ends=many)
        self.ours, self.theirs = Conversation(Handshake(Role.CONNECTOR, ID)), Conversation(Handshake(Role.LISTENER))
        for conversation, other in ((self.ours, self.theirs), (self.theirs, self.ours)):
            link = Link()
            link.other = other
            conversation.attach(link)  # type: ignore[arg-type]
        self.ours.say(hello)
        self.theirs.say(reply)
        self.ours.say(Ready(ID))
        if joined:
            self.theirs.say(Joined(ID))
        self.sides: list[list[End]] = []
        for conversation in (self.ours, self.theirs):
            engine = SimpleNamespace(
                progress=lambda: None, arm=lambda: None, lock=threading.RLock(), mrs=[],
                channel=SimpleNamespace(fileno=lambda: 9),
            )  # fmt: skip
            self.sides.append([End(conversation, engine, qp_type, recv_size, max_send) for _ in range(count)])
        for here, there in zip(*self.sides, strict=True):
            here.other, there.other = there, here
        self.probers = []
        for side in self.sides:
            self.probers.append(Prober(side, Deadline(deadline_s, ConnectTimeout)))  # type: ignore[arg-type]
            side[0].engine.mrs.append(side[0].mr)

    def prove(self, clock: Clock) -> None:
        """Both sides, until both are done or one raises."""
        done = [False, False]
        for _ in range(2000):
            for which, prober in enumerate(self.probers):
                done[which] = done[which] or prober.advance()
            if all(done):
                return
            clock.now += 0.05
        raise AssertionError("no end")

    def fails(self, clock: Clock, error: type[Exception]) -> str:
        with pytest.raises(error) as caught:
            self.prove(clock)
        return str(caught.value)


def drop(data: bytes) -> None:
    return None


def only_small(data: bytes) -> bytes | None:
    return data if len(data) <= 100 else None


TYPES = pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD])


def test_contents_are_the_id_and_the_index_repeated() -> None:
    assert contents(ID, 5, 20) == ID + b"\x00\x00\x00\x05"
    assert contents(ID, 5, 16) == ID
    assert contents(ID, 5, 45) == (ID + b"\x00\x00\x00\x05") * 2 + ID[:5]
    assert contents(ID, 5, 0) == b""
    assert contents(ID, 4095, 513) != contents(ID, 4094, 513)


@TYPES
@pytest.mark.parametrize("count", [1, 3])
def test_both_sides_prove_both_ways(clock: Clock, qp_type: QpType, count: int) -> None:
    pair = Pair(qp_type, count)
    pair.prove(clock)
    large = 256 if qp_type is QpType.UD else 513
    for side, prober in zip(pair.sides, pair.probers, strict=True):
        for made in side:
            assert sorted(made.sent_sizes) == [16, large]
            assert made.reposted == [0, 1]
            assert not made.queue
        assert not side[0].mr.closed
        prober.close()
        assert side[0].mr.closed
        assert side[0].conversation.handshake.proved


@pytest.mark.parametrize(("recv_size", "max_send", "sizes"), [(1, 1, {1}), (16, 16, {16}), (100, 100, {16, 100})])
def test_probes_are_never_above_what_the_receives_take(
    clock: Clock, recv_size: int, max_send: int, sizes: set[int]
) -> None:
    pair = Pair(recv_size=recv_size, max_send=max_send)
    pair.prove(clock)
    assert {size for side in pair.sides for made in side for size in made.sent_sizes} == sizes


@pytest.mark.parametrize("qp_type", [QpType.UC, QpType.UD])
def test_what_was_lost_is_sent_again(clock: Clock, qp_type: QpType) -> None:
    pair = Pair(qp_type)
    for side in pair.sides:
        left = [2]

        def lossy(data: bytes, left: list[int] = left) -> bytes | None:
            left[0] -= 1
            return data if left[0] < 0 else None

        side[0].carry = lossy
    pair.prove(clock)


def test_over_rc_a_dead_path_is_a_completion_error(clock: Clock) -> None:
    pair = Pair()
    pair.sides[0][0].carry = drop
    words = pair.fails(clock, CompletionError)
    assert words.startswith("prove the data path from QP 0x000011 on rxe0 port 1 to ")
    assert "RETRY_EXC_ERR" in words
    assert "UDP port 4791" in words
    assert "bytes arrive" not in words


def test_over_rc_a_path_that_drops_what_is_large_is_told_apart(clock: Clock) -> None:
    pair = Pair()
    pair.sides[0][0].carry = only_small
    assert (
        "(16 bytes arrive, 513 do not: the network between carries less than path_mtu 256; give a smaller path_mtu)"
    ) in pair.fails(clock, CompletionError)


def test_over_rc_a_message_that_is_lost_with_success_is_told_at_once(clock: Clock) -> None:
    pair = Pair()
    here, there = pair.sides[0][0], pair.sides[1][0]
    real = here.post

    def forgetful(sent: Any, part: Part, to: Any, *, proving: bool) -> bool:
        done = real(sent, part, to, proving=proving)
        if part.place[1] == 16:
            there.queue.pop()
        return done

    here.post = forgetful  # type: ignore[method-assign]
    words = pair.fails(clock, RemoteProtocolError)
    assert "513 bytes from QP 0x000011 on rxe0 port 1 arrived, and those sent before them did not" in words
    assert "The PSNs of the two ends do not fit" in words
    assert clock.now < 101


def test_a_receive_that_is_missing_is_not_taken_for_a_small_mtu(clock: Clock) -> None:
    pair = Pair()
    pair.sides[0][0].carry, pair.sides[0][0].fault = only_small, WcStatus.RNR_RETRY_EXC_ERR
    words = pair.fails(clock, CompletionError)
    assert "path_mtu" not in words
    assert "no receive posted" in words


@pytest.mark.parametrize("qp_type", [QpType.UC, QpType.UD])
@pytest.mark.parametrize(
    ("there", "back", "words"),
    [
        (drop, drop, "No probe arrived. Causes that fit: a firewall drops RoCE (UDP port 4791"),
        (only_small, only_small, "Some probes arrived and some did not. (16 bytes arrive, "),
        (drop, bytes, "its own do not arrive here: packets are dropped in one"),
    ],
    ids=["none", "only small ones", "one way"],
)
def test_over_types_that_lose_messages_time_tells(
    clock: Clock, qp_type: QpType, there: Carry, back: Carry, words: str
) -> None:
    pair = Pair(qp_type)
    pair.sides[0][0].carry, pair.sides[1][0].carry = there, back
    said = pair.fails(clock, ConnectTimeout)
    assert said.startswith("prove the data path: no success within 10")
    assert words in said
    assert ("another Q_Key" in said) == (qp_type is QpType.UD and there is drop)


def test_probes_that_arrive_changed_are_told(clock: Clock) -> None:
    pair = Pair()
    pair.sides[0][0].carry = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    assert "16 bytes from QP 0x000011 on rxe0 port 1 are not what was sent" in pair.fails(clock, RemoteProtocolError)


def test_probes_of_another_queue_pair_are_told(clock: Clock) -> None:
    pair = Pair(count=2)
    first, second = pair.sides[1]
    pair.sides[0][0].other, pair.sides[0][1].other = second, first
    assert "Do both ends mean the same queue pair?" in pair.fails(clock, RemoteProtocolError)


def test_a_peer_that_gives_up_is_told_with_its_reason(clock: Clock) -> None:
    pair = Pair(QpType.UC)
    pair.sides[0][0].carry = drop
    pair.probers[0].advance()
    pair.sides[1][0].conversation.give_up(Reject(ID, "prove the data path", 0, "its reason"))
    with pytest.raises(PeerRejected, match="the peer refused at prove the data path: its reason"):
        pair.probers[0].advance()
    pair = Pair(QpType.UC)
    pair.sides[1][0].conversation.lend()
    pair.sides[1][0].conversation.close()
    with pytest.raises(PeerClosed, match="prove the data path: the peer closed the connection"):
        pair.probers[0].advance()


def test_a_proof_alone_is_not_enough(clock: Clock) -> None:
    pair = Pair(QpType.UC)
    pair.sides[1][0].carry = drop
    pair.sides[1][0].conversation.say(Proof(ID))
    with suppress(ConnectTimeout):
        for _ in range(300):
            assert not pair.probers[0].advance()
            clock.now += 0.05


# ---- a side that is slow is no fault of the path


def test_a_peer_that_is_not_in_rts_yet_is_waited_for_as_long_as_the_call_waits(clock: Clock) -> None:
    """Its listener is busy: 10 s without a probe mean nothing as long as it has not joined."""
    pair = Pair(QpType.UC, joined=False, deadline_s=60)
    pair.sides[0][0].carry = pair.sides[1][0].carry = drop
    for _ in range(500):
        assert not pair.probers[0].advance()
        clock.now += 0.1
    clock.now += 11
    with pytest.raises(ConnectTimeout) as caught:
        pair.probers[0].advance()
    assert "The peer has replied and has not gone on since: it is busy, slow or stopped" in str(caught.value)
    for blame in ("firewall", "path_mtu", "4791", "dropped"):
        assert blame not in str(caught.value)


def test_from_the_moment_that_it_joins_the_path_has_its_ten_seconds(clock: Clock) -> None:
    pair = Pair(QpType.UC, joined=False, deadline_s=60)
    pair.sides[0][0].carry = pair.sides[1][0].carry = drop
    for _ in range(300):
        assert not pair.probers[0].advance()
        clock.now += 0.1
    pair.theirs.say(Joined(ID))
    for _ in range(100):
        assert not pair.probers[0].advance()
        clock.now += 0.1
    clock.now += 1
    with pytest.raises(ConnectTimeout, match=r"No probe arrived\. Causes that fit: a firewall drops RoCE"):
        pair.probers[0].advance()


def test_the_path_never_has_more_time_than_the_call(clock: Clock) -> None:
    pair = Pair(QpType.UC, deadline_s=3)
    pair.sides[0][0].carry = pair.sides[1][0].carry = drop
    assert not pair.probers[0].advance()
    clock.now += 3.1
    with pytest.raises(ConnectTimeout):
        pair.probers[0].advance()


def test_many_queue_pairs_have_more_time(clock: Clock) -> None:
    pair = Pair(QpType.UC, count=50)
    for side in pair.sides:
        for made in side:
            made.carry = drop
    assert not pair.probers[0].advance()
    clock.now += probe.PATIENCE_S + 49 * probe.PATIENCE_EACH_S
    assert not pair.probers[0].advance()
    clock.now += 2 * probe.PATIENCE_EACH_S
    with pytest.raises(ConnectTimeout):
        pair.probers[0].advance()


def test_each_probe_that_comes_gives_the_path_its_time_anew(clock: Clock) -> None:
    pair = Pair(QpType.UC, count=3)
    for made in (*pair.sides[0], *pair.sides[1]):
        made.carry = drop
    for mine, theirs in zip(*pair.sides, strict=True):
        assert [prober.advance() for prober in pair.probers] == [False, False]
        clock.now += 8
        mine.carry = theirs.carry = bytes
        for prober in pair.probers:
            prober.advance()
    pair.prove(clock)


# ---- the same on a device in software


@pytest.fixture
def real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this host, and less patience."""
    for module in (deadline, probe):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(probe, "PATIENCE_S", 0.5)


def connect_in_vain(software: Software, error: Any, qp_type: str = "RC", **options: Any) -> tuple[Any, str]:
    """The connector's error, and what the listener says of it."""
    software.network.ack_timeout_s = 0.3
    with rdmaconnect.listen("127.0.0.1:0", path_mtu=256) as listener:
        given = {"qp_type": qp_type, "path_mtu": 256, "deadline_s": 10}
        with pytest.raises(error) as caught:
            rdmaconnect.connect(listener.url, **given | options)
        with pytest.raises(RdmaConnectError) as theirs:
            listener.accept(deadline_s=5, tolerant=False)
        until(lambda: not software.alive["qp"])
    return caught.value, str(theirs.value)


@pytest.mark.usefixtures("real_time")
@TYPES
def test_a_path_that_loses_everything_is_told_on_both_sides(software: Software, qp_type: QpType) -> None:
    software.network.lose(lambda message: True)
    error, theirs = connect_in_vain(software, (CompletionError, ConnectTimeout, PeerRejected), str(qp_type))
    for words in (str(error), theirs):
        assert "prove the data path" in words
        assert "4791" in words


@pytest.mark.usefixtures("real_time")
def test_an_accept_that_ends_before_the_proof_says_how_far_it_has_come(
    software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 10.0)
    software.network.lose(lambda message: True)
    told: list[str] = []
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor() as threads:
        connecting = threads.submit(rdmaconnect.connect, listener.url, qp_type="UC", deadline_s=3)
        while not connecting.done():
            with pytest.raises(ConnectTimeout) as caught:
                listener.accept(deadline_s=0.1)
            told.append(str(caught.value))
        with pytest.raises(ConnectTimeout):
            connecting.result()
        until(lambda: not software.alive["qp"])
    how_far = re.compile(r"Not finished with 127\.0\.0\.1 \(proof of the data path: .*4791")
    assert any(how_far.search(words) for words in told), told


@pytest.mark.usefixtures("real_time")
@TYPES
def test_a_path_that_loses_what_is_large_is_told(software: Software, qp_type: QpType) -> None:
    software.network.lose(lambda message: message.length > 200)
    error, theirs = connect_in_vain(software, (CompletionError, ConnectTimeout, PeerRejected), str(qp_type))
    assert "give a smaller path_mtu" in str(error) + theirs
    assert "16 bytes arrive" in str(error) + theirs


@pytest.mark.usefixtures("real_time")
@pytest.mark.parametrize("qp_type", ["UC", "UD"])
def test_what_is_lost_now_and_then_is_sent_again(software: Software, qp_type: str) -> None:
    count = [0]

    def now_and_then(message: object) -> bool:
        count[0] += 1
        return count[0] <= 3

    software.network.lose(now_and_then)
    with (
        rdmaconnect.listen("127.0.0.1:0") as listener,
        rdmaconnect.connect(listener.url, qp_type=qp_type, deadline_s=10) as here,
        listener.accept(deadline_s=10) as there,
    ):
        here.send(b"proven")
        assert there.recv() == b"proven", "no probe is taken for a message"
    assert count[0] > 3


@pytest.mark.usefixtures("real_time")
@TYPES
def test_a_listener_that_is_slow_to_rts_is_waited_for_and_nothing_is_blamed(
    software: Software, qp_type: QpType
) -> None:
    """Its connector is in RTS long before, and sends probes to a queue pair that is not ready to answer."""
    first = []

    def slow(call: Any) -> float:
        first.append(call)
        return 1.5 if len(first) == 2 else 0.0  # the connector goes first

    software.on("ibv_modify_qp", to=QpState.RTS, delay=slow)
    with (
        rdmaconnect.listen("127.0.0.1:0") as listener,
        rdmaconnect.connect(listener.url, qp_type=qp_type, deadline_s=10) as here,
        listener.accept(deadline_s=10) as there,
    ):
        here.send(b"slow")
        assert there.recv() == b"slow"
    assert here.connect_s > 1.5


@pytest.mark.usefixtures("real_time")
def test_a_proof_under_way_does_not_need_that_anybody_accepts(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        ends = [rdmaconnect.connect(listener.url, deadline_s=10) for _ in range(5)]
        assert all(end.connect_s < 5 for end in ends)
        others = [listener.accept(deadline_s=5) for _ in range(5)]
        for end in (*ends, *others):
            end.close()
