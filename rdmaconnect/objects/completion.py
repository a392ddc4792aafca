"""Completion channels and completion queues. What is polled as an iterator is in ``completion_ex``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref
from functools import partial
from itertools import repeat, starmap
from typing import Any

from .. import verbs
from ..abi import CqAttrMask, ibv_cq, ibv_modify_cq_attr, ibv_wc
from ..errors import StateError, VerbsError
from .context import Context
from .fields import bits
from .locks import exclusive
from .owned import Owned
from .waitable import Waitable

__all__ = ["CQ", "CompChannel"]

#: completions taken by one poll
BATCH = 32


class CompChannel(Waitable["list[CQ]"]):
    """A descriptor that becomes readable when an armed completion queue has a completion.

    ``wait``, ``wait_async`` and ``drain`` give the queues that had events; each is then armed again, and
    polled until it is empty: an event may come without a completion, and for many there may be one.

    Args:
        context: the device.

    Raises:
        VerbsError: EMFILE when the open-file limit is reached, among others.

    Source: ibv_create_comp_channel(3), ibv_get_cq_event(3).
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._cqs: dict[int, CQ] = {}
        #: where the next event is put, and its queue's address there: Ctrl-C loses none that is not counted yet
        self._event = ctypes.POINTER(ibv_cq)(), ctypes.c_void_p()
        self._came = ctypes.c_void_p.from_buffer(self._event[0])
        super().__init__(
            lambda: verbs.ibv_create_comp_channel(context.pointer),
            f"completion channel of {context.name}",
            (context,),
            lambda made: made.contents.fd,
        )

    def drain(self) -> list[CQ]:
        """Take all events that have come, each counted on its queue for the acknowledgement. Never blocks.

        Those of a queue that was made by other means are acknowledged at once, and not told of.

        Returns:
            The queues that they were for, each once, in the order of their first events.

        Raises:
            StateError: after close.
        """
        with self.lock:
            self.pointer  # noqa: B018
            return self._take_all()

    def _take_all(self) -> list[CQ]:
        """Called with the lock held; also while it is being closed."""
        found: dict[int, CQ] = {}
        channel, came = self._pointer, self._came
        while came.value is not None or verbs.ibv_get_cq_event(channel, self._event):
            address: int = came.value  # type: ignore[assignment]
            pointer, cq = ctypes.cast(address, ctypes.POINTER(ibv_cq)), self._cqs.get(address)
            if cq is not None:
                found[address] = cq
                cq._unacked += 1
                came.value = None  # nothing is called between these two, and so no signal's handler
                if cq._unacked >= cq.ACK_BATCH:
                    cq._acknowledge(pointer)
            else:  # of a queue that was made by other means: destroying it would wait for this for ever
                came.value = None
                verbs.ibv_ack_cq_events(pointer, 1)
        return list(found.values())

    _take = drain

    def _release(self, pointer: Any) -> None:
        try:
            verbs.ibv_destroy_comp_channel(pointer)
        except VerbsError:
            if not self.gone:
                raise
            os.close(self._fd)  # C counts the queues of the lost device, which are never freed


