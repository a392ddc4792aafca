"""What the benchmarks make of what was measured, and that the counting works; ``docker/lab bench`` measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import contests
import counts
import goals
import ours
import program
import pytest
import report
import run as runner
from contests import FULL, SMALL, Scale, Turn
from software import Software

from rdmaconnect import verbs

HERE = Path(__file__).resolve().parent
FIGURES = {figure for c in contests.contests(FULL).values() for t in c.turns for figure in (*t.figures, *t.after)}
FACTS = {"listener": "rxe2", "connector": "rxe1", "gid": 1, "address": "10.9.0.2", "python": "python3"}


def turns(scale: Scale = FULL) -> list[Turn]:
    return [turn for contest in contests.contests(scale).values() for turn in contest.turns]


# ---- figures


def test_connecting_lasts_until_both_sides_have_all() -> None:
    listen, connect = {"begin": 0, "end": 9_000_000}, {"begin": 1_000_000, "end": 7_000_000}
    assert contests.connecting(listen, connect, 4) == 2000
    assert contests.connecting({"begin": 0, "end": 5_000_000}, connect, 4) == 1500


def test_the_slower_side_counts() -> None:
    assert contests.verbs({"verbs_ns": 300_000}, {"verbs_ns": 500_000}, 5) == 100
    assert contests.closing({"begin": 5_000, "end": 9_000}, {"begin": 1_000, "end": 3_000}, 2) == 2


def test_round_trips_and_writes_are_what_the_side_that_begins_sees() -> None:
    connect = {"begin": 0, "end": 2_000_000_000}
    assert contests.tripping({}, connect, 1000) == 2000
    assert contests.writing({}, connect, 64) == 32


def test_memory_is_told_without_the_receives() -> None:
    listen = {"rss_before": 0, "rss_after": 30 * 1024}
    connect = {"rss_before": 1024, "rss_after": 11 * 1024, "receives": 2048}
    assert contests.resident(listen, connect, 10) == 1


def test_others_programs_are_read() -> None:
    cmtime = """
step              total ms     max ms     min us  us / conn
create id    :        1.00       0.50       1.00       5.00
bind addr    :        2.00       0.50       1.00       5.00
resolve addr :        3.00       0.50       1.00       5.00
resolve route:        4.00       0.50       1.00       5.00
create qp    :        5.00       0.50       1.00       5.00
connect      :       85.00       0.50       1.00       5.00
disconnect   :     1000.00       0.50       1.00       5.00
destroy      :     1000.00       0.50       1.00       5.00
"""
    assert contests.cmtime(cmtime, 100) == 1000
    said = "128000 bytes in 0.35 seconds = 2.92 Mbit/sec\n1000 iters in 0.35 seconds = 350.63 usec/iter\n"
    assert contests.rc_pingpong(said, 1000) == 350.63
    bandwidth = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    50               31.50              29.25                0.000029
"""
    assert contests.write_bw(bandwidth, 50) == 29.25
    assert contests.importing("2500000\n", 1) == 2.5
    with pytest.raises(ValueError, match=r"is not in what was printed: .Couldn't connect"):
        contests.rc_pingpong("Couldn't connect", 1000)


# ---- rdmaconnect's own program, on the device in software


