"""What is measured, as data, and how a figure comes from what the programs answered. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

Reply = Mapping[str, Any]
#: (the listening side's answer, the connecting side's, how many) -> the figure
Figure = Callable[[Reply, Reply, int], float]

MESSAGE = 64
MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Args:
        count: connections of one exchange.
        ones: how often in a turn what makes one connection is done; the turn's figure is their mean.
        iters: messages to and fro.
        writes: RDMA writes.
        storm: connectors at one listener.
        growth: connections of one exchange, each a step.
    """

    count: int = 200
    ones: int = 5
    iters: int = 1000
    writes: int = 50
    storm: int = 240
    growth: tuple[int, ...] = (1, 10, 100, 1000, 4000)


FULL = Scale()
SMALL = Scale(count=8, ones=1, iters=50, writes=16, storm=6, growth=(1, 4))


# ---- figures of what the programs answer: CLOCK_MONOTONIC is the same on both nodes


def connecting(listen: Reply, connect: Reply, count: int) -> float:
    """us per connection, from the connector's call until both sides have all of them."""
    return (max(listen["end"], connect["end"]) - connect["begin"]) / 1e3 / count


def verbs(listen: Reply, connect: Reply, count: int) -> float:
    """us per connection in the verbs that create a queue pair and move it, of the slower side; both do it at once."""
    return max(side["verbs_ns"] for side in (listen, connect)) / 1e3 / count


def closing(listen: Reply, connect: Reply, count: int) -> float:
    """us per connection, of the slower side."""
    return max(side["end"] - side["begin"] for side in (listen, connect)) / 1e3 / count


def tripping(listen: Reply, connect: Reply, count: int) -> float:
    """us per round trip, as the side that begins sees it."""
    return (connect["end"] - connect["begin"]) / 1e3 / count


def writing(listen: Reply, connect: Reply, count: int) -> float:
    """MiB/s of writes of a MiB each."""
    return count / ((connect["end"] - connect["begin"]) / 1e9)


def resident(listen: Reply, connect: Reply, count: int) -> float:
    """KiB that a process has more for each further connection, receives apart: of the side that took more."""
    more = max(side["rss_after"] - side["rss_before"] for side in (listen, connect))
    return (more / count - connect["receives"]) / 1024


def mean(values: list[float]) -> float:
    """What a turn's repetitions come to."""
    return fmean(values)


def both(listen: Reply, connect: Reply, of: Callable[[Reply], float], count: int) -> float:
    """us per connection of both nodes together."""
    return (of(listen) + of(connect)) / 1e3 / count


def profile(what: str, **verbs: tuple[str, ...]) -> dict[str, Figure]:
    """What time goes to: elapsed, what both nodes took of their processors, and of that what they spent in verbs.

    The rest of the processors' time is Python, the C library and the kernel's TCP. The two nodes have a processor each,
    so that each figure but the first may come to twice what has elapsed.

    Args:
        what: was done, for the figures' names.
        **verbs: a name, and the verbs that it stands for; all others are told as one.
    """
    named = {verb for group in verbs.values() for verb in group}

    def in_verbs(which: Callable[[str], bool]) -> Figure:
        return lambda listen, connect, count: both(
            listen, connect, lambda side: sum(ns for verb, ns in side["spent"].items() if which(verb)), count
        )

    figures: dict[str, Figure] = {
        f"profile: {what}, elapsed": connecting if "close" not in what else closing,
        f"profile: {what}, processors": lambda listen, connect, count: both(
            listen, connect, lambda side: side["cpu_ns"], count
        ),
    }
    for name, group in verbs.items():
        figures[f"profile: {what}, {name}"] = in_verbs(frozenset(group).__contains__)
    return figures | {f"profile: {what}, other verbs": in_verbs(lambda verb: verb not in named)}


#: the verbs that a profile tells by name
MAKING = {
    "create_qp": ("ibv_create_qp",), "modify_qp": ("ibv_modify_qp",), "post_recv": ("ibv_post_recv",),
    "reg_mr and dereg_mr": ("ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_dereg_mr"),
}  # fmt: skip


# ---- figures of what others' programs print


def cmtime(text: str, count: int) -> float:
    """us per connection: the sum of the steps that make it, of the client's table."""
    _found(r"(?m)^connect\s*:\s*([\d.]+)", text)
    steps = {name: float(total) for name, total in re.findall(r"(?m)^(\w[\w ]*\w)\s*:\s*([\d.]+)", text)}
    return sum(total for name, total in steps.items() if name in CM_STEPS) * 1e3 / count


#: the steps of ``cmtime`` that make a connection; "bind addr" is there with ``-b`` alone
CM_STEPS = ("create id", "bind addr", "resolve addr", "resolve route", "create qp", "connect")


