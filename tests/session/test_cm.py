"""Connections by rdma_cm, between ends of this library and with strangers, over librdmacm in software."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from example_programs import example
from exchange_ends import until
from software import Device, RdmaCm, Software, after_verbs, end_on

import rdmaconnect
from rdmaconnect import (
    ConnectTimeout,
    DeviceError,
    HealthState,
    LibraryError,
    PeerClosed,
    PeerRejected,
    RdmaConnectError,
    RemoteProtocolError,
    StateError,
    VerbsError,
    rdmacm,
)
from rdmaconnect.abi import QpState, WcStatus
from rdmaconnect.abi.rdma_cma import CmEventType
from rdmaconnect.objects.cm import CmChannel, CmEvent, CmId, CmParam, sockaddr
from rdmaconnect.protocol.cm_message import CmMessage

URL = "rdma://127.0.0.1:7174"
E = CmEventType
#: the functions that something follows, the state that a connector is in then, and the stage that its deadline names
FOLLOWED = {
    "rdma_resolve_addr": "resolve the address",
    "rdma_resolve_route": "resolve the route",
    "rdma_connect": "wait for the peer's reply",
}
PATIENCE_S = 10.0


@pytest.fixture
def listener(cm: RdmaCm) -> Iterator[rdmaconnect.Listener]:
    with rdmaconnect.listen(URL) as made:
        yield made


@contextmanager
def joined(
    listen: dict[str, Any] | None = None, **connect: Any
) -> Iterator[tuple[rdmaconnect.Connection, rdmaconnect.Connection]]:
    with (
        rdmaconnect.listen(URL, **(listen or {})) as door,
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S, **connect) as here,
        door.accept(deadline_s=PATIENCE_S) as there,
    ):
        yield here, there


# ---- ours with ours


def test_messages_and_memory(cm: RdmaCm) -> None:
    memory = bytearray(b"0123456789")
    listen = {"regions": {"m": memory}, "private_data": b"hi", "recv_size": 5000}
    with joined(listen, private_data=b"ho", traffic_class=96) as (here, there):
        assert (here.private_data, there.private_data) == (b"hi", b"ho")
        assert (here.max_send_size, there.max_send_size) == (5000, 65536)
        assert (here.path.dest_qp_num, there.path.dest_qp_num) == (there.local.qp_num, here.local.qp_num)
        assert here.path.rq_psn == there.path.sq_psn
        here.send(b"one")
        there.send(b"two" * 1000)
        assert (there.recv(), here.recv()) == (b"one", b"two" * 1000)
        here.write(b"abc", "m", imm=7)
        assert there.recv_imm() == 7
        assert (memory, here.read("m", 4)) == (b"abc3456789", b"abc3")
        with here.batch() as batch:
            sent = [batch.post_send(b"%d" % n) for n in range(3)]
        assert [there.recv() for _ in sent] == [b"0", b"1", b"2"]
        assert [one.done() for one in sent] == [True] * 3
        assert {mark.stage for mark in here.trace} >= {
            "port",
            "prepared",
            "hello",
            "reply",
            "path",
            "ready",
            "connected",
        }
        assert (str(here.health.state), here.lost, here.generation) == (str(HealthState.ALIVE), None, 1)
        assert "127.0.0.1:7174" in repr(here)
    assert cm.calls["rdma_set_option"] == 1


def test_asyncio_on_both_sides(cm: RdmaCm) -> None:
    async def both() -> list[bytes]:
        async with await rdmaconnect.alisten(URL) as door:
            taking = asyncio.ensure_future(door.accept(deadline_s=PATIENCE_S))
            async with await rdmaconnect.aconnect(URL, deadline_s=PATIENCE_S) as here, await taking as there:
                await here.send(b"asked")
                asked = await there.recv()
                await there.send(b"answered")
                return [asked, await here.recv()]

    assert asyncio.run(both()) == [b"asked", b"answered"]


def test_many_come_to_one_listener_whose_end_is_not_theirs(cm: RdmaCm) -> None:
    with rdmaconnect.listen(URL) as door, ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S) for _ in range(8)]
        there = [door.accept(deadline_s=PATIENCE_S) for _ in range(8)]
        here = [call.result(PATIENCE_S) for call in calls]
    assert len(cm.channels) == 9
    by_number = {connection.local.qp_num: connection for connection in there}
    for connection in here:
        connection.send(b"still there")
        assert by_number[connection.path.dest_qp_num].recv() == b"still there"
    for connection in (*here, *there):
        connection.close()


def test_a_connector_may_come_first(cm: RdmaCm) -> None:
    with ThreadPoolExecutor(1) as threads:
        here = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S)
        until(lambda: cm.calls["rdma_connect"] >= 2, 5)
        with rdmaconnect.listen(URL) as door, door.accept() as there, here.result(PATIENCE_S) as connection:
            connection.send(b"at last")
            assert there.recv() == b"at last"


@pytest.mark.parametrize("closes", ["connector", "listener"])
def test_a_close_is_a_good_bye(cm: RdmaCm, closes: str) -> None:
    seen: list[str] = []
    with joined() as (here, there):
        one, other = (here, there) if closes == "connector" else (there, here)
        other.on_change(lambda health: seen.append(str(health.state)))
        one.send(b"before")
        one.close()
        assert other.recv(deadline_s=PATIENCE_S) == b"before"
        with pytest.raises(PeerClosed, match=r"^recv: the peer closed the connection \(rdma_disconnect\)"):
            other.recv(deadline_s=PATIENCE_S)
        assert isinstance(other.lost, PeerClosed)
        until(lambda: seen == ["dead"], 5)
        with pytest.raises(StateError, match="goes by rdma_cm"):
            other.reconnect()
        with pytest.raises(StateError, match="is closed"):
            one.recv()


def test_a_device_that_is_removed(cm: RdmaCm) -> None:
    with joined() as (here, there):
        for about in list(cm.ids.values()):
            if not about.listens:
                cm.tell(about, E.DEVICE_REMOVAL)
        for end in (here, there):
            with pytest.raises(DeviceError, match="is not there any more"):
                end.recv(deadline_s=PATIENCE_S)
            until(lambda end=end: isinstance(end.lost, DeviceError), 5)  # type: ignore[misc]


def test_events_that_change_nothing(cm: RdmaCm) -> None:
    with joined() as (here, there):
        for about in list(cm.ids.values()):
            for kind in (E.ADDR_CHANGE, E.TIMEWAIT_EXIT, CmEventType(77)):
                cm.tell(about, kind)
        here.send(b"on")
        assert there.recv() == b"on"


def test_the_example_speaks_rping_with_itself(cm: RdmaCm, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("rping")
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(module.serve, "127.0.0.1:7174")
        module.ping("127.0.0.1", count=3)
        assert served.exception(PATIENCE_S) is None
    said = capsys.readouterr().out
    assert "3 pings of 64 bytes, each verified" in said
    assert "3 pings answered" in said


# ---- what fails


ENDED = {
    ("rdma_resolve_addr", E.ADDR_ERROR, -errno.ENODEV): (DeviceError, "leaves by a network device that no RDMA device"),
    ("rdma_resolve_addr", E.ADDR_ERROR, -errno.ETIMEDOUT): (
        VerbsError,
        "rdma_resolve_addr: ETIMEDOUT.*does not answer",
    ),
    ("rdma_resolve_addr", E.ADDR_ERROR, -1): (VerbsError, "rdma_resolve_addr: EIO"),
    ("rdma_resolve_route", E.ROUTE_ERROR, -errno.ETIMEDOUT): (VerbsError, "rdma_resolve_route: ETIMEDOUT"),
    ("rdma_connect", E.CONNECT_ERROR, -errno.EINVAL): (VerbsError, "rdma_connect: EINVAL"),
    ("rdma_connect", E.UNREACHABLE, -errno.ETIMEDOUT): (VerbsError, "rdma_connect: ETIMEDOUT.*connection manager"),
    ("rdma_connect", E.UNREACHABLE, 0): (VerbsError, "rdma_connect: ETIMEDOUT"),
    ("rdma_connect", E.REJECTED, 28): (PeerRejected, r"refused at rdma_connect: its application refused \(status 28\)"),
    ("rdma_connect", E.REJECTED, 27): (PeerRejected, "lower max_rd_atomic"),
    ("rdma_connect", E.REJECTED, 99): (PeerRejected, r"no reason that is known here \(status 99\)"),
    ("rdma_resolve_addr", E.DEVICE_REMOVAL, 0): (DeviceError, "it was removed"),
    ("rdma_resolve_route", E.DEVICE_REMOVAL, 0): (DeviceError, "it was removed"),
    ("rdma_connect", E.DEVICE_REMOVAL, 0): (DeviceError, "it was removed"),
    ("rdma_connect", E.DISCONNECTED, 0): (PeerClosed, "closed the connection"),
}


@pytest.mark.parametrize(("function", "kind", "status"), ENDED, ids=lambda value: str(value))
def test_an_event_that_ends_it_is_an_error(cm: RdmaCm, function: str, kind: CmEventType, status: int) -> None:
    cm.say(function, kind, status)
    error, words = ENDED[function, kind, status]
    with pytest.raises(error, match=words) as seen:
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    if kind is not E.REJECTED:
        assert "rdma://127.0.0.1:7174" in str(seen.value) or error is PeerClosed


def test_what_a_stranger_says_when_it_refuses(cm: RdmaCm) -> None:
    cm.say("rdma_connect", E.REJECTED, 28, b"go away")
    with pytest.raises(PeerRejected) as seen:
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    assert seen.value.private_data.rstrip(b"\0") == b"go away"
    assert seen.value.stage == "rdma_connect"


def test_without_a_device(cm: RdmaCm) -> None:
    for call in (rdmaconnect.connect, rdmaconnect.listen):
        cm.fail("rdma_create_event_channel", errno.ENODEV)
        with pytest.raises(DeviceError, match="find an RDMA device: there is none"):
            call(URL)


CALLS = ["rdma_create_event_channel", "rdma_create_id", "rdma_resolve_addr", "rdma_resolve_route", "rdma_connect",
         "rdma_init_qp_attr", "rdma_establish"]  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_a_function_that_fails_at_the_connector(cm: RdmaCm, function: str) -> None:
    with rdmaconnect.listen(URL):
        if function == "rdma_init_qp_attr":  # the listener asks thrice before
            cm.before("rdma_accept", lambda cm_id: cm.fail("rdma_init_qp_attr", errno.ENOMEM))
        else:
            cm.fail(function, errno.ENOMEM)
        with pytest.raises(VerbsError, match=f"{function}: ENOMEM"):
            rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


@pytest.mark.parametrize("function", ["rdma_init_qp_attr", "rdma_accept"])
def test_a_function_that_fails_at_the_listener(
    cm: RdmaCm, listener: rdmaconnect.Listener, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    cm.fail(function, errno.ENOMEM)
    with pytest.raises(PeerRejected, match=rf"{function}: ENOMEM \(12\), Cannot allocate memory \(status 28\)"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    with pytest.raises(VerbsError, match=f"accept on rdma://127.0.0.1:7174: {function}: ENOMEM|ask rdma_cm"):
        listener.accept(deadline_s=PATIENCE_S, tolerant=False)
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S), listener.accept(deadline_s=PATIENCE_S):
        pass


@pytest.mark.parametrize("function", ["rdma_create_event_channel", "rdma_create_id", "rdma_bind_addr", "rdma_listen"])
def test_a_function_that_fails_where_one_is_to_listen(cm: RdmaCm, function: str) -> None:
    cm.fail(function, errno.EADDRINUSE)
    with pytest.raises(VerbsError, match=f"{function}: EADDRINUSE"):
        rdmaconnect.listen(URL)


@pytest.mark.parametrize(
    ("verb", "nth", "error"),
    [
        ("ibv_open_device", 1, VerbsError),
        ("ibv_create_qp", 1, VerbsError),
        ("ibv_create_qp", 2, PeerRejected),
        ("ibv_reg_mr", 2, PeerRejected),
    ],
)
def test_a_verb_that_fails_on_either_side(
    cm: RdmaCm, software: Software, listener: rdmaconnect.Listener, verb: str, nth: int, error: type[Exception]
) -> None:
    with software.on(verb, fail=errno.ENOMEM, nth=nth), pytest.raises(error, match=f"{verb}: E"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


@pytest.mark.parametrize("side", [1, 2])
def test_a_queue_pair_that_cannot_be_moved(
    cm: RdmaCm, software: Software, listener: rdmaconnect.Listener, side: int
) -> None:
    failing = software.on("ibv_modify_qp", to=QpState.RTR, fail=errno.EINVAL, nth=side)
    with failing, pytest.raises(PeerRejected if side == 1 else rdmaconnect.ModifyError, match="INIT->RTR"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    until(lambda: len(cm.ids) == 1, 5)


# ---- patience, cancelling, Ctrl-C


@pytest.mark.parametrize("function", FOLLOWED)
def test_a_deadline_passes(cm: RdmaCm, function: str) -> None:
    cm.silent(function)
    with pytest.raises(ConnectTimeout, match=f"connect: {FOLLOWED[function]}: no success within"):
        rdmaconnect.connect(URL, deadline_s=0.3)


def test_the_deadline_passes_where_nobody_listens(cm: RdmaCm) -> None:
    with pytest.raises(ConnectTimeout, match="nobody listens there on that port of rdma_cm"):
        rdmaconnect.connect(URL, deadline_s=0.5)
    assert cm.calls["rdma_connect"] > 1


@pytest.mark.parametrize("at", ["RTR", "prepare"])
def test_the_deadline_passes_in_a_verb(cm: RdmaCm, software: Software, at: str) -> None:
    with rdmaconnect.listen(URL):
        verb = {"to": QpState.RTR, "nth": 2} if at == "RTR" else {}
        name = "ibv_modify_qp" if at == "RTR" else "ibv_create_qp"
        with software.on(name, delay=1.0, **verb), pytest.raises(ConnectTimeout, match=r"move to RTR|make the queue"):
            rdmaconnect.connect(URL, deadline_s=0.5)
        until(lambda: len(cm.ids) == 1 and not software.alive["qp"], 5)


def test_a_peer_that_does_not_go_on_after_the_answer(
    cm: RdmaCm, listener: rdmaconnect.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmaconnect.session.cm_listen._PATIENCE_S", 0.3)
    cm.silent("rdma_accept")
    with pytest.raises(PeerRejected, match="has not said that the connection stands"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    with pytest.raises(ConnectTimeout, match="has not said that the connection stands"):
        listener.accept(deadline_s=PATIENCE_S, tolerant=False)


@pytest.mark.parametrize("function", FOLLOWED)
def test_a_task_is_cancelled(cm: RdmaCm, function: str) -> None:
    cm.silent(function)

    async def cancelled() -> None:
        task = asyncio.ensure_future(rdmaconnect.aconnect(URL, deadline_s=None))
        while not cm.calls[function]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: not cm.left(), 5)


@pytest.mark.parametrize("function", FOLLOWED)
def test_ctrl_c(cm: RdmaCm, function: str) -> None:
    cm.silent(function)

    def interrupt() -> None:
        until(lambda: cm.calls[function] > 0, 5)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with after_verbs():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    thread.join()
    until(lambda: not cm.left(), 5)


def test_ctrl_c_in_accept(cm: RdmaCm, listener: rdmaconnect.Listener) -> None:
    thread = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with after_verbs():
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            listener.accept(deadline_s=PATIENCE_S)
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S), listener.accept(deadline_s=PATIENCE_S):
        pass


# ---- listeners


def test_a_listener_on_a_free_port_and_its_words(cm: RdmaCm) -> None:
    with rdmaconnect.listen("rdma://127.0.0.1:0") as door:
        assert (door.port, door.url, repr(door)) == (40000, "rdma://127.0.0.1:40000", f"<Listener {door.url}>")
        with pytest.raises(ConnectTimeout, match="nobody asked"):
            door.accept(deadline_s=0.1)
        with pytest.raises(VerbsError, match=r"EADDRINUSE.*take another port"):
            rdmaconnect.listen(door.url)
    with pytest.raises(StateError, match="is closed"):
        door.accept()
    with rdmaconnect.listen("rdma://*") as door, rdmaconnect.connect("rdma://127.0.0.1", deadline_s=5):
        assert door.url == "rdma://*:18515"
        door.accept().close()


def test_a_listener_that_is_closed_amid_requests(cm: RdmaCm) -> None:
    door = rdmaconnect.listen(URL)
    cm.silent("rdma_accept")
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S)
        until(lambda: cm.calls["rdma_accept"] == 1, 5)
        with rdmaconnect.connect(URL, deadline_s=PATIENCE_S) as waits:
            until(lambda: len(cm.ids) == 5, 5)
            door.close()
            assert isinstance(stuck.exception(PATIENCE_S), PeerRejected)
            with pytest.raises(PeerClosed):
                waits.recv(deadline_s=PATIENCE_S)


def test_a_listener_without_room_says_so_and_is_asked_again(cm: RdmaCm) -> None:
    with rdmaconnect.listen(URL, max_half_open=1) as door, rdmaconnect.connect(URL, deadline_s=PATIENCE_S):
        until(lambda: bool(door._ready), 5)
        with pytest.raises(ConnectTimeout, match="busy: 1 connections are half open or wait to be accepted"):
            rdmaconnect.connect(URL, deadline_s=0.5)
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S)
            until(lambda: cm.calls["rdma_reject"] >= 3, 5)
            door.accept().close()
            with call.result(PATIENCE_S):
                door.accept().close()


# ---- strangers: programs that were written with librdmacm


class Stranger:
    """What a program does with librdmacm: it knows nothing of this library."""

    def __init__(self, calls: Counter[str]) -> None:
        self.stack, self.calls = ExitStack(), calls
        self.channel = self.stack.enter_context(CmChannel())
        self.end = self.stack.enter_context(end_on())
        self.id = CmId(self.channel)

    def wait(self, kind: CmEventType) -> CmEvent:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            select.select([self.channel.fileno()], [], [], 0.1)
            event = self.channel.take()
            if event is not None:
                assert event.kind is kind
                return event
        raise AssertionError(f"no {kind}")

    def climb(self, cm_id: CmId) -> None:
        rtr, rts = (cm_id.attr(state, "climb") for state in (QpState.RTR, QpState.RTS))
        self.end.qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=15))
        values = {name: getattr(rtr, name) for name in ("ah_attr", "path_mtu", "dest_qp_num", "rq_psn")}
        rest = {"max_dest_rd_atomic": 1, "min_rnr_timer": 12, "sq_psn": rts.sq_psn, "timeout": 14}
        path = SimpleNamespace(**values, **rest, retry_cnt=7, rnr_retry=7, max_rd_atomic=1)
        self.end.qp.move(QpState.RTR, path)
        self.end.recv(1, 0, 16)
        self.end.qp.move(QpState.RTS, path)

    def param(self, data: bytes) -> CmParam:
        return CmParam(self.end.qp.qp_num, 1, 1, private_data=data)

    def close(self) -> None:
        with self.stack:
            self.id.close()


@pytest.fixture
def stranger(cm: RdmaCm) -> Iterator[Stranger]:
    made = Stranger(cm.calls)
    yield made
    made.close()


def send(stranger: Stranger, data: bytes) -> None:
    from rdmaconnect.objects.work_request import SendRequest

    stranger.end.qp.post_send(SendRequest().send(2, inline=data))
    stranger.end.wait(1)


@pytest.mark.parametrize("plain", [True, False])
def test_a_stranger_listens(stranger: Stranger, plain: bool) -> None:
    stranger.id.bind(sockaddr(2, ("127.0.0.1", 7174)), 1, "listen")
    with ThreadPoolExecutor(1) as threads:
        options = {"private_data": b"its own", "plain": True} if plain else {}
        call = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S, **options)
        asked = stranger.wait(E.CONNECT_REQUEST)
        assert len(asked.param.private_data) == 56
        assert (asked.param.private_data.rstrip(b"\0") == b"its own") is plain
        assert (CmMessage.read(asked.param.private_data) is None) is plain
        child = asked.request
        assert child is not None
        stranger.climb(child)
        child.accept(stranger.param(b"welcome"), "accept")
        with call.result(PATIENCE_S) as conn:
            stranger.wait(E.ESTABLISHED)
            assert (len(conn.private_data), conn.private_data.rstrip(b"\0")) == (196, b"welcome")
            assert (conn.max_send_size, conn.remote, conn.path.max_rd_atomic) == (1 << 30, {}, 1)
            conn.send(b"sixteen bytes...")
            stranger.end.wait(1)
            assert stranger.end.memory[:16] == b"sixteen bytes..."
            send(stranger, b"back")
            assert conn.recv() == b"back"
            assert conn.read(stranger.end.mr.region, 7) == b"sixteen"
            child.disconnect()
            with pytest.raises(PeerClosed, match="rdma_disconnect"):
                conn.recv(deadline_s=PATIENCE_S)
            # it is answered at once: rdma_disconnect of a program without a channel of its own waits for that
            until(lambda: stranger.calls["rdma_disconnect"] == 2, 5)
        child.close()


def test_a_stranger_connects(stranger: Stranger) -> None:
    with rdmaconnect.listen(URL, private_data=b"served", regions={"m": bytearray(8)}) as door:
        stranger.id.resolve_addr(sockaddr(2, ("127.0.0.1", 7174)), 1000, "resolve")
        stranger.wait(E.ADDR_RESOLVED)
        stranger.id.resolve_route(1000, "resolve")
        stranger.wait(E.ROUTE_RESOLVED)
        stranger.id.connect(stranger.param(b""), "connect")
        answer = stranger.wait(E.CONNECT_RESPONSE)
        assert answer.param.private_data.rstrip(b"\0") == b"served"
        stranger.climb(stranger.id)
        stranger.id.establish("connect")
        with door.accept(deadline_s=PATIENCE_S) as conn:
            assert (conn.private_data, conn.max_send_size) == (bytes(56), 1 << 30)
            send(stranger, b"first")
            assert conn.recv() == b"first"
            conn.send(b"sixteen bytes...")
            stranger.end.wait(1)
            stranger.id.close()  # as where its process ends
            with pytest.raises(PeerClosed):
                conn.recv(deadline_s=PATIENCE_S)


@pytest.mark.parametrize("data", [b"rdmac\x01", b"rdmac\x01\0\0\0\0\0\0", b"rdmac\x01\0\0\1\0\xff"])
def test_what_begins_as_a_message_of_ours_and_is_none_is_refused(stranger: Stranger, data: bytes) -> None:
    with rdmaconnect.listen(URL) as door:
        stranger.id.resolve_addr(sockaddr(2, ("127.0.0.1", 7174)), 1000, "resolve")
        stranger.wait(E.ADDR_RESOLVED)
        stranger.id.connect(stranger.param(data), "connect")
        assert stranger.wait(E.REJECTED).status == 28
        with pytest.raises(RemoteProtocolError, match="rdma_cm: "):
            door.accept(deadline_s=PATIENCE_S, tolerant=False)


def test_more_than_the_peer_receives_is_its_failure(stranger: Stranger) -> None:
    """A stranger does not say how long a message it takes: what is longer than that fails, as the device says."""
    stranger.id.bind(sockaddr(2, ("127.0.0.1", 7174)), 1, "listen")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S)
        child = stranger.wait(E.CONNECT_REQUEST).request
        assert child is not None
        stranger.climb(child)
        child.accept(stranger.param(b""), "accept")
        with call.result(PATIENCE_S) as conn:
            with pytest.raises(rdmaconnect.CompletionError) as seen:
                conn.send(bytes(17))
            assert seen.value.status == WcStatus.REM_INV_REQ_ERR
        child.close()


# ---- arguments


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qp_type": "UD"}, ValueError, "qp_type is UD: by rdma:// only RC is connected"),
    ({"secret": "sixteen bytes of it"}, ValueError, "rdma_cm protects nothing"),
    ({"auto_reconnect": True}, ValueError, "nothing is connected anew"),
    ({"gid_index": 1, "path_mtu": 1024}, ValueError, "gid_index and path_mtu: rdma_cm chooses"),
    ({"hop_limit": 3}, ValueError, "hop_limit: rdma_cm chooses"),
    ({"device": "soft9"}, DeviceError, "use device soft9: rdma_cm goes by soft0 port 1"),
    ({"private_data": bytes(45)}, ValueError, "private_data is 45 bytes and the named regions 0: rdma_cm carries 56"),
    ({"regions": dict.fromkeys("abc", bytearray(8))}, ValueError, "the named regions 66: rdma_cm carries 56"),
    ({"plain": 1}, TypeError, "plain is 1"),
    ({"plain": True, "private_data": bytes(57)}, ValueError, "private_data is 57 bytes: rdma_cm carries 56"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=[" ".join(options) for options, *_ in REFUSED])
def test_what_rdma_cm_does_not_have_is_refused(
    cm: RdmaCm, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rdmaconnect.connect(URL, deadline_s=5, **options)


def test_one_at_a_time_and_by_no_other_call(cm: RdmaCm, software: Software) -> None:
    with pytest.raises(ValueError, match="one queue pair is connected at a time"):
        rdmaconnect.connect_many(URL, 2)
    calls: list[Callable[[], Any]] = [lambda: rdmaconnect.meet("127.0.0.1:1", URL), lambda: rdmaconnect.Pool(URL)]
    for call in calls:
        with pytest.raises(ValueError, match=r"only connect\(\) and listen\(\) go by rdma_cm"):
            call()
    with pytest.raises(ValueError, match="plain is for rdma:// urls"):
        rdmaconnect.connect("127.0.0.1", plain=True, deadline_s=5)
    for options in ({"qp_types": ["UD"]}, {"share_ud": True}):
        with pytest.raises(ValueError, match="only RC is connected"):
            rdmaconnect.listen(URL, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the named regions 221: rdma_cm carries 196 bytes this way"):
        rdmaconnect.listen(URL, regions={"n" * 200: bytearray(1)})
    with pytest.raises(ValueError, match="it is the connector's to choose"):
        rdmaconnect.listen(URL, traffic_class=96)


def test_without_librdmacm(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACONNECT_LIBRDMACM", "librdmacm-is-not-here.so.1")
    rdmacm.library.cache_clear()
    rdmacm.use(None)
    for call in (rdmaconnect.connect, rdmaconnect.listen):
        with pytest.raises(LibraryError, match=r"load librdmacm-is-not-here.so.1: .*apt install librdmacm1"):
            call(URL)
    monkeypatch.undo()
    rdmacm.use(None)


# ---- iWARP


def test_an_iwarp_port_is_never_chosen_for_the_other_exchange() -> None:
    with (
        Software([Device("iw0", iwarp=True), Device("soft0")]),
        rdmaconnect.listen("127.0.0.1:0") as door,
        rdmaconnect.connect(door.url, deadline_s=PATIENCE_S) as conn,
    ):
        assert conn.local.port.device == "soft0"
        assert any("iw0" in line and "rdma://" in line for line in conn.path.why)
        door.accept().close()


def test_where_there_is_nothing_but_iwarp_the_error_says_so(cm: RdmaCm) -> None:
    with Software([Device("iw0", iwarp=True)]) as software:
        for options in ({}, {"device": "iw0"}):
            with pytest.raises(DeviceError, match=r'use iw0: it is of iWARP.*connect\("rdma://\.\.\."\)'):
                rdmaconnect.listen("127.0.0.1:0", **options)  # type: ignore[arg-type]
        assert software.problems() == []


def test_iwarp_by_rdma_cm_where_the_kernel_moves_the_queue_pairs() -> None:
    with Software([Device("iw0", iwarp=True)]) as software, RdmaCm(software) as cm:
        with joined({"regions": {"m": bytearray(4)}}, max_rd_atomic=2) as (here, there):
            here.send(b"over TCP")
            assert there.recv() == b"over TCP"
            there.send(b"and back")
            assert here.recv() == b"and back"
            here.write(b"iWRP", "m")
            assert here.read("m") == b"iWRP"
            assert (here.path.max_rd_atomic, there.path.max_dest_rd_atomic) == (2, 2)
            assert "iWARP" in here.path.why[0]
        assert (cm.calls["rdma_establish"], software.calls["ibv_modify_qp"]) == (0, 2)
        until(lambda: not cm.left() and not software.left(), 5)
        assert software.problems() == []


def test_on_change_may_close_though_another_thread_is_closing(cm: RdmaCm) -> None:
    """The service thread would wait for the one that closes, and that for the service thread."""
    with joined() as (here, there):
        here.on_change(lambda health: here.close())
        there.close()
        here.close()
        until(lambda: here.closed, 5)


def test_an_event_that_cannot_be_taken_is_asked_for_again(cm: RdmaCm, listener: rdmaconnect.Listener) -> None:
    cm.fail("rdma_get_cm_event", errno.ENOMEM, times=2)
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S), listener.accept(deadline_s=PATIENCE_S):
        pass


def test_errors_of_rdma_cm_can_be_caught_as_one_kind(cm: RdmaCm) -> None:
    cm.fail("rdma_resolve_addr", errno.ENODEV)
    with pytest.raises(RdmaConnectError):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
