"""The doctor's question to another host, its answer, and every way tried, between devices in software."""

from __future__ import annotations

import errno
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
from exchange_ends import channels, free_port, until
from places import TESTS
from samples import V1
from software import Call, Device, Message, Network, Port, Software, after_verbs
from two_hosts import refuse, two_hosts

from rdmaconnect.abi import PortState, QpState
from rdmaconnect.agreement.options import Options
from rdmaconnect.doctor import Attempt, Verdict, pair, visit
from rdmaconnect.doctor.report import visit_lines
from rdmaconnect.doctor.service import DoctorListener, open_listener
from rdmaconnect.errors import ConnectTimeout, StateError
from rdmaconnect.exchange.curve import keygen
from rdmaconnect.exchange.url import addresses, host_of, port_of
from rdmaconnect.protocol import codec
from rdmaconnect.protocol.handshake import Role
from rdmaconnect.protocol.messages import Answer, Question
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import run_apart
from rdmaconnect.session.closing import close_ends
from rdmaconnect.session.connect import try_candidate
from rdmaconnect.session.fallback import Fallback
from rdmaconnect.session.listen import listen
from rdmaconnect.session.outgoing import Outgoing
from rdmaconnect.session.ports import rank_ports
from rdmaconnect.session.terms import make_terms
from rdmaconnect.session.trace import Trace

#: every way there is between the two, in the order in which ``connect`` tries them
WAYS = [("127.0.0.2", "127.0.0.3"), ("127.0.0.1", "127.0.0.3"), ("fe80::1", "fe80::2")]
OPTIONS = Options(device="here")


@pytest.fixture
def hosts() -> Iterator[Software]:
    """RC gives up a message after 0.1 s here."""
    with two_hosts(["fe80::1", "127.0.0.1", "127.0.0.2"], ["fe80::2", "127.0.0.3"], Network(0.1)) as software:
        yield software


@contextmanager
def listener(device: str = "there", **keys: str) -> Iterator[DoctorListener]:
    """The doctor of the other host."""
    said: list[str] = []

    def attend() -> None:
        with suppress(StateError):  # it was closed
            clinic.attend(said.append)

    clinic = open_listener("127.0.0.1:0", Options(device=device), **keys)
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
    with listener() as clinic:
        came = visit(clinic.url, OPTIONS, 20, seen.append)
        until(lambda: not hosts.objects("qp"))  # a doctor who has left is not held on to
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
    assert "question" not in caplog.text
    assert "the peer refused at agreed: move RC QP" in caplog.text


def is_here(call: Call) -> bool:
    return bool(call["pd"].context.device.name == "here")


def is_large(message: Message) -> bool:
    return message.length > 512


