"""kill -9 of either side at every message of the handshake: what the other is told, and what is left."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
from nodes import PATIENCE, Node, ours

import rdmaconnect
import rdmaconnect.session.incoming
from rdmaconnect import CompletionError, Connection, ConnectTimeout, PeerClosed, RdmaConnectError

SENT = {"connector": ("Hello", "Ready", "Proof"), "listener": ("Reply", "Proof")}
#: (side that dies, what it does last, kind of message)
DEATHS = [
    (side, did, kind)
    for side, other in (("connector", "listener"), ("listener", "connector"))
    for did, kinds in (("sent", SENT[side]), ("received", SENT[other]))
    for kind in kinds
]

# Forks a peer for each line that it reads, which costs far less than to start an interpreter.
NURSERY = textwrap.dedent(
    """
    import os, signal, sys, time
    import rdmaconnect
    from rdmaconnect.session.conversation import Conversation

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def doom(did, kind):
        say, hear = Conversation.say, Conversation.hear
        def saying(self, message):
            say(self, message)
            if did == "sent" and type(message).__name__ == kind:
                time.sleep(0.5)  # the service thread has sent it by then
                die()
        def hearing(self, message):
            if did == "received" and type(message).__name__ == kind:
                die()
            hear(self, message)
        Conversation.say, Conversation.hear = saying, hearing

    def play(side, address, device, did, kind):
        options = {} if device == "-" else {"device": device}
        doom(did, kind)
        if side == "connector":
            conn = rdmaconnect.connect(address, deadline_s=120, **options)
        else:
            conn = rdmaconnect.listen(address, **options).accept(deadline_s=120)
        with conn:
            conn.send(conn.recv(deadline_s=120))
            conn.recv(deadline_s=120)

    print("up", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                play(*line.split())
            except rdmaconnect.PeerClosed:
                pass
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """
)


class Nursery:
    """Where peers come from that are to be killed."""

    def __init__(self, node: Node) -> None:
        self.device = node.named.get("device", "-")
        self._program = subprocess.Popen(
            node.command(sys.executable, "-c", NURSERY), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "up"

    def _line(self) -> str:
        assert self._program.stdout is not None
        return self._program.stdout.readline().strip()

    def bear(self, side: str, address: str, did: str = "-", kind: str = "-") -> int:
        """Start a peer; its process id."""
        assert self._program.stdin is not None
        print(side, address, self.device, did, kind, file=self._program.stdin, flush=True)
        return int(self._line())

    def end(self) -> int:
        """Wait for the peer to end; its exit status, or the negative signal."""
        return int(self._line())

    def close(self) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        try:
            self._program.wait(PATIENCE)
        finally:
            self._program.kill()
            self._program.wait()
            self._program.stdout.close()


@pytest.fixture(scope="module")
def nurseries(node1: Node, node2: Node) -> Iterator[dict[str, Nursery]]:
    """Connectors come from node 1, listeners from node 2."""
    made: dict[str, Nursery] = {}
    try:
        made["connector"] = Nursery(node1)
        made["listener"] = Nursery(node2)
        yield made
    finally:
        for nursery in made.values():
            nursery.close()


def _talk(conn: Connection) -> None:
    conn.send(b"are you there?", deadline_s=PATIENCE)
    assert conn.recv(deadline_s=PATIENCE) == b"are you there?"


def _lost(conn: Connection, deadline_s: float) -> RdmaConnectError:
    """What is told to one who waits on a connection whose peer is dead."""
    with conn, pytest.raises((PeerClosed, CompletionError)) as caught:
        conn.recv(deadline_s=deadline_s)
    return caught.value


@pytest.mark.parametrize(("side", "did", "kind"), DEATHS, ids="-".join)
def test_killed(
    node1: Node, node2: Node, nurseries: dict[str, Nursery], side: str, did: str, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rdmaconnect.session.incoming, "HALF_OPEN_S", 3.0)
    patience_s, nursery = 8.0, nurseries[side]
    before = time.monotonic()
    if side == "connector":
        with node2.listening() as listener:
            nursery.bear(side, listener.url.removeprefix("tcp://"), did, kind)
            error = node2.call(_outcome, listener.accept, patience_s)
            _told(error, time.monotonic() - before, patience_s, nursery)
            # the next one is served as if nothing had been
            nursery.bear(side, listener.url.removeprefix("tcp://"))
            with node2.call(listener.accept, deadline_s=PATIENCE) as conn:
                _talk(conn)
            assert nursery.end() == 1
    else:
        address = f"{node2.address}:{18900 + DEATHS.index((side, did, kind))}"
        nursery.bear(side, address, did, kind)
        error = node1.call(_outcome, rdmaconnect.connect, patience_s, address, **node1.named)
        _told(error, time.monotonic() - before, patience_s, nursery)
        nursery.bear(side, address)
        with node1.call(rdmaconnect.connect, address, deadline_s=PATIENCE, **node1.named) as conn:
            _talk(conn)
        assert nursery.end() == 1
    assert ours() == []


def _outcome(make: Any, patience_s: float, *args: Any, **options: Any) -> RdmaConnectError:
    """The error of making a connection, or of waiting on one that was made just before the peer died."""
    limit = time.monotonic() + patience_s
    try:
        if not args:
            options["tolerant"] = False
        conn = make(*args, deadline_s=patience_s, **options)
    except RdmaConnectError as e:
        return e
    return _lost(conn, limit - time.monotonic())


def _told(error: RdmaConnectError, took_s: float, patience_s: float, nursery: Nursery) -> None:
    print(f"after {took_s:.1f} s {type(error).__name__}: {error}")
    assert nursery.end() == -9
    assert took_s < patience_s + 3
    assert isinstance(error, PeerClosed | ConnectTimeout)
    assert re.search("is gone|did not go on|closed its side", str(error))
    assert ours() == []
