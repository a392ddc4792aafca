"""The messages as bytes: what was agreed on paper, what survives the way, and that nothing a peer sends does harm."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import (
    ID,
    IDS,
    MTUS,
    TEXTS,
    U8,
    end,
    ends,
    gid,
    gids,
    ports,
    private,
    regions,
    roce,
    targets,
    wishes,
)
from vectors import VALUES, read

from rdmaconnect.abi import GidType
from rdmaconnect.agreement.endpoint import GidKey, RemoteRegion
from rdmaconnect.agreement.path import Agreement, Wish
from rdmaconnect.errors import RemoteProtocolError
from rdmaconnect.protocol import codec as wire
from rdmaconnect.protocol.codec import MAX_FRAME, decode, encode
from rdmaconnect.protocol.messages import (
    Answer,
    Beat,
    Bye,
    Hello,
    Joined,
    Message,
    Proof,
    Ready,
    Reject,
    Remark,
    Reply,
    Target,
)

names = pytest.mark.parametrize("name", VALUES)
MAPS = {name: msgpack.unpackb(read(name)) for name in VALUES}
HELLO = VALUES["hello"]
assert isinstance(HELLO, Hello)

#: an end on a port whose tables are full
LARGEST = end(
    roce(
        *(gid("2001:db8::1", GidType.ROCE_V2, i, "x" * 64) for i in range(256)), device="x" * 64, pkeys=(0xFFFF,) * 256
    )
)
ports_offered = st.lists(ports, max_size=3).map(tuple)
#: arrays of as many as there are
ROWS = ("qps", "gids", "away", "pkeys", "ports", "doors", "remarks", "zero", "differences")
#: of the GIDs agreed on nobody says whose address they are: their ports do
known = gids.map(lambda entry: replace(entry, here=True))
agreements = st.builds(
    lambda pair, *rest: Agreement(*pair, *rest),
    st.just((None, None)) | st.tuples(known, known),
    MTUS,
    st.integers(0, 15),
    U8,
    st.integers(0, 2**20 - 1),
    st.integers(1, 0x7FFF),
    st.booleans(),
)
stages = st.lists(st.tuples(st.text("abc é", max_size=16), st.integers(0, 2**53)), max_size=64).map(tuple)
beats = st.just(0) | st.integers(100, 60_000)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        IDS,
        ends(),
        wishes,
        regions,
        private,
        st.none() | IDS,
        targets,
        st.booleans(),
        beats,
        st.integers(0, 2**31 - 1),
    ),
    st.builds(Reply, IDS, ends(), agreements, regions, private, ports_offered, stages, st.just(b"") | IDS, beats),
    st.builds(Ready, IDS, stages),
    st.builds(Joined, IDS),
    st.builds(Proof, IDS, stages),
    st.builds(Beat, IDS),
    st.builds(Reject, IDS, TEXTS, st.integers(0, 4095), TEXTS, ports_offered, st.integers(0, 60_000)),
    st.builds(Bye, IDS, TEXTS, st.booleans()),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=20) | st.sampled_from(list(MAPS.values())).map(copy.deepcopy),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("vtidqpsmem", max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


def pack(value: Any) -> bytes:
    frame: bytes = msgpack.packb(value)
    return frame


def refusal(frame: bytes, *what: Any) -> str:
    """The words with which a frame is refused: one printable line."""
    try:
        decode(frame)
    except RemoteProtocolError as e:
        words = str(e)
    else:
        pytest.fail(f"{what or frame!r} was taken")
    assert words.isprintable()
    assert words.startswith("decode: the peer")
    return words


def survives(frame: bytes) -> None:
    """Whatever the bytes, they are a valid message, one of an unknown type, or refused in words."""
    try:
        message = decode(frame)
    except RemoteProtocolError as e:
        words = str(e)
    else:
        words = "a message"
        assert decode(encode(message)) == message if message is not None else unknown(frame)
    assert words.isprintable()


def unknown(frame: bytes) -> bool:
    """Whether a frame is a whole message of this version, of a type that it does not have."""
    body = msgpack.unpackb(frame)
    return body["v"] == 1 and isinstance(body["t"], str) and body["t"] not in TYPES and len(body["id"]) == 16


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside of nested maps and lists."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested maps and lists with another value in one place; ``...`` takes the place out."""
    result = copy.deepcopy(value)
    target = result
    for key in path[:-1]:
        target = target[key]
    if new is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = new
    return result


