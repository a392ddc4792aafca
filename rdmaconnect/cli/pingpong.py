"""``rdmaconnect pingpong``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..connect import connect
from ..connection import Connection
from ..endpoint import MTU_BYTES, Options
from ..listener import listen
from ..oob import DEFAULT_PORT, tcp_url
from ..pingpong import Report, describe_end, echo, most_size, ping
from .arguments import count, seconds, tcp_port

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]

_DEFAULTS = Options()
_SIZES = _DEFAULTS.sizes()


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
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
        type=tcp_port,
        default=DEFAULT_PORT,
        metavar="PORT",
        help="TCP port of the exchange (%(default)s)",
    )
    add("-t", "--type", choices=("RC", "UC", "UD"), default="RC", type=str.upper, help="queue pair type (%(default)s)")
    add("-s", "--size", type=count(0), metavar="BYTES", help="size of each message (4096, for UD at most the MTU)")
    add("-n", "--iters", type=count(1), default=1000, metavar="N", help="round trips (%(default)s)")
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
    add("--deadline", type=seconds, default=30.0, metavar="SECONDS", help=patience)
    pingpong.set_defaults(run=_pingpong, parser=pingpong)


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
