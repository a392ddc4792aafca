"""Which of this host's ports to use."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..abi import LinkLayer, PortState
from ..agreement.endpoint import Gid, GidEntry, PortAddress
from ..agreement.options import Options
from ..errors import DeviceError, VerbsError
from ..exchange.url import is_address
from ..objects.context import device_names, open_device
from ..objects.device_attr import DeviceAttr
from ..objects.interfaces import interface_index
from ..objects.no_device import why_none
from ..objects.port import Port
from .watch import recall, recalled

__all__ = ["Choice", "choose_ports", "gid_is_here", "known_ports", "rank_ports", "source_addresses"]


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


def _merit(port: Port, sources: Sequence[Gid]) -> tuple[bool, bool, bool]:
    """How well a port suits: it has the address that the route starts from; a routable address; an address here."""
    here = [entry for entry in port.gids if port.link_layer == LinkLayer.INFINIBAND or gid_is_here(entry)]
    return (
        any(entry.gid in sources for entry in here),
        any(not entry.gid.is_link_local for entry in here),
        bool(here),
    )


class Choice(NamedTuple):
    """The ports of this host that could be used.

    Attributes:
        ports: the best first; at least one.
        addresses: what a peer is told of each, the best first; those that have no address are left out.
        certain: whether there will be a sign of every change of this.
    """

    ports: tuple[Port, ...]
    addresses: tuple[PortAddress, ...]
    certain: bool


def rank_ports(options: Options, host: str | None = None) -> list[Port]:
    """The ports that could be used, the best first; see :func:`choose_ports`."""
    return list(choose_ports(options, host).ports)


def choose_ports(options: Options, host: str | None = None) -> Choice:
    """The ports that could be used, and what a peer is told of them.

    An explicit device or port wins. Otherwise: ACTIVE ports, first the one whose GID is the address
    that the kernel's route to ``host`` starts from, then those with an address of this network
    namespace. What was found is remembered while nothing has changed (``watch``).

    Args:
        options: ``device``, ``port_num`` and ``gid_index`` narrow the choice, ``max_rd_atomic`` what a peer is told.
        host: the peer's name or address, if known.

    Raises:
        DeviceError: nothing fits; lists what was seen and what to do.
        VerbsError, LibraryError: as :func:`device_names` and :func:`open_device`.
    """
    asked = _asked(options)
    only = None if options.device is None else (options.device,)

    def toward() -> tuple[Choice, bool]:
        sources = tuple(source_addresses(host)) if host else ()
        choice = recall((asked, sources), only, lambda: _choose(options, sources))
        return choice, choice.certain and (host is None or is_address(host))

    return recall((asked, host), only, toward)


def known_ports(options: Options, host: str | None = None) -> Choice | None:
    """The same if it is remembered, else None. It never blocks."""
    found: Choice | None = recalled((_asked(options), host))
    return found


def _asked(options: Options) -> tuple[object, ...]:
    return options.device, options.port_num, options.gid_index, options.max_rd_atomic


def _choose(options: Options, sources: Sequence[Gid]) -> tuple[Choice, bool]:
    """Read it of the devices."""
    names = [options.device] if options.device is not None else device_names()
    if not names:
        raise DeviceError(f"find an RDMA device: {why_none()}")
    problems: list[str] = []
    wanted_is_missing = False
    found: list[tuple[tuple[bool, bool, bool], Port]] = []
    attrs: dict[str, DeviceAttr] = {}
    for name in names:
        try:
            with open_device(name) as context:
                ports = context.ports() if options.port_num is None else (context.port(options.port_num),)
                attrs[name] = context.attr
        except (VerbsError, DeviceError) as e:
            if options.device is not None or getattr(e, "errno", 0) in (errno.EMFILE, errno.ENFILE):
                raise
            problems.append(str(e).rstrip("."))
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
    return Choice(tuple(best), tuple(_addresses(best, attrs, options)), certain), certain


def _addresses(ports: Sequence[Port], attrs: Mapping[str, DeviceAttr], options: Options) -> Iterator[PortAddress]:
    # a GID index that was asked for means one port's: nothing else is meant
    for port in ports if options.gid_index is None else ports[:1]:
        with contextlib.suppress(DeviceError):
            yield port.address(attrs[port.device], options)
