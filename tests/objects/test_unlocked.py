"""Posting and polling without a lock: the verb is shut where it may not be called, and nobody comes amid a call."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from software import Software, end_on, joined
from threads import running

from rdmaconnect import verbs
from rdmaconnect.abi import QpState, QpType, WrOpcode
from rdmaconnect.errors import PostError, StateError, VerbsError
from rdmaconnect.objects.work_request import RecvList, RecvRequest, SendRequest

C = ctypes.CDLL(None)


def c_function(name: str, *argtypes: Any) -> Any:
    """One of the C library's, as an op table would have it."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)((name, C))


# ---- the verb


def test_a_verb_that_is_shut_does_nothing_until_it_is_reopened() -> None:
    verb = verbs.shuttable(c_function("abs", ctypes.c_int))
    assert isinstance(verb, verbs.Shuttable)
    assert verb(-5) == 5
    verb.shut()
    assert verb(-5) == verbs.SHUT
    verb.reopen()
    assert verb(-5) == 5
    verb.disown()
    assert verb(-5) == verbs.SHUT


def test_nobody_shuts_a_verb_amid_a_call() -> None:
    """Not even where another thread waits for its turn all the time."""
    verb = verbs.shuttable(c_function("usleep", ctypes.c_uint))
    begun, ended, shut = threading.Event(), list[float](), list[float]()

    def call() -> None:
        begun.set()
        assert verb(100_000) == 0
        ended.append(time.monotonic())

    def close() -> None:
        begun.wait(30)
        verb.shut()
        shut.append(time.monotonic())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # from begun.set() to the call nobody else comes to anything
    try:
        with running(call, close):
            pass
    finally:
        sys.setswitchinterval(interval)
    assert shut[0] >= ended[0] - 0.05
    assert verb(0) == verbs.SHUT