TYPES = {
    "hello", "reply", "ready", "joined", "proof", "beat", "resume", "unlisted", "reject", "bye", "question", "answer",
}  # fmt: skip
PLACES = [(name, path) for name in VALUES for path in places(MAPS[name])]

# ---- what was agreed on paper


@names
def test_the_bytes_are_those_of_the_vector(name: str) -> None:
    assert encode(VALUES[name]).hex() == read(name).hex()


@names
def test_the_vector_means_the_same_message(name: str) -> None:
    assert decode(read(name)) == VALUES[name]


def test_a_hello_is_the_map_that_the_specification_says() -> None:
    assert MAPS["hello"] == {
        "v": 1,
        "t": "hello",
        "id": ID,
        "qpt": 2,
        "qps": [[0x11C, 0xABCDEF, 0]],
        "port": {
            "dev": "rxe0", "num": 1, "ll": 2, "lid": 0, "mtu": 3, "grh": False,
            "pkeys": [0xFFFF], "ord": 128, "ird": 16,
            "gids": [
                [bytes.fromhex("fe80000000000000505400fffe123456"), 1, 0, "eth0"],
                [bytes.fromhex("00000000000000000000ffff0a000007"), 2, 3, "eth0"],
            ],
        },
        "rsz": 65536,
        "mem": {"ring": [0x7F0000001000, 1 << 20, 0xDEADBEEF]},
        "data": b"rank 3",
        "wish": {"mtu": 4, "sl": 3, "tc": 106, "fl": 0xFFFFF, "pkey": 0xFFFF, "probe": True},
        "prev": None, "want": None, "meet": False,
    }  # fmt: skip
    again = MAPS["hello-again"]
    assert (again["prev"], again["meet"], len(again["data"])) == (b"\x11" * 16, True, 4096)
    assert again["want"] == ["rxe1", 254, b"\x22" * 16, b"\x33" * 16]
    assert MAPS["hello-target-lid"]["want"] == ["mlx5_1", 1, None, None]
    assert MAPS["hello-many"]["wish"]["probe"] is False


def test_a_reply_is_the_map_that_the_specification_says() -> None:
    found = MAPS["reply"]
    assert set(found) == {"v", "t", "id", "qpt", "qps", "port", "rsz", "mem", "data", "agree", "ports"}
    assert found["ports"] == [found["port"], MAPS["reply-lid"]["port"]]
    assert found["agree"] == {
        "cg": [bytes.fromhex("00000000000000000000ffff0a000007"), 2, 3, "eth0"],
        "lg": [bytes.fromhex("00000000000000000000ffff0a000008"), 2, 255, "enp1s0"],
        "mtu": 3, "sl": 0, "tc": 0, "fl": 0, "pkey": 0x7FFF,
    }  # fmt: skip
    assert MAPS["reply-lid"]["agree"] == {
        "cg": None, "lg": None, "mtu": 1, "sl": 15, "tc": 255, "fl": 0xFFFFF, "pkey": 1,
    }  # fmt: skip


def test_the_small_messages_are_the_maps_that_the_specification_says() -> None:
    for name in ("ready", "joined", "proof", "beat"):
        assert MAPS[name] == {"v": 1, "t": name, "id": ID}
    assert set(MAPS["reject"]) == {"v", "t", "id", "stage", "errno", "why", "ports"}
    assert MAPS["reject-ports"] == {
        "v": 1, "t": "reject", "id": bytes(16), "stage": "", "errno": 0, "why": "",
        "ports": [MAPS["reply-lid"]["port"], MAPS["hello"]["port"]],
    }  # fmt: skip
    assert MAPS["ready-doors"]["doors"] == [["port", 0], ["hello", 2500], ["a door of 16 cha", 2**53]]
    assert MAPS["bye"] == {"v": 1, "t": "bye", "id": ID, "why": "close"}


def test_the_longest_message_of_a_port_is_told_if_it_is_known() -> None:
    (end,) = VALUES["hello"].ends  # type: ignore[union-attr]
    told = replace(VALUES["hello"], ends=(replace(end, port=replace(end.port, max_msg_sz=1 << 23)),))
    body = msgpack.unpackb(encode(told))
    assert body["port"].pop("msz") == 1 << 23
    assert body == MAPS["hello"], "a peer of an earlier release reads the rest"
    assert decode(encode(told)) == told
    for wrong in (-1, 2**32, "1", None):
        with pytest.raises(RemoteProtocolError, match="msz"):
            decode(pack(MAPS["hello"] | {"port": MAPS["hello"]["port"] | {"msz": wrong}}))