@pytest.mark.parametrize(
    ("trouble", "cause", "fix"),
    [
        (lambda hosts: hosts.network.lose(lambda message: True), "a firewall drops RoCE (UDP port 4791:", "nft"),
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
    with listener() as clinic:
        trouble(hosts)
        came = visit(clinic.url, OPTIONS, 20)
    assert not came.ok
    assert came.findings[-1].words == "No pair of ports could be connected."
    assert came.matrix is not None
    (attempt,) = came.matrix.attempts
    assert cause in attempt.cause
    assert fix in attempt.fix


def test_the_ports_are_ranked_for_the_address_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``connect`` does; of a name with two addresses the first is not listened on."""
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        hosts = ["::1", "127.0.0.1"] if host == "both.test" else [host]
        return [found for one in hosts for found in real(one, port, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    devices = [Device(name, [Port([text])]) for name, text in (("here6", "::1"), ("here4", "127.0.0.1"))]
    with Software([*devices, Device("there", [Port(["::1", "127.0.0.3"])])]) as software:
        with listener() as clinic:
            came = visit(clinic.url.replace("127.0.0.1", "both.test"), Options(), 20)
        assert software.problems() == []
    assert came.matrix is not None
    assert gids(came.matrix.attempts[0]) == ("127.0.0.1", "127.0.0.3")


@pytest.mark.parametrize("when", [("ibv_create_qp", "there"), ("ibv_modify_qp", "here")])
def test_a_visit_that_is_interrupted_leaves_nothing(hosts: Software, when: tuple[str, str]) -> None:
    """Ctrl-C while it asks, for the other host makes a queue pair to see whether it can, and while it connects."""
    verb, device = when

    def interrupt(call: Call) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def hits(call: Call) -> bool:
        return bool(call["pd" if verb == "ibv_create_qp" else "qp"].context.device.name == device)

    with listener() as clinic:
        to = QpState.RTR if verb == "ibv_modify_qp" else None
        hosts.on(verb, to=to, where=hits, before=interrupt, delay=0.1, times=1)
        with after_verbs(), pytest.raises(KeyboardInterrupt):
            visit(clinic.url, OPTIONS, 20)
        until(lambda: channels() == 0)


def test_ways_for_which_no_time_is_left_are_told(hosts: Software) -> None:
    refuse(hosts, "here", WAYS[0], errno.ETIMEDOUT)
    with listener() as clinic:
        came = visit(clinic.url, OPTIONS, 2, lambda attempt: time.sleep(2))
    assert came.matrix is not None
    assert [attempt.state for attempt in came.matrix.attempts] == ["failed", "untried", "untried"]
    assert came.findings[-1].words.endswith("2 pairs were left untried: the deadline passed.")
    assert came.findings[-1].fix == "give it more time: --deadline"


def test_another_host_without_a_port_is_told(hosts: Software) -> None:
    hosts.devices[1].ports[0].state = PortState.DOWN
    with listener() as clinic:
        came = visit(clinic.url, OPTIONS, 20)
    assert not came.ok
    assert came.findings[-1].words == "The other host has no port that can be used."
    assert any("there port 1" in finding.words and "DOWN" in finding.words for finding in came.findings)


def test_gids_that_never_go_together_are_told(hosts: Software) -> None:
    hosts.devices[1].ports[0].gids[:] = [("127.0.0.3", V1)]
    with listener() as clinic:
        came = visit(clinic.url, OPTIONS, 20)
    assert came.findings[-1].words.startswith("No GID here goes with one there")
    assert list(visit_lines(came))[-1] == "No connection can be made."


def test_a_listener_that_is_no_doctor_is_left_alone(hosts: Software) -> None:
    """An application must not be handed a doctor's connections, nor hear of its question."""
    with listen("127.0.0.1:0", device="there") as application:
        came = visit(application.url, OPTIONS, 20)
        with pytest.raises(ConnectTimeout, match=r"nobody asked|none asked for a connection"):
            application.accept(deadline_s=0.1, tolerant=False)
    assert "ibv_create_qp" not in hosts.calls
    (finding,) = came.findings
    assert "but not `rdmaconnect doctor --serve`" in finding.words
    assert "an application listens here, and no doctor" in finding.words
    assert finding.fix.startswith("there: rdmaconnect doctor --serve -p ")


def test_a_listener_that_does_not_know_the_question_is_told_in_time(
    hosts: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores what it does not know, as every version does."""
    monkeypatch.delitem(codec._DECODERS, "question")
    monkeypatch.setattr(pair, "EACH_S", 0.5)
    with listen("127.0.0.1:0", device="there") as application:
        came = visit(application.url, OPTIONS, 20)
    (finding,) = came.findings
    assert "Or it is of an earlier version" in finding.words
    assert finding.fix.startswith("there: rdmaconnect doctor --serve -p ")


def test_after_its_question_a_doctor_may_say_hello_on_the_same_connection(hosts: Software) -> None:
    with listener() as clinic:
        terms = make_terms({})
        outgoing = Outgoing(clinic.url, addresses(host_of(clinic.url), port_of(clinic.url)), terms.keys)
        trace = Trace(Role.CONNECTOR, Deadline(None))
        for _ in range(3):
            conversation = run_apart(outgoing.ask(Question, trace, Deadline(10)))
            answer = conversation.handshake.peer
            assert isinstance(answer, Answer)
            assert [port.device for port in answer.ports] == ["there"]
        fallback = Fallback(rank_ports(Options(device="here")), terms, trace)
        made = run_apart(try_candidate(outgoing, terms, fallback, 1, Deadline(10, ConnectTimeout), None), close_ends)
        close_ends(made)
        outgoing.close()


def test_a_visit_by_key_files(hosts: Software, tmp_path: Path) -> None:
    for name in ("doctor", "visitor"):
        keygen(str(tmp_path / name), name)
    theirs = {"key": str(tmp_path / "doctor/doctor.key_secret"), "peer_keys": str(tmp_path / "visitor")}
    ours = {"key": str(tmp_path / "visitor/visitor.key_secret"), "peer_key": str(tmp_path / "doctor/doctor.key")}
    with listener(**theirs) as clinic:
        assert visit(clinic.url, OPTIONS, 20, **ours).ok
        (finding,) = visit(clinic.url, OPTIONS, 5).findings
    assert finding.name == "exchange"
    assert "key" in finding.words


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
    came = visit("127.0.0.1:1", OPTIONS, 5)
    (finding,) = came.here
    assert came.findings == ()
    assert (finding.name, finding.verdict) == ("ports", Verdict.FAIL)
    lines = list(visit_lines(came))
    assert lines[0] == "This host, toward tcp://127.0.0.1:1, which was not asked:"
    assert not any("other host" in line for line in lines)
    assert lines[-1] == "No connection can be made."
    assert "No port of this host can be used: find an ACTIVE RDMA port" in finding.words


def test_a_report_to_the_other_host_fits_into_an_answer() -> None:
    broken = [Device(f"soft{i}", limits={"max_qp": 0}) for i in range(1, 41)]
    with Software([Device("here"), *broken]) as software:
        with listener("none") as clinic:
            clinic.options = Options()
            came = visit(clinic.url, OPTIONS, 20)
        assert software.problems() == []
    remarks = [f for f in came.findings if f.verdict is Verdict.WARN]
    assert len(remarks) == codec.MAX_REMARKS
    assert sum(f.words.startswith("There: ") for f in remarks) == len(remarks)


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
    tests = TESTS
    path, port = os.pathsep.join([str(tests), str(tests.parent)]), free_port()
    with Software(network=Network.shared(str(tmp_path))) as software:
        program = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            came = visit(f"127.0.0.1:{port}", Options(), 20)  # which waits until it is there
            assert program.stdout is not None
            said = ""
            while not said.endswith("\n") or "\nconnected: " not in said:
                line = program.stdout.readline()
                assert line, said
                said += line
            program.send_signal(signal.SIGINT)
            said += program.communicate(timeout=20)[0]
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
