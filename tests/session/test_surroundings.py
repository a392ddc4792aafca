"""Ports, addresses and devices of this host that change, or go, under connections that stand."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from exchange_ends import until
from samples import V2, end, gid, infiniband, roce
from software import Device, Port, Software, connected
from software.ends import PATIENCE_S

import rdmaconnect
from rdmaconnect.abi import EventType, Mtu, PortState, QpType
from rdmaconnect.agreement.options import Options
from rdmaconnect.agreement.path import Wish, agree, make_paths
from rdmaconnect.objects import context as device
from rdmaconnect.objects.context import open_device
from rdmaconnect.protocol.health import HealthState
from rdmaconnect.session import watch
from rdmaconnect.session.surroundings import compare

ALIVE, SUSPECT, MOVED, DEAD = HealthState


@pytest.fixture
def port() -> Port:
    return Port(gids=["127.0.0.1", "10.0.0.7"])


@pytest.fixture
def software(port: Port, monkeypatch: pytest.MonkeyPatch) -> Iterator[Software]:
    """One device on that port; nothing has to settle."""
    monkeypatch.setattr(watch, "SETTLE_S", 0.1)
    with Software([Device("soft0", [port])]) as made:
        yield made
        assert made.problems() == []


def change(software: Software, event: EventType, port: Port, **values: Any) -> None:
    """A port changes, and its device tells of it."""
    for name, value in values.items():
        setattr(port, name, value)
    software.event("soft0", event, 1)


def test_what_concerns_a_connection_is_told_and_what_does_not_is_not(software: Software, port: Port) -> None:
    with connected() as ends:
        seen: list[str] = []
        ends[0].on_change(lambda health: seen.append(str(health)))
        change(software, EventType.PORT_ERR, port, state=PortState.DOWN)
        assert until(lambda: all(end.health.state is SUSPECT for end in ends))
        assert ends[0].health.why == "soft0 port 1 is DOWN"
        change(software, EventType.PORT_ACTIVE, port, state=PortState.ACTIVE)
        assert until(lambda: all(end.health.state is ALIVE for end in ends))
        change(software, EventType.GID_CHANGE, port, gids=["127.0.0.1", "10.0.0.8"])
        time.sleep(0.5)
        assert [end.health.state for end in ends] == [ALIVE, ALIVE], "another slot"
        change(software, EventType.GID_CHANGE, port, gids=[None, "10.0.0.8"])
        assert until(lambda: all(end.health.state is MOVED for end in ends))
        assert ends[0].health.why == "gid_index 0 (::ffff:127.0.0.1, RoCE v2) is not on soft0 port 1 any more"
        change(software, EventType.GID_CHANGE, port, gids=["127.0.0.1", "10.0.0.8"])
        assert until(lambda: all(end.health.state is ALIVE for end in ends))
        assert [words.partition(":")[0] for words in seen] == ["suspect", "alive", "moved", "alive"]
        assert ends[0].lost is None


@pytest.mark.parametrize("way", ["verbs fail", "its node is gone"])
def test_a_device_that_goes_ends_waiting_calls_and_is_let_go(
    software: Software, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    nodes = {"software-soft0": 7}
    monkeypatch.setattr(device, "device_nodes", lambda: nodes)
    with connected() as ends, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(end.recv, deadline_s=PATIENCE_S) for end in ends]
        time.sleep(0.1)
        began = time.monotonic()
        if way == "verbs fail":
            software.on("ibv_query_device", fail=5)
            software.on("ibv_query_port", fail=5)
        else:
            nodes.clear()
        software.event("soft0", EventType.DEVICE_FATAL)
        errors = [one.exception(PATIENCE_S) for one in waiting]
        assert time.monotonic() - began < 3
        for one, error in zip(ends, errors, strict=True):
            # the peer is on the same device, and may have said so first
            assert isinstance(error, (rdmaconnect.DeviceError, rdmaconnect.PeerClosed))
            assert "soft0 is not there any more: it was removed. Connect anew." in str(error)
            assert until(lambda one=one: isinstance(one.lost, rdmaconnect.DeviceError))
            assert one.health.state is DEAD
            for use in (
                lambda one=one: one.send(b"x"),
                lambda one=one: one.recv(),
                lambda one=one: one.post_send(b"x"),
            ):
                with pytest.raises(rdmaconnect.DeviceError):
                    use()
        assert until(lambda: software.made["context"] and not software.objects("context"))
        assert not software.objects("qp")


def test_the_peer_of_a_device_that_went_is_told(software: Software) -> None:
    with connected() as (here, there), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(there.recv, deadline_s=PATIENCE_S)
        here._end.lose(rdmaconnect.DeviceError("soft0 is not there any more"))
        error = waiting.exception(2)
        assert isinstance(error, rdmaconnect.PeerClosed)
        assert "the peer closed the connection (soft0 is not there any more)" in str(error)


def until_it_fails_to_receive(end: rdmaconnect.Connection) -> None:
    with suppress(rdmaconnect.RdmaConnectError):
        while True:
            end.recv(deadline_s=PATIENCE_S)


@pytest.mark.parametrize("call", ["recv", "send", "post_send", "write", "read", "lost", "batch"])
def test_a_device_that_goes_amid_calls_is_named_by_each(software: Software, call: str) -> None:
    """Between any two lines of a call: threads take turns after every few of them."""
    memory = bytearray(64)

    def use(end: rdmaconnect.Connection) -> None:
        match call:
            case "recv":
                end.recv(deadline_s=PATIENCE_S)
            case "send" | "post_send":
                getattr(end, call)(b"x")
            case "write":
                end.write(b"abc", "m")
            case "read":
                end.read("m", 4)
            case "lost":
                if end.lost is not None:
                    raise end.lost
            case "batch":
                with end.batch() as batch:
                    batch.post_send(b"x")

    def until_it_fails(end: rdmaconnect.Connection) -> None:
        while True:
            use(end)

    interval = sys.getswitchinterval()
    for _ in range(20):
        with connected(listen={"regions": {"m": memory}}) as (here, there), ThreadPoolExecutor(3) as threads:
            if call in ("send", "post_send", "batch"):
                threads.submit(until_it_fails_to_receive, there)
            sys.setswitchinterval(1e-6)
            try:
                using = [threads.submit(until_it_fails, here) for _ in range(2)]
                time.sleep(0.01)
                here._end.lose(rdmaconnect.DeviceError("soft0 is not there any more"))
                errors = [one.exception(PATIENCE_S) for one in using]
            finally:
                sys.setswitchinterval(interval)
            here.close()
            assert [(type(error), str(error)) for error in errors] == [
                (rdmaconnect.DeviceError, "soft0 is not there any more")
            ] * 2


def test_a_watch_stays_while_there_are_connections(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "IDLE_S", 0.1)
    monkeypatch.setattr(watch, "ATTENDED_S", 0.1)
    with connected():
        time.sleep(0.6)
        assert len(watch._watches) == 1
        nodes = dict.fromkeys(watch.device_nodes(), 1)
        monkeypatch.setattr(watch, "device_nodes", lambda: {**nodes, "uverbs77": 7})
        looked = threading.Event()
        monkeypatch.setattr(watch.attendants, "tell", lambda *args: looked.set())
        kept = next(iter(watch._watches.values()))
        kept._nodes = {"uverbs77": 8}
        assert looked.wait(PATIENCE_S), "a node is another one"
    assert until(lambda: not watch._watches)


# ---- pure

ROCE = roce(gid("10.0.0.7", V2, 3), gid("10.0.0.8", V2, 4), active_mtu=Mtu.MTU_1024, pkeys=(0xFFFF, 0x8005))
INFINIBAND = infiniband(7, active_mtu=Mtu.MTU_4096)


def path_over(port: Any) -> Any:
    """The path of a connection to itself."""
    ends = (end(port, qp_type=QpType.RC),)
    agreement = agree(ends[0], ends[0], Wish())
    return make_paths(ends, ends, agreement, Options(), connector=True)[0]


def as_read(address: Any, **values: Any) -> Any:
    """The same port as it is read later."""
    with Software([Device("one")]), open_device("one") as context:
        port = context.port(1)
    same = {"device": address.device, "port_num": address.port_num, "lid": address.lid, "gids": address.gids}
    return replace(port, **{**same, "pkeys": address.pkeys, "active_mtu": address.active_mtu, **values})


CHANGES: dict[str, tuple[Any, dict[str, Any], HealthState, str]] = {
    "nothing": (ROCE, {}, ALIVE, ""),
    "down": (ROCE, {"state": PortState.DOWN}, SUSPECT, "port 1 is DOWN"),
    "elsewhere": (ROCE, {"gids": (gid("10.0.0.7", V2, 9),)}, MOVED, "any more, it is gid_index 9 now"),
    "empty": (ROCE, {"gids": ()}, MOVED, "is not on"),
    "another": (ROCE, {"gids": (gid("10.0.0.9", V2, 3),)}, MOVED, "is not on"),
    "mtu": (ROCE, {"active_mtu": Mtu.MTU_512}, SUSPECT, "carries 512 bytes now, the path 1024"),
    "pkey": (ROCE, {"pkeys": (0x8005, 0xFFFF)}, MOVED, "the P_Key at index 0"),
    "other pkey": (ROCE, {"pkeys": (0xFFFF, 0x8006)}, ALIVE, ""),
    "lid": (INFINIBAND, {"lid": 8}, MOVED, "was 7 and is 8"),
}


@pytest.mark.parametrize(("then", "values", "state", "words"), CHANGES.values(), ids=CHANGES)
def test_what_a_port_has_become(then: Any, values: dict[str, Any], state: HealthState, words: str) -> None:
    seen, why = compare(then, path_over(then), as_read(then, **values))
    assert seen is state, why
    assert words in why
