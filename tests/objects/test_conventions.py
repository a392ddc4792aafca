"""How verbs say that they have failed: read by their own conventions, whatever providers make of these."""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from software import Call, Software

from rdmaconnect import abi, verbs
from rdmaconnect.abi import AccessFlags, Fails, QpSendOpsFlags, QpState, QpType, WrOpcode
from rdmaconnect.errors import LibraryError, PostError, VerbsError
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import MR, PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.work_request import RecvRequest, SendRequest

#: a verb of each convention
ONE = {
    Fails.NULL_ERRNO: "ibv_alloc_pd",
    Fails.ERRNO_RETURNED: "ibv_post_send",
    Fails.MINUS_ONE: "ibv_query_gid",
    Fails.MINUS_ERRNO: "_ibv_query_gid_table",
    Fails.POLL_COUNT: "ibv_poll_cq",
    Fails.POLL_ERRNO: "ibv_start_poll",
    Fails.NEVER: "ibv_ack_cq_events",
}

#: verb, result, errno that the call left -> errno, and whether that is a reason
READ = [
    ("ibv_alloc_pd", None, errno.ENOMEM, errno.ENOMEM, True),
    ("ibv_alloc_pd", None, 0, errno.EIO, False),
    ("ibv_alloc_pd", 1, errno.ENOMEM, 0, True),
    ("ibv_post_send", errno.EINVAL, 0, errno.EINVAL, True),
    ("ibv_post_send", -errno.EINVAL, 0, errno.EINVAL, True),
    ("ibv_post_send", -1, 0, errno.EIO, False),
    ("ibv_modify_qp", -1, errno.ENOMEM, errno.ENOMEM, True),
    ("ibv_modify_qp", errno.EPERM, 0, errno.EPERM, True),
    ("ibv_query_gid", -1, 0, errno.EIO, False),
    ("ibv_query_gid", -1, errno.EINVAL, errno.EINVAL, True),
    ("ibv_rereg_mr", -4, errno.EFAULT, errno.EFAULT, True),
    ("_ibv_query_gid_table", -errno.EOPNOTSUPP, 0, errno.EOPNOTSUPP, True),
    ("ibv_resolve_eth_l2_from_gid", -1, 0, errno.EIO, False),
    ("_ibv_query_gid_table", 7, errno.EINVAL, 0, True),
    ("ibv_poll_cq", -2, 0, errno.EIO, False),
    ("ibv_poll_cq", 3, 0, 0, True),
    ("ibv_start_poll", -2, 0, errno.EIO, False),
    ("ibv_start_poll", errno.ENOENT, 0, errno.ENOENT, True),
    ("ibv_next_poll", 0, 0, 0, True),
    ("ibv_ack_cq_events", 0, errno.EINVAL, 0, True),
]


@pytest.mark.parametrize(("name", "result", "left", "number", "reason"), READ)
def test_a_result_is_read_by_its_verb_s_convention(
    name: str, result: Any, left: int, number: int, reason: bool
) -> None:
    assert verbs.errno_of(name, result, left) == number
    if number:
        words = str(verbs.failed(name, result, "do it", left))
        assert ("It gave no reason" in words) is not reason
        assert str(result if result is not None else "NULL") in words or reason


def test_every_convention_has_its_reader() -> None:
    assert set(ONE) == set(Fails)
    for fails, name in ONE.items():
        assert (abi.PROTOTYPES.get(name) or abi.OPS[name]).fails is fails


@given(st.sampled_from([name for fails, name in ONE.items() if fails is not Fails.NULL_ERRNO]), st.integers(-300, 300))
def test_no_result_stands_for_an_errno_below_0(name: str, result: int) -> None:
    assert verbs.errno_of(name, result) >= 0


# ---- what the rooms make of it


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


def answer(holder: Any, field: str, result: int) -> Any:
    """Let a function of a table of operations answer so, whatever it is asked; what is returned must be kept."""
    function = type(getattr(holder, field))(lambda *_: result)
    setattr(holder, field, function)
    return function


def answers(result: int) -> Any:
    """A hook that lets a verb answer so."""

    def after(call: Call) -> None:
        call.result = result

    return after


def test_a_broken_queue_is_not_an_empty_one(software: Software, context: Context) -> None:
    """CQ_POLL_ERR of mlx4, mlx5, mthca and vmw_pvrdma is -2, which is not -ENOENT."""
    said = r"EIO \(5\).* It gave no reason: {} answered -2"
    with CQEx(context, 8) as cq:
        kept = answer(cq._ex.contents, "start_poll", -2)
        with pytest.raises(VerbsError, match=f"poll extended CQ of soft0: .*{said.format('ibv_start_poll')}"):
            cq.start_poll()
        with pytest.raises(VerbsError, match=said.format("ibv_start_poll")):
            verbs.ibv_start_poll(cq._ex)
    kept = answer(context.pointer.contents.ops, "poll_cq", -2)
    with CQ(context, 8) as cq:
        with pytest.raises(VerbsError, match=f"poll CQ of soft0: .*{said.format('ibv_poll_cq')}") as caught:
            cq.poll()
        assert caught.value.errno == errno.EIO
        with pytest.raises(VerbsError, match=said.format("ibv_poll_cq")):
            verbs.ibv_poll_cq(cq.pointer, 1, (abi.ibv_wc * 1)())
    assert kept


