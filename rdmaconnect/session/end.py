"""One end of a connection: who its peer is, reconnecting, closing; ``data_path`` has what moves over it.

What users hold of it are the fronts of ``connection``. The rest of the session deals with ends, and uses what has no
underscore.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
from .prepared import Prepared
from .trace import Mark
from .transceiver import Source, Transceiver

__all__ = ["End", "Established"]


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


class End(DataPath):
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
        again: how it is connected anew; None where it cannot be.
    """

    remote: Mapping[str, RemoteRegion]
    private_data: bytes
    token: bytes

    def __init__(self, prepared: Prepared, transceiver: Transceiver, established: Established) -> None:
        prepared.lend()
        self.prepared, self.engine, self.transceiver = prepared, prepared.engine, transceiver
        self.regions: Mapping[str, MR] = prepared.regions
        self.connect_s, self.spin, self.front = 0.0, prepared.options.spin, "Connection"
        self._closed = False
        self._to_free: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self.again: Callable[[End, float | None], Procedure[None]] | None = None
        self.join(established)
        self.known_as = self.token

    def join(self, established: Established) -> None:
        """Take the place of one end of a connection that both sides have agreed on."""
        established.conversation.lend()
        # there before the conversation: see replaced
        self.token = established.token
        self.conversation = established.conversation
        self.local, self.peer, self.path, self.ah = (
            self.transceiver.endpoint,
            established.peer,
            established.path,
            established.ah,
        )
        self.remote, self.private_data = dict(established.remote), established.private_data
        self._source: Source = None
        self.to: UdAddress | None = None
        if self.ah is not None:
            gid = self.path.remote_gid
            self._source = (self.peer.qp_num, gid.gid.raw if gid else b"")
            self.transceiver.open(self._source)
            self.to = UdAddress(self.ah, self.peer.qp_num, self.peer.qkey)
        self._begin()

    def reconnect(self, deadline_s: float | None) -> Procedure[None]:
        """Connect it anew."""
        self.check_open()
        if self.again is None:
            raise StateError(f"reconnect {self!r}: it shares its exchange or its queue pair. Connect anew instead.")
        yield from self.again(self, deadline_s)

    def replaced(self, token: bytes) -> None:
        """Its peer connects anew, and so has given up the conversation that ``token`` is of.

        A hello that comes late, when there is a newer one, changes nothing.
        """
        conversation = self.conversation
        if self.token == token:
            conversation.over(PeerClosed("the peer connects anew: call reconnect()."))

    def part(self) -> None:
        """Give up what joined it to its old peer; the queue pair stays."""
        self.conversation.close()
        if self.ah is not None:
            self.ah.close()
        self._end()

    # ---- the end

    def check_open(self) -> None:
        """Raise StateError if it was closed, or belongs to another process."""
        if self._pid != os.getpid():
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
    def lost(self) -> RdmaConnectError | None:
        """Why it is of no more use, or None as far as is known here. Never blocks."""
        try:
            self.check_open()
            self.engine.progress()
        except StateError as e:
            return e
        if self.conversation.left is not None or self.transceiver.broken is not None:
            return self._over("use the connection", self.transceiver.broken)
        return None

    def closing(self) -> Procedure[None]:
        """Close it."""
        yield Call(self.close)

    @property
    def trace(self) -> tuple[Mark, ...]:
        """Each stage of the handshake with its time, of both ends."""
        return self.conversation.trace.marks()

    def close(self) -> None:
        """Tell the peer, free everything; what is refused stays for the next close."""
        if self._pid != os.getpid():  # all of it is the parent's, locks that its threads held included
            self._closed = True
            return
        with self.engine.lock:
            try:
                if not self._closed:
                    self._closed = True
                    self.engine.changed.notify()
                    memory = None if self._staging is None else self._staging.mr
                    owned = [thing.close for thing in (self.ah, memory) if thing is not None]
                    self._to_free = [lambda: self.transceiver.shut(self._source), *owned, self.prepared.close]
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
        self._to_free = list(refused)
        if refused:
            # what all stands on tells of all that still does
            last = refused.get(self.prepared.close)
            errors = list(refused.values()) if last is None else [last]
            raise together(f"close the connection from {self.local} to {self.peer}", errors)

    def __del__(self) -> None:
        # one whose constructor failed has freed itself
        if not getattr(self, "_closed", True) and self._pid == os.getpid() and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            here().submit(self.close)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<{self.front} {self.local.qp_type} {self.local} to {self.peer}{state}>"
