"""How long a silent peer is waited for: the model, the table of the README, and what cannot be met."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.timers import DETECT_LEAST_S, DETECT_MOST_S, Timers, timers_for


def test_the_default_answers_within_two_seconds_on_hardware() -> None:
    timers = Options().timers
    assert timers == (14, 3) == timers_for(2)
    assert timers.most_s <= 2.0
    assert timers.least_s == pytest.approx(0.268, abs=0.001)


@given(st.floats(DETECT_LEAST_S, DETECT_MOST_S))
def test_what_is_asked_for_is_met_and_no_patience_given_away(detect_s: float) -> None:
    timers = timers_for(detect_s)
    assert timers.most_s <= detect_s
    assert 1 <= timers.retry_cnt <= 6
    assert Timers(timers.timeout + 1, timers.retry_cnt).most_s > detect_s


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (0.5, r"^detect_s is 0\.5: give 1 to 100000 seconds\. Less cannot be met: some adapters wait 0\.5 s for each"),
        (0, "^detect_s is 0: give 1 to"),
        (math.inf, "^detect_s is inf: give 1 to"),
        (math.nan, "^detect_s is nan: give 1 to"),
    ],
)
def test_what_cannot_be_met_is_refused(wrong: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options(detect_s=wrong)


@pytest.mark.parametrize("wrong", ["2", True, b"2", [2]])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    timers_for(1)
    with pytest.raises(TypeError, match=r"^detect_s is .*: give seconds"):
        Options(detect_s=wrong)


@pytest.mark.parametrize("besides", [{"timeout": 14}, {"retry_cnt": 0}, {"timeout": 0, "retry_cnt": 7}])
def test_it_is_given_or_the_timers_are(besides: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^detect_s is 3, which sets timeout and retry_cnt, and they are given too"):
        Options(detect_s=3, **besides)  # type: ignore[arg-type]


def test_one_timer_alone_may_be_given() -> None:
    assert Options(timeout=20).timers == (20, 3)
    assert Options(retry_cnt=6).timers == (14, 6)
    assert Options(timeout=0).timers.most_s == Options(timeout=0).timers.least_s == math.inf


def test_the_table_of_the_readme_is_what_the_model_says() -> None:
    rows = re.findall(r"^\| (\d+) \| ([0-9. to|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(code) for code, _ in rows] == [12, 14, 16, 18, 20]
    for code, cells in rows:
        for retry_cnt, cell in zip((1, 3, 6), cells.split(" | "), strict=True):
            timers = Timers(int(code), retry_cnt)
            assert cell == f"{timers.least_s:.2g} to {timers.most_s:.3g}", timers
