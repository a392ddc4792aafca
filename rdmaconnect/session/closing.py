"""Closing many connections at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ..errors import RdmaConnectError, together
from ..runtime.procedure import call_apart, do_apart
from .async_connection import AsyncConnection
from .base import BaseConnection, end_of
from .connection import Connection
from .end import End

__all__ = ["aclose_many", "close_ends", "close_many"]


def close_many(connections: Iterable[Connection]) -> None:
    """Close several connections, as :meth:`Connection.close` does each; for hundreds it is much quicker.

    Args:
        connections: any, made together or not; one that was closed before is fine.

    Raises:
        TypeError: one is no connection; then none is closed.
        VerbsError: something could not be freed: it names all that stays, and all else is closed. Close again later.
    """
    do_apart(partial(close_ends, _ends(connections)))


async def aclose_many(connections: Iterable[AsyncConnection]) -> None:
    """The same as :func:`close_many` for asyncio. Nothing blocks the event loop."""
    await call_apart(partial(close_ends, _ends(connections)))


def _ends(connections: Iterable[BaseConnection]) -> list[End]:
    return [end_of(connection, "one of connections", "a connection") for connection in connections]


def close_ends(ends: Sequence[End]) -> None:
    """Close all of them, though one may not be closed.

    Raises:
        RdmaConnectError: as :func:`close_many`.
    """
    refused = []
    for end in ends:
        try:
            end.close()
        except RdmaConnectError as e:
            refused.append(e)
    if refused:
        raise together(f"close {len(ends)} connections", refused)
