"""The two fronts of a listener, blocking and for asyncio; what is below fills the backlog."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from ..errors import ConnectTimeout, StateError
from ..runtime.deadline import Deadline
from ..runtime.procedure import arun, run_apart
from .async_connection import AsyncConnection
from .backlog import Backlog
from .connection import Connection
from .end import End

__all__ = ["AsyncListener", "Listener"]


class Listener(Backlog):
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
            DeviceError: by ``rdma://``, the device that it listened on was removed.
            RdmaConnectError: with ``tolerant=False``, whatever went wrong with the first peer.
        """
        deadline = Deadline(deadline_s, ConnectTimeout)
        taken: list[End] = []
        try:
            self._take_now(taken, tolerant)
            return Connection(taken[0] if taken else run_apart(self._accept(deadline, tolerant), self._put_back))
        except BaseException:
            for connection in taken:
                self._put_back(connection)
            raise

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


class AsyncListener(Backlog):
    """The same as :class:`Listener` for asyncio. Made by :func:`alisten`; ``async for`` gives its connections."""

    _NAME = "AsyncListener"

    async def accept(self, *, deadline_s: float | None = 30, tolerant: bool = True) -> AsyncConnection:
        """See :meth:`Listener.accept`."""
        return AsyncConnection(await arun(self._accept(Deadline(deadline_s, ConnectTimeout), tolerant)))

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
