"""``rdmaconnect pingpong``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..abi import QpType
from ..agreement.endpoint import MTU_BYTES
from ..agreement.options import Options
from ..errors import ConnectTimeout, RdmaConnectError
from ..exchange.url import DEFAULT_PORT, tcp_url
from ..pingpong import (
    LARGEST,
    OPS,
    Echoed,
    Report,
    check_memory,
    describe_end,
    echo,
    most_size,
    ping,
    plot,
    report,
    sweep,
)
from ..pingpong.rdma_core import Game, echo_tool, ping_tool
from ..session.connect import connect_many
from ..session.connection import Connection
from ..session.listen import Listener, listen
from ..session.trace import Mark
from .arguments import add_keys, count, seconds, tcp_port
from .screen import width

if TYPE_CHECKING:
    from .arguments import Commands

__all__ = ["add"]

_DEFAULTS = Options()
_SIZES = _DEFAULTS.sizes()
#: bytes that receives take together, if there are two at least
_RECEIVES = 64 * 2**20
#: the largest size of a sweep, as in perftest
_SWEEP_TO = 8 * 2**20
#: bytes of payload with each size of a sweep, one way
_SWEEP_BYTES = 256 * 2**20
#: whom it plays with: itself, or rdma-core's ibv_*_pingpong, which has these defaults, and none of these options
_OURS, _RDMA_CORE = "rdmaconnect", "rdma-core"
_TOOL_MTU, _TOOL_SIZE, _TOOL_UD_SIZE = 1024, 4096, 2048
_NOT_OF_TOOL = {"--op": "op", "-a": "sweep", "-D": "duration", "--bw": "bw", "--tx-depth": "tx_depth", "-q": "qps",
                "--trace": "trace", "--key": "key", "--peer-key": "peer_key"}  # fmt: skip


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    pingpong = commands.add_parser(
        "pingpong",
        parents=[common],
        help="messages there and back, checked and timed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Without HOST: serve one ping-pong. With HOST: connect to one that serves, and say what is done.\n"
        "The letters are those of ibv_rc_pingpong; -a, -q and -D are perftest's, and so is --tx-depth.",
        epilog=_epilog(),
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
    add("--op", choices=OPS, default="send", help="what is done, see below (%(default)s)")
    size = "bytes of each payload, up to 1 GiB (4096, for UD at most the MTU); with -a the largest"
    add("-s", "--size", type=count(0), metavar="BYTES", help=size)
    add("-a", "--sweep", action="store_true", help="all powers of two from 1 byte up to -s (8 MiB)")
    add("-n", "--iters", type=count(1), metavar="N", help="round trips (1000; with -a fewer of the large ones)")
    add("-D", "--duration", type=seconds, metavar="SECONDS", help="for so long with each size, instead of -n")
    add("--bw", action="store_true", help="throughput: many one way at once, instead of round trips (over RC)")
    depth = f"with --bw, how many are on their way at once on each connection ({_SIZES.send_depth})"
    add("--tx-depth", type=count(1), metavar="N", help=depth)
    add("-q", "--qps", type=count(1), default=1, metavar="N", help="connections, used in turn (%(default)s)")
    add("-m", "--mtu", type=int, choices=list(MTU_BYTES.values()), help="largest path MTU (default: the ports')")
    add("-l", "--sl", type=int, metavar="SL", help="service level, 0 to 15 (default: the other side's, or 0)")
    add("-r", "--rx-depth", type=int, metavar="N", help=f"receives kept posted ({_SIZES.recv_depth})")
    add("-e", "--events", action="store_true", help="sleep on completion events, do not poll first")
    tool = (
        f"what the other side is: {_RDMA_CORE} is ibv_rc_pingpong, or the one of -t, started with a -g on Ethernet and "
    )
    tool += f"the same -s ({_TOOL_SIZE}; UD {_TOOL_UD_SIZE}), -n and -m ({_TOOL_MTU}) as here (%(default)s)"
    add("--peer", choices=(_OURS, _RDMA_CORE), default=_OURS, help=tool)
    patience = "seconds to connect and for each message (%(default)s); a server waits for its peer without limit"
    add("--deadline", type=seconds, default=30.0, metavar="SECONDS", help=patience)
    add_keys(pingpong)
    add("--trace", action="store_true", help="show each step of the handshake with its time, of both ends")
    add("--csv", metavar="FILE", help="write one row for each size; - for standard output instead of text")
    add("--plot", metavar="FILE.png", help="draw it, 1200 x 800 pixels (needs the extra 'plot')")
    pingpong.set_defaults(run=_pingpong, parser=pingpong, check=_check)


def _epilog() -> str:
    lines = ["a round trip of each --op (with --bw those with * go one way, many at once):"]
    for name, op in OPS.items():
        says = f"{op.says} ({', '.join(map(str, op.qp_types))})"
        star = "*" if op.one_way else ""
        lines += textwrap.wrap(f"  {name + star:9}  {says}", width(sys.stdout), subsequent_indent=" " * 13)
    return "\n".join(lines)


def _check(args: argparse.Namespace) -> None:
    """Find the url and the options, in ``args``; refuse what no two ends can do, before anything is done."""
    kept = _DEFAULTS.sizes(args.qps)
    recv_size = args.size if args.op == "send" and (args.size or 0) > kept.recv_size else None
    try:
        options = Options(
            device=args.device, port_num=args.port_num, gid_index=args.gid_index, path_mtu=args.mtu, sl=args.sl,
            recv_size=recv_size, recv_depth=args.rx_depth, send_depth=args.tx_depth,
            spin=0 if args.events else _DEFAULTS.spin,
        )  # fmt: skip
        if recv_size is not None and args.rx_depth is None:
            options = dataclasses.replace(options, recv_depth=max(2, min(kept.recv_depth, _RECEIVES // recv_size)))
        _agree(args)
        if args.peer == _RDMA_CORE:
            options = _of_tool(args, options)
        args.url = tcp_url("*" if args.host is None else args.host, bind=args.host is None, port=args.port)
    except ValueError as e:
        args.parser.error(str(e))
    args.options = options


def _of_tool(args: argparse.Namespace, options: Options) -> Options:
    """The options for one of rdma-core's programs, with its own defaults.

    Raises:
        ValueError: what it cannot do, in words.
    """
    given = [letter for letter, name in _NOT_OF_TOOL.items() if getattr(args, name) != args.parser.get_default(name)]
    if given:
        raise ValueError(f"{', '.join(given)} with --peer {_RDMA_CORE}: its programs only send messages to and fro")
    if args.size == 0:
        raise ValueError(f"size is 0: --peer {_RDMA_CORE} takes 1 or more")
    if args.size is None:
        args.size = _TOOL_UD_SIZE if args.type == "UD" else _TOOL_SIZE
    args.iters = args.iters or 1000
    return dataclasses.replace(options, recv_size=args.size, path_mtu=args.mtu or _TOOL_MTU)


def _pingpong(args: argparse.Namespace) -> int:
    options: Options = args.options
    size, depth, *_ = options.sizes(args.qps)
    check_memory(size * depth * args.qps, f"{depth * args.qps} receives of {size} bytes")
    if args.peer == _RDMA_CORE:
        return _play_tool(args, Game(QpType[args.type], args.size, args.iters, options, args.deadline))
    return _serve(args, args.url, options) if args.host is None else _ping(args, args.url, options)


def _agree(args: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: what, in words.
    """
    if args.json and args.csv == "-":
        raise ValueError("--json and --csv - both mean standard output: give --csv a file")
    if args.duration is not None and args.iters is not None:
        raise ValueError("-n says how often and -D how long: give one of them")
    if args.duration == 0:
        raise ValueError("-D is 0: give more")
    op = OPS[args.op]
    if args.tx_depth is not None and not args.bw:
        raise ValueError("--tx-depth is for --bw: one round trip has one on its way")
    if args.bw and args.plot is not None:
        raise ValueError("--plot draws round trips: leave --bw away, or write a --csv")
    if args.bw and not (args.type == "RC" and op.one_way):
        able = ", ".join(name for name, op in OPS.items() if op.one_way)
        raise ValueError(f"--bw of {args.op} over {args.type}: it takes {able} over RC, which loses nothing")
    if QpType[args.type] not in op.qp_types:
        raise ValueError(f"--op {args.op} over {args.type}: it takes -t {' or '.join(map(str, op.qp_types))}")
    if args.size is not None and not op.least <= args.size <= LARGEST:
        raise ValueError(f"size is {args.size}: --op {args.op} takes {op.least} to {LARGEST}")
    if args.sweep and args.size == 0:
        raise ValueError("-a goes from 1 byte up to -s: give -s 1 or more")
    if args.plot is not None and args.host is not None:
        plot.require()


