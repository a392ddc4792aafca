"""``rdmaconnect doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..agreement.options import Options
from ..errors import RdmaConnectError
from ..exchange.url import DEFAULT_PORT, host_of, tcp_url
from .arguments import add_keys, seconds, tcp_port
from .screen import paint, width

if TYPE_CHECKING:
    from ..doctor import Attempt, Host
    from .arguments import Commands

__all__ = ["add"]

_COLOURS = {
    "bad": r"^FAIL\b|\bFAIL \d+|^No connection can be made.*",
    "doubt": r"^WARN\b",
    "good": r"^ok\b|\*?\bok (?=\d)|^A connection can be made.*",
    "head": r"^(This|The other) host, .*",
}


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    doctor = commands.add_parser(
        "doctor", parents=[common], help="what keeps this host, or this pair of hosts, from connecting",
        description="Without HOST: examine this host. With HOST: try every port here with every port there, where "
        "`rdmaconnect doctor --serve` runs. Exit status 0 if a connection can be made, 1 if not.",
    )  # fmt: skip
    add = doctor.add_argument
    add("host", nargs="?", metavar="HOST", help="name or address of the other host")
    add("--serve", action="store_true", help="be the other host: serve doctors until Ctrl-C")
    add("-d", "--device", metavar="NAME", help="only this RDMA device")
    add("-i", "--port-num", type=int, metavar="N", help="only this port of the device")
    add("-g", "--gid-index", type=int, metavar="N", help="only this slot of the GID table")
    add(
        "-p",
        "--port",
        type=tcp_port,
        default=DEFAULT_PORT,
        metavar="PORT",
        help="TCP port of the exchange (%(default)s)",
    )
    add_keys(doctor)
    add("--deadline", type=seconds, default=60.0, metavar="SECONDS", help="for all pairs together (%(default)s)")
    doctor.set_defaults(run=_doctor, parser=doctor, check=_check)


def _check(args: argparse.Namespace) -> None:
    """Find the options and the url, in ``args``."""
    if args.serve and (args.host or args.json):
        args.parser.error("--serve takes neither HOST nor --json")
    try:
        args.options = Options(device=args.device, port_num=args.port_num, gid_index=args.gid_index)
        args.url = tcp_url(args.host, port=args.port) if args.host else None
    except ValueError as e:
        args.parser.error(str(e))


def _doctor(args: argparse.Namespace) -> int:
    if not sys.platform.startswith("linux"):
        raise RdmaConnectError(f"examine this host: it is {sys.platform}, and only Linux has what is examined")
    from ..doctor import gather, serve  # the other commands do without

    if args.serve:

        def say(words: str) -> None:
            print(words, file=sys.stderr, flush=True)

        serve(f"*:{args.port}", args.options, say, key=args.key, peer_keys=args.peer_key)
        return 0
    host = gather(args.options, host_of(args.url) if args.url else None)
    return _host(host, args.json) if args.url is None else _pair(host, args.url, args.options, args)


def _host(host: Host, as_object: bool) -> int:
    from ..doctor import examine
    from ..doctor.report import as_json, host_lines

    findings = examine(host)
    if as_object:
        print(json.dumps(as_json(host, findings)))
    else:
        _show(host_lines(host, findings, width(sys.stdout)))
    return 0 if host.usable else 1


def _pair(host: Host, url: str, options: Options, args: argparse.Namespace) -> int:
    from ..doctor import examine, visit
    from ..doctor.report import as_json, host_lines, visit_lines

    findings = examine(host)
    if not args.json:
        _show(host_lines(host, findings, width(sys.stdout)))
        print(flush=True)
    tell = None if args.json else _told
    found = visit(url, options, args.deadline, tell, key=args.key, peer_key=args.peer_key)
    if args.json:
        print(json.dumps(as_json(host, findings, found)))
    else:
        _show(visit_lines(found, width(sys.stdout)))
    return 0 if found.ok else 1


def _show(lines: Iterable[str]) -> None:
    print(paint("\n".join(lines), _COLOURS, sys.stdout))


def _told(attempt: Attempt) -> None:
    """One attempt, where somebody waits for it."""
    if sys.stderr.isatty():
        print(f"{attempt.way}: {attempt.state}", file=sys.stderr, flush=True)
