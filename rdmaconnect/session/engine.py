"""The engine room: one protection domain, channel and completion queue, and the memory that receives go to."""

from __future__ import annotations

import errno
import mmap
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from ..abi import AccessFlags, QpType
from ..agreement.options import Sizes
from ..errors import RdmaConnectError, StateError, VerbsError
from ..objects.completion import BATCH, CQ, CompChannel
from ..objects.context import Context
from ..objects.memory import MR, PD
from ..objects.queuepair import QueuePair
from ..objects.work_request import RecvList
from ..runtime.wakeup import Signal

__all__ = ["Engine", "Ring"]


class User(Protocol):
    """Who has a queue pair on the engine's completion queue."""

    def complete(self, wc: Any) -> None:
        """Take one completion."""

    def close(self) -> None:
        """Destroy the queue pair."""


class Engine:
    """What queue pairs that are used together share.

    Any thread may use it: whoever waits takes the completions of all.

    Args:
        context: the opened device; its use is given back on close.
        cqe: completions that may be outstanding.

    Attributes:
        lock: held while completions are taken and work is posted.
        changed: notified when completions were taken, by whoever, and when one of its users is closed.
        transceivers: queue pair number -> transceiver.
    """

    def __init__(self, context: Context, cqe: int) -> None:
        self.context = context
        self.lock = threading.RLock()
        self.changed = Signal()
        self.transceivers: dict[int, User] = {}
        try:
            self.pd = PD(context)
            self.channel = CompChannel(context)
            self.cq = CQ(context, cqe, self.channel)
        except BaseException:
            self.close()
            raise

    def queue_pairs(self, qp_type: QpType, count: int, sizes: Sizes) -> list[QueuePair]:
        """Queue pairs on its completion queue, in RESET; inline as much as is wished and the device gives."""
        make = partial(
            QueuePair.several, count, self.pd, self.cq, self.cq, qp_type,
            max_send_wr=sizes.send_depth, max_recv_wr=sizes.recv_depth,
        )  # fmt: skip
        try:
            return make(max_inline_data=sizes.max_inline_data)
        except VerbsError as e:
            if e.errno != errno.EINVAL or not sizes.max_inline_data:
                raise
        return make()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.context.closed

    def progress(self) -> None:
        """Take what has completed, and give it to its transceivers.

        Raises:
            StateError: after close.
        """
        with self.lock:
            try:
                count = self.cq.poll()
            except StateError:
                raise StateError(f"the queue pairs on {self.context.name} are closed.") from None
            if not count:
                return
            while True:
                for wc in self.cq.wcs[:count]:
                    transceiver = self.transceivers.get(wc.qp_num)
                    if transceiver is not None:
                        transceiver.complete(wc)
                if count < BATCH or not (count := self.cq.poll()):
                    break
        self.changed.notify()

    def arm(self) -> None:
        """Ask for an event at the next completion; call :meth:`progress` after it, then sleep."""
        with self.lock:
            if not self.context.closed:
                self.channel.drain()
                self.cq.arm()

    def close(self) -> None:
        """Free everything, the last made first. Twice is fine.

        Raises:
            VerbsError: the library refuses; it names all that stays open. Close again later.
        """
        with self.lock:
            for transceiver in list(self.transceivers.values()):
                with suppress(RdmaConnectError):  # which is told of all at once below
                    transceiver.close()
            self.context.close()
            for transceiver in list(self.transceivers.values()):
                transceiver.close()


class Ring:
    """Memory for receives, registered at once for any number of transceivers.

    Args:
        pd: the protection domain.
        slots: how many receives.
        slot_size: bytes of each.
        depth: how many of them are posted together.

    Attributes:
        mr: its region.
        view: its bytes.
        receives: the receives of one transceiver, to be posted as one list; to be used under the engine's lock.
    """

    def __init__(self, pd: PD, slots: int, slot_size: int, depth: int) -> None:
        self.slot_size = slot_size
        memory = mmap.mmap(-1, slots * slot_size)
        self.mr: MR = pd.register(memory, AccessFlags.LOCAL_WRITE)
        self.view = memoryview(memory)
        self.receives = RecvList(depth, slot_size, self.mr.lkey)
