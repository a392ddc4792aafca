"""A queue pair from one life of its connection to the next: emptied, and taken back to INIT."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..abi import QpState
from ..agreement.endpoint import Endpoint, PortAddress
from ..agreement.options import Sizes
from ..errors import CompletionError, VerbsError
from ..objects.queuepair import QueuePair
from ..objects.transition import Transition
from ..objects.work_request import RecvRequest
from ..runtime.deadline import Deadline, wait_ready
from .engine import PROBES, Engine, Ring
from .transfer import Sent

__all__ = ["Restarting", "Source"]

#: a device that has not told of all that was posted so many seconds after ERR does not any more
_DRAIN_S, _DRAIN_STEP_MS = 0.25, 1
#: for UD, where a message came from: queue pair and GID; None elsewhere, where there is only one peer
Source = tuple[int, bytes] | None


class Restarting:
    """What a :class:`~rdmaconnect.session.transceiver.Transceiver` does where a connection is connected anew."""

    engine: Engine
    sizes: Sizes
    qp: QueuePair
    is_ud: bool
    endpoint: Endpoint
    broken: CompletionError | None
    takes: Callable[[memoryview], bool] | None = None
    sent: deque[tuple[int, Sent]]
    inboxes: dict[Source, list[tuple[int, int]]]
    unread: list[tuple[int, int]]
    immediates: list[tuple[int, int]]
    _most_sent: int
    slot_size: int
    #: whether no spare receive was ever posted
    _spare_free = True
    _to_init: Transition
    _ring: Ring
    _lent: set[int]
    _idle: set[int]

    def payload(self, slot: int, length: int) -> memoryview:
        """The bytes that came into a slot."""
        raise NotImplementedError

    def _receive(self, slot: int) -> RecvRequest:
        """The receive into a slot."""
        raise NotImplementedError

    def _init(self, step: Transition) -> None:
        """To INIT, with all receives posted."""
        raise NotImplementedError

    def _flush(self) -> None:
        """What is on its way never comes to its end."""
        raise NotImplementedError

    def spare(self, size: int) -> tuple[memoryview, int, int] | None:
        """Registered memory that nothing comes into: its bytes, address and L_Key; None where there is not so much.

        It is that of the spare receives, until they are needed; none over UD, where several may prove at once.
        """
        start = self.sizes.recv_depth * self.slot_size
        if self.is_ud or not self._spare_free or size > self._ring.spare * self.slot_size:
            return None
        return self._ring.view[start : start + size], self._ring.mr.addr + start, self._ring.mr.lkey

    def hold(self) -> None:
        """Post nothing for users until :meth:`go_on`."""
        self._most_sent = 0

    def go_on(self) -> None:
        """Post what users have, unless it has failed since. Called with the engine's lock held."""
        if self.broken is None:
            self._most_sent = self.sizes.send_depth

    def stop(self) -> None:
        """To ERR, and take what the device has to tell of what was posted. Blocks, for a quarter of a second at most.

        What it has told of cannot get lost with RESET, where devices forget completions that nobody has taken.
        """
        deadline = Deadline(_DRAIN_S)
        with self.engine.lock:
            self.hold()
            if self.qp.state in (QpState.RESET, QpState.INIT):
                return
            with suppress(VerbsError):  # where the device is gone it tells nothing more
                self.qp.move(QpState.ERR)
        while True:
            with self.engine.lock:
                self.engine.progress()
                slots = set(range(self.sizes.recv_depth))
                if not self.sent and slots <= self._idle | self._held():
                    return
            if deadline.left_s <= 0:
                return
            wait_ready((), (), deadline, _DRAIN_STEP_MS)

    def restart(
        self,
        address: PortAddress | None = None,
        to_init: Transition | None = None,
        probe: bytes = b"",
        psn: int | None = None,
    ) -> None:
        """Back to INIT through RESET, with a fresh PSN and nothing outstanding: to be connected anew.

        What was on its way counts as flushed. Messages that nobody has read stay where they are.

        Args:
            address: its port as it is now; None if that is as it was.
            to_init: the step that goes with it.
            probe: what the probes of the life that is over begin with: they are no messages; b"" for none.
            psn: where the peer knows it already: the one that it sends from, 24 bits.
        """
        with self.engine.lock:
            self.hold()
            self.qp.move(QpState.RESET)
            self.engine.progress()
            self._flush()
            for inbox in self.inboxes.values():
                self.unread += (one for one in inbox if not probe or self.payload(*one)[: len(probe)] != probe)
                inbox.clear()
            self.inboxes = {} if self.is_ud else {None: []}
            self.broken, self._idle = None, set()
            end, self._to_init = self.endpoint, to_init or self._to_init
            port = address or end.port
            psn = secrets.randbits(24) if psn is None else psn
            self.endpoint = Endpoint(end.qp_type, end.qp_num, psn, port, end.recv_size, end.qkey)
            held, depth = self._held(), self.sizes.recv_depth
            if not held:
                self._init(self._to_init)
                return
            self.qp.take(self._to_init, self.endpoint)
            free = [slot for slot in range(depth) if slot not in held]
            spare = [slot for slot in range(depth, depth + self._ring.spare) if slot not in held]
            self._spare_free = False
            for slot in spare[: max(0, PROBES - len(free))] + free:
                self.qp.post_recv(self._receive(slot))

    def _held(self) -> set[int]:
        """The slots in which there is what nobody has read to its end."""
        messages = (one for inbox in (self.unread, self.immediates, *self.inboxes.values()) for one in inbox)
        return {slot for slot, _ in messages} | self._lent
