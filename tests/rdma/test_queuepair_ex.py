"""ibv_create_qp_ex and the builder of work requests: what it is made with, batches, and what is refused.

What the operations carry is in test_operations.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ends import End, end_on, joined
from nodes import Node
from test_operations import OPS

from rdmaconnect import verbs
from rdmaconnect.abi import (
    QpCreateFlags,
    QpInitAttrMask,
    QpSendOpsFlags,
    QpState,
    QpType,
    RxHashFields,
    WcStatus,
    ibv_qp_init_attr_ex,
    ibv_qp_open_attr,
    ibv_rwq_ind_table_init_attr,
    ibv_sge,
    ibv_wq_init_attr,
)
from rdmaconnect.errors import LibraryError, PostError, StateError, VerbsError
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx, RxHash
from rdmaconnect.objects.srq import XRCD

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
Ops = QpSendOpsFlags
SENDS = Ops.SEND | Ops.SEND_WITH_IMM


@pytest.fixture
def ends(node1: Node, node2: Node) -> Iterator[tuple[End, End]]:
    with joined(node1, node2, RC, send_ops_flags=SENDS | Ops.RDMA_WRITE) as both:
        both[0].memory[:8] = b"12345678"
        yield both


@pytest.mark.parametrize("with_ops", [False, True], ids=["no_attr", "with_attr"])
@pytest.mark.parametrize("qp_type", [RC, UC, UD], ids=str)
def test_create_qp_ex(node1: Node, qp_type: QpType, with_ops: bool) -> None:
    ops = OPS[qp_type] if with_ops else Ops(0)
    with end_on(node1, qp_type, 1, send_ops_flags=ops, max_send_wr=20, max_recv_wr=30, sq_sig_all=True) as end:
        qp, init = end.qp, end.qp.query_init()
        assert (init.qp_type, init.sq_sig_all, init.has_srq) == (qp_type, True, False)
        assert qp.query().qp_state == qp.state == QpState.RESET
        assert init.cap.max_send_wr >= qp.cap.max_send_wr >= 20
        assert init.cap.max_recv_wr >= qp.cap.max_recv_wr >= 30
        assert init.cap.max_send_sge >= 4
        assert init.cap.max_recv_sge >= 4
        assert init.cap.max_inline_data >= 64
        if not with_ops:
            with pytest.raises(StateError, match="made without send_ops_flags"):
                qp.batch()


@pytest.mark.parametrize("name", ["max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"])
def test_create_qp_ex_with_illegal_caps(node1: Node, name: str) -> None:
    most = 2**31 if name.endswith("wr") else 0xFFFF
    with (
        pytest.raises(VerbsError, match=r"create an extended queue pair of type UD: ibv_create_qp_ex: EINVAL"),
        end_on(node1, UD, 1, send_ops_flags=SENDS, **{name: most}),
    ):
        pass


@pytest.mark.parametrize(
    ("qp_type", "options"),
    [
        (RC, {"send_ops_flags": SENDS | Ops.TSO}),
        (RC, {"send_ops_flags": SENDS | Ops(1 << 40)}),
        (UC, {"send_ops_flags": SENDS | Ops.RDMA_READ}),
        (UD, {"send_ops_flags": SENDS | Ops.RDMA_WRITE}),
        (UD, {"create_flags": QpCreateFlags.BLOCK_SELF_MCAST_LB}),
        (UD, {"source_qpn": 0}),
        (UD, {"send_ops_flags": SENDS, "max_tso_header": 64}),
        (UD, {"send_ops_flags": SENDS, "rx_hash_conf": RxHash(bytes(40), RxHashFields.SRC_IPV4)}),
        (QpType.RAW_PACKET, {"send_ops_flags": SENDS}),
        (QpType.DRIVER, {"send_ops_flags": SENDS}),
    ],
    ids=lambda value: str(value),
)
def test_what_the_device_lacks_is_named(node1: Node, qp_type: QpType, options: dict[str, Any]) -> None:
    with (
        pytest.raises(VerbsError, match=rf"of type {qp_type}: ibv_create_qp_ex: EOPNOTSUPP.*ask for less") as caught,
        end_on(node1, qp_type, 1, **options),
    ):
        pass
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, QpInitAttrMask.PD),
        ({"send_ops_flags": SENDS}, QpInitAttrMask.PD | QpInitAttrMask.SEND_OPS_FLAGS),
        ({"create_flags": QpCreateFlags.SCATTER_FCS}, QpInitAttrMask.PD | QpInitAttrMask.CREATE_FLAGS),
        ({"source_qpn": 0}, QpInitAttrMask.PD | QpInitAttrMask.CREATE_FLAGS),
        ({"max_tso_header": 9}, QpInitAttrMask.PD | QpInitAttrMask.MAX_TSO_HEADER),
        ({"rx_hash_conf": RxHash(b"key", RxHashFields.INNER)}, QpInitAttrMask.PD | QpInitAttrMask.RX_HASH),
    ],
    ids=lambda value: str(value),
)
def test_comp_mask_names_what_is_given(
    node1: Node, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], bits: QpInitAttrMask
) -> None:
    seen = []

    def look(_: Any, attr: ibv_qp_init_attr_ex) -> Any:
        seen.append(attr)
        raise VerbsError("ibv_create_qp_ex", errno.EOPNOTSUPP)

    monkeypatch.setattr(verbs, "ibv_create_qp_ex", look)
    with end_on(node1, UD, 1) as end, pytest.raises(VerbsError):
        QueuePairEx(end.pd, end.cq, end.cq, UD, max_send_wr=1, max_recv_wr=1, **options)
    attr = seen[0]
    assert QpInitAttrMask(attr.comp_mask) == bits
    assert attr.send_ops_flags == options.get("send_ops_flags", 0)
    assert attr.max_tso_header == options.get("max_tso_header", 0)
    if "rx_hash_conf" in options:
        conf = attr.rx_hash_conf
        assert bytes(conf.rx_hash_key[: conf.rx_hash_key_len]) == b"key"
        assert (conf.rx_hash_function, conf.rx_hash_fields_mask) == (1, 1 << 31)
    assert bool(attr.create_flags & QpCreateFlags.SOURCE_QPN) == ("source_qpn" in options)


def test_with_nothing_extended_it_is_a_plain_queue_pair(node1: Node) -> None:
    with end_on(node1, RC, 1) as end:
        qp = QueuePairEx(end.pd, end.cq, end.cq, RC, max_send_wr=1, max_recv_wr=1)
        with pytest.raises(LibraryError, match=r"ibv_qp_to_qp_ex: .* give send_ops_flags"):
            verbs.ibv_qp_to_qp_ex(qp.pointer)
        qp.move(QpState.RESET)
        qp.close()


def test_a_batch_is_posted_together_and_in_its_order(ends: tuple[End, End]) -> None:
    here, there = ends
    for n in range(3):
        there.recv(n, 100 * n)
    with here.qp.batch() as wr:
        wr.send(1, sge=here.mr.sge(0, 4)).send_imm(2, 5, sge=here.mr.sge(4, 4)).send(3, inline=b"abc")
        assert wr.count == 3
        assert here.cq.poll() == 0
    assert [wc.wr_id for wc in here.wait(3)] == [1, 2, 3]
    assert [wc.byte_len for wc in there.wait(3)] == [4, 4, 3]
    assert (there.memory[:4], there.memory[100:104], there.memory[200:203]) == (b"1234", b"5678", b"abc")


def test_a_batch_that_raises_posts_nothing(ends: tuple[End, End]) -> None:
    here, there = ends
    there.recv(1, 0)
    with pytest.raises(ValueError, match="give 64 bits"):
        _fail(here)
    with here.qp.batch() as wr:
        wr.send(2, inline=b"kept")
    assert here.wait()[0].wr_id == 2
    assert there.wait()[0].byte_len == 4
    assert there.memory[:4] == b"kept"


def _fail(end: End) -> None:
    with end.qp.batch() as wr:
        wr.send(1, inline=b"lost").send(-1)


def test_an_operation_that_was_not_asked_for_is_refused_by_its_flag(ends: tuple[End, End]) -> None:
    here, there = ends
    region, piece = there.region(0, 8), here.mr.sge(0, 8)
    builds = {
        "SEND_WITH_INV": lambda wr: wr.send_inv(1, 5, sge=piece),
        "RDMA_WRITE_WITH_IMM": lambda wr: wr.rdma_write_imm(1, region, 5, sge=piece),
        "RDMA_READ": lambda wr: wr.rdma_read(1, region, sge=piece),
        "ATOMIC_CMP_AND_SWP": lambda wr: wr.atomic_cmp_swp(1, region, 1, 2, sge=piece),
        "ATOMIC_FETCH_AND_ADD": lambda wr: wr.atomic_fetch_add(1, region, 1, sge=piece),
        "ATOMIC_WRITE": lambda wr: wr.atomic_write(1, region, bytes(8)),
        "FLUSH": lambda wr: wr.flush(1, region),
        "LOCAL_INV": lambda wr: wr.local_inv(1, 5),
        "TSO": lambda wr: wr.send_tso(1, b"", 100, sge=piece),
    }
    for flag, build in builds.items():
        with (
            pytest.raises(StateError, match=rf"^{flag} on RC QP .*without QpSendOpsFlags\.{flag} in send_ops_flags"),
            here.qp.batch() as wr,
        ):
            build(wr)
    there.recv(0, 0)
    with here.qp.batch() as wr:
        wr.send(9, sge=piece)
    assert here.wait()[0].wr_id == 9


def test_what_does_not_fit_leaves_nothing_behind(ends: tuple[End, End]) -> None:
    here, there = ends
    most, room = here.qp.cap.max_inline_data, here.qp.cap.max_send_sge
    there.recv(0, 0)
    with here.qp.batch() as wr:
        with pytest.raises(ValueError, match=rf"post {most + 1} bytes inline to RC QP .*: it takes {most}"):
            wr.send(1, inline=[bytes(most), b"x"])
        with pytest.raises(ValueError, match=rf"post {room + 1} pieces"):
            wr.send(1, sge=[here.mr.sge(0, 1)] * (room + 1))
        wr.send(2, inline=bytes(most))
    assert here.wait()[0].wr_id == 2
    assert there.wait()[0].byte_len == most


def test_a_full_queue_refuses_the_whole_batch(ends: tuple[End, End]) -> None:
    here, _ = ends
    most = here.qp.query().cap.max_send_wr
    with pytest.raises(PostError, match=rf"post a batch of {most + 2} .*ibv_wr_complete: ENOSPC.*no room") as caught:
        _write(here, most + 2)
    assert caught.value.posted == 0
    assert here.cq.poll() == 0
    _write(here, 1)


def _write(end: End, count: int) -> None:
    with end.qp.batch() as wr:
        for n in range(count):
            wr.send(n, sge=end.mr.sge(0, 1))


def test_a_batch_belongs_to_its_block_and_its_thread(ends: tuple[End, End]) -> None:
    here, there = ends
    there.recv(0, 0)
    there.recv(1, 0)
    early = here.qp.batch()
    with pytest.raises(StateError, match=r"SEND on RC QP .*: its batch is not open in this thread"):
        early.send(1)
    with early as wr:
        with pytest.raises(StateError, match=r"begin another batch on RC QP .*: a batch is open on it in this thread"):
            here.qp.batch().__enter__()
        with pytest.raises(StateError, match=r"post to RC QP .*: a batch is open"):
            here.qp.post_send(SendRequest().send(1))
        with pytest.raises(StateError, match=r"move RC QP .*: a batch is open"):
            here.qp.move(QpState.ERR)
        failures: list[Exception] = []
        thread = threading.Thread(target=lambda: _try(lambda: wr.send(5), failures))
        thread.start()
        thread.join()
        assert "not open in this thread" in str(failures[0])
        waiting = threading.Thread(target=_write, args=(here, 1))
        waiting.start()
        wr.send(1, sge=here.mr.sge(0, 1))
    waiting.join()
    assert [wc.wr_id for wc in here.wait(2)] == [1, 0]
    with pytest.raises(StateError, match="not open"):
        wr.send(1)
    with pytest.raises(StateError, match="this one was used"):
        wr.__enter__()


def _try(function: Any, failures: list[Exception]) -> None:
    try:
        function()
    except StateError as e:
        failures.append(e)


def test_a_batch_needs_a_state_to_send_in_and_an_open_queue_pair(node1: Node) -> None:
    with end_on(node1, RC, 1, send_ops_flags=SENDS) as end:
        for state in (QpState.RESET, QpState.INIT, QpState.RTR):
            end.qp.state = state
            with pytest.raises(StateError, match=f"it is in {state} and sends from RTS on"), end.qp.batch():
                pass
        batch = end.qp.batch()
        end.qp.state = QpState.RESET
        end.qp.close()
        with pytest.raises(StateError, match=r"^RC QP .* is closed"):
            end.qp.batch()
        with pytest.raises(StateError, match=r"^RC QP .* is closed"):
            batch.__enter__()


def test_abort_drops_what_was_written(ends: tuple[End, End]) -> None:
    here, there = ends
    there.recv(0, 0)
    with here.qp.batch() as wr:
        wr.send(1, inline=b"lost")
        wr.abort()
        with pytest.raises(StateError, match="not open"):
            wr.send(2, inline=b"lost too")
    _write(here, 1)
    assert here.wait()[0].wr_id == 0
    assert there.wait()[0].byte_len == 1


def test_closing_in_the_block_aborts_the_batch(ends: tuple[End, End]) -> None:
    here, _ = ends
    batch = here.qp.batch()
    with pytest.raises(StateError, match=r"^post a batch to RC QP .*: it was closed in the block"):
        _close_inside(batch, here)


def _close_inside(batch: Any, end: End) -> None:
    with batch as wr:
        wr.send(1, inline=b"x")
        end.qp.close()
        with pytest.raises(StateError, match="not open"):
            wr.send(2)


def test_work_in_err_is_flushed(ends: tuple[End, End]) -> None:
    here, _ = ends
    here.qp.move(QpState.ERR)
    _write(here, 2)
    assert [wc.wr_id for wc in here.wait(2, WcStatus.WR_FLUSH_ERR)] == [0, 1]


def test_a_ud_batch_needs_a_target_and_an_open_one(node1: Node, node2: Node) -> None:
    with joined(node1, node2, UD, send_ops_flags=SENDS) as (here, there):
        to = here.address_of(there)
        there.recv(0, 0)
        with here.qp.batch() as wr:
            with pytest.raises(ValueError, match="say whom it is for"):
                wr.send(1, inline=b"x")
            wr.send(2, inline=b"x", to=to)
        here.wait()
        to.ah.close()
        with here.qp.batch() as wr, pytest.raises(StateError, match=r"address handle .* is closed"):
            wr.send(3, inline=b"x", to=to)
        assert here.cq.poll() == 0


def test_the_bare_verbs_carry_a_message(ends: tuple[End, End]) -> None:
    here, there = ends
    there.qp.post_recv(RecvRequest.scatter(0, there.mr.sge(0, 64)), RecvRequest.scatter(1, there.mr.sge(64, 64)))
    qp = verbs.ibv_qp_to_qp_ex(here.qp.pointer)
    pieces = (ibv_sge * 2)(*((p.addr, p.length, p.lkey) for p in (here.mr.sge(4, 4), here.mr.sge(0, 4))))
    verbs.ibv_wr_start(qp)
    qp.contents.wr_id, qp.contents.wr_flags = 5, 2
    verbs.ibv_wr_send(qp)
    verbs.ibv_wr_set_sge_list(qp, 2, pieces)
    qp.contents.wr_id = 6
    verbs.ibv_wr_send_imm(qp, 0)
    verbs.ibv_wr_set_sge(qp, here.mr.lkey, here.mr.addr, 8)
    with pytest.raises(LibraryError, match="ibv_wr_rdma_read: EOPNOTSUPP"):
        verbs.ibv_wr_rdma_read(qp, 0, 0)
    verbs.ibv_wr_complete(qp)
    assert [wc.wr_id for wc in here.wait(2)] == [5, 6]
    assert [wc.byte_len for wc in there.wait(2)] == [8, 8]
    assert (there.memory[:8], there.memory[64:72]) == (b"56781234", b"12345678")


def test_xrc_is_said_to_be_lacking(node1: Node) -> None:
    with end_on(node1, UD, 1) as end:
        with pytest.raises(LibraryError, match=r"open an XRC domain: ibv_open_xrcd: EOPNOTSUPP.*mlx5") as caught:
            XRCD(end.context)
        assert caught.value.errno == errno.EOPNOTSUPP
        with pytest.raises(LibraryError, match=r"ibv_open_qp: EOPNOTSUPP.*XRC_RECV"):
            verbs.ibv_open_qp(end.context.pointer, ibv_qp_open_attr(qp_num=5))
        with pytest.raises(VerbsError, match=r"type XRC_SEND: ibv_create_qp_ex: EOPNOTSUPP"):
            QueuePairEx(end.pd, end.cq, None, QpType.XRC_SEND, max_send_wr=1, send_ops_flags=SENDS)


def test_receive_side_scaling_is_said_to_be_lacking(node1: Node) -> None:
    with open_device(node1.device) as context:
        with pytest.raises(LibraryError, match=r"create a work queue: ibv_create_wq: EOPNOTSUPP.*mlx5"):
            verbs.ibv_create_wq(context.pointer, ibv_wq_init_attr())
        with pytest.raises(LibraryError, match=r"ibv_create_rwq_ind_table: EOPNOTSUPP.*mlx5"):
            verbs.ibv_create_rwq_ind_table(context.pointer, ibv_rwq_ind_table_init_attr())


def test_arguments_of_another_device_or_range_are_refused(node1: Node, node2: Node) -> None:
    with end_on(node1, UD, 1) as here, end_on(node2, UD, 1) as there, PD(here.context) as pd:
        with pytest.raises(ValueError, match=r"PD of rxe1: CQ of rxe2 is of another device"):
            QueuePairEx(pd, here.cq, there.cq, UD, max_send_wr=1)
        with pytest.raises(ValueError, match="source_qpn is 16777216: give 24 bits"):
            QueuePairEx(pd, here.cq, here.cq, UD, source_qpn=2**24)
