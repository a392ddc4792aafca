"""Stories and the ways of running them: the same bodies for threads and an event loop, and what breaks into them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmaconnect.deadline import Deadline
from rdmaconnect.errors import ConnectTimeout, DeadlineExceeded, StateError, VerbsError
from rdmaconnect.story import Call, Story, Wait, arun, call_apart, run, run_apart
from rdmaconnect.wakeup import Signal

T = TypeVar("T")
Tell = Callable[[Story[Any]], Any]
#: seconds that nothing here takes
PATIENCE_S = 10.0


def watched() -> set[int]:
    """The descriptors that the running loop watches, besides its own."""
    loop: Any = asyncio.get_running_loop()
    return set(loop._selector.get_map()) - {loop._ssock.fileno()}


def open_fds() -> set[str]:
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def tell_async(story: Story[T]) -> T:
    async def main() -> T:
        before = open_fds()
        try:
            return await arun(story)
        finally:
            assert watched() == set(), "the loop still watches a descriptor for us"
            assert open_fds() <= before

    return asyncio.run(main())


@pytest.fixture(params=[run, run_apart, tell_async], ids=["run", "run_apart", "arun"])
def tell(request: pytest.FixtureRequest) -> Tell:
    made: Tell = request.param
    return made


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe() for _ in range(3)]
    yield made
    for fd in (fd for ends in made for fd in ends):
        os.close(fd)


def wait(*fds: int, seconds: float | None = PATIENCE_S, slice_ms: int | None = None) -> Story[Any]:
    return (yield Wait(Deadline(seconds), fds, slice_ms=slice_ms))


def raises(error: BaseException) -> Any:
    raise error


# ---- both fronts


def test_a_story_that_waits_for_nothing_gives_its_value(tell: Tell) -> None:
    def story() -> Story[str]:
        return "value"
        yield Call(lambda: None)

    assert tell(story()) == "value"


def test_a_story_is_told_which_descriptors_can_be_read(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, _), (b, to_b), (c, _) = pipes
    os.write(to_b, b"x")
    assert tell(wait(a, b, c)) == {b}
    assert tell(wait(b, b)) == {b}


def test_what_comes_while_it_sleeps_wakes_it(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    timer = threading.Timer(0.05, os.write, (to_a, b"x"))
    timer.start()
    started = time.monotonic()
    assert tell(wait(a, seconds=None)) == {a}
    assert 0.03 < time.monotonic() - started < 5
    timer.join()


@pytest.mark.parametrize(("seconds", "slice_ms"), [(0.05, None), (None, 50), (10, 50), (0.05, 10_000), (0, None)])
def test_sleep_ends_with_the_deadline_or_the_slice(
    tell: Tell, pipes: list[tuple[int, int]], seconds: float | None, slice_ms: int | None
) -> None:
    started = time.monotonic()
    assert tell(wait(pipes[0][0], seconds=seconds, slice_ms=slice_ms)) == set()
    assert (0 if seconds == 0 else 0.04) <= time.monotonic() - started < 5


def test_without_descriptors_it_sleeps_all_the_same(tell: Tell) -> None:
    assert tell(wait(seconds=0.02)) == set()


def test_a_story_goes_from_wait_to_call_and_back(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes

    def story() -> Story[list[Any]]:
        found: list[Any] = []
        for number in range(3):
            found.append((yield Call(lambda number=number: os.write(to_a, bytes([number])))))
            found.append((yield Wait(Deadline(5), (a,))))
            found.append(os.read(a, 10))
        return found

    assert tell(story()) == [1, {a}, b"\x00", 1, {a}, b"\x01", 1, {a}, b"\x02"]


def test_stories_tell_stories(tell: Tell) -> None:
    def inner(number: int) -> Story[int]:
        doubled: int = yield Call(lambda: number * 2)
        return doubled

    def outer() -> Story[int]:
        return (yield from inner((yield from inner(3))))

    assert tell(outer()) == 12


def handles(error: BaseException) -> Story[str]:
    with pytest.raises(type(error)) as caught:
        yield Call(lambda: raises(error))
    assert caught.value is error
    answer: str = yield Call(lambda: "and on it goes")
    return answer


@pytest.mark.parametrize("error", [ValueError("words"), OSError(5, "words")], ids=repr)
def test_what_a_call_raises_is_raised_in_the_story_and_may_be_handled_there(tell: Tell, error: BaseException) -> None:
    assert tell(handles(error)) == "and on it goes"


def test_ctrl_c_in_a_call_is_raised_in_the_story() -> None:
    """Where nothing else calls: a thread of an event loop's executor gets no KeyboardInterrupt."""
    assert run(handles(KeyboardInterrupt())) == "and on it goes"


