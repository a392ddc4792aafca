"""The extended completion queue: an iterator over completions, with the fields that it was made for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import verbs
from ..abi import CqInitAttrMask, CqWcFlags, CreateCqAttrFlags, ibv_cq_init_attr_ex
from ..errors import RdmaConnectError, StateError, VerbsError
from .completion import CQ, CompChannel, check
from .context import Context
from .current_completion import STANDARD_WC_FLAGS, CurrentCompletion
from .fields import bits, put
from .locks import this
from .owned import Owned

__all__ = ["CQEx"]


class CQEx(CurrentCompletion, CQ):
    """A completion queue that is polled as an iterator::

        for wc in cq.poll_batch():
            print(wc.wr_id, wc.status, wc.read_byte_len())

    It does all that a :class:`CQ` does, in a queue pair and with a channel. Its current completion is
    read on the queue itself: ``wr_id`` and ``status``, and by the ``read_*`` methods what ``wc_flags``
    asked for. With a status other than SUCCESS only ``wr_id``, ``status``, ``read_qp_num`` and
    ``read_vendor_err`` mean anything.

    The provider locks the queue from ``start_poll`` to ``end_poll``: another thread that polls it waits
    until then, and within a batch the same thread may not poll or resize it by other means. A batch is of
    the thread that has begun it: no other one may go on with it, read its completions or close the queue.

    Args:
        context, cqe, channel, comp_vector, cq_context: as :class:`CQ`.
        wc_flags: which fields completions must have.
        flags: SINGLE_THREADED: only one thread will ever poll it, the provider need not lock;
            IGNORE_OVERRUN: no check for an overrun, completions may be lost.
        parent_domain: a parent domain, for its thread domain and allocators; it outlives the queue.

    Attributes:
        fields: which fields its completions have, as given in ``wc_flags``. (The flags of a completion,
            ``wc_flags`` of ``struct ibv_wc``, are :meth:`read_wc_flags`.)

    Raises:
        ValueError: a number out of range, or a channel or parent domain of another device.
        VerbsError: EOPNOTSUPP where the provider lacks a flag, EINVAL above the device's limits.
        LibraryError: the library is too old.

    Source: ibv_create_cq_ex(3).
    """

    has_batches = True

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompChannel | None = None,
        *,
        comp_vector: int = 0,
        wc_flags: CqWcFlags = STANDARD_WC_FLAGS,
        flags: CreateCqAttrFlags | None = None,
        parent_domain: Owned | None = None,
        cq_context: int = 0,
    ) -> None:
        check(context, cqe, channel, comp_vector)
        self.cq_context = bits("cq_context", cq_context, 64)
        attr = put(ibv_cq_init_attr_ex(), cqe=cqe, comp_vector=comp_vector, wc_flags=int(wc_flags))
        attr.cq_context = cq_context
        if flags is not None:
            put(attr, flags=int(flags), comp_mask=int(attr.comp_mask | CqInitAttrMask.FLAGS))
        if parent_domain is not None:
            there = getattr(parent_domain, "context", None)
            if not isinstance(there, Context) or not there.is_same(context):
                raise ValueError(f"parent_domain is the {parent_domain.name}: give one of {context.name}")
            attr.comp_mask |= CqInitAttrMask.PD

        def make() -> Any:
            if channel is not None:
                attr.channel = channel.pointer
            if parent_domain is not None:
                attr.parent_domain = parent_domain.pointer
            self._ex = verbs.ibv_create_cq_ex(context.pointer, attr)
            self._struct = self._ex.contents
            self._one_by_one = verbs.next_poll_ends_batch(self._ex)
            return verbs.ibv_cq_ex_to_cq(self._ex)

        self.fields = CqWcFlags(wc_flags)
        #: what was read once: it was asked for
        self._asked: set[Callable[[Any], Any]] = set()
        #: held from start to end of a batch: a second thread waits here, not in the provider
        self._batch = threading.Lock()
        self._owner: threading.Thread | None = None  # the thread whose batch is open
        self._count = 0  # of batches: which one is open
        self._reader: threading.Thread | None = None  # the same while a completion is current
        self._locked = False  # whether the provider is within the batch too
        domains = (parent_domain,) if parent_domain is not None else ()
        self._adopt(make, f"extended CQ of {context.name}", context, channel, *domains)

    # ---- the iterator

    def poll_batch(self, most: int | None = None) -> Iterator[CQEx]:
        """The completions that there are, one after the other; ends when the queue is empty.

        The batch is ended however the loop is left: by itself, by ``break`` or by an exception. (Keep the
        iterator in a variable, and it is ended when that is closed or let go, in whatever thread.)

        Args:
            most: how many to take, 1 or more; None for all.

        Yields:
            This queue, each time with the next completion as the current one.

        Raises:
            ValueError: ``most`` is below 1.
            StateError: closed, this thread is within a batch of it already, or the batch is another thread's.
            VerbsError: the queue is broken.
        """
        if most is not None and most < 1:
            raise ValueError(f"most is {most}: give 1 or more, or None for all")
        return _Batch(self, most)

    def start_poll(self) -> bool:
        """Begin a batch with the oldest completion; if another thread is in one, wait until it ends.

        Returns:
            Whether a completion is current. If not, the queue is empty and there is no batch to end.

        Raises:
            StateError: closed, or this thread is within a batch already.
            VerbsError: the queue is broken; there is no batch to end.

        Source: ibv_create_cq_ex(3), ``ibv_start_poll``.
        """
        self._outside("start a batch")
        self._batch.acquire()
        try:
            with self.lock:
                self.pointer  # noqa: B018
                me = this.thread
                if self._start(me):
                    self._owner, self._count = me, self._count + 1
                    return True
        except BaseException:
            self._batch.release()
            raise
        self._batch.release()
        return False

    def next_poll(self) -> bool:
        """Go on to the next completion of the batch.

        Returns:
            Whether a completion is current. If not, there is none left, and :meth:`end_poll` is due.

        Raises:
            StateError: no batch was started, or another thread's.
            VerbsError: the queue is broken; :meth:`end_poll` is due all the same.

        Source: ibv_create_cq_ex(3), ``ibv_next_poll``.
        """
        with self.lock:
            me = this.thread
            if self._owner is not me:
                self._within("go on")
            return self._next(me)

    def _next(self, me: threading.Thread) -> bool:
        self._reader = None
        if self._one_by_one:
            self._end()
            return self._start(me)
        there = verbs.ibv_next_poll(self._struct, f"poll {self.name}")
        if there:
            self._reader = me
        return there

    def end_poll(self) -> None:
        """End the batch: what it went over is consumed.

        Raises:
            StateError: no batch was started.

        Source: ibv_create_cq_ex(3), ``ibv_end_poll``.
        """
        with self.lock:
            self._within("end a batch")
            self._end_batch()

    def _end_batch(self) -> None:
        self._reader = self._owner = None
        try:
            self._end()
        finally:
            self._batch.release()

    def _leave_batch(self, number: int) -> None:
        """End that batch, if it is still open. Whoever has let go of it is not within it, whichever thread it is."""
        if self._is_open(number):  # the lock only then: the collector comes here from anywhere
            with self.lock:
                if self._is_open(number):
                    self._end_batch()

    def _is_open(self, number: int) -> bool:
        return self._owner is not None and self._count == number

    def _go_on(self, number: int) -> bool:
        """As :meth:`next_poll`, if that batch is still open."""
        with self.lock:
            me = this.thread
            if self._owner is not me or self._count != number:
                if not self._is_open(number):
                    self.pointer  # noqa: B018
                    raise StateError(f"go on with a batch of {self.name}: it was ended. Begin another one.")
                self._within("go on")
            return self._next(me)

    def _start(self, me: threading.Thread) -> bool:
        self._locked = verbs.ibv_start_poll(self._struct, f"poll {self.name}")
        self._reader = me if self._locked else None
        return self._locked

    def _end(self) -> None:
        if self._locked:
            self._locked = False
            verbs.ibv_end_poll(self._struct)

    def _outside(self, doing: str) -> None:
        self.pointer  # noqa: B018
        self._end_if_left()
        if self._owner is this.thread:
            raise StateError(f"{doing} on {self.name}: this thread is within a batch of it. Call end_poll() first.")

    def batch_lock(self, doing: str) -> Any:
        self._outside(doing)
        return self._batch

    def _disown(self) -> None:
        super()._disown()
        self._owner = self._reader = None

    def _end_if_left(self) -> None:
        """End a batch that a thread has left open which is over."""
        owner = self._owner
        if owner is not None and not owner.is_alive():
            self._leave_batch(self._count)

    def _within(self, doing: str) -> None:
        self.pointer  # noqa: B018
        if self._owner is None:
            raise StateError(f"{doing} on {self.name}: no batch is open. Call start_poll() first.")
        if self._owner is not this.thread:
            raise StateError(f"{doing} on {self.name}: the batch is another thread's. Only that one may use it.")

    # ---- what must not come between the start and the end of a batch

    def poll(self) -> int:
        """As :meth:`CQ.poll`; waits for another thread's batch.

        Raises:
            StateError: closed, or this thread is within a batch.
            VerbsError: the queue is broken.
        """
        self._outside("poll")
        with self._batch:
            return super().poll()

    def busy_poll(self, tries: int) -> Sequence[Any]:
        """As :meth:`CQ.busy_poll`; otherwise as :meth:`poll`."""
        self._outside("poll")
        with self._batch:
            return super().busy_poll(tries)

    def arm(self, solicited_only: bool = False) -> None:
        """As :meth:`CQ.arm`; waits for another thread's batch: some providers take the queue's lock for it.

        Raises:
            StateError: closed, made without a channel, or this thread is within a batch.

        Source: rdma-core, providers/irdma/uverbs.c, ``irdma_uarm_cq``; ionic has the same.
        """
        with self.apart("arm"):
            super().arm(solicited_only)

    def resize(self, cqe: int) -> None:
        """As :meth:`CQ.resize`; waits for another thread's batch.

        Raises:
            StateError: closed, or this thread is within a batch.
            ValueError, VerbsError, LibraryError: as :meth:`CQ.resize`.
        """
        self._outside("resize")
        with self._batch:
            super().resize(cqe)

    def close(self) -> None:
        """Destroy it; a batch of this thread is ended first. Twice is fine.

        Raises:
            StateError: another thread is within a batch.
            VerbsError: EBUSY while a queue pair made by other means uses it.
        """
        super().close()

    def _close_children(self, refused: list[RdmaConnectError], wait: bool) -> bool:
        if wait and self._owner is this.thread:  # else it was forgotten, and this thread is within it all the same
            self.end_poll()
        return super()._close_children(refused, wait)

    def _release(self, pointer: Any) -> None:
        self._end_if_left()
        if self._owner is not None:
            raise StateError(f"close {self.name}: another thread is within a batch of it. Let it end that first.")
        super()._release(pointer)


class _Batch(Iterator[CQEx]):
    """The completions of one batch, which is ended with this."""

    def __init__(self, cq: CQEx, most: int | None) -> None:
        self._cq, self._left = cq, most
        self._number: int | None = None

    def __next__(self) -> CQEx:
        if self._left == 0:
            there = False
        elif self._number is None:
            there = self._cq.start_poll()
            self._number = self._cq._count if there else None
        else:
            try:
                there = self._cq._go_on(self._number)
            except VerbsError:
                self.close()  # which who may not go on with it does not
                raise
        if not there:
            self.close()
            self._left = 0
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        return self._cq

    def close(self) -> None:
        """End the batch, if it is still open."""
        number, self._number = self._number, None
        if number is not None:
            self._cq._leave_batch(number)

    def __del__(self) -> None:
        self.close()
