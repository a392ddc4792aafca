"""Queue pairs, address handles and shared receive queues: what they are, and how a queue pair sends."""

from __future__ import annotations

import errno
import math
import time
from collections import deque
from typing import Any

from rdmaconnect.abi import (
    EventType,
    QpAttrMask,
    SendFlags,
    WcStatus,
    ibv_ah,
    ibv_ah_attr,
    ibv_qp,
    ibv_qp_attr,
    ibv_qp_cap,
    ibv_srq,
)
from rdmaconnect.agreement.transitions import FIELDS, TABLE

from .arena import Object, Refused
from .device import Port
from .memory import Mw, NoAccess, Pd, point, pointed
from .network import (
    ATOMICS,
    BIND_MW,
    DROPPED,
    LOCAL_INV,
    NOT_READY,
    PSN,
    RC,
    READ,
    UC,
    UD,
    Answer,
    Message,
    completion,
    gather,
    scatter,
)

RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
M = QpAttrMask
STATE, CUR, AV, PORT, PKEY_INDEX = (int(b) for b in (M.STATE, M.CUR_STATE, M.AV, M.PORT, M.PKEY_INDEX))
#: (type, from, to) -> (bits that must be, bits that may be)
RULES = {
    (int(kind), int(frm), int(to)): (int(row.required), int(row.required | row.optional) | STATE)
    for kind, rows in TABLE.items()
    for (frm, to), row in rows.items()
}
_FIELDS = [(int(bit), names) for bit, names in FIELDS.items() if bit not in (M.STATE, M.CUR_STATE, M.CAP)]
SIGNALED, SOLICITED, INLINE = (int(f) for f in (SendFlags.SIGNALED, SendFlags.SOLICITED, SendFlags.INLINE))
#: what a completion calls each opcode of a work request
_DONE = {0: 1, 1: 1, 2: 0, 3: 0, 4: 2, 5: 3, 6: 4, 7: 6, 8: 5, 9: 0, 10: 7, 14: 8, 15: 9}
#: what each type can send
CAN = {RC: {*range(10), 14, 15}, UC: {0, 1, 2, 3, 7, 8, 9}, UD: {2, 3}}
#: ``min_rnr_timer`` codes in ms. Source: InfiniBand specification, table 45
_RNR_MS = (
    655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92, 2.56, 3.84,
    5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52,
)  # fmt: skip

Pieces = list[tuple[int, int, int]]


class Send:
    """A send work request that was posted."""

    __slots__ = ("attempt", "data", "fields", "flags", "opcode", "pieces", "rnr_until", "until", "wr_id")

    def __init__(self, wr_id: int, opcode: int, flags: int, pieces: Pieces, data: bytes | None) -> None:
        self.wr_id, self.opcode, self.flags, self.pieces, self.data = wr_id, opcode, flags, pieces, data
        self.fields: dict[str, Any] = {}
        self.attempt = 0
        self.until = self.rnr_until = math.inf


class Ah(Object):
    """An address handle."""

    kind, struct, typed = "ah", ibv_ah, ("ibv_ah",)

    def __init__(self, world: Any, pd: Pd, attr: ibv_ah_attr) -> None:
        world.room_for(pd.context, "ah")
        super().__init__(world, pd)
        self.attr = ibv_ah_attr.from_buffer_copy(attr)
        point(self.c, "context", pd.context)
        point(self.c, "pd", pd)


class Srq(Object):
    """A shared receive queue."""

    kind, struct, typed = "srq", ibv_srq, ("ibv_srq",)

    def __init__(self, world: Any, pd: Pd, max_wr: int, max_sge: int, limit: int) -> None:
        world.room_for(pd.context, "srq")
        device = pd.context.device
        if not 0 < max_wr <= device.limit("max_srq_wr") or not 0 < max_sge <= device.limit("max_srq_sge"):
            raise Refused(errno.EINVAL)
        super().__init__(world, pd)
        self.context, self.max_wr, self.max_sge, self.limit = pd.context, max_wr, max_sge, limit
        self.recvs: deque[tuple[int, Pieces]] = deque()
        self.qps: set[Qp] = set()
        point(self.c, "context", pd.context)
        point(self.c, "pd", pd)


