"""What happens amid a call by rdma_cm, over librdmacm in software: it is named, and nothing of it is lost."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from exchange_ends import until
from software import RdmaCm, Software
from software.rdmacm import Id

import rdmaconnect
from rdmaconnect import ConnectTimeout, DeviceError, PeerClosed, PeerRejected, VerbsError
from rdmaconnect.abi.rdma_cma import CmEventType, rdma_conn_param
from rdmaconnect.objects.cm import CmEvent, CmId, CmParam
from rdmaconnect.protocol.cm_message import refusal
from rdmaconnect.session import cm_listen

URL = "rdma://127.0.0.1:7174"
E = CmEventType
PATIENCE_S = 10.0


@pytest.fixture
def door(cm: RdmaCm) -> Iterator[rdmaconnect.Listener]:
    with rdmaconnect.listen(URL) as made:
        yield made


def tells_later(cm: RdmaCm, kind: CmEventType) -> Callable[[Id | None], None]:
    """Have an event come a little later, about who calls."""

    def tell(about: Id) -> None:
        with cm.lock:
            if about.address in cm.ids:
                cm.tell(about, kind, 28, rdma_conn_param())

    return lambda cm_id: threading.Timer(0.05, tell, (cm_id,)).start()


def listening(cm: RdmaCm) -> Id:
    (found,) = (one for one in cm.ids.values() if one.listens)
    return found


# ---- a call is refused for what has happened: the event says what, though it comes a little later


@pytest.mark.parametrize("function", ["rdma_resolve_route", "rdma_connect", "rdma_init_qp_attr", "rdma_establish"])
@pytest.mark.parametrize("kind", [E.DEVICE_REMOVAL, E.DISCONNECTED, E.REJECTED])
def test_a_call_that_comes_too_late_at_the_connector(
    cm: RdmaCm, door: rdmaconnect.Listener, function: str, kind: CmEventType
) -> None:
    number = errno.ENODEV if kind is E.DEVICE_REMOVAL else errno.EINVAL
    asked_before = 3 if function == "rdma_init_qp_attr" else 0  # by the listener
    cm.fail(function, number, after=asked_before, do=tells_later(cm, kind))
    error = {E.DEVICE_REMOVAL: DeviceError, E.DISCONNECTED: PeerClosed, E.REJECTED: PeerRejected}[kind]
    with pytest.raises(error, match=r"it was removed|closed the connection|its application refused"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


def test_a_call_that_comes_too_late_at_the_listener(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    cm.fail("rdma_accept", errno.EINVAL, do=tells_later(cm, E.REJECTED))
    with ThreadPoolExecutor(1) as threads:
        threads.submit(rdmaconnect.connect, URL, deadline_s=0.5)
        with pytest.raises(PeerClosed, match=f"accept on {URL}: the peer gave its request up"):
            door.accept(deadline_s=PATIENCE_S, tolerant=False)


@pytest.mark.parametrize("verb", ["ibv_open_device", "ibv_create_cq", "ibv_create_qp", "ibv_modify_qp"])
def test_a_verb_that_fails_since_the_device_went(
    cm: RdmaCm, software: Software, door: rdmaconnect.Listener, verb: str
) -> None:
    def goes(call: Any) -> None:
        (connecting,) = (one for one in cm.ids.values() if not one.listens)
        tells_later(cm, E.DEVICE_REMOVAL)(connecting)

    failing = software.on(verb, fail=errno.EIO, before=goes, times=1)
    with failing, pytest.raises(DeviceError, match="it was removed"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


def test_a_call_that_is_refused_for_what_nobody_says_is_named_by_itself(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    cm.fail("rdma_establish", errno.EINVAL)
    with pytest.raises(VerbsError, match="rdma_establish: EINVAL"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


def test_a_device_that_goes_just_before_the_connection_stands_is_let_go(
    cm: RdmaCm, software: Software, door: rdmaconnect.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener's end is made when its device has gone already: nobody need close it for that to be let go."""

    def stand(conversation: Any, *rest: Any) -> Any:
        conversation.told(CmEvent(E.DEVICE_REMOVAL, conversation.cm_id, 0, CmParam(0, 0, 0)))
        return made(conversation, *rest)

    made = cm_listen.stand
    monkeypatch.setattr(cm_listen, "stand", stand)
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S), door.accept(deadline_s=PATIENCE_S) as there:
        until(lambda: len(software.objects("qp")) == 1, 5)
        with pytest.raises(DeviceError, match="it was removed"):
            there.send(b"x")


