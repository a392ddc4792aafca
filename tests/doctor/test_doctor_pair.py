"""A pair of hosts: causes, matrix and words from values; the question and its answer on devices in software."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from exchange_ends import channels, until
from hosts import settle
from samples import V1, gid, infiniband, roce
from software import Device as SoftDevice
from software import Port as SoftPort
from software import Software

from rdmaconnect.abi import PortState, QpState, QpType, WcStatus
from rdmaconnect.agreement.candidates import Candidate, candidates
from rdmaconnect.agreement.endpoint import PortAddress
from rdmaconnect.agreement.options import Options
from rdmaconnect.doctor import Attempt, Host, Matrix, Verdict, pair, service, visit
from rdmaconnect.doctor.causes import Ground, explain
from rdmaconnect.doctor.host import Device, Trial
from rdmaconnect.doctor.matrix import ends, order
from rdmaconnect.doctor.report import WIDTH, as_json, visit_lines
from rdmaconnect.doctor.service import DoctorListener
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    ModifyError,
    PeerMismatch,
    PeerRejected,
    RdmaConnectError,
    VerbsError,
)
from rdmaconnect.objects.netlink import Route
from rdmaconnect.protocol import codec
from rdmaconnect.session.terms import ListenOptions, make_terms

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
            "10.0.0.1 did not answer at 10.0.0.2 (eth9, there) in time, though from here the other "
            "host is on that network (neighbour REACHABLE)",
            "ping -I eth9 10.0.0.1",
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
            CompletionError(WcStatus.RETRY_EXC_ERR), Ground(), "a firewall drops RoCE (UDP port 4791:",
            "on both hosts: nft insert rule inet filter input udp dport 4791 accept; tcp dport 7 too; or iptables",
        ),
        (CompletionError(WcStatus.WR_FLUSH_ERR), Ground(), "a firewall drops RoCE", "iptables"),
        (ConnectTimeout("prove", 10, "a firewall drops RoCE (UDP port 4791:"), Ground(), "UDP port 4791", "nft"),
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


# ---- the question and its answer, on devices in software


HOST = Host(name="there", core=False, kernel="6.1")


class Clinic:
    """A doctor's other side, and the device here that visits it."""

    def __init__(self, software: Software, listener: DoctorListener) -> None:
        self.software, self.url, self._listener = software, listener.url, listener
        self._over, self.said, self.held = threading.Event(), list[str](), list[Any]()
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        while not self._over.is_set():
            try:
                self.held.append(self._listener.accept(deadline_s=0.05))
            except ConnectTimeout as e:
                self.said.append(str(e))

    def visit(self, seconds: float = 20, tell: Any = None) -> pair.Visit:
        return visit(self.url, Options(device="rxe1"), seconds, tell)

    def outcomes(self, *numbers: int) -> None:
        """What RTR comes to here at each way, in turn; 0 for success."""
        for nth, number in enumerate(numbers, 1):
            here = lambda call: call["qp"].context.device.name == "rxe1"  # noqa: E731
            self.software.on("ibv_modify_qp", to=QpState.RTR, where=here, nth=nth, fail=number or None)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()
        for connection in self.held:
            connection.close()


@contextmanager
def listener(*gids_: Any, host: Host | None = HOST) -> Iterator[Clinic]:
    """A doctor's other side on a device with these GIDs; without one the device has no port that can be used."""
    here = [str(entry.gid.address) for entry in HERE.gids]
    ports = [SoftPort(gids=list(gids_))] if gids_ else [SoftPort(state=PortState.DOWN)]
    devices = [SoftDevice("rxe1", [SoftPort(gids=here)]), SoftDevice("rxe2", ports)]
    with Software(devices) as software, pytest.MonkeyPatch.context() as patch:
        if host is not None:  # what this machine really is
            patch.setattr(service, "gather", lambda options: host)
        terms = make_terms({"device": "rxe2"}, ListenOptions, listens=True)
        clinic = Clinic(software, DoctorListener("tcp://127.0.0.1:0", terms, [QpType.RC], False))
        try:
            yield clinic
            clinic.close()
            until(lambda: channels() == 0 and not software.left())
            assert software.problems() == []
        finally:
            clinic.close()
            settle(software)


THERE_GIDS = ("fe80::2", "10.0.0.2")


