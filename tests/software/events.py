"""Asynchronous events: the verbs that take and acknowledge them."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from typing import Any

from rdmaconnect.abi import EventType, ibv_async_event

from .arena import Refused
from .calls import verb
from .device import Context


def tell(context: Context, event_type: int, element: int) -> None:
    """Queue an event. Called with the lock held."""
    context.events.append((int(event_type), element))
    if len(context.events) == 1:
        os.eventfd_write(context.event_fd, 1)


_PORT = {
    EventType.PORT_ACTIVE, EventType.PORT_ERR, EventType.LID_CHANGE, EventType.PKEY_CHANGE, EventType.SM_CHANGE,
    EventType.CLIENT_REREGISTER, EventType.GID_CHANGE,
}  # fmt: skip


@verb(locked=False)
def ibv_get_async_event(world: Any, context: Context, event: ibv_async_event) -> None:
    while True:
        with world.lock:
            if context.events:
                event_type, element = context.events.popleft()
                if not context.events:
                    os.eventfd_read(context.event_fd)
                break
            if not os.get_blocking(context.event_fd):
                raise Refused(errno.EAGAIN)
        select.select([context.event_fd], [], [], 0.1)
    event.event_type = event_type
    if event_type in _PORT:
        event.element.port_num = element
    else:
        ctypes.c_void_p.from_address(ctypes.addressof(event)).value = element


@verb
def ibv_ack_async_event(world: Any, event: ibv_async_event) -> None:
    """Nothing waits for it here: an object's events go with it."""
