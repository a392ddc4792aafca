"""Where the C structs live that are handed out: memory that is given once and never again.

So a pointer to a freed struct can be told from every other one for as long as the process lives, reading
through it never crashes, and what is read is poison.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections import OrderedDict
from itertools import count
from typing import Any, ClassVar

CHUNK = 1 << 20
#: in front of each struct: index of its kind, number of its world
_HEADER = 16
_POISON = 0x6B
#: freed objects of which more is remembered than their kind
_REMEMBERED = 4096


class Arena:
    """Memory without an end; nothing in it is ever freed."""

    def __init__(self) -> None:
        self.renew()
        self._chunks: list[tuple[int, int, mmap.mmap]] = []
        self._at = self._end = 0
        #: address -> where the struct begins that it lies in
        self.within: dict[int, int] = {}

    def renew(self) -> None:
        """A new lock, in a forked child: whoever held the old one is not there."""
        self._lock = threading.Lock()

    def new(self, size: int, kind: int, world: int) -> int:
        """The address of ``size`` bytes of zeros, aligned to 16."""
        need = _HEADER + (size + 15) // 16 * 16
        with self._lock:
            if self._at + need > self._end:
                # private: what a forked child makes is not to be seen here
                chunk = mmap.mmap(-1, max(CHUNK, need), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._at = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
                self._end = self._at + len(chunk)
                self._chunks.append((self._at, self._end, chunk))
            address, self._at = self._at + _HEADER, self._at + need
        label = (ctypes.c_uint64 * 2).from_address(address - _HEADER)
        label[:] = kind, world
        return address

    def label(self, address: int) -> tuple[int, int] | None:
        """(kind, world) of the struct that was once handed out at an address; None if none ever was."""
        address = self.within.get(address, address)
        if address % 16 or not any(start < address < end for start, end, _ in self._chunks):
            return None
        kind, world = (ctypes.c_uint64 * 2).from_address(address - _HEADER)
        return (kind, world) if 0 <= kind < len(KINDS) and world in WORLDS else None


ARENA = Arena()
#: every kind of object, in the order of their definition
KINDS: list[type[Object]] = []
#: number -> who made objects; for as long as the process lives, as pointers into it may
WORLDS: dict[int, Any] = {}
#: address -> the object that lives there
ALIVE: dict[int, Object] = {}
#: address -> how it ended, of the last that were freed
_ends: OrderedDict[int, str] = OrderedDict()
_numbers = count(1)
_handles = count(1)


def new_world(world: Any) -> int:
    """A number for whoever makes objects."""
    number = next(_numbers)
    WORLDS[number] = world
    return number


class Refused(Exception):
    """A verb fails with this errno."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.errno = number


class Misused(Exception):
    """A verb was given what no program may give it; ``world`` is to know, if it is known whose it was."""

    def __init__(self, words: str, world: Any = None) -> None:
        super().__init__(words)
        self.world = world


class Object:
    """Something that a verb made: a struct, the state behind it, and what must outlive it.

    Args:
        world: whose it is.
        parents: what cannot be destroyed before it.

    Attributes:
        address: of the struct.
        c: the struct.
        users: how many others need it.
        unacked: events of it that were taken and not acknowledged.
    """

    kind: ClassVar[str]
    struct: ClassVar[Any]
    #: the names of the structs that a pointer to it may be typed as
    typed: ClassVar[tuple[str, ...]]
    _index: ClassVar[int]
    _spans: ClassVar[list[tuple[int, int]]]

    def __init_subclass__(cls) -> None:
        cls._index = len(KINDS)
        KINDS.append(cls)
        pointers = (ctypes._Pointer, ctypes._CFuncPtr, ctypes.c_void_p)  # type: ignore[attr-defined]
        fields = [(name, kind) for name, kind, *_ in cls.struct._fields_]
        plain = [name for name, kind in fields if not issubclass(kind, (*pointers, ctypes.Structure))]
        cls._spans = [(getattr(cls.struct, name).offset, getattr(cls.struct, name).size) for name in plain]

    def __init__(self, world: Any, *parents: Object | None) -> None:
        self.world = world
        self.parents = tuple(parent for parent in parents if parent is not None)
        self.users = self.unacked = 0
        self.freed = False
        self.address = self._place(ARENA.new(ctypes.sizeof(self._whole()), self._index, world.number))
        self.c = self.struct.from_address(self.address)
        if hasattr(self.struct, "handle"):
            self.c.handle = next(_handles)
        for parent in self.parents:
            parent.users += 1
        ALIVE[self.address] = self
        world.made[self.kind] += 1
        world.living[self.kind][self.address] = self

    def _whole(self) -> Any:
        """The struct that is really allocated."""
        return self.struct

    def _place(self, address: int) -> int:
        """Where in it the struct is that is handed out."""
        return address

    def free(self, how: str) -> None:
        """Destroy it.

        Raises:
            Refused: EBUSY while others need it.
        """
        if self.users:
            raise Refused(errno.EBUSY)
        self.freed = True
        for parent in self.parents:
            parent.users -= 1
        del ALIVE[self.address]
        del self.world.living[self.kind][self.address]
        for offset, size in self._spans:
            ctypes.memset(self.address + offset, _POISON, size)
        _ends[self.address] = f"{self} was freed by {how} in thread {threading.current_thread().name}"
        if len(_ends) > _REMEMBERED:
            _ends.popitem(last=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.address:#x}"


def find(address: int | None, struct: str) -> Object:
    """The living object that a pointer to ``struct`` means.

    Raises:
        Misused: NULL, a freed object, another kind of object, or no object at all.
    """
    found = ALIVE.get(address or 0)
    if found is not None:
        if struct in found.typed:
            return found
        raise Misused(f"was given {found} for a struct {struct}", found.world)
    if not address:
        raise Misused(f"was given NULL for a struct {struct}")
    label = ARENA.label(address)
    if label is None:
        raise Misused(f"was given {address:#x} for a struct {struct}: there never was one")
    kind, world = KINDS[label[0]], WORLDS[label[1]]
    raise Misused(f"use after free: {_ends.get(address) or f'{kind.kind} {address:#x} was freed'}", world)
