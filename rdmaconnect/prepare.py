"""One end made ready to be connected: everything that exists before the peer is known."""

from __future__ import annotations

import mmap
import secrets
from typing import Any

from .abi import AccessFlags, QpState, QpType
from .completion import CQ, CompChannel
from .device import Context, Port
from .endpoint import Endpoint, Options, RemoteRegion
from .memory import PD
from .path import ACCESS, Path
from .queuepair import QueuePair, RecvRequest

__all__ = ["Prepared"]


class _Init:
    """The attributes that RESET to INIT needs, before there is a path."""

    def __init__(self, port: Port, pkey_index: int, qp_type: QpType, qkey: int) -> None:
        self.port_num, self.pkey_index, self.qkey = port.port_num, pkey_index, qkey
        self.qp_access_flags = ACCESS[qp_type]


class Prepared:
    """A queue pair in INIT with its receives posted, and all that it stands on.

    Receives are posted in INIT, so that a peer that sends as soon as it may finds one.

    Args:
        context: the opened device; this object gives its use back when closed.
        port: the port to use.
        qp_type: RC.
        options: sizes, depths, limits.
        regions: named memory to register at once: name -> anything with a buffer.

    Attributes:
        pd, channel, cq, qp: the objects.
        ring: the memory of the receives, ``recv_depth`` slots of ``recv_size`` bytes.
        requests: one posted receive for each slot; its ``wr_id`` is the slot's number.
        regions: name -> MR.
        endpoint: what the peer is told.
    """

    def __init__(
        self, context: Context, port: Port, qp_type: QpType, options: Options, regions: dict[str, Any] | None = None
    ) -> None:
        self.context, self.port, self.options = context, port, options
        self._closers: list[Any] = [context]
        try:
            attr = context.query_device()
            address = port.address(attr, options)
            self.pd = self._own(PD(context))
            self.channel = self._own(CompChannel(context))
            depth = options.send_depth + options.recv_depth
            self.cq = self._own(CQ(context, depth, self.channel))
            self.qp = self._own(
                QueuePair(
                    self.pd, self.cq, self.cq, qp_type, max_send_wr=options.send_depth, max_recv_wr=options.recv_depth
                )
            )
            self.regions = {name: self.pd.register(buffer) for name, buffer in (regions or {}).items()}
            self.ring = mmap.mmap(-1, options.recv_size * options.recv_depth)
            self.ring_mr = self.pd.register(self.ring, AccessFlags.LOCAL_WRITE)
            qkey = secrets.randbits(31) if qp_type == QpType.UD else 0
            self.qp.move(QpState.INIT, _Init(port, _pkey_index(port, options), qp_type, qkey))
            size = options.recv_size
            self.requests = [
                RecvRequest(slot, self.ring_mr.addr + slot * size, size, self.ring_mr.lkey)
                for slot in range(options.recv_depth)
            ]
            for request in self.requests:
                self.qp.post_recv(request)
            self.endpoint = Endpoint(qp_type, self.qp.qp_num, secrets.randbits(24), address, recv_size=size, qkey=qkey)
        except BaseException:
            self.close()
            raise

    def _own(self, thing: Any) -> Any:
        self._closers.append(thing)
        return thing

    def offered(self) -> dict[str, RemoteRegion]:
        """The named regions as the peer is told of them."""
        return {name: mr.region for name, mr in self.regions.items()}

    def to_rtr(self, path: Path) -> None:
        """INIT to RTR: from here on the peer's packets are taken. Can block for seconds on RoCE."""
        self.qp.move(QpState.RTR, path)

    def to_rts(self, path: Path) -> None:
        """RTR to RTS: from here on it may send."""
        self.qp.move(QpState.RTS, path)

    def close(self) -> None:
        """Free everything, the last made first. Twice is fine."""
        while self._closers:
            self._closers.pop().close()


def _pkey_index(port: Port, options: Options) -> int:
    """The slot to start with; RTR sets the one agreed on."""
    for index, pkey in enumerate(port.pkeys):
        if pkey & 0x7FFF and (options.pkey is None or pkey & 0x7FFF == options.pkey & 0x7FFF):
            return index
    return 0
