"""What RDMA hardware this host has, and which port to use for a peer."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath

from . import handle, verbs
from .abi import GidType, LinkLayer, Mtu, PortFlags, PortState, ibv_device_attr
from .endpoint import Gid, GidEntry, Options, PortAddress
from .errors import DeviceError, VerbsError
from .handle import Owned

__all__ = ["Context", "Port", "device_names", "open_device", "rank_ports", "source_addresses"]

_SYSFS = FilePath("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Port:
    """A port as it is now.

    Args:
        device: the device's name.
        port_num: from 1.
        state: only ACTIVE carries data; INIT on InfiniBand means that there is no subnet manager.
        link_layer: InfiniBand or Ethernet.
        lid, sm_lid: 16 bits; 0 on Ethernet.
        max_mtu, active_mtu: MTU codes.
        flags: ``IBV_QPF_*``.
        max_msg_sz: longest message, bytes.
        pkeys: the P_Key table by value.
        gids: the GID table without its empty slots.
    """

    device: str
    port_num: int
    state: PortState
    link_layer: LinkLayer
    lid: int
    sm_lid: int
    max_mtu: Mtu
    active_mtu: Mtu
    flags: PortFlags
    max_msg_sz: int
    pkeys: tuple[int, ...]
    gids: tuple[GidEntry, ...]

    def address(self, attr: ibv_device_attr, options: Options) -> PortAddress:
        """What a peer is told of this port.

        Args:
            attr: the device's limits.
            options: ``gid_index`` and ``max_rd_atomic`` narrow it.

        Raises:
            DeviceError: ``gid_index`` is an empty slot, or no GID is usable; lists the table.
        """
        gids = self.gids
        if options.gid_index is not None:
            gids = tuple(entry for entry in gids if entry.gid_index == options.gid_index)
            if not gids:
                raise DeviceError(
                    f"use gid_index {options.gid_index} of {self.device} port {self.port_num}: that slot is empty. "
                    f"There are {self.gid_words()}."
                )
        elif not gids and self.link_layer == LinkLayer.ETHERNET:
            raise DeviceError(
                f"use {self.device} port {self.port_num}: its GID table is empty. "
                "Give its network device an address (ip addr add), or run in the network namespace that has it."
            )
        most = 255 if options.max_rd_atomic is None else options.max_rd_atomic
        return PortAddress(
            device=self.device,
            port_num=self.port_num,
            link_layer=self.link_layer,
            lid=self.lid,
            active_mtu=self.active_mtu,
            gids=gids,
            grh_required=bool(self.flags & PortFlags.GRH_REQUIRED),
            pkeys=self.pkeys,
            max_rd_atomic=min(attr.max_qp_init_rd_atom, most, 255),
            max_dest_rd_atomic=min(attr.max_qp_rd_atom, most, 255),
        )

    def gid_words(self) -> str:
        """The GID table in words."""
        return ", ".join(map(str, self.gids)) or "no GIDs"

    def __str__(self) -> str:
        return f"{self.device} port {self.port_num} {self.state} ({self.link_layer})"


class Context(Owned):
    """An opened device; made by :func:`open_device`, which shares one among all its users here.

    Attributes:
        name: the device's name.
    """

    def __init__(self, pointer: object, name: str) -> None:
        super().__init__(pointer, name)
        self._uses = 1

    def close(self) -> None:
        """Give one use back; the last one closes the device, and first all that was made from it."""
        with _lock:
            self._uses -= 1
            if self._uses > 0 or self.closed:
                return
            _opened.pop((self._made_in, self.name), None)
        super().close()

    def _release(self, pointer: object) -> None:
        verbs.ibv_close_device(pointer)

    def query_device(self) -> ibv_device_attr:
        """The device's limits. Source: ibv_query_device(3)."""
        return verbs.ibv_query_device(self.pointer)

    def ports(self) -> tuple[Port, ...]:
        """All ports as they are now. Source: ibv_query_port(3), ibv_query_gid_table(3)."""
        return tuple(self._ports())

    def port(self, port_num: int) -> Port:
        """One port as it is now.

        Raises:
            DeviceError: if the device has no such port.
        """
        ports = self.ports()
        for port in ports:
            if port.port_num == port_num:
                return port
        raise DeviceError(f"use port {port_num} of {self.name}: it has port{'s' * (len(ports) > 1)} "
                          f"{', '.join(str(port.port_num) for port in ports)}.")  # fmt: skip

    def _ports(self) -> Iterator[Port]:
        pointer = self.pointer
        numbers = range(1, self.query_device().phys_port_cnt + 1)
        attrs = {number: verbs.ibv_query_port(pointer, number) for number in numbers}
        table = verbs.ibv_query_gid_table(pointer, max(1, sum(attr.gid_tbl_len for attr in attrs.values())))
        for number, attr in attrs.items():
            gids = tuple(
                GidEntry(Gid(bytes(entry.gid.raw)), GidType(entry.gid_type), entry.gid_index, self._netdev(entry))
                for entry in table
                if entry.port_num == number and any(entry.gid.raw)
            )
            yield Port(
                device=self.name,
                port_num=number,
                state=PortState(attr.state),
                link_layer=LinkLayer(attr.link_layer or LinkLayer.INFINIBAND),
                lid=attr.lid,
                sm_lid=attr.sm_lid,
                max_mtu=Mtu(attr.max_mtu),
                active_mtu=Mtu(attr.active_mtu),
                flags=PortFlags(attr.flags),
                max_msg_sz=attr.max_msg_sz,
                pkeys=tuple(verbs.ibv_query_pkey(pointer, number, i) for i in range(attr.pkey_tbl_len)),
                gids=gids,
            )

    def _netdev(self, entry: object) -> str:
        """The netdev of a GID by name; from sysfs, since an index means another device in another namespace."""
        port, index = entry.port_num, entry.gid_index  # type: ignore[attr-defined]
        try:
            return (_SYSFS / self.name / f"ports/{port}/gid_attrs/ndevs/{index}").read_text().strip()
        except OSError:
            return ""


