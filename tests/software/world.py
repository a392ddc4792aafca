"""The device in software: what a test makes, installs in place of libibverbs, and looks at."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from rdmaconnect import abi, verbs
from rdmaconnect.session import watch

from . import completion, events, extended, memory, queuepair_verbs, rare  # noqa: F401  they bring their verbs
from .arena import ALIVE, ARENA, WORLDS, Object, Refused, new_world
from .calls import Library, current, set_current
from .device import Context, Device, Listed
from .hooks import Hook
from .network import Network

#: what is in a guard
GUARD = 0x6B6B6B6B
#: how many descriptors are guarded at once after they were closed
MOST_GUARDS = 32


class Software:
    """Devices in software, in place of libibverbs from :meth:`install` to :meth:`remove`; a context manager of both.

    Args:
        devices: one by default, ``soft0``, with one port on 127.0.0.1.
        network: what they are on; one of their own by default.
        missing: exported symbols that this library is too old for.

    Attributes:
        devices, network: as given.
        calls: how often each verb was called.
        living: the objects of each kind, by their address, the oldest first.
        made: how many objects of each kind were ever made.
        descriptors: those that it has open.
        errors: what no program may do and one did: use after free, close with something left, ...
    """

    def __init__(
        self, devices: Iterable[Device] | None = None, network: Network | None = None, missing: Iterable[str] = ()
    ) -> None:
        self.number = new_world(self)
        self.devices = [Device()] if devices is None else list(devices)
        self.network = network or Network()
        self.network.worlds.append(self)
        self.calls: Counter[str] = Counter()
        self.living: defaultdict[str, dict[int, Object]] = defaultdict(dict)
        self.made: Counter[str] = Counter()
        self.hooks: dict[str, list[Hook]] = {}
        self.errors: list[str] = []
        self.descriptors: set[int] = set()
        self._guards: deque[int] = deque()
        self._leaves: Counter[str] = Counter()
        self._expected: list[str] = []
        #: local and remote key -> region or window
        self.keys: dict[int, Any] = {}
        self._key_numbers = count(1)
        self.listed = [Listed(self, device) for device in self.devices]
        self.library = Library(set(missing))

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """Held while anything changes."""
        return self.network.lock

    # ---- in place of libibverbs

    def install(self) -> Software:
        """Take the place of libibverbs in this process."""
        set_current(self)
        verbs.use(self.library)
        return self

    def remove(self) -> None:
        """Give the place back. What was made lives on, and answers to who holds a pointer to it."""
        end = time.monotonic() + 5
        while current() is self:
            with watch._lock:  # nobody makes another one meanwhile, of this library's devices
                if not watch._readers or time.monotonic() > end:
                    watch.forget()
                    set_current(None)
                    verbs.use(None)
            time.sleep(0.001)
        self.network.close()

    def __enter__(self) -> Software:
        return self.install()

    def __exit__(self, *error: object) -> None:
        self.remove()

    # ---- what a test does

    def on(self, verb: str, **what: Any) -> Hook:
        """Let something happen at calls of a verb.

        Args:
            verb: its C name, as in ``abi.PROTOTYPES`` or ``abi.OPS``.
            what: ``delay`` (seconds, or a function of the ``Call``), ``fail`` (an errno: the verb does
                nothing and fails), ``before``, ``after`` it has succeeded (functions of the ``Call``); and for which:
                ``dgid`` (the path's), ``to`` (the state of ``ibv_modify_qp``), ``thread``, ``where`` (a
                predicate on the ``Call``), and among those ``nth`` (from 1; a number or several) and
                ``times`` (at most).

        Returns:
            The hook; ``remove`` it, or use it in a ``with`` statement.
        """
        if verb not in abi.PROTOTYPES and verb not in abi.OPS:
            raise ValueError(f"{verb} is no verb")
        hook = Hook(verb, **what)
        self.hooks = self.hooks | {verb: [*self.hooks.get(verb, []), hook]}
        return hook

    def event(self, context: Context | str, event_type: int, element: int = 0) -> None:
        """Tell of an asynchronous event.

        Args:
            context: of which device: one context, or a device's name for all that have it open.
            event_type: ``EventType``.
            element: the port's number, or the object's address; 0 for a device's.
        """
        with self.lock:
            of_name = [one for one in self.objects("context") if one.device.name == context]
            for one in [context] if isinstance(context, Context) else of_name:
                events.tell(one, event_type, element)

    # ---- what a test looks at

    def objects(self, kind: str) -> list[Any]:
        """The living objects of a kind, the oldest first."""
        return list(self.living[kind].values())

    @property
    def alive(self) -> Counter[str]:
        """How many objects of each kind there are."""
        return Counter({kind: len(objects) for kind, objects in list(self.living.items())})

    def left(self) -> dict[str, int]:
        """kind -> how many are alive; only those that are. What is kept for the next connection goes at once."""
        watch.forget()
        return {kind: number for kind, number in self.alive.items() if number and kind != Listed.kind}

    # ---- the end of a test

    def leaves(self, **kinds: int) -> None:
        """Say what this test leaves alive on purpose: kind -> how many."""
        self._leaves.update(kinds)

    def expects(self, pattern: str) -> None:
        """Say that this test makes an error on purpose, which this regular expression finds in :attr:`errors`."""
        self._expected.append(pattern)

    def problems(self) -> list[str]:
        """What is wrong at the end of a test: things left, errors, descriptors used after they were closed."""
        end = time.monotonic() + 5  # what a worker is closing just now is not left
        while (left := self._left_over()) and time.monotonic() < end:
            time.sleep(0.01)
        found = [f"{n} {kind} left" for kind, n in left.items()]
        found += [f"no {kind} left, of {n} that should be" for kind, n in self._leaves.items() if not self.alive[kind]]
        found += [e for e in self.errors if not any(re.search(p, e) for p in self._expected)]
        found += [f"no error {p!r}" for p in self._expected if not any(re.search(p, e) for e in self.errors)]
        if self.descriptors and not self._leaves:
            found.append(f"descriptors left: {sorted(self.descriptors)}")
        while self._guards:
            self._unguard(found.append)
        return found

    def _left_over(self) -> dict[str, int]:
        """What is left and should not be."""
        return {kind: n for kind, n in self.left().items() if n != self._leaves[kind]}

    # ---- for the verbs

    def error(self, words: str, stack: bool = True) -> None:
        """Remember what no program may do."""
        where = "".join(traceback.format_stack(limit=12)[:-2]) if stack else ""
        self.errors.append(f"{words}\n{where}".rstrip())

    def room_for(self, context: Context, kind: str) -> None:
        """Refuse with ENOMEM what a device has no more room for."""
        if len(self.living[kind]) >= context.device.limit(f"max_{kind}"):
            raise Refused(errno.ENOMEM)

    def made_from(self, context: Context) -> list[Object]:
        """The living objects of a context, the youngest first."""
        return [one for one in reversed(list(ALIVE.values())) if getattr(one, "context", None) is context]

    def new_key(self, owner: Any) -> int:
        """A key for memory, never used before."""
        key = (next(self._key_numbers) << 8 | secrets.randbits(8)) & 0xFFFFFFFF
        self.keys[key] = owner
        return key

    def opened(self, fd: int) -> int:
        """Count a descriptor."""
        self.descriptors.add(fd)
        return fd

    def close_fd(self, fd: int) -> None:
        """Close a descriptor of its own; for a while a guard takes its number, to see who still reads it."""
        self.descriptors.discard(fd)
        try:
            guard = os.eventfd(GUARD, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # none is left
            os.close(fd)
            return
        os.dup2(guard, fd, inheritable=False)
        os.close(guard)
        self._guards.append(fd)
        if len(self._guards) > MOST_GUARDS:
            self._unguard(self.errors.append)

    def _unguard(self, tell: Callable[[str], None]) -> None:
        fd = self._guards.popleft()
        try:
            touched = os.eventfd_read(fd) != GUARD
        except OSError:
            touched = True
        if touched:
            tell(f"descriptor {fd} was read, written to or closed after it was given back")
        with contextlib.suppress(OSError):
            os.close(fd)


def _after_fork() -> None:
    ARENA.renew()
    for world in WORLDS.values():
        world.network.renew()


os.register_at_fork(after_in_child=_after_fork)
