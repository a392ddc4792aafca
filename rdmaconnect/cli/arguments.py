"""What several commands take: the types of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import shown

if TYPE_CHECKING:
    #: what :meth:`argparse.ArgumentParser.add_subparsers` gives
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_keys", "count", "seconds", "tcp_port"]


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add the options that protect the exchange with key files."""
    parser.add_argument("--key", metavar="FILE", help="this side's .key_secret file (see keygen)")
    words = "the other side's .key file; where this side listens, the folder of those that may connect. Without "
    words += "either, RDMACONNECT_SECRET of the environment protects the exchange if it is set"
    parser.add_argument("--peer-key", metavar="FILE", help=words)


def count(least: int) -> Callable[[str], int]:
    """A whole number of ``least`` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of {least} or more")
        return int(text)

    return parse


def tcp_port(text: str) -> int:
    """A number from 1 to 65535."""
    number = count(1)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{shown(number)} is above 65535")
    return number


def seconds(text: str) -> float:
    """A number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of seconds, 0 or more")
    return value
