"""What lies between queue pairs: messages, their losses, paths that are cut, and what the far end does with them."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from rdmaconnect.abi import AccessFlags, EventType, LinkLayer, PortState, QpState, QpType, WcOpcode, WcStatus, WrOpcode

from .arena import Refused
from .clock import Clock
from .completion import WC
from .gid import is_multicast, raw_gid
from .grh import GRH_BYTES, header
from .memory import LOCAL_WRITE, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, Mw, NoAccess, reach

RC, UC, UD = int(QpType.RC), int(QpType.UC), int(QpType.UD)
RTR, RTS, SQD, ERR = int(QpState.RTR), int(QpState.RTS), int(QpState.SQD), int(QpState.ERR)
_O = WrOpcode
WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CMP_SWP, FETCH_ADD, LOCAL_INV, BIND_MW, SEND_INV = range(10)
FLUSH, ATOMIC_WRITE = int(_O.FLUSH), int(_O.ATOMIC_WRITE)
ATOMICS = (CMP_SWP, FETCH_ADD)
_NEED = {
    WRITE: REMOTE_WRITE, WRITE_IMM: REMOTE_WRITE, READ: REMOTE_READ, CMP_SWP: REMOTE_ATOMIC,
    FETCH_ADD: REMOTE_ATOMIC, ATOMIC_WRITE: REMOTE_WRITE, FLUSH: int(AccessFlags.FLUSH_GLOBAL),
}  # fmt: skip
PSN = 0xFFFFFF
#: answers that are no ``ibv_wc_status``
DROPPED, NOT_READY = -1, -2


class Message(NamedTuple):
    """What one send work request puts on the wire.

    ``dgid`` and ``sgid`` are empty where LIDs are used. ``length`` is that of a read too; ``imm`` is in network
    order, or the key that is to be invalidated.
    """

    qp_type: int
    qp_num: int
    dest_qp_num: int
    opcode: int
    sgid: bytes
    dgid: bytes
    dlid: int
    psn: int
    mtu: int
    pkey: int
    data: bytes
    length: int
    imm: int = 0
    remote_addr: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    qkey: int = 0
    solicited: bool = False
    traffic_class: int = 0
    flow_label: int = 0
    hop_limit: int = 0
    sl: int = 0
    slid: int = 0

    @property
    def packets(self) -> int:
        """How many packets it takes."""
        return max(1, -(-self.length // self.mtu))


class Answer(NamedTuple):
    """What comes back: a status, :data:`DROPPED` where nothing does, :data:`NOT_READY` without a receive; and data."""

    status: int
    data: bytes = b""


ACK, DROP, RNR = Answer(0), Answer(DROPPED), Answer(NOT_READY)


class Trouble:
    """Something that goes wrong in the network, until it is removed; also a context manager.

    Attributes:
        seen: how often it did.
    """

    def __init__(self, troubles: list[Trouble], hits: Callable[[Any], bool]) -> None:
        self._troubles, self._hits, self.seen = troubles, hits, 0
        troubles.append(self)

    def hits(self, what: Any) -> bool:
        """Whether it is of this one; counts it."""
        if self._hits(what):
            self.seen += 1
            return True
        return False

    def remove(self) -> None:
        """All is well again."""
        if self in self._troubles:
            self._troubles.remove(self)

    def __enter__(self) -> Trouble:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Network:
    """One network; all devices of a world are on it.

    Attributes:
        lock: held while anything in it changes.
        ack_timeout_s: seconds after which RC gives up a message that nobody acknowledges; None for what the
            queue pair's ``timeout`` and ``retry_cnt`` say.
        resolve_s: seconds that it takes to find out that nobody has a GID.
    """

    def __init__(self, ack_timeout_s: float | None = None, resolve_s: float = 0.0) -> None:
        self.ack_timeout_s, self.resolve_s = ack_timeout_s, resolve_s
        self.worlds: list[Any] = []
        self.qps: dict[int, Any] = {}
        self._qp_numbers = count(0x11)
        self._losses: list[Trouble] = []
        self._unreachable: dict[bytes, float] = {}
        self.renew()

    def renew(self) -> None:
        """Locks and clock anew, in a forked child: their holders are not there."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.clock = Clock()

    @staticmethod
    def shared(path: str, **options: Any) -> Network:
        """A network that all processes of this host are on which name the same directory; see :mod:`shared`."""
        from .shared import SharedNetwork

        return SharedNetwork(path, **options)

    def close(self) -> None:
        """Nothing happens on it any more."""
        self.clock.close()

    # ---- troubles

    def lose(self, which: Callable[[Message], bool]) -> Trouble:
        """Lose the messages that ``which`` is true of; each attempt of RC to send one again is asked about anew."""
        return Trouble(self._losses, which)

    def cut(self, one: str | bytes, other: str | bytes, both: bool = True) -> Trouble:
        """Lose all from one GID to another, and back unless ``both`` is false."""
        ways = {(raw_gid(one), raw_gid(other))} | ({(raw_gid(other), raw_gid(one))} if both else set())
        return self.lose(lambda message: (message.sgid, message.dgid) in ways)

    def unreachable(self, gid: str | bytes, seconds: float = 0.0) -> None:
        """From now on nobody finds this GID: RTR and ``ibv_create_ah`` block so long, then fail with ETIMEDOUT."""
        self._unreachable[raw_gid(gid)] = seconds

    def reachable(self, gid: str | bytes) -> None:
        """The opposite of :meth:`unreachable`."""
        self._unreachable.pop(raw_gid(gid), None)

    def resolve(self, context: Any, port_num: int, ah: Any) -> None:
        """Find the way to a peer, as the kernel does for RTR and for an address handle. Called without the lock.

        Raises:
            Refused: EINVAL for a path that cannot be, ETIMEDOUT where nobody has the GID.
        """
        port = context.port(port_num)
        if not ah.is_global:
            if port.link_layer == LinkLayer.ETHERNET:
                raise Refused(errno.EINVAL)
            return
        if ah.grh.sgid_index not in port.slots():
            raise Refused(errno.EINVAL)
        dgid = bytes(ah.grh.dgid.raw)
        seconds = self._unreachable.get(dgid)
        if seconds is None and (is_multicast(dgid) or self._is_known(dgid)):
            return
        time.sleep(self.resolve_s if seconds is None else seconds)
        raise Refused(errno.ETIMEDOUT)

    def _is_known(self, gid: bytes) -> bool:
        return any(p.has(gid) for world in self.worlds for device in world.devices for p in device.ports)

    # ---- queue pairs

    def enter(self, qp: Any) -> int:
        """A number for a queue pair."""
        number = next(n for n in (n & PSN for n in self._qp_numbers) if n > 1 and n not in self.qps)
        self.qps[number] = qp
        return number

    def carry(self, message: Message, answered: Callable[[Answer], None]) -> None:
        """Bring a message to its queue pair, and the answer back. Called with the lock held."""
        if any(loss.hits(message) for loss in list(self._losses)):
            answered(DROP)
        elif message.qp_type == UD and message.dgid and is_multicast(message.dgid):
            for qp in list(self.qps.values()):
                if message.dgid in qp.groups:
                    self.receive(qp, message)
            answered(ACK)
        else:
            answered(self.receive(self.qps.get(message.dest_qp_num), message))

    def kick(self, qp_num: int) -> None:
        """Somebody waits for what has just come: try again now."""
        qp = self.qps.get(qp_num)
        if qp is not None:
            qp.retry()

    # ---- the far end

    def receive(self, qp: Any, message: Message) -> Answer:
        """What a queue pair does with a message."""
        if qp is None or qp.qp_type != message.qp_type or qp.state not in (RTR, RTS, SQD) or not _is_here(qp, message):
            return DROP
        if message.qp_type == UD:
            return _receive_ud(qp, message)
        if message.qp_type == RC:
            attr = qp.attr
            if attr.dest_qp_num != message.qp_num or (message.sgid and qp.dgid != message.sgid):
                return DROP
            behind = (message.psn - qp.expected) & PSN
            if behind >= 1 << 23:  # it was here before, as far as one can tell: acknowledged, and not looked at
                return ACK if message.opcode not in (READ, *ATOMICS) else DROP
            if behind:
                return DROP
        answer = _execute(qp, message)
        if answer.status == 0:
            qp.expected = (message.psn + message.packets) & PSN
        elif message.qp_type == UC:
            return DROP
        elif answer.status > 0 and qp.state != ERR:
            qp.fail()
            qp.world.event(qp.context, EventType.QP_ACCESS_ERR, qp.address)
        return answer


