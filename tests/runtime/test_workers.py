"""Threads for what blocks: as many as there is work for, never in the way of the end, and each in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
from places import ROOT

from rdmaconnect.runtime import workers
from rdmaconnect.runtime.workers import Workers, here

PATIENCE_S = 10.0


class Gate:
    """Work that ends when it may."""

    def __init__(self) -> None:
        self.open, self.lock = threading.Event(), threading.Lock()
        self.now = self.most = 0

    def __call__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.open.wait(PATIENCE_S)
        with self.lock:
            self.now -= 1


def wait_until(seconds: float, look: object) -> None:
    end = time.monotonic() + seconds
    while not look():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.002)


def test_what_is_done_gives_its_result_or_its_error() -> None:
    made = Workers(4)
    error = KeyboardInterrupt("of the work")

    def fail() -> None:
        raise error

    assert made.submit(lambda: 7).result(PATIENCE_S) == 7
    with pytest.raises(KeyboardInterrupt) as caught:
        made.submit(fail).result(PATIENCE_S)
    assert caught.value is error
    assert made.submit(lambda: 8).result(PATIENCE_S) == 8, "the thread of the one that failed lives on"
    given = Future[int]()
    assert made.submit(lambda: 9, given) is given
    assert given.result(PATIENCE_S) == 9


def test_as_much_is_done_at_once_as_there_is_and_no_more_than_the_most() -> None:
    made, gate = Workers(5), Gate()
    results = [made.submit(gate) for _ in range(12)]
    wait_until(PATIENCE_S, lambda: gate.now == 5)
    time.sleep(0.05)
    assert gate.most == 5
    assert not any(result.done() for result in results)
    gate.open.set()
    for result in results:
        result.result(PATIENCE_S)
    assert gate.most == 5


def test_one_that_blocks_holds_up_nobody_else() -> None:
    made, gate = Workers(), Gate()
    blocked = [made.submit(gate) for _ in range(workers.THREADS_MAX // 8)]
    assert made.submit(lambda: "at once").result(PATIENCE_S) == "at once"
    gate.open.set()
    for result in blocked:
        result.result(PATIENCE_S)


def test_what_has_not_begun_can_be_cancelled_and_is_not_done() -> None:
    made, gate, done = Workers(1), Gate(), list[str]()
    first = made.submit(gate)
    wait_until(PATIENCE_S, lambda: gate.now == 1)
    second, third = made.submit(lambda: done.append("second")), made.submit(lambda: done.append("third"))
    assert second.cancel()
    assert not first.cancel()
    gate.open.set()
    third.result(PATIENCE_S)
    assert done == ["third"]
    with pytest.raises(CancelledError):
        second.result()


def test_threads_without_work_end_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_IDLE_S", 0.05)
    made, gate = Workers(), Gate()
    before = threading.active_count()
    results = [made.submit(gate) for _ in range(20)]
    wait_until(PATIENCE_S, lambda: gate.now == 20)
    assert threading.active_count() >= before + 19
    gate.open.set()
    for result in results:
        result.result(PATIENCE_S)
    wait_until(PATIENCE_S, lambda: made._threads == 1)
    wait_until(PATIENCE_S, lambda: threading.active_count() <= before)
    assert made.submit(lambda: "still there").result(PATIENCE_S) == "still there"


def test_where_no_more_threads_can_be_started_the_work_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Workers()
    wait_until(PATIENCE_S, lambda: made._idle == 1)

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        results = [made.submit(lambda number=number: number) for number in range(5)]
        assert [result.result(PATIENCE_S) for result in results] == list(range(5))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Workers()
    assert made.submit(lambda: 7).result(PATIENCE_S) == 7


def test_a_result_is_not_kept_by_the_thread_that_made_it() -> None:
    import gc
    import weakref

    class Thing:
        pass

    made = Workers(1)
    result = made.submit(Thing)
    seen = weakref.ref(result.result(PATIENCE_S))
    made.submit(int).result(PATIENCE_S)
    del result
    wait_until(PATIENCE_S, lambda: (gc.collect(), seen() is None)[1])


def test_there_is_one_for_each_network_namespace_and_process() -> None:
    assert here() is here()
    seen: list[Workers] = []
    threads = [threading.Thread(target=lambda: seen.append(here())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {here()}
    mine = os.stat("/proc/thread-self/ns/net").st_ino
    look = here().submit(lambda: os.stat("/proc/thread-self/ns/net").st_ino)
    assert look.result(PATIENCE_S) == mine


def test_a_child_has_workers_of_its_own() -> None:
    mine = here()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            other = here()
            code = 0 if other is not mine and other.submit(lambda: 7).result(PATIENCE_S) == 7 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert here() is mine


ENDS = """
import time
from rdmaconnect.runtime.workers import here
for _ in range(3):
    here().submit(lambda: time.sleep(600))
time.sleep(0.1)
print("over", flush=True)
"""


def test_a_process_ends_though_something_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
