"""Connections made ahead, so that a caller does not wait for them."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from functools import partial
from types import TracebackType

from ..errors import ConnectTimeout, RdmaConnectError, StateError, together
from ..exchange.url import tcp_url
from ..runtime.deadline import Deadline
from ..runtime.peer_log import log
from ..runtime.procedure import Call, Interrupt, Procedure, Wait, arun, run, run_apart
from ..runtime.wakeup import Signal, weakly
from ..runtime.workers import here
from ..verbs import library
from .async_connection import AsyncConnection
from .closing import close_ends
from .connect import connect_procedure
from .connection import Connection
from .end import End
from .terms import ConnectOptions, Unpack, check_alone, check_count, make_deadline, make_terms

__all__ = ["AsyncPool", "Pool"]

#: seconds before one that was taken is replaced, and before those are that were lost
REST_S, PAUSE_S = 0.1, 1.0
#: seconds that one which is being made has when its pool is closed: its peer is not to hear of a failure
GRACE_S = 1.0


class BasePool:
    """What both fronts of a pool share."""

    def __init__(self, peer: str, spare: int = 16, **options: Unpack[ConnectOptions]) -> None:
        self._closed = True
        self.url, self.spare = tcp_url(peer), check_count(spare, "spare")
        self._options, self._terms = options, make_terms(options)
        make_deadline(options)
        check_alone(self._terms, "a Pool, which replaces what is lost")
        library()
        self._pid, self._workers = os.getpid(), here()
        self._lock, self._changed, self._interrupt = threading.Lock(), Signal(), Interrupt()
        self._idle: deque[End] = deque()
        #: lost before anybody asked for them: to be closed
        self._discarded: list[End] = []
        self._filling = self._wanted = False
        self._failed: BaseException | None = None
        self._closed = False
        self._wake()

    @property
    def idle(self) -> int:
        """How many connections are ready now."""
        return len(self._idle)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    # ---- in a worker: as many as there should be

    def _wake(self) -> None:
        """Have the lost replaced and the lacking made. Never blocks."""
        with self._lock:
            self._wanted = True
            if self._filling or self._closed:
                return
            self._filling = True
        self._workers.submit(self._fill)

    def _fill(self) -> None:
        try:
            if self._idle:  # whoever has just taken one is not to share the processor with this
                run(self._rest(REST_S), self._interrupt)
            while self._lacks():
                made = connect_procedure(self.url, self._terms, 1, make_deadline(self._options))
                self._keep(run(made, self._interrupt)[0])
        except BaseException as e:  # noqa: BLE001  the next who waits for it is told
            with self._lock:
                self._filling, self._failed = False, e.with_traceback(None)
                more = self._wanted and not self._closed
            if not self._closed:
                log.warning("pool for %s: %s", self.url, e)
            if more:  # something has changed meanwhile
                self._wake()
        self._changed.notify()

    def _lacks(self) -> bool:
        """Close what was lost, and tell whether another one is to be made; if not, the filling is over."""
        while True:
            with self._lock:
                looking, self._wanted = (list(self._idle) if self._wanted else []), False
            lost = [end for end in looking if end.lost is not None]
            for end in lost:
                self._discard(end)
            self._close_discarded()
            if lost:  # a peer that closes whatever it gets is not to be kept busy with that
                run(self._rest(PAUSE_S), self._interrupt)
            with self._lock:
                if not self._closed and len(self._idle) < self.spare:
                    return True
                if not self._wanted or self._closed:
                    self._filling = False
                    return False

    def _rest(self, seconds: float) -> Procedure[None]:
        """Do nothing for so long, or until the pool is closed."""
        deadline = Deadline(seconds)
        while deadline.left_s > 0:
            seen = self._changed.count
            if self._closed:
                return
            yield Wait(deadline, changes=((self._changed, seen),))

    def _keep(self, end: End) -> None:
        """One more is ready; that its peer is gone is seen from now on."""
        end.conversation.on_change = weakly(self._wake)
        with self._lock:
            kept = not self._closed
            if kept:
                self._idle.append(end)
                self._failed = None
        if not kept:
            end.close()
        elif end.lost is not None:  # before it could be seen
            self._wake()
        self._changed.notify()

    def _discard(self, end: End) -> None:
        with self._lock:
            if end in self._idle:  # nobody took it meanwhile
                self._idle.remove(end)
                self._discarded.append(end)

    def _close_discarded(self) -> list[RdmaConnectError]:
        """Close them; what is refused stays for the next time."""
        with self._lock:
            ends, self._discarded = self._discarded, []
        refused = []
        for end in ends:
            try:
                end.close()
            except RdmaConnectError as e:
                refused.append(e)
                with self._lock:
                    self._discarded.append(end)
        return refused

    # ---- for its users

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StateError(f"the pool for {self.url} belongs to the process that forked this one: make one here.")
        if self._closed:
            raise StateError(f"the pool for {self.url} is closed.")

    def _take(self) -> End | None:
        """The one that is ready for longest, and still stands."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    return None
                end = self._idle.popleft()
            end.conversation.on_change = None
            if end.lost is None:
                return end
            with self._lock:
                self._discarded.append(end)

    def _acquire(self, deadline_s: float | None) -> Procedure[End]:
        deadline = Deadline(deadline_s, ConnectTimeout)
        self._check_open()
        end = self._take()
        self._wake()
        if end is None:
            (end,) = yield from connect_procedure(self.url, self._terms, 1, deadline)
        return end

    def _warm(self, deadline_s: float | None) -> Procedure[None]:
        deadline = Deadline(deadline_s, ConnectTimeout)
        self._check_open()
        self._failed = None
        self._wake()
        while True:
            seen = self._changed.count
            self._check_open()
            if len(self._idle) >= self.spare:
                return
            if self._failed is not None:
                raise self._failed
            deadline.check(f"warm the pool for {self.url}", f"{len(self._idle)} of {self.spare} are ready.")
            yield Wait(deadline, changes=((self._changed, seen),))

    def _closing(self) -> Procedure[None]:
        if self._pid != os.getpid():  # all of it is the parent's, locks that its threads held included
            self._closed = True
            return
        with self._lock:
            self._closed = True
        self._changed.notify()
        deadline = Deadline(GRACE_S)
        while True:
            seen = self._changed.count
            if not self._filling:
                break
            if deadline.left_s <= 0:
                self._interrupt.set(StateError(f"the pool for {self.url} was closed."))
                deadline = Deadline(None)
            yield Wait(deadline, changes=((self._changed, seen),))
        yield Call(self._free)

    def _free(self) -> None:
        with self._lock:
            self._discarded += self._idle
            self._idle.clear()
        if refused := self._close_discarded():
            raise together(f"close the pool for {self.url}", refused)

    def __del__(self) -> None:
        # one whose constructor failed has nothing; while it is being filled it is not forgotten
        if not self._closed and self._pid == os.getpid() and not sys.is_finalizing():
            words = f"{self!r} was never closed"
            self._closed = True  # whoever keeps the warning keeps this, which is to make no more connections
            warnings.warn(words, ResourceWarning, source=self, stacklevel=2)
            self._workers.submit(partial(close_ends, [*self._idle, *self._discarded]))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._idle)} of {self.spare} ready"
        return f"<{type(self).__name__} {self.url} {state}>"