# ---- what survives the way


@given(messages)
@settings(max_examples=80)
def test_any_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_version_1_has_learnt_since_is_left_out_where_it_says_nothing() -> None:
    for name in ("hello", "hello-many", "hello-again", "reply", "reply-lid", "reject", "reject-ports"):
        assert not OPTIONAL & set(MAPS[name]), name
    hello = {key: value for key, value in MAPS["hello-beats"].items() if key not in OPTIONAL}
    assert decode(pack(hello)) == replace(VALUES["hello-beats"], beat_ms=0, patience_ms=0)
    assert set(MAPS["hello-beats"]) - set(hello) == {"beat", "patience"}
    assert set(MAPS["reply-beats"]) - set(MAPS["reply"]) == {"beat", "token", "doors"}
    assert set(MAPS["reject-again"]) - set(MAPS["reject"]) == {"again"}


def test_what_version_1_has_learnt_since_may_be_there_alone() -> None:
    assert decode(pack({**MAPS["hello"], "beat": 100})) == replace(HELLO, beat_ms=100)
    assert decode(pack({**MAPS["hello"], "patience": 0})) == HELLO
    assert decode(pack({**MAPS["hello"], "patience": 2**31 - 1})) == replace(HELLO, patience_ms=2**31 - 1)
    assert decode(pack({**MAPS["reply"], "token": ID})) == replace(VALUES["reply"], token=ID)
    assert decode(pack({**MAPS["reject"], "again": 60_000})) == replace(VALUES["reject"], again_ms=60_000)
    (first,), kinds = HELLO.ends, [[1, "eth0"], [2, "é"]]
    away = replace(first.port, gids=(first.port.gids[0], replace(first.port.gids[1], here=False)))
    told = {**MAPS["hello"], "port": {**MAPS["hello"]["port"], "away": [1, 200]}}
    assert decode(pack(told)) == replace(HELLO, ends=(first.at(away),))
    again = VALUES["hello-again"]
    assert isinstance(again, Hello)
    assert again.target is not None
    given = zip((again.target.connector_gid, again.target.listener_gid), kinds, strict=True)
    wanted = [GidKey(key.raw, GidType(kind), netdev) for key, (kind, netdev) in given if key]
    exact = replace(again, target=Target("rxe1", 254, *wanted))
    assert decode(pack({**MAPS["hello-again"], "kinds": kinds})) == exact
    assert msgpack.unpackb(encode(exact)) == {**MAPS["hello-again"], "kinds": kinds}
    wish = {**MAPS["reply"]["agree"], "probe": True, "pkey": None, "sl": 0, "tc": 0, "fl": 0, "mtu": 5}
    asked = {**MAPS["hello"], "wish": {**wish, "zero": ["tc", "later"]}}
    assert decode(pack(asked)) == replace(HELLO, wish=Wish(traffic_class=0))
    assert decode(pack({**MAPS["hello"], "wish": wish})) == replace(HELLO, wish=Wish()), "0 of an older peer is none"
    told = {**MAPS["reject"], "differences": ["sl", ""]}
    assert decode(pack(told)) == replace(VALUES["reject"], differences=("sl", ""))
    # of another message they are unknown keys
    assert decode(pack({**MAPS["bye"], "beat": "x", "again": b"y", "token": 0})) == VALUES["bye"]


def test_patience_beyond_what_the_wire_carries_is_cut() -> None:
    assert decode(encode(replace(HELLO, patience_ms=2**40))) == replace(HELLO, patience_ms=2**31 - 1)


@names
def test_unknown_keys_and_longer_rows_are_ignored(name: str) -> None:
    for path in [(), *places(MAPS[name])]:
        body = copy.deepcopy(MAPS[name])
        target = body
        for key in path:
            target = target[key]
        if isinstance(target, dict) and path != ("mem",):
            target["later"] = {"x": [1]}
        elif isinstance(target, list) and path[-1] not in ROWS:
            target.append({"x": [1]})
        assert decode(pack(body)) == VALUES[name], path


