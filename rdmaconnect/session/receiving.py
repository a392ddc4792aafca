"""What comes over a connection: messages, and word of writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..abi import QpType
from ..agreement.endpoint import Endpoint
from ..errors import StateError
from ..objects.buffer_like import BufferLike
from ..objects.buffers import hold
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure
from .transceiver import Source
from .waiting import Waiting

__all__ = ["Receiving"]

#: slot and bytes of a message
Message = tuple[int, int]


class Receiving(Waiting):
    """The receiving side of :class:`~rdmaconnect.session.data_path.DataPath`."""

    local: Endpoint
    _source: Source
    #: the messages that can be read
    _inbox: list[Message]

    def _begin(self) -> None:
        """There is a peer."""
        #: messages that have been taken from it, and words of writes
        self._taken = 0
        self._lossy = self.local.qp_type != QpType.RC

    def inbox(self) -> list[Message]:
        """What has come in this life."""
        try:
            return self.transceiver.inboxes[self._source]
        except KeyError:
            self.check_open()
            raise

    def _let_read(self) -> None:
        """From now on what has come in this life can be read, after what was left of earlier ones.

        The engine's lock is held.
        """
        self._inbox = inbox = self.inbox()
        if unread := self.transceiver.unread:
            inbox[:0] = unread
            unread.clear()

    def heed(self, takes: Callable[[memoryview], bool]) -> None:
        """Have what is not the application's taken out, of what has come in this life and of what comes."""
        with self.engine.lock:
            self.transceiver.takes, inbox = takes, self.inbox()
            self.engine.progress()  # what lies there holds a receive each
            for message in [message for message in inbox if takes(self.transceiver.payload(*message))]:
                inbox.remove(message)
                self.transceiver.repost(message[0])

    def try_recv(self, deadline_s: float | None) -> bytes | None:
        """The next message if it is there, or comes while this end polls; None else."""
        self._check(deadline_s)
        return self._polled(self._recv)

    def recv(self, deadline_s: float | None) -> Procedure[bytes]:
        """The next message, where :meth:`try_recv` gave none."""
        return self._until(self._recv, Deadline(deadline_s), "recv", polled=True)

    def _recv(self) -> bytes | None:
        """An attempt at it."""
        if not self._inbox:
            return None
        message = self._message() if self._lossy else self._inbox.pop(0)
        return None if message is None else self.transceiver.take(*message)

    def _message(self) -> Message | None:
        """Take the next message, if there is one."""
        inbox = self._inbox
        while inbox:
            message = inbox.pop(0)
            if not (self._lossy and self._is_probe(message)):
                self._taken += 1
                return message
            self.transceiver.repost(message[0])
        return None

    def _is_probe(self, message: Message) -> bool:
        """Whether it is a probe that came a second time."""
        return self.conversation.is_probe(self.transceiver.payload(*message))

    def recv_into(self, buffer: BufferLike, deadline_s: float | None) -> Procedure[int]:
        self.check_open()
        with hold(buffer) as target:
            if target.readonly:
                raise ValueError(f"receive into a read-only {type(buffer).__name__}: give a writable one")
            view, room = target.view, target.length

            def attempt() -> int | None:
                if not self._inbox:
                    return None
                message = self._message()
                if message is None:
                    return None
                slot, length = message
                if length > room:
                    self._inbox.insert(0, message)
                    raise ValueError(f"receive {length} bytes: the buffer has {room}")
                try:
                    view[:length] = self.transceiver.payload(slot, length)
                finally:
                    self.transceiver.repost(slot)
                return length

            return (yield from self._until(attempt, Deadline(deadline_s), "recv"))

    def recv_view(self, deadline_s: float | None) -> Procedure[AbstractContextManager[memoryview]]:
        self.check_open()
        return (yield from self._until(self._lent, Deadline(deadline_s), "recv"))

    def _lent(self) -> AbstractContextManager[memoryview] | None:
        """An attempt at it."""
        if not self._inbox:
            return None
        message = self._message()
        return None if message is None else self.transceiver.lend(*message)

    def recv_imm(self, deadline_s: float | None) -> Procedure[int]:
        self._need("a write that is told", QpType.RC, QpType.UC)
        return (yield from self._until(self._imm, Deadline(deadline_s), "recv_imm"))

    def _imm(self) -> int | None:
        while self._lossy and self._inbox and self._is_probe(self._inbox[0]):
            self.transceiver.repost(self._inbox.pop(0)[0])  # nobody may call recv(), and a write needs a slot
        if not self.transceiver.immediates:
            return None
        slot, imm = self.transceiver.immediates.pop(0)
        self._taken += 1
        self.transceiver.repost(slot)
        return imm

    def _need(self, what: str, *types: QpType) -> None:
        self.check_open()
        if self.local.qp_type not in types:
            words = " or ".join(map(str, types))
            raise StateError(f"{what} over {self.local.qp_type}: this type does not have it. Connect with {words}.")
