"""What the command line prints fits the terminal, and has colour only where a terminal shows it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from places import ROOT

from rdmaconnect.cli.screen import paint, width

ESCAPE = re.compile(r"\033\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(columns: int, *argv: str, **env: str) -> list[str]:
    """What the program prints on a terminal so wide, line by line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    program = subprocess.Popen(
        [sys.executable, "-m", "rdmaconnect", *argv], stdout=theirs, stderr=theirs, stdin=theirs,
        env={**known, "TERM": "xterm", "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # EIO: the program has closed it
        pass
    finally:
        os.close(ours)
        program.wait(60)
    return said.decode().splitlines()


@pytest.mark.parametrize("columns", [50, 80, 110])
@pytest.mark.parametrize("argv", [("explain", "EINVAL"), ("states", "RC"), ("doctor",)], ids=" ".join)
def test_text_fits_the_terminal(columns: int, argv: tuple[str, ...]) -> None:
    lines = [ESCAPE.sub("", line) for line in on_a_terminal(columns, *argv)]
    free = [line for line in lines if " " in line.strip()]  # a word alone, a long path say, is not broken
    assert max(map(len, free)) <= columns
    assert columns > 100 or max(map(len, free)) > columns - 15


def test_colour_is_for_terminals_that_want_it() -> None:
    assert ESCAPE.search("\n".join(on_a_terminal(80, "explain", "ENOMEM")))
    assert ESCAPE.search("\n".join(on_a_terminal(80, "explain", "no such code")))
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert not ESCAPE.search("\n".join(on_a_terminal(80, "explain", "ENOMEM", **env)))


def test_what_is_no_terminal_is_80_wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for columns, laid_out in (("20", 40), ("100", 100), ("1000", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert width(Terminal()) == laid_out
        assert width(io.StringIO()) == 80
    assert paint("ok it is", {"good": "^ok"}, io.StringIO()) == "ok it is"
    assert paint("ok it is\nok", {"good": "^ok"}, Terminal()) == "\033[32mok\033[0m it is\n\033[32mok\033[0m"
