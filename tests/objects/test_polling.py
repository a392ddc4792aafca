"""Several threads at one completion queue: who has which completion, and whose a batch is."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from forgetting import forget
from software import End, Software, end_on, joined
from threads import running

from rdmaconnect import StateError
from rdmaconnect.abi import QpSendOpsFlags, QpState, QpType
from rdmaconnect.errors import VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx

RC = QpType.RC
SIZES = {"max_send_wr": 4, "max_recv_wr": 4}


def complete(end: End, *wr_ids: int) -> None:
    """Have completions: sends on a queue pair in ERR are flushed."""
    for wr_id in wr_ids:
        end.qp.post_send(SendRequest().send(wr_id, inline=b"x"))


@pytest.fixture
def end(software: Software) -> Iterator[End]:
    with joined() as (here, _):
        here.qp.move(QpState.ERR)
        yield here


def test_each_thread_has_its_own_completions(end: End) -> None:
    """The one that polls later does not write over what the first is still reading."""
    polled, read = threading.Event(), threading.Event()
    got: dict[str, list[int]] = {}

    def first() -> None:
        count = end.cq.poll()
        polled.set()
        read.wait(30)
        got["first"] = [wc.wr_id for wc in end.cq.wcs[:count]]

    complete(end, 1, 2)
    with running(first):
        polled.wait(30)
        complete(end, 3, 4)
        got["second"] = [wc.wr_id for wc in end.cq.wcs[: end.cq.poll()]]
        read.set()
    assert got == {"first": [1, 2], "second": [3, 4]}


def test_many_pollers_get_each_completion_once(end: End) -> None:
    """Each looks at what it got a while later."""
    done, lock, over = list[int](), threading.Lock(), threading.Event()

    def poll() -> None:
        while not over.is_set():
            count = end.cq.poll()
            time.sleep(0.001)
            found = [wc.wr_id for wc in end.cq.wcs[:count]]
            with lock:
                done.extend(found)

    def post() -> None:
        try:
            for start in range(0, 200, 4):
                complete(end, *range(start, start + 4))
                ends = time.monotonic() + 30
                while len(done) < start - 16 and time.monotonic() < ends:
                    time.sleep(0.001)
            while len(done) < 200 and time.monotonic() < ends:
                time.sleep(0.001)
        finally:
            over.set()

    with running(post, *[poll] * 4):
        pass
    assert sorted(done) == list(range(200))


def test_a_list_of_completions_stays_the_same(end: End) -> None:
    before = end.cq.wcs
    complete(end, 1)
    assert [wc.wr_id for wc in before[: end.cq.poll()]] == [1]
    assert end.cq.wcs is before


# ---- batches of an extended queue


@pytest.fixture
def extended(software: Software) -> Iterator[tuple[CQEx, Callable[..., None]]]:
    """An extended queue, and what has completions come."""
    with end_on() as base, CQEx(base.context, 64) as cq:
        qp = QueuePair(base.pd, cq, cq, RC, **SIZES, max_inline_data=8)
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        qp.move(QpState.ERR)

        def come(*wr_ids: int) -> None:
            for wr_id in wr_ids:
                qp.post_send(SendRequest().send(wr_id, inline=b"x"))

        yield cq, come


def elsewhere(call: Callable[[], Any]) -> Any:
    """What it answers in another thread, or the error."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as e:  # noqa: BLE001  it is looked at
            result.append(e)

    with running(run):
        pass
    return result[0]


def test_a_batch_is_of_the_thread_that_began_it(extended: Any) -> None:
    cq, come = extended
    come(1, 2, 3)
    batch = cq.poll_batch()
    assert next(batch).wr_id == 1
    for call in (cq.next_poll, cq.end_poll, lambda: cq.wr_id, cq.read_opcode, lambda: cq.status, lambda: next(batch)):
        error = elsewhere(call)
        assert isinstance(error, StateError)
        assert "the batch is another thread's. Only that one may use it" in str(error)
    assert cq.wr_id == 1, "nothing was taken from the one whose it is"
    assert [wc.wr_id for wc in batch] == [2, 3]


def test_an_iterator_that_another_thread_lets_go_ends_its_batch(extended: Any) -> None:
    cq, come = extended
    come(1, 2)
    batches = [cq.poll_batch()]
    next(batches[0])
    elsewhere(batches.clear)
    with pytest.raises(StateError, match="no completion is current"):
        _ = cq.wr_id
    assert elsewhere(lambda: [wc.wr_id for wc in cq.poll_batch()]) == [2], "nobody waits for ever"


