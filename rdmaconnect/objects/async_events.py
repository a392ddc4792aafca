"""Asynchronous events: what happens to a device, its ports and the objects made on it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .. import verbs
from ..abi import EventType, ibv_async_event
from ..errors import StateError
from .owned import Owned
from .waitable import Waitable

__all__ = ["AsyncEvent", "AsyncEvents", "EventKind"]


class EventKind(Enum):
    """What an event has happened to."""

    DEVICE = "device"
    PORT = "port"
    QP = "QP"
    CQ = "CQ"
    SRQ = "SRQ"
    WQ = "WQ"
    #: a type that this package does not know
    UNKNOWN = "unknown"


_E = EventType
#: what each type has happened to, which is also the member of ``ibv_async_event.element``, in capitals
KINDS = {
    **dict.fromkeys((_E.DEVICE_FATAL, _E.DEVICE_SPEED_CHANGE), EventKind.DEVICE),
    **dict.fromkeys(
        (_E.PORT_ACTIVE, _E.PORT_ERR, _E.LID_CHANGE, _E.PKEY_CHANGE, _E.SM_CHANGE, _E.CLIENT_REREGISTER, _E.GID_CHANGE),
        EventKind.PORT,
    ),
    **dict.fromkeys(
        (_E.QP_FATAL, _E.QP_REQ_ERR, _E.QP_ACCESS_ERR, _E.COMM_EST, _E.SQ_DRAINED, _E.PATH_MIG, _E.PATH_MIG_ERR,
         _E.QP_LAST_WQE_REACHED),
        EventKind.QP,
    ),
    _E.CQ_ERR: EventKind.CQ,
    **dict.fromkeys((_E.SRQ_ERR, _E.SRQ_LIMIT_REACHED), EventKind.SRQ),
    _E.WQ_FATAL: EventKind.WQ,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One event, acknowledged already.

    Args:
        device: the device's name.
        event_type: what has happened.
        kind: what it has happened to.
        element: the object (``QueuePair``, ``CQ``, ...) for the kinds QP, CQ, SRQ and WQ; None if it was
            made by other means, or is no longer known here.
        port_num: the port, for the kind PORT.
        text: the library's words for ``event_type``.
    """

    device: str
    event_type: EventType
    kind: EventKind
    element: Owned | None
    port_num: int | None
    text: str

    def __str__(self) -> str:
        port = f" port {self.port_num}" if self.port_num is not None else ""
        what = self.element.name if self.element is not None else f"{self.device}{port}"
        return f"{what}: {self.event_type} ({self.text})"


class AsyncEvents(Waitable[AsyncEvent]):
    """The events of an opened device; made by ``Context.events``.

    Whoever shares the device in this process shares them: each event goes to one of those who wait.
    Each is acknowledged as it is taken, so that no destroy has to wait for it.

    Args:
        context: the device.

    Attributes:
        taker: the thread that is taking one, or None: it may not destroy what an event can be of, since that waits
            for the acknowledgement.

    Source: ibv_get_async_event(3).
    """

    def __init__(self, context: Owned) -> None:
        self._context = context
        self.taker: int | None = None
        super().__init__(
            lambda: context.pointer, f"async events of {context.name}", (context,), lambda made: made.contents.async_fd
        )

    def take(self) -> AsyncEvent | None:
        """The next event; None if there is none. Never blocks.

        Raises:
            StateError: after close.
        """
        # the device's lock, which whoever destroys something holds too: one that is gone waits for no acknowledgement
        with self._context.lock:
            self.taker = threading.get_ident()
            try:
                event = verbs.ibv_get_async_event(self.pointer)
                if event is None:
                    return None
                try:
                    return self._decoded(event)
                finally:
                    verbs.ibv_ack_async_event(event)
            finally:
                self.taker = None

    _take = take

    def _decoded(self, event: ibv_async_event) -> AsyncEvent:
        event_type = EventType(event.event_type)
        kind = KINDS.get(event_type, EventKind.UNKNOWN)
        element, port_num = None, None
        if kind is EventKind.PORT:
            port_num = event.element.port_num
        elif kind not in (EventKind.DEVICE, EventKind.UNKNOWN):
            member = getattr(event.element, kind.name.lower())
            element = _made_at(self._context, ctypes.addressof(member.contents))
        text = verbs.ibv_event_type_str(event_type)
        return AsyncEvent(self._context.name, event_type, kind, element, port_num, text)

    def _release(self, pointer: Any) -> None:
        """Nothing: the descriptor is the device's."""


def _made_at(owner: Owned, address: int) -> Owned | None:
    """The object among all that was made from ``owner`` whose C struct is at ``address``."""
    for child in owner.children():
        contents = None
        with suppress(StateError):  # it may be closed by another thread
            contents = getattr(child.pointer, "contents", None)
        if contents is not None and ctypes.addressof(contents) == address:
            return child
        found = _made_at(child, address)
        if found is not None:
            return found
    return None
