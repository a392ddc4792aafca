"""Whose place an incoming connection may take: a peer that connects anew shows the token that it was told last."""

from __future__ import annotations

import threading
import weakref

from ..errors import StateError
from .end import End
from .incoming import Incoming

__all__ = ["Places"]


class Places:
    """The connections of a listener that may be connected anew. Any thread may use it.

    Attributes:
        live: token -> connection; they are not kept.
        awaited: connections that are to be connected anew now -> what is to take their place, once it has come.
    """

    def __init__(self) -> None:
        self.live: weakref.WeakValueDictionary[bytes, End] = weakref.WeakValueDictionary()
        self.awaited: dict[End, Incoming | None] = {}
        self._lock = threading.Lock()

    def held(self, incoming: Incoming) -> End | None:
        """The connection whose place it is to take, if it is held here and its peer is the same.

        Raises:
            StateError: the peer is another, by its key.
        """
        prev = incoming.hello.prev
        with self._lock:
            held = None if prev is None else self.live.get(prev)
        if held is None or held.closed or held.given_up:
            return None
        conversation = held.conversation
        user = conversation.user if conversation.channel is None else conversation.channel.user
        if user != incoming.channel.user:
            raise StateError("take the place of a connection: it belongs to a peer with another key.")
        return held

    def claim(self, connection: End, incoming: Incoming) -> bool:
        """Have it take the place of a connection, if that is awaited and no other has come before."""
        with self._lock:
            if self.awaited.get(connection, incoming) not in (None, incoming) or connection not in self.awaited:
                return False
            self.awaited[connection] = incoming
            # until the connector is known to have heard the new token, it may come by the one that it has shown
            self._know(connection, incoming.hello.prev or connection.token, incoming.token)
            return True

    def unclaim(self, connection: End, incoming: Incoming) -> None:
        """Nothing came of it: another may."""
        with self._lock:
            if self.awaited.get(connection) is incoming:
                self.awaited[connection] = None

    def stands(self, connection: End, incoming: Incoming) -> None:
        """It is the connection now; its peer may take its place by the token that it was told with it."""
        with self._lock:
            self._know(connection, incoming.token)
            self.awaited.pop(connection, None)

    def expect(self, connection: End) -> None:
        """It is to be connected anew."""
        with self._lock:
            self.awaited[connection] = None

    def forget(self, connection: End) -> Incoming | None:
        """It is not awaited any more; gives what was to take its place, if that is under way."""
        with self._lock:
            return self.awaited.pop(connection, None)

    def _know(self, connection: End, *tokens: bytes) -> None:
        """These tokens are a connection's, and no others."""
        for token in [token for token, one in self.live.items() if one is connection and token not in tokens]:
            del self.live[token]  # a hello of an earlier life finds nobody
        self.live.update(dict.fromkeys(tokens, connection))
