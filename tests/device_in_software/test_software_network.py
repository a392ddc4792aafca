"""The network of the device in software: what is lost, cut, unreachable, late, and what RC makes of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from software import Message, Software, joined

import rdmaconnect
from rdmaconnect.abi import EventType, QpState, QpType, WcStatus
from rdmaconnect.errors import ModifyError, VerbsError
from rdmaconnect.objects.queuepair import SendRequest

RTR = QpState.RTR
#: seconds that are noticed, and do not matter
A_WHILE = 0.05


def send(end: object, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[attr-defined]


def test_messages_are_lost(software: Software) -> None:
    with joined(QpType.UC) as (here, there):
        with software.network.lose(lambda message: message.data == b"lost") as loss:
            for wr_id, data in enumerate((b"lost", b"found")):
                there.recv(wr_id)
                send(here, wr_id, data)
            here.wait(2)
            assert there.wait()[0].byte_len == 5
        assert loss.seen == 1
        send(here, 3, b"lost")
        assert there.wait()[0].byte_len == 4
        here.wait()


def test_rc_sends_again_what_was_lost(software: Software) -> None:
    tries: list[Message] = []

    def first_two(message: Message) -> bool:
        tries.append(message)
        return len(tries) <= 2

    with joined() as (here, there), software.network.lose(first_two):
        there.recv(1)
        send(here, 2, b"x")
        here.wait()
        there.wait()
    assert [(message.qp_num, message.opcode, message.data) for message in tries] == [(here.qp.qp_num, 2, b"x")] * 3


def test_rc_gives_up_in_the_end(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined() as (here, there), software.network.cut("127.0.0.1", "127.0.0.1"):
        before = time.monotonic()
        there.recv(1)
        send(here, 2, b"x")
        send(here, 3, b"y")
        (wc,) = here.wait(1, WcStatus.RETRY_EXC_ERR)
        assert wc.wr_id == 2
        assert A_WHILE <= time.monotonic() - before < 5
        here.wait(1, WcStatus.WR_FLUSH_ERR)
        assert here.qp.query().qp_state == QpState.ERR
        assert there.cq.poll() == 0


def test_the_patience_is_that_of_the_queue_pair(software: Software) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, timeout=10, retry_cnt=3)  # 4 times 4.2 ms, and the peer is not in RTR
        before = time.monotonic()
        send(here, 1, b"x")
        here.wait(1, WcStatus.RETRY_EXC_ERR)
        assert 0.016 <= time.monotonic() - before < 5


def test_a_peer_that_comes_late_is_waited_for(software: Software) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, timeout=18)
        there.recv(1)
        send(here, 1, b"x")
        time.sleep(A_WHILE)
        assert here.cq.poll() == 0
        there.climb(here)
        here.wait()
        there.wait()


@pytest.mark.parametrize(("rnr_retry", "status"), [(0, WcStatus.RNR_RETRY_EXC_ERR), (7, WcStatus.SUCCESS)])
def test_a_peer_without_a_receive(software: Software, rnr_retry: int, status: WcStatus) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, rnr_retry=rnr_retry)
        there.climb(here)
        send(here, 1, b"x")
        if status:
            here.wait(1, status)
            return
        time.sleep(A_WHILE)
        assert here.cq.poll() == 0
        there.recv(1)
        here.wait()


@pytest.mark.parametrize(("wrong", "status"), [({"dest_qp_num": 5}, 1), ({"rq_psn": 0x222222 + 9}, 1), ({}, 0)])
def test_rc_knows_its_peer(software: Software, wrong: dict[str, int], status: int) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, **wrong)
        there.climb(here)
        here.recv(1)
        send(there, 2, b"x")
        there.wait(1, WcStatus.RETRY_EXC_ERR if status and "dest_qp_num" in wrong else WcStatus.SUCCESS)
        # a PSN that is behind is taken for one that was here before: acknowledged, and not delivered
        assert here.cq.poll() == (0 if status else 1)


def test_a_psn_that_is_ahead_is_not_taken(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, rq_psn=there.psn - 1)
        there.climb(here)
        here.recv(1)
        send(there, 2, b"x")
        there.wait(1, WcStatus.RETRY_EXC_ERR)


def test_a_gid_that_nobody_has(software: Software) -> None:
    software.network.unreachable("127.0.0.1", A_WHILE)
    with pytest.raises(ModifyError, match="ETIMEDOUT"), joined():
        pass
    before = time.monotonic()
    with joined(QpType.UD) as (here, there), pytest.raises(VerbsError, match="ETIMEDOUT"):
        here.address_of(there)
    assert time.monotonic() - before >= A_WHILE
    software.network.reachable("127.0.0.1")
    software.devices[0].ports[0].gids.append("127.0.0.2")
    with joined():
        pass


def test_a_blocked_rtr_blocks_nobody_else(software: Software) -> None:
    software.devices[0].ports[0].gids.append("127.0.0.2")
    software.network.unreachable("127.0.0.2", 1.0)
    with joined(to=QpState.INIT) as (here, there), ThreadPoolExecutor(1) as threads:
        path = here.path_to(there)
        far = type(path)(1, is_global=1, dgid=rdmaconnect.Gid.parse("127.0.0.2").raw)
        before = time.monotonic()
        blocked = threads.submit(here.climb, there, ah_attr=far)
        while software.calls["ibv_modify_qp"] < 3:
            time.sleep(0.001)
        with joined() as (a, b):
            b.recv(1)
            send(a, 1, b"x")
            a.wait()
        assert time.monotonic() - before < 0.9
        with pytest.raises(ModifyError, match="ETIMEDOUT"):
            blocked.result(5)
        assert time.monotonic() - before >= 1.0


def test_a_port_that_is_down_carries_nothing(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined() as (here, there):
        there.recv(1)
        software.devices[0].ports[0].state = 1
        software.event("soft0", EventType.PORT_ERR, 1)
        event = here.context.events.take()
        assert event is not None
        assert (event.event_type, event.port_num) == (EventType.PORT_ERR, 1)
        send(here, 2, b"x")
        here.wait(1, WcStatus.RETRY_EXC_ERR)


def test_a_queue_that_is_overrun_is_noticed(software: Software) -> None:
    software.expects("cq .* of 1 entries was overrun")
    with joined(cqe=1) as (here, there):
        for wr_id in (1, 2):
            there.recv(wr_id)
        there.qp.move(QpState.ERR)
        event = here.context.events.take()
        assert event is not None
        assert (event.event_type, event.element) == (EventType.CQ_ERR, there.cq)
