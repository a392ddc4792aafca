"""What moves over a connection: messages, RDMA writes and reads; ``atomics`` has the atomics."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.endpoint import RemoteRegion
from ..errors import RdmaConnectError
from ..objects.buffer_like import BufferLike
from ..objects.memory import MR
from ..runtime.deadline import Deadline, wait_ready
from ..runtime.procedure import Procedure
from .atomics import Atomics
from .life import LifeOver
from .posting import NOWHERE, Work
from .transfer import Part, Sent

__all__ = ["DataPath"]

#: who looks at a peer waits so long at most for those who post and poll, s
_HOLD_S = 0.01
#: between two looks whether what is said has gone, ms
_STEP_MS = 1
_SEND, _WRITE, _WRITE_IMM = WrOpcode.SEND, WrOpcode.RDMA_WRITE, WrOpcode.RDMA_WRITE_WITH_IMM


class DataPath(Atomics):
    """One queue pair in RTS toward one peer; :class:`~rdmaconnect.session.base.BaseConnection` gives it both."""

    # ---- what it tells of the peer: see Witness of ``liveness``

    @property
    def answers(self) -> bool:
        """Whether the peer's device acknowledges what comes, without its process."""
        return self.local.qp_type is QpType.RC

    def look(self) -> str:
        """Take what has completed; in words, how the data path failed, or ""."""
        if not self._closed and self.engine.lock.acquire(timeout=_HOLD_S):
            try:
                with suppress(RdmaConnectError):  # it is just being closed
                    self.engine.progress()
            finally:
                self.engine.lock.release()
        broken = self.transceiver.broken
        return "" if broken is None else str(broken.status)

    def ask(self) -> Sent | None:
        """Write nothing into the peer's memory, which its device acknowledges; None if that cannot be posted now.

        The R_Key of a write of no bytes is not checked: none is needed.
        """
        sent = Sent(_WRITE, 0)
        if self._closed or not self.engine.lock.acquire(timeout=_HOLD_S):
            return None
        try:
            with suppress(RdmaConnectError):
                if self.transceiver.post(sent, Part(_WRITE, NOWHERE, RemoteRegion(0, 0, 0))):
                    return sent
        finally:
            self.engine.lock.release()
        return None

    def say(self, data: bytes, grace_s: float) -> bool:
        """Send a message of this library's own.

        Args:
            data: short.
            grace_s: seconds that it is waited for.

        Returns:
            Whether it has gone by then; over RC, whether the peer's device has it.
        """
        sent = Sent(_SEND, len(data))
        with self.engine.lock, suppress(RdmaConnectError):  # it is being closed
            if self.transceiver.broken is not None or len(data) > self.max_send_size:
                return False
            part = Part(_SEND, NOWHERE, inline=data)
            if len(data) > self._inline:
                mr = MR(self.engine.pd, bytearray(data), AccessFlags(0))
                part, sent.release = Part(_SEND, (mr.addr, mr.length, mr.lkey)), mr.close
            try:
                self.transceiver.post(sent, part, self.to, proving=True)
            finally:
                if not sent.posted:
                    sent.ended(WcStatus.WR_FLUSH_ERR)
            deadline = Deadline(grace_s)
            while sent.status is None and deadline.left_s > 0:
                wait_ready((), (), deadline, _STEP_MS)
                self.engine.progress()
        return sent.status == WcStatus.SUCCESS

    def arrivals(self) -> int:
        """How many messages have come, over a type that does not acknowledge."""
        return self._taken + len(self._inbox) + len(self.transceiver.immediates)

    # ---- what is asked for

    def send(self, data: BufferLike | MR, deadline_s: float | None) -> Procedure[None] | None:
        """Send a message; gives what remains to be run, or None if it is done."""
        self._check(deadline_s)
        if data.__class__ is bytes and self.to is None and 0 < len(data) <= self._inline:
            sent = self.transceiver.post_inline(_SEND, data)
        else:
            sent = self.try_post(_SEND, data)
        if sent is None:
            return self._whole(Deadline(deadline_s), _SEND, data)
        self._polled(sent.over)
        return None if sent.status == 0 else self.finish(sent, Deadline(deadline_s), polled=True)

    def write(
        self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None, deadline_s: float | None
    ) -> Procedure[None] | None:
        """Write into the peer's memory; likewise."""
        self._check(deadline_s)
        sent = self.try_write(data, region, offset, imm)
        if sent is None:
            return self._whole(Deadline(deadline_s), _WRITE if imm is None else _WRITE_IMM, data, region, offset, imm)
        self._polled(sent.over)
        return None if sent.status == 0 else self.finish(sent, Deadline(deadline_s), polled=True)

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
        sent = self.try_write(data, region, offset, imm)
        if sent is None:
            work = _WRITE if imm is None else _WRITE_IMM, data, region, offset, imm
            sent = yield from self.posting(Deadline(deadline_s), *work)
        return sent

    def try_write(self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None) -> Sent | None:
        """Post a write, as :meth:`try_post`; None besides where there is no peer now that has the region."""
        if self.life.ended:
            self._need("RDMA write", QpType.RC, QpType.UC)
            return None
        try:
            return self.try_post(*self.writing(data, region, offset, imm))
        except LifeOver:  # just now
            return None

    def writing(self, data: BufferLike | MR, region: RemoteRegion | str, offset: int, imm: int | None) -> Work:
        """The arguments of :meth:`try_post` for a write."""
        self._need("RDMA write", QpType.RC, QpType.UC)
        return _WRITE if imm is None else _WRITE_IMM, data, self._region(region), offset, imm

    def read(
        self, region: RemoteRegion | str, length: int | None, offset: int, deadline_s: float | None
    ) -> Procedure[bytes]:
        self._need("RDMA read", QpType.RC)
        deadline = Deadline(deadline_s)
        if self.life.ended:
            yield from self.standing(deadline, "wait for the connection")
        whole = self._region(region)
        source = whole.slice(offset, whole.length - offset if length is None else length)
        target = bytearray(source.length)
        yield from self.finish((yield from self.reading(target, region, source.length, offset, deadline)), deadline)
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
