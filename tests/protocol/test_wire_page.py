"""docs/wire.md and the codec say the same: each key, whether it must be there, its type and its range."""

from __future__ import annotations

import copy
import hashlib
import re
from typing import Any, NamedTuple

import msgpack
import pytest
from places import ROOT
from vectors import VALUES, read
from zmq.utils import z85

from rdmaconnect.errors import RemoteProtocolError
from rdmaconnect.exchange.curve import keys_for
from rdmaconnect.exchange.url import DEFAULT_PORT
from rdmaconnect.exchange.zmtp import HANDSHAKE
from rdmaconnect.protocol import codec, reading
from rdmaconnect.protocol.codec import decode

PAGE = (ROOT / "docs/wire.md").read_text(encoding="utf-8")
BODIES: dict[str, Any] = {name: msgpack.unpackb(read(name)) for name in VALUES}
TYPES = {body["t"] for body in BODIES.values()}

#: where in the vectors the parts of messages are: (vector, path)
PLACES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "port": ("hello-target", ("port",)),
    "wish": ("hello-target", ("wish",)),
    "agreement": ("reply-unproven", ("agree",)),
    "queue pair": ("hello", ("qps", 0)),
    "region": ("hello", ("mem", "ring")),
    "GID": ("hello", ("port", "gids", 0)),
    "stage": ("ready-doors", ("doors", 0)),
    "remark": ("answer", ("remarks", 0)),
}


class Row(NamedTuple):
    """One row of a table: of a map's key, or of a place in a row."""

    section: str
    key: Any
    must: bool
    kind: str
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.section}.{self.key}"


def sections() -> dict[str, str]:
    parts = re.split(r"^(###+) (.+)$", PAGE, flags=re.M)
    return {title: re.split(r"^## ", text, flags=re.M)[0] for title, text in zip(parts[2::3], parts[3::3], strict=True)}


def rows() -> list[Row]:
    found = []
    for title, text in sections().items():
        for line in re.findall(r"^\| (?:`\w+`|\d+) \|.*\|$", text, re.M):
            cells = [re.sub(r"\[([^\]]+)\]\(#[^)]+\)", r"\1", cell.strip()) for cell in line.split("|")[1:]]
            key, must, kind, span = cells[0].strip("`"), *cells[1:4]
            least, _, most = span.partition(" to ")
            ends = (int(least), int(most or least)) if span else (-1, -1)
            found.append(Row(title, int(key) if key.isdigit() else key, not must.startswith("no"), kind, *ends))
    return found


ROWS = rows()
EVERY = [row for row in ROWS if row.section == "every message"]
#: types of messages and parts -> their rows
TABLES = {title: [row for row in ROWS if row.section == title] for title in (*TYPES, *PLACES)}


def at(section: str, key: Any) -> tuple[str, tuple[Any, ...]]:
    """A vector that has a key of a section, and the path to it."""
    if section in PLACES:
        name, path = PLACES[section]
        return name, (*path, key)
    name = next(name for name, body in BODIES.items() if body["t"] == section and key in body)
    return name, (key,)


def with_value(row: Row, value: Any) -> bytes:
    """The vector with another value there; ``...`` takes it out."""
    name, path = at(row.section if row.section != "every message" else "hello", row.key)
    body = copy.deepcopy(BODIES[name])
    target = body
    for step in path[:-1]:
        target = target[step]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    packed: bytes = msgpack.packb(body)
    return packed


def value_of(row: Row) -> Any:
    name, path = at(row.section if row.section != "every message" else "hello", row.key)
    value = BODIES[name]
    for step in path:
        value = value[step]
    return value


def taken(frame: bytes) -> bool:
    try:
        return decode(frame) is not None
    except RemoteProtocolError:
        return False


# ---- what there is


def test_the_page_is_read() -> None:
    assert len(ROWS) > 80
    assert {row.kind.split()[0].strip(":") for row in ROWS} == {"int", "bin", "text", "bool", "array", "map"}


def test_its_links_lead_somewhere() -> None:
    anchors = {title.lower().replace(" ", "-") for title in re.findall(r"^##+ (.+)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:tests|rdmaconnect)/[\w./]+)`", PAGE))


def test_the_types_are_those_of_the_codec() -> None:
    titles = re.findall(r"^### (.+)$", PAGE.partition("## Messages")[2], re.M)
    assert titles[0] == "every message"
    assert set(titles[1 : titles.index("What they carry")]) == TYPES == set(codec._DECODERS)


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_the_keys_of_each_type_are_all_there(kind: str) -> None:
    seen = set().union(*(body for body in BODIES.values() if body["t"] == kind))
    assert [row.key for row in EVERY] == ["v", "t", "id"]
    assert {row.key for row in TABLES[kind]} == seen - {"v", "t", "id"}


