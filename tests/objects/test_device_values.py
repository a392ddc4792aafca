"""What a device says: every member of the C structs comes out, under its name, and what is not there as None."""

from __future__ import annotations

import dataclasses
import sys
from ctypes import sizeof
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect import abi
from rdmaconnect.abi import (
    AtomicCap,
    DeviceCapFlags,
    LinkLayer,
    OdpGeneralCaps,
    OdpTransportCaps,
    PciAtomicOpSize,
    PortCapFlags,
    PortState,
    QpType,
    RawPacketCaps,
    RxHashFields,
    RxHashFunctionFlags,
    TmCaps,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_port_attr,
)
from rdmaconnect.objects.device_attr import DeviceAttr, guid_text
from rdmaconnect.objects.port import LinkSpeed, LinkWidth, PhysState, Port

HEAD = [name for name, _ in ibv_device_attr._fields_]
PARTS = [name for name, _ in ibv_device_attr_ex._fields_ if name not in ("orig_attr", "comp_mask")]


def test_every_member_of_the_structs_has_a_field() -> None:
    fields = [field.name for field in dataclasses.fields(DeviceAttr)]
    assert fields[: len(HEAD)] == HEAD
    assert sorted(fields[len(HEAD) :]) == sorted(PARTS)


def test_numbers_come_out_as_they_went_in() -> None:
    attr = ibv_device_attr(fw_ver=b"1.2.3", atomic_cap=2, device_cap_flags=1 << 20 | 1 << 31)
    special = ("fw_ver", "node_guid", "sys_image_guid", "device_cap_flags", "atomic_cap")
    numbers = {name: i + 1 for i, name in enumerate(HEAD) if name not in special}
    for name, value in numbers.items():
        setattr(attr, name, value)
    found = DeviceAttr.of(attr)
    assert {name: getattr(found, name) for name in numbers} == numbers
    assert (found.fw_ver, found.atomic_cap) == ("1.2.3", AtomicCap.GLOB)
    assert found.device_cap_flags & DeviceCapFlags.XRC
    assert str(found.device_cap_flags) == "XRC|0x80000000"


def test_guids_are_numbers_in_host_order_and_are_written_as_everywhere() -> None:
    attr = ibv_device_attr(node_guid=int.from_bytes(bytes.fromhex("28e764fffe9a7ce4"), sys.byteorder))
    assert DeviceAttr.of(attr).node_guid == 0x28E764FFFE9A7CE4
    assert guid_text(0x28E764FFFE9A7CE4) == "28e7:64ff:fe9a:7ce4"


def test_without_the_extended_verb_the_extended_part_is_absent() -> None:
    found = DeviceAttr.of(ibv_device_attr(phys_port_cnt=2))
    assert {getattr(found, name) for name in PARTS} == {None}
    assert found.port_count == 2


def test_what_reads_as_zero_is_absent_and_what_does_not_is_there() -> None:
    assert {getattr(DeviceAttr.of_ex(ibv_device_attr_ex()), name) for name in PARTS} == {None}
    for name in PARTS:
        attr = ibv_device_attr_ex()
        place = getattr(ibv_device_attr_ex, name)
        raw = bytearray(bytes(attr))
        raw[place.offset] = 1
        found = DeviceAttr.of_ex(ibv_device_attr_ex.from_buffer(raw))
        assert [part for part in PARTS if getattr(found, part) is not None] == [name]


