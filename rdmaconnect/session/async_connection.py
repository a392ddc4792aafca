"""What a user holds at the end, for asyncio."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from ..agreement.endpoint import RemoteRegion
from ..objects.buffer_like import BufferLike
from ..objects.memory import MR
from ..protocol.health import Health
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure, Wait, arun
from ..runtime.wakeup import Signal
from .base import BaseConnection
from .posted import AsyncBatch, AsyncTransfer

__all__ = ["AsyncConnection"]


def _change(signal: Signal, seen: int) -> Procedure[None]:
    """Wait for a change."""
    yield Wait(Deadline(None), changes=((signal, seen),), slice_ms=1000)


class AsyncConnection(BaseConnection):
    """The same as ``Connection`` for asyncio. Made by ``aconnect``, ``ameet`` and ``AsyncListener.accept``.

    Attributes, arguments, results and errors are those of ``Connection``; nothing blocks the event loop.
    Cancelling a call loses no message; what was posted may still be sent.
    """

    #: an event loop has other things to do
    _MOST_SPIN = 16

    async def send(self, data: BufferLike | MR, *, deadline_s: float | None = 30) -> None:
        """See :meth:`~rdmaconnect.Connection.send`."""
        rest = self._end.send(data, deadline_s)
        if rest is not None:
            await arun(rest)

    async def recv(self, *, deadline_s: float | None = 30) -> bytes:
        """See :meth:`~rdmaconnect.Connection.recv`."""
        data = self._end.try_recv(deadline_s)
        return await arun(self._end.recv(deadline_s)) if data is None else data

    async def recv_into(self, buffer: BufferLike, *, deadline_s: float | None = 30) -> int:
        """See :meth:`~rdmaconnect.Connection.recv_into`."""
        return await arun(self._end.recv_into(buffer, deadline_s))

    @asynccontextmanager
    async def recv_view(self, *, deadline_s: float | None = 30) -> AsyncIterator[memoryview]:
        """See :meth:`~rdmaconnect.Connection.recv_view`."""
        with await arun(self._end.recv_view(deadline_s)) as view:
            yield view

    async def write(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str,
        *,
        offset: int = 0,
        imm: int | None = None,
        deadline_s: float | None = 30,
    ) -> None:
        """See :meth:`~rdmaconnect.Connection.write`."""
        rest = self._end.write(data, region, offset, imm, deadline_s)
        if rest is not None:
            await arun(rest)

    async def recv_imm(self, *, deadline_s: float | None = 30) -> int:
        """See :meth:`~rdmaconnect.Connection.recv_imm`."""
        return await arun(self._end.recv_imm(deadline_s))

    async def read(
        self,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> bytes:
        """See :meth:`~rdmaconnect.Connection.read`."""
        return await arun(self._end.read(region, length, offset, deadline_s))

    async def read_into(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> int:
        """See :meth:`~rdmaconnect.Connection.read_into`."""
        return await arun(self._end.read_into(buffer, region, length, offset, deadline_s))

    async def fetch_add(
        self, region: RemoteRegion | str, add: int, *, offset: int = 0, deadline_s: float | None = 30
    ) -> int:
        """See :meth:`~rdmaconnect.Connection.fetch_add`."""
        return await arun(self._end.fetch_add(region, add, offset, deadline_s))

    async def compare_swap(
        self, region: RemoteRegion | str, compare: int, swap: int, *, offset: int = 0, deadline_s: float | None = 30
    ) -> int:
        """See :meth:`~rdmaconnect.Connection.compare_swap`."""
        return await arun(self._end.compare_swap(region, compare, swap, offset, deadline_s))

    async def post_send(self, data: BufferLike | MR, *, deadline_s: float | None = 30) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_send`."""
        return AsyncTransfer(self._end, await arun(self._end.begin_send(data, deadline_s)))

    async def post_write(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str,
        *,
        offset: int = 0,
        imm: int | None = None,
        deadline_s: float | None = 30,
    ) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_write`."""
        return AsyncTransfer(self._end, await arun(self._end.begin_write(data, region, offset, imm, deadline_s)))

    async def post_read(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_read`."""
        return AsyncTransfer(
            self._end, await arun(self._end.reading(buffer, region, length, offset, Deadline(deadline_s)))
        )

    def batch(self, *, deadline_s: float | None = 30) -> AsyncBatch:
        """See :meth:`~rdmaconnect.Connection.batch`."""
        return AsyncBatch(self._end, deadline_s)

    async def changes(self) -> AsyncIterator[Health]:
        """Each change of :attr:`health` from now on, in order; the last is this side's ``close``.

        For example ``async for health in conn.changes(): print(health)``.
        """
        came: deque[Health] = deque()
        changed = Signal()

        def note(health: Health) -> None:
            came.append(health)
            changed.notify()

        remove = self.on_change(note)
        try:
            while True:
                seen, last = changed.count, self.closed
                while came:
                    yield came.popleft()
                if last:
                    return
                await arun(_change(changed, seen))
        finally:
            remove()

    async def reconnect(self, *, deadline_s: float | None = 30) -> None:
        """See :meth:`~rdmaconnect.Connection.reconnect`."""
        await arun(self._end.reconnect(deadline_s))

    async def close(self) -> None:
        """See :meth:`~rdmaconnect.Connection.close`."""
        await arun(self._end.closing())

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
