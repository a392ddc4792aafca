"""README.md tells the truth: its programs are valid and all tested, its commands exist, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from snippets import README, ROOT, Program, commands, programs
from software import Software

from rdmaconnect.agreement.options import Options
from rdmaconnect.cli import _parser


def test_every_program_is_marked_to_be_run() -> None:
    assert README.count("```python") == len(programs()) >= 12
    sides = Counter((program.name, program.side) for program in programs())
    assert set(sides.values()) == {1}
    for name, side in sides:
        assert side == "alone" or (name, "client" if side == "server" else "server") in sides


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is of Python 3.11")
def test_programs_are_typed(tmp_path: Path) -> None:
    for program in programs():
        ast.parse(program.code)
        (tmp_path / f"{program.name}_{program.side}.py").write_text(program.code)
    files = sorted(str(path) for path in tmp_path.glob("*.py"))
    words = [sys.executable, "-m", "mypy", "--python-version", "3.11", "--config-file", "pyproject.toml", *files]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("program", [p for p in programs() if p.side == "alone"], ids=lambda program: program.name)
def test_programs_that_need_no_other_side(
    program: Program, software: Software, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(program.code, f"README.md, {program.name}", "exec"), {"__name__": "__main__"})
    assert program.prints in capsys.readouterr().out


def test_every_command_is_understood() -> None:
    ours = [words[1:] for words in commands() if words[0] == "rdmaconnect"]
    assert {"doctor", "pingpong", "devices", "states", "explain", "keygen"} <= {words[0] for words in ours}
    for words in ours:
        _parser().parse_args(words)


def test_every_command_of_the_program_is_told_of() -> None:
    told = {words[1] for words in commands() if words[0] == "rdmaconnect"}
    assert re.findall(r"^    (\w+) ", _parser().format_help().partition("commands:")[2], re.MULTILINE)
    assert set(re.findall(r"^    (\w+) ", _parser().format_help().partition("commands:")[2], re.MULTILINE)) <= told


def test_the_lab_is_called_as_ci_calls_it() -> None:
    ci = (ROOT / ".ci/run").read_text()
    labs = {words[1] for words in commands() if words[0] == "docker/lab"}
    assert {"pingpong", "test"} <= labs
    for word in labs:
        assert f"docker/lab {word}" in ci


def test_every_option_is_told_of() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", README.partition("| option |")[2], re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(rows))) >= set(Options.__dataclass_fields__)


def test_every_link_leads_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", README, flags=re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:docker|examples|tests|rdmaconnect)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
