"""Devices and ports: the choice among them, with stand-ins for the hardware."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import IB, V1, V2, gid, port

from rdmaconnect.abi import GidType, LinkLayer, Mtu, PortFlags, PortState, TransportType
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.agreement.options import Options
from rdmaconnect.errors import DeviceError, LibraryError, VerbsError
from rdmaconnect.objects import context as device
from rdmaconnect.objects import no_device
from rdmaconnect.objects.context import Port
from rdmaconnect.session import ports
from rdmaconnect.session.ports import rank_ports, source_addresses

#: an address that no host has: a GID that cannot be bound here
FAR = "192.0.2.1"


class Device(device.Context):
    """A context without a device: counts its uses."""

    transport_type = TransportType.IB  # type: ignore[assignment]

    def __init__(self, name: str, ports: tuple[Port, ...], error: Exception | None = None) -> None:
        self.name, self._ports, self.error = name, ports, error
        self.uses = 0

    def ports(self) -> tuple[Port, ...]:
        return self._ports

    @property
    def attr(self) -> Any:
        return SimpleNamespace(max_qp_init_rd_atom=16, max_qp_rd_atom=16)

    def close(self) -> None:
        self.uses -= 1
        assert self.uses >= 0


class Host:
    """Stands in for all the devices of a host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: dict[str, Device] = {}
        self.sources: list[Gid] = []
        self.kernel: list[str] = []
        monkeypatch.setattr(device, "device_names", lambda: list(self.devices))
        monkeypatch.setattr(ports, "device_names", lambda: list(self.devices))
        monkeypatch.setattr(no_device, "kernel_devices", lambda: self.kernel)
        monkeypatch.setattr(no_device, "_NODES", Path("/nowhere"))
        monkeypatch.setattr(ports, "open_device", self.open)
        monkeypatch.setattr(ports, "source_addresses", lambda host: self.sources)

    def has(self, *ports: Port, error: Exception | None = None) -> None:
        self.devices[ports[0].device] = Device(ports[0].device, ports, error)

    def open(self, name: str) -> Device:
        if name not in self.devices:
            raise DeviceError(f"use device {name}: there is no such device.")
        found = self.devices[name]
        if found.error is not None:
            raise found.error
        found.uses += 1
        return found

    def rank(self, host: str | None = None, **options: Any) -> list[tuple[str, int]]:
        found = rank_ports(Options(**options), host)
        assert all(made.uses == 0 for made in self.devices.values()), "a device was left open"
        return [(port.device, port.port_num) for port in found]

    def choose(self, host: str | None = None, **options: Any) -> tuple[str, int]:
        return self.rank(host, **options)[0]

    def refuses(self, error: type[Exception] = DeviceError, **options: Any) -> str:
        with pytest.raises(error) as caught:
            rank_ports(Options(**options))
        assert all(made.uses == 0 for made in self.devices.values()), "a device was left open"
        return str(caught.value)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


# ---- which port


def test_the_only_active_port_is_chosen(host: Host) -> None:
    host.has(
        port(gid("127.0.0.1"), state=PortState.DOWN),
        port(gid("127.0.0.1"), port_num=2),
        port(gid("127.0.0.1"), port_num=3, state=PortState.INIT),
    )
    assert host.choose() == ("rxe0", 2)


def test_the_port_that_the_route_starts_from_comes_first(host: Host) -> None:
    host.has(port(gid("127.0.0.1"), name="rxe0"))
    host.has(port(gid("127.0.0.2"), name="rxe1"))
    host.has(port(gid("127.0.0.3"), name="rxe2"))
    host.sources = [Gid.parse("127.0.0.2")]
    assert host.choose("peer") == ("rxe1", 1)
    assert host.choose() == ("rxe0", 1)


