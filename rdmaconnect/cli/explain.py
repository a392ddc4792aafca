"""``rdmaconnect explain``."""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import json
import os
import textwrap
from typing import TYPE_CHECKING, Any

from .. import errors
from ..abi import WcStatus
from ..hints import HINTS
from .themes import CLASSES, THEMES

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]

_WIDTH = 80
#: what stands in a hint for the values that only the failure itself has
_FIELDS = {"gid_index": "N", "local_gid": "the local GID", "remote_gid": "the peer's GID"}
_ERRNOS = {name: number for name, number in vars(errno).items() if name.startswith("E")}
_STATUSES = {name: status for name, status in WcStatus.__members__.items() if status is not WcStatus.SUCCESS}


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    explain = commands.add_parser(
        "explain", parents=[common], help="what an error means, and what to do about it",
        description="CODE is an errno or a completion status, by name or number, a class of error, or a theme: "
        + ", ".join(THEMES) + ".",
    )  # fmt: skip
    explain.add_argument("code", metavar="CODE", help="for example ETIMEDOUT, 12, RETRY_EXC_ERR, PeerMismatch, memlock")
    explain.set_defaults(run=_explain, parser=explain)


def _explain(args: argparse.Namespace) -> int:
    meanings = _meanings(args.code)
    if not meanings:
        raise ValueError(_unknown(args.code))
    if args.json:
        print(json.dumps({"code": args.code, "meanings": meanings}))
    else:
        print("\n\n".join("\n".join(_lines(meaning)) for meaning in meanings))
    return 0


def _meanings(code: str) -> list[dict[str, Any]]:
    """Everything that a code can stand for: a number is both an errno and a status."""
    if code.isdecimal():
        name, status = errno.errorcode.get(int(code), ""), WcStatus(int(code))
        return [*_errno(name), *_status(status.name if status.known else "")]
    word = code.upper().removeprefix("IBV_WC_")
    return [*_errno(word), *_status(word), *_class(code), *_theme(code)]


def _errno(name: str) -> list[dict[str, Any]]:
    if name not in _ERRNOS:
        return []
    number = _ERRNOS[name]
    name = errors.errno_name(number).partition(" ")[0]  # EOPNOTSUPP for ENOTSUP
    verbs: dict[str, list[str]] = {}
    for (verb, condition), text in HINTS.items():
        if verb != "completion" and condition == name:
            verbs.setdefault(text.format(**_FIELDS), []).append(verb)
    hints = [{"verbs": names, "hint": text} for text, names in verbs.items()]
    return [{"kind": "errno", "name": name, "number": number, "meaning": os.strerror(number), "hints": hints}]


def _status(name: str) -> list[dict[str, Any]]:
    if name not in _STATUSES:
        return []
    hint = HINTS["completion", name]
    return [{"kind": "completion status", "name": name, "number": int(_STATUSES[name]), "hint": hint}]


def _class(code: str) -> list[dict[str, Any]]:
    for name, (when, todo) in CLASSES.items():
        if name.lower() == code.lower():
            words = " ".join((inspect.getdoc(getattr(errors, name)) or "").partition("\n\n")[0].split())
            words = words.replace("``", "`")
            return [{"kind": "error class", "name": name, "meaning": words, "when": when, "hint": todo}]
    return []


def _theme(code: str) -> list[dict[str, Any]]:
    name = code.lower()
    return [{"kind": "theme", "name": name, "hint": THEMES[name]}] if name in THEMES else []


def _lines(meaning: dict[str, Any]) -> list[str]:
    number = f" ({meaning['number']})" if "number" in meaning else ""
    words = f": {meaning['meaning'].rstrip('.')}." if "meaning" in meaning else ""
    lines = _fill(f"{meaning['name']}{number}, {meaning['kind']}{words}", "", "  ")
    for key in ("when", "hint"):
        if key in meaning:
            lines += _fill(meaning[key], "  ", "  ")
    for entry in meaning.get("hints", ()):
        lines += _fill(f"{', '.join(entry['verbs'])}: {entry['hint']}", "  ", "    ")
    if meaning.get("hints") == []:
        lines += _fill("No verb has a hint of its own for it: the verb's manual page may tell.", "  ", "  ")
    return lines


def _fill(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=True
    )  # fmt: skip


def _unknown(code: str) -> str:
    known = {word.lower(): word for word in (*_ERRNOS, *_STATUSES, *CLASSES, *THEMES)}
    asked = code.lower().removeprefix("ibv_wc_")
    close = [known[word] for word in difflib.get_close_matches(asked, known, 4)]
    hint = f"Did you mean {', '.join(close)}?" if close else "See `rdmaconnect explain --help`."
    shown = code if len(code) <= _WIDTH // 2 else f"{code[: _WIDTH // 2]}..."
    return "\n".join(textwrap.wrap(f"explain {shown!r}: there is no such code. {hint}", _WIDTH - len("rdmaconnect: ")))
