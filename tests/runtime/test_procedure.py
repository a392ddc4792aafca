"""Procedures and the ways of running them: the same bodies for threads and an event loop, and what breaks into them."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Call, Procedure, Wait, arun, call_apart, run, run_apart
from rdmaconnect.runtime.wakeup import Signal

T = TypeVar("T")
Tell = Callable[[Procedure[Any]], Any]
#: seconds that nothing here takes
PATIENCE_S = 10.0


def watched() -> set[int]:
    """The descriptors that the running loop watches, besides its own."""
    loop: Any = asyncio.get_running_loop()
    return set(loop._selector.get_map()) - {loop._ssock.fileno()}


def open_fds() -> set[str]:
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def tell_async(procedure: Procedure[T]) -> T:
    async def main() -> T:
        before = open_fds()
        try:
            return await arun(procedure)
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


def wait(*fds: int, seconds: float | None = PATIENCE_S, slice_ms: int | None = None) -> Procedure[Any]:
    return (yield Wait(Deadline(seconds), fds, slice_ms=slice_ms))


def raises(error: BaseException) -> Any:
    raise error


# ---- both fronts


def test_a_procedure_that_waits_for_nothing_gives_its_value(tell: Tell) -> None:
    def procedure() -> Procedure[str]:
        return "value"
        yield Call(lambda: None)

    assert tell(procedure()) == "value"


def test_a_procedure_is_told_which_descriptors_can_be_read(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, _), (b, to_b), (c, _) = pipes
    os.write(to_b, b"x")
    assert tell(wait(a, b, c)) == {b}
    assert tell(wait(b, b)) == {b}


def test_what_comes_while_it_sleeps_wakes_it(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    timer = threading.Timer(0.05, os.write, (to_a, b"x"))
    started = time.monotonic()
    timer.start()
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


def test_a_procedure_goes_from_wait_to_call_and_back(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes

    def procedure() -> Procedure[list[Any]]:
        found: list[Any] = []
        for number in range(3):
            found.append((yield Call(lambda number=number: os.write(to_a, bytes([number])))))
            found.append((yield Wait(Deadline(5), (a,))))
            found.append(os.read(a, 10))
        return found

    assert tell(procedure()) == [1, {a}, b"\x00", 1, {a}, b"\x01", 1, {a}, b"\x02"]


def test_procedures_tell_procedures(tell: Tell) -> None:
    def inner(number: int) -> Procedure[int]:
        doubled: int = yield Call(lambda: number * 2)
        return doubled

    def outer() -> Procedure[int]:
        return (yield from inner((yield from inner(3))))

    assert tell(outer()) == 12


def handles(error: BaseException) -> Procedure[str]:
    with pytest.raises(type(error)) as caught:
        yield Call(lambda: raises(error))
    assert caught.value is error
    answer: str = yield Call(lambda: "and on it goes")
    return answer


@pytest.mark.parametrize("error", [ValueError("words"), OSError(5, "words")], ids=repr)
def test_what_a_call_raises_is_raised_in_the_procedure_and_may_be_handled_there(
    tell: Tell, error: BaseException
) -> None:
    assert tell(handles(error)) == "and on it goes"


def test_ctrl_c_in_a_call_is_raised_in_the_procedure() -> None:
    """Where nothing else calls: a thread of an event loop's executor gets no KeyboardInterrupt."""
    assert run(handles(KeyboardInterrupt())) == "and on it goes"


def test_what_a_procedure_does_not_handle_comes_out_after_its_cleaning_up(tell: Tell) -> None:
    steps: list[str] = []

    def procedure() -> Procedure[None]:
        try:
            yield Call(lambda: raises(ValueError("words")))
        finally:
            yield Call(lambda: steps.append("cleaned"))

    with pytest.raises(ValueError, match="words"):
        tell(procedure())
    assert steps == ["cleaned"]