def test_a_port_whose_addresses_are_not_here_comes_last(host: Host) -> None:
    host.has(port(gid(FAR), name="rxe0"))
    host.has(port(gid("127.0.0.2"), name="rxe1"))
    host.sources = [Gid.parse(FAR)]
    assert host.choose("peer") == ("rxe1", 1)


def test_infiniband_ports_need_no_address_here(host: Host) -> None:
    host.has(port(gid(FAR), name="rxe0"))
    host.has(port(gid("fe80::1", IB), name="mlx5_0", link_layer=LinkLayer.INFINIBAND))
    assert host.choose("peer") == ("mlx5_0", 1)


def test_an_explicit_device_wins_over_the_route(host: Host) -> None:
    host.has(port(gid("127.0.0.1"), name="rxe0"))
    host.has(port(gid("127.0.0.2"), name="rxe1"))
    host.sources = [Gid.parse("127.0.0.1")]
    assert host.choose("peer", device="rxe1") == ("rxe1", 1)


def test_an_explicit_port_wins(host: Host) -> None:
    host.has(port(gid("127.0.0.1")), port(gid("127.0.0.2"), port_num=2))
    assert host.choose(port_num=2) == ("rxe0", 2)
    assert host.choose(device="rxe0", port_num=2) == ("rxe0", 2)


def test_a_device_that_cannot_be_opened_is_passed_over(host: Host) -> None:
    host.has(port(name="rxe0"), error=VerbsError("ibv_open_device", errno.EACCES, "open rxe0"))
    host.has(port(gid("127.0.0.1"), name="rxe1"))
    assert host.choose() == ("rxe1", 1)


def test_all_ports_that_could_be_used_are_there_the_best_first(host: Host) -> None:
    host.has(port(gid(FAR), name="rxe0"), port(gid("127.0.0.9"), name="rxe0", port_num=2, state=PortState.DOWN))
    host.has(port(gid("169.254.7.7"), gid("127.0.0.1"), name="rxe1"), port(gid("127.0.0.2"), name="rxe1", port_num=2))
    host.sources = [Gid.parse("127.0.0.2")]
    assert host.rank("peer") == [("rxe1", 2), ("rxe1", 1)]
    assert host.rank() == [("rxe1", 1), ("rxe1", 2)]
    assert host.rank("peer", device="rxe1") == [("rxe1", 2), ("rxe1", 1)]
    assert host.rank("peer", device="rxe1", port_num=1) == [("rxe1", 1)]


def test_ports_of_another_network_namespace_are_there_only_if_there_are_no_others(host: Host) -> None:
    host.has(port(gid(FAR), name="rxe0"))
    host.has(port(name="rxe1"))
    assert host.rank() == [("rxe0", 1), ("rxe1", 1)]
    host.has(port(gid("fe80::1", IB), name="mlx5_0", link_layer=LinkLayer.INFINIBAND))
    assert host.rank() == [("mlx5_0", 1)]
    assert host.rank(device="rxe0") == [("rxe0", 1)]


def test_a_device_without_the_port_asked_for_is_passed_over_if_another_has_it(host: Host) -> None:
    host.has(port(gid("127.0.0.1"), name="rxe0"))
    host.has(port(gid("127.0.0.2"), name="rxe1"), port(gid("127.0.0.3"), name="rxe1", port_num=2))
    assert host.rank(port_num=2) == [("rxe1", 2)]
    assert "Seen: use port 3 of rxe0: it has port 1; use port 3 of rxe1: it has ports 1, 2." in host.refuses(port_num=3)


# ---- what is said where nothing fits


def test_no_device_says_how_to_get_one(host: Host) -> None:
    words = host.refuses()
    assert words.startswith("find an RDMA device: there is none. Load its driver (SoftRoCE: `modprobe rdma_rxe; ")
    assert "in a container pass /dev/infiniband" in words


