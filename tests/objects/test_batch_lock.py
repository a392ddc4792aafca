"""What takes the lock that ``ibv_start_poll`` holds on real adapters is refused within a batch, and not tried.

mlx5, mlx4, mthca, hns, efa, irdma and ionic take a queue pair's completions out of its queues when it is destroyed,
most of them when it goes to RESET too, each with the queue's lock; in the thread that holds it, that never ends.
Source: rdma-core, ``mlx5_lock_cqs``, ``mlx4_lock_cqs``, ``hns_roce_lock_cqs``, ``efa_lock_cqs``, ``irdma_clean_cqes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from software import Software

from rdmaconnect.abi import QpState, QpType, WqState
from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.work_request import RecvRequest
from rdmaconnect.objects.workqueue import WQ

#: what is tried within a batch -> the verbs that must not be called
TRIED: dict[str, tuple[Callable[[SimpleNamespace], object], set[str]]] = {
    "close a queue pair that sends there": (lambda it: it.sender.close(), {"ibv_destroy_qp"}),
    "close a queue pair that receives there": (lambda it: it.qp.close(), {"ibv_destroy_qp"}),
    "close its protection domain": (lambda it: it.pd.close(), {"ibv_destroy_qp", "ibv_dealloc_pd"}),
    "move a queue pair to RESET": (lambda it: it.qp.move(QpState.RESET), {"ibv_modify_qp"}),
    "modify it to RESET": (lambda it: it.qp.modify({"qp_state": QpState.RESET}), {"ibv_modify_qp"}),
    "close a work queue": (lambda it: it.wq.close(), {"ibv_destroy_wq"}),
    "move a work queue": (lambda it: it.wq.modify(WqState.RDY), {"ibv_modify_wq"}),
    "arm it": (lambda it: it.cq.arm(), {"ibv_req_notify_cq"}),
    "resize it": (lambda it: it.cq.resize(9), {"ibv_resize_cq"}),
    "poll it": (lambda it: it.cq.poll(), {"ibv_poll_cq"}),
    "begin another batch": (lambda it: it.cq.start_poll(), {"ibv_start_poll"}),
}


@pytest.fixture
def it(software: Software) -> Iterator[SimpleNamespace]:
    with open_device("soft0") as context, CompChannel(context) as channel, PD(context) as pd:
        cq, other = CQEx(context, 8, channel), CQ(context, 8)
        qp = QueuePair(pd, other, cq, QpType.RC, max_send_wr=1, max_recv_wr=1)
        sender = QueuePair(pd, cq, other, QpType.RC, max_send_wr=1, max_recv_wr=1)
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        qp.post_recv(RecvRequest(1))
        qp.move(QpState.ERR)
        yield SimpleNamespace(pd=pd, cq=cq, qp=qp, sender=sender, wq=WQ(pd, cq, 2), software=software)


@pytest.mark.parametrize("name", TRIED)
def test_within_a_batch_nothing_waits_for_its_own_lock(it: SimpleNamespace, name: str) -> None:
    tried, verbs = TRIED[name]
    seen = 0
    for wc in it.cq.poll_batch():
        seen += 1
        before = it.software.calls.copy()
        with pytest.raises(RdmaConnectError, match=r"this thread is within a batch of it. Call end_poll\(\) first"):
            tried(it)
        assert {verb for verb in verbs if it.software.calls[verb] != before[verb]} == set()
        assert wc.wr_id == 1  # the completion is still the current one
    assert seen == 1
    tried(it)  # after the batch it goes well


def test_what_takes_no_lock_goes_on_within_a_batch(it: SimpleNamespace) -> None:
    for _ in it.cq.poll_batch():
        it.qp.query()
        it.qp.modify({"qp_state": QpState.ERR})
        assert it.cq.cqe == 8
