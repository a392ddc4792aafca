"""The package on machines that cannot have a device: without libibverbs, on macOS and on Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

#: plays another platform; what the standard library chose for this one is loaded before that
PLAY = r"""
import argparse, asyncio, asyncio.unix_events, ctypes, importlib.abc, os, select, shutil, subprocess, sys
import msgpack, zmq, zmq.auth
system, *absent = sys.argv[1:]
asked = []

class Library(ctypes.CDLL):
    def __init__(self, name, *args, **more):
        if name and "ibverbs" in name:
            asked.append(name)
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **more)

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ctypes.CDLL = Library
sys.platform = system
sys.meta_path.insert(0, Blocked())
for word in absent:
    module, _, attribute = word.partition(".")
    if attribute:
        delattr(sys.modules[module], attribute)
    else:
        sys.modules.pop(module, None)
"""

USE = r"""
import pkgutil
import rdmaconnect
for found in pkgutil.walk_packages(rdmaconnect.__path__, "rdmaconnect."):
    if found.name != "rdmaconnect.__main__":
        __import__(found.name)
assert asked == [], asked

from rdmaconnect import cli
from rdmaconnect.agreement import transitions
from rdmaconnect.objects import buffers
from rdmaconnect.protocol import codec as wire
from rdmaconnect.abi import QpState, QpType, WcStatus
assert str(rdmaconnect.Gid.parse("10.0.0.1")) == "::ffff:10.0.0.1"
assert transitions.TABLE[QpType.RC][QpState.INIT, QpState.RTR]
assert buffers.as_bytes(bytearray(b"abc")) == b"abc"
assert cli.main(["states", "RC", "--json"]) == 0

for call in (lambda: rdmaconnect.connect("10.0.0.1", deadline_s=5), lambda: rdmaconnect.listen("127.0.0.1:0")):
    try:
        call()
    except rdmaconnect.LibraryError as e:
        assert "load libibverbs.so.1: " in str(e) and "Install it" in str(e), e
    else:
        raise AssertionError("connected without libibverbs")
assert cli.main(["devices"]) == 1
"""

#: system -> what Python does not have there
ABSENT = {
    "linux": [],
    "darwin": ["select.epoll", "os.eventfd", "os.pidfd_open", "os.memfd_create", "os.sched_getaffinity"],
    "win32": [
        "select.epoll", "select.poll", "os.eventfd", "os.pidfd_open", "os.memfd_create", "os.sched_getaffinity",
        "os.register_at_fork", "os.fork", "os.getuid", "os.geteuid", "os.setns", "fcntl", "resource", "termios",
        "pwd", "grp",
    ],
}  # fmt: skip


@pytest.mark.parametrize("system", ABSENT)
def test_it_imports_and_its_pure_parts_work(system: str, tmp_path: Path) -> None:
    absent = [word for word in ABSENT[system] if "." not in word or hasattr(*named(word))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAY + USE, system, *absent],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"RTR"' in done.stdout
    assert done.stderr.startswith("rdmaconnect: load libibverbs.so.1: ")


def named(word: str) -> tuple[object, str]:
    module, _, attribute = word.partition(".")
    return __import__(module), attribute
