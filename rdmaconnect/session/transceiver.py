"""One queue pair with its receives posted, and what has come and gone on it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ..abi import QpState, QpType, SendFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from ..agreement.endpoint import GRH_BYTES, Endpoint, Gid, RemoteRegion
from ..agreement.options import Sizes
from ..agreement.path import Path
from ..errors import CompletionError, PostError, RdmaConnectError, StateError
from ..objects.address import UdAddress
from ..objects.queuepair import QueuePair
from ..objects.transition import Transition
from ..objects.work_request import RecvRequest, SendList, SendRequest
from .engine import PROBES, Engine, Ring
from .life import UNBORN
from .restarting import Restarting, Source
from .steps import step_to_rtr, step_to_rts
from .transfer import Part, Piece, Sent, fill, words

__all__ = ["Source", "Transceiver"]

#: work-request ids from here on are sends; below they are receive slots
_SEND = 1 << 32
_SIGNALED = int(SendFlags.SIGNALED)
_WITH_IMM = int(WcOpcode.RECV_RDMA_WITH_IMM)
#: the slots that a proof takes on a queue pair that nothing else has come to
_PROBED = [*range(PROBES)]


class Transceiver(Restarting):
    """One queue pair with its receives posted, and what has come and gone on it.

    Made in INIT, so that receives are there before the peer can send.

    Args:
        engine: what it shares.
        qp: its queue pair, in RESET; from here on it is the transceiver's.
        endpoint: what the peer is told of it.
        sizes: how much of what.
        ring: registered memory; ``recv_depth`` slots from ``slot`` on are this transceiver's.
        to_init: the step from RESET to INIT, which all of a port take alike: see ``steps``.

    Attributes:
        endpoint: as given; with another PSN after :meth:`restart`.
        broken: the first failure, or None; on_broken is called at it, if it is set, with the engine's lock held.
        takes: where there is no side channel, says whether a message is not the application's; else None.
        life: which life of its connection this is, for what is posted.
        inboxes: source -> slot and bytes of each message that has come in this life.
        unread: the same of earlier lives.
        immediates: (slot, immediate data) of each write that the peer told of; the slot is to be given back.
        slot_size: bytes of a slot: the payload and, for UD, 40 bytes of GRH in front of it.
    """

    broken: CompletionError | None = None
    on_broken: Callable[[], None] | None = None
    life = UNBORN
    _next_id = _SEND
    #: how many in a row are not signalled
    _quiet = 0

    def __init__(
        self,
        engine: Engine,
        qp: QueuePair,
        endpoint: Endpoint,
        sizes: Sizes,
        ring: Ring,
        slot: int,
        to_init: Transition,
    ) -> None:
        self._begin(engine, qp, endpoint, sizes, to_init)
        self._ring, self.slot_size = ring, ring.slot_size
        self._memory, self._view = ring.memory, ring.view
        self._base = slot * ring.slot_size
        self._grh = GRH_BYTES if self.is_ud else 0
        self._request, self._list = engine.request, engine.requests
        self._most_sent = sizes.send_depth
        #: slot -> its receive, made when it is first given back: many connections never use most of theirs
        self._receives: dict[int, RecvRequest] = {}
        self._init(to_init)

    def _begin(self, engine: Engine, qp: QueuePair, endpoint: Endpoint, sizes: Sizes, to_init: Transition) -> None:
        """Nothing has come or gone yet; from here on the engine knows it."""
        self.engine, self.qp, self.endpoint, self.sizes, self._to_init = engine, qp, endpoint, sizes, to_init
        self.is_ud = qp.qp_type == QpType.UD
        #: work-request id and transfer of each that has not completed, in the order of posting
        self.sent: deque[tuple[int, Sent]] = deque()
        # lists: they are short, and one that is empty is a tenth of a deque
        self.inboxes: dict[Source, list[tuple[int, int]]] = {} if self.is_ud else {None: []}
        self.unread: list[tuple[int, int]] = []
        self.immediates: list[tuple[int, int]] = []
        #: slots that somebody looks into; and those that were to be given back when the device took none any more
        self._lent: set[int] = set()
        self._idle: set[int] = set()
        engine.transceivers[qp.qp_num] = self

    def _init(self, step: Transition) -> None:
        self.qp.take(step, self.endpoint)
        self.qp.post_recv(self._ring.receives.at(self._ring.mr.addr + self._base))

    # ---- out

    def room(self) -> bool:
        """Whether another send may be posted. Called with the engine's lock held."""
        return len(self.sent) < self._most_sent

    def post(self, sent: Sent, part: Part, to: UdAddress | None = None, *, proving: bool = False) -> bool:
        """Post a transfer of one work request.

        Args:
            sent: what becomes of it.
            part: what it does.
            to: for UD, where it goes.
            proving: whether it is not a user's, and goes though theirs are held.

        Returns:
            False if there was no room; try again after :meth:`Engine.progress`.

        Raises:
            VerbsError: as ``ibv_post_send``.
            LifeOver: it is for memory of an earlier life's peer.
        """
        with self.engine.lock:
            if len(self.sent) >= (self.sizes.send_depth if proving else self._most_sent):
                return False
            if part.target is not None:
                self._check(sent, part.target)
            self._next_id = wr_id = self._next_id + 1
            fill(self._request, wr_id, part, to, _SIGNALED)
            self._post(wr_id, sent)
            return True

    def post_probes(self, probes: Sequence[Sent], requests: SendList, addr: int) -> bool:
        """Post messages of a proof as one list, over RC or UC.

        Args:
            probes: what becomes of each.
            requests: they.
            addr: where they begin.

        Returns:
            False if there was no room.

        Raises:
            VerbsError: as ``ibv_post_send``.
        """
        with self.engine.lock:
            if len(self.sent) + len(probes) > self.sizes.send_depth:
                return False
            wr_id = self._next_id + 1
            self._next_id += len(probes)
            self.sent += zip(range(wr_id, self._next_id + 1), probes, strict=True)
            try:
                self.qp.post_send(requests.at(addr, wr_id))
            except Exception:
                for _ in probes:
                    self.sent.pop()
                raise
            return True

    def post_inline(self, opcode: WrOpcode, data: bytes | bytearray, remote: RemoteRegion | None = None) -> Sent | None:
        """Post short data over RC or UC, which is copied: the hot path. None if there was no room."""
        with self.engine.lock:
            if len(self.sent) >= self._most_sent:
                return None
            if remote is not None and remote.life is not None and remote.life.ended:
                self.life.check(remote, words(opcode, len(data)))
            self._next_id = wr_id = self._next_id + 1
            self._request.fill_inline(wr_id, opcode, data, remote)
            sent = Sent(opcode, len(data))
            self._post(wr_id, sent)
            return sent

    def _check(self, sent: Sent, region: RemoteRegion) -> None:
        if region.life is not None and region.life.ended:
            self.life.check(region, sent.doing)

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
            now = work[: max(0, self._most_sent - len(on_the_way))]
            if not now:
                return None
            for sent, part, _ in now:
                if part.target is not None:
                    self._check(sent, part.target)
            requests += [SendRequest() for _ in range(len(now) - len(requests))]
            for at, (sent, part, last) in enumerate(now, 1):
                self._next_id = wr_id = self._next_id + 1
                signaled = at == len(now) or self._quiet >= self._most_sent // 2
                self._quiet = 0 if signaled else self._quiet + 1
                fill(requests[at - 1], wr_id, part, to, _SIGNALED if signaled else 0)
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
            self.hold()  # what is posted from here on could only fail too, and each time leave room for more
            if self.on_broken is not None:
                self.on_broken()
        if wr_id < _SEND:
            if status:
                self._idle.add(wr_id)
                return
            if wc.opcode == _WITH_IMM:
                self.immediates.append((wr_id, socket.ntohl(wc.imm_data)))
                return
            inbox = self.inboxes.get(self._source(wr_id, wc) if self.is_ud else None)
            message = wr_id, wc.byte_len - self._grh
            if inbox is None or (self.takes is not None and self.takes(self.payload(*message))):
                self.repost(wr_id)  # a datagram of somebody who is not connected, or not for the application
            else:
                inbox.append(message)
            return
        on_the_way = self.sent
        while on_the_way and on_the_way[0][0] <= wr_id:  # those before it that give no completion have succeeded
            posted, sent = on_the_way.popleft()
            if status and posted == wr_id:
                sent.life = self.life
                sent.ended(status, wc.vendor_err, wr_id)
            else:
                sent.ended()

    def _flush(self) -> None:
        """What is on its way never comes to its end."""
        while self.sent:
            wr_id, sent = self.sent.popleft()
            sent.life = self.life
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

    def lend(self, slot: int, length: int) -> AbstractContextManager[memoryview]:
        """The bytes themselves, for a while; then the slot goes back to the device. The engine's lock is held."""
        self._lent.add(slot)
        return self._lend(slot, length)

    def take(self, slot: int, length: int) -> bytes:
        """A copy of them; the slot goes back to the device. Called with the engine's lock held."""
        start = self._base + slot * self.slot_size + self._grh
        data = self._memory[start : start + length]
        self.repost(slot)
        return data

    @contextmanager
    def _lend(self, slot: int, length: int) -> Iterator[memoryview]:
        view = self.payload(slot, length)
        try:
            yield view
        finally:
            with self.engine.lock:
                self._lent.discard(slot)
                self.repost(slot)
        try:
            view.release()
        except BufferError:
            raise BufferError(
                "end recv_view: what was made of the view is still there. Copy what is to stay."
            ) from None

    def repost(self, slot: int) -> None:
        """Give a slot back to the device. Called with the engine's lock held."""
        if self.broken is not None:
            self._idle.add(slot)
            return
        request = self._receives.get(slot)
        if request is None:
            if slot >= self.sizes.recv_depth:  # a spare one
                return
            request = self._receives[slot] = self._receive(slot)
        try:
            self.qp.post_recv(request)
        except StateError:
            if not self.qp.closed:
                raise

    def repost_all(self, slots: list[int]) -> None:
        """The same of several. The first ones go back as one list: for that no receive need be made of each."""
        if self.broken is None and slots == _PROBED:
            self.qp.post_recv(self._ring.again.at(self._ring.mr.addr + self._base))
            return
        for slot in slots:
            self.repost(slot)

    def _receive(self, slot: int) -> RecvRequest:
        at = self._ring.mr.addr + self._base + slot * self.slot_size
        return RecvRequest(slot, at, self.slot_size, self._ring.mr.lkey)

    def open(self, source: Source) -> None:
        """Take messages of one more peer, over UD."""
        with self.engine.lock:
            self.inboxes.setdefault(source, [])

    def shut(self, source: Source) -> None:
        """Take messages of that peer no more; without any peer left the queue pair is destroyed."""
        with self.engine.lock:
            self.inboxes.pop(source, None)
            if not self.inboxes:
                self.close()

    # ---- states

    def to_rtr(self, path: Path, step: Transition | None = None, struct: Any = None) -> None:
        """INIT to RTR: from here on the peer's packets are taken. Can block for seconds on RoCE.

        A UD queue pair is there already where it serves another peer.

        Args:
            path: its path.
            step: made ready, where many queue pairs take it: see ``steps``.
            struct: its own of :meth:`Transition.structs`.
        """
        if not self.is_ud:
            self.qp.take(step or step_to_rtr(path, self.endpoint.qp_type), path, struct)
            return
        with self.engine.lock:  # peers of one UD queue pair may come at the same time; to move it never blocks
            if self.qp.state not in (QpState.RTR, QpState.RTS):
                self.qp.take(step_to_rtr(path, QpType.UD), path)

    def to_rts(self, path: Path, step: Transition | None = None, struct: Any = None) -> None:
        """RTR to RTS: from here on it may send. Arguments as of :meth:`to_rtr`."""
        if not self.is_ud:
            self.qp.take(step or step_to_rts(path, self.endpoint.qp_type), path, struct)
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
            if self.sent:
                self._flush()
