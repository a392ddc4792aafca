"""Connecting TCP to a host by whichever of its addresses answers first (RFC 8305), until it does.

A :class:`Dial` never waits: its owner polls its descriptors for writing, and hands the clock in.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import VerbsError
from .tcp import set_options
from .url import Address

__all__ = ["Dial", "sockets"]

#: RFC 8305, 5, Connection Attempt Delay: from the beginning of one address to that of the next, s
_DELAY_S = 0.25
#: from an address's failure to its next attempt: at first, doubled each time, and at most, s
_AGAIN_S, _AGAIN_MAX_S = 0.05, 1.0
#: an attempt without an answer begins anew after this, s: after 3.1 the kernel knows that no neighbour has the
#: address, and an older one, which doubles its pauses, would send its next SYN only after 7
_ANSWER_S = 4.0
#: attempts under way at a time
_AT_ONCE = 8

_UNDER_WAY = {errno.EINPROGRESS, errno.EALREADY, errno.EINTR}
_NOT_TRIED = "not tried yet"
_NO_ANSWER = "no answer: the host is down or not there, or a firewall drops the packets"
_FORBIDDEN = "not permitted on this host: a firewall, a route or a security policy of its own forbids it"
#: what connect(2) says of a network itself, before anything was sent
_AT_FIRST = {
    errno.ENETUNREACH: "no route: this host's routing table has none there, or it is a broadcast or multicast address",
    errno.EHOSTUNREACH: "no route: this host's routing table holds it to be unreachable (`ip route get` shows it)",
    errno.EINVAL: "no route: this host's routing table discards what is sent there (`ip route get` shows it)",
}
#: what an attempt that was under way came to
_AT_LAST = {
    errno.ECONNREFUSED: "refused: the host is there, but nothing listens on that port, or a firewall rejects it",
    errno.ECONNRESET: "something took the connection and reset it at once",
    errno.ENETUNREACH: "network unreachable: a router on the way has no route there",
    errno.EHOSTUNREACH: (
        "host unreachable: nobody on its network answers to that address, or a router or firewall on the way says so"
    ),
    errno.ETIMEDOUT: _NO_ANSWER,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.ENETDOWN: "the interface toward it is down",
    errno.EAFNOSUPPORT: "this host's kernel has no such protocol (IPv6 switched off?)",
    errno.EADDRNOTAVAIL: "this host has no address or no free port to connect from",
}


@dataclass(slots=True, eq=False)
class _Attempt:
    """One address.

    Attributes:
        sock: the attempt under way, or None.
        due: when to give the attempt up, or, without one, when to begin the next.
        pause: seconds from its next failure to the attempt after that.
        seen: in words, what the last attempt came to.
        error: its errno, 0 while there is none.
    """

    address: Address
    sock: socket.socket | None = None
    due: float = 0.0
    pause: float = _AGAIN_S
    seen: str = _NOT_TRIED
    error: int = 0


def sockets(address: Address, count: int) -> list[socket.socket]:
    """So many sockets, of the calling thread's network namespace; fewer for want of descriptors."""
    made: list[socket.socket] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            made.append(socket.socket(address.family, socket.SOCK_STREAM))  # noqa: PERF401 - those so far are kept
    return made


