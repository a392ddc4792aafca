"""A ping-pong with rdma-core's programs: their line, their order, and what is said of a peer that does otherwise."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from software import Software
from two_hosts import two_hosts

from rdmaconnect.abi import LinkLayer, QpType
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.agreement.options import Options
from rdmaconnect.cli import main
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeadlineExceeded,
    PeerClosed,
    PeerMismatch,
    RemoteProtocolError,
)
from rdmaconnect.pingpong import PayloadError
from rdmaconnect.pingpong.dest import DONE, Dest
from rdmaconnect.pingpong.rdma_core import Game, Served, echo_tool, ping_tool

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
PATIENCE_S = 10.0
#: as ibv_rc_pingpong of rdma-core 44 sent it: -d rxe1 -g 1 on 10.9.0.1
LINE = b"0000:000011:a1b2c3:00000000000000000000ffff0a090001\0"
NOWHERE = "0" * 32


def game(qp_type: QpType = RC, size: int = 1000, iters: int = 5, deadline_s: float = PATIENCE_S, **more: Any) -> Game:
    return Game(qp_type, size, iters, Options(recv_size=size, path_mtu=1024, **more), deadline_s)


# ---- the line


def test_the_line_is_theirs() -> None:
    dest = Dest(0, 0x11, 0xA1B2C3, Gid.parse("10.9.0.1"))
    assert dest.to_bytes() == LINE
    assert Dest.from_bytes(LINE) == dest
    assert len(LINE) == Dest.SIZE


@given(st.integers(0, 0xFFFF), st.integers(1, 0xFFFFFF), st.integers(0, 0xFFFFFF), st.binary(min_size=16, max_size=16))
def test_each_value_survives(lid: int, qpn: int, psn: int, raw: bytes) -> None:
    dest = Dest(lid, qpn, psn, Gid(raw))
    assert len(dest.to_bytes()) == Dest.SIZE
    assert Dest.from_bytes(dest.to_bytes()) == dest


@pytest.mark.parametrize(
    "line",
    [
        LINE[:-1] + b"\n", LINE[:-1], LINE + b"\0", LINE.upper(), LINE.replace(b"0000:", b"+000:", 1),
        LINE.replace(b":", b" "), LINE.replace(b"a1b2c3", b"0xb2c3"), LINE.replace(b"ffff", b"fff_"), b"",
        LINE.replace(b"0a090001", b"0a09\xd9\xa0\xd9\xa0"), bytes(52),
    ],
)  # fmt: skip
def test_a_line_that_is_none_is_refused_with_what_it_is(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"read the peer's address: b'.*is not LID, QPN, PSN and GID") as seen:
        Dest.from_bytes(line)
    assert str(seen.value).isprintable()


def test_a_number_out_of_range_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match=r"qpn is 0: give 1 to 16777215"):
        Dest.from_bytes(LINE.replace(b"000011", b"000000"))


@given(st.binary(max_size=60))
def test_no_bytes_do_harm(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Dest.from_bytes(line)


# ---- both roles, one with the other


@contextmanager
def serving(game: Game, url: str = "tcp://127.0.0.1:0", **more: Any) -> Iterator[tuple[str, Future[Served]]]:
    """Our side as the server; its address."""
    port: Future[int] = Future()
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(echo_tool, url, game, listening=port.set_result, **more)
        yield f"tcp://127.0.0.1:{port.result(PATIENCE_S)}", done


@pytest.mark.parametrize("qp_type", [RC, UC, UD], ids=str)
@pytest.mark.parametrize("spin", [0, 500])
def test_the_two_roles_fit_each_other(software: Software, qp_type: QpType, spin: int) -> None:
    shares: list[float] = []
    with serving(game(qp_type, spin=spin)) as (url, done):
        report = ping_tool(url, game(qp_type, spin=spin), tick=shares.append)
        served = done.result(PATIENCE_S)
    assert (served.echoed.op, served.echoed.sizes, served.echoed.iters) == ("send", (1000,), 5)
    (row,) = report.rows
    assert (row.size, row.iters, report.path_mtu, report.qp_type) == (1000, 5, 1024, str(qp_type))
    assert 0 < row.min_us <= row.max_us
    assert report.connect_us > 0
    assert shares == [0.0]
    assert [served.remote[name] for name in ("qp_num", "psn", "gid")] == [
        report.local[name] for name in ("qp_num", "psn", "gid")
    ]
    assert report.remote["device"] == f"ibv_{str(qp_type).lower()}_pingpong"


def test_by_lid_where_no_gid_is_asked_for(software: Software) -> None:
    port = software.devices[0].ports[0]
    port.link_layer, port.lid = LinkLayer.INFINIBAND, 7
    with serving(game()) as (url, done):
        report = ping_tool(url, game())
        assert done.result(PATIENCE_S).local["gid"] is None
    assert report.local["lid"] == report.remote["lid"] == 7
    assert report.why == ["by LID 0x7 to 0x7 of ibv_rc_pingpong"]


def test_the_gid_that_fits_the_servers_peer() -> None:
    v6 = "::1"
    with two_hosts(["127.0.0.1", v6], ["127.0.0.1", v6]) as software:
        del software
        with serving(game(device="there")) as (url, done):
            report = ping_tool(url, game(device="here", gid_index=1))
            assert done.result(PATIENCE_S).local["gid"] == report.local["gid"] == v6


# ---- a peer that does otherwise


@contextmanager
def peer(*steps: bytes | int) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads (a number of bytes), or sends, and closes; what it read."""
    read: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)

        def play() -> None:
            tcp, _ = server.accept()
            with tcp:
                act(tcp, steps, read)

        thread = threading.Thread(target=play)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}", read
        finally:
            thread.join(PATIENCE_S)


