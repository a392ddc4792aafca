"""The stages of a handshake: what is noted, what the peer is told, and how two clocks are laid side by side."""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_ends import until
from hosts import ONE, World, world
from hypothesis import given
from hypothesis import strategies as st
from test_meet import Sides, sides

from rdmaconnect.protocol.handshake import Role
from rdmaconnect.runtime import deadline
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.session.trace import MAX_MARKS, Mark, Trace, shift

CALLER = ["port", "prepared", "hello", "reply", "path", "joined", "ready", "connected"]
CALLED = ["hello", "port", "prepared", "path", "reply", "ready", "joined", "connected"]


__all__ = ["sides", "world"]  # fixtures of the tests that they are from


def trace(role: Role = Role.CONNECTOR) -> tuple[Trace, Any]:
    """A trace, and the clock that it reads."""
    clock = SimpleNamespace(waited_s=0.0)
    return Trace(role, clock), clock


def stages(marks: tuple[Mark, ...], end: str) -> list[str]:
    return [mark.stage for mark in marks if mark.end == end]


# ---- one end


def test_a_stage_is_a_mark_and_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    made, clock = trace()
    with caplog.at_level(logging.DEBUG, "rdmaconnect"):
        made.mark("port", "%s for %s", "rxe0 port 1", "tcp://peer:1")
        clock.waited_s = 0.25
        made.mark("hello", "100% sent")
    assert made.marks() == (
        Mark("port", 0.0, "local", "rxe0 port 1 for tcp://peer:1"),
        Mark("hello", 0.25, "local", "100% sent"),
    )
    assert [record.getMessage() for record in caplog.records] == [
        "port: rxe0 port 1 for tcp://peer:1",
        "hello: 100% sent",
    ]
    assert {record.filename for record in caplog.records} == {"test_trace.py"}
    assert made.stages() == (("port", 0), ("hello", 250_000))


def test_many_failed_ways_leave_the_last_stages() -> None:
    made, clock = trace()
    for clock.waited_s in range(MAX_MARKS + 5):
        made.mark("again", "")
    assert [mark.at_s for mark in made.marks()] == list(range(5, MAX_MARKS + 5))
    assert len(made.stages()) == MAX_MARKS == 64


def test_a_peer_that_tells_nothing_leaves_what_it_had_told() -> None:
    made, _ = trace()
    made.mark("hello", "")
    made.hear(())
    assert stages(made.marks(), "peer") == []
    made.hear([("hello", 0)])
    made.hear(())
    assert stages(made.marks(), "peer") == ["hello"]


# ---- two clocks


TIMES = st.floats(0, 10)


@given(TIMES, st.lists(TIMES, min_size=5, max_size=5), st.sampled_from(Role))
def test_the_true_shift_is_within_the_bounds(start: float, steps: list[float], role: Role) -> None:
    """The listener's clock starts ``start`` seconds after the connector's; the messages take any time."""
    at, caller, called = start, {}, {}
    caller["hello"] = at - min(steps[0], start)
    called["hello"] = at - start
    called["reply"] = (at := at + steps[1]) - start
    caller["reply"] = (at := at + steps[2])
    caller["ready"] = (at := at + steps[3])
    called["ready"] = (at := at + steps[4]) - start
    mine, theirs, true = (caller, called, start) if role is Role.CONNECTOR else (called, caller, -start)
    by, within = shift(mine, theirs, role)
    assert by - within - 1e-9 <= true <= by + within + 1e-9
    assert 0 <= within <= (steps[2] + steps[4]) / 2 + 1e-9
    back, same = shift(theirs, mine, Role.LISTENER if role is Role.CONNECTOR else Role.CONNECTOR)
    assert (back, same) == (pytest.approx(-by), pytest.approx(within))