class Dial:
    """Attempts to connect to one of several addresses.

    The first address begins at once; each next one when the one before it has failed, or has not answered for
    0.25 s. An address that failed is tried again after 50 ms, doubled each time up to 1 s; one that does not
    answer, every 4 s. At most 8 attempts are under way at a time. Nothing happens but in :meth:`advance`.

    Args:
        addresses: where to, in the order in which to try; at least one.
        now: the clock, s.
        new_socket: makes a socket from family and kind.

    Raises:
        ValueError: there is no address.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        now: float,
        new_socket: Callable[[int, int], socket.socket] = socket.socket,
    ) -> None:
        if not addresses:
            raise ValueError("connect: there is no address to connect to")
        self._new_socket = new_socket
        self._fresh = deque(_Attempt(address) for address in addresses)
        self._fresh_due = now
        self._begun: list[_Attempt] = []

    def filenos(self) -> list[int]:
        """Descriptors to poll for writing; other ones after each :meth:`advance`."""
        return [attempt.sock.fileno() for attempt in self._begun if attempt.sock is not None]

    def due_s(self, now: float) -> float:
        """Seconds until :meth:`advance` is due though no descriptor is ready; ``math.inf`` for never."""
        times = [attempt.due for attempt in self._begun if attempt.sock is not None]
        if len(times) < _AT_ONCE:
            times += [attempt.due for attempt in self._begun if attempt.sock is None]
            times += [self._fresh_due] if self._fresh else []
        return max(0.0, min(times, default=math.inf) - now)

    def advance(self, now: float) -> socket.socket | None:
        """See what the attempts came to, and begin those that are due.

        Args:
            now: the clock, s.

        Returns:
            The connected socket, non-blocking and with the options of ``set_options``, which the caller then
            owns; all else is closed. None while there is none, and when closed.

        Raises:
            VerbsError: EMFILE, ENFILE: no descriptor is left. All is closed.
        """
        try:
            for attempt in self._begun:
                if attempt.sock is not None and self._stands(attempt, attempt.sock, now, _AT_LAST):
                    return self._take(attempt)
            while (next_way := self._next(now)) is not None:
                if self._begin(next_way, now):
                    return self._take(next_way)
        except BaseException:
            self.close()
            raise
        return None

    def close(self) -> None:
        """Drop all that is under way, for good; :meth:`seen` still tells. Twice is fine."""
        for attempt in self._begun:
            self._drop(attempt)
            attempt.due = math.inf
        self._fresh_due = math.inf

    def seen(self) -> str:
        """In words, what was seen of each address."""
        by_words: dict[str, list[str]] = {}
        for attempt in (*self._begun, *self._fresh):
            by_words.setdefault(attempt.seen, []).append(str(attempt.address))
        return "; ".join(f"{', '.join(where)}: {words}" for words, where in by_words.items())

    @property
    def refused(self) -> bool:
        """Whether an address refused the last time that it was tried."""
        return any(one.error == errno.ECONNREFUSED for one in self._begun)

    # ---- one attempt

    def _next(self, now: float) -> _Attempt | None:
        """The address to begin with now, or None."""
        if sum(attempt.sock is not None for attempt in self._begun) >= _AT_ONCE:
            return None
        if self._fresh and self._fresh_due <= now:
            self._fresh_due = now + _DELAY_S
            self._begun.append(self._fresh.popleft())
            return self._begun[-1]
        return next((attempt for attempt in self._begun if attempt.sock is None and attempt.due <= now), None)

    def _begin(self, attempt: _Attempt, now: float) -> bool:
        """Begin an attempt; whether it stands already."""
        try:
            sock = attempt.sock = self._new_socket(attempt.address.family, socket.SOCK_STREAM)
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                raise VerbsError("socket", e.errno, f"connect to {attempt.address}") from None
            self._fail(attempt, now, e.errno or 0, _AT_LAST)
            return False
        attempt.due = now + _ANSWER_S
        sock.setblocking(False)
        set_options(sock)
        if attempt.seen == _NOT_TRIED:
            attempt.seen = _NO_ANSWER
        return self._stands(attempt, sock, now, _AT_FIRST)

    def _stands(self, attempt: _Attempt, sock: socket.socket, now: float, words: dict[int, str]) -> bool:
        """Whether the attempt is a connection by now; if it failed, when it is to begin anew."""
        # of an attempt under way, connect(2) asked once more tells all: that it is, what it came to, or success
        error = sock.connect_ex(attempt.address.sockaddr)
        if error in _UNDER_WAY and now < attempt.due:
            return False
        if error in (0, errno.EISCONN):
            try:
                if sock.getsockname() != sock.getpeername():
                    return True
                # nothing listens there, and the kernel gave this socket that very port to connect from (RFC 9293,
                # 3.5, simultaneous open). It is reset, so that it does not keep the port in TIME_WAIT
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                error = errno.ECONNREFUSED
            except OSError:  # it is none any more
                error = errno.ECONNRESET
        self._fail(attempt, now, errno.ETIMEDOUT if error in _UNDER_WAY else error, words)
        return False

    def _fail(self, attempt: _Attempt, now: float, error: int, words: dict[int, str]) -> None:
        self._drop(attempt)
        attempt.error = error
        attempt.seen = words.get(error) or _AT_LAST.get(error) or os.strerror(error)
        attempt.due, attempt.pause = now + attempt.pause, min(attempt.pause * 2, _AGAIN_MAX_S)
        if attempt is self._begun[-1]:
            self._fresh_due = now

    def _take(self, attempt: _Attempt) -> socket.socket | None:
        sock, attempt.sock, attempt.seen = attempt.sock, None, "connected"
        self.close()
        return sock

    @staticmethod
    def _drop(attempt: _Attempt) -> None:
        if attempt.sock is not None:
            attempt.sock.close()
            attempt.sock = None
