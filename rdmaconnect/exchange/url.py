"""Where a host listens for the exchange: what a caller gives, its ``tcp://`` url, and the addresses of a name."""

from __future__ import annotations

import encodings.idna  # noqa: F401  the first look-up loads it, and fails where there are no descriptors to read it by
import ipaddress
import re
import socket
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import shown

__all__ = [
    "DEFAULT_PORT", "Address", "addresses", "host_of", "is_address", "is_rdma", "loopback_of", "port_of", "rdma_url",
    "tcp_url",
]  # fmt: skip

#: the TCP port of the exchange
DEFAULT_PORT = 18515
#: a name or IPv4 address, or IPv6 in brackets, and perhaps a port; or IPv6 without brackets, and no port
_ADDRESS = re.compile(
    r"(?P<host>[^:/\[\]]*|\[[^/\[\]]*\])(?::(?P<port>[0-9]{1,5}))?|(?P<v6>[^:/\[\]]*:[^/\[\]]*:[^/\[\]]*)", re.ASCII
)
#: RFC 1035, 2.3.4: octets of a name without its last dot, and of a label
_NAME_MAX, _LABEL_MAX = 253, 63


class Address(NamedTuple):
    """One address of a host, as a socket takes it.

    Attributes:
        family: ``AF_INET`` or ``AF_INET6``.
        sockaddr: what ``connect`` and ``bind`` of a socket of that family take.
        interface: for a link-local IPv6 address, the name of the interface whose link it is on; else "".
    """

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    interface: str = ""

    def __str__(self) -> str:
        host, port = self.sockaddr[:2]
        zone = f"%{self.interface}" if self.interface else ""
        return f"[{host}{zone}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


# ---- what a caller gives; pure


def tcp_url(peer: str, *, bind: bool = False, port: int = DEFAULT_PORT) -> str:
    """The url of a peer.

    Args:
        peer: ``"host"``, ``"host:port"``, ``"[v6]:port"``, ``":port"`` or ``"*"`` when binding, or a
            ``tcp://`` url.
        bind: whether it is to listen there; then an empty host means all addresses.
        port: the TCP port where ``peer`` names none.

    Returns:
        ``tcp://host:port``, IPv6 in brackets.

    Raises:
        ValueError: naming what was given.
    """
    if not isinstance(peer, str):
        raise TypeError(f"the peer is {shown(peer)}: give a text such as 'host' or 'host:port'")
    if is_rdma(peer):
        raise ValueError(f"the peer is {shown(peer)}: only connect() and listen() go by rdma_cm. Give a tcp:// url")
    if "://" in peer and not peer.strip().startswith("tcp://"):
        raise ValueError(f"the peer is {shown(peer)}: only tcp:// urls are spoken, and rdma:// ones by rdma_cm")
    return _url("tcp://", peer, bind, port)


def is_rdma(peer: object) -> bool:
    """Whether what a caller gave is an ``rdma://`` url: there rdma_cm is the exchange."""
    return isinstance(peer, str) and peer.lstrip().startswith("rdma://")


def rdma_url(peer: str, *, bind: bool = False) -> str:
    """The url of a peer that rdma_cm connects to: as :func:`tcp_url`, but ``rdma://``, whose ports are its own."""
    return _url("rdma://", peer, bind, DEFAULT_PORT)


def _url(scheme: str, peer: str, bind: bool, port: int) -> str:
    found = _ADDRESS.fullmatch(peer.strip().removeprefix(scheme))
    host, number = (found["host"] or found["v6"] or "", int(found["port"] or port)) if found else ("", 0)
    if not found or (not bind and host in ("", "*")) or number > 65535 or not (bind or number):
        raise ValueError(f"the peer is {shown(peer)}: give 'host' or 'host:port' with a port of 1 to 65535")
    v6 = host.startswith("[") or ":" in host
    host = host.strip("[]") if v6 else host or "*"
    if host != "*" and (fault := _fault(host, v6)):
        raise ValueError(f"the peer is {shown(peer)}: {fault}")
    return f"{scheme}[{host}]:{number}" if v6 else f"{scheme}{host}:{number}"


def host_of(url: str) -> str:
    """The host in a ``tcp://`` or ``rdma://`` url, IPv6 without its brackets."""
    return url.partition("://")[2].rpartition(":")[0].strip("[]")


def port_of(url: str) -> int:
    """The port in a ``tcp://`` or ``rdma://`` url."""
    return int(url.rpartition(":")[2])


def _fault(host: str, v6: bool) -> str:
    """In words, why a host cannot be one of that spelling; "" if it can."""
    if v6:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as e:
            return f"{e}. Give an IPv6 address, such as ::1 or fe80::1%eth0"
        return ""
    if not host.isascii():
        return "a name is ASCII. Give the form of it that begins with xn--, or an address"
    if odd := re.search(r"[^\w.-]", host, re.ASCII):
        return f"a name of a host has no {odd[0]!r} in it. Give a name or an address"
    name = host.removesuffix(".")
    longest = max(map(len, name.split(".")))
    if len(name) > _NAME_MAX or longest > _LABEL_MAX:
        return (
            f"it has {len(name)} characters, {longest} between two dots: "
            f"a name has at most {_NAME_MAX}, and {_LABEL_MAX} between two dots"
        )
    if not all(name.split(".")):
        return "there is nothing before or between its dots. Give a name or an address"
    return ""


