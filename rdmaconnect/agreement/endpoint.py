"""The values that two ends tell each other. Pure, frozen, validated when made.

A :class:`PortAddress` is how a port can be reached, an :class:`Endpoint` a queue pair on it, a
:class:`RemoteRegion` memory that the peer may touch.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import le
from typing import Any, NamedTuple

from ..abi import GidType, LinkLayer, Mtu, QpType
from ..errors import shown
from .columns import filled
from .ranges import AH_RANGES, RANGES, Span, within

__all__ = [
    "GRH_BYTES",
    "MTU_BYTES",
    "Endpoint",
    "Gid",
    "GidEntry",
    "GidKey",
    "PortAddress",
    "RemoteRegion",
]

#: bytes in front of each UD payload that the device fills with the global routing header
GRH_BYTES = 40
_V4_MAPPED = bytes(10) + b"\xff\xff"
#: MTU code -> bytes
MTU_BYTES: dict[Mtu, int] = {mtu: 128 << int(mtu) for mtu in Mtu}


@dataclass(frozen=True, slots=True, order=True)
class Gid:
    """A port's 128-bit global identifier.

    Args:
        raw: 16 bytes in network order, as ``ibv_gid.raw``.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.raw, bytes) or len(self.raw) != 16:
            raise ValueError(f"a GID is {shown(self.raw)}: give 16 bytes")

    @classmethod
    def parse(cls, text: str) -> Gid:
        """The GID of an address: ``"fe80::1"``, ``"::ffff:10.0.0.1"``, or ``"10.0.0.1"`` mapped."""
        address = ipaddress.ip_address(text.partition("%")[0])
        return cls(_V4_MAPPED + address.packed if address.version == 4 else address.packed)

    @property
    def is_zero(self) -> bool:
        """Whether the slot is empty."""
        return not any(self.raw)

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address, mapped (``::ffff:a.b.c.d``)."""
        return self.raw.startswith(_V4_MAPPED)

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The same as an IP address, IPv4 if it is a mapped one."""
        return ipaddress.IPv4Address(self.raw[12:]) if self.is_ipv4 else ipaddress.IPv6Address(self.raw)

    @property
    def is_link_local(self) -> bool:
        """Whether it is in fe80::/10 or, mapped, in 169.254.0.0/16."""
        return self.address.is_link_local

    @property
    def is_loopback(self) -> bool:
        """Whether it is in 127.0.0.0/8 or ::1."""
        return self.address.is_loopback

    def common_prefix(self, other: Gid) -> int:
        """How many leading bits, 0 to 128, are the same in both."""
        return 128 - (int.from_bytes(self.raw, "big") ^ int.from_bytes(other.raw, "big")).bit_length()

    def __str__(self) -> str:
        return f"::ffff:{self.address}" if self.is_ipv4 else str(self.address)


class GidKey(NamedTuple):
    """What tells one GID of a port from another, wherever its slot is now.

    The value alone does not: RoCE v1 and v2 have the same, and so have two network devices with one address, or
    a VLAN and its parent, whose link-local addresses come of the same MAC. A VLAN is a network device of its own.

    Args:
        raw: the GID, 16 bytes in network order.
        gid_type: its type, or None for any.
        netdev: its network device's name on its own host; one of another name is taken where there is none of this.
    """

    raw: bytes
    gid_type: GidType | None = None
    netdev: str = ""


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One slot of a port's GID table.

    Args:
        gid: the identifier.
        gid_type: IB, RoCE v1 or RoCE v2.
        gid_index: its slot, 0 to 255; told to the peer for its messages only, never used there.
        netdev: the network device's name, or "".
        here: whether it is an address of the network namespace of the process that tells it, so far as that
            knows: from another one, as a container has of its host's GIDs, packets may not come back.
    """

    gid: Gid
    gid_type: GidType
    gid_index: int
    netdev: str = ""
    here: bool = True

    def __post_init__(self) -> None:
        within("gid_index", self.gid_index, *AH_RANGES["sgid_index"])

    @property
    def key(self) -> GidKey:
        """What tells it from the port's other GIDs."""
        return GidKey(self.gid.raw, self.gid_type, self.netdev)

    @property
    def type_words(self) -> str:
        """The type as people write it: ``RoCE v2``."""
        return _GID_WORDS.get(self.gid_type, str(self.gid_type))

    def __str__(self) -> str:
        return f"gid_index {self.gid_index} ({self.gid}, {self.type_words})"


