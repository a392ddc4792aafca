"""One round trip of each way to play, on either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..agreement.endpoint import RemoteRegion
from ..errors import RemoteProtocolError
from ..runtime.deadline import Deadline
from ..session.connection import Connection
from .contents import Buffer, PayloadError, payload

__all__ = ["CALLERS", "SERVERS", "Turn"]

#: looks at the memory between two looks whether the peer is still there
_LOOKS = 256
_IMM = 0xFFFFFFFF
#: one round trip, or the serving side's part of it, by its number; gives the bytes that came
Turn = Callable[[int], int]


def _receive(conn: Connection, buffer: Buffer, iteration: int, deadline_s: float | None) -> int:
    try:
        return conn.recv_into(buffer.landing, deadline_s=deadline_s)
    except ValueError as e:
        raise PayloadError(f"check round trip {iteration}: {buffer.size} bytes are due: {e}") from None


def _see(conn: Connection, buffer: Buffer, iteration: int, deadline_s: float | None) -> None:
    """Look at the memory until its last byte is the one due: devices write what is before it first."""
    view, last = buffer.view, buffer.size - 1
    due = payload(1, iteration + last)[0]
    for _ in range(_LOOKS):
        if view[last] == due:
            return
    deadline = Deadline(deadline_s)
    while True:
        for _ in range(_LOOKS):
            if view[last] == due:
                return
        lost = conn.lost
        if lost is not None:
            if view[last] == due:
                return  # it wrote, and closed
            raise lost
        deadline.check(f"see the peer's write of {buffer.size} bytes at {conn.local}", "Over UC it may have been lost.")


def _told(conn: Connection, iteration: int, deadline_s: float | None) -> None:
    came = conn.recv_imm(deadline_s=deadline_s)
    if came != iteration & _IMM:
        raise RemoteProtocolError(f"check round trip {iteration}: a write came with the number {came}. Was one lost?")


# ---- the connecting side: there and back


def _send(conn: Connection, out: Buffer, back: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        conn.send(out.data, deadline_s=deadline_s)
        return _receive(conn, back, i, deadline_s)

    return turn


def _write(conn: Connection, out: Buffer, back: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        conn.write(out.data, region, deadline_s=deadline_s)
        _see(conn, back, i, deadline_s)
        return back.size

    return turn


def _write_imm(conn: Connection, out: Buffer, back: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        conn.write(out.data, region, imm=i & _IMM, deadline_s=deadline_s)
        _told(conn, i, deadline_s)
        return back.size

    return turn


def _read(conn: Connection, out: Buffer, back: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        conn.read_into(back.data, region, deadline_s=deadline_s)
        return back.size

    return turn


# ---- the serving side: what comes goes back, and is checked


def _send_back(conn: Connection, buffer: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        length = _receive(conn, buffer, i, deadline_s)
        # a wrong one goes back too: both sides shall see it
        conn.send(buffer.data if length == buffer.size else bytes(buffer.landing[:length]), deadline_s=deadline_s)
        buffer.check(i, length)
        return length

    return turn


def _write_back(conn: Connection, buffer: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        _see(conn, buffer, i, deadline_s)
        buffer.check(i)  # before it goes back: then the next may overwrite it
        conn.write(buffer.data, region, deadline_s=deadline_s)
        return buffer.size

    return turn


def _write_imm_back(conn: Connection, buffer: Buffer, region: Any, deadline_s: float | None) -> Turn:
    def turn(i: int) -> int:
        _told(conn, i, deadline_s)
        buffer.check(i)
        conn.write(buffer.data, region, imm=i & _IMM, deadline_s=deadline_s)
        return buffer.size

    return turn


#: op -> the connecting side's turn over one connection: (connection, what goes, where it comes, the peer's memory)
CALLERS: dict[str, Callable[[Connection, Buffer, Buffer, RemoteRegion | None, float | None], Turn]] = {
    "send": _send, "write": _write, "write_imm": _write_imm, "read": _read,
}  # fmt: skip
#: op -> the serving side's, or None where it has none: (connection, where it comes, the peer's memory)
SERVERS: dict[str, Callable[[Connection, Buffer, RemoteRegion | None, float | None], Turn] | None] = {
    "send": _send_back, "write": _write_back, "write_imm": _write_imm_back, "read": None,
}  # fmt: skip
