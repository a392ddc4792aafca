"""What the connecting side wants done, as a value and as the bytes that it says it with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from ..abi import QpType
from ..agreement.endpoint import RemoteRegion
from ..errors import RdmaConnectError, RemoteProtocolError, shown

__all__ = ["LARGEST", "MAX_BATCH", "MAX_CONNECTIONS", "OPS", "Answer", "Op", "Plan", "PlanRefused", "sweep"]

#: bytes of the longest payload: the largest that every op and device can carry as one message
LARGEST = 2**30
#: round trips that one plan may ask for
MAX_BATCH = 2**16
MAX_CONNECTIONS = 4096
#: bytes of the longest plan or answer
_PLAN_MAX = 512
#: a plan of another version is not understood
_VERSION = 3


class Op(NamedTuple):
    """One way to play.

    Args:
        qp_types: the types that have it.
        least: bytes of the smallest payload.
        ways: how often the payload travels in one round trip.
        says: what a round trip is, in words.
        one_way: what many on their way at once are, in words; empty if it is not done so.
    """

    qp_types: tuple[QpType, ...]
    least: int
    ways: int
    says: str
    one_way: str = ""


_ANY, _CONNECTED = (QpType.RC, QpType.UC, QpType.UD), (QpType.RC, QpType.UC)
#: name -> what it is
OPS = {
    "send": Op(_ANY, 0, 2, "a message there and one back", "messages, each checked where it is received"),
    "write": Op(
        _CONNECTED, 1, 2, "an RDMA write there and one back, each seen by polling memory for its last byte",
        "RDMA writes into the same memory, which is checked at the end",
    ),
    "write_imm": Op(_CONNECTED, 1, 2, "an RDMA write with immediate there and one back, each seen by its completion"),
    "read": Op(
        (QpType.RC,), 1, 1, "one RDMA read; the serving side's program takes no part, as in ib_read_lat",
        "RDMA reads into the same memory, which is checked at the end",
    ),
}  # fmt: skip


class PlanRefused(RdmaConnectError):
    """The serving side will not do what is wanted; with its reason."""


@dataclass(frozen=True)
class Plan:
    """What is to be done next, over connections that stand.

    Args:
        op: a key of ``OPS``.
        size: bytes of each payload, up to 1 GiB.
        iters: round trips, 1 to 65536; more are asked for with one plan after the other.
        first: the number of the first round trip, which decides the contents.
        connections: how many are used in turn.
        region: where the serving side writes to, for the writes; None else.
        end: nothing more comes.
        outstanding: 0, or how many transfers are on their way at once on each connection, up to 32768: then all go one
            way, and nothing comes back.

    Raises:
        ValueError: a value out of range.
    """

    op: str = "send"
    size: int = 0
    iters: int = 1
    first: int = 0
    connections: int = 1
    region: RemoteRegion | None = None
    end: bool = False
    outstanding: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {shown(self.op)}: give {', '.join(OPS)}")
        limits = {
            "size": (OPS[self.op].least, LARGEST), "iters": (1, MAX_BATCH), "first": (0, 2**62),
            "outstanding": (0, 2**15), "connections": (1, MAX_CONNECTIONS),
        }  # fmt: skip
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is {shown(value)}: op {self.op} takes {least} to {most}")

    def check(self, qp_type: QpType, most: int) -> None:
        """Refuse what these connections cannot do.

        Args:
            qp_type: theirs.
            most: bytes of the longest message that both ends take.

        Raises:
            ValueError: in words.
        """
        op = OPS[self.op]
        if self.outstanding and (qp_type is not QpType.RC or not op.one_way):
            able = ", ".join(name for name, op in OPS.items() if op.one_way)
            raise ValueError(f"op {self.op} over {qp_type} one way: it takes {able} over RC, which loses nothing")
        types = op.qp_types
        if qp_type not in types:
            raise ValueError(f"op {self.op} over {qp_type}: this type does not have it. {_or(types)} have")
        if (
            self.op.startswith("write")
            and not self.outstanding
            and (self.region is None or self.region.length < self.size)
        ):
            raise ValueError(f"op {self.op} of {self.size} bytes: there is no region for as many")
        if self.op == "send" and self.size > most:
            more = "a datagram carries one MTU" if qp_type is QpType.UD else "give the serving side that size (-s) too"
            raise ValueError(f"size is {self.size}: these two ends take 0 to {most} bytes in one message; {more}")

    def pack(self) -> bytes:
        """Its bytes."""
        region = self.region.to_bytes() if self.region is not None else None
        return _pack({
            "pingpong": _VERSION, "op": self.op, "size": self.size, "iters": self.iters, "first": self.first,
            "outstanding": self.outstanding, "connections": self.connections, "region": region, "end": self.end,
        })  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Plan:
        """A plan from its bytes; nothing in them is trusted.

        Raises:
            RemoteProtocolError: they are none.
        """
        try:
            body = _unpack(data)
            fields = {name: body[name] for name in cls.__dataclass_fields__}
            fields["region"] = _region(fields["region"])
            if body["pingpong"] != _VERSION or type(fields["end"]) is not bool:
                raise ValueError(body["pingpong"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as e:
            raise RemoteProtocolError(
                f"echo: the peer's first message is not a plan ({_words(e)}). "
                "Does it run ping, of the same version of rdmaconnect?"
            ) from None


@dataclass(frozen=True)
class Answer:
    """What the serving side says to a plan.

    Args:
        region: where the connecting side writes to or reads from; None for messages.
        no: why it will not, in words; empty if it will.
    """

    region: RemoteRegion | None = None
    no: str = ""

    def pack(self) -> bytes:
        """Its bytes."""
        return _pack({"region": self.region.to_bytes() if self.region is not None else None, "no": _cut(self.no)})

    @classmethod
    def unpack(cls, data: bytes) -> Answer:
        """An answer from its bytes.

        Raises:
            RemoteProtocolError: they are none.
        """
        try:
            body = _unpack(data)
            return cls(_region(body["region"]), _words(body["no"]))
        except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
            raise RemoteProtocolError("ping: the peer does not answer the plan. Does it run echo?") from None


def sweep(most: int, least: int = 1) -> list[int]:
    """The powers of two from ``least`` on up to ``most``, in bytes."""
    return [1 << bit for bit in range(LARGEST.bit_length()) if least <= 1 << bit <= most]


def _pack(body: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(body)
    return packed


def _unpack(data: bytes) -> dict[str, Any]:
    if len(data) > _PLAN_MAX:
        raise ValueError(f"{len(data)} bytes")
    body = msgpack.unpackb(data)
    if not isinstance(body, dict):
        raise TypeError("no map")
    return body


def _region(value: Any) -> RemoteRegion | None:
    return None if value is None else RemoteRegion.from_bytes(value)


def _cut(words: str) -> str:
    """So much of a text that it fits into the smallest datagram."""
    return words.encode(errors="replace")[:160].decode(errors="ignore")


def _words(value: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(value)[:400])


def _or(types: tuple[QpType, ...]) -> str:
    return " and ".join(map(str, types))
