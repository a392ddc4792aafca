"""The values that two ends tell each other, and the wishes of one. Pure, frozen, validated when made.

A :class:`PortAddress` is how a port can be reached, an :class:`Endpoint` a queue pair on it, a
:class:`RemoteRegion` memory that the peer may touch, :class:`Options` what the caller asks for.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict

from ..abi import GidType, LinkLayer, Mtu, QpType

__all__ = [
    "GRH_BYTES",
    "MTU_BYTES",
    "Endpoint",
    "Gid",
    "GidEntry",
    "Options",
    "OptionsDict",
    "PortAddress",
    "RemoteRegion",
    "Sizes",
]

#: bytes in front of each UD payload that the device fills with the global routing header
GRH_BYTES = 40
_V4_MAPPED = bytes(10) + b"\xff\xff"


def _within(name: str, value: int, least: int, greatest: int, meaning: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: give an integer")
    if not least <= value <= greatest:
        raise ValueError(f"{name} is {value}: give {least} to {greatest}{f' ({meaning})' if meaning else ''}")


@dataclass(frozen=True, slots=True, order=True)
class Gid:
    """A port's 128-bit global identifier.

    Args:
        raw: 16 bytes in network order, as ``ibv_gid.raw``.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.raw, bytes) or len(self.raw) != 16:
            raise ValueError(f"a GID is {self.raw!r}: give 16 bytes")

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


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One slot of a port's GID table.

    Args:
        gid: the identifier.
        gid_type: IB, RoCE v1 or RoCE v2.
        gid_index: its slot, 0 to 255; told to the peer for its messages only, never used there.
        netdev: the network device's name, or "".
    """

    gid: Gid
    gid_type: GidType
    gid_index: int
    netdev: str = ""

    def __post_init__(self) -> None:
        _within("gid_index", self.gid_index, 0, 255)

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
        _within("max_msg_sz", self.max_msg_sz, 0, 2**32 - 1)
        _within("port_num", self.port_num, 1, 254)
        _within("lid", self.lid, 0, 0xFFFF)
        _within("active_mtu", self.active_mtu, 1, 5, "an ibv_mtu code")
        _within("max_rd_atomic", self.max_rd_atomic, 0, 255)
        _within("max_dest_rd_atomic", self.max_dest_rd_atomic, 0, 255)
        for pkey in self.pkeys:
            _within("pkey", pkey, 0, 0xFFFF)
        if len(self.gids) > 256 or any(entry.gid.is_zero for entry in self.gids):
            raise ValueError(f"gids has {len(self.gids)} entries: give at most 256, none of them all zero")

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
    """

    addr: int
    rkey: int = field(repr=False)
    length: int

    #: bytes that :meth:`to_bytes` gives
    SIZE = 20

    def __post_init__(self) -> None:
        _within("addr", self.addr, 0, 2**64 - 1)
        _within("rkey", self.rkey, 0, 2**32 - 1)
        _within("length", self.length, 0, 2**64 - 1)

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
        return RemoteRegion(self.addr + offset, self.rkey, length)


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
        _within("qp_num", self.qp_num, 1, 0xFFFFFF, "24 bits, and 0 is the subnet manager's")
        _within("psn", self.psn, 0, 0xFFFFFF, "24 bits")
        _within("recv_size", self.recv_size, 0, 2**31)
        _within("qkey", self.qkey, 0, 0xFFFFFFFF)

    def at(self, port: PortAddress) -> Endpoint:
        """The same queue pair with its port described otherwise."""
        return replace(self, port=port)

    def __str__(self) -> str:
        return f"QP {self.qp_num:#08x} on {self.port}"


class Sizes(NamedTuple):
    """What each queue pair has: bytes of a receive, receives posted, sends that may be on their way."""

    recv_size: int
    recv_depth: int
    send_depth: int


class OptionsDict(TypedDict, total=False):
    """The fields of :class:`Options`, which tells what they mean, as keywords of a call."""

    device: str | None
    port_num: int | None
    gid_index: int | None
    path_mtu: int | None
    sl: int
    traffic_class: int
    flow_label: int
    pkey: int | None
    timeout: int
    retry_cnt: int
    rnr_retry: int
    min_rnr_timer: int
    max_rd_atomic: int | None
    hop_limit: int
    recv_size: int | None
    recv_depth: int | None
    send_depth: int | None
    spin: int
    probe: bool


