"""What was measured, as lines of text at most 80 columns wide, and as CSV. Values in, text out."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence

from ..session.trace import Mark
from . import COLUMNS, OPS, Echoed, Rate, Report, Row

__all__ = [
    "bins",
    "can_draw",
    "csv_text",
    "ends_lines",
    "histogram",
    "rates",
    "report_lines",
    "served_lines",
    "table",
    "timeline",
]

WIDTH = 80
#: rows of a histogram
BINS = 12
#: eighths of a character cell, 0 to 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FIGURES = ("min_us", "p50_us", "p90_us", "p99_us", "max_us", "mb_per_s")
_HEADS = ("min us", "p50 us", "p90 us", "p99 us", "max us", "MB/s")


def can_draw(encoding: str | None) -> bool:
    """Whether a stream of that encoding takes the bars of :func:`histogram`."""
    try:
        _EIGHTHS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _fold(label: str, text: str) -> list[str]:
    """A label of 17 columns, and the text beside it, over as many lines as it takes."""
    return textwrap.wrap(f"{label:16} {text}", WIDTH, subsequent_indent=" " * 17) or [label]


def _figure(value: float) -> str:
    """A number in at most 9 columns."""
    return f"{value:.{2 if value < 1e5 else 1 if value < 1e6 else 0}f}" if value < 1e9 - 1 else f"{value:.2e}"


def ends_lines(local: Mapping[str, object], remote: Mapping[str, object]) -> list[str]:
    """Both ends, as ``ibv_rc_pingpong`` shows them."""
    lines = []
    for name, end in (("local", local), ("remote", remote)):
        where = f"LID {end['lid']:#06x}, QPN {end['qp_num']:#08x}, PSN {end['psn']:#08x}"
        lines += _fold(f"{name} address:", where)
        lines += _fold("", f"GID {end['gid'] or '-'} ({end['device']} port {end['port_num'] or '-'})")
    return lines


def report_lines(report: Report, *, unicode: bool) -> list[str]:
    """All of a report; with one size its histogram too."""
    lines = ends_lines(report.local, report.remote)
    for why in report.why:
        lines += _fold("path:", why)
    many = f", {report.connections} connections in turn" if report.connections > 1 else ""
    lines += _fold(
        "connected:", f"{report.connect_us / 1000:.1f} ms, {report.qp_type}, path MTU {report.path_mtu}{many}"
    )
    op = OPS[report.op]
    if report.outstanding:
        lines += _fold(f"{report.op}:", f"{op.one_way}; at most {report.outstanding} on their way on each connection")
        return [*lines, "", *rates(report.rates)]
    lines += _fold(f"{report.op}:", f"{op.says}; contents verified")
    if len(report.rows) == 1:
        (row,) = report.rows
        seconds, number = row.mean_us * row.iters / 1e6, op.ways * row.size * row.iters
        lines.append(f"{number} bytes in {seconds:.2f} seconds = {row.mb_per_s * 8:.2f} Mbit/sec")
        lines.append(f"{row.iters} iters in {seconds:.2f} seconds = {row.mean_us:.2f} usec/iter")
    lines += ["", *table(report.rows)]
    if len(report.rows) == 1:
        lines += ["", *histogram(report.rows[0].samples, unicode=unicode)]
    return lines


def served_lines(done: Echoed) -> list[str]:
    """What the serving side did."""
    verified = "" if done.op == "read" else ", contents verified"
    many = f" over {done.connections} connections in turn" if done.connections > 1 else ""
    sizes = f"{done.sizes[0]}" if len(done.sizes) == 1 else f"{min(done.sizes)} to {max(done.sizes)}"
    return _fold("served:", f"{done.iters} x {done.op} of {sizes} bytes{many}{verified}") if done.op else ["served: 0"]


def table(rows: Sequence[Row]) -> list[str]:
    """One line for each size, under a head."""
    lines = [f"{'bytes':>10} {'iters':>8}" + "".join(f" {head:>9}" for head in _HEADS)]
    for row in rows:
        iters = str(row.iters) if row.iters < 10**8 else f"{row.iters:.2e}"
        lines.append(f"{row.size:>10} {iters:>8}" + "".join(f" {_figure(getattr(row, f)):>9}" for f in _FIGURES))
    if any(row.every > 1 for row in rows):
        most = max(row.every for row in rows)
        lines.append(f"(percentiles of one round trip in {most}: the others are counted, not kept)")
    return lines


def rates(rows: Sequence[Rate]) -> list[str]:
    """One line for each size, under the head of ``ib_write_bw``."""
    lines = [f"{'#bytes':>10} {'#iterations':>12} {'BW average[MiB/sec]':>20} {'MsgRate[Mpps]':>14}"]
    return lines + [f"{r.size:>10} {r.iters:>12} {r.mib_per_s:>20.2f} {r.msg_per_s / 1e6:>14.6f}" for r in rows]


def bins(samples: Sequence[float], count: int = BINS) -> list[tuple[float, float, int]]:
    """(from, to, number) of bins that grow by a factor, and together hold all samples."""
    least, most = max(min(samples), 1e-3), max(max(samples), 1e-3)
    if most <= least * 1.001:
        return [(least, most, len(samples))]
    step = math.log(most / least) / count
    numbers = [0] * count
    for sample in samples:
        numbers[min(count - 1, max(0, int(math.log(max(sample, 1e-3) / least) / step)))] += 1
    edges = [least * math.exp(step * n) for n in range(count)] + [most]
    return list(zip(edges, edges[1:], numbers, strict=False))


def histogram(samples: Sequence[float], *, unicode: bool) -> list[str]:
    """How many round trips took how long, as bars; the bins grow by a factor."""
    if not samples:
        return []
    found = bins(samples)
    peak = max(number for _, _, number in found)
    lines = []
    for low, high, number in found:
        head = f"{_figure(low):>9} - {_figure(high):>9} us {number:>7} "
        room = WIDTH - len(head)
        lines.append((head + _bar(number / peak * room, unicode, number)).rstrip())
    return lines


def _bar(cells: float, unicode: bool, number: int) -> str:
    """A bar so many cells long; where there is something it is never empty."""
    if not unicode:
        return "#" * max(round(cells), min(number, 1))
    eighths = max(round(cells * 8), min(number, 1))
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def timeline(marks: Sequence[Mark]) -> list[str]:
    """Both ends' stages in the order of time, this end's on the left."""
    within = max((mark.within_s for mark in marks), default=0.0) * 1000
    exact = f"; the peer's by halving the round trip, +-{within:.2f} ms" if within else ""
    lines = [f"ms since this end began{exact}", f"{'ms':>10}  {'local':10} peer"]
    for mark in marks:
        place = f"{mark.stage:10} {mark.words}" if mark.end == "local" else f"{'':10} {mark.stage}"
        line = f"{mark.at_s * 1000:>10.2f}  {place}".rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...")
    return lines


def csv_text(report: Report) -> str:
    """A head and one row for each size, with what the JSON's rows have; RFC 4180, but with plain line ends."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = report.rates or report.rows
    writer.writerow(("qp_type", "op", "connections", *(rows[0].asdict() if rows else COLUMNS)))
    for row in rows:
        writer.writerow((report.qp_type, report.op, report.connections, *row.asdict().values()))
    return text.getvalue()
