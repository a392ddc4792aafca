"""One queue pair with its receives posted, and what has come and gone on it."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from ..abi import QpAttrMask, QpState, QpType, SendFlags, WcFlags, WcOpcode, WcStatus
from ..agreement.endpoint import GRH_BYTES, Endpoint, Gid, PortAddress, RemoteRegion
from ..agreement.options import Sizes
from ..agreement.path import ACCESS, Path
from ..errors import CompletionError, PostError, RdmaConnectError, StateError
from ..objects.address import UdAddress
from ..objects.memory import Sge
from ..objects.queuepair import QueuePair
from ..objects.transition import Transition
from ..objects.work_request import RecvRequest, SendRequest
from .engine import Engine, Ring
from .transfer import Part, Piece, Sent

__all__ = ["Source", "Transceiver", "step_to_init", "step_to_rtr", "step_to_rts"]

#: work-request ids from here on are sends; below they are receive slots
_SEND = 1 << 32
_SIGNALED = int(SendFlags.SIGNALED)
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
        self._request, self._list = SendRequest(), list[SendRequest]()
        #: how many in a row are not signalled
        self._quiet = 0
        self._next_id, self._most_sent = _SEND, sizes.send_depth
        self.broken: CompletionError | None = None
        #: work-request id and transfer of each that has not completed, in the order of posting
        self.sent: deque[tuple[int, Sent]] = deque()
        self.inboxes: dict[Source, deque[tuple[int, int]]] = {} if self.is_ud else {None: deque()}
        self.immediates: deque[tuple[int, int]] = deque()
        #: slot -> its receive, made when it is first given back: many connections never use most of theirs
        self._receives: dict[int, RecvRequest] = {}
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

    def room(self) -> bool:
        """Whether another send may be posted. Called with the engine's lock held."""
        return len(self.sent) < self._most_sent

    def post(self, sent: Sent, part: Part, to: UdAddress | None = None) -> bool:
        """Post a transfer of one work request.

        Args:
            sent: what becomes of it.
            part: what it does.
            to: for UD, where it goes.

        Returns:
            False if there was no room; try again after :meth:`Engine.progress`.

        Raises:
            VerbsError: as ``ibv_post_send``.
        """
        with self.engine.lock:
            if len(self.sent) >= self._most_sent:
                return False
            self._next_id = wr_id = self._next_id + 1
            _fill(self._request, wr_id, part, to, _SIGNALED)
            self._post(wr_id, sent)
            return True

    def post_inline(self, sent: Sent, data: bytes | bytearray, remote: RemoteRegion | None = None) -> bool:
        """The same for short data over RC and UC, which is copied: the hot path."""
        with self.engine.lock:
            if len(self.sent) >= self._most_sent:
                return False
            self._next_id = wr_id = self._next_id + 1
            self._request.fill_inline(wr_id, sent.opcode, data, remote=remote)
            self._post(wr_id, sent)
            return True

    def _post(self, wr_id: int, sent: Sent) -> None:
        self._quiet, sent.posted = 0, True
        self.sent.append((wr_id, sent))  # first: Ctrl-C may come when it is posted
        try:
            self.qp.post_send(self._request)
        except Exception:
            self.sent.pop()
            sent.posted = False
            raise

    def post_list(self, work: list[Piece], to: UdAddress | None = None) -> bool | None:
        """Post work requests as one list, as many as there is room for, and take those out of ``work``.

        Only the last one is signalled, and as many before that there is room again in time.

        Returns:
            None if some are left: try again after :meth:`Engine.progress`.

        Raises:
            VerbsError: as ``ibv_post_send``; those before the first bad one are taken out.
        """
        on_the_way, requests = self.sent, self._list
        with self.engine.lock:
            now = work[: self._most_sent - len(on_the_way)]
            if not now:
                return None
            requests += [SendRequest() for _ in range(len(now) - len(requests))]
            for at, (sent, part, last) in enumerate(now, 1):
                self._next_id = wr_id = self._next_id + 1
                signaled = at == len(now) or self._quiet >= self._most_sent // 2
                self._quiet = 0 if signaled else self._quiet + 1
                _fill(requests[at - 1], wr_id, part, to, _SIGNALED if signaled else 0)
                sent.left, sent.posted = sent.left + (not last), last
                on_the_way.append((wr_id, sent))
            try:
                self.qp.post_send(*requests[: len(now)])
            except Exception as e:
                posted = (e.posted if isinstance(e, PostError) else 0) or 0
                for sent, _, last in reversed(now[posted:]):
                    on_the_way.pop()
                    sent.left, sent.posted = sent.left - (not last), False
                del work[:posted]
                raise
            del work[: len(now)]
            return None if work else True

    def complete(self, wc: Any) -> None:
        """Take one completion. Called with the engine's lock held."""
        wr_id, status = wc.wr_id, wc.status
        if status and self.broken is None:
            self.broken = CompletionError(
                WcStatus(status), vendor_err=wc.vendor_err, wr_id=wr_id, qp_num=wc.qp_num,
                opcode="receive" if wr_id < _SEND else "send", doing=f"use {self.qp.name}",
            )  # fmt: skip
        if wr_id < _SEND:
            if status:
                return
            if wc.opcode == _WITH_IMM:
                self.immediates.append((wr_id, socket.ntohl(wc.imm_data)))
                return
            inbox = self.inboxes.get(self._source(wr_id, wc) if self.is_ud else None)
            if inbox is None:
                self.repost(wr_id)  # a datagram of somebody who is not connected
            else:
                inbox.append((wr_id, wc.byte_len - self._grh))
            return
        on_the_way = self.sent
        while on_the_way and on_the_way[0][0] <= wr_id:  # those before it that give no completion have succeeded
            posted, sent = on_the_way.popleft()
            if status and posted == wr_id:
                sent.ended(status, wc.vendor_err, wr_id)
            else:
                sent.ended()

    def _flush(self) -> None:
        """What is on its way never comes to its end."""
        while self.sent:
            wr_id, sent = self.sent.popleft()
            sent.ended(WcStatus.WR_FLUSH_ERR, 0, wr_id)

    # ---- in

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

    @contextmanager
    def lend(self, slot: int, length: int) -> Iterator[memoryview]:
        """The bytes themselves, for a while; then the slot goes back to the device."""
        inboxes, view = self.inboxes, self.payload(slot, length)
        try:
            yield view
        finally:
            with self.engine.lock:
                if inboxes is self.inboxes:  # else all slots are back at the device since restart()
                    self.repost(slot)
        try:
            view.release()
        except BufferError:
            raise BufferError(
                "end recv_view: what was made of the view is still there. Copy what is to stay."
            ) from None

    def repost(self, slot: int) -> None:
        """Give a slot back to the device. Called with the engine's lock held."""
        if self.broken is None:
            request = self._receives.get(slot)
            if request is None:
                at = self._ring.mr.addr + self._base + slot * self.slot_size
                request = self._receives[slot] = RecvRequest(slot, at, self.slot_size, self._ring.mr.lkey)
            try:
                self.qp.post_recv(request)
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


def _fill(request: SendRequest, wr_id: int, part: Part, to: UdAddress | None, flags: int) -> None:
    """Have a work request do what it is to do."""
    opcode, place, remote, imm, inline = part
    if to is not None:
        request.send(wr_id, sge=None if inline else Sge(*place), inline=inline, to=to, flags=flags)
    elif imm is not None and remote is not None:
        sge = None if inline else Sge(*place)
        request.rdma_write_imm(wr_id, remote, imm, sge=sge, inline=inline, flags=flags)
    elif inline is not None:
        request.fill_inline(wr_id, opcode, inline, remote=remote, flags=flags)
    else:
        request.fill(wr_id, opcode, *place, remote=remote, flags=flags)