class Pool(BasePool):
    """Connections to one peer, made ahead: :meth:`acquire` hands one out without waiting for it. A context manager.

    Each was made as ``connect`` makes one, by an exchange of its own, and is handed out once. To give it back is to
    close it. Another one is made in its place, in the background, 0.1 s after it was taken. So nobody gets messages,
    memory or errors that another one left, but ``regions``, which are every connection's. Any thread may use a pool.

    Idle connections that are lost are closed and replaced when that is known: where the peer closes them or its process
    ends, a second later, and where it vanishes, after 15 s. Where it cannot be reached, a warning is logged, and the
    pool is filled when it is next asked for a connection.

    The peer gets each connection from ``accept`` as it is made, before anybody uses it: there the first ``recv`` is to
    wait for long. How many are in use at the same time is not limited.

    Args:
        peer: ``"host"``, ``"host:port"`` (port 18515 by default) or a ``tcp://`` url; it may start later.
        spare: how many are to be ready, 1 to 4096.
        **options: see :class:`ConnectOptions`; ``deadline_s`` is that of each one that is made ahead.

    Attributes:
        url: the peer's.
        spare: as given.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        LibraryError: there is no libibverbs.
    """

    def acquire(self, *, deadline_s: float | None = 30) -> Connection:
        """A connection: one that is ready, or else one that is made now. It is the caller's, who closes it.

        Args:
            deadline_s: seconds, or None to wait for ever.

        Raises:
            StateError: the pool is closed, or of the process that forked this one.
            RdmaConnectError: none was ready, and then as ``connect``.
        """
        return Connection(run_apart(self._acquire(deadline_s), self._keep))

    def warm(self, *, deadline_s: float | None = 30) -> None:
        """Wait until ``spare`` connections are ready.

        Several pools are filled at the same time, whoever waits for which.

        Args:
            deadline_s: seconds, or None to wait for ever.

        Raises:
            ConnectTimeout: they are not; says how many are.
            StateError: as :meth:`acquire`.
            RdmaConnectError: why one could not be made, as ``connect``.
        """
        run_apart(self._warm(deadline_s))

    def close(self) -> None:
        """Close the connections that nobody has taken, and make no more. Twice is fine.

        Raises:
            VerbsError: something could not be freed: it names all that stays. Close again later.
        """
        run_apart(self._closing())

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncPool(BasePool):
    """The same as :class:`Pool` for asyncio.

    Nothing blocks the event loop but its constructor where it is given keys: it reads them, or makes them of a secret.
    """

    async def acquire(self, *, deadline_s: float | None = 30) -> AsyncConnection:
        """See :meth:`Pool.acquire`."""
        return AsyncConnection(await arun(self._acquire(deadline_s)))

    async def warm(self, *, deadline_s: float | None = 30) -> None:
        """See :meth:`Pool.warm`."""
        await arun(self._warm(deadline_s))

    async def close(self) -> None:
        """See :meth:`Pool.close`."""
        await arun(self._closing())

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
