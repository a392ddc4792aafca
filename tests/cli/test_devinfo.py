"""`devices -v`: every part of a device that has them all, laid out as ibv_devinfo lays it out."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rdmaconnect.abi import GidType, QpType, TransportType, ibv_device_attr, ibv_device_attr_ex, ibv_port_attr
from rdmaconnect.cli.devinfo import describe, lines
from rdmaconnect.objects.device_attr import DeviceAttr
from rdmaconnect.objects.gid_table import GidSlot
from rdmaconnect.objects.port import Port

GID = bytes.fromhex("fe800000000000000002c90300001234")


def everything() -> DeviceAttr:
    attr = ibv_device_attr_ex(
        completion_timestamp_mask=0xFFFF, hca_core_clock=156250, device_cap_flags_ex=1 << 36 | 1 << 50 | 1,
        max_wq_type_rq=5, raw_packet_caps=0xF, max_dm_size=131072, xrc_odp_caps=1, phys_port_cnt_ex=1,
    )  # fmt: skip
    attr.orig_attr = ibv_device_attr(
        fw_ver=b"16.35.1", phys_port_cnt=1, vendor_id=0x2C9, hw_ver=0x1A, max_fmr=1, max_map_per_fmr=2, max_srq=3,
        device_cap_flags=1 << 20 | 1 << 31, atomic_cap=1, max_srq_wr=4, max_srq_sge=5,
    )  # fmt: skip
    attr.odp_caps.general_caps, attr.odp_caps.per_transport_caps.rc_odp_caps = 3, 1 << 5 | 1 << 20
    attr.tso_caps.max_tso, attr.tso_caps.supported_qpts = 262144, 1 << QpType.RAW_PACKET | 1 << QpType.UD
    attr.rss_caps.rx_hash_fields_mask, attr.rss_caps.rx_hash_function = 0x800000FF, 1
    attr.rss_caps.supported_qpts = 1 << QpType.RAW_PACKET
    attr.packet_pacing_caps.qp_rate_limit_min, attr.packet_pacing_caps.qp_rate_limit_max = 1, 100
    attr.packet_pacing_caps.supported_qpts = 1 << QpType.RC
    attr.tm_caps.max_num_tags, attr.tm_caps.flags = 127, 1
    attr.cq_mod_caps.max_cq_count, attr.cq_mod_caps.max_cq_period = 65535, 4095
    attr.pci_atomic_caps.swap = 6
    return DeviceAttr.of_ex(attr)


def device(attr: DeviceAttr, transport: TransportType = TransportType.IB, **port: Any) -> Any:
    values = {"state": 4, "phys_state": 5, "active_width": 2, "active_speed": 32, "link_layer": 1, **port}
    made = Port.of("mlx5_0", 1, ibv_port_attr(max_mtu=5, active_mtu=5, **values), (0xFFFF,), ())
    return SimpleNamespace(
        name="mlx5_0", pointer=None, transport_type=transport, num_comp_vectors=8, query_device=lambda: attr,
        gid_table=lambda: (GidSlot(1, 0, GID, GidType.IB),), ports=lambda: (made,), port_speed=lambda number: 100.0,
    )  # fmt: skip


def test_every_part_has_its_lines() -> None:
    shown = lines(describe(device(everything())))
    for block in (
        ["hca_id:\tmlx5_0", "\ttransport:\t\t\tInfiniBand (0)", "\tfw_ver:\t\t\t\t16.35.1"],
        ["\tvendor_id:\t\t\t0x02c9"],
        ["\thw_ver:\t\t\t\t0x1A"],
        ["\tdevice_cap_flags:\t\t0x80100000", "\t\t\t\t\tXRC", "\t\t\t\t\tUnknown flags: 0x80000000"],
        ["\tmax_fmr:\t\t\t1", "\tmax_map_per_fmr:\t\t2", "\tmax_srq:\t\t\t3", "\tmax_srq_wr:\t\t\t4"],
        ["\tgeneral_odp_caps:", "\t\t\t\t\tODP_SUPPORT", "\t\t\t\t\tODP_SUPPORT_IMPLICIT"],
        ["\trc_odp_caps:", "\t\t\t\t\tSUPPORT_SRQ", "\t\t\t\t\tUnknown flags: 0x100000"],
        ["\tuc_odp_caps:", "\t\t\t\t\tNO SUPPORT"],
        ["\txrc_odp_caps:", "\t\t\t\t\tSUPPORT_SEND"],
        ["\tcompletion timestamp_mask:\t\t\t0x000000000000ffff", "\thca_core_clock:\t\t\t156250kHZ"],
        ["\traw packet caps:", "\t\t\t\t\tC-VLAN stripping offload", "\t\t\t\t\tScatter FCS offload"],
        ["\tdevice_cap_flags_ex:\t\t0x4001000000001", "\t\t\t\t\tPCI_WRITE_END_PADDING"],
        ["\ttso_caps:", "\t\tmax_tso:\t\t\t262144", "\t\tsupported_qp:", "\t\t\t\t\tSUPPORT_UD"],
        ["\t\trx_hash_function:\t\t\t\t0x1", "\t\trx_hash_fields_mask:\t\t\t\t0x800000FF", "\t\tsupported_qp:"],
        ["\tmax_wq_type_rq:\t\t\t5", "\tpacket_pacing_caps:", "\t\tqp_rate_limit_min:\t1kbps"],
        ["\tmax_num_tags:\t\t\t127", "\tmax_ops:\t\t\t0", "\tmax_sge:\t\t\t0", "\tflags:", "\t\t\t\t\tIBV_TM_CAP_RC"],
        ["", "\tcq moderation caps:", "\t\tmax_cq_count:\t\t65535", "\t\tmax_cq_period:\t\t4095 us", ""],
        ["\tmaximum available device memory:\t131072Bytes", "", "\tpci_atomic_caps:"],
        ["\tnum_comp_vectors:\t\t8", "\t\tport:\t1", "\t\t\tstate:\t\t\tPORT_ACTIVE (4)"],
        [
            "\t\t\tactive_width:\t\t4X (2)",
            "\t\t\tactive_speed:\t\t25.0 Gbps (32)",
            "\t\t\teffective_speed:\t100.0 Gbps",
        ],
        ["\t\t\tphys_state:\t\tLINK_UP (5)", "\t\t\tGID[  0]:\t\tfe80:0000:0000:0000:0002:c903:0000:1234", ""],
    ):
        assert any(shown[i : i + len(block)] == block for i in range(len(shown))), block


def test_a_device_with_nothing_shows_zeros_and_says_what_it_lacks() -> None:
    made = device(DeviceAttr.of(ibv_device_attr()), state=77, active_speed=3, phys_state=9)
    made.port_speed = lambda number: None
    info = describe(made)
    shown = lines(info)
    for line in (
        "\tcompletion_timestamp_mask not supported", "\tcore clock not supported", "\ttag matching not supported",
        "\tdevice_cap_flags_ex:\t\t0x0", "\t\tmax_tso:\t\t\t0", "\t\tqp_rate_limit_max:\t0kbps",
        "\t\t\tactive_speed:\t\tinvalid (3)", "\t\t\tphys_state:\t\tinvalid (9)", "\t\t\tstate:\t\t\tinvalid (77)",
    ):  # fmt: skip
        assert line in shown, line
    assert not [line for line in shown if "fw_ver" in line or "srq_wr" in line or "effective" in line]
    assert (info["tso_caps"], info["max_dm_size"], info["ports"][0]["effective_speed"]) == (None, None, None)


def test_iwarp_has_no_physical_state_and_ethernet_says_the_gids_type() -> None:
    shown = lines(describe(device(everything(), TransportType.IWARP)))
    assert not [line for line in shown if "phys_state" in line]
    shown = lines(describe(device(everything(), link_layer=2)))
    assert "\t\t\tGID[  0]:\t\tfe80:0000:0000:0000:0002:c903:0000:1234, IB" in shown


def test_the_description_survives_json() -> None:
    info = describe(device(replace(everything(), tso_caps=None)))
    assert json.loads(json.dumps(info)) == info
    assert info["rss_caps"]["supported_qp"] == ["RAW_PACKET"]
    assert info["device_cap_flags_ex"] == {
        "value": 1 << 36 | 1 << 50 | 1, "names": ["PCI_WRITE_END_PADDING"], "unknown": 1 << 50
    }  # fmt: skip
