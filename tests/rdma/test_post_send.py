"""ibv_post_send and ibv_post_recv: lists in one call, and what is refused before or by the device."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from ends import End, end_on, joined
from nodes import Node

from rdmaconnect.abi import QpState, QpType, SendFlags, WcStatus, WrOpcode
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import PostError, StateError
from rdmaconnect.objects.address import UdAddress
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD, Sge
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD


@pytest.fixture
def ends(node1: Node, node2: Node) -> Iterator[tuple[End, End]]:
    with joined(node1, node2, RC) as both:
        both[0].memory[:12] = b"one.two.tri."
        yield both


@pytest.fixture
def lone(node1: Node) -> Iterator[End]:
    """A queue pair in RESET."""
    with end_on(node1, RC, 1) as end:
        yield end


def sends(end: End, *wr_ids: int) -> list[SendRequest]:
    return [SendRequest().send(n, sge=end.mr.sge(4 * i, 4)) for i, n in enumerate(wr_ids)]


def test_a_list_is_posted_in_one_call_and_in_its_order(ends: tuple[End, End]) -> None:
    here, there = ends
    there.qp.post_recv(*(RecvRequest.scatter(n, there.mr.sge(100 + 4 * n, 4)) for n in range(3)))
    here.qp.post_send(*sends(here, 11, 12, 13))
    assert [wc.wr_id for wc in here.wait(3)] == [11, 12, 13]
    assert [(wc.wr_id, wc.byte_len) for wc in there.wait(3)] == [(0, 4), (1, 4), (2, 4)]
    assert there.memory[100:112] == b"one.two.tri."


def test_requests_can_be_posted_again_alone_after_a_list(ends: tuple[End, End]) -> None:
    here, there = ends
    requests = sends(here, 1, 2)
    for n in range(3):
        there.recv(n, 0)
    here.qp.post_send(*requests)
    here.qp.post_send(requests[0])
    assert [wc.wr_id for wc in here.wait(3)] == [1, 2, 1]
    there.wait(3)


def test_the_first_bad_one_of_a_list_is_named_and_those_before_it_are_posted(ends: tuple[End, End]) -> None:
    here, there = ends
    good, bad, after = sends(here, 21, 22, 23)
    bad.wr.contents.num_sge = 1000  # past the checks of this layer
    there.recv(0, 0)
    with pytest.raises(PostError, match=r"^post work request 2 of 3 \(wr_id 22\) to RC QP .* EINVAL") as caught:
        here.qp.post_send(good, bad, after)
    assert (caught.value.posted, caught.value.wr_id, caught.value.errno) == (1, 22, errno.EINVAL)
    assert here.wait()[0].wr_id == 21
    assert there.wait()[0].byte_len == 4


def test_a_full_send_queue_is_an_error_that_says_how_far_it_got(ends: tuple[End, End]) -> None:
    here, _ = ends  # no receives: nothing leaves the queue
    most = here.qp.query().cap.max_send_wr
    requests = [SendRequest().send(n, sge=here.mr.sge(0, 4)) for n in range(most + 2)]
    with pytest.raises(PostError, match=r"ENOMEM.*The send queue is full") as caught:
        here.qp.post_send(*requests)
    assert caught.value.posted == caught.value.wr_id <= most
    assert caught.value.posted >= 16


@pytest.mark.parametrize("qp_type", [RC, UD], ids=str)
def test_full_rq_bad_flow(node1: Node, qp_type: QpType) -> None:
    with end_on(node1, qp_type, 1) as end:
        end.climb(end, QpState.INIT)
        most = end.qp.query().cap.max_recv_wr
        with pytest.raises(PostError, match=r"ibv_post_recv: ENOMEM.*The receive queue is full") as caught:
            end.qp.post_recv(*(RecvRequest.scatter(n, end.mr.sge(0, 64)) for n in range(most + 2)))
        assert 16 <= caught.value.posted <= most
        with pytest.raises(PostError, match="ENOMEM"):
            end.recv(99)


def test_rq_with_larger_sgl_bad_flow(node1: Node) -> None:
    with end_on(node1, UD, 1) as end:
        end.climb(end, QpState.INIT)
        pieces = [end.mr.sge(64 * n, 64) for n in range(end.qp.cap.max_recv_sge + 1)]
        with pytest.raises(PostError, match=r"work request 1 of 1 \(wr_id 5\).*EINVAL") as caught:
            end.qp.post_recv(RecvRequest.scatter(5, pieces))
        assert caught.value.posted == 0


def test_post_send_qp_state_bad_flow(lone: End) -> None:
    request = SendRequest().send(1, sge=lone.mr.sge(0, 4))
    for state in (QpState.RESET, QpState.INIT, QpState.RTR):
        if state != QpState.RESET:
            lone.climb(lone, state)
        lone.qp.state = state
        with pytest.raises(StateError, match=rf"^post to RC QP .*: it is in {state} and sends from RTS on"):
            lone.qp.post_send(request)
        with pytest.raises(StateError, match=f"it is in {state}"):
            lone.qp.post_send(request.fill(1, WrOpcode.SEND, 0, 0, 0))
        if state != QpState.RESET:
            lone.qp.move(QpState.RESET)


def test_post_receive_qp_state_bad_flow(lone: End) -> None:
    with pytest.raises(StateError, match=r"^post a receive to RC QP .*: it is in RESET"):
        lone.recv()
    lone.climb(lone, QpState.INIT)
    lone.recv(4)
    lone.qp.move(QpState.ERR)
    assert lone.wait(1, WcStatus.WR_FLUSH_ERR)[0].wr_id == 4


def test_work_posted_in_err_is_flushed(ends: tuple[End, End]) -> None:
    here, _ = ends
    here.qp.move(QpState.ERR)
    here.qp.post_send(*sends(here, 1, 2))
    assert [wc.wr_id for wc in here.wait(2, WcStatus.WR_FLUSH_ERR)] == [1, 2]


def test_a_closed_queue_pair_says_so(lone: End) -> None:
    request = SendRequest().send(1)
    lone.qp.close()
    with pytest.raises(StateError, match=r"^RC QP .* is closed\.$"):
        lone.qp.post_send(request)
    with pytest.raises(StateError, match=r"^RC QP .* is closed\.$"):
        lone.qp.post_recv(RecvRequest(1))
    with pytest.raises(StateError, match=r"^RC QP .* is closed\.$"):
        lone.qp.query()


def test_what_does_not_fit_the_queue_pair_is_refused_by_name(ends: tuple[End, End]) -> None:
    here, there = ends
    qp, piece = here.qp, here.mr.sge(0, 1)
    most, room = qp.cap.max_inline_data, qp.cap.max_send_sge
    with pytest.raises(ValueError, match=rf"^post {most + 1} bytes inline to RC QP .*: it takes {most}$"):
        qp.post_send(SendRequest().send(1, inline=bytes(most + 1)))
    with pytest.raises(ValueError, match=rf"^post {room + 1} pieces to RC QP .*: it takes {room}$"):
        qp.post_send(SendRequest().send(1, sge=[piece] * (room + 1)))
    with pytest.raises(ValueError, match="only UD and XRC_SEND have a target"):
        qp.post_send(SendRequest().send(1, sge=piece, to=here.address_of(there)))
    with pytest.raises(ValueError, match=r"TSO header of 14 bytes to RC QP .*: it takes 0"):
        qp.post_send(SendRequest().send_tso(1, bytes(14), 100, sge=piece))
    request = SendRequest().send(1, sge=piece)
    with pytest.raises(ValueError, match="a request is in it twice"):
        qp.post_send(request, request)
    assert here.cq.poll() == 0


def test_inline_data_up_to_the_limit_is_sent(ends: tuple[End, End]) -> None:
    here, there = ends
    data = bytes(range(here.qp.cap.max_inline_data))
    there.recv(0, 0)
    here.qp.post_send(SendRequest().send(1, inline=data))
    assert there.wait()[0].byte_len == len(data)
    assert there.memory[: len(data)] == data


def test_a_ud_queue_pair_needs_a_target(node1: Node, node2: Node) -> None:
    with joined(node1, node2, UD) as (here, there):
        piece = here.mr.sge(0, 4)
        for request in (
            SendRequest().send(1, sge=piece),
            SendRequest().fill(1, WrOpcode.SEND, piece.addr, 4, piece.lkey),
            SendRequest().rdma_write(1, there.region(0, 4), sge=piece),
        ):
            with pytest.raises(ValueError, match=r"^post to UD QP .*: say whom it is for \(to=UdAddress"):
                here.qp.post_send(request)
        to = here.address_of(there)
        request = SendRequest().send(1, sge=piece, to=to)
        to.ah.close()
        with pytest.raises(StateError, match=r"^address handle of rxe\d to GID .* is closed"):
            here.qp.post_send(request)
        with pytest.raises(StateError, match="is closed"):
            SendRequest().send(1, sge=piece, to=to)


def test_what_is_of_another_protection_domain_or_device_is_refused(node1: Node, node2: Node) -> None:
    with joined(node1, node2, UD) as (here, there), PD(here.context) as other:
        to = here.address_of(there)
        foreign = UdAddress(node1.call(type(to.ah), other, to.ah.attr), to.remote_qpn, to.remote_qkey)
        with pytest.raises(ValueError, match=r"address handle .* is of another protection domain"):
            here.qp.post_send(SendRequest().send(1, to=foreign))
        foreign.ah.close()
        with pytest.raises(ValueError, match=r"make a queue pair in PD of rxe1: CQ of rxe2 is of another device"):
            QueuePair(here.pd, here.cq, there.cq, RC, max_send_wr=1, max_recv_wr=1)


def test_arguments_outside_of_their_range_are_refused_when_they_are_given(lone: End) -> None:
    mr, region = lone.mr, lone.region(0, 64)
    piece, odd = mr.sge(0, 8), RemoteRegion(region.addr + 1, region.rkey, 8)
    cases = {
        "wr_id is -1: give 64 bits": lambda r: r.send(-1),
        "wr_id is 18446744073709551616": lambda r: r.send(2**64),
        "imm_data is 4294967296: give 32 bits": lambda r: r.send_imm(1, 2**32),
        "invalidate_rkey is -1": lambda r: r.local_inv(1, -1),
        "compare is -1: give 64 bits": lambda r: r.atomic_cmp_swp(1, region, -1, 0, sge=piece),
        "into 7 local bytes: give 8": lambda r: r.atomic_fetch_add(1, region, 1, sge=mr.sge(0, 7)),
        "give a multiple of 8": lambda r: r.atomic_fetch_add(1, odd, 1, sge=piece),
        "RDMA_WRITE of 65 bytes: the remote region has 64": lambda r: r.rdma_write(1, region, sge=mr.sge(0, 65)),
        "ATOMIC_CMP_AND_SWP of 8 bytes: the remote region has 4": lambda r: r.atomic_cmp_swp(
            1, region.slice(0, 4), 0, 0, sge=piece
        ),
        "both sge and inline": lambda r: r.send(1, sge=piece, inline=b"x"),
        "not the flag INLINE": lambda r: r.send(1, sge=piece, flags=SendFlags.INLINE),
        "fill in SEND with INLINE": lambda r: r.fill(1, WrOpcode.SEND, 0, 4, 0, flags=SendFlags.INLINE),
        "fill in BIND_MW": lambda r: r.fill(1, WrOpcode.BIND_MW, 0, 0, 0),
        "a piece's length is 4294967296": lambda r: r.send(1, sge=Sge(0, 2**32, 1)),
        "9 bytes at offset 8184": lambda r: r.send(1, sge=mr.sge(len(mr) - 8, 9)),
        "at offset -1": lambda r: r.send(1, sge=mr.sge(-1, 4)),
    }
    for match, build in cases.items():
        with pytest.raises(ValueError, match=match):
            build(SendRequest())
    with pytest.raises(StateError, match="ATOMIC_WRITE: ibv_post_send has no such request"):
        SendRequest().atomic_write(1, region, bytes(8))
    with pytest.raises(StateError, match="FLUSH: ibv_post_send has no such request"):
        SendRequest().flush(1, region)


def test_a_device_refuses_what_only_it_can_know(node1: Node) -> None:
    with open_device(node1.device) as context, PD(context) as pd, CQ(context, 8) as cq:
        for wrong in ({"max_send_wr": 2**31}, {"max_recv_sge": 10**6}, {"max_inline_data": 2**31}):
            with pytest.raises(OSError, match=r"create a queue pair of type RC.*above the device's limit"):
                QueuePair(pd, cq, cq, RC, **{"max_send_wr": 1, "max_recv_wr": 1, **wrong})
