"""Many values at once, column by column: a hello may have thousands of queue pairs. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeVar

__all__ = ["filled"]

T = TypeVar("T")


def filled(kind: type[T], count: int, columns: Iterable[tuple[str, Iterable[Any]]]) -> tuple[T, ...]:
    """So many instances of a frozen dataclass, without its constructor: their fields have been checked.

    Args:
        kind: the class.
        count: how many.
        columns: each of its fields, and the values that the instances have there, in order.
    """
    made = tuple(map(object.__new__, repeat(kind, count)))
    for name, values in columns:
        deque(map(object.__setattr__, made, repeat(name), values), 0)
    return made
