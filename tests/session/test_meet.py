"""Both sides call each other: one connection, whatever the order. On a device in software, over real ZeroMQ."""

from __future__ import annotations

import asyncio
import errno
import importlib
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_ends import PATIENCE_S, End, Heard, channels, free_port, taken, until
from hypothesis import given
from samples import IDS
from software import Software
from tap import Tap, tapped
from vectors import VALUES

import rdmaconnect
from rdmaconnect.abi import QpState
from rdmaconnect.errors import ConnectTimeout, PeerRejected, RdmaConnectError, StateError
from rdmaconnect.exchange import service
from rdmaconnect.exchange.channel import Channel
from rdmaconnect.exchange.url import addresses
from rdmaconnect.protocol.codec import decode, encode
from rdmaconnect.protocol.handshake import Role, State, counts
from rdmaconnect.protocol.messages import Hello, Ready, Reject, Reply
from rdmaconnect.session.outgoing import Outgoing
from rdmaconnect.session.terms import make_terms


@pytest.fixture(autouse=True)
def _nothing_is_left(software: Software) -> Iterator[None]:
    yield
    until(lambda: channels() == 0 and not software.left())


class Sides:
    """Two that meet, each at a port of its own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.ports = free_port(), free_port()

    def start(self, which: int, deadline_s: float = PATIENCE_S, peer: str = "", **options: Any) -> Future[Any]:
        local, other = (f"127.0.0.1:{self.ports[n]}" for n in (which, 1 - which))
        given_ = {"probe": False, "deadline_s": deadline_s}
        return self.threads.submit(rdmaconnect.meet, local, peer or other, **given_ | options)

    def meet(self, delay_s: float = 0.0, first: int = 0, **options: Any) -> list[Any]:
        """Both, one some time after the other; their ends."""
        made: dict[int, Future[Any]] = {first: self.start(first, **options)}
        time.sleep(delay_s)
        made[1 - first] = self.start(1 - first, **options)
        return [made[which].result(PATIENCE_S + 1) for which in (0, 1)]


@pytest.fixture
def sides() -> Iterator[Sides]:
    with ThreadPoolExecutor(6) as threads:
        yield Sides(threads)


def check(ends: list[Any]) -> None:
    """Two ends of one connection."""
    a, b = (end._end.conversation.handshake for end in ends)
    assert a.state is b.state is State.JOINED
    assert a.id == b.id
    assert {a.role, b.role} == set(Role)
    for mine, theirs in (ends, ends[::-1]):
        assert mine.path.dest_qp_num == theirs.local.qp_num
        assert mine.path.rq_psn == theirs.local.psn
        mine.send(b"hello")
        assert theirs.recv() == b"hello"


def close(ends: list[Any]) -> None:
    for end in ends:
        end.close()


@given(IDS, IDS)
def test_of_two_calls_at_most_one_counts(a: bytes, b: bytes) -> None:
    assert not counts(a, a)
    assert counts(a, b) is not counts(b, a) or a == b
    assert counts(min(a, b), max(a, b)) or a == b


@pytest.mark.parametrize("probe", [False, True])
def test_many_pairs_in_any_order_are_as_many_connections(sides: Sides, software: Software, probe: bool) -> None:
    chance, callers = random.Random(7), {0: 0, 1: 0}
    for _ in range(30):
        made = software.made["qp"]
        ends = sides.meet(chance.choice([0, 0, 0.001, 0.005, 0.03]), chance.randrange(2), probe=probe)
        check(ends)
        assert software.made["qp"] == made + 2
        callers[0 if ends[0]._end.conversation.handshake.role is Role.CONNECTOR else 1] += 1
        close(ends)
        until(lambda: channels() == 0)
    assert min(callers.values()) > 3, "the rule prefers one side"


@pytest.mark.parametrize("qp_type", ["UC", "UD"])
def test_the_other_types_meet_too(sides: Sides, qp_type: str) -> None:
    ends = sides.meet(qp_type=qp_type, probe=True)
    check(ends)
    close(ends)


@contextmanager
def taps(sides: Sides) -> Iterator[tuple[Tap, Tap]]:
    """What each side says to the other; a side calls the other's tap."""
    with tapped(f"tcp://127.0.0.1:{sides.ports[0]}") as one, tapped(f"tcp://127.0.0.1:{sides.ports[1]}") as two:
        yield one, two


def test_the_connection_is_the_one_of_the_smaller_id(sides: Sides) -> None:
    with taps(sides) as (to_first, to_second):
        for number in range(10):
            futures = [sides.start(0, peer=to_second.url), sides.start(1, peer=to_first.url)]
            ends = [future.result(PATIENCE_S) for future in futures]
            check(ends)
            for tap in (to_first, to_second):
                assert all(hello.meet for hello in tap.of(Hello))  # type: ignore[attr-defined]
            ids = [tap.of(Hello)[-1].id for tap in (to_first, to_second) if len(tap.of(Hello)) > number]
            if len(ids) == 2:
                assert ends[0]._end.conversation.id == min(ids)
            close(ends)
            until(lambda: channels() == 0)
        said = to_first.said + to_second.said
        for kind in (Reply, Ready):
            assert sum(type(message) is kind for message, _ in said) == 10, kind


