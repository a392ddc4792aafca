"""``rdmaconnect explain``."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors import shown
from ..hints import HINTS
from .pasted import ERRNOS, EVENTS, STATUSES, codes
from .screen import paint, width
from .themes import CLASSES, THEMES

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]

#: what stands in a hint for the values that only the failure itself has
_FIELDS = {"gid_index": "N", "local_gid": "the local GID", "remote_gid": "the peer's GID"}


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    explain = commands.add_parser(
        "explain", parents=[common], help="what an error means, and what to do about it",
        description="CODE is an errno, a completion status or an event, by name, number or words, a class of error, "
        "any line or traceback that has one of them, - to read it from standard input, or a theme: "
        + ", ".join(THEMES) + ".",
    )  # fmt: skip
    words = "for example ETIMEDOUT, 12, -110, 'transport retry counter exceeded', IBV_EVENT_QP_FATAL, memlock"
    explain.add_argument("code", metavar="CODE", nargs="+", help=words)
    explain.set_defaults(run=_explain, parser=explain)


def _explain(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.code == ["-"] else " ".join(args.code)
    meanings = [_meaning(kind, name, text) for kind, name in codes(text)]
    if not meanings:
        raise ValueError(_unknown(text))
    if args.json:
        print(json.dumps({"code": text, "meanings": meanings}))
    else:
        lines = "\n\n".join("\n".join(_lines(meaning, width(sys.stdout))) for meaning in meanings)
        print(paint(lines, {"head": r"^\w[\w-]*"}, sys.stdout))
    return 0


def _meaning(kind: str, name: str, text: str) -> dict[str, Any]:
    if kind == "errno":
        return _errno(name, text)
    if kind == "error class":
        return _class(name)
    if kind == "theme":
        return {"kind": kind, "name": name, "hint": THEMES[name]}
    group, numbers = ("event", EVENTS) if kind == "event" else ("completion", STATUSES)
    return {"kind": kind, "name": name, "number": numbers[name], "hint": HINTS[group, name]}


def _errno(name: str, text: str) -> dict[str, Any]:
    number = ERRNOS[name]
    name = errors.errno_name(number).partition(" ")[0]  # EOPNOTSUPP for ENOTSUP
    known = [what for what, condition in HINTS if what not in ("completion", "event") and condition == name]
    # of a line that names the verb only the hints for it; "ibv_modify_qp RTR" if it names the state that it goes to too
    going = re.sub(r"\w+->", "", text)
    for named in (
        [what for what in known if " " in what and all(word in going for word in what.split())],
        [what for what in known if what.partition(" ")[0] in text],
    ):
        if named:
            known = named
            break
    verbs: dict[str, list[str]] = {}
    for what in known:
        verbs.setdefault(HINTS[what, name].format(**_FIELDS), []).append(what)
    hints = [{"verbs": names, "hint": hint} for hint, names in verbs.items()]
    return {"kind": "errno", "name": name, "number": number, "meaning": os.strerror(number), "hints": hints}


def _class(name: str) -> dict[str, Any]:
    when, todo = CLASSES[name]
    words = " ".join((inspect.getdoc(getattr(errors, name)) or "").partition("\n\n")[0].split()).replace("``", "`")
    return {"kind": "error class", "name": name, "meaning": words, "when": when, "hint": todo}


def _lines(meaning: dict[str, Any], columns: int) -> list[str]:
    def fill(text: str, first: str, later: str) -> list[str]:
        return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)

    number = f" ({meaning['number']})" if "number" in meaning else ""
    words = f": {meaning['meaning'].rstrip('.')}." if "meaning" in meaning else ""
    lines = fill(f"{meaning['name']}{number}, {meaning['kind']}{words}", "", "  ")
    for key in ("when", "hint"):
        if key in meaning:
            lines += fill(meaning[key], "  ", "  ")
    for entry in meaning.get("hints", ()):
        lines += fill(f"{', '.join(entry['verbs'])}: {entry['hint']}", "  ", "    ")
    if meaning.get("hints") == []:
        lines += fill("No verb has a hint of its own for it: the verb's manual page may tell.", "  ", "  ")
    return lines


def _unknown(text: str) -> str:
    known = {word.lower(): word for word in (*ERRNOS, *STATUSES, *EVENTS, *CLASSES, *THEMES)}
    asked = re.sub(r"^ibv_(wc|event)_", "", text.strip().lower())
    close = [known[word] for word in difflib.get_close_matches(asked, known, 4)]
    hint = f"Did you mean {', '.join(close)}?" if close else "See `rdmaconnect explain --help`."
    words = f"explain {shown(text)}: there is no code in it. {hint}"
    return "\n".join(textwrap.wrap(words, width(sys.stderr) - len("rdmaconnect: ")))
