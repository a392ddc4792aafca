"""Queue pairs made alike and together, on a device in software; and a step and receives made ready for many."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from software import Software, end_on, joined

from rdmaconnect.abi import AccessFlags, QpState, QpType, WrOpcode
from rdmaconnect.agreement.path import AhAttr
from rdmaconnect.errors import PostError, StateError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.transition import Transition
from rdmaconnect.objects.work_request import RecvList, SendList, SendRequest

SIZES = {"max_send_wr": 4, "max_recv_wr": 4}
PATH = SimpleNamespace(
    ah_attr=AhAttr(port_num=1), path_mtu=3, dest_qp_num=17, rq_psn=5, max_dest_rd_atomic=1, min_rnr_timer=12,
)  # fmt: skip
INIT = SimpleNamespace(port_num=1, pkey_index=0, qkey=0, qp_access_flags=AccessFlags.LOCAL_WRITE)


@pytest.fixture
def pd(software: Software) -> Iterator[PD]:
    with open_device("soft0") as context, PD(context) as made:
        yield made


@pytest.fixture
def cq(pd: PD) -> Iterator[CQ]:
    with CQ(pd.context, 64) as made:
        yield made


def test_they_are_as_those_made_alone(pd: PD, cq: CQ) -> None:
    made = QueuePair.several(3, pd, cq, cq, QpType.RC, **SIZES)
    with QueuePair(pd, cq, cq, QpType.RC, **SIZES) as alone:
        assert len({qp.qp_num for qp in (*made, alone)}) == 4
        for qp in made:
            assert (qp.state, qp.pd, qp.qp_type) == (QpState.RESET, pd, QpType.RC)
            assert bytes(qp.cap) == bytes(alone.cap)
            assert f"{qp.qp_num:#08x}" in qp.name
            qp.close()


def test_all_or_none(software: Software, pd: PD, cq: CQ) -> None:
    before = software.left()
    with (
        software.on("ibv_create_qp", fail=errno.ENOMEM, nth=3),
        pytest.raises(VerbsError, match="create a queue pair of type RC: ibv_create_qp: ENOMEM"),
    ):
        QueuePair.several(5, pd, cq, cq, QpType.RC, **SIZES)
    assert software.calls["ibv_create_qp"] == 3
    assert software.left() == before


def test_none_of_what_is_closed(pd: PD, cq: CQ) -> None:
    cq.close()
    with pytest.raises(StateError, match="is closed"):
        QueuePair.several(2, pd, cq, cq, QpType.RC, **SIZES)


def test_a_number_that_does_not_fit_is_named(pd: PD, cq: CQ) -> None:
    with pytest.raises(ValueError, match="max_send_wr is 4294967296: give 0 to 4294967295"):
        QueuePair.several(2, pd, cq, cq, QpType.RC, max_send_wr=1 << 32, max_recv_wr=1)


def test_a_step_is_made_ready_once_and_taken_by_many(pd: PD, cq: CQ) -> None:
    step = Transition(QpType.RC, QpState.RESET, QpState.INIT, INIT)
    made = QueuePair.several(3, pd, cq, cq, QpType.RC, **SIZES)
    for qp in made:
        qp.take(step, INIT)
        assert (qp.state, qp.query().qp_state) == (QpState.INIT, QpState.INIT)
    with pytest.raises(StateError, match="RESET->INIT as RC: it is in INIT"):
        made[0].take(step, INIT)
    for qp in made:
        qp.close()


def test_a_step_is_of_one_type(pd: PD, cq: CQ) -> None:
    step = Transition(QpType.RC, QpState.RESET, QpState.INIT, INIT)
    with QueuePair(pd, cq, cq, QpType.UD, **SIZES) as qp, pytest.raises(StateError, match="as RC"):
        qp.take(step, INIT)


def test_a_step_looks_at_what_is_each_queue_pair_s_own(pd: PD, cq: CQ) -> None:
    step = Transition(QpType.UD, QpState.RESET, QpState.INIT, INIT)
    with QueuePair(pd, cq, cq, QpType.UD, **SIZES) as qp:
        with pytest.raises(ValueError, match="qkey is 4294967296: give 0 to 4294967295"):
            qp.take(step, SimpleNamespace(qkey=1 << 32))
        qp.take(step, SimpleNamespace(qkey=7))
        assert qp.query().qkey == 7


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_of_many_is_written_as_that_of_each(count: int) -> None:
    step = Transition(QpType.RC, QpState.INIT, QpState.RTR, PATH)
    own = [SimpleNamespace(dest_qp_num=i + 1, rq_psn=0xFFFFFF - i) for i in range(count)]
    assert [bytes(struct) for struct in step.structs(own)] == [bytes(step.struct(path)) for path in own]
    own[-1].rq_psn = 1 << 24
    with pytest.raises(ValueError, match="rq_psn is 16777216: give 0 to 16777215"):
        step.structs(own)


def test_receives_of_a_list_land_side_by_side(software: Software) -> None:
    with joined() as (one, two):
        receives = RecvList(4, 16, one.mr.lkey)
        assert receives.at(one.mr.addr) is receives
        one.qp.post_recv(receives)
        for i in range(4):
            two.memory[8 * i : 8 * i + 8] = bytes([65 + i]) * 8
            two.qp.post_send(SendRequest().fill(100 + i, WrOpcode.SEND, two.mr.addr + 8 * i, 8, two.mr.lkey))
        assert [wc.wr_id for wc in one.wait(4)] == [0, 1, 2, 3]
        assert one.memory[:64] == b"".join(bytes([65 + i]) * 8 + bytes(8) for i in range(4))


def test_messages_of_a_list_go_in_one_post_and_the_last_tells_of_all(software: Software) -> None:
    with joined() as (one, two):
        one.qp.post_recv(RecvList(4, 16, one.mr.lkey).at(one.mr.addr))
        two.memory[:24] = bytes(range(24))
        sends = SendList((4, 16), two.mr.lkey)
        two.qp.post_send(sends.at(two.mr.addr, 100))
        two.qp.post_send(sends.at(two.mr.addr + 4, 200))
        assert software.calls["ibv_post_send"] == 2
        assert [wc.wr_id for wc in two.wait(2)] == [101, 201]
        assert [(wc.wr_id, wc.byte_len) for wc in one.wait(4)] == [(0, 4), (1, 16), (2, 4), (3, 16)]
        came = [one.memory[16 * i : 16 * i + size] for i, size in enumerate((4, 16, 4, 16))]
        assert came == [bytes(range(*span)) for span in ((0, 4), (4, 20), (4, 8), (8, 24))]


def test_a_list_of_messages_is_for_those_who_have_one_peer(software: Software) -> None:
    with joined(QpType.UD) as (one, _), pytest.raises(ValueError, match="say whom it is for"):
        one.qp.post_send(SendList((4,), one.mr.lkey).at(one.mr.addr, 1))
    with end_on() as end, pytest.raises(StateError, match="sends from RTS on"):
        end.qp.post_send(SendList((4,), end.mr.lkey).at(end.mr.addr, 1))


def test_of_a_list_that_does_not_fit_it_is_told(software: Software) -> None:
    with end_on(max_recv_wr=6) as end:
        end.qp.move(QpState.INIT, INIT)
        receives = RecvList(4, 16, end.mr.lkey).at(end.mr.addr)
        end.qp.post_recv(receives)
        with pytest.raises(PostError, match="ENOMEM"):
            end.qp.post_recv(receives)