def is_address(host: str) -> bool:
    """Whether a host is given by its address: nobody has to be asked for it."""
    return _literal(host) is not None


@lru_cache(256)
def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# ---- the addresses of a host


def addresses(host: str, port: int, *, bind: bool = False) -> list[Address]:
    """The addresses to try, the one that the system prefers first (RFC 6724), each of them once.

    A name is looked up, which blocks for as long as the name servers do. An IPv4 address that is mapped into
    IPv6 is taken as IPv4.

    Args:
        host: a name, an IPv4 address, an IPv6 address without brackets, with ``%interface`` if it is link-local.
        port: the TCP port; 0, when binding, for a free one.
        bind: whether it is to listen there; then ``"*"`` and "" mean all addresses of this host: ``::``, which
            takes IPv4 too unless the socket is told otherwise, and after it 0.0.0.0, for a kernel without IPv6.

    Returns:
        At least one.

    Raises:
        ValueError: it cannot be a host, it does not resolve, or a link-local address lacks its interface.
        OSError: the look-up was not possible, for want of descriptors for example.
    """
    deed = f"{'listen on' if bind else 'connect to'} {host}"
    if bind and host in ("", "*"):
        return [Address(socket.AF_INET6, ("::", port, 0, 0)), Address(socket.AF_INET, ("0.0.0.0", port))]
    if fault := _fault(host, ":" in host):
        raise ValueError(f"the host is {shown(host)}: {fault}")
    literal = _literal(host)
    if literal is not None:
        try:
            return [_numeric(literal, port)]
        except _NoInterfaceError as e:
            raise ValueError(f"{deed}: {e}") from None
    found: dict[Address, None] = {}
    faults = []
    for text in _look_up(host, deed):
        try:
            found[_numeric(ipaddress.ip_address(text), port)] = None
        except _NoInterfaceError as e:
            faults.append(str(e))
    if not found:
        raise ValueError(f"{deed}: the name stands for {text}, and {faults[-1]}")
    return list(found)


def _look_up(host: str, deed: str) -> list[str]:
    """The addresses of a name as texts, IPv6 with the number of its scope. Blocks."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as e:
        if e.errno == socket.EAI_AGAIN:
            raise ValueError(
                f"{deed}: the name servers gave no answer ({e.strerror}). "
                "Check /etc/resolv.conf and the network to them, or give an address"
            ) from None
        raise ValueError(
            f"{deed}: the name does not resolve ({e.strerror}). Check its spelling, or give an address"
        ) from None
    except UnicodeError as e:
        raise ValueError(f"{deed}: the name does not resolve ({e}). Check its spelling, or give an address") from None
    except OSError as e:
        raise OSError(e.errno, f"{deed}: look up the name: {e.strerror}. Give an address, or see to that") from None
    texts = []
    for info in infos:
        sockaddr: tuple[Any, ...] = info[4]  # of IPv6: address, port, flow, scope
        text, scope = str(sockaddr[0]).partition("%")[0], sockaddr[3:]
        texts.append(f"{text}%{scope[0]}" if any(scope) else text)
    return texts


class _NoInterfaceError(ValueError):
    """A link-local address without an interface that is there."""


def _numeric(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> Address:
    """An address of this host's socket interface.

    Raises:
        _NoInterfaceError: a link-local address and its interface do not go together.
    """
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if isinstance(address, ipaddress.IPv4Address):
        return Address(socket.AF_INET, (str(address), port))
    zone, plain = address.scope_id or "", str(address).partition("%")[0]
    if not address.is_link_local:
        if zone:
            raise _NoInterfaceError(f"only a link-local address has an interface: leave %{zone} out")
        return Address(socket.AF_INET6, (plain, port, 0, 0))
    # asked of the list and not by name: for a name that is not there the kernel would look for a module to load
    interfaces = dict(socket.if_nameindex())
    index = next((i for i, name in interfaces.items() if zone in (name, str(i))), 0)
    if not index:
        names = [name for name in interfaces.values() if name != "lo"]
        if not names:
            raise _NoInterfaceError(f"{plain} is link-local, and this host has no interface but lo")
        seen = f"there is no interface {zone} here" if zone else f"{plain} is link-local: every interface has its own"
        forms = ", ".join(f"{plain}%{name}" for name in names)
        raise _NoInterfaceError(f"{seen}. Say on which one it is: {forms}")
    return Address(socket.AF_INET6, (plain, port, 0, index), interfaces[index])


def loopback_of(host: str) -> str:
    """The address by which a host means itself, if ``host`` is one or stands for one; else "". May block."""
    try:
        found = {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):  # no such name; "*"
        return ""
    plain = [getattr(address, "ipv4_mapped", None) or address for address in found]
    return str(plain[0]) if all(address.is_loopback for address in plain) else ""
