"""The conversation of connections that were made together: its messages, and whether the peer is still there."""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from .deadline import Deadline
from .errors import RdmaConnectError
from .handshake import Handshake, Outcome, State
from .messages import Beat, Bye, Message, Proof, Reject
from .trace import Trace
from .wire import decode, encode

__all__ = ["Link", "Wire"]

#: seconds between two looks whether the peer is still there, while waiting for it
BEAT_S = 1.0


class Link(Protocol):
    """The out-of-band channel to one peer."""

    def filenos(self) -> list[int]: ...
    def send(self, frame: bytes) -> None: ...
    def recv(self) -> bytes | None: ...
    def close(self) -> None: ...


class Wire:
    """The out-of-band side of connections that were made together: the last closes it.

    Attributes:
        left: why the peer is gone, in words, or None.
        error: the same as it was raised, or None.
        trace: the doors on the way to here.
    """

    def __init__(self, link: Link, handshake: Handshake, trace: Trace | None = None) -> None:
        self.link, self.handshake = link, handshake
        self.trace = trace or Trace(handshake.role, Deadline(None))
        self.left: str | None = None
        self.error: RdmaConnectError | None = None
        self._users = 0
        self._beat = time.monotonic()

    def filenos(self) -> set[int]:
        """The descriptors to wait on."""
        return set(self.link.filenos())

    def look(self) -> None:
        """Has the peer said something, and is it still there?"""
        if self.left is not None or self.handshake.state is not State.JOINED:
            return
        try:
            while self.left is None and (frame := self.link.recv()) is not None:
                message = decode(frame)
                if self.handshake.receive(message) is not Outcome.MOVED:
                    continue
                if isinstance(message, Bye):
                    self.left = f"the peer closed the connection ({message.why})."
                elif isinstance(message, Proof):
                    self.trace.hear(message.doors)
            now = time.monotonic()
            if self.left is None and now - self._beat >= BEAT_S:
                self._beat = now
                self.say(Beat(self.id))
        except RdmaConnectError as e:
            self.left, self.error = str(e), e

    @property
    def id(self) -> bytes:
        """The connection's 16 bytes."""
        assert self.handshake.id is not None
        return self.handshake.id

    def say(self, message: Message) -> None:
        """Send one message to the peer."""
        self.link.send(encode(self.handshake.send(message)))

    def give_up(self, message: Reject) -> None:
        """Tell the peer why nothing comes of it; after that nothing more is said."""
        with contextlib.suppress(RdmaConnectError):
            self.say(message)
        self.left = message.why

    def is_probe(self, payload: memoryview) -> bool:
        """Whether a message is a probe that came a second time, over a type that may repeat it."""
        return self.handshake.lossy and bytes(payload[:16]) == self.handshake.id

    def lend(self) -> None:
        """One user more; each :meth:`close` takes one back."""
        self._users += 1

    def close(self, why: str = "close") -> None:
        """Say good-bye and close, if this was the last user.

        Args:
            why: for the peer.
        """
        self._users -= 1
        if self._users <= 0:
            if self.left is None:
                with contextlib.suppress(RdmaConnectError):  # it may be gone already
                    self.say(Bye(self.id, why))
            self.link.close()
