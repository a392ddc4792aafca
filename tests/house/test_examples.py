"""The examples between devices in software; tests/rdma/test_lab_examples.py has them on real ones."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from example_programs import EXAMPLES, example, key_files
from exchange_ends import free_port
from snippets import README
from software import Software
from two_hosts import two_hosts

from rdmaconnect import AsyncListener, Listener

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
PATIENCE_S = 60.0


@pytest.fixture
def hosts() -> Iterator[Software]:
    with two_hosts(["127.0.0.2"], ["127.0.0.3"]) as software:
        yield software


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples wait for their peers for ever; here a peer that fails must not hold up the rest."""
    for kind in (Listener, AsyncListener):

        def accept(self: Any, *, accept: Callable[..., Any] = kind.accept, **options: Any) -> Any:
            return accept(self, deadline_s=PATIENCE_S)

        monkeypatch.setattr(kind, "accept", accept)


def play(server: Callable[..., Any], *clients: Callable[..., Any]) -> None:
    """Let one serve and the others call, each as ``role(address, device)``."""
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(len(clients) + 1) as threads:
        roles = [threads.submit(server, address, "there")]
        roles += [threads.submit(client, address, "here") for client in clients]
        errors = [role.exception(PATIENCE_S * 2) for role in roles]
    assert errors == [None] * len(roles)


def test_messages(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("messages")
    play(module.serve, module.greet)
    assert "131072 bytes written into the server's memory and verified" in capsys.readouterr().out


def test_an_asyncio_server_has_many_clients(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("many_clients")
    play(lambda *where: asyncio.run(module.serve(*where)), lambda *where: asyncio.run(module.call(*where)))
    assert "4 clients got 5 answers each, verified" in capsys.readouterr().out


def test_a_file_is_fetched(hosts: Software, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("file_transfer")
    play(module.offer, partial(module.fetch, folder=str(tmp_path)))
    assert (tmp_path / "file_transfer.py").read_bytes() == (EXAMPLES / "file_transfer.py").read_bytes()
    assert "bytes fetched and verified" in capsys.readouterr().out


def test_many_connections_come_from_one_exchange(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("connect_many")
    play(module.serve, module.add)
    said = capsys.readouterr().out
    assert "100 connections brought 4950 together" in said
    assert "; the sum is 4950" in said


def test_requests_go_over_connections_that_are_ready(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("pool")
    play(module.serve, module.ask)
    said = capsys.readouterr().out
    assert "8 requests answered" in said
    assert "8 requests over 8 queue pairs, verified" in said


def test_a_connection_outlives_its_server(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("reconnect")
    play(module.serve, module.count)
    said = capsys.readouterr()
    assert "30 numbers came, the last is 29" in said.out
    assert "30 numbers sent and answered, connected anew 2 times" in said.out
    assert said.err.count("the peer closed the connection") == 2


def test_who_has_no_key_is_refused(hosts: Software, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("keys")
    served, called = key_files(tmp_path)
    play(partial(module.serve, **served), partial(module.call, **called))
    said = capsys.readouterr().out
    assert "without a key: " in said
    assert "with it: welcome" in said


def test_two_that_are_alike_meet(hosts: Software, capsys: pytest.CaptureFixture[str]) -> None:
    module, (one, two) = example("meet"), (f"127.0.0.1:{free_port()}" for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        sides = [threads.submit(module.swap, *ends) for ends in ((one, two, "here"), (two, one, "there"))]
        assert [side.exception(PATIENCE_S * 2) for side in sides] == [None, None]
    assert capsys.readouterr().out.count("bytes each way") == 2


# ---- one style


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_the_same_everywhere(name: str) -> None:
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)
    if "this example needs" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "HOST" in done.stdout
    for short, long in (("-l", "--listen ADDRESS"), ("-d", "--device NAME")):
        assert re.search(rf"{short}( [A-Z]+)?, {long}\b", done.stdout)  # Python 3.13 and later leave the first one out
    assert ("[HOST]" in done.stdout) is (name != "meet")
    assert f"python examples/{name}.py" in " ".join(done.stdout.split())


def test_the_page_lists_each() -> None:
    assert [name for name in NAMES if f"`examples/{name}.py`" not in README] == []
