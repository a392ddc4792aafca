"""One queue pair with its receives posted, and what has come and gone on it."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ..abi import QpAttrMask, QpState, QpType, WcFlags, WcOpcode, WcStatus
from ..agreement.endpoint import GRH_BYTES, Endpoint, Gid, PortAddress
from ..agreement.options import Sizes
from ..agreement.path import ACCESS, Path
from ..errors import CompletionError, RdmaConnectError, StateError
from ..objects.address import UdAddress
from ..objects.memory import Sge
from ..objects.queuepair import QueuePair
from ..objects.transition import Transition
from ..objects.work_request import SendRequest
from .engine import Engine, Ring
from .transfer import Part, Sent

__all__ = ["Source", "Transceiver", "step_to_init", "step_to_rtr", "step_to_rts"]

#: work-request ids from here on are sends; below they are receive slots
_SEND = 1 << 32
_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
#: for UD, where a message came from: queue pair and GID; None elsewhere, where there is only one peer
Source = tuple[int, bytes] | None


class Transceiver:
    """One queue pair with its receives posted, and what has come and gone on it.

    Made in INIT, so that receives are there before the peer can send.

    Args:
        engine: what it shares.
        qp: its queue pair, in RESET; from here on it is the transceiver's.
        address: the port it is on.
        sizes: how much of what.
        ring: registered memory; ``recv_depth`` slots from ``slot`` on are this transceiver's.
        to_init: the step from RESET to INIT, which all of a port take alike: see :func:`step_to_init`.

    Attributes:
        endpoint: what the peer is told.
        broken: the first failure, or None.
        immediates: (slot, immediate data) of each write that the peer told of; the slot is to be given back.
        slot_size: bytes of a slot: the payload and, for UD, 40 bytes of GRH in front of it.
    """

    def __init__(
        self,
        engine: Engine,
        qp: QueuePair,
        address: PortAddress,
        sizes: Sizes,
        ring: Ring,
        slot: int,
        to_init: Transition,
    ) -> None:
        self.engine, self.sizes, self._to_init = engine, sizes, to_init
        self.qp, self.is_ud = qp, qp.qp_type == QpType.UD
        self._ring, self.slot_size = ring, ring.slot_size
        self._view = ring.view
        self._base = slot * ring.slot_size
        self._grh = GRH_BYTES if self.is_ud else 0
        self._request = SendRequest()
        self._next_id, self._most_sent = _SEND, sizes.send_depth
        self.broken: CompletionError | None = None
        #: work-request id and transfer of each that has not completed, in the order of posting
        self.sent: deque[tuple[int, Sent]] = deque()
        self.inboxes: dict[Source, deque[tuple[int, int]]] = {} if self.is_ud else {None: deque()}
        self.immediates: deque[tuple[int, int]] = deque()
        engine.transceivers[qp.qp_num] = self
        qkey = secrets.randbits(31) if self.is_ud else 0
        recv_size = ring.slot_size - (GRH_BYTES if self.is_ud else 0)
        self.endpoint = Endpoint(qp.qp_type, qp.qp_num, secrets.randbits(24), address, recv_size, qkey)
        self._init(to_init)

    def _init(self, step: Transition) -> None:
        self.qp.take(step, self.endpoint)
        self.qp.post_recv(self._ring.receives.at(self._ring.mr.addr + self._base))

    def restart(self) -> None:
        """Back to INIT through RESET, with a fresh PSN and nothing outstanding: to be connected anew.

        What was on its way counts as flushed.
        """
        with self.engine.lock:
            self.qp.move(QpState.RESET)
            self.engine.progress()
            self._flush()
            self.broken = None
            self.inboxes = {} if self.is_ud else {None: deque()}
            self.immediates.clear()
            end = self.endpoint
            self.endpoint = Endpoint(end.qp_type, end.qp_num, secrets.randbits(24), end.port, end.recv_size, end.qkey)
            self._init(self._to_init)

    # ---- out

    def post(self, sent: Sent, part: Part, to: UdAddress | None = None, last: bool = True) -> bool:
        """Post one send work request.

        Args:
            sent: what becomes of it.
            part: what it does.
            to: for UD, where it goes.
            last: whether it is the last of ``sent``.

        Returns:
            False if there was no room; try again after :meth:`Engine.progress`.

        Raises:
            VerbsError: as ``ibv_post_send``.
        """
        on_the_way, request = self.sent, self._request
        with self.engine.lock:
            if len(on_the_way) >= self._most_sent:
                return False
            self._next_id = wr_id = self._next_id + 1
            opcode, place, remote, imm, inline = part
            if to is not None:
                request.send(wr_id, sge=None if inline else Sge(*place), inline=inline, to=to)
            elif imm is not None and remote is not None:
                request.rdma_write_imm(wr_id, remote, imm, sge=None if inline else Sge(*place), inline=inline)
            elif inline is not None:
                request.fill_inline(wr_id, opcode, inline, remote=remote)
            else:
                request.fill(wr_id, opcode, *place, remote=remote)
            if last:
                sent.posted = True
            else:
                sent.left += 1
            on_the_way.append((wr_id, sent))  # first: Ctrl-C may come when it is posted
            try:
                self.qp.post_send(request)
            except Exception:
                on_the_way.pop()
                sent.posted, sent.left = False, sent.left - (not last)
                raise
            return True

    def complete(self, wc: Any) -> None:
        """Take one completion. Called with the engine's lock held."""
        wr_id, status = wc.wr_id, wc.status
        if status and self.broken is None:
            self.broken = CompletionError(
                WcStatus(status), vendor_err=wc.vendor_err, wr_id=wr_id, qp_num=wc.qp_num,
                opcode="receive" if wr_id < _SEND else "send", doing=f"use {self.qp.name}",
            )  # fmt: skip
        if wr_id < _SEND:
            if not status:
                self._arrived(wr_id, wc)
            return
        on_the_way = self.sent
        while on_the_way and on_the_way[0][0] <= wr_id:  # those before it that give no completion have succeeded
            posted, sent = on_the_way.popleft()
            if posted == wr_id:
                sent.ended(status, wc.vendor_err, wr_id)
            else:
                sent.ended()

    def _flush(self) -> None:
        """What is on its way never comes to its end."""
        while self.sent:
            wr_id, sent = self.sent.popleft()
            sent.ended(WcStatus.WR_FLUSH_ERR, 0, wr_id)

    # ---- in

    def _arrived(self, slot: int, wc: Any) -> None:
        if wc.opcode == _WITH_IMM:
            self.immediates.append((slot, socket.ntohl(wc.imm_data)))
            return
        inbox = self.inboxes.get(self._source(slot, wc) if self.is_ud else None)
        if inbox is None:
            self.repost(slot)  # a datagram of somebody who is not connected
        else:
            inbox.append((slot, wc.byte_len - self._grh))

    def _source(self, slot: int, wc: Any) -> Source:
        start = self._base + slot * self.slot_size
        grh = bytes(self._view[start : start + GRH_BYTES])
        if not WcFlags(wc.wc_flags) & WcFlags.GRH:
            return wc.src_qp, b""
        # IBTA RoCEv2 annex: an IPv4 header lies in the last 20 bytes
        return wc.src_qp, grh[8:24] if grh[0] >> 4 == 6 else Gid.parse(".".join(map(str, grh[32:36]))).raw

    def payload(self, slot: int, length: int) -> memoryview:
        """The bytes that came into a slot; valid until :meth:`repost`."""
        start = self._base + slot * self.slot_size + self._grh
        return self._view[start : start + length]

    def take(self, slot: int, length: int) -> bytes:
        """The bytes that came into a slot, which goes back to the device. Called with the engine's lock held."""
        start = self._base + slot * self.slot_size + self._grh
        try:
            return bytes(self._view[start : start + length])
        finally:
            self.repost(slot)

    def repost(self, slot: int) -> None:
        """Give a slot back to the device. Called with the engine's lock held."""
        if self.broken is None:
            try:
                self.qp.post_recv(self._ring.receive(self._base, slot))
            except StateError:
                if not self.qp.closed:
                    raise

    def open(self, source: Source) -> None:
        """Take messages of one more peer, over UD."""
        with self.engine.lock:
            self.inboxes.setdefault(source, deque())

    def shut(self, source: Source) -> None:
        """Take messages of that peer no more; without any peer left the queue pair is destroyed."""
        with self.engine.lock:
            self.inboxes.pop(source, None)
            if not self.inboxes:
                self.close()

    # ---- states

    def to_rtr(self, path: Path, step: Transition | None = None) -> None:
        """INIT to RTR: from here on the peer's packets are taken. Can block for seconds on RoCE.

        A UD queue pair is there already where it serves another peer.

        Args:
            path: its path.
            step: made ready, where many queue pairs take it: see :func:`step_to_rtr`.
        """
        if not self.is_ud:
            self.qp.take(step or step_to_rtr(path, self.endpoint.qp_type), path)
            return
        with self.engine.lock:  # peers of one UD queue pair may come at the same time; to move it never blocks
            if self.qp.state not in (QpState.RTR, QpState.RTS):
                self.qp.take(step_to_rtr(path, QpType.UD), path)

    def to_rts(self, path: Path, step: Transition | None = None) -> None:
        """RTR to RTS: from here on it may send. Arguments as of :meth:`to_rtr`."""
        if not self.is_ud:
            self.qp.take(step or step_to_rts(path, self.endpoint.qp_type), path)
            return
        with self.engine.lock:
            if self.qp.state is not QpState.RTS:
                self.qp.take(step_to_rts(path, QpType.UD), path)

    def close(self) -> None:
        """Destroy the queue pair; what is outstanding counts as flushed. Twice is fine.

        Raises:
            VerbsError: the library refuses. Close again later.
        """
        with self.engine.lock:
            if self.sent and not self.qp.closed:
                with suppress(RdmaConnectError):  # where the device is gone nothing has completed
                    self.engine.progress()
            self.qp.close()
            self.engine.transceivers.pop(self.qp.qp_num, None)
            self._flush()


def step_to_init(qp_type: QpType, port: PortAddress, pkey: int | None) -> Transition:
    """RESET to INIT, before there is a path.

    Args:
        qp_type: RC, UC or UD.
        port: the port it is on.
        pkey: partition key wished, or None.
    """
    wanted = (
        index
        for index, key in enumerate(port.pkeys)
        if key & 0x7FFF and (pkey is None or key & 0x7FFF == pkey & 0x7FFF)
    )
    values = SimpleNamespace(
        port_num=port.port_num, qp_access_flags=ACCESS[qp_type], qkey=0, pkey_index=next(wanted, 0)
    )
    return Transition(qp_type, QpState.RESET, QpState.INIT, values)


def step_to_rtr(path: Path, qp_type: QpType) -> Transition:
    """INIT to RTR, along a path; INIT took the first P_Key that could be, this sets the one agreed on."""
    return Transition(qp_type, QpState.INIT, QpState.RTR, path, QpAttrMask.PKEY_INDEX)


def step_to_rts(path: Path, qp_type: QpType) -> Transition:
    """RTR to RTS, along a path."""
    return Transition(qp_type, QpState.RTR, QpState.RTS, path)