@pytest.mark.parametrize("gil", [True, False])
def test_where_threads_run_at_once_there_is_a_lock(gil: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    verb = verbs.shuttable(c_function("abs", ctypes.c_int))
    assert isinstance(verb, verbs.Shuttable) is gil
    assert verb(-5) == 5
    verb.shut()
    assert verb(-5) == verbs.SHUT


# ---- requests


def test_a_request_is_looked_at_again_when_more_is_asked_of_it(software: Software) -> None:
    with joined(max_inline_data=8) as (here, there):
        request = SendRequest().fill_inline(1, WrOpcode.SEND, b"1234")
        for _ in range(2):
            there.recv(1, 0, 64)
            here.qp.post_send(request)
        request.fill_inline(2, WrOpcode.SEND, b"12")
        there.recv(1, 0, 64)
        here.qp.post_send(request)
        request.fill_inline(3, WrOpcode.SEND, b"123456789")
        with pytest.raises(ValueError, match=r"^post 9 bytes inline to .* it takes 8$"):
            here.qp.post_send(request)
        request.fill(4, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey)
        there.recv(1, 0, 64)
        here.qp.post_send(request)
        assert [wc.wr_id for wc in here.wait(4)] == [1, 1, 2, 4]
        assert [wc.byte_len for wc in there.wait(4)] == [4, 4, 2, 4]


def test_a_request_that_fits_one_queue_pair_is_looked_at_by_another(software: Software) -> None:
    with joined() as (here, _), joined(max_inline_data=8) as (small, _), end_on() as reset:
        request = SendRequest().fill_inline(1, WrOpcode.SEND, bytes(64))
        here.qp.post_send(request)
        with pytest.raises(ValueError, match=r"^post 64 bytes inline to .* it takes 8$"):
            small.qp.post_send(request)
        with pytest.raises(StateError, match=r"it is in RESET and sends from RTS on\."):
            reset.qp.post_send(request)
        here.qp.post_send(request)


def test_a_request_that_names_others_is_looked_at_each_time(software: Software) -> None:
    with joined() as (here, _), joined(QpType.UD) as (datagrams, other):
        request = SendRequest().fill(1, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey)
        here.qp.post_send(request)
        to = datagrams.address_of(other)
        request.send(2, inline=b"x", to=to)
        with pytest.raises(ValueError, match="only UD and XRC_SEND have a target"):
            here.qp.post_send(request)
        datagrams.qp.post_send(request)
        to.ah.close()
        with pytest.raises(StateError, match=r"address handle .* is closed"):
            datagrams.qp.post_send(request)
        with pytest.raises(ValueError, match="say whom it is for"):
            datagrams.qp.post_send(request.fill(3, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey))


def test_a_full_queue_is_told_of_a_request_that_was_posted_before(software: Software) -> None:
    with end_on(max_recv_wr=2) as end:
        end.climb(end, QpState.INIT)
        request = RecvRequest(7, end.mr.addr, 8, end.mr.lkey)
        for _ in range(2):
            end.qp.post_recv(request)
        with pytest.raises(PostError, match=r"wr_id 7\) to RC QP .* in INIT: ibv_post_recv: ENOMEM") as caught:
            end.qp.post_recv(request)
        assert caught.value.posted == 0
        with pytest.raises(PostError) as caught:
            end.qp.post_recv(RecvList(1, 8, end.mr.lkey).at(end.mr.addr))
        assert caught.value.wr_id == 0


# ---- while something else goes on


def test_who_posts_again_waits_for_who_moves_the_queue_pair(software: Software) -> None:
    moving = threading.Event()
    order: list[str] = []

    def hold(call: Any) -> None:
        moving.set()
        time.sleep(0.05)
        order.append("moved")

    with joined() as (here, _):
        request = SendRequest().fill(1, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey, flags=0)
        receive = RecvRequest(1, here.mr.addr, 8, here.mr.lkey)
        here.qp.post_send(request)
        here.qp.post_recv(receive)
        software.on("ibv_modify_qp", before=hold, times=1)
        with running(lambda: here.qp.move(QpState.SQD)):
            assert moving.wait(30)
            here.qp.post_send(request)
            here.qp.post_recv(receive)
            order.append("posted")
        assert order == ["moved", "posted"]
        here.qp.move(QpState.RESET)
        with pytest.raises(StateError, match=r"it is in RESET and sends from RTS on\."):
            here.qp.post_send(request)
        with pytest.raises(StateError, match=r"it is in RESET\."):
            here.qp.post_recv(receive)
        here.qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        here.qp.post_recv(receive)
        with pytest.raises(StateError, match=r"it is in INIT and sends from RTS on\."):
            here.qp.post_send(request)


def test_who_polls_waits_for_who_resizes_the_queue(software: Software) -> None:
    resizing = threading.Event()
    order: list[str] = []

    def hold(call: Any) -> None:
        resizing.set()
        time.sleep(0.05)
        order.append("resized")

    with end_on() as end:
        software.on("ibv_resize_cq", before=hold, times=1)
        with running(lambda: end.cq.resize(8)):
            assert resizing.wait(30)
            assert end.cq.poll() == 0
            assert end.cq.busy_poll(4) == ()
            order.append("polled")
    assert order == ["resized", "polled"]


def test_what_the_library_refuses_to_free_is_used_as_before(software: Software) -> None:
    with joined() as (here, there):
        request = SendRequest().fill(1, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey)
        here.qp.post_send(request)
        with software.on("ibv_destroy_qp", fail=errno.EBUSY), pytest.raises(VerbsError, match="EBUSY"):
            here.qp.close()
        for wr_id in (1, 2):
            there.recv(wr_id, 0, 64)
        here.qp.post_send(request)
        here.wait(2)
        here.qp.close()
        with pytest.raises(StateError, match=r"^RC QP 0x\w+ of soft0 is closed\.$"):
            here.qp.post_send(request)
        with software.on("ibv_destroy_cq", fail=errno.EBUSY), pytest.raises(VerbsError, match="EBUSY"):
            here.cq.close()
        assert here.cq.poll() == 0
        here.cq.close()
        for poll in (here.cq.poll, lambda: here.cq.busy_poll(8)):
            with pytest.raises(StateError, match=r"^CQ of soft0 is closed\.$"):
                poll()


def test_a_child_of_fork_posts_and_polls_nothing(software: Software) -> None:
    with joined() as (here, _):
        request = SendRequest().fill(1, WrOpcode.SEND, here.mr.addr, 4, here.mr.lkey)
        here.qp.post_send(request)
        pid = os.fork()
        if not pid:
            told = 0
            for call in (lambda: here.qp.post_send(request), here.cq.poll, lambda: here.cq.busy_poll(2)):
                try:
                    call()
                except StateError as e:
                    told += "belongs to the process that forked this one" in str(e)
            os._exit(told)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 3


# ---- polling until something comes


def test_busy_polling_gives_what_has_come(software: Software) -> None:
    with joined() as (here, there):
        assert here.cq.busy_poll(100) == ()
        there.recv(5, 0, 64)
        here.qp.post_send(SendRequest().fill_inline(6, WrOpcode.SEND, b"hello"))
        assert [wc.wr_id for wc in here.cq.busy_poll(1000)] == [6]
        assert [(wc.wr_id, wc.byte_len) for wc in there.cq.busy_poll(1000)] == [(5, 5)]


def test_busy_polling_looks_as_often_as_it_is_told(software: Software) -> None:
    with end_on() as end:
        before = software.calls["ibv_poll_cq"]
        assert end.cq.busy_poll(7) == ()
        assert software.calls["ibv_poll_cq"] - before == 7