class CQ(Owned):
    """A completion queue.

    Any number of threads may poll it: each has :attr:`wcs` of its own. Events taken from its channel are
    acknowledged by itself: many at a time, and the rest before it is destroyed, which waits for that.

    Args:
        context: the device.
        cqe: entries wanted, 1 to the device's ``max_cqe``.
        channel: where its events go, or None.
        comp_vector: which of the device's interrupt vectors signals them, below ``num_comp_vectors``.
        cq_context: a number of the caller's, 64 bits, which comes with each event (``verbs.ibv_get_cq_event``).

    Attributes:
        cq_context: as given.
        cqe: entries it really has.
        unacked: events taken and not acknowledged yet.

    Raises:
        ValueError: ``cqe`` or ``comp_vector`` out of range, or a channel of another device.
        VerbsError: EINVAL above the device's limit, among others.

    Source: ibv_create_cq(3).
    """

    #: events acknowledged together: each acknowledgement takes a mutex
    ACK_BATCH = 64
    #: whether it is polled in batches, within which a provider holds its lock
    has_batches = False

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompChannel | None = None,
        *,
        comp_vector: int = 0,
        cq_context: int = 0,
    ) -> None:
        check(context, cqe, channel, comp_vector)
        self.cq_context = bits("cq_context", cq_context, 64)

        def make() -> Any:
            events = channel.pointer if channel else None
            return verbs.ibv_create_cq(context.pointer, cqe, events, comp_vector, cq_context)

        self._adopt(make, f"CQ of {context.name}", context, channel)

    def _adopt(
        self, make: Callable[[], Any], name: str, context: Context, channel: CompChannel | None, *parents: Owned
    ) -> None:
        """Become the owner of a ``struct ibv_cq *``."""
        self.context, self.channel = context, channel
        #: events taken and not acknowledged; and, while some are being, how many, and how many had been by the library
        self._unacked, self._acking = 0, None  # type: int, tuple[int, int] | None

        def made() -> Any:
            pointer = make()
            poll = verbs.shuttable(verbs.op("ibv_poll_cq", pointer.contents.context))
            self._shuttable = (poll,)
            self._mine = _Buffer(partial(poll, byref(pointer.contents)))
            if channel:
                channel._cqs[ctypes.addressof(pointer.contents)] = self
            return pointer

        Owned.__init__(self, made, name, (context, *((channel,) if channel else ()), *parents))

    @property
    def wcs(self) -> list[Any]:
        """The :data:`BATCH` ``struct ibv_wc`` that :meth:`poll` fills for the calling thread, until its next poll."""
        return self._mine.wcs

    def batch_lock(self, doing: str) -> Any:
        """What is held within a batch; None where there are none: see :attr:`has_batches`.

        Raises:
            StateError: this thread is within one, and would wait for itself.
        """
        return None

    def apart(self, doing: str) -> AbstractContextManager[object]:
        """To be held around what takes the provider's lock of this queue: to reset a queue pair, for example.

        Args:
            doing: that, in words.

        Raises:
            StateError: this thread is within a batch, and would wait for itself.
        """
        return self.batch_lock(doing) or nullcontext()

    @property
    @exclusive
    def cqe(self) -> int:
        """Entries it really has, at least as many as were asked for."""
        return int(self.pointer.contents.cqe)

    def poll(self) -> int:
        """Take up to :data:`BATCH` completions into this thread's :attr:`wcs`.

        Returns:
            How many came.

        Raises:
            StateError: after close.
            VerbsError: the queue is broken.

        Source: ibv_poll_cq(3).
        """
        count = self._mine.poll()
        return count if count >= 0 else self._alone(count)

    @exclusive
    def _alone(self, count: int) -> int:
        """What a poll came to that answered less than 0: it is closed or broken, or was just being resized."""
        self.pointer  # noqa: B018
        if count == verbs.SHUT:
            count = self._mine.poll()
        if count < 0:
            raise verbs.failed("ibv_poll_cq", count, f"poll {self.name}")
        return count

    def busy_poll(self, tries: int) -> Sequence[Any]:
        """Poll again and again until something has come: what costs least for who wants it at once.

        No other thread of this process runs meanwhile: give a number of tries that it can do without, some dozens.

        Args:
            tries: how often at most, 1 or more.

        Returns:
            Those of this thread's :attr:`wcs` that came, none if nothing did.

        Raises:
            StateError, VerbsError: as :meth:`poll`.
        """
        mine = self._mine
        count = mine.poll() or next(filter(None, starmap(mine.poll, repeat((), tries - 1))), 0)
        if count < 0:
            count = self._alone(count)
        return mine.wcs[:count] if count else ()

    @exclusive
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

    @exclusive
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
        pointer = self.pointer
        self._shut()  # who polls now waits for the lock
        try:
            verbs.ibv_resize_cq(pointer, cqe)
        finally:
            self._reopen()

    @exclusive
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
        self.pointer  # noqa: B018
        if self.channel is None:
            if count:
                raise ValueError(f"acknowledge {count} events of {self.name}: it has no channel, so none can come")
            return
        with self.channel.lock:
            self._settle(self.pointer)
            if count is not None and not 0 <= count <= self._unacked:
                raise ValueError(f"acknowledge {count} events of {self.name}: {self._unacked} are due")
            self._acknowledge(self.pointer, count)

    def _acknowledge(self, pointer: Any, count: int | None = None) -> None:
        """Called with the channel's lock held, which is what keeps the queue from being destroyed meanwhile."""
        self._settle(pointer)
        if count := self._unacked if count is None else count:
            self._acking = count, pointer.contents.comp_events_completed
            verbs.ibv_ack_cq_events(pointer, count)
            self._settle(pointer)

    def _settle(self, pointer: Any) -> None:
        """Count what was acknowledged, also where a signal's handler raised just then."""
        if self._acking is not None:
            count, before = self._acking
            if pointer.contents.comp_events_completed != before:
                self._unacked -= count
            self._acking = None  # nothing is called between these two

    def _locks_after(self) -> list[Any]:
        # destroying waits for the acknowledgement of every event that was taken: nobody may take one now
        return [self.context.destroying(self), *([] if self.channel is None else [self.channel.lock])]

    def _release(self, pointer: Any) -> None:
        if self.channel is not None:
            with contextlib.suppress(VerbsError):  # a device that is gone gives none, and waits for none
                self.channel._take_all()
            self._acknowledge(pointer)
        verbs.ibv_destroy_cq(pointer)

    def _freed(self, pointer: Any) -> None:
        address = ctypes.addressof(pointer.contents)  # the next queue may have it by now
        if self.channel is not None and self.channel._cqs.get(address) is self:
            del self.channel._cqs[address]


class _Buffer(threading.local):
    """What one thread polls into: ``poll`` takes completions into ``wcs``, and answers how many."""

    wcs: list[Any]
    poll: Callable[[], int]

    def __init__(self, verb: Callable[..., int]) -> None:
        self._verb = verb

    def __getattr__(self, name: str) -> Any:
        """At its first poll: many a thread that makes a queue never polls it."""
        if name not in _Buffer.__annotations__:
            raise AttributeError(name)
        array = (ibv_wc * BATCH)()
        self.wcs = [*array]
        self.poll = partial(self._verb, BATCH, byref(self.wcs[0]))
        return self.__dict__[name]


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
    if channel is not None and not channel.context.is_same(context):
        raise ValueError(f"channel is the {channel.name}: give one of {context.name}")
