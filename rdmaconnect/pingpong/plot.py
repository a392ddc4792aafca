"""A report as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import Report, Row
from .report import bins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HEIGHT", "WIDTH", "figure", "require", "save"]

#: pixels
WIDTH, HEIGHT = 1200, 800
_DPI = 100
#: distributions in one picture, at most: evenly chosen of the sizes
_CURVES = 6
_SHARES = (("p99_us", "99 %"), ("p90_us", "90 %"), ("p50_us", "50 %"), ("min_us", "least"))


def require() -> None:
    """Is matplotlib there? Better asked before anything is measured.

    Raises:
        ValueError: it is not; says how to get it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise ValueError(f"a plot needs matplotlib ({e}): pip install matplotlib") from None


def save(report: Report, path: str) -> None:
    """Write a report as a PNG of ``WIDTH`` x ``HEIGHT`` pixels.

    With one size: its histogram and its distribution. With several: latency and throughput over the size,
    and the distributions of some.

    Args:
        report: with at least one row, and its samples.
        path: the file; one that is there is replaced.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure(report))
    canvas.print_png(path)  # savefig would heed a user's matplotlibrc: cut it, scale it


def figure(report: Report) -> Figure:
    """The picture itself. No state of pyplot is used or changed."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, layout="constrained")
    many = f", {report.connections} connections" if report.connections > 1 else ""
    ends = f"{report.local['device']} to {report.remote['device']}"
    made.suptitle(f"rdmaconnect pingpong: {report.op} over {report.qp_type}, {ends}, MTU {report.path_mtu}{many}")
    if len(report.rows) == 1:
        left, right = made.subplots(1, 2)
        _histogram(left, report.rows[0])
        _distributions(right, report.rows)
    else:
        places = made.subplot_mosaic([["latency", "throughput"], ["distribution", "distribution"]])
        _latency(places["latency"], report.rows)
        _throughput(places["throughput"], report.rows)
        _distributions(places["distribution"], report.rows)
    return made


def _in_us(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _histogram(axes: Any, row: Row) -> None:
    found = bins(row.samples, 50)
    edges = [found[0][0] * 0.999, *(high for _, high, _ in found[:-1]), found[-1][1] * 1.001]
    axes.stairs([number for _, _, number in found], edges, fill=True)
    axes.set(xscale="log", xlabel="round trip, us", ylabel="number", title=f"{row.size} bytes, {row.iters} round trips")
    _in_us(axes.xaxis)


def _distributions(axes: Any, rows: Sequence[Row]) -> None:
    step = max(1, -(-len(rows) // _CURVES))
    for row in rows[::step]:
        ranked = sorted(row.samples)
        axes.step(ranked, [(n + 1) / len(ranked) * 100 for n in range(len(ranked))], label=f"{row.size} bytes")
    axes.set(xscale="log", xlabel="round trip, us", ylabel="% that took no longer", title="distribution")
    _in_us(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend()


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    sizes = [row.size for row in rows]
    for name, label in _SHARES:
        axes.plot(sizes, [getattr(row, name) for row in rows], marker=".", label=label)
    axes.set(xlabel="bytes", ylabel="round trip, us", title="latency", yscale="log")
    _in_us(axes.yaxis)
    axes.set_xscale("symlog" if 0 in sizes else "log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if row.size and row.mb_per_s]
    axes.plot([row.size for row in shown], [row.mb_per_s for row in shown], marker=".")
    axes.set(xlabel="bytes", ylabel="MB/s", title="throughput, one round trip at a time", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
