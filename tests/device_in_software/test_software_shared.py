"""A network of the device in software that several processes are on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import TESTS
from software import Network, Software

import rdmaconnect
from rdmaconnect import CompletionError, PeerClosed, RdmaConnectError

Start = Callable[[str], "subprocess.Popen[str]"]
#: seconds that nothing here takes
PATIENCE_S = 20

LISTENER = """
import sys
import rdmaconnect
from software import Network, Software

memory = bytearray(b"of the listener" + bytes(1 << 18))
with Software(network=Network.shared(sys.argv[1])) as software:
    with rdmaconnect.listen("127.0.0.1:0", regions={"m": memory}) as listener:
        print(listener.url, flush=True)
        with listener.accept(deadline_s=20) as connection:
            while True:
                try:
                    message = connection.recv(deadline_s=20)
                except rdmaconnect.PeerClosed:
                    break
                connection.send(message[::-1])
    problems = software.problems()
print(*problems, flush=True)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Software]:
    with Software(network=Network.shared(str(tmp_path))) as software:
        yield software
        assert software.problems() == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program on the same network."""
    running: list[subprocess.Popen[str]] = []

    def begin(program: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        command = [sys.executable, "-c", program, str(tmp_path)]
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_two_processes_are_connected(
    shared: Software, start: Callable[[str], subprocess.Popen[str]], qp_type: str
) -> None:
    peer = start(LISTENER)
    assert peer.stdout is not None
    with rdmaconnect.connect(peer.stdout.readline().strip(), qp_type=qp_type, deadline_s=PATIENCE_S) as connection:
        for size in (0, 1, 1000):
            message = os.urandom(size)
            connection.send(message)
            assert connection.recv(deadline_s=PATIENCE_S) == message[::-1]
        if qp_type == "RC":
            assert connection.read("m", 15) == b"of the listener"
            data = os.urandom(1 << 18)
            connection.write(data, "m")
            assert connection.read("m", 1 << 18) == data
    assert peer.communicate(timeout=PATIENCE_S) == ("\n", None)


def test_a_killed_process_answers_nothing_any_more(shared: Software, start: Start) -> None:
    shared.network.ack_timeout_s = 0.2
    peer = start(LISTENER)
    assert peer.stdout is not None
    with rdmaconnect.connect(peer.stdout.readline().strip(), deadline_s=PATIENCE_S) as connection:
        connection.send(b"x")
        assert connection.recv(deadline_s=PATIENCE_S) == b"x"
        peer.send_signal(signal.SIGKILL)
        peer.wait(PATIENCE_S)
        before = time.monotonic()
        with pytest.raises((CompletionError, PeerClosed)):
            connection.send(b"nobody")
        assert time.monotonic() - before < PATIENCE_S


def test_a_stopped_process_is_waited_for(shared: Software, start: Start) -> None:
    peer = start(LISTENER)
    assert peer.stdout is not None
    with rdmaconnect.connect(peer.stdout.readline().strip(), deadline_s=PATIENCE_S) as connection:
        peer.send_signal(signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        with pytest.raises(RdmaConnectError):
            connection.send(b"later", deadline_s=0.3)
        peer.send_signal(signal.SIGCONT)
        assert connection.recv(deadline_s=PATIENCE_S) == b"retal"


def test_what_a_process_sends_is_lost_by_its_own_network(shared: Software, start: Start) -> None:
    shared.network.ack_timeout_s = 0.2
    peer = start(LISTENER)
    assert peer.stdout is not None
    with rdmaconnect.connect(peer.stdout.readline().strip(), deadline_s=PATIENCE_S) as connection:
        with shared.network.cut("127.0.0.1", "127.0.0.1") as cut, pytest.raises(CompletionError, match="RETRY_EXC"):
            connection.send(b"x")
        assert cut.seen > 1
