"""Ownership of what libibverbs hands out: one class for all of it, and one rule.

* **Made under its parents.** An object is its parents' child from before the library makes it, so nobody frees a
  parent under a constructor; a parent that is being closed takes no more children.
* **Used by one thread at a time.** Whoever calls the library with an object holds its ``lock``, and so does whoever
  frees it: no call of a class of this package meets a freed object. (A ``pointer`` that was taken out of it is in the
  hands of who took it.) To poll and to post what was posted before takes no lock: those verbs are shut before it is
  freed, and a call of theirs is over before anybody can do that (:class:`verbs.Shuttable`).
* **Closed once.** However many threads close an object, or it and its parents, one frees it and the others wait for
  that. What was made from it goes first, the last made first, all that can be freed, and one error names what could
  not be.
* **What the library refuses to free stays open** and as it was, and can be closed again.
* **A device that is gone has freed everything** (``EIO``, ``ENODEV``): then closing succeeds, and gives back what is
  this process's.
* **What is forgotten** warns (``ResourceWarning``) and is closed all the same, children first. The collector runs
  amid anything, and so waits for no lock: what it cannot free is freed when the next object is made or closed. What
  the library refuses then is kept for good, with the memory that belongs to it.
* **A forked process owns nothing** of the one that forked it: there each object is of no use, and closing it frees
  nothing.
"""

from __future__ import annotations

import errno
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from ..errors import RdmaConnectError, StateError, VerbsError, together
from ..runtime.fork import in_child
from .locks import Busy, taken

__all__ = ["Owned", "make_together", "open_here"]

_Self = TypeVar("_Self", bound="Owned")
#: as ``threading.RLock()``, which goes through Python
_RLock = type(threading.RLock())

#: all that is open in this process
_here: dict[int, weakref.ref[Owned]] = {}
#: what the kernel answers where the device is gone, and has freed all that was made on it; others may mean more by it
_GONE = {errno.EIO, errno.ENODEV}
#: forgotten, and refused by the library: what the device may still use must not be collected
_kept: dict[int, Owned] = {}
#: forgotten where it could not be freed: it is when something is made or closed
_later: list[Owned] = []


def _try_again() -> None:
    """Free what could not be before."""
    for _ in range(len(_later)):
        with suppress(IndexError):
            _later.pop(0)._collect()


def _forked() -> None:
    """In a forked process: nothing is its own, and no lock is held by a thread that there is no more."""
    for owned in open_here():
        owned._disown()
    _here.clear()


in_child(_forked)


def open_here() -> list[Owned]:
    """All that is open in this process."""
    return [owned for ref in list(_here.values()) if (owned := ref()) is not None]


def make_together(some: Sequence[Owned], make: Callable[[Any], object], name: str, parents: tuple[Owned, ...]) -> None:
    """As the constructor does with one; all of them, or none. The parents' locks are held."""
    for one in some:
        one._begin(name, parents)
    try:
        _enter(dict(zip(map(id, some), map(weakref.ref, some), strict=True)), parents, name)
        for one in some:
            one._pointer = make(one)
    except BaseException:
        for one in some:
            if one.closed:
                one._leave()
            else:
                one.close()
        raise


def _enter(some: Mapping[int, weakref.ref[Owned]], parents: tuple[Owned, ...], name: str) -> None:
    """What is about to be made becomes its parents' child, unless it is too late: then the caller has it leave."""
    if _later:
        _try_again()
    _here.update(some)
    for parent in parents:
        parent._admit(some, name)


