"""Shared receive queues: many queue pairs take from one; sizes, limits, and what rxe lacks."""

from __future__ import annotations

import errno

import pytest
from ends import end_on, joined
from nodes import Node

from rdmaconnect import verbs
from rdmaconnect.abi import QpType, SrqInitAttrMask, SrqType, ibv_srq_init_attr_ex
from rdmaconnect.errors import LibraryError, PostError, StateError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.srq import SRQ

RC, UD = QpType.RC, QpType.UD


@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
@pytest.mark.parametrize("qp_type", [RC, UD], ids=str)
def test_srq_traffic(node1: Node, node2: Node, qp_type: QpType, extended: bool) -> None:
    options = {"send_ops_flags": 0} if extended else {}
    with joined(node1, node2, qp_type, srq=lambda pd: SRQ(pd, 10), **options) as (here, there):
        head, to = (40, here.address_of(there)) if qp_type == UD else (0, None)
        assert there.qp.query_init().has_srq
        there.qp.srq.post_recv(*(RecvRequest.scatter(n, there.mr.sge(100 * n, 100)) for n in range(3)))
        here.memory[:12] = b"one.two.tri."
        here.qp.post_send(*(SendRequest().send(n, sge=here.mr.sge(4 * n, 4), to=to) for n in range(3)))
        here.wait(3)
        assert [wc.byte_len for wc in there.wait(3)] == [head + 4] * 3
        assert [there.memory[100 * n + head :][:4] for n in range(3)] == [b"one.", b"two.", b"tri."]
        with pytest.raises(StateError, match=r"post a receive to .*: it receives from BASIC SRQ of rxe2"):
            there.recv()


def test_two_queue_pairs_take_from_one_queue(node1: Node, node2: Node) -> None:
    with open_device(node2.device) as context, PD(context) as pd, CQ(context, 16) as cq, SRQ(pd, 4) as srq:
        mr = pd.register(bytearray(64))
        qps = [QueuePair(pd, cq, cq, UD, max_send_wr=1, max_recv_wr=0, srq=srq) for _ in range(2)]
        with end_on(node1, UD, 5) as here, end_on(node2, UD, 6) as there:
            for qp in qps:
                there.qp, own = qp, there.qp
                there.climb(there)
                there.qp = own
            here.climb(there)
            to = here.address_of(there)
            srq.post_recv(RecvRequest.scatter(1, mr.sge()), RecvRequest.scatter(2, mr.sge()))
            for qp in qps:
                target = type(to)(to.ah, qp.qp_num, to.remote_qkey)
                here.qp.post_send(SendRequest().send(1, inline=b"x", to=target))
                here.wait()
            found = []
            while len(found) < 2:
                found += [(wc.wr_id, wc.qp_num) for wc in cq.wcs[: cq.poll()]]
            assert found == [(1, qps[0].qp_num), (2, qps[1].qp_num)]
        srq.close()
        assert all(qp.closed for qp in qps)


def test_its_sizes_are_asked_changed_and_bounded(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd, SRQ(pd, 10, 3) as srq:
        attr = srq.query()
        assert (attr.max_sge, attr.srq_limit) == (3, 0)
        assert srq.max_wr >= 10
        assert attr.max_wr >= 10
        srq.modify(srq_limit=4)
        assert srq.query().srq_limit == 4
        srq.modify(max_wr=40)
        assert srq.max_wr == srq.query().max_wr >= 40
        with pytest.raises(VerbsError, match=r"ibv_modify_srq: EINVAL.*srq_limit must be below max_wr"):
            srq.modify(srq_limit=10**6)
        with pytest.raises(VerbsError, match=r"ibv_create_srq: EINVAL.*above the device's limit"):
            SRQ(pd, 2**31)
        with pytest.raises(VerbsError, match="ibv_create_srq: EINVAL"):
            SRQ(pd, 10, 10**6)


def test_a_full_queue_says_how_far_it_got(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd, SRQ(pd, 4) as srq:
        mr = pd.register(bytearray(8))
        with pytest.raises(PostError, match=r"to BASIC SRQ of rxe1: ibv_post_srq_recv: ENOMEM.*is full") as caught:
            srq.post_recv(*(RecvRequest.scatter(n, mr.sge()) for n in range(srq.query().max_wr + 2)))
        assert caught.value.posted >= 4
        with pytest.raises(PostError, match="EINVAL") as caught:
            SRQ(pd, 4).post_recv(RecvRequest.scatter(7, [mr.sge(0, 1)] * 9))
        assert (caught.value.posted, caught.value.wr_id) == (0, 7)
        srq.close()
        with pytest.raises(StateError, match="BASIC SRQ of rxe1 is closed"):
            srq.post_recv(RecvRequest(1))
        with pytest.raises(StateError, match="BASIC SRQ of rxe1 is closed"), CQ(context, 1) as cq:
            QueuePair(pd, cq, cq, RC, max_send_wr=1, max_recv_wr=1, srq=srq)


def test_an_extended_one_with_nothing_extended_is_a_plain_one(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd:
        attr = ibv_srq_init_attr_ex(comp_mask=SrqInitAttrMask.PD, pd=pd.pointer)
        attr.attr.max_wr = attr.attr.max_sge = 1
        srq = verbs.ibv_create_srq_ex(context.pointer, attr)
        number, bad = verbs.ibv_post_srq_recv(srq, RecvRequest(1).wr)
        assert (number, bad) == (0, None)
        verbs.ibv_destroy_srq(srq)


def test_what_rxe_lacks_is_named(node1: Node, node2: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd, CQ(context, 1) as cq, SRQ(pd, 1) as srq:
        with pytest.raises(LibraryError, match=r"ibv_get_srq_num: EOPNOTSUPP.*Only XRC queues have a number") as caught:
            srq.number()
        assert caught.value.errno == errno.EOPNOTSUPP
        with pytest.raises(VerbsError, match=r"type TM: ibv_create_srq_ex: EOPNOTSUPP.*not have this srq_type"):
            SRQ(pd, 1, srq_type=SrqType.TM, cq=cq, max_num_tags=1, max_ops=1)
        with open_device(node2.device) as other, CQ(other, 1) as foreign:
            with pytest.raises(ValueError, match="CQ of rxe2 is of another device"):
                SRQ(pd, 1, srq_type=SrqType.XRC, cq=foreign)
            with PD(other) as far, pytest.raises(ValueError, match="BASIC SRQ of rxe1 is of another device"):
                QueuePair(far, foreign, foreign, RC, max_send_wr=1, max_recv_wr=0, srq=srq)
