"""What was read of this host, remembered for as long as nothing has changed.

Which ports there are, their tables, and which address a peer is reached from hardly ever change, and are dear to read.
So what was read is kept, and thrown away whole at the first sign of any change. What there are signs for is kept, and
nothing else:

- links, addresses, routes and rules: the kernel's notices over netlink, which are there before the call that made the
  change has returned;
- ports, LIDs, P_Key and GID tables: the asynchronous events of a context of its own for each device;
- devices: their names, and what sysfs knows each by, which is another number for one that was removed and made anew;
  and the kernel's word of each that goes, which comes before it waits for those who have it open.

The kernel fills GID tables some time after an address has changed: so for a while after a change nothing is kept.
It is one for each network namespace, and goes at such a sign and when nobody has asked for some seconds, with its
descriptors; while there are connections it stays, and is made anew: each is told of every sign, and looks for itself
whether that concerns it (``attendants``). So long the devices stay open too, and no longer: where one was removed while
it was kept open (rxe, Linux 7.2), the other devices of its network namespace were seen to take no more packets (UDP
"NoPorts").

Source: rtnetlink(7), netlink(7) (NETLINK_KOBJECT_UEVENT), ibv_get_async_event(3).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ..errors import RdmaConnectError, VerbsError
from ..exchange import service
from ..objects.context import Context, device_names, one_list, open_apart, open_device
from ..objects.sysfs import device_nodes, kernel_devices
from ..runtime.fork import in_child
from ..runtime.workers import here, namespace
from ..verbs import library
from . import attendants

__all__ = ["attend", "forget", "recall", "recalled"]

T = TypeVar("T")

#: seconds after a change in which nothing is kept; and after which what nobody asks for is given up
SETTLE_S, IDLE_S = 1.0, 5.0
#: between two looks at what devices there are, while somebody goes by them, s
ATTENDED_S = 1.0
_UEVENT = 15
#: how the kernel begins to say that a device is removed, or named anew, and what its path has
_SIGNS = ((b"remove@", b"/infiniband_verbs/"), (b"move@", b"/infiniband/"))
_INTERFACES = "/sys/class/net"
#: values that are kept at most: one for each peer's address among them
_MOST = 1024
#: RTNLGRP_* of linux/rtnetlink.h: LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE, NEXTHOP
_GROUPS = sum(1 << group - 1 for group in (1, 5, 7, 8, 9, 11, 19, 32))


class _Watch:
    """Signs of change in one network namespace, and what was read while there were none. Under :data:`_lock`."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, Any] = {}
        self.used = time.monotonic()
        self._names = {*device_names()}  # first: without the library there is nothing to watch, on any system
        self._events: dict[str, Context] = {}
        #: so that the next connection finds them open
        self._kept_open: list[Context] = []
        self._signs, self._heard = select.epoll(), False
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        self._uevents = socket.socket(socket.AF_NETLINK, kind | socket.SOCK_NONBLOCK, _UEVENT)
        try:
            self._socket.bind((0, _GROUPS))
            self._uevents.bind((0, 1))
            self._signs.register(self._socket, select.EPOLLIN)
            self._sysfs = {*os.listdir(_INTERFACES)} >= {name for _, name in socket.if_nameindex()}
            self._devices, self._nodes = self._list(), device_nodes()
        except BaseException:
            self._socket.close()
            self._uevents.close()
            self._signs.close()
            raise

    def _list(self) -> tuple[object, dict[str, int]]:
        """What tells this library's list of devices from another one."""
        devices = kernel_devices() if self._sysfs else {}
        if devices.keys() != self._names:  # sysfs is not of this namespace, or shows others: only the library can tell
            devices = dict.fromkeys(device_names(), 0)
        return library(), devices

    def follow(self, names: Sequence[str] | None) -> None:
        """Look out for events of these devices too; None for all.

        Raises:
            RdmaConnectError: one cannot be opened.
        """
        for name in self._names if names is None else names:
            if name not in self._events:
                context = self._events[name] = open_apart(name)
                self._signs.register(context.events.fileno(), select.EPOLLIN)
                self._kept_open.append(open_device(name))

    def follows(self, name: str) -> bool:
        """Whether it looks out for events of a device."""
        return name in self._events

    def lacks_a_node(self) -> bool:
        """Whether a device's node that was there is not there any more. Never blocks."""
        return not self._nodes.items() <= device_nodes().items()

    def holds(self) -> bool:
        """Whether nothing has changed since it was made."""
        return self._list() == self._devices and not self._signs.poll(0)

    def disown(self) -> None:
        """In a child: what it watches is its parent's."""
        self._socket.close()
        self._signs.close()
        self._uevents.close()

    def listen(self, where: int) -> None:
        """Go at the first sign of a change, whether anybody asks or not. In the service thread."""
        service.loop().add_reader(self._signs.fileno(), _changed, where, self)
        service.loop().add_reader(self._uevents.fileno(), self._hear, where)

    def _hear(self, where: int) -> None:
        """Words of the kernel on devices of all kinds."""
        for _ in range(64):
            try:
                said = self._uevents.recv(4096).partition(b"\0")[0]
            except OSError:  # no more, or too many to keep
                return
            if any(said.startswith(action) and path in said for action, path in _SIGNS):
                _changed(where, self)
                return

    def changed(self) -> None:
        """There was a sign: wait for no other. In the service thread."""
        self._heard = True
        service.loop().remove_reader(self._signs.fileno())
        service.loop().remove_reader(self._uevents.fileno())
        self._uevents.close()

    def close(self) -> None:
        """Give up its descriptors and devices. Twice is fine, and so are two threads."""
        try:
            service.soon(self._end)
        except VerbsError:  # there is no service thread, nor descriptors for one
            self._signs.close()
            self._uevents.close()
        self._socket.close()
        for context in (*self._events.values(), *self._kept_open):
            with contextlib.suppress(RdmaConnectError):  # the device is gone
                context.close()

    def _end(self) -> None:
        if not self._signs.closed:
            if not self._heard:
                self.changed()
            self._signs.close()


