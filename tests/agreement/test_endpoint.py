"""The values that two ends tell each other: what they accept, what they say, how they are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import U64, end, gid, infiniband, roce

from rdmaconnect.abi import GidType, LinkLayer, Mtu, QpType
from rdmaconnect.agreement.endpoint import MTU_BYTES, Endpoint, Gid, GidEntry, PortAddress, RemoteRegion
from rdmaconnect.agreement.options import Options, Sizes, mtu_code

# ---- Gid


@pytest.mark.parametrize(
    ("text", "raw", "says"),
    [
        ("10.0.0.7", "00000000000000000000ffff0a000007", "::ffff:10.0.0.7"),
        ("::ffff:10.0.0.7", "00000000000000000000ffff0a000007", "::ffff:10.0.0.7"),
        ("fe80::a:1", "fe8000000000000000000000000a0001", "fe80::a:1"),
        ("fe80::1%eth0", "fe800000000000000000000000000001", "fe80::1"),
        ("2001:db8::1", "20010db8000000000000000000000001", "2001:db8::1"),
    ],
)
def test_a_gid_is_read_from_and_written_as_an_address(text: str, raw: str, says: str) -> None:
    assert Gid.parse(text).raw.hex() == raw
    assert str(Gid.parse(text)) == says


@given(st.binary(min_size=16, max_size=16))
def test_any_gid_survives_being_written_and_read(raw: bytes) -> None:
    assert Gid.parse(str(Gid(raw))).raw == raw


@pytest.mark.parametrize(
    ("text", "ipv4", "link_local", "loopback"),
    [
        ("10.0.0.1", True, False, False),
        ("169.254.9.9", True, True, False),
        ("127.0.0.1", True, False, True),
        ("fe80::1", False, True, False),
        ("febf::1", False, True, False),
        ("fec0::1", False, False, False),
        ("::1", False, False, True),
        ("2001:db8::1", False, False, False),
    ],
)
def test_the_scope_of_a_gid(text: str, ipv4: bool, link_local: bool, loopback: bool) -> None:
    found = Gid.parse(text)
    assert (found.is_ipv4, found.is_link_local, found.is_loopback) == (ipv4, link_local, loopback)
    assert not found.is_zero
    assert Gid(bytes(16)).is_zero


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [("10.0.0.1", "10.0.0.1", 128), ("10.0.0.1", "10.0.0.2", 126), ("10.0.0.1", "138.0.0.1", 96), ("::", "8000::", 0)],
)
def test_common_prefix_counts_leading_bits(a: str, b: str, bits: int) -> None:
    assert Gid.parse(a).common_prefix(Gid.parse(b)) == bits
    assert Gid.parse(b).common_prefix(Gid.parse(a)) == bits


@pytest.mark.parametrize("raw", [b"", bytes(15), bytes(17), "fe80::1", bytearray(16), None])
def test_a_gid_has_16_bytes(raw: Any) -> None:
    with pytest.raises(ValueError, match="give 16 bytes"):
        Gid(raw)


@pytest.mark.parametrize("text", ["", "localhost", "10.0.0", "10.0.0.1/24", "[::1]"])
def test_text_that_is_no_address_is_no_gid(text: str) -> None:
    with pytest.raises(ValueError, match="IPv4 or IPv6"):
        Gid.parse(text)


def test_gids_sort_and_hash_by_value() -> None:
    a, b = Gid.parse("10.0.0.1"), Gid.parse("10.0.0.2")
    assert sorted([b, a]) == [a, b]
    assert len({a, b, Gid(a.raw)}) == 2


def test_a_gid_entry_says_its_slot_value_and_type() -> None:
    assert str(gid("10.0.0.4", GidType.ROCE_V2, 3)) == "gid_index 3 (::ffff:10.0.0.4, RoCE v2)"
    assert str(gid("fe80::4", GidType.ROCE_V1)) == "gid_index 0 (fe80::4, RoCE v1)"
    assert gid("fe80::4", GidType(9)).type_words == "unknown (9)"
    for index in (-1, 256):
        with pytest.raises(ValueError, match=f"gid_index is {index}: give 0 to 255"):
            GidEntry(Gid.parse("fe80::1"), GidType.IB, index)


# ---- ranges, named


def options(**fields: Any) -> Options:
    return Options(**fields)


LIMITS = [
    *((options, name, *limits) for name, limits in {
        "port_num": (1, 254), "gid_index": (0, 255), "sl": (0, 15), "traffic_class": (0, 255),
        "flow_label": (0, 2**20 - 1), "pkey": (1, 0xFFFF), "timeout": (0, 31), "retry_cnt": (0, 7),
        "rnr_retry": (0, 7), "min_rnr_timer": (0, 31), "max_rd_atomic": (0, 255), "hop_limit": (1, 255),
        "recv_size": (1, 2**30), "recv_depth": (1, 2**15), "send_depth": (1, 2**15), "spin": (0, 2**31),
    }.items()),
    (end, "qp_num", 1, 2**24 - 1),
    (end, "psn", 0, 2**24 - 1),
    (end, "recv_size", 0, 2**31),
    (end, "qkey", 0, 2**32 - 1),
    (roce, "port_num", 1, 254),
    (roce, "lid", 0, 0xFFFF),
    (roce, "active_mtu", 1, 5),
    (roce, "max_rd_atomic", 0, 255),
    (roce, "max_dest_rd_atomic", 0, 255),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "least", "greatest"), LIMITS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_value_out_of_range_is_refused_by_name(make: Any, name: str, least: int, greatest: int) -> None:
    for value in (least, greatest):
        assert getattr(make(**{name: value}), name) == value
    for value in (least - 1, greatest + 1):
        with pytest.raises(ValueError, match=rf"^{name} is {value}: give {least} to {greatest}\b"):
            make(**{name: value})
    for wrong in ("1", 1.0, True, b"1"):
        with pytest.raises(TypeError, match=f"^{name} is {wrong!r}: give an integer"):
            make(**{name: wrong})


@pytest.mark.parametrize("pkey", [-1, 0x10000])
def test_a_partition_key_has_16_bits(pkey: int) -> None:
    assert roce(pkeys=(0, 0xFFFF)).pkeys == (0, 0xFFFF)
    with pytest.raises(ValueError, match=f"pkey is {pkey}: give 0 to 65535"):
        roce(pkeys=(0xFFFF, pkey))


def test_a_port_takes_256_gids_and_none_that_is_zero() -> None:
    many = tuple(gid("10.0.0.1", gid_index=i % 256) for i in range(257))
    assert len(roce(*many[:256]).gids) == 256
    with pytest.raises(ValueError, match="gids has 257 entries"):
        roce(*many)
    with pytest.raises(ValueError, match="none of them all zero"):
        roce(gid("::"))


def test_what_is_not_given_has_the_value_that_is_documented() -> None:
    assert dataclasses.asdict(Options()) == {
        "device": None, "port_num": None, "gid_index": None, "path_mtu": None, "sl": None,
        "traffic_class": None, "flow_label": None, "pkey": None, "timeout": None, "retry_cnt": None, "detect_s": None,
        "rnr_retry": 7, "min_rnr_timer": 12, "max_rd_atomic": None,
        "hop_limit": 64, "recv_size": None, "recv_depth": None, "send_depth": None,
            "max_inline_data": 64, "spin": 500,
            "probe": None,
    }  # fmt: skip
    port = PortAddress("rxe0", 1, LinkLayer.ETHERNET, 0, Mtu.MTU_1024)
    assert (port.gids, port.grh_required, port.pkeys) == ((), False, (0xFFFF,))
    assert (port.max_rd_atomic, port.max_dest_rd_atomic) == (1, 1)
    made = Endpoint(QpType.RC, 1, 2, port)
    assert (made.recv_size, made.qkey) == (0, 0)
    assert gid("::1", netdev="") == GidEntry(Gid.parse("::1"), GidType.ROCE_V2, 0)


def test_options_are_all_optional_and_unknown_ones_are_refused() -> None:
    assert Options().mtu is Mtu.MTU_4096
    assert Options(**dataclasses.asdict(Options())) == Options()
    with pytest.raises(TypeError, match="gid_idx"):
        Options(gid_idx=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "count", "sizes"),
    [
        ({}, 1, (65536, 16, 16)),
        ({}, 2, (16384, 4, 4)),
        ({}, 4096, (16384, 4, 4)),
        ({"recv_size": 1}, 1, (1, 16, 16)),
        ({"recv_size": 2**30, "recv_depth": 2**15, "send_depth": 1}, 1000, (2**30, 2**15, 1)),
        ({"send_depth": 9}, 3, (16384, 4, 9)),
    ],
)
def test_sizes_that_were_left_open_depend_on_how_many_are_made(
    given: dict[str, int], count: int, sizes: tuple[int, int, int]
) -> None:
    assert Options(**given).sizes(count) == Sizes(*sizes)
    assert Options(**given).sizes() == Options(**given).sizes(1)


def test_a_port_can_be_told_with_one_gid_or_none() -> None:
    made = roce(gid("10.0.0.1"), gid("10.0.0.2", gid_index=1), device="rxe7")
    assert made.only(made.gids[1]) == roce(made.gids[1], device="rxe7")
    assert made.only(None).gids == ()
    assert end(made).at(made.only(None)) == end(made.only(None))


@pytest.mark.parametrize("size", [256, 512, 1024, 2048, 4096])
def test_an_mtu_is_given_in_bytes(size: int) -> None:
    assert MTU_BYTES[Options(path_mtu=size).mtu] == size
    assert MTU_BYTES[mtu_code(size)] == size
    assert Options(path_mtu=size).mtu.name == f"MTU_{size}"


@pytest.mark.parametrize("size", [0, 5, 1500, 8192, -256, 1024.0, "1024", Mtu.MTU_1024])
def test_an_mtu_that_is_none_is_refused_with_those_there_are(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^path_mtu is .*: give 256, 512, 1024, 2048, 4096 bytes$"):
        Options(path_mtu=size)


@pytest.mark.parametrize("value", [roce(), infiniband(), end(), Options(), gid("::1"), RemoteRegion(1, 2, 3)])
def test_values_are_frozen_and_take_no_other_attributes(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 1)
    with pytest.raises((AttributeError, TypeError)):
        value.anything = 1
    assert hash(value) == hash(dataclasses.replace(value))


def test_an_end_and_a_port_say_who_they_are() -> None:
    assert str(end(roce(device="mlx5_0", port_num=2), qp_num=0x11C)) == "QP 0x00011c on mlx5_0 port 2"
    assert infiniband().link_layer is LinkLayer.INFINIBAND


# ---- RemoteRegion


def test_a_region_never_shows_its_key() -> None:
    region = RemoteRegion(addr=0x1000, rkey=0xDEADBEEF, length=64)
    for text in (repr(region), str(region), f"{region}"):
        assert str(0xDEADBEEF) not in text
        assert "deadbeef" not in text.lower()
    assert region.rkey == 0xDEADBEEF


def test_a_packed_region_is_addr_length_rkey_in_network_order() -> None:
    region = RemoteRegion(addr=0x0102030405060708, rkey=0xA1B2C3D4, length=0x1112131415161718)
    packed = region.to_bytes()
    assert RemoteRegion.from_bytes(packed) == region
    assert packed.hex() == "01020304050607081112131415161718a1b2c3d4"


@given(st.builds(RemoteRegion, U64, st.integers(0, 2**32 - 1), U64))
def test_any_region_survives_packing(region: RemoteRegion) -> None:
    packed = region.to_bytes()
    assert len(packed) == RemoteRegion.SIZE
    assert RemoteRegion.from_bytes(packed) == region


@pytest.mark.parametrize("size", [0, 19, 21])
def test_a_packed_region_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"is {size} bytes long: give 20"):
        RemoteRegion.from_bytes(bytes(size))


@pytest.mark.parametrize("fields", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**64)])
def test_a_region_of_more_bits_is_refused(fields: tuple[int, int, int]) -> None:
    assert RemoteRegion(2**64 - 1, 2**32 - 1, 2**64 - 1).slice(0, 0).addr == 2**64 - 1
    with pytest.raises(ValueError, match=r"^(addr|rkey|length) is "):
        RemoteRegion(*fields)


def test_a_slice_of_a_region_stays_inside() -> None:
    region = RemoteRegion(0x1000, 7, 100)
    assert region.slice(0, 100) == region
    assert region.slice(10, 90) == RemoteRegion(0x100A, 7, 90)
    assert region.slice(100, 0) == RemoteRegion(0x1064, 7, 0)
    for offset, length in ((0, 101), (100, 1), (-1, 5), (5, -1), (101, 0)):
        with pytest.raises(ValueError, match=f"{length} bytes at offset {offset}: the remote region has 100 bytes"):
            region.slice(offset, length)
