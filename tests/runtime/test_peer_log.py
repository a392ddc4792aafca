"""What peers can have logged."""

from __future__ import annotations

import logging

import pytest

from rdmaconnect.runtime.peer_log import BURST, PERIOD_S, Throttle, log


def logged(throttle: Throttle, at_s: float, words: str, *args: object, level: int = logging.WARNING) -> list[str]:
    """One line at a time of the clock: what comes of it."""
    record = logging.LogRecord("rdmaconnect.peers", level, __file__, 1, words, args, None)
    record.created = at_s
    return [record.getMessage()] if throttle.filter(record) else []


def test_no_kind_of_line_fills_the_log() -> None:
    throttle = Throttle()
    seen = [line for number in range(1000) for line in logged(throttle, 5.0, "%d came", number)]
    assert seen == [f"{number} came" for number in range(BURST)]
    assert logged(throttle, 5.0, "%s went", "one") == ["one went"]
    more = f" (and {1000 - BURST} more like it before)"
    assert logged(throttle, 5.0 + PERIOD_S, "%d came", 1) == [f"1 came{more}"]
    assert logged(throttle, 5.1 + PERIOD_S, "%d came", 2) == ["2 came"]


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    throttle = Throttle()
    for _ in range(2 * BURST):
        logged(throttle, 1e9, "came")
    assert logged(throttle, 1e9 - 3600, "came") == [f"came (and {BURST} more like it before)"]


def test_who_asks_for_all_lines_has_them() -> None:
    throttle = Throttle()
    assert all(logged(throttle, 1.0, "came", level=logging.DEBUG) for _ in range(100))


def test_it_is_on_the_logger_of_peers_and_that_is_a_part_of_the_library_s() -> None:
    assert any(isinstance(one, Throttle) for one in log.filters)
    assert log.parent is logging.getLogger("rdmaconnect")


@pytest.mark.parametrize("times", [1, 5])
def test_what_passes_comes_to_the_application(times: int, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(times):
        log.warning("%s came", "one")
    assert caplog.messages == ["one came"] * times
