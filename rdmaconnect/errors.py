"""What can go wrong, as a tree of classes, one grammar for their messages, and the table of remedies.

::

    RdmaConnectError
    ├── LibraryError          libibverbs missing, too old, or without a symbol or op      (also OSError)
    ├── DeviceError           no device, no ACTIVE port, no usable GID; lists what was seen
    ├── VerbsError            a verb failed: .verb .errno .doing                          (also OSError)
    │   ├── ModifyError       + .qp_num .frm .to .mask .missing .not_allowed .path
    │   └── PostError         some of a list of work requests were not posted: .posted .wr_id
    ├── CompletionError       a work completion failed: .status .vendor_err .wr_id .qp_num .opcode
    │   └── OutcomeUnknown    the connection was lost while it was on its way: it may or may not be done: .generation
    ├── StateError            closed, consumed, or a transition that is not in the table
    ├── PeerMismatch          both ends are sound but cannot be joined: .differences
    ├── PeerRejected          the other end refused: .stage .errno .reason
    ├── PeerClosed            the other end closed a connection that stood   (also ConnectionError)
    ├── AuthenticationError   the peer is not who it must be, or does not know us
    ├── ProtocolError
    │   ├── LocalProtocolError    this side asked for something illegal
    │   └── RemoteProtocolError   the peer sent something illegal
    └── DeadlineExceeded      a wait ran out: .stage .waited_s                            (also TimeoutError)
        └── ConnectTimeout    ... before the connection stood

Bad arguments are ``ValueError`` or ``TypeError`` from the value's own constructor. A message reads
*deed: verdict. Next step.*
"""

from __future__ import annotations

import errno as _errno
import os
import reprlib
from collections.abc import Sequence

from .hints import HINTS

__all__ = [
    "HINTS",
    "AuthenticationError",
    "CompletionError",
    "ConnectTimeout",
    "DeadlineExceeded",
    "DeviceError",
    "LibraryError",
    "LocalProtocolError",
    "ModifyError",
    "OutcomeUnknown",
    "PeerClosed",
    "PeerMismatch",
    "PeerRejected",
    "PostError",
    "ProtocolError",
    "RdmaConnectError",
    "RemoteProtocolError",
    "StateError",
    "VerbsError",
    "errno_name",
    "hint_for",
    "say_more",
    "shown",
    "together",
]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value as a message names it: its repr, of at most 80 characters however large it is."""
    text = _SHORT.repr(value[:80] if isinstance(value, bytes | bytearray) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def errno_name(number: int) -> str:
    """``ETIMEDOUT (110)`` for 110; ``unknown errno (N)`` for what this platform does not know."""
    return f"{_code(number) or 'unknown errno'} ({number})"


def _code(number: int) -> str:
    """``EOPNOTSUPP``, not ``ENOTSUP``, which is the same number on Linux: verbs speak of the former."""
    return "EOPNOTSUPP" if number == _errno.EOPNOTSUPP else _errno.errorcode.get(number, "")


def hint_for(what: str, number: int, **fields: object) -> str:
    """The next step after an errno, or "".

    Args:
        what: the first half of a key of :data:`HINTS`.
        number: the errno.
        **fields: what the hint's ``{...}`` stand for; without one of them the hint is left out.
    """
    try:
        return HINTS.get((what, _code(number)), "").format(**fields)
    except KeyError:
        return ""


def _sentence(deed: str, verdict: str, hint: str) -> str:
    text = f"{deed}: {verdict}" if deed else verdict
    text = text.rstrip(".") + "."
    return f"{text} {hint}" if hint else text


class RdmaConnectError(Exception):
    """The base of every error of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        # multiprocessing carries errors from one process to another; by default it would call
        # the constructor with the finished message
        return _revive, (type(self), self.args, self.__dict__)


def say_more(error: RdmaConnectError, words: str) -> None:
    """Add a sentence to an error's message."""
    text = f"{error} {words}"
    if isinstance(error, OSError):
        error.args, error.strerror = (error.errno, text), text
    else:
        error.args = (text,)