def test_what_a_procedure_raises_itself_comes_out(tell: Tell) -> None:
    def procedure() -> Procedure[None]:
        yield Wait(Deadline(0))
        raise ValueError("words")

    with pytest.raises(ValueError, match="words"):
        tell(procedure())


def test_a_wait_that_fails_is_raised_in_the_procedure(tell: Tell) -> None:
    def procedure() -> Procedure[str]:
        try:
            yield Wait(Deadline(1), (-1, "no descriptor"))  # type: ignore[arg-type]
        except (ValueError, TypeError, OSError, StateError) as e:
            return type(e).__name__
        return "nothing"

    assert tell(procedure()) != "nothing"


# ---- changes


@pytest.mark.parametrize("before", [True, False], ids=["before the wait", "while it sleeps"])
def test_a_change_wakes_it_and_none_is_lost(tell: Tell, before: bool) -> None:
    signal_, other = Signal(), Signal()

    def procedure() -> Procedure[tuple[Any, float]]:
        seen = signal_.count
        if before:
            signal_.notify()  # between the look and the wait
        else:
            threading.Timer(0.05, signal_.notify).start()
        clock = Deadline(None)
        ready = yield Wait(Deadline(PATIENCE_S), changes=((other, other.count), (signal_, seen)))
        return ready, clock.waited_s

    ready, waited_s = tell(procedure())
    assert ready == set()
    assert waited_s < 5
    assert signal_.count == 1
    assert signal_._wake == other._wake == [], "it is still subscribed"


def test_a_change_and_a_descriptor_go_together(tell: Tell, pipes: list[tuple[int, int]]) -> None:
    (a, to_a), _, _ = pipes
    signal_ = Signal()

    def procedure() -> Procedure[list[Any]]:
        changes = ((signal_, signal_.count),)
        os.write(to_a, b"x")
        found = [(yield Wait(Deadline(PATIENCE_S), (a,), changes))]
        found.append((yield Wait(Deadline(0.02), changes=changes)))
        signal_.notify()
        found.append((yield Wait(Deadline(PATIENCE_S), (a,), changes)))
        return found

    assert tell(procedure()) == [{a}, set(), set()]
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


def write_wait(*fds: int, seconds: float = PATIENCE_S) -> Procedure[Any]:
    return (yield Wait(Deadline(seconds), writable=fds))


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

        def procedure() -> Procedure[None]:
            yield Call(lambda: (seen.append(threading.get_ident()), time.sleep(0.2)))

        task = asyncio.create_task(arun(procedure()))
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


def test_cancelled_while_it_waits_a_procedure_is_told_there_and_cleans_up(pipes: list[tuple[int, int]]) -> None:
    steps: list[str] = []

    def procedure() -> Procedure[None]:
        try:
            yield Wait(Deadline(None), (pipes[0][0],))
        except asyncio.CancelledError:
            steps.append("told")
            raise
        finally:
            yield Call(lambda: steps.append("cleaned"))

    async def main() -> None:
        task = asyncio.create_task(arun(procedure()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watched() == set()

    asyncio.run(main())
    assert steps == ["told", "cleaned"]


@pytest.mark.parametrize("times", [1, 3])
def test_cancelled_while_it_calls_a_procedure_cleans_up_after_the_call(times: int) -> None:
    steps: list[str] = []
    may_end = threading.Event()

    def block() -> str:
        may_end.wait(5)
        steps.append("call ended")
        return "result"

    def procedure() -> Procedure[None]:
        try:
            yield Call(block, undo=lambda result: steps.append(f"{result} undone"))
        finally:
            steps.append("cleaned")

    async def main() -> None:
        task = asyncio.create_task(arun(procedure()))
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

    def procedure() -> Procedure[None]:
        yield Call(lambda: (may_end.wait(5), raises(ValueError("words"))), undo=undone.append)

    async def main() -> None:
        task = asyncio.create_task(arun(procedure()))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert undone == []


def test_a_procedure_may_be_timed_out() -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(arun(wait(seconds=None)), 0.05)

    asyncio.run(main())