def act(tcp: socket.socket, steps: tuple[bytes | int, ...], read: list[bytes]) -> None:
    tcp.settimeout(PATIENCE_S)
    for step in steps:
        if isinstance(step, bytes):
            tcp.sendall(step)
        else:
            try:
                read.append(tcp.recv(step))
            except ConnectionResetError:  # it closed, and had not read all
                read.append(b"")


def test_the_client_speaks_first_in_one_piece_and_says_done_when_it_can_receive(software: Software) -> None:
    line = LINE.replace(b"0a090001", b"7f000001").replace(b"000011", b"abcdef")  # which there is not
    with peer(100, line, 100) as (url, read), pytest.raises(CompletionError, match="Do both sides have the same -s"):
        ping_tool(url, game())
    assert Dest.from_bytes(read[0]).gid == Gid.parse("127.0.0.1")
    assert read[1] == DONE


BAD: list[tuple[tuple[bytes | int, ...], type[Exception], str]] = [
    ((100,), RemoteProtocolError, "closed after 0 of 52 bytes"),
    ((100, LINE[:20]), RemoteProtocolError, r"closed after 20 of 52 bytes: b'0000:000011"),
    (
        (100, b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and a good deal", 1),
        RemoteProtocolError,
        "b'SSH-2.0-OpenSSH_9.2p1",
    ),
    ((100, b"\xff" + bytes(63), 1), RemoteProtocolError, "a plain `rdmaconnect pingpong` is there"),
    ((100, LINE[:19] + NOWHERE.encode() + b"\0", 1), PeerMismatch, r"ibv_rc_pingpong has none, .* give it one with -g"),
    (
        (100, LINE[:19] + b"fe80" + b"0" * 27 + b"1\0", 1),
        PeerMismatch,
        "soft0 port 1 has gid_index|here does not go with it",
    ),
]


@pytest.mark.parametrize(("steps", "error", "words"), BAD)
def test_a_server_that_is_none(
    software: Software, steps: tuple[bytes | int, ...], error: type[Exception], words: str
) -> None:
    with peer(*steps) as (url, read), pytest.raises(error, match=words):
        ping_tool(url, game())
    assert read[1:] in ([b""], [])  # it was not told that all is well


def test_a_server_that_says_nothing(software: Software) -> None:
    with peer(100, 1) as (url, _), pytest.raises(ConnectTimeout, match="0 of 52 bytes") as seen:
        ping_tool(url, game(deadline_s=0.3))
    assert seen.value.waited_s < PATIENCE_S / 2


def test_nobody_there(software: Software) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectTimeout, match=f"connect to 127.0.0.1:{port}: .*refused"):
        ping_tool(f"tcp://127.0.0.1:{port}", game(deadline_s=0.3))


def calls(url: str, *steps: bytes | int) -> list[bytes]:
    """A client that does this."""
    read: list[bytes] = []
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as tcp:
        act(tcp, steps, read)
    return read


HERE = LINE.replace(b"0a090001", b"7f000001")


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        ((b"GET / HTTP/1.1\r\nHost: somebody.somewhere.example\r\n\r\n",), RemoteProtocolError, "b'GET / HTTP/1.1"),
        ((LINE[:51],), RemoteProtocolError, "closed after 51 of 52 bytes"),
        ((HERE, 52, b"gone\0"), RemoteProtocolError, r"the peer said b'gone\\x00', not b'done\\x00'"),
        ((HERE, 52), RemoteProtocolError, "hear that the peer has the own address: .* closed after 0 of 5 bytes"),
    ],
)
def test_a_client_that_is_none(
    software: Software, steps: tuple[bytes | int, ...], error: type[Exception], words: str
) -> None:
    with serving(game()) as (url, done):
        calls(url, *steps)
        with pytest.raises(error, match=words):
            done.result(PATIENCE_S)


