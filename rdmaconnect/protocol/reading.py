"""Values out of what a peer sent: of the type and in the range that is due, or a ValueError that says what was seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import msgpack

from ..errors import RemoteProtocolError

__all__ = [
    "MAX_FRAME", "bytes_of", "columns_of", "flag_of", "get", "int_of", "list_of", "once", "optional_bytes", "row_of",
    "short", "text_of", "unpack", "value_of",
]  # fmt: skip

T = TypeVar("T")

MAX_FRAME = 512 * 1024
#: first bytes of arrays and maps, and how many such bytes a frame may have: the longest sound ones have fewer, those
#: in their numbers and names counted
MAX_CONTAINERS = 128 * 1024
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
#: parts of messages that are kept as they were read last time, and the longest of them, bytes: a peer says of its port
#: the same in each hello
_KEPT, _KEPT_MAX = 64, 1024


def short(value: object, limit: int = 60) -> str:
    """What a peer sent, made safe for a line of text; of what may be nested too deep to print, the type."""
    text = type(value).__name__ if isinstance(value, list | dict) else str(value)
    return ascii(text)[1:-1][:limit]


def unpack(frame: bytes, hint: str) -> Any:
    """What MessagePack makes of bytes that nobody vouches for.

    Args:
        frame: the bytes.
        hint: what to do where they are no MessagePack.

    Raises:
        RemoteProtocolError: they are too many, not MessagePack, or have too much in them.
    """
    if len(frame) > MAX_FRAME:
        raise RemoteProtocolError(f"decode: the peer's frame has {len(frame)} bytes, at most {MAX_FRAME} are taken.")
    # these bytes begin the arrays and maps, of which each costs far more to make than to send; others may be like them
    if len(frame) - len(frame.translate(None, _CONTAINERS)) > MAX_CONTAINERS:
        raise RemoteProtocolError(f"decode: the peer's {len(frame)} bytes have too many arrays and maps in them.")
    try:
        return msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.UnpackException) as e:
        raise RemoteProtocolError(
            f"decode: the peer's {len(frame)} bytes are not a message ({type(e).__name__}). {hint}"
        ) from None


def value_of(body: Any, key: str) -> Any:
    """What a map has under a key."""
    if not isinstance(body, dict) or key not in body:
        raise ValueError(f"{key} is missing")
    return body[key]


def get(body: Any, key: str, kind: type[Any]) -> Any:
    """The same, which is to be of one type."""
    try:
        value = body[key]
    except (KeyError, TypeError):
        value = value_of(body, key)  # says what is the matter
    if type(value) is not kind:  # a bool is no integer here
        raise ValueError(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def list_of(body: Any, key: str, most: int, least: int = 0) -> list[Any]:
    """The same, an array of so many entries."""
    value = get(body, key, list)
    if not least <= len(value) <= most:
        raise ValueError(f"{key} has {len(value)} entries: {least} to {most} are allowed")
    return list(value)


def row_of(value: Any, *kinds: type[Any]) -> list[Any]:
    """The first entries of an array, each of its type; a later version may have more."""
    if not isinstance(value, list) or len(value) < len(kinds):
        raise ValueError(f"an entry is {short(value)}: {len(kinds)} values are due")
    return [get({"entry": v}, "entry", kind) for v, kind in zip(value, kinds, strict=False)]


def columns_of(rows: list[Any], *kinds: type[Any]) -> list[tuple[Any, ...]]:
    """Many rows as columns, each of one type: in a few steps, however many there are."""
    if not rows:
        return [()] * len(kinds)
    if {*map(type, rows)} == {list}:
        columns = list(zip(*rows, strict=False))[: len(kinds)]
        if [{*map(type, column)} for column in columns] == [{kind} for kind in kinds]:
            return columns
    return list(zip(*(row_of(value, *kinds) for value in rows), strict=True))  # or which of them is wrong


def once(take: Callable[[Any], T]) -> Callable[[Any], T]:
    """Read a part of a message, or remember what the same bytes were when they came before."""
    kept = lru_cache(_KEPT)(lambda packed: take(msgpack.unpackb(packed)))

    def taken(body: Any) -> T:
        packed = msgpack.packb(body)
        return kept(packed) if len(packed) <= _KEPT_MAX else take(body)

    return taken


def text_of(body: Any, key: str, most: int) -> str:
    """A text of so many characters at most; those that cannot be printed become question marks."""
    value = get(body, key, str)
    if len(value) > most:
        raise ValueError(f"{key} has {len(value)} characters: at most {most} are allowed")
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def flag_of(body: Any, key: str) -> bool:
    """A truth; False where it is missing."""
    return key in body and get(body, key, bool)


def int_of(body: Any, key: str, most: int, least: int = 0) -> int:
    """An integer from ``least`` to ``most``."""
    value: int = get(body, key, int)
    if not least <= value <= most:
        raise ValueError(f"{key} is {value}: {least} to {most} are allowed")
    return value


def bytes_of(body: Any, key: str, least: int, most: int) -> bytes:
    """So many bytes."""
    value: bytes = get(body, key, bytes)
    if not least <= len(value) <= most:
        raise ValueError(f"{key} has {len(value)} bytes: {least} to {most} are allowed")
    return value


def optional_bytes(body: Any, key: str, size: int) -> bytes | None:
    """So many bytes, or nil."""
    return None if value_of(body, key) is None else bytes_of(body, key, size, size)
