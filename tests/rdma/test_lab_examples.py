"""The examples on two nodes: each is imported, as starting a Python costs seconds here; one is started all the same."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import pytest
from example_programs import EXAMPLES, example, key_files
from nodes import PATIENCE, Node

from rdmaconnect import AsyncListener, Listener

PORTS = itertools.count(18620)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples wait for their peers for ever; here a peer that fails must not hold up the rest."""
    for kind in (Listener, AsyncListener):

        def accept(self: Any, *, accept: Callable[..., Any] = kind.accept, **options: Any) -> Any:
            return accept(self, deadline_s=PATIENCE * 2, tolerant=False)

        monkeypatch.setattr(kind, "accept", accept)


@pytest.fixture
def play(node1: Node, node2: Node, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Play a serving and several asking roles; what they print, if all succeed."""

    def play(server: Callable[..., Any], client: Callable[..., Any], clients: int = 1, **more: Any) -> str:
        address = f"{node2.address}:{next(PORTS)}"
        roles = [node2.start(server, address, node2.named.get("device"), **more)]
        roles += [node1.start(client, address, node1.named.get("device")) for _ in range(clients)]
        errors = [role.exception(PATIENCE * 3) for role in roles]
        assert errors == [None] * len(roles)
        return capsys.readouterr().out

    return play


def test_an_array_is_written_into_the_peers_memory(play: Callable[..., str]) -> None:
    module = example("numpy_array")
    said = play(module.serve, module.write)
    assert "1048576 bytes written into the server's array and verified" in said
    assert "1048576 bytes came into an array of (256, 1024)" in said


def test_an_asyncio_server_has_many_clients(play: Callable[..., str]) -> None:
    module = example("many_clients")
    said = play(lambda *where: asyncio.run(module.serve(*where)), lambda *where: asyncio.run(module.call(*where)))
    assert "4 clients sent 20 messages" in said
    assert "4 clients got 5 answers each, verified" in said


def test_a_parameter_server_comes_to_the_truth(play: Callable[..., str]) -> None:
    module = example("parameter_server")
    said = play(module.serve, module.work, 2, rounds=20)
    assert "20 rounds with 2 workers: weights [ 3.  -1.   0.5  8.  -2.5]" in said
    assert {line.split(":")[0] for line in said.splitlines() if "the mean error" in line} == {"worker 0", "worker 1"}


def test_one_queue_pair_sends_to_many(play: Callable[..., str]) -> None:
    module = example("ud_fanout")
    said = play(module.publish, module.subscribe, 3, count=20)
    assert "20 datagrams to 3 subscribers, who saw [20, 20, 20], by 1 queue pair" in said
    assert said.count("20 datagrams came, each verified; 0 were lost") == 3


def test_a_file_is_fetched_by_a_program(node1: Node, node2: Node, tmp_path: FilePath) -> None:
    module, port, content = example("file_transfer"), next(PORTS), random.Random(1).randbytes((2 << 20) + 12345)
    (tmp_path / "source.bin").write_bytes(content)
    (tmp_path / "got").mkdir()
    offering = node2.start(module.offer, f"{node2.address}:{port}", node2.named.get("device"), tmp_path / "source.bin")
    device = ["-d", node1.device] if node1.named else []
    words = [sys.executable, EXAMPLES / "file_transfer.py", f"{node2.address}:{port}", "--into", tmp_path / "got"]
    done = subprocess.run(
        node1.command(*map(str, words), *device), capture_output=True, text=True, timeout=PATIENCE * 3
    )
    assert (done.returncode, offering.exception(PATIENCE)) == (0, None), done.stderr
    assert (tmp_path / "got/source.bin").read_bytes() == content
    progress = [line for line in done.stderr.splitlines() if "%" in line]
    assert progress == [f"{part:3d} % of {len(content)} bytes" for part in (49, 99, 100)]
    assert "2109497 bytes fetched and verified" in done.stdout


def test_many_connections_come_from_one_exchange(play: Callable[..., str]) -> None:
    module = example("connect_many")
    said = play(module.serve, partial(module.add, count=20))
    assert "20 connections brought 190 together" in said
    assert "; the sum is 190" in said


def test_a_connection_outlives_its_server(play: Callable[..., str]) -> None:
    module = example("reconnect")
    said = play(module.serve, module.count)
    assert "30 numbers came, the last is 29" in said
    assert "30 numbers sent and answered, connected anew 2 times" in said


def test_who_has_no_key_is_refused(play: Callable[..., str], tmp_path: FilePath) -> None:
    module = example("keys")
    served, called = key_files(tmp_path)
    said = play(partial(module.serve, **served), partial(module.call, **called))
    assert "without a key: " in said
    assert "with it: welcome" in said
    assert "a client that is known says: it is me" in said


def test_two_that_are_alike_meet(node1: Node, node2: Node, capsys: pytest.CaptureFixture[str]) -> None:
    module, port = example("meet"), next(PORTS)
    here, there = (f"{node.address}:{port}" for node in (node1, node2))
    sides = [node1.start(module.swap, there, here, node1.named.get("device"))]
    sides += [node2.start(module.swap, here, there, node2.named.get("device"))]
    assert [side.exception(PATIENCE * 3) for side in sides] == [None, None]
    assert capsys.readouterr().out.count("1048576 bytes each way between") == 2


def test_tensors_are_written_into_the_peers_model(play: Callable[..., str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    module = example("torch_tensor")
    said = play(module.serve, module.write)
    assert "38440 bytes of tensors written into the peer's model, which now computes the same" in said
    assert "4 tensors came, the model says [" in said
