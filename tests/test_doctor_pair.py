"""A pair of hosts: causes, matrix and words, from values."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest
from samples import V1, gid, infiniband, roce

from rdmaconnect.abi import WcStatus
from rdmaconnect.diagnose import Attempt, Host, Matrix, pair
from rdmaconnect.diagnose.causes import Ground, explain
from rdmaconnect.diagnose.matrix import ends, order
from rdmaconnect.diagnose.netlink import Route
from rdmaconnect.diagnose.report import WIDTH, as_json, visit_lines
from rdmaconnect.endpoint import PortAddress
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
from rdmaconnect.path import Candidate, candidates

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
