"""Connecting with few descriptors left: one error in words, whichever of them is missing, and nothing on stderr."""

from __future__ import annotations

import subprocess
import sys

from places import ROOT

PROGRAM = """
import sys
sys.path.insert(0, "tests")
import os, resource
from rdmaconnect import connect
import software

for left in range(1, 18):
    child = os.fork()
    if child == 0:
        with software.Software():
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, 4096))
            try:
                connect("127.0.0.1:9", deadline_s=0.5)
            except BaseException as e:
                print(left, type(e).__name__, e, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_with_few_descriptors_left_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in said] == [*range(1, 18)]
    enough = next(index for index, line in enumerate(said) if line.split()[1] == "ConnectTimeout")
    assert enough >= 8
    for line in said[:enough]:
        assert line.split()[1] == "VerbsError", line
        assert "EMFILE (24)" in line, line
    assert {line.split()[1] for line in said[enough:]} == {"ConnectTimeout"}
