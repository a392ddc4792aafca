"""The programs and commands of README.md, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_PROGRAM = re.compile(
    r"^<!-- run: (?P<name>\w+) (?P<side>server|client|alone)(?P<forever>, forever)?(?:, prints: (?P<prints>.*?))? -->\n"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

_TOOLS = r"rdmaconnect|docker/lab|docker|kubectl|pip|python3|\.venv/bin/\w+"


class Program(NamedTuple):
    """One program of the page.

    Args:
        name: what it and its other side are called.
        side: ``server`` or ``client``, or ``alone`` if it needs no other.
        forever: whether it ends only when it is ended.
        prints: words that it prints, or "".
        code: its text.
    """

    name: str
    side: str
    forever: bool
    prints: str
    code: str


def programs() -> list[Program]:
    """Every marked program."""
    return [
        Program(found["name"], found["side"], bool(found["forever"]), found["prints"] or "", found["code"])
        for found in _PROGRAM.finditer(README)
    ]


def commands() -> list[list[str]]:
    """The words of every command line: those indented by four, without what follows a ``#``."""
    lines = re.findall(rf"^    ((?:{_TOOLS})\b.*)$", README, re.MULTILINE)
    return [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