def test_the_parts_are_decoded() -> None:
    attr = ibv_device_attr_ex(
        completion_timestamp_mask=0xFFFF, hca_core_clock=1000, device_cap_flags_ex=1 << 34, max_wq_type_rq=5,
        raw_packet_caps=0b1010, max_dm_size=4096, xrc_odp_caps=1, phys_port_cnt_ex=300,
    )  # fmt: skip
    attr.orig_attr.phys_port_cnt = 255
    attr.odp_caps.general_caps, attr.odp_caps.per_transport_caps.ud_odp_caps = 3, 1 << 5
    attr.tso_caps.max_tso, attr.tso_caps.supported_qpts = 65536, 1 << QpType.RAW_PACKET | 1 << QpType.UD | 1 << 30
    attr.rss_caps.rx_hash_fields_mask, attr.rss_caps.rx_hash_function = 1 << 31 | 1, 1
    attr.packet_pacing_caps.qp_rate_limit_max, attr.packet_pacing_caps.supported_qpts = 7, 1 << QpType.RC
    attr.tm_caps.max_num_tags, attr.tm_caps.flags = 9, 1
    attr.cq_mod_caps.max_cq_count, attr.cq_mod_caps.max_cq_period = 10, 11
    attr.pci_atomic_caps.swap = 6
    found = DeviceAttr.of_ex(attr)
    odp, tso, rss, pacing, tm = (
        found.odp_caps, found.tso_caps, found.rss_caps, found.packet_pacing_caps, found.tm_caps
    )  # fmt: skip
    assert odp
    assert tso
    assert rss
    assert pacing
    assert tm
    assert odp.general_caps == OdpGeneralCaps.SUPPORT | OdpGeneralCaps.SUPPORT_IMPLICIT
    assert (odp.rc_odp_caps, odp.ud_odp_caps) == (OdpTransportCaps(0), OdpTransportCaps.SRQ_RECV)
    assert found.xrc_odp_caps == OdpTransportCaps.SEND
    assert tso.max_tso == 65536
    assert sorted(map(str, tso.supported_qpts)) == ["RAW_PACKET", "UD", "unknown (30)"]
    assert rss.rx_hash_fields_mask == RxHashFields.INNER | RxHashFields.SRC_IPV4
    assert rss.rx_hash_function == RxHashFunctionFlags.TOEPLITZ
    assert pacing.supported_qpts == {QpType.RC}
    assert (tm.max_num_tags, tm.flags) == (9, TmCaps.RC)
    assert found.cq_mod_caps
    assert dataclasses.astuple(found.cq_mod_caps) == (10, 11)
    assert found.pci_atomic_caps
    assert found.pci_atomic_caps.swap == PciAtomicOpSize(6)
    assert found.raw_packet_caps == RawPacketCaps.SCATTER_FCS | RawPacketCaps.DELAY_DROP
    assert found.device_cap_flags_ex == DeviceCapFlags.RAW_SCATTER_FCS
    assert (found.completion_timestamp_mask, found.hca_core_clock) == (0xFFFF, 1000)
    assert (found.max_wq_type_rq, found.max_dm_size, found.port_count) == (5, 4096, 300)


@given(st.binary(min_size=sizeof(ibv_device_attr_ex), max_size=sizeof(ibv_device_attr_ex)))
def test_any_bytes_are_decoded_and_printed(raw: bytes) -> None:
    found = DeviceAttr.of_ex(ibv_device_attr_ex.from_buffer_copy(raw))
    assert "DeviceAttr(" in repr(found)
    assert hash(found) == hash(DeviceAttr.of_ex(ibv_device_attr_ex.from_buffer_copy(raw)))


def test_every_member_of_the_ports_struct_has_a_field() -> None:
    names = {field.name for field in dataclasses.fields(Port)}
    assert {name for name, _ in ibv_port_attr._fields_} - names == {"active_speed_ex"}


def _port(**members: Any) -> Port:
    return Port.of("rxe0", 1, ibv_port_attr(**members), (0xFFFF,), ())


def test_a_port_is_decoded() -> None:
    port = _port(
        state=4, phys_state=5, active_width=2, active_speed=32, link_layer=2, port_cap_flags=1 << 16, lmc=3, sm_sl=4
    )
    assert (port.state, port.phys_state) == (PortState.ACTIVE, PhysState.LINK_UP)
    assert (port.active_width, port.active_width.lanes) == (LinkWidth.X4, 4)
    assert (port.active_speed, port.active_speed.gbps) == (LinkSpeed.EDR, 25.0)
    assert (port.link_layer, port.port_cap_flags) == (LinkLayer.ETHERNET, PortCapFlags.CM_SUP)
    assert (port.lmc, port.sm_sl, port.pkeys) == (3, 4, (0xFFFF,))


def test_the_wider_speed_wins_where_there_is_one() -> None:
    assert _port(active_speed=128, active_speed_ex=256).active_speed == LinkSpeed.XDR
    assert _port(active_speed=1).active_speed == LinkSpeed.SDR


@pytest.mark.parametrize("kind", [PhysState, LinkWidth, LinkSpeed])
def test_unknown_codes_are_kept(kind: type[abi.CEnum]) -> None:
    assert str(kind(77)) == "unknown (77)"
    assert LinkWidth(77).lanes is None
    assert LinkSpeed(77).gbps is None