@pytest.mark.parametrize("part", PLACES)
def test_the_keys_of_each_part_are_all_there(part: str) -> None:
    name, path = PLACES[part]
    body = BODIES[name]
    for step in path:
        body = body[step]
    if isinstance(body, dict):
        assert {row.key for row in TABLES[part]} == set(body) | ({"msz"} if part == "port" else set())
    else:
        assert [row.key for row in TABLES[part]] == list(range(len(body)))


def test_the_constants() -> None:
    told = dict(re.findall(r"^\| ([\w ]+) \| (\d+) \| [^|]*\|$", PAGE, re.M))
    constants = {
        "version": codec.VERSION, "TCP port": DEFAULT_PORT, "frame": codec.MAX_FRAME, "queue pairs": codec.MAX_QPS,
        "regions": codec.MAX_REGIONS, "ports": codec.MAX_PORTS,
    }  # fmt: skip
    assert {name: int(value) for name, value in told.items() if name in constants} == constants
    assert f"more than {reading.MAX_CONTAINERS} bytes that could begin one" in PAGE


def test_the_greeting_is_ours_byte_for_byte() -> None:
    (block,) = re.findall(r"^((?:    .+\n)+)", PAGE.partition("### CURVE")[0], re.M)
    told = b""
    for word in block.split():
        text, times = word.strip('"'), re.fullmatch(r"00\*(\d+)", word)
        told += text.encode() if word[0] == '"' else bytes(int(times[1])) if times else bytes.fromhex(word)
    assert told == HANDSHAKE


@pytest.mark.parametrize("listens", [True, False])
def test_the_keys_of_a_secret(listens: bool) -> None:
    role, secret = "listener" if listens else "connector", "correct horse battery staple"
    (n, r, p, size) = map(int, re.findall(rf'"rdmaconnect 1 {role}", +N = (\d+), r = (\d+), p = (\d+), (\d+)', PAGE)[0])
    raw = hashlib.scrypt(secret.encode(), salt=f"rdmaconnect 1 {role}".encode(), n=n, r=r, p=p, dklen=size)
    keys = keys_for(listens=listens, secret=secret)
    assert keys is not None
    assert keys.secret == z85.encode(raw)


# ---- whether it must be there, and what it can be

#: what a vector has
KNOWN = [row for row in ROWS if row.key != "msz"]
NUMBERS = [row for row in KNOWN if row.kind.startswith("int")]
LENGTHS = [row for row in KNOWN if row.least >= 0 and row not in NUMBERS]


@pytest.mark.parametrize("row", [row for row in KNOWN if isinstance(row.key, str)], ids=str)
def test_what_must_be_there_must_and_what_may_be_missing_may(row: Row) -> None:
    assert taken(with_value(row, ...)) is not row.must


@pytest.mark.parametrize("row", KNOWN, ids=str)
def test_another_type_is_refused(row: Row) -> None:
    assert not taken(with_value(row, 1.5))
    assert taken(with_value(row, None)) is ("or nil" in row.kind)


@pytest.mark.parametrize("row", NUMBERS, ids=str)
def test_the_ends_of_a_range_are_taken_and_no_more(row: Row) -> None:
    found = {value: taken(with_value(row, value)) for value in (row.least, row.most)}
    assert found == {row.least: True, row.most: True}
    outside = [value for value in (row.least - 1, row.most + 1) if -(2**63) <= value < 2**64]
    assert {value: taken(with_value(row, value)) for value in outside} == dict.fromkeys(outside, False)
    assert not taken(with_value(row, True))


@pytest.mark.parametrize("row", LENGTHS, ids=str)
def test_so_long_and_no_longer(row: Row) -> None:
    value = value_of(row)

    def sized(size: int) -> Any:
        if isinstance(value, dict):
            some = next(iter(value.values()), [0, 0, 0])
            return {f"{n}": some for n in range(size)}
        if isinstance(value, list):
            some = BODIES["hello"]["port"] if row.kind == "array of port" else 0
            return [(value or [some])[0]] * size
        return (b"\1" if row.kind.startswith("bin") else "x") * size

    assert taken(with_value(row, sized(row.most)))
    assert not taken(with_value(row, sized(row.most + 1)))
    if row.least:
        assert taken(with_value(row, sized(row.least)))
        assert not taken(with_value(row, sized(row.least - 1)))


@pytest.mark.parametrize("part", [name for name, rows_ in TABLES.items() if rows_ and rows_[0].key == 0])
def test_a_row_may_be_longer_and_not_shorter(part: str) -> None:
    name, path = PLACES[part]
    row = Row(part, path[-1], True, "", 0, 0)
    body = BODIES[name]
    for step in path:
        body = body[step]

    def frame(value: Any) -> bytes:
        changed = copy.deepcopy(BODIES[name])
        target = changed
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value
        packed: bytes = msgpack.packb(changed)
        return packed

    assert taken(frame([*body, "new"])), row
    assert not taken(frame(body[:-1])), row
