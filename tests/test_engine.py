"""When the engine asks for the next event: once, and anew for those that sleep on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rdmaconnect.engine import Engine


@pytest.fixture
def engine() -> Any:
    """An engine without a device: ``asked`` counts its requests for an event, ``events`` are those to take."""
    made: Any = Engine.__new__(Engine)
    made.lock, made._closers, made._armed, made.sleepers, made.asked, made.events = (
        threading.RLock(),
        [1],
        False,
        0,
        0,
        0,
    )

    def ask() -> None:
        made.asked += 1

    def drain() -> list[int]:
        came, made.events = made.events, 0
        return [1] * came

    made.cq, made.channel = SimpleNamespace(arm=ask), SimpleNamespace(drain=drain)
    return made


def test_an_event_that_is_due_is_not_asked_for_again(engine: Any) -> None:
    engine.arm()
    engine.arm()
    engine.heard()  # woken by something else
    engine.arm()
    assert engine.asked == 1
    engine.events = 1
    engine.heard()
    assert engine.asked == 1
    engine.arm()
    assert engine.asked == 2


def test_who_takes_an_event_asks_for_the_others_that_sleep(engine: Any) -> None:
    engine.arm()
    with engine.sleeping():
        engine.events = 1
        engine.heard()
        assert engine.asked == 2
    assert engine.sleepers == 0
    with pytest.raises(KeyError), engine.sleeping():
        raise KeyError
    assert engine.sleepers == 0


def test_after_the_end_nothing_is_asked(engine: Any) -> None:
    engine._closers.clear()
    engine.arm()
    engine.heard()
    assert engine.asked == 0