_lock = threading.RLock()
_opened: dict[tuple[int, str], Context] = {}


@contextmanager
def _device_list() -> Iterator[dict[str, tuple[object, str]]]:
    """name -> (pointer, uverbs node's name), while the list is held."""
    array, devices = verbs.ibv_get_device_list()
    try:
        yield {verbs.ibv_get_device_name(d): (d, d.contents.dev_name.decode()) for d in devices}
    finally:
        verbs.ibv_free_device_list(array)


def device_names() -> list[str]:
    """The names of the devices that this process can see, in the library's order.

    Raises:
        LibraryError: libibverbs is missing.
        VerbsError: ENOSYS where the kernel has no RDMA.
    """
    with _device_list() as devices:
        return list(devices)


def open_device(name: str) -> Context:
    """Open a device, or take another use of it if it is open here already.

    Args:
        name: as :func:`device_names` lists it.

    Returns:
        The context; each use is given back with ``close``.

    Raises:
        DeviceError: no such device; lists those there are.
        VerbsError: it cannot be opened; ENOENT, EACCES and EPERM told apart.
    """
    with _lock:
        context = _opened.get((handle._generation, name))
        if context is not None:
            context._uses += 1
            return context
        with _device_list() as devices:
            if name not in devices:
                raise DeviceError(f"use device {name}: there is no such device. {_seen(list(devices))}")
            device, node = devices[name]
            try:
                pointer = verbs.ibv_open_device(device, doing=f"open {name}")
            except VerbsError as e:
                raise _why_not_opened(name, node, e) from None
        context = _opened[handle._generation, name] = Context(pointer, name)
        return context


def _why_not_opened(name: str, node: str, error: VerbsError) -> VerbsError:
    """The library's errno is not reliable here: open the node again and see."""
    try:
        os.close(os.open(f"/dev/infiniband/{node}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        return VerbsError("ibv_open_device", e.errno or errno.EIO, f"open {name} (/dev/infiniband/{node})")
    return error


def _seen(names: list[str]) -> str:
    return f"There is {', '.join(names)}." if names else "There is none."


def source_addresses(host: str) -> list[Gid]:
    """The addresses that this host would send from to reach ``host``, by the kernel's routes.

    Args:
        host: a name or an address, IPv6 without brackets.

    Returns:
        One for each address of the host that there is a route to; empty if none. Nothing is sent.
    """
    found = []
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    for family, kind, proto, _, address in infos:
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            found.append(Gid.parse(probe.getsockname()[0]))
    return found


def _is_local(entry: GidEntry) -> bool:
    """Whether the GID is an address of this network namespace: only there can it be bound."""
    address = entry.gid.address
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            scope = socket.if_nametoindex(entry.netdev) if entry.gid.is_link_local and entry.netdev else 0
            probe.bind((str(address), 0) if address.version == 4 else (str(address), 0, 0, scope))
        except OSError:
            return False
    return True


def _merit(port: Port, sources: list[Gid]) -> tuple[bool, bool, bool]:
    """How well a port suits: it has the address that the route starts from; a routable address; an address here."""
    here = [entry for entry in port.gids if port.link_layer == LinkLayer.INFINIBAND or _is_local(entry)]
    return (
        any(entry.gid in sources for entry in here),
        any(not entry.gid.is_link_local for entry in here),
        bool(here),
    )


def rank_ports(options: Options, host: str | None = None) -> list[Port]:
    """The ports that could be used, the best first.

    An explicit device or port wins. Otherwise: ACTIVE ports, first the one whose GID is the address
    that the kernel's route to ``host`` starts from, then those with an address of this network
    namespace.

    Args:
        options: ``device``, ``port_num`` and ``gid_index`` narrow the choice.
        host: the peer's name or address, if known.

    Returns:
        At least one port.

    Raises:
        DeviceError: nothing fits; lists what was seen and what to do.
        VerbsError, LibraryError: as :func:`device_names` and :func:`open_device`.
    """
    names = [options.device] if options.device is not None else device_names()
    if not names:
        raise DeviceError(
            "find an RDMA device: there is none. Load its driver (SoftRoCE: `modprobe rdma_rxe; rdma link add rxe0 "
            "type rxe netdev eth0`); in a container pass /dev/infiniband and see `rdma system show`."
        )
    sources = source_addresses(host) if host else []
    problems: list[str] = []
    found: list[tuple[tuple[bool, bool, bool], Port]] = []
    for name in names:
        try:
            with open_device(name) as context:
                ports = context.ports() if options.port_num is None else (context.port(options.port_num),)
        except VerbsError as e:
            if options.device is not None:
                raise
            problems.append(str(e))
            continue
        found += [(_merit(port, sources), port) for port in ports if port.state == PortState.ACTIVE]
        problems += [str(port) for port in ports if port.state != PortState.ACTIVE]
    if not found:
        raise DeviceError(
            f"find an ACTIVE RDMA port: there is none. Seen: {'; '.join(problems)}. "
            "DOWN: bring its network device up (ip link set ... up). INIT: start a subnet manager."
        )
    return [port for _, port in sorted(found, key=lambda pair: pair[0], reverse=True)]
