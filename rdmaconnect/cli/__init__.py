"""The command line: each command, ``rdmaconnect pingpong`` for example, in a file of its own.

Exit status 0, 1 for an error (one or two sentences on stderr), 2 for wrong usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import RdmaConnectError
from . import completion, devices, doctor, explain, keys, pingpong, states

__all__ = ["main"]

COMMANDS = (doctor, pingpong, devices, states, explain, keys, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.verbose and args.logs:
        logging.basicConfig(format="%(relativeCreated)7.1f ms %(message)s", level=logging.DEBUG)
    try:
        status: int = args.run(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return 1
    except (RdmaConnectError, OSError, ValueError) as e:
        words = e.strerror if isinstance(e, OSError) and e.strerror else e
        print(f"rdmaconnect: {words}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rdmaconnect", description="Connect RDMA queue pairs in one call.")
    parser.add_argument("--version", action="version", version=f"rdmaconnect {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    common.add_argument("-v", "--verbose", action="store_true", help="log each step to stderr")
    common.set_defaults(logs=True, program=parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands, common)
    return parser
