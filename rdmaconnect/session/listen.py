"""The other side of the procedure: taking connections, one after the other or many at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..abi import QpType
from ..exchange.url import is_rdma, tcp_url
from ..runtime.procedure import Call, Procedure, call_apart, run_apart
from ..verbs import library
from .admission import MAX_HALF_OPEN, MAX_QPS
from .listener import AsyncListener, Listener
from .listening import BaseListener
from .ports import rank_ports
from .terms import CONNECTABLE, ListenOptions, Terms, Unpack, check_alone, make_terms, parse_qp_types

__all__ = ["AsyncListener", "AsyncTcpListener", "Listener", "TcpListener", "alisten", "listen"]


class TcpListener(BaseListener, Listener):
    """A :class:`Listener` whose exchange goes over TCP."""


class AsyncTcpListener(BaseListener, AsyncListener):
    """An :class:`AsyncListener` whose exchange goes over TCP."""


def _open(address: str, options: ListenOptions) -> Listener:
    terms, room = _terms(options)
    if is_rdma(address):
        from .cm_listen import CmListener  # what most programs never load

        return CmListener(address, terms, options)
    return TcpListener(*_over_tcp(address, terms, options), *room)


def _open_async(address: str, options: ListenOptions) -> AsyncListener:
    terms, room = _terms(options)
    if is_rdma(address):
        from .cm_listen import AsyncCmListener

        return AsyncCmListener(address, terms, options)
    return AsyncTcpListener(*_over_tcp(address, terms, options), *room)


def _terms(options: ListenOptions) -> tuple[Terms, tuple[int, int]]:
    terms = make_terms(options, ListenOptions, listens=True)
    return terms, (options.get("max_half_open", MAX_HALF_OPEN), options.get("max_qps", MAX_QPS))


def _over_tcp(address: str, terms: Terms, options: ListenOptions) -> tuple[str, Terms, list[QpType], bool]:
    if options.get("share_ud"):
        check_alone(terms, "share_ud, whose peers share a queue pair")
    types = parse_qp_types(options.get("qp_types", CONNECTABLE))
    if terms.own is not None and terms.own.qp_type is not None:
        types = [kind for kind in types if kind == terms.own.qp_type]
        if not types:
            raise ValueError(f"qp is of type {terms.own.qp_type}, which is not among qp_types")
    url = tcp_url(address, bind=True)
    rank_ports(terms.options)  # better now than when the first connector asks
    return url, terms, types, options.get("share_ud", False)


def _call(function: Callable[[], Listener]) -> Procedure[Listener]:
    listener: Listener = yield Call(function)
    return listener


def listen(address: str = "*", **options: Unpack[ListenOptions]) -> Listener:
    """Listen for connectors.

    They are connected as they come, whether ``accept`` is called or not, and wait there like TCP connections
    in a backlog.

    Args:
        address: ``"*"`` for all addresses, ``"host"``, ``"host:port"`` or a ``tcp://`` url; or an ``rdma://`` url, to
            take connections by rdma_cm, which other programs speak too. The port defaults to 18515; 0 takes a free one,
            see ``Listener.url``.
        **options: see :class:`ListenOptions`; ``device``, ``gid_index``, ``recv_size`` and all else that is of the
            queue pairs and their port, see :class:`Options`.

    Returns:
        The listener; connectors are taken from now on.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        OSError: the address is taken or not one of this host.
        DeviceError, LibraryError, VerbsError: this host has no usable RDMA device.
    """
    library()
    return run_apart(_call(partial(_open, address, options)), Listener.close)


async def alisten(address: str = "*", **options: Unpack[ListenOptions]) -> AsyncListener:
    """The same as :func:`listen` for asyncio; gives an :class:`AsyncListener`."""
    return await call_apart(partial(_open_async, address, options))
