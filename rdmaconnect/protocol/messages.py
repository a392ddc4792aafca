"""The messages of the out-of-band exchange, as values. Pure; ``codec`` makes bytes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..agreement.endpoint import Endpoint, GidKey, PortAddress, RemoteRegion
from ..agreement.path import Agreement, Wish

__all__ = [
    "Answer", "Beat", "Bye", "Hello", "Joined", "Message", "Proof", "Question", "Ready", "Reject", "Remark", "Reply",
    "Resume", "Stages", "Target", "Unlisted",
]  # fmt: skip


#: (stage, microseconds since the sender's start) of each stage that the sender went through
Stages = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """What a connector wants a listener to use.

    Args:
        device: name of the listener's device.
        port_num: its port.
        connector_gid, listener_gid: the pair, or None where LIDs are used.
    """

    device: str
    port_num: int
    connector_gid: GidKey | None = None
    listener_gid: GidKey | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """The connector's ends, its wishes and its named memory.

    Args:
        prev: what the reply of the connection that this one takes the place of was marked with (``token``).
        beat_ms: the connector says every so many milliseconds that it is there, whatever its application is at;
            0 if it does not.
        patience_ms: how long the connector goes on waiting; 0 if it does not tell.
    """

    id: bytes
    ends: tuple[Endpoint, ...]
    wish: Wish
    regions: dict[str, RemoteRegion]
    private_data: bytes = b""
    prev: bytes | None = field(default=None, repr=False)
    target: Target | None = None
    meet: bool = False
    beat_ms: int = 0
    patience_ms: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The listener's ends, what it agreed to and its named memory.

    Args:
        token: 16 bytes by which the connector may take this connection's place later, or none. They are known
            to nobody else: they never travel over the data path.
        beat_ms: as in :class:`Hello`.
    """

    id: bytes
    ends: tuple[Endpoint, ...]
    agreement: Agreement
    regions: dict[str, RemoteRegion]
    private_data: bytes = b""
    ports: tuple[PortAddress, ...] = ()
    stages: Stages = ()
    token: bytes = field(default=b"", repr=False)
    beat_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The connector is in RTS."""

    id: bytes
    stages: Stages = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """The listener is in RTS: from here on its silence on the data path means something."""

    id: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """The sender has received the peer's probes, whole."""

    id: bytes
    stages: Stages = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender is there.

    Args:
        ask: whether the peer is to say at once that it is there too.
    """

    id: bytes
    ask: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """The connector dials again, since the side channel of a connection that stands has ended.

    Args:
        token: of the reply to its hello.
    """

    id: bytes
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unlisted:
    """The sender listens no more: that its address refuses says nothing of it from here on."""

    id: bytes


@dataclass(frozen=True, slots=True)
class Reject:
    """The sender gives up, and says where and why.

    Args:
        again_ms: the sender is busy: the same may be asked again after so many milliseconds; 0 if it need not be.
        differences: where both ends are sound and cannot be joined, each difference in words.
    """

    id: bytes
    stage: str
    errno: int
    why: str
    ports: tuple[PortAddress, ...] = ()
    again_ms: int = 0
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender closes a connection that stood.

    Args:
        why: in words.
        lost: whether it was lost, or is to be connected anew: then this is no good-bye of its application.
    """

    id: bytes
    why: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A doctor asks, instead of saying hello, what this host is and what it has."""

    id: bytes


class Remark(NamedTuple):
    """One thing that is not as it should be on the host that answers.

    Args:
        verdict: how bad it is: ``fail`` or ``warn``.
        name: what was looked at.
        words: what was seen.
        fix: what mends it, or "".
    """

    verdict: str
    name: str
    words: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a doctor's other side tells of itself.

    Args:
        host: its name.
        remarks: what is not as it should be.
        ports: those that can be used.
    """

    id: bytes
    host: str
    remarks: tuple[Remark, ...]
    ports: tuple[PortAddress, ...]


Message = Hello | Reply | Ready | Joined | Proof | Beat | Resume | Unlisted | Reject | Bye | Question | Answer
