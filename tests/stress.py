"""Many threads that do everything to the same objects at random: open, make, post, poll, wait, close, forget."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rdmaconnect.abi import AccessFlags, MwType, QpSendOpsFlags, QpState, QpType
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.srq import SRQ
from rdmaconnect.runtime.deadline import Deadline

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
SIZES = {"max_send_wr": 8, "max_recv_wr": 8, "max_inline_data": 16}
OPS = QpSendOpsFlags.SEND | QpSendOpsFlags.RDMA_WRITE | QpSendOpsFlags.LOCAL_INV
#: objects of each kind that there are at most: more would only be slower
MOST = 40

#: seconds, and threads, unless the environment says otherwise
SECONDS = float(os.environ.get("RDMACONNECT_STRESS_S", "3"))
THREADS = int(os.environ.get("RDMACONNECT_STRESS_THREADS", "50"))
#: so much longer on a machine that has not come to everything by then, seconds
SLOW_S = 60.0


def wanted() -> set[str]:
    """What is to have been done in the end."""
    return {f"make {kind}" for kind in MAKE} | {"send", "receive", "poll", "close", "forget"}


class Pool:
    """What there is; whoever takes something has it together with all others.

    Args:
        device: the device's name.
        enter: called first in each thread.
    """

    def __init__(self, device: str, enter: Callable[[], object] = lambda: None) -> None:
        self.device, self.enter = device, enter
        self.things: dict[str, list[Any]] = {kind: [] for kind in MAKE}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.raised: list[str] = []

    def any(self, chance: random.Random, *kinds: str) -> Any:
        """One of these kinds; IndexError if there is none."""
        return chance.choice(self.things[chance.choice(kinds)])

    def of(self, chance: random.Random, pd: PD, kind: str) -> Any:
        """One of this kind in a protection domain, mostly: it is refused in any other."""
        found = [thing for thing in self.things[kind] if thing.pd is pd]
        return chance.choice(found) if found and chance.random() < 0.9 else self.any(chance, kind)

    def run(self, seconds: float, threads: int, seed: int) -> None:
        """Go on for so long, on a slow machine until each of :func:`wanted` was done; then close all."""
        begin = time.monotonic()
        least, most = begin + seconds, begin + seconds + SLOW_S
        running = [
            threading.Thread(target=self._act, args=(random.Random(seed + number), least, most), daemon=True)
            for number in range(threads)
        ]
        usual = gc.get_threshold()
        gc.set_threshold(200, 5, 5)  # the collector is to come amid everything
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # what is forgotten is so on purpose
            for thread in running:
                thread.start()
            for thread in running:
                thread.join(seconds + SLOW_S + 60)
            gc.set_threshold(*usual)
            stuck = [thread for thread in running if thread.is_alive()]
            for context in self.things["Context"]:
                context.close()
            self.things.clear()
            gc.collect()
        assert not stuck, f"{len(stuck)} threads wait for one another"
        assert self.raised == [], f"{len(self.raised)} times: {self.raised[0]}"
        assert set(self.done) >= wanted()

    def _act(self, chance: random.Random, least: float, most: float) -> None:
        self.enter()
        while (now := time.monotonic()) < least or (now < most and not set(self.done) >= wanted()):
            kind = chance.choice(list(ACTIONS))
            try:
                ACTIONS[kind](self, chance)
                self.done[kind] += 1
            except IndexError:  # there is none of what it needs
                pass
            except (RdmaConnectError, ValueError):  # closed meanwhile, full, busy, not in that state
                self.refused[kind] += 1
            except Exception:  # noqa: BLE001  it is told at the end
                self.raised.append(traceback.format_exc())


def _open(pool: Pool, chance: random.Random) -> Context:
    return open_device(pool.device)


def _cq(pool: Pool, chance: random.Random) -> CQ:
    context = pool.any(chance, "Context")
    channel = pool.any(chance, "CompChannel") if chance.random() < 0.5 else None
    kind = chance.choice((CQ, CQ, CQEx))
    made: CQ = kind(context, 64, channel)
    return made


def _qp(pool: Pool, chance: random.Random) -> QueuePair:
    pd, send, recv = pool.any(chance, "PD"), pool.any(chance, "CQ"), pool.any(chance, "CQ")
    qp_type = chance.choice((RC, RC, UC, UD))
    srq = pool.any(chance, "SRQ") if chance.random() < 0.2 else None
    if chance.random() < 0.3:
        qp: Any = QueuePairEx(pd, send, recv, qp_type, **SIZES, srq=srq, send_ops_flags=OPS & _can(qp_type))
    else:
        qp = QueuePair(pd, send, recv, qp_type, **SIZES, srq=srq)
    if chance.random() < 0.7:
        _climb(qp)
    return qp  # type: ignore[no-any-return]


def _can(qp_type: QpType) -> QpSendOpsFlags:
    return {RC: OPS, UC: OPS & ~QpSendOpsFlags.LOCAL_INV}.get(qp_type, QpSendOpsFlags.SEND)


def _path(context: Context) -> AhAttr:
    entry = next(entry for entry in context.port(1).gids if entry.gid.is_ipv4)
    return AhAttr(port_num=1, is_global=1, dgid=entry.gid.raw, sgid_index=entry.gid_index, hop_limit=64)


def _climb(qp: QueuePair) -> None:
    """Connect it to itself."""
    values = SimpleNamespace(
        port_num=1, pkey_index=0, qkey=0x11, path_mtu=3, dest_qp_num=qp.qp_num, rq_psn=5, sq_psn=5, max_rd_atomic=1,
        max_dest_rd_atomic=1, min_rnr_timer=1, timeout=8, retry_cnt=1, rnr_retry=1, ah_attr=_path(qp.context),
        qp_access_flags=FULL_ACCESS if qp.qp_type == RC else AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE,
    )  # fmt: skip
    for state in (QpState.INIT, QpState.RTR, QpState.RTS):
        qp.move(state, values)


#: kind -> how one is made
MAKE: dict[str, Callable[[Pool, random.Random], Any]] = {
    "Context": _open,
    "PD": lambda p, c: PD(p.any(c, "Context")),
    "CompChannel": lambda p, c: CompChannel(p.any(c, "Context")),
    "CQ": _cq,
    "SRQ": lambda p, c: SRQ(p.any(c, "PD"), 8),
    "MR": lambda p, c: MR(p.any(c, "PD"), mmap.mmap(-1, 4096 * c.randrange(1, 5)), FULL_ACCESS | AccessFlags.MW_BIND),
    "MW": lambda p, c: MW(p.any(c, "PD"), c.choice((MwType.TYPE_1, MwType.TYPE_2))),
    "AH": lambda p, c: _ah(p.any(c, "PD")),
    "QP": _qp,
}


def _ah(pd: PD) -> AddressHandle:
    return AddressHandle(pd, _path(pd.context))


def _make(kind: str) -> Callable[[Pool, random.Random], None]:
    def make(pool: Pool, chance: random.Random) -> None:
        things = pool.things[kind]
        if len(things) < MOST:
            things.append(MAKE[kind](pool, chance))

    return make


def _send(pool: Pool, chance: random.Random) -> None:
    qp, request = pool.any(chance, "QP"), SendRequest()
    to = UdAddress(pool.of(chance, qp.pd, "AH"), qp.qp_num, 0x11) if qp.qp_type == UD else None
    if chance.random() < 0.5 or qp.qp_type == UD:
        request.send(1, inline=b"inline", to=to)
    else:
        mr = pool.of(chance, qp.pd, "MR")
        if chance.random() < 0.5:
            request.fill(2, chance.choice((0, 2, 4)), mr.addr, 64, mr.lkey, remote=mr.region)  # type: ignore[arg-type]
        else:
            request.rdma_write(3, mr.region, sge=mr.sge(0, 64))
    qp.post_send(*([request] if chance.random() < 0.7 else [SendRequest().send(4, inline=b"x", to=to), request]))


def _recv(pool: Pool, chance: random.Random) -> None:
    queue = pool.any(chance, "QP", "SRQ")
    mr = pool.of(chance, queue.pd, "MR")
    plain = RecvRequest(5, mr.addr, 256, mr.lkey)
    queue.post_recv(chance.choice((plain, RecvRequest.scatter(6, mr.sge(0, 256)))))


def _poll(pool: Pool, chance: random.Random) -> None:
    cq = pool.any(chance, "CQ")
    if isinstance(cq, CQEx) and chance.random() < 0.7:
        for wc in cq.poll_batch(chance.choice((None, 1, 3))):
            if chance.random() < 0.1:
                break
            assert wc.wr_id < 10
    else:
        for wc in cq.wcs[: cq.poll()]:
            assert wc.wr_id < 10


def _batch(pool: Pool, chance: random.Random) -> None:
    qp = pool.any(chance, "QP")
    if not isinstance(qp, QueuePairEx) or qp.qp_type == UD:
        raise IndexError
    with qp.batch() as wr:
        wr.send(7, inline=b"in a batch")
        if chance.random() < 0.3:
            wr.abort()


def _bind(pool: Pool, chance: random.Random) -> None:
    qp = pool.any(chance, "QP")
    mw, mr = pool.of(chance, qp.pd, "MW"), pool.of(chance, qp.pd, "MR")
    if mw.mw_type == MwType.TYPE_1:
        qp.bind_mw(8, mw, mr)
    else:
        qp.post_send(SendRequest().bind_mw(9, mw, mr))


def _wait(pool: Pool, chance: random.Random) -> None:
    what = chance.random()
    if what < 0.4:
        pool.any(chance, "CQ").arm()
    elif what < 0.7:
        pool.any(chance, "CompChannel").wait(Deadline(0.002))
    else:
        pool.any(chance, "Context").events.take()


def _ask(pool: Pool, chance: random.Random) -> None:
    chance.choice((
        lambda: pool.any(chance, "Context").query_device(), lambda: pool.any(chance, "Context").port(1),
        lambda: pool.any(chance, "QP").query(), lambda: pool.any(chance, "SRQ").query(),
        lambda: pool.any(chance, "CQ").cqe, lambda: pool.any(chance, "MR").region,
    ))()  # fmt: skip


def _move(pool: Pool, chance: random.Random) -> None:
    qp = pool.any(chance, "QP")
    qp.move(chance.choice((QpState.ERR, QpState.RESET)))
    if qp.state == QpState.RESET and chance.random() < 0.7:
        _climb(qp)


def _close(pool: Pool, chance: random.Random) -> None:
    kind = chance.choices(list(MAKE), weights=[1, 2, 2, 4, 3, 8, 4, 6, 8])[0]
    thing = pool.any(chance, kind)
    try:
        thing.close()
    finally:
        if thing.closed:
            _drop(pool, thing)


def _drop(pool: Pool, thing: Any) -> None:
    for things in pool.things.values():
        with contextlib.suppress(ValueError):
            things.remove(thing)


def _forget(pool: Pool, chance: random.Random) -> None:
    things = pool.things[chance.choice([kind for kind in MAKE if kind != "Context"])]
    things.pop(chance.randrange(len(things)) if things else 0)


def _sweep(pool: Pool, chance: random.Random) -> None:
    for things in pool.things.values():
        for thing in [thing for thing in things if thing.closed]:
            _drop(pool, thing)
    if chance.random() < 0.05:
        gc.collect()


ACTIONS: dict[str, Callable[[Pool, random.Random], Any]] = {
    **{f"make {kind}": _make(kind) for kind in MAKE},
    "make MR again": _make("MR"),
    "make QP again": _make("QP"),
    "send": _send, "send again": _send, "receive": _recv, "receive again": _recv, "poll": _poll, "poll again": _poll,
    "batch": _batch, "bind": _bind, "wait": _wait, "ask": _ask, "move": _move, "close": _close, "close again": _close,
    "forget": _forget, "sweep": _sweep,
}  # fmt: skip
