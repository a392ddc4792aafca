"""What a ping-pong measured."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..agreement.endpoint import Endpoint, GidEntry

__all__ = ["COLUMNS", "Rate", "Report", "Row", "Samples", "describe_end", "percentiles"]

#: samples that are kept of one size, at most
KEPT = 2**18
_RANKS = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Samples:
    """Microseconds of round trips, in bounded memory.

    All are kept up to ``KEPT``; from there on every second is let go, then every second of the rest, and so
    on, so that what is kept is spread evenly over the run. Number, sum, least and greatest stay exact.

    Attributes:
        count: how many were added.
        total: their sum.
        every: of how many one is kept.
        kept: those that are.
    """

    def __init__(self) -> None:
        self.count, self.every = 0, 1
        self.total = 0.0
        self.kept = array("d")
        self._least, self._most = float("inf"), 0.0

    def extend(self, more: Sequence[float]) -> None:
        """Add some."""
        if not more:
            return
        skip = -self.count % self.every
        self.count += len(more)
        self.total += sum(more)
        self._least, self._most = min(self._least, min(more)), max(self._most, max(more))
        self.kept.extend(islice(more, skip, None, self.every))
        while len(self.kept) > KEPT:
            self.kept = self.kept[::2]
            self.every *= 2

    def percentiles(self) -> dict[str, float]:
        """min, p50, p90, p99 and max of at least one sample."""
        return {**percentiles(self.kept), "min": round(self._least, 3), "max": round(self._most, 3)}


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """min, p50, p90, p99 and max of at least one sample, by nearest rank."""
    ranked = sorted(samples)
    last = len(ranked) - 1
    return {name: round(ranked[round(last * share)], 3) for name, share in _RANKS.items()}


@dataclass(frozen=True)
class Row:
    """What was measured with one size.

    Args:
        size: bytes of each payload.
        iters: round trips.
        min_us, p50_us, p90_us, p99_us, max_us: microseconds of a round trip.
        mean_us: their mean.
        mb_per_s: payload in 10**6 bytes a second of these round trips: both ways; for ``read`` one.
        every: the percentiles are of one round trip in so many: 1 up to 262144 of them.
        samples: the microseconds that were kept, in the order of time.
    """

    size: int
    iters: int
    min_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    mean_us: float
    mb_per_s: float
    every: int = 1
    samples: Sequence[float] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, size: int, samples: Samples, ways: int) -> Row:
        """Sum up at least one sample; the payload travelled ``ways`` times in each."""
        ranks = {f"{name}_us": value for name, value in samples.percentiles().items()}
        rate = round(size * ways * samples.count / samples.total, 3) if samples.total else 0.0
        mean = round(samples.total / samples.count, 3)
        return cls(size, samples.count, **ranks, mean_us=mean, mb_per_s=rate, every=samples.every, samples=samples.kept)

    def asdict(self) -> dict[str, object]:
        """The same as plain values, without the samples."""
        return {name: getattr(self, name) for name in COLUMNS}


#: the names of a row's figures, in order
COLUMNS = tuple(name for name in Row.__dataclass_fields__ if name != "samples")


@dataclass(frozen=True)
class Rate:
    """What was measured one way with one size.

    Args:
        size: bytes of each payload.
        iters: how many.
        seconds: from the first post to the end of the last.
        mib_per_s: payload in 2**20 bytes a second.
        msg_per_s: payloads a second.
    """

    size: int
    iters: int
    seconds: float
    mib_per_s: float
    msg_per_s: float

    @classmethod
    def of(cls, size: int, iters: int, seconds: float) -> Rate:
        """Of at least one payload."""
        rate = iters / max(seconds, 1e-9)
        return cls(size, iters, round(seconds, 6), round(rate * size / 2**20, 6), round(rate, 3))

    def asdict(self) -> dict[str, object]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Report:
    """What a ping-pong measured.

    Args:
        qp_type: the type of the queue pairs.
        op: what was done: ``send``, ``write``, ``write_imm`` or ``read``.
        connections: how many were used in turn.
        rows: one for each size, of round trips.
        connect_us: microseconds from the call of ``connect`` to its return.
        local, remote: the two ends of the first connection.
        path_mtu: bytes.
        why: how the path was chosen.
        outstanding: how many were on their way at once on each connection, one way; 0 for round trips.
        rates: instead of ``rows``, one for each size.
    """

    qp_type: str
    op: str
    connections: int
    rows: tuple[Row, ...]
    connect_us: float
    local: dict[str, object]
    remote: dict[str, object]
    path_mtu: int
    why: list[str] = field(default_factory=list)
    outstanding: int = 0
    rates: tuple[Rate, ...] = ()

    def asdict(self) -> dict[str, object]:
        """The same as plain values, for JSON; without the samples."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "rows": [row.asdict() for row in self.rows],
            "rates": [rate.asdict() for rate in self.rates],
        }


def describe_end(end: Endpoint, gid: GidEntry | None) -> dict[str, object]:
    """One end as plain values: device, port, GID, LID, queue pair and PSN."""
    return {
        "device": end.port.device,
        "port_num": end.port.port_num,
        "gid_index": gid.gid_index if gid else None,
        "gid": str(gid.gid) if gid else None,
        "lid": end.port.lid,
        "qp_num": end.qp_num,
        "psn": end.psn,
    }
