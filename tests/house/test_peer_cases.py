"""The tables of tests/rdma/README.md name tests that there are."""

from __future__ import annotations

import re

from places import TESTS

FOLDER = TESTS / "rdma"
ROWS = [line.split("|") for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| test_")]


def test_every_case_that_passes_there_has_one_of_ours() -> None:
    lacking = [
        theirs.strip() for _, theirs, outcome, ours, _ in ROWS if outcome.strip() == "ok" and "test_" not in ours
    ]
    assert len(ROWS) > 100
    assert lacking == []


def test_every_one_of_ours_is_there() -> None:
    named = {name for row in ROWS for name in re.findall(r"\b(test_\w+)\.(test_\w+)", row[3])}
    sources = {file: (FOLDER / f"{file}.py").read_text() for file, _ in named}
    assert len(named) > 50
    assert [f"{file}.{test}" for file, test in sorted(named) if f"def {test}(" not in sources[file]] == []
