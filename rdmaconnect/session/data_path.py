"""What moves over a connection: messages, RDMA writes and reads."""

from __future__ import annotations

from typing import Any

from ..abi import QpType, WrOpcode
from ..agreement.endpoint import RemoteRegion
from ..objects.buffer_like import BufferLike
from ..objects.memory import MR
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure
from .posting import Posting, Work
from .transfer import Sent

__all__ = ["DataPath"]

_SEND, _WRITE, _WRITE_IMM = WrOpcode.SEND, WrOpcode.RDMA_WRITE, WrOpcode.RDMA_WRITE_WITH_IMM


class DataPath(Posting):
    """One queue pair in RTS toward one peer; :class:`~rdmaconnect.session.base.BaseConnection` gives it both."""

    # ---- what is asked for

    def send(self, data: BufferLike | MR, deadline_s: float | None) -> Procedure[None] | None:
        """Send a message; gives what remains to be run, or None if it is done."""
        self._check(deadline_s)
        sent = self.try_post(_SEND, data)
        if sent is None:
            return self._whole(Deadline(deadline_s), _SEND, data)
        self.engine.progress()
        return None if sent.status == 0 else self.finish(sent, Deadline(deadline_s))

    def write(
        self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None, deadline_s: float | None
    ) -> Procedure[None] | None:
        """Write into the peer's memory; likewise."""
        self._check(deadline_s)
        work = self.writing(data, region, offset, imm)
        sent = self.try_post(*work)
        if sent is None:
            return self._whole(Deadline(deadline_s), *work)
        self.engine.progress()
        return None if sent.status == 0 else self.finish(sent, Deadline(deadline_s))

    def begin_send(self, data: BufferLike | MR, deadline_s: float | None) -> Procedure[Sent]:
        """Post a message."""
        self._check(deadline_s)
        sent = self.try_post(_SEND, data)
        return sent if sent is not None else (yield from self.posting(Deadline(deadline_s), _SEND, data))

    def begin_write(
        self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None, deadline_s: float | None
    ) -> Procedure[Sent]:
        """Post a write."""
        self._check(deadline_s)
        work = self.writing(data, region, offset, imm)
        sent = self.try_post(*work)
        return sent if sent is not None else (yield from self.posting(Deadline(deadline_s), *work))

    def writing(self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None) -> Work:
        """The arguments of :meth:`try_post` for a write."""
        self._need("RDMA write", QpType.RC, QpType.UC)
        return _WRITE if imm is None else _WRITE_IMM, data, self._region(region), offset, imm

    def read(
        self, region: RemoteRegion | str, length: int | None, offset: int, deadline_s: float | None
    ) -> Procedure[bytes]:
        self._need("RDMA read", QpType.RC)
        whole = self._region(region)
        source = whole.slice(offset, whole.length - offset if length is None else length)
        target = bytearray(source.length)
        yield from self.read_into(target, source, source.length, 0, deadline_s)
        return bytes(target)

    def read_into(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None,
        offset: int,
        deadline_s: float | None,
    ) -> Procedure[int]:
        deadline = Deadline(deadline_s)
        sent = yield from self.reading(buffer, region, length, offset, deadline)
        yield from self.finish(sent, deadline)
        return sent.length

    def _whole(self, deadline: Deadline, *work: Any) -> Procedure[None]:
        sent = yield from self.posting(deadline, *work)
        yield from self.finish(sent, deadline)
