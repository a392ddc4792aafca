"""TCP sockets of the exchange: the options that each of them has, and the one that listens."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import VerbsError, hint_for
from .url import Address

__all__ = ["has_unread", "listen", "local_of", "peer_of", "set_options", "silent_s"]

#: where ``tcpi_last_data_recv`` lies in ``struct tcp_info`` (linux/tcp.h)
_LAST_DATA_RECV = struct.Struct("@52xI")
#: what one address of several may not have: the next one is taken
_NOT_HERE = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV}


def set_options(sock: socket.socket) -> None:
    """Make a TCP connection say at once what it is given, and notice a peer that is gone.

    Without traffic the kernel asks the peer after 5 s and then each second; a peer that has acknowledged nothing
    for 10 s, be it data or these questions, is gone. Source: tcp(7).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10000)


def peer_of(tcp: socket.socket) -> str:
    """The IP address of the other end; "" if it is gone."""
    return _address(tcp.getpeername)


def local_of(tcp: socket.socket) -> str:
    """The IP address of this end; "" if it is gone."""
    return _address(tcp.getsockname)


def silent_s(tcp: socket.socket) -> float:
    """Seconds since the last bytes of the other end came or, if none did, since it connected; also before ``accept``.

    Source: ``tcpi_last_data_recv`` of ``TCP_INFO``, tcp(7).
    """
    try:
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
    except OSError:  # it is gone already: reading will tell
        return 0.0
    return float(_LAST_DATA_RECV.unpack(info)[0]) / 1000


def has_unread(tcp: socket.socket) -> bool:
    """Whether there are bytes of the other end that nobody has read yet."""
    try:
        return bool(tcp.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _address(ask: Callable[[], Any]) -> str:
    try:
        address = str(ask()[0])
    except OSError:  # it is gone already: reading will tell
        return ""
    return address.removeprefix("::ffff:") if "." in address else address


def listen(addresses: Sequence[Address], backlog: int = 4096) -> socket.socket:
    """A socket that listens on the first of the addresses that this host has.

    The port can be taken again as soon as the socket is closed, though connections that it accepted live on.
    ``::`` takes IPv4 as well.

    Args:
        addresses: where to, at least one (``rdmaconnect.exchange.url.addresses``).
        backlog: connections that may wait to be accepted; the kernel keeps ``net.core.somaxconn`` at most.

    Returns:
        The socket, non-blocking; those accepted from it have ``SO_REUSEADDR`` too, and else no options.

    Raises:
        VerbsError: EMFILE, ENFILE: no descriptor is left.
        OSError: the address is taken, or none of them is one of this host; says which.
    """
    first: OSError | None = None
    for address in addresses:
        try:
            return _listen(address, backlog)
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                raise VerbsError("socket", e.errno, f"listen on {address}") from None
            verdict = os.strerror(e.errno or 0)
            hint = hint_for("bind", e.errno or 0) or "Give an address of this host."
            first = first or OSError(e.errno, f"listen on {address}: {verdict}. {hint}")
            if e.errno not in _NOT_HERE:
                raise first from None
    raise first or ValueError("listen: there is no address to listen on")


def _listen(address: Address, backlog: int) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address.sockaddr)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
