"""What the kernel tells over netlink: the RDMA subsystem's settings, a route, a neighbour.

A socket of the calling thread, so the answers are those of its network namespace, and of no tool's output
that may be missing or change. ``rdma system show`` reads the same message; iproute2 is not in every container.

Source: linux/netlink.h, linux/rtnetlink.h, linux/neighbour.h, rdma/rdma_netlink.h;
``nldev_sys_get_doit`` in drivers/infiniband/core/nldev.c.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .interfaces import interface_index

__all__ = ["Route", "ipv4_addresses", "neighbour", "rdma_system", "route"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_RDMA, _ROUTE = 20, 0  # protocols: NETLINK_RDMA, NETLINK_ROUTE
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE, _MULTI = 2, 3, 0x2
_GETADDR, _NEWNEIGH, _GETNEIGH, _GETROUTE = 22, 28, 30, 26
#: RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_SYS_GET)
_SYS_GET = (5 << 10) + 6
_NETNS_MODE, _COPY_ON_FORK = 66, 93
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY = 1, 2, 4, 5
_NDA_DST, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
#: NUD_* of linux/neighbour.h
_STATES = {
    0x01: "INCOMPLETE", 0x02: "REACHABLE", 0x04: "STALE", 0x08: "DELAY", 0x10: "PROBE", 0x20: "FAILED",
    0x40: "NOARP", 0x80: "PERMANENT",
}  # fmt: skip


def _ask(protocol: int, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
    """One request; what the answers carry.

    Raises:
        OSError: the kernel has no such family, or refuses.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as s:
        s.settimeout(2)
        s.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body)
        found: list[bytes] = []
        while True:
            data = s.recv(1 << 17)
            more = False
            for type_, flags_, payload in _messages(data):
                if type_ == _ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    raise OSError(number, os.strerror(number))
                if type_ == _DONE:
                    return found
                found.append(payload)
                more = bool(flags_ & _MULTI)
            if not more:
                return found


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, flags, _, _ = _HEADER.unpack_from(data)
        yield kind, flags, data[_HEADER.size : length]
        data = data[max(_HEADER.size, length + 3 & ~3) :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = data[4:length]
        data = data[max(4, length + 3 & ~3) :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def rdma_system() -> tuple[str, bool | None]:
    """The RDMA network-namespace mode, and whether pinned memory is copied on fork.

    Returns:
        ``shared``, ``exclusive`` or "" where the kernel does not tell; True, or None likewise
        (kernels before 5.12 do not copy, and have no word for it).
    """
    try:
        answers = _ask(_RDMA, _SYS_GET, b"")
    except OSError:
        return "", None
    found = _attributes(answers[0]) if answers else {}
    mode = {b"\0": "exclusive", b"\1": "shared"}.get(found.get(_NETNS_MODE, b"")[:1], "")
    return mode, True if found.get(_COPY_ON_FORK, b"\0")[:1] == b"\1" else None


@dataclass(frozen=True, slots=True)
class Route:
    """How the kernel would send from one address of one network device.

    Args:
        netdev: the device that the packets leave by, "" if there is no route.
        gateway: the next hop, "" if the destination is on the link.
        errno: why there is no route, or 0.
    """

    netdev: str = ""
    gateway: str = ""
    errno: int = 0

    @property
    def words(self) -> str:
        """In words."""
        if self.errno:
            return f"no route ({os.strerror(self.errno)})"
        return f"by {self.netdev}, {f'gateway {self.gateway}' if self.gateway else 'on the link'}"


def route(source: Address, target: Address, netdev: str) -> Route | None:
    """What ``ip route get TARGET from SOURCE oif NETDEV`` says: RoCE looks for a route on the GID's device only.

    Args:
        source, target: two addresses of one family.
        netdev: by name; "" leaves it to the kernel.

    Returns:
        The route, or None if the kernel could not be asked.
    """
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    bits = target.max_prefixlen
    body = struct.pack("=BBBBBBBBI", family, bits, bits, 0, 0, 0, 0, 0, 0)
    body += _attribute(_RTA_DST, target.packed) + _attribute(_RTA_SRC, source.packed)
    if netdev:
        try:
            body += _attribute(_RTA_OIF, struct.pack("=I", interface_index(netdev)))
        except OSError:  # another namespace's
            return None
    try:
        answers = _ask(_ROUTE, _GETROUTE, body)
    except OSError as e:
        return Route(errno=e.errno) if e.errno else None
    found = _attributes(answers[0][12:]) if answers else {}
    out = ""
    with contextlib.suppress(OSError, KeyError, struct.error):
        out = socket.if_indextoname(struct.unpack("=I", found[_RTA_OIF])[0])
    return Route(out, str(ipaddress.ip_address(found[_RTA_GATEWAY])) if _RTA_GATEWAY in found else "")


def ipv4_addresses() -> dict[str, list[ipaddress.IPv4Interface]]:
    """The IPv4 addresses of this network namespace with their prefixes, by network device; empty if nothing tells."""
    found: dict[str, list[ipaddress.IPv4Interface]] = {}
    with contextlib.suppress(OSError, KeyError, struct.error):
        for answer in _ask(_ROUTE, _GETADDR, struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0), _DUMP):
            bits, index = struct.unpack_from("=xBxxI", answer)
            address = ipaddress.IPv4Interface((_attributes(answer[8:])[_IFA_LOCAL], bits))
            found.setdefault(socket.if_indextoname(index), []).append(address)
    return found


def neighbour(target: Address, netdev: str) -> str:
    """The state of a neighbour on a network device, as ``ip neigh`` names it.

    Returns:
        ``REACHABLE``, ``FAILED`` and so on; "" if the kernel knows no such neighbour.
    """
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    try:
        index = interface_index(netdev)
        answers = _ask(_ROUTE, _GETNEIGH, struct.pack("=BxxxiHBB", family, 0, 0, 0, 0), _DUMP)
    except OSError:
        return ""
    for answer in answers:
        its_index, state = struct.unpack_from("=iH", answer, 4)
        if its_index == index and _attributes(answer[12:]).get(_NDA_DST) == target.packed:
            return _STATES.get(state, f"state {state:#x}")
    return ""
