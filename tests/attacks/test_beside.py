"""Honest connectors beside an attacker of each kind: none fails, and memory and descriptors stay within bounds."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from software import Software
from software.world import MOST_GUARDS

import rdmaconnect
from rdmaconnect.exchange.alive import open_channels

from .attackers import KINDS, NOWHERE
from .campaign import SCALE, Campaign, descriptors, status, until

#: seconds of each attack
SECONDS = min(0.2 * SCALE, 10.0)
#: what an attacker may cost, MiB of resident memory: 1,024 strangers with 64 KiB each, and ZeroMQ's own
MEMORY_MIB = 160


class Attacker:
    """The attackers' process."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("attackers.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, kind: str, port: int, seconds: float) -> None:
        """Begin one attack."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {port} {seconds}\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Until it is over; how often it was done."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    made = Attacker()
    yield made
    made.close()


class Server:
    """Accepts whoever comes, and says a word to each.

    Attributes:
        listener: of this host.
    """

    def __init__(self, counted: Campaign, **options: Any) -> None:
        self._counted, self._over = counted, threading.Event()
        self.listener = rdmaconnect.listen("127.0.0.1:0", **options)
        self._threads = [threading.Thread(target=self._serve) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection = self.listener.accept(deadline_s=0.2)
            except rdmaconnect.ConnectTimeout:
                continue
            except BaseException as e:  # noqa: BLE001  that is what is counted
                self._counted.raised("accept", e)
                return
            self._counted.count("accepted")
            with connection:
                try:
                    connection.send(b"word", deadline_s=1)
                except rdmaconnect.RdmaConnectError:  # an attacker has no queue pair
                    self._counted.count("accepted from an attacker")

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.listener.close()


def honest(counted: Campaign, url: str, over: threading.Event, **options: Any) -> None:
    """Connect again and again, and take the word."""
    while True:
        connection = counted.call("connect", rdmaconnect.connect, url, deadline_s=10, **options)
        if connection is not None:
            with connection:
                counted.count("got the word", connection.recv(deadline_s=5) == b"word")
        if over.wait(0.02):
            return


def beside(software: Software, counted: Campaign, attacker: Attacker, kind: str, **options: Any) -> None:
    """One attack, and two honest connectors beside it."""
    # nobody there: that is known only after a while
    software.on("ibv_modify_qp", dgid=NOWHERE, delay=2.0, fail=errno.ETIMEDOUT)
    server = Server(counted, **options)
    before = status("VmRSS") // 1024, descriptors()
    attacker.start(kind, server.listener.port, SECONDS)
    time.sleep(0.05)
    over = threading.Event()
    connectors = [
        threading.Thread(target=honest, args=(counted, server.listener.url, over), kwargs=options) for _ in range(2)
    ]
    for thread in connectors:
        thread.start()
    did = attacker.wait()
    over.set()
    for thread in connectors:
        thread.join()
    server.close()
    counted.note(f"{did} attacks")
    # the device in software guards the numbers of its last descriptors; a hello for 4,096 queue pairs takes its time
    back = until(lambda: open_channels() == 0 and descriptors() <= before[1] + 12 + MOST_GUARDS, 15)
    back = until(lambda: software.left() == {}, 60) and back
    counted.note(f"{before[0]} MiB before, {status('VmRSS') // 1024} after")
    assert counted.counts["connect: ok"] == counted.counts["got the word"] > 0
    assert counted.failures() == {}, counted.said
    assert back, (open_channels(), descriptors(), before)
    assert status("VmHWM") // 1024 < before[0] + MEMORY_MIB


@pytest.mark.parametrize("kind", KINDS)
def test_honest_connectors_beside(software: Software, counted: Campaign, attacker: Attacker, kind: str) -> None:
    beside(software, counted, attacker, kind)


@pytest.mark.parametrize(
    "kind", ["none", "idle", "greeted", "mechanism", "garbage", "broken_zmtp", "plain", "wrong_key"]
)
def test_honest_connectors_of_a_protected_listener_beside(
    software: Software, counted: Campaign, attacker: Attacker, kind: str
) -> None:
    beside(software, counted, attacker, kind, secret="a secret of thirty-two characters")


@pytest.mark.parametrize("kind", ["descriptors", "greeted", "halves"])
def test_honest_connectors_where_descriptors_are_scarce(
    software: Software, counted: Campaign, attacker: Attacker, kind: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 128, before[1]))
    try:
        beside(software, counted, attacker, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
