"""A pair of hosts: causes, matrix and words from values; the question and its answer between devices in software."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from exchange_ends import free_port
from samples import V1, gid, infiniband, roce
from software import Call, Device, Message, Network, Port, Software
from two_hosts import refuse, two_hosts

from rdmaconnect.abi import PortState, QpState, WcStatus
from rdmaconnect.diagnose import Attempt, Host, Matrix, Verdict, pair, visit
from rdmaconnect.diagnose.causes import Ground, explain
from rdmaconnect.diagnose.matrix import ends, order
from rdmaconnect.diagnose.netlink import Route
from rdmaconnect.diagnose.report import WIDTH, as_json, visit_lines
from rdmaconnect.diagnose.service import GREETING, Surgery, open_surgery
from rdmaconnect.endpoint import Options, PortAddress
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    StateError,
    VerbsError,
)
from rdmaconnect.listener import listen
from rdmaconnect.path import Candidate, candidates
from rdmaconnect.wire import MAX_TEXT

A, DEAD, FE80 = gid("10.0.0.1", gid_index=1), gid("10.77.0.1", gid_index=2), gid("fe80::1")
HERE = roce(FE80, A, DEAD, device="rxe1")
THERE = roce(gid("fe80::2", netdev="eth9"), gid("10.0.0.2", gid_index=1, netdev="eth9"), device="rxe2")
WAY = Candidate(HERE.only(A), THERE.only(THERE.gids[1]))


def step(number: int) -> ModifyError:
    return ModifyError(number, "move RC QP 0x000011 INIT->RTR", qp_num=0x11, frm="INIT", to="RTR", mask=0)


def refused(error: RdmaConnectError) -> PeerRejected:
    return PeerRejected("heard", getattr(error, "errno", None) or 0, str(error))


# ---- causes


@pytest.mark.parametrize(
    ("error", "ground", "cause", "fix"),
    [
        # R03: nobody has the address; no route; a gateway that does not answer
        (
            step(errno.ETIMEDOUT), Ground(Route("eth0"), "FAILED"),
            "10.0.0.2 does not answer at 10.0.0.1 (eth0, here) (neighbour FAILED)", "ping -I eth0 10.0.0.2",
        ),
        (
            step(errno.ETIMEDOUT), Ground(Route(errno=errno.ENETUNREACH)),
            "There is no route from 10.0.0.1 (eth0, here) to 10.0.0.2.",
            "ip route get 10.0.0.2 from 10.0.0.1 oif eth0",
        ),
        (
            step(errno.ETIMEDOUT), Ground(Route("eth0", "10.0.0.254"), "FAILED"),
            "10.0.0.2 is behind 10.0.0.254, which does not answer on eth0.", "ping -I eth0 10.0.0.254",
        ),
        (
            refused(step(errno.ETIMEDOUT)), Ground(Route("eth0"), "REACHABLE"),
            "10.0.0.1 does not answer at 10.0.0.2 (eth9, there): it is not on that network.", "ping -I eth9 10.0.0.1",
        ),
        # R04, R20
        (step(errno.ENETUNREACH), Ground(), "no route from 10.0.0.1 (eth0, here)", "ip link set eth0 up"),
        (refused(step(errno.ENETUNREACH)), Ground(), "no route from 10.0.0.2 (eth9, there)", "ip link set eth9 up"),
        # R01, R02
        (step(errno.ENODATA), Ground(), "The GID 10.0.0.1 here went away", "rdmaconnect devices"),
        (step(errno.EINVAL), Ground(), "other family, MTU or port", "gid_index="),
        (PeerMismatch(["GIDs: none matches"]), Ground(), "join the two ends: GIDs: none matches.", ""),
        # R06
        (
            refused(CompletionError(WcStatus.RETRY_EXC_ERR, doing="carries less than path_mtu 4096")), Ground(),
            "Small messages pass and large ones do not", "path_mtu=1024",
        ),
        # R23
        (
            CompletionError(WcStatus.RETRY_EXC_ERR), Ground(), "a firewall drops RoCE (UDP port 4791)",
            "on both hosts: nft insert rule inet filter input udp dport 4791 accept; tcp dport 7 too; or iptables",
        ),
        (CompletionError(WcStatus.WR_FLUSH_ERR), Ground(), "a firewall drops RoCE", "iptables"),
        (ConnectTimeout("prove", 10, "a firewall drops RoCE (UDP port 4791)"), Ground(), "UDP port 4791", "nft"),
        # R15, R18
        (VerbsError("ibv_reg_mr", errno.ENOMEM), Ground(), "limit of locked memory is too low", "ulimit -l"),
        (refused(VerbsError("ibv_reg_mr", errno.ENOMEM)), Ground(), "could not be registered there", "ulimit -l"),
        (VerbsError("ibv_create_comp_channel", errno.EMFILE), Ground(), "No file descriptor is left here", "ulimit -n"),
        (ConnectTimeout("connect: wait for the peer's reply", 3), Ground(), "no success", "rdmaconnect doctor --serve"),
        (DeviceError("use rxe9: no."), Ground(), "use rxe9: no.", ""),
    ],
)  # fmt: skip
def test_a_failure_is_told_with_its_cause_and_what_mends_it(
    error: RdmaConnectError, ground: Ground, cause: str, fix: str
) -> None:
    words, commands = explain(WAY, error, ground, 7)
    assert cause in words
    assert fix in commands
    assert bool(fix) == bool(commands)


# ---- the matrix


def matrix(*attempts: Attempt, here: tuple[PortAddress, ...] = (HERE,), there: Any = (THERE,)) -> Matrix:
    ways = [attempt.way for attempt in attempts]
    return Matrix(ends(here, [w.here for w in ways]), ends(there, [w.there for w in ways]), attempts)


def three() -> Matrix:
    good, *rest = candidates([HERE], [THERE])
    return matrix(
        Attempt(good, path_mtu=1024, latency_us=12.3),
        Attempt(rest[0], error="long", cause="Nobody is there.", fix="ping it"),
        Attempt(rest[1], tried=False),
    )


def found(of: Matrix) -> pair.Visit:
    return pair.Visit("tcp://10.0.0.2:18515", (pair._verdict(of),), of)


def test_every_gid_here_stands_against_every_one_there() -> None:
    of = three()
    assert [end.port.gids[0] for end in of.here] == list(HERE.gids)
    assert [end.port.gids[0] for end in of.there] == list(THERE.gids)
    states = [[getattr(of.at(row, column), "state", None) for column in of.there] for row in of.here]
    assert states == [["untried", None], [None, "ok"], [None, "failed"]]
    assert of.chosen is of.attempts[0]
    assert matrix(*of.attempts[1:]).chosen is None


def test_ports_that_go_by_lid_have_a_row_of_their_own() -> None:
    a, b = infiniband(5, gid("fe80::5")), infiniband(6, gid("fe80::6"))
    (way,) = candidates([a], [b])
    of = matrix(Attempt(way, path_mtu=4096), here=(a,), there=(b,))
    assert [end.words for end in of.here][-1] == "mlx5_0 port 1 LID 0x5"
    assert of.at(of.here[-1], of.there[-1]) is of.attempts[0]


def test_the_order_is_that_of_connect_the_routes_ports_first() -> None:
    slow, fast = roce(gid("10.0.0.1", V1), device="a"), roce(gid("10.0.0.3"), device="b")
    there = [roce(gid("10.0.0.2", V1), gid("10.0.0.4"), device="c")]
    assert [way.here.device for way in order([slow, fast], there)] == ["a", "b"]
    assert [way.here.device for way in candidates([slow, fast], there)] == ["b", "a"]
    assert order([], there) == []


def test_the_matrix_in_words() -> None:
    lines = list(visit_lines(found(three())))
    start = next(i for i, line in enumerate(lines) if line.endswith("A           B"))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["1", "untried", "-"],
        ["2", "-", "*ok", "12us"],
        ["3", "-", "FAIL", "1"],
    ]
    assert "  1  Nobody is there." in lines
    assert "     fix: ping it" in lines
    assert lines[-1] == "A connection can be made."
    text = " ".join(" ".join(lines).split())
    assert "rxe1 port 1 gid_index 1 (::ffff:10.0.0.1, RoCE v2) to rxe2 port 1 gid_index 1" in text
    assert "path MTU 1024. 1 pairs were left untried: the deadline passed." in text


def test_a_large_matrix_is_no_wider_than_a_terminal() -> None:
    long = "2001:db8:1111:2222:3333:4444:5555:"
    here, there = (
        [roce(*(gid(f"{long}{side}{i:03x}", gid_index=i) for i in range(30)), device=f"a_long_name{side}")]
        for side in "ab"
    )
    attempts = [
        Attempt(way, error="e", cause=f"Cause {i} " + "of this and that " * 9, fix="do this " * 20)
        for i, way in enumerate(candidates(here, there))
    ]
    lines = list(visit_lines(found(matrix(*attempts, here=tuple(here), there=tuple(there)))))
    assert max(map(len, lines)) <= WIDTH
    assert any(line.split()[-1:] == ["AD"] for line in lines)
    assert any(line.endswith("FAIL 900") for line in lines)
    assert lines[-1] == "No connection can be made."


def test_json_has_the_same() -> None:
    told = json.loads(json.dumps(as_json(Host(), [], found(three()))))
    assert told["ok"] is True
    assert [(p["state"], p["chosen"], p["cause"]) for p in told["pairs"]] == [
        ("ok", True, ""), ("failed", False, "Nobody is there."), ("untried", False, ""),
    ]  # fmt: skip
    assert told["pairs"][0]["here"]["gid"] == "::ffff:10.0.0.1"
    assert told["pairs"][0]["there"] == {
        "device": "rxe2", "port_num": 1, "lid": 0, "gid_index": 1, "gid": "::ffff:10.0.0.2", "type": "RoCE v2",
        "netdev": "eth9",
    }  # fmt: skip
    assert told["peer"]["findings"][0]["verdict"] == "ok"


# ---- both sides, on devices in software

#: every way there is between the two, in the order in which ``connect`` tries them
WAYS = [("127.0.0.2", "127.0.0.3"), ("127.0.0.1", "127.0.0.3"), ("fe80::1", "fe80::2")]
OPTIONS = Options(device="here")


@pytest.fixture
def hosts() -> Iterator[Software]:
    """RC gives up a message after 0.1 s here."""
    with two_hosts(["fe80::1", "127.0.0.1", "127.0.0.2"], ["fe80::2", "127.0.0.3"], Network(0.1)) as software:
        yield software


@contextmanager
def surgery(device: str = "there") -> Iterator[Surgery]:
    """The doctor of the other host."""
    said: list[str] = []

    def attend() -> None:
        with suppress(StateError):  # it was closed
            clinic.attend(said.append)

    clinic = open_surgery("127.0.0.1:0", Options(device=device))
    with clinic:
        thread = threading.Thread(target=attend)
        thread.start()
        try:
            yield clinic
        finally:
            clinic.close()
            thread.join()
    assert all(words.startswith("connected: QP ") for words in said)


def gids(attempt: Attempt) -> tuple[str, str]:
    here, there = (str(port.gids[0].gid.address) for port in (attempt.way.here, attempt.way.there))
    return here, there


def test_a_visit_tries_every_way_and_tells_what_is_wrong_there(
    hosts: Software, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(hosts, "here", WAYS[0], errno.ETIMEDOUT)
    refuse(hosts, "there", WAYS[2][::-1], errno.ENETUNREACH)
    hosts.devices[1].ports.append(Port(["127.0.0.4"], state=PortState.DOWN))
    seen = list[Attempt]()
    with surgery() as clinic:
        came = visit(clinic.url, OPTIONS, 20, seen.append)
    assert came.ok
    assert came.matrix is not None
    assert list(came.matrix.attempts) == seen
    assert [gids(attempt) for attempt in seen] == WAYS
    assert [attempt.state for attempt in seen] == ["failed", "ok", "failed"]
    assert "does not answer at 127.0.0.2 (NETDEV, here)" in seen[0].cause
    assert "no route from fe80::2 (NETDEV, there)" in seen[2].cause
    assert came.matrix.chosen is seen[1]
    assert (seen[1].path_mtu, seen[1].route) == (1024, "by lo, on the link")
    assert seen[1].latency_us is not None
    assert 0 < seen[1].latency_us < 1e6
    assert came.findings[0].words == f"rdmaconnect doctor at {socket.gethostname()}."
    (down,) = [finding for finding in came.findings if "there port 2" in finding.words]
    assert (down.name, down.verdict) == ("peer", Verdict.WARN)
    assert "DOWN" in down.words
    assert came.findings[-1].verdict is Verdict.OK
    # the question is no failure of the listener's; a way that was refused is
    assert GREETING not in caplog.text
    assert "the peer refused at agreed: move RC QP" in caplog.text


def is_large(message: Message) -> bool:
    return message.length > 512


def is_here(call: Call) -> bool:
    return bool(call["pd"].context.device.name == "here")


@pytest.mark.parametrize(
    ("trouble", "cause", "fix"),
    [
        (lambda hosts: hosts.network.lose(lambda message: True), "a firewall drops RoCE (UDP port 4791)", "nft"),
        (lambda hosts: hosts.network.lose(is_large), "Small messages pass and large ones do not", "path_mtu=1024"),
        (
            lambda hosts: hosts.on("ibv_modify_qp", to=QpState.RTR, fail=errno.ENODATA),
            "The GID 127.0.0.3 there went away", "rdmaconnect devices",
        ),
        (
            lambda hosts: hosts.on("ibv_modify_qp", to=QpState.RTR, fail=errno.EINVAL),
            "The device refused the address pair 127.0.0.3 to 127.0.0.2 there", "gid_index=",
        ),
        (
            lambda hosts: hosts.on("ibv_reg_mr", fail=errno.ENOMEM, where=is_here),
            "Memory could not be registered here", "ulimit -l",
        ),
    ],
)  # fmt: skip
def test_where_no_way_works_the_visit_fails_with_the_causes(
    hosts: Software, trouble: Callable[[Software], object], cause: str, fix: str
) -> None:
    del hosts.devices[0].ports[0].gids[:2]
    with surgery() as clinic:
        trouble(hosts)
        came = visit(clinic.url, OPTIONS, 20)
    assert not came.ok
    assert came.findings[-1].words == "No pair of ports could be connected."
    assert came.matrix is not None
    (attempt,) = came.matrix.attempts
    assert cause in attempt.cause
    assert fix in attempt.fix


def test_ways_for_which_no_time_is_left_are_told(hosts: Software) -> None:
    refuse(hosts, "here", WAYS[0], errno.ETIMEDOUT)
    with surgery() as clinic:
        came = visit(clinic.url, OPTIONS, 2, lambda attempt: time.sleep(2))
    assert came.matrix is not None
    assert [attempt.state for attempt in came.matrix.attempts] == ["failed", "untried", "untried"]
    assert came.findings[-1].words.endswith("2 pairs were left untried: the deadline passed.")
    assert came.findings[-1].fix == "give it more time: --deadline"


def test_another_host_without_a_port_is_told(hosts: Software) -> None:
    hosts.devices[1].ports[0].state = PortState.DOWN
    with surgery() as clinic:
        came = visit(clinic.url, OPTIONS, 20)
    assert not came.ok
    assert came.findings[-1].words == "The other host has no port that can be used."
    assert any("there port 1" in finding.words and "DOWN" in finding.words for finding in came.findings)


def test_gids_that_never_go_together_are_told(hosts: Software) -> None:
    hosts.devices[1].ports[0].gids[:] = [("127.0.0.3", V1)]
    with surgery() as clinic:
        came = visit(clinic.url, OPTIONS, 20)
    assert came.findings[-1].words.startswith("No GID here goes with one there")
    assert list(visit_lines(came))[-1] == "No connection can be made."


def test_a_listener_that_is_no_doctor_is_left_alone(hosts: Software) -> None:
    """An application must not be handed a doctor's connections."""
    with listen("127.0.0.1:0", device="there") as application:
        came = visit(application.url, OPTIONS, 20)
        with pytest.raises(DeviceError, match=r"use \? port 1, which the peer wants"):
            application.accept(deadline_s=10, tolerant=False)
    (finding,) = came.findings
    assert "but not `rdmaconnect doctor --serve`" in finding.words
    assert finding.fix.startswith("there: rdmaconnect doctor --serve -p ")


