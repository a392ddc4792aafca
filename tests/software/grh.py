"""The 40 bytes in front of a received datagram: a global route header, or an IPv4 header in their second half."""

from __future__ import annotations

import socket
import struct
from typing import Any

from rdmaconnect.agreement.endpoint import GRH_BYTES, Gid

__all__ = ["GRH_BYTES", "header", "source_and_target"]

_UDP = 17


def header(message: Any) -> bytes:
    """What the device writes there, over RoCE v2 or InfiniBand.

    Source: IBTA annex A17 (RoCEv2), InfiniBand specification, section 8.3.
    """
    length = len(message.data) + 32
    if Gid(message.dgid).is_ipv4:
        return bytes(20) + struct.pack(
            "!BBHHHBBH4s4s", 0x45, message.traffic_class, 20 + length, 0, 0x4000, message.hop_limit, _UDP, 0,
            message.sgid[12:], message.dgid[12:],
        )  # fmt: skip
    first = 6 << 28 | message.traffic_class << 20 | message.flow_label
    return struct.pack("!IHBB16s16s", first, length, _UDP, message.hop_limit, message.sgid, message.dgid)


def source_and_target(raw: bytes) -> tuple[bytes, bytes] | None:
    """The two GIDs that such a header names; None if it is none."""
    if raw[0] >> 4 == 6:
        return raw[8:24], raw[24:40]
    if raw[20] == 0x45:
        return tuple(Gid.parse(socket.inet_ntoa(raw[at : at + 4])).raw for at in (32, 36))  # type: ignore[return-value]
    return None
