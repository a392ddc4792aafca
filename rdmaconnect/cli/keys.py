"""``rdmaconnect keygen``."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from ..exchange.curve import keygen

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    keys = commands.add_parser(
        "keygen", parents=[common], help="make a pair of key files",
        description="Write FOLDER/NAME.key, to give away, and FOLDER/NAME.key_secret, to keep.",
    )  # fmt: skip
    keys.add_argument("name", metavar="[FOLDER/]NAME", help="the files' name without its end")
    keys.set_defaults(run=_keygen, parser=keys)


def _keygen(args: argparse.Namespace) -> int:
    folder, name = os.path.split(args.name)
    public, secret = keygen(folder or ".", name)
    if args.json:
        print(json.dumps({"public": public, "secret": secret}))
    else:
        print(f"{public}: give it to the other side\n{secret}: keep it")
    return 0
