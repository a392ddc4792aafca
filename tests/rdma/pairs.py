"""Two queue pairs on two nodes, each with a completion queue of a test's own making, and its channel."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, pointer
from types import SimpleNamespace

from nodes import Node

from rdmaconnect import verbs
from rdmaconnect.abi import QpState, QpType, SendFlags, WrOpcode, ibv_send_wr, ibv_sge
from rdmaconnect.agreement.path import ACCESS, AhAttr
from rdmaconnect.objects.address import AddressHandle
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest
from rdmaconnect.objects.srq import SRQ

DEPTH = 16
GRH = 40
SIZE = 512
SLOT = SIZE + GRH
QKEY = 0x1234

MakeCQ = Callable[[Context, CompChannel], CQ]


class End:
    """A queue pair with a queue and memory of its own; slot i of the memory is for work request i."""

    def __init__(self, node: Node, qp_type: QpType, make_cq: MakeCQ, stack: ExitStack, shared: bool) -> None:
        self.node = node
        self.context = stack.enter_context(open_device(node.device))
        self.pd = stack.enter_context(PD(self.context))
        self.channel = stack.enter_context(CompChannel(self.context))
        self.cq = stack.enter_context(make_cq(self.context, self.channel))
        self.srq = stack.enter_context(SRQ(self.pd, DEPTH)) if shared else None
        sizes = {"max_send_wr": DEPTH, "max_recv_wr": 0 if shared else DEPTH}
        self.qp = stack.enter_context(QueuePair(self.pd, self.cq, self.cq, qp_type, srq=self.srq, **sizes))
        self.memory = bytearray(DEPTH * SLOT)
        self.mr = self.pd.register(self.memory)
        self.ah: AddressHandle | None = None
        self.peer_qpn = 0

    def to_rts(self, peer: End) -> None:
        """Connect it; UD too gets the address of the other one."""
        here, there = (next(g for g in end.context.port(1).gids if g.gid.is_ipv4) for end in (self, peer))
        path = AhAttr(port_num=1, is_global=1, dgid=there.gid.raw, sgid_index=here.gid_index, hop_limit=64)
        values = SimpleNamespace(
            pkey_index=0, port_num=1, qkey=QKEY, qp_access_flags=ACCESS.get(self.qp.qp_type, 0), path_mtu=3,
            dest_qp_num=peer.qp.qp_num, rq_psn=5, sq_psn=5, max_rd_atomic=1, max_dest_rd_atomic=1, min_rnr_timer=1,
            timeout=14, retry_cnt=6, rnr_retry=7, ah_attr=path,
        )  # fmt: skip
        for state in (QpState.INIT, QpState.RTR, QpState.RTS):
            self.node.call(self.qp.move, state, values)
        self.peer_qpn = peer.qp.qp_num
        if self.qp.qp_type == QpType.UD:
            self.ah = self.node.call(AddressHandle, self.pd, path)

    @property
    def head(self) -> int:
        """Bytes in front of a received message."""
        return GRH if self.qp.qp_type == QpType.UD else 0

    def post_recv(self, wr_id: int) -> None:
        """Post slot ``wr_id % DEPTH`` to receive into."""
        request = RecvRequest(wr_id, self.mr.addr + wr_id % DEPTH * SLOT, SLOT, self.mr.lkey)
        (self.srq or self.qp).post_recv(request)

    def post_send(
        self,
        wr_id: int,
        data: bytes,
        *,
        imm: int | None = None,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """Send from slot ``wr_id % DEPTH``."""
        start = wr_id % DEPTH * SLOT
        self.memory[start : start + len(data)] = data
        sge = ibv_sge(addr=self.mr.addr + start, length=len(data), lkey=self.mr.lkey)
        opcode = WrOpcode.SEND if imm is None else WrOpcode.SEND_WITH_IMM
        wr = ibv_send_wr(wr_id=wr_id, sg_list=pointer(sge), num_sge=1, opcode=opcode, send_flags=flags)
        wr.imm_data = socket.htonl(imm or 0)
        if self.ah is not None:
            wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey = self.ah.pointer, self.peer_qpn, QKEY
        bad = ctypes.POINTER(ibv_send_wr)()
        context = self.qp.pointer.contents.context
        assert verbs.op("ibv_post_send", context)(self.qp.pointer, byref(wr), byref(bad)) == 0

    def received(self, wr_id: int, length: int) -> bytes:
        """What lies in slot ``wr_id % DEPTH``; ``length`` is what the completion says."""
        start = wr_id % DEPTH * SLOT
        return bytes(self.memory[start + self.head : start + length])


@contextmanager
def ends(here: Node, there: Node, qp_type: QpType, make_cq: MakeCQ, shared: bool = False) -> Iterator[tuple[End, End]]:
    """A connected pair; ``make_cq`` makes the queue of each; their receives may be in shared queues."""
    with ExitStack() as stack:
        one, other = (End(node, qp_type, make_cq, stack, shared) for node in (here, there))
        one.to_rts(other)
        other.to_rts(one)
        yield one, other
