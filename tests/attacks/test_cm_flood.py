"""A flood of requests by rdma_cm that nobody means to complete: memory is bounded, and others are served."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from software import RdmaCm, Software

import rdmaconnect
from rdmaconnect.abi.rdma_cma import CmEventType
from rdmaconnect.runtime.peer_log import throttle
from rdmaconnect.runtime.workers import THREADS_MAX

from .campaign import Campaign, aside, scaled, status, until
from .puppets import Puppet, param

E = CmEventType
PORT = 7174
URL = f"rdma://127.0.0.1:{PORT}"


class Logged(logging.Handler):
    """How many lines the log has had, those that were left out included."""

    def __init__(self) -> None:
        super().__init__()
        self.told = self.lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Counts it, before it is known whether it is left out."""
        self.told += "accept on" in str(record.msg)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        self.lines += 1


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What the log of peers is told, and what comes of that."""
    log, handler = logging.getLogger("rdmaconnect.peers"), Logged()
    log.filters.insert(0, handler)
    log.addHandler(handler)
    before, propagates = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    throttle.reset()
    yield handler
    log.setLevel(before)
    log.propagate = propagates
    log.removeHandler(handler)
    log.filters.remove(handler)


@pytest.mark.parametrize("stays", [True, False], ids=["and stay", "and go at once"])
def test_requests_that_are_never_completed(
    software: Software, cm: RdmaCm, counted: Campaign, logged: Logged, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmaconnect.session.cm_listen.SILENT_S", 0.3)
    number, most = scaled(600, 20_000), 16
    over = threading.Event()
    cm.on_tell = lambda told, kind: counted.count(str(kind))
    with rdmaconnect.listen(URL, max_half_open=most, recv_depth=2, recv_size=64) as listener:

        def flood(seed: int) -> None:
            there: deque[Puppet] = deque()
            for i in range(number // 4):
                one = Puppet(cm)
                one.ask(PORT, param(b"never", i + 1))
                counted.count("requests")
                if stays:
                    counted.count("answers", (event := one.take(0.5)) is not None and event.kind is E.CONNECT_RESPONSE)
                there.append(one)
                while there and (len(there) > 100 or not stays):
                    there.popleft().close()
            while there:
                there.popleft().close()

        def serve() -> None:
            while not listener.closed:
                made = counted.call("accept", listener.accept, deadline_s=0.2)
                if made is not None:
                    made.close()

        def be_honest() -> None:
            while not over.is_set():
                counted.call("an honest connect", rdmaconnect.connect, URL, deadline_s=20).close()

        before = status("VmRSS")
        serving = aside(serve)
        flooding = [aside(flood, i) for i in range(4)]
        peak = held = 0
        honest = aside(be_honest)
        while not all(one.done() for one in flooding):
            peak = max(peak, len(software.objects("qp")))
            held = max(held, len(listener._reader.channel.ids))
            time.sleep(0.005)
        for one in flooding:
            one.result()
        over.set()
        honest.result()
        listener.close()
        serving.result()
        assert until(lambda: not cm.ids, 10)
        gc.collect()
        counted.note(f"{peak} queue pairs and {held} identifiers at most; {status('VmRSS') - before} KiB more")
        counted.note(f"the log was told {logged.told} times, and has {logged.lines} lines")
    assert peak <= most + 2  # an honest connector's, besides
    assert held <= most + THREADS_MAX + 2
    assert counted.failures().keys() <= {"accept: ConnectTimeout", "accept: StateError"}
    assert counted.counts["an honest connect: ok"] > 0
    assert logged.told + counted.counts["an honest connect: ok"] >= counted.counts["CONNECT_REQUEST"]
