"""Messages that are almost right: each a sound one in which a few things were changed."""

from __future__ import annotations

import contextlib
import copy
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

__all__ = ["bytewise", "mutated"]

#: values that a field may not expect
STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 127, 255, 256, 4095, 4096, 4097, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "x" * 65,
    "x" * 300, "x" * 2049, "\0\x1b[31m\n", "\u202e\U0010ffff", b"", bytes(15), bytes(16), b"\1" * 17, b"x" * 4097,
    [], {}, [[]], {"a": 1}, {"": {}}, [None] * 17, [0] * 5000, msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2),
    "hello", "reply", "ready", "joined", "proof", "beat", "reject", "bye", "HELLO",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each thing in a body."""
    if path:
        yield path
    if len(path) > 7:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:40]):
            yield from places(inner, (*path, index))


def at(body: Any, path: tuple[Any, ...]) -> Any:
    """What is there."""
    for step in path:
        body = body[step]
    return body


def mutated(chance: random.Random, body: dict[str, Any], changes: int) -> bytes:
    """The bytes of a body in which so many things were changed."""
    body = copy.deepcopy(body)
    for _ in range(changes):
        found = list(places(body))
        if not found:
            break
        path = chance.choice(found)
        parent, key = at(body, path[:-1]), path[-1]
        with contextlib.suppress(RecursionError):  # of what was nested deeply before
            _change(chance, parent, key)
    try:
        packed: bytes = msgpack.packb(body, unicode_errors="surrogatepass", use_single_float=chance.random() < 0.1)
    except (ValueError, OverflowError, TypeError, RecursionError):
        return b"\xc1"
    return packed


def _change(chance: random.Random, parent: Any, key: Any) -> None:
    value, how = parent[key], chance.randrange(7)
    if how == 0:
        del parent[key]
    elif how == 1:
        parent[key] = copy.deepcopy(chance.choice(STRANGE))
    elif how == 2 and isinstance(value, int):
        parent[key] = chance.choice((value + 1, value - 1, value * 2, -value, value ^ 1 << chance.randrange(63)))
    elif how == 3 and isinstance(value, list):
        value.extend(
            copy.deepcopy(value) * chance.choice((1, 5, 300)) if value else [copy.deepcopy(chance.choice(STRANGE))]
        )
    elif how == 4 and isinstance(value, bytes):
        parent[key] = chance.choice((bytes(len(value)), b"\xff" * len(value), chance.randbytes(len(value))))
    elif how == 5 and isinstance(value, dict):
        value[chance.choice(["zz", "v", "t", "x" * 70000, "ports", 7])] = copy.deepcopy(chance.choice(STRANGE))
    else:
        deep: Any = value
        for _ in range(chance.choice((1, 50, 510, 512, 1100))):
            deep = [deep] if chance.random() < 0.5 else {"k": deep}
        parent[key] = deep


def bytewise(chance: random.Random, data: bytes) -> bytes:
    """Bytes of which a few were changed, taken out or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if not changed:
            break
        i, how = chance.randrange(len(changed)), chance.randrange(6)
        if how == 0:
            changed[i] ^= 1 << chance.randrange(8)
        elif how == 1:
            changed[i] = chance.randrange(256)
        elif how == 2:
            del changed[i : i + chance.choice((1, 2, 8, 100))]
        elif how == 3:
            changed[i:i] = chance.randbytes(chance.choice((1, 2, 8)))
        elif how == 4:
            del changed[i:]
        else:
            changed[i:i] = chance.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb")) + struct.pack(">I", 2**32 - 1)
    return bytes(changed)