@dataclass(frozen=True, slots=True)
class Options:
    """What one side asks for. None leaves the choice to the library.

    Args:
        device: name of the RDMA device, as ``rdmaconnect devices`` lists it.
        port_num: its port, from 1.
        gid_index: the slot of its GID table to use.
        path_mtu: the largest path MTU wished, in bytes: 256, 512, 1024, 2048 or 4096.
        sl: service level, 0 to 15, applied on both ends (the connector's counts).
        traffic_class: 0 to 255, likewise.
        flow_label: 20 bits, likewise.
        pkey: partition key by value, 16 bits.
        timeout: the ACK-timeout *code*: 4.096 us x 2**timeout, 0 to 31. 18 is 1.07 s.
        retry_cnt: retries after a timeout, 0 to 7. Some devices take 7 for ever.
        rnr_retry: retries while the peer has no receive posted, 0 to 6; 7 for ever.
        min_rnr_timer: the code of the pause asked of a peer that sends too early, 0 to 31. 12 is 0.64 ms.
        max_rd_atomic: most RDMA reads and atomics outstanding, 0 to 255.
        hop_limit: 1 to 255.
        recv_size: bytes of each posted receive, 1 to 2**30: the longest message that the peer may send.
            65536 by default, 16384 where several queue pairs are made at once, an MTU at most for UD.
        recv_depth: receives kept posted, 1 to 2**15; 16 by default, or 4.
        send_depth: sends that may be on their way at once, 1 to 2**15; 16 by default, or 4.
        spin: polls of the completion queue before a wait sleeps on its events; 0 sleeps at once.
        probe: whether messages are sent both ways and checked before the connection is handed out (the
            connector's counts).
    """

    device: str | None = None
    port_num: int | None = None
    gid_index: int | None = None
    path_mtu: int | None = None
    sl: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    pkey: int | None = None
    timeout: int = 18
    retry_cnt: int = 6
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    max_rd_atomic: int | None = None
    hop_limit: int = 64
    recv_size: int | None = None
    recv_depth: int | None = None
    send_depth: int | None = None
    spin: int = 500
    probe: bool = True

    def __post_init__(self) -> None:
        limits = {
            "port_num": (1, 254), "gid_index": (0, 255), "sl": (0, 15), "traffic_class": (0, 255),
            "flow_label": (0, 0xFFFFF), "pkey": (1, 0xFFFF), "timeout": (0, 31), "retry_cnt": (0, 7),
            "rnr_retry": (0, 7), "min_rnr_timer": (0, 31), "max_rd_atomic": (0, 255), "hop_limit": (1, 255),
            "recv_size": (1, 2**30), "recv_depth": (1, 2**15), "send_depth": (1, 2**15), "spin": (0, 2**31),
        }  # fmt: skip
        for name, (least, greatest) in limits.items():
            value = getattr(self, name)
            if value is not None:
                _within(name, value, least, greatest)
        sizes = MTU_BYTES.values()
        if self.path_mtu is not None and not (isinstance(self.path_mtu, int) and self.path_mtu in sizes):
            raise ValueError(f"path_mtu is {self.path_mtu}: give {', '.join(map(str, sizes))} bytes")

    def sizes(self, count: int = 1) -> Sizes:
        """The sizes for ``count`` queue pairs made at once, with what was left open filled in."""
        least = Sizes(65536, 16, 16) if count == 1 else Sizes(16384, 4, 4)
        return Sizes(
            self.recv_size or least.recv_size,
            self.recv_depth or least.recv_depth,
            self.send_depth or least.send_depth,
        )

    @property
    def mtu(self) -> Mtu:
        """``path_mtu`` as a code; the greatest if there is no wish."""
        return mtu_code(self.path_mtu or 4096)


#: MTU code -> bytes
MTU_BYTES: dict[Mtu, int] = {mtu: 128 << int(mtu) for mtu in Mtu}


def mtu_code(size: int) -> Mtu:
    """The code of an MTU of ``size`` bytes, one of 256, 512, 1024, 2048 and 4096."""
    return Mtu((size // 128).bit_length() - 1)