def _is_here(qp: Any, message: Message) -> bool:
    """Whether it comes to the queue pair's port, in a partition of its own."""
    port = qp.port
    if port is None or port.state != PortState.ACTIVE:
        return False
    if message.dgid:
        if not port.has(message.dgid) and message.dgid not in qp.groups:
            return False
    elif message.dlid & ~((1 << port.lmc) - 1) != port.lid:
        return False
    mine = port.pkeys[qp.attr.pkey_index]
    return (mine ^ message.pkey) & 0x7FFF == 0 and bool((mine | message.pkey) & 0x8000)


def _receive_ud(qp: Any, message: Message) -> Answer:
    if qp.attr.qkey != message.qkey:
        return DROP
    wqe = qp.take_recv()
    if wqe is None or len(message.data) + GRH_BYTES > sum(length for _, length, _ in wqe[1]):
        if wqe is not None:
            qp.give_back(wqe)
        return DROP
    grh = header(message) if message.dgid else bytes(GRH_BYTES)
    try:
        scatter(qp, wqe[1], grh + message.data)
    except NoAccess:
        qp.received(wqe[0], WcStatus.LOC_PROT_ERR)
        qp.fail()
        return DROP
    flags = (1 if message.dgid else 0) | (2 if message.opcode == SEND_IMM else 0)
    qp.received(wqe[0], 0, WcOpcode.RECV, message, flags, GRH_BYTES + len(message.data))
    return ACK


