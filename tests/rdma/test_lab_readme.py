"""The programs and commands of README.md on two nodes, word for word but for the hosts' addresses."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from nodes import NETNS, PATIENCE, Node
from snippets import Program, commands, programs

pytestmark = pytest.mark.skipif(not NETNS, reason="the page names no devices, which the rig needs")

PROGRAMS = {(program.name, program.side): program for program in programs()}
#: commands that need no other side
ALONE = [words for words in commands() if words[:2] in (["rdmaconnect", "devices"], ["rdmaconnect", "doctor"])]


def _code(program: Program, node2: Node) -> str:
    return program.code.replace("10.0.0.2", node2.address)


def _run(program: Program, node2: Node) -> str:
    """What it prints."""
    printed = io.StringIO()
    told: dict[str, Any] = {"__name__": "__main__", "print": lambda *words: print(*words, file=printed)}
    exec(compile(_code(program, node2), f"README.md, {program.name} {program.side}", "exec"), told)
    return printed.getvalue()


@contextmanager
def _serving(node2: Node, program: Program) -> Iterator[None]:
    """One that ends only when it is ended is a process of its own."""
    running = subprocess.Popen(node2.command(sys.executable, "-c", _code(program, node2)))
    try:
        yield
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("name", [name for name, side in PROGRAMS if side == "client"])
def test_programs(node1: Node, node2: Node, name: str) -> None:
    server, client = PROGRAMS[name, "server"], PROGRAMS[name, "client"]
    if server.forever:
        with _serving(node2, server):
            assert client.prints in node1.call(_run, client, node2)
        return
    served = node2.start(_run, server, node2)
    assert client.prints in node1.call(_run, client, node2)
    assert server.prints in served.result(PATIENCE)


@pytest.mark.parametrize("name", [name for name, side in PROGRAMS if side == "alone"])
def test_programs_that_need_no_other_side(node1: Node, name: str) -> None:
    program = PROGRAMS[name, "alone"]
    assert program.prints in node1.call(_run, program, node1)


@pytest.mark.parametrize("words", [words for words in ALONE if len(words) == 2], ids=" ".join)
def test_commands_about_this_host(node1: Node, words: list[str]) -> None:
    shown = node1.run(sys.executable, "-m", *words)
    assert node1.device in shown
