"""Several locks held together, or none where another thread has one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import StateError

__all__ = ["Busy", "taken"]

_NO_LOCK = nullcontext()


class Busy(StateError):
    """Another thread is at it, and there is no waiting for that one."""


def taken(locks: list[Any], wait: bool, owner: Any) -> AbstractContextManager[object]:
    """Hold locks, taken in this order.

    Args:
        locks: they.
        wait: whether to wait for them; if not, one that another thread holds raises :class:`Busy`.
        owner: what is being closed; its ``name`` goes into the error.
    """
    if wait and len(locks) == 1:
        lock: AbstractContextManager[object] = locks[0]
        return lock
    return _Taken(locks, wait, owner) if locks else _NO_LOCK


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