def test_integers_of_any_width_are_taken() -> None:
    packed = pack(MAPS["hello"])
    key = pack("sl")
    assert packed.count(key + b"\x03") == 1
    for wide in (b"\xcc\x03", b"\xcd\x00\x03", b"\xce\x00\x00\x00\x03", b"\xcf" + bytes(7) + b"\x03", b"\xd0\x03"):
        assert decode(packed.replace(key + b"\x03", key + wide)) == HELLO


def test_gid_types_and_queue_pair_types_that_are_not_known_yet_are_kept() -> None:
    body = changed(changed(MAPS["hello"], ("port", "gids", 0, 1), 77), ("qpt",), 99)
    found = decode(pack(body))
    assert isinstance(found, Hello)
    assert str(found.ends[0].port.gids[0].gid_type) == "unknown (77)"
    assert found.ends[0].qp_type == 99


# ---- what a peer sends is not trusted


@given(st.binary(max_size=200))
@settings(max_examples=60)
@example(b"")
@example(b"GET / HTTP/1.1\r\n\r\n")
@example(b"\xff")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xd6\xff\xff\xff\xff\xff")
@example(b"\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
def test_arbitrary_bytes_do_no_harm(frame: bytes) -> None:
    survives(frame)


@given(values)
@settings(max_examples=60)
def test_arbitrary_values_do_no_harm(value: Any) -> None:
    survives(pack(value))
    survives(pack({"v": 1, "t": "hello", "id": ID, "qps": value, "port": value, "mem": value}))


@given(st.sampled_from(PLACES), values)
@settings(max_examples=150)
def test_arbitrary_values_in_any_place_of_a_message_do_no_harm(place: tuple[str, tuple[Any, ...]], new: Any) -> None:
    name, path = place
    survives(pack(changed(MAPS[name], path, new)))


def test_the_kinds_of_two_gids_count_for_nothing_where_there_is_one() -> None:
    for place in (2, 3):
        survives(pack(changed(MAPS["hello-target"], ("want", place), None)))


@names
def test_any_changed_byte_does_no_harm(name: str) -> None:
    frame = read(name)
    inside = range(frame.find(bytes(range(64))) + 64, frame.rfind(bytes(range(192, 256))))  # private data: any will do
    for at in set(range(len(frame))) - set(inside if len(frame) > 4096 else ()):
        for bits in (0x01, 0x80, 0xFF):
            survives(frame[:at] + bytes([frame[at] ^ bits]) + frame[at + 1 :])


@names
def test_every_truncation_and_every_excess_is_refused(name: str) -> None:
    frame = read(name)
    for size in range(len(frame)):
        if size < 1000 or size > len(frame) - 1000 or size % 100 == 0:
            refusal(frame[:size])
    for more in (b"\x00", b"\xc0", frame):
        assert "not a message" in refusal(frame + more)


#: keys that a peer of an older version does not send
OPTIONAL = {"doors", "beat", "patience", "token", "again", "ask", "lost", "kinds", "away", "zero", "differences"}


def optional(name: str, path: tuple[Any, ...]) -> bool:
    """Whether a message is valid without the value: one entry more or less of a list, a region, or what is newer."""
    if (name, *path) == ("resume", "token"):
        return False
    return (
        path[-1] in OPTIONAL or tuple(path[-2:]) == ("agree", "probe") or (len(path) > 1 and path[-2] in ("mem", *ROWS))
    )


@names
def test_every_value_that_is_missing_is_refused(name: str) -> None:
    for path in places(MAPS[name]):
        body = changed(MAPS[name], path, ...)
        if optional(name, path) and (path[0] != "qps" or body["qps"]):
            assert decode(pack(body)) != VALUES[name], path
        elif isinstance(path[-1], str) and path != ("v",):
            assert f"{path[-1]} is missing" in refusal(pack(body), path)
        else:
            refusal(pack(body), path)


#: a value of each kind that MessagePack has
KINDS: list[Any] = [None, True, 7, 1.5, "text", b"bytes", [], {}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)]
NONE = type(None)
#: the places that take more than one kind; all others take what the vector has
TAKES = {
    ("wish", "pkey"): {int, NONE}, ("agree", "cg"): {list, NONE}, ("agree", "lg"): {list, NONE},
    ("want",): {list, NONE}, ("want", 2): {bytes, NONE}, ("want", 3): {bytes, NONE}, ("prev",): {bytes, NONE},
}  # fmt: skip


