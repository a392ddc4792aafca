"""Where a host listens for the exchange: what a caller gives, ZeroMQ's address of it, and the names of hosts."""

from __future__ import annotations

import ipaddress
import re
import socket

__all__ = ["DEFAULT_PORT", "check_name", "host_of", "loopback_of", "tcp_url"]

#: the TCP port of the exchange
DEFAULT_PORT = 18515
#: a name or IPv4 address, or IPv6 in brackets, and perhaps a port; or IPv6 without brackets, and no port
_ADDRESS = re.compile(
    r"(?P<host>\*|[\w.-]*|\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\])(?::(?P<port>[0-9]{1,5}))?"
    r"|(?P<v6>[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%[\w.-]+)?)",
    re.ASCII,
)


def tcp_url(peer: str, *, bind: bool = False, port: int = DEFAULT_PORT) -> str:
    """ZeroMQ's address of a peer.

    Args:
        peer: ``"host"``, ``"host:port"``, ``"[v6]:port"``, ``":port"`` or ``"*"`` when binding, or a
            ``tcp://`` url.
        bind: whether it is to listen there; then an empty host means all addresses.
        port: the TCP port where ``peer`` names none.

    Returns:
        ``tcp://host:port``.

    Raises:
        ValueError: naming what was given.
    """
    if not isinstance(peer, str):
        raise TypeError(f"the peer is {peer!r}: give a text such as 'host' or 'host:port'")
    text = peer.strip()
    if "://" in text and not text.startswith("tcp://"):
        raise ValueError(f"the peer is {peer!r}: only tcp:// urls are spoken")
    found = _ADDRESS.fullmatch(text.removeprefix("tcp://"))
    host, number = (found["host"] or found["v6"] or "", int(found["port"] or port)) if found else ("", 0)
    if not found or (not bind and host in ("", "*")) or number > 65535 or not (bind or number):
        raise ValueError(f"the peer is {peer!r}: give 'host' or 'host:port' with a port of 1 to 65535")
    if ":" in host:
        host = f"[{host.strip('[]')}]"
        ipaddress.IPv6Address(host[1:-1])  # says itself what is wrong with it
    host = host or "*"
    return f"tcp://{host}:{number}"


def check_name(host: str) -> None:
    """Ask for a host's addresses. Blocks as long as the name servers do.

    Raises:
        ValueError: it has none.
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as e:
        raise ValueError(
            f"connect to {host}: the name does not resolve ({e}). Check its spelling, or give an address"
        ) from None


def host_of(url: str) -> str:
    """The host in a ``tcp://`` url, IPv6 without its brackets."""
    return url.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def loopback_of(host: str) -> str:
    """The address by which a host means itself, if ``host`` is one or stands for one; else "". May block."""
    try:
        found = {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):  # no such name; "*"
        return ""
    plain = [getattr(address, "ipv4_mapped", None) or address for address in found]
    return str(plain[0]) if all(address.is_loopback for address in plain) else ""
