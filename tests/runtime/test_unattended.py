"""A procedure that nobody waits for: where its steps and its waits take place, and what breaks into it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rdmaconnect.errors import StateError
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Call, Interrupt, Procedure, Wait
from rdmaconnect.runtime.unattended import run_unattended
from rdmaconnect.runtime.wakeup import Signal
from rdmaconnect.runtime.workers import Workers


@pytest.fixture
def workers() -> Workers:
    return Workers(2)


def run(procedure: Procedure[Any], workers: Workers, interrupt: Interrupt | None = None) -> Any:
    return asyncio.run(run_unattended(procedure, workers, interrupt or Interrupt()))


def test_its_steps_are_taken_by_workers_and_its_waits_by_nobody(workers: Workers) -> None:
    threads: list[threading.Thread] = []

    def procedure() -> Procedure[str]:
        for _ in range(3):
            threads.append(threading.current_thread())
            yield Wait(Deadline(0.01))
        threads.append((yield Call(threading.current_thread)))
        return "done"

    assert run(procedure(), workers) == "done"
    assert len(threads) == 4
    assert threading.current_thread() not in threads


def test_a_change_ends_a_wait_and_an_error_is_its_own(workers: Workers) -> None:
    signal = Signal()

    def procedure() -> Procedure[None]:
        threading.Timer(0.01, signal.notify).start()
        yield Wait(Deadline(10), changes=((signal, 0),))
        with pytest.raises(ZeroDivisionError):
            yield Call(lambda: 1 // 0)
        raise KeyError("what it met")

    began = Deadline(None)
    with pytest.raises(KeyError, match="what it met"):
        run(procedure(), workers)
    assert began.waited_s < 5


def test_it_is_broken_into_where_it_waits(workers: Workers) -> None:
    interrupt, cleaned = Interrupt(), []

    def procedure() -> Procedure[None]:
        threading.Timer(0.01, interrupt.set, [StateError("it was closed.")]).start()
        try:
            yield Wait(Deadline(10))
        finally:
            cleaned.append(True)

    with pytest.raises(StateError, match="it was closed"):
        run(procedure(), workers, interrupt)
    assert cleaned == [True]
