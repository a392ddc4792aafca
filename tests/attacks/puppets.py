"""Programs that speak by rdma_cm and keep to nothing: played on the kernel's side of it, past librdmacm."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from types import TracebackType

from software import RdmaCm
from software.rdmacm import Channel, Event, Id

from rdmaconnect.abi.rdma_cma import CmEventType, rdma_conn_param

__all__ = ["Puppet", "param"]

_LOOPBACK = struct.pack("!I", 0x7F000001)


def param(data: bytes = b"", qp_num: int = 77, depth: int = 1) -> rdma_conn_param:
    """What it says of itself."""
    held = ctypes.create_string_buffer(data, len(data) or 1)
    made = rdma_conn_param(
        private_data=ctypes.addressof(held), private_data_len=len(data), qp_num=qp_num,
        responder_resources=depth, initiator_depth=depth,
    )  # fmt: skip
    made.kept = held
    return made


class Puppet:
    """One such program: an identifier, and whose requests come to it.

    Args:
        cm: the librdmacm that others use.
        port: where it listens; 0 for nowhere.
    """

    def __init__(self, cm: RdmaCm, port: int = 0) -> None:
        self.cm, self.channel = cm, Channel()
        self.id = Id(self.channel)
        self._mine = [self.id]
        self.id.port, self.id.listens = port, bool(port)
        with cm.lock:
            cm.ids[self.id.address] = self.id

    def do(self, function: str, *args: object, of: Id | None = None) -> bool:
        """What a function does to its identifier, or another; whether it did."""
        return self.cm.play(function, (of or self.id).address, *args)

    def ask(self, port: int, said: rdma_conn_param) -> None:
        """Ask whoever listens there for a connection."""
        where = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + _LOOPBACK
        ctypes.memmove(ctypes.addressof(self.id.struct.route.addr.dst_storage), where, len(where))
        self.do("rdma_connect", ctypes.addressof(said))

    def answer(self, child: Id, said: rdma_conn_param) -> bool:
        """Take a request."""
        return self.do("rdma_accept", ctypes.addressof(said), of=child)

    def refuse(self, child: Id, status: int, data: bytes) -> None:
        """Refuse a request, with any reason."""
        with self.cm.lock:
            peer, child.peer = child.peer, None
            if peer is not None:
                peer.peer = None
                self.cm.tell(peer, CmEventType.REJECTED, status, param(data))

    def take(self, seconds: float = 1.0) -> Event | None:
        """The next event, None if none comes."""
        if not select.select([self.channel.fd], [], [], seconds)[0]:
            return None
        with self.cm.lock:
            if not self.channel.events:
                return None
            os.eventfd_read(self.channel.fd)
            event = self.channel.events.popleft()
        if event.request is not None:
            self._mine.append(event.request)
        return event

    def leave(self, one: Id) -> None:
        """Give an identifier up, whatever it is amid."""
        with self.cm.lock:
            if self.cm.ids.pop(one.address, None) is not None:
                self.cm.drop(one)
        self._mine.remove(one)

    def close(self) -> None:
        """Its process has ended."""
        with self.cm.lock:
            for one in list(self._mine):
                self.leave(one)
            os.close(self.channel.fd)

    def __enter__(self) -> Puppet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