def test_an_iterator_ends_no_batch_but_its_own(extended: Any) -> None:
    cq, come = extended
    come(1, 2, 3)
    old = cq.poll_batch()
    next(old)
    cq.end_poll()
    assert cq.start_poll()
    with pytest.raises(StateError, match=r"it was ended\. Begin another one"):
        next(old)
    forget([old])
    old = None
    gc.collect()
    assert cq.wr_id == 2, "the batch that was begun since is still open"
    cq.end_poll()


def test_a_batch_of_a_thread_that_is_over_keeps_nobody_waiting(extended: Any) -> None:
    cq, come = extended
    come(1, 2, 3)
    assert elsewhere(cq.start_poll)
    assert elsewhere(lambda: [wc.wr_id for wc in cq.poll_batch()]) == [2, 3]


def test_closing_a_queue_pair_waits_for_the_batch_of_another_thread(extended: Any, software: Software) -> None:
    cq, come = extended
    come(1)
    inside, go = threading.Event(), threading.Event()

    def read() -> None:
        for wc in cq.poll_batch():
            inside.set()
            go.wait(30)
            time.sleep(0.05)
            assert wc.wr_id == 1

    (qp,) = [child for ref in cq._children.values() if (child := ref()) is not None]
    with running(read):
        inside.wait(30)
        with running(qp.close):
            time.sleep(0.05)
            assert not qp.closed, "a provider takes the queue's lock for it"
            go.set()
    assert qp.closed


def test_within_a_batch_of_its_own_queue_a_queue_pair_is_not_closed_or_reset(extended: Any) -> None:
    cq, come = extended
    come(1)
    (qp,) = [child for ref in cq._children.values() if (child := ref()) is not None]
    for _ in cq.poll_batch():
        for call in (qp.close, lambda: qp.move(QpState.RESET)):
            with pytest.raises(StateError, match=r"this thread is within a batch of it. Call end_poll\(\) first"):
                call()
        assert not qp.closed
    qp.close()


# ---- batches of an extended queue pair


@pytest.fixture
def pair(software: Software) -> Iterator[tuple[End, End]]:
    with joined(kind=QueuePairEx, send_ops_flags=QpSendOpsFlags.SEND) as ends:
        yield ends


def test_who_posts_waits_for_the_batch_of_another_thread(pair: tuple[End, End]) -> None:
    here, there = pair
    for wr_id in range(3):
        there.recv(wr_id)
    inside, go = threading.Event(), threading.Event()

    def write() -> None:
        with here.qp.batch() as wr:
            inside.set()
            wr.send(1, inline=b"1")
            go.wait(30)
            wr.send(2, inline=b"2")

    with running(write):
        inside.wait(30)
        with running(lambda: here.qp.post_send(SendRequest().send(3, inline=b"3"))):
            time.sleep(0.05)
            go.set()
    assert [wc.wr_id for wc in here.wait(3)] == [1, 2, 3]


def test_a_queue_pair_is_not_closed_under_a_batch_of_another_thread(pair: tuple[End, End]) -> None:
    here, _ = pair
    inside, go = threading.Event(), threading.Event()

    def write() -> None:
        with here.qp.batch() as wr:
            inside.set()
            go.wait(30)
            wr.abort()

    with running(write):
        inside.wait(30)
        for close in (here.qp.close, here.pd.close):
            with pytest.raises(StateError, match=r"another thread is within a batch\. Let it leave its block first"):
                close()
        assert (here.qp.closed, here.pd.closed, here.mr.closed) == (False, False, True)
        go.set()
    here.pd.close()
    assert here.qp.closed


def test_closing_ends_the_batch_that_a_thread_left_open_which_is_over(pair: tuple[End, End]) -> None:
    here, _ = pair
    elsewhere(lambda: here.qp.batch().__enter__())
    here.qp.close()
    assert here.qp.closed


def test_a_forgotten_queue_pair_in_a_batch_of_its_queue_is_freed_later(software: Software) -> None:
    with open_device("soft0") as context, PD(context) as pd, CQEx(context, 4) as cq, CQ(context, 4) as other:
        qp = QueuePair(pd, cq, other, RC, **SIZES, max_inline_data=8)
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        qp.move(QpState.ERR)
        qp.post_send(SendRequest().send(1, inline=b"x"))
        things = [qp]
        del qp
        assert cq.start_poll()
        with pytest.warns(ResourceWarning, match="never closed"):
            forget(things)
        assert software.alive["qp"] == 1
        cq.end_poll()
    assert software.alive["qp"] == 0


def test_a_queue_that_breaks_within_a_batch_lets_others_in(extended: Any, software: Software) -> None:
    cq, come = extended
    come(1, 2)
    batch = cq.poll_batch()
    next(batch)
    with software.on("ibv_next_poll", fail=errno.EINVAL), pytest.raises(VerbsError, match="EINVAL"):
        next(batch)
    assert elsewhere(lambda: cq.start_poll()) is True