def test_what_each_says_reaches_the_other(sides: Sides) -> None:
    ring = bytearray(64)
    futures = [sides.start(0, private_data=b"zero", regions={"ring": ring}), sides.start(1, private_data=b"one")]
    ends = [future.result(PATIENCE_S) for future in futures]
    assert [end.private_data for end in ends] == [b"one", b"zero"]
    ends[1].write(b"from one", "ring")
    assert ring.startswith(b"from one")
    assert all(end.connect_s > 0 for end in ends)
    close(ends)


def test_alone_it_waits_until_its_deadline(sides: Sides, software: Software) -> None:
    before = time.monotonic()
    with pytest.raises(ConnectTimeout) as caught:
        sides.start(0, 1.0).result(PATIENCE_S)
    assert time.monotonic() - before < 4
    assert f"meet the peer at tcp://127.0.0.1:{sides.ports[1]}" in str(caught.value)
    assert "nothing listens on that port" in str(caught.value)
    again = sides.meet()  # the port is free at once
    check(again)
    close(again)


def test_a_local_address_that_is_taken_is_an_error_at_once(sides: Sides) -> None:
    with socket.create_server(("127.0.0.1", sides.ports[0])), pytest.raises(OSError, match="Address already in use"):
        sides.start(0).result(PATIENCE_S)


def test_whoever_answers_and_fails_calls_anew(sides: Sides, software: Software) -> None:
    """RTR fails once on the side that is called: the caller is told, its meet fails, and a new one succeeds.

    The other side calls anew at once: so quickly that sometimes its call is answered before the caller has heard.
    """
    failed = 0
    for _ in range(15):
        hook = software.on("ibv_modify_qp", to=QpState.RTR, fail=errno.ETIMEDOUT, times=1)
        futures = {which: sides.start(which) for which in (0, 1)}
        until(lambda futures=futures: any(future.done() for future in futures.values()))  # type: ignore[misc]
        lost = next(which for which, future in futures.items() if future.done())
        error = futures[lost].exception()
        assert hook.seen == 1
        if error is not None:
            failed += 1
            assert isinstance(error, PeerRejected)
            assert "INIT->RTR" in str(error)
            futures[lost] = sides.start(lost)
        ends = [futures[which].result(PATIENCE_S + 1) for which in (0, 1)]
        check(ends)
        close(ends)
        until(lambda: channels() == 0)
    assert failed > 0


def test_a_call_that_comes_when_a_side_has_given_up_is_hung_up_on(software: Software) -> None:
    """Its peer calls anew then, whoever meets it next at this address; it must not wait for who is gone."""
    meet_module = importlib.import_module("rdmaconnect.session.meet")
    terms = make_terms({}, listens=True)
    for known in (False, True):
        meeting = meet_module._Meeting(terms, "tcp://127.0.0.1:0")
        if known:
            meeting.expect(Outgoing("tcp://127.0.0.1:1", addresses("127.0.0.1", 1), None))
        early, late = (SimpleNamespace(channel=Told(), conversation=None) for _ in range(2))
        hello = VALUES["hello"]
        assert isinstance(hello, Hello)
        service.do(lambda: meeting.called_by(early, replace(hello, meet=True)))  # noqa: B023
        assert early.channel.told == []
        meeting.close()
        service.do(lambda: meeting.called_by(late, replace(hello, meet=True)))  # noqa: B023
        assert early.channel.told == late.channel.told == ["close"]


