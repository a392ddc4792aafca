"""Shell completion: the scripts that ``rdmaconnect completion`` prints, and what bash makes of one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from rdmaconnect.cli import main

BASH = shutil.which("bash")
#: asks the completion as readline would; `ls` stands in for a host with devices
ASK = r"""
eval "$1"; shift
ls() { [ "$1" = /sys/class/infiniband ] && printf '%s\n' mlx5_0 mlx5_1 rxe1; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
[[ $(complete -p rdmaconnect) =~ -F\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_the_commands_and_their_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in ("pingpong", "devices", "states", "keygen", "gid-index"):
        assert word in text
    checker = shutil.which(shell)
    if checker is not None:
        subprocess.run([checker, "-n"], input=text, text=True, check=True, timeout=30)


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["de"], {"devices"}),
        (["p"], {"pingpong"}),
        (["pingpong", "--gid"], {"--gid-index"}),
        (["pingpong", "-t", ""], {"RC", "UC", "UD"}),
        (["pingpong", "-d", "mlx"], {"mlx5_0", "mlx5_1"}),
        (["pingpong", "--device", ""], {"mlx5_0", "mlx5_1", "rxe1"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(BASH), "--norc", "-uc", ASK, "ask", script("bash", capsys), "rdmaconnect", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    assert offered <= set(done.stdout.split())
    assert words[-1] in ("p", "") or set(done.stdout.split()) == offered


def test_without_shtab_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "shtab is not installed. pip install shtab" in capsys.readouterr().err


def test_another_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", "command.com"])
    assert caught.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_the_script_comes_as_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = script("bash", capsys)
    assert main(["completion", "bash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": "bash", "script": told.removesuffix("\n")}