def test_a_visit_tries_every_way_and_tells_what_is_wrong_there() -> None:
    seen: list[Attempt] = []
    with listener(*THERE_GIDS) as clinic:
        clinic.outcomes(errno.ETIMEDOUT, 0, errno.ENETUNREACH)
        came = clinic.visit(tell=seen.append)
        assert came.ok
        assert came.matrix is not None
        assert [attempt.state for attempt in came.matrix.attempts] == ["failed", "ok", "failed"]
        assert list(came.matrix.attempts) == seen
        assert came.matrix.chosen is seen[1]
        assert seen[1].path_mtu == 1024
        assert [f.words for f in came.findings[:2]] == [
            "rdmaconnect doctor at there.",
            "There: fail kernel: Linux 6.1: RDMA is not loaded. This kernel has no such module on disk.",
        ]
        assert came.findings[-1].verdict is Verdict.OK
        until(lambda: clinic.held)
        until(lambda: clinic.held[0].lost is not None)  # the doctor has left


def test_of_the_ways_that_work_each_one_is_measured() -> None:
    with listener(*THERE_GIDS) as clinic:
        came = clinic.visit()
    assert came.matrix is not None
    assert [attempt.state for attempt in came.matrix.attempts] == ["ok", "ok", "ok"]
    assert came.matrix.chosen is came.matrix.attempts[0]


def test_where_no_way_works_the_visit_fails_with_the_causes() -> None:
    with listener(*THERE_GIDS) as clinic:
        clinic.software.network.ack_timeout_s = 0.2
        clinic.software.network.lose(lambda message: True)
        came = clinic.visit()
    assert not came.ok
    assert came.findings[-1].words == "No pair of ports could be connected."
    assert all("4791" in line for line in [came.matrix.attempts[0].cause, came.matrix.attempts[0].fix])  # type: ignore[union-attr]


def test_ways_for_which_no_time_is_left_are_told() -> None:
    with listener(*THERE_GIDS) as clinic:
        clinic.outcomes(errno.ETIMEDOUT)
        came = clinic.visit(1.0, lambda attempt: time.sleep(1.1))
    assert [attempt.state for attempt in came.matrix.attempts] == ["failed", "untried", "untried"]  # type: ignore[union-attr]
    assert came.findings[-1].words.endswith("2 pairs were left untried: the deadline passed.")
    assert came.findings[-1].fix == "give it more time: --deadline"


def test_another_host_without_a_port_is_told() -> None:
    with listener() as clinic:
        came = clinic.visit()
    assert not came.ok
    assert came.findings[-1].words == "The other host has no port that can be used."
    assert "RDMA is not loaded" in came.findings[1].words


def test_gids_that_never_go_together_are_told() -> None:
    with listener(("10.0.0.2", V1)) as clinic:
        came = clinic.visit()
        time.sleep(0.1)
        assert clinic.said
        assert not any("Failed with" in words for words in clinic.said), "a question is no failure"
    assert came.findings[-1].words.startswith("No GID here goes with one there")
    assert list(visit_lines(came))[-1] == "No connection can be made."


def test_where_nothing_listens_the_next_step_is_told() -> None:
    with Software():
        (finding,) = visit("127.0.0.1:1", Options(), 0.3).findings
    assert "nothing listens on that port, or a firewall rejects it" in finding.words
    assert "rdmaconnect doctor --serve -p 1" in finding.fix
    assert "tcp dport 1 accept" in finding.fix


def test_a_name_that_does_not_resolve_and_a_host_without_ports() -> None:
    (finding,) = visit("no-such-host.invalid", Options(), 5).findings
    assert (finding.name, finding.verdict) == ("name", Verdict.FAIL)
    with pytest.raises(ValueError, match="the peer is"):
        visit("a b", Options(), 5)
    with Software([SoftDevice("rxe1", [SoftPort(state=PortState.DOWN)])]):
        came = visit("127.0.0.1:1", Options(), 5)
    (finding,) = came.here
    assert finding.words.startswith("No port of this host can be used: ")


def test_a_report_to_the_other_host_fits_into_an_answer() -> None:
    devices = tuple(Device(f"rxe{i}", trials={1: Trial("It is broken. " * 99)}) for i in range(50))
    with listener(*THERE_GIDS, host=Host(devices=devices)) as clinic:
        came = clinic.visit()
    remarks = [f for f in came.findings if f.verdict is Verdict.WARN]
    assert len(remarks) == codec.MAX_REMARKS
    assert max(len(f.words) for f in remarks) <= codec.REMARK["words"] + len("There: fail 0123456789: ")