def _serve(args: argparse.Namespace, url: str, options: Options) -> int:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(url, options=options, key=args.key, peer_keys=args.peer_key))
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)

        def more(number: int) -> list[Connection]:
            return [stack.enter_context(listener.accept(deadline_s=args.deadline)) for _ in range(number)]

        conn = stack.enter_context(first(listener, args.deadline))
        done = echo(conn, more=more, deadline_s=args.deadline)
        ends = {
            "local": describe_end(conn.local, conn.path.local_gid),
            "remote": describe_end(conn.peer, conn.path.remote_gid),
        }
        qp_type, trace = str(conn.local.qp_type), conn.trace if args.trace else ()
    _show_served(args, qp_type, done, ends, trace)
    return 0


def _show_served(
    args: argparse.Namespace,
    qp_type: str,
    done: Echoed,
    ends: dict[str, dict[str, object]],
    trace: Sequence[Mark] = (),
) -> None:
    if args.json:
        body = {"qp_type": qp_type, **dataclasses.asdict(done), **ends}
        print(json.dumps(body | ({"trace": list(map(dataclasses.asdict, trace))} if args.trace else {})))
    else:
        _print([*report.ends_lines(**ends), *report.served_lines(done), *_timeline(args, trace)])


def _play_tool(args: argparse.Namespace, game: Game) -> int:
    """With one of rdma-core's programs as the other side."""
    if args.host is None:
        served = echo_tool(
            args.url, game, listening=lambda port: print(f"listening on port {port}", file=sys.stderr, flush=True)
        )
        _show_served(args, args.type, served.echoed, {"local": served.local, "remote": served.remote})
        return 0
    with _progress(not args.json) as tick:
        result = ping_tool(args.url, game, tick=tick)
    _show_result(args, result)
    return 0