#: network namespace -> its watch, and the time from which on there may be one
_watches: dict[int, _Watch] = {}
_settled: dict[int, float] = {}
#: one for each call that reads now: whoever puts another library in the place of this one waits for them
_readers: list[object] = []
#: those that workers are closing
_leaving: set[_Watch] = set()
_lock = threading.RLock()


def recall(key: Hashable, names: Sequence[str] | None, make: Callable[[], tuple[T, bool]]) -> T:
    """A value that was read of this host, or that is read now.

    Args:
        key: what it is; None is no value.
        names: the devices that it was read from; None for all.
        make: reads it; says too whether there is a sign of every change of it.

    Raises:
        BaseException: what ``make`` raises; nothing is kept then.
    """
    where = namespace()
    with _lock:
        kept: T | None = _look_up(where, key)
    if kept is not None:
        return kept
    with _read(), one_list():
        watch = _followed(where, names)
        value, certain = make()
    if watch is not None and certain:
        with _lock:
            if _watches.get(where) is watch and watch.holds():
                if len(watch.kept) >= _MOST:
                    watch.kept.clear()
                watch.kept[key] = value
    return value


def _followed(where: int, names: Sequence[str] | None) -> _Watch | None:
    """The watch, which looks out for these devices too; None while there can be none."""
    with _lock:
        watch = _current(where)
        try:
            if watch is not None:
                watch.follow(names)
        except (RdmaConnectError, OSError):
            return None
        return watch


def attend(some: Sequence[attendants.Attendant]) -> None:
    """Have some told of whatever changes in this network namespace and on their device, until they leave.

    They are not kept. Never blocks for long.
    """
    where = namespace()
    workers = attendants.enter(where, some)
    with _lock:
        watch = _watches.get(where)
        followed = watch is not None and watch.follows(some[0].device)
    if not followed:
        workers.submit(partial(_watch_on, where))


def _watch_on(where: int) -> None:
    """Have a watch for those who attend. In a worker."""
    with _read(), contextlib.suppress(RdmaConnectError, OSError):
        names = sorted({one.device for one in attendants.of(where)})
        if names:
            with one_list():
                _followed(where, names)


