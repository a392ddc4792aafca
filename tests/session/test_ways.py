"""Which way is taken from host to host, and which one next where the proof fails: devices in software."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from exchange_ends import channels, until
from hosts import pair_of
from software import Call, Device, Message, Network, Port, Software
from software.gid import raw_gid

import rdmaconnect
from rdmaconnect.abi import EventType, PortState
from rdmaconnect.agreement.timers import timers_for
from rdmaconnect.cli.pingpong import first
from rdmaconnect.errors import (
    CompletionError,
    ConnectTimeout,
    DeviceError,
    OutcomeUnknown,
    PeerClosed,
    PeerRejected,
    RdmaConnectError,
)
from rdmaconnect.exchange import service
from rdmaconnect.exchange.channel import Channel
from rdmaconnect.objects import sysfs
from rdmaconnect.session import outgoing
from rdmaconnect.session.ports import choose_ports

PATIENCE_S = 20.0
#: two network devices of each host, all in one subnet; connectors call the second one of ``there``
MINE, THEIRS = ("127.0.0.1", "127.0.0.2"), ("127.0.0.11", "127.0.0.12")
ACCEPT = {"deadline_s": PATIENCE_S}


class Hosts:
    """Devices in software, what the kernel tells of them, and a listener on one of them."""

    def __init__(self, world: ExitStack, ends: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world, self._stack, self._sysfs = world, ends, tmp_path
        monkeypatch.setattr(sysfs, "_DEVICES", str(tmp_path))
        self.software: Software
        self.threads = ends.enter_context(ThreadPoolExecutor(2))

    def have(self, network: Network | None = None, **devices: Sequence[Sequence[str]]) -> Software:
        """Devices by name: for each of their ports its GIDs, each with its network device behind a ``%``."""
        made = []
        for name, ports in devices.items():
            made.append(Device(name, [Port([gid.partition("%")[0] for gid in gids]) for gids in ports]))
            for number, gids in enumerate(ports, 1):
                for index, gid in enumerate(gids):
                    self._tell(f"{name}/ports/{number}/gid_attrs/ndevs/{index}", gid.partition("%")[2])
                    address = raw_gid(gid.partition("%")[0]).hex(":", 2)
                    self._tell(f"{name}/ports/{number}/gids/{index}", address)
        self.software = self._world.enter_context(Software(made, network))
        return self.software

    def _tell(self, path: str, text: str) -> None:
        file = self._sysfs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def listen(self, address: str = THEIRS[1], **options: Any) -> rdmaconnect.Listener:
        return self._stack.enter_context(rdmaconnect.listen(f"{address}:0", **options))

    def both(self, theirs: Mapping[str, Any] | None = None, **mine: Any) -> tuple[Any, Any]:
        listener = self.listen(**{"device": "there", **(theirs or {})})
        here = rdmaconnect.connect(listener.url, **{"device": "here", "deadline_s": PATIENCE_S, **mine})
        self._stack.enter_context(here)
        return here, self._stack.enter_context(listener.accept(deadline_s=PATIENCE_S))

    def fails(self, error: type[RdmaConnectError] | tuple[type[RdmaConnectError], ...], **mine: Any) -> Any:
        listener = self.listen(device="there")
        with pytest.raises(error) as caught:
            rdmaconnect.connect(listener.url, **{"device": "here", "deadline_s": PATIENCE_S, **mine})
        return caught.value


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with ExitStack() as world:
        with ExitStack() as ends:
            made = Hosts(world, ends, tmp_path, monkeypatch)
            yield made
        until(lambda: channels() == 0 and not made.software.left())
        assert made.software.problems() == []


def talk(here: Any, there: Any) -> None:
    here.send(b"there")
    assert there.recv(**ACCEPT) == b"there"
    there.send(b"here")
    assert here.recv(**ACCEPT) == b"here"


# ---- the next way where the proof fails


def flux(message: Message) -> bool:
    """The first network device of each host answers ARP for both its addresses, and drops what is for the other."""
    return message.dgid in (raw_gid(MINE[1]), raw_gid(THEIRS[1]))


def one_direction(message: Message) -> bool:
    """Nothing comes back from the address that was called."""
    return message.sgid == raw_gid(THEIRS[1])


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
@pytest.mark.parametrize("trouble", [flux, one_direction])
def test_two_network_devices_in_one_subnet_on_both_sides(
    hosts: Hosts, qp_type: str, trouble: Callable[[Message], bool]
) -> None:
    software = hosts.have(here=[[MINE[0]], [MINE[1]]], there=[[THEIRS[0]], [THEIRS[1]]])
    software.network.lose(trouble)
    before = time.monotonic()
    here, there = hosts.both(qp_type=qp_type)
    assert pair_of(here) == (MINE[0], THEIRS[0]) == pair_of(there)[::-1]
    assert time.monotonic() - before < PATIENCE_S / 2
    rejected = [line for line in here.path.why if line.startswith("rejected: ")]
    assert THEIRS[1] in rejected[0], "the address that was called comes first"
    assert "arp_ignore, arp_announce and rp_filter" in " ".join(rejected)
    talk(here, there)


def test_many_queue_pairs_go_another_way_together(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]], [MINE[1]]], there=[[THEIRS[0]], [THEIRS[1]]])
    software.network.lose(flux)
    listener = hosts.listen(device="there")
    made = rdmaconnect.connect_many(listener.url, 5, device="here", deadline_s=PATIENCE_S)
    theirs = [listener.accept(**ACCEPT) for _ in made]
    assert {pair_of(connection) for connection in made} == {(MINE[0], THEIRS[0])}
    for connection in (*made, *theirs):
        connection.close()


def test_where_no_way_carries_each_is_named_with_both_gids_and_every_cause(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]]], there=[[THEIRS[0], THEIRS[1]]])
    software.network.lose(lambda message: True)
    before = time.monotonic()
    words = str(hosts.fails((CompletionError, PeerRejected)))
    assert time.monotonic() - before < PATIENCE_S / 2
    for theirs in THEIRS:
        assert f"by ::ffff:{MINE[0]} (RoCE v2) to ::ffff:{theirs} (RoCE v2)" in words or (
            f"by ::ffff:{theirs} (RoCE v2) to ::ffff:{MINE[0]} (RoCE v2)" in words
        )
    for cause in ("UDP port 4791", "arp_ignore", "expects another PSN", "Tried before: "):
        assert cause in words


@pytest.mark.parametrize("qp_type", ["UC", "UD"])
def test_each_way_has_its_share_of_the_deadline_where_only_time_tells(hosts: Hosts, qp_type: str) -> None:
    """RC's device tells that nothing comes through; of the other types only that nothing has come for a while."""
    software = hosts.have(here=[[MINE[0]], [MINE[1]]], there=[[THEIRS[0]], [THEIRS[1]]])
    software.network.lose(lambda message: {message.sgid, message.dgid} != {raw_gid(MINE[1]), raw_gid(THEIRS[0])})
    here, there = hosts.both(qp_type=qp_type, deadline_s=12)  # else it raises
    assert pair_of(here) == (MINE[1], THEIRS[0])
    talk(here, there)


