"""Asynchronous events: the verbs that take and acknowledge them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from typing import Any

from rdmaconnect.abi import EventType, ibv_async_event

from .arena import ALIVE, Misused, Object, Refused
from .calls import verb
from .device import Context
from .polling import readable

#: seconds that destroying waits for an acknowledgement
PATIENCE_S = 5.0


def tell(context: Context, event_type: int, element: int) -> None:
    """Queue an event. Called with the lock held."""
    context.events.append((int(event_type), element))
    if len(context.events) == 1:
        os.eventfd_write(context.event_fd, 1)


def forget(context: Context, thing: Object) -> None:
    """Drop the events of an object that is to go. Called with the lock held."""
    if any(element == thing.address and kind not in OF_PORT for kind, element in context.events):
        context.events = deque(one for one in context.events if one[1] != thing.address)
        _settle(context)


def _settle(context: Context) -> None:
    if not context.events:
        os.eventfd_read(context.event_fd)


def wait_for_acks(world: Any, thing: Any) -> None:
    """What destroying does first: it waits until every event that was taken is acknowledged.

    Raises:
        Refused: EBUSY where others need it.
        Misused: nobody acknowledges; the real one waits for ever.
    """
    if thing.users:
        raise Refused(errno.EBUSY)
    forget(thing.context, thing)
    if not world.network.changed.wait_for(lambda: not thing.unacked, PATIENCE_S):
        raise Misused(f"{thing}: {thing.unacked} events were not acknowledged: it would wait for ever", world)
    if thing.freed:
        raise Misused(f"use after free: {thing} was destroyed twice at once", world)


#: the types whose element is a port's number
OF_PORT = {
    int(kind)
    for kind in (
        EventType.PORT_ACTIVE, EventType.PORT_ERR, EventType.LID_CHANGE, EventType.PKEY_CHANGE, EventType.SM_CHANGE,
        EventType.CLIENT_REREGISTER, EventType.GID_CHANGE,
    )
}  # fmt: skip


@verb(locked=False)
def ibv_get_async_event(world: Any, context: Context, event: ibv_async_event) -> None:
    while True:
        with world.lock:
            if context.freed:
                raise Misused(f"{context} was closed while its events were waited for", world)
            if context.events:
                event_type, element = context.events.popleft()
                _settle(context)
                thing = ALIVE.get(element)
                if thing is not None and event_type not in OF_PORT:
                    thing.unacked += 1
                break
            if not os.get_blocking(context.event_fd):
                raise Refused(errno.EAGAIN)
        readable(context.event_fd, 100)
    event.event_type = event_type
    if event_type in OF_PORT:
        event.element.port_num = element
    else:
        ctypes.c_void_p.from_address(ctypes.addressof(event)).value = element


@verb
def ibv_ack_async_event(world: Any, event: ibv_async_event) -> None:
    if event.event_type in OF_PORT:
        return
    element = ctypes.c_void_p.from_address(ctypes.addressof(event)).value
    thing: Any = ALIVE.get(element or 0)
    if element and (thing is None or not thing.unacked):
        raise Misused(f"was given an event of {thing or hex(element)} that was acknowledged before", world)
    if thing is not None:
        thing.unacked -= 1
        head = getattr(thing, "head", thing.c)
        counter = "async_events_completed" if thing.kind == "cq" else "events_completed"
        setattr(head, counter, getattr(head, counter) + 1)
        thing.world.network.changed.notify_all()
