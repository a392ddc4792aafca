"""The ping-pong over a connection that is none: contents, plan, report."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import end, gid, infiniband, roce

from rdmaconnect.abi import Mtu
from rdmaconnect.endpoint import Options
from rdmaconnect.errors import DeadlineExceeded, RemoteProtocolError
from rdmaconnect.path import Wish, agree, make_path
from rdmaconnect.pingpong import PayloadError, describe_end, echo, payload, percentiles, ping


class Peer:
    """A connection whose other end answers at once: ``answer`` makes each message that comes back."""

    def __init__(self, answer: Any = None) -> None:
        self.local = end(roce(gid("10.0.0.1", gid_index=1)), qp_num=0x11, recv_size=4096)
        self.peer = end(roce(gid("10.0.0.2", gid_index=2), device="rxe1"), qp_num=0x22, recv_size=1024)
        agreement = agree(self.local, self.peer, Wish(Mtu.MTU_512))
        self.path = make_path(self.local, self.peer, agreement, Options(), connector=True)
        self.connect_s, self.max_send_size = 0.0015, 1024
        self.answer = answer or (lambda data, number: data)
        self.sent: list[bytes] = []
        self.inbox: deque[bytes] = deque()

    def send(self, data: bytes, *, deadline_s: float | None) -> None:
        assert deadline_s == 7
        self.sent.append(data)
        if len(self.sent) > 1:
            self.inbox.append(self.answer(data, len(self.sent) - 2))

    def recv(self, *, deadline_s: float | None) -> bytes:
        assert deadline_s == 7
        if not self.inbox:
            raise DeadlineExceeded("recv", 7)
        return self.inbox.popleft()


class Pinger:
    """A connection whose other end has sent these messages."""

    def __init__(self, *messages: bytes) -> None:
        self.inbox = deque(messages)
        self.local = SimpleNamespace(recv_size=4096)
        self.peer = SimpleNamespace(recv_size=4096)
        self.max_send_size = 4096
        self.sent: list[bytes] = []

    def send(self, data: bytes, *, deadline_s: float | None) -> None:
        self.sent.append(data)

    def recv(self, *, deadline_s: float | None) -> bytes:
        return self.inbox.popleft()


def plan(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


# ---- contents


@given(st.integers(0, 3000), st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_payload_has_its_size_and_differs_from_the_next_in_every_byte(size: int, iteration: int) -> None:
    this, after = payload(size, iteration), payload(size, iteration + 1)
    assert len(this) == len(after) == size
    assert all(a != b for a, b in zip(this, after, strict=True))


def test_a_payload_shows_a_packet_in_the_wrong_place() -> None:
    data = payload(8192, 0)
    blocks = {data[at : at + 256] for at in range(0, 8192, 256)}
    assert len(blocks) == 32
    for size, iteration in [(0, 0), (5, 0), (3, 250), (3, 251), (3, 252), (1000, 7), (502, 1)]:
        assert payload(size, iteration) == bytes((iteration + at) % 251 for at in range(size))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([5.0], [5, 5, 5, 5, 5]),
        ([3.0, 1.0, 2.0], [1, 2, 3, 3, 3]),
        (list(range(1001)), [0, 500, 900, 990, 1000]),
        ([1.23456], [1.235] * 5),
    ],
)
def test_percentiles_are_by_nearest_rank(samples: list[float], expected: list[float]) -> None:
    assert percentiles(samples) == dict(zip(["min", "p50", "p90", "p99", "max"], expected, strict=True))


def test_an_end_is_described_with_plain_values() -> None:
    made = end(roce(gid("10.0.0.1", gid_index=3), port_num=2), qp_num=0x11C, psn=7)
    assert describe_end(made, made.port.gids[0]) == {
        "device": "rxe0", "port_num": 2, "gid_index": 3, "gid": "::ffff:10.0.0.1", "lid": 0, "qp_num": 0x11C, "psn": 7,
    }  # fmt: skip
    by_lid = describe_end(end(infiniband(9)), None)
    assert (by_lid["lid"], by_lid["gid"], by_lid["gid_index"]) == (9, None, None)


# ---- ping


def test_ping_says_what_will_come_then_sends_it() -> None:
    peer, ticks = Peer(), []
    report = ping(peer, size=100, iters=3, deadline_s=7, tick=ticks.append)  # type: ignore[arg-type]
    assert peer.sent == [plan(size=100, iters=3), *(payload(100, i) for i in range(3))]
    assert ticks == [1, 2, 3]
    assert (report.size, report.iters, report.qp_type, report.path_mtu) == (100, 3, "RC", 512)
    assert report.connect_us == 1500.0
    assert report.local["qp_num"] == 0x11
    assert report.remote["gid"] == "::ffff:10.0.0.2"
    assert report.why == list(peer.path.why)
    lat = report.latency_us
    assert 0 < lat["min"] <= lat["p50"] <= lat["p90"] <= lat["p99"] <= lat["max"]
    assert report.usec_per_iter >= lat["min"]
    assert report.mbit_per_s == pytest.approx(2 * 8 * 100 / report.usec_per_iter, rel=0.05)


def test_a_report_is_plain_json() -> None:
    report = ping(Peer(), size=0, iters=1, deadline_s=7)  # type: ignore[arg-type]
    assert json.loads(json.dumps(report.asdict())) == report.asdict()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda data, i: data[:-1], r"^check round trip 0: 100 bytes went out, 99 came back\.$"),
        (lambda data, i: data + b"x", r"100 bytes went out, 101 came back"),
        (lambda data, i: data[:40] + bytes([data[40] ^ 1]) + data[41:], r"^check round trip 0: .*40.*"),
        (lambda data, i: payload(100, i - (i == 2)), r"^check round trip 2: "),
    ],
)
def test_a_message_that_comes_back_changed_is_told(answer: Any, match: str) -> None:
    with pytest.raises(PayloadError, match=match):
        ping(Peer(answer), size=100, iters=3, deadline_s=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, 1025])
def test_ping_sends_no_more_than_both_ends_take(size: int) -> None:
    peer = Peer()
    with pytest.raises(ValueError, match=f"^size is {size}: these two ends take 0 to 1024 bytes in one message$"):
        ping(peer, size=size, iters=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^iters is 0: give 1 or more$"):
        ping(peer, iters=0, size=1)  # type: ignore[arg-type]
    assert peer.sent == []


# ---- echo


def test_echo_returns_every_message_and_says_how_many() -> None:
    peer = Pinger(plan(size=5, iters=2), payload(5, 0), payload(5, 1))
    assert echo(peer) == (5, 2)  # type: ignore[arg-type]
    assert peer.sent == [payload(5, 0), payload(5, 1)]


@pytest.mark.parametrize(
    "first",
    [b"", b"hello", b"\xc1", b"\x93\x01\x02\x03", plan(), plan(size=1), plan(iters=1), plan(size=None, iters=1)],
)
def test_echo_refuses_a_first_message_that_is_no_plan(first: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^echo: the peer's first message is not a plan"):
        echo(Pinger(first))  # type: ignore[arg-type]


def test_echo_returns_a_wrong_message_too_and_then_tells() -> None:
    peer = Pinger(plan(size=5, iters=2), b"wrong")
    with pytest.raises(PayloadError, match=r"^check round trip 0: "):
        echo(peer)  # type: ignore[arg-type]
    assert peer.sent == [b"wrong"]
