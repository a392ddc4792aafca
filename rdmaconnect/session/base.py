"""What both fronts of a connection share: who its peer is, reconnecting, closing; ``data_path`` has what moves."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..agreement.endpoint import Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import PeerClosed, RdmaConnectError, StateError
from ..objects.address import AddressHandle, UdAddress
from ..objects.memory import MR
from ..objects.owned import together
from ..runtime.procedure import Call, Procedure
from ..runtime.workers import here
from .conversation import Conversation
from .data_path import DataPath
from .engine import Source, Transceiver
from .prepared import Prepared
from .trace import Mark

__all__ = ["BaseConnection", "Established", "M"]

#: a front
M = TypeVar("M", bound="BaseConnection")


@dataclass(frozen=True, slots=True)
class Established:
    """What joins one queue pair to one peer."""

    peer: Endpoint
    path: Path
    conversation: Conversation
    remote: Mapping[str, RemoteRegion]
    private_data: bytes
    ah: AddressHandle | None
    token: bytes = field(default=b"", repr=False)


class BaseConnection(DataPath):
    """One queue pair connected to one peer; :class:`~rdmaconnect.Connection` tells of its attributes."""

    #: polls before a wait sleeps, at most: an event loop has other things to do
    MOST_SPIN = 2**31
    private_data: bytes
    regions: Mapping[str, MR]
    connect_s: float

    def __init__(self, prepared: Prepared, transceiver: Transceiver, established: Established) -> None:
        prepared.lend()
        self._prepared, self._engine, self._transceiver = prepared, prepared.engine, transceiver
        self.regions, self.connect_s = prepared.regions, 0.0
        self._spin = min(prepared.options.spin, self.MOST_SPIN)
        self._closed = False
        self._to_free: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._again: Callable[[BaseConnection, float | None], Procedure[None]] | None = None
        self._join(established)
        #: by which the peer knows it: of the last exchange that came to an end
        self._known_as = self._token

    def _join(self, established: Established) -> None:
        """Take the place of one end of a connection that both sides have agreed on."""
        established.conversation.lend()
        #: by which it may be replaced later, or the id of an older version; there before the conversation: see replaced
        self._token = established.token
        self._conversation = established.conversation
        self.local, self.peer, self.path, self.ah = (
            self._transceiver.endpoint,
            established.peer,
            established.path,
            established.ah,
        )
        self.remote, self.private_data = dict(established.remote), established.private_data
        self._source: Source = None
        self._to: UdAddress | None = None
        if self.ah is not None:
            gid = self.path.remote_gid
            self._source = (self.peer.qp_num, gid.gid.raw if gid else b"")
            self._transceiver.open(self._source)
            self._to = UdAddress(self.ah, self.peer.qp_num, self.peer.qkey)
        self._begin()

    def _reconnect(self, deadline_s: float | None) -> Procedure[None]:
        self._check_open()
        if self._again is None:
            raise StateError(f"reconnect {self!r}: it shares its exchange or its queue pair. Connect anew instead.")
        yield from self._again(self, deadline_s)

    def replaced(self, token: bytes) -> None:
        """Its peer connects anew, and so has given up the conversation that ``token`` is of.

        A hello that comes late, when there is a newer one, changes nothing.
        """
        conversation = self._conversation
        if self._token == token:
            conversation.over(PeerClosed("the peer connects anew: call reconnect()."))

    def _part(self) -> None:
        """Give up what joined it to its old peer; the queue pair stays."""
        self._conversation.close()
        if self.ah is not None:
            self.ah.close()
        self._end()

    # ---- the end

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StateError(
                f"the connection from {self.local} to {self.peer} belongs to the process that forked this one: "
                "connect anew here."
            )
        if self._closed:
            raise StateError(f"the connection from {self.local} to {self.peer} is closed.")

    @property
    def closed(self) -> bool:
        """Whether this side was closed."""
        return self._closed

    @property
    def lost(self) -> RdmaConnectError | None:
        """Why the connection is of no more use, or None as far as is known here. Never blocks."""
        try:
            self._check_open()
            self._engine.progress()
        except StateError as e:
            return e
        if self._conversation.left is not None or self._transceiver.broken is not None:
            return self._over("use the connection", self._transceiver.broken)
        return None

    def _closing(self) -> Procedure[None]:
        yield Call(self._close)

    @property
    def trace(self) -> tuple[Mark, ...]:
        """Each stage of the handshake with its time, this end's and the peer's, in the order of time.

        The times are seconds since this end's start: the call of ``connect`` or ``meet``, or the arrival of
        the peer's hello. The two clocks are aligned by halving the round trip, and ``within_s`` says how
        exact that is. The peer's stages are those until its proof (with ``probe=False``, until its last
        message); none if its version does not tell them. Connections that were made together share one
        trace; ``reconnect`` begins a new one.
        """
        return self._conversation.trace.marks()

    def _close(self) -> None:
        if self._pid != os.getpid():  # all of it is the parent's, locks that its threads held included
            self._closed = True
            return
        with self._engine.lock:
            try:
                if not self._closed:
                    self._closed = True
                    self._engine.changed.notify()
                    owned = [thing.close for thing in (self.ah, self._stage_mr) if thing is not None]
                    self._to_free = [lambda: self._transceiver.shut(self._source), *owned, self._prepared.close]
                    broken = self._transceiver.broken
                    self._conversation.close("close" if broken is None else str(broken))
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
        self._to_free = list(refused)
        if refused:
            # what all stands on tells of all that still does
            last = refused.get(self._prepared.close)
            errors = list(refused.values()) if last is None else [last]
            raise together(f"close the connection from {self.local} to {self.peer}", errors)

    def __del__(self) -> None:
        # one whose constructor failed has freed itself
        if not getattr(self, "_closed", True) and self._pid == os.getpid() and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            here().submit(self._close)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<{type(self).__name__} {self.local.qp_type} {self.local} to {self.peer}{state}>"
