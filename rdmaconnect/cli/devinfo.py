"""What ``ibv_devinfo -v`` prints, as a dictionary and as lines: for ``rdmaconnect devices -v``.

The dictionary is ready for JSON and has the keys of ``ibv_devinfo``: numbers are numbers, an enum is
``{"code": 5, "name": "LINK_UP"}``, flags are ``{"value": 3, "names": ["SEND", "RECV"], "unknown": 0}``, and None
is what the device, its provider, the kernel or the library lacks. The lines are laid out as that program's, so
that what reads those can read these; bits that it does not know may have names here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

from ..abi import CEnum, CFlag, DeviceCapFlags, GidType, RawPacketCaps, TransportType, bits
from ..agreement.endpoint import MTU_BYTES
from ..objects.context import Context
from ..objects.device_attr import DeviceAttr, guid_text
from ..objects.gid_table import GidSlot
from ..objects.port import Port

__all__ = ["describe", "lines"]

Info = dict[str, Any]

_TRANSPORTS = {
    TransportType.IB: "InfiniBand",
    TransportType.IWARP: "iWARP",
    TransportType.USNIC: "usNIC",
    TransportType.USNIC_UDP: "usNIC UDP",
    TransportType.UNSPECIFIED: "unspecified",
}
_GID_TYPES = {GidType.IB: "IB", GidType.ROCE_V1: "RoCE v1", GidType.ROCE_V2: "RoCE v2"}
#: virtual lanes by ``max_vl_num``
_LANES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 15}
_ODP_WORDS = {"SRQ_RECV": "SUPPORT_SRQ"}
_RAW_PACKET_WORDS = {
    str(RawPacketCaps.CVLAN_STRIPPING): "C-VLAN stripping offload",
    str(RawPacketCaps.SCATTER_FCS): "Scatter FCS offload",
    str(RawPacketCaps.IP_CSUM): "IP csum offload",
    str(RawPacketCaps.DELAY_DROP): "Delay drop",
}
#: the plain numbers of ``ibv_device_attr``, in the program's order
_NUMBERS = (
    "max_sge", "max_sge_rd", "max_cq", "max_cqe", "max_mr", "max_pd", "max_qp_rd_atom", "max_ee_rd_atom",
    "max_res_rd_atom", "max_qp_init_rd_atom", "max_ee_init_rd_atom", "atomic_cap", "max_ee", "max_rdd", "max_mw",
    "max_raw_ipv6_qp", "max_raw_ethy_qp", "max_mcast_grp", "max_mcast_qp_attach", "max_total_mcast_qp_attach",
    "max_ah", "max_fmr", "max_map_per_fmr", "max_srq", "max_srq_wr", "max_srq_sge", "max_pkeys", "local_ca_ack_delay",
)  # fmt: skip
#: number -> the number that it only means something with
_HANGS_ON = {"max_map_per_fmr": "max_fmr", "max_srq_wr": "max_srq", "max_srq_sge": "max_srq"}


# ---- the dictionary


def describe(context: Context) -> Info:
    """Everything about an opened device, ready for JSON.

    Args:
        context: the device.

    Raises:
        VerbsError: it cannot be asked.

    Source: ibv_devinfo(1).
    """
    attr = context.query_device()
    slots = context.gid_table()
    return {
        "hca_id": context.name,
        "transport": _enum(context.transport_type, _TRANSPORTS.get(context.transport_type)),
        "fw_ver": attr.fw_ver,
        "node_guid": guid_text(attr.node_guid),
        "sys_image_guid": guid_text(attr.sys_image_guid),
        "board_id": _sysfs(f"/sys/class/infiniband/{context.name}/board_id"),
        **{name: getattr(attr, name) for name in ("vendor_id", "vendor_part_id", "hw_ver", "phys_port_cnt")},
        **_limits(attr),
        **_extended(attr),
        "num_comp_vectors": context.num_comp_vectors,
        "ports": [_port(context, port, slots) for port in context.ports()],
    }


def _limits(attr: DeviceAttr) -> Info:
    """What ``ibv_query_device`` says."""
    names = ("max_mr_size", "page_size_cap", "max_qp", "max_qp_wr")
    return {
        **{name: getattr(attr, name) for name in names},
        "device_cap_flags": _flags(attr.device_cap_flags),
        **{name: getattr(attr, name) for name in _NUMBERS},
        "atomic_cap": _named(attr.atomic_cap, "ATOMIC_"),
    }


def _extended(attr: DeviceAttr) -> Info:
    """What only ``ibv_query_device_ex`` says."""
    odp, xrc = attr.odp_caps, attr.xrc_odp_caps
    tso, rss, pacing, tm = attr.tso_caps, attr.rss_caps, attr.packet_pacing_caps, attr.tm_caps
    atomics, more = attr.pci_atomic_caps, attr.device_cap_flags_ex
    return {
        "general_odp_caps": odp and _flags(odp.general_caps),
        "rc_odp_caps": odp and _flags(odp.rc_odp_caps),
        "uc_odp_caps": odp and _flags(odp.uc_odp_caps),
        "ud_odp_caps": odp and _flags(odp.ud_odp_caps),
        "xrc_odp_caps": None if xrc is None else _flags(xrc),
        "completion_timestamp_mask": attr.completion_timestamp_mask,
        "hca_core_clock": attr.hca_core_clock,
        "raw_packet_caps": None if attr.raw_packet_caps is None else _flags(attr.raw_packet_caps),
        "device_cap_flags_ex": None if more is None else _flags(more, DeviceCapFlags(more & ~0xFFFFFFFF)),
        "tso_caps": tso and {"max_tso": tso.max_tso, "supported_qp": _types(tso.supported_qpts)},
        "rss_caps": rss
        and {
            "max_rwq_indirection_tables": rss.max_rwq_indirection_tables,
            "max_rwq_indirection_table_size": rss.max_rwq_indirection_table_size,
            "rx_hash_function": _flags(rss.rx_hash_function),
            "rx_hash_fields_mask": _flags(rss.rx_hash_fields_mask),
            "supported_qp": _types(rss.supported_qpts),
        },
        "max_wq_type_rq": attr.max_wq_type_rq,
        "packet_pacing_caps": pacing
        and {
            "qp_rate_limit_min": pacing.qp_rate_limit_min,
            "qp_rate_limit_max": pacing.qp_rate_limit_max,
            "supported_qp": _types(pacing.supported_qpts),
        },
        "tm_caps": tm
        and {
            **{name: getattr(tm, name) for name in ("max_rndv_hdr_size", "max_num_tags", "max_ops", "max_sge")},
            "flags": _flags(tm.flags),
        },
        "cq_moderation_caps": attr.cq_mod_caps
        and {name: getattr(attr.cq_mod_caps, name) for name in ("max_cq_count", "max_cq_period")},
        "max_dm_size": attr.max_dm_size,
        "pci_atomic_caps": atomics
        and {name: _flags(getattr(atomics, name)) for name in ("fetch_add", "swap", "compare_swap")},
    }


def _port(context: Context, port: Port, slots: tuple[GidSlot, ...]) -> Info:
    lanes, gbps = port.active_width.lanes, port.active_speed.gbps
    return {
        "port": port.port_num,
        "state": _named(port.state, "PORT_"),
        "max_mtu": _enum(port.max_mtu, MTU_BYTES.get(port.max_mtu)),
        "active_mtu": _enum(port.active_mtu, MTU_BYTES.get(port.active_mtu)),
        "sm_lid": port.sm_lid,
        "port_lid": port.lid,
        "port_lmc": port.lmc,
        "link_layer": port.layer_words,
        "max_msg_sz": port.max_msg_sz,
        "port_cap_flags": _flags(port.port_cap_flags),
        "port_cap_flags2": _flags(port.port_cap_flags2),
        "max_vl_num": _enum(port.max_vl_num, _LANES.get(port.max_vl_num)),
        **{name: getattr(port, name) for name in ("bad_pkey_cntr", "qkey_viol_cntr", "sm_sl", "pkey_tbl_len")},
        **{name: getattr(port, name) for name in ("gid_tbl_len", "subnet_timeout", "init_type_reply")},
        "active_width": _enum(port.active_width, f"{lanes}X" if lanes else None),
        "active_speed": _enum(port.active_speed, f"{gbps} Gbps" if gbps else None),
        "effective_speed": context.port_speed(port.port_num),
        "phys_state": _named(port.phys_state),
        "gids": [
            {"gid_index": slot.gid_index, "gid": _gid(slot), "type": _GID_TYPES.get(slot.gid_type, str(slot.gid_type))}
            for slot in slots
            if slot.port_num == port.port_num
        ],
        "pkeys": [f"{pkey:#06x}" for pkey in port.pkeys],
    }


def _gid(slot: GidSlot) -> str:
    """A RoCE v2 GID is an address, and written as one; the others in full."""
    if slot.gid_type == GidType.ROCE_V2:
        return socket.inet_ntop(socket.AF_INET6, slot.raw)
    text = slot.raw.hex()
    return ":".join(text[i : i + 4] for i in range(0, 32, 4))


def _enum(code: int, name: str | int | None) -> Info:
    return {"code": int(code), "name": name}


def _named(value: CEnum, prefix: str = "") -> Info:
    return _enum(value, f"{prefix}{value}" if value.known else None)


def _flags(value: CFlag, shown: CFlag | None = None) -> Info:
    """All bits as a number; the names of those to be shown, and those without a name."""
    shown = value if shown is None else shown
    named = bits(shown)
    return {"value": int(value), "names": [str(bit) for bit in named], "unknown": int(shown) & ~sum(map(int, named))}


def _types(kinds: frozenset[Any]) -> list[str]:
    return [str(kind) for kind in sorted(kinds)]


def _sysfs(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return FilePath(path).read_text().strip() or None
    return None


# ---- the lines


def lines(info: Info) -> list[str]:
    """What :func:`describe` gave, laid out as ``ibv_devinfo -v`` prints it.

    Returns:
        Lines with tabs and without line ends.
    """
    return [*_head_lines(info), *_limit_lines(info), *_extended_lines(info), *_port_lines(info)]


def _line(depth: int, key: str, value: object, column: int = 40) -> str:
    """``key:`` after ``depth`` tabs, and the value at ``column``, by tabs of 8."""
    reached = depth * 8 + len(key) + 1
    return "\t" * depth + f"{key}:" + "\t" * max(1, -(-(column - reached) // 8)) + str(value)


def _coded(enum: Info) -> str:
    return f"{'invalid' if enum['name'] is None else enum['name']} ({enum['code']})"


def _listed(flags: Info | None, prefix: str = "", words: dict[str, str] | None = None) -> list[str]:
    """A line for each flag, and one for the bits without a name."""
    if flags is None:
        return []
    shown = [(words or {}).get(name, prefix + name) for name in flags["names"]]
    if flags["unknown"]:
        shown.append(f"Unknown flags: 0x{flags['unknown']:X}")
    return ["\t" * 5 + text for text in shown]


def _typed(caps: Info | None) -> list[str]:
    """The types of queue pair that a part works for."""
    if caps is None or not caps["supported_qp"]:
        return []
    return ["\t\tsupported_qp:", *("\t" * 5 + f"SUPPORT_{name}" for name in caps["supported_qp"])]


def _head_lines(info: Info) -> list[str]:
    def some(key: str) -> list[str]:
        return [_line(1, key, info[key])] if info[key] else []

    return [
        f"hca_id:\t{info['hca_id']}",
        _line(1, "transport", _coded(info["transport"])),
        *some("fw_ver"),
        _line(1, "node_guid", info["node_guid"]),
        _line(1, "sys_image_guid", info["sys_image_guid"]),
        _line(1, "vendor_id", f"0x{info['vendor_id']:04x}"),
        _line(1, "vendor_part_id", info["vendor_part_id"]),
        _line(1, "hw_ver", f"0x{info['hw_ver']:X}"),
        *some("board_id"),
        _line(1, "phys_port_cnt", info["phys_port_cnt"]),
    ]


def _limit_lines(info: Info) -> list[str]:
    numbers = [name for name in _NUMBERS if info.get(_HANGS_ON.get(name, ""), 1)]
    return [
        _line(1, "max_mr_size", f"0x{info['max_mr_size']:x}"),
        _line(1, "page_size_cap", f"0x{info['page_size_cap']:x}"),
        _line(1, "max_qp", info["max_qp"]),
        _line(1, "max_qp_wr", info["max_qp_wr"]),
        _line(1, "device_cap_flags", f"0x{info['device_cap_flags']['value']:08x}"),
        *_listed(info["device_cap_flags"]),
        *(_line(1, name, _coded(info[name]) if name == "atomic_cap" else info[name]) for name in numbers),
    ]


def _extended_lines(info: Info) -> list[str]:
    found = ["\tgeneral_odp_caps:", *_listed(info["general_odp_caps"], "ODP_")]
    for key in ("rc_odp_caps", "uc_odp_caps", "ud_odp_caps", "xrc_odp_caps"):
        found += [f"\t{key}:", *(_listed(info[key], "SUPPORT_", _ODP_WORDS) or ["\t" * 5 + "NO SUPPORT"])]
    stamp, clock, raw = info["completion_timestamp_mask"], info["hca_core_clock"], info["raw_packet_caps"]
    found.append(
        _line(1, "completion timestamp_mask", f"0x{stamp:016x}", 56)
        if stamp
        else "\tcompletion_timestamp_mask not supported"
    )
    found.append(_line(1, "hca_core_clock", f"{clock}kHZ") if clock else "\tcore clock not supported")
    found += ["\traw packet caps:", *_listed(raw, words=_RAW_PACKET_WORDS)] if raw else []
    more = info["device_cap_flags_ex"]
    found += [_line(1, "device_cap_flags_ex", f"0x{more['value'] if more else 0:X}"), *_listed(more)]
    return [*found, *_part_lines(info)]


def _part_lines(info: Info) -> list[str]:
    """The parts that are structs of their own."""
    tso, rss, pacing = info["tso_caps"] or {}, info["rss_caps"] or {}, info["packet_pacing_caps"] or {}
    function, fields = (rss.get(key, {}).get("value", 0) for key in ("rx_hash_function", "rx_hash_fields_mask"))
    tables = ("max_rwq_indirection_tables", "max_rwq_indirection_table_size")
    found = [
        "\ttso_caps:",
        _line(2, "max_tso", tso.get("max_tso", 0), 48),
        *_typed(info["tso_caps"]),
        "\trss_caps:",
        *(_line(2, key, rss.get(key, 0), 64) for key in tables),
        _line(2, "rx_hash_function", f"0x{function:x}", 64),
        _line(2, "rx_hash_fields_mask", f"0x{fields:X}", 64),
        *_typed(info["rss_caps"]),
        _line(1, "max_wq_type_rq", info["max_wq_type_rq"] or 0),
        "\tpacket_pacing_caps:",
        *(_line(2, key, f"{pacing.get(key, 0)}kbps") for key in ("qp_rate_limit_min", "qp_rate_limit_max")),
        *_typed(info["packet_pacing_caps"]),
    ]
    tm, moderation, atomics = info["tm_caps"], info["cq_moderation_caps"], info["pci_atomic_caps"]
    if tm:
        found += [_line(1, key, tm[key]) for key in ("max_rndv_hdr_size", "max_num_tags", "max_ops", "max_sge")]
        found += ["\tflags:", *_listed(tm["flags"], "IBV_TM_CAP_")]
    else:
        found.append("\ttag matching not supported")
    if moderation:
        found += ["", "\tcq moderation caps:", _line(2, "max_cq_count", moderation["max_cq_count"])]
        found += [_line(2, "max_cq_period", f"{moderation['max_cq_period']} us"), ""]
    if info["max_dm_size"]:
        found += [f"\tmaximum available device memory:\t{info['max_dm_size']}Bytes", ""]
    if atomics:
        found += ["\tpci_atomic_caps:", *(_line(2, key, f"0x{caps['value']:x}") for key, caps in atomics.items())]
    return [*found, _line(1, "num_comp_vectors", info["num_comp_vectors"])]


def _port_lines(info: Info) -> list[str]:
    found = []
    for port in info["ports"]:
        found.append(f"\t\tport:\t{port['port']}")
        for key, value in port.items():
            if key == "phys_state" and info["transport"]["code"] != TransportType.IB:
                continue
            if value is not None and key not in ("port", "gids", "pkeys"):
                found.append(_line(3, key, _PORT_FORMATS.get(key, str)(value), 48))
        for gid in port["gids"]:
            kind = f", {gid['type']}" if port["link_layer"] == "Ethernet" else ""
            found.append(_line(3, f"GID[{gid['gid_index']:3}]", gid["gid"] + kind, 48))
        found.append("")
    return found


#: how a port's values are written where ``str`` does not do
_PORT_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(
        ("state", "max_mtu", "active_mtu", "max_vl_num", "active_width", "active_speed", "phys_state"), _coded
    ),
    "port_lmc": "0x{:02x}".format,
    **dict.fromkeys(("max_msg_sz", "bad_pkey_cntr", "qkey_viol_cntr"), "0x{:x}".format),
    "port_cap_flags": lambda flags: f"0x{flags['value']:08x}",
    "port_cap_flags2": lambda flags: f"0x{flags['value']:04x}",
    "effective_speed": "{:.1f} Gbps".format,
}
