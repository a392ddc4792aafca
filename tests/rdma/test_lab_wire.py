"""A peer in C (``tests/wire/peer.c``), which knows nothing but docs/wire.md: both roles, with CURVE and without."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nodes import PATIENCE, Node
from peer_in_c import compiled, lacking

from rdmaconnect import AuthenticationError, Connection, ConnectTimeout, PeerClosed
from rdmaconnect.exchange.curve import Keys, keys_for

LACKING = lacking("msgpack.h", "zmq.h", "infiniband/verbs.h")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("peer", tmp_path_factory.mktemp("wire"), "-lzmq", "-libverbs")


def words_of(keys: Keys | None, other: bytes) -> list[str]:
    return [] if keys is None else [key.decode() for key in (keys.public, keys.secret, other)]


def keys(role: str, secret: str | None) -> list[str]:
    """What the peer is given: its own keys, and the public one of the other side."""
    if secret is None:
        return []
    listener, connector = (keys_for(listens=listens, secret=secret) for listens in (True, False))
    assert listener is not None
    assert connector is not None
    return words_of(*((connector, listener.public) if role == "connect" else (listener, connector.public)))


@contextmanager
def running(node: Node, program: Path, role: str, url: str, secret: str | None) -> Iterator[subprocess.Popen[str]]:
    """The peer on a node, by GID 1: the node's IPv4 address."""
    words = node.command(str(program), role, url, node.device, "1", *keys(role, secret))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as peer:
        try:
            yield peer
        finally:
            peer.kill()


def ended(peer: subprocess.Popen[str], status: int = 0) -> list[str]:
    out, _ = peer.communicate(timeout=PATIENCE)
    assert peer.returncode == status, out
    return out.splitlines()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["NULL", "CURVE"])
def test_c_connects(node1: Node, node2: Node, program: Path, secret: str | None) -> None:
    with node2.listening(secret=secret) as listener, running(node1, program, "connect", listener.url, secret) as peer:
        conn: Connection = node2.call(listener.accept, deadline_s=PATIENCE)
        with conn:
            assert conn.recv(deadline_s=PATIENCE) == b"from a connector in C"
            assert conn.peer.port.device == node1.device
            assert conn.path.remote_gid == conn.peer.port.gids[0]
            conn.send(b"from Python", deadline_s=PATIENCE)
            with pytest.raises(PeerClosed, match="enough said"):
                conn.recv(deadline_s=PATIENCE)
        assert ended(peer) == ["asked", "message: from Python"]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["NULL", "CURVE"])
def test_c_listens(node1: Node, node2: Node, program: Path, secret: str | None) -> None:
    url = f"tcp://{node2.address}:{18630 if secret else 18631}"
    with running(node2, program, "listen", url, secret) as peer:
        with node1.connect(url, secret=secret).result(PATIENCE * 2) as conn:
            conn.send(b"from Python", deadline_s=PATIENCE)
            assert conn.recv(deadline_s=PATIENCE) == b"from a listener in C"
            assert "proven" in [mark.stage for mark in conn.trace]
        assert ended(peer) == ["listening", "message: from Python", "bye: close"]


def test_c_lets_nobody_in_whose_key_it_does_not_know(node1: Node, node2: Node, program: Path) -> None:
    url = f"tcp://{node2.address}:18632"
    with running(node2, program, "listen", url, SECRET), pytest.raises((AuthenticationError, ConnectTimeout)):
        node1.connect(url, secret=SECRET * 2, deadline_s=10).result(PATIENCE * 2)
