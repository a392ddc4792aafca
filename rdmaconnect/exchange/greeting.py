"""The first bytes of a peer, checked before ZeroMQ sees any of them. Pure.

ZeroMQ also speaks the older ZMTP 1.0 and 2.0, which know no security, and takes whatever it cannot place for
one of them: an HTTP request, a TLS hello. Here only ZMTP 3 with the mechanism expected goes on.

Source: RFC 23 and RFC 37 (ZMTP 3.0 and 3.1), RFC 25 (ERROR).
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Fault", "Greeting", "GreetingError"]

#: signature; version; mechanism; the whole greeting, in bytes
_SIGNATURE, _VERSION, _MECHANISM, _WHOLE = 10, 11, 32, 64
#: bytes after the greeting in which an ERROR command is looked for
_HANDSHAKE = 1024


class Fault(Enum):
    """What is wrong with a greeting."""

    FOREIGN = "it does not speak ZeroMQ's protocol"
    OLD = "it speaks ZMTP 1.0 or 2.0, which knows no security"
    UNPROTECTED = "its exchange is not protected"
    PROTECTED = "its exchange is protected"
    MECHANISM = "its exchange is protected in another way"


class GreetingError(Exception):
    """The peer is none that can be spoken with.

    Attributes:
        fault: what is wrong.
        seen: its first bytes.
        passed: what may go on all the same, so that ZeroMQ says how this side is protected.
    """

    def __init__(self, fault: Fault, seen: bytes, passed: bytes = b"") -> None:
        super().__init__(f"{fault.value} (it began with {ascii(seen)[2:-1]})")
        self.fault, self.seen, self.passed = fault, seen, passed


class Greeting:
    """What a peer says first.

    Args:
        mechanism: ``b"NULL"`` or ``b"CURVE"``.

    Attributes:
        complete: whether the whole greeting has come.
        refused: the reason in an ERROR command of the peer, or "".
    """

    def __init__(self, mechanism: bytes) -> None:
        self._mechanism = mechanism.ljust(_MECHANISM - _VERSION - 1, b"\0")
        self._head = bytearray()
        self._passed = 0
        self._watching = True
        self.complete = False
        self.refused = ""

    def take(self, data: bytes) -> bytes:
        """Take what has come.

        Returns:
            What may go on to ZeroMQ now; the rest is kept.

        Raises:
            GreetingError: this is no peer.
        """
        if not self._watching:
            return data
        self._head += data
        self._check()
        have = len(self._head)
        upto = have if have >= _MECHANISM else min(have, _VERSION) if have >= _SIGNATURE else 0
        passed, self._passed = bytes(self._head[self._passed : upto]), upto
        self.complete = have >= _WHOLE
        if self.complete:
            self._look_for_error()
        return passed

    def _check(self) -> None:
        head = self._head
        seen = bytes(head[:16])
        if (head and head[0] != 0xFF) or (len(head) >= _SIGNATURE and head[_SIGNATURE - 1] != 0x7F):
            raise GreetingError(Fault.FOREIGN, seen)
        if len(head) >= _VERSION and head[_VERSION - 1] < 3:
            raise GreetingError(Fault.OLD, seen)
        if len(head) >= _MECHANISM:
            theirs = bytes(head[_VERSION + 1 : _MECHANISM])
            if theirs != self._mechanism:
                names = {b"NULL": Fault.UNPROTECTED, b"CURVE": Fault.PROTECTED}
                passed = bytes(head[self._passed : _VERSION])
                raise GreetingError(names.get(theirs.rstrip(b"\0"), Fault.MECHANISM), seen, passed)

    def _look_for_error(self) -> None:
        """A refusal by the peer's handler of authentication comes as a command in clear."""
        at = _WHOLE
        for _ in range(3):
            if len(self._head) < at + 2:
                break
            flags, size, begin = self._head[at], self._head[at + 1], at + 2
            if flags != 0x04:  # a long command, or already a message: no ERROR, which is short
                self._watching = False
                break
            body = bytes(self._head[begin : begin + size])
            if body[:6] == b"\x05ERROR" and len(body) == size:
                words = body[7:].decode("ascii", "replace")
                self.refused = "".join(c if c.isprintable() else "?" for c in words) or "no reason given"
                self._watching = False
            at = begin + size
        else:
            self._watching = False
        if len(self._head) > _WHOLE + _HANDSHAKE:
            self._watching = False
        if not self._watching:
            self._head = bytearray()