@names
def test_every_value_of_another_type_is_refused(name: str) -> None:
    for path in places(MAPS[name]):
        target = MAPS[name]
        for key in path:
            target = target[key]
        takes = TAKES.get(path, {type(target)})
        for wrong in KINDS:
            # what is of the right kind may still be too short: 16 bytes are due, or an entry of several values
            short = path[0] in ("prev", "want", "token") and wrong in (b"bytes", [])
            few = path == ("beat",) and wrong == 7  # at least 100 ms
            if type(wrong) not in takes or short or few:
                refusal(pack(changed(MAPS[name], path, wrong)), path, wrong)


OUT_OF_RANGE = [
    ("hello", ("qpt",), [-1, 256]),
    ("hello", ("qps", 0, 0), [-1, 0, 2**24, 2**64 - 1]),
    ("hello", ("qps", 0, 1), [-1, 2**24]),
    ("hello", ("qps", 0, 2), [-1, 2**32]),
    ("hello", ("port", "num"), [0, 255]),
    ("hello", ("port", "ll"), [-1, 256]),
    ("hello", ("port", "lid"), [-1, 2**16]),
    ("hello", ("port", "mtu"), [-1, 0, 6]),
    ("hello", ("port", "pkeys", 0), [-1, 2**16]),
    ("hello", ("port", "ird"), [-1, 256]),
    ("hello", ("port", "ord"), [-1, 256]),
    ("hello", ("port", "gids", 0, 0), [b"", bytes(16), bytes(15), bytes(17)]),
    ("hello", ("port", "gids", 0, 2), [-1, 256]),
    ("hello", ("port", "gids", 0, 3), ["x" * 65]),
    ("hello", ("port", "dev"), ["x" * 65]),
    ("hello", ("rsz",), [-1, 2**31 + 1]),
    ("hello", ("mem", "ring", 0), [-1]),
    ("hello", ("mem", "ring", 1), [-1]),
    ("hello", ("mem", "ring", 2), [-1, 2**32]),
    ("hello", ("mem",), [{"x" * 257: [1, 2, 3]}, {b"ring": [1, 2, 3]}]),
    ("hello", ("wish", "mtu"), [0, 6]),
    ("hello", ("wish", "sl"), [-1, 16]),
    ("hello", ("wish", "tc"), [-1, 256]),
    ("hello", ("wish", "fl"), [-1, 2**20]),
    ("hello", ("wish", "pkey"), [-1, 0, 2**16]),
    ("hello", ("data",), [bytes(4097)]),
    ("hello", ("prev",), [b"", bytes(15), bytes(17)]),
    ("hello-again", ("want",), [[], ["rxe0"], ["rxe0", 1], ["rxe0", 1, None]]),
    ("hello-again", ("want", 0), ["x" * 65]),
    ("hello-target", ("kinds",), [[], [[2, ""]]]),
    ("hello-target", ("port", "away", 0), [-1, 256]),
    ("hello-target", ("kinds", 0), [[], [2]]),
    ("hello-target", ("kinds", 1, 1), ["x" * 65]),
    ("hello-again", ("want", 1), [-1, 0, 255]),
    ("hello-again", ("want", 2), [b"", bytes(15), bytes(17)]),
    ("hello-again", ("want", 3), [b"", bytes(15), bytes(17)]),
    ("reply", ("data",), [bytes(4097)]),
    ("reply", ("ports", 1, "num"), [0, 255]),
    ("reject-ports", ("ports", 0, "gids", 0, 0), [b"", bytes(16), bytes(17)]),
    ("reply", ("agree", "mtu"), [0, 6]),
    ("reply", ("agree", "cg", 0), [b"", bytes(16), bytes(15), bytes(17)]),
    ("reply", ("agree", "lg", 0), [b"", bytes(16), bytes(15), bytes(17)]),
    ("reply", ("agree", "sl"), [-1, 16]),
    ("reply", ("agree", "pkey"), [-1, 0, 0x8000, 0xFFFF]),
    ("reject", ("errno",), [-1, 4096]),
    ("reject", ("stage",), ["x" * 65]),
    ("reject", ("why",), ["x" * 2049]),
    ("bye", ("why",), ["x" * 2049]),
    ("bye-lost", ("lost",), [0, b"", None]),
    ("ready", ("id",), [b"", bytes(15), bytes(17)]),
    ("ready-doors", ("doors",), [[["hello", 0]] * 65]),
    ("reply-doors", ("doors", 0, 0), ["x" * 17]),
    ("proof-doors", ("doors", 0, 1), [-1, 2**53 + 1]),
    ("hello-beats", ("beat",), [-1, 0, 1, 99, 60_001, 2**64 - 1]),
    ("hello-beats", ("patience",), [-1, 2**31, 2**64 - 1]),
    ("reply-beats", ("beat",), [-1, 0, 99, 60_001]),
    ("reply-beats", ("token",), [b"", bytes(15), bytes(17)]),
    ("reject-again", ("again",), [-1, 60_001]),
]