def test_what_a_story_does_not_handle_comes_out_after_its_cleaning_up(tell: Tell) -> None:
    steps: list[str] = []

    def story() -> Story[None]:
        try:
            yield Call(lambda: raises(ValueError("words")))
        finally:
            yield Call(lambda: steps.append("cleaned"))

    with pytest.raises(ValueError, match="words"):
        tell(story())
    assert steps == ["cleaned"]


def test_what_a_story_raises_itself_comes_out(tell: Tell) -> None:
    def story() -> Story[None]:
        yield Wait(Deadline(0))
        raise ValueError("words")

    with pytest.raises(ValueError, match="words"):
        tell(story())


def test_a_wait_that_fails_is_raised_in_the_story(tell: Tell) -> None:
    def story() -> Story[str]:
        try:
            yield Wait(Deadline(1), (-1, "no descriptor"))  # type: ignore[arg-type]
        except (ValueError, TypeError, OSError, StateError) as e:
            return type(e).__name__
        return "nothing"

    assert tell(story()) != "nothing"


# ---- changes


@pytest.mark.parametrize("before", [True, False], ids=["before the wait", "while it sleeps"])
def test_a_change_wakes_it_and_none_is_lost(tell: Tell, before: bool) -> None:
    signal_, other = Signal(), Signal()

    def story() -> Story[tuple[Any, float]]:
        seen = signal_.count
        if before:
            signal_.notify()  # between the look and the wait
        else:
            threading.Timer(0.05, signal_.notify).start()
        clock = Deadline(None)
        ready = yield Wait(Deadline(PATIENCE_S), changes=((other, other.count), (signal_, seen)))
        return ready, clock.waited_s

    ready, waited_s = tell(story())
    assert ready == set()
    assert waited_s < 5
    assert signal_.count == 1
    assert signal_._wake == other._wake == [], "it is still subscribed"