class Owned:
    """An object of libibverbs that is freed when this one is closed. A context manager.

    A subclass sets what its ``_release`` and ``_freed`` need before it calls this constructor: from then on another
    thread may close it with a parent.

    Args:
        make: makes it; answers the C pointer.
        name: what messages call it.
        parents: what must outlive it; each is kept alive, and closes this one first.

    Raises:
        StateError: a parent is closed, or being closed.
    """

    # until a constructor has come so far
    _pointer: Any = None
    _parents: tuple[Owned, ...] = ()
    name = "(not made)"
    #: the process that made it forked this one
    _forked = False
    #: close() is on its way down; the device is gone
    _closing = gone = False
    #: to be freed as soon as it has no children: it was forgotten, or closed while the last of them are collected
    due = False
    #: why it and what was made from it is closed, where that was not its users' doing
    why_closed: RdmaConnectError | None = None
    #: verbs that are called without its lock
    _shuttable: tuple[Any, ...] = ()

    def __init__(self, make: Callable[[], Any], name: str, parents: tuple[Owned, ...] = ()) -> None:
        self._begin(name, parents)
        with self.lock:
            try:
                _enter({id(self): weakref.ref(self)}, parents, name)
                self._pointer = make()
            except BaseException:
                self._leave()
                raise

    def _begin(self, name: str, parents: tuple[Owned, ...]) -> None:
        """What each has before anybody can see it."""
        self.name, self._parents = name, parents
        #: held while the library is called with it
        self.lock = _RLock()
        #: held by who closes it; taken before that of its children, and before any ``lock``
        self._ending = _RLock()
        self._children: dict[int, Callable[[], Owned | None]] = {}

    def _admit(self, children: Mapping[int, weakref.ref[Owned]], name: str) -> None:
        """Take children, unless it is too late; the caller takes back what it has put down."""
        # first put down, then look: so does close(), the other way round
        self._children.update(children)
        if self._closing or self.due or self._pointer is None:
            for child in children:
                self._children.pop(child, None)
            self.pointer  # noqa: B018  says what is the matter
            raise self._cause() or StateError(f"make {name}: {self.name} is being closed.")

    def _adopt_by(self, parent: Owned, instead_of: Owned | None = None) -> None:
        """Take one more parent, or another one, after it was made.

        Raises:
            StateError: that is closed, or being closed.
        """
        if parent not in self._parents:
            parent._admit({id(self): weakref.ref(self)}, self.name)
            self._parents = (*self._parents, parent)
        if instead_of is not None and instead_of is not parent:
            self._leave_one(instead_of)

    def _leave_one(self, parent: Owned) -> None:
        """Take a parent away again."""
        self._parents = tuple(p for p in self._parents if p is not parent)
        parent._children.pop(id(self), None)

    def children(self) -> list[Owned]:
        """What was made from it and is not forgotten, in that order."""
        return [child for ref in list(self._children.values()) if (child := ref()) is not None]

    def _locks_before(self) -> list[Any]:
        """The locks to be held before its own when it is freed; a ``StateError`` if that cannot be now."""
        return []

    def _locks_after(self) -> list[Any]:
        """Those to be held after its own; likewise."""
        return []

    def _release(self, pointer: Any) -> None:
        """Free ``pointer``, in one call of the library after which nothing raises; each kind says how."""
        raise NotImplementedError

    def _shut(self) -> None:
        """No verb is called without its lock from now on. Called with it held."""
        for verb in self._shuttable:
            verb.shut()

    def _reopen(self) -> None:
        """It was not freed: the verbs that are called without its lock may be again. Called with the lock held."""
        for verb in self._shuttable:
            verb.reopen()

    def _freed(self, pointer: Any) -> None:
        """Give back what is this process's, once ``pointer`` is free or its device is gone."""

    def _disown(self) -> None:
        """It belongs to the process that has just forked this one."""
        self._pointer, self._forked = None, True
        for verb in self._shuttable:
            verb.disown()
        self.lock, self._ending = _RLock(), _RLock()

    def _answers(self) -> bool:
        """Whether the device is there, as far as anything that it was made from knows how to ask."""
        return all(parent._answers() for parent in self._parents)

    def _must_wait(self) -> bool:
        """Whether it may not be freed where it was forgotten; then its parents keep it until they are closed."""
        return False

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._pointer is None

    @property
    def pointer(self) -> Any:
        """The C pointer, for the verbs that take it.

        Raises:
            StateError: after close, or in a process other than the one that made it.
            RdmaConnectError: why it was closed, where that was not its user's doing.
        """
        pointer = self._pointer
        if pointer is None:
            if self._forked:
                raise StateError(f"{self.name} belongs to the process that forked this one. Open the device anew here.")
            raise self._cause() or StateError(f"{self.name} is closed.")
        return pointer

    def _cause(self) -> RdmaConnectError | None:
        """Why it, or what it was made from, was closed, if that is known."""
        causes = (parent._cause() for parent in self._parents)
        return self.why_closed or next((cause for cause in causes if cause is not None), None)

    def close(self) -> None:
        """Free it, and first what was made from it. Twice is fine, and so are two threads.

        Raises:
            VerbsError: the library refuses, for example with EBUSY; it names all that stays open. Close again later.
            StateError: something cannot be closed now, for example within another thread's batch.
        """
        if _later:
            _try_again()
        refused: list[RdmaConnectError] = []
        self._close(refused)
        if refused:
            raise together(f"close {self.name}", refused)

    def _close(self, refused: list[RdmaConnectError], wait: bool = True) -> None:
        """Close it, and add to ``refused`` what was refused; without ``wait`` also where another thread is at it."""
        if self._forked or "_ending" not in self.__dict__:  # another process's, or its constructor never came so far
            return
        try:
            with self._ending if wait else taken([self._ending], wait, self):
                # whoever makes or uses it comes to an end first
                with self.lock if wait else taken([self.lock], wait, self):
                    if self._pointer is None or self._closing:
                        return
                    self._closing = True
                try:
                    free = self._close_children(refused, wait) and self._free(refused, wait)
                finally:
                    self._closing = False
        except Busy as e:
            refused.append(e)
            return
        if free:  # outside of the lock, which comes after that of a parent
            self._leave(wait)

    def _close_children(self, refused: list[RdmaConnectError], wait: bool) -> bool:
        """Close what was made from it; whether there is nothing left."""
        if not self._children:
            self.due = True
            return True
        while True:
            now: list[RdmaConnectError] = []
            went = False
            for child in reversed(self.children()):
                was_open = not child.closed
                child._close(now, wait)
                went |= was_open and child.closed
            # what is busy can be so by one of the others: a region by a window, whose new binding never took place
            if not (now and went):
                break
        refused += now
        self.due = not now
        return self.due and not self._children  # of those that are being collected now, the last one comes back here

    def _free(self, refused: list[RdmaConnectError], wait: bool) -> bool:
        """Free it, its children being gone; whether that is done."""
        try:
            before, lock = self._locks_before(), self.lock if wait else taken([self.lock], wait, self)
            first = taken(before, wait, self) if before else lock  # which is free to be taken twice
            with first, lock, taken(self._locks_after(), wait, self):
                self._free_alone()
        except RdmaConnectError as e:
            self.due = False
            refused.append(VerbsError(e.verb, e.errno or 0, f"close {self.name}") if isinstance(e, VerbsError) else e)
            return False
        return True

    def _free_alone(self) -> None:
        pointer = self._pointer
        try:
            self._pointer = None  # before, as the library lets the interpreter's lock go
            if self._shuttable:
                self._shut()
            self._release(pointer)
        except RdmaConnectError as e:
            gone = self.gone or (isinstance(e, VerbsError) and e.errno in _GONE and not self._answers())
            if not gone:
                self._pointer = pointer
                self._reopen()
                raise
            self._lose()
        except BaseException:  # whether it is free nobody knows
            _kept[id(self)] = self
            raise
        self._freed(pointer)

    def _lose(self) -> None:
        """The device is gone, and so is all that this was made from."""
        self.gone = True
        for parent in self._parents:
            parent._lose()

    def _leave(self, wait: bool = True) -> None:
        """It is nobody's child any more."""
        me = id(self)
        _here.pop(me, None)
        _kept.pop(me, None)
        for parent in self._parents:
            parent._children.pop(me, None)
            if parent.due:
                parent._collect(wait)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._pointer is None:
            return
        try:
            warnings.warn(f"{self.name} was never closed", ResourceWarning, source=self, stacklevel=2)
        finally:
            if not sys.is_finalizing():  # the kernel frees what a process leaves; memory: see ``memory``
                self.due = True
                self._collect()

    def _collect(self, wait: bool = False) -> None:
        """Free what was forgotten, once all that was made from it is free: the collector keeps no order.

        It comes in the middle of anything, and so waits for nobody: what cannot be freed now is later.
        """
        if any(ref() is None for ref in list(self._children.values())):
            return
        if self._must_wait():
            self._stay(lambda: self)
            return
        refused: list[RdmaConnectError] = []
        self._close(refused, wait)
        if not refused:
            return
        if all(isinstance(e, StateError) for e in refused):
            _later.append(self)
            self._stay(weakref.ref(self))
            return
        _kept[id(self)] = self
        self._stay(weakref.ref(self))
        why = together(f"close {self.name}", refused)
        warnings.warn(f"forgotten, and kept for good: {why}", ResourceWarning, stacklevel=2)

    def _stay(self, ref: Callable[[], Owned | None]) -> None:
        """Be the parents' child again, who have lost sight of it, and may be closed before."""
        for parent in self._parents:
            parent._children[id(self)] = ref
        if self._pointer is None:  # closed meanwhile, by a thread that still saw it
            self._leave()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' closed' if self.closed else ''}>"