def _tell(where: int) -> None:
    """There is a change. In the service thread."""
    attendants.tell(where, SETTLE_S + 0.05, partial(_watch_on, where))


@contextlib.contextmanager
def _read() -> Iterator[None]:
    """One reader more, while it lasts."""
    reader = object()
    _readers.append(reader)
    try:
        yield
    finally:
        _readers.remove(reader)


def recalled(key: Hashable) -> Any:
    """What :func:`recall` has kept, or None. It never blocks."""
    if not _lock.acquire(blocking=False):  # somebody opens devices just now
        return None
    try:
        return _look_up(namespace(), key)
    finally:
        _lock.release()


def _look_up(where: int, key: Hashable) -> Any:
    """What is kept, if nothing has changed since; else None."""
    watch = _watches.get(where)
    try:
        if watch is None or key not in watch.kept or not watch.holds():
            return None
    except (RdmaConnectError, OSError):  # there are no devices any more
        return None
    watch.used = time.monotonic()
    return watch.kept[key]


def _current(where: int) -> _Watch | None:
    """The watch of a network namespace, if it holds, or a new one; None while there can be none."""
    now = time.monotonic()
    watch = _watches.get(where)
    try:
        if watch is not None:
            if watch.holds():
                watch.used = now
                return watch
            _drop(where)
            _settled[where] = now + SETTLE_S
            service.soon(_tell, where)
        if now < _settled.get(where, now):
            return None
        _settled.pop(where, None)
        watch = _watches[where] = _Watch()
    except (RdmaConnectError, OSError):  # no devices, no descriptors: what is read is not kept
        _drop(where)
        return None
    service.soon(watch.listen, where)
    service.soon(_look_later, where, IDLE_S)
    return watch


def _changed(where: int, watch: _Watch) -> None:
    """There is a sign. In the service thread."""
    watch.changed()
    _tell(where)
    _give_up(where, watch)


def _leave(where: int, watch: _Watch) -> None:
    """Have a worker close it: to close a device may take a while."""
    del _watches[where]
    _leaving.add(watch)

    def close() -> None:
        watch.close()
        _leaving.discard(watch)

    here().submit(close)


def _give_up(where: int, watch: _Watch) -> None:
    if not _lock.acquire(blocking=False):  # somebody asks just now
        service.loop().call_later(0.01, _give_up, where, watch)
        return
    try:
        if _watches.get(where) is watch:
            _settled[where] = time.monotonic() + SETTLE_S
            _leave(where, watch)
    finally:
        _lock.release()


def _drop(where: int) -> None:
    watch = _watches.pop(where, None)
    if watch is not None:
        watch.close()


def _look_later(where: int, seconds: float) -> None:
    service.loop().call_later(seconds, _look, where)


def _look(where: int) -> None:
    """Give it up if nobody has asked for a while. In the service thread."""
    if not _lock.acquire(blocking=False):  # somebody asks just now
        _look_later(where, IDLE_S)
        return
    try:
        watch = _watches.get(where)
        left = 0.0 if watch is None else watch.used + IDLE_S - time.monotonic()
        if watch is not None and attendants.of(where):
            left = ATTENDED_S
            if watch.lacks_a_node():  # where the kernel says nothing of devices
                service.soon(_changed, where, watch)
        if left > 0:
            _look_later(where, left)
        elif watch is not None:
            _leave(where, watch)
    finally:
        _lock.release()


@atexit.register
def forget() -> None:
    """Throw all of it away."""
    with _lock:
        for where in list(_watches):
            _drop(where)
        _settled.clear()
        attendants.clear()
    for watch in list(_leaving):
        watch.close()
    with contextlib.suppress(RuntimeError, VerbsError):  # the process ends, or nothing was ever exchanged
        service.do(int)  # what is closed there is closed


def _forget() -> None:
    """In a child: what its parent watches is not its own."""
    global _lock
    _lock = threading.RLock()
    for watch in (*_watches.values(), *_leaving):
        watch.disown()
    for those in (_watches, _leaving, _readers):
        those.clear()


in_child(_forget)
