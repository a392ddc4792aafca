"""The recipes of examples/stores: two ends connected by each store, on devices in software; and their length."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from example_programs import EXAMPLES, example
from snippets import README
from software import Software
from stores import REDIS, Comms, FewOfRedis, FewOfTcpStore, redis_server
from two_hosts import two_hosts

NAMES = sorted(path.stem for path in (EXAMPLES / "stores").glob("*.py"))
PATIENCE_S = 60.0


@pytest.fixture
def hosts() -> Iterator[Software]:
    with two_hosts(["127.0.0.2"], ["127.0.0.3"]) as software:
        yield software


def swapped(name: str, *of_each: tuple[Any, ...]) -> list[bytes]:
    """What each rank is given, by the program of that name."""
    module = example(f"stores/{name}")
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(module.swap, *args, device) for args, device in zip(of_each, DEVICES, strict=True)]
        return [rank.result(PATIENCE_S) for rank in ranks]


DEVICES, BOTH = ("here", "there"), [b"from 1", b"from 0"]


def test_over_a_shared_file(hosts: Software, tmp_path: Path) -> None:
    assert swapped("over_file", (tmp_path, 0), (tmp_path, 1)) == BOTH
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end0", "end1"]


def test_over_a_store_of_torch(hosts: Software) -> None:
    if importlib.util.find_spec("torch") is None:  # then what it is used of, by the same names
        store: Any = FewOfTcpStore()
        assert swapped("over_tcpstore", (store, 0), (store, 1)) == BOTH
        pytest.skip("torch is not installed: two ends were connected by a stand-in with set and get")
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", store.port, 2, False)
    assert swapped("over_tcpstore", (store, 0), (other, 1)) == BOTH


def test_over_mpi(hosts: Software) -> None:
    # one process has one rank: what MPI is used of, by the same name
    assert swapped("over_mpi", *((comm,) for comm in Comms.of(2))) == BOTH


def test_over_redis(hosts: Software, tmp_path: Path) -> None:
    if REDIS is None or importlib.util.find_spec("redis") is None:
        store = FewOfRedis()
        assert swapped("over_redis", (store, 0), (store, 1)) == BOTH
        pytest.skip("redis-server or redis is not installed: two ends were connected by a stand-in with its lists")
    from redis import Redis

    with redis_server(tmp_path) as path:
        assert swapped("over_redis", *((Redis(unix_socket_path=path), rank) for rank in (0, 1))) == BOTH


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_on_the_page(name: str) -> None:
    lines = len((EXAMPLES / f"stores/{name}.py").read_text().splitlines())
    print(f"{name}: {lines} lines")
    assert lines <= 25
    assert f"| `examples/stores/{name}.py` | {lines} |" in README
