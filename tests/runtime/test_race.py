"""Several procedures at once: the first that ends wins, and the others are ended, whatever they are amid."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rdmaconnect.errors import ConnectTimeout, StateError
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Call, Interrupt, Procedure, Wait, arun, run
from rdmaconnect.runtime.race import race

RUNS: dict[str, Callable[[Procedure[Any]], Any]] = {
    "in a thread": run,
    "with asyncio": lambda procedure: asyncio.run(arun(procedure)),
}
runs = pytest.mark.parametrize("how", RUNS)


class Course:
    """What is raced, and what became of each."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self.lost: list[int] = []
        self.undone: list[object] = []

    def after(self, name: str, seconds: float, error: Exception | None = None, call: bool = False) -> Procedure[str]:
        """One that sleeps, or has a worker do so, then returns its name or raises."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                yield Call(lambda: time.sleep(left)) if call else Wait(Deadline(left))
            if error is not None:
                raise error
        except BaseException as e:
            self.ended[name] = str(e)
            raise
        finally:
            yield Call(lambda: None)  # it cleans up
        self.ended[name] = "won"
        return name

    def race(self, *procedures: Procedure[str], may: bool = True) -> Procedure[tuple[int, str]]:
        def lost(place: int, error: BaseException) -> bool:
            self.lost.append(place)
            return may

        return race(procedures, lost, self.undone.append)


@runs
def test_the_first_wins_and_the_others_are_ended(how: str) -> None:
    course, start = Course(), time.monotonic()
    won = RUNS[how](course.race(course.after("slow", 9), course.after("quick", 0.1), course.after("slower", 9)))
    assert won == (1, "quick")
    assert time.monotonic() - start < 8
    assert course.ended == {"quick": "won"} | dict.fromkeys(["slow", "slower"], "another one was quicker.")
    assert (course.lost, course.undone) == ([], [])


@runs
def test_one_that_is_amid_a_call_is_ended_after_it(how: str) -> None:
    course, start = Course(), time.monotonic()
    won = RUNS[how](course.race(course.after("blocks", 0.5, call=True), course.after("quick", 0.05)))
    assert won == (1, "quick")
    assert time.monotonic() - start >= 0.5
    assert course.undone in ([], ["blocks"])  # it may have come to its end meanwhile
    assert set(course.ended) == {"blocks", "quick"}


@runs
def test_those_that_fail_are_told_of_and_the_others_go_on(how: str) -> None:
    course = Course()
    won = RUNS[how](course.race(course.after("fails", 0.05, ValueError("no")), course.after("last", 0.2)))
    assert (won, course.lost, course.ended) == ((1, "last"), [0], {"fails": "no", "last": "won"})


@runs
def test_where_all_fail_the_first_of_them_is_raised(how: str) -> None:
    course = Course()
    with pytest.raises(ValueError, match="the best"):
        RUNS[how](
            course.race(course.after("a", 0.1, ValueError("the best")), course.after("b", 0.0, ValueError("the other")))
        )
    assert course.lost == [1, 0]


@runs
def test_where_the_others_are_not_to_go_on_it_is_raised(how: str) -> None:
    course = Course()
    with pytest.raises(ValueError, match="no"):
        RUNS[how](course.race(course.after("a", 0.0, ValueError("no")), course.after("b", 9), may=False))
    assert course.ended == {"a": "no", "b": "no"}


def test_a_call_whose_deadline_passes_is_left_to_its_worker() -> None:
    gone, undone = threading.Event(), threading.Event()

    def late() -> Procedure[str]:
        yield Call(gone.wait, Deadline(0.1, ConnectTimeout), "block", undo=lambda value: undone.set())
        return "never"

    with pytest.raises(ConnectTimeout, match="block"):
        run(race([late()], lambda place, error: True, lambda value: None))
    gone.set()
    assert undone.wait(5)


def test_an_interrupt_ends_all() -> None:
    course, interrupt = Course(), Interrupt()
    threading.Timer(0.1, interrupt.set, [KeyboardInterrupt("Ctrl-C")]).start()
    with pytest.raises(KeyboardInterrupt):
        run(course.race(course.after("a", 9), course.after("b", 9)), interrupt)
    assert course.ended == {"a": "Ctrl-C", "b": "Ctrl-C"}


def test_a_winner_that_is_interrupted_while_the_others_are_ended_is_taken_back() -> None:
    course, interrupt = Course(), Interrupt()
    threading.Timer(0.2, interrupt.set, [KeyboardInterrupt("Ctrl-C")]).start()
    with pytest.raises(KeyboardInterrupt):
        run(course.race(course.after("blocks", 0.5, call=True), course.after("quick", 0.05)), interrupt)
    assert "quick" in course.undone


def test_a_cancelled_race_ends_all() -> None:
    course = Course()

    async def cancel() -> None:
        task = asyncio.create_task(arun(course.race(course.after("a", 9), course.after("b", 0.3, call=True))))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert course.ended["a"] == ""
    assert set(course.ended) == {"a", "b"}


def test_there_is_no_worker_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course()

    def none(call: Call) -> None:
        raise StateError("no thread")

    monkeypatch.setattr("rdmaconnect.runtime.race.Errand", none)
    with pytest.raises(StateError, match="no thread"):
        run(course.race(course.after("a", 0.1, call=True)))
    assert course.ended == {"a": "no thread"}