def rc_pingpong(text: str, count: int) -> float:
    """us per round trip, of ``ibv_rc_pingpong``, which says where what came is not what was sent."""
    if "invalid data" in text:
        raise ValueError(f"a message came changed: {text}")
    return _found(r"= ([\d.]+) usec/iter", text)


def write_bw(text: str, count: int) -> float:
    """MiB/s on average, of ``ib_write_bw``."""
    return _found(rf"(?m)^\s*{MIB}\s+\d+\s+[\d.]+\s+([\d.]+)", text)


def importing(text: str, count: int) -> float:
    """ms, as the interpreter says them itself."""
    return _found(r"([\d.]+)", text) / 1e6


def _found(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} is not in what was printed: {text.strip()[-500:]!r}")
    return float(match[1])


# ---- turns


@dataclass(frozen=True)
class Turn:
    """What one of the contestants does in each round.

    Args:
        program: one of :data:`TOLD`, or of :data:`COMMANDS`.
        words: what both sides are told, a template for the numbers of a :class:`Scale`; of a command, the
            number that is ``count`` of its figures, and what its command lines need.
        figures: name -> how it is made of the answers.
        after: the same for the ``close`` that follows; without, what was made is closed all the same.
        repeat: how often it is done in a turn: a template too.
        instance: processes of its own, under this name.
        fresh: new processes each time.
    """

    program: str
    words: str
    figures: Mapping[str, Figure | Callable[[str, int], float]]
    after: Mapping[str, Figure] = field(default_factory=dict)
    repeat: str = "1"
    instance: str = ""
    fresh: bool = False


@dataclass(frozen=True)
class Contest:
    """Turns that are taken one after the other in each round, so that they meet the same machine.

    Args:
        about: what it is, for people.
        turns: who takes part.
        warm: whether a round is played before those that count.
    """

    about: str
    turns: tuple[Turn, ...]
    warm: bool = True


#: the programs that are told line by line what to do; both sides live through all rounds
TOLD = ("floor", "ibverbs", "pyverbs", "ours")


@dataclass(frozen=True)
class Command:
    """A program of others.

    Args:
        connect: the command line of the connecting side.
        listen: that of the listening side; none where there is only one side.
        lasts: whether the listening side goes on until it is ended.
    """

    connect: str
    listen: str = ""
    lasts: bool = False


COMMANDS = {
    "cmtime": Command("cmtime -s {address} -c {count}", "cmtime -c {count}", lasts=True),
    "ibv_rc_pingpong": Command(
        "ibv_rc_pingpong -d {connector} -g {gid} -s {message} -n {count} -c {address}",
        "ibv_rc_pingpong -d {listener} -g {gid} -s {message} -n {count} -c",
    ),
    "ib_write_bw": Command(
        "ib_write_bw -d {connector} -x {gid} -s {mib} -n {count} -t {depth} -F {address}",
        "ib_write_bw -d {listener} -x {gid} -s {mib} -n {count} -t {depth} -F",
    ),
    "python": Command("{python} -c '{statement}'"),
}
_IMPORT = "import time; t = time.perf_counter_ns(); import {}; print(time.perf_counter_ns() - t)"


