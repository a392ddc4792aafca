"""What is loaded when: by ``import rdmaconnect``, and by the names that connect and listen."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rdmaconnect

ROOT = Path(rdmaconnect.__file__).parent
#: not loaded by those who only connect and listen: what stands on connections, rarer objects of the verbs, and what a
#: message of an error, a key or a secret alone needs, ZeroMQ among it
RARE = {
    "rdmaconnect.cli", "rdmaconnect.doctor", "rdmaconnect.pingpong", "rdmaconnect.objects.domain",
    "rdmaconnect.objects.imported", "rdmaconnect.objects.queuepair_ex",
    "rdmaconnect.objects.regions", "rdmaconnect.objects.steering", "rdmaconnect.objects.tagmatching",
    "rdmaconnect.objects.workqueue", "rdmaconnect.exchange.carried", "rdmaconnect.session.pool", "zmq",
    "rdmaconnect.abi.rdma_cma", "rdmaconnect.rdmacm", "rdmaconnect.objects.cm", "rdmaconnect.session.cm_connect",
    "rdmaconnect.session.cm_listen",
    "argparse", "difflib", "numpy", "torch",
}  # fmt: skip
#: not loaded by ``import rdmaconnect``
HEAVY = {"asyncio", "ctypes", "dataclasses", "inspect", "logging", "msgpack", "socket", "subprocess", "zmq"}


def loaded(*lines: str) -> set[str]:
    """The modules that a new interpreter loads for these lines, its own start left out."""
    told = "import json, sys; before = set(sys.modules)", *lines, "print(json.dumps([*(set(sys.modules) - before)]))"
    done = run(*told)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that does these lines."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    argv = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=variables, check=False)


def test_the_package_itself_loads_next_to_nothing() -> None:
    found = loaded("import rdmaconnect")
    assert {name for name in found if name.startswith("rdmaconnect")} == {"rdmaconnect"}
    assert not found & HEAVY


def test_who_connects_and_listens_loads_nothing_that_is_seldom_used() -> None:
    found = loaded("from rdmaconnect import connect, listen")
    assert {"rdmaconnect.session.connect", "rdmaconnect.session.listen", "msgpack"} <= found
    assert not {name for name in found for rare in RARE if f"{name}.".startswith(f"{rare}.")}


def test_what_type_checkers_read_is_what_python_loads() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (read, done) = (node for node in tree.body if isinstance(node, ast.If))
    checked = {
        node.module: {alias.name for alias in node.names} for node in read.body if isinstance(node, ast.ImportFrom)
    }
    (table,) = (node.value for node in done.body if isinstance(node, ast.Assign))
    assert {module: set(names.split()) for module, names in ast.literal_eval(table).items()} == checked
    assert {"__version__"}.union(*checked.values()) == set(rdmaconnect.__all__) <= set(dir(rdmaconnect))
    for module, names in checked.items():
        for name in names:
            defined = getattr(importlib.import_module(f"rdmaconnect.{module}"), name)
            assert getattr(rdmaconnect, name) is defined


def test_a_name_that_there_is_not_is_told_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'rdmaconnect' has no attribute 'conect'$") as seen:
        rdmaconnect.conect  # noqa: B018
    assert (seen.value.name, seen.value.obj) == ("conect", rdmaconnect)
    with pytest.raises(ImportError, match="cannot import name 'conect' from 'rdmaconnect'"):
        from rdmaconnect import conect  # noqa: F401


def test_what_cannot_be_loaded_is_named_and_tried_again() -> None:
    done = run(
        "import sys",
        "sys.modules['msgpack'] = None",
        "import rdmaconnect",
        "try: rdmaconnect.connect",
        "except ModuleNotFoundError as e: print(e.name)",
        "del sys.modules['msgpack']",
        "print(rdmaconnect.connect.__name__)",
    )
    assert (done.stdout.split(), done.stderr) == (["msgpack", "connect"], "")


def test_threads_that_ask_first_at_the_same_time_get_the_same() -> None:
    done = run(
        "import rdmaconnect, threading",
        "from concurrent.futures import ThreadPoolExecutor",
        "start = threading.Barrier(16)",
        "def ask(at):",
        "    start.wait()",
        "    return getattr(rdmaconnect, ('connect', 'listen', 'meet', 'AsyncConnection')[at % 4])",
        "with ThreadPoolExecutor(16) as threads: found = list(threads.map(ask, range(16)))",
        "print(len({id(name) for name in found}), sorted({name.__name__ for name in found}))",
    )
    assert (done.stdout, done.stderr) == ("4 ['AsyncConnection', 'connect', 'listen', 'meet']\n", "")