def test_the_end_of_an_earlier_side_channel_that_is_told_late_ends_no_later_one(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers: list[Any] = []

    class Told(Channel):
        def __init__(self, tcp: Any, receiver: Any, *more: Any) -> None:
            receivers.append(receiver)
            super().__init__(tcp, receiver, *more)
            if len(receivers) == 2:
                service.soon(receivers[0].over, PeerClosed("the first one has ended."))

    monkeypatch.setattr(outgoing, "Channel", Told)
    software = hosts.have(here=[[MINE[0]], [MINE[1]]], there=[[THEIRS[0]], [THEIRS[1]]])
    software.network.lose(flux)
    here, there = hosts.both()
    talk(here, there)
    assert len(receivers) == 2


def test_the_only_way_has_all_the_time(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]]], there=[[THEIRS[1]]])
    software.network.lose(lambda message: True)
    before = time.monotonic()
    error = hosts.fails((ConnectTimeout, PeerRejected), qp_type="UC", deadline_s=4)
    assert time.monotonic() - before > 3.5
    assert f"::ffff:{MINE[0]} (RoCE v2) to ::ffff:{THEIRS[1]} (RoCE v2)" in str(error)


def test_what_is_no_fault_of_the_path_ends_it_at_once(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]], [MINE[1]]], there=[[THEIRS[0]], [THEIRS[1]]])

    def is_there(call: Call) -> bool:
        return bool(call["pd"].context.device.name == "there")

    software.on("ibv_create_qp", fail=errno.ENOMEM, where=is_there)
    error = hosts.fails(PeerRejected)
    assert error.errno == errno.ENOMEM
    assert "Tried before" not in str(error)
    assert software.made["qp"] == 1


