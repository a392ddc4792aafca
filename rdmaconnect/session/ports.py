"""Which of this host's ports to use."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..abi import LinkLayer, PortState, TransportType
from ..agreement.endpoint import Gid, GidEntry, PortAddress
from ..agreement.options import Options
from ..errors import DeviceError, VerbsError
from ..exchange.url import is_address
from ..objects.context import device_names, open_device
from ..objects.device_attr import DeviceAttr
from ..objects.interfaces import interface_index
from ..objects.netlink import route
from ..objects.no_device import why_none
from ..objects.port import Port
from ..objects.sysfs import kernel_gids
from ..protocol.messages import Target
from .watch import recall, recalled

__all__ = [
    "Choice",
    "LeftOut",
    "choose_ports",
    "gid_is_here",
    "known_ports",
    "mark_here",
    "ports_anew",
    "rank_ports",
    "source_addresses",
    "wanted_port",
]

P = TypeVar("P", Port, PortAddress)


def source_addresses(host: str) -> list[Gid]:
    """The addresses that this host would send from to reach ``host``, by the kernel's routes.

    Args:
        host: a name or an address, IPv6 without brackets.

    Returns:
        One for each address of the host that there is a route to; empty if none. Nothing is sent.

    Raises:
        VerbsError: EMFILE, ENFILE.
    """
    found = []
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # no such name, or nothing that could be one
        return []
    for family, _, _, _, address in infos:
        probe = _datagrams(family)
        if probe is not None:
            with probe, suppress(OSError):
                probe.connect(address)
                found.append(Gid.parse(probe.getsockname()[0]))
    return found


def _datagrams(family: int) -> socket.socket | None:
    """A UDP socket; None where there are none of this family.

    Raises:
        VerbsError: EMFILE, ENFILE.
    """
    try:
        return socket.socket(family, socket.SOCK_DGRAM)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise VerbsError("socket", e.errno, "find the way to the peer") from None
        return None


def gid_is_here(entry: GidEntry) -> bool:
    """Whether the GID is an address of this network namespace: only there can it be bound."""
    address = entry.gid.address
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    probe = _datagrams(family)
    if probe is not None:
        with probe, suppress(OSError):
            scope = interface_index(entry.netdev) if entry.gid.is_link_local and entry.netdev else 0
            probe.bind((str(address), 0) if address.version == 4 else (str(address), 0, 0, scope))
            return True
    return False


def mark_here(port: Port) -> Port:
    """The same port; of its GIDs those are marked that are no address of this network namespace."""
    if port.link_layer == LinkLayer.INFINIBAND:
        return port
    gids = tuple(entry if gid_is_here(entry) else replace(entry, here=False) for entry in port.gids)
    return port if gids == port.gids else replace(port, gids=gids)


def _merit(port: Port, sources: Sequence[Gid]) -> tuple[int, bool, bool]:
    """How well a port suits: it has the address that packets start from; a routable address; an address here."""
    here = [entry.gid for entry in port.gids if entry.here]
    return (
        max((len(sources) - n for n, source in enumerate(sources) if source in here), default=0),
        any(not gid.is_link_local for gid in here),
        bool(here),
    )


def wanted_port(ports: Sequence[Port], target: Target | None) -> Port:
    """The port that the peer wants; the best if it wants none.

    Raises:
        DeviceError: that one cannot be used.
    """
    if target is None:
        return ports[0]
    for port in ports:
        if (port.device, port.port_num) == (target.device, target.port_num):
            return port
    raise DeviceError(f"use {target.device} port {target.port_num}, which the peer wants: it cannot be used here.")


class LeftOut(NamedTuple):
    """A device of this host that could not be looked at.

    Attributes:
        device: its name.
        address: the address that the route to the peer starts from, if the device has it, and so was needed; or "".
        error: why.
    """

    device: str
    address: str
    error: str

    def __str__(self) -> str:
        at = f", which has {self.address}, where the route to the peer starts" if self.address else ""
        return f"{self.device}{at}: {self.error}"


class Choice(NamedTuple):
    """The ports of this host that could be used.

    Attributes:
        ports: the best first; at least one.
        addresses: what a peer is told of each, the best first; those that have no address are left out.
        certain: whether there will be a sign of every change of this.
        left_out: the devices that cannot be opened and so were not looked at.
    """

    ports: tuple[Port, ...]
    addresses: tuple[PortAddress, ...]
    certain: bool
    left_out: tuple[LeftOut, ...] = ()


def rank_ports(options: Options, host: str | None = None) -> list[Port]:
    """The ports that could be used, the best first; see :func:`choose_ports`."""
    return list(choose_ports(options, host).ports)


def choose_ports(options: Options, host: str | None = None, local: str = "") -> Choice:
    """The ports that could be used, and what a peer is told of them.

    An explicit device or port wins. Otherwise: ACTIVE ports, first the one whose GID is the address
    that the exchange goes over, or that the kernel's route to ``host`` starts from, on the network device
    of that route; then those with an address of this network namespace. What was found is remembered
    while nothing has changed (``watch``).

    Args:
        options: ``device``, ``port_num`` and ``gid_index`` narrow the choice, ``max_rd_atomic`` what a peer is told.
        host: the peer's name or address, if known.
        local: this host's address that the peer is talked to from, if known.

    Raises:
        DeviceError: nothing fits; lists what was seen and what to do.
        VerbsError, LibraryError: as :func:`device_names` and :func:`open_device`.
    """
    asked = _asked(options)
    only = None if options.device is None else (options.device,)

    def toward() -> tuple[Choice, bool]:
        known = [Gid.parse(local)] if local else []
        sources = tuple(dict.fromkeys(known + (source_addresses(host) if host else [])))
        choice = recall((asked, sources), only, lambda: _choose(options, sources))
        return _by_route(choice, sources, host or ""), choice.certain and (host is None or is_address(host))

    return recall((asked, host, local), only, toward)


def ports_anew(port: Port, options: Options, host: str | None, local: str = "") -> Choice:
    """The ports that a connection could be connected anew over: of its device, which has its queue pair and memory.

    Args:
        port: the one that it is on: the first if it can still be used, and the only one if none can.
        options, host, local: as of :func:`choose_ports`.

    Raises:
        VerbsError, LibraryError: as :func:`choose_ports`.
    """
    alone = Choice((port,), (), certain=False)
    if options.gid_index is not None:  # which means one port's
        return alone
    try:
        choice = choose_ports(replace(options, device=port.device), host, local)
    except DeviceError:
        return alone

    usable = {address.port_num for address in choice.addresses}

    def last(one: Port | PortAddress) -> tuple[bool, bool]:
        return one.port_num not in usable, one.port_num != port.port_num

    ports, addresses = tuple(sorted(choice.ports, key=last)), tuple(sorted(choice.addresses, key=last))
    return Choice(ports, addresses, choice.certain, choice.left_out)


def known_ports(options: Options, host: str | None = None) -> Choice | None:
    """The same if it is remembered, else None. It never blocks."""
    found: Choice | None = recalled((_asked(options), host, ""))
    return found


def _by_route(choice: Choice, sources: Sequence[Gid], host: str) -> Choice:
    """The same choice; where several network devices have the address that packets start from, theirs first."""
    owners = {(gid, entry.netdev) for p in choice.ports for entry in p.gids for gid in sources if entry.gid == gid}
    if len(owners) == len({gid for gid, _ in owners}):
        return choice
    leaving = {(gid, _netdev_toward(gid, host)) for gid, _ in owners}

    def first(entry: GidEntry) -> bool:
        return (entry.gid, entry.netdev) not in leaving

    def sort(ports: Sequence[P]) -> tuple[P, ...]:
        better = [replace(port, gids=tuple(sorted(port.gids, key=first))) for port in ports]
        return tuple(sorted(better, key=lambda port: all(map(first, port.gids))))

    return Choice(sort(choice.ports), sort(choice.addresses), choice.certain, choice.left_out)


def _netdev_toward(source: Gid, host: str) -> str:
    """The network device that packets from an address of this host to another host leave by; "" if nothing tells."""
    address, _, netdev = host.partition("%")
    if netdev or not is_address(address):
        return netdev
    target = Gid.parse(address).address
    found = route(source.address, target, "") if target.version == source.address.version else None
    return found.netdev if found is not None else ""


def _asked(options: Options) -> tuple[object, ...]:
    return options.device, options.port_num, options.gid_index, options.max_rd_atomic


def _choose(options: Options, sources: Sequence[Gid]) -> tuple[Choice, bool]:
    """Read it of the devices."""
    names = [options.device] if options.device is not None else device_names()
    if not names:
        raise DeviceError(f"find an RDMA device: {why_none()}")
    problems: list[str] = []
    wanted_is_missing = False
    found: list[tuple[tuple[int, bool, bool], Port]] = []
    left_out: list[LeftOut] = []
    attrs: dict[str, DeviceAttr] = {}
    for name in names:
        try:
            with open_device(name) as context:
                whole = context.ports() if options.port_num is None else (context.port(options.port_num),)
                if context.transport_type is TransportType.IWARP:
                    raise DeviceError(
                        f"use {name}: it is of iWARP, whose queue pairs rdma_cm alone connects, and not this exchange: "
                        'see connect("rdma://...").'
                    )
                attrs[name], ports = context.attr, tuple(map(mark_here, whole))
        except (VerbsError, DeviceError) as e:
            if options.device is not None or getattr(e, "errno", 0) in (errno.EMFILE, errno.ENFILE):
                raise
            problems.append(str(e).rstrip("."))
            needed = {source.raw for source in sources} & kernel_gids(name)
            left_out.append(LeftOut(name, str(Gid(min(needed)).address) if needed else "", str(e)))
            continue
        wanted = options.gid_index
        fit = [p for p in ports if wanted is None or options.device or any(g.gid_index == wanted for g in p.gids)]
        found += [(_merit(port, sources), port) for port in fit if port.state == PortState.ACTIVE]
        problems += [f"{port} with {port.gid_words()}" for port in ports if port not in fit]
        wanted_is_missing |= len(fit) < len(ports)
        problems += [str(port) for port in ports if port.state != PortState.ACTIVE]
    if not found and wanted_is_missing:
        raise DeviceError(
            f"use gid_index {options.gid_index}: that slot is empty on every port. Seen: {'; '.join(problems)}. "
            "Addresses come and go, and their slots with them: see `rdmaconnect devices`."
        )
    if not found:
        raise DeviceError(
            f"find an ACTIVE RDMA port: there is none. Seen: {'; '.join(problems)}. "
            "DOWN: bring its network device up (ip link set ... up). INIT: start a subnet manager."
        )
    here = [pair for pair in found if pair[0][2]] or found  # others belong to another network namespace
    best = [port for _, port in sorted(here, key=lambda pair: pair[0], reverse=True)]
    # the MTU of a port whose network device is elsewhere may change without a sign, and so may the rights to a device
    certain = len(attrs) == len(names) and all(merit[2] for merit, _ in here)
    return Choice(tuple(best), tuple(_addresses(best, attrs, options)), certain, tuple(left_out)), certain


def _addresses(ports: Sequence[Port], attrs: Mapping[str, DeviceAttr], options: Options) -> Iterator[PortAddress]:
    # a GID index that was asked for means one port's: nothing else is meant
    for port in ports if options.gid_index is None else ports[:1]:
        with contextlib.suppress(DeviceError):
            yield port.address(attrs[port.device], options)