def test_a_client_that_resets(software: Software) -> None:
    with serving(game()) as (url, done):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as tcp:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with pytest.raises((PeerClosed, RemoteProtocolError)):
            done.result(PATIENCE_S)


@pytest.mark.parametrize("steps", [(1,), (LINE[:10], 1), (HERE, 52, 1)])
def test_a_client_that_stops(software: Software, steps: tuple[bytes | int, ...]) -> None:
    with serving(game(deadline_s=0.3)) as (url, done), ThreadPoolExecutor(1) as threads:
        calling = threads.submit(calls, url, *steps)
        with pytest.raises(ConnectTimeout, match=r"has sent \d+ of \d+ bytes"):
            done.result(PATIENCE_S)
        assert calling.result(PATIENCE_S)[-1] == b""


# ---- the data path


def test_a_message_that_is_lost_and_one_that_came_back_changed(software: Software) -> None:
    with serving(game(UC, deadline_s=0.3)) as (url, done):
        with software.network.lose(lambda message: True), pytest.raises(DeadlineExceeded, match="start both anew"):
            ping_tool(url, game(UC, deadline_s=0.3))
        with pytest.raises(
            DeadlineExceeded, match=r"round trip 0 with ibv_uc_pingpong at QP 0x.*the same -s, -n.* a RoCE v2 one"
        ):
            done.result(PATIENCE_S)


def test_sizes_that_differ(software: Software) -> None:
    with serving(game(size=500)) as (url, done):
        with pytest.raises(CompletionError, match="Do both sides have the same -s"):
            ping_tool(url, game(size=1000, timeout=1))
        with pytest.raises(CompletionError, match="Do both sides have the same -s"):
            done.result(PATIENCE_S)
    with serving(game(size=1000)) as (url, done):
        with pytest.raises((CompletionError, DeadlineExceeded), match="Do both sides have the same -s"):
            ping_tool(url, game(size=500, timeout=1, deadline_s=0.5))
        with pytest.raises(PayloadError, match="500 bytes came, and 1000 are due"):
            done.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (game(UD, size=5000), "a datagram of soft0 port 1 ACTIVE .* has 1024 bytes at most. Give -s 1024"),
        (game(RC), "Give -m 512 here and to ibv_rc"),
    ],
)
def test_what_the_port_cannot_carry_is_told_before(software: Software, play: Game, words: str) -> None:
    if play.qp_type is RC:
        software.devices[0].ports[0].active_mtu = 512
    with peer(1) as (url, read), pytest.raises(ValueError, match=words):
        ping_tool(url, play)
    assert read == [b""]


# ---- the command


def test_the_command_plays_both_sides(software: Software, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    words = ["pingpong", "--peer", "rdma-core", "-p", port, "-n", "7", "-s", "999", "-t", "UD"]
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(main, words)
        assert main([*words, "127.0.0.1"]) == 0
        assert serving.result(PATIENCE_S) == 0
    out, err = capsys.readouterr()
    assert f"listening on port {port}" in err
    assert "7 iters in" in out
    assert "served:          7 x send of 999 bytes, contents verified" in out
    assert "(ibv_ud_pingpong port -)" in out


def test_the_command_tells_both_sides_as_json(software: Software, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    words = ["pingpong", "--peer", "rdma-core", "-p", port, "-n", "3", "-s", "64", "--json"]
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(main, words)
        assert main([*words, "127.0.0.1"]) == serving.result(PATIENCE_S) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (served,), (called,) = ([one for one in told if ("rows" in one) is rows] for rows in (False, True))
    assert (served["qp_type"], served["op"], served["sizes"], served["iters"]) == ("RC", "send", [64], 3)
    assert [called[key] for key in ("qp_type", "path_mtu", "connections")] == ["RC", 1024, 1]
    assert (called["rows"][0]["iters"], called["remote"]["qp_num"]) == (3, served["local"]["qp_num"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("-a", "-a with --peer rdma-core: its programs only send messages"),
        ("--op write -q 2 --trace", "--op, -q, --trace with --peer rdma-core"),
        ("-s 0", "size is 0: --peer rdma-core takes 1 or more"),
    ],
)
def test_what_the_programs_cannot_do(more: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pingpong", "--peer", "rdma-core", *more.split()])
    assert words in capsys.readouterr().err