@pytest.mark.parametrize("ways", [2, 1])
def test_a_ping_pongs_server_waits_for_the_next_way(hosts: Hosts, ways: int) -> None:
    software = hosts.have(here=[[MINE[0]]], there=[[THEIRS[0]], [THEIRS[1]]][-ways:])
    software.network.lose(flux)
    listener = hosts.listen(device="there")
    serving = hosts.threads.submit(first, listener, 2.0)
    if ways > 1:
        with (
            rdmaconnect.connect(listener.url, device="here", deadline_s=PATIENCE_S) as here,
            serving.result(PATIENCE_S) as there,
        ):
            talk(here, there)
    else:
        with pytest.raises((CompletionError, PeerRejected)):
            rdmaconnect.connect(listener.url, device="here", deadline_s=PATIENCE_S)
        with pytest.raises((CompletionError, PeerRejected), match="arp_ignore"):
            serving.result(PATIENCE_S)


# ---- the first way


def test_the_address_that_was_called_is_used(hosts: Hosts) -> None:
    """A VLAN beside its parent, the two in one table: both are as near, and the exchange goes over the VLAN."""
    hosts.have(here=[["127.0.0.5%eth0", f"{MINE[0]}%lo"]], there=[["127.0.0.11%eth0", "127.0.0.12%eth0.100"]])
    here, there = hosts.both()
    assert pair_of(here) == (MINE[0], THEIRS[1])
    assert (here.path.remote_gid.netdev, there.path.local_gid.netdev) == ("eth0.100", "eth0.100")
    assert not any("rejected" in line for line in here.path.why)


def test_of_two_network_devices_with_one_address_that_of_the_route_is_used(hosts: Hosts) -> None:
    hosts.have(here=[["127.0.0.1%eth0", "127.0.0.1%lo"]], there=[["127.0.0.12%eth7", "127.0.0.12%lo"]])
    here, there = hosts.both()
    assert (here.path.local_gid.netdev, here.path.ah_attr.sgid_index) == ("lo", 1)
    assert (there.path.local_gid.netdev, there.path.ah_attr.sgid_index) == ("lo", 1)
    assert here.path.remote_gid.netdev == "lo"


def test_of_two_devices_with_one_address_that_of_the_route_is_used(hosts: Hosts) -> None:
    hosts.have(wrong=[["127.0.0.1%eth0"]], right=[["127.0.0.1%lo"]], there=[["127.0.0.12"]])
    here, _ = hosts.both(device=None)
    assert here.local.port.device == "right"


def test_a_listener_uses_the_device_that_was_called(hosts: Hosts) -> None:
    """Both devices are in one namespace, as with policy routing: the route back starts from another address."""
    hosts.have(a=[[MINE[0]]], b=[[THEIRS[1]]])
    here, there = hosts.both({"device": None}, device=None)
    assert (here.local.port.device, there.local.port.device) == ("a", "b")
    assert not any("rejected" in line for line in here.path.why)


def test_one_address_on_both_hosts_is_not_what_joins_them(hosts: Hosts) -> None:
    hosts.have(here=[["172.17.0.1", MINE[0]]], there=[["172.17.0.1", THEIRS[1]]])
    here, _ = hosts.both()
    assert pair_of(here) == (MINE[0], THEIRS[1])
    assert not any("rejected" in line for line in here.path.why)


