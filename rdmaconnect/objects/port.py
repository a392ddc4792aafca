"""A port of a device, decoded into a frozen value. Pure: structs in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from ..abi import CEnum, LinkLayer, Mtu, PortCapFlags, PortCapFlags2, PortFlags, PortState, ibv_port_attr
from ..agreement.endpoint import MTU_BYTES, GidEntry, PortAddress
from ..agreement.options import Options
from ..errors import DeviceError

__all__ = ["LinkSpeed", "LinkWidth", "PhysState", "Port"]


class PhysState(CEnum):
    """``ibv_port_attr.phys_state``: PortPhysicalState of PortInfo; only LINK_UP can carry data."""

    SLEEP = 1
    POLLING = 2
    DISABLED = 3
    PORT_CONFIGURATION_TRAINING = 4
    LINK_UP = 5
    LINK_ERROR_RECOVERY = 6
    PHY_TEST = 7


class LinkWidth(CEnum):
    """``ibv_port_attr.active_width``: LinkWidthActive of PortInfo."""

    X1 = 1
    X4 = 2
    X8 = 4
    X12 = 8
    X2 = 16

    @property
    def lanes(self) -> int | None:
        """Lanes side by side; None for an unknown code."""
        return int(self.name[1:]) if self.known else None


class LinkSpeed(CEnum):
    """``ibv_port_attr.active_speed`` or ``active_speed_ex``: LinkSpeedActive of PortInfo and its extensions."""

    SDR = 1
    DDR = 2
    QDR = 4
    FDR10 = 8
    FDR = 16
    EDR = 32
    HDR = 64
    NDR = 128
    XDR = 256

    @property
    def gbps(self) -> float | None:
        """Gbit/s of each lane; None for an unknown code."""
        return _GBPS.get(int(self))


_LAYERS = {LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.ETHERNET: "Ethernet"}
_GBPS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}


class Limits(Protocol):
    """What :meth:`Port.address` reads of a device's attributes."""

    @property
    def max_qp_init_rd_atom(self) -> int: ...
    @property
    def max_qp_rd_atom(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Port:
    """A port as it is now: all of ``ibv_port_attr`` by its C names, and its two tables.

    Args:
        device: the device's name.
        port_num: from 1.
        state: only ACTIVE carries data; INIT on InfiniBand means that there is no subnet manager.
        phys_state: of the link below.
        link_layer: InfiniBand or Ethernet.
        lid, sm_lid: 16 bits; 0 on Ethernet.
        lmc: how many low bits of the LID are path bits, 0 to 7.
        sm_sl: service level of the subnet manager.
        max_mtu, active_mtu: MTU codes.
        active_width, active_speed: of the link: lanes, and the rate of each.
        flags: ``IBV_QPF_*``.
        port_cap_flags, port_cap_flags2: what the port can do.
        max_msg_sz: longest message, bytes.
        max_vl_num: virtual lanes as a code: 1, 2, 3, 4, 5 for 1, 2, 4, 8, 15.
        bad_pkey_cntr, qkey_viol_cntr: packets refused for their P_Key and Q_Key.
        subnet_timeout: code: 4.096 us * 2**code.
        init_type_reply: of the subnet manager, for what it was asked when the port came up.
        gid_tbl_len, pkey_tbl_len: slots of the tables.
        pkeys: the P_Key table by value, 16 bits each in host order.
        gids: the GID table without its empty slots, and without those from 256 on: an address cannot name them.
    """

    device: str
    port_num: int
    state: PortState
    link_layer: LinkLayer
    lid: int
    sm_lid: int
    max_mtu: Mtu
    active_mtu: Mtu
    flags: PortFlags
    max_msg_sz: int
    phys_state: PhysState
    active_width: LinkWidth
    active_speed: LinkSpeed
    port_cap_flags: PortCapFlags
    port_cap_flags2: PortCapFlags2
    max_vl_num: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    lmc: int
    sm_sl: int
    subnet_timeout: int
    init_type_reply: int
    gid_tbl_len: int
    pkey_tbl_len: int
    pkeys: tuple[int, ...]
    gids: tuple[GidEntry, ...]

    @property
    def layer_words(self) -> str:
        """``Ethernet``, ``InfiniBand``, or ``Unknown``."""
        return _LAYERS.get(self.link_layer, "Unknown")

    def asdict(self) -> dict[str, Any]:
        """What a person asks of a port, as plain values: number, state, link layer, LID, MTUs in bytes, GIDs."""
        return {
            "port_num": self.port_num,
            "state": str(self.state),
            "link_layer": self.layer_words,
            "lid": self.lid,
            "active_mtu": MTU_BYTES.get(self.active_mtu),
            "max_mtu": MTU_BYTES.get(self.max_mtu),
            "gids": [
                {"gid_index": g.gid_index, "gid": str(g.gid), "type": g.type_words, "netdev": g.netdev}
                for g in self.gids
            ],
        }

    def address(self, attr: Limits, options: Options) -> PortAddress:
        """What a peer is told of this port.

        Args:
            attr: the device's limits.
            options: ``gid_index`` and ``max_rd_atomic`` narrow it.

        Raises:
            DeviceError: ``gid_index`` is an empty slot, or no GID is usable; lists the table.
        """
        gids = self.gids
        if options.gid_index is not None:
            gids = tuple(entry for entry in gids if entry.gid_index == options.gid_index)
            if not gids:
                raise DeviceError(
                    f"use gid_index {options.gid_index} of {self.device} port {self.port_num}: that slot is empty. "
                    f"There are {self.gid_words()}."
                )
        elif not gids and self.link_layer == LinkLayer.ETHERNET:
            raise DeviceError(
                f"use {self.device} port {self.port_num}: its GID table is empty. "
                "Give its network device an address (ip addr add), or run in the network namespace that has it."
            )
        most = 255 if options.max_rd_atomic is None else options.max_rd_atomic
        return _address(self, gids, min(attr.max_qp_init_rd_atom, most, 255), min(attr.max_qp_rd_atom, most, 255))

    def __hash__(self) -> int:
        # its name is enough: the rest, which is dear to hash, hardly ever differs
        return hash((self.device, self.port_num, self.lid))

    @classmethod
    def of(
        cls, device: str, port_num: int, attr: ibv_port_attr, pkeys: tuple[int, ...], gids: tuple[GidEntry, ...]
    ) -> Port:
        """Decode what ``ibv_query_port`` filled in.

        Args:
            device: the device's name.
            port_num: from 1.
            attr: the struct.
            pkeys, gids: the tables.
        """
        return cls(
            device=device,
            port_num=port_num,
            state=PortState(attr.state),
            link_layer=LinkLayer(attr.link_layer or LinkLayer.INFINIBAND),
            lid=attr.lid,
            sm_lid=attr.sm_lid,
            max_mtu=Mtu(attr.max_mtu),
            active_mtu=Mtu(attr.active_mtu),
            flags=PortFlags(attr.flags),
            max_msg_sz=attr.max_msg_sz,
            phys_state=PhysState(attr.phys_state),
            active_width=LinkWidth(attr.active_width),
            active_speed=LinkSpeed(attr.active_speed_ex or attr.active_speed),
            port_cap_flags=PortCapFlags(attr.port_cap_flags),
            port_cap_flags2=PortCapFlags2(attr.port_cap_flags2),
            max_vl_num=attr.max_vl_num,
            bad_pkey_cntr=attr.bad_pkey_cntr,
            qkey_viol_cntr=attr.qkey_viol_cntr,
            lmc=attr.lmc,
            sm_sl=attr.sm_sl,
            subnet_timeout=attr.subnet_timeout,
            init_type_reply=attr.init_type_reply,
            gid_tbl_len=attr.gid_tbl_len,
            pkey_tbl_len=attr.pkey_tbl_len,
            pkeys=pkeys,
            gids=gids,
        )

    def gid_words(self) -> str:
        """The GID table in words."""
        return ", ".join(map(str, self.gids)) or "no GIDs"

    def __str__(self) -> str:
        return f"{self.device} port {self.port_num} {self.state} ({self.link_layer})"


@lru_cache(maxsize=64)
def _address(port: Port, gids: tuple[GidEntry, ...], max_rd_atomic: int, max_dest_rd_atomic: int) -> PortAddress:
    """Asked for with every connection, it hardly ever changes."""
    return PortAddress(
        device=port.device,
        port_num=port.port_num,
        link_layer=port.link_layer,
        lid=port.lid,
        active_mtu=port.active_mtu,
        gids=gids,
        grh_required=bool(port.flags & PortFlags.GRH_REQUIRED),
        pkeys=port.pkeys,
        max_rd_atomic=max_rd_atomic,
        max_dest_rd_atomic=max_dest_rd_atomic,
        max_msg_sz=port.max_msg_sz,
    )