def _execute(qp: Any, message: Message) -> Answer:
    """Do what a message asks for, over RC and UC."""
    opcode, where = message.opcode, 0
    need = _NEED.get(opcode)
    if min(message.length, message.mtu) > 128 << qp.attr.path_mtu:
        return Answer(WcStatus.REM_INV_REQ_ERR)
    if need is not None and message.length:
        if not qp.attr.qp_access_flags & need:
            return Answer(WcStatus.REM_INV_REQ_ERR if opcode in ATOMICS else WcStatus.REM_ACCESS_ERR)
        try:
            where = reach(qp.world, qp.pd, message.rkey, message.remote_addr, message.length, need, qp.qp_num)
        except NoAccess:
            return Answer(WcStatus.REM_ACCESS_ERR)
    if opcode in (*ATOMICS, ATOMIC_WRITE) and message.remote_addr % 8:
        return Answer(WcStatus.REM_INV_REQ_ERR)
    if opcode == READ:
        return Answer(0, ctypes.string_at(where, message.length))
    if opcode in ATOMICS:
        return Answer(0, _atomic(where, message))
    if opcode == FLUSH:
        return ACK
    if opcode in (WRITE, ATOMIC_WRITE):
        ctypes.memmove(where, message.data, message.length)
        return ACK
    wqe = qp.take_recv()
    if wqe is None:
        qp.waiters.add(message.qp_num)
        return RNR
    if opcode == WRITE_IMM:
        ctypes.memmove(where, message.data, message.length)
        qp.received(wqe[0], 0, WcOpcode.RECV_RDMA_WITH_IMM, message, 2, message.length)
        return ACK
    try:
        if message.length > sum(length for _, length, _ in wqe[1]):
            qp.received(wqe[0], WcStatus.LOC_LEN_ERR)
            return Answer(WcStatus.REM_INV_REQ_ERR)
        scatter(qp, wqe[1], message.data)
    except NoAccess:
        qp.received(wqe[0], WcStatus.LOC_PROT_ERR)
        return Answer(WcStatus.REM_OP_ERR)
    if opcode == SEND_INV and not _invalidate(qp, message.imm):
        qp.received(wqe[0], WcStatus.LOC_PROT_ERR)
        return Answer(WcStatus.REM_ACCESS_ERR)
    qp.received(wqe[0], 0, WcOpcode.RECV, message, {SEND_IMM: 2, SEND_INV: 8}.get(opcode, 0), message.length)
    return ACK


def _invalidate(qp: Any, key: int) -> bool:
    found = qp.world.keys.get(key)
    if not isinstance(found, Mw) or found.pd is not qp.pd or found.qp_num not in (None, qp.qp_num):
        return False
    found.unbind()
    return True


def _atomic(where: int, message: Message) -> bytes:
    word = ctypes.c_uint64.from_address(where)
    old = word.value
    if message.opcode == FETCH_ADD:
        word.value = old + message.compare_add & 2**64 - 1
    elif old == message.compare_add:
        word.value = message.swap
    return bytes(ctypes.c_uint64(old))


# ---- local memory


def gather(qp: Any, pieces: list[tuple[int, int, int]]) -> bytes:
    """The bytes of a message; NoAccess if one piece may not be read."""
    if len(pieces) == 1:
        addr, length, key = pieces[0]
        return ctypes.string_at(reach(qp.world, qp.pd, key, addr, length, 0), length)
    return b"".join(
        ctypes.string_at(reach(qp.world, qp.pd, key, addr, length, 0), length) for addr, length, key in pieces
    )


def scatter(qp: Any, pieces: list[tuple[int, int, int]], data: bytes) -> None:
    """Put the bytes of a message into memory; NoAccess if one piece may not be written to."""
    at = 0
    for addr, length, key in pieces:
        part = min(length, len(data) - at)
        if part <= 0:
            return
        where = reach(qp.world, qp.pd, key, addr, part, LOCAL_WRITE)
        ctypes.memmove(where, data if part == len(data) else data[at : at + part], part)
        at += part


def completion(
    wr_id: int, status: int, qp_num: int, opcode: int = 0x6B, byte_len: int = 0, message: Message | None = None,
    flags: int = 0,
) -> bytes:  # fmt: skip
    """A packed ``ibv_wc``; what does not count in a failed one is poison."""
    if status:
        return WC.pack(wr_id, status, 0x6B, 0, *[0x6B6B6B6B] * 2, qp_num, *[0x6B6B6B6B] * 2, *[0x6B6B] * 2, 0x6B, 0x6B)
    if message is None:
        return WC.pack(wr_id, 0, opcode, 0, byte_len, 0, qp_num, 0, flags, 0, 0, 0, 0)
    slid, sl = (message.slid, message.sl) if message.qp_type == UD else (0, 0)
    source = message.qp_num if message.qp_type == UD else 0
    return WC.pack(wr_id, 0, opcode, 0, byte_len, message.imm, qp_num, source, flags, 0, slid, sl, 0)