class Qp(Object):
    """A queue pair.

    Attributes:
        sends: posted and not completed, the oldest first.
        recvs: posted and not used.
        psn: what it sends next; ``expected``: what it takes next.
        draining: whether in SQD a send is still under way.
        waiters: numbers of the queue pairs that wait for a receive here.
        groups: the multicast GIDs that it is in.
    """

    kind, struct, typed = "qp", ibv_qp, ("ibv_qp", "ibv_qp_ex")

    def __init__(self, world: Any, pd: Pd, init: Any) -> None:
        world.room_for(pd.context, "qp")
        cqs = [pointed(init, name, "ibv_cq") for name in ("send_cq", "recv_cq")]
        self.srq: Srq | None = pointed(init, "srq", "ibv_srq")
        self.qp_type = init.qp_type
        if self.qp_type not in CAN:
            raise Refused(errno.EOPNOTSUPP)
        if None in cqs:
            raise Refused(errno.EINVAL)
        cap, limit = init.cap, pd.context.device.limit
        most = max(cap.max_send_wr, cap.max_recv_wr), max(cap.max_send_sge, cap.max_recv_sge)
        if most[0] > limit("max_qp_wr") or most[1] > limit("max_sge") or cap.max_inline_data > 1024:
            raise Refused(errno.EINVAL)
        super().__init__(world, pd, *{cqs[0], cqs[1]}, self.srq)
        self.pd, self.context = pd, pd.context
        self.send_cq, self.recv_cq = cqs
        self.cap = ibv_qp_cap.from_buffer_copy(cap)
        self.sig_all = bool(init.sq_sig_all)
        self.groups: set[bytes] = set()
        self.qp_num = self.head.qp_num = world.network.enter(self)
        for field, to in (("context", pd.context), ("pd", pd), ("srq", self.srq)):
            point(self.head, field, to)
        self.head.qp_context = init.qp_context
        point(self.head, "send_cq", self.send_cq)
        point(self.head, "recv_cq", self.recv_cq)
        self.head.qp_type = self.qp_type
        if self.srq is not None:
            self.srq.qps.add(self)
        self._empty()

    def __str__(self) -> str:
        return f"qp {self.qp_num:#x}"

    def _empty(self) -> None:
        self.state = self.head.state = RESET
        self.attr = ibv_qp_attr()
        self.sends: deque[Send] = deque()
        self.recvs: deque[tuple[int, Pieces]] = deque()
        self.waiters: set[int] = set()
        self.psn = self.expected = 0
        self._waiting = self._pumping = self.draining = False

    @property
    def head(self) -> Any:
        """Its ``struct ibv_qp``."""
        return self.c

    @property
    def port(self) -> Port | None:
        """The port that it is on."""
        return self.context.device.ports[self.attr.port_num - 1] if self.attr.port_num else None

    @property
    def dgid(self) -> bytes:
        """The peer's GID; empty where LIDs are used."""
        return bytes(self.attr.ah_attr.grh.dgid.raw) if self.attr.ah_attr.is_global else b""

    def free(self, how: str) -> None:
        if self.groups:
            raise Refused(errno.EBUSY)
        super().free(how)
        if self.srq is not None:
            self.srq.qps.discard(self)
        self.clean()
        self.state = RESET
        self.sends.clear()
        del self.world.network.qps[self.qp_num]

    def clean(self) -> None:
        """Take what it has completed out of its completion queues, where the device does so."""
        if not self.context.device.keeps_completions:
            for cq in {self.send_cq, self.recv_cq}:
                cq.clean(self.qp_num)

    # ---- states

    def modify(self, attr: ibv_qp_attr, mask: int) -> None:
        """The state machine's step, whose mask and path were checked."""
        if mask & STATE and attr.qp_state == RESET:
            self.clean()
            self._empty()
            return
        for bit, names in _FIELDS:
            if bit & mask:
                for name in names:
                    setattr(self.attr, name, getattr(attr, name))
        if mask & M.SQ_PSN:
            self.psn = attr.sq_psn
        if mask & M.RQ_PSN:
            self.expected = attr.rq_psn
        if not mask & STATE:
            return
        if attr.qp_state == ERR:
            self.fail()
        self.state = self.head.state = attr.qp_state
        if self.state == SQD:
            self.draining = self._waiting
            self._drained()
        elif self.state == RTS:
            self.draining = False
            self.pump()

    def _drained(self) -> None:
        """In SQD: tell that nothing is under way any more, if that was asked for."""
        if not self.draining and self.attr.en_sqd_async_notify:
            self.attr.en_sqd_async_notify = 0
            self.world.event(self.context, EventType.SQ_DRAINED, self.address)

    def fail(self, status: int | None = None) -> None:
        """To ERR: the oldest send ends with ``status``, all else is flushed."""
        was, self.state, self._waiting, self.draining = self.state, ERR, False, False
        while self.sends:
            self._done(self.sends.popleft(), WcStatus.WR_FLUSH_ERR if status is None else status)
            status = None
        while self.recvs:
            self.received(self.recvs.popleft()[0], WcStatus.WR_FLUSH_ERR)
        if self.srq is not None and was != ERR:
            self.world.event(self.context, EventType.QP_LAST_WQE_REACHED, self.address)

    # ---- receives

    def take_recv(self) -> tuple[int, Pieces] | None:
        """The oldest receive, or None."""
        srq = self.srq
        if srq is None:
            return self.recvs.popleft() if self.recvs else None
        if not srq.recvs:
            return None
        found = srq.recvs.popleft()
        if len(srq.recvs) < srq.limit:
            srq.limit = 0
            self.world.event(self.context, EventType.SRQ_LIMIT_REACHED, srq.address)
        return found

    def give_back(self, wqe: tuple[int, Pieces]) -> None:
        """It was not used after all."""
        (self.recvs if self.srq is None else self.srq.recvs).appendleft(wqe)

    def received(
        self, wr_id: int, status: int, opcode: int = 0, message: Message | None = None, flags: int = 0, size: int = 0
    ) -> None:
        """Complete a receive."""
        wc = completion(wr_id, status, self.qp_num, opcode, size, message, flags)
        self.recv_cq.add(self.qp_num, wc, bool(status) or bool(message and message.solicited))

    # ---- sends

    def post(self, send: Send) -> None:
        """One more."""
        self.sends.append(send)
        if self.state == ERR:
            self.fail()

    def pump(self) -> None:
        """Send what can be sent."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self.sends and (self.state == RTS or self.draining) and not self._waiting:
                send = self.sends[0]
                if send.opcode in (LOCAL_INV, BIND_MW):
                    self._local(send)
                    continue
                try:
                    message = self._message(send)
                except NoAccess:
                    self.fail(WcStatus.LOC_PROT_ERR)
                    return
                if message.length > (self.port.max_msg_sz if self.qp_type != UD else message.mtu):
                    self.fail(WcStatus.LOC_LEN_ERR)
                    return
                self._waiting = True
                self.world.network.carry(message, lambda answer, m=message, s=send: self._answered(s, m, answer))
        finally:
            self._pumping = False

    def _message(self, send: Send) -> Message:
        ah = send.fields["ah"] if self.qp_type == UD else self.attr.ah_attr
        port = self.context.port(ah.port_num or self.attr.port_num)
        data = send.data
        length = send.fields.get("length", sum(size for _, size, _ in send.pieces) if data is None else len(data))
        if data is None:
            data = gather(self, send.pieces) if send.opcode not in (READ, *ATOMICS) and send.pieces else b""
        sgid, _ = port.slots().get(ah.grh.sgid_index, (b"", 0)) if ah.is_global else (b"", 0)
        grh = ah.grh
        mtu = port.active_mtu if self.qp_type == UD else 128 << self.attr.path_mtu
        return Message(
            self.qp_type, self.qp_num, send.fields.get("remote_qpn", self.attr.dest_qp_num), send.opcode, sgid,
            bytes(grh.dgid.raw) if ah.is_global else b"", ah.dlid, self.psn, mtu, port.pkeys[self.attr.pkey_index],
            data, length, send.fields.get("imm", 0), send.fields.get("remote_addr", 0), send.fields.get("rkey", 0),
            send.fields.get("compare_add", 0), send.fields.get("swap", 0), send.fields.get("remote_qkey", 0),
            bool(send.flags & SOLICITED), grh.traffic_class, grh.flow_label, grh.hop_limit, ah.sl, port.lid,
        )  # fmt: skip

    def _answered(self, send: Send, message: Message, answer: Answer) -> None:
        """What became of a message; an answer that comes too late is nobody's."""
        if not self._waiting or not self.sends or self.sends[0] is not send:
            return
        status = answer.status if self.qp_type == RC else 0
        if status in (DROPPED, NOT_READY):
            self._again(send, status)
            return
        self._waiting = False
        if status:
            self.fail(status)
            return
        if answer.data:
            try:
                scatter(self, send.pieces, answer.data)
            except NoAccess:
                self.fail(WcStatus.LOC_PROT_ERR)
                return
        self.psn = (self.psn + message.packets) & PSN
        self.sends.popleft()
        self._done(send, 0, message.length)
        if self.draining:
            self.draining = False
            self._drained()
        self.pump()

    def _again(self, send: Send, why: int) -> None:
        """Try once more later, unless the patience of this queue pair is at its end."""
        network, now, attr = self.world.network, time.monotonic(), self.attr
        if why == NOT_READY:
            if attr.rnr_retry < 7 and send.rnr_until == math.inf:
                peer = network.qps.get(attr.dest_qp_num)
                send.rnr_until = now + attr.rnr_retry * _RNR_MS[peer.attr.min_rnr_timer if peer else 12] / 1000
            send.until = math.inf
        elif send.until == math.inf:
            if network.ack_timeout_s is not None:
                send.until = now + network.ack_timeout_s
            elif attr.timeout:
                send.until = now + 4.096e-6 * 2**attr.timeout * (attr.retry_cnt + 1)
        if now >= min(send.until, send.rnr_until):
            self.fail(WcStatus.RNR_RETRY_EXC_ERR if why == NOT_READY else WcStatus.RETRY_EXC_ERR)
            return
        send.attempt += 1
        pause = min(0.001 * 2 ** min(send.attempt, 6), 0.05, max(0.0, min(send.until, send.rnr_until) - now))
        network.clock.later(pause, lambda: self._later(send))

    def _later(self, send: Send) -> None:
        with self.world.lock:
            if self.sends and self.sends[0] is send:
                self.retry()

    def retry(self) -> None:
        """Send the oldest once more, if it waits."""
        if self._waiting and not self._pumping:
            self._waiting = False
            self.pump()

    def _local(self, send: Send) -> None:
        """What needs no network."""
        if send.opcode == BIND_MW:
            mw, mr, info, key = send.fields["bind"]
            fine = mw.bind(info, mr, key, self.qp_num if mw.c.type == 2 else None)
        else:
            mw = self.world.keys.get(send.fields["imm"])
            fine = isinstance(mw, Mw)
            if fine:
                mw.unbind()
        if not fine:
            self.fail(WcStatus.MW_BIND_ERR)
            return
        self.sends.popleft()
        self._done(send, 0)

    def _done(self, send: Send, status: int, length: int = 0) -> None:
        if status or self.sig_all or send.flags & SIGNALED:
            wc = completion(send.wr_id, status, self.qp_num, _DONE[send.opcode], length)
            self.send_cq.add(self.qp_num, wc, bool(status))
