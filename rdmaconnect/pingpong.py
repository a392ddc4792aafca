"""A ping-pong over a connection: messages there and back, contents checked, times measured.

The connecting side decides size and count and sends them first; the serving side echoes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import msgpack

from .connection import Connection
from .endpoint import MTU_BYTES, Endpoint, GidEntry
from .errors import RdmaConnectError, RemoteProtocolError

__all__ = ["PayloadError", "Report", "echo", "ping"]

#: bytes of the first message, which says what will come
PLAN_MAX = 256
# 251 is prime: no packet or page size is a multiple of it, so that a packet in the wrong place shows
_CYCLE = bytes(range(251)) * 2


class PayloadError(RdmaConnectError):
    """A message came back with other contents than it went out with."""


@dataclass(frozen=True)
class Report:
    """What a ping-pong measured.

    Args:
        qp_type: the type of the queue pairs.
        size: bytes of each message.
        iters: round trips.
        usec_per_iter: mean microseconds of a round trip, checking included.
        mbit_per_s: payload both ways, megabits in a second.
        latency_us: microseconds of a round trip: min, p50, p90, p99, max.
        connect_us: microseconds from the call of ``connect`` to its return.
        local, remote: the two ends.
        path_mtu: bytes.
        why: how the path was chosen.
    """

    qp_type: str
    size: int
    iters: int
    usec_per_iter: float
    mbit_per_s: float
    latency_us: dict[str, float]
    connect_us: float
    local: dict[str, object]
    remote: dict[str, object]
    path_mtu: int
    why: list[str] = field(default_factory=list)

    def asdict(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        return asdict(self)


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


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """min, p50, p90, p99 and max of at least one sample, by nearest rank."""
    ranked = sorted(samples)
    last = len(ranked) - 1
    ranks = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ranked[round(last * share)], 3) for name, share in ranks.items()}


def payload(size: int, iteration: int) -> bytes:
    """The contents of one message: they differ from one iteration to the next, in every byte."""
    start = iteration % 251
    return (_CYCLE[start : start + 251] * (size // 251 + 1))[:size]


def most_size(conn: Connection) -> int:
    """The longest message, in bytes, that can go there and come back."""
    return min(conn.local.recv_size, conn.max_send_size)


def ping(
    conn: Connection,
    *,
    size: int = 4096,
    iters: int = 1000,
    deadline_s: float | None = 30,
    tick: Callable[[int], None] | None = None,
) -> Report:
    """Send messages, wait for each to come back, check every byte.

    Args:
        conn: connected to a peer that runs :func:`echo`.
        size: bytes of each message, 0 to the smaller ``recv_size`` of both ends.
        iters: round trips, at least 1.
        deadline_s: seconds for each message.
        tick: called with the number of round trips done, after each.

    Returns:
        What was measured.

    Raises:
        ValueError: ``size`` is above what one end takes, or ``iters`` below 1.
        PayloadError: a message came back changed.
        RdmaConnectError: as ``send`` and ``recv``.
    """
    most = most_size(conn)
    if not 0 <= size <= most:
        raise ValueError(f"size is {size}: these two ends take 0 to {most} bytes in one message")
    if iters < 1:
        raise ValueError(f"iters is {iters}: give 1 or more")
    conn.send(msgpack.packb({"size": size, "iters": iters}), deadline_s=deadline_s)
    samples = []
    started = time.perf_counter()
    for i in range(iters):
        out = payload(size, i)
        before = time.perf_counter()
        conn.send(out, deadline_s=deadline_s)
        back = conn.recv(deadline_s=deadline_s)
        samples.append((time.perf_counter() - before) * 1e6)
        if back != out:
            raise PayloadError(_difference(out, back, i))
        if tick is not None:
            tick(i + 1)
    took_us = (time.perf_counter() - started) * 1e6
    return Report(
        qp_type=str(conn.local.qp_type),
        size=size,
        iters=iters,
        usec_per_iter=round(took_us / iters, 3),
        mbit_per_s=round(size * 8 * 2 * iters / took_us, 3),
        latency_us=percentiles(samples),
        connect_us=round(conn.connect_s * 1e6, 1),
        local=describe_end(conn.local, conn.path.local_gid),
        remote=describe_end(conn.peer, conn.path.remote_gid),
        path_mtu=MTU_BYTES[conn.path.path_mtu],
        why=list(conn.path.why),
    )


def _difference(out: bytes, back: bytes, iteration: int) -> str:
    if len(out) != len(back):
        return f"check round trip {iteration}: {len(out)} bytes went out, {len(back)} came back."
    at = next(i for i, (a, b) in enumerate(zip(out, back, strict=True)) if a != b)
    return f"check round trip {iteration}: byte {at} of {len(out)} went out as {out[at]} and came back as {back[at]}."


def echo(conn: Connection, *, deadline_s: float | None = 30) -> tuple[int, int]:
    """Send every message back, as many as the peer says first.

    Args:
        conn: connected to a peer that runs :func:`ping`.
        deadline_s: seconds for each message.

    Returns:
        (size in bytes, round trips).

    Raises:
        RemoteProtocolError: the first message does not say what will come.
        PayloadError: a message does not have the contents due.
        RdmaConnectError: as ``send`` and ``recv``.
    """
    first = conn.recv(deadline_s=deadline_s)
    try:
        plan = msgpack.unpackb(first[:PLAN_MAX])
        size, iters = plan["size"], plan["iters"]
        if type(size) is not int or type(iters) is not int or not 0 <= size <= most_size(conn) or iters < 1:
            raise ValueError(plan)
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        raise RemoteProtocolError("echo: the peer's first message is not a plan. Does it run ping?") from None
    for i in range(iters):
        data = conn.recv(deadline_s=deadline_s)
        conn.send(data, deadline_s=deadline_s)
        if data != payload(size, i):
            raise PayloadError(_difference(payload(size, i), data, i))
    return size, iters
