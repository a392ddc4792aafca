"""What the two paths show of a peer, and what that means: pure, so any history can be tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmaconnect.protocol.health import (
    ANSWER_S,
    APART_S,
    APART_SILENT_S,
    ASK_AFTER_S,
    DOUBT_S,
    REDIAL_FAILED_S,
    REDIAL_S,
    SILENT_S,
    Evidence,
    Health,
    HealthState,
    is_quiet,
    judge,
    wishes,
)

ALIVE, SUSPECT, MOVED, DEAD = HealthState
BROKEN = {"broken": 10.0, "ended": 10.0, "heard": 9.0, "how": "reset"}


def evidence(**shown: object) -> Evidence:
    return Evidence(**{"heard": 0.0, **shown})  # type: ignore[arg-type]


def state(now: float, **shown: object) -> HealthState:
    return judge(evidence(**shown), now)[0]


def test_a_health_reads_as_a_sentence() -> None:
    assert str(Health(ALIVE)) == "alive"
    assert str(Health(SUSPECT, "it is silent", 3.0)) == "suspect: it is silent"


def test_nothing_speaks_against_a_peer_that_is_heard() -> None:
    assert judge(evidence(), DOUBT_S) == (ALIVE, "")
    assert wishes(evidence(), DOUBT_S) == (False, False, False, False)
    assert not is_quiet(evidence(), DOUBT_S)
    assert is_quiet(evidence(), DOUBT_S + 0.1)
    assert is_quiet(evidence(**BROKEN), 10.0)


def test_a_broken_side_channel_alone_ends_nothing() -> None:
    """Whoever is to dial, and over any type, as long as the rest keeps quiet."""
    for dials in (True, False):
        for answers in (True, False):
            assert state(10.2, dials=dials, answers=answers, **BROKEN) is SUSPECT
    assert wishes(evidence(dials=True, **BROKEN), 10.04) == (True, False, False, True)
    assert wishes(evidence(dials=False, **BROKEN), 10.04) == (False, False, False, True)
    e = evidence(dials=True, refusals=1, first_refusal=10.1, last_refusal=10.1, **BROKEN)
    e.mend(10.3)
    assert judge(e, 10.4) == (ALIVE, "")


# ---- its process is gone


def test_two_refusals_a_second_apart() -> None:
    refused = {"dials": True, "refusals": 2, "first_refusal": 10.1, **BROKEN}
    early, late = 10.0 + APART_S, 10.2 + APART_S
    assert state(12.0, answers=False, last_refusal=early, **refused) is SUSPECT
    assert state(12.0, answers=False, last_refusal=late, **refused) is DEAD
    assert state(12.0, answers=False, last_refusal=10.0 + APART_SILENT_S, in_order=True, **refused) is SUSPECT
    half = {"last_refusal": 10.2 + APART_SILENT_S, **refused}
    assert state(12.0, answers=False, in_order=True, **half) is DEAD, "the kernel has closed what its process had open"
    assert state(12.0, answers=False, **half) is SUSPECT, "it was reset on the way"
    assert state(12.0, answers=False, in_order=True, came=11.9, **half) is SUSPECT, "the data goes on"
    # over a type that answers that is asked first
    asking = evidence(last_refusal=late, **refused)
    assert wishes(asking, late).ask
    assert judge(asking, late)[0] is SUSPECT
    asking.asked = late
    assert judge(asking, late + ANSWER_S - 0.01)[0] is SUSPECT
    assert judge(asking, late + ANSWER_S + 0.01)[0] is DEAD
    soon = replace(asking, last_refusal=10.2 + APART_SILENT_S, asked=10.1)
    assert judge(soon, 10.2 + ANSWER_S)[0] is DEAD, "its device is silent as well"
    answered = replace(asking, asked=None, came=late + 0.1)
    assert judge(answered, 1000.0)[0] is SUSPECT, "its device answers: a listener that was closed"
    assert "refused" in judge(answered, 12.0)[1]


def test_one_refusal_and_a_failed_data_path() -> None:
    refused = {"dials": True, "refusals": 1, "first_refusal": 10.0, "last_refusal": 10.0, **BROKEN}
    dead, why = judge(evidence(failed="RETRY_EXC_ERR", **refused), 10.0)
    assert dead is DEAD
    assert why == (
        "the peer is gone: its side channel ended without a good-bye, and its address refuses, "
        "and the data path failed (RETRY_EXC_ERR): its process ended, or the network to it broke."
    )


def test_a_listener_that_does_not_know_it() -> None:
    unknown = {"dials": True, "unknown": "who listens there does not know the connection", **BROKEN}
    assert state(10.1, answers=False, **unknown) is DEAD
    assert state(10.1, asked=10.05, **unknown) is SUSPECT
    assert state(10.05 + ANSWER_S + 0.01, asked=10.05, **unknown) is DEAD
    assert state(10.1, failed="REM_ACCESS_ERR", **unknown) is DEAD
    assert state(99.0, came=98.5, **unknown) is SUSPECT


def test_of_one_that_cannot_be_dialled_a_refusal_says_nothing() -> None:
    deaf = {
        "dials": True, "deaf": True, "refusals": 9, "first_refusal": 10.0, "last_refusal": 20.0, "unknown": "other",
        "answers": False, **BROKEN,
    }  # fmt: skip
    assert state(9.0 + SILENT_S, **deaf) is SUSPECT
    assert state(9.1 + SILENT_S, **deaf) is DEAD, "neither path has brought anything"
    assert state(9.1 + SILENT_S, came=9.0 + SILENT_S, **deaf) is SUSPECT
    assert wishes(evidence(**{**deaf, "answers": True}), 10.1).ask


def test_who_has_to_dial_and_does_not() -> None:
    assert state(9.9 + REDIAL_S, answers=False, **BROKEN) is SUSPECT
    assert state(10.1 + REDIAL_S, answers=False, **BROKEN) is DEAD
    assert state(10.1 + REDIAL_S, answers=False, came=10.0 + REDIAL_S, **BROKEN) is SUSPECT, "the data goes on"
    assert state(10.1 + REDIAL_S, **BROKEN) is SUSPECT, "its device is to be asked"
    assert state(10.1 + REDIAL_S, asked=10.0, **BROKEN) is DEAD
    assert state(10.1 + REDIAL_S, asked=10.0, deaf=True, **BROKEN) is DEAD
    assert state(10.1 + REDIAL_S, answers=False, deaf=True, **BROKEN) is SUSPECT
    assert wishes(evidence(**BROKEN), 10.1 + ASK_AFTER_S).ask
    assert state(10.1 + REDIAL_FAILED_S, failed="RETRY_EXC_ERR", **BROKEN) is DEAD
    assert state(9.9 + REDIAL_FAILED_S, failed="RETRY_EXC_ERR", **BROKEN) is SUSPECT
    hung_up = {**BROKEN, "ended": None}
    assert state(9.0 + SILENT_S, answers=False, **hung_up) is SUSPECT, "this side hung up: it has all the time"


# ---- silence


def test_silence_is_first_doubted_and_ends_it_only_on_both_paths() -> None:
    assert state(DOUBT_S + 0.1) is SUSPECT
    assert wishes(evidence(dials=True), DOUBT_S + 0.1) == (True, False, False, True)
    assert wishes(evidence(dials=False), DOUBT_S + 0.1) == (False, True, False, True)
    assert state(SILENT_S, answers=False) is SUSPECT
    assert state(SILENT_S + 0.1, answers=False) is DEAD
    assert state(SILENT_S + 0.1, answers=False, came=SILENT_S) is SUSPECT
    assert wishes(evidence(), SILENT_S + 0.1).ask
    assert state(SILENT_S + 0.1) is SUSPECT
    assert state(SILENT_S + 0.2 + ANSWER_S, asked=SILENT_S + 0.1) is DEAD
    assert state(1000.0, came=999.5) is SUSPECT
    assert state(SILENT_S + 0.1, failed="RETRY_EXC_ERR") is DEAD


def test_a_failed_data_path_alone_is_named_as_such() -> None:
    asked = evidence(failed="RETRY_EXC_ERR")
    assert judge(asked, 1.0) == (SUSPECT, "the data path failed (RETRY_EXC_ERR): the peer is being asked")
    assert wishes(asked, 1.0).look
    asked.answered = True
    assert judge(asked, 1.0)[1].endswith("but the peer answers over its side channel: reconnect()")
    assert not wishes(asked, 1.0).look


def test_what_has_moved_here_comes_before_suspicion_and_after_death() -> None:
    moved = {"here": MOVED, "here_why": "the address 10.0.0.7 is gone"}
    assert judge(evidence(**moved), 1.0) == (MOVED, "the address 10.0.0.7 is gone")
    assert judge(evidence(here=SUSPECT, here_why="rxe0 port 1 is DOWN"), 1.0) == (SUSPECT, "rxe0 port 1 is DOWN")
    assert state(10.2, failed="RETRY_EXC_ERR", **moved, **BROKEN) is MOVED
    assert state(12.0, failed="RETRY_EXC_ERR", **moved, **BROKEN) is DEAD


# ---- any history

times = st.floats(0, 100)
maybe = st.none() | times
histories = st.builds(
    Evidence, dials=st.booleans(), answers=st.booleans(), heard=times, broken=maybe, ended=maybe,
    deaf=st.booleans(), refusals=st.integers(0, 3), first_refusal=times, last_refusal=times,
    unknown=st.sampled_from(["", "unknown"]), came=maybe, asked=maybe, failed=st.sampled_from(["", "RETRY_EXC_ERR"]),
    answered=st.booleans(), here=st.sampled_from([ALIVE, SUSPECT, MOVED]), here_why=st.just("here"),
)  # fmt: skip


@given(histories, st.floats(0, 30))
@settings(max_examples=1000)
def test_dead_needs_a_reason_on_both_paths(e: Evidence, later: float) -> None:
    now = max(100.0, e.heard) + later
    if judge(e, now)[0] is not DEAD:
        return
    # the side channel speaks against it ...
    assert e.broken is not None or e.ended is not None or now - e.heard > e.silent_max_s
    # ... and the data path does not speak for it
    if not e.failed:
        if e.answers:
            assert e.asked is not None
            assert now - e.asked > ANSWER_S
        else:
            assert e.came is None or now - e.came > REDIAL_S or e.came <= max(e.heard, e.broken or 0, e.ended or 0)


@given(histories, st.floats(0, 30))
@settings(max_examples=500)
def test_what_is_not_as_it_should_be_has_words_and_is_looked_at_again(e: Evidence, later: float) -> None:
    now = 100.0 + later
    what, why = judge(e, now)
    assert bool(why) == (what is not ALIVE)
    if what is SUSPECT and e.here is ALIVE and not (e.failed and e.answered):
        assert wishes(e, now).look or e.ended is not None


@given(histories)
@settings(max_examples=500)
def test_a_word_over_a_new_side_channel_clears_it(e: Evidence) -> None:
    e.mend(200.0)
    what, _ = judge(e, 200.1)
    assert what is (e.here if e.here is not ALIVE else SUSPECT if e.failed else ALIVE)


@pytest.mark.parametrize("dials", [True, False])
def test_the_data_path_is_asked_once_a_second_at_most(dials: bool) -> None:
    shown = evidence(dials=dials, unknown="unknown", **BROKEN)
    asked = []
    for tick in range(500):
        now = 10.0 + tick / 100
        if wishes(shown, now).ask:
            asked.append(now)
            shown.came = now
    assert len(asked) == 5
    assert all(b - a > 0.99 for a, b in pairwise(asked))
