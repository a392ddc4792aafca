"""Plays both nodes of the lab: lets the contestants take turns, and writes what each turn came to.

Run by ``docker/lab bench`` inside. Each turn is a line of JSON in the file that it is told: ``figure``, ``round``
(from 1), ``value``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contests import FULL, SMALL, TOLD, Contest, Scale, Turn, command, contests, mean

HERE = Path(__file__).resolve().parent
LISTENER, CONNECTOR = 2, 1
GID_INDEX = 1
#: seconds for one answer, or one command
PATIENCE_S = 900.0
#: seconds between turns: what the last one left to be done in the background is not the next one's
PAUSE_S = 0.3


class Failed(Exception):
    """A turn failed; says why."""


def address(node: int) -> str:
    """The node's IPv4 address."""
    return f"10.9.0.{node}"


class Side:
    """One side of a program that is told line by line what to do."""

    def __init__(self, argv: list[str], side: str, node: int, words: Path) -> None:
        self.name, self.words = f"{Path(argv[-1]).name} {side}", words
        argv = ["on", str(node), *argv, side, f"rxe{node}", str(GID_INDEX), address(LISTENER)]
        with words.open("w") as errors:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def tell(self, line: str) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: the answer that is missing says so
            print(line, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise Failed(
                f"{self.name} ended, or said nothing for {PATIENCE_S:.0f} s:\n{self.words.read_text()[-2000:]}"
            )
        return json.loads(line)

    def result(self) -> dict[str, Any]:
        """Its next answer that is more than to be ready."""
        while "ready" in (answer := self.answer()):
            pass
        return answer

    def end(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Pair:
    """Both sides of such a program, which live until they are ended."""

    def __init__(self, argv: list[str], words: Path) -> None:
        nodes = (("listen", LISTENER), ("connect", CONNECTOR))
        self.sides = [Side(argv, side, node, words.with_suffix(f".{side}")) for side, node in nodes]
        try:
            self.started, _ = [side.answer() for side in self.sides]
        except Failed:
            self.end()
            raise

    def play(self, words: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tell both the same, the connecting side as soon as the other is ready; what they answered."""
        listen, connect = self.sides
        listen.tell(f"{words} 0")
        ready = listen.answer()
        connect.tell(f"{words} {ready['port']}")
        return connect_first(connect, listen)

    def close(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Let both close what they made, at the same time."""
        for side in self.sides:
            side.tell("close")
        listen, connect = (side.result() for side in self.sides)
        return listen, connect

    def end(self) -> None:
        """End both."""
        for side in self.sides:
            side.end()


def connect_first(connect: Side, listen: Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both answers; where one side failed, its words."""
    try:
        answer = connect.result()
    except Failed as e:
        raise Failed(f"{e}\n{listen.name}:\n{listen.words.read_text()[-2000:]}") from e
    return listen.result(), answer


class Player:
    """Lets contestants play.

    Args:
        scale: how much of everything.
        out: a folder for the programs' words.
        peers: the Python that has PyPI's ``ibverbs``.
    """

    def __init__(self, scale: Scale, out: Path, peers: str) -> None:
        self.scale, self.out = scale, out
        self.ours = os.environ["RDMACONNECT_LAB_PYTHON"]
        self.argv = {
            "floor": [str(out / "floor")],
            "ibverbs": [peers, str(HERE / "peer_ibverbs.py")],
            "pyverbs": ["/usr/bin/python3", str(HERE / "peer_pyverbs.py")],
            "ours": [self.ours, str(HERE / "ours.py")],
        }
        self.pairs: dict[tuple[str, str], Pair] = {}
        assert set(self.argv) == set(TOLD)

    def compile(self) -> None:
        """Compile the floor."""
        source = str(HERE / "floor.c")
        subprocess.run(["gcc", "-O2", "-Wall", "-o", *self.argv["floor"], source, "-libverbs"], check=True)

    def pair(self, program: str, instance: str = "") -> Pair:
        """The processes of a program."""
        key = program, instance
        if key not in self.pairs:
            words = self.out / f"{program}{'-' if instance else ''}{instance}"
            self.pairs[key] = Pair(self.argv[program], words)
        return self.pairs[key]

    def end(self, program: str, instance: str = "") -> None:
        """End them."""
        pair = self.pairs.pop((program, instance), None)
        if pair is not None:
            pair.end()

    def play(self, turn: Turn) -> dict[str, float]:
        """One turn; figure -> value."""
        if turn.program not in TOLD:
            text, count = self.run(turn)
            return {name: figure(text, count) for name, figure in turn.figures.items()}
        sizes = {name: " ".join(map(str, self.pair("ours").started[name])) for name in ("bulk", "single")}
        given = {**vars(self.scale), **sizes}
        words = turn.words.format(**given)
        count = next(int(word) for word in words.split() if word.isdigit())
        found: dict[str, list[float]] = {}
        for _ in range(int(turn.repeat.format(**given))):
            if turn.fresh:
                self.end(turn.program, turn.instance)
            pair = self.pair(turn.program, turn.instance)
            answers = pair.play(words)
            for name, figure in turn.figures.items():
                found.setdefault(name, []).append(figure(*answers, count))
            if words.removeprefix("timed ").startswith(("connect", "one", "storm", "memory")):
                answers = pair.close()
                for name, figure in turn.after.items():
                    found.setdefault(name, []).append(figure(*answers, count))
        return {name: mean(values) for name, values in found.items()}

    def run(self, turn: Turn) -> tuple[str, int]:
        """Run others' program on both nodes; what both printed, the connecting side first, and its count."""
        facts = {
            "listener": f"rxe{LISTENER}",
            "connector": f"rxe{CONNECTOR}",
            "gid": GID_INDEX,
            "address": address(LISTENER),
            "python": self.ours,
        }
        told, count = command(turn, self.scale, facts)
        server, words = None, self.out / f"{turn.program}.listen"
        words.write_text("")
        if told.listen:
            with words.open("w") as file:
                argv = ["on", str(LISTENER), *shlex.split(told.listen)]
                server = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT)
        try:
            if server is not None:
                wait_for(server, turn.program, words)
            argv = ["on", str(CONNECTOR), *shlex.split(told.connect)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            if server is not None and not told.lasts:
                server.wait(PATIENCE_S)
        finally:
            if server is not None:
                server.kill()
                server.wait()
        said = done.stdout + done.stderr + words.read_text()
        if done.returncode or (server is not None and server.returncode and not told.lasts):
            raise Failed(f"{told.connect}: status {done.returncode}: {said[-2000:]}")
        return said, count


def wait_for(server: subprocess.Popen[bytes], program: str, words: Path) -> None:
    """Wait until a program listens, over TCP or with the RDMA connection manager."""
    look = ["rdma", "resource", "show", "cm_id"] if program == "cmtime" else ["ss", "-Hltnp"]
    for _ in range(100):
        said = subprocess.run(["on", str(LISTENER), *look], capture_output=True, text=True, check=False).stdout
        if any(program in line and "LISTEN" in line for line in said.splitlines()):
            return
        if server.poll() is not None:
            raise Failed(f"{program}: the listening side ended with {server.returncode}: {words.read_text()[-2000:]}")
        time.sleep(0.1)
    raise Failed(f"{program}: the listening side does not listen after 10 s: {said[-500:]}")


def rounds(contest: Contest, count: int) -> Iterator[tuple[int, Turn]]:
    """(round, turn); round 0 warms up. Who begins changes from round to round."""
    turns, many = contest.turns, len(contest.turns)
    for number in range(0 if contest.warm and count > 1 else 1, count + 1):
        for i in range(many):
            yield number, turns[(i + number) % many]


def main() -> int:
    """Play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peers", required=True, help="the Python that has PyPI's ibverbs")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("only", nargs="*")
    options = parser.parse_args()
    if os.environ["RDMACONNECT_LAB_LAYOUT"] != "netns":
        sys.exit("lab bench needs a kernel from 7.0 on: before, the nodes are no network namespaces")
    scale = SMALL if options.small else FULL
    player, failed = Player(scale, options.out, options.peers), set[int]()
    if missing := [name for name in ("gcc", "cmtime", "ib_write_bw") if shutil.which(name) is None]:
        sys.exit(f"not installed: {', '.join(missing)}")
    player.compile()
    with (options.out / "turns.jsonl").open("w") as file:
        for name, contest in contests(scale).items():
            if options.only and name not in options.only:
                continue
            print(f"bench: {name}: {contest.about}", flush=True)
            for number, turn in rounds(contest, options.rounds):
                if id(turn) in failed:
                    continue
                started = time.monotonic()
                try:
                    found = player.play(turn)
                except (Failed, OSError, ValueError, KeyError, subprocess.SubprocessError) as e:
                    failed.add(id(turn))
                    print(f"bench: FAILED: {turn.program} {turn.words}: {type(e).__name__}: {e}", flush=True)
                    player.end(turn.program, turn.instance)
                    continue
                words = ", ".join(f"{figure} {value:,.4g}" for figure, value in found.items())
                print(f"bench: round {number}: {words} ({time.monotonic() - started:.0f} s)", flush=True)
                for figure, value in found.items() if number else ():
                    print(json.dumps({"figure": figure, "round": number, "value": value}), file=file, flush=True)
                time.sleep(PAUSE_S)
    for program, instance in list(player.pairs):
        player.end(program, instance)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
