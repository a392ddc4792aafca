"""What rdma_cm says of one connection: its events are read in the service thread, as every exchange is."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

from ..abi.rdma_cma import CmEventType
from ..errors import DeviceError, RdmaConnectError, StateError, VerbsError
from ..exchange import service
from ..objects.cm import CmChannel, CmEvent, CmId
from ..protocol.handshake import Handshake, Role
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure, Wait
from .cm_errors import LAST, error_of
from .conversation import Conversation
from .trace import Trace

__all__ = ["CmConversation", "CmReader"]

T = TypeVar("T")

log = logging.getLogger("rdmaconnect")
#: seconds that a close waits for the service thread, which may be amid something
_END_S = 1.0
#: and until events that could not be taken are asked for again
_AGAIN_S = 0.2
#: what rdma_cm and the device answer when something has happened that the call does not fit any more
_TOO_LATE = {errno.EINVAL, errno.EIO, errno.ENODEV, errno.ENOENT, errno.ENOTCONN}
#: and seconds in which the event is there that says what
_EVENT_S = 0.2


class CmReader:
    """Reads one channel of events in the service thread, and gives each to who it is for.

    It is closed when the last of its users has given it back. Any thread may use it; to make it blocks.

    Raises:
        LibraryError: librdmacm is missing.
        VerbsError: as :class:`CmChannel`.
    """

    def __init__(self) -> None:
        self.channel = CmChannel()
        #: identifier -> who is told of its events
        self._told: dict[CmId, Callable[[CmEvent], None]] = {}
        self._lock, self._users = threading.Lock(), 1
        try:
            service.do(self._listen)
        except BaseException:
            self.channel.close()
            raise

    def tell(self, cm_id: CmId, told: Callable[[CmEvent], None]) -> None:
        """Have a function called, in the service thread, with each event of an identifier; it must not block."""
        self._told[cm_id] = told

    def forget(self, cm_id: CmId) -> None:
        """Nobody is told of its events any more."""
        self._told.pop(cm_id, None)

    def _listen(self) -> None:
        """In the service thread."""
        with suppress(StateError):  # closed
            service.loop().add_reader(self.channel.fileno(), self._read)

    def _read(self) -> None:
        for _ in range(64):
            try:
                event = self.channel.take()
            except StateError:  # closed
                return
            except VerbsError as e:  # no memory, for example: the event is there still
                log.warning("rdma_cm: %s It is asked again in %g s.", e, _AGAIN_S)
                service.loop().remove_reader(self.channel.fileno())
                service.loop().call_later(_AGAIN_S, self._listen)
                return
            if event is None:
                return
            told = None if event.cm_id is None else self._told.get(event.cm_id)
            if told is not None:
                told(event)
            elif event.request is not None:
                event.request.close()

    def lend(self) -> CmReader:
        """One user more; each :meth:`close` takes one back."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Close the channel, if this was the last user."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        try:  # the service thread may wait for the caller, where it calls an application's on_change
            service.do(self._end, _END_S)
        except TimeoutError:  # it comes to it
            pass
        except RuntimeError:  # the process ends
            self.channel.close()

    def _end(self) -> None:
        """In the service thread."""
        with suppress(StateError):  # a child of fork
            service.loop().remove_reader(self.channel.fileno())
        self.channel.close()


class CmConversation(Conversation):
    """One connection by rdma_cm. Nothing is said between its two ends but what rdma_cm says: there are no beats.

    Args:
        reader: its events'; one use of it is the conversation's own.
        cm_id: its identifier, which is the conversation's own.
        role: which side this is.
        trace: the stages on the way.
        doing: what is being done, in words.

    Attributes:
        cm_id: as given.
        stands: whether both sides hold the connection, so that the peer is to be told of its end.
        address: on the listener's side, the peer's, in words.
    """

    def __init__(self, reader: CmReader, cm_id: CmId, role: Role, trace: Trace, doing: str) -> None:
        super().__init__(Handshake(role, secrets.token_bytes(16)), trace)
        self._reader, self.cm_id, self._doing = reader, cm_id, doing
        self._came: dict[CmEventType, CmEvent] = {}
        self._on_removal: Callable[[DeviceError], None] | None = None
        self._ended = False
        self.stands, self.address = False, cm_id.peer
        reader.tell(cm_id, self.told)

    # ---- in the service thread

    def told(self, event: CmEvent) -> None:
        """An event has come."""
        if event.kind not in LAST:
            with self._lock:
                self._came[event.kind] = event
            self._changed()
            return
        error = error_of(event, self._doing, self.handshake.role)
        self.over(error)
        if event.kind is CmEventType.DISCONNECTED and self.stands:
            self.stands = False
            with suppress(RdmaConnectError):  # which answers it: some programs wait for that before they go on
                self.cm_id.disconnect()
        if isinstance(error, DeviceError) and self._on_removal is not None:
            self._on_removal(error)

    # ---- in any thread

    def until(self, kinds: Collection[CmEventType], deadline: Deadline, stage: str, hint: str) -> Procedure[CmEvent]:
        """Wait for one of these events.

        Raises:
            RdmaConnectError: another one came, after which they cannot come.
            DeadlineExceeded: or the class of the deadline.
        """
        while True:
            seen = self.changed.count
            for kind in kinds:
                if kind in self._came:
                    return self._came[kind]
            self.check(stage)
            deadline.check(stage, hint)
            yield Wait(deadline, changes=((self.changed, seen),))

    def explained(self, procedure: Procedure[T], deadline: Deadline, stage: str) -> Procedure[T]:
        """Run a procedure; where it is refused something for what has happened meanwhile, that is raised instead."""
        try:
            return (yield from procedure)
        except VerbsError as e:
            limit = Deadline(min(_EVENT_S, deadline.left_s) if e.errno in _TOO_LATE else 0)
            while self.left is None and limit.left_s > 0:  # the event may be on its way
                seen = self.changed.count
                if self.left is None:
                    yield Wait(limit, changes=((self.changed, seen),))
            self.check(stage)
            raise

    def holds(self, on_removal: Callable[[DeviceError], None]) -> None:
        """Both sides hold the connection from here on.

        Args:
            on_removal: called when the device is removed, in the service thread; or here, if it was already.
        """
        self._on_removal, self.stands = on_removal, True
        if isinstance(self.error, DeviceError):
            on_removal(self.error)

    def check(self, stage: str) -> None:
        """Raise if it is over."""
        if self.left is not None:
            raise self.error or self.failure(stage)

    def close(self, why: str = "close", *, lost: bool = False) -> None:
        """Say good-bye, if this was the last user."""
        closed = "this side was closed."
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._leave(closed, StateError(closed))
        self.end()

    def end(self) -> None:
        """Give the identifier up, whatever it is amid; the peer of a connection that stands is told. Twice is fine."""
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        self._reader.forget(self.cm_id)
        if self.stands:
            with suppress(RdmaConnectError):  # the peer has said so before
                self.cm_id.disconnect()
        with suppress(VerbsError):  # with its channel it is closed once more
            self.cm_id.close()
        self._reader.close()
