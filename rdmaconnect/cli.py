"""The command line: ``rdmaconnect pingpong``, ``devices``, ``states`` and ``keygen``.

Exit status 0, 1 for an error (one or two sentences on stderr), 2 for wrong usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import __version__, devinfo
from .abi import LinkLayer, QpType, bits
from .connect import connect
from .connection import Connection
from .curve import keygen
from .device import Port, device_names, open_device
from .endpoint import MTU_BYTES, Options
from .errors import DeviceError, RdmaConnectError
from .listener import listen
from .oob import DEFAULT_PORT, tcp_url
from .pingpong import Report, describe_end, echo, most_size, ping
from .transitions import TABLE

__all__ = ["main"]

_DEFAULTS = Options()
_SIZES = _DEFAULTS.sizes()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.verbose and args.run is not _devices:
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
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    pingpong = commands.add_parser(
        "pingpong",
        parents=[common],
        help="messages there and back, checked and timed",
        description="Without HOST: serve one ping-pong. With HOST: connect to one that serves. "
        "The letters are those of ibv_rc_pingpong.",
    )
    add = pingpong.add_argument
    add("host", nargs="?", metavar="HOST", help="name or address of the serving side")
    add("-d", "--device", metavar="NAME", help="RDMA device (default: by the route to the peer)")
    add("-i", "--port-num", type=int, metavar="N", help="the device's port (default: the first ACTIVE one)")
    add("-g", "--gid-index", type=int, metavar="N", help="slot of the GID table (default: the best pair)")
    add(
        "-p",
        "--port",
        type=_tcp_port,
        default=DEFAULT_PORT,
        metavar="PORT",
        help="TCP port of the exchange (%(default)s)",
    )
    add("-t", "--type", choices=("RC", "UC", "UD"), default="RC", type=str.upper, help="queue pair type (%(default)s)")
    add("-s", "--size", type=_count(0), metavar="BYTES", help="size of each message (4096, for UD at most the MTU)")
    add("-n", "--iters", type=_count(1), default=1000, metavar="N", help="round trips (%(default)s)")
    add("-m", "--mtu", type=int, choices=list(MTU_BYTES.values()), help="largest path MTU (default: the ports')")
    add("-l", "--sl", type=int, default=0, metavar="SL", help="service level, 0 to 15 (%(default)s)")
    add(
        "-r",
        "--rx-depth",
        type=int,
        metavar="N",
        help=f"receives kept posted ({_SIZES.recv_depth})",
    )
    add("-e", "--events", action="store_true", help="sleep on completion events, do not poll first")
    patience = "seconds to connect and for each message (%(default)s); a server waits for its peer without limit"
    add("--deadline", type=_seconds, default=30.0, metavar="SECONDS", help=patience)
    pingpong.set_defaults(run=_pingpong, parser=pingpong)

    devices = commands.add_parser(
        "devices", parents=[common], help="devices, ports, states and GID tables",
        description="What this host has; with -v all that ibv_devinfo -v tells.",
    )  # fmt: skip
    devices.set_defaults(run=_devices, parser=devices)

    states = commands.add_parser(
        "states", parents=[common], help="which attributes each transition of a queue pair needs and allows",
        description="The table that ibv_modify_qp follows: required and optional attributes for each pair of states.",
    )  # fmt: skip
    states.add_argument("type", metavar="TYPE", type=_table_type, help=", ".join(map(str, TABLE)))
    states.set_defaults(run=_states, parser=states)

    keys = commands.add_parser(
        "keygen", parents=[common], help="make a pair of key files",
        description="Write FOLDER/NAME.key, to give away, and FOLDER/NAME.key_secret, to keep.",
    )  # fmt: skip
    keys.add_argument("name", metavar="[FOLDER/]NAME", help="the files' name without its end")
    keys.set_defaults(run=_keygen, parser=keys)
    return parser


def _table_type(text: str) -> QpType:
    for qp_type in TABLE:
        if text.upper() == str(qp_type):
            return qp_type
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, TABLE))}")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse


def _tcp_port(text: str) -> int:
    number = _count(1)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value


# ---- pingpong


def _pingpong(args: argparse.Namespace) -> int:
    options = {
        "device": args.device,
        "port_num": args.port_num,
        "gid_index": args.gid_index,
        "path_mtu": args.mtu,
        "sl": args.sl,
        "recv_size": args.size if (args.size or 0) > _SIZES.recv_size else None,
        "recv_depth": args.rx_depth,
        "spin": 0 if args.events else _DEFAULTS.spin,
    }
    try:
        Options(**options)
        url = tcp_url("*" if args.host is None else args.host, bind=args.host is None)
        url = url.removesuffix(f":{DEFAULT_PORT}") + f":{args.port}" if url.endswith(f":{DEFAULT_PORT}") else url
    except ValueError as e:
        args.parser.error(str(e))
    return _serve(args, url, options) if args.host is None else _ping(args, url, options)


def _serve(args: argparse.Namespace, url: str, options: dict[str, Any]) -> int:
    with listen(url, **options) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        conn = listener.accept(deadline_s=None, tolerant=False)
    with conn:
        size, iters = echo(conn, deadline_s=args.deadline)
        ends = {
            "local": describe_end(conn.local, conn.path.local_gid),
            "remote": describe_end(conn.peer, conn.path.remote_gid),
        }
        if args.json:
            print(json.dumps({"qp_type": str(conn.local.qp_type), "size": size, "iters": iters, **ends}))
        else:
            _print_ends(**ends)
            print(f"echoed {iters} messages of {size} bytes, contents verified")
    return 0


def _ping(args: argparse.Namespace, url: str, options: dict[str, Any]) -> int:
    made: Connection = connect(url, qp_type=args.type, deadline_s=args.deadline, **options)
    with made as conn, _progress(args.iters, not args.json) as tick:
        size = min(4096, most_size(conn)) if args.size is None else args.size
        report = ping(conn, size=size, iters=args.iters, deadline_s=args.deadline, tick=tick)
    if args.json:
        print(json.dumps(report.asdict()))
    else:
        _print_report(report)
    return 0


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, where the extra ``cli`` (rich) is installed."""
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("ping-pong", total=total)
        yield lambda done: bar.update(task, completed=done)


