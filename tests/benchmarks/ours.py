"""rdmaconnect itself, as a user calls it, with the defaults; and its object layer, used as the peers are."""

from __future__ import annotations

import mmap
import resource
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from program import MESSAGE, RECEIVES, Program, check, now, pattern, resident, swap

import rdmaconnect
from rdmaconnect import Pool, abi, close_many, connect, connect_many, listen, verbs
from rdmaconnect.abi import QpState, QpType, WrOpcode
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.work_request import RecvList, SendRequest

PATIENCE_S = 600.0
#: polls before a wait sleeps, where the others poll without end
SPIN = 1 << 30
#: and how many of those the object layer does in a row
TRIES = 64
#: the send's id: those of the receives count from 0
SEND = 1 << 32


class Timed:
    """What a program's time goes to: libibverbs with the time in each of its calls taken, ns.

    Where a thread waits for its turn on the processor inside of a call, that is taken for the call's.
    """

    def __init__(self) -> None:
        self.library, self.op, self.spent = verbs.library(), verbs.op, Counter[str]()
        verbs.use(self)
        verbs.op = self.timed_op

    def __getitem__(self, name: str) -> Any:
        function = self.library[name]
        return function if name not in abi.PROTOTYPES else self.timed(name, function)

    def timed_op(self, name: str, holder: Any) -> Any:
        """The same for a verb that goes through the device's own table."""
        return self.timed(name, self.op(name, holder))

    def timed(self, name: str, function: Any) -> Any:
        """A function that counts the time in another."""
        if name in abi.PROTOTYPES:
            prototype = abi.PROTOTYPES[name]
            function.restype, function.argtypes = prototype.restype, prototype.argtypes
        spent = self.spent

        def call(*args: Any) -> Any:
            begin = now()
            try:
                return function(*args)
            finally:
                spent[name] += now() - begin

        return call


