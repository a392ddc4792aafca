"""C enums as Python enums: values the header does not know are kept, not refused, and print as what they are.

A newer library or kernel may hand over a number that this package has never heard of. That must not break the
program that asked, so both kinds accept any integer:

    >>> str(WcStatus(12)), str(WcStatus(99))
    ('RETRY_EXC_ERR', 'unknown (99)')
    >>> str(QpAttrMask.STATE | QpAttrMask.PORT), str(QpAttrMask(1 << 30 | 1))
    ('STATE|PORT', 'STATE|0x40000000')
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

F = TypeVar("F", bound="CFlag")
E = TypeVar("E", bound="type[CEnum] | type[CFlag]")


def _format(number: int, text: str, spec: str) -> str:
    """`f"{x}"` and `f"{x:>8}"` show the name, `f"{x:d}"` and `f"{x:#x}"` the number."""
    return format(number, spec) if spec and spec[-1] in "bcdnoxX" else format(text, spec)


class CEnum(IntEnum):
    """One value out of a C enum. `str()` is the short name, or `unknown (9)`."""

    # that of the number, which it is equal to; Enum's own is one of the name, and far slower
    __hash__ = int.__hash__

    @classmethod
    def _missing_(cls, value: object) -> CEnum | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"unknown ({value})"
        member._value_ = int(value)
        return member

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # by value: some releases of Python 3.11 pickle by name, and an unknown value has none
        return type(self), (int(self),)

    @property
    def known(self) -> bool:
        """Whether the header names this value."""
        return self._name_ in type(self).__members__

    def __str__(self) -> str:
        return self._name_

    def __format__(self, spec: str) -> str:
        return _format(int(self), str(self), spec)


class CFlag(IntFlag):
    """A set of bits out of a C enum. `str()` is `STATE|PORT`, unknown bits in hex, `0` for the empty set."""

    __hash__ = int.__hash__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (int(self),)

    def __str__(self) -> str:
        known = bits(self)
        rest = int(self) & ~sum(int(bit) for bit in known)
        names = [str(bit._name_) for bit in known]
        return "|".join([*names, hex(rest)] if rest else names) or "0"

    def __format__(self, spec: str) -> str:
        return _format(int(self), str(self), spec)


ENUMS: dict[type[CEnum] | type[CFlag], tuple[str | None, str]] = {}
"""Each class: the C enum it mirrors (None: an anonymous enum or macros) and the prefix its members drop."""


def c_enum(c_name: str | None, prefix: str) -> Callable[[E], E]:
    """Say which C enum a class mirrors; member `X` is the enumerator `prefix + "X"`."""

    def register(cls: E) -> E:
        ENUMS[cls] = (c_name, prefix)
        return cls

    return register


def bits(flags: F) -> list[F]:
    """The named single bits that are set in `flags`, lowest first.

    Python iterates over a flag only since 3.11; this does it on 3.10 too, and passes over unknown bits.
    """
    members = type(flags).__members__.values()
    return sorted({m for m in members if m & flags and int(m) & (int(m) - 1) == 0})