def test_a_device_of_another_namespace_in_exclusive_mode_is_told_by_its_node(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    (tmp_path / "uverbs0").touch()
    (tmp_path / "rdma_cm").touch()
    monkeypatch.setattr(no_device, "_NODES", tmp_path)
    monkeypatch.setattr(no_device.os, "open", refuse)
    words = host.refuses()
    assert words.startswith(f"find an RDMA device: there is none for this process. open {tmp_path}/uverbs0: ")
    assert "ibv_open_device: EPERM (1), Operation not permitted. A device cgroup or the RDMA network-namesp" in words
    assert "`rdma system show` (exclusive mode hides devices of other namespaces)" in words


def test_a_node_that_can_be_opened_is_no_reason(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(no_device, "_NODES", tmp_path)
    assert host.refuses().startswith("find an RDMA device: there is none. Load its driver")


def test_devices_that_only_the_kernel_sees_are_named(host: Host) -> None:
    host.kernel = ["mlx5_0", "mlx5_1"]
    words = host.refuses()
    assert words.startswith("find an RDMA device: the kernel has mlx5_0, mlx5_1, but this process cannot use them: ")
    assert "pass --device /dev/infiniband" in words


def test_a_gid_index_that_no_port_has_is_told_with_what_there_is(host: Host) -> None:
    host.has(port(gid("10.0.0.1")))
    words = host.refuses(gid_index=7)
    assert words.startswith(
        "use gid_index 7: that slot is empty on every port. Seen: rxe0 port 1 ACTIVE (ETHERNET) with"
    )
    assert "(::ffff:10.0.0.1, " in words
    assert "bring its network device up" not in words


def test_without_descriptors_nothing_is_said_of_ports(host: Host) -> None:
    host.has(port(name="rxe1"), error=VerbsError("ibv_query_pkey", errno.EMFILE))
    words = host.refuses(VerbsError)
    assert words.startswith("ibv_query_pkey: EMFILE (24), Too many open files. No file descriptor is left: raise the ")


def test_no_active_port_lists_what_was_seen(host: Host) -> None:
    host.has(port(name="rxe0", state=PortState.DOWN))
    host.has(port(name="mlx5_0", port_num=2, state=PortState.INIT, link_layer=LinkLayer.INFINIBAND))
    host.has(port(name="rxe1"), error=VerbsError("ibv_open_device", errno.EACCES, "open rxe1"))
    words = host.refuses()
    assert words.startswith(
        "find an ACTIVE RDMA port: there is none. Seen: rxe0 port 1 DOWN (ETHERNET); "
        "mlx5_0 port 2 INIT (INFINIBAND); open rxe1: ibv_open_device: EACCES (13), Permission denied."
    )
    assert words.endswith("DOWN: bring its network device up (ip link set ... up). INIT: start a subnet manager.")


def test_an_explicit_device_that_is_not_there_is_an_error_though_others_are(host: Host) -> None:
    host.has(port(gid("127.0.0.1")))
    assert host.refuses(device="rxe9") == "use device rxe9: there is no such device."


def test_an_explicit_device_that_cannot_be_opened_is_an_error_though_others_could(host: Host) -> None:
    host.has(port(gid("127.0.0.1"), name="rxe0"))
    host.has(port(name="rxe1"), error=VerbsError("ibv_open_device", errno.EACCES, "open rxe1"))
    assert host.refuses(VerbsError, device="rxe1").startswith("open rxe1: ibv_open_device: EACCES")


def test_an_explicit_port_that_is_not_there_is_told_with_those_that_are(host: Host) -> None:
    host.has(port(gid("127.0.0.1")))
    assert host.refuses(device="rxe0", port_num=2) == "use port 2 of rxe0: it has port 1."
    host.has(port(name="two"), port(name="two", port_num=2))
    assert host.refuses(device="two", port_num=3) == "use port 3 of two: it has ports 1, 2."


def test_an_explicit_port_that_is_down_is_not_replaced_by_another(host: Host) -> None:
    host.has(port(gid("127.0.0.1")), port(port_num=2, state=PortState.DOWN))
    assert "Seen: rxe0 port 2 DOWN (ETHERNET)." in host.refuses(device="rxe0", port_num=2)


@pytest.mark.parametrize(
    "error", [VerbsError("ibv_get_device_list", errno.ENOSYS, "list RDMA devices"), LibraryError("load x: no.")]
)
def test_no_library_and_no_kernel_support_come_out_as_they_are(
    host: Host, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> list[str]:
        raise error

    monkeypatch.setattr(ports, "device_names", fail)
    assert host.refuses(type(error)) == str(error)


def test_an_unknown_device_is_told_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.verbs, "ibv_get_device_list", lambda: (None, []))
    monkeypatch.setattr(device.verbs, "ibv_free_device_list", lambda array: None)
    monkeypatch.setattr(no_device, "kernel_devices", list)
    monkeypatch.setattr(no_device, "_NODES", Path("/nowhere"))
    with pytest.raises(DeviceError, match=r"^use device rxe9: there is no such device\. There is none\. Load its"):
        device.open_device("rxe9")


# ---- what a peer is told of a port


def attr(**fields: int) -> Any:
    return SimpleNamespace(**{"max_qp_rd_atom": 16, "max_qp_init_rd_atom": 128} | fields)


TABLE = (gid("fe80::1", V1, 0), gid("10.0.0.1", V1, 1), gid("10.0.0.1", V2, 2))


def test_a_port_tells_its_whole_table() -> None:
    made = port(*TABLE, flags=PortFlags.GRH_REQUIRED, pkeys=(0xFFFF, 0x8005), lid=7, port_num=2)
    told = made.address(attr(), Options())
    assert (told.device, told.port_num, told.lid, told.gids) == ("rxe0", 2, 7, TABLE)
    assert (told.grh_required, told.pkeys, told.active_mtu) == (True, (0xFFFF, 0x8005), Mtu.MTU_1024)
    assert (told.max_rd_atomic, told.max_dest_rd_atomic) == (128, 16)


def test_an_explicit_gid_index_leaves_no_other() -> None:
    assert port(*TABLE).address(attr(), Options(gid_index=1)).gids == TABLE[1:2]


def test_an_empty_slot_is_refused_with_the_table() -> None:
    with pytest.raises(DeviceError) as caught:
        port(*TABLE).address(attr(), Options(gid_index=9))
    assert str(caught.value) == (
        "use gid_index 9 of rxe0 port 1: that slot is empty. There are gid_index 0 (fe80::1, RoCE v1), "
        "gid_index 1 (::ffff:10.0.0.1, RoCE v1), gid_index 2 (::ffff:10.0.0.1, RoCE v2)."
    )
    with pytest.raises(DeviceError, match=r"There are no GIDs\."):
        port().address(attr(), Options(gid_index=0))


def test_ethernet_needs_a_gid_and_infiniband_does_not() -> None:
    with pytest.raises(DeviceError, match=r"^use rxe0 port 1: its GID table is empty\. Give its network device an"):
        port().address(attr(), Options())
    assert port(link_layer=LinkLayer.INFINIBAND, lid=5).address(attr(), Options()).gids == ()


@pytest.mark.parametrize(
    ("wish", "issues", "answers", "told"),
    [
        (None, 128, 16, (128, 16)),
        (4, 128, 16, (4, 4)),
        (0, 128, 16, (0, 0)),
        (None, 1000, 300, (255, 255)),
        (64, 0, 1, (0, 1)),
    ],
)
def test_reads_outstanding_are_the_devices_the_wish_and_8_bits(
    wish: int | None, issues: int, answers: int, told: tuple[int, int]
) -> None:
    limits = attr(max_qp_init_rd_atom=issues, max_qp_rd_atom=answers)
    found = port(*TABLE).address(limits, Options(max_rd_atomic=wish))
    assert (found.max_rd_atomic, found.max_dest_rd_atomic) == told


def test_a_port_says_its_name_state_and_kind() -> None:
    assert str(port()) == "rxe0 port 1 ACTIVE (ETHERNET)"
    assert str(replace(port(), state=PortState(9))) == "rxe0 port 1 unknown (9) (ETHERNET)"
    assert port(gid("10.0.0.1", GidType(9))).gid_words() == "gid_index 0 (::ffff:10.0.0.1, unknown (9))"


# ---- where a route starts


@pytest.mark.parametrize(("host", "source"), [("127.0.0.1", "127.0.0.1"), ("127.9.9.9", "127.0.0.1")])
def test_the_source_of_a_route_is_the_kernels_choice(host: str, source: str) -> None:
    assert source_addresses(host) == [Gid.parse(source)]


def test_the_source_of_a_route_over_ipv6() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("::1", 9))
        except OSError as e:
            pytest.skip(f"no IPv6 here: {e}")
    assert source_addresses("::1") == [Gid.parse("::1")]


def answers(*found: tuple[int, Any]) -> Any:
    return lambda host, port, type: [(family, type, 0, "", address) for family, address in found]


def test_a_name_has_a_source_for_each_address_that_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = (socket.AF_INET, ("255.255.255.255", 9))  # broadcast needs a permission
    here = (socket.AF_INET, ("127.0.0.1", 9))
    monkeypatch.setattr(ports.socket, "getaddrinfo", answers(unreachable, here, here))
    assert source_addresses("name") == [Gid.parse("127.0.0.1")] * 2


def test_a_name_that_does_not_resolve_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(ports.socket, "getaddrinfo", fail)
    assert source_addresses("no-such-host") == []


# ---- one context for all users


class Library:
    """Stands in for libibverbs: one device, which may refuse to be opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.error: VerbsError | None = None
        handle = SimpleNamespace(contents=SimpleNamespace(dev_name=b"uverbs-none"))
        monkeypatch.setattr(device.verbs, "ibv_get_device_list", lambda: self.note("list", (None, [handle])))
        monkeypatch.setattr(device.verbs, "ibv_free_device_list", lambda array: self.note("free"))
        monkeypatch.setattr(device.verbs, "ibv_get_device_name", lambda pointer: "rxe0")
        monkeypatch.setattr(device.verbs, "ibv_open_device", self.open)
        monkeypatch.setattr(device.verbs, "ibv_close_device", lambda pointer: self.note("close"))

    def note(self, call: str, result: Any = None) -> Any:
        self.calls.append(call)
        return result

    def open(self, pointer: Any, doing: str) -> object:
        self.note("open")
        if self.error is not None:
            raise self.error
        return object()


def test_a_device_is_opened_once_and_closed_with_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    assert device.device_names() == ["rxe0"]
    one, two = device.open_device("rxe0"), device.open_device("rxe0")
    assert one.pointer is two.pointer
    assert one.is_same(two)
    one.close()
    assert one.closed
    assert not two.closed
    two.close()
    two.close()
    assert two.closed
    assert library.calls == ["list", "free", "list", "open", "free", "close"]
    three = device.open_device("rxe0")
    assert not three.is_same(two)
    three.close()


def test_who_closes_twice_takes_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    one, two = device.open_device("rxe0"), device.open_device("rxe0")
    one.close()
    one.close()
    assert not two.closed
    two.close()
    assert library.calls.count("close") == 1


def test_a_device_that_cannot_be_opened_says_what_its_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch)
    library.error = VerbsError("ibv_open_device", errno.EIO)
    with pytest.raises(VerbsError) as caught:
        device.open_device("rxe0")
    assert caught.value.errno == errno.ENOENT
    assert str(caught.value).startswith("open rxe0 (/dev/infiniband/uverbs-none): ibv_open_device: ENOENT (2), ")
    assert "pass --device /dev/infiniband" in str(caught.value)
    assert library.calls == ["list", "open", "free"]
