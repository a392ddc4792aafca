"""What peers of this library tell each other in the private data of rdma_cm. Pure.

rdma_cm carries few bytes, and fills the rest up with zeros: of a connection over TCP's port space 56 in a request, 196
in an answer, 148 in a refusal. A message of this library is, numbers in network order:

    5 bytes   "rdmac"
    1         the version, 1
    4         bytes that each of the sender's receives takes
    1         bytes of the application's private data, and after it, those
    1         how many regions, and of each: 1 byte, so many bytes of name in UTF-8, and the region's 20 bytes

    a refusal instead, after the version: 1 byte, whether the same may be asked again (0 or 1), 1 byte, and so many
    bytes of words in UTF-8

Anything else is a peer's that was not written with this library: all of it is its application's. A listener answers in
kind. A peer of another version is not one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..agreement.endpoint import RemoteRegion
from ..errors import RemoteProtocolError

__all__ = ["ANSWER_MAX", "REFUSAL_MAX", "REQUEST_MAX", "CmMessage", "is_ours", "read_refusal", "refusal"]

#: bytes of private data over TCP's port space. Source: rdma_connect(3), rdma_accept(3), rdma_reject(3)
REQUEST_MAX, ANSWER_MAX, REFUSAL_MAX = 56, 196, 148
#: what a message of ours begins with
_OURS = b"rdmac\x01"
_RECV_MAX = 2**31


def is_ours(data: bytes) -> bool:
    """Whether private data that came begins as a message of this library, which it need not be."""
    return data.startswith(_OURS)


@dataclass(frozen=True, slots=True)
class CmMessage:
    """What a peer is told while it connects.

    Args:
        recv_size: bytes that each receive takes, 1 to 2**31.
        private_data: of the application, at most 255 bytes.
        regions: named memory.
    """

    recv_size: int
    private_data: bytes = b""
    regions: Mapping[str, RemoteRegion] = field(default_factory=dict)

    def to_bytes(self, most: int) -> bytes:
        """The message.

        Args:
            most: bytes that there is room for.

        Raises:
            ValueError: it is longer; says what takes how many.
        """
        names = {name: name.encode() for name in self.regions}
        described = [bytes([len(raw) & 0xFF]) + raw + self.regions[name].to_bytes() for name, raw in names.items()]
        regions = b"".join(described)
        length = len(_OURS) + 6 + len(self.private_data) + len(regions)
        if length > most:
            raise ValueError(
                f"private_data is {len(self.private_data)} bytes and the named regions {len(regions)}: rdma_cm carries "
                f"{most} bytes this way, {len(_OURS) + 6} of which this library takes. Send the rest in a message "
                "(mr.region.to_bytes()), or connect by tcp://"
            )
        sizes = self.recv_size.to_bytes(4, "big") + bytes([len(self.private_data)])
        return b"".join((_OURS, sizes, self.private_data, bytes([len(names)]), regions))

    @classmethod
    def read(cls, data: bytes) -> CmMessage | None:
        """The message in private data that came; None if it is no message of this library.

        Raises:
            RemoteProtocolError: it begins as one and is none.
        """
        if not is_ours(data):
            return None
        reader = _Reader(data, len(_OURS))
        recv_size = int.from_bytes(reader.take(4), "big")
        if not 1 <= recv_size <= _RECV_MAX:
            raise RemoteProtocolError(f"rdma_cm: the peer says that its receives take {recv_size} bytes.")
        private_data = reader.take(reader.byte())
        regions = {}
        for _ in range(reader.byte()):
            name = reader.text(reader.byte())
            if not name.isprintable():
                raise RemoteProtocolError("rdma_cm: the name of a region of the peer's is no printable text.")
            regions[name] = RemoteRegion.from_bytes(reader.take(RemoteRegion.SIZE))
        return cls(recv_size, private_data, regions)


def refusal(words: str, *, again: bool = False) -> bytes:
    """Why a request is refused, for a peer of this library; cut to what there is room for.

    Args:
        words: why.
        again: whether the same may be asked again.
    """
    raw = words.encode()[: REFUSAL_MAX - len(_OURS) - 2].decode(errors="ignore").encode()
    return _OURS + bytes([again, len(raw)]) + raw


def read_refusal(data: bytes) -> tuple[str, bool]:
    """The words of a refusal, and whether the same may be asked again; "" if the peer is none of this library."""
    if not is_ours(data):
        return "", False
    reader = _Reader(data, len(_OURS))
    try:
        again = reader.byte() == 1
        return reader.text(reader.byte()), again
    except RemoteProtocolError:
        return "", False


class _Reader:
    """Takes bytes off, and refuses where there are none left."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        if len(taken) < count:
            raise RemoteProtocolError(
                f"rdma_cm: the peer's private data ends after {len(self._data)} bytes, too early."
            )
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self, count: int) -> str:
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise RemoteProtocolError("rdma_cm: a text in the peer's private data is no UTF-8.") from None
