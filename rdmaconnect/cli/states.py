"""``rdmaconnect states``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from ..abi import QpType, bits
from ..agreement.transitions import TABLE
from ..errors import shown
from .screen import paint, width

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    states = commands.add_parser(
        "states", parents=[common], help="which attributes each transition of a queue pair needs and allows",
        description="The table that ibv_modify_qp follows: required and optional attributes for each pair of states.",
    )  # fmt: skip
    states.add_argument("type", metavar="TYPE", type=_table_type, help=", ".join(map(str, TABLE)))
    states.set_defaults(run=_states, parser=states)


def _table_type(text: str) -> QpType:
    for qp_type in TABLE:
        if text.upper() == str(qp_type):
            return qp_type
    raise argparse.ArgumentTypeError(f"{shown(text)} is not one of {', '.join(map(str, TABLE))}")


def _states(args: argparse.Namespace) -> int:
    rows = [
        {
            "from": str(frm),
            "to": str(to),
            "required": list(map(str, bits(row.required))),
            "optional": list(map(str, bits(row.optional))),
        }
        for (frm, to), row in TABLE[args.type].items()
    ]
    if args.json:
        print(json.dumps({"qp_type": str(args.type), "transitions": rows}))
        return 0
    for row in rows:
        print(paint(f"{row['from']:5} -> {row['to']}", {"head": ".*"}, sys.stdout))
        for kind in ("required", "optional"):
            if row[kind]:
                words = f"  {kind}: {', '.join(row[kind])}"
                print(textwrap.fill(words, width(sys.stdout), subsequent_indent=" " * 12))
    return 0
