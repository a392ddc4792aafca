"""PyPI ``ibverbs``, used as a program that knows its own peer would: what it needs goes over a TCP connection."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from typing import Any

import ibverbs as ib
from program import MESSAGE, RECEIVES, Program, check, now, pattern, swap

ACCESS = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_READ | ib.AccessFlags.REMOTE_WRITE
SEND, RECV = 1, 2


class Lot:
    """Queue pairs that share a completion queue and one registered memory, which ends with a message of their own."""

    def __init__(
        self, opened: tuple[Any, Any, Any, Any], count: int, depth: int, size: int, send_depth: int, inline: int
    ) -> None:
        context, pd, _, _ = opened
        self.length = count * depth * size + MESSAGE
        self.memory = mmap.mmap(-1, self.length)
        self._pin = ctypes.c_char.from_buffer(self.memory)
        self.cq = context.create_cq(count * (depth + send_depth))
        self.mr = pd.reg_mr(ctypes.addressof(self._pin), self.length, ib.AccessFlags.LOCAL_WRITE)
        init = ib.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, max_send_wr=send_depth, max_recv_wr=depth,
                             max_inline_data=inline)  # fmt: skip
        self.qps = [pd.create_qp(init) for _ in range(count)]
        self.slots = [self.mr.sge(size, i * size) for i in range(count * depth)]
        self.recvs = [ib.RecvWR(wr_id=RECV + i, sg_list=[slot]) for i, slot in enumerate(self.slots)]
        self.size, self.depth, self.left = size, depth, depth
        for i, qp in enumerate(self.qps):
            qp.to_init(1, int(ACCESS))
            qp.post_recv(self.recvs[i * depth : (i + 1) * depth])

    def message(self, flags: int = int(ib.SendFlags.SIGNALED)) -> Any:
        """The work request that sends the message."""
        sge = self.mr.sge(MESSAGE, self.length - MESSAGE)
        return ib.SendWR(wr_id=SEND, sg_list=[sge], opcode=int(ib.WROpcode.SEND), send_flags=flags)

    def close(self) -> None:
        """Free what is left when the queue pairs are gone."""
        self.mr.close()
        self.cq.close()


class Ibverbs(Program):
    """PyPI ``ibverbs``."""

    opened: tuple[Any, Any, Any, Any] | None = None
    playing: Lot | None = None

    def __init__(self, *argv: str) -> None:
        super().__init__(*argv)
        self.lots: list[Lot] = []

    def open(self) -> tuple[Any, Any, Any, Any]:
        """The device, a protection domain, the port and the GID; once."""
        if self.opened is None:
            context = next(d for d in ib.get_device_list() if d.name == self.device).open()
            port, gid = context.query_port(1), context.query_gid(1, self.gid_index)
            self.opened = context, context.alloc_pd(), port, gid
        return self.opened

    def connect(self, count: int, depth: int, size: int, send_depth: int, port: int) -> dict[str, Any]:
        """So many queue pairs in RTS, with receives posted, from one TCP exchange."""
        if self.listens:
            self.open()
        begin = now()
        with self.dial(port) as sock:
            lot = self.joined(sock, count, depth, size, send_depth)
            swap(sock, b"d")
            end = now()
            self.lots.append(lot)
            for qp in dict.fromkeys((lot.qps[0], lot.qps[-1])):
                self.prove(lot, qp)
            swap(sock, b"d")
        return {"begin": begin, "end": end}

    one = connect

    def joined(self, sock: Any, count: int, depth: int, size: int, send_depth: int, inline: int = 0) -> Lot:
        """Make queue pairs and take them to RTS with those of the other side."""
        opened = self.open()
        _, _, port, gid = opened
        lot = Lot(opened, count, depth, size, send_depth, inline)
        psns = [secrets.randbits(24) for _ in lot.qps]
        infos = [ib.local_qp_info(qp, port, gid, port=1, psn=psn) for qp, psn in zip(lot.qps, psns, strict=True)]
        theirs = swap(sock, b"".join(info.to_bytes() for info in infos))
        each = len(theirs) // count
        for i, qp in enumerate(lot.qps):
            peer = ib.QPInfo.from_bytes(theirs[i * each : (i + 1) * each])
            qp.to_rtr(peer, sgid_index=self.gid_index, mtu=min(port.active_mtu, peer.mtu), hop_limit=64)
            qp.to_rts(psns[i], timeout=18, retry_cnt=6, rnr_retry=7)
        return lot

    def prove(self, lot: Lot, qp: Any) -> None:
        """Send a message and take one, over the same queue pair."""
        lot.memory[-MESSAGE:] = pattern(self.listens)
        qp.post_send([lot.message()])
        left = 2
        while left:
            for wc in lot.cq.poll(1):  # no more than is awaited: the next may be another queue pair's
                wc.raise_for_status()
                left -= 1
                if wc.wr_id >= RECV:
                    at = (wc.wr_id - RECV) * lot.size
                    check(lot.memory[at : at + wc.byte_len], self.listens)

    def close(self) -> dict[str, Any]:
        """Destroy the queue pairs."""
        begin = now()
        for lot in self.lots:
            for qp in lot.qps:
                qp.close()
        end = now()
        for lot in self.lots:
            lot.close()
        self.lots = []
        return {"begin": begin, "end": end}

    def pingpong(self, iters: int, port: int) -> dict[str, Any]:
        """So many messages to and fro, polling: enough to use every receive."""
        if self.playing is None:
            with self.dial(port) as sock:
                lot = self.playing = self.joined(sock, 1, RECEIVES, MESSAGE, RECEIVES, inline=MESSAGE)
                lot.memory[:] = bytes(lot.length - MESSAGE) + pattern(self.listens)
                swap(sock, b"d")
        else:
            lot = self.playing
            lot.memory[:-MESSAGE] = bytes(lot.length - MESSAGE)
            self.ready()
        (qp,), cq, send = lot.qps, lot.cq, [lot.message(int(ib.SendFlags.SIGNALED | ib.SendFlags.INLINE))]
        success, sent, received, first = int(ib.WCStatus.SUCCESS), 0, 0, int(not self.listens)
        left = lot.left
        begin = now()
        for i in range(iters):
            if first:
                qp.post_send(send)
            while received <= i or sent < i + first:
                while not (wcs := cq.poll(2)):
                    pass
                for wc in wcs:
                    if wc.status != success:
                        wc.raise_for_status()
                    if wc.wr_id == SEND:
                        sent += 1
                    else:
                        received += 1
                        left -= 1
                        if not left:
                            left = RECEIVES
                            qp.post_recv(lot.recvs)
            if not first:
                qp.post_send(send)
        end = now()
        lot.left = left
        while sent < iters:
            sent += len(cq.poll(2))
        check(lot.memory[: RECEIVES * MESSAGE], self.listens)
        return {"begin": begin, "end": end}


if __name__ == "__main__":
    Ibverbs.main()