def contests(scale: Scale) -> dict[str, Contest]:
    """All of them, in the order in which they are played."""
    return {
        "first": Contest(
            "the first connection of a process, device opened, no probe and with it",
            (
                Turn("ibverbs", "first one 1 {single}", {"first: ibverbs": connecting}, instance="first"),
                Turn(
                    "ours", "first one_unproven 1 {single}", {"first: connect, no probe": connecting}, instance="first"
                ),
                Turn("ours", "first one 1 {single}", {"first: connect": connecting}, instance="first"),
            ),
            warm=False,
        ),
        "memory": Contest(
            "memory of each further connection of one exchange",
            (
                Turn("floor", "memory {count} {bulk}", {"memory: C": resident}, fresh=True),
                Turn("ours", "first memory {count} {bulk}", {"memory: connect_many": resident}, instance="first"),
            ),
            warm=False,
        ),
        "batch": Contest(
            f"{scale.count} connections from one exchange, and their end",
            (
                Turn(
                    "floor", "connect {count} {bulk}",
                    {"batch: C, verbs alone": verbs, "batch: C, exchange and receives too": connecting},
                    {"close: ibv_destroy_qp": closing},
                ),
                Turn("cmtime", "{count}", {"batch: cmtime": cmtime}),
                Turn("ibverbs", "connect {count} {bulk}", {"batch: ibverbs": connecting}),
                Turn(
                    "ours", "connect_unproven {count} {bulk}", {"batch: connect_many, no probe": connecting},
                    {"close: close_many()": closing},
                ),
                Turn("ours", "connect {count} {bulk}", {"batch: connect_many": connecting}),
            ),
        ),
        "each": Contest(
            "one connection after the other to the same peer, each with all that it needs",
            (
                Turn("ibverbs", "one 1 {single}", {"each: ibverbs": connecting}, repeat="{ones}"),
                Turn("ours", "one_unproven 1 {single}", {"each: connect, no probe": connecting}, repeat="{ones}"),
                Turn("ours", "one 1 {single}", {"each: connect": connecting}, repeat="{ones}"),
                Turn("ours", "pooled 1 {single}", {"each: a pool's hit": connecting}, repeat="{ones}"),
            ),
        ),
        "pingpong": Contest(
            f"RC messages of {MESSAGE} bytes to and fro, all sides polling",
            (
                Turn("ibv_rc_pingpong", "{iters}", {"pingpong: ibv_rc_pingpong": rc_pingpong}),
                Turn("ibverbs", "pingpong {iters}", {"pingpong: ibverbs": tripping}),
                Turn("pyverbs", "pingpong {iters}", {"pingpong: pyverbs": tripping}),
                Turn("ours", "objects {iters}", {"pingpong: objects": tripping}),
                Turn("ours", "pingpong {iters}", {"pingpong: send and recv": tripping}),
            ),
        ),
        "profile": Contest(
            "what the time of rdmaconnect's own goes to; each verb is timed, which takes a little more",
            (
                Turn(
                    "ours", "timed connect_unproven {count} {bulk}", profile("one of many, no probe", **MAKING),
                    profile("one of close_many()", destroy_qp=("ibv_destroy_qp",)), instance="timed",
                ),
                Turn(
                    "ours", "timed one_unproven 1 {single}", profile("connect, no probe", **MAKING),
                    repeat="{ones}", instance="timed",
                ),
            ),
        ),
        "write": Contest(
            "RDMA writes of 1 MiB",
            (
                Turn("ib_write_bw", "{writes} depth=16", {"write: ib_write_bw, 16 outstanding": write_bw}),
                Turn("ib_write_bw", "{writes} depth=1", {"write: ib_write_bw, one at a time": write_bw}),
                Turn("ours", f"write {{writes}} {MIB} 16", {"write: conn.post_write, 16 outstanding": writing}),
                Turn("ours", f"write {{writes}} {MIB} 1", {"write: conn.write, one at a time": writing}),
            ),
        ),
        "storm": Contest(
            f"{scale.storm} connectors at one listener at once",
            (
                Turn("ours", "connect {storm} {bulk}", {"storm: one of a bulk": connecting}),
                Turn("ours", "storm {storm} {bulk}", {"storm: one of the connectors": connecting}),
            ),
            warm=False,
        ),
        "growth": Contest(
            "connections in one exchange, no probe: the cost of each",
            tuple(
                turn
                for n in scale.growth
                for sizes in ("{bulk}" if n > 1 else "{single}",)
                for turn in (
                    Turn("floor", f"connect {n} {sizes}", {f"growth: C, {n}": verbs}),
                    Turn("ours", f"connect_unproven {n} {sizes}", {f"growth: connect_many, {n}": connecting}),
                )
            ),
            warm=False,
        ),
        "import": Contest(
            "what the import takes, beside that of what it needs",
            (
                Turn("python", "1 zmq, msgpack", {"import: zmq, msgpack": importing}),
                Turn("python", "1 rdmaconnect", {"import: rdmaconnect": importing}),
                Turn(
                    "python", "1 rdmaconnect; rdmaconnect.connect; rdmaconnect.listen",
                    {"import: rdmaconnect, and what connects and listens": importing},
                ),
            ),
        ),
    }  # fmt: skip


def units(figure: str) -> str:
    """The unit of a figure, by the contest that it is of."""
    return {"write": "MiB/s", "memory": "KiB", "import": "ms"}.get(figure.partition(":")[0], "us")


def command(turn: Turn, scale: Scale, facts: Mapping[str, Any]) -> tuple[Command, int]:
    """Others' program with its command lines filled in, and how many it makes.

    Args:
        turn: of one of :data:`COMMANDS`.
        scale: the numbers.
        facts: ``listener``, ``connector`` (devices), ``gid``, ``address``, ``python``.
    """
    count, _, rest = turn.words.format(**vars(scale)).partition(" ")
    names = {"count": count, "message": MESSAGE, "mib": MIB, "statement": _IMPORT.format(rest), **facts}
    names |= dict(pair.split("=") for pair in rest.split() if "=" in pair)
    known = COMMANDS[turn.program]
    return replace(known, connect=known.connect.format(**names), listen=known.listen.format(**names)), int(count)


if __name__ == "__main__":
    print(*contests(FULL))
