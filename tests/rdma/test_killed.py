"""kill -9 of either side at every message of the handshake: what the other is told, and what is left."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fork_server import ForkServer, both_sides
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

PROGRAM = """
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
"""


@pytest.fixture(scope="module")
def servers(node1: Node, node2: Node) -> Iterator[dict[str, ForkServer]]:
    with both_sides(node1, node2, PROGRAM) as made:
        yield made


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
    node1: Node, node2: Node, servers: dict[str, ForkServer], side: str, did: str, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rdmaconnect.session.incoming, "HALF_OPEN_S", 3.0)
    patience_s, server = 8.0, servers[side]
    before = time.monotonic()
    if side == "connector":
        with node2.listening() as listener:
            server.start(side, listener.url.removeprefix("tcp://"), server.device, did, kind)
            error = node2.call(_outcome, listener.accept, patience_s)
            _told(error, time.monotonic() - before, patience_s, server)
            # the next one is served as if nothing had been
            server.start(side, listener.url.removeprefix("tcp://"), server.device, "-", "-")
            with node2.call(listener.accept, deadline_s=PATIENCE) as conn:
                _talk(conn)
            assert server.wait() == 1
    else:
        address = f"{node2.address}:{18900 + DEATHS.index((side, did, kind))}"
        server.start(side, address, server.device, did, kind)
        error = node1.call(_outcome, rdmaconnect.connect, patience_s, address, **node1.named)
        _told(error, time.monotonic() - before, patience_s, server)
        server.start(side, address, server.device, "-", "-")
        with node1.call(rdmaconnect.connect, address, deadline_s=PATIENCE, **node1.named) as conn:
            _talk(conn)
        assert server.wait() == 1
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


def _told(error: RdmaConnectError, took_s: float, patience_s: float, server: ForkServer) -> None:
    print(f"after {took_s:.1f} s {type(error).__name__}: {error}")
    assert server.wait() == -9
    assert took_s < patience_s + 3
    assert isinstance(error, PeerClosed | ConnectTimeout)
    assert re.search("is gone|did not go on|closed its side", str(error))
    assert ours() == []
