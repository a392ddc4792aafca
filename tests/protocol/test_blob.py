"""The bytes of an end: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import zlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from samples import IDS, TEXTS, V1, V2, end, ends, gid, infiniband, private, regions, roce, wishes

from rdmaconnect.agreement.endpoint import Gid, PortAddress, RemoteRegion
from rdmaconnect.agreement.path import Wish
from rdmaconnect.errors import AuthenticationError, RemoteProtocolError
from rdmaconnect.protocol import blob as module
from rdmaconnect.protocol.blob import SMALL_BLOB, Blob, connection_id, open_blob, seal, shortened
from rdmaconnect.protocol.messages import Hello

KEY, OTHER = b"k" * 32, b"o" * 32
ID, NOW = bytes(range(16)), 1_800_000_000
keys = st.none() | st.binary(min_size=32, max_size=32)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    """An end with several ports: they share all but where they are."""
    ident, wish, data = draw(IDS), draw(wishes), draw(private)
    first = draw(ends().filter(lambda some: some[0].port.port_num < 250))
    hellos = [Hello(ident, first, wish, draw(regions), data)]
    for number in range(draw(st.integers(0, 3))):
        port, more = replace(draw(ends())[0].port, port_num=250 + number), draw(regions)
        hellos.append(Hello(ident, tuple(end.at(port) for end in first), wish, more))
    made = draw(st.integers(0, 2**40))
    return Blob(ident, made, made + draw(st.integers(1, 2**32)), draw(TEXTS), tuple(hellos))


def one(*ports: PortAddress, **fields: object) -> Blob:
    hellos = tuple(Hello(ID, (end(port),), Wish(), {}) for port in ports or (roce(gid("10.0.0.1")),))
    return replace(Blob(ID, NOW, NOW + 600, "", hellos), **fields)


@given(blobs(), keys)
def test_what_goes_in_comes_out(blob: Blob, key: bytes | None) -> None:
    assert open_blob(seal(blob, key), key) == blob


@pytest.mark.parametrize("key", [None, KEY])
def test_every_flipped_bit_is_refused(key: bytes | None) -> None:
    data = seal(one(tag="ring"), key)
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(RemoteProtocolError):
            open_blob(bytes(flipped), key)


@pytest.mark.parametrize("key", [None, KEY])
def test_every_truncation_and_every_addition_is_refused(key: bytes | None) -> None:
    data = seal(one(), key)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError, match=r"truncated|not an end's"):
            open_blob(data[:size], key)
    for more in (b"\0", b"\n", data):
        with pytest.raises(RemoteProtocolError, match=f"too long: {len(data) + len(more)} of {len(data)}"):
            open_blob(data + more, key)


@given(blobs(), st.integers(0), st.integers(1, 255), keys)
def test_no_changed_byte_is_taken(blob: Blob, at: int, by: int, key: bytes | None) -> None:
    data = bytearray(seal(blob, key))
    data[at % len(data)] ^= by
    with pytest.raises(RemoteProtocolError):
        open_blob(bytes(data), key)


@given(st.binary(max_size=200), keys)
def test_what_is_no_end_is_refused_in_words(data: bytes, key: bytes | None) -> None:
    for start in (b"", b"RDMB", seal(one(), key)[:14]):
        with pytest.raises((RemoteProtocolError, AuthenticationError)):
            open_blob(start + data, key)


def resealed(data: bytes, key: bytes | None, version: int = 1, body: bytes | None = None) -> bytes:
    """The same bytes of one who knows the secret and means no good."""
    packed = data[14 + (0 if key is None else 32) :] if body is None else body
    size = 14 + (0 if key is None else 32) + len(packed)
    head = b"RDMB" + bytes([version, key is not None]) + size.to_bytes(4, "big")
    rest = (b"" if key is None else module._mac(key, head, packed)) + packed
    return head + module._crc(head, rest) + rest


def test_the_version_is_told_before_anything_else_is_asked() -> None:
    data = resealed(seal(one(), None), None, version=2)
    with pytest.raises(RemoteProtocolError, match="of version 2, this side knows 1"):
        open_blob(data, KEY)


@pytest.mark.parametrize(
    ("sealed", "opened", "words"),
    [
        (KEY, OTHER, "by another secret, or somebody has changed them"),
        (KEY, None, "by a secret, and this end has none"),
        (None, KEY, "are not authenticated, and this end has a secret"),
    ],
)
def test_a_wrong_secret_is_no_damage(sealed: bytes | None, opened: bytes | None, words: str) -> None:
    with pytest.raises(AuthenticationError, match=words):
        open_blob(seal(one(), sealed), opened)


def test_who_changes_it_and_mends_the_checksum_needs_the_secret() -> None:
    data, evil = seal(one(), KEY), zlib.compress(b"evil")
    head, rest = data[:6] + (46 + len(evil)).to_bytes(4, "big"), data[14:46] + evil
    with pytest.raises(AuthenticationError):
        open_blob(head + module._crc(head, rest) + rest, KEY)


def body_of(blob: Blob) -> dict[str, object]:
    raw: dict[str, object] = msgpack.unpackb(zlib.decompress(seal(blob, None)[14:]))
    return raw


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": b"short"}, "id has 5 bytes"),
        ({"ports": []}, "ports has 0 entries: 1 to 8"),
        ({"until": -1}, "until is -1"),
        ({"made": "now"}, "made is a str"),
        ({"tag": "x" * 257}, "tag has 257 characters"),
        ({"tag": None}, "tag is a NoneType"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, object], words: str) -> None:
    body = zlib.compress(msgpack.packb(body_of(one()) | change))
    with pytest.raises(RemoteProtocolError, match=words):
        open_blob(resealed(b"", None, body=body), None)


def test_ports_that_are_no_ports_of_one_end_are_refused() -> None:
    many = body_of(one(*[roce(gid("10.0.0.1"))] * 8))
    body = zlib.compress(msgpack.packb(many | {"ports": many["ports"] * 2}))  # type: ignore[operator]
    with pytest.raises(RemoteProtocolError, match="ports has 16 entries"):
        open_blob(resealed(b"", None, body=body), None)
    two = one(roce(gid("10.0.0.1")), roce(gid("10.0.1.1")))
    unlike = replace(two, hellos=(two.hellos[0], replace(two.hellos[1], wish=Wish(sl=3))))
    with pytest.raises(RemoteProtocolError, match="differ in more than where they are"):
        open_blob(seal(unlike, None), None)
    with pytest.raises(RemoteProtocolError, match="two of its ports have one name"):
        open_blob(seal(two, None), None)
    crowded = one(roce(*(gid(f"10.0.0.{n}", gid_index=n) for n in range(1, 18))))
    with pytest.raises(RemoteProtocolError, match="more than 16 GIDs"):
        open_blob(seal(crowded, None), None)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    assert len(bomb) < 70_000
    with pytest.raises(RemoteProtocolError, match="more than 524288 bytes"):
        open_blob(resealed(b"", None, body=bomb), None)
    with pytest.raises(RemoteProtocolError, match="too many arrays"):
        open_blob(resealed(b"", None, body=zlib.compress(b"\x90" * (512 << 10))), None)


def test_it_expires_by_the_clock_that_is_handed_in() -> None:
    blob = one(until=NOW + 60)
    blob.check_time(NOW + 60)
    with pytest.raises(RemoteProtocolError, match=r"expired 5 s ago, 60 s after they were made"):
        blob.check_time(NOW + 65)
    replace(blob, until=0).check_time(NOW + 1e9)


@pytest.mark.parametrize(("name", "key"), [("blob", None), ("blob-secret", KEY)])
def test_bytes_of_this_version_are_read_for_ever(name: str, key: bytes | None) -> None:
    data = bytes.fromhex((ROOT / f"tests/data/{name}.hex").read_text())
    board = {"board": RemoteRegion(0x7F0000001000, 0x1234, 64)}
    ports = roce(gid("10.0.0.1"), gid("fe80::1", V1, 1)), infiniband(7)
    hellos = tuple(Hello(ID, (end(port),), Wish(sl=3), board) for port in ports)
    told = Blob(ID, NOW, NOW + 600, "ring 1", (replace(hellos[0], private_data=b"me"), hellos[1]))
    assert open_blob(data, key) == told
    assert open_blob(seal(told, key), key) == told


# ---- the size


def server(number: int, addresses: int, chance: bytes) -> PortAddress:
    """A port as large servers have them: each address with both types of RoCE."""
    raws = [bytes.fromhex("fe80000000000000") + chance[:8], bytes(10) + b"\xff\xff\x0a" + chance[8:11]]
    raws += [bytes.fromhex("20010db8") + chance[n : n + 12] for n in range(11, 11 + addresses)]
    pairs = [(Gid(raw), kind) for raw in raws[:addresses] for kind in (V1, V2)]
    gids = [replace(gid("::1", kind, at, f"ens{number}f0np0"), gid=one) for at, (one, kind) in enumerate(pairs)]
    rd = {"max_rd_atomic": 16, "max_dest_rd_atomic": 16, "max_msg_sz": 1 << 31}
    return roce(*gids, device=f"mlx5_{number}", **rd)


@given(st.integers(1, 20), st.binary(min_size=8 * 40, max_size=8 * 40), st.none() | st.just(KEY))
def test_eight_ports_take_a_kibibyte(addresses: int, chance: bytes, key: bytes | None) -> None:
    ports = [server(n, addresses, chance[40 * n : 40 * n + 40]) for n in range(8)]
    blob = shortened(one(*ports), key)
    data = seal(blob, key)
    assert len(data) <= SMALL_BLOB
    assert open_blob(data, key) == blob
    for whole, told in zip(ports, (told.port for told in blob.ends), strict=True):
        assert told == replace(whole, gids=told.gids)
        assert V2 in {entry.gid_type for entry in told.gids}
        assert set(told.gids) <= set(whole.gids)


def test_the_least_useful_are_left_out_first() -> None:
    away, v1 = replace(gid("10.0.0.1", V2, 0), here=False), gid("10.0.0.2", V1, 1)
    local, good = gid("fe80::2", V2, 2), gid("10.0.0.2", V2, 3)
    for count, left in ((4, [away, v1, local, good]), (3, [v1, local, good]), (2, [local, good]), (1, [good])):
        told = module._with_gids(one(roce(away, v1, local, good)), count)
        assert list(told.ends[0].port.gids) == left


def test_memory_and_data_come_on_top_and_leave_the_addresses_alone() -> None:
    port = server(0, 4, bytes(range(40)))
    hello = Hello(ID, (end(port),), Wish(), {"board": RemoteRegion(1 << 40, 7, 1 << 30)}, bytes(range(256)) * 16)
    blob = shortened(one(hellos=(hello,)), KEY)
    assert blob.hellos == (hello,)
    assert len(seal(blob, KEY)) < SMALL_BLOB + 4096


def test_a_port_of_infiniband_needs_its_lid_alone() -> None:
    blob = one(infiniband(lid=7))
    assert open_blob(seal(blob, None), None).ends[0].port.lid == 7
    assert len(seal(blob, None)) < 300


# ---- the id


@given(IDS, IDS, keys)
def test_both_ends_know_the_connection_by_one_id(a: bytes, b: bytes, key: bytes | None) -> None:
    assert connection_id(a, b, key) == connection_id(b, a, key)
    assert len(connection_id(a, b, key)) == 16


def test_the_id_is_nobody_elses() -> None:
    a, b, c = bytes(16), bytes([1]) * 16, bytes([2]) * 16
    assert len({connection_id(*pair, key) for pair in ((a, b), (a, c), (b, c)) for key in (None, KEY, OTHER)}) == 9
