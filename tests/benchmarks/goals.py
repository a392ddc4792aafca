"""What the figures should be to each other, and whether they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from contests import Scale, units


@dataclass(frozen=True)
class Goal:
    """One figure against another.

    Args:
        words: for people.
        of, against: names of figures.
        limit: the greatest quotient; or, with ``minus``, the greatest difference.
        minus: whether it is the difference that counts.
        at_least: whether ``limit`` is the least instead: more is better.
    """

    words: str
    of: str
    against: str
    limit: float
    minus: bool = False
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Whether that is good enough."""
        return value >= self.limit if self.at_least else value <= self.limit


def goals(scale: Scale) -> tuple[Goal, ...]:
    """Those whose feature there is."""
    many = f"connect_many({scale.count})"
    steps = [n for n in scale.growth if n > 1]
    return (
        Goal(f"{many}, probe off, against the C floor", "batch: connect_many, no probe", "batch: C, verbs alone", 2.0),
        Goal(f"{many}, probe on, against PyPI ibverbs batch", "batch: connect_many", "batch: ibverbs", 1.0),
        Goal(
            "connect(), second and later, probe off, against PyPI ibverbs each", "each: connect, no probe",
            "each: ibverbs", 0.7,
        ),
        Goal("connect(), second and later, probe on, against the same", "each: connect", "each: ibverbs", 1.0),
        Goal("a pool's hit against a cold connect(), probe on", "each: a pool's hit", "each: connect", 0.4),
        Goal("first connect() of a process against the same peer's first", "first: connect", "first: ibverbs", 1.5),
        Goal(
            f"{many}, probe off, against cmtime -c {scale.count}, its steps", "batch: connect_many, no probe",
            "batch: cmtime", 0.5,
        ),
        Goal(f"close of {scale.count} against ibv_destroy_qp", "close: close_many()", "close: ibv_destroy_qp", 3.0),
        Goal("ping-pong, object layer, against ibv_rc_pingpong", "pingpong: objects", "pingpong: ibv_rc_pingpong", 1.1),
        Goal("the same against PyPI ibverbs", "pingpong: objects", "pingpong: ibverbs", 0.95),
        Goal("the same against pyverbs", "pingpong: objects", "pingpong: pyverbs", 0.95),
        Goal("send and recv against the object layer", "pingpong: send and recv", "pingpong: objects", 1.15),
        Goal(
            "writes of 1 MiB, 16 outstanding, MiB/s, against ib_write_bw", "write: conn.post_write, 16 outstanding",
            "write: ib_write_bw, 16 outstanding", 0.95, at_least=True,
        ),
        Goal(
            f"{scale.storm} connectors at one listener against {scale.storm} of a bulk",
            "storm: one of the connectors", "storm: one of a bulk", 3.0,
        ),
        Goal(
            "memory per further connection beyond the C loop's, KiB", "memory: connect_many", "memory: C", 8.0,
            minus=True,
        ),
        Goal("import rdmaconnect against import zmq, msgpack", "import: rdmaconnect", "import: zmq, msgpack", 2.0),
        *(
            Goal(
                f"growth: each of {more} against each of {fewer}", f"growth: connect_many, {more}",
                f"growth: connect_many, {fewer}", 1.3,
            )
            for fewer, more in pairwise(steps)
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What a goal came to.

    Args:
        goal: it.
        value: of the medians: the quotient, or the difference.
        least, greatest: of the rounds, each by itself.
        met: whether ``value`` is good enough.
    """

    goal: Goal
    value: float
    least: float
    greatest: float
    met: bool


def judge(wanted: Iterable[Goal], found: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """Of each goal whose two figures were measured.

    Args:
        wanted: the goals.
        found: figure -> its value in each round.
    """
    verdicts = []
    for goal in wanted:
        of, against = found.get(goal.of, ()), found.get(goal.against, ())
        if of and against:
            each = [_compare(goal, a, b) for a, b in zip(of, against, strict=False)]
            value = _compare(goal, median(of), median(against))
            verdicts.append(Verdict(goal, value, min(each), max(each), goal.met(value)))
    return verdicts


def _compare(goal: Goal, of: float, against: float) -> float:
    return of - against if goal.minus else of / against


def gather(turns: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """figure -> its value in each round, of the lines that the runner wrote."""
    found: dict[str, list[float]] = {}
    for turn in turns:
        if "figure" in turn:
            found.setdefault(turn["figure"], []).append(turn["value"])
    return found


def table(found: Mapping[str, Sequence[float]], verdicts: Iterable[Verdict]) -> str:
    """Both as Markdown."""
    lines = ["| figure | median | least to greatest | rounds |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        spread = f"{_number(min(values))} to {_number(max(values))}"
        lines.append(f"| {name} | {_number(median(values))} {units(name)} | {spread} | {len(values)} |")
    lines += ["", "| goal | limit | measured | round by round | |", "|---|--:|--:|--:|---|"]
    for verdict in verdicts:
        spread = f"{_number(verdict.least)} to {_number(verdict.greatest)}"
        met = "met" if verdict.met else "not met"
        limit = f"at {'least' if verdict.goal.at_least else 'most'} {verdict.goal.limit:g}"
        lines.append(f"| {verdict.goal.words} | {limit} | {_number(verdict.value)} | {spread} | {met} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
