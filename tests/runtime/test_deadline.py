"""One deadline for a whole call."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rdmaconnect.errors import ConnectTimeout, DeadlineExceeded
from rdmaconnect.runtime import deadline as deadline_module
from rdmaconnect.runtime.deadline import Deadline, wait_readable


class Clock:
    """Stands in for the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(deadline_module, "time", fake)
    return fake


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_deadline_is_spent_down_and_never_below_nothing(clock: Clock) -> None:
    deadline = Deadline(3)
    seen = []
    for clock.now in (100.0, 101.0, 102.9995, 103.0, 200.0):
        seen.append((deadline.left_s, deadline.left_ms))
    assert seen[0] == (3.0, 3000)
    assert seen[1] == (2.0, 2000)
    assert seen[2][1] == 1  # rounded up: rounding down would spin
    assert seen[3:] == [(0.0, 0), (0.0, 0)]
    assert deadline.waited_s == 100.0


def test_without_a_limit_nothing_is_spent(clock: Clock) -> None:
    for deadline in (Deadline(None), Deadline(math.inf)):
        clock.now += 1e9
        assert deadline.left_s == math.inf
        assert deadline.left_ms is None
        deadline.check("wait")


@pytest.mark.parametrize("seconds", [0, 0.0, 5, 1e-9, 1e10, 1e308])
def test_any_number_of_seconds_is_a_wait_that_poll_takes(seconds: float, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    deadline = Deadline(seconds)
    assert 0 <= (deadline.left_ms or 0) < 2**31
    wait_readable([pipe[0]], deadline)


@pytest.mark.parametrize("seconds", [-1, -1e-9, math.nan, -math.inf])
def test_less_than_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"deadline_s is .*: give seconds, 0 or more, or None"):
        Deadline(seconds)


@pytest.mark.parametrize("seconds", ["5", b"5", [5]])
def test_what_is_no_number_is_refused(seconds: Any) -> None:
    with pytest.raises(TypeError):
        Deadline(seconds)


def test_check_raises_the_class_given_with_stage_and_time(clock: Clock) -> None:
    deadline = Deadline(2.5, ConnectTimeout)
    clock.now += 2.4
    deadline.check("connect: wait")
    clock.now += 0.1
    with pytest.raises(ConnectTimeout, match=r"^connect: wait: no success within 2\.5 s\. Is it up\?$") as caught:
        deadline.check("connect: wait", "Is it up?")
    assert caught.value.stage == "connect: wait"
    assert caught.value.waited_s == pytest.approx(2.5)
    assert type(Deadline(0).exceeded("x")) is DeadlineExceeded


def test_waiting_ends_when_a_descriptor_can_be_read(pipe: tuple[int, int]) -> None:
    writer = threading.Timer(0.05, os.write, (pipe[1], b"x"))
    writer.start()
    started = time.monotonic()
    wait_readable([pipe[0]], Deadline(10))
    assert 0.03 < time.monotonic() - started < 5
    writer.join()


@pytest.mark.parametrize(("seconds", "slice_ms"), [(0.05, None), (None, 50), (10, 50), (0.05, 10000)])
def test_waiting_ends_with_the_deadline_or_the_slice(
    seconds: float | None, slice_ms: int | None, pipe: tuple[int, int]
) -> None:
    started = time.monotonic()
    wait_readable([pipe[0]], Deadline(seconds), slice_ms)
    assert 0.04 < time.monotonic() - started < 5