def test_a_change_and_a_descriptor_go_together(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    signal_ = Signal()

    def story() -> Story[list[Any]]:
        changes = ((signal_, signal_.count),)
        os.write(to_a, b"x")
        found = [(yield Wait(Deadline(PATIENCE_S), (a,), changes))]
        found.append((yield Wait(Deadline(0.02), changes=changes)))
        signal_.notify()
        found.append((yield Wait(Deadline(PATIENCE_S), (a,), changes)))
        return found

    assert tell(story()) == [{a}, set(), set()]
    assert signal_._wake == []


def test_what_can_be_written_wakes_it(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    os.set_blocking(to_a, False)
    assert tell(write_wait(to_a)) == {to_a}
    while True:
        try:
            os.write(to_a, bytes(4096))
        except BlockingIOError:
            break
    assert tell(write_wait(to_a, seconds=0.05)) == set()
    timer = threading.Timer(0.05, os.read, (a, 1 << 20))
    timer.start()
    assert tell(write_wait(to_a)) == {to_a}
    timer.join()


def write_wait(*fds: int, seconds: float = PATIENCE_S) -> Story[Any]:
    return (yield Wait(Deadline(seconds), writable=fds))


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

    def call(self, seconds: float | None = 0.05) -> Call:
        deadline = Deadline(seconds, ConnectTimeout)
        return Call(self, deadline, "do a slow thing", undo=self.undo, finally_=self.over.set)

    def end(self) -> None:
        self.may_end.set()
        assert self.over.wait(PATIENCE_S)


def test_a_call_is_not_waited_for_beyond_its_deadline_and_its_result_is_undone(tell: Tell) -> None:
    slow, clock = Slow(), Deadline(None)

    def story() -> Story[None]:
        yield slow.call()

    with pytest.raises(ConnectTimeout, match=r"^do a slow thing: no success within 0\.0"):
        tell(story())
    assert clock.waited_s < 2
    assert slow.undone == []
    assert not slow.over.is_set()
    slow.end()
    assert slow.undone == ["result"]


def test_a_call_that_fails_too_late_has_nothing_to_undo(tell: Tell) -> None:
    slow = Slow(ValueError("words"))

    def story() -> Story[str]:
        with pytest.raises(DeadlineExceeded):
            yield slow.call()
        return "it went on"

    assert tell(story()) == "it went on"
    slow.end()
    assert slow.undone == []


def test_a_call_in_time_is_not_undone(tell: Tell) -> None:
    slow = Slow()
    slow.may_end.set()

    def story() -> Story[Any]:
        return (yield slow.call(PATIENCE_S))

    assert tell(story()) == "result"
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

    def story() -> Story[str]:
        try:
            return (yield Call(do, deadline, finally_=lambda: steps.append("finally")))
        except ValueError:
            return "failed"

    assert tell(story()) == ("result" if error is None else "failed")
    end = time.monotonic() + PATIENCE_S
    while not steps and time.monotonic() < end:
        time.sleep(0.001)
    assert steps == ["finally"]


def test_an_undo_that_fails_keeps_nobody_from_the_last_step(tell: Tell, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()

    def bad(result: str) -> None:
        raise ValueError("cannot be undone")

    def story() -> Story[None]:
        yield Call(slow, Deadline(0.02), undo=bad, finally_=slow.over.set)

    with pytest.raises(DeadlineExceeded):
        tell(story())
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


def test_run_apart_runs_the_story_where_no_signal_handler_breaks_in() -> None:
    def story() -> Story[list[threading.Thread]]:
        first = threading.current_thread()
        yield Wait(Deadline(0.01))
        return [first, threading.current_thread(), (yield Call(threading.current_thread))]

    here = threading.main_thread()
    assert set(run(story())) == {here}
    apart = run_apart(story())
    assert here not in apart
    assert apart[0] is apart[1]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run_apart(story())))
    thread.start()
    thread.join()
    assert set(found) == {thread}, "elsewhere it is run where it is called"


@pytest.mark.parametrize("what", ["a descriptor", "a change", "time"])
def test_interrupted_while_it_waits_a_story_is_told_there_and_cleans_up(
    interrupts: Any, pipes: list[tuple[int, int]], what: str
) -> None:
    steps: list[str] = []
    signal_ = Signal()

    def story() -> Story[None]:
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
        run_apart(story())
    assert steps == ["told", "cleaned"]
    assert signal_._wake == []


def test_interrupted_in_a_call_that_may_be_abandoned_a_story_goes_on_at_once(interrupts: Any) -> None:
    slow, clock = Slow(), Deadline(None)

    def story() -> Story[None]:
        yield slow.call(None)

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(story())
    assert clock.waited_s < 5
    assert slow.undone == []
    slow.end()
    assert slow.undone == ["result"]


def test_interrupted_in_a_call_that_is_waited_for_a_story_hears_of_it_after_that(interrupts: Any) -> None:
    steps: list[str] = []

    def story() -> Story[None]:
        yield Call(lambda: (time.sleep(0.3), steps.append("call ended")))
        try:
            yield Wait(Deadline(None))
        finally:
            steps.append("cleaned")

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(story())
    assert steps == ["call ended", "cleaned"]


def test_interrupted_again_while_it_cleans_up_it_comes_to_its_end_all_the_same(interrupts: Any) -> None:
    steps: list[str] = []

    def story() -> Story[None]:
        try:
            yield Wait(Deadline(None))
        finally:
            yield Call(lambda: (time.sleep(0.3), steps.append("cleaned")))

    for seconds in (0.05, 0.1, 0.15, 0.2):
        interrupts(seconds)
    with pytest.raises(Interrupted):
        run_apart(story())
    assert steps == ["cleaned"]


def test_what_a_story_gives_that_does_not_mind_the_interrupt_is_undone(interrupts: Any) -> None:
    undone: list[str] = []

    def story() -> Story[str]:
        yield Call(lambda: time.sleep(0.3))
        return "made"

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(story(), undone.append)
    assert undone == ["made"]


def test_a_story_that_handles_the_interrupt_gives_its_value_to_nobody(interrupts: Any) -> None:
    """The caller was interrupted: it gets that, and not a value that it does not expect."""
    undone: list[str] = []

    def story() -> Story[str]:
        with contextlib.suppress(Interrupted):
            yield Wait(Deadline(None))
        return "made"

    interrupts(0.05)
    with pytest.raises(Interrupted):
        run_apart(story(), undone.append)
    assert undone == ["made"]


def test_an_error_of_the_story_comes_out_of_run_apart_as_it_is() -> None:
    error = KeyboardInterrupt("of the story itself")

    def story() -> Story[None]:
        raise error
        yield

    with pytest.raises(KeyboardInterrupt) as caught:
        run_apart(story(), lambda value: pytest.fail("there is nothing to undo"))
    assert caught.value is error


CTRL_C = """
import signal, sys, threading, time
from rdmaconnect.deadline import Deadline
from rdmaconnect.story import Wait, run_apart
threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()

def story():
    try:
        yield Wait(Deadline(None))
    finally:
        print("cleaned", flush=True)

run_apart(story())
"""


def test_ctrl_c_ends_a_program_that_waits() -> None:
    """Where nothing handles it: the story cleans up, and the program ends as Python programs do."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", CTRL_C], cwd=root, capture_output=True, text=True, timeout=30)
    assert done.stdout == "cleaned\n"
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


# ---- on an event loop


def test_call_apart_calls_in_a_worker() -> None:
    async def main() -> None:
        assert await call_apart(threading.get_ident) != threading.get_ident()
        with pytest.raises(ValueError, match="words"):
            await call_apart(lambda: raises(ValueError("words")))

    asyncio.run(main())


def test_a_descriptor_may_be_closed_and_its_number_given_anew_while_it_is_waited_for(
    pipes: list[tuple[int, int]],
) -> None:
    """Nobody is woken by what somebody else opened under the same number."""

    async def main() -> None:
        mine, to_mine = os.pipe()
        task = asyncio.create_task(arun(wait(mine, seconds=0.3)))
        await asyncio.sleep(0.05)
        os.close(mine)
        other, to_other = os.pipe()
        assert other == mine
        os.write(to_other, b"x")
        assert await task == set()
        assert watched() == set()
        assert select.select([other], [], [], 0)[0] == [other], "its byte is still there"
        for fd in (other, to_other, to_mine):
            os.close(fd)

    asyncio.run(main())


def test_without_descriptors_a_wait_on_an_event_loop_says_so(
    pipes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(fd: int) -> int:
        raise OSError(24, "Too many open files")

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "dup", none_left)
            with pytest.raises(VerbsError, match="EMFILE"):
                await arun(wait(pipes[0][0]))
        assert watched() == set()

    asyncio.run(main())


def test_a_call_blocks_no_loop() -> None:
    async def main() -> None:
        here, ticks = threading.get_ident(), 0
        seen: list[int] = []

        def story() -> Story[None]:
            yield Call(lambda: (seen.append(threading.get_ident()), time.sleep(0.2)))

        task = asyncio.create_task(arun(story()))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        assert ticks > 5
        assert seen
        assert seen != [here]

    asyncio.run(main())


def test_many_tasks_wait_on_one_descriptor(pipes: list[tuple[int, int]]) -> None:
    (a, to_a), (b, to_b), _ = pipes

    async def main() -> None:
        tasks = [asyncio.create_task(arun(wait(a, b))) for _ in range(50)]
        short = asyncio.create_task(arun(wait(a, seconds=0.01)))
        cancelled = asyncio.create_task(arun(wait(a)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        assert await short == set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not any(task.done() for task in tasks), "one that left took the reader of the others along"
        os.write(to_b, b"x")
        assert await asyncio.gather(*tasks) == [{b}] * 50
        assert watched() == set()
        os.write(to_a, b"x")
        assert await arun(wait(a)) == {a}
        assert watched() == set()

    asyncio.run(main())


def test_a_descriptor_that_cannot_be_watched_leaves_no_trace(pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes

    async def main() -> None:
        with open(os.devnull) as null:  # epoll refuses it
            for _ in range(2):
                with pytest.raises(PermissionError):
                    await arun(wait(a, null.fileno()))
                assert watched() == set()
            number = null.fileno()
        again, other = os.pipe()
        try:
            os.write(other, b"x")
            os.write(to_a, b"x")
            assert await arun(wait(again)) == {again}, f"{number} is watched no more"
        finally:
            os.close(again)
            os.close(other)

    asyncio.run(main())


def test_two_loops_do_not_mix_their_readers(pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(arun(wait(a))))) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    os.write(to_a, b"x")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [{a}] * 2


# ---- cancelled


def test_cancelled_while_it_waits_a_story_is_told_there_and_cleans_up(pipes: list[tuple[int, int]]) -> None:
    steps: list[str] = []

    def story() -> Story[None]:
        try:
            yield Wait(Deadline(None), (pipes[0][0],))
        except asyncio.CancelledError:
            steps.append("told")
            raise
        finally:
            yield Call(lambda: steps.append("cleaned"))

    async def main() -> None:
        task = asyncio.create_task(arun(story()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watched() == set()

    asyncio.run(main())
    assert steps == ["told", "cleaned"]


@pytest.mark.parametrize("times", [1, 3])
def test_cancelled_while_it_calls_a_story_cleans_up_after_the_call(times: int) -> None:
    steps: list[str] = []
    may_end = threading.Event()

    def block() -> str:
        may_end.wait(5)
        steps.append("call ended")
        return "result"

    def story() -> Story[None]:
        try:
            yield Call(block, undo=lambda result: steps.append(f"{result} undone"))
        finally:
            steps.append("cleaned")

    async def main() -> None:
        task = asyncio.create_task(arun(story()))
        for _ in range(times):
            await asyncio.sleep(0.02)
            task.cancel()
        await asyncio.sleep(0.02)
        assert steps == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert steps == ["call ended", "result undone", "cleaned"]


def test_a_call_that_fails_after_it_was_cancelled_has_nothing_to_undo() -> None:
    may_end, undone = threading.Event(), []

    def story() -> Story[None]:
        yield Call(lambda: (may_end.wait(5), raises(ValueError("words"))), undo=undone.append)

    async def main() -> None:
        task = asyncio.create_task(arun(story()))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert undone == []


def test_cancelled_in_a_call_that_may_be_abandoned_a_story_goes_on_at_once() -> None:
    slow, steps = Slow(), list[str]()

    def story() -> Story[None]:
        try:
            yield slow.call(None)
        finally:
            steps.append("cleaned")

    async def main() -> None:
        task = asyncio.create_task(arun(story()))
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

    def story(number: int, takes_ms: int) -> Story[None]:
        def work() -> int:
            time.sleep(takes_ms / 1000)
            return number

        call = Call(work, Deadline(None), undo=undone.append, finally_=lambda: over.append(number))
        used.append((yield call))

    async def main() -> None:
        tasks = [asyncio.create_task(arun(story(number, takes))) for number, (takes, _) in enumerate(plan)]
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


def test_a_story_may_be_timed_out() -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(arun(wait(seconds=None)), 0.05)

    asyncio.run(main())
