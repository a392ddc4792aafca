"""What is remembered of this host is thrown away at any change: devices, ports, tables, addresses, routes."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from exchange_ends import until
from forking import in_a_fork
from software import Device, Port, Software
from software.device import Listed

import rdmaconnect
from rdmaconnect.abi import EventType, LinkLayer, PortState
from rdmaconnect.agreement.options import Options
from rdmaconnect.errors import DeviceError, VerbsError
from rdmaconnect.objects.context import open_device
from rdmaconnect.session import watch
from rdmaconnect.session.ports import choose_ports, known_ports

#: verbs that read what is remembered
READS = ("ibv_query_device", "ibv_query_device_ex", "ibv_query_port", "ibv_query_pkey", "_ibv_query_gid_table")
CLONE_NEWNET = 0x40000000
RTM_NEWLINK, RTM_NEWADDR, RTM_NEWROUTE = 16, 20, 24
LO, IFF_UP = 1, 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to settle: the device in software changes at once."""
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)


@pytest.fixture
def pairs() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Connects to one listener, as often as it is called; closes each pair before the next one is made."""
    with ExitStack() as stack:
        listener = stack.enter_context(rdmaconnect.listen("127.0.0.1:0"))

        def connect(**options: Any) -> tuple[Any, Any]:
            with (
                rdmaconnect.connect(listener.url, deadline_s=10, **options) as here,
                listener.accept(deadline_s=10) as there,
            ):
                return here, there

        yield connect


def read_by(software: Software, work: Callable[[], object]) -> dict[str, int]:
    """The verbs that read tables while something is done."""
    before = Counter(software.calls)
    work()
    return {verb: number for verb, number in (Counter(software.calls) - before).items() if verb in READS}


def test_a_second_connection_reads_no_table_anew(software: Software, pairs: Any) -> None:
    pairs()
    assert read_by(software, pairs) == {}


def test_what_is_kept_goes_when_nobody_asks(software: Software, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.forget()
    monkeypatch.setattr(watch, "IDLE_S", 0.1)
    pairs()
    assert until(lambda: not watch._watches)
    assert until(lambda: software.alive["context"] == 0)
    assert read_by(software, pairs)


# ---- faults: what has changed between two connections


def changed(software: Software, pairs: Any, change: Callable[[Port], object]) -> tuple[Any, Any]:
    """A pair, a change, a pair, and two more: the last three are the same, and the last one reads nothing."""
    pairs()
    change(software.devices[0].ports[0])
    ends = here, there = pairs()
    for reads in (True, False):
        assert bool(read_by(software, lambda: ends_are(pairs(), here, there))) <= reads
    return ends


def ends_are(ends: tuple[Any, Any], here: Any, there: Any) -> None:
    for end, before in zip(ends, (here, there), strict=True):
        assert end.local.port == before.local.port
        assert (end.path.local_gid, end.path.path_mtu) == (before.path.local_gid, before.path.path_mtu)


def test_an_address_that_has_moved(software: Software, pairs: Any, quick: None) -> None:
    here, there = changed(software, pairs, lambda port: port.gids.insert(0, None))
    assert [end.path.local_gid.gid_index for end in (here, there)] == [1, 1]
    here, there = changed(software, pairs, lambda port: setattr(port, "gids", ["127.0.0.2"]))
    assert str(here.path.local_gid.gid) == str(there.path.local_gid.gid) == "::ffff:127.0.0.2"


def test_a_table_of_partition_keys_and_an_mtu_that_have_changed(software: Software, pairs: Any, quick: None) -> None:
    here, _ = changed(software, pairs, lambda port: port.pkeys.insert(0, 0x8001))
    assert here.local.port.pkeys == (0x8001, 0xFFFF)
    here, _ = changed(software, pairs, lambda port: setattr(port, "active_mtu", 512))
    assert here.path.path_mtu == 2


def test_a_lid_that_has_changed(quick: None) -> None:
    ports = [Port(gids=["fe80::1"], link_layer=LinkLayer.INFINIBAND, lid=7)]
    with Software([Device("ib0", ports)]) as software:
        assert choose_ports(Options()).ports[0].lid == 7
        assert read_by(software, lambda: choose_ports(Options())) == {}
        ports[0].lid = 9
        assert choose_ports(Options()).ports[0].lid == 9


def test_a_port_that_went_down(software: Software, pairs: Any, quick: None) -> None:
    pairs()
    software.devices[0].ports[0].state = PortState.DOWN
    with pytest.raises(DeviceError, match="find an ACTIVE RDMA port"):
        pairs()
    software.devices[0].ports[0].state = PortState.ACTIVE
    pairs()


def test_a_device_that_was_added_and_one_that_was_removed(quick: None) -> None:
    one, two = (Device(name, [Port(gids=[gid])]) for name, gid in (("one", "127.0.0.9"), ("two", "127.0.0.1")))
    with Software([one]) as software:
        assert [port.device for port in choose_ports(Options(), "127.0.0.1").ports] == ["one"]
        software.listed.append(Listed(software, two))
        assert [port.device for port in choose_ports(Options(), "127.0.0.1").ports] == ["two", "one"]
        assert read_by(software, lambda: choose_ports(Options(), "127.0.0.1")) == {}
        software.listed.pop(0)
        assert [port.device for port in choose_ports(Options(), "127.0.0.1").ports] == ["two"]


def test_a_device_that_goes_is_let_go_at_once_though_nobody_asks(software: Software, pairs: Any) -> None:
    pairs()
    assert software.alive["context"]
    software.event("soft0", EventType.DEVICE_FATAL)
    assert until(lambda: software.alive["context"] == 0, watch.IDLE_S / 2)
    assert not watch._watches


@pytest.mark.parametrize("event", [EventType.PORT_ERR, EventType.LID_CHANGE, EventType.SM_CHANGE, EventType.GID_CHANGE])
def test_after_each_event_all_is_read_anew(software: Software, event: EventType, quick: None) -> None:
    choose_ports(Options())
    assert read_by(software, lambda: choose_ports(Options())) == {}
    software.event("soft0", event, 1)
    assert read_by(software, lambda: choose_ports(Options()))


def test_after_a_change_nothing_is_kept_until_it_has_settled(
    software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.3)
    choose_ports(Options())
    software.event("soft0", EventType.GID_CHANGE, 1)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        assert read_by(software, lambda: choose_ports(Options()))
    time.sleep(0.2)
    choose_ports(Options())
    assert read_by(software, lambda: choose_ports(Options())) == {}


def test_for_a_first_connection_devices_are_listed_once(software: Software) -> None:
    watch.forget()
    before = Counter(software.calls)
    choose_ports(Options(), "127.0.0.1")
    # and once more to see that nothing has changed meanwhile, where sysfs does not tell
    assert (Counter(software.calls) - before)["ibv_get_device_list"] <= 3
    assert software.alive["device_list"] == 0


def test_what_changes_while_it_is_read_is_not_kept(software: Software, quick: None) -> None:
    hook = software.on("ibv_query_port", times=1, after=lambda call: setattr(software.devices[0].ports[0], "lid", 3))
    with hook:
        assert choose_ports(Options()).ports[0].lid == 0
    assert choose_ports(Options()).ports[0].lid == 3


def test_the_applications_own_events_stay_its_own(software: Software) -> None:
    with open_device("soft0") as context:
        choose_ports(Options())
        software.event("soft0", EventType.SM_CHANGE, 1)
        choose_ports(Options())
        event = context.events.take()
        assert event is not None
        assert event.event_type is EventType.SM_CHANGE


def test_a_device_of_another_namespace_beside_the_one_that_is_used_is_watched_too(quick: None) -> None:
    far, near = (Device(name, [Port(gids=[gid])]) for name, gid in (("far", "192.0.2.1"), ("near", "127.0.0.1")))
    with Software([far, near]) as software:
        assert [port.device for port in choose_ports(Options()).ports] == ["near"]
        assert read_by(software, lambda: choose_ports(Options())) == {}
        far.ports[0].gids = ["127.0.0.2"]
        assert {port.device for port in choose_ports(Options()).ports} == {"near", "far"}


def test_of_ports_whose_network_device_is_elsewhere_nothing_is_kept() -> None:
    with Software([Device(ports=[Port(gids=["192.0.2.1"])])]) as software:
        choose_ports(Options())
        assert read_by(software, lambda: choose_ports(Options()))


def test_what_is_remembered_is_given_without_a_wait(
    software: Software, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_ports(Options(), "127.0.0.1") is None
    choice = choose_ports(Options(), "127.0.0.1")
    assert known_ports(Options(), "127.0.0.1") is choice
    assert known_ports(Options(gid_index=0), "127.0.0.1") is None
    with ThreadPoolExecutor(1) as threads, watch._lock:  # somebody opens a device just now
        assert threads.submit(known_ports, Options(), "127.0.0.1").result(5) is None
    software.devices[0].ports[0].lid = 5
    assert known_ports(Options(), "127.0.0.1") is None
    software.listed.clear()
    assert known_ports(Options(), "127.0.0.1") is None


def test_a_name_may_stand_for_another_address_at_any_time(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = socket.getaddrinfo, Counter[str]()

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        asked[host] += 1
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for host in ("name.example", "127.0.0.1"):
        for _ in range(3):
            choose_ports(Options(), host)
    assert asked == {"name.example": 3, "127.0.0.1": 1}


def test_without_descriptors_all_is_read_each_time(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise VerbsError("ibv_open_device", errno.EMFILE, f"open {name}")

    monkeypatch.setattr(watch, "open_apart", refuse)
    choose_ports(Options())
    assert read_by(software, lambda: choose_ports(Options()))


def test_a_child_reads_for_itself(software: Software) -> None:
    choose_ports(Options())
    assert in_a_fork(lambda: (len(watch._watches), choose_ports(Options()).ports[0].device)) == "(0, 'soft0')"
    assert read_by(software, lambda: choose_ports(Options())) == {}


# ---- the kernel's notices


def in_a_namespace(work: Callable[[], None]) -> None:
    """Done in a network namespace of its own."""
    failed: list[BaseException] = []

    def enter() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            failed.append(OSError(ctypes.get_errno(), "unshare"))
            return
        try:
            work()
        except BaseException as e:  # noqa: BLE001
            failed.append(e)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed and isinstance(failed[0], OSError) and failed[0].errno in (errno.EPERM, errno.ENOSYS):
        pytest.skip(f"a network namespace cannot be made here: {os.strerror(failed[0].errno)}")
    if failed:
        raise failed[0]


def tell(kind: int, body: bytes) -> None:
    """Have the kernel make a link, an address or a route."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), kind, 0x405, 1, 0) + body)  # REQUEST, ACK, CREATE
        number = -struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    assert not number, os.strerror(number)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value


def test_each_link_address_and_route_that_changes_is_seen_at_once(software: Software, quick: None) -> None:
    up = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, LO, IFF_UP, IFF_UP)
    address = (
        struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, LO)
        + attribute(1, bytes([10, 1, 2, 3]))
        + attribute(2, bytes([10, 1, 2, 3]))
    )
    v6 = struct.pack("=BBBBI", socket.AF_INET6, 64, 0, 0, LO) + attribute(1, socket.inet_pton(socket.AF_INET6, "fd::5"))
    route = struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 3, 0, 1, 0)
    route += attribute(1, bytes([192, 0, 2, 0])) + attribute(4, struct.pack("=I", LO))
    steps = ((RTM_NEWLINK, up), (RTM_NEWADDR, address), (RTM_NEWADDR, v6), (RTM_NEWROUTE, route))
    numbers = count(1)

    def read() -> int:
        return watch.recall("number", (), lambda: (next(numbers), True))

    def work() -> None:
        for step in steps:
            kept = read()
            assert read() == kept
            tell(*step)
            assert read() > kept, step

    outside = read()
    in_a_namespace(work)
    assert read() == outside, "another namespace is no concern of this one"
