"""The command line: exit statuses and words, without a device."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import V1, V2, end, gid, port, roce

import rdmaconnect
from rdmaconnect import cli
from rdmaconnect.abi import Mtu
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Wish, agree, make_path
from rdmaconnect.cli import main
from rdmaconnect.errors import ConnectTimeout, DeviceError, RdmaConnectError, VerbsError
from rdmaconnect.objects import context as device
from rdmaconnect.pingpong import Echoed, Report, Row, sweep
from rdmaconnect.pingpong.report import histogram
from rdmaconnect.session.trace import Mark

COMMANDS: list[list[str]] = [["devices"], ["pingpong"], ["pingpong", "127.0.0.1"]]
NO_RDMA = VerbsError("ibv_get_device_list", errno.ENOSYS, "list RDMA devices")


@pytest.fixture
def no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without RDMA, whatever this machine has."""

    def fail() -> Any:
        raise NO_RDMA

    monkeypatch.setattr(device.verbs, "ibv_get_device_list", fail)


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said of a wrong use, after the usage."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert (out == "") is ("--json" not in argv)
    assert err.startswith("usage: rdmaconnect")
    return err.rpartition("error: ")[2]


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rdmaconnect", *argv],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# ---- exit statuses


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_without_rdma_it_says_so_in_words(argv: list[str], no_rdma: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "rdmaconnect: list RDMA devices: ibv_get_device_list: ENOSYS (38), Function not implemented. "
        "This kernel has no RDMA subsystem: load it (modprobe ib_uverbs and the device's driver, "
        "for SoftRoCE rdma_rxe), or use a kernel that has it.\n"
    )


def test_without_a_device_it_says_so_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device.verbs, "ibv_get_device_list", lambda: (None, []))
    monkeypatch.setattr(device.verbs, "ibv_free_device_list", lambda array: None)
    for argv in COMMANDS:
        assert main(argv) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "there is none. Load " in err
        assert err.count("\n") == 1
    assert main(["pingpong", "-d", "rxe9"]) == 1
    words = "rdmaconnect: use device rxe9: there is no such device. There is none. Load its driver"
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize(
    "error", [DeviceError("deed: verdict."), OSError(5, "words"), ValueError("words"), ConnectTimeout("connect", 1.0)]
)
def test_an_error_is_one_line_and_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.devices, "device_names", lambda: raises(error))
    assert main(["devices"]) == 1
    words = "words" if type(error) is OSError else error
    assert capsys.readouterr() == ("", f"rdmaconnect: {words}\n")


