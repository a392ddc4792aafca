"""Debian's pyverbs, for Debian's own Python: the same ping-pong."""

from __future__ import annotations

import secrets
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from program import MESSAGE, RECEIVES, Program, check, now, pattern, swap
from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SEND, RECV = 1, 2


class Pyverbs(Program):
    """Debian's pyverbs."""

    playing: Any = None

    def queue_pair(self, sock: Any) -> Any:
        """A queue pair in RTS with receives posted."""
        context = Context(name=self.device)
        pd, cq = PD(context), CQ(context, 2 * RECEIVES)
        mr = MR(pd, (RECEIVES + 1) * MESSAGE, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=RECEIVES, max_recv_wr=RECEIVES, max_inline_data=MESSAGE)
        qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap), QPAttr(port_num=1))  # in INIT
        recvs = [RecvWR(RECV + i, 1, [SGE(mr.buf + i * MESSAGE, MESSAGE, mr.lkey)]) for i in range(RECEIVES)]
        for one, following in pairwise(recvs):
            one.next_wr = following
        qp.post_recv(recvs[0])
        port, psn = context.query_port(1), secrets.randbits(24)
        gid = bytes.fromhex(context.query_gid(1, self.gid_index).gid.replace(":", ""))
        theirs = swap(sock, gid + qp.qp_num.to_bytes(4, "big") + psn.to_bytes(4, "big"))
        dgid = ":".join(theirs[i : i + 2].hex() for i in range(0, 16, 2))
        route = GlobalRoute(dgid=GID(dgid), sgid_index=self.gid_index, hop_limit=64)
        attr = QPAttr(port_num=1)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.path_mtu, attr.dest_qp_num = port.active_mtu, int.from_bytes(theirs[16:20], "big")
        attr.rq_psn, attr.sq_psn = int.from_bytes(theirs[20:], "big"), psn
        attr.max_dest_rd_atomic, attr.max_rd_atomic, attr.min_rnr_timer = 1, 1, 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 18, 6, 7
        qp.to_rts(attr)
        sge = SGE(mr.buf + RECEIVES * MESSAGE, MESSAGE, mr.lkey)
        flags = e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE
        send = SendWR(SEND, num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=flags)
        return SimpleNamespace(context=context, pd=pd, cq=cq, mr=mr, qp=qp, recvs=recvs, send=send, left=RECEIVES)

    def pingpong(self, iters: int, port: int) -> dict[str, Any]:
        """So many messages to and fro, polling: enough to use every receive."""
        if self.playing is None:
            with self.dial(port) as sock:
                self.playing = self.queue_pair(sock)
                self.clean()
                swap(sock, b"d")
        else:
            self.clean()
            self.ready()
        of = self.playing
        qp, cq, send, recvs = of.qp, of.cq, of.send, of.recvs
        sent, received, first = 0, 0, int(not self.listens)
        left = of.left
        begin = now()
        for i in range(iters):
            if first:
                qp.post_send(send)
            while received <= i or sent < i + first:
                while not (found := cq.poll(2))[0]:
                    pass
                for wc in found[1]:
                    if wc.status:
                        raise ValueError(f"a completion with status {wc.status}")
                    if wc.wr_id == SEND:
                        sent += 1
                    else:
                        received += 1
                        left -= 1
                        if not left:
                            left = RECEIVES
                            qp.post_recv(recvs[0])
            if not first:
                qp.post_send(send)
        end = now()
        of.left = left
        while sent < iters:
            sent += cq.poll(2)[0]
        check(of.mr.read(RECEIVES * MESSAGE, 0), self.listens)
        return {"begin": begin, "end": end}

    def clean(self) -> None:
        """Forget what came; the message is at the end."""
        mr = self.playing.mr
        mr.write(bytes(RECEIVES * MESSAGE) + pattern(self.listens), (RECEIVES + 1) * MESSAGE)


if __name__ == "__main__":
    Pyverbs.main()
