"""Several locks held together, or none where another thread has one of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import StateError

__all__ = ["Busy", "apart_from", "batch_locks", "exclusive", "holding", "taken", "this"]

_NO_LOCK = nullcontext()


_Self = TypeVar("_Self", bound=Any)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _This(threading.local):
    def __init__(self) -> None:
        self.thread = threading.current_thread()


#: ``this.thread`` is the calling thread: what is whose cannot be told by ``get_ident``, which is given anew
this = _This()


class Busy(StateError):
    """Another thread is at it, and there is no waiting for that one."""


def exclusive(method: Callable[Concatenate[_Self, _P], _T]) -> Callable[Concatenate[_Self, _P], _T]:
    """A method that calls the library with its object: alone, and so never with one that is being freed."""

    @functools.wraps(method)
    def alone(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **kwargs)

    return alone


def taken(locks: list[Any], wait: bool, owner: Any) -> AbstractContextManager[object]:
    """Hold locks, taken in this order.

    Args:
        locks: they.
        wait: whether to wait for them; if not, one that another thread holds raises :class:`Busy`.
        owner: what is being closed; its ``name`` goes into the error.
    """
    if not locks:
        return _NO_LOCK
    if wait and len(locks) == 1:
        lock: AbstractContextManager[object] = locks[0]
        return lock
    return _Taken(locks, wait, owner)


def holding(things: Iterable[Any]) -> AbstractContextManager[object]:
    """The locks of several objects, taken in one order whoever asks: the library reads them all in one call."""
    return taken([thing.lock for thing in sorted(set(things), key=id)], True, None)


class _Taken:
    __slots__ = ("_held", "_locks", "_owner", "_wait")

    def __init__(self, locks: list[Any], wait: bool, owner: Any) -> None:
        self._locks, self._wait, self._owner = locks, wait, owner
        self._held: list[Any] = []

    def __enter__(self) -> None:
        try:
            for lock in self._locks:
                if not lock.acquire(self._wait):
                    raise Busy(f"close {self._owner.name}: another thread is using it.")
                self._held.append(lock)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while self._held:
            self._held.pop().release()


def batch_locks(queues: Iterable[Any], doing: str) -> list[Any]:
    """What is held within batches of completion queues (None: of none), each once, in one order whoever asks.

    Raises:
        StateError: this thread is within one of them.
    """
    found = [cq.batch_lock(doing) for cq in sorted({cq for cq in queues if cq is not None}, key=id)]
    return [lock for lock in found if lock is not None]


@contextmanager
def apart_from(queues: Iterable[Any], doing: str) -> Iterator[None]:
    """:meth:`CQ.apart` of several."""
    with ExitStack() as stack:
        for lock in batch_locks(queues, doing):
            stack.enter_context(lock)
        yield
