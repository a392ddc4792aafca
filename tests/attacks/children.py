"""Programs in processes of their own, each on its own device in software: what ends them ends nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import rdmaconnect

__all__ = ["Child"]

_TESTS = Path(__file__).parent.parent
_PATH = os.pathsep.join([str(_TESTS), str(Path(rdmaconnect.__file__).parent.parent)])
_BEFORE = """
import faulthandler, logging, os, sys, threading, time
faulthandler.enable()
logging.getLogger("rdmaconnect").setLevel(logging.CRITICAL)
import rdmaconnect
from software import Network, Software
software = Software(network=Network.shared(NETWORK) if NETWORK else None).install()
def say(*words): print(*words, flush=True)
def listen_for():  # a line of the test
    return sys.stdin.readline()
"""


class Child:
    """One program.

    Args:
        program: its text, after which comes what every child has: ``rdmaconnect``, ``software``, ``say`` and
            ``listen_for``.
        network: the directory of the network that its device is on; "" for one of its own.
        values: names that it has besides.
    """

    def __init__(self, program: str, network: str = "", **values: Any) -> None:
        names = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"NETWORK = {network!r}\n{_BEFORE}{names}{textwrap.dedent(program)}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"PYTHONPATH": _PATH},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def line(self) -> str:
        """The next line that it says; "" if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, words: str = "") -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self, seconds: float = 20.0) -> tuple[int, str]:
        """Wait for its end; its status, and what it said last. One that does not end is killed."""
        try:
            said, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            said, _ = self.process.communicate()
            return self.process.returncode, f"did not end within {seconds:g} s\n{said}"
        return self.process.returncode, said.strip()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
