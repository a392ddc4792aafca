"""What a peer sends, checked before ZeroMQ sees any of it. Pure.

ZeroMQ also speaks the older ZMTP 1.0 and 2.0, which know no security, and takes whatever it cannot place for one
of them: an HTTP request, a TLS hello. As a client of CURVE it takes a READY before it has any key. It keeps
messages of several frames without bound, and acts on commands in the midst of the traffic. None of that is part
of this exchange, so none of it goes on.

Source: RFC 23 and RFC 37 (ZMTP 3.0 and 3.1), RFC 25 and 26 (ZMTP-CURVE); libzmq 4.3.5.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

__all__ = ["CURVE_ADDS", "HANDSHAKE", "Fault", "Filter", "ZmtpError", "framed", "pong"]

#: signature; version; mechanism; the whole greeting, in bytes
_SIGNATURE, _VERSION, _MECHANISM, _WHOLE = 10, 11, 32, 64
#: flags of a frame: more of the message follows; the size has 8 bytes; a command
_MORE, _LONG, _COMMAND = 1, 2, 4
#: bytes of a command of the handshake at most
_HANDSHAKE_MAX = 4096
#: messages that may be on their way through ZeroMQ at the same time: its own count does not see parts of messages
FRAMES_MAX = 128
#: what CURVE adds to a message: its name, the nonce, the flags and the authenticator
CURVE_ADDS = 33
#: bytes of a frame's beginning that are looked at, and those of the longest header
_LOOK, _HEADER = 24, 9
#: first byte of a message of one frame -> bytes of its header
_HEADERS = {b"\0": 2, bytes((_LONG,)): _HEADER}
_ERROR = b"\x05ERROR"
#: (mechanism, whether this side listens) -> the commands of the peer's handshake, each by how it begins, and the
#: sizes that it may have
_HANDSHAKES: dict[tuple[bytes, bool], tuple[tuple[bytes, range], ...]] = {
    (b"NULL", True): ((b"\x05READY", range(6, _HANDSHAKE_MAX)),),
    (b"NULL", False): ((b"\x05READY", range(6, _HANDSHAKE_MAX)),),
    (b"CURVE", True): ((b"\x05HELLO", range(200, 201)), (b"\x08INITIATE", range(257, _HANDSHAKE_MAX))),
    (b"CURVE", False): ((b"\x07WELCOME", range(168, 169)), (b"\x05READY", range(30, _HANDSHAKE_MAX))),
}
#: commands in the midst of the traffic: older peers ask so whether this side is there
_HEARTBEATS = ((b"\x04PING", range(7, 24)), (b"\x04PONG", range(5, 22)))
#: bytes of a PING before its context, which a PONG repeats
_CONTEXT = 7
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
#: all that a side without keys says before its messages: the greeting of ZMTP 3.1 and its READY
HANDSHAKE = (
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"NULL".ljust(_WHOLE - _VERSION - 1, b"\0") + bytes([_COMMAND, len(_READY)])
) + _READY


def framed(message: bytes) -> bytes:
    """A message as ZMTP 3 frames it."""
    size = len(message)
    return (b"\0" + bytes((size,)) if size < 256 else b"\x02" + size.to_bytes(8, "big")) + message


def pong(context: bytes) -> bytes:
    """The answer to a PING."""
    return bytes([_COMMAND, 5 + len(context)]) + b"\x04PONG" + context


class Fault(Enum):
    """What is wrong with what a peer sends."""

    FOREIGN = "it does not speak ZeroMQ's protocol"
    OLD = "it speaks ZMTP 1.0 or 2.0, which knows no security"
    UNPROTECTED = "its exchange is not protected"
    PROTECTED = "its exchange is protected"
    MECHANISM = "its exchange is protected in another way"
    HANDSHAKE = "its handshake is none of ZMTP 3"
    TRAFFIC = "it sends what is no message of this exchange"
    LONG = "it sends more at once than it may"


class ZmtpError(Exception):
    """The peer is none that can be spoken with.

    Attributes:
        fault: what is wrong.
        seen: the first bytes of what is wrong.
        passed: what may go on all the same: what came before, or enough for ZeroMQ to say how this side is protected.
    """

    def __init__(self, fault: Fault, seen: bytes, passed: bytes = b"") -> None:
        super().__init__(f"{fault.value} ({ascii(seen)[2:-1]})")
        self.fault, self.seen, self.passed = fault, seen, passed


class Filter:
    """Lets through what a peer may send.

    Args:
        mechanism: ``b"NULL"`` or ``b"CURVE"``.
        listens: whether this side is the listener.
        max_frame: bytes of the longest message; may be lowered later.

    Attributes:
        greeted: whether the peer's whole greeting has come.
        refused: the reason in an ERROR command of the peer, or "".
        messages: without keys, those that came whole, for the owner to take: nobody else needs to read them.
        pings: likewise the contexts of PINGs, to be answered.
        unread, frames: bytes and number of the messages that have begun to come since the owner set these to 0.
    """

    def __init__(self, mechanism: bytes, listens: bool, max_frame: int) -> None:
        self._protected = mechanism == b"CURVE"
        self._mechanism = mechanism.ljust(_MECHANISM - _VERSION - 1, b"\0")
        self._handshake = list(_HANDSHAKES[mechanism, listens])
        self.max_frame = max_frame
        #: of the greeting, and then of the frame under way: what has come and was not let through, or is looked at
        self._head = bytearray()
        self._passed = 0
        #: bytes of the frame under way that are still to come, once its beginning was looked at
        self._left = 0
        self.greeted = False
        self.refused = ""
        self.messages: deque[bytes] = deque()
        self.pings: deque[bytes] = deque()
        #: what has come of the message under way
        self._message: bytearray | None = None
        self.unread = self.frames = 0

    @property
    def shaken(self) -> bool:
        """Whether the peer's handshake is over."""
        return not self._handshake

    def take(self, data: bytes) -> bytes:
        """Take what has come.

        Returns:
            What may go on to ZeroMQ now; the rest is kept.

        Raises:
            ZmtpError: it may not be sent.
        """
        if self.greeted:
            return data if self._is_message(data) else self._frames(data)
        self._head += data
        self._greet()
        have = len(self._head)
        upto = min(have, _WHOLE) if have >= _MECHANISM else min(have, _VERSION) if have >= _SIGNATURE else 0
        passed, self._passed = bytes(self._head[self._passed : upto]), upto
        if have >= _WHOLE:
            self.greeted = True
            rest, self._head = bytes(self._head[_WHOLE:]), bytearray()
            return self._frames(rest, passed)
        return passed

    def _greet(self) -> None:
        head = self._head
        seen = bytes(head[:16])
        if (head and head[0] != 0xFF) or (len(head) >= _SIGNATURE and head[_SIGNATURE - 1] != 0x7F):
            raise ZmtpError(Fault.FOREIGN, seen)
        if len(head) >= _VERSION and head[_VERSION - 1] < 3:
            raise ZmtpError(Fault.OLD, seen)
        if len(head) >= _MECHANISM:
            theirs = bytes(head[_VERSION + 1 : _MECHANISM])
            if theirs != self._mechanism:
                names = {b"NULL": Fault.UNPROTECTED, b"CURVE": Fault.PROTECTED}
                passed = bytes(head[self._passed : _VERSION])
                raise ZmtpError(names.get(theirs.rstrip(b"\0"), Fault.MECHANISM), seen, passed)

    def _is_message(self, data: bytes) -> bool:
        """Take what is one message, whole and alone, as mostly: here nothing is kept and nothing is to be judged."""
        if self._handshake or self._left or self._head or self._protected or self.frames >= FRAMES_MAX:
            return False
        header = _HEADERS.get(data[:1], 0)
        size = int.from_bytes(data[1:header], "big")
        if not header or len(data) != header + size or size > self.max_frame:
            return False
        self.frames += 1
        self.unread += len(data)
        self.messages.append(data[header:])
        return True

    def _frames(self, data: bytes, before: bytes = b"") -> bytes:
        """Follow the frames: the beginning of each is kept until it can be judged, those before a bad one go on."""
        passed = bytearray(before)
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                if self._message is not None:
                    self._message += part
            else:
                head = self._head + data[at : at + _HEADER + _LOOK]
                due = _due(head)
                at += min(due, len(head)) - len(self._head)
                self._head = head[:due]
                if len(head) < due:
                    break
                try:
                    part = self._begin()
                except ZmtpError as e:
                    e.passed = bytes(passed)
                    raise
            passed += part
            if self._message is not None and not self._left:
                self.messages.append(bytes(self._message))
                self._message = None
        return bytes(passed)

    def _begin(self) -> bytes:
        """Judge the frame whose beginning is there, and let that through."""
        head, self._head = bytes(self._head), bytearray()
        header = 9 if head[0] & _LONG else 2
        size, body = int.from_bytes(head[1:header], "big"), head[header:]
        if head[0] & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError(Fault.TRAFFIC, head)
        if self._handshake:
            self._shake_hands(head[0], size, body)
        elif head[0] & _COMMAND:
            if self._protected or not any(body.startswith(name) and size in sizes for name, sizes in _HEARTBEATS):
                raise ZmtpError(Fault.TRAFFIC, head)
            if body.startswith(_HEARTBEATS[0][0]):
                self.pings.append(body[_CONTEXT:])
        elif head[0] & _MORE:
            raise ZmtpError(Fault.TRAFFIC, head)
        elif size > self.max_frame + CURVE_ADDS * self._protected:
            raise ZmtpError(Fault.LONG, head[:header])
        else:
            self.frames += 1
            self.unread += header + size
            if self.frames > FRAMES_MAX:
                raise ZmtpError(Fault.LONG, head[:header])
            if not self._protected:
                self._message = bytearray(body)
        self._left = size - len(body)
        return head

    def _shake_hands(self, flags: int, size: int, body: bytes) -> None:
        name, sizes = self._handshake[0]
        if flags & _COMMAND and body.startswith(_ERROR) and 7 <= size <= len(body):
            words = body[7:size].decode("ascii", "replace")
            self.refused = "".join(c if c.isprintable() else "?" for c in words) or "no reason given"
        elif not (flags & _COMMAND) or flags & _MORE or not body.startswith(name) or size not in sizes:
            raise ZmtpError(Fault.HANDSHAKE, body)
        else:
            del self._handshake[0]


def _due(head: bytes | bytearray) -> int:
    """How many bytes of a frame's beginning it takes to judge it, as far as these tell."""
    if not head:
        return 1
    header = _HEADER if head[0] & _LONG else 2
    return header if len(head) < header else header + min(int.from_bytes(head[1:header], "big"), _LOOK)
