"""Two ends to start from: connections, or queue pairs joined by hand."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import rdmaconnect
from rdmaconnect.abi import AccessFlags, QpState, QpType, WcStatus, ibv_wc
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.work_request import RecvRequest

#: seconds that nothing here takes
PATIENCE_S = 10.0
QKEY = 0x1234
_FIELDS = [name for name, _ in ibv_wc._fields_ if not name.startswith("_")] + ["imm_data"]


@contextmanager
def connected(
    qp_type: str = "RC", listen: dict[str, Any] | None = None, **connect: Any
) -> Iterator[tuple[rdmaconnect.Connection, rdmaconnect.Connection]]:
    """A connection over 127.0.0.1: (the connector's end, the listener's end)."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        listener = stack.enter_context(rdmaconnect.listen("127.0.0.1:0", **(listen or {})))
        there = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        options = {"qp_type": qp_type, "deadline_s": PATIENCE_S, **connect}
        here = stack.enter_context(rdmaconnect.connect(listener.url, **options))
        yield here, stack.enter_context(there.result(PATIENCE_S))


@dataclass
class End:
    """A queue pair and all that it stands on, with two pages of memory that the peer may use."""

    context: Context
    pd: PD
    channel: CompChannel
    cq: CQ
    qp: Any
    memory: mmap.mmap
    mr: MR
    psn: int
    seen: list[SimpleNamespace] = field(default_factory=list)
    handles: list[AddressHandle] = field(default_factory=list)

    def recv(self, wr_id: int, offset: int = 0, length: int = 256) -> None:
        """Post a receive."""
        self.qp.post_recv(RecvRequest.scatter(wr_id, self.mr.sge(offset, length)))

    def wait(self, count: int = 1, status: WcStatus = WcStatus.SUCCESS) -> list[SimpleNamespace]:
        """The next completions, all with this status."""
        end = time.monotonic() + PATIENCE_S
        while len(self.seen) < count:
            assert time.monotonic() < end, f"{len(self.seen)} of {count} completions at {self.qp.name}"
            taken = self.cq.wcs[: self.cq.poll()]
            self.seen += [SimpleNamespace(**{name: getattr(wc, name) for name in _FIELDS}) for wc in taken]
        found, self.seen = self.seen[:count], self.seen[count:]
        assert [WcStatus(wc.status) for wc in found] == [status] * count
        return found

    def path_to(self, peer: End) -> AhAttr:
        """The way to the peer's port."""
        mine, theirs = (end.context.port(1).gids[0] for end in (self, peer))
        return AhAttr(1, is_global=1, dgid=theirs.gid.raw, sgid_index=mine.gid_index, hop_limit=64)

    def address_of(self, peer: End) -> UdAddress:
        """Whom a datagram is for; the handle lives as long as the end."""
        self.handles.append(AddressHandle(self.pd, self.path_to(peer)))
        return UdAddress(self.handles[-1], peer.qp.qp_num, QKEY)

    def climb(self, peer: End, to: QpState = QpState.RTS, **attributes: Any) -> None:
        """Take the queue pair to a state, with all that it needs, or what is given instead."""
        values = SimpleNamespace(
            port_num=1, pkey_index=0, qkey=QKEY, qp_access_flags=FULL_ACCESS, path_mtu=3, dest_qp_num=peer.qp.qp_num,
            rq_psn=peer.psn, sq_psn=self.psn, ah_attr=self.path_to(peer), max_rd_atomic=4, max_dest_rd_atomic=4,
            min_rnr_timer=1, timeout=14, retry_cnt=7, rnr_retry=7,
        )  # fmt: skip
        vars(values).update(attributes)
        for state in (QpState.INIT, QpState.RTR, QpState.RTS):
            if self.qp.state < state <= to:
                self.qp.move(state, values)


@contextmanager
def end_on(device: str = "soft0", qp_type: QpType = QpType.RC, psn: int = 1, **options: Any) -> Iterator[End]:
    """One end, its queue pair in RESET."""
    with ExitStack() as stack:
        context = stack.enter_context(open_device(device))
        pd = stack.enter_context(PD(context))
        channel = stack.enter_context(CompChannel(context))
        cq = stack.enter_context(CQ(context, options.pop("cqe", 64), channel))
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        mr = MR(pd, memory, options.pop("access", FULL_ACCESS | AccessFlags.MW_BIND))
        kind: Any = options.pop("kind", QueuePair)
        sizes = {"max_send_wr": 16, "max_recv_wr": 16, "max_send_sge": 4, "max_recv_sge": 4, "max_inline_data": 64}
        qp = stack.enter_context(kind(pd, cq, cq, qp_type, **sizes | options))
        yield End(context, pd, channel, cq, qp, memory, mr, psn)


@contextmanager
def joined(
    qp_type: QpType = QpType.RC, here: str = "soft0", there: str = "soft0", to: QpState = QpState.RTS, **options: Any
) -> Iterator[tuple[End, End]]:
    """Two ends whose queue pairs are in RTS, or in another state."""
    with end_on(here, qp_type, 0x111111, **options) as a, end_on(there, qp_type, 0x222222, **options) as b:
        a.climb(b, to)
        b.climb(a, to)
        yield a, b