class Sides:
    """Both sides of it in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ports: SimpleQueue[int] = SimpleQueue()
        monkeypatch.setattr(program, "say", lambda ready, port: self.ports.put(port))
        monkeypatch.setattr(ours.resource, "setrlimit", lambda *_: None)
        self.listen, self.connect = (ours.Ours(side, "soft0", "0", "127.0.0.1") for side in ("listen", "connect"))

    def play(self, words: str) -> tuple[dict[str, Any], dict[str, Any]]:
        word, *numbers = words.split()
        with ThreadPoolExecutor(1) as thread:
            listen = thread.submit(self.listen.obey, word, [*numbers, "0"])
            connect = self.connect.obey(word, [*numbers, str(self.ports.get(timeout=10))])
            return listen.result(30), connect

    def close(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.listen.obey, "close", [])
            self.connect.obey("close", [])
        for side in (self.connect, self.listen):
            for end in (
                side.pool,
                *side.listeners.values(),
                *side.playing.values(),
                side.object and side.object.kept,
                side.listener,
            ):
                if end is not None:
                    end.close()


@pytest.fixture
def sides(software: Software, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    made = Sides(monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize(
    "words",
    [
        "connect 3 4 16384 4", "connect_unproven 3 4 16384 4", "one 1 16 65536 16", "one_unproven 1 16 65536 16",
        "memory 2 4 16384 4", "storm 3 4 16384 4",
    ],
)  # fmt: skip
def test_our_program_connects_and_sends(sides: Sides, words: str) -> None:
    listen, connect = sides.play(words)
    assert connect["end"] > connect["begin"] > 0
    assert listen["end"] > connect["begin"]
    assert len(sides.listen.conns) == len(sides.connect.conns) == int(words.split()[1]) * (1 + ("memory" in words))


def test_our_program_takes_what_a_pool_has_ready(sides: Sides, software: Software) -> None:
    for number in (1, 2):
        listen, connect = sides.play("pooled 1 16 65536 16")
        assert listen["end"] > listen["begin"] > 0
        assert connect["end"] > connect["begin"] > 0
        assert len(sides.listen.conns) == len(sides.connect.conns) == number
        assert sides.connect.pool is not None
        assert sides.connect.pool.idle == 4


def test_our_program_has_what_it_says(sides: Sides) -> None:
    depth, size, send_depth = sides.connect.started()["single"]
    sides.play(f"one 1 {depth} {size} {send_depth}")
    assert sides.connect.conns[0].local.recv_size == size
    with pytest.raises(ValueError, match="not 77 as the others have"):
        sides.connect.joined(1, 77, lambda: sides.connect.conns)


@pytest.mark.parametrize("words", ["pingpong 20", "objects 20", "write 3 100000 1", "write 30 100000 16"])
def test_our_program_plays_twice(sides: Sides, words: str) -> None:
    for _ in range(2):
        _, connect = sides.play(words)
        assert connect["end"] > connect["begin"]


def test_our_program_tells_what_its_time_goes_to(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    library = verbs.library()
    monkeypatch.setattr(verbs, "op", verbs.op)
    sides.listen.time_verbs()
    sides.connect.timed = sides.listen.timed
    try:
        answers = sides.play("connect_unproven 3 4 16384 4")
    finally:
        verbs.use(library)
    spent = answers[1]["spent"]
    assert spent.keys() >= {"ibv_create_qp", "ibv_modify_qp", "ibv_reg_mr", "ibv_post_recv"}
    assert min(spent.values()) > 0
    told = {name: figure(*answers, 3) for name, figure in contests.profile("this", **contests.MAKING).items()}
    assert told["profile: this, elapsed"] > 0
    assert told["profile: this, processors"] > 0
    verbs_us = sum(us for name, us in told.items() if "elapsed" not in name and "processors" not in name)
    assert verbs_us == pytest.approx(sum(sum(answer["spent"].values()) for answer in answers) / 1e3 / 3)


# ---- turns


@pytest.mark.parametrize("scale", [FULL, SMALL])
def test_each_turn_can_be_told(scale: Scale) -> None:
    sizes = {"bulk": "4 16384 4", "single": "16 65536 16"}
    for turn in turns(scale):
        if turn.program in contests.TOLD:
            words = turn.words.format(**vars(scale), **sizes).split()
            methods = (
                HERE / {"floor": "floor.c", "ours": "ours.py"}.get(turn.program, f"peer_{turn.program}.py")
            ).read_text()
            word = words[1] if words[0] == "first" else words[0]
            assert f"def {word}(" in methods or f"{word} = " in methods or f'"{word} %d' in methods, turn
        else:
            told, count = contests.command(turn, scale, FACTS)
            assert "{" not in told.connect + told.listen
            assert count > 0


def test_both_sides_of_others_programs_are_asked_for_the_same() -> None:
    (turn,) = [t for t in turns() if t.program == "ib_write_bw" and "depth=16" in t.words]
    told, count = contests.command(turn, FULL, FACTS)
    assert told.listen == f"ib_write_bw -d rxe2 -x 1 -s 1048576 -n {FULL.writes} -t 16 -F"
    assert told.connect == told.listen.replace("rxe2", "rxe1") + " 10.9.0.2"
    assert count == FULL.writes


def test_no_figure_is_measured_twice() -> None:
    names = [figure for turn in turns() for figure in (*turn.figures, *turn.after)]
    assert len(names) == len(set(names))


# ---- the runner


def test_who_begins_changes_and_a_warm_round_comes_first() -> None:
    a, b = Turn("ours", "a", {}), Turn("ours", "b", {})
    warm = [(n, turn.words) for n, turn in runner.rounds(contests.Contest("", (a, b)), 2)]
    assert warm == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    cold = [n for n, _ in runner.rounds(contests.Contest("", (a, b), warm=False), 2)]
    assert cold == [1, 1, 2, 2]
    assert [n for n, _ in runner.rounds(contests.Contest("", (a, b)), 1)] == [1, 1], (
        "a single round shows that it works"
    )


#: a program that is told what to do, and says what it was told
FAKE = """
import sys
sys.path.insert(0, FOLDER)
from program import Program