class Told:
    """A channel that notes what it was told."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.told: list[str] = []

    def send(self, frame: bytes) -> None:
        self.told.append("send")

    def close(self) -> None:
        self.told.append("close")


def test_a_side_that_goes_before_they_stood_and_comes_again_meets_all_the_same(sides: Sides) -> None:
    chance = random.Random(3)
    for _ in range(6):
        lasting = sides.start(1)
        with pytest.raises(ConnectTimeout):
            # nobody is at the port that it calls
            sides.start(0, chance.choice([0.05, 0.15, 0.25]), peer=f"127.0.0.1:{free_port()}").result(PATIENCE_S)
        ends = [sides.start(0).result(PATIENCE_S), lasting.result(PATIENCE_S)]
        check(ends)
        close(ends)
        until(lambda: channels() == 0)


def test_who_connects_to_one_that_meets_is_turned_away_in_words(sides: Sides) -> None:
    meeting = sides.start(0)
    with pytest.raises(PeerRejected, match=r"this side meets one peer, it does not listen: call meet\(\)\."):
        rdmaconnect.connect(f"127.0.0.1:{sides.ports[0]}", probe=False, deadline_s=PATIENCE_S)
    assert not meeting.done()
    ends = [meeting.result(PATIENCE_S) for meeting in (meeting, sides.start(1))]
    check(ends)
    close(ends)


def test_who_meets_one_that_listens_is_turned_away_in_words(sides: Sides) -> None:
    with rdmaconnect.listen(f"127.0.0.1:{sides.ports[1]}", probe=False) as listening:
        with pytest.raises(PeerRejected, match=r"this side listens, it does not meet\(\): call connect\(\)\."):
            sides.start(0).result(PATIENCE_S)
        with pytest.raises(StateError, match=r"this side listens, it does not meet\(\): call connect\(\)\."):
            listening.accept(deadline_s=PATIENCE_S, tolerant=False)


def hello_of(sides: Sides) -> Hello:
    """What one that meets says."""
    with tapped(f"tcp://127.0.0.1:{sides.ports[1]}") as tap:
        futures = [sides.start(0, peer=tap.url), sides.start(1)]
        close([future.result(PATIENCE_S) for future in futures])
        until(lambda: channels() == 0)
        hellos = tap.of(Hello)
    if not hellos:
        return hello_of(sides)
    assert isinstance(hellos[0], Hello)
    return hellos[0]


def stranger_at(address: str, port: int) -> End:
    tcp = socket.socket()
    tcp.bind((address, 0))
    tcp.connect(("127.0.0.1", port))
    tcp.setblocking(False)
    heard = Heard()
    return End(Channel(tcp, heard, 1 << 19), heard)


@pytest.mark.parametrize("ident", [b"\x01" * 16, b"\xff" * 16], ids=["the smaller id", "the larger id"])
def test_it_takes_only_the_peer_that_it_was_told(sides: Sides, ident: bytes) -> None:
    hello = hello_of(sides)
    meeting = sides.start(0)
    until(lambda: taken(sides.ports[0]))
    stranger = stranger_at("127.0.0.2", sides.ports[0])
    stranger.send(encode(replace(hello, id=ident)))
    reject = decode(stranger.heard.next())
    assert isinstance(reject, Reject)
    assert reject.why == "this side meets the peer at 127.0.0.1, and not 127.0.0.2."
    stranger.channel.close()
    assert not meeting.done()
    ends = [future.result(PATIENCE_S) for future in (meeting, sides.start(1))]
    check(ends)
    close(ends)


def test_a_refused_call_is_told_in_the_timeout(sides: Sides) -> None:
    hello = hello_of(sides)
    meeting = sides.start(0, 1.0)
    until(lambda: taken(sides.ports[0]))
    stranger = stranger_at("127.0.0.2", sides.ports[0])
    stranger.send(encode(hello))
    with pytest.raises(ConnectTimeout, match=r"A call of 127\.0\.0\.2 was refused: this side meets the peer at 127"):
        meeting.result(PATIENCE_S)
    stranger.channel.close()


def test_bytes_that_are_no_message_end_their_own_connection_only(sides: Sides) -> None:
    meeting = sides.start(0)
    until(lambda: taken(sides.ports[0]))
    stranger = stranger_at("127.0.0.1", sides.ports[0])
    stranger.send(b"garbage")
    stranger.heard.end()
    ends = [future.result(PATIENCE_S) for future in (meeting, sides.start(1))]
    check(ends)
    close(ends)


def test_under_one_secret_they_meet_and_with_another_not(sides: Sides) -> None:
    secret = "a secret of one job, long enough"
    ends = sides.meet(secret=secret)
    check(ends)
    close(ends)
    until(lambda: channels() == 0)
    futures = [sides.start(0, 3.0, secret=secret), sides.start(1, 3.0, secret=secret + "!")]
    for future in futures:
        with pytest.raises(RdmaConnectError):
            future.result(PATIENCE_S)


def test_for_asyncio_it_is_the_same(sides: Sides) -> None:
    async def main() -> None:
        here, there = (f"127.0.0.1:{port}" for port in sides.ports)
        ends = await asyncio.gather(
            rdmaconnect.ameet(here, there, deadline_s=PATIENCE_S), rdmaconnect.ameet(there, here, deadline_s=PATIENCE_S)
        )
        await ends[0].send(b"hello")
        assert await ends[1].recv() == b"hello"
        for end in ends:
            await end.close()

    asyncio.run(main())


def test_cancelled_it_leaves_nothing_and_its_port_is_free(sides: Sides) -> None:
    async def main() -> None:
        here, there = (f"127.0.0.1:{port}" for port in sides.ports)
        task = asyncio.create_task(rdmaconnect.ameet(here, there, deadline_s=None))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: channels() == 0)
    ends = sides.meet()
    check(ends)
    close(ends)