@pytest.mark.parametrize(("name", "path", "wrong"), OUT_OF_RANGE, ids=lambda value: ".".join(map(str, value))[:20])
def test_every_value_out_of_range_is_refused(name: str, path: tuple[Any, ...], wrong: list[Any]) -> None:
    for value in wrong:
        assert "invalid" in refusal(pack(changed(MAPS[name], path, value)))


@pytest.mark.parametrize("kind", ["", "Ready", "ping", "hello2", "\x1b[31m", "x" * 1000])
@pytest.mark.parametrize("name", ["ready", "hello", "reject-ports"])
def test_a_message_of_an_unknown_type_is_ignored_whatever_else_it_says(kind: str, name: str) -> None:
    assert decode(pack({**MAPS[name], "t": kind})) is None
    assert decode(pack({"v": 1, "t": kind, "id": ID, "later": {"x": [1]}})) is None


def test_of_an_unknown_type_the_frame_must_be_one_of_this_protocol_all_the_same() -> None:
    assert "id has 15 bytes" in refusal(pack({"v": 1, "t": "ping", "id": bytes(15)}))
    assert "id is missing" in refusal(pack({"v": 1, "t": "ping"}))
    assert "version 2" in refusal(pack({"v": 2, "t": "ping", "id": ID}))
    for kind in (b"ping", 7, None, ["ping"]):
        assert "t is a " in refusal(pack({"v": 1, "t": kind, "id": ID}))


@pytest.mark.parametrize("version", [0, 2, -1, 2**64 - 1, "1", b"1", True, 1.0, None, [1], {}])
def test_another_version_is_refused_with_both_versions(version: Any) -> None:
    words = refusal(pack({**MAPS["ready"], "v": version}))
    assert "the peer speaks version" in words
    assert "this side 1. Install the same major version" in words


@pytest.mark.parametrize("value", [None, 1, "text", [], [1], {}, {"t": "ready", "id": ID}, {"V": 1}])
def test_what_has_no_version_is_refused_as_such(value: Any) -> None:
    assert refusal(pack(value)) == "decode: the peer's frame has no version. Is it rdmaconnect on that port?"


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 1020, 1100, 100_000])
@pytest.mark.parametrize(
    "path", [("v",), ("t",), ("qps", 0), ("port", "pkeys", 0), ("port", "gids", 0), ("mem", "ring")]
)
def test_deeply_nested_values_are_refused(depth: int, path: tuple[Any, ...]) -> None:
    mark = b"\xa6MARKER"
    frame = pack(changed(MAPS["hello"], path, "MARKER")).replace(mark, b"\x91" * depth + b"\xc0")
    refusal(frame)


def test_map_keys_that_are_no_text_are_refused() -> None:
    for key in (1, None, 1.5, True):
        refusal(pack({**MAPS["ready"], key: 1}))


def test_a_frame_may_be_as_long_as_the_cap_and_no_longer() -> None:
    frame = pack({**MAPS["ready"], "pad": b""})
    pad = bytes(MAX_FRAME - len(frame) - 3)
    longest = pack({**MAPS["ready"], "pad": pad})
    assert MAX_FRAME == 524288
    assert len(longest) == MAX_FRAME
    assert decode(longest) == Ready(ID)
    words = refusal(pack({**MAPS["ready"], "pad": pad + b"x"}))
    assert words == f"decode: the peer's frame has {MAX_FRAME + 1} bytes, at most {MAX_FRAME} are taken."


