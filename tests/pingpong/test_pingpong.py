"""The ping-pong between two ends in memory: contents, plan, both sides, report."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import end, gid, infiniband, roce

from rdmaconnect.abi import Mtu, QpType
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Wish, agree, make_path
from rdmaconnect.errors import DeadlineExceeded, DeviceError, PeerClosed, RemoteProtocolError
from rdmaconnect.pingpong import (
    COLUMNS,
    OPS,
    Echoed,
    PayloadError,
    Plan,
    PlanRefused,
    Report,
    Samples,
    check_memory,
    contents,
    describe_end,
    echo,
    payload,
    percentiles,
    ping,
    plan,
    result,
    rounds,
    sweep,
)

PATIENCE = 20


# ---- two ends


class Region:
    """Registered memory of a :class:`Net`."""

    def __init__(self, net: Net, view: memoryview) -> None:
        net.made += 1
        self.net, self.view, self.length = net, view, len(view)
        self.region = RemoteRegion(net.made << 32, net.made, len(view))
        net.memory[self.region.addr] = view

    def close(self) -> None:
        self.net.memory.pop(self.region.addr, None)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Net:
    """The memory of both ends."""

    def __init__(self) -> None:
        self.memory: dict[int, memoryview] = {}
        self.made = 0


class End:
    """One end of a connection; ``harm`` changes what goes out, by its number."""

    other: End

    def __init__(self, net: Net, qp_type: QpType, number: int) -> None:
        self.net, self.number = net, number
        self.lost: PeerClosed | None = None
        self.local = end(roce(gid("10.0.0.1", gid_index=1)), qp_type=qp_type, qp_num=0x11, recv_size=4096)
        self.peer = end(roce(gid("10.0.0.2", gid_index=2), device="rxe1"), qp_type=qp_type, qp_num=0x22, recv_size=1024)
        self.path = make_path(
            self.local, self.peer, agree(self.local, self.peer, Wish(Mtu.MTU_512)), Options(), connector=True
        )
        self.connect_s, self.max_send_size = 0.0015, 1024
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.told: queue.Queue[int | None] = queue.Queue()
        self.harm: Callable[[bytes, int], bytes] = lambda data, number: data
        self.sent: list[bytes] = []
        self.done: list[str] = []

    def register(self, buffer: Any) -> Region:
        return Region(self.net, memoryview(buffer))

    def _bytes(self, data: Any) -> bytes:
        self.sent.append(bytes(data.view if isinstance(data, Region) else data))
        return self.harm(self.sent[-1], len(self.sent) - 1)

    def send(self, data: Any, *, deadline_s: float | None) -> None:
        self.done.append("send")
        self.other.inbox.put(self._bytes(data))

    def _take(self, inbox: queue.Queue[Any], deadline_s: float | None) -> Any:
        try:
            found = inbox.get(timeout=PATIENCE if deadline_s is None else deadline_s)
        except queue.Empty:
            raise DeadlineExceeded("recv", deadline_s or 0) from None
        if found is None:
            raise PeerClosed("recv: the peer closed the connection.")
        return found

    def recv(self, *, deadline_s: float | None) -> bytes:
        found: bytes = self._take(self.inbox, deadline_s)
        return found

    def recv_into(self, buffer: Any, *, deadline_s: float | None) -> int:
        data = self.recv(deadline_s=deadline_s)
        if len(data) > len(buffer):
            raise ValueError(f"receive {len(data)} bytes: the buffer has {len(buffer)}")
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any, region: RemoteRegion, *, imm: int | None = None, deadline_s: float | None) -> None:
        self.done.append("write")
        target = self.net.memory[region.addr]
        target[:] = self._bytes(data)
        if imm is not None:
            self.other.told.put(imm)

    def recv_imm(self, *, deadline_s: float | None) -> int:
        found: int = self._take(self.told, deadline_s)
        return found

    def read_into(self, buffer: Region, region: RemoteRegion, *, deadline_s: float | None) -> int:
        self.done.append("read")
        buffer.view[:] = self.harm(bytes(self.net.memory[region.addr]), len(self.done) - 1)
        return len(buffer.view)

    def close(self) -> None:
        self.other.lost = PeerClosed("the peer closed the connection.")
        for inbox in (self.other.inbox, self.other.told):
            inbox.put(None)


def ends(count: int = 1, qp_type: QpType = QpType.RC) -> tuple[list[Any], list[Any]]:
    """Connections as both sides hold them."""
    net = Net()
    here, there = ([End(net, qp_type, n) for n in range(count)] for _ in range(2))
    for a, b in zip(here, there, strict=True):
        a.other, b.other = b, a
        b.local, b.peer, b.max_send_size = a.peer, a.local, 4096
    return here, there


def both(
    here: Sequence[Any], there: Sequence[Any], more: Any = None, **options: Any
) -> tuple[Report | BaseException, Echoed | BaseException]:
    """Run both sides; what comes out of each. Whoever fails closes, as a program would."""

    def told(conns: Sequence[Any], function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as e:  # noqa: BLE001  it is what came out
            for conn in conns:
                conn.close()
            return e

    with ThreadPoolExecutor(1) as threads:
        take = more or (lambda number: there[1 : 1 + number])
        serving = threads.submit(told, there, lambda: echo(there[0], more=take, deadline_s=PATIENCE))
        report = told(here, lambda: ping(here, **{"deadline_s": PATIENCE} | options))
        for conn in here:
            conn.close()
        return report, serving.result()


def played(here: Sequence[Any], there: Sequence[Any], **options: Any) -> tuple[Report, Echoed]:
    report, served = both(here, there, **options)
    assert isinstance(report, Report), report
    assert isinstance(served, Echoed), served
    return report, served


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


@pytest.mark.parametrize("size", [0, 1, 251, 4096, 251 * 4096, 251 * 4096 + 1, 3_000_000])
def test_a_buffer_is_filled_and_checked_in_pieces_of_any_size(size: int) -> None:
    conn: Any = SimpleNamespace(register=lambda view: Region(Net(), view))
    with contents.Buffer(conn, size) as buffer:
        for iteration in (0, 250, 251, 10**6):
            buffer.fill(iteration)
            assert bytes(buffer.view) == payload(size, iteration)
            buffer.check(iteration, size)
            if not size:
                continue
            with pytest.raises(PayloadError, match=f"^check round trip {iteration + 1}: byte 0 of {size} went out as"):
                buffer.check(iteration + 1)
            buffer.view[-1] ^= 1
            with pytest.raises(PayloadError, match=f": byte {size - 1} of {size} went out as"):
                buffer.check(iteration)
        buffer.blank()
        assert set(buffer.view) <= {255}


def test_more_memory_than_there_is_is_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "meminfo"
    source.write_text("MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n")
    check_memory(2048 * 1024, "it", str(source))
    with pytest.raises(DeviceError, match=r"^it takes 3 MiB here, and 2 are available\. Give a smaller size\.$"):
        check_memory(3 * 2**20, "it", str(source))
    check_memory(2**60, "it", str(tmp_path / "none"))


# ---- plan


PLANS = st.builds(
    Plan,
    st.sampled_from(list(OPS)),
    st.integers(1, 2**30),
    st.integers(1, 2**16),
    st.integers(0, 2**40),
    st.integers(1, 4096),
    st.none()
    | st.builds(RemoteRegion, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    st.booleans(),
    st.integers(0, 2**15),
)


@given(PLANS)
@settings(max_examples=50)
def test_a_plan_survives_the_way(made: Plan) -> None:
    assert Plan.unpack(made.pack()) == made
    assert len(made.pack()) <= 256  # one datagram, whatever the MTU


def changed(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb({**msgpack.unpackb(Plan("send", 5, 2).pack()), **fields})
    return packed


NO_PLANS = [
    b"", b"hello", b"\xc1", b"\x93\x01\x02\x03", msgpack.packb({}), msgpack.packb({"size": 1, "iters": 1}),
    changed(pingpong=1), changed(pingpong=None), changed(op="dance"), changed(op=None), changed(size=-1),
    changed(size=2**30 + 1), changed(size=1.5), changed(size=True), changed(iters=0), changed(iters=2**16 + 1),
    changed(first=-1), changed(connections=0), changed(connections=4097), changed(region=b"short"),
    changed(region=7), changed(end=1), changed(op="write", size=0), b"\x91" * 500, bytes(513),
]  # fmt: skip


@pytest.mark.parametrize("first", NO_PLANS)
def test_echo_refuses_a_first_message_that_is_no_plan(first: bytes) -> None:
    _, there = ends()
    there[0].inbox.put(first)
    with pytest.raises(RemoteProtocolError, match=r"^echo: the peer's first message is not a plan") as e:
        echo(there[0], deadline_s=PATIENCE)
    assert str(e.value).isprintable()
    assert there[0].sent == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Plan("send", 1025), "size is 1025: these two ends take 0 to 1024 bytes in one message"),
        (Plan("write", 8), "there is no region for as many"),
        (Plan("write", 8, region=RemoteRegion(1, 1, 7)), "there is no region for as many"),
        (Plan("send", 8, connections=2), "2 connections are wanted, 1 are served here"),
    ],
)
def test_echo_refuses_what_cannot_be_and_says_so(made: Plan, words: str) -> None:
    here, there = ends()
    there[0].inbox.put(made.pack())
    with pytest.raises(PlanRefused, match=words):
        echo(there[0], deadline_s=PATIENCE)
    assert words in plan.Answer.unpack(here[0].inbox.get_nowait()).no


@pytest.mark.parametrize(
    ("op", "qp_type", "words"),
    [
        ("read", QpType.UC, "op read over UC: this type does not have it. RC have"),
        ("read", QpType.UD, "op read over UD"),
        ("write", QpType.UD, "op write over UD: this type does not have it. RC and UC have"),
        ("write_imm", QpType.UD, "op write_imm over UD"),
    ],
)
def test_both_sides_refuse_what_the_type_does_not_have(op: str, qp_type: QpType, words: str) -> None:
    here, there = ends(qp_type=qp_type)
    with pytest.raises(ValueError, match=words):
        ping(here, op=op, sizes=[8], iters=1, deadline_s=PATIENCE)
    assert here[0].sent == []
    there[0].inbox.put(Plan(op, 8, region=RemoteRegion(1, 1, 8)).pack())
    with pytest.raises(PlanRefused, match=words):
        echo(there[0], deadline_s=PATIENCE)


def test_a_peer_that_lacks_the_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(need: int, what: str) -> None:
        raise DeviceError(f"{what}: no")

    here, there = ends()
    monkeypatch.setattr(rounds._Service, "_prepare", lambda self, plan: lack(1, "buffers"))
    report, served = both(here, there, sizes=[8], iters=1)
    assert isinstance(report, PlanRefused)
    assert str(report) == "ping 8 bytes: the peer refuses: buffers: no"
    assert isinstance(served, PlanRefused)


@pytest.mark.parametrize("answer", [b"", b"\xc1", b"hello", msgpack.packb({"region": None}), msgpack.packb([1])])
def test_an_answer_that_is_none_is_told(answer: bytes) -> None:
    here, _ = ends()
    here[0].inbox.put(answer)
    with pytest.raises(RemoteProtocolError, match=r"^ping: the peer does not answer the plan\. Does it run echo\?$"):
        ping(here, sizes=[8], iters=1, deadline_s=PATIENCE)


def test_a_sweep_goes_over_the_powers_of_two() -> None:
    assert sweep(1) == [1]
    assert sweep(9) == [1, 2, 4, 8]
    assert sweep(2**30)[-2:] == [2**29, 2**30]
    assert sweep(8 * 2**20) == [1 << bit for bit in range(24)]


# ---- both sides


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [1, 3])
def test_both_sides_play_and_check_what_comes(op: str, count: int) -> None:
    here, there = ends(count)
    shares: list[float] = []
    report, served = played(here, there, op=op, sizes=[1, 700], iters=7, tick=shares.append)
    assert served == Echoed(op, (1, 700), 14, count)
    assert (report.op, report.connections, [(r.size, r.iters) for r in report.rows]) == (op, count, [(1, 7), (700, 7)])
    for row in report.rows:
        assert 0 < row.min_us <= row.p50_us <= row.p90_us <= row.p99_us <= row.max_us
        assert row.min_us <= row.mean_us <= row.max_us
        ways = 1 if op == "read" else 2
        assert row.mb_per_s == pytest.approx(ways * row.size / row.mean_us, rel=0.05, abs=0.001)
        assert len(row.samples) == row.iters
    assert shares == sorted(shares)
    assert shares[-1] == 1
    # all connections, in turn
    verb = "send" if op == "send" else "read" if op == "read" else "write"
    used = [conn.done.count(verb) for conn in here]
    control = (3, 0) if op == "send" else (0, 0)
    assert used == [sum(1 for _ in range(2) for i in range(7) if i % count == n) + (control[0] if n == 0 else 0)
                    for n in range(count)]  # fmt: skip
    assert (here[0].net.memory, there[0].net.memory) == ({}, {})  # all of it given back


def test_the_plan_says_what_comes_and_then_it_comes() -> None:
    here, there = ends()
    report, _ = played(here, there, sizes=[100], iters=3)
    plans = [here[0].sent[0], here[0].sent[-1]]
    assert Plan.unpack(plans[0]) == Plan("send", 100, 3)
    assert Plan.unpack(plans[1]).end
    assert here[0].sent[1:-1] == there[0].sent[1:] == [payload(100, i) for i in range(3)]
    assert (report.qp_type, report.path_mtu, report.connect_us) == ("RC", 512, 1500.0)
    assert report.local["qp_num"] == 0x11
    assert report.remote["gid"] == "::ffff:10.0.0.2"
    assert report.why == list(here[0].path.why)


def test_an_empty_message_goes_there_and_back() -> None:
    here, there = ends(qp_type=QpType.UD)
    report, served = played(here, there, sizes=[0], iters=2)
    assert (served.sizes, report.rows[0].mb_per_s) == ((0,), 0.0)


def test_many_round_trips_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_BATCH", 4)
    here, there = ends()
    report, served = played(here, there, op="write", sizes=[9], iters=10)
    asked = [Plan.unpack(data) for data in here[0].sent if data[:1] == b"\x89"]
    assert [(p.first, p.iters, p.end) for p in asked] == [(0, 4, False), (4, 4, False), (8, 2, False), (0, 1, True)]
    assert (report.rows[0].iters, served) == (10, Echoed("write", (9,), 10, 1))


def test_a_duration_ends_it_on_both_sides() -> None:
    here, there = ends()
    shares: list[float] = []
    report, served = played(here, there, sizes=[8, 16], duration_s=0.3, iters=1, tick=shares.append)
    for row in report.rows:
        assert row.iters > 1
        assert 0.1e6 < row.iters * row.mean_us < 3e6
    assert served.iters == sum(row.iters for row in report.rows)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_large_sizes_are_played_less_often() -> None:
    here, there = ends()
    report, _ = played(here, there, op="write", sizes=[1, 100, 1000], iters=50, most_bytes=2000)
    assert [row.iters for row in report.rows] == [50, 20, rounds.FEW]


@pytest.mark.parametrize(("options", "words"), [
    ({"sizes": [-1]}, "size is -1"), ({"sizes": [8, 1025]}, "these two ends take 0 to 1024 bytes"),
    ({"iters": 0, "sizes": [1]}, "iters is 0: give 1 or more"), ({"op": "dance"}, "op is 'dance'"),
    ({"op": "write", "sizes": [0]}, "size is 0: op write takes 1 to 1073741824"),
    ({"op": "read", "sizes": [2**30 + 1]}, "size is 1073741825"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_said(options: dict[str, Any], words: str) -> None:
    here, _ = ends()
    with pytest.raises(ValueError, match=words):
        ping(here, **{"sizes": [8]} | options)
    assert here[0].sent == []


# ---- what goes wrong


@pytest.mark.parametrize("op", ["send", "write", "write_imm"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_payload_that_was_changed_on_the_way_is_told(op: str, side: int) -> None:
    sides = ends()
    sides[side][0].harm = lambda data, number: data[:40] + b"\xfe" + data[41:] if number == 3 else data
    report, served = both(*sides, op=op, sizes=[100], iters=5)
    # number 0 was plan or answer
    both_see = op == "send" or side == 0
    seen = [what for what in (report, served) if isinstance(what, PayloadError)]
    assert seen, (report, served)
    assert str(seen[0]).startswith("check round trip 2: byte 40 of 100 went out as 42 and came back as 254.")
    assert both_see or isinstance(report, PayloadError)
    assert not isinstance(report, Report)
    assert not isinstance(served, Echoed)


def test_a_read_that_brings_nothing_is_told() -> None:
    here, there = ends()
    here[0].harm = lambda data, number: data if number != 4 else b"\xff" * len(data)
    report, _ = both(here, there, op="read", sizes=[64], iters=5)
    assert isinstance(report, PayloadError)
    assert "went out as 0 and came back as 255" in str(report)


@pytest.mark.parametrize("length", [99, 101])
def test_a_message_of_another_length_is_told(length: int) -> None:
    here, there = ends()
    here[0].harm = lambda data, number: data if number != 1 else payload(length, 0)
    report, served = both(here, there, sizes=[100], iters=2)
    assert isinstance(served, PayloadError)
    assert f"{length}" in str(served)
    assert not isinstance(report, Report)


def test_a_write_that_is_lost_ends_at_the_deadline_and_a_peer_that_is_gone_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, there = ends(qp_type=QpType.UC)
    there[0].inbox.put(Plan("write", 8, region=RemoteRegion(1, 1, 8)).pack())
    with pytest.raises(DeadlineExceeded, match="see the peer's write of 8 bytes") as e:
        echo(there[0], deadline_s=0.05)
    assert "Over UC it may have been lost." in str(e.value)
    there[0].inbox.put(Plan("write", 8, region=RemoteRegion(1, 1, 8)).pack())
    there[0].lost = PeerClosed("gone")
    with pytest.raises(PeerClosed, match="gone"):
        echo(there[0], deadline_s=PATIENCE)


def test_a_write_out_of_turn_is_told() -> None:
    _, there = ends()
    there[0].inbox.put(Plan("write_imm", 8, region=RemoteRegion(1, 1, 8)).pack())
    there[0].told.put(1)
    with pytest.raises(RemoteProtocolError, match="check round trip 0: a write came with the number 1"):
        echo(there[0], deadline_s=PATIENCE)


def test_a_good_bye_between_two_plans_is_the_end() -> None:
    _, there = ends()
    there[0].inbox.put(Plan("send", 5).pack())
    there[0].inbox.put(payload(5, 0))
    there[0].inbox.put(None)
    assert echo(there[0], deadline_s=PATIENCE) == Echoed("send", (5,), 1, 1)
    there[0].inbox.put(None)
    with pytest.raises(PeerClosed):
        echo(there[0], deadline_s=PATIENCE)


# ---- figures


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


@given(st.lists(st.integers(0, 40), max_size=12))
def test_samples_are_thinned_evenly_and_count_all(parts: list[int]) -> None:
    made, number = Samples(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "KEPT", 16)
        for part in parts:
            made.extend([float(number + n) for n in range(part)])
            number += part
    assert (made.count, made.total) == (number, sum(range(number)))
    assert len(made.kept) <= 16
    assert list(made.kept) == [float(n) for n in range(0, number, made.every)]
    if number:
        assert (made.percentiles()["min"], made.percentiles()["max"]) == (0, number - 1)
        assert len(made.kept) > 8 or made.every == 1


def test_an_end_is_described_with_plain_values() -> None:
    made = end(roce(gid("10.0.0.1", gid_index=3), port_num=2), qp_num=0x11C, psn=7)
    assert describe_end(made, made.port.gids[0]) == {
        "device": "rxe0", "port_num": 2, "gid_index": 3, "gid": "::ffff:10.0.0.1", "lid": 0, "qp_num": 0x11C, "psn": 7,
    }  # fmt: skip
    by_lid = describe_end(end(infiniband(9)), None)
    assert (by_lid["lid"], by_lid["gid"], by_lid["gid_index"]) == (9, None, None)


def test_a_report_is_plain_json() -> None:
    here, there = ends()
    report, _ = played(here, there, sizes=[4, 8], iters=2)
    found = json.loads(json.dumps(report.asdict()))
    assert found == report.asdict()
    assert [tuple(row) for row in found["rows"]] == [COLUMNS, COLUMNS]
