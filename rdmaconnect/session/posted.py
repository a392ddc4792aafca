"""What ``post_send``, ``post_write`` and ``post_read`` give, and batches of them: for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..abi import WrOpcode
from ..agreement.endpoint import RemoteRegion
from ..errors import StateError
from ..objects.buffer_like import BufferLike
from ..objects.memory import MR
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure, arun, run
from .end import End
from .life import Life
from .posting import Work
from .transfer import Piece, Sent

__all__ = ["AsyncBatch", "AsyncTransfer", "Batch", "Transfer"]


class _Posted:
    """What both kinds of transfer share."""

    def __init__(self, end: End, sent: Sent) -> None:
        self._end, self._sent = end, sent

    @property
    def length(self) -> int:
        """Bytes of it."""
        return self._sent.length

    def done(self) -> bool:
        """Whether it is over, well or not. Never waits; nor raises, which is for ``wait``."""
        return self._end.is_over(self._sent)

    def __repr__(self) -> str:
        state = "on its way" if self._sent.status is None else "failed" if self._sent.status else "done"
        return f"<{type(self).__name__} {self._sent.doing}, {state}>"


class Transfer(_Posted):
    """A message, write or read that was posted and may still be on its way; :class:`~rdmaconnect.Connection` gives it.

    What is forgotten is sent all the same.

    Attributes:
        length: bytes of it.
    """

    def wait(self, *, deadline_s: float | None = 30) -> None:
        """Wait until the device has done it; over RC the peer's device has it then. Twice is fine.

        Args:
            deadline_s: seconds.

        Raises:
            DeadlineExceeded: it is still on its way; wait again, or close.
            CompletionError: it failed. WR_FLUSH_ERR: one before it had failed, or it was never posted.
            OutcomeUnknown: the connection was lost before it was done, and is connected anew: it may or may not be.
            PeerClosed: the peer went before it was done.
            StateError: this side was closed before it was done.

        Source: ibv_poll_cq(3).
        """
        if not self._end.is_over(self._sent) or self._sent.status:
            run(self._end.finish(self._sent, Deadline(deadline_s)))


class AsyncTransfer(_Posted):
    """The same as :class:`Transfer` for asyncio; to await it is to await its ``wait()``."""

    async def wait(self, *, deadline_s: float | None = 30) -> None:
        """See :meth:`Transfer.wait`."""
        if not self._end.is_over(self._sent) or self._sent.status:
            await arun(self._end.finish(self._sent, Deadline(deadline_s)))

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()


T = TypeVar("T", Transfer, AsyncTransfer)


class _Gathered(Generic[T]):
    """What both kinds of batch share."""

    _kind: type[T]

    def __init__(self, end: End, deadline_s: float | None) -> None:
        self._end, self._deadline = end, Deadline(deadline_s)
        self._life: Life | None = None
        self._work: list[Piece] = []
        self._ended = False

    def _add(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str | None = None,
        offset: int = 0,
        imm: int | None = None,
    ) -> Procedure[T]:
        end = self._end
        life = yield from self._open()
        work: Work = (WrOpcode.SEND, data, None, 0, None)
        if region is not None:
            work = end.writing(data, region, offset, imm)
        piece = end.piece(*work)
        if piece is None:
            sent = yield from end.posting(self._deadline, *work, into=self._work, batch=life)
        else:
            sent = piece.sent
            yield from end.add(piece, self._deadline, self._work, life)
        return self._kind(end, sent)

    def _add_read(
        self, buffer: BufferLike | MR, region: RemoteRegion | str, length: int | None, offset: int
    ) -> Procedure[T]:
        life = yield from self._open()
        sent = yield from self._end.reading(buffer, region, length, offset, self._deadline, self._work, life)
        return self._kind(self._end, sent)

    def _open(self) -> Procedure[Life]:
        """The life that all of it is of."""
        self._end.check_open()
        if self._ended:
            raise StateError("post in a batch: it has ended, and what was in it is posted. Begin another.")
        if self._life is None:
            self._life = yield from self._end.standing(self._deadline, "wait for the connection")
        return self._life

    def _post_all(self) -> Procedure[None]:
        if self._life is not None:
            yield from self._end.post_list(self._work, self._deadline, self._life)

    def _post(self, failed: bool) -> Procedure[None]:
        self._ended = True
        try:
            if not failed:
                yield from self._post_all()
        finally:
            self._end.drop(self._work)


class Batch(_Gathered[Transfer]):
    """Transfers that are posted as one list, with one doorbell, at the end of ``with``; ``Connection.batch`` makes it.

    Its methods are those of ``Connection``. It is of one thread at a time. What is more than the queue takes
    (``send_depth``), or than the memory for copies, is posted before the end. Only the last of a list, and one now and
    then, is signalled; each of the transfers is told of its own end all the same. Where the block raises, what was not
    posted by then fails with WR_FLUSH_ERR.
    """

    _kind = Transfer

    def post_send(self, data: BufferLike | MR) -> Transfer:
        """See :meth:`~rdmaconnect.Connection.post_send`."""
        return run(self._add(data))

    def post_write(
        self, data: BufferLike | MR, region: RemoteRegion | str, *, offset: int = 0, imm: int | None = None
    ) -> Transfer:
        """See :meth:`~rdmaconnect.Connection.post_write`."""
        return run(self._add(data, region, offset, imm))

    def post_read(
        self, buffer: BufferLike | MR, region: RemoteRegion | str, length: int | None = None, *, offset: int = 0
    ) -> Transfer:
        """See :meth:`~rdmaconnect.Connection.post_read`."""
        return run(self._add_read(buffer, region, length, offset))

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._post(error is not None))


class AsyncBatch(_Gathered[AsyncTransfer]):
    """The same as :class:`Batch` for asyncio."""

    _kind = AsyncTransfer

    async def post_send(self, data: BufferLike | MR) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_send`."""
        return await arun(self._add(data))

    async def post_write(
        self, data: BufferLike | MR, region: RemoteRegion | str, *, offset: int = 0, imm: int | None = None
    ) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_write`."""
        return await arun(self._add(data, region, offset, imm))

    async def post_read(
        self, buffer: BufferLike | MR, region: RemoteRegion | str, length: int | None = None, *, offset: int = 0
    ) -> AsyncTransfer:
        """See :meth:`~rdmaconnect.Connection.post_read`."""
        return await arun(self._add_read(buffer, region, length, offset))

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await arun(self._post(error is not None))
