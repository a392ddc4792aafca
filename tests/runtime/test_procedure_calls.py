"""Calls that a procedure does not wait for, and what breaks into a procedure: interrupts and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from test_procedure import PATIENCE_S, Tell, pipes, tell

from rdmaconnect.errors import ConnectTimeout, DeadlineExceeded
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Call, Procedure, Wait, arun, run, run_apart
from rdmaconnect.runtime.wakeup import Signal

__all__ = ["pipes", "tell"]  # fixtures of test_procedure


# ---- calls that are not waited for


class Slow:
    """A call that blocks until it may end, and what became of its result."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_end, self.over = (threading.Event() for _ in range(3))
        self.undone: list[str] = []
        self._error = error

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return "result"

    def undo(self, result: str) -> None:
        self.undone.append(result)

    def call(self, seconds: float | None = 0.5) -> Call:
        deadline = Deadline(seconds, ConnectTimeout)
        return Call(self, deadline, "do a slow thing", undo=self.undo, finally_=self.over.set)

    def end(self) -> None:
        self.may_end.set()
        assert self.over.wait(PATIENCE_S)


def test_a_call_is_not_waited_for_beyond_its_deadline_and_its_result_is_undone(tell: Tell) -> None:
    slow, clock = Slow(), Deadline(None)

    def procedure() -> Procedure[None]:
        yield slow.call()

    with pytest.raises(ConnectTimeout, match=r"^do a slow thing: no success within \d"):
        tell(procedure())
    assert clock.waited_s < 2
    assert slow.undone == []
    assert not slow.over.is_set()
    slow.end()
    assert slow.undone == ["result"]


def test_a_call_that_fails_too_late_has_nothing_to_undo(tell: Tell) -> None:
    slow = Slow(ValueError("words"))

    def procedure() -> Procedure[str]:
        with pytest.raises(DeadlineExceeded):
            yield slow.call()
        return "it went on"

    assert tell(procedure()) == "it went on"
    slow.end()
    assert slow.undone == []


def test_a_call_in_time_is_not_undone(tell: Tell) -> None:
    slow = Slow()
    slow.may_end.set()

    def procedure() -> Procedure[Any]:
        return (yield slow.call(PATIENCE_S))

    assert tell(procedure()) == "result"
    assert slow.over.wait(PATIENCE_S)
    assert slow.undone == []


@pytest.mark.parametrize("deadline", [None, Deadline(None)], ids=["waited for", "abandonable"])
@pytest.mark.parametrize("error", [None, ValueError("words")], ids=["it succeeds", "it fails"])
def test_what_is_to_be_done_finally_is_done_once(
    tell: Tell, deadline: Deadline | None, error: Exception | None
) -> None:
    steps: list[str] = []

    def do() -> str:
        if error is not None:
            raise error
        return "result"

    def procedure() -> Procedure[str]:
        try:
            return (yield Call(do, deadline, finally_=lambda: steps.append("finally")))
        except ValueError:
            return "failed"

    assert tell(procedure()) == ("result" if error is None else "failed")
    end = time.monotonic() + PATIENCE_S
    while not steps and time.monotonic() < end:
        time.sleep(0.001)
    assert steps == ["finally"]


def test_an_undo_that_fails_keeps_nobody_from_the_last_step(tell: Tell, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()

    def bad(result: str) -> None:
        raise ValueError("cannot be undone")

    def procedure() -> Procedure[None]:
        yield Call(slow, Deadline(0.02), undo=bad, finally_=slow.over.set)

    with pytest.raises(DeadlineExceeded):
        tell(procedure())
    slow.end()
    end = time.monotonic() + PATIENCE_S
    while "cannot be undone" not in caplog.text:
        assert time.monotonic() < end, "nobody is told"
        time.sleep(0.001)


# ---- interrupted


class Interrupted(Exception):
    """What a signal handler raises."""


@pytest.fixture
def interrupts(request: pytest.FixtureRequest) -> Iterator[Callable[[float], threading.Timer]]:
    """Has the main thread interrupted in so many seconds, by an exception that a signal handler raises."""

    def handler(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    timers: list[threading.Timer] = []

    def later(seconds: float) -> threading.Timer:
        timers.append(threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)))
        timers[-1].start()
        return timers[-1]

    yield later
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


def test_run_apart_runs_the_procedure_where_no_signal_handler_breaks_in() -> None:
    def procedure() -> Procedure[list[threading.Thread]]:
        first = threading.current_thread()
        yield Wait(Deadline(0.01))
        return [first, threading.current_thread(), (yield Call(threading.current_thread))]

    here = threading.main_thread()
    assert set(run(procedure())) == {here}
    apart = run_apart(procedure())
    assert here not in apart
    assert apart[0] is apart[1]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run_apart(procedure())))
    thread.start()
    thread.join()
    assert set(found) == {thread}, "elsewhere it is run where it is called"