def _revive(cls: type[RdmaConnectError], args: tuple[object, ...], attributes: dict[str, object]) -> RdmaConnectError:
    error = cls.__new__(cls, *args)
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(attributes)
    return error


class LibraryError(RdmaConnectError, OSError):
    """libibverbs is missing or too old, or it or the device's provider lacks a function.

    Attributes:
        errno: ``EOPNOTSUPP`` for a function that is absent, ``ENOENT`` for the library itself.
    """

    def __init__(self, message: str, errno: int = _errno.ENOENT) -> None:
        OSError.__init__(self, errno, message)

    def __str__(self) -> str:
        return str(self.strerror)


class DeviceError(RdmaConnectError):
    """No device, no ACTIVE port or no usable GID; the message lists what was seen."""


class VerbsError(RdmaConnectError, OSError):
    """A verb failed.

    Attributes:
        verb: the C identifier, for example ``ibv_reg_mr``.
        errno: the error number, by the verb's own failure convention.
        doing: what was being done, in words.
        hint: the next step, in words; "" if there is none.
    """

    def __init__(self, verb: str, errno: int, doing: str = "", hint: str | None = None) -> None:
        if hint is None:
            hint = hint_for(verb, errno) or hint_for("any verb", errno)
        verdict = f"{verb}: {errno_name(errno)}, {os.strerror(errno)}"
        OSError.__init__(self, errno, _sentence(doing, verdict, hint))
        self.verb = verb
        self.doing = doing
        self.hint = hint

    def __str__(self) -> str:
        return str(self.strerror)


