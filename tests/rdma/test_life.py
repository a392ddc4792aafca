"""After connecting: peers that close, die, come back; data for the application; keys."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from nodes import NETNS, PATIENCE, Node, connected

import rdmaconnect
from rdmaconnect import AuthenticationError, ConnectTimeout, PeerClosed, StateError

SECRET = "a secret of more than sixteen bytes"


def test_private_data_goes_both_ways(node1: Node, node2: Node) -> None:
    with connected(node1, node2, connect={"private_data": b"rank 1"}, listen={"private_data": b"x" * 4096}) as (
        here,
        there,
    ):
        assert (here.private_data, there.private_data) == (b"x" * 4096, b"rank 1")
    with pytest.raises(ValueError, match="private_data is 4097 bytes long"):
        rdmaconnect.connect("127.0.0.1", private_data=bytes(4097))


@pytest.mark.parametrize("first", ["connector", "listener"])
def test_reconnect_brings_the_same_objects_back(node1: Node, node2: Node, first: str) -> None:
    board = bytearray(b"memory stays")
    with node2.listening(regions={"board": board}) as listener:
        accepted = node2.start(listener.accept, deadline_s=PATIENCE)
        with node1.connect(listener.url).result(PATIENCE) as here, accepted.result(PATIENCE) as there:
            psns = {here.local.psn, there.local.psn}
            if first == "listener":
                again = node2.start(there.reconnect, deadline_s=PATIENCE)
                time.sleep(0.3)
                node1.call(here.reconnect, deadline_s=PATIENCE)
            else:
                mine = node1.start(here.reconnect, deadline_s=PATIENCE)
                time.sleep(0.3)
                again = node2.start(there.reconnect, deadline_s=PATIENCE)
                mine.result(PATIENCE)
            again.result(PATIENCE)
            assert not psns & {here.local.psn, there.local.psn}
            assert here.peer.psn == there.local.psn
            here.send(b"again")
            assert there.recv() == b"again"
            assert here.read("board") == b"memory stays"


PEER = textwrap.dedent(
    """
    import sys, rdmaconnect
    listener = rdmaconnect.listen(sys.argv[1], device=sys.argv[2] or None)
    print("up", flush=True)
    conn = listener.accept(deadline_s=None)
    print("accepted", flush=True)
    conn.send(conn.recv(deadline_s=None))
    conn.recv(deadline_s=None)
    """
)


def _peer(node: Node, address: str) -> subprocess.Popen[str]:
    device = "" if NETNS else node.device
    return subprocess.Popen(
        node.command(sys.executable, "-c", PEER, address, device), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _kill(program: subprocess.Popen[str]) -> None:
    """kill -9: `on` has become the program itself."""
    program.kill()
    program.wait()
    if program.stdout is not None:
        program.stdout.close()


def test_a_killed_peer_is_noticed_and_its_successor_is_reconnected_to(node1: Node, node2: Node) -> None:
    address = f"{node2.address}:18700"
    program = _peer(node2, address)
    try:
        with node1.connect(address, deadline_s=PATIENCE * 3).result(PATIENCE * 3) as conn:
            conn.send(b"alive?")
            assert conn.recv(deadline_s=PATIENCE) == b"alive?"
            _kill(program)
            before = time.monotonic()
            with pytest.raises((PeerClosed, rdmaconnect.CompletionError), match=r"is gone|RETRY_EXC"):
                conn.recv(deadline_s=PATIENCE)
            assert time.monotonic() - before < 20
            assert conn.lost is not None
            program = _peer(node2, address)
            node1.call(conn.reconnect, deadline_s=PATIENCE * 3)
            conn.send(b"and you?")
            assert conn.recv(deadline_s=PATIENCE) == b"and you?"
    finally:
        _kill(program)


def test_a_listener_notices_a_killed_connector(node1: Node, node2: Node) -> None:
    code = "import sys, time, rdmaconnect as r; c = r.connect(sys.argv[1], device=sys.argv[2] or None); time.sleep(999)"
    with node2.listening() as listener:
        program = subprocess.Popen(
            node1.command(sys.executable, "-c", code, listener.url, "" if NETNS else node1.device)
        )
        try:
            conn = node2.call(listener.accept, deadline_s=PATIENCE * 2)
        finally:
            _kill(program)
        with conn, pytest.raises(PeerClosed):
            conn.recv(deadline_s=PATIENCE)


def test_reconnect_without_a_peer_gives_up_and_can_be_tried_again(node1: Node, node2: Node) -> None:
    with node2.listening() as listener:
        accepted = node2.start(listener.accept, deadline_s=PATIENCE)
        here = node1.connect(listener.url).result(PATIENCE)
        accepted.result(PATIENCE).close()
    with here:
        for _ in range(2):
            with pytest.raises(ConnectTimeout):
                node1.call(here.reconnect, deadline_s=0.5)
    with pytest.raises(StateError):
        here.reconnect(deadline_s=1)


# ---- keys


def test_one_secret_for_both_sides(node1: Node, node2: Node, caplog: pytest.LogCaptureFixture) -> None:
    with connected(node1, node2, connect={"secret": SECRET}, listen={"secret": SECRET}) as (here, there):
        here.send(b"protected")
        assert there.recv() == b"protected"
    assert "without protection" not in caplog.text
    assert SECRET not in caplog.text


def test_the_secret_may_come_from_the_environment(node1: Node, node2: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACONNECT_SECRET", SECRET)
    with connected(node1, node2, listen={"secret": SECRET}):
        pass


def test_key_files(node1: Node, node2: Node, tmp_path: Path) -> None:
    listener = rdmaconnect.keygen(str(tmp_path), "listener")
    known = rdmaconnect.keygen(str(tmp_path / "known"), "connector")
    stranger = rdmaconnect.keygen(str(tmp_path / "other"), "stranger")
    assert os.stat(listener[1]).st_mode & 0o077 == 0
    protected = {"key": listener[1], "peer_keys": str(tmp_path / "known")}
    with connected(node1, node2, connect={"key": known[1], "peer_key": listener[0]}, listen=protected):
        pass
    with node2.listening(**protected) as service:
        there = node2.start(service.accept, deadline_s=8)
        with pytest.raises(AuthenticationError, match="does not know the key of this side"):
            node1.connect(service.url, key=stranger[1], peer_key=listener[0]).result(PATIENCE)
        with pytest.raises(ConnectTimeout, match="none asked"):
            there.result(PATIENCE)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"secret": SECRET + "!"}, {"secret": SECRET}, "another key than this side expects, another secret, or none"),
        ({}, {"secret": SECRET}, "the listener's exchange is protected, this connector's is not"),
        ({"secret": SECRET}, {}, "protected, the listener's is not|another secret, or none"),
    ],
    ids=["wrong secret", "no key", "plain listener"],
)
def test_keys_that_do_not_fit(
    node1: Node, node2: Node, mine: dict[str, str], theirs: dict[str, str], words: str
) -> None:
    with node2.listening(**theirs) as listener:
        there = node2.start(listener.accept, deadline_s=10)
        with pytest.raises(AuthenticationError, match=words):
            node1.connect(listener.url, **mine).result(PATIENCE)
        with pytest.raises(ConnectTimeout, match="none asked"):
            there.result(PATIENCE)


def test_an_open_listener_warns_once(node2: Node, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rdmaconnect"), node2.listening():
        pass
    assert caplog.text.count("without protection") == 1


def test_nothing_goes_over_the_wire_in_clear(node1: Node, node2: Node) -> None:
    for secret, clear in ((None, True), (SECRET, False)):
        keys = {"secret": secret} if secret else {}
        with node2.listening(**keys) as listener:
            tap = node2.call(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            with tap:
                there = node2.start(listener.accept, deadline_s=PATIENCE)
                with node1.connect(listener.url, **keys).result(PATIENCE) as here:
                    there.result(PATIENCE).close()
                tap.setblocking(False)
                port, raw = listener.port.to_bytes(2, "big"), b""
                with contextlib.suppress(BlockingIOError):
                    while True:
                        packet = tap.recv(65535)
                        raw += packet if port in packet[34:38] or port in packet[54:58] else b""
            assert len(raw) > 500
            assert (b"qps" in raw) is clear
            assert (here.path.local_gid.gid.raw in raw) is clear
