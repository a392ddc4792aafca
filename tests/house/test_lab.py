"""`docker/lab` refuses what cannot be meant before it installs or boots anything."""

from __future__ import annotations

import argparse
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from places import ROOT


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module, which can neither install nor boot."""
    monkeypatch.syspath_prepend(str(ROOT / "docker"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("lab", str(ROOT / "docker/lab"))
    spec = spec_from_loader("lab", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    for name in ("prepare", "inside", "kernel", "install"):
        monkeypatch.setattr(module, name, lambda *words, name=name: pytest.fail(f"{name} was called"))
    return module


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("pingpong --suite sid", "argument --suite: invalid choice: 'sid'"),
        ("test --timeout soon", "argument --timeout: 'soon' is not a number of seconds above 0"),
        ("test --timeout 0", "argument --timeout: '0' is not a number of seconds above 0"),
        ("run", "the following arguments are required: script"),
        ("bench --rounds 0", "argument --rounds: '0' is not a number from 1 to 64"),
        ("run --nodes 0 x", "argument --nodes: '0' is not a number from 1 to 64"),
    ],
)
def test_wrong_usage_is_told(lab: Any, argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        lab.parse(argv.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_script_that_is_none_is_told(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("if")
    for name, words in (("missing", "there is no script .*: give a file of bash"), ("wrong", "is no bash: ")):
        with pytest.raises(lab.LabError, match=words):
            lab.script(lab.parse(["run", str(tmp_path / name)]), tmp_path)
    (tmp_path / "wrong").write_text("true")
    with pytest.raises(lab.LabError, match="holds exactly 2 nodes: leave --nodes out"):
        lab.script(lab.parse(["run", "--suite", "bookworm", "--nodes", "3", str(tmp_path / "wrong")]), tmp_path)


def test_a_contest_that_is_none_is_told(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"there is no contest dance: the contests are .*batch, each"):
        lab.bench(lab.parse(["bench", "--small", "batch", "dance"]), tmp_path)
    with pytest.raises(lab.LabError, match=r"kernel 7.0 or newer, so no --suite"):
        lab.bench(lab.parse(["bench", "--suite", "bookworm"]), tmp_path)


def test_tests_that_are_not_there_are_told(lab: Any, tmp_path: Path) -> None:
    for argument in ("tests/test_nothing.py", "tests/nothing/", "test_nothing.py::test_it"):
        with pytest.raises(lab.LabError, match=r"there is no .*: give paths of the checkout"):
            lab.test(lab.parse(["test", "-x", "-k", "a/b", argument]), tmp_path)


def test_arguments_are_divided_between_here_and_devices(lab: Any) -> None:
    assert lab.divide(["-k", "tests", "-x"]) == (["-k", "tests", "-x"], ["tests"], ["tests/rdma"])
    assert lab.divide(["tests/rdma/test_lab_connect.py"]) == ([], [], ["tests/rdma/test_lab_connect.py"])
    assert lab.divide(["tests/exchange/test_url.py::test_it", "-q"]) == (
        ["-q"],
        ["tests/exchange/test_url.py::test_it"],
        [],
    )


def test_a_kernel_is_booted_again_where_the_emulator_is_to_blame(lab: Any) -> None:
    int3 = "[   50.969044] Oops: int3: 0000 [#2] SMP NOPTI\n[   50.96] Kernel panic - not syncing: Fatal exception"
    assert "amid the job" in lab.boots_again(int3, begun=True)
    assert "did not come up (Oops: int3" in lab.boots_again(int3, begun=False)
    assert "no word why" in lab.boots_again("", begun=False)
    assert lab.boots_again("[    9.1] Oops: 0002 [#1] SMP\n", begun=True) == ""
    assert lab.boots_again("", begun=True) == ""


def test_what_is_lacking_is_counted(lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import supplies

    monkeypatch.setattr(supplies, "CACHE", tmp_path)
    monkeypatch.setattr(supplies, "ask", lambda *words: "gcc installed\n")
    assert supplies.lacking(["gcc"], []) == supplies.VENV_MB
    assert supplies.lacking(["gcc", "qemu"], ["forky", "forky", "trixie"]) == (
        supplies.VENV_MB + supplies.PACKAGES_MB + 2 * supplies.KERNEL_MB
    )


def test_each_command_says_what_it_is_for(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lab.parse(["--help"])
    said = capsys.readouterr().out
    for word in (
        "pingpong",
        "test",
        "wheel",
        "pythons",
        "compose",
        "bench",
        "run",
        "shell",
        "--suite forky|trixie|bookworm",
    ):
        assert word in said
    assert isinstance(lab.parse(["pythons", "-x"]), argparse.Namespace)


def test_only_the_pythons_that_were_asked_for(lab: Any) -> None:
    options = lab.parse(["pythons", "--python", "3.11", "--python", "3.14", "-x"])
    assert (options.python, options.rest) == (["3.11", "3.14"], ["-x"])
    with pytest.raises(lab.LabError, match=r"no Python 3\.9 here: give one of 3\.10, 3\.11"):
        lab.pythons(lab.parse(["pythons", "--python", "3.9"]), None)