@pytest.mark.parametrize(("count", "fits"), [(1, True), (wire.MAX_QPS, True), (0, False), (wire.MAX_QPS + 1, False)])
def test_one_hello_carries_up_to_4096_queue_pairs(count: int, fits: bool) -> None:
    assert wire.MAX_QPS == 4096
    frame = pack(changed(MAPS["hello"], ("qps",), [[number + 1, number, 0] for number in range(count)]))
    if fits:
        found = decode(frame)
        assert isinstance(found, Hello)
        assert [end.qp_num for end in found.ends] == list(range(1, count + 1))
        assert decode(encode(found)) == found
    else:
        assert f"qps has {count} entries: 1 to 4096 are allowed" in refusal(frame)


@pytest.mark.parametrize(
    ("path", "entry"),
    [(("port", "gids"), [bytes(15) + b"\x01", 2, 0, ""]), (("port", "pkeys"), 1)],
)
def test_tables_have_at_most_256_entries(path: tuple[Any, ...], entry: Any) -> None:
    assert decode(pack(changed(MAPS["hello"], path, [entry] * 256)))
    assert f"{path[-1]} has 257 entries: 0 to 256 are allowed" in refusal(
        pack(changed(MAPS["hello"], path, [entry] * 257))
    )


@pytest.mark.parametrize("name", ["reply", "reject"])
def test_at_most_16_ports_are_offered(name: str) -> None:
    port = MAPS["hello"]["port"]
    found = decode(pack(changed(MAPS[name], ("ports",), [port] * 16)))
    assert isinstance(found, Reply | Reject)
    assert len(found.ports) == 16
    assert "ports has 17 entries: 0 to 16 are allowed" in refusal(pack(changed(MAPS[name], ("ports",), [port] * 17)))


def test_at_most_256_regions_are_named() -> None:
    region = {str(i): [1, 2, 3] for i in range(256)}
    assert decode(pack(changed(MAPS["hello"], ("mem",), region)))
    assert "mem has 257 entries" in refusal(pack(changed(MAPS["hello"], ("mem",), {**region, "one": [1, 2, 3]})))


def test_what_a_peer_says_can_be_printed() -> None:
    evil = "\x1b[31m\r\nrdmaconnect: \u202egone\x00"
    reject = decode(pack({**MAPS["reject"], "why": evil, "stage": evil}))
    assert reject == Reject(ID, "?[31m??rdmaconnect: ?gone?", 110, "?[31m??rdmaconnect: ?gone?")
    for path in (("t",), ("v",), ("port", "dev"), ("mem",)):
        new: Any = {evil: 1} if path == ("mem",) else evil
        survives(pack(changed(MAPS["hello"], path, new)))
    hello = decode(pack(changed(MAPS["hello"], ("port", "dev"), evil)))
    assert isinstance(hello, Hello)
    assert str(hello.ends[0].port).isprintable()


def test_a_message_shows_no_keys() -> None:
    assert HELLO.regions["ring"].rkey == 0xDEADBEEF
    assert str(0xDEADBEEF) not in repr(HELLO)


# ---- what this side sends


def test_long_reasons_are_cut_so_that_the_peer_takes_them() -> None:
    assert decode(encode(Reject(ID, "s" * 99, 5, "w" * 9999))) == Reject(ID, "s" * 64, 5, "w" * 2048)
    assert decode(encode(Bye(ID, "w" * 9999))) == Bye(ID, "w" * 2048)


@pytest.mark.parametrize("number", [-2, 4096, 2**70])
def test_an_errno_that_is_none_does_not_keep_a_reject_from_being_read(number: int) -> None:
    assert decode(encode(Reject(ID, "asked", number, "why"))) == Reject(ID, "asked", 0, "why")
    for good in (0, 1, 4095):
        assert decode(encode(Reject(ID, "asked", good, "why"))) == Reject(ID, "asked", good, "why")


def test_text_that_utf8_cannot_carry_is_replaced() -> None:
    assert decode(encode(Reject(ID, "asked", 2, "open /tmp/\udc80"))) == Reject(ID, "asked", 2, "open /tmp/?")


