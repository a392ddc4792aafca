"""Each function of librdmacm that is used, one short function each: the only file that calls it.

As ``verbs`` is for libibverbs: the functions keep the C names and take and give ctypes pointers, and what fails is
raised. It is loaded when somebody connects or listens by an ``rdma://`` url, and by nothing else.

Unless a docstring says otherwise, each raises:

* ``VerbsError`` with the function's errno,
* ``LibraryError`` if librdmacm or the symbol is missing.

None blocks for long but :func:`rdma_destroy_id`, which waits until every event of the identifier that was taken is
acknowledged, and :func:`rdma_get_cm_event` on a channel that was not made non-blocking.
"""

from __future__ import annotations

import ctypes
import errno
import socket
from typing import Any

from .abi import Fails, ibv_qp_attr
from .abi.rdma_cma import (
    CM_PROTOTYPES,
    PortSpace,
    rdma_cm_event,
    rdma_cm_id,
    rdma_conn_param,
)
from .errors import LibraryError, VerbsError
from .shared_library import SharedLibrary

__all__ = [
    "library",
    "rdma_accept",
    "rdma_ack_cm_event",
    "rdma_bind_addr",
    "rdma_connect",
    "rdma_create_event_channel",
    "rdma_create_id",
    "rdma_destroy_event_channel",
    "rdma_destroy_id",
    "rdma_disconnect",
    "rdma_establish",
    "rdma_get_cm_event",
    "rdma_get_src_port",
    "rdma_init_qp_attr",
    "rdma_listen",
    "rdma_reject",
    "rdma_resolve_addr",
    "rdma_resolve_route",
    "rdma_set_option",
    "use",
]

_librdmacm = SharedLibrary(
    "librdmacm.so.1",
    "RDMACONNECT_LIBRDMACM",
    CM_PROTOTYPES,
    "Debian and Ubuntu `apt install librdmacm1`, Fedora and RHEL `dnf install librdmacm`. Only rdma:// urls need it.",
    LibraryError,
)
use, library, _symbol = _librdmacm.use, _librdmacm.load, _librdmacm.symbol


def _call(name: str, *args: Any, doing: str = "") -> Any:
    """Call an exported function and raise by its failure convention."""
    function, fails = _symbol(name), CM_PROTOTYPES[name].fails
    ctypes.set_errno(0)
    result = function(*args)
    failed = not result if fails is Fails.NULL_ERRNO else fails is Fails.MINUS_ONE and result < 0
    if failed:
        raise VerbsError(name, ctypes.get_errno() or errno.EIO, doing)
    return result


# ---- channels and identifiers


def rdma_create_event_channel(doing: str = "") -> Any:
    """Open a channel for events. The first one opens the devices that there are.

    Args:
        doing: what it is for, in words.

    Returns:
        ``struct rdma_event_channel *``, the library's until :func:`rdma_destroy_event_channel`.

    Raises:
        VerbsError: ENODEV without an RDMA device; ENOENT, EACCES for /dev/infiniband/rdma_cm; EMFILE, ENFILE.

    Source: rdma_create_event_channel(3).
    """
    return _call("rdma_create_event_channel", doing=doing)


def rdma_destroy_event_channel(channel: Any) -> None:
    """Close a channel, whose identifiers were destroyed before. Source: rdma_destroy_event_channel(3)."""
    _call("rdma_destroy_event_channel", channel)


def rdma_create_id(channel: Any, ps: PortSpace, doing: str = "") -> Any:
    """Make an identifier, which is for a connection what a socket is for TCP.

    Args:
        channel: where its events come.
        ps: TCP for RC, UDP for UD.
        doing: what it is for, in words.

    Returns:
        ``struct rdma_cm_id *``, the library's until :func:`rdma_destroy_id`.

    Source: rdma_create_id(3).
    """
    made = ctypes.POINTER(rdma_cm_id)()
    _call("rdma_create_id", channel, ctypes.byref(made), None, int(ps), doing=doing)
    return made


def rdma_destroy_id(cm_id: Any) -> None:
    """Destroy an identifier, and end what it is amid. Waits until its events that were taken are acknowledged.

    Source: rdma_destroy_id(3).
    """
    _call("rdma_destroy_id", cm_id)


def rdma_set_option(cm_id: Any, level: int, optname: int, value: bytes, doing: str = "") -> None:
    """Set an option of an identifier.

    Args:
        cm_id: the identifier.
        level: ``RDMA_OPTION_ID`` (0).
        optname: ``RDMA_OPTION_ID_TOS`` (0), one byte, the traffic class; others are in the manual.
        value: the bytes of it.
        doing: what for, in words.

    Source: rdma_set_option(3).
    """
    _call("rdma_set_option", cm_id, level, optname, ctypes.c_char_p(value), len(value), doing=doing)


# ---- addresses


def rdma_bind_addr(cm_id: Any, address: bytes, doing: str = "") -> None:
    """Give an identifier this host's address and port.

    Args:
        cm_id: the identifier.
        address: a ``struct sockaddr_in`` or ``sockaddr_in6`` as bytes; port 0 for a free one.
        doing: what for, in words.

    Raises:
        VerbsError: EADDRINUSE, EADDRNOTAVAIL, ENODEV for an address that no RDMA device has, among others.

    Source: rdma_bind_addr(3).
    """
    _call("rdma_bind_addr", cm_id, ctypes.c_char_p(address), doing=doing)


