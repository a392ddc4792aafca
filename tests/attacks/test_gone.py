"""Peers that are killed or stopped, and networks that break one of two paths: who is gone is known, and nobody else."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy
from software import Network, Software

import rdmaconnect
from rdmaconnect.protocol.health import HealthState

from .campaign import Campaign, aside, scaled, until
from .children import Child

SECRET = {"secret": "a secret of thirty-two characters"}
TYPES = pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])

BUSY = """
def load(connection):  # data both ways, for as long as anybody is there
    def send():
        while True: connection.send(b"x" * 64)
    threading.Thread(target=send, daemon=True).start()
    while True: connection.recv(deadline_s=None)
"""
CONNECTS = BUSY + "load(rdmaconnect.connect(url, deadline_s=20, qp_type=qp_type, **options))"
LISTENS = (
    BUSY
    + """
listener = rdmaconnect.listen("127.0.0.1:0", **options)
say(listener.url)
load(listener.accept(deadline_s=20))
"""
)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Software]:
    """A device on a network that children are on too."""
    with Software(network=Network.shared(str(tmp_path))) as made:
        yield made
        until(lambda: made.left() == {}, 30)
        assert made.problems() == []


class Load:
    """Data both ways over one connection, and what ends it; what is seen of its peer, with the times."""

    def __init__(self, connection: rdmaconnect.Connection) -> None:
        self.connection = connection
        self.moved = 0
        self.seen: list[tuple[float, rdmaconnect.Health]] = []
        self.ended: dict[str, tuple[float, BaseException]] = {}
        connection.on_change(lambda health: self.seen.append((time.monotonic(), health)))
        self._threads = {name: threading.Thread(target=self._run, args=(name,)) for name in ("send", "recv")}
        for thread in self._threads.values():
            thread.start()

    def _run(self, name: str) -> None:
        try:
            while True:
                if name == "send":
                    self.connection.send(b"x" * 64, deadline_s=20)
                else:
                    self.connection.recv(deadline_s=20)
                self.moved += 1
        except rdmaconnect.RdmaConnectError as e:
            self.ended[name] = time.monotonic(), e

    def join(self, *names: str) -> None:
        """Until these have ended, or both."""
        for name in names or self._threads:
            self._threads[name].join(30)


@TYPES
@pytest.mark.parametrize("killed", ["connector", "listener"])
@pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "protected"])
def test_a_peer_that_is_killed_under_load_is_named(
    shared: Software, tmp_path: Path, counted: Campaign, killed: str, qp_type: str, options: dict[str, str]
) -> None:
    trials = scaled(1, 20)
    for _ in range(trials):
        with ExitStack() as stack:
            if killed == "connector":
                listener = stack.enter_context(rdmaconnect.listen("127.0.0.1:0", **options))
                accepted = aside(listener.accept, deadline_s=20)
                child = Child(CONNECTS, str(tmp_path), url=listener.url, options=options, qp_type=qp_type)
                connection = accepted.result()
            else:
                child = Child(LISTENS, str(tmp_path), options=options)
                connection = rdmaconnect.connect(child.line(), deadline_s=20, qp_type=qp_type, **options)
            stack.enter_context(child)
            stack.enter_context(connection)
            load = Load(connection)
            assert until(lambda: load.moved > 20)  # noqa: B023 - it is used up at once
            began = time.monotonic()
            child.signal(signal.SIGKILL)
            load.join("recv")
            first = next(when for when, health in load.seen if health.state is not HealthState.ALIVE)
            counted.took("suspected", first - began, 1)
            when, error = load.ended["recv"]
            # two refusals are a second apart; over RC the device tells before
            counted.took(f"told {qp_type}", when - began, 1 if qp_type == "RC" else 1.5)
            counted.count("right", isinstance(error, rdmaconnect.PeerClosed) and "the peer is gone: " in str(error))
            counted.count("dead", connection.health.state is HealthState.DEAD)
    assert counted.counts["dead"] == trials
    assert counted.counts["right"] == trials


def test_a_stopped_peer_is_not_gone(shared: Software, tmp_path: Path, counted: Campaign) -> None:
    # SIGSTOP for less than the silence that is allowed: nobody may be blamed for it, on either side
    child = Child(LISTENS, str(tmp_path), options={})
    with child, rdmaconnect.connect(child.line(), deadline_s=20, qp_type="UD") as connection:
        load = Load(connection)
        for _ in range(scaled(1, 20)):
            child.signal(signal.SIGSTOP)
            time.sleep(scaled(1, 6))
            child.signal(signal.SIGCONT)
            before = load.moved
            counted.count("goes on", until(lambda: load.moved > before + 20))  # noqa: B023
            counted.count("dead", connection.lost is not None)
        child.signal(signal.SIGKILL)
        load.join("recv")
    assert counted.counts["dead"] == 0
    assert counted.counts["goes on"] == scaled(1, 20)


@TYPES
@pytest.mark.parametrize("trouble", ["reset", "one way", "refused"])
def test_a_broken_side_channel_ends_nothing(
    software: Software, counted: Campaign, trouble: str, qp_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "one way":  # ten seconds of silence each time
        monkeypatch.setattr("rdmaconnect.exchange.alive.TICK_S", 0.1)
        monkeypatch.setattr("rdmaconnect.protocol.health.DOUBT_S", 7.0)
        monkeypatch.setattr("rdmaconnect.protocol.health.REDIAL_S", 14.0)
        monkeypatch.setattr("rdmaconnect.protocol.health.ANSWER_S", 14.0)
    trials = scaled(3, 50)
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        proxy = Proxy(listener.port)
        accepted = aside(listener.accept, deadline_s=20)
        here = rdmaconnect.connect(f"127.0.0.1:{proxy.port}", qp_type=qp_type, deadline_s=20)
        there = accepted.result()
        loads = [Load(here), Load(there)]
        for trial in range(trials):
            taken, moved = proxy.taken, [load.moved for load in loads]
            if trouble == "one way":
                proxy.cut(of_connector=trial % 2 == 0)
            else:
                if trouble == "refused":
                    proxy.refuse(0.5)
                proxy.reset()
            counted.count("resumed", until(lambda: proxy.taken > taken))  # noqa: B023
            states = [end.health.state for end in (here, there)]
            counted.count("dead", states.count(HealthState.DEAD))
            counted.count("alive", until(lambda: _alive(here, there)))
            went_on = until(lambda: all(load.moved > was for load, was in zip(loads, moved, strict=True)))  # noqa: B023
            counted.count("goes on", went_on)
        here.close()
        there.close()
        for load in loads:
            load.join()
        proxy.close()
    assert dict(counted.counts) == {"resumed": trials, "alive": trials, "goes on": trials, "dead": 0}


def _alive(*ends: Any) -> bool:
    return all(end.health.state is HealthState.ALIVE for end in ends)


def test_a_cut_data_path_is_named_as_such(software: Software, counted: Campaign) -> None:
    software.network.ack_timeout_s = 0.05
    for _ in range(scaled(3, 20)):
        with rdmaconnect.listen("127.0.0.1:0") as listener:
            accepted = aside(listener.accept, deadline_s=20)
            here = rdmaconnect.connect(listener.url, deadline_s=20)
            there = accepted.result()
            with software.network.lose(lambda message: True):
                error = aside(here.send, b"lost").exception()
            counted.count("named", "RETRY_EXC_ERR" in str(error) and "The peer is there: it has" in str(error))
            counted.count("dead", HealthState.DEAD in (here.health.state, there.health.state))
            here.close()
            there.close()
    assert dict(counted.counts) == {"named": scaled(3, 20), "dead": 0}
