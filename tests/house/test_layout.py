"""Where tests are: a folder for each wing, and names that no two files share, so that one pytest can take all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from places import ROOT, TESTS

#: folders of tests of what is no wing: all of the project, its device in software, campaigns, devices, benchmarks
OTHERS = {"house", "device_in_software", "software", "attacks", "rdma", "data", "benchmarks"}


def folders(place: Path) -> set[str]:
    return {path.parent.relative_to(place).parts[0] for path in place.glob("*/*.*") if path.suffix in (".py", ".md")}


def test_each_wing_has_its_folder_of_tests() -> None:
    wings = folders(ROOT / "rdmaconnect")
    assert wings <= {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders(TESTS) - wings <= OTHERS
    assert [path.name for path in TESTS.glob("test_*.py")] == []


def test_no_two_files_have_the_same_name() -> None:
    twice = {name: count for name, count in Counter(p.name for p in TESTS.rglob("test_*.py")).items() if count > 1}
    assert twice == {}


def test_what_needs_a_device_can_be_collected_where_there_is_none() -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/rdma"]
    env = {**os.environ, "RDMACONNECT_LAB": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