def raises(error: BaseException) -> Any:
    raise error


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.devices, "device_names", lambda: raises(KeyboardInterrupt()))
    assert main(["devices"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.devices, "device_names", lambda: raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["devices"])


@pytest.mark.parametrize("argv", [["-h"], ["pingpong", "-h"], ["devices", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_are_status_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(("usage: rdmaconnect", f"rdmaconnect {rdmaconnect.__version__}\n"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("nope", "invalid choice: 'nope'"),
        ("devices extra", "unrecognized arguments: extra"),
        ("pingpong a b", "unrecognized arguments: b"),
        ("pingpong -z", "unrecognized arguments: -z"),
        ("pingpong -d", "argument -d/--device: expected one argument"),
        ("pingpong -i 0", "port_num is 0: give 1 to 254"),
        ("pingpong -i 255", "port_num is 255: give 1 to 254"),
        ("pingpong -i x", "argument -i/--port-num: invalid int value: 'x'"),
        ("pingpong -g 256", "gid_index is 256: give 0 to 255"),
        ("pingpong -g -1", "gid_index is -1: give 0 to 255"),
        ("pingpong -p 0", "argument -p/--port: '0' is not a whole number of 1 or more"),
        ("pingpong -p 65536", "argument -p/--port: 65536 is above 65535"),
        ("pingpong -p ssh", "argument -p/--port: 'ssh' is not a whole number of 1 or more"),
        ("pingpong -s -1", "argument -s/--size: '-1' is not a whole number of 0 or more"),
        ("pingpong -s 1.5", "argument -s/--size: '1.5' is not a whole number"),
        ("pingpong -s 1073741825", "recv_size is 1073741825: give 1 to 1073741824"),
        ("pingpong --op dance", "argument --op: invalid choice: 'dance'"),
        ("pingpong --op read -t UC", "--op read over UC: it takes -t RC"),
        ("pingpong --op write -t UD", "--op write over UD: it takes -t RC or UC"),
        ("pingpong --op read -s 0", "size is 0: --op read takes 1 to 1073741824"),
        ("pingpong --op write -s 1073741825", "size is 1073741825: --op write takes 1 to 1073741824"),
        ("pingpong -a -s 0", "-a goes from 1 byte up to -s: give -s 1 or more"),
        ("pingpong -n 5 -D 5", "-n says how often and -D how long: give one of them"),
        ("pingpong -D 0", "-D is 0: give more"),
        ("pingpong -q 0", "argument -q/--qps: '0' is not a whole number of 1 or more"),
        ("pingpong --json --csv -", "--json and --csv - both mean standard output"),
        ("pingpong -n 0", "argument -n/--iters: '0' is not a whole number of 1 or more"),
        ("pingpong -m 1500", "argument -m/--mtu: invalid choice: "),
        ("pingpong -l 16", "sl is 16: give 0 to 15"),
        ("pingpong -r 0", "recv_depth is 0: give 1 to 32768"),
        ("pingpong --deadline soon", "argument --deadline: 'soon' is not a number of seconds, 0 or more"),
        ("pingpong http://host", "the peer is "),
    ],
)
def test_wrong_usage_is_status_2_with_the_letter_or_the_range(
    argv: str, words: str, no_rdma: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in usage_error(capsys, *argv.split())


# ---- one object, of errors too


@pytest.mark.parametrize(
    ("argv", "status", "kind", "number"),
    [
        ("devices", 1, "VerbsError", errno.ENOSYS),
        ("devices -v", 1, "VerbsError", errno.ENOSYS),
        ("pingpong", 1, "VerbsError", errno.ENOSYS),
        ("pingpong 127.0.0.1", 1, "VerbsError", errno.ENOSYS),
        ("explain xyzzy", 1, "ValueError", None),
        ("keygen /dev/null/a", 1, "FileExistsError", errno.EEXIST),
        ("states TCP", 2, "usage", None),
        ("pingpong -p ssh", 2, "usage", None),
        ("doctor --serve", 2, "usage", None),
        ("nope", 2, "usage", None),
    ],
)
def test_an_error_is_an_object_too(
    argv: str, status: int, kind: str, number: int | None, no_rdma: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([*argv.split(), "--json"],):
        try:
            assert main(words) == status
        except SystemExit as e:
            assert e.code == status  # noqa: PT017
        out, err = capsys.readouterr()
        said = json.loads(out)
        assert said.keys() == {"error", "class", "errno"}
        assert (said["class"], said["errno"]) == (kind, number)
        assert " ".join(said["error"].split()) in " ".join(err.split())


def test_an_error_of_the_system_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["keygen", str(tmp_path / "file" / "node1")]) == 1
    assert f"rdmaconnect: {tmp_path / 'file'}: " in capsys.readouterr().err


# ---- the whole program


def test_the_program_runs_as_a_module() -> None:
    try:
        names, found = device.device_names(), ""
    except RdmaConnectError as e:
        names, found = [], str(e)
    done = run("devices")
    assert "Traceback" not in done.stderr
    if names:
        assert done.returncode == 0
        assert all(name in done.stdout for name in names)
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"rdmaconnect: {found}\n" or "there is none" in done.stderr


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_without_libibverbs_it_says_how_to_get_it(argv: list[str]) -> None:
    done = run(*argv, RDMACONNECT_LIBIBVERBS="/nonexistent/libibverbs.so")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rdmaconnect: load /nonexistent/libibverbs.so: ")
    assert "cannot open shared object file" in done.stderr
    assert "Debian and Ubuntu `apt install ibverbs-providers`, Fedora and RHEL `dnf install libibverbs`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_import_needs_no_libibverbs_and_loads_none() -> None:
    code = (
        "import rdmaconnect, rdmaconnect.cli\n"
        "with open('/proc/self/maps') as maps: assert 'libibverbs' not in maps.read()\n"
        "try: rdmaconnect.listen(':0')\n"
        "except rdmaconnect.LibraryError as e: print(type(e).__mro__[1].__name__, e.errno, e)\n"
    )
    env = {**os.environ, "RDMACONNECT_LIBIBVERBS": "/nonexistent/libibverbs.so"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"RdmaConnectError {errno.ENOENT} load /nonexistent/libibverbs.so: ")


def test_a_library_that_is_another_one_is_refused_in_words() -> None:
    done = run("devices", RDMACONNECT_LIBIBVERBS="libc.so.6")
    assert done.returncode == 1
    assert done.stderr == (
        "rdmaconnect: ibv_get_device_list: this libibverbs does not export it. Install a newer rdma-core.\n"
    )


# ---- what is asked of the library


class Asked(Exception):
    """The library was called."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Run a command line, and see how connect or listen would be called."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def note(url: str, count: int = 1, *, options: Options, **others: Any) -> Any:
        calls.append((url, {**asdict(options), **others, "count": count}))
        raise Asked

    monkeypatch.setattr(cli.pingpong, "connect_many", note)
    monkeypatch.setattr(cli.pingpong, "listen", note)

    def command(*argv: str) -> tuple[str, dict[str, Any]]:
        with pytest.raises(Asked):
            main(["pingpong", *argv])
        return calls.pop()

    return command


def test_the_letters_are_those_of_ibv_rc_pingpong(asked: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    line = "10.0.0.7 -d rxe1 -i 2 -g 3 -p 4 -s 100000 -n 7 -m 1024 -l 5 -r 6 -e --deadline 2.5"
    url, options = asked(*line.split())
    assert url == "tcp://10.0.0.7:4"
    wished = Options(
        device="rxe1", port_num=2, gid_index=3, path_mtu=1024, sl=5, recv_size=100000, recv_depth=6, spin=0
    )
    assert options == {**asdict(wished), "deadline_s": 2.5, "qp_type": "RC", "count": 1, "key": None, "peer_key": None}
    for host, peer_key in ([], "peer_keys"), (["peer"], "peer_key"):
        options = asked(*host, "--key", "keys/me.key_secret", "--peer-key", "known")[1]
        assert (options["key"], options[peer_key]) == ("keys/me.key_secret", "known")
    assert asked("peer", "-t", "ud")[1]["qp_type"] == "UD"
    assert asked("peer", "-q", "9")[1]["count"] == 9


def test_large_receives_are_few(
    asked: Callable[..., tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(cli.pingpong, "check_memory", lambda need, what: taken.append(need))
    for size, depth in ((2**16, None), (2**16 + 1, 16), (2**24, 4), (2**30, 2)):
        assert asked("peer", "-s", str(size))[1]["recv_depth"] == depth
        assert taken.pop() == size * (depth or 16)
    assert asked("-s", str(2**30), "-r", "1")[1]["recv_depth"] == 1
    # written and read memory needs no receives
    assert asked("peer", "-s", str(2**30), "--op", "write")[1]["recv_size"] is None
    # where there are many, each has less by default
    assert asked("peer", "-s", "16385", "-q", "2")[1]["recv_size"] == 16385


def test_without_letters_the_choice_is_the_librarys(asked: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    url, options = asked()
    assert url == "tcp://*:18515"
    assert options == {**asdict(Options()), "count": 1, "key": None, "peer_keys": None}
    url, options = asked("peer")
    assert url == "tcp://peer:18515"
    assert options == {
        **asdict(Options()),
        "deadline_s": 30,
        "qp_type": "RC",
        "count": 1,
        "key": None,
        "peer_key": None,
    }


@pytest.mark.parametrize(("host", "url"), [("::1", "tcp://[::1]:5"), ("fe80::1%eth0", "tcp://[fe80::1%eth0]:5")])
def test_an_ipv6_host_needs_no_brackets(host: str, url: str, asked: Callable[..., tuple[str, dict[str, Any]]]) -> None:
    assert asked(host, "-p", "5")[0] == url


# ---- what is printed

HERE, THERE = end(roce(gid("10.0.0.1", gid_index=1))), end(roce(gid("10.0.0.2", gid_index=2), device="rxe1"))
PATH = make_path(HERE, THERE, agree(HERE, THERE, Wish()), Options(), connector=True)
ROW = Row(4096, 10, 1.0, 2.0, 3.0, 4.0, 5.0, 20.0, 409.6, samples=(1.0, 2.0, 2.0, 5.0))
REPORT = Report(
    qp_type="RC", op="send", connections=1, rows=(ROW,), connect_us=1500.0,
    local={"device": "rxe0", "port_num": 1, "gid_index": 1, "gid": "::ffff:10.0.0.1", "lid": 0, "qp_num": 17, "psn": 5},
    remote={"device": "rxe1", "port_num": 1, "gid_index": 2, "gid": None, "lid": 9, "qp_num": 18, "psn": 6},
    path_mtu=1024, why=["by GID: this to that"],
)  # fmt: skip
TRACE = (Mark("port", 0.0, "local", "rxe0 port 1"), Mark("hello", 0.002, "peer", "", 0.0005))


class Connected:
    """Stands in for a connection."""

    local, peer, path, max_send_size, trace = HERE, THERE, PATH, 4096, TRACE

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How ping is called; it gives ``REPORT``."""
    asked: list[dict[str, Any]] = []

    def connect_many(url: str, count: int, **options: Any) -> Any:
        return [Connected() for _ in range(count)]

    def ping(conns: Any, **options: Any) -> Report:
        asked.append({"connections": len(conns), **options})
        return REPORT

    monkeypatch.setattr(cli.pingpong, "connect_many", connect_many)
    monkeypatch.setattr(cli.pingpong, "ping", ping)
    return asked


def test_ping_prints_ends_path_and_times(pings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pingpong", "peer"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "local address:   LID 0x0000, QPN 0x000011, PSN 0x000005",
        "                 GID ::ffff:10.0.0.1 (rxe0 port 1)",
        "remote address:  LID 0x0009, QPN 0x000012, PSN 0x000006",
        "                 GID - (rxe1 port 1)",
        "path:            by GID: this to that",
        "connected:       1.5 ms, RC, path MTU 1024",
        "send:            a message there and one back; contents verified",
        "81920 bytes in 0.00 seconds = 3276.80 Mbit/sec",
        "10 iters in 0.00 seconds = 20.00 usec/iter",
        "",
        "     bytes    iters    min us    p50 us    p90 us    p99 us    max us      MB/s",
        "      4096       10      1.00      2.00      3.00      4.00      5.00    409.60",
        "",
        *histogram(ROW.samples, unicode=True),
    ]
    assert pings == [{
        "connections": 1, "op": "send", "sizes": [4096], "iters": 1000, "most_bytes": None, "duration_s": None,
            "outstanding": 0,
        "deadline_s": 30, "tick": None,
    }]  # fmt: skip


def test_ping_prints_one_json_object_if_asked(pings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pingpong", "peer", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert json.loads(out) == REPORT.asdict()
    assert main(["pingpong", "peer", "--json", "--trace"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == [
        {"stage": "port", "at_s": 0.0, "end": "local", "words": "rxe0 port 1", "within_s": 0.0},
        {"stage": "hello", "at_s": 0.002, "end": "peer", "words": "", "within_s": 0.0005},
    ]


def test_ping_writes_csv(pings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        "qp_type,op,connections,size,iters,min_us,p50_us,p90_us,p99_us,max_us,mean_us,mb_per_s,every\n"
        "RC,send,1,4096,10,1.0,2.0,3.0,4.0,5.0,20.0,409.6,1\n"
    )
    assert main(["pingpong", "peer", "--csv", "-"]) == 0
    assert capsys.readouterr().out == rows
    assert main(["pingpong", "peer", "--csv", str(tmp_path / "a.csv")]) == 0
    assert (tmp_path / "a.csv").read_text() == rows
    assert "MB/s" in capsys.readouterr().out
    assert main(["pingpong", "peer", "--csv", str(tmp_path / "none" / "a.csv")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_ping_shows_the_trace_of_both_ends(pings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pingpong", "peer", "--trace"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "ms since this end began; the peer's by halving the round trip, +-0.50 ms",
        "        ms  local      peer",
        "      0.00  port       rxe0 port 1",
        "      2.00             hello",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-a", {"sizes": sweep(4096), "most_bytes": 2**28}),  # what both ends take
        ("-a -s 1000 -n 5", {"sizes": sweep(1000), "iters": 5, "most_bytes": None}),
        ("--sweep --op read", {"op": "read", "sizes": sweep(2**23), "iters": 1000}),
        ("--op write -s 1073741824", {"op": "write", "sizes": [2**30]}),
        ("--op write_imm -q 3 -D 0.5", {"op": "write_imm", "connections": 3, "duration_s": 0.5}),
    ],
)
def test_what_is_asked_for_is_what_is_pinged(line: str, expected: dict[str, Any], pings: list[dict[str, Any]]) -> None:
    assert main(["pingpong", "peer", *line.split()]) == 0
    assert {name: pings[0][name] for name in expected} == expected


@pytest.mark.parametrize("as_json", [False, True])
def test_the_serving_side_says_where_it_listens_and_what_it_served(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = SimpleNamespace(url="tcp://[::]:18515", accept=Connected)

    @contextmanager
    def listening(*args: Any, **options: Any) -> Iterator[Any]:
        yield listener

    def echo(conn: Any, more: Any, deadline_s: float) -> Echoed:
        assert len(more(2)) == 2
        return Echoed("send", (4096,), 10, 3)

    monkeypatch.setattr(cli.pingpong, "listen", listening)
    monkeypatch.setattr(cli.pingpong, "echo", echo)
    assert main(["pingpong", *["--json"] * as_json, "--trace"]) == 0
    out, err = capsys.readouterr()
    assert err == "listening on tcp://[::]:18515\n"
    if as_json:
        found = json.loads(out)
        assert (found["qp_type"], found["op"], found["sizes"], found["iters"]) == ("RC", "send", [4096], 10)
        assert found["remote"]["gid"] == "::ffff:10.0.0.2"
        assert found["trace"][0]["stage"] == "port"
    else:
        served = "served:          10 x send of 4096 bytes over 3 connections in turn, contents"
        assert out.splitlines()[4:6] == [served, "                 verified"]
        assert "GID ::ffff:10.0.0.1 (rxe0 port 1)" in out
        assert out.splitlines()[-1] == "      2.00             hello"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        if name == "rxe1":
            raise VerbsError("ibv_open_device", errno.EACCES, "open rxe1")
        made = port(gid("fe80::1", V1, 0), gid("10.0.0.1", V2, 1), active_mtu=Mtu.MTU_1024)
        yield SimpleNamespace(ports=lambda: (made,))

    monkeypatch.setattr(cli.devices, "device_names", lambda: ["rxe0", "rxe1"])
    monkeypatch.setattr(cli.devices, "open_device", opened)


def test_devices_are_listed_with_ports_and_gids(two_devices: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["rxe0", "  port 1: ACTIVE, Ethernet, LID 0x0000, MTU 1024 (at most 4096)"]
    assert out[2].split() == ["gid", "0:", "fe80::1", "RoCE", "v1", "eth0"]
    assert out[3].split() == ["gid", "1:", "::ffff:10.0.0.1", "RoCE", "v2", "eth0"]
    assert out[4].startswith("rxe1: cannot be opened: open rxe1: ibv_open_device: EACCES (13), Permission denied.")


def test_devices_are_listed_as_json(two_devices: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["devices"]
    assert one == {
        "device": "rxe0",
        "ports": [{
            "port_num": 1, "state": "ACTIVE", "link_layer": "Ethernet", "lid": 0, "active_mtu": 1024, "max_mtu": 4096,
            "gids": [
                {"gid_index": 0, "gid": "fe80::1", "type": "RoCE v1", "netdev": "eth0"},
                {"gid_index": 1, "gid": "::ffff:10.0.0.1", "type": "RoCE v2", "netdev": "eth0"},
            ],
        }],
    }  # fmt: skip
    assert (two["device"], two["ports"]) == ("rxe1", [])
    assert "EACCES" in two["error"]


# ---- tables and keys


@pytest.mark.parametrize("qp_type", ["RC", "uc", "UD", "RAW_PACKET"])
def test_the_table_of_a_type_is_printed(qp_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["states", qp_type]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "INIT" in out
    assert "RTR" in out
    assert ("DEST_QPN" in out) is (qp_type.upper() in ("RC", "UC"))


def test_an_unknown_type_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'TCP' is not one of RC" in usage_error(capsys, "states", "TCP")


def test_a_pair_of_keys_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / "keys" / "node1")
    assert main(["keygen", name]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    secret = Path(f"{name}.key_secret")
    assert f"{name}.key" in out
    assert secret.stat().st_mode & 0o777 == 0o600
    (key,) = [line.split('"')[1] for line in secret.read_text().splitlines() if "secret-key" in line]
    assert key not in out
    assert main(["keygen", name]) == 1
    assert "is there already. Take another name." in capsys.readouterr().err


# ---- the bar


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("installed", [True, False])
def test_a_bar_is_shown_on_a_terminal_where_rich_is_installed(
    installed: bool, pings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if not installed:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    ping = cli.pingpong.ping

    def ticks(conns: Any, tick: Callable[[float], None] | None, **options: Any) -> Report:
        if tick is not None:
            tick(0.5)
            terminal.write("half")
        return ping(conns, tick=tick, **options)

    monkeypatch.setattr(cli.pingpong, "ping", ticks)
    assert main(["pingpong", "peer"]) == 0
    assert ("half" in terminal.getvalue()) is installed
    assert ("ping-pong" in terminal.getvalue()) is installed
