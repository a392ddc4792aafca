"""One end of a connection: who its peer is, reconnecting, closing; ``data_path`` has what moves over it.

What users hold of it are the fronts of ``connection``. The rest of the session deals with ends, and uses what has no
underscore.
"""

from __future__ import annotations

import errno
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

from ..errors import DeviceError, PeerClosed, RdmaConnectError, StateError, VerbsError, together
from ..exchange import service
from ..objects.context import Port
from ..objects.memory import MR
from ..objects.queuepair import QueuePair
from ..protocol.codec import MAX_TEXT
from ..protocol.health import Health, HealthState
from ..protocol.messages import Bye
from ..runtime.deadline import Deadline
from ..runtime.fork import process
from ..runtime.procedure import Call, Procedure, Wait
from ..runtime.workers import here
from . import attendants
from .conversation import now
from .prepared import Prepared
from .renewing import Established, Renewing
from .surroundings import compare
from .trace import Mark
from .transceiver import Transceiver

__all__ = ["End", "Established"]

log = logging.getLogger("rdmaconnect")
_close = attrgetter("close")
#: seconds that what is under way in the background has, when a connection is closed
_GRACE_S = 1.0


class End(Renewing):
    """One queue pair connected to one peer.

    Args:
        prepared: what it stands on; its use is given back by :meth:`close`.
        transceiver: the queue pair, in RTS.
        established: what joins it to its peer.

    Attributes:
        local, peer, path, remote, private_data, regions, ah, max_send_size, connect_s, trace, closed, lost: what
            users see of them, see :class:`~rdmaconnect.Connection`.
        front: the class of what a user holds of it, for words.
        spin: polls before a wait sleeps.
        prepared, engine, transceiver, conversation: what it stands on, and what joins it to its peer now.
        to: for UD, where each message goes.
        token: by which its peer may take its place later.
        known_as: the token by which the peer knows it: of the last exchange that came to an end.
    """

    _watchers: tuple[Callable[[Health], object], ...] = ()
    _last_health = Health(HealthState.ALIVE)
    _to_free: Sequence[Callable[[], None]] = ()

    def __init__(self, prepared: Prepared, transceiver: Transceiver, established: Established) -> None:
        prepared.lend()
        self.prepared, self.engine, self.transceiver = prepared, prepared.engine, transceiver
        self.regions: Mapping[str, MR] = prepared.regions
        self.connect_s, self.spin, self.front = 0.0, prepared.options.spin, "Connection"
        self._closed = False
        #: the mark of the process that it belongs to; None for none any more
        self._process = process.mark
        self._inbox = transceiver.unread
        self.join(established)

    def replaced(self, token: bytes) -> None:
        """Its peer connects anew, and so has given up the conversation that ``token`` is of.

        A hello that comes late, when there is a newer one, changes nothing.
        """
        conversation = self.conversation
        if self.token == token:
            conversation.over(PeerClosed("the peer connects anew: call reconnect()."))

    @property
    def qp(self) -> QueuePair:
        """The queue pair, as users see it."""
        return self.transceiver.qp

    # ---- this host

    @property
    def device(self) -> str:
        """The name of the device that it is on."""
        return self.local.port.device

    def changed(self, ports: dict[tuple[object, int], Port]) -> None:
        """Something of this host has changed: see whether it is what this goes by. In a worker."""
        context = self.engine.context
        try:
            if not context.removed:
                key = self.engine, self.path.port_num
                now = ports[key] = ports.get(key) or context.port(self.path.port_num)
                self.conversation.here(*compare(self.local.port, self.path, now))
                return
        except StateError:  # it is being closed
            return
        except VerbsError as e:
            if e.errno not in (errno.EIO, errno.ENODEV):
                return
        self.lose(DeviceError(f"use {self.local}: {self.device} is not there any more: it was removed. Connect anew."))

    def lose(self, error: DeviceError) -> None:
        """Its device is not there any more: the peer is told. Blocks."""
        conversation = self.conversation
        with suppress(RdmaConnectError):  # it is over already, or goes by the device itself
            conversation.say(Bye(conversation.id, str(error)[:MAX_TEXT]))
        self.engine.lose(error)
        conversation.over(error)

    # ---- the end

    def check_open(self) -> None:
        """Raise if it was closed, belongs to another process, or its device is gone."""
        if self.engine.gone is not None and not self._closed:
            raise self.engine.gone
        if self._process is not process.mark:
            raise StateError(
                f"the connection from {self.local} to {self.peer} belongs to the process that forked this one: "
                "connect anew here."
            )
        if self._closed:
            raise StateError(f"the connection from {self.local} to {self.peer} is closed.")

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def health(self) -> Health:
        """What is known of the peer. Never blocks."""
        if self._closed:
            return self._last_health
        if self.look() and self.conversation.left is None and self.transceiver.broken is not None:
            self._doubts(self.transceiver.broken)
        return self._told(self.conversation.health)

    def _told(self, health: Health) -> Health:
        """As those who hold it are told of it: what is connected anew by itself is not dead."""
        if health.state is not HealthState.DEAD:
            return health
        if self.given_up:
            return Health(HealthState.DEAD, self.given_up, health.since)
        if self.comes_back():
            why = f"{health.why.rstrip('.')}: it is being connected anew"
            return Health(HealthState.SUSPECT, why, health.since)
        return health

    def on_change(self, function: Callable[[Health], object]) -> Callable[[], None]:
        """Have a function called in the service thread whenever ``health`` changes; what is given takes that back."""
        with self.engine.lock:
            self._watchers = (*self._watchers, function)

        def remove() -> None:
            with self.engine.lock:
                self._watchers = tuple(one for one in self._watchers if one is not function)

        return remove

    @property
    def watched(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._watchers)

    def turned(self, health: Health) -> None:
        """This is what is known of the peer now. In the service thread."""
        self._tell(self._watchers, self._told(health))

    def _tell(self, watchers: tuple[Callable[[Health], object], ...], health: Health) -> None:
        for function in watchers:
            try:
                function(health)
            except Exception:
                log.exception("on_change of %r", self)

    @property
    def lost(self) -> RdmaConnectError | None:
        """Why it is of no more use, or None as far as is known here. Never blocks."""
        try:
            self.check_open()
            self.engine.progress()
        except (StateError, DeviceError) as e:
            return e
        if self._is_lost and not self.comes_back():
            return self._over("use the connection", self.transceiver.broken)
        return None

    def closing(self) -> Procedure[None]:
        """Close it, and wait until nothing of it goes on, which may be in the midst of a verb."""
        yield Call(self.close)
        deadline = Deadline(_GRACE_S)
        while self._unattended and deadline.left_s > 0:
            seen = self.engine.changed.count
            if self._unattended:
                yield Wait(deadline, changes=((self.engine.changed, seen),))

    @property
    def trace(self) -> tuple[Mark, ...]:
        """Each stage of the handshake with its time, of both ends."""
        return self.conversation.trace.marks()

    def close(self) -> None:
        """Tell the peer, free everything; what is refused stays for the next close."""
        # all of it is the parent's, locks that its threads held included
        if self._process is not process.mark:
            self._closed = True
            return
        with self.engine.lock:
            try:
                if not self._closed:
                    self._closed = True
                    attendants.leave(self)
                    if self._interrupt is not None:
                        self._interrupt.set(StateError(f"the connection from {self.local} to {self.peer} was closed."))
                    self._last_health = now(HealthState.DEAD, "this side was closed.")
                    if self._watchers:
                        service.soon(self._tell, self._watchers, self._last_health)
                        self._watchers = ()
                    self.engine.changed.notify()
                    owned = self._memory() if self.ah is None else (self.ah, *self._memory())
                    shut = partial(self.transceiver.shut, self._source)
                    self._to_free = (shut, *map(_close, owned), self.prepared.close)
                    broken = self.transceiver.broken
                    self.conversation.close("close" if broken is None else str(broken))
            finally:
                self._free()

    def _free(self) -> None:
        """Free all that can be freed; the rest at the next close."""
        refused: dict[Callable[[], None], RdmaConnectError] = {}
        for step in self._to_free:
            try:
                step()
            except RdmaConnectError as e:
                refused[step] = e
        self._to_free = tuple(refused)
        if refused:
            # what all stands on tells of all that still does
            last = refused.get(self.prepared.close)
            errors = list(refused.values()) if last is None else [last]
            raise together(f"close the connection from {self.local} to {self.peer}", errors)

    def __del__(self) -> None:
        # one whose constructor failed has freed itself
        if not getattr(self, "_closed", True) and self._process is process.mark and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            here().submit(self.close)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<{self.front} {self.local.qp_type} {self.local} to {self.peer}{state}>"