class ModifyError(VerbsError):
    """``ibv_modify_qp`` failed, or was refused here because it could only fail.

    Attributes:
        qp_num: the queue pair's number, 24 bits.
        frm, to: the states (``QpState``).
        mask: the ``QpAttrMask`` that was given.
        missing: bits of the table's row that were not given.
        not_allowed: bits given that the row does not have.
        path: the ``Path`` in use, or None.
    """

    def __init__(
        self,
        errno: int,
        doing: str,
        *,
        qp_num: int,
        frm: object,
        to: object,
        mask: int,
        missing: int = 0,
        not_allowed: int = 0,
        path: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__("ibv_modify_qp", errno, doing, hint)
        self.qp_num, self.frm, self.to = qp_num, frm, to
        self.mask, self.missing, self.not_allowed, self.path = mask, missing, not_allowed, path


class PostError(VerbsError):
    """Posting a list of work requests failed in the middle of it.

    Attributes:
        posted: how many were posted, those before the first bad one; None if the provider does not tell.
        wr_id: the first bad one's id, or None.
    """

    def __init__(
        self,
        verb: str,
        errno: int,
        doing: str = "",
        *,
        posted: int | None = None,
        wr_id: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(verb, errno, doing, hint)
        self.posted, self.wr_id = posted, wr_id


class CompletionError(RdmaConnectError):
    """A work request completed with a status other than SUCCESS.

    Attributes:
        status: ``WcStatus``; never an errno.
        vendor_err: the vendor's own code, as ``ibv_wc.vendor_err``.
        wr_id: the work request's id.
        qp_num: the local queue pair.
        opcode: what was asked for, in words (``ibv_wc.opcode`` is not valid on failure).
    """

    def __init__(
        self,
        status: int,
        *,
        vendor_err: int = 0,
        wr_id: int = 0,
        qp_num: int = 0,
        opcode: str = "",
        doing: str = "",
        hint: str | None = None,
    ) -> None:
        name = str(status)
        deed = doing or f"{opcode or 'work request'} on QP {qp_num:#08x}"
        verdict = f"work completion {name} ({int(status)}), vendor_err {vendor_err:#x}"
        hint = HINTS.get(("completion", name), "") if hint is None else hint
        super().__init__(_sentence(deed, verdict, hint))
        self.status, self.vendor_err, self.wr_id = status, vendor_err, wr_id
        self.qp_num, self.opcode = qp_num, opcode


class OutcomeUnknown(CompletionError):
    """The connection was lost while a transfer was on its way, and is, or was to be, connected anew.

    The peer may or may not have it. It is not repeated: only the application knows what may happen twice.

    Attributes:
        generation: which life of the connection it was posted in, as ``Connection.generation``.
    """

    def __init__(
        self,
        status: int,
        *,
        generation: int,
        why: str,
        vendor_err: int = 0,
        wr_id: int = 0,
        qp_num: int = 0,
        opcode: str = "",
        doing: str = "",
    ) -> None:
        words = {"vendor_err": vendor_err, "wr_id": wr_id, "qp_num": qp_num}
        super().__init__(status, **words, opcode=opcode, doing=doing, hint="")
        verdict = (
            f"its outcome is unknown: the connection was lost in generation {generation} while wr_id {wr_id} was on "
            f"its way ({status}, vendor_err {vendor_err:#x}). {why}".rstrip(".")
        )
        self.args = (_sentence(doing, verdict, "Ask the peer whether it has it, or repeat what may happen twice."),)
        self.generation = generation


class StateError(RdmaConnectError):
    """The object is closed or consumed, or the transition is not in the table."""


class PeerMismatch(RdmaConnectError):
    """Both ends are sound but cannot be joined.

    Attributes:
        differences: every difference found, not only the first.
        ports: ports of the other end that could be tried instead (``PortAddress``), empty if none may help; None
            where that is not known.
    """

    def __init__(self, differences: Sequence[str], ports: Sequence[object] | None = None) -> None:
        super().__init__("join the two ends: " + "; ".join(differences) + ".")
        self.differences, self.ports = tuple(differences), None if ports is None else tuple(ports)


class PeerRejected(RdmaConnectError):
    """The other end refused, and said why.

    Attributes:
        stage: the stage at which it refused.
        errno: its error number, or 0.
        reason: its own words.
        ports: other ports of it that could be tried (``PortAddress``).
        again_ms: it is busy: the same may be asked again after so many milliseconds; 0 if it need not be.
        private_data: over rdma_cm, what it said besides, as it came: filled up with zeros; else b"".
    """

    def __init__(
        self,
        stage: str,
        errno: int,
        reason: str,
        ports: Sequence[object] = (),
        again_ms: int = 0,
        private_data: bytes = b"",
    ) -> None:
        super().__init__(f"connect: the peer refused at {stage}: {reason}")
        self.stage, self.errno, self.reason, self.ports = stage, errno, reason, tuple(ports)
        self.again_ms, self.private_data = again_ms, private_data


class PeerClosed(RdmaConnectError, ConnectionError):
    """The other end closed the connection."""


class AuthenticationError(RdmaConnectError):
    """The peer is not who it must be, or does not know us."""


class ProtocolError(RdmaConnectError):
    """The conversation broke its rules."""


class LocalProtocolError(ProtocolError):
    """This side asked for something that the conversation does not allow now."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the conversation does not allow."""


class DeadlineExceeded(RdmaConnectError, TimeoutError):
    """A wait ran out.

    Attributes:
        stage: the stage at which it ran out.
        waited_s: seconds waited in all.
    """

    def __init__(self, stage: str, waited_s: float, hint: str = "") -> None:
        TimeoutError.__init__(self, _errno.ETIMEDOUT, _sentence(stage, f"no success within {waited_s:.3g} s", hint))
        self.stage, self.waited_s = stage, waited_s

    def __str__(self) -> str:
        return str(self.strerror)


class ConnectTimeout(DeadlineExceeded):
    """The connection did not stand by the deadline."""


def together(deed: str, refused: list[RdmaConnectError]) -> RdmaConnectError:
    """One error for all that could not be closed.

    Args:
        deed: what was being done, in words.
        refused: one for each object, at least one.
    """
    if len(refused) == 1:
        return refused[0]
    words = f"{len(refused)} objects stay open: {' '.join(map(str, refused))}"
    first = next((e for e in refused if isinstance(e, VerbsError)), None)
    if first is None:
        return StateError(f"{deed}: {words}")
    return VerbsError(first.verb, first.errno or 0, deed, words)
