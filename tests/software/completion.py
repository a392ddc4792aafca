"""Completion channels and completion queues."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections import deque
from typing import Any

from rdmaconnect.abi import EventType, ibv_comp_channel, ibv_cq, ibv_wc

from .arena import Misused, Object, Refused
from .calls import verb
from .device import Context
from .events import wait_for_acks
from .memory import point
from .polling import readable

#: wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, path bits
WC = struct.Struct("=Qii6IHHBB2x")
assert WC.size == ctypes.sizeof(ibv_wc)
_ANY, _SOLICITED = 1, 2


class Channel(Object):
    """A completion channel: its descriptor is readable while events wait."""

    kind, struct, typed = "comp_channel", ibv_comp_channel, ("ibv_comp_channel",)

    def __init__(self, world: Any, context: Context) -> None:
        fd = world.opened(os.eventfd(0, os.EFD_CLOEXEC))
        super().__init__(world, context)
        self.context = context
        self.events: deque[Cq] = deque()
        point(self.c, "context", context)
        self.fd = self.c.fd = fd

    def tell(self, cq: Cq) -> None:
        """One event more."""
        self.events.append(cq)
        if len(self.events) == 1:
            os.eventfd_write(self.fd, 1)

    def forget(self, cq: Cq) -> None:
        """Drop the events of a queue that is no more."""
        if cq in self.events:
            self.events = deque(one for one in self.events if one is not cq)
            self.settle()

    def settle(self) -> None:
        """Make the descriptor unreadable, if there is no event left."""
        if not self.events and readable(self.fd, 0):
            os.eventfd_read(self.fd)

    def free(self, how: str) -> None:
        super().free(how)
        self.world.close_fd(self.fd)


class Cq(Object):
    """A completion queue.

    Attributes:
        queue: (queue pair's number, a packed ``ibv_wc``, when in ns), the oldest first.
    """

    kind, struct, typed = "cq", ibv_cq, ("ibv_cq", "ibv_cq_ex")

    def __init__(self, world: Any, context: Context, cqe: int, channel: Channel | None, vector: int) -> None:
        world.room_for(context, "cq")
        if not 1 <= cqe <= context.device.limit("max_cqe") or not 0 <= vector < context.device.num_comp_vectors:
            raise Refused(errno.EINVAL)
        super().__init__(world, context, channel)
        self.context, self.channel = context, channel
        self.queue: deque[tuple[int, bytes, int]] = deque()
        self.armed = 0
        self.overrun = False
        point(self.c, "context", context)
        point(self.c, "channel", channel)
        self.c.cqe = cqe

    def add(self, qp_num: int, wc: bytes, solicited: bool) -> None:
        """One completion more; and its event, if that was asked for."""
        if len(self.queue) >= self.c.cqe:
            if not self.overrun:
                self.overrun = True
                self.world.error(f"{self} of {self.c.cqe} entries was overrun", stack=False)
                self.world.event(self.context, EventType.CQ_ERR, self.address)
            return
        self.queue.append((qp_num, wc, time.monotonic_ns()))
        if self.armed == _ANY or (self.armed and solicited):
            self.armed = 0
            if self.channel is not None:
                self.channel.tell(self)

    def clean(self, qp_num: int) -> None:
        """Take out what a queue pair has left."""
        if any(one[0] == qp_num for one in self.queue):
            self.queue = deque(one for one in self.queue if one[0] != qp_num)


# ---- verbs


@verb
def ibv_create_comp_channel(world: Any, context: Context) -> Channel:
    return Channel(world, context)


@verb
def ibv_destroy_comp_channel(world: Any, channel: Channel) -> None:
    channel.free("ibv_destroy_comp_channel")


@verb
def ibv_create_cq(
    world: Any, context: Context, cqe: int, cq_context: int | None, channel: Channel | None, comp_vector: int
) -> Cq:
    made = Cq(world, context, cqe, channel, comp_vector)
    made.c.cq_context = cq_context
    return made


@verb
def ibv_resize_cq(world: Any, cq: Cq, cqe: int) -> None:
    if not max(1, len(cq.queue)) <= cqe <= cq.context.device.limit("max_cqe"):
        raise Refused(errno.EINVAL)
    cq.c.cqe = cqe


@verb
def ibv_modify_cq(world: Any, cq: Cq, attr: Any) -> None:
    """Events are never held back here, so there is nothing to set."""


@verb
def ibv_destroy_cq(world: Any, cq: Cq) -> None:
    wait_for_acks(world, cq)
    cq.free("ibv_destroy_cq")
    if cq.channel is not None:
        cq.channel.forget(cq)


@verb(idle=lambda thing: thing.kind == "cq" and not thing.queue)
def ibv_poll_cq(world: Any, cq: Cq, num_entries: int, wc: Any) -> int:
    queue = cq.queue
    count = min(num_entries, len(queue))
    data = b"".join([queue.popleft()[1] for _ in range(count)])
    ctypes.memmove(ctypes.addressof(wc), data, len(data))
    return count


@verb
def ibv_req_notify_cq(world: Any, cq: Cq, solicited_only: int) -> None:
    if cq.channel is not None and cq.armed != _ANY:
        cq.armed = _SOLICITED if solicited_only else _ANY


@verb(locked=False)
def ibv_get_cq_event(world: Any, channel: Channel, cq: int, cq_context: Any) -> None:
    while True:
        with world.lock:
            if channel.freed:
                raise Misused(f"{channel} was destroyed while it was waited on", world)
            if channel.events:
                found = channel.events.popleft()
                channel.settle()
                found.unacked += 1
                break
            if not os.get_blocking(channel.fd):
                raise Refused(errno.EAGAIN)
        readable(channel.fd, 100)
    ctypes.c_void_p.from_address(cq).value = found.address
    cq_context.value = found.c.cq_context


@verb
def ibv_ack_cq_events(world: Any, cq: Cq, nevents: int) -> None:
    if nevents > cq.unacked:
        raise Misused(f"{cq}: {nevents} events are acknowledged, and {cq.unacked} were taken", world)
    cq.unacked -= nevents
    cq.c.comp_events_completed += nevents
    world.network.changed.notify_all()