def rdma_get_src_port(cm_id: Any) -> int:
    """The port that an identifier is bound to, 0 for none. Source: rdma_get_src_port(3)."""
    return socket.ntohs(_call("rdma_get_src_port", cm_id))


def rdma_resolve_addr(cm_id: Any, destination: bytes, timeout_ms: int, doing: str = "") -> None:
    """Begin to find the device and the address that lead to a peer; ADDR_RESOLVED or ADDR_ERROR follows.

    Args:
        cm_id: the identifier.
        destination: a ``struct sockaddr_in`` or ``sockaddr_in6`` as bytes.
        timeout_ms: milliseconds that it may take.
        doing: what for, in words.

    Source: rdma_resolve_addr(3).
    """
    _call("rdma_resolve_addr", cm_id, None, ctypes.c_char_p(destination), timeout_ms, doing=doing)


def rdma_resolve_route(cm_id: Any, timeout_ms: int, doing: str = "") -> None:
    """Begin to find the path to the peer whose address is resolved; ROUTE_RESOLVED or ROUTE_ERROR follows.

    Args:
        cm_id: the identifier.
        timeout_ms: milliseconds that it may take.
        doing: what for, in words.

    Source: rdma_resolve_route(3).
    """
    _call("rdma_resolve_route", cm_id, timeout_ms, doing=doing)


# ---- connections


def rdma_connect(cm_id: Any, param: rdma_conn_param, doing: str = "") -> None:
    """Ask the peer for a connection. For a queue pair of the caller's CONNECT_RESPONSE follows, or, over iWARP,
    ESTABLISHED; else REJECTED, UNREACHABLE or CONNECT_ERROR.

    Args:
        cm_id: the identifier, its route resolved.
        param: with the number of the queue pair, which is in INIT.
        doing: what for, in words.

    Source: rdma_connect(3).
    """
    _call("rdma_connect", cm_id, ctypes.byref(param), doing=doing)


def rdma_establish(cm_id: Any, doing: str = "") -> None:
    """Tell the peer, after CONNECT_RESPONSE, that the queue pair is in RTS. Source: rdma_establish(3)."""
    _call("rdma_establish", cm_id, doing=doing)


def rdma_listen(cm_id: Any, backlog: int, doing: str = "") -> None:
    """Take requests at the address that the identifier is bound to; each is a CONNECT_REQUEST.

    Args:
        cm_id: the identifier.
        backlog: how many may wait.
        doing: what for, in words.

    Source: rdma_listen(3).
    """
    _call("rdma_listen", cm_id, backlog, doing=doing)


def rdma_accept(cm_id: Any, param: rdma_conn_param, doing: str = "") -> None:
    """Take a request; ESTABLISHED follows, or CONNECT_ERROR or UNREACHABLE.

    Args:
        cm_id: the identifier that the CONNECT_REQUEST brought.
        param: with the number of the queue pair, which is in RTS, or over iWARP in INIT.
        doing: what for, in words.

    Source: rdma_accept(3).
    """
    _call("rdma_accept", cm_id, ctypes.byref(param), doing=doing)


def rdma_reject(cm_id: Any, private_data: bytes, doing: str = "") -> None:
    """Refuse a request, or after CONNECT_RESPONSE the answer to one.

    Args:
        cm_id: the identifier.
        private_data: for the peer, at most 148 bytes.
        doing: what for, in words.

    Source: rdma_reject(3).
    """
    _call("rdma_reject", cm_id, ctypes.c_char_p(private_data), len(private_data), doing=doing)


def rdma_disconnect(cm_id: Any) -> None:
    """Tell the peer that the connection is over: both get DISCONNECTED. Source: rdma_disconnect(3)."""
    _call("rdma_disconnect", cm_id)


def rdma_init_qp_attr(cm_id: Any, qp_state: int, doing: str = "") -> ibv_qp_attr:
    """What a queue pair of the caller's needs to enter a state, by what both ends have said so far.

    Args:
        cm_id: the identifier.
        qp_state: INIT, RTR or RTS.
        doing: what for, in words.

    Returns:
        ``struct ibv_qp_attr``; of which fields are filled in the state decides.

    Source: rdma_init_qp_attr(3).
    """
    attr, mask = ibv_qp_attr(qp_state=int(qp_state)), ctypes.c_int()
    _call("rdma_init_qp_attr", cm_id, ctypes.byref(attr), ctypes.byref(mask), doing=doing)
    return attr


# ---- events


def rdma_get_cm_event(channel: Any) -> Any:
    """Take the next event of a channel.

    Returns:
        ``struct rdma_cm_event *``, to be acknowledged; None if there is none and the channel is non-blocking.

    Source: rdma_get_cm_event(3).
    """
    event = ctypes.POINTER(rdma_cm_event)()
    try:
        _call("rdma_get_cm_event", channel, ctypes.byref(event))
    except VerbsError as e:
        if e.errno == errno.EAGAIN:
            return None
        raise
    return event


def rdma_ack_cm_event(event: Any) -> None:
    """Give an event back, and all that it points to. Source: rdma_ack_cm_event(3)."""
    _call("rdma_ack_cm_event", event)
