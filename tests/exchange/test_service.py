"""The service thread: one in each process, asleep while nothing happens, and quiet at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from exchange_ends import PATIENCE_S, calling, channels, place, until
from places import ROOT

from rdmaconnect.exchange import service


def test_there_is_one_whoever_asks_first() -> None:
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(service.loop())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {service.loop()}
    named = [thread for thread in threading.enumerate() if thread.name == "rdmaconnect-exchange"]
    assert len(named) == 1
    assert named[0].daemon


def test_what_is_done_there_gives_its_result_or_its_error() -> None:
    error = KeyboardInterrupt("of the work")

    def fail() -> None:
        raise error

    assert service.do(lambda: threading.current_thread().name) == "rdmaconnect-exchange"
    assert service.do(lambda: service.do(lambda: 7)) == 7, "from the thread itself too"
    with pytest.raises(KeyboardInterrupt) as caught:
        service.do(fail)
    assert caught.value is error
    assert service.do(lambda: 8) == 8, "the thread lives on"


def test_what_is_to_be_called_soon_is_called_in_its_order() -> None:
    seen: list[int] = []
    for number in range(100):
        service.soon(seen.append, number)
    service.do(lambda: None)
    assert seen == list(range(100))


def test_it_sleeps_while_nothing_happens() -> None:
    with place() as where, calling(where) as here:
        here.send(b"x")
        there = where.next()
        there.take()
        where.know(there)
        task = service.do(threading.get_native_id)

        def used() -> int:
            fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        before = used()
        time.sleep(1.5)
        assert used() - before <= 5, "hundredths of a second of CPU in 1.5 s"
        there.channel.close()


def test_ticks_end_with_the_last_channel() -> None:
    from rdmaconnect.exchange import alive

    with place() as where, calling(where) as here:
        here.send(b"x")
        where.next().take()
        assert service.do(lambda: alive._ticking)
    until(lambda: channels() == 0)
    until(lambda: not service.do(lambda: alive._ticking))


def test_a_child_has_one_of_its_own() -> None:
    mine = service.do(threading.get_native_id)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            other = service.do(threading.get_native_id)
            code = 0 if other != mine and service.do(lambda: 7) == 7 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert service.do(threading.get_native_id) == mine


ENDS = {
    "at once": "from rdmaconnect.exchange import service; service.loop()",
    "with daemons that ask": """
import contextlib, threading, time
from rdmaconnect.exchange import service
def ask():
    with contextlib.suppress(RuntimeError):
        while True:
            service.do(lambda: 7)
            service.soon(int)
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
""",
    "by an exception": "from rdmaconnect.exchange import service; service.loop(); import sys; sys.exit(7)",
    "something at its end uses it": """
import atexit
from rdmaconnect.exchange import service
service.loop()
def late():
    service.soon(print, "never")
    try:
        service.loop()
    except RuntimeError as e:
        assert "nothing is exchanged any more" in str(e)
import rdmaconnect.exchange.service as s
atexit.unregister(s._stop)
atexit.register(late)
atexit.register(s._stop)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_process_ends_quietly_and_at_once(how: str) -> None:
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENDS[how]], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (7 if "exception" in how else 0, "", "")
    assert time.monotonic() - before < PATIENCE_S
