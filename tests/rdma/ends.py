"""Two queue pairs on two nodes, joined by hand: what the tests of the objects below a connection start from."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nodes import PATIENCE, Node

from rdmaconnect.abi import AccessFlags, QpState, QpType, WcStatus
from rdmaconnect.agreement.endpoint import GidEntry, RemoteRegion
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx

SIZE = 2 * mmap.PAGESIZE
#: the running kernel, (major, minor): rxe has grown
KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split("+")[0].split(".")[:2])
QKEY = 0x11223344
#: what a queue pair of each type lets its peer do
ACCESS = {
    QpType.RC: FULL_ACCESS,
    QpType.UC: AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE,
}


def ipv4_gid(context: Context) -> GidEntry:
    """The RoCE v2 GID of the node's IPv4 address."""
    return next(entry for entry in context.port(1).gids if entry.gid.is_ipv4)


@dataclass
class End:
    """One end: a queue pair, and memory that the peer may use."""

    node: Node
    context: Context
    pd: PD
    cq: CQ
    qp: Any
    memory: mmap.mmap
    mr: MR
    gid: GidEntry
    psn: int
    seen: list[SimpleNamespace] = field(default_factory=list)
    handles: list[AddressHandle] = field(default_factory=list)

    def reset_memory(self, byte: int = 0) -> None:
        self.memory[:] = bytes([byte]) * len(self.memory)

    def recv(self, wr_id: int = 0, offset: int = 0, length: int = 256) -> None:
        """Post a receive into the memory."""
        self.qp.post_recv(RecvRequest.scatter(wr_id, self.mr.sge(offset, length)))

    def wait(self, count: int = 1, *status: WcStatus) -> list[SimpleNamespace]:
        """The next completions, each with one of these statuses: SUCCESS by default."""
        end = time.monotonic() + PATIENCE
        names = ("wr_id", "status", "opcode", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags", "slid", "sl")
        while len(self.seen) < count:
            assert time.monotonic() < end, f"{len(self.seen)} of {count} completions at {self.qp.name}"
            for wc in self.cq.wcs[: self.cq.poll()]:
                self.seen.append(SimpleNamespace(**{n: getattr(wc, n) for n in (*names, "dlid_path_bits")}))
        found, self.seen = self.seen[:count], self.seen[count:]
        wanted = status or (WcStatus.SUCCESS,)
        unlike = [str(WcStatus(wc.status)) for wc in found if wc.status not in wanted]
        assert not unlike, f"{unlike} instead of {[str(s) for s in wanted]} at {self.qp.name}"
        return found

    def path_to(self, peer: End) -> AhAttr:
        return AhAttr(port_num=1, is_global=1, dgid=peer.gid.gid.raw, sgid_index=self.gid.gid_index, hop_limit=64)

    def address_of(self, peer: End) -> UdAddress:
        """A handle to the peer; closed with the protection domain."""
        self.handles.append(self.node.call(AddressHandle, self.pd, self.path_to(peer)))
        return UdAddress(self.handles[-1], peer.qp.qp_num, QKEY)

    def region(self, offset: int = 0, length: int = SIZE) -> RemoteRegion:
        return self.mr.region.slice(offset, length)

    def climb(self, peer: End, to: QpState = QpState.RTS, access: AccessFlags | None = None) -> None:
        """Take the queue pair up to a state, attribute by attribute."""
        self.node.call(self._climb, peer, to, access)

    def _climb(self, peer: End, to: QpState, access: AccessFlags | None) -> None:
        qp_type = self.qp.qp_type
        steps = attributes(qp_type, self, peer)
        if access is not None:
            steps[0]["qp_access_flags"] = access
        for state, attr in zip((QpState.INIT, QpState.RTR, QpState.RTS), steps, strict=True):
            if state <= to:
                self.qp.modify({"qp_state": state, **attr})


def attributes(qp_type: QpType, here: End, there: End) -> list[dict[str, Any]]:
    """What the steps to INIT, RTR and RTS need."""
    init: dict[str, Any] = {"pkey_index": 0, "port_num": 1}
    if qp_type == QpType.UD:
        return [{**init, "qkey": QKEY}, {}, {"sq_psn": here.psn}]
    init["qp_access_flags"] = ACCESS[qp_type]
    rtr = {"ah_attr": here.path_to(there), "path_mtu": 3, "dest_qp_num": there.qp.qp_num, "rq_psn": there.psn}
    rts = {"sq_psn": here.psn}
    if qp_type == QpType.RC:
        rtr |= {"max_dest_rd_atomic": 4, "min_rnr_timer": 1}
        rts |= {"timeout": 14, "retry_cnt": 7, "rnr_retry": 7, "max_rd_atomic": 4}
    return [init, rtr, rts]


@contextmanager
def end_on(node: Node, qp_type: QpType, psn: int, access: AccessFlags | None = None, **options: Any) -> Iterator[End]:
    """One end with its queue pair in RESET; `send_ops_flags` makes an extended one."""
    with ExitStack() as stack:
        context = stack.enter_context(open_device(node.device))
        pd = stack.enter_context(PD(context))
        cq = stack.enter_context(CQ(context, 128))
        memory = mmap.mmap(-1, SIZE)
        mr = MR(pd, memory, access)
        sizes = {"max_send_wr": 16, "max_recv_wr": 16, "max_send_sge": 4, "max_recv_sge": 4, "max_inline_data": 64}
        kind: Any = QueuePairEx if {"send_ops_flags", "create_flags", "source_qpn"} & options.keys() else QueuePair
        if callable(options.get("srq")):
            options["srq"] = options["srq"](pd)
        qp = stack.enter_context(kind(pd, cq, cq, qp_type, **sizes | options))
        yield End(node, context, pd, cq, qp, memory, mr, ipv4_gid(context), psn)


@contextmanager
def joined(
    here: Node, there: Node, qp_type: QpType = QpType.RC, to: QpState = QpState.RTS, **options: Any
) -> Iterator[tuple[End, End]]:
    """Two ends whose queue pairs are in RTS, or in another state."""
    with end_on(here, qp_type, 0x111111, **options) as a, end_on(there, qp_type, 0x222222, **options) as b:
        a.climb(b, to)
        b.climb(a, to)
        yield a, b
