"""The terminal: how wide text may be, and colour where it is one."""

from __future__ import annotations

import os
import re
import shutil
from typing import TextIO

__all__ = ["paint", "width"]

#: columns where nothing tells, the narrowest and the widest that text is laid out for
_USUAL, _LEAST, _MOST = 80, 40, 120
_STYLES = {"bad": "1;31", "doubt": "33", "good": "32", "head": "1"}


def width(stream: TextIO) -> int:
    """Columns to lay text out for, 40 to 120.

    Args:
        stream: where it goes: of a terminal its width counts (COLUMNS of the environment before it), else 80.
    """
    if not stream.isatty():
        return _USUAL
    return max(_LEAST, min(shutil.get_terminal_size((_USUAL, 24)).columns, _MOST))


def paint(text: str, patterns: dict[str, str], stream: TextIO) -> str:
    """The text, coloured where a terminal shows it.

    Args:
        text: lines.
        patterns: style (``bad``, ``doubt``, ``good`` or ``head``) -> regular expression of what has it.
        stream: where it goes: only a terminal is given colour, and none if NO_COLOR is in the environment
            (https://no-color.org), or TERM is ``dumb``.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    for style, pattern in patterns.items():
        text = re.sub(pattern, rf"\033[{_STYLES[style]}m\g<0>\033[0m", text, flags=re.MULTILINE)
    return text
