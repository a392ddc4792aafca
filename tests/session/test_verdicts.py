"""A transfer that failed: whether the peer is there is asked first, and the error says which it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from proxy import Proxy
from software import Software, connected
from software.ends import PATIENCE_S

import rdmaconnect
from rdmaconnect import CompletionError, PeerClosed, RemoteRegion, WcStatus
from rdmaconnect.protocol.health import HealthState
from rdmaconnect.session.waiting import ASK_S, OF_PEER

#: what others have seen of killed peers
OF_THE_KILLED = [WcStatus.RETRY_EXC_ERR, WcStatus.REM_ACCESS_ERR, WcStatus.REM_OP_ERR, WcStatus.WR_FLUSH_ERR]


def fail(end: Any, status: WcStatus) -> None:
    """A queue pair fails, in a way that the device in software has no reason for."""
    end._end.transceiver.broken = CompletionError(status, doing="a test")


USES: dict[str, Callable[[rdmaconnect.Connection], object]] = {
    "send": lambda end: end.send(b"lost"),
    "wait": lambda end: end.post_send(b"lost").wait(),
    "read": lambda end: end.read("m"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_data_path_that_is_cut_is_named_as_such(
    software: Software, use: Callable[[rdmaconnect.Connection], object]
) -> None:
    with connected(listen={"regions": {"m": bytearray(8)}}) as (here, there):
        software.network.ack_timeout_s = 0.05
        with software.network.lose(lambda message: True):
            began = time.monotonic()
            with pytest.raises(CompletionError, match=r"RETRY_EXC_ERR \(12\).*The peer is there: it has answered"):
                use(here)
            assert time.monotonic() - began < ASK_S
        assert here.health.state is HealthState.SUSPECT
        assert here.health.why == (
            "the data path failed (RETRY_EXC_ERR), but the peer answers over its side channel: reconnect()"
        )
        assert isinstance(here.lost, CompletionError)
        assert there.health.state is HealthState.ALIVE


def test_a_key_that_is_refused_by_a_peer_that_is_there(software: Software) -> None:
    with connected() as (here, _):
        with pytest.raises(CompletionError, match=r"REM_ACCESS_ERR.*The peer is there.*rkey") as caught:
            here.write(b"x", RemoteRegion(4096, 77, 8))
        assert caught.value.status == WcStatus.REM_ACCESS_ERR
        assert caught.value.qp_num == here.local.qp_num


@pytest.mark.parametrize("status", OF_THE_KILLED, ids=str)
@pytest.mark.parametrize("side", ["connector", "listener"])
def test_a_peer_that_is_gone_is_named_whatever_the_device_said_first(
    software: Software, status: WcStatus, side: str
) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(2) as threads:
        proxy = Proxy(listener.port)
        accepted = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        with (
            rdmaconnect.connect(f"127.0.0.1:{proxy.port}", deadline_s=PATIENCE_S) as connector,
            accepted.result(PATIENCE_S) as other,
        ):
            end = connector if side == "connector" else other
            waiting = threads.submit(end.recv, deadline_s=PATIENCE_S)
            time.sleep(0.05)
            began = time.monotonic()
            proxy.cut(True)  # who is killed answers nothing any more
            proxy.cut(False)
            fail(end, status)  # the side channel follows: as where memory is freed before sockets
            end._end.engine.changed.notify()
            proxy.close()
            error = waiting.exception(PATIENCE_S)
            assert isinstance(error, PeerClosed)
            assert "the peer is gone: its side channel ended without a good-bye" in str(error)
            assert f"and the data path failed ({status}): its process ended" in str(error)
            assert str(error).endswith(f"This side saw {status} first.")
            assert time.monotonic() - began < 3
            assert end.health.state is HealthState.DEAD


def test_where_it_cannot_be_told_both_causes_are_named(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as threads:
        proxy = Proxy(listener.port)
        accepted = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        with (
            rdmaconnect.connect(f"127.0.0.1:{proxy.port}", deadline_s=PATIENCE_S) as here,
            accepted.result(PATIENCE_S),
        ):
            proxy.cut(True)
            proxy.cut(False)
            fail(here, WcStatus.REM_ACCESS_ERR)
            began = time.monotonic()
            with pytest.raises(CompletionError, match=r"The peer has not answered.* it is gone, or both paths.*rkey"):
                here.recv(deadline_s=PATIENCE_S)
            assert ASK_S <= time.monotonic() - began < ASK_S + 1
            began = time.monotonic()
            with pytest.raises(CompletionError):
                here.recv(deadline_s=0.1)
            assert time.monotonic() - began < ASK_S, "the caller's own patience counts"
        proxy.close()


def test_what_this_end_did_wrong_is_told_at_once(software: Software) -> None:
    assert not {WcStatus.LOC_PROT_ERR, WcStatus.LOC_LEN_ERR, WcStatus.LOC_QP_OP_ERR} & OF_PEER
    with connected() as (here, _):
        fail(here, WcStatus.LOC_PROT_ERR)
        with pytest.raises(CompletionError, match="a test: work completion LOC_PROT_ERR"):
            here.recv()
        assert here.health.state is HealthState.ALIVE
