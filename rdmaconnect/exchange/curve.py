"""Keys that protect the exchange: key files, or one secret for a whole job. ZeroMQ CURVE (RFC 26).

With key files each side has a pair of its own; the listener knows the connectors' public keys, the
connector the listener's. With one secret both sides derive the two pairs from it with scrypt (RFC 7914).
Nothing here is ever printed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath

import zmq
import zmq.auth
from zmq.utils import z85

__all__ = ["Keys", "keygen", "keys_for"]

#: the environment variable that holds the shared secret of a job
SECRET_VARIABLE = "RDMACONNECT_SECRET"


@dataclass(frozen=True, slots=True)
class Keys:
    """What one side needs; the keys are Z85 text, 40 characters.

    Args:
        public, secret: its own pair.
        listener: for a connector, the listener's public key.
        knows: for a listener, whether a connector's public key may come in.
    """

    public: bytes
    secret: bytes = field(repr=False)
    listener: bytes = b""
    knows: Callable[[bytes], bool] | None = field(default=None, repr=False)


@lru_cache(maxsize=8)
def _derive(secret: bytes, role: str) -> tuple[bytes, bytes]:
    raw = hashlib.scrypt(secret, salt=f"rdmaconnect 1 {role}".encode(), n=2**14, r=8, p=1, dklen=32)
    pair = z85.encode(raw)
    return zmq.curve_public(pair), pair


def _load(path: str, *, need_secret: bool) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"read key file {path}: {e}. Make one with `rdmaconnect keygen`.") from None
    if need_secret and not secret:
        raise ValueError(f"read key file {path}: it holds no secret key. Give the one that ends in .key_secret.")
    return public, secret or b""


def keys_for(
    *, listens: bool, secret: str | bytes | None = None, key: str | None = None, peer: str | None = None
) -> Keys | None:
    """The keys of one side.

    Args:
        listens: whether it is the listener.
        secret: the secret that all of a job share, at least 16 bytes; by default the environment's
            RDMACONNECT_SECRET. Not with ``key``.
        key: this side's own file, ending in ``.key_secret``.
        peer: for a connector, the listener's public file, ending in ``.key``; for a listener, the folder of
            the connectors' public files.

    Returns:
        The keys, or None if none were given: then the exchange is not protected.

    Raises:
        ValueError: the arguments do not go together, a file cannot be read, or the secret is too short.
    """
    if key is None and peer is None:
        secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        if secret is None:
            return None
        raw = secret.encode() if isinstance(secret, str) else bytes(secret)
        if len(raw) < 16:
            raise ValueError(
                f"the secret has {len(raw)} bytes: give at least 16, for example from `openssl rand -hex 32`"
            )
        mine, theirs = _derive(raw, "listener"), _derive(raw, "connector")
        if listens:
            return Keys(*mine, knows=lambda public: public == theirs[0])
        return Keys(*theirs, listener=mine[0])
    if secret is not None or key is None or peer is None:
        raise ValueError("protect the exchange: give secret alone, or key and peer_key together")
    public, own = _load(key, need_secret=True)
    if listens:
        folder = FilePath(peer)
        if not folder.is_dir():
            raise ValueError(f"read the connectors' keys: {peer} is not a folder")
        return Keys(public, own, knows=lambda other: _in_folder(folder, other))
    return Keys(public, own, listener=_load(peer, need_secret=False)[0])


def _in_folder(folder: FilePath, public: bytes) -> bool:
    """Looked up at each connection, so that keys can be added and taken away."""
    for path in sorted(folder.glob("*.key")):
        with contextlib.suppress(ValueError):  # a file that is no key lets nobody in, and keeps nobody out
            if _load(str(path), need_secret=False)[0] == public:
                return True
    return False


def keygen(folder: str, name: str) -> tuple[str, str]:
    """Make a pair of key files.

    Args:
        folder: where to.
        name: the files' name.

    Returns:
        (``folder/name.key``, ``folder/name.key_secret``); only the owner may read the latter.

    Raises:
        FileExistsError: one of them is there already.
        OSError: the folder cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    for end in (".key", ".key_secret"):
        if os.path.exists(os.path.join(folder, name + end)):
            raise FileExistsError(
                f"make a key: {os.path.join(folder, name + end)} is there already. Take another name."
            )
    before = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    os.chmod(public, 0o644)
    return public, secret
