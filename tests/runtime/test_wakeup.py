"""Waking those who wait: no change is lost, and a descriptor is one waiter's for as long as it has it."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Callable

import pytest

from rdmaconnect.runtime import wakeup
from rdmaconnect.runtime.wakeup import MOST_SPARE, Signal, Waker, lend_waker, return_waker


def readable(waker: Waker) -> bool:
    return select.select([waker], [], [], 0)[0] == [waker]


# ---- signals


def test_all_who_subscribed_are_called_at_each_change() -> None:
    signal, calls = Signal(), list[str]()
    one, two = (lambda: calls.append("one")), (lambda: calls.append("two"))
    assert signal.subscribe(one, signal.count)
    assert signal.subscribe(two, signal.count)
    signal.notify()
    assert (calls, signal.count) == (["one", "two"], 1)
    signal.unsubscribe(one)
    signal.notify()
    assert (calls, signal.count) == (["one", "two", "two"], 2)
    signal.unsubscribe(two)
    signal.unsubscribe(two)
    signal.notify()
    assert len(calls) == 3


def test_who_has_not_seen_the_last_change_is_not_subscribed() -> None:
    signal, calls = Signal(), list[str]()
    seen = signal.count
    signal.notify()
    assert not signal.subscribe(lambda: calls.append("late"), seen)
    signal.notify()
    assert calls == []


def test_one_that_subscribed_twice_leaves_twice() -> None:
    signal, calls = Signal(), list[int]()
    wake = lambda: calls.append(1)  # noqa: E731
    for _ in range(2):
        assert signal.subscribe(wake, 0)
    signal.notify()
    assert len(calls) == 2
    signal.unsubscribe(wake)
    signal.notify()
    assert len(calls) == 3


def test_no_change_is_lost_whoever_makes_it_when() -> None:
    """Threads that wait for a number which others raise: each sees the last one, and none sleeps through it."""
    signal, state = Signal(), [0]
    last, waiting = 2000, list[threading.Thread]()
    ended: list[int] = []

    def wait() -> None:
        wake = threading.Event()
        while True:
            seen = signal.count
            if state[0] >= last:
                ended.append(state[0])
                return
            wake.clear()
            if signal.subscribe(wake.set, seen):
                if not wake.wait(10):
                    return
                signal.unsubscribe(wake.set)

    for _ in range(4):
        waiting.append(threading.Thread(target=wait))
        waiting[-1].start()
    for _ in range(last):
        state[0] += 1
        signal.notify()
    for thread in waiting:
        thread.join(20)
    assert ended == [last] * 4


# ---- wakers


def test_a_waker_is_readable_from_set_to_clear() -> None:
    waker = Waker()
    assert not readable(waker)
    for _ in range(3):
        waker.set()
    assert readable(waker)
    waker.clear()
    assert not readable(waker)
    waker.clear()
    assert not readable(waker)


def test_its_descriptor_is_closed_when_nobody_knows_it_any_more_and_not_before() -> None:
    waker = Waker()
    fd, wake = waker.fileno(), waker.set
    assert not os.get_inheritable(fd)
    del waker
    gc.collect()
    wake()  # a signal may still hold it
    assert select.select([fd], [], [], 0)[0] == [fd]
    del wake
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_of_the_wakers_of_many_calls_a_few_are_kept() -> None:
    before = len(os.listdir("/proc/self/fd"))
    lent = [lend_waker() for _ in range(MOST_SPARE + 100)]
    for waker in lent:
        return_waker(waker)
    lent.clear()
    del waker
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_SPARE


def test_without_a_descriptor_there_is_an_error_and_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: int) -> int:
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "eventfd", none_left)
        patch.setattr(os, "close", lambda fd: pytest.fail(f"it closed {fd}"))
        patch.setattr(wakeup, "_spare", [])
        with pytest.raises(OSError, match="Too many open files"):
            lend_waker()
        gc.collect()


def test_a_waker_that_was_given_back_is_lent_again_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_spare", [])
    one = lend_waker()
    two = lend_waker()
    assert one is not two
    one.set()  # by somebody who was late
    return_waker(one)
    again = lend_waker()
    assert again is one
    assert not readable(again)


def test_no_two_threads_have_one_waker_and_there_are_as_many_as_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_spare", [])
    made, held, lock, problems = set[int](), set[int](), threading.Lock(), list[str]()

    def use() -> None:
        for _ in range(300):
            waker = lend_waker()
            with lock:
                if waker.fileno() in held:
                    problems.append("two have it")
                held.add(waker.fileno())
                made.add(waker.fileno())
            time.sleep(0)
            with lock:
                held.discard(waker.fileno())
            return_waker(waker)

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(made) <= 6


def in_child(check: Callable[[], bool]) -> bool:
    """Whether a check holds in a forked child."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_does_not_wake_its_parent() -> None:
    waker = lend_waker()
    return_waker(waker)

    def set_one() -> bool:
        mine = lend_waker()
        mine.set()
        return mine is not waker

    assert in_child(set_one)
    assert not readable(waker)
