"""Completion channels and completion queues."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from . import verbs
from .abi import ibv_wc
from .device import Context
from .errors import StateError, VerbsError
from .handle import Owned

__all__ = ["CQ", "CompChannel"]

#: completions taken by one poll
BATCH = 32


class CompChannel(Owned):
    """A descriptor that becomes readable when an armed completion queue has a completion.

    Args:
        context: the device.

    Raises:
        VerbsError: EMFILE when the open-file limit is reached, among others.

    Source: ibv_create_comp_channel(3).
    """

    def __init__(self, context: Context) -> None:
        pointer = verbs.ibv_create_comp_channel(context.pointer)
        super().__init__(pointer, f"completion channel of {context.name}", (context,))
        self.context = context
        self._fd: int = pointer.contents.fd
        self._cqs: dict[int, CQ] = {}
        os.set_blocking(self._fd, False)

    def fileno(self) -> int:
        """The descriptor, for poll(2) and its kin; non-blocking."""
        self.pointer  # noqa: B018
        return self._fd

    def drain(self) -> None:
        """Take all events that have come, each counted on its queue for the acknowledgement."""
        while True:
            try:
                pointer = verbs.ibv_get_cq_event(self.pointer)
            except VerbsError as e:
                if e.errno in (errno.EAGAIN, errno.EINTR):
                    return
                raise
            cq = self._cqs.get(ctypes.addressof(pointer.contents))
            if cq is not None:
                cq._count_event()

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_comp_channel(pointer)


class CQ(Owned):
    """A completion queue.

    Args:
        context: the device.
        cqe: entries wanted, 1 to the device's ``max_cqe``.
        channel: where its events go, or None.

    Attributes:
        wcs: the :data:`BATCH` ``struct ibv_wc`` that :meth:`poll` fills; valid until the next poll.
        cqe: entries it really has.

    Raises:
        ValueError: ``cqe`` below 1.
        VerbsError: EINVAL above the device's limit, among others.

    Source: ibv_create_cq(3).
    """

    #: events acknowledged together: each acknowledgement takes a mutex
    ACK_BATCH = 64

    def __init__(self, context: Context, cqe: int, channel: CompChannel | None = None) -> None:
        if cqe < 1:
            raise ValueError(f"cqe is {cqe}: give 1 or more")
        pointer = verbs.ibv_create_cq(context.pointer, cqe, channel.pointer if channel else None)
        parents = (context, channel) if channel else (context,)
        super().__init__(pointer, f"CQ of {context.name}", parents)
        self.context, self.channel = context, channel
        self.cqe: int = pointer.contents.cqe
        self._array = (ibv_wc * BATCH)()
        self.wcs = [self._array[i] for i in range(BATCH)]
        self._poll = verbs.op("ibv_poll_cq", pointer.contents.context)
        self._unacked = 0
        if channel:
            channel._cqs[ctypes.addressof(pointer.contents)] = self

    def poll(self) -> int:
        """Take up to :data:`BATCH` completions into :attr:`wcs`.

        Returns:
            How many came.

        Raises:
            VerbsError: the queue is broken.

        Source: ibv_poll_cq(3).
        """
        count: int = self._poll(self.pointer, BATCH, self._array)
        if count < 0:
            raise VerbsError("ibv_poll_cq", -count if count < -1 else errno.EIO, f"poll {self.name}")
        return count

    def arm(self) -> None:
        """Ask for an event at the next completion; poll once more after it.

        Raises:
            StateError: it has no channel.

        Source: ibv_req_notify_cq(3).
        """
        if self.channel is None:
            raise StateError(f"arm {self.name}: it was made without a completion channel.")
        verbs.ibv_req_notify_cq(self.pointer)

    def _count_event(self) -> None:
        self._unacked += 1
        if self._unacked >= self.ACK_BATCH:
            self._ack()

    def _ack(self) -> None:
        if self._unacked:
            verbs.ibv_ack_cq_events(self.pointer, self._unacked)
            self._unacked = 0

    def _release(self, pointer: Any) -> None:
        if self.channel is not None:
            # destroying waits for the acknowledgement of every event that was taken
            self.channel.drain()
            self._ack()
            self.channel._cqs.pop(ctypes.addressof(pointer.contents), None)
        verbs.ibv_destroy_cq(pointer)
