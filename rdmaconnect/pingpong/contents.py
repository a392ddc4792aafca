"""What the payloads contain, where they lie, and whether they arrived as they went."""

from __future__ import annotations

import mmap
from typing import Any, Protocol

from ..errors import DeviceError, RdmaConnectError
from ..objects.memory import MR

__all__ = ["BLANK", "Buffer", "PayloadError", "check", "check_memory", "payload"]

# 251 is prime: no packet or page size is a multiple of it, so that a packet in the wrong place shows
_PERIOD = 251
#: bytes that are written or compared at once; a multiple of the period
_PIECE = _PERIOD * 4096
_PATTERN = bytes(range(_PERIOD)) * 4097
_VIEW = memoryview(_PATTERN)
#: what a buffer is full of before something arrives: no payload has it
BLANK = 255
_BLANKS = memoryview(bytes([BLANK]) * _PIECE)


class PayloadError(RdmaConnectError):
    """A payload arrived with other contents than it went out with."""


def payload(size: int, iteration: int) -> bytes:
    """The contents of one payload: they differ from one iteration to the next, in every byte.

    Byte ``n`` is ``(iteration + n) % 251``.
    """
    start = iteration % _PERIOD
    if size <= _PIECE:
        return _PATTERN[start : start + size]
    return b"".join(_PATTERN[start : start + min(_PIECE, size - at)] for at in range(0, size, _PIECE))


class Registers(Protocol):
    """What memory can be registered on: a connection, or a protection domain."""

    def register(self, buffer: memoryview) -> MR:
        """Register it."""


class Buffer:
    """Memory for one payload, registered; written and compared without a copy of it.

    Args:
        conn: it is registered on this connection's protection domain, or on this one.
        size: bytes of the payload, 0 or more.

    Attributes:
        view: its bytes.
        landing: the same, or one byte where an empty message is to be received.
        mr: the same as registered; None for an empty payload.

    Raises:
        DeviceError: the host does not have as much memory.
        VerbsError: the locked-memory limit or the device does not allow it; says which.
    """

    def __init__(self, conn: Registers, size: int) -> None:
        self.size = size
        try:
            memory = mmap.mmap(-1, max(size, 1))
        except (OSError, OverflowError) as e:
            raise DeviceError(f"make a buffer of {size} bytes: {e}. Give a smaller size.") from None
        self.landing = memoryview(memory)
        self.view = self.landing[:size]
        self.mr: MR | None = conn.register(self.view) if size else None

    @property
    def data(self) -> MR | memoryview:
        """What is transferred without a copy; of an empty payload nothing."""
        return self.view if self.mr is None else self.mr

    def fill(self, iteration: int) -> None:
        """Make it the payload of an iteration."""
        start, view = iteration % _PERIOD, self.view
        for at in range(0, self.size, _PIECE):
            length = min(_PIECE, self.size - at)
            view[at : at + length] = _VIEW[start : start + length]

    def blank(self) -> None:
        """Make it what no payload is, in every byte."""
        for at in range(0, self.size, _PIECE):
            length = min(_PIECE, self.size - at)
            self.view[at : at + length] = _BLANKS[:length]

    def check(self, iteration: int, length: int | None = None) -> None:
        """Is this the payload of that iteration?

        Args:
            iteration: whose payload is due.
            length: bytes that came, if they were counted.

        Raises:
            PayloadError: says which byte is the first that is not.
        """
        check(self.view, self.size, iteration, length)

    def close(self) -> None:
        """Give the memory back."""
        if self.mr is not None:
            self.mr.close()
        self.view = self.landing = memoryview(b"")  # the last view of it frees it

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def check(view: memoryview, size: int, iteration: int, length: int | None = None) -> None:
    """Are these bytes the payload of an iteration?

    Args:
        view: what came.
        size: bytes that are due.
        iteration: whose payload is due.
        length: bytes that came, if they were counted.

    Raises:
        PayloadError: says which byte is the first that is not.
    """
    if length is not None and length != size:
        raise PayloadError(f"check round trip {iteration}: {size} bytes went out, {length} came back.")
    start = iteration % _PERIOD
    if size <= _PIECE:
        if not _PATTERN.startswith(view, start):
            _differs(view, size, iteration, 0)
        return
    for at in range(0, size, _PIECE):
        if not _PATTERN.startswith(view[at : min(at + _PIECE, size)], start):
            _differs(view, size, iteration, at)


def _differs(view: memoryview, size: int, iteration: int, begin: int) -> None:
    due = payload(min(_PIECE, size - begin), iteration)
    at = next(n for n, byte in enumerate(due) if byte != view[begin + n])
    raise PayloadError(
        f"check round trip {iteration}: byte {begin + at} of {size} went out as {due[at]} "
        f"and came back as {view[begin + at]}."
    )


def check_memory(need: int, what: str, source: str = "/proc/meminfo") -> None:
    """Refuse to take more memory than the host has to give: the kernel would kill a program for it.

    Args:
        need: bytes.
        what: what for, in words.
        source: where the kernel tells; without it nothing is refused.

    Raises:
        DeviceError: with both numbers.

    Source: proc_meminfo(5), ``MemAvailable``.
    """
    try:
        with open(source) as file:
            lines = [line.split() for line in file]
    except OSError:
        return
    have = next((int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"]), None)
    if have is not None and need > have:
        raise DeviceError(f"{what} takes {need >> 20} MiB here, and {have >> 20} are available. Give a smaller size.")