def test_who_closes_at_once_has_sent_what_it_sent(
    cm: RdmaCm, door: rdmaconnect.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector has established the connection, and its connect() has not returned, when all is over."""
    establish = CmId.establish

    def slowly(self: CmId, doing: str) -> None:
        establish(self, doing)
        with door.accept(deadline_s=PATIENCE_S) as there:
            there.send(b"all there is")
        until(lambda: not any(one.channel.events for one in cm.ids.values()), 5)
        time.sleep(0.05)

    monkeypatch.setattr(CmId, "establish", slowly)
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S) as here:
        assert here.recv(deadline_s=PATIENCE_S) == b"all there is"
        with pytest.raises(PeerClosed, match="rdma_disconnect"):
            here.recv(deadline_s=PATIENCE_S)


# ---- what a peer may say


def test_a_peer_that_tells_more_reads_at_once_than_this_device_starts(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    def connects(cm_id: Id | None) -> None:
        assert cm_id is not None
        cm_id.param = said = rdma_conn_param(qp_num=5, responder_resources=200, initiator_depth=255)
        cm.tell(cm_id, E.CONNECT_RESPONSE, 0, said)

    cm.before("rdma_connect", connects)
    cm.silent("rdma_connect")
    cm.silent("rdma_establish")
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S) as here:
        assert (here.path.max_rd_atomic, here.path.max_dest_rd_atomic) == (16, 16)


def test_what_is_no_message_of_ours_though_it_begins_as_one_is_refused_in_words(
    cm: RdmaCm, door: rdmaconnect.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmaconnect.session.cm_connect.message_of", lambda *given: refusal("")[:6] + bytes(6))
    with pytest.raises(PeerRejected, match="the peer says that its receives take 0 bytes"):
        rdmaconnect.connect(URL, deadline_s=PATIENCE_S)


# ---- a listener


def test_who_was_there_before_its_device_went_is_accepted(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    with rdmaconnect.connect(URL, deadline_s=PATIENCE_S) as here:
        until(lambda: door._ready, PATIENCE_S)
        cm.tell(listening(cm), E.DEVICE_REMOVAL)
        until(lambda: door._gone, PATIENCE_S)  # type: ignore[attr-defined]
        here.send(b"last words")
        with door.accept(deadline_s=PATIENCE_S, tolerant=False) as there:
            assert there.recv() == b"last words"
        with pytest.raises(DeviceError, match="Listen anew"):
            door.accept(deadline_s=0.1)


def test_a_listener_whose_device_went_says_so(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    with ThreadPoolExecutor(1) as threads, rdmaconnect.connect(URL, deadline_s=PATIENCE_S):
        door.accept(deadline_s=PATIENCE_S).close()
        waiting = threads.submit(door.accept, deadline_s=PATIENCE_S)
        cm.tell(listening(cm), E.DEVICE_REMOVAL)
        assert isinstance(waiting.exception(PATIENCE_S), DeviceError)
        with pytest.raises(DeviceError, match=f"accept on {URL}: the device is not there any more.*Listen anew"):
            door.accept(deadline_s=0.1)


def test_those_who_do_not_go_on_make_room_for_others_and_all_are_logged(
    cm: RdmaCm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rdmaconnect.peers")
    monkeypatch.setattr("rdmaconnect.session.cm_listen.SILENT_S", 0.5)
    with rdmaconnect.listen(URL, max_half_open=2) as door, ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        cm.silent("rdma_establish", times=2)
        for _ in range(2):  # their connectors think that all is well, and the kernel does not tell of it
            stack.enter_context(rdmaconnect.connect(URL, deadline_s=PATIENCE_S))
        waits = threads.submit(rdmaconnect.connect, URL, deadline_s=PATIENCE_S)
        with door.accept(deadline_s=PATIENCE_S), waits.result(PATIENCE_S):
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert any("is told to try again: busy: 2 connections are half open" in line for line in lines)
    assert sum("it has not gone on for" in line for line in lines) == 2


def test_an_identifier_that_cannot_be_destroyed_is_with_its_channel(cm: RdmaCm) -> None:
    with rdmaconnect.listen(URL) as door:
        here = rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
        there = door.accept(deadline_s=PATIENCE_S)
        for end in (here, there):
            cm.fail("rdma_destroy_id", errno.EBUSY)
            end.close()
        assert len(cm.ids) == 2  # the listener's channel is in use
    assert cm.left() == {}


def test_a_peer_that_never_says_that_it_stands(cm: RdmaCm, door: rdmaconnect.Listener) -> None:
    cm.say("rdma_accept", E.UNREACHABLE, -errno.ETIMEDOUT)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(rdmaconnect.connect, URL, deadline_s=0.5)
        with pytest.raises(VerbsError, match=r"rdma_accept: ETIMEDOUT.*did not say that the connection stands"):
            door.accept(deadline_s=PATIENCE_S, tolerant=False)
        assert isinstance(asked.exception(PATIENCE_S), (ConnectTimeout, PeerRejected))


def test_a_fault_of_this_library_s_own_is_logged_and_the_peer_is_told(
    cm: RdmaCm, door: rdmaconnect.Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*given: Any) -> Any:
        raise KeyError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(cm_listen, "message_of", raises)
        with pytest.raises(PeerRejected, match="a fault"):
            rdmaconnect.connect(URL, deadline_s=PATIENCE_S)
    until(lambda: any(record.exc_info for record in caplog.records), 5)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
