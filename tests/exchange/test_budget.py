"""What one peer may ask of this process before it has to rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.exchange.budget import CREDIT, EACH_S, EARNED, REST_MAX_S, Budget


def test_an_honest_peer_never_rests() -> None:
    made, now = Budget(0.0), 0.0
    for cost in (1, 8, 1, 8, 1, 3, 1):  # hellos, two of which came to nothing, ready, a long frame, proof
        assert made.charge(cost, 100, now) == 0
    for _ in range(10_000):  # and then beats
        now += 1.0
        assert made.charge(1, 100, now) == 0


def test_a_flood_rests_the_longer_the_more_there_are() -> None:
    for others in (0, 1, 9):
        made = Budget(0.0)
        assert made.charge(CREDIT, others, 0.0) == 0
        assert made.charge(1, others, 0.0) == pytest.approx(EACH_S * (others + 1))
    assert Budget(0.0).charge(10**9, 0, 0.0) == REST_MAX_S


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=50))
def test_without_a_rest_nobody_takes_more_than_it_has_and_earns(steps: list[tuple[float, float]]) -> None:
    made, now, taken = Budget(0.0), 0.0, 0.0
    for cost, pause in steps:
        now += pause
        taken += cost
        if made.charge(cost, 0, now):
            break
        assert taken <= CREDIT + EARNED * now + 1e-6


def test_after_a_rest_it_goes_on_from_nothing() -> None:
    made = Budget(0.0)
    assert made.charge(CREDIT + 5, 0, 0.0) > 0
    assert made.charge(1, 0, 0.0) == pytest.approx(EACH_S)
    assert made.charge(1, 0, 1000.0) == 0
