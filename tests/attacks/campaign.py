"""What a campaign counts, and how much of it is done."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import rdmaconnect
from rdmaconnect.runtime import wakeup

#: how much is done: 1, what plain pytest has time for, to 100, all
SCALE = min(max(int(os.environ.get("RDMACONNECT_CAMPAIGN", "1")), 1), 100)
#: where is listened: what is done over TCP is done by rdma_cm too
WHERE = {"tcp": "127.0.0.1:0", "rdma_cm": "rdma://127.0.0.1:0"}
ADDRESSES = pytest.mark.parametrize("address", WHERE.values(), ids=WHERE)
#: by so much a call may outlive its deadline, s
LATE_S = 0.3


def scaled(least: int, most: int) -> int:
    """How often: ``least`` at scale 1, ``most`` at 100."""
    return least + (most - least) * (SCALE - 1) // 99


def status(name: str) -> int:
    """A number of /proc/self/status, such as VmRSS: kB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))


def reset_peak() -> None:
    """VmHWM counts from now on. Source: proc(5), clear_refs."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Wait for a condition; whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def aside(function: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
    """Call something in a thread of its own; its result to come."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **named))
        except BaseException as e:  # noqa: BLE001  it is for whoever asks for the result
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def pair(
    listener: rdmaconnect.Listener, url: str = "", **options: Any
) -> tuple[rdmaconnect.Connection, rdmaconnect.Connection]:
    """A connection: the end that connected, and the one that was accepted."""
    accepted = aside(listener.accept, deadline_s=10)
    here = rdmaconnect.connect(url or listener.url, deadline_s=10, **options)
    return here, accepted.result()