@pytest.mark.parametrize("what", ["a descriptor", "a change", "time"])
def test_interrupted_while_it_waits_a_procedure_is_told_there_and_cleans_up(
    interrupts: Any, pipes: list[tuple[int, int]], what: str
) -> None:
    steps: list[str] = []
    signal_ = Signal()

    def procedure() -> Procedure[None]:
        try:
            if what == "a descriptor":
                yield Wait(Deadline(None), (pipes[0][0],))
            elif what == "a change":
                yield Wait(Deadline(None), changes=((signal_, 0),))
            yield Wait(Deadline(None))
        except Interrupted:
            steps.append("told")
            raise
        finally:
            yield Call(lambda: steps.append("cleaned"))

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(procedure())
    assert steps == ["told", "cleaned"]
    assert signal_._wake == []


def test_interrupted_in_a_call_that_may_be_abandoned_a_procedure_goes_on_at_once(interrupts: Any) -> None:
    slow, clock = Slow(), Deadline(None)

    def procedure() -> Procedure[None]:
        yield slow.call(None)

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(procedure())
    assert clock.waited_s < 5
    assert slow.undone == []
    slow.end()
    assert slow.undone == ["result"]


def test_interrupted_in_a_call_that_is_waited_for_a_procedure_hears_of_it_after_that(interrupts: Any) -> None:
    steps: list[str] = []

    def procedure() -> Procedure[None]:
        yield Call(lambda: (time.sleep(0.3), steps.append("call ended")))
        try:
            yield Wait(Deadline(None))
        finally:
            steps.append("cleaned")

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(procedure())
    assert steps == ["call ended", "cleaned"]


def test_interrupted_again_while_it_cleans_up_it_comes_to_its_end_all_the_same(interrupts: Any) -> None:
    steps: list[str] = []

    def procedure() -> Procedure[None]:
        try:
            yield Wait(Deadline(None))
        finally:
            yield Call(lambda: (time.sleep(0.3), steps.append("cleaned")))

    for seconds in (0.05, 0.1, 0.15, 0.2):
        interrupts(seconds)
    with pytest.raises(Interrupted):
        run_apart(procedure())
    assert steps == ["cleaned"]


def test_what_a_procedure_gives_that_does_not_mind_the_interrupt_is_undone(interrupts: Any) -> None:
    undone: list[str] = []

    def procedure() -> Procedure[str]:
        yield Call(lambda: time.sleep(0.3))
        return "made"

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(procedure(), undone.append)
    assert undone == ["made"]


def test_a_procedure_that_handles_the_interrupt_gives_its_value_to_nobody(interrupts: Any) -> None:
    """The caller was interrupted: it gets that, and not a value that it does not expect."""
    undone: list[str] = []

    def procedure() -> Procedure[str]:
        with contextlib.suppress(Interrupted):
            yield Wait(Deadline(None))
        return "made"

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(procedure(), undone.append)
    assert undone == ["made"]


def test_an_error_of_the_procedure_comes_out_of_run_apart_as_it_is() -> None:
    error = KeyboardInterrupt("of the procedure itself")

    def procedure() -> Procedure[None]:
        raise error
        yield

    with pytest.raises(KeyboardInterrupt) as caught:
        run_apart(procedure(), lambda value: pytest.fail("there is nothing to undo"))
    assert caught.value is error


CTRL_C = """
import signal, sys, threading, time
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Wait, run_apart
threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()

def procedure():
    try:
        yield Wait(Deadline(None))
    finally:
        print("cleaned", flush=True)

run_apart(procedure())
"""


def test_ctrl_c_ends_a_program_that_waits() -> None:
    """Where nothing handles it: the procedure cleans up, and the program ends as Python programs do."""
    root = ROOT
    done = subprocess.run([sys.executable, "-c", CTRL_C], cwd=root, capture_output=True, text=True, timeout=30)
    assert done.stdout == "cleaned\n"
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


# ---- cancelled


def test_cancelled_in_a_call_that_may_be_abandoned_a_procedure_goes_on_at_once() -> None:
    slow, steps = Slow(), list[str]()

    def procedure() -> Procedure[None]:
        try:
            yield slow.call(None)
        finally:
            steps.append("cleaned")

    async def main() -> None:
        task = asyncio.create_task(arun(procedure()))
        while not slow.begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert steps == ["cleaned"]
    assert slow.undone == []
    slow.end()
    assert slow.undone == ["result"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=50)
def test_however_cancels_and_ends_fall_each_result_is_used_or_undone_and_each_call_is_over(
    plan: list[tuple[int, int]],
) -> None:
    """(milliseconds that a call takes, milliseconds after which it is cancelled), all at the same time."""
    used, undone, over = list[int](), list[int](), list[int]()

    def procedure(number: int, takes_ms: int) -> Procedure[None]:
        def work() -> int:
            time.sleep(takes_ms / 1000)
            return number

        call = Call(work, Deadline(None), undo=undone.append, finally_=lambda: over.append(number))
        used.append((yield call))

    async def main() -> None:
        tasks = [asyncio.create_task(arun(procedure(number, takes))) for number, (takes, _) in enumerate(plan)]
        loop = asyncio.get_running_loop()
        for task, (_, after) in zip(tasks, plan, strict=True):
            loop.call_later(after / 1000, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    end = time.monotonic() + PATIENCE_S
    while len(over) < len(plan) and time.monotonic() < end:
        time.sleep(0.001)
    assert sorted(over) == list(range(len(plan)))
    assert len(set(used)) + len(set(undone)) == len(used) + len(undone), "twice"
    assert not set(used) & set(undone)