def test_a_hello_that_waited_for_its_listener_does_not_spoil_it() -> None:
    caller = {"hello": 0.0, "reply": 60.02, "ready": 60.03}
    called = {"hello": 0.0, "reply": 0.01, "ready": 0.04}
    assert shift(caller, called, Role.CONNECTOR) == (pytest.approx(60.0), pytest.approx(0.01))
    without = {stage: called[stage] for stage in ("hello", "reply")}
    assert shift(caller, without, Role.CONNECTOR) == (pytest.approx(30.005), pytest.approx(30.005))


def test_without_a_message_in_common_nothing_is_shifted() -> None:
    assert shift({"port": 1.0}, {"port": 5.0, "hello": 2.0}, Role.CONNECTOR) == (0.0, 0.0)


# ---- through the procedure


def test_connect_and_accept_see_the_stages_of_both(world: World) -> None:
    ends, first = world.both(count=3)
    here, there = ends[0].trace, first.trace
    assert ends[0]._end.conversation.trace is ends[2]._end.conversation.trace
    assert stages(here, "local") == CALLER
    assert stages(there, "local") == CALLED
    # without a proof, what was known with the last message
    assert stages(here, "peer") == CALLED[: CALLED.index("reply") + 1]
    assert stages(there, "peer") == CALLER[: CALLER.index("ready") + 1]
    for marks in (here, there):
        assert [mark.at_s for mark in marks] == sorted(mark.at_s for mark in marks)
        assert all(mark.within_s == 0 and mark.words for mark in marks if mark.end == "local")
        assert all(0 < mark.within_s < 1 and not mark.words for mark in marks if mark.end == "peer")
    assert 0 <= next(mark.at_s for mark in there if mark.stage == "hello" and mark.end == "local") < 0.5
    hello = {mark.end: mark for mark in here if mark.stage == "hello"}
    assert hello["local"].at_s <= hello["peer"].at_s + hello["peer"].within_s
    for end in (world.listener.accept(deadline_s=5) for _ in range(2)):
        end.close()


def test_with_a_proof_both_tell_of_it(world: World) -> None:
    here, there = world.both(probe=True)
    for end in (here, there):
        until(lambda end=end: "proof" in stages(end.trace, "peer"))  # type: ignore[misc]
        assert [stage for stage in stages(end.trace, "local") if stage.startswith("prov") or stage == "proof"] == [
            "proof", "proven",
        ]  # fmt: skip


def test_a_way_that_failed_is_in_the_trace(world: World) -> None:
    world.refuse("there", ONE[::-1], number=errno.ETIMEDOUT)
    end, other = world.both()
    here = end.trace
    assert stages(here, "local").count("hello") == 2
    (again,) = [mark for mark in here if mark.stage == "again"]
    assert "10.0.1.1" in again.words
    # the second hello began the listener's
    assert stages(here, "peer") == ["hello", "port", "prepared", "path", "reply"]
    assert stages(other.trace, "local") == CALLED
    reply = {mark.end: mark.at_s for mark in here if mark.stage == "reply"}
    asked = [mark.at_s for mark in here if mark.stage == "hello" and mark.end == "local"]
    assert asked[-1] <= reply["peer"] <= reply["local"]


def test_both_that_meet_see_both(software: Any, sides: Sides) -> None:
    ends = sides.meet()
    for end in ends:
        marks = end.trace
        assert {"hello", "reply", "path"} <= set(stages(marks, "local"))
        assert {"hello", "reply"} <= set(stages(marks, "peer"))
        assert stages(marks, "local")[-1] == "connected"
    for end in ends:
        end.close()
    until(lambda: not software.left())


def test_reconnect_begins_a_new_trace(world: World) -> None:
    here, there = world.both()
    before = here.trace
    again = world.threads.submit(there.reconnect, deadline_s=10)
    here.reconnect(deadline_s=10)
    again.result(10)
    assert here.trace != before
    assert stages(here.trace, "local").count("hello") == 1
    assert stages(there.trace, "local")[0] == "hello"


def test_the_clock_is_the_callers_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(deadline, "time", clock)
    made = Trace(Role.CONNECTOR, Deadline(None))
    clock.now = 7.5
    made.mark("port", "")
    assert made.marks()[0].at_s == 2.5
