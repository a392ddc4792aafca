"""Dialling a listener again, whose side channel to a connection that stands has ended."""

from __future__ import annotations

import time
from socket import socket
from typing import Protocol

from ..errors import AuthenticationError, PeerRejected, RdmaConnectError, RemoteProtocolError
from ..exchange import service
from ..exchange.channel import SMALL_FRAME, Channel
from ..exchange.curve import Keys
from ..exchange.dial import Dial, sockets
from ..exchange.url import Address
from ..protocol.codec import decode, encode
from ..protocol.messages import Beat, Reject, Resume
from ..runtime.workers import Workers, namespace

__all__ = ["Dialler", "Redial"]

#: an answer is waited for so long, s; from a refusal to the next attempt, s
_ANSWER_S, _AGAIN_S = 4.0, 0.25
#: a lost packet is not to be mistaken for an answer that fails to come: the address counts as so many
_AT_ONCE = 3


class Dialler(Protocol):
    """Who has the listener dialled, and hears what comes of it, in the service thread."""

    def refused(self) -> None:
        """Nobody listens there."""

    def look(self) -> None:
        """There may be something to do."""

    def unknown(self, why: str) -> None:
        """Who listens there does not know the connection."""

    def resumed(self, channel: Channel) -> None:
        """It is the same as before; the channel's receiver is to be set."""


class Redial:
    """One listener that is dialled again; a :class:`~rdmaconnect.exchange.channel.Receiver` until it has answered.

    Nothing happens but in :meth:`advance`, and when something comes. For the service thread.

    Args:
        address: where it was reached.
        keys: to protect the exchange, as at first; None for none.
        resume: what is said: the connection's id, and the token that only its two ends know.
        origin: the network namespace that it is dialled from, and its workers.
        dialler: whom it is for.
    """

    def __init__(
        self, address: Address, keys: Keys | None, resume: Resume, origin: tuple[int, Workers], dialler: Dialler
    ) -> None:
        self._address, self._keys, self._resume, self._dialler = address, keys, resume, dialler
        self._where, self._workers = origin
        #: made, to be connected; and whether a worker is making some
        self._sockets: list[socket] = []
        self._making = False
        self._dial: Dial | None = None
        self._channel: Channel | None = None
        self._due = 0.0
        self._watched: list[int] = []
        self._over = True

    def advance(self) -> None:
        """Do what is due."""
        now, self._over = time.monotonic(), False
        if now < self._due:
            return
        if self._channel is not None:  # no answer came
            self._rest()
            return
        self._unwatch()
        if self._dial is None:
            if not self._sockets:
                self._make()
            if not self._sockets:
                return
            self._dial = Dial([self._address] * _AT_ONCE, now, lambda family, kind: self._sockets.pop())
        try:
            tcp = self._dial.advance(now)
        except (RdmaConnectError, IndexError):  # no descriptors, or it is to begin anew
            self._rest()
            return
        if tcp is not None:
            self._drop()
            self._dial, self._due = None, now + _ANSWER_S
            self._channel = Channel(tcp, self, SMALL_FRAME, self._keys)
            self._channel.send(encode(self._resume))
        elif self._dial.refused:
            self._rest()
            self._dialler.refused()
        else:
            self._watched = self._dial.filenos()
            for fd in self._watched:
                service.loop().add_writer(fd, self._dialler.look)

    def _make(self) -> None:
        """Sockets of the connector's network namespace, which may be another one than the service thread's."""
        if namespace() == self._where:
            self._made(self._new())
        elif not self._making:
            self._making = True
            self._workers.submit(lambda: service.soon(self._made, self._new()))

    def _new(self) -> list[socket]:
        return sockets(self._address, _AT_ONCE)

    def _made(self, sockets: list[socket]) -> None:
        self._sockets += sockets
        if self._making:
            self._making = False
            if self._over:
                self._drop()
            else:
                self._dialler.look()

    def _drop(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def _unwatch(self) -> None:
        for fd in self._watched:
            service.loop().remove_writer(fd)
        self._watched = []

    def _rest(self) -> None:
        self.stop()
        self._due = time.monotonic() + _AGAIN_S

    def say(self, frame: bytes) -> None:
        """Say something before the answer has come, if there is somebody to say it to."""
        if self._channel is not None:
            self._channel.send(frame)

    def stop(self) -> None:
        """Give up what is under way."""
        self._over = True
        self._unwatch()
        self._drop()
        if self._dial is not None:
            self._dial.close()
            self._dial = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._due = 0.0

    # ---- what comes

    def took(self, frame: bytes) -> None:
        """The answer has come."""
        try:
            message = decode(frame)
        except RdmaConnectError as e:
            self.over(e)
            return
        if isinstance(message, Beat) and message.id == self._resume.id:
            channel, self._channel = self._channel, None
            if channel is not None:
                self._dialler.resumed(channel)
        elif isinstance(message, Reject):
            if message.again_ms:  # it is busy
                self._rest()
            else:
                self.over(PeerRejected(message.stage, message.errno, message.why))

    def over(self, error: RdmaConnectError) -> None:
        """Nothing comes of it."""
        self._rest()
        if isinstance(error, PeerRejected | AuthenticationError | RemoteProtocolError):
            said = error.reason if isinstance(error, PeerRejected) else str(error)
            self._dialler.unknown(f"who listens at {self._address} now does not know the connection ({said})")

    def tick(self) -> None:
        """A second has passed."""