@pytest.mark.parametrize("name", [1, None, b"ring", "x" * 257, "a\nb", "\udc80"])
def test_a_region_with_a_name_that_the_peer_would_refuse_is_not_sent(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^a region's name is .*: give printable text of at most 256 characters$"):
        encode(replace(HELLO, regions={name: RemoteRegion(1, 2, 3)}))


def test_more_regions_than_the_peer_takes_are_not_sent() -> None:
    many = {str(i): RemoteRegion(i, i, i) for i in range(257)}
    with pytest.raises(ValueError, match=r"^there are 257 regions: at most 256 may be named$"):
        encode(replace(HELLO, regions=many))
    many.popitem()
    many.popitem()
    many["x" * 256] = RemoteRegion(1, 2, 3)
    assert decode(encode(replace(HELLO, regions=many))) == replace(HELLO, regions=many)


def test_more_private_data_than_the_peer_takes_is_not_sent() -> None:
    assert decode(encode(replace(HELLO, private_data=bytes(4096)))) == replace(HELLO, private_data=bytes(4096))
    with pytest.raises(ValueError, match=r"^private_data is 4097 bytes long: at most 4096 may be sent$"):
        encode(replace(HELLO, private_data=bytes(4097)))


def test_a_message_longer_than_the_cap_is_not_sent() -> None:
    regions = {f"{i}{'💩' * 250}": RemoteRegion(2**63, 2**31, 2**63) for i in range(256)}
    many = tuple(replace(LARGEST, qp_num=number, qkey=2**31) for number in range(2**20, 2**20 + 4096))
    reply = VALUES["reply"]
    assert isinstance(reply, Reply)
    assert encode(replace(reply, ends=many, regions=regions))
    with pytest.raises(ValueError, match=f"^the reply is [0-9]+ bytes long: at most {MAX_FRAME} may be sent$"):
        encode(replace(reply, ends=many, regions=regions, ports=(LARGEST.port,) * 16))


#: as many stages as there may be
FULL = (("x" * 16, 2**53),) * 64


def test_the_largest_port_fits_into_a_frame_with_all_its_queue_pairs() -> None:
    many = tuple(replace(LARGEST, qp_num=2**24 - 1, psn=2**24 - 1, qkey=2**32 - 1) for _ in range(4096))
    target = Target("x" * 64, 254, *[GidKey(bytes(16), GidType.ROCE_V2, "n" * 64)] * 2)
    hello = Hello(ID, many, Wish(), {}, bytes(4096), bytes(16), target, True, 60_000, 2**31 - 1)
    assert len(encode(hello)) <= MAX_FRAME
    entry = LARGEST.port.gids[0]
    agreement = Agreement(entry, entry, LARGEST.port.active_mtu, 15, 255, 2**20 - 1, 0x7FFF)
    reply = Reply(ID, many, agreement, {}, bytes(4096), (LARGEST.port,) * 16, FULL, bytes(16), 60_000)
    assert len(encode(reply)) <= MAX_FRAME
    assert len(encode(Reject(ID, "x" * 64, 4095, "漢" * 2048, (LARGEST.port,) * 16, 60_000))) <= MAX_FRAME


def test_an_answer_that_says_too_much_is_cut() -> None:
    long = Answer(ID, "x" * 999, (Remark("fail" * 9, "y" * 99, "z" * 9999, "w" * 9999),) * 99, (LARGEST.port,) * 16)
    frame = encode(long)
    assert len(frame) <= MAX_FRAME
    cut = decode(frame)
    assert isinstance(cut, Answer)
    assert [len(text) for text in cut.remarks[0]] == [16, 64, 512, 512]
    assert (len(cut.host), len(cut.remarks), len(cut.ports)) == (256, 32, 16)


def test_a_part_that_was_read_before_is_not_taken_for_one_that_only_compares_equal() -> None:
    """The parts that a peer repeats are remembered by their bytes: 1 is not True, and 1.0 is not 1."""
    body = copy.deepcopy(MAPS["hello"])
    assert decode(pack(body)) == HELLO
    for where, other in ((("wish", "probe"), 1), (("wish", "sl"), 0.0), (("port", "num"), 1.0), (("port", "grh"), 0)):
        changed = copy.deepcopy(body)
        changed[where[0]][where[1]] = other
        assert f"{where[1]} is a {type(other).__name__}" in refusal(pack(changed), where)


def test_of_many_rows_the_one_that_is_wrong_is_named() -> None:
    body = copy.deepcopy(MAPS["hello-many"])
    for wrong, words in (([1, 2], "an entry is list: 3 values are due"), ([1, "x", 2], "entry is a str, not a int")):
        changed = copy.deepcopy(body)
        changed["qps"][-1] = wrong
        assert words in refusal(pack(changed), wrong)
    body["qps"][-1] += ["of a later version"]
    assert decode(pack(body)) == VALUES["hello-many"]
