"""The other side of the procedure: taking connections, one after the other or many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from ..exchange.url import tcp_url
from ..runtime.procedure import Call, Procedure, arun, call_apart, run_apart
from ..verbs import library
from .admission import MAX_HALF_OPEN, MAX_QPS
from .connection import AsyncConnection, Connection
from .listening import BaseListener
from .ports import rank_ports
from .terms import Terms, make_terms, parse_qp_type

__all__ = ["AsyncListener", "Listener", "alisten", "listen"]


class Listener(BaseListener[Connection]):
    """Takes connections on one address. Made by :func:`listen`; a context manager."""

    front = Connection

    def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> Connection:
        """The next connection; those that were made together come one after the other.

        Args:
            deadline_s: seconds, or None to wait for ever.
            tolerant: whether a peer with whom it fails is logged as a warning and passed over; if not,
                its error is raised.

        Returns:
            The connection, its queue pair in RTS and its data path proven.

        Raises:
            ConnectTimeout: nobody came in time; names those with whom it failed.
            StateError: the listener is closed.
            RdmaConnectError: with ``tolerant=False``, whatever went wrong with the first peer.
        """
        return run_apart(self._accept(deadline_s, tolerant), self._put_back)

    def close(self) -> None:
        """Stop listening; connections that were accepted live on. Twice is fine."""
        run_apart(self._closing())

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncListener(BaseListener[AsyncConnection]):
    """The same for asyncio. Made by :func:`alisten`; ``async for`` gives its connections."""

    front = AsyncConnection

    async def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> AsyncConnection:
        """See :meth:`Listener.accept`."""
        return await arun(self._accept(deadline_s, tolerant))

    async def close(self) -> None:
        """See :meth:`Listener.close`."""
        await arun(self._closing())

    async def __aiter__(self) -> AsyncIterator[AsyncConnection]:
        while not self._closed:
            yield await self.accept(deadline_s=None)

    async def __aenter__(self) -> AsyncListener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


L = TypeVar("L", Listener, AsyncListener)


def _open(
    kind: type[L],
    address: str,
    qp_types: Collection[str],
    share_ud: bool,
    max_half_open: int,
    max_qps: int,
    make: Callable[[], Terms],
) -> L:
    terms = make()
    types = [parse_qp_type(name) for name in qp_types]
    url = tcp_url(address, bind=True)
    rank_ports(terms.options)  # better now than when the first connector asks
    return kind(url, terms, types, share_ud, max_half_open, max_qps)


def _call(function: Callable[[], Listener]) -> Procedure[Listener]:
    listener: Listener = yield Call(function)
    return listener


def listen(
    address: str = "*",
    *,
    qp_types: Collection[str] = ("RC", "UC", "UD"),
    share_ud: bool = False,
    max_half_open: int = MAX_HALF_OPEN,
    max_qps: int = MAX_QPS,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> Listener:
    """Listen for connectors.

    They are connected as they come, whether ``accept`` is called or not, and wait there like TCP connections
    in a backlog.

    Args:
        address: ``"*"`` for all addresses, ``"host"``, ``"host:port"`` or a ``tcp://`` url. The port
            defaults to 18515; 0 takes a free one, see ``Listener.url``.
        qp_types: the types that a connector may ask for.
        share_ud: whether one queue pair serves all UD peers.
        max_half_open: connections that may be under way, or made and not yet accepted; a connector beyond them
            is told to try again, and does so until its own deadline.
        max_qps: the same for the queue pairs of all of them.
        regions: named memory that every peer may use: name -> anything with a buffer.
        private_data: for each peer's application, at most 4096 bytes.
        secret: the shared secret that protects the exchange; by default RDMACONNECT_SECRET of the
            environment, if set.
        key, peer_key: instead, this side's ``.key_secret`` file and the folder of the connectors' ``.key`` files.
        **options: see :class:`Options`.

    Returns:
        The listener; connectors are taken from now on.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        OSError: the address is taken or not one of this host.
        DeviceError, LibraryError, VerbsError: this host has no usable RDMA device.
    """
    make = partial(
        make_terms, "RC", options, regions, private_data, listens=True, secret=secret, key=key, peer_key=peer_key
    )
    library()
    opening = partial(_open, Listener, address, qp_types, share_ud, max_half_open, max_qps, make)
    return run_apart(_call(opening), Listener._close)


async def alisten(
    address: str = "*",
    *,
    qp_types: Collection[str] = ("RC", "UC", "UD"),
    share_ud: bool = False,
    max_half_open: int = MAX_HALF_OPEN,
    max_qps: int = MAX_QPS,
    regions: Mapping[str, Any] | None = None,
    private_data: bytes = b"",
    secret: str | bytes | None = None,
    key: str | None = None,
    peer_key: str | None = None,
    **options: Any,
) -> AsyncListener:
    """The same as :func:`listen` for asyncio; gives an :class:`AsyncListener`."""
    make = partial(
        make_terms, "RC", options, regions, private_data, listens=True, secret=secret, key=key, peer_key=peer_key
    )
    return await call_apart(partial(_open, AsyncListener, address, qp_types, share_ud, max_half_open, max_qps, make))