def _print_ends(local: dict[str, Any], remote: dict[str, Any]) -> None:
    for name, end in (("local", local), ("remote", remote)):
        print(
            f"{name + ' address:':16} LID {end['lid']:#06x}, QPN {end['qp_num']:#08x}, PSN {end['psn']:#08x}, "
            f"GID {end['gid'] or '-'} ({end['device']} port {end['port_num']})"
        )


def _print_report(report: Report) -> None:
    _print_ends(report.local, report.remote)
    for line in report.why:
        print(f"{'path:':16} {line}")
    seconds = report.usec_per_iter * report.iters / 1e6
    print(f"connected in {report.connect_us / 1000:.1f} ms, path MTU {report.path_mtu}")
    print(f"{2 * report.size * report.iters} bytes in {seconds:.2f} seconds = {report.mbit_per_s:.2f} Mbit/sec")
    print(f"{report.iters} iters in {seconds:.2f} seconds = {report.usec_per_iter:.2f} usec/iter, contents verified")
    print("latency usec:    " + "  ".join(f"{name} {value:.1f}" for name, value in report.latency_us.items()))


# ---- devices


def _devices(args: argparse.Namespace) -> int:
    names = device_names()
    if not names:
        raise DeviceError("list RDMA devices: there is none. Load a driver, or pass /dev/infiniband to the container.")
    if args.verbose:
        return _devinfo(names, args.json)
    found = [_describe_device(name) for name in names]
    if args.json:
        print(json.dumps({"devices": found}))
    else:
        for device in found:
            _print_device(device)
    return 0


def _devinfo(names: Sequence[str], as_json: bool) -> int:
    found = []
    for name in names:
        with open_device(name) as context:
            found.append(devinfo.describe(context))
    print(
        json.dumps({"devices": found}) if as_json else "\n".join(line for info in found for line in devinfo.lines(info))
    )
    return 0


def _describe_device(name: str) -> dict[str, Any]:
    try:
        with open_device(name) as context:
            return {"device": name, "ports": [_describe_port(port) for port in context.ports()]}
    except RdmaConnectError as e:
        return {"device": name, "error": str(e), "ports": []}


def _describe_port(port: Port) -> dict[str, Any]:
    return {
        "port_num": port.port_num,
        "state": str(port.state),
        "link_layer": "Ethernet" if port.link_layer == LinkLayer.ETHERNET else "InfiniBand",
        "lid": port.lid,
        "active_mtu": MTU_BYTES.get(port.active_mtu),
        "max_mtu": MTU_BYTES.get(port.max_mtu),
        "gids": [
            {"gid_index": g.gid_index, "gid": str(g.gid), "type": g.type_words, "netdev": g.netdev} for g in port.gids
        ],
    }


def _print_device(device: dict[str, Any]) -> None:
    print(device["device"] + (f": cannot be opened: {device['error']}" if "error" in device else ""))
    for port in device["ports"]:
        print(
            f"  port {port['port_num']}: {port['state']}, {port['link_layer']}, LID {port['lid']:#06x}, "
            f"MTU {port['active_mtu']} (at most {port['max_mtu']})"
        )
        for gid in port["gids"]:
            print(f"    gid {gid['gid_index']:3}: {gid['gid']:39} {gid['type']:7} {gid['netdev']}")


# ---- states


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
        print(f"{row['from']:5} -> {row['to']}")
        for kind in ("required", "optional"):
            if row[kind]:
                words = f"  {kind}: {', '.join(row[kind])}"
                print(textwrap.fill(words, 80, subsequent_indent=" " * 12))
    return 0


# ---- keygen


def _keygen(args: argparse.Namespace) -> int:
    folder, name = os.path.split(args.name)
    public, secret = keygen(folder or ".", name)
    if args.json:
        print(json.dumps({"public": public, "secret": secret}))
    else:
        print(f"{public}: give it to the other side\n{secret}: keep it")
    return 0
