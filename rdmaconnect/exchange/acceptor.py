"""Connections of strangers on one address, until they have said what they want."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from ..runtime.peer_log import log
from . import service
from .channel import Channel, Receiver
from .curve import Keys
from .tcp import has_unread, listen, peer_of, set_options, silent_s
from .url import addresses, host_of, port_of

__all__ = ["Acceptor", "descriptors_are_scarce"]


#: connections taken in one go
_AT_ONCE = 16
#: seconds without accepting when there is no place or no descriptor left
_REST_S = 0.05
#: seconds that a stranger has until it says what it wants
STRANGER_S = 10.0
#: descriptors that are left to the application
RESERVE = 48
#: strangers at most; beyond them those of whom nothing was heard for so many seconds are dropped, which is halved for
#: as long as others wait all the same: who dials in earnest answers within a round trip
STRANGERS_MAX, SILENT_S, SILENT_LEAST_S = 1024, 1.0, 0.1
_SILENT = "it is silent, and others wait"


def descriptors_are_scarce() -> bool:
    """Whether so few descriptors are left that strangers get none of them; the application may need them."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    most = _descriptors()
    # the kernel gives the lowest number that is free
    return most is not None and lowest >= most - RESERVE


def _descriptors() -> int | None:
    """How many this process may have; None for any number."""
    import resource  # Windows has none, and no RDMA either

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


class Acceptor:
    """Takes connections, once it is started, and gives each a channel.

    Args:
        url: ``tcp://host:port``; port 0 takes a free one.
        welcome: makes the receiver of one more channel; called in the service thread.
        max_frame: bytes of the longest frame that is taken.
        keys: to protect the exchange; None for none.

    Attributes:
        url: the address bound, with the real port.
        host: the IP address that it is bound to.
        connected: how many connections were taken.

    Raises:
        ValueError: the name does not resolve.
        OSError: the address is taken, or not one of this host; says which.
    """

    def __init__(
        self, url: str, welcome: Callable[[Channel], Receiver], max_frame: int, keys: Keys | None = None
    ) -> None:
        self._pid = os.getpid()
        self._welcome, self._max_frame, self._keys = welcome, max_frame, keys
        self._socket = listen(addresses(host_of(url), port_of(url), bind=True))
        self.host, port = self._socket.getsockname()[:2]
        named = url.removeprefix("tcp://").rpartition(":")[0]
        anywhere = f"[{self.host}]" if self._socket.family == socket.AF_INET6 else self.host
        self.url = f"tcp://{anywhere if named in ('', '*') else named}:{port}"
        self._strangers: dict[Channel, float] = {}
        self._domain = ""
        self._closed = False
        self._patience_s = SILENT_S
        self.connected = 0
        most = _descriptors()
        self._most = STRANGERS_MAX if most is None else max(16, min(STRANGERS_MAX, most // 8))

    def start(self) -> None:
        """Begin to take connections, which wait in the kernel's queue until then.

        Raises:
            OSError, RuntimeError: no descriptor, no thread; then it is closed.
        """
        try:
            service.do(self._start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Accept no more; the port is free when this returns. Channels that somebody knows live on. Twice is fine."""
        if self._pid != os.getpid():  # a fork's copies: to close them does not concern the parent
            self._socket.close()
        elif not self._closed:
            with contextlib.suppress(RuntimeError):  # the process ends, and with it all of this
                service.do(self._stop)

    def know(self, channel: Channel) -> None:
        """A channel is no stranger's any more: it has said what it wants. For the service thread."""
        self._strangers.pop(channel, None)

    def expect(self, channel: Channel) -> None:
        """A channel has to say again what it wants; it is closed if nobody listens here. For the service thread."""
        if self._closed:
            channel.close()
        else:
            self._strangers[channel] = time.monotonic()

    # ---- in the service thread

    def _start(self) -> None:
        if self._keys is not None:
            from . import zap  # and ZeroMQ with it: who has no keys does not load it

            self._domain = zap.admit(self._keys.knows or (lambda key: False))
        self._resume()

    def _resume(self) -> None:
        if not self._closed:
            service.loop().add_reader(self._socket.fileno(), self._accept)

    def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        service.loop().remove_reader(self._socket.fileno())
        self._socket.close()
        strangers, self._strangers = self._strangers, {}
        for channel in strangers:
            channel.close()
        if self._domain:
            from . import zap

            zap.forget(self._domain)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            scarce = descriptors_are_scarce()
            if scarce:
                log.warning("accept on %s: few descriptors are left; strangers that say nothing are dropped", self.url)
            if (scarce or len(self._strangers) >= self._most) and not self._drop_silent():
                self._rest()
                return
            try:
                tcp, _address = self._socket.accept()
            except BlockingIOError:
                self._patience_s = SILENT_S
                return
            except (InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:  # EMFILE, ENFILE, ENOBUFS, ENOMEM
                log.warning("accept on %s: %s; strangers that say nothing are dropped", self.url, e)
                self._drop_silent()
                self._rest()
                return
            self._take(tcp)

    def _rest(self) -> None:
        """Leave those who come in the kernel's queue for a while."""
        self._patience_s = min(self._patience_s, max(self._patience_s / 2, SILENT_LEAST_S))
        service.loop().remove_reader(self._socket.fileno())
        service.loop().call_later(_REST_S, self._resume)

    def _take(self, tcp: socket.socket) -> None:
        self.connected += 1
        # where many wait, who was silent in the kernel's queue already gets no place
        if self._patience_s < SILENT_S and silent_s(tcp) > self._patience_s and not has_unread(tcp):
            log.debug("accept on %s: %s is dropped: %s", self.url, peer_of(tcp), _SILENT)
            tcp.close()
            return
        try:
            tcp.setblocking(False)
            set_options(tcp)
        except OSError:  # it is gone already
            tcp.close()
            return
        channel = Channel(tcp, _Nobody(), self._max_frame, self._keys, listens=True, domain=self._domain)
        channel.receiver = self._welcome(channel)
        if not self._strangers:
            service.loop().call_later(STRANGER_S / 4, self._look)
        self._strangers[channel] = time.monotonic()

    def _look(self) -> None:
        """Drop those who have had their time."""
        now = time.monotonic()
        for channel, since in list(self._strangers.items()):
            if now - since > STRANGER_S:
                self._drop(channel, f"it did not say what it wants within {STRANGER_S:g} s")
        if self._strangers and not self._closed:
            service.loop().call_later(STRANGER_S / 4, self._look)

    def _drop_silent(self) -> int:
        """Make room: drop the strangers of whom nothing was heard for a while; how many."""
        silent = [one for one in self._strangers if one.silent_s > self._patience_s and not one.unread()]
        for channel in silent:
            self._drop(channel, _SILENT)
        return len(silent)

    def _drop(self, channel: Channel, why: str) -> None:
        self._strangers.pop(channel, None)
        log.debug("accept on %s: %s is dropped: %s", self.url, channel.address, why)
        channel.close()


class _Nobody:
    """The receiver of a channel whose own is not made yet."""

    def took(self, frame: bytes) -> None: ...
    def over(self, error: Exception) -> None: ...
    def tick(self) -> None: ...
