"""Ownership of what libibverbs hands out: one class for all of it.

A parent closes its children first, in the reverse order of their making; closing twice is fine; use
after close fails with the object's name; a finaliser only warns, since the order in which Python
collects is not the order in which the kernel lets go.
"""

from __future__ import annotations

import warnings
import weakref
from types import TracebackType
from typing import Any, TypeVar

from .errors import StateError
from .fork import in_child

__all__ = ["Owned"]

_Self = TypeVar("_Self", bound="Owned")

#: how many forks lie between the first process and this one: asking the kernel at each use would cost
_generation = 0


def _count_fork() -> None:
    global _generation
    _generation += 1


in_child(_count_fork)


class Owned:
    """An object of libibverbs that is freed when this one is closed.

    Args:
        pointer: the C pointer.
        name: what messages call it.
        parents: what must outlive it; each is kept alive, and closes this one first.
    """

    # until a constructor has come so far
    _pointer: Any = None
    name = "(not made)"

    def __init__(self, pointer: Any, name: str, parents: tuple[Owned, ...] = ()) -> None:
        self._pointer = pointer
        self.name = name
        self._parents = parents
        self._children: dict[int, weakref.ref[Owned]] = {}
        self._made_in = _generation
        for parent in parents:
            parent._children[id(self)] = weakref.ref(self)

    def _adopt_by(self, parent: Owned, instead_of: Owned | None = None) -> None:
        """Take one more parent, or another one, after it was made."""
        if instead_of is not None:
            instead_of._children.pop(id(self), None)
        self._parents = (*(p for p in self._parents if p is not instead_of and p is not parent), parent)
        parent._children[id(self)] = weakref.ref(self)

    def _release(self, pointer: Any) -> None:
        """Free ``pointer``; each kind says how."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._pointer is None

    @property
    def pointer(self) -> Any:
        """The C pointer, for the verbs that take it.

        Raises:
            StateError: after close, or in a process other than the one that made it.
        """
        if self._pointer is None:
            raise StateError(f"{self.name} is closed.")
        if self._made_in != _generation:
            raise StateError(f"{self.name} belongs to the process that forked this one. Open the device anew here.")
        return self._pointer

    def close(self) -> None:
        """Free it, what was made from it first. Twice is fine.

        Raises:
            VerbsError: the library refuses, for example EBUSY; the object stays open.
        """
        if self._pointer is None:
            return
        for child in reversed([ref() for ref in self._children.values()]):
            if child is not None:
                child.close()
        self._children.clear()
        if self._made_in == _generation:
            self._release(self._pointer)
        self._pointer = None
        for parent in self._parents:
            parent._children.pop(id(self), None)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._pointer is not None and self._made_in == _generation:
            warnings.warn(f"{self.name} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' closed' if self.closed else ''}>"