class Fake(Program):
    def started(self):
        return {"bulk": [4, 16384, 4], "single": [16, 65536, 16]}

    def one(self, *numbers):
        if not self.listens and numbers[-1] != 5:
            raise ValueError(f"told {numbers}")
        self.ready(5)
        return {"begin": 1000, "end": 3000, "numbers": numbers}

    def close(self):
        return {"begin": 0, "end": 4000}

Fake.main()
"""


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[runner.Player]:
    """It plays on two nodes that are none."""
    on, fake = tmp_path / "on", tmp_path / "fake.py"
    on.write_text('#!/bin/sh\nshift; exec "$@"\n')
    on.chmod(0o755)
    fake.write_text(FAKE.replace("FOLDER", repr(str(HERE))))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RDMACONNECT_LAB_PYTHON", sys.executable)
    made = runner.Player(FULL, tmp_path, sys.executable)
    made.argv["ours"] = [sys.executable, str(fake)]
    yield made
    for key in list(made.pairs):
        made.end(*key)


def test_a_turn_is_told_to_both_sides_and_closed(player: runner.Player) -> None:
    turn = Turn("ours", "one 2 {single}", {"each: x": contests.connecting}, {"close: x": contests.closing}, "{ones}")
    assert player.play(turn) == {"each: x": 1.0, "close: x": 2.0}
    assert player.pair("ours").play("one 2 16 65536 16")[1]["numbers"] == [2, 16, 65536, 16, 5]


def test_a_first_turn_is_of_a_child(player: runner.Player) -> None:
    turn = Turn("ours", "first one 2 {single}", {"first: x": contests.connecting}, instance="first")
    assert player.play(turn) == player.play(turn) == {"first: x": 1.0}
    assert set(player.pairs) == {("ours", ""), ("ours", "first")}, "the other tells the sizes"


def test_what_a_program_says_at_its_end_is_told(player: runner.Player) -> None:
    with pytest.raises(runner.Failed, match="no attribute 'sing'"):
        player.play(Turn("ours", "sing 1", {}))


def test_others_programs_are_run(player: runner.Player) -> None:
    found = player.play(Turn("python", "1 json, re", {"import: x": contests.importing}))
    assert 0 < found["import: x"] < 10_000


# ---- goals


@pytest.mark.parametrize("scale", [FULL, SMALL])
def test_goals_are_about_figures_that_are_measured(scale: Scale) -> None:
    figures = {figure for turn in turns(scale) for figure in (*turn.figures, *turn.after)}
    wanted = goals.goals(scale)
    assert {name for goal in wanted for name in (goal.of, goal.against)} <= figures
    assert len({goal.words for goal in wanted}) == len(wanted)


def test_both_figures_of_a_goal_are_of_one_contest() -> None:
    for goal in goals.goals(FULL):
        assert len({name.partition(":")[0] for name in (goal.of, goal.against)}) == 1, "they take turns there"


def test_a_goal_is_judged_by_the_medians() -> None:
    goal = goals.Goal("a against b", "batch: a", "batch: b", 2.0)
    (verdict,) = goals.judge([goal], {"batch: a": [10, 30, 21], "batch: b": [10, 10, 10]})
    assert (verdict.value, verdict.least, verdict.greatest, verdict.met) == (2.1, 1.0, 3.0, False)
    (verdict,) = goals.judge([goal], {"batch: a": [10, 30, 20], "batch: b": [10, 10, 10]})
    assert verdict.met


def test_a_difference_is_judged_as_one() -> None:
    goal = goals.Goal("memory", "memory: a", "memory: b", 8.0, minus=True)
    (verdict,) = goals.judge([goal], {"memory: a": [12.0], "memory: b": [5.0]})
    assert (verdict.value, verdict.met) == (7.0, True)


def test_of_some_more_is_better() -> None:
    goal = goals.Goal("write", "write: a", "write: b", 0.95, at_least=True)
    for value, met in ((94, False), (96, True)):
        (verdict,) = goals.judge([goal], {"write: a": [value], "write: b": [100]})
        assert verdict.met is met
        assert f"| write | at least 0.95 | {value / 100:g} |" in goals.table({}, [verdict])


def test_a_goal_without_figures_is_left_out() -> None:
    assert goals.judge(goals.goals(FULL), {"batch: ibverbs": [1.0]}) == []


# ---- the report


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """What the runner writes of two rounds, in which everything takes as long."""
    path = tmp_path / "turns.jsonl"
    values = [{"figure": name, "round": n, "value": 5.0 + n} for n in (1, 2) for name in sorted(FIGURES)]
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def run(*argv: object) -> str:
    return subprocess.run([sys.executable, *map(str, argv)], check=True, text=True, capture_output=True).stdout


def test_the_report_tells_every_figure_and_goal(lines: Path, tmp_path: Path) -> None:
    said = run(HERE / "report.py", lines, "--out", tmp_path / "out")
    written = json.loads((tmp_path / "out/bench.json").read_text())
    assert set(written["figures"]) == FIGURES
    assert all(of["median"] == 6.5 and of["rounds"] == [6.0, 7.0] for of in written["figures"].values())
    assert [goal["goal"] for goal in written["goals"]] == [goal.words for goal in goals.goals(FULL)]
    for name in (*FIGURES, *(goal.words for goal in goals.goals(FULL))):
        assert f"| {name} |" in said
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_small_report_says_that_it_means_nothing(lines: Path) -> None:
    said = run(HERE / "report.py", lines, "--small")
    assert said.rstrip().endswith("its figures mean nothing.")
    assert f"| connect_many({SMALL.count}), probe off, against the C floor |" in said


def test_growth_is_drawn_in_order() -> None:
    curves = report.growth({"growth: C, 100": [4.0, 6.0], "growth: C, 10": [3.0], "batch: C": [1.0]})
    assert curves == {"C": [(10, 3.0), (100, 5.0)]}


# ---- counts


#: function calls that each phase may take, both ends together: a third more than was seen, as waits differ
MOST_CALLS = {
    "connect, the first": 6150,
    "close": 1300,
    "connect, the second": 2850,
    "send and recv of 64 bytes": 46,
    "64 bytes through the objects": 5.6,
    "one of connect_many(10)": 500,
    "close one of 10": 171,
    "one of close_many(10)": 139,
    "from rdmaconnect import connect, listen": 112_000,
}


def test_counts_are_alike_from_round_to_round_and_do_not_grow() -> None:
    for _ in range(3):  # what else goes on in the process, late on a busy machine, is counted too: not each time
        found: dict[str, Any] = json.loads(
            run(HERE / "counts.py", "--count", 10, "--messages", 20, "--rounds", 3, "--json")
        )
        print(json.dumps(found, indent=1))
        repeated = found.keys() - {*counts.IMPORTS, "a pool's hit"}
        apart = {name: found[name] for name in repeated if found[name]["spread"]["instructions"] >= 0.2}
        if not apart:
            break
    assert apart == {}
    assert {name: found[name]["calls"] for name, most in MOST_CALLS.items() if found[name]["calls"] > most} == {}
    zmq, ours, all_ours = (found.pop(statement) for statement in counts.IMPORTS)
    assert ours["instructions"] < zmq["instructions"] / 4
    assert zmq["instructions"] < all_ours["instructions"] < 8 * zmq["instructions"]
    hit, second = found.pop("a pool's hit"), found["connect, the second"]
    assert 0 < hit["instructions"] < 0.1 * second["instructions"]
    assert len(found) == 8
    for name, of in found.items():
        assert of["instructions"] > of["calls"] > 0, name
        assert of.get("system_calls", 1) > 0, name
    bulk, one = found["one of connect_many(10)"], found["connect, the second"]
    assert bulk["instructions"] < one["instructions"]
    assert bulk["verbs"]["ibv_create_qp"] == one["verbs"]["ibv_create_qp"] == 2
    assert bulk["verbs"]["ibv_modify_qp"] == one["verbs"]["ibv_modify_qp"] == 6
    assert one["verbs"]["ibv_reg_mr"] == 2, "a proof of one queue pair registers nothing"


def test_system_calls_are_counted_between_marks() -> None:
    log = "\n".join([
        "1 openat(3)", f'1 access("{counts.MARK}2/connect", F_OK) = -1', "1 read(3 <unfinished ...>", "2 write(4) = 1",
        "1 <... read resumed>) = 1", "1 close(3) = 0", "2 close(4) = 0", f'1 access("{counts.MARK}0/end", F_OK) = -1',
        "1 exit_group(0)",
    ])  # fmt: skip
    assert counts.marked(log) == {"connect": 2.0}