class Ours(Program):
    """rdmaconnect."""

    def __init__(self, *argv: str) -> None:
        super().__init__(*argv)
        self.conns: list[rdmaconnect.Connection] = []
        self.listeners: dict[Any, rdmaconnect.Listener] = {}
        self.pool: rdmaconnect.Pool | None = None
        self.playing: dict[int, rdmaconnect.Connection] = {}
        self.object: Any = None
        self.timed: Timed | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def started(self) -> dict[str, Any]:
        """What each queue pair has by default: the others get the same (recv_depth, recv_size, send_depth)."""
        sizes = {"single": rdmaconnect.Options().sizes(1), "bulk": rdmaconnect.Options().sizes(2)}
        return {name: [of.recv_depth, of.recv_size, of.send_depth] for name, of in sizes.items()}

    def time_verbs(self) -> None:
        """Take the time in each verb from here on."""
        self.timed = self.timed or Timed()

    def begun(self) -> Callable[[], dict[str, Any]]:
        """What is measured begins now; what is given tells, when it is over, how long it took, and of what."""
        spent = Counter[str]() if self.timed is None else self.timed.spent.copy()
        begin, cpu = now(), time.process_time_ns()

        def ended() -> dict[str, Any]:
            end = now()
            times: dict[str, Any] = {"begin": begin, "end": end}
            if self.timed is not None:
                verbs_ns = dict(self.timed.spent - spent)
                times |= {"cpu_ns": time.process_time_ns() - cpu, "spent": verbs_ns}
            return times

        return ended

    # ---- connecting

    def listening(self, spin: int = rdmaconnect.Options().spin, whose: str = "") -> rdmaconnect.Listener:
        """The listener of one kind of connections; it stays for the next time."""
        if (spin, whose) not in self.listeners:
            self.listeners[spin, whose] = listen(f"{self.address}:0", spin=spin)
        listener = self.listeners[spin, whose]
        self.ready(int(listener.url.rpartition(":")[2]))
        return listener

    def accepted(self, count: int, whose: str) -> list[rdmaconnect.Connection]:
        """As many connections as the other side makes."""
        listener = self.listening(whose=whose)
        return [listener.accept(deadline_s=PATIENCE_S, tolerant=False) for _ in range(count)]

    def connect(self, count: int, depth: int, size: int, send_depth: int, port: int, **options: Any) -> dict[str, Any]:
        """So many connections from one exchange; the sizes are the default's."""
        return self.joined(count, size, lambda: connect_many(self.url(port), count, deadline_s=PATIENCE_S, **options))

    def one(self, count: int, depth: int, size: int, send_depth: int, port: int, **options: Any) -> dict[str, Any]:
        """One connection."""
        return self.joined(1, size, lambda: [connect(self.url(port), deadline_s=PATIENCE_S, **options)])

    def pooled(self, count: int, depth: int, size: int, send_depth: int, port: int) -> dict[str, Any]:
        """One connection of a pool that is full; it is filled again before the answer."""
        if self.listens:
            return self.joined(1, size, None, whose="the pool's")
        if self.pool is None:
            self.pool = Pool(self.url(port), 4, deadline_s=PATIENCE_S)
            self.pool.warm(deadline_s=PATIENCE_S)
        pool = self.pool
        answer = self.joined(1, size, lambda: [pool.acquire(deadline_s=PATIENCE_S)])
        pool.warm(deadline_s=PATIENCE_S)
        return answer

    def connect_unproven(self, *numbers: int) -> dict[str, Any]:
        """The same without the probe."""
        return self.connect(*numbers, probe=False)

    def one_unproven(self, *numbers: int) -> dict[str, Any]:
        """The same without the probe."""
        return self.one(*numbers, probe=False)

    def memory(self, count: int, depth: int, size: int, send_depth: int, port: int) -> dict[str, Any]:
        """The same twice; the answer is that of the second time."""
        self.connect_unproven(count, depth, size, send_depth, port)
        return self.connect_unproven(count, depth, size, send_depth, port) | {"receives": depth * size}

    def storm(self, count: int, depth: int, size: int, send_depth: int, port: int) -> dict[str, Any]:
        """So many threads that connect at once, each a connection of the bulk's sizes."""
        sizes = {"recv_depth": depth, "recv_size": size, "send_depth": send_depth, "deadline_s": PATIENCE_S}

        def all_at_once() -> list[rdmaconnect.Connection]:
            with ThreadPoolExecutor(count) as threads:
                return list(threads.map(lambda _: connect(self.url(port), **sizes), range(count)))

        return self.joined(count, size, all_at_once, ordered=False)

    def url(self, port: int) -> str:
        """Where the other side listens."""
        return f"{self.address}:{port}"

    def joined(
        self, count: int, size: int, make: Any, ordered: bool = True, whose: str = "all others'"
    ) -> dict[str, Any]:
        """Make connections, on either side; then send a message over the first and the last of them, and take one."""
        before, ended = resident(), self.begun()
        made = self.accepted(count, whose) if self.listens else make()
        times, after = ended(), resident()
        self.conns += made
        if ordered and made[0].local.recv_size != size:
            raise ValueError(f"receives of {made[0].local.recv_size} bytes, not {size} as the others have")
        proven = dict.fromkeys((made[0], made[-1]) if ordered else made)
        for conn in proven:
            conn.send(pattern(self.listens))
        for conn in proven:
            check(conn.recv(), self.listens)
        return {**times, "rss_before": before, "rss_after": after}

    def close(self) -> dict[str, Any]:
        """Close them all."""
        ended = self.begun()
        close_many(self.conns)
        times = ended()
        self.conns = []
        return times

    # ---- data

    def lasting(self, port: int, spin: int = rdmaconnect.Options().spin) -> rdmaconnect.Connection:
        """A connection that is kept for the next time."""
        if spin in self.playing:
            self.ready()
        elif self.listens:
            self.playing[spin] = self.listening(spin).accept(deadline_s=PATIENCE_S, tolerant=False)
        else:
            self.playing[spin] = connect(self.url(port), spin=spin, deadline_s=PATIENCE_S)
        return self.playing[spin]

    def pingpong(self, iters: int, port: int) -> dict[str, Any]:
        """So many messages to and fro through ``send`` and ``recv``."""
        conn, data, came = self.lasting(port, SPIN), pattern(self.listens), b""
        begin = now()
        if self.listens:
            for _ in range(iters):
                came = conn.recv(deadline_s=PATIENCE_S)
                conn.send(data, deadline_s=PATIENCE_S)
        else:
            for _ in range(iters):
                conn.send(data, deadline_s=PATIENCE_S)
                came = conn.recv(deadline_s=PATIENCE_S)
        end = now()
        check(came, self.listens)
        return {"begin": begin, "end": end}

    def write(self, iters: int, size: int, depth: int, port: int) -> dict[str, Any]:
        """So many RDMA writes of a registered buffer, ``depth`` on their way at once, or one after the other."""
        conn = self.lasting(port)
        if self.listens:
            memory = mmap.mmap(-1, size)
            with conn.register(memory) as mr:
                conn.send(mr.region.to_bytes())
                begin = now()
                conn.recv(deadline_s=PATIENCE_S)
                end = now()
            check(memory[:], True)
            return {"begin": begin, "end": end}
        region = rdmaconnect.RemoteRegion.from_bytes(conn.recv())
        memory = mmap.mmap(-1, size)
        memory[:] = pattern(False, size)
        with conn.register(memory) as mr:
            begin = now()
            if depth == 1:
                for _ in range(iters):
                    conn.write(mr, region, deadline_s=PATIENCE_S)
            else:
                on_the_way = deque(conn.post_write(mr, region) for _ in range(min(depth, iters)))
                for _ in range(iters - len(on_the_way)):
                    on_the_way.popleft().wait(deadline_s=PATIENCE_S)
                    on_the_way.append(conn.post_write(mr, region))
                for transfer in on_the_way:
                    transfer.wait(deadline_s=PATIENCE_S)
            end = now()
            conn.send(b"done")
        return {"begin": begin, "end": end}

    # ---- the object layer

    def objects(self, iters: int, port: int) -> dict[str, Any]:
        """So many messages to and fro through a ``QueuePair`` and a ``CQ``, polling: enough to use every receive."""
        if self.object is None:
            with self.dial(port) as sock:
                self.object = self.queue_pair(sock)
                swap(sock, b"d")
        else:
            self.object.memory[:] = bytes(RECEIVES * MESSAGE)
            self.ready()
        of = self.object
        qp, cq, send, recvs = of.qp, of.cq, of.send, of.recvs
        poll, sent, received, first = cq.busy_poll, 0, 0, int(not self.listens)
        left = of.left
        begin = now()
        for i in range(iters):
            if first:
                qp.post_send(send)
            while received <= i or sent < i + first:
                while not (wcs := poll(TRIES)):
                    pass
                for wc in wcs:
                    if wc.status:
                        raise ValueError(f"a completion with status {wc.status}")
                    if wc.wr_id == SEND:
                        sent += 1
                    else:
                        received += 1
                        left -= 1
                        if not left:
                            left = RECEIVES
                            qp.post_recv(recvs)
            if not first:
                qp.post_send(send)
        end = now()
        of.left = left
        while sent < iters:
            sent += cq.poll()
        check(of.memory[:], self.listens)
        return {"begin": begin, "end": end}

    def queue_pair(self, sock: Any) -> Any:
        """A queue pair in RTS with receives posted, made by hand."""
        with ExitStack() as stack:
            context = stack.enter_context(open_device(self.device))
            pd, cq = stack.enter_context(PD(context)), stack.enter_context(CQ(context, 2 * RECEIVES))
            memory = mmap.mmap(-1, RECEIVES * MESSAGE)
            mr = stack.enter_context(MR(pd, memory))
            sizes = {"max_send_wr": RECEIVES, "max_recv_wr": RECEIVES, "max_inline_data": MESSAGE}
            qp = stack.enter_context(QueuePair(pd, cq, cq, QpType.RC, **sizes))
            port = context.port(1)
            gid = next(entry for entry in port.gids if entry.gid_index == self.gid_index)
            qp.modify({
                "qp_state": QpState.INIT, "pkey_index": 0, "port_num": 1, "qp_access_flags": FULL_ACCESS,
            })  # fmt: skip
            recvs = RecvList(RECEIVES, MESSAGE, mr.lkey).at(mr.addr)
            qp.post_recv(recvs)
            psn = secrets.randbits(24)
            mine = gid.gid.raw + qp.qp_num.to_bytes(4, "big") + psn.to_bytes(4, "big")
            theirs = swap(sock, mine)
            path = AhAttr(port_num=1, is_global=1, dgid=theirs[:16], sgid_index=self.gid_index, hop_limit=64)
            qp.modify({
                "qp_state": QpState.RTR, "ah_attr": path, "path_mtu": port.active_mtu,
                "dest_qp_num": int.from_bytes(theirs[16:20], "big"), "rq_psn": int.from_bytes(theirs[20:], "big"),
                "max_dest_rd_atomic": 1, "min_rnr_timer": 12,
            })  # fmt: skip
            qp.modify({
                "qp_state": QpState.RTS, "sq_psn": psn, "timeout": 18, "retry_cnt": 6, "rnr_retry": 7,
                "max_rd_atomic": 1,
            })  # fmt: skip
            send = SendRequest().fill_inline(SEND, WrOpcode.SEND, pattern(self.listens))
            kept = stack.pop_all()
        return SimpleNamespace(qp=qp, cq=cq, memory=memory, send=send, recvs=recvs, left=RECEIVES, kept=kept)


if __name__ == "__main__":
    Ours.main()
