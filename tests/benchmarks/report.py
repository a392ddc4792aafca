"""Prints what a run came to as a table, and writes it down: ``bench.json`` with every round, and ``bench.png``.

    report.py TURNS [--out FOLDER] [--small]

TURNS is the file that ``run.py`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from contests import FULL, SMALL, units
from goals import Verdict, gather, goals, judge, table

#: inches at 100 dots each
WIDTH, HEIGHT = 14.0, 9.0


def document(found: Mapping[str, Sequence[float]], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "figures": {
            name: {"unit": units(name), "median": median(values), "rounds": list(values)}
            for name, values in found.items()
        },
        "goals": [
            {
                "goal": verdict.goal.words, "of": verdict.goal.of, "against": verdict.goal.against,
                ("at_least" if verdict.goal.at_least else "at_most"): verdict.goal.limit, "measured": verdict.value,
                "least": verdict.least,
                "greatest": verdict.greatest, "met": verdict.met,
            }
            for verdict in verdicts
        ],
    }  # fmt: skip


def growth(found: Mapping[str, Sequence[float]]) -> dict[str, list[tuple[int, float]]]:
    """Whose -> (connections in one exchange, us of each), in order."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, values in found.items():
        if match := re.fullmatch(r"growth: (.+), (\d+)", name):
            curves.setdefault(match[1], []).append((int(match[2]), median(values)))
    return {whose: sorted(points) for whose, points in curves.items()}


def draw(found: Mapping[str, Sequence[float]], verdicts: Sequence[Verdict], path: Path) -> None:
    """Write a PNG: how far each figure is from its goal, and what each of many connections costs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = growth(found)
    made = Figure(figsize=(WIDTH, HEIGHT), dpi=100, layout="constrained")
    made.suptitle("rdmaconnect: measured against its goals, in one run")
    axes = made.subplots(1, 2 if curves else 1, squeeze=False, width_ratios=[3, 2] if curves else None)[0]
    shown = [verdict for verdict in reversed(verdicts) if verdict.value > 0]
    shares = [(verdict.value / verdict.goal.limit) ** (-1 if verdict.goal.at_least else 1) for verdict in shown]
    bars = axes[0].barh([verdict.goal.words for verdict in shown], shares)
    for bar, verdict in zip(bars, shown, strict=True):
        bar.set_color("tab:green" if verdict.met else "tab:red")
        axes[0].annotate(f" {verdict.value:.3g}", (bar.get_width(), bar.get_y() + bar.get_height() / 2), va="center")
    axes[0].axvline(1, color="black")
    axes[0].set(xscale="log", xlabel="measured, as a multiple of the goal (1: just met)")
    axes[0].margins(x=0.15)
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter("")
    if curves:
        for whose, points in curves.items():
            axes[1].plot(*zip(*points, strict=True), marker="o", label=whose)
        axes[1].set(xscale="log", yscale="log", xlabel="connections in one exchange", ylabel="us per connection")
        axes[1].grid(alpha=0.3, which="both")
        axes[1].legend()
        for axis in (axes[1].xaxis, axes[1].yaxis):
            axis.set_major_formatter("{x:,g}")
    FigureCanvasAgg(made).print_png(path)


def main() -> int:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("turns", type=Path)
    parser.add_argument("--out", type=Path, help="a folder; made if it is not there")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    found = gather(map(json.loads, options.turns.read_text().splitlines()))
    verdicts = judge(goals(SMALL if options.small else FULL), found)
    print(table(found, verdicts))
    if options.small:
        print("\nA small run shows that everything works: its figures mean nothing.")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.json").write_text(json.dumps(document(found, verdicts), indent=1) + "\n")
        draw(found, verdicts, options.out / "bench.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
