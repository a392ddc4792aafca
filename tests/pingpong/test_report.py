"""What is printed and drawn of a ping-pong: widths, bars, figures, and the size of the picture."""

from __future__ import annotations

import random
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmaconnect.pingpong import OPS, Echoed, Report, Row, Samples, plot, sweep
from rdmaconnect.pingpong.report import bins, can_draw, csv_text, histogram, report_lines, served_lines, table, timeline
from rdmaconnect.session.trace import Mark

LONGEST = "fe80:1111:2222:3333:4444:5555:6666:7777"
END = {
    "device": "mlx5_bond_10", "port_num": 254, "gid_index": 255, "gid": LONGEST, "lid": 0xFFFF, "qp_num": 2**24 - 1,
    "psn": 2**24 - 1,
}  # fmt: skip
TIMES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=50)


def row(size: int, samples: list[float], ways: int = 2) -> Row:
    made = Samples()
    made.extend(samples)
    return Row.of(size, made, ways)


def report(*rows: Row, **fields: Any) -> Report:
    values: dict[str, Any] = {
        "qp_type": "RC", "op": "write", "connections": 4096, "rows": rows, "connect_us": 1e8, "local": END,
        "remote": END, "path_mtu": 4096, "why": [f"by GID: {LONGEST} (RoCE v2, mlx5_bond_10) to {LONGEST} (RoCE v2)"],
    }  # fmt: skip
    return Report(**values | fields)


# ---- text


@given(TIMES, st.sampled_from(list(OPS)), st.booleans(), st.sampled_from([0, 1, 4096, 2**30]))
@settings(max_examples=30)
def test_whatever_was_measured_it_fits_into_80_columns(samples: list[float], op: str, unicode: bool, size: int) -> None:
    lines = report_lines(report(row(size, samples, OPS[op].ways), op=op), unicode=unicode)
    assert max(map(len, lines)) <= 80
    assert unicode or all(line.isascii() for line in lines)
    assert all(line == line.rstrip() for line in lines)
    many = report_lines(report(*(row(n, samples) for n in sweep(2**30))), unicode=unicode)
    assert max(map(len, many)) <= 80
    assert max(map(len, served_lines(Echoed(op, (1, 2**30), 10**9, 4096)))) <= 80


def test_the_table_has_a_line_for_each_size() -> None:
    rows = [row(1, [float(n) for n in range(1, 101)]), row(2**30, [1234567.8], 1)]
    assert table(rows) == [
        "     bytes    iters    min us    p50 us    p90 us    p99 us    max us      MB/s",
        "         1      100      1.00     51.00     90.00     99.00    100.00      0.04",
        "1073741824        1   1234568   1234568   1234568   1234568   1234568    869.73",
    ]
    thinned = Row(8, 10**9, 1, 2, 3, 4, 5, 6, 7, every=4)
    assert table([thinned])[1:] == [
        "         8 1.00e+09      1.00      2.00      3.00      4.00      5.00      7.00",
        "(percentiles of one round trip in 4: the others are counted, not kept)",
    ]


@given(TIMES)
def test_every_sample_is_in_one_bin(samples: list[float]) -> None:
    found = bins(samples)
    assert sum(number for _, _, number in found) == len(samples)
    assert 1 <= len(found) <= 12
    for (low, high, _), (after, _, _) in pairwise(found):
        assert low < high == after
    assert found[0][0] == pytest.approx(max(min(samples), 1e-3))
    assert found[-1][1] == pytest.approx(max(max(samples), 1e-3))


def test_bins_grow_by_a_factor_and_bars_with_the_number() -> None:
    samples = [1.0] * 8 + [2.0] * 4 + [1000.0]
    lines = histogram(samples, unicode=True)
    assert len(lines) == 12
    assert lines[0] == f"     1.00 -      1.78 us       8 {'█' * 47}"
    assert lines[1] == f"     1.78 -      3.16 us       4 {'█' * 23}▌"
    assert lines[2] == "     3.16 -      5.62 us       0"
    assert lines[-1] == f"   562.34 -   1000.00 us       1 {'█' * 5}▉"
    assert histogram(samples, unicode=False)[0] == f"     1.00 -      1.78 us       8 {'#' * 47}"
    assert histogram([7.0] * 3, unicode=False) == [f"     7.00 -      7.00 us       3 {'#' * 47}"]
    assert histogram([], unicode=True) == []
    rare = histogram([1.0] * 100_000 + [9.0], unicode=True)
    assert rare[-1].endswith("1 ▏")  # what is there is seen


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False), (None, False), ("nonsense", False)]
)
def test_bars_are_drawn_where_the_terminal_can(encoding: str | None, can: bool) -> None:
    assert can_draw(encoding) is can


def test_a_timeline_shows_both_ends_within_80_columns() -> None:
    marks = [
        Mark("hello", -0.0012, "peer", "", 0.00005),
        Mark("port", 0.0, "local", "x" * 200),
        Mark("connected", 1000.0, "local", "1"),
    ]
    assert timeline(marks) == [
        "ms since this end began; the peer's by halving the round trip, +-0.05 ms",
        "        ms  local      peer",
        "     -1.20             hello",
        "      0.00  port       " + "x" * 54 + "...",
        "1000000.00  connected  1",
    ]
    assert timeline([])[0] == "ms since this end began"


def test_csv_has_the_columns_of_the_json() -> None:
    made = report(row(8, [1.0]), row(16, [2.0]))
    head, *rows = csv_text(made).splitlines()
    assert head.split(",")[3:] == list(made.asdict()["rows"][0])  # type: ignore[index]
    assert [line.split(",")[:5] for line in rows] == [
        ["RC", "write", "4096", "8", "1"],
        ["RC", "write", "4096", "16", "1"],
    ]


# ---- picture


def png_size(path: Path) -> tuple[int, int]:
    """Width and height as the file's header says (PNG, 11.2.2: IHDR comes first)."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert head[12:16] == b"IHDR"
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize("sizes", [[4096], [0], [0, 8], sweep(2**20)], ids=str)
def test_the_plot_is_a_png_of_the_promised_size(sizes: list[int], tmp_path: Path) -> None:
    chance = random.Random(1)
    rows = [row(size, [chance.lognormvariate(3, 0.3) + size / 100 for _ in range(50)]) for size in sizes]
    path = tmp_path / "plot.png"
    plot.save(report(*rows), str(path))
    assert png_size(path) == (plot.WIDTH, plot.HEIGHT) == (1200, 800)
    assert path.stat().st_size > 10_000
    assert "matplotlib.pyplot" not in sys.modules


def test_the_plot_of_one_size_shows_histogram_and_distribution_that_of_a_sweep_more() -> None:
    one = plot.figure(report(row(8, [1.0, 1.0])))
    assert [axes.get_title() for axes in one.axes] == ["8 bytes, 2 round trips", "distribution"]
    many = plot.figure(report(*(row(size, [float(size), size * 2.0]) for size in sweep(1024))))
    assert [axes.get_title() for axes in many.axes] == [
        "latency",
        "throughput, one round trip at a time",
        "distribution",
    ]
    latency = {line.get_label(): list(line.get_ydata()) for line in many.axes[0].lines}
    assert latency["least"] == [float(size) for size in sweep(1024)]
    assert len(many.axes[2].lines) <= 6


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"^a plot needs matplotlib .*: pip install matplotlib$"):
        plot.save(report(row(8, [1.0])), "/nonexistent/x.png")
