"""The recipes of examples/stores as the programs that they are, one on each node, over the stores themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_programs import EXAMPLES
from nodes import LONG, NETNS, Node, both
from stores import REDIS, redis_server

pytestmark = pytest.mark.skipif(not NETNS, reason="the recipes name no device, which the rig needs")
Told = Callable[[str, str], None]
#: what the ranks print, each what the other has sent
FROM = [f"{data!r}\n" for data in (b"from 1", b"from 0")]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Tell how long a recipe is, and how long it took."""
    start = time.monotonic()

    def tell(name: str, what: str) -> None:
        lines = len((EXAMPLES / f"stores/{name}.py").read_text().splitlines())
        took = time.monotonic() - start
        assert lines <= 25
        with capsys.disabled():
            print(f"\nexamples/stores/{name}.py: {lines} lines, two nodes connected by {what}, {took:.0f} s", end="")

    return tell


def program(name: str, *arguments: str, **variables: str) -> list[str]:
    """The command line of a recipe."""
    given = [f"{variable}={value}" for variable, value in variables.items()]
    return ["env", *given, sys.executable, str(EXAMPLES / f"stores/{name}.py"), *arguments]


def swapped(node1: Node, node2: Node, name: str, where: str, **variables: str) -> list[str]:
    """What both ranks print, each started on its node."""
    ranks = enumerate((node1, node2))
    return list(both(*(node.command(*program(name, where, str(rank), **variables)) for rank, node in ranks)))


def beside() -> Path:
    """The environment that has what is tried besides; a test without it is skipped."""
    python = os.environ.get("RDMACONNECT_LAB_PEERS")
    if not python:
        pytest.skip("docker/lab test makes an environment with mpi4py, MPICH and redis")
    return Path(python).parents[1]


def packages_of(environment: Path) -> str:
    return str(next(environment.glob("lib/python*/site-packages")))


def test_over_a_shared_file(node1: Node, node2: Node, tmp_path: Path, told: Told) -> None:
    assert swapped(node1, node2, "over_file", str(tmp_path)) == FROM
    told("over_file", "a folder")


def test_over_redis(node1: Node, node2: Node, tmp_path: Path, told: Told) -> None:
    packages = packages_of(beside())
    if REDIS is None:
        pytest.skip("redis-server is not installed: apt install redis-tools")
    with redis_server(tmp_path, node1.command(), node1.address):
        assert swapped(node1, node2, "over_redis", node1.address, PYTHONPATH=packages) == FROM
    told("over_redis", "a Redis of node 1")


def test_over_mpi(node1: Node, node2: Node, told: Told) -> None:
    environment = beside()
    given = {
        "PYTHONPATH": packages_of(environment),
        "MPI4PY_LIBMPI": str(environment / "lib/libmpi.so.12"),
        "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp",  # over the network, as between hosts
        "PYTHONUNBUFFERED": "",  # each line as a whole
    }  # fmt: skip
    one, other = (["-n", "1", *node.command(*program("over_mpi", **given))] for node in (node1, node2))
    words = [str(environment / "bin/mpiexec"), "-prepend-rank", *one, ":", *other]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines(keepends=True)) == [f"[{rank}] {line}" for rank, line in enumerate(FROM)]
    told("over_mpi", "MPICH's mpiexec, a rank on each")


def test_over_a_store_of_torch(node1: Node, node2: Node, told: Told) -> None:
    tree = os.environ.get("RDMACONNECT_LAB_TORCH")
    if not tree:
        pytest.skip("there is no torch: docker/lab test fetches Debian's where it is for this Python")
    lib, folders = Path(tree, "usr/lib"), ("*-linux-gnu", "*-linux-gnu/blas", "*-linux-gnu/lapack")
    libraries = [str(lib), *(str(path) for folder in folders for path in lib.glob(folder))]
    where = {"LD_LIBRARY_PATH": ":".join(libraries), "PYTHONPATH": f"{tree}/usr/lib/python3/dist-packages"}
    assert swapped(node1, node2, "over_tcpstore", node1.address, **where) == FROM
    told("over_tcpstore", "torch's TCPStore, which node 1 serves")