def test_an_address_of_another_namespace_is_the_last_to_be_used_and_the_peer_is_told(hosts: Hosts) -> None:
    """198.51.100.0/24 is nobody's here: so a pod sees the GIDs of its host."""
    hosts.have(here=[["198.51.100.1", MINE[0]]], there=[["198.51.100.2", THEIRS[1]]])
    here, there = hosts.both()
    assert pair_of(here) == (MINE[0], THEIRS[1])
    assert [entry.here for entry in there.peer.port.gids] == [False, True]
    assert [entry.here for entry in here.peer.port.gids] == [False, True]


def test_each_end_has_the_patience_that_it_was_given(hosts: Hosts) -> None:
    hosts.have(here=[[MINE[0]]], there=[[THEIRS[1]]])
    here, there = hosts.both({"detect_s": 10}, detect_s=1)
    assert (here.path.timeout, here.path.retry_cnt) == timers_for(1)
    assert (there.path.timeout, there.path.retry_cnt) == timers_for(10)
    attr = here._end.transceiver.qp.query()
    assert (attr.timeout, attr.retry_cnt) == timers_for(1)
    with pytest.raises(ValueError, match=r"detect_s is 0\.2: give 1 to"):
        rdmaconnect.connect("127.0.0.1:1", detect_s=0.2)
    with pytest.raises(ValueError, match="detect_s is 3, which sets timeout"):
        rdmaconnect.listen("127.0.0.1:0", detect_s=3, timeout=14)


# ---- a device that cannot be opened


def refuse_open(software: Software, name: str) -> None:
    software.on("ibv_open_device", fail=errno.EACCES, where=lambda call: call["device"].device.name == name)


def test_a_device_that_cannot_be_opened_and_was_needed_is_named(hosts: Hosts) -> None:
    software = hosts.have(near=[[MINE[0]]], far=[["127.0.0.9"]], there=[[THEIRS[1]]])
    refuse_open(software, "near")
    choice = choose_ports(rdmaconnect.Options(), THEIRS[1])
    (words,) = choice.left_out
    assert str(words).startswith(f"near, which has {MINE[0]}, where the route to the peer starts: open near")
    listener = hosts.listen(device="there")
    software.network.lose(lambda message: True)
    with pytest.raises((CompletionError, PeerRejected), match=rf"Left out: near, which has {MINE[0]}"):
        rdmaconnect.connect(listener.url, deadline_s=PATIENCE_S)


def test_a_listeners_device_that_cannot_be_opened_is_named_where_it_was_needed(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    software = hosts.have(here=[[MINE[0]]], near=[[THEIRS[1]]], other=[["fe80::9"]])
    refuse_open(software, "near")
    listener = hosts.listen()
    software.network.lose(lambda message: True)
    with pytest.raises((CompletionError, PeerRejected)):
        rdmaconnect.connect(listener.url, device="here", deadline_s=PATIENCE_S)
    until(lambda: f"Left out: near, which has {THEIRS[1]}" in caplog.text)


def test_where_another_device_does_what_was_left_out_is_in_why(hosts: Hosts) -> None:
    software = hosts.have(near=[[MINE[0]]], far=[["127.0.0.9"]], there=[[THEIRS[1]]])
    refuse_open(software, "near")
    here, there = hosts.both(device=None)
    assert here.local.port.device == "far" or here.local.port.device == "there"
    assert any(line.startswith(f"left out: near, which has {MINE[0]}") for line in here.path.why)
    talk(here, there)


# ---- reconnecting


def again(hosts: Hosts, here: Any, there: Any) -> None:
    """Connect both ends anew, and talk."""
    waiting = hosts.threads.submit(there.reconnect, deadline_s=PATIENCE_S)
    here.reconnect(deadline_s=PATIENCE_S)
    waiting.result(PATIENCE_S)
    talk(here, there)


def test_reconnect_finds_the_slot_that_the_gid_has_moved_to(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]]], there=[[THEIRS[1]]])
    here, there = hosts.both()
    mine, theirs = (device.ports[0] for device in software.devices)
    for slots in ([None, None], ["127.0.0.77"]):
        mine.gids[:] = [*slots, MINE[0]]
        theirs.gids[:] = [*slots, THEIRS[1]]
        again(hosts, here, there)
        for end in (here, there):
            assert end.path.local_gid.gid_index == end.path.ah_attr.sgid_index == len(slots)
    assert (pair_of(here), here.peer.port.gids[-1].gid_index) == ((MINE[0], THEIRS[1]), 1)


