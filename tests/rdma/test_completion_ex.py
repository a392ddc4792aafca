"""Extended completion queues on a device: made, polled as iterators, read, within queue pairs."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from nodes import PATIENCE, Node
from pairs import DEPTH, End, ends

from rdmaconnect import LibraryError, StateError, VerbsError, verbs
from rdmaconnect.abi import (
    CqWcFlags,
    CreateCqAttrFlags,
    QpState,
    QpType,
    WcFlags,
    WcOpcode,
    WcStatus,
    bits,
    ibv_cq_init_attr_ex,
)
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.current_completion import STANDARD_WC_FLAGS
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.runtime.deadline import Deadline


@pytest.fixture
def context(node1: Node) -> Iterator[Context]:
    with open_device(node1.device) as opened:
        yield opened


def standard(context: Context, _: CompChannel) -> CQEx:
    """A queue with all the fields of ``struct ibv_wc``."""
    return CQEx(context, 2 * DEPTH)


def until(cq: CQEx, count: int) -> Iterator[CQEx]:
    """Completions, until there were so many."""
    deadline = Deadline(PATIENCE)
    while count:
        for wc in cq.poll_batch(count):
            count -= 1
            yield wc
        deadline.check("completions")


# ---- made


def refusal(context: Context, **wanted: Any) -> VerbsError | None:
    """Why such a queue cannot be made; None if it can."""
    try:
        CQEx(context, 10, **wanted).close()
    except VerbsError as e:
        return e
    return None


def test_create_cq_ex_takes_each_standard_flag_and_names_what_the_device_lacks(context: Context) -> None:
    refused = {flag: refusal(context, wc_flags=flag) for flag in CqWcFlags}
    assert {flag for flag, error in refused.items() if error is None} == set(bits(STANDARD_WC_FLAGS))
    for flag, error in refused.items():
        if error is not None:
            assert error.errno == errno.EOPNOTSUPP
            assert f"10 entries with {flag}: ibv_create_cq_ex: EOPNOTSUPP" in str(error)
            assert "The provider lacks one of the flags" in str(error)
    assert refusal(context, flags=CreateCqAttrFlags.SINGLE_THREADED) is None
    overrun = refusal(context, flags=CreateCqAttrFlags.IGNORE_OVERRUN)
    assert overrun is None or overrun.errno == errno.EOPNOTSUPP
    with PD(context) as pd:
        cq = CQEx(context, 10, parent_domain=pd)
    assert cq.closed


def test_create_cq_ex_bad_flow_too_many_entries_and_no_such_vector(context: Context) -> None:
    most = context.query_device().max_cqe
    with CQEx(context, most) as cq:
        assert cq.cqe >= most
    with pytest.raises(VerbsError, match=r"ibv_create_cq_ex: EINVAL .* max_cqe"):
        CQEx(context, most + 1)
    vectors = context.num_comp_vectors
    CQEx(context, 10, comp_vector=vectors - 1).close()
    with pytest.raises(ValueError, match=f"comp_vector is {vectors + 1}"):
        CQEx(context, 10, comp_vector=vectors + 1)
    attr = ibv_cq_init_attr_ex(cqe=10, comp_vector=vectors + 1)
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_create_cq_ex(context.pointer, attr)


# ---- traffic


def messages(seed: int, count: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(1, 500)) for _ in range(count)]


def exchange(one: End, other: End, data: list[bytes]) -> None:
    """Send everything there, one after the other, and look at all that both completions say."""
    receiver, sender = other.cq, one.cq
    assert isinstance(receiver, CQEx)
    assert isinstance(sender, CQEx)
    for i, message in enumerate(data):
        other.post_recv(i)
        one.post_send(i, message, imm=i if i % 2 else None)
        for wc in until(sender, 1):
            assert (wc.wr_id, wc.status, wc.read_opcode()) == (i, WcStatus.SUCCESS, WcOpcode.SEND)
            assert wc.read_qp_num() == one.qp.qp_num
        for wc in until(receiver, 1):
            assert (wc.wr_id, wc.status, wc.read_opcode()) == (i, WcStatus.SUCCESS, WcOpcode.RECV)
            assert wc.read_byte_len() == len(message) + other.head
            assert wc.read_qp_num() == other.qp.qp_num
            assert bool(wc.read_wc_flags() & WcFlags.WITH_IMM) == bool(i % 2)
            assert wc.read_vendor_err() == 0
            if i % 2:
                assert wc.read_imm_data() == i
            if other.head:
                assert wc.read_src_qp() == one.qp.qp_num
                assert wc.read_wc_flags() & WcFlags.GRH
            assert (wc.read_slid(), wc.read_sl(), wc.read_dlid_path_bits()) == (0, 0, 0)
            assert other.received(i, wc.read_byte_len()) == message


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UD], ids=str)
def test_rc_and_ud_traffic_cq_ex(node1: Node, node2: Node, qp_type: QpType) -> None:
    with ends(node1, node2, qp_type, standard) as (one, other):
        exchange(one, other, messages(1, 60))
        exchange(other, one, messages(2, 40))


def test_both_interfaces_tell_the_same(node1: Node, node2: Node) -> None:
    fields = ("wr_id", "status", "opcode", "byte_len", "qp_num", "src_qp", "wc_flags", "slid", "sl", "dlid_path_bits")
    seen: dict[str, list[tuple[int, ...]]] = {"plain": [], "extended": []}
    with ends(node1, node2, QpType.UD, standard) as (one, other):
        cq = other.cq
        assert isinstance(cq, CQEx)
        for kind, found in seen.items():
            other.post_recv(3)
            one.post_send(0, b"the same", imm=77)
            deadline = Deadline(PATIENCE)
            while not found:
                if kind == "plain":
                    found += [tuple(getattr(wc, name) for name in fields) for wc in cq.wcs[: cq.poll()]]
                else:
                    for wc in cq.poll_batch():
                        reads = [getattr(wc, f"read_{name}")() for name in fields[2:]]
                        found.append((wc.wr_id, wc.status, *reads))
                deadline.check("a completion")
    assert seen["plain"] == seen["extended"]
    assert len(seen["plain"]) == 1


# ---- batches


def filled(other: End, count: int) -> CQEx:
    """The queue of ``other`` with ``count`` flushed receives in it."""
    for i in range(count):
        other.post_recv(i)
    other.qp.move(QpState.ERR)
    cq = other.cq
    assert isinstance(cq, CQEx)
    time.sleep(0.5)  # the device flushes in its own time
    return cq


def test_batches_take_each_completion_once(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, standard) as (_, other):
        cq = filled(other, 8)
        got = [wc.wr_id for wc in cq.poll_batch(3)]
        for wc in cq.poll_batch():
            got.append(wc.wr_id)
            assert wc.status == WcStatus.WR_FLUSH_ERR
            break
        with pytest.raises(KeyError):
            _fail_within(cq, got)
        got += [wc.wr_id for wc in until(cq, 3)]
        assert got == list(range(8))
        assert list(cq.poll_batch()) == []
        assert not cq.start_poll()
        other.post_send(9, b"flushed too")
        assert [(wc.wr_id, wc.status) for wc in until(cq, 1)] == [(9, WcStatus.WR_FLUSH_ERR)]


def _fail_within(cq: CQEx, got: list[int]) -> None:
    for wc in cq.poll_batch():
        got.append(wc.wr_id)
        raise KeyError


def test_raw_calls_on_the_device(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, standard) as (_, other):
        cq = filled(other, 2)
        assert cq.start_poll()
        with pytest.raises(StateError, match="this thread is within a batch"):
            cq.poll()
        assert cq.wr_id == 0
        assert cq.next_poll()
        assert (cq.wr_id, cq.status) == (1, WcStatus.WR_FLUSH_ERR)
        assert not cq.next_poll()
        with pytest.raises(StateError, match="no completion is current"):
            cq.read_opcode()
        cq.end_poll()
        assert cq.poll() == 0


def test_what_was_not_asked_for_is_not_read(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, lambda c, _: CQEx(c, 2 * DEPTH, wc_flags=CqWcFlags.QP_NUM)) as (_, other):
        cq = filled(other, 1)
        for wc in until(cq, 1):
            assert wc.read_qp_num() == other.qp.qp_num
            with pytest.raises(StateError, match=r"made without CqWcFlags\.BYTE_LEN"):
                wc.read_byte_len()
            with pytest.raises(StateError, match=r"made without CqWcFlags\.COMPLETION_TIMESTAMP"):
                wc.read_completion_ts()
            with pytest.raises(LibraryError, match="ibv_wc_read_completion_ts"):  # NULL there, and no crash
                verbs.ibv_wc_read_completion_ts(cq._ex)


def test_closing_within_a_batch(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, standard) as (_, other):
        cq = filled(other, 3)
        assert cq.start_poll()
        with pytest.raises(StateError, match="this thread is within a batch of it"):
            other.qp.close()
        cq.close()
        assert other.qp.closed
        with pytest.raises(StateError, match="extended CQ of rxe2 is closed"):
            cq.next_poll()


# ---- with other objects


def test_cq_ex_with_a_channel(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, lambda c, channel: CQEx(c, 2 * DEPTH, channel)) as (one, other):
        cq = other.cq
        assert isinstance(cq, CQEx)
        for i in range(5):
            cq.arm()
            other.post_recv(i)
            one.post_send(i, b"x")
            assert other.channel.wait(Deadline(PATIENCE)) == [cq]
            assert [wc.wr_id for wc in until(cq, 1)] == [i]
        assert cq.unacked == 5
    assert cq.closed


def test_cq_ex_for_sends_and_cq_for_receives(context: Context) -> None:
    with PD(context) as pd, CQEx(context, 8) as sends, CQ(context, 8) as receives:
        qp = QueuePair(pd, sends, receives, QpType.RC, max_send_wr=1, max_recv_wr=1)
        assert qp.qp_num > 0
        sends.close()
        assert qp.closed


def test_resize_cq_ex(context: Context) -> None:
    with CQEx(context, 10) as cq:
        cq.resize(1000)
        assert cq.cqe >= 1000
        assert list(cq.poll_batch()) == []
