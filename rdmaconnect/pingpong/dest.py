"""The line that rdma-core's ``ibv_*_pingpong`` send each other, as a value and as bytes. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..agreement.endpoint import Gid
from ..agreement.ranges import AH_RANGES, RANGES, within
from ..errors import RemoteProtocolError, shown

__all__ = ["DONE", "QKEY", "Dest"]

#: the word of who called, once it has read the other's line
DONE = b"done\0"
#: of every UD queue pair of these programs
QKEY = 0x11111111
_LINE = re.compile(rb"([0-9a-f]{4}):([0-9a-f]{6}):([0-9a-f]{6}):([0-9a-f]{32})\0")


@dataclass(frozen=True, slots=True)
class Dest:
    """Where one side's queue pair is.

    Args:
        lid: of its port, 16 bits; 0 on Ethernet.
        qpn: the queue pair's number, 1 to 2**24 - 1.
        psn: the packet sequence number that it sends from, 24 bits.
        gid: its address; all zero where LIDs alone are used (no ``-g``).

    Raises:
        ValueError: a number out of range.

    Source: ``struct pingpong_dest`` of rdma-core's libibverbs/examples.
    """

    lid: int
    qpn: int
    psn: int
    gid: Gid

    #: bytes of the line
    SIZE = 52

    def __post_init__(self) -> None:
        within("lid", self.lid, *AH_RANGES["dlid"])
        within("qpn", self.qpn, *RANGES["dest_qp_num"])
        within("psn", self.psn, *RANGES["sq_psn"])

    def to_bytes(self) -> bytes:
        """The line: ``%04x:%06x:%06x:%s`` with the GID as 32 hexadecimal digits, and a zero byte."""
        return b"%04x:%06x:%06x:%s\0" % (self.lid, self.qpn, self.psn, self.gid.raw.hex().encode())

    @classmethod
    def from_bytes(cls, line: bytes) -> Dest:
        """The value of a line; nothing in it is trusted.

        Raises:
            RemoteProtocolError: it is none; says what came instead.
        """
        found = _LINE.fullmatch(line)
        if not found:
            what = " It begins as ZMTP does: a plain `rdmaconnect pingpong` is there." if line[:1] == b"\xff" else ""
            raise RemoteProtocolError(
                f"read the peer's address: {shown(line)} is not LID, QPN, PSN and GID as ibv_rc_pingpong sends them "
                f"(0000:000000:000000: and 32 hexadecimal digits, lower case).{what}"
            )
        lid, qpn, psn = (int(digits, 16) for digits in found.groups()[:3])
        try:
            return cls(lid, qpn, psn, Gid(bytes.fromhex(found[4].decode())))
        except ValueError as e:
            raise RemoteProtocolError(f"read the peer's address: {e}. It sent {shown(line)}.") from None