def test_reconnect_without_an_address_says_so_and_may_be_tried_again(hosts: Hosts) -> None:
    software = hosts.have(here=[[MINE[0]]], there=[[THEIRS[1]]])
    here, there = hosts.both()
    software.devices[0].ports[0].gids[:] = []
    with pytest.raises(DeviceError, match="its GID table is empty"):
        here.reconnect(deadline_s=PATIENCE_S)
    software.devices[0].ports[0].gids[:] = [None, MINE[1]]
    again(hosts, here, there)
    assert pair_of(here) == (MINE[1], THEIRS[1])


# ---- anew over another port of the same device, which has the queue pair and the memory

#: in the order of a pair: the hosts, and the addresses that are left
NAMES, OTHERS = ("here", "there"), (MINE[1], THEIRS[0])
TWO_PORTS = {"here": [[MINE[0]], [MINE[1]]], "there": [[THEIRS[0]], [THEIRS[1]]]}


def take_away(software: Software, name: str, port_num: int, how: str) -> None:
    """A port goes down, loses its address, or packets from and to it are dropped."""
    (device,) = (device for device in software.devices if device.name == name)
    port = device.ports[port_num - 1]
    gid = port.gids[0]
    if how == "down":
        port.state = PortState.DOWN
        software.event(name, EventType.PORT_ERR, port_num)
    elif how == "address":
        port.gids[:] = []
        software.event(name, EventType.GID_CHANGE, port_num)
    # what is sent from a slot that is empty has no source
    software.network.lose(lambda message: not message.sgid or raw_gid(gid) in (message.sgid, message.dgid))


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
@pytest.mark.parametrize("how", ["down", "address", "dropped"])
@pytest.mark.parametrize("gone", [("here",), ("there",), ("here", "there")], ids="-".join)
def test_reconnect_takes_another_port_where_the_one_before_is_gone(
    hosts: Hosts, qp_type: str, how: str, gone: Sequence[str]
) -> None:
    software = hosts.have(**TWO_PORTS)
    here, there = hosts.both(qp_type=qp_type)
    before, number = pair_of(here), here._end.transceiver.qp.qp_num
    assert before == (MINE[0], THEIRS[1]), "the address that was called"
    if "here" in gone:
        take_away(software, "here", 1, how)
    if "there" in gone:
        take_away(software, "there", 2, how)
    again(hosts, here, there)
    now = tuple(other if name in gone else one for name, one, other in zip(NAMES, before, OTHERS, strict=True))
    assert pair_of(here) == pair_of(there)[::-1] == now
    assert (here.path.port_num, there.path.port_num) == (1 + ("here" in gone), 2 - ("there" in gone))
    assert here._end.transceiver.qp.qp_num == number


@pytest.mark.parametrize("how", ["down", "address", "dropped"])
def test_a_connection_comes_back_by_itself_over_another_port(hosts: Hosts, how: str) -> None:
    software = hosts.have(**TWO_PORTS)
    auto = {"auto_reconnect": PATIENCE_S}
    box = bytearray(8)
    here, there = hosts.both(auto, regions={"box": box}, **auto)
    take_away(software, "here", 1, how)
    try:
        here.send(b"once")
    except OutcomeUnknown:  # it was on its way when the packets began to be dropped
        came = []
    else:  # an event of the port was faster
        came = [b"once"]
    until(lambda: min(here.generation, there.generation) == 2, PATIENCE_S)
    assert pair_of(here) == (MINE[1], THEIRS[1])
    assert [there.recv(**ACCEPT) for _ in came] == came
    talk(here, there)
    there.write(b"the same", "box")
    assert box == b"the same"


def test_a_port_that_was_asked_for_is_the_only_one(hosts: Hosts) -> None:
    software = hosts.have(**TWO_PORTS)
    here, _ = hosts.both(port_num=1)
    take_away(software, "here", 1, "address")
    with pytest.raises(DeviceError, match="its GID table is empty"):
        here.reconnect(deadline_s=PATIENCE_S)
    assert here.path.port_num == 1
