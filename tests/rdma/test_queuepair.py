"""Queue pairs as they are made, asked and ended; what only some devices have."""

from __future__ import annotations

import errno

import pytest
from ends import end_on
from nodes import Node

from rdmaconnect.abi import QpAttrMask, QpDataInOrderCaps, QpState, QpType, WrOpcode
from rdmaconnect.errors import LibraryError, StateError, VerbsError
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.qp_attr import Ece, QpAttr
from rdmaconnect.objects.queuepair import QueuePair

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
TYPES = pytest.mark.parametrize("qp_type", [RC, UC, UD], ids=str)


@pytest.mark.parametrize("with_attr", [False, True], ids=["no_attr", "with_attr"])
@TYPES
def test_create_qp(node1: Node, qp_type: QpType, with_attr: bool) -> None:
    with end_on(node1, qp_type, 1, sq_sig_all=True) as end:
        assert end.qp.qp_num > 1
        assert end.qp.state == QpState.RESET
        if with_attr:
            end.climb(end)
            assert end.qp.query().qp_state == end.qp.state == QpState.RTS


def test_create_raw_qp_is_said_to_be_lacking(node1: Node) -> None:
    with (
        pytest.raises(VerbsError, match=r"of type RAW_PACKET: ibv_create_qp: EOPNOTSUPP.*not have this qp_type"),
        end_on(node1, QpType.RAW_PACKET, 1),
    ):
        pass


@TYPES
def test_query_qp(node1: Node, qp_type: QpType) -> None:
    with end_on(node1, qp_type, 1, sq_sig_all=True, max_send_wr=17, max_recv_wr=33) as end:
        init, attr = end.qp.query_init(), end.qp.query(QpAttrMask.STATE | QpAttrMask.CAP)
        assert (init.qp_type, init.sq_sig_all, init.has_srq) == (qp_type, True, False)
        assert attr.qp_state == QpState.RESET
        assert init.cap == attr.cap
        assert init.cap.max_send_wr >= 17
        assert init.cap.max_recv_wr >= 33
        assert (init.cap.max_send_sge, init.cap.max_recv_sge) >= (4, 4)
        assert init.cap.max_inline_data >= 64
        assert isinstance(attr, QpAttr)
        with pytest.raises(AttributeError):
            attr.qp_state = QpState.RTS  # type: ignore[misc]


def test_query_tells_what_was_set(node1: Node) -> None:
    with end_on(node1, RC, 0xABCDEF) as end:
        end.climb(end)
        attr = end.qp.query()
        assert (attr.qp_state, attr.path_mtu, attr.port_num) == (QpState.RTS, 3, 1)
        assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (end.qp.qp_num, 0xABCDEF, 0xABCDEF)
        assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (14, 7, 7, 1)
        assert (attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.pkey_index) == (4, 4, 0)
        path = end.path_to(end)
        assert (attr.ah_attr.dgid, attr.ah_attr.sgid_index) == (path.dgid, path.sgid_index)
        assert (attr.ah_attr.is_global, attr.ah_attr.hop_limit) == (1, 64)


def test_query_data_in_order(node1: Node) -> None:
    with end_on(node1, UD, 1) as end:
        end.climb(end)
        assert end.qp.data_in_order(WrOpcode.SEND) in (QpDataInOrderCaps(0), QpDataInOrderCaps.WHOLE_MSG)


def test_what_rxe_lacks_is_named(node1: Node) -> None:
    with end_on(node1, RC, 1) as end:
        for match, call in (
            ("ibv_query_ece: EOPNOTSUPP.*Only mlx5", end.qp.query_ece),
            ("ibv_set_ece: EOPNOTSUPP.*needs a vendor_id", lambda: end.qp.set_ece(Ece(0, 1))),
            ("ibv_set_ece: EOPNOTSUPP", lambda: end.qp.set_ece(Ece(0x15B3, 1))),
            ("ibv_modify_qp_rate_limit: EOPNOTSUPP.*packet pacing", lambda: end.qp.limit_rate(1000)),
        ):
            with pytest.raises(LibraryError, match=match) as caught:
                call()
            assert caught.value.errno == errno.EOPNOTSUPP


def test_what_it_stands_on_closes_it_first(node1: Node) -> None:
    with end_on(node1, RC, 1) as end:
        with QueuePair(end.pd, end.cq, end.cq, RC, max_send_wr=1, max_recv_wr=1) as other:
            end.cq.close()
            assert other.closed
            assert end.qp.closed
        end.qp.close()
        with pytest.raises(StateError, match=r"CQ .*is closed"):
            QueuePair(end.pd, end.cq, end.cq, RC, max_send_wr=1, max_recv_wr=1)
        domain = PD(end.context)
        domain.close()
        with pytest.raises(StateError, match="is closed"):
            QueuePair(domain, end.cq, end.cq, RC, max_send_wr=1, max_recv_wr=1)
