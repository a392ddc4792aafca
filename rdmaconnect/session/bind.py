"""Bind, bytes, connect: two ends that are alike, and whatever two programs have in common between them.

    Options -> Ports -> Prepared on each (INIT) -> Blob -> bytes -> Blob (theirs) -> the best pair of ports, Agreement
    -> Path -> RTR -> RTS -> proof -> Connection

Nobody listens, and nothing goes over TCP: what carries the bytes is the caller's.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType

from ..errors import ConnectTimeout, StateError
from ..runtime.deadline import Deadline
from ..runtime.procedure import arun, call_apart, do_apart, run_apart
from ..verbs import library
from .async_connection import AsyncConnection
from .bound import EXPIRES_S, BaseBoundEnd, ask, binding
from .closing import close_ends
from .connection import Connection
from .terms import BindOptions, Unpack

__all__ = ["AsyncBoundEnd", "BoundEnd", "abind", "bind"]


def bind(
    *,
    count: int = 1,
    tag: str = "",
    expires_s: float | None = EXPIRES_S,
    deadline_s: float | None = 30,
    **options: Unpack[BindOptions],
) -> BoundEnd:
    """Make one end of a connection, before anybody is known: its bytes go to the other end by any way that there is.

    On each port that could be used, 8 at most, queue pairs are made, in INIT and with their receives posted; once the
    other end is known, those on the best pair of ports that carries are connected and the others freed. Name a
    ``device`` to have them on that alone. Nobody listens, and nothing goes over TCP.

    With ``qp``, ``send_cq`` or ``recv_cq`` the queue pairs' receives and completions are the application's, and nothing
    of this library's own goes over them: no proof, no good-bye. Neither end waits for the other then, and ``health``
    knows of this host's own port alone. ``qp`` is on one port, the one that it is in INIT on, or else the best of its
    device; it is in INIT from here on, for its receives to be posted, and is not to be moved until it is connected.

    Args:
        count: queue pairs to connect, 1 to 4096, the same on both ends.
        tag: what the application calls this connection, at most 256 characters; both ends must say the same, so that
            bytes that were meant for another end are refused.
        expires_s: seconds from now on for which the bytes are good, by the clocks of both hosts; None for ever.
        deadline_s: seconds for all of this, or None to wait for ever.
        **options: see :class:`BindOptions`; ``device``, ``gid_index``, ``path_mtu`` and all else that is of the
            queue pair and its port, see :class:`Options`.

    Returns:
        The end. It is closed by ``close()``, or at the end of ``with``, unless it was connected.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        DeviceError, LibraryError, VerbsError: this host cannot.
        StateError: ``qp`` is neither in RESET nor in INIT, or another connection's, or an end's.
        ConnectTimeout: the deadline passed.

    Source: ibv_create_qp(3), ibv_modify_qp(3), ``IBV_QPS_INIT``.
    """
    deadline = Deadline(deadline_s, ConnectTimeout)
    asked = ask(count, tag, expires_s, options)
    library()
    return run_apart(binding(BoundEnd, asked, deadline), BoundEnd.close)


async def abind(
    *,
    count: int = 1,
    tag: str = "",
    expires_s: float | None = EXPIRES_S,
    deadline_s: float | None = 30,
    **options: Unpack[BindOptions],
) -> AsyncBoundEnd:
    """The same as :func:`bind` for asyncio; gives an :class:`AsyncBoundEnd`. Nothing blocks the event loop."""
    deadline = Deadline(deadline_s, ConnectTimeout)
    asked = await call_apart(partial(ask, count, tag, expires_s, options))
    return await arun(binding(AsyncBoundEnd, asked, deadline))


class BoundEnd(BaseBoundEnd):
    """One end of a connection, whose other end is not known yet. Made by :func:`bind`; a context manager."""

    def connect(self, theirs: bytes, *, deadline_s: float | None = 30) -> Connection:
        """Connect with the other end, which does the same with the bytes of this one, before or after.

        Both work out what they agree on, each by itself, from both ends' bytes: the pairs of ports, the best first and
        each port in one of them, all of which are proven at once; which of the two sends first, and says by which one
        both go on, goes by the ends' ids. Other GIDs of a pair of ports are not tried; other pairs are not either where
        one end does without the proof.

        Before it returns, both have proven the data path over the data path itself, unless one said
        ``probe=False``. An end connects once, whether that succeeds or not; where the bytes are refused, or the two
        ends do not go together, it can be given others.

        Args:
            theirs: what the other end's :meth:`to_bytes` gave.
            deadline_s: seconds for all of it, the wait for the other end's call included; None for ever.

        Returns:
            The connection. It has no side channel: its good-bye goes over the data path, its ``health`` is what the
            data path shows, and it cannot be connected anew.

        Raises:
            RemoteProtocolError: the bytes are none of an end, truncated, damaged, of another version, expired, or were
                connected with before by this process.
            LocalProtocolError: they are this end's own.
            AuthenticationError: the two ends' secrets differ.
            PeerMismatch: the two ends do not go together; with all differences, on both ends.
            ModifyError: the device refused a step, often since the peer cannot be reached from the GID used.
            CompletionError: the data path is broken; says what that means.
            ConnectTimeout: the deadline passed; says at which stage, and what has arrived.
            StateError: it was connected before, or is closed; or ``count`` is not 1; or the application's queue pair
                was moved or destroyed meanwhile.
            TypeError: ``theirs`` is not bytes.
        """
        _check_single(self._asked.count)
        return Connection(run_apart(self.connecting(theirs, Deadline(deadline_s, ConnectTimeout)), close_ends)[0])

    def connect_many(self, theirs: bytes, *, deadline_s: float | None = 30) -> list[Connection]:
        """The same for all ``count`` queue pairs, in their order: a list of connections."""
        made = run_apart(self.connecting(theirs, Deadline(deadline_s, ConnectTimeout)), close_ends)
        return list(map(Connection, made))

    def close(self) -> None:
        """Free the queue pairs, unless they were connected. Twice is fine.

        Raises:
            VerbsError: something could not be freed: it names all that stays. Close again later.
        """
        do_apart(self.free)

    def __enter__(self) -> BoundEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBoundEnd(BaseBoundEnd):
    """The same as :class:`BoundEnd` for asyncio. Made by :func:`abind`."""

    async def connect(self, theirs: bytes, *, deadline_s: float | None = 30) -> AsyncConnection:
        """See :meth:`BoundEnd.connect`."""
        _check_single(self._asked.count)
        return AsyncConnection((await arun(self.connecting(theirs, Deadline(deadline_s, ConnectTimeout))))[0])

    async def connect_many(self, theirs: bytes, *, deadline_s: float | None = 30) -> list[AsyncConnection]:
        """See :meth:`BoundEnd.connect_many`."""
        return list(map(AsyncConnection, await arun(self.connecting(theirs, Deadline(deadline_s, ConnectTimeout)))))

    async def close(self) -> None:
        """See :meth:`BoundEnd.close`."""
        await call_apart(self.free)

    async def __aenter__(self) -> AsyncBoundEnd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _check_single(count: int) -> None:
    if count != 1:
        raise StateError(f"connect: the end has {count} queue pairs. Call connect_many().")
