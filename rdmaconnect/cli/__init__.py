"""The command line: each command, ``rdmaconnect pingpong`` for example, in a file of its own.

Exit status 0, 1 for an error (one or two sentences on stderr), 2 for wrong usage, 130 for Ctrl-C. With ``--json``
an error and wrong usage are one object on stdout too: ``error``, the words; ``class``; ``errno``, a number or null.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import RdmaConnectError
from . import completion, devices, doctor, explain, keys, pingpong, states
from .screen import paint

__all__ = ["check", "main"]

COMMANDS = (doctor, pingpong, devices, states, explain, keys, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = check(argv)
    try:
        if args.verbose and args.logs:
            logging.basicConfig(format="%(relativeCreated)7.1f ms %(message)s", level=logging.DEBUG)
        status: int = args.run(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return 1
    except (RdmaConnectError, OSError, ValueError) as e:
        words = _words(e)
        if args.json:
            print(json.dumps({"error": words, "class": type(e).__name__, "errno": getattr(e, "errno", None) or None}))
        print(paint(f"rdmaconnect: {words}", {"bad": r"^rdmaconnect:"}, sys.stderr), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def check(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line, and do nothing that it asks for.

    Args:
        argv: the arguments after the program's name.

    Returns:
        What was read.

    Raises:
        SystemExit: wrong usage, which is told on stderr, status 2; or help was asked for, status 0.
    """
    try:
        args = _parser().parse_args(argv)
        args.check(args)
    except _UsageError as e:
        if "--json" in argv:
            print(json.dumps({"error": str(e), "class": "usage", "errno": None}))
        argparse.ArgumentParser.error(e.parser, str(e))
    return args


def _words(error: Exception) -> str:
    """What an error says, of the system's own with the file that it is about."""
    if not isinstance(error, OSError) or isinstance(error, RdmaConnectError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


class _UsageError(Exception):
    """Wrong usage, of the parser that found it."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(self, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rdmaconnect", description="Connect RDMA queue pairs in one call.")
    parser.add_argument("--version", action="version", version=f"rdmaconnect {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text, of an error too")
    common.add_argument("-v", "--verbose", action="store_true", help="log each step to stderr")
    common.set_defaults(logs=True, program=parser, check=lambda args: None)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands, common)
    return parser
