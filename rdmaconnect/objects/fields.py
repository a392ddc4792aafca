"""Numbers on their way into C: ctypes cuts off silently what does not fit, so each is looked at before."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

__all__ = ["bits", "put"]

#: codes of ctypes' integer types: those of signed ones are small letters
_INTEGERS = "bBhHiIlLqQ"


def bits(name: str, value: int, width: int) -> int:
    """``value``, if it is an unsigned number of ``width`` bits.

    Raises:
        ValueError: it is not; ``name`` says which.
    """
    if not 0 <= value < 1 << width:
        raise ValueError(f"{name} is {value}: give {width} bits, without a sign")
    return value


def put(struct: Any, **values: Any) -> Any:
    """Set fields of a C struct; what is no number is taken as it is.

    Args:
        struct: the struct.
        values: its fields' new values.

    Returns:
        The struct.

    Raises:
        ValueError: a number that its field cannot hold; nothing after it was set.
    """
    kind: Any = type(struct)
    spans = _spans(kind)
    for name, value in values.items():
        span = spans.get(name)
        if span is not None and isinstance(value, int) and not span[0] <= value <= span[1]:
            raise ValueError(f"{name} is {int(value)}: give {span[0]} to {span[1]}")
        setattr(struct, name, value)
    return struct


@cache
def _spans(struct: Any) -> Mapping[str, tuple[int, int]]:
    """Field -> the least and the greatest number that it can hold, for the fields that hold one."""
    found = {}
    for name, kind, *width in struct._fields_:
        code = getattr(kind, "_type_", None)
        if isinstance(code, str) and code in _INTEGERS:
            size = width[0] if width else 8 * ctypes.sizeof(kind)
            found[name] = (-(1 << size - 1), (1 << size - 1) - 1) if code.islower() else (0, (1 << size) - 1)
    return found
