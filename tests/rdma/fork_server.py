"""Processes of a node, forked one after the other from one interpreter: to start an interpreter takes far longer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from nodes import PATIENCE, Node

#: what follows the program, which has defined ``play``
_LOOP = """
import os, sys
import rdmaconnect

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
    print("end", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkServer:
    """Starts processes of a node, one at a time.

    Args:
        node: where.
        program: Python that defines ``play(*words)``, which each process calls; it has ``sys.argv`` too.
        arguments: the program's.

    Attributes:
        device: what the node's connections have to name, or "-".
        printed: what the process that has ended last had printed and nobody read, line by line.
    """

    def __init__(self, node: Node, program: str, *arguments: object) -> None:
        self.device = node.named.get("device", "-")
        self.printed: list[str] = []
        command = node.command(sys.executable, "-c", textwrap.dedent(program) + _LOOP, *map(str, arguments))
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == "up"

    def start(self, *words: object) -> int:
        """Start a process that calls ``play(*words)``; its id."""
        assert self._server.stdin is not None
        print(*words, file=self._server.stdin, flush=True)
        return int(self.line())

    def line(self) -> str:
        """The next line that is printed."""
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server has ended"
        return line.strip()

    def wait(self) -> int:
        """Wait for the process to end; its exit status, or the negative signal."""
        self.printed = []
        while not (line := self.line()).startswith("end "):
            self.printed.append(line)
        return int(line.removeprefix("end "))

    def close(self) -> None:
        """End the server, whose process has ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(PATIENCE)
        finally:
            self._server.kill()
            self._server.wait()
            self._server.stdout.close()


@contextmanager
def both_sides(node1: Node, node2: Node, program: str) -> Iterator[dict[str, ForkServer]]:
    """Connectors come from node 1, listeners from node 2."""
    made: dict[str, ForkServer] = {}
    try:
        made["connector"] = ForkServer(node1, program)
        made["listener"] = ForkServer(node2, program)
        yield made
    finally:
        for server in made.values():
            server.close()
