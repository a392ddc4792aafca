"""What one end tells the other where there is no side channel: the bytes of ``to_bytes()``. Pure.

They are a hello for each port that the end could use, made before anybody is known, and carried by whatever two
programs have in common::

    offset  bytes
         0      4  ``RDMB``
         4      1  version of these bytes, 1. Another one is refused.
         5      1  1 where they are authenticated, else 0
         6      4  their number, in network order
        10      4  CRC-32 of all else, in network order: it tells damage, and not malice
        14     32  where authenticated, HMAC-SHA256 (RFC 2104) of bytes 0 to 9 and of what follows
                   then, compressed (zlib, RFC 1950), one MessagePack map:

    ======  =====  ==============================================================
    id      bin    16 random bytes: this end, which connects once
    made    int    when they were made, seconds since 1970
    until   int    when they expire, likewise; 0 for never
    tag     text   what the application calls this connection, at most 256 characters; both ends say the same
    own     bool   true where receives and completions are the application's own, so that nothing but its messages is to
                   be sent there; left out where they are not
    ports   array  1 to 8 hellos, of at most 16 GIDs each, without ``v``, ``t`` and ``id``, as ``docs/wire.md`` has
                   them; the best port first. ``data`` is that of the first; ``prev`` and ``want`` are nil, ``meet`` is
                   false
    ======  =====  ==============================================================

The key is scrypt (RFC 7914) of the shared secret: see ``exchange.curve.shared_key``.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from dataclasses import dataclass, replace

import msgpack

from ..abi import GidType
from ..agreement.endpoint import Endpoint, GidEntry
from ..errors import AuthenticationError, RemoteProtocolError
from .codec import put_hello, take_hello
from .messages import Hello
from .reading import MAX_FRAME, bytes_of, flag_of, int_of, list_of, short, text_of, unpack

__all__ = ["MAX_BLOB_PORTS", "MAX_TAG", "SMALL_BLOB", "Blob", "connection_id", "open_blob", "seal", "shortened"]

MAGIC, BLOB_VERSION = b"RDMB", 1
#: ports of one end, GIDs of each, characters of its tag
MAX_BLOB_PORTS, MAX_BLOB_GIDS, MAX_TAG = 8, 16, 256
#: bytes that an end does not exceed; each further queue pair, named memory and data of the application's come on top
SMALL_BLOB = 1024
_HEAD, _CHECK, _MAC = 10, 4, 32
_MAX_TIME = 2**63 - 1
_HINT = "Give connect() the bytes that the other end's to_bytes() gave, all of them and unchanged."


@dataclass(frozen=True, slots=True)
class Blob:
    """One end as the other is told of it.

    Args:
        id: 16 random bytes.
        made: when it was made, seconds since 1970.
        until: when it expires, likewise; 0 for never.
        tag: what the application calls the connection.
        hellos: one for each port, the best first; their own ids count for nothing.
        own: whether receives and completions are the application's own.
    """

    id: bytes
    made: int
    until: int
    tag: str
    hellos: tuple[Hello, ...]
    own: bool = False

    @property
    def ends(self) -> tuple[Endpoint, ...]:
        """The first queue pair on each port."""
        return tuple(hello.ends[0] for hello in self.hellos)

    def check_time(self, now: float) -> None:
        """Refuse it if it has expired.

        Args:
            now: by this host's clock, seconds since 1970.

        Raises:
            RemoteProtocolError: it has.
        """
        if self.until and now > self.until:
            raise RemoteProtocolError(
                f"connect: the peer's bytes have expired {now - self.until:.0f} s ago, {self.until - self.made} s "
                "after they were made. Bind anew there, give a larger expires_s, or set both hosts' clocks."
            )


def connection_id(one: bytes, other: bytes, key: bytes | None) -> bytes:
    """The 16 bytes by which both ends know their connection; with a key nobody else knows them."""
    both = b"".join(sorted((one, other)))
    return hmac.digest(key or b"", b"rdmaconnect connection" + both, hashlib.sha256)[:16]


# ---- bytes


def seal(blob: Blob, key: bytes | None) -> bytes:
    """The bytes of an end.

    Args:
        blob: the end.
        key: to authenticate them, or None.

    Raises:
        ValueError: it has more memory or queue pairs than a peer would take.
    """
    ports = [put_hello(hello if at == 0 else replace(hello, private_data=b"")) for at, hello in enumerate(blob.hellos)]
    body = msgpack.packb(
        {"id": blob.id, "made": blob.made, "until": blob.until, "tag": blob.tag, "ports": ports}
        | ({"own": True} if blob.own else {}),
        unicode_errors="replace",
    )
    if len(body) > MAX_FRAME:
        raise ValueError(f"bind: {len(body)} bytes before compression: at most {MAX_FRAME} may be told. Bind fewer.")
    packed = zlib.compress(body, 9)
    size = _HEAD + _CHECK + len(packed) + (_MAC if key is not None else 0)
    head = MAGIC + bytes([BLOB_VERSION, key is not None]) + size.to_bytes(4, "big")
    rest = (b"" if key is None else _mac(key, head, packed)) + packed
    return head + _crc(head, rest) + rest


def open_blob(data: bytes, key: bytes | None) -> Blob:
    """The end that bytes are of.

    Args:
        data: as they came; nothing in them is trusted.
        key: that of this end, or None.

    Returns:
        The end, every value in range. Whether it has expired is for :meth:`Blob.check_time`.

    Raises:
        RemoteProtocolError: they are not such bytes, truncated, damaged, of another version, or invalid in any part.
        AuthenticationError: another secret, or one end has one and the other has not.
    """
    head, rest = data[:_HEAD], data[_HEAD + _CHECK :]
    if len(data) < _HEAD + _CHECK or not head.startswith(MAGIC):
        raise RemoteProtocolError(f"connect: the peer's {len(data)} bytes are not an end's: {short(data)}. {_HINT}")
    if head[4] != BLOB_VERSION:
        raise RemoteProtocolError(
            f"connect: the peer's bytes are of version {head[4]}, this side knows {BLOB_VERSION}. "
            "Install the same major version of rdmaconnect on both."
        )
    size = int.from_bytes(head[6:], "big")
    if len(data) != size:
        more = "truncated" if len(data) < size else "too long"
        raise RemoteProtocolError(f"connect: the peer's bytes are {more}: {len(data)} of {size}. {_HINT}")
    if _crc(head, rest) != data[_HEAD : _HEAD + _CHECK]:
        raise RemoteProtocolError(f"connect: the peer's {size} bytes are damaged: their checksum is another. {_HINT}")
    return _read(_authentic(head, rest, key))


def _authentic(head: bytes, rest: bytes, key: bytes | None) -> bytes:
    """What is compressed, if it is from one who knows the secret, or nobody is to know one."""
    if head[5] not in (0, 1):
        raise RemoteProtocolError(f"connect: the peer's bytes are authenticated in a way {head[5]}, not known here.")
    if not head[5]:
        if key is not None:
            raise AuthenticationError(
                "connect: the peer's bytes are not authenticated, and this end has a secret. Give both the same."
            )
        return rest
    if key is None:
        raise AuthenticationError(
            "connect: the peer's bytes are authenticated by a secret, and this end has none. Give both the same."
        )
    if not hmac.compare_digest(rest[:_MAC], _mac(key, head, rest[_MAC:])):
        raise AuthenticationError(
            "connect: the peer's bytes are authenticated by another secret, or somebody has changed them. "
            "Give both ends the same secret."
        )
    return rest[_MAC:]


def _read(packed: bytes) -> Blob:
    try:
        unzip = zlib.decompressobj()
        raw = unzip.decompress(packed, MAX_FRAME)
        if not unzip.eof or unzip.unused_data:
            raise ValueError(f"more than {MAX_FRAME} bytes, or not all of them")
        body = unpack(raw, _HINT)
        ident = bytes_of(body, "id", 16, 16)
        times = int_of(body, "made", _MAX_TIME), int_of(body, "until", _MAX_TIME)
        hellos = tuple(take_hello(ident, value) for value in list_of(body, "ports", MAX_BLOB_PORTS, 1))
        if len({(hello.ends[0].qp_type, len(hello.ends), hello.wish) for hello in hellos}) != 1:
            raise ValueError("its ports differ in more than where they are")
        if len({(hello.ends[0].port.device, hello.ends[0].port.port_num) for hello in hellos}) != len(hellos):
            raise ValueError("two of its ports have one name")
        if max(len(hello.ends[0].port.gids) for hello in hellos) > MAX_BLOB_GIDS:
            raise ValueError(f"a port has more than {MAX_BLOB_GIDS} GIDs")
        return Blob(ident, *times, text_of(body, "tag", MAX_TAG), hellos, "own" in body and flag_of(body, "own"))
    except (ValueError, TypeError, OverflowError, RecursionError, zlib.error) as e:
        raise RemoteProtocolError(f"connect: the peer's bytes are invalid: {short(e, 200)}.") from None


def _mac(key: bytes, head: bytes, packed: bytes) -> bytes:
    return hmac.digest(key, head + packed, hashlib.sha256)


def _crc(head: bytes, rest: bytes) -> bytes:
    return zlib.crc32(head + rest).to_bytes(4, "big")


# ---- the size


def shortened(blob: Blob, key: bytes | None) -> Blob:
    """The same end, in :data:`SMALL_BLOB` bytes if that can be: of each port's GIDs the least useful are left out.

    RoCE v2 stays before v1, an address of its own network namespace before another one's, and a routable one before a
    link-local one; of each port the best stays.
    """
    hellos = tuple(replace(hello, ends=hello.ends[:1], regions={}, private_data=b"") for hello in blob.hellos)
    bare, count = replace(blob, hellos=hellos), MAX_BLOB_GIDS
    while count > 1 and len(seal(_with_gids(bare, count), key)) > SMALL_BLOB:
        count -= 1
    return _with_gids(blob, count)


def _with_gids(blob: Blob, count: int) -> Blob:
    """At most so many for each port."""
    return replace(blob, hellos=tuple(_best_gids(hello, count) for hello in blob.hellos))


def _best_gids(hello: Hello, count: int) -> Hello:
    port = hello.ends[0].port
    if len(port.gids) <= count:
        return hello
    best = sorted(port.gids, key=_rank)[:count]
    port = replace(port, gids=tuple(entry for entry in port.gids if entry in best))
    return replace(hello, ends=tuple(end.at(port) for end in hello.ends))


def _rank(entry: GidEntry) -> tuple[bool, ...]:
    return not entry.here, entry.gid_type is GidType.ROCE_V1, entry.gid.is_link_local
