"""Completion channels and completion queues. What is polled as an iterator is in ``completion_ex``."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from . import verbs
from .abi import CqAttrMask, ibv_modify_cq_attr, ibv_wc
from .device import Context
from .errors import StateError, VerbsError
from .handle import Owned
from .waiting import Waitable

__all__ = ["CQ", "CompChannel"]

#: completions taken by one poll
BATCH = 32


class CompChannel(Waitable["list[CQ]"]):
    """A descriptor that becomes readable when an armed completion queue has a completion.

    ``wait``, ``wait_async`` and ``drain`` give the queues that had events; each is then armed again, and
    polled until it is empty: an event may come without a completion, and for many there may be one
    event.

    Args:
        context: the device.

    Raises:
        VerbsError: EMFILE when the open-file limit is reached, among others.

    Source: ibv_create_comp_channel(3), ibv_get_cq_event(3).
    """

    def __init__(self, context: Context) -> None:
        pointer = verbs.ibv_create_comp_channel(context.pointer)
        super().__init__(pointer, f"completion channel of {context.name}", (context,), pointer.contents.fd)
        self.context = context
        self._cqs: dict[int, CQ] = {}

    def drain(self) -> list[CQ]:
        """Take all events that have come, each counted on its queue for the acknowledgement. Never blocks.

        Returns:
            The queues that they were for, each once, in the order of their first events.

        Raises:
            StateError: after close.
        """
        found: dict[int, CQ] = {}
        with self._lock:
            while event := verbs.ibv_get_cq_event(self.pointer):
                pointer, _ = event
                address = ctypes.addressof(pointer.contents)
                cq = self._cqs.get(address)
                if cq is not None:
                    cq._count_event()
                    found[address] = cq
        return list(found.values())

    _take = drain

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_comp_channel(pointer)


class CQ(Owned):
    """A completion queue.

    Events taken from its channel are acknowledged by itself: many at a time, and the rest before it is
    destroyed, which waits for that.

    Args:
        context: the device.
        cqe: entries wanted, 1 to the device's ``max_cqe``.
        channel: where its events go, or None.
        comp_vector: which of the device's interrupt vectors signals them, below ``num_comp_vectors``.

    Attributes:
        wcs: the :data:`BATCH` ``struct ibv_wc`` that :meth:`poll` fills; valid until the next poll.
        cqe: entries it really has.
        unacked: events taken and not acknowledged yet.

    Raises:
        ValueError: ``cqe`` or ``comp_vector`` out of range, or a channel of another device.
        VerbsError: EINVAL above the device's limit, among others.

    Source: ibv_create_cq(3).
    """

    #: events acknowledged together: each acknowledgement takes a mutex
    ACK_BATCH = 64

    def __init__(self, context: Context, cqe: int, channel: CompChannel | None = None, *, comp_vector: int = 0) -> None:
        check(context, cqe, channel, comp_vector)
        events = channel.pointer if channel else None
        pointer = verbs.ibv_create_cq(context.pointer, cqe, events, comp_vector)
        self._adopt(pointer, f"CQ of {context.name}", context, channel)

    def _adopt(self, pointer: Any, name: str, context: Context, channel: CompChannel | None, *parents: Owned) -> None:
        """Become the owner of a ``struct ibv_cq *``."""
        Owned.__init__(self, pointer, name, (context, *((channel,) if channel else ()), *parents))
        self.context, self.channel = context, channel
        self._array = (ibv_wc * BATCH)()
        self.wcs = [self._array[i] for i in range(BATCH)]
        self._poll = verbs.op("ibv_poll_cq", pointer.contents.context)
        self._unacked = 0
        if channel:
            channel._cqs[ctypes.addressof(pointer.contents)] = self

    @property
    def cqe(self) -> int:
        """Entries it really has, at least as many as were asked for."""
        return int(self.pointer.contents.cqe)

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

    def arm(self, solicited_only: bool = False) -> None:
        """Ask for an event at the next completion; poll once more after it.

        Args:
            solicited_only: only for a receive that the sender marked (``SendFlags.SOLICITED``), or a failure
                (rxe leaves failures out).

        Raises:
            StateError: it has no channel.

        Source: ibv_req_notify_cq(3).
        """
        if self.channel is None:
            raise StateError(f"arm {self.name}: it was made without a completion channel.")
        verbs.ibv_req_notify_cq(self.pointer, solicited_only)

    def resize(self, cqe: int) -> None:
        """Change how many entries it has; what waits in it stays.

        Args:
            cqe: entries wanted, 1 to ``max_cqe``; :attr:`cqe` then says how many it got.

        Raises:
            ValueError: below 1.
            VerbsError: EINVAL above the limit, or below the completions that wait in it.
            LibraryError: the provider does not have it.

        Source: ibv_resize_cq(3).
        """
        if not 1 <= cqe < 1 << 31:
            raise ValueError(f"cqe is {cqe}: give 1 or more")
        verbs.ibv_resize_cq(self.pointer, cqe)

    def moderate(self, count: int, period_us: int) -> None:
        """Let one event stand for several completions.

        Args:
            count: completions, 0 to 65535 and at most the device's ``cq_mod_caps.max_cq_count``.
            period_us: microseconds after the first of them, likewise.

        Raises:
            ValueError: above 65535.
            VerbsError: EINVAL above the device's limit.
            LibraryError: the provider does not have it.

        Source: ibv_modify_cq(3).
        """
        for name, value in (("count", count), ("period_us", period_us)):
            if not 0 <= value <= 0xFFFF:
                raise ValueError(f"{name} is {value}: give 0 to 65535")
        attr = ibv_modify_cq_attr(attr_mask=int(CqAttrMask.MODERATE))
        attr.moderate.cq_count, attr.moderate.cq_period = count, period_us
        verbs.ibv_modify_cq(self.pointer, attr)

    # ---- events

    @property
    def unacked(self) -> int:
        """Events taken from the channel and not acknowledged yet."""
        return self._unacked

    def ack_events(self, count: int | None = None) -> None:
        """Acknowledge events now. Seldom needed: it happens by itself, many at a time and before the end.

        Args:
            count: how many; None for all that are due.

        Raises:
            ValueError: more than were taken.

        Source: ibv_get_cq_event(3), ``ibv_ack_cq_events``.
        """
        pointer = self.pointer
        if self.channel is None:
            if count:
                raise ValueError(f"acknowledge {count} events of {self.name}: it has no channel, so none can come")
            return
        with self.channel._lock:
            due = self._unacked if count is None else count
            if not 0 <= due <= self._unacked:
                raise ValueError(f"acknowledge {due} events of {self.name}: {self._unacked} are due")
            if due:
                verbs.ibv_ack_cq_events(pointer, due)
                self._unacked -= due

    def _count_event(self) -> None:
        """One was taken; the caller holds the channel's lock."""
        self._unacked += 1
        if self._unacked >= self.ACK_BATCH:
            self.ack_events()

    def _release(self, pointer: Any) -> None:
        if self.channel is None:
            verbs.ibv_destroy_cq(pointer)
            return
        # destroying waits for the acknowledgement of every event that was taken: nobody may take one now
        with self.channel._lock:
            self.channel.drain()
            self.ack_events()
            verbs.ibv_destroy_cq(pointer)
            self.channel._cqs.pop(ctypes.addressof(pointer.contents), None)


def check(context: Context, cqe: int, channel: CompChannel | None, comp_vector: int) -> None:
    """Refuse what the kernel would refuse without a word, or take for another number.

    Raises:
        ValueError: names the argument.
    """
    if not 1 <= cqe < 1 << 31:
        raise ValueError(f"cqe is {cqe}: give 1 or more")
    vectors = context.num_comp_vectors
    if not 0 <= comp_vector < vectors:
        raise ValueError(f"comp_vector is {comp_vector}: {context.name} has {vectors}, give 0 to {vectors - 1}")
    if channel is not None and channel.context is not context:
        raise ValueError(f"channel is the {channel.name}: give one of {context.name}")