class Campaign:
    """Counts of one campaign.

    Attributes:
        counts: what -> how often.
        foreign: exceptions that are none of the library's, each with where it came from first.
        said: count of a failure -> the words of the first.
        peak_mib: the most resident memory while it ran.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.foreign: dict[str, str] = {}
        self.said: dict[str, str] = {}
        self._overdue: list[tuple[str, float, float, float]] = []
        self.notes: list[str] = []
        self._took: defaultdict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self.began = time.monotonic()
        reset_peak()

    def call(
        self, what: str, function: Callable[..., Any], *args: Any, within_s: float | None = None, **named: Any
    ) -> Any:
        """Call something, and count what came of it.

        Args:
            what: its name in the counts.
            within_s: the deadline, by which it must be back.

        Returns:
            Its result; None if it raised.
        """
        began = time.monotonic()
        try:
            result = function(*args, **named)
        except BaseException as e:  # noqa: BLE001  that is what is counted
            self.raised(what, e)
            result = None
        else:
            self.count(f"{what}: ok")
        self.took(what, time.monotonic() - began, within_s)
        return result

    def count(self, what: str, number: int = 1) -> None:
        """So many more."""
        with self._lock:
            self.counts[what] += number

    def raised(self, what: str, error: BaseException) -> None:
        """An exception came out of a call."""
        self.count(f"{what}: {type(error).__name__}")
        self.said.setdefault(f"{what}: {type(error).__name__}", str(error))
        if not isinstance(error, rdmaconnect.RdmaConnectError):
            words = f"{what}: {type(error).__name__}: {str(error)[:200]}"
            with self._lock:
                self.foreign.setdefault(words, "".join(traceback.format_exception(error)))

    def took(self, what: str, seconds: float, within_s: float | None = None) -> None:
        """A call took so long."""
        with self._lock:
            self._took[what].append(seconds)
        if within_s is not None and seconds > within_s + LATE_S:
            self._overdue.append((what, seconds, within_s, time.monotonic()))

    def late(self) -> list[str]:
        """Calls that outlived their deadlines by more than the machine was too slow, in words."""
        if self._overdue:
            machine().look()
        found = []
        for what, seconds, within_s, end in self._overdue:
            behind = machine().behind_s(end - seconds, end)
            if seconds > within_s + LATE_S + behind:
                found.append(f"{what}: {seconds:.2f} s of {within_s:g} s (the machine: {behind:.2f} s)")
        return found

    def median_ms(self, what: str) -> float:
        """Of the calls of that name."""
        return statistics.median(self._took[what] or [0.0]) * 1000

    def failures(self) -> dict[str, int]:
        """The counts of what did not go well."""
        return {what: n for what, n in self.counts.items() if not what.endswith(": ok") and ": " in what}

    def note(self, words: str) -> None:
        """For the line."""
        self.notes.append(words)

    def line(self) -> str:
        """All of it, on one line."""
        words = [f"{n} {what}" for what, n in self.counts.items()]
        words += [f"{w} median {self.median_ms(w):.1f} ms, max {max(t) * 1000:.0f} ms" for w, t in self._took.items()]
        words += self.notes
        seconds = time.monotonic() - self.began
        return f"{self.name}: {'; '.join(words)}; peak {status('VmHWM') // 1024} MiB; {seconds:.1f} s"


class Flat:
    """What must not grow from one round to the next, once the first few have been."""

    def __init__(self, counted: Campaign, warm: int) -> None:
        self._counted, self._warm, self._rounds = counted, warm, 0
        self._before = (0, 0, 0)

    @staticmethod
    def _now() -> tuple[int, int, int]:
        wakeup._spare.clear()  # kept for the next calls that sleep, as many as slept at once, 32 at most
        gc.collect()
        return descriptors(), threading.active_count(), status("VmRSS") // 1024

    def round(self) -> None:
        """One more is over."""
        self._rounds += 1
        if self._rounds == self._warm:
            time.sleep(0.5)
            self._before = self._now()

    def check(self, more_mib: int = 24) -> None:
        """Nothing has grown."""
        before = self._before
        until(lambda: self._now()[0] <= before[0] + 8, 8)
        until(lambda: self._now()[1] <= before[1] + 2, 8)  # workers without work end after 5 s
        now = self._now()
        self._counted.note(f"descriptors, threads, MiB: {before} then, {now} at the end")
        assert now[0] <= before[0] + 8
        assert now[1] <= before[1] + 2
        assert now[2] <= before[2] + more_mib


class Machine:
    """A process that does nothing but look by how much this machine is too slow just now.

    It sleeps, and sees how late it wakes; and it adds up for how long the threads of this process and of its children
    could have run and had no processor: whoever has the interpreter's lock meanwhile holds up all others.

    Source: proc(5), /proc/pid/task/tid/schedstat: its second number, in ns; /proc/pid/task/tid/children.
    """

    _PROGRAM = (
        "import glob, os, sys, time\n"
        "def read(name):\n"
        " try: return open(name).read().split()\n"
        " except OSError: return []\n"
        "def delays():\n"
        " pids, found = [sys.argv[1]], {}\n"
        " for pid in pids:\n"
        "  for task in glob.glob(f'/proc/{pid}/task/*'):\n"
        "   pids += {*read(f'{task}/children')} - {str(os.getpid())}\n"
        "   for waited in read(f'{task}/schedstat')[1:2]: found[task] = int(waited) / 1e9\n"
        " return found\n"
        "before = delays(); looks = 5\n"
        "while True:\n"
        " began = time.monotonic(); late = 0.0\n"
        " for _ in range(looks):\n"
        "  n = time.monotonic(); time.sleep(0.01); d = time.monotonic() - n - 0.01\n"
        "  late += d if d > 0.03 else 0\n"
        " n = time.monotonic(); after = delays(); end = time.monotonic()\n"
        # of 1,000 threads it takes long: it is to take no more than a tenth of a processor from them
        " looks = max(5, int((end - n) * 1000))\n"
        " waited = sum(s - before.get(name, 0) for name, s in after.items())\n"
        " before = after; late += waited if waited > 0.03 else 0\n"
        " print(began, end, late, flush=True)\n"
    )

    def __init__(self) -> None:
        program = [sys.executable, "-c", self._PROGRAM, str(os.getpid())]
        self._process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        #: when it began to look, when it had looked, and the seconds that were lost between
        self._seen: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, end, late = map(float, line.split())
            self._seen.append((began, end, late))

    def look(self) -> None:
        """Wait until it has seen all that was until now."""
        now = time.monotonic()
        until(lambda: self._seen and self._seen[-1][0] >= now)

    def behind_s(self, since: float, to: float) -> float:
        """Seconds by which it was too slow in all between two times of the monotonic clock, or about them."""
        return sum(late for began, end, late in list(self._seen) if began <= to and end >= since)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


_machine: Machine | None = None


def machine() -> Machine:
    """The one of this process; it knows of what was since it was first asked for."""
    global _machine
    if _machine is None:
        _machine = Machine()
        atexit.register(_machine.close)
    return _machine


#: the lines of all campaigns
LINES: list[str] = []


@contextlib.contextmanager
def campaign(name: str) -> Iterator[Campaign]:
    """A campaign that ends with its line, and fails with what no campaign may see."""
    machine()
    made = Campaign(name)
    try:
        yield made
    finally:
        LINES.append(made.line())
    assert made.foreign == {}, "\n".join(made.foreign.values())
    late = made.late()
    assert late == [], "\n".join(late)