def test_where_nothing_listens_the_next_step_is_told(hosts: Software) -> None:
    (finding,) = visit("127.0.0.1:1", OPTIONS, 0.3).findings
    assert "refused: the host is there, but nothing listens on that port" in finding.words
    assert "rdmaconnect doctor --serve -p 1" in finding.fix
    assert "tcp dport 1 accept" in finding.fix


def test_a_name_that_does_not_resolve_and_a_host_without_ports(hosts: Software) -> None:
    (finding,) = visit("no-such-host.invalid", OPTIONS, 5).findings
    assert (finding.name, finding.verdict) == ("name", Verdict.FAIL)
    with pytest.raises(ValueError, match="the peer is"):
        visit("a b", OPTIONS, 5)
    hosts.devices[0].ports[0].state = PortState.DOWN
    (finding,) = visit("127.0.0.1:1", OPTIONS, 5).findings
    assert (finding.name, finding.verdict) == ("ports", Verdict.FAIL)
    assert "No port of this host can be used: find an ACTIVE RDMA port" in finding.words


def test_a_report_to_the_other_host_fits_into_a_reject() -> None:
    broken = [Device(f"soft{i}", limits={"max_qp": 0}) for i in range(1, 21)]
    with Software([Device("here"), *broken]) as software:
        with surgery("none") as clinic:
            clinic.options = Options()
            assert len(clinic.report()) > MAX_TEXT
            came = visit(clinic.url, OPTIONS, 20)
        assert software.problems() == []
    assert len(came.findings) > 3
    assert MAX_TEXT // 2 < sum(len(f.words) for f in came.findings[:-1]) < MAX_TEXT + 500


# ---- the program itself, in a process of its own

SERVE = """
import sys
from rdmaconnect.cli import main
from software import Network, Software

with Software(network=Network.shared(sys.argv[1])) as software:
    code = main(["doctor", "--serve", "-p", sys.argv[2]])
    print("ended", code, *software.problems(), flush=True)
"""


def test_the_program_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    path, port = os.pathsep.join([str(tests), str(tests.parent)]), free_port()
    with Software(network=Network.shared(str(tmp_path))) as software:
        program = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            came = visit(f"127.0.0.1:{port}", Options(), 20)  # which waits until it is there
            program.send_signal(signal.SIGINT)
            said, _ = program.communicate(timeout=20)
        finally:
            program.kill()
            program.wait()
        assert software.problems() == []
    assert came.ok
    assert came.matrix is not None
    assert came.matrix.attempts[0].latency_us is not None
    assert f"\nlistening on tcp://[::]:{port}\n" in said
    assert said.count("\nconnected: QP ") == 1
    assert said.endswith("\nended 130\n"), said
