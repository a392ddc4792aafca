"""Read files that may not be there, or not for us."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["entries", "text"]


def text(path: str | Path) -> str:
    """What a file says, "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def entries(path: str | Path) -> list[str]:
    """The names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
