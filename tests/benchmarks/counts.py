"""What connecting costs in counts, which are alike on every machine: on the device in software, both ends together.

    counts.py [--count N] [--messages N] [--rounds N] [--json]

Counted are Python's instructions and function calls in every thread (of rdmaconnect and all that it calls in Python,
without the device in software), verbs by their names, and, where there is ``strace``, system calls (with those of the
device in software). Imports are counted in new interpreters. Of each the median of the rounds is told, and half of how
far they are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import software  # noqa: E402
from software.calls import ENTRIES  # noqa: E402

import rdmaconnect  # noqa: E402
from rdmaconnect import verbs  # noqa: E402
from rdmaconnect.abi import WrOpcode  # noqa: E402
from rdmaconnect.objects.work_request import RecvRequest, SendRequest  # noqa: E402

#: where the code is that is not counted: the device's, and this
LEFT_OUT = (str(Path(software.__file__).parent), __file__)
# a device of C has no lock around what is posted and polled
ENTRIES.update(method.__code__ for method in vars(verbs._Guarded).values() if hasattr(method, "__code__"))
#: the work is over when nothing was counted for so long, in seconds: a part of it is done in the background
QUIET_S = 0.2
PATIENCE_S = 300.0
#: a file that is not there: asking for it marks a place among the system calls
MARK = "/mark-of-counts/"
SIZE = 64


class Tally:
    """Counts instructions and function calls of every thread that starts while it is on, and of this one."""

    def __init__(self) -> None:
        self._threads: list[Counter[str]] = []
        self._mine = threading.local()
        self._left_out: dict[CodeType, bool] = {}

    def __enter__(self) -> Tally:
        threading.settrace(self._call)
        self.resume()
        return self

    def resume(self) -> None:
        """Count this thread's work from now on."""
        sys.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def read(self) -> Counter[str]:
        """The counts by now."""
        return sum(list(self._threads), Counter())

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        mine = self._mine
        counts = getattr(mine, "counts", None)
        if counts is None:
            counts = mine.counts = Counter()
            mine.inside = False
            self._threads.append(counts)
            mine.step = self._stepper(counts)
        code = frame.f_code
        if mine.inside:
            return None
        if code in ENTRIES:  # what runs below it is the device's work
            mine.inside = True
            frame.f_trace_lines = False
            return self._leaver(mine)
        if code not in self._left_out:
            self._left_out[code] = code.co_filename.startswith(LEFT_OUT)
        if self._left_out[code]:
            return None
        counts["calls"] += 1
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return mine.step

    @staticmethod
    def _stepper(counts: Counter[str]) -> Callable[..., Any]:
        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                counts["instructions"] += 1
            return step

        return step

    @staticmethod
    def _leaver(mine: Any) -> Callable[..., Any]:
        def leave(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return":
                mine.inside = False
            return leave

        return leave


Phase = Callable[[str, int], Any]


def play(count: int, messages: int, phase: Phase) -> None:
    """Connect, talk and close; ``phase(name, of)`` is a context in which ``of`` of that are done."""

    def both(make: Callable[[str], list[Any]], many: int) -> list[Any]:
        theirs: list[Any] = []

        def accept() -> None:
            theirs.extend(listener.accept(deadline_s=PATIENCE_S) for _ in range(many))

        thread = threading.Thread(target=accept)
        thread.start()
        mine = make(listener.url)
        thread.join()
        return [*mine, *theirs]

    def one(url: str) -> list[Any]:
        return [rdmaconnect.connect(url, deadline_s=PATIENCE_S)]

    def many(url: str) -> list[Any]:
        return rdmaconnect.connect_many(url, count, deadline_s=PATIENCE_S)

    def close(conns: list[Any]) -> None:
        for conn in conns:
            conn.close()

    with software.Software() as made, rdmaconnect.listen("127.0.0.1:0", spin=0) as listener:
        phase.verbs = made.calls  # type: ignore[attr-defined]
        with phase("connect, the first", 1):
            conns = both(one, 1)
        with phase("close", 1):
            close(conns)
        with phase("connect, the second", 1):
            here, there = conns = both(one, 1)
        data = bytes(SIZE)
        with phase(f"send and recv of {SIZE} bytes", messages):
            for _ in range(messages):
                here.send(data)
                there.recv()
        close(conns)
        through_objects(data, messages, phase)
        with rdmaconnect.Pool(listener.url, 1, deadline_s=PATIENCE_S) as pool:
            pool.warm(deadline_s=PATIENCE_S)
            pool.spare = 0  # the next one, which is made in the background, costs what the second connection does
            with phase("a pool's hit", 1):
                conns = [pool.acquire(deadline_s=PATIENCE_S)]
            close([*conns, listener.accept(deadline_s=PATIENCE_S)])
        with phase(f"one of connect_many({count})", count):
            conns = both(many, count)
        with phase(f"close one of {count}", count):
            close(conns)
        conns = both(many, count)
        with phase(f"one of close_many({count})", count):
            rdmaconnect.close_many(conns)


def through_objects(data: bytes, messages: int, phase: Phase) -> None:
    """Send messages from one queue pair to another; both poll. The first time the requests are looked at."""
    with software.joined() as (here, there):
        send = SendRequest().fill_inline(1, WrOpcode.SEND, data)
        recv = RecvRequest(2, there.mr.addr, len(data), there.mr.lkey)

        def message() -> None:
            there.qp.post_recv(recv)
            here.qp.post_send(send)
            while not here.cq.busy_poll(64):
                pass
            while not there.cq.busy_poll(64):
                pass

        message()
        with phase(f"{SIZE} bytes through the objects", messages):
            for _ in range(messages):
                message()


class Counting:
    """The phases of one round: name -> what -> count, each for one of what is done."""

    verbs: Counter[str]

    def __init__(self, tally: Tally) -> None:
        self.tally, self.found = tally, dict[str, dict[str, Any]]()

    @contextmanager
    def __call__(self, name: str, of: int) -> Iterator[None]:
        before, verbs = self._settled(), Counter(self.verbs)
        yield
        counted, called = self._settled() - before, Counter(self.verbs) - verbs
        self.found[name] = {what: counted[what] / of for what in ("instructions", "calls")}
        self.found[name]["verbs"] = {verb: number / of for verb, number in sorted(called.items())}

    def _settled(self) -> Counter[str]:
        """The counts when nothing goes on any more; this thread's own work for that is not counted."""
        sys.settrace(None)
        last, deadline = self.tally.read(), time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(QUIET_S)
            now = self.tally.read()
            if now == last:
                break
            last = now
        self.tally.resume()
        return last


class Marking:
    """The phases as marks among the system calls."""

    verbs: Counter[str]

    @contextmanager
    def __call__(self, name: str, of: int) -> Iterator[None]:
        os.access(f"{MARK}{of}/{name}", os.F_OK)
        yield
        time.sleep(QUIET_S)
        os.access(f"{MARK}0/end", os.F_OK)


def count_python(count: int, messages: int) -> dict[str, dict[str, Any]]:
    """One round in this process, which must have connected nothing before."""
    with Tally() as tally:
        counting = Counting(tally)
        play(count, messages, counting)
    return counting.found


#: what is imported, each in a new interpreter: without what connects, with it, and the two that it needs
IMPORTS = ("import zmq, msgpack", "import rdmaconnect", "from rdmaconnect import connect, listen")
_COUNT_IMPORT = """
import json, sys
counts = {"instructions": 0, "calls": 0, "verbs": {}}
def step(frame, event, argument):
    counts["instructions"] += event == "opcode"
    return step
def call(frame, event, argument):
    counts["calls"] += 1
    frame.f_trace_lines, frame.f_trace_opcodes = False, True
    return step
sys.settrace(call)
exec(sys.argv[1])
sys.settrace(None)
print(json.dumps(counts))
"""


def count_import(statement: str) -> dict[str, Any]:
    """Of an import in a new interpreter, once Python has compiled what it loads."""
    argv = [sys.executable, "-c", _COUNT_IMPORT, statement]
    variables = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(2):
        done = subprocess.run(argv, stdout=subprocess.PIPE, env=variables, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def count_system_calls(argv: list[str]) -> dict[str, float]:
    """One round in a process of its own: phase -> system calls; none where there is no strace, or it may not trace."""
    if shutil.which("strace") is None:
        return {}
    with tempfile.NamedTemporaryFile() as log:
        done = subprocess.run(["strace", "-f", "-qq", "-o", log.name, *argv], capture_output=True, check=False)
        return {} if done.returncode else marked(Path(log.name).read_text(errors="replace"))


def marked(log: str) -> dict[str, float]:
    """Phase -> system calls, of what strace wrote."""
    found: dict[str, float] = {}
    name, of, calls = "end", 0, 0
    for line in log.splitlines():
        if mark := re.search(rf'"{MARK}(\d+)/(.*?)"', line):
            if of:
                found[name] = calls / of
            of, name, calls = int(mark[1]), mark[2], 0
        elif re.match(r"\d+\s+\w+\(", line):  # the second halves of calls begin with <...
            calls += 1
    return found


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """phase -> what -> median of the rounds; ``spread``: what -> how far they are apart, as a share of it."""
    found: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        numbers = {what: [one[name][what] for one in rounds] for what in rounds[0][name] if what != "verbs"}
        found[name] = {what: median(values) for what, values in numbers.items()}
        found[name]["spread"] = {what: (max(v) - min(v)) / (median(v) or 1) for what, v in numbers.items()}
        verbs = sorted({verb for one in rounds for verb in one[name]["verbs"]})
        found[name]["verbs"] = {verb: median(one[name]["verbs"].get(verb, 0) for one in rounds) for verb in verbs}
    return found


def measure(count: int, messages: int, rounds: int) -> dict[str, dict[str, Any]]:
    """All of it: phase -> ``instructions``, ``calls``, ``system_calls`` (if it can be had), ``spread``, ``verbs``.

    Each round is a process of its own, so that the first connection is one; each import is in one too.
    """
    argv = [sys.executable, __file__, "--count", str(count), "--messages", str(messages), "--part"]
    all_rounds = []
    for _ in range(rounds):
        done = subprocess.run([*argv, "python"], stdout=subprocess.PIPE, check=True)
        found, system_calls = json.loads(done.stdout), count_system_calls([*argv, "system"])
        for name, number in system_calls.items():
            found[name]["system_calls"] = number
        found |= {statement: count_import(statement) for statement in IMPORTS}
        all_rounds.append(found)
    return summary(all_rounds)


def table(found: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| what | instructions | calls | system calls | verbs |", "|---|--:|--:|--:|---|"]
    for name, of in found.items():
        whats = ("instructions", "calls", "system_calls")
        cells = [f"{of[what]:,.0f} (± {of['spread'][what] / 2:.1%})" if what in of else "-" for what in whats]
        verbs = ", ".join(f"{verb.removeprefix('ibv_')} {number:.3g}" for verb, number in of["verbs"].items())
        lines.append(f"| {name} | {' | '.join(cells)} | {verbs} |")
    return "\n".join(lines)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="connections of one exchange (default: 200)")
    parser.add_argument("--messages", type=int, default=50, help="messages (default: 50)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=["python", "system"], help="one round, of which this is counted")
    options = parser.parse_args()
    if options.part == "system":
        play(options.count, options.messages, Marking())
        return
    if options.part == "python":
        print(json.dumps(count_python(options.count, options.messages)))
        return
    found = measure(options.count, options.messages, options.rounds)
    print(json.dumps(found, indent=1) if options.json else table(found))


if __name__ == "__main__":
    main()