def test_minus_one_is_neither_eperm_nor_what_was_before(software: Software, context: Context) -> None:
    kept = [answer(context.pointer.contents.ops, f"post_{what}", -1) for what in ("send", "recv")]
    with PD(context) as pd, CQ(context, 8) as cq, QueuePair(pd, cq, cq, QpType.RC, max_send_wr=4, max_recv_wr=4) as qp:
        qp.state = QpState.RTS
        ctypes.set_errno(errno.EAGAIN)
        request = SendRequest().fill(1, WrOpcode.SEND, 0, 0, 0)
        for call in (
            lambda: qp.post_send(request),
            lambda: qp.post_send(request, SendRequest().fill(2, WrOpcode.SEND, 0, 0, 0)),
            lambda: qp.post_recv(RecvRequest(1)),
        ):
            with pytest.raises(PostError, match=r"EIO \(5\).*It gave no reason: ibv_post_\w+ answered -1") as caught:
                call()
            assert caught.value.errno == errno.EIO
        assert verbs.ibv_post_send(qp.pointer, request.wr)[0] == errno.EIO
        with software.on("ibv_modify_qp", after=answers(-1)):
            assert verbs.ibv_modify_qp(qp.pointer, abi.ibv_qp_attr(qp_state=0), 1) == errno.EIO
    assert kept


def test_optional_access_goes_the_way_of_the_header_s_macro(software: Software, context: Context) -> None:
    """``ibv_reg_mr`` and ``ibv_reg_mr_iova`` of verbs.h call ``ibv_reg_mr_iova2`` for such bits."""
    access = AccessFlags.LOCAL_WRITE | AccessFlags.RELAXED_ORDERING
    with PD(context) as pd:
        for iova in (None, 1 << 40):
            software.calls.clear()
            buffer = bytearray(8192)
            start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            where = None if iova is None else iova + start % 4096
            MR(pd, buffer, access, iova=where).close()
            assert software.calls["ibv_reg_mr_iova2"] == 1
            assert not software.calls["ibv_reg_mr"] + software.calls["ibv_reg_mr_iova"]


def test_events_of_a_queue_made_by_raw_verbs_are_acknowledged(software: Software, context: Context) -> None:
    with CompChannel(context) as channel, PD(context) as pd:
        raw = verbs.ibv_create_cq(context.pointer, 8, channel.pointer, cq_context=77)
        attr = abi.ibv_qp_init_attr(qp_type=int(QpType.RC), send_cq=raw, recv_cq=raw)
        attr.cap.max_send_wr = attr.cap.max_recv_wr = attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
        qp = verbs.ibv_create_qp(pd.pointer, attr)
        step = abi.ibv_qp_attr(qp_state=int(QpState.INIT), port_num=1)
        assert verbs.ibv_modify_qp(qp, step, int(abi.QpAttrMask(0b111001))) == 0
        request = RecvRequest(1)
        assert verbs.ibv_post_recv(qp, request.wr) == (0, None)
        verbs.ibv_req_notify_cq(raw)
        assert verbs.ibv_modify_qp(qp, abi.ibv_qp_attr(qp_state=int(QpState.ERR)), 1) == 0
        assert channel.drain() == []
        verbs.ibv_destroy_qp(qp)
        verbs.ibv_destroy_cq(raw)  # waits for every acknowledgement
        assert software.calls["ibv_ack_cq_events"] == 1


def test_a_python_of_32_bits_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs.use(None)
    try:
        monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
        with pytest.raises(LibraryError, match=r"this Python has 32 bits, .* Use a 64-bit Python\."):
            verbs.library()
    finally:
        verbs.use(None)


def test_a_batch_that_is_refused_without_a_reason_says_so(software: Software, context: Context) -> None:
    with PD(context) as pd, CQ(context, 8) as cq:
        ops = QpSendOpsFlags.SEND
        with QueuePairEx(pd, cq, cq, QpType.RC, max_send_wr=4, max_inline_data=8, send_ops_flags=ops) as qp:
            qp.state = QpState.RTS
            kept = answer(qp._ex.contents, "wr_complete", -1)
            with (
                pytest.raises(PostError, match=r"EIO.*It gave no reason: ibv_wr_complete answered -1") as caught,
                qp.batch() as batch,
            ):
                batch.send(1, inline=b"x")
            assert (caught.value.errno, caught.value.posted) == (errno.EIO, 0)
            verbs.ibv_wr_abort(qp._ex)
    assert kept


def test_what_a_provider_left_out_is_refused_before_anything_is_written(software: Software, context: Context) -> None:
    with PD(context) as pd, CQ(context, 8) as cq, pd.register(bytearray(8)) as mr:
        ops = QpSendOpsFlags.SEND
        with QueuePairEx(pd, cq, cq, QpType.RC, max_send_wr=4, max_inline_data=8, send_ops_flags=ops) as qp:
            qp.state = QpState.RTS
            table = qp._ex.contents
            table.wr_set_sge = type(table.wr_set_sge)()
            with qp.batch() as batch:
                with pytest.raises(LibraryError, match="ibv_wr_set_sge: EOPNOTSUPP"):
                    batch.send(1, sge=mr.sge())
                assert (batch.count, software.calls["ibv_wr_send"]) == (0, 0)
                batch.send(2, inline=b"x")
                batch.abort()
            assert software.calls["ibv_wr_send"] == 1
