"""``rdmaconnect completion``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..errors import RdmaConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arguments import Commands

__all__ = ["add"]

_SHELLS = ("bash", "zsh", "fish")
#: shell -> the function that tells it what devices there are
_DEVICES = {
    "bash": """
_rdmaconnect_devices() { compgen -W "$(ls /sys/class/infiniband 2> /dev/null)" -- "$1"; }
""",
    "zsh": """
_rdmaconnect_devices() { compadd -- /sys/class/infiniband/*(N:t) }
""",
}
_USE = """Put the output where your shell looks for it, for example

  rdmaconnect completion bash > ~/.local/share/bash-completion/completions/rdmaconnect
  rdmaconnect completion zsh > FOLDER/_rdmaconnect      (FOLDER of your $fpath)
  rdmaconnect completion fish > ~/.config/fish/completions/rdmaconnect.fish

or, for this shell alone: eval "$(rdmaconnect completion bash)"
"""


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    completion = commands.add_parser(
        "completion", parents=[common], help="a script that completes this program's words in a shell",
        description="Print it. It needs the package shtab.",
        epilog=_USE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    completion.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    completion.set_defaults(run=_completion, parser=completion)


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise RdmaConnectError("print the completion: the package shtab is not installed. pip install shtab") from None
    for action in _actions(args.program):
        if action.dest == "device":
            action.complete = dict.fromkeys(_DEVICES, "_rdmaconnect_devices")
    script = shtab.complete(args.program, args.shell, preamble=_DEVICES.get(args.shell, ""))
    print(json.dumps({"shell": args.shell, "script": script}) if args.json else script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """The arguments of a program and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