def first(listener: Listener, deadline_s: float) -> Connection:
    """The first connection that is made; one with whom it fails may come again, another way.

    Args:
        listener: waits without limit for the first that comes.
        deadline_s: seconds, from the first failure on.

    Raises:
        RdmaConnectError: that failure, if nothing came of it.
    """
    try:
        return listener.accept(deadline_s=None, tolerant=False)
    except RdmaConnectError as e:
        failure = e
    try:
        return listener.accept(deadline_s=deadline_s)
    except ConnectTimeout:
        raise failure from None


def _ping(args: argparse.Namespace, url: str, options: Options) -> int:
    made = connect_many(
        url,
        args.qps,
        qp_type=args.type,
        deadline_s=args.deadline,
        options=options,
        key=args.key,
        peer_key=args.peer_key,
    )
    with contextlib.ExitStack() as stack:
        conns = [stack.enter_context(conn) for conn in made]
        trace = conns[0].trace if args.trace else ()
        sizes = _sizes(args, most_size(conns[0]))
        tick = stack.enter_context(_progress(not args.json))
        result = ping(
            conns, op=args.op, sizes=sizes, iters=args.iters or 1000, duration_s=args.duration,
            outstanding=(args.tx_depth or options.sizes(args.qps).send_depth) if args.bw else 0,
            most_bytes=_SWEEP_BYTES if args.sweep and args.iters is None else None,
            deadline_s=args.deadline, tick=tick,
        )  # fmt: skip
    _show_result(args, result, trace)
    return 0


def _show_result(args: argparse.Namespace, result: Report, trace: Sequence[Mark] = ()) -> None:
    if args.json:
        more = {"trace": list(map(dataclasses.asdict, trace))} if args.trace else {}
        print(json.dumps(result.asdict() | more))
    elif args.csv == "-":
        print(report.csv_text(result), end="")
    else:
        unicode = report.can_draw(sys.stdout.encoding)
        _print([*report.report_lines(result, unicode=unicode), *_timeline(args, trace)])
    if args.csv not in (None, "-"):
        Path(args.csv).write_text(report.csv_text(result))
    if args.plot is not None:
        plot.save(result, args.plot)


def _sizes(args: argparse.Namespace, most: int) -> list[int]:
    """The sizes to measure; ``most`` is the longest message that both ends take."""
    fits = most if args.op == "send" else LARGEST
    if args.sweep:
        return sweep(min(_SWEEP_TO, fits) if args.size is None else args.size)
    return [min(4096, fits) if args.size is None else args.size]


def _timeline(args: argparse.Namespace, trace: Sequence[Mark]) -> list[str]:
    return ["", *report.timeline(trace)] if args.trace else []


def _print(lines: list[str]) -> None:
    print("\n".join(lines))


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[float], None] | None]:
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
        task = bar.add_task("ping-pong", total=1.0)
        yield lambda share: bar.update(task, completed=share)