_GID_WORDS = {GidType.IB: "IB", GidType.ROCE_V1: "RoCE v1", GidType.ROCE_V2: "RoCE v2"}


@dataclass(frozen=True, slots=True)
class PortAddress:
    """How a port can be reached and what it can do.

    Args:
        device: the device's name on its host, for messages.
        port_num: 1 to 254.
        link_layer: InfiniBand or Ethernet.
        lid: local identifier, 16 bits; 0 on Ethernet.
        active_mtu: the port's present MTU code.
        gids: its usable GID table, empty slots left out; 256 at most.
        grh_required: whether the port says ``IBV_QPF_GRH_REQUIRED``.
        pkeys: partition keys by value, 16 bits each, in table order; 0 for an empty slot.
        max_rd_atomic: RDMA reads and atomics that this end can have outstanding, 0 to 255.
        max_dest_rd_atomic: of these, how many this end can answer at once, 0 to 255.
        max_msg_sz: bytes of its longest message, 32 bits; 0 if it is not told.
    """

    device: str
    port_num: int
    link_layer: LinkLayer
    lid: int
    active_mtu: Mtu
    gids: tuple[GidEntry, ...] = ()
    grh_required: bool = False
    pkeys: tuple[int, ...] = (0xFFFF,)
    max_rd_atomic: int = 1
    max_dest_rd_atomic: int = 1
    max_msg_sz: int = 0

    def __post_init__(self) -> None:
        within("max_msg_sz", self.max_msg_sz, 0, 2**32 - 1)
        within("port_num", self.port_num, *RANGES["port_num"])
        within("lid", self.lid, *AH_RANGES["dlid"])
        within("active_mtu", self.active_mtu, *RANGES["path_mtu"])
        within("max_rd_atomic", self.max_rd_atomic, *RANGES["max_rd_atomic"])
        within("max_dest_rd_atomic", self.max_dest_rd_atomic, *RANGES["max_dest_rd_atomic"])
        for pkey in self.pkeys:
            within("pkey", pkey, 0, 0xFFFF)
        if len(self.gids) > 256 or any(entry.gid.is_zero for entry in self.gids):
            raise ValueError(f"gids has {len(self.gids)} entries: give at most 256, none of them all zero")

    def __hash__(self) -> int:
        # its name is enough: the rest, which is dear to hash, hardly ever differs
        return hash((self.device, self.port_num, self.lid))

    def only(self, gid: GidEntry | None) -> PortAddress:
        """The same port with that one GID, or none."""
        return replace(self, gids=() if gid is None else (gid,))

    def __str__(self) -> str:
        return f"{self.device} port {self.port_num}"


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """Memory of the peer that this end may write or read.

    Args:
        addr: its virtual address there, 64 bits.
        rkey: the key that opens it, 32 bits; never printed.
        length: bytes.
        life: the life of the connection that the peer named it in, which ends with a reconnect; None where it did not.
    """

    addr: int
    rkey: int = field(repr=False)
    length: int
    life: Any = field(default=None, repr=False, compare=False)

    #: bytes that :meth:`to_bytes` gives
    SIZE = 20

    def __post_init__(self) -> None:
        within("addr", self.addr, 0, 2**64 - 1)
        within("rkey", self.rkey, 0, 2**32 - 1)
        within("length", self.length, 0, 2**64 - 1)

    def to_bytes(self) -> bytes:
        """20 bytes, to be sent to the peer: addr, length (8 bytes each) and rkey (4), network order."""
        return b"".join(n.to_bytes(size, "big") for n, size in ((self.addr, 8), (self.length, 8), (self.rkey, 4)))

    @classmethod
    def from_bytes(cls, data: bytes) -> RemoteRegion:
        """The opposite of :meth:`to_bytes`.

        Raises:
            ValueError: if ``data`` is not 20 bytes long.
        """
        if len(data) != cls.SIZE:
            raise ValueError(f"a packed region is {len(data)} bytes long: give {cls.SIZE}")
        return cls(*(int.from_bytes(data[a:b], "big") for a, b in ((0, 8), (16, 20), (8, 16))))

    def slice(self, offset: int, length: int) -> RemoteRegion:
        """The part from ``offset``, ``length`` bytes long.

        Raises:
            ValueError: if it is not inside of the region.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{length} bytes at offset {offset}: the remote region has {self.length} bytes")
        if length == self.length:
            return self
        return RemoteRegion(self.addr + offset, self.rkey, length, self.life)


#: of an endpoint's qp_num, psn, recv_size and qkey
_ENDPOINT: tuple[Span, ...] = (RANGES["dest_qp_num"], RANGES["sq_psn"], (0, 2**31, "bytes"), RANGES["qkey"])
_LEAST, _MOST, _ = zip(*_ENDPOINT, strict=True)
#: those of them that are each queue pair's own
_OWN: dict[str, Span] = {"qp_num": _ENDPOINT[0], "psn": _ENDPOINT[1], "qkey": _ENDPOINT[3]}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a connection: a queue pair and the port it is on.

    Args:
        qp_type: its transport service type.
        qp_num: its number, 1 to 2**24 - 1.
        psn: the packet sequence number that *it will send from*, 24 bits.
        port: the port.
        recv_size: bytes that each of its posted receives can take.
        qkey: for UD, the key that a datagram must carry, 32 bits.
    """

    qp_type: QpType
    qp_num: int
    psn: int
    port: PortAddress
    recv_size: int = 0
    qkey: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        # a hello may have thousands: what is as it should be costs little
        numbers = (self.qp_num, self.psn, self.recv_size, self.qkey)
        if {*map(type, numbers)} == {int} and all(map(le, _LEAST, numbers)) and all(map(le, numbers, _MOST)):
            return
        for name, number, span in zip(("qp_num", "psn", "recv_size", "qkey"), numbers, _ENDPOINT, strict=True):
            within(name, number, *span)

    @classmethod
    def several(
        cls,
        qp_type: QpType,
        port: PortAddress,
        recv_size: int,
        qp_nums: Sequence[int],
        psns: Sequence[int],
        qkeys: Sequence[int],
    ) -> tuple[Endpoint, ...]:
        """Those of queue pairs on one port that differ in these numbers, at least one; each list is as long.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        first = cls(qp_type, qp_nums[0], psns[0], port, recv_size, qkeys[0])
        if len(qp_nums) == 1:
            return (first,)
        own = {"qp_num": qp_nums, "psn": psns, "qkey": qkeys}
        for name, column in own.items():
            least, greatest, _ = _OWN[name]
            if {*map(type, column)} != {int} or min(column) < least or max(column) > greatest:
                for value in column:
                    within(name, value, *_OWN[name])
        alike = {"qp_type": qp_type, "port": port, "recv_size": recv_size}
        shared = ((name, repeat(value)) for name, value in alike.items())
        return filled(cls, len(qp_nums), (*own.items(), *shared))

    def at(self, port: PortAddress) -> Endpoint:
        """The same queue pair with its port described otherwise."""
        return replace(self, port=port)

    def __str__(self) -> str:
        return f"QP {self.qp_num:#08x} on {self.port}"
