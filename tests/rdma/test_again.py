"""Connections that come back by themselves: their peer is killed and comes again, their port goes down and up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from attacks.campaign import scaled, status, until
from fork_server import ForkServer
from nodes import PATIENCE, Node, connected, ours

from rdmaconnect import Connection, DeadlineExceeded, OutcomeUnknown
from rdmaconnect.runtime import wakeup

TYPES = ("RC", "UC", "UD")

# A server puts down each number that it was sent, and sends it back.
PROGRAM = """
    import os, sys
    import rdmaconnect

    def play(address, device):
        options = {} if device == "-" else {"device": device}
        with rdmaconnect.listen(address, **options) as listener:
            conn = listener.accept(deadline_s=None)
            while True:
                number = conn.recv(deadline_s=None)
                os.write(journal, b"%d %s\\n" % (os.getpid(), number))
                conn.send(number, deadline_s=None)

    journal = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
"""


class Servers:
    """Servers that are to be killed, one after the other."""

    def __init__(self, node: Node, address: str, journal: Path) -> None:
        self._server, self._address, self._pid = ForkServer(node, PROGRAM, journal), address, 0

    def start(self) -> None:
        self._pid = self._server.start(self._address, self._server.device)

    def kill(self, *ends: int) -> None:
        """kill -9; with what else it may have ended before."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        assert self._server.wait() in (-signal.SIGKILL, *ends)

    def close(self) -> None:
        self._server.close()


@contextmanager
def servers_on(node: Node, address: str, journal: Path) -> Iterator[Servers]:
    """The last of them is killed in the end."""
    made = Servers(node, address, journal)
    made.start()
    try:
        yield made
    finally:
        made.kill(1)  # its peer has gone
        made.close()


def wait_for(generation: int, *connections: Connection) -> None:
    """Until they have all come so far."""
    end = time.monotonic() + 2 * PATIENCE
    while any(one.generation < generation for one in connections):
        assert time.monotonic() < end, [(one.generation, str(one.health), str(one.lost)) for one in connections]
        time.sleep(0.01)


@pytest.mark.parametrize("kind", TYPES)
def test_kill_and_rejoin(node1: Node, node2: Node, kind: str, tmp_path: Path) -> None:
    """Of each number it is known what became of it, and nothing grows from one life to the next."""
    cycles = scaled(3, 200)
    address, journal, over = f"{node2.address}:18710", tmp_path / "journal", threading.Event()
    sent: list[int] = []
    unknown: list[int] = []
    came: list[bytes] = []

    def send(conn: Connection) -> None:
        number = 0
        while not over.is_set():
            try:
                conn.send(b"%d" % number, deadline_s=2 * PATIENCE)
                sent.append(number)
            except OutcomeUnknown as e:
                assert e.generation <= conn.generation  # noqa: PT017  of a life that was
                unknown.append(number)
            number += 1
            over.wait(0.01)

    def receive(conn: Connection) -> None:
        while not over.is_set():
            with suppress(DeadlineExceeded):  # the last one may have come before it was the last
                came.append(conn.recv(deadline_s=1))

    took: list[float] = []
    seen: list[tuple[int, int, int]] = []
    with servers_on(node2, address, journal) as servers, ExitStack() as stack:
        connecting = node1.connect(address, qp_type=kind, auto_reconnect=2 * PATIENCE)
        conn = stack.enter_context(connecting.result(2 * PATIENCE))
        users = [node1.start(user, conn) for user in (send, receive)]
        for cycle in range(cycles):
            time.sleep(0.2)
            servers.kill()
            killed = time.monotonic()
            servers.start()
            wait_for(cycle + 2, conn)
            took.append(time.monotonic() - killed)
            wakeup._spare.clear()
            seen.append((len(os.listdir("/proc/self/fd")), len(ours()), status("VmRSS") // 1024))
        time.sleep(0.5)
        # what watches this host comes and goes meanwhile, with 9 descriptors
        assert until(lambda: len(os.listdir("/proc/self/fd")) <= seen[0][0] + 4, 15), seen
        over.set()
        for user in users:
            user.result(3 * PATIENCE)
        assert conn.lost is None
        assert conn.generation == cycles + 1
    lines = [line.split() for line in journal.read_bytes().splitlines()]
    times = Counter(number for _, number in lines)
    print(
        f"\n{kind}: {cycles} kills, {len(sent)} sent, {len(unknown)} unknown, {len(lines)} arrived, {len(came)} back; "
        f"again after {sorted(took)[len(took) // 2]:.2f} s, at most {max(took):.2f} s; "
        f"descriptors, resources, MiB: {seen[0]} then, {seen[-1]} at the end"
    )
    assert set(times.values()) == {1}  # nothing twice
    assert set(map(int, times)) <= {*sent, *unknown}
    assert len(unknown) <= cycles
    if kind == "RC":  # what was sent and not put down was in the memory of a server that was killed
        assert len(set(sent) - set(map(int, times))) <= 18 * cycles
    assert len(set(came)) == len(came)
    assert set(came) <= set(times)
    assert seen[-1][1] <= seen[0][1] + 2
    assert seen[-1][2] <= seen[0][2] + 32


def test_a_port_that_goes_down_and_comes_up(node1: Node, node2: Node) -> None:
    """Both sides come back by themselves, and what had come and was not read is read first."""
    wishes = {"auto_reconnect": 2 * PATIENCE}
    with connected(node1, node2, connect=wishes, listen=wishes) as (here, there):
        here.send(b"unread")
        node1.run("ip", "link", "set", node1.netdev, "down")
        try:
            with pytest.raises(OutcomeUnknown):
                node1.call(here.send, b"into the dark", deadline_s=PATIENCE)
        finally:
            node1.run("ip", "link", "set", node1.netdev, "up")
        wait_for(2, here, there)
        here.send(b"again", deadline_s=PATIENCE)
        there.send(b"and back", deadline_s=PATIENCE)
        assert there.recv(deadline_s=PATIENCE) == b"unread"
        assert there.recv(deadline_s=PATIENCE) in (b"again", b"into the dark")
        assert here.recv(deadline_s=PATIENCE) == b"and back"
        print(f"\ngenerations {here.generation} and {there.generation}; {here.health}")
