"""What a device says it can do, decoded into frozen values. Pure: structs in, values out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..abi import (
    AtomicCap,
    DeviceCapFlags,
    OdpGeneralCaps,
    OdpTransportCaps,
    PciAtomicOpSize,
    QpType,
    RawPacketCaps,
    RxHashFields,
    RxHashFunctionFlags,
    TmCaps,
    ibv_device_attr,
    ibv_device_attr_ex,
)

__all__ = [
    "CqModerationCaps",
    "DeviceAttr",
    "OdpCaps",
    "PacketPacingCaps",
    "PciAtomicCaps",
    "RssCaps",
    "RtValues",
    "TagMatchingCaps",
    "TsoCaps",
    "guid_text",
]


@dataclass(frozen=True, slots=True)
class OdpCaps:
    """On-demand paging: at all, and which operations of RC, UC and UD may touch memory that is paged on demand."""

    general_caps: OdpGeneralCaps
    rc_odp_caps: OdpTransportCaps
    uc_odp_caps: OdpTransportCaps
    ud_odp_caps: OdpTransportCaps


@dataclass(frozen=True, slots=True)
class TsoCaps:
    """TCP segmentation: largest payload, bytes; the types of queue pair that can."""

    max_tso: int
    supported_qpts: frozenset[QpType]


@dataclass(frozen=True, slots=True)
class RssCaps:
    """Receive-side scaling: types of queue pair, limits of the indirection table, what can be hashed and how."""

    supported_qpts: frozenset[QpType]
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: RxHashFields
    rx_hash_function: RxHashFunctionFlags


@dataclass(frozen=True, slots=True)
class PacketPacingCaps:
    """Rate limits of a queue pair, kbit/s; the types of queue pair that can."""

    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: frozenset[QpType]


@dataclass(frozen=True, slots=True)
class TagMatchingCaps:
    """Tag matching: rendezvous header in bytes, tags in a list, transports, outstanding operations, SGEs."""

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: TmCaps
    max_ops: int
    max_sge: int


@dataclass(frozen=True, slots=True)
class CqModerationCaps:
    """Limits of ``CQ.moderate``: completions, microseconds."""

    max_cq_count: int
    max_cq_period: int


@dataclass(frozen=True, slots=True)
class PciAtomicCaps:
    """Operand sizes of PCI atomics."""

    fetch_add: PciAtomicOpSize
    swap: PciAtomicOpSize
    compare_swap: PciAtomicOpSize


@dataclass(frozen=True, slots=True)
class RtValues:
    """What a device says in real time: its raw clock in ticks of ``hca_core_clock``, None if it did not answer."""

    raw_clock: int | None


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """``ibv_device_attr_ex`` and the ``ibv_device_attr`` in it, by their C names.

    All numbers are upper limits; what can really be had may be less, since resources are shared.

    From ``odp_caps`` on, None stands for what is not there: the device, its provider, the kernel or the
    library lacks it, and C does not tell which. (All of them read as 0 there, and 0 means "not
    supported" for each.) Where there is only ``ibv_query_device``, all of these are None.

    Args:
        fw_ver: firmware version.
        node_guid, sys_image_guid: 64 bits in host order; :func:`guid_text` writes them.
        max_mr_size: bytes.
        page_size_cap: bit n for pages of 2**n bytes.
        vendor_id: IEEE OUI, 24 bits.
        max_sge, max_sge_rd: scatter/gather entries of a work request; of an RDMA read.
        max_qp_rd_atom, max_qp_init_rd_atom: RDMA reads and atomics that a queue pair can answer; can have
            outstanding. ``max_res_rd_atom``: that the device can answer in all.
        max_pkeys: entries of a P_Key table.
        local_ca_ack_delay: code: 4.096 us * 2**code.
        phys_port_cnt: ports, 255 at most; see :attr:`port_count`.
        xrc_odp_caps: as the transports of ``odp_caps``.
        completion_timestamp_mask: the bits that a timestamp can use.
        hca_core_clock: kHz.
        device_cap_flags_ex: the flags with those above bit 31.
        max_wq_type_rq: receive work queues.
        max_dm_size: device memory, bytes.
        phys_port_cnt_ex: ports.
    """

    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCapFlags
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_ee_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    max_ee_init_rd_atom: int
    atomic_cap: AtomicCap
    max_ee: int
    max_rdd: int
    max_mw: int
    max_raw_ipv6_qp: int
    max_raw_ethy_qp: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_total_mcast_qp_attach: int
    max_ah: int
    max_fmr: int
    max_map_per_fmr: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int

    odp_caps: OdpCaps | None = None
    xrc_odp_caps: OdpTransportCaps | None = None
    completion_timestamp_mask: int | None = None
    hca_core_clock: int | None = None
    device_cap_flags_ex: DeviceCapFlags | None = None
    tso_caps: TsoCaps | None = None
    rss_caps: RssCaps | None = None
    max_wq_type_rq: int | None = None
    packet_pacing_caps: PacketPacingCaps | None = None
    raw_packet_caps: RawPacketCaps | None = None
    tm_caps: TagMatchingCaps | None = None
    cq_mod_caps: CqModerationCaps | None = None
    max_dm_size: int | None = None
    pci_atomic_caps: PciAtomicCaps | None = None
    phys_port_cnt_ex: int | None = None

    @property
    def port_count(self) -> int:
        """Ports: ``phys_port_cnt_ex`` where it is known, for there can be more than 255."""
        return self.phys_port_cnt_ex or self.phys_port_cnt

    @classmethod
    def of(cls, attr: ibv_device_attr) -> DeviceAttr:
        """Decode what ``ibv_query_device`` filled in: without the extended part."""
        return cls(**_fields(attr, _HEAD))

    @classmethod
    def of_ex(cls, attr: ibv_device_attr_ex) -> DeviceAttr:
        """Decode what ``ibv_query_device_ex`` filled in."""
        return _decoded(bytes(attr))


@lru_cache(maxsize=16)
def _decoded(raw: bytes) -> DeviceAttr:
    """The value of a ``struct ibv_device_attr_ex``; asked for with every connection, it hardly ever changes."""
    attr = ibv_device_attr_ex.from_buffer_copy(raw)
    parts: dict[str, Any] = {}
    for name, decode in _EXTENDED.items():
        place = getattr(ibv_device_attr_ex, name)
        there = any(raw[place.offset : place.offset + place.size])
        parts[name] = decode(getattr(attr, name)) if there else None
    return DeviceAttr(**_fields(attr.orig_attr, _HEAD), **parts)


def guid_text(guid: int) -> str:
    """A GUID as it is written: ``28e7:64ff:fe9a:7ce4``."""
    text = f"{guid:016x}"
    return ":".join(text[i : i + 4] for i in range(0, 16, 4))


def _guid(network: int) -> int:
    return int.from_bytes(network.to_bytes(8, sys.byteorder), "big")


def _qp_types(mask: int) -> frozenset[QpType]:
    """The types of a bit mask ``1 << IBV_QPT_*``."""
    return frozenset(QpType(bit) for bit in range(mask.bit_length()) if mask >> bit & 1)


Decoders = dict[str, Callable[[Any], Any]]


def _fields(struct: Any, decoders: Decoders) -> dict[str, Any]:
    """The members by name, each through its decoder, else as a number."""
    return {name: decoders.get(name, int)(getattr(struct, name)) for name, _ in struct._fields_}


def _part(kind: Callable[..., Any], **decoders: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decoder for a struct: ``kind`` of its members."""
    return lambda struct: kind(**_fields(struct, decoders))


def _odp(caps: Any) -> OdpCaps:
    transports = _fields(
        caps.per_transport_caps, dict.fromkeys(("rc_odp_caps", "uc_odp_caps", "ud_odp_caps"), OdpTransportCaps)
    )
    return OdpCaps(OdpGeneralCaps(caps.general_caps), **transports)


_HEAD: Decoders = {
    "fw_ver": lambda text: text.decode(errors="replace"),
    "node_guid": _guid,
    "sys_image_guid": _guid,
    "device_cap_flags": DeviceCapFlags,
    "atomic_cap": AtomicCap,
}
_EXTENDED: Decoders = {
    "odp_caps": _odp,
    "xrc_odp_caps": OdpTransportCaps,
    "completion_timestamp_mask": int,
    "hca_core_clock": int,
    "device_cap_flags_ex": DeviceCapFlags,
    "tso_caps": _part(TsoCaps, supported_qpts=_qp_types),
    "rss_caps": _part(
        RssCaps, supported_qpts=_qp_types, rx_hash_fields_mask=RxHashFields, rx_hash_function=RxHashFunctionFlags
    ),
    "max_wq_type_rq": int,
    "packet_pacing_caps": _part(PacketPacingCaps, supported_qpts=_qp_types),
    "raw_packet_caps": RawPacketCaps,
    "tm_caps": _part(TagMatchingCaps, flags=TmCaps),
    "cq_mod_caps": _part(CqModerationCaps),
    "max_dm_size": int,
    "pci_atomic_caps": _part(
        PciAtomicCaps, fetch_add=PciAtomicOpSize, swap=PciAtomicOpSize, compare_swap=PciAtomicOpSize
    ),
    "phys_port_cnt_ex": int,
}
