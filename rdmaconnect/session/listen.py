"""The other side of the procedure: taking connections, one after the other or many at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TypeVar

from ..errors import StateError
from ..exchange.url import tcp_url
from ..runtime.procedure import Call, Procedure, arun, call_apart, run_apart
from ..verbs import library
from .admission import MAX_HALF_OPEN, MAX_QPS
from .async_connection import AsyncConnection
from .connection import Connection
from .listening import BaseListener
from .ports import rank_ports
from .terms import CONNECTABLE, ListenOptions, Unpack, make_terms, parse_qp_types

__all__ = ["AsyncListener", "Listener", "alisten", "listen"]


class Listener(BaseListener):
    """Takes connections on one address. Made by :func:`listen`; a context manager.

    ``for conn in listener`` gives its connections as they come, for as long as the listener is open.

    Attributes:
        url: the address bound, with the real port.
    """

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
        return Connection(run_apart(self._accept(deadline_s, tolerant), self._put_back))

    def close(self) -> None:
        """Stop listening; connections that were accepted live on. Twice is fine."""
        run_apart(self._closing())

    def __iter__(self) -> Iterator[Connection]:
        while not self._closed:
            try:
                connection = self.accept(deadline_s=None)
            except StateError:
                if self._closed:  # while it waited
                    return
                raise
            yield connection

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncListener(BaseListener):
    """The same as :class:`Listener` for asyncio. Made by :func:`alisten`; ``async for`` gives its connections."""

    async def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> AsyncConnection:
        """See :meth:`Listener.accept`."""
        return AsyncConnection(await arun(self._accept(deadline_s, tolerant)))

    async def close(self) -> None:
        """See :meth:`Listener.close`."""
        await arun(self._closing())

    async def __aiter__(self) -> AsyncIterator[AsyncConnection]:
        while not self._closed:
            try:
                connection = await self.accept(deadline_s=None)
            except StateError:
                if self._closed:  # while it waited
                    return
                raise
            yield connection

    async def __aenter__(self) -> AsyncListener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


L = TypeVar("L", Listener, AsyncListener)


def _open(kind: type[L], address: str, options: ListenOptions) -> L:
    terms = make_terms(options, ListenOptions, listens=True)
    types = parse_qp_types(options.get("qp_types", CONNECTABLE))
    url = tcp_url(address, bind=True)
    rank_ports(terms.options)  # better now than when the first connector asks
    room = options.get("max_half_open", MAX_HALF_OPEN), options.get("max_qps", MAX_QPS)
    return kind(url, terms, types, options.get("share_ud", False), *room)


def _call(function: Callable[[], Listener]) -> Procedure[Listener]:
    listener: Listener = yield Call(function)
    return listener


def listen(address: str = "*", **options: Unpack[ListenOptions]) -> Listener:
    """Listen for connectors.

    They are connected as they come, whether ``accept`` is called or not, and wait there like TCP connections
    in a backlog.

    Args:
        address: ``"*"`` for all addresses, ``"host"``, ``"host:port"`` or a ``tcp://`` url. The port
            defaults to 18515; 0 takes a free one, see ``Listener.url``.
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
    return run_apart(_call(partial(_open, Listener, address, options)), Listener._close)


async def alisten(address: str = "*", **options: Unpack[ListenOptions]) -> AsyncListener:
    """The same as :func:`listen` for asyncio; gives an :class:`AsyncListener`."""
    return await call_apart(partial(_open, AsyncListener, address, options))
