"""Keys that protect the exchange: key files, or one secret for a whole job. ZeroMQ CURVE (RFC 26).

With key files each side has a pair of its own; the listener knows the connectors' public keys, the
connector the listener's. With one secret both sides derive the two pairs from it with scrypt (RFC 7914).
Nothing here is ever printed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from ..errors import shown

__all__ = ["Keys", "keygen", "keys_for", "shared_key"]

log = logging.getLogger("rdmaconnect")

#: the environment variable that holds the shared secret of a job
SECRET_VARIABLE = "RDMACONNECT_SECRET"
#: bytes of a shared secret, at least
_SECRET_MIN = 16
#: bytes of a key file, at most; it has about 400, and what its owner notes in it
_FILE_MAX = 65536
#: in a key file, ``public-key = "..."``
_ENTRY = re.compile(rb"""^[ \t]*(public|secret)-key[ \t]*=[ \t]*["']?([^"'\s]*)["']?[ \t]*\r?$""", re.MULTILINE)
#: a file that changed so short a time before it was read may change again with the same time in its inode, s
_UNSETTLED_S = 2.0
#: looking through a folder takes about 4 us for each file: one of more files than this rests so many seconds after it
_SMALL, _REST_S = 100, 1.0


@dataclass(frozen=True, slots=True)
class Keys:
    """What one side needs; the keys are Z85 text, 40 characters.

    Args:
        public, secret: its own pair.
        listener: for a connector, the listener's public key.
        knows: for a listener, whether a connector's public key may come in; it never raises.
    """

    public: bytes
    secret: bytes = field(repr=False)
    listener: bytes = b""
    knows: Callable[[bytes], bool] | None = field(default=None, repr=False)


def keys_for(
    *,
    listens: bool,
    secret: str | bytes | None = None,
    key: str | os.PathLike[str] | None = None,
    peer_key: str | os.PathLike[str] | None = None,
    peer_keys: str | os.PathLike[str] | None = None,
) -> Keys | None:
    """The keys of one side.

    Args:
        listens: whether it is the listener.
        secret: the secret that all of a job share, at least 16 bytes; by default the environment's
            RDMACONNECT_SECRET. Not with ``key``.
        key: this side's own file, ending in ``.key_secret``.
        peer_key: the public file, ending in ``.key``, of the one peer that there is.
        peer_keys: instead, for a listener, the folder of its peers' public files. It is read when somebody
            connects: a key that is taken away is refused from then on; one that is added is known, in a folder
            of more than 100 within a second.

    Returns:
        The keys, or None if none were given: then the exchange is not protected.

    Raises:
        ValueError: the arguments do not go together, a file cannot be read, or the secret is empty or too short.
        TypeError: the secret is neither text nor bytes.
    """
    if key is None and peer_key is None and peer_keys is None:
        raw = _secret(secret)
        if raw is None:
            return None
        mine, theirs = _derive(raw, "listener"), _derive(raw, "connector")
        if listens:
            return Keys(*mine, knows=partial(_same, other=theirs[0]))
        return Keys(*theirs, listener=mine[0])
    one = (peer_key is None) is not (peer_keys is None)
    if secret is not None or key is None or not one or (peer_keys is not None and not listens):
        raise ValueError(
            "protect the exchange: give secret alone, or key and peer_key together, or key and peer_keys to listen"
        )
    public, own = _own(os.fspath(key))
    if peer_keys is not None:
        return Keys(public, own, knows=_Folder(os.fspath(peer_keys)).knows)
    assert peer_key is not None
    other = _load(os.fspath(peer_key))[0]
    if listens:
        return Keys(public, own, knows=partial(_same, other=other))
    return Keys(public, own, listener=other)


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
    import zmq

    public, secret = zmq.curve_keypair()
    # the form of pyzmq's own certificates, which other programs read
    lines = {
        ".key": f'# a public key of ZeroMQ CURVE\nmetadata\ncurve\n    public-key = "{public.decode()}"\n',
        ".key_secret": (
            "# a secret key of ZeroMQ CURVE: give it to nobody, and let nobody read it\nmetadata\ncurve\n"
            f'    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n'
        ),
    }
    paths = {end: os.path.join(folder, name + end) for end in lines}
    for path in paths.values():
        if os.path.lexists(path):
            raise FileExistsError(f"make a key: {path} is there already. Take another name.")
    for (end, text), mode in zip(lines.items(), (0o644, 0o600), strict=True):
        fd = os.open(paths[end], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            os.chmod(paths[end], mode)  # whatever the umask
            file.write(text)
    return paths[".key"], paths[".key_secret"]


# ---- one secret


def _secret(given: str | bytes | None) -> bytes | None:
    """The bytes of the secret in force.

    Raises:
        ValueError, TypeError: as :func:`keys_for`; the words never show it.
    """
    from_environment = given is None
    if given is None:
        given = os.environ.get(SECRET_VARIABLE)
        if given is None:
            return None
    if isinstance(given, str):
        # bytes of the environment that are no text; an error of encode() would carry the secret
        if re.search("[\ud800-\udc7f\udd00-\udfff]", given):
            raise ValueError("the secret has surrogates in it, which are no text: give other text, or bytes")
        raw = given.encode(errors="surrogateescape")
    elif isinstance(given, bytes | bytearray | memoryview):
        raw = bytes(given)
    else:
        raise TypeError(f"the secret is of type {type(given).__name__}: give text or bytes")
    if not raw and from_environment:
        raise ValueError(
            f"{SECRET_VARIABLE} is set, but empty: give it at least {_SECRET_MIN} bytes, for example from "
            "`openssl rand -hex 32`, or unset it for an exchange without protection"
        )
    if len(raw) < _SECRET_MIN:
        raise ValueError(
            f"the secret has {len(raw)} bytes: give at least {_SECRET_MIN}, for example from `openssl rand -hex 32`"
        )
    return raw


def shared_key(secret: str | bytes | None) -> bytes | None:
    """The key that authenticates what two ends tell each other where there is no side channel.

    Args:
        secret: the secret that all of a job share, as for :func:`keys_for`.

    Returns:
        32 bytes, scrypt (RFC 7914) of the secret with N 2**14, r 8, p 1 and the salt ``rdmaconnect 1 bytes``; None
        where there is no secret.

    Raises:
        ValueError, TypeError: as :func:`keys_for`.
    """
    raw = _secret(secret)
    return None if raw is None else _stretched(raw, "bytes")


@lru_cache(maxsize=8)
def _stretched(secret: bytes, purpose: str) -> bytes:
    return hashlib.scrypt(secret, salt=f"rdmaconnect 1 {purpose}".encode(), n=2**14, r=8, p=1, dklen=32)


@lru_cache(maxsize=8)
def _derive(secret: bytes, role: str) -> tuple[bytes, bytes]:
    import zmq
    from zmq.utils import z85

    pair = z85.encode(_stretched(secret, role))
    return zmq.curve_public(pair), pair


def _same(one: bytes | None, other: bytes) -> bool:
    """Whether they are equal, in a time that does not tell where they differ; of what is not bytes, no."""
    return isinstance(one, bytes | bytearray) and hmac.compare_digest(one, other)


# ---- a token for each connection


def _own(path: str) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if not secret:
        raise ValueError(f"read key file {path}: it holds no secret key. Give the one that ends in .key_secret.")
    import zmq

    if zmq.curve_public(secret) != public:
        raise ValueError(f"read key file {path}: its two keys do not belong together. Make a new pair.")
    return public, secret


def _load(path: str) -> tuple[bytes, bytes]:
    """The public and secret key of a file; the latter may be empty.

    Raises:
        ValueError: in words, why there are none.
    """
    try:
        return _read(path)
    except OSError as e:
        why = e.strerror
    except ValueError as e:
        why = str(e)
    raise ValueError(f"read key file {path}: {why}. Make one with `rdmaconnect keygen`.")


def _read(path: str) -> tuple[bytes, bytes]:
    """As :func:`_load`; never waits for what is no file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no key file, in words.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened: some devices do things then
        raise ValueError("it is not a file")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a file")
        text = file.read(_FILE_MAX + 1)
    if len(text) > _FILE_MAX:
        raise ValueError(f"it has more than {_FILE_MAX} bytes, and so is no key file")
    found: dict[bytes, bytes] = dict(reversed(_ENTRY.findall(text)))  # the first of each counts
    if b"public" not in found:
        raise ValueError("it holds no public key")
    for name, value in found.items():
        if not _is_key(value):
            raise ValueError(f"its {name.decode()} key is not one: that is 40 characters of Z85")
    return found[b"public"], found.get(b"secret", b"")


def _is_key(text: bytes) -> bool:
    from zmq.utils import z85

    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):  # a character that Z85 has not, a length, five that are too large
        return False


@dataclass(slots=True)
class _File:
    """What was last read of a file.

    Attributes:
        inode: (device, number, size, time of the last change in ns).
        lasts: whether the file is as it was read while its inode is.
        key: its public key; None if it could not be read.
    """

    inode: tuple[int, ...]
    lasts: bool
    key: bytes | None


class _Folder:
    """The public keys in a folder's ``.key`` files. Any thread may ask.

    A known key is read again from its file each time somebody has it. For an unknown one the folder is looked
    through; of more than 100 files, once a second at most unless it has changed.

    Raises:
        ValueError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode: tuple[int, ...] = ()
        self._rests_until = 0.0
        self._files: dict[str, _File] = {}
        self._names: dict[bytes, str] = {}
        #: name, "" for the folder itself -> why it lets nobody in, as it was logged
        self._faults: dict[str, str] = {}
        try:
            self._look(os.stat(path))
        except (OSError, ValueError) as e:  # ValueError: a NUL in the path
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise ValueError(f"read the connectors' keys: {shown(path)}: {why}. Give a folder of .key files.") from None

    def knows(self, public: bytes) -> bool:
        """Whether a file holds that key. A failing read lets nobody in by that file, and is logged once."""
        with self._lock:
            try:
                return isinstance(public, bytes) and self._holds(public)
            except OSError as e:
                self._blame("", e.strerror or str(e))
            except Exception:
                log.exception("read the connectors' keys in %s", self._path)
            return False

    def _holds(self, public: bytes) -> bool:
        name = self._names.get(public)
        if name is not None:
            # one that was taken away is no fault
            if os.path.exists(os.path.join(self._path, name)) and self._key(name) == public:
                self._faults.pop("", None)
                return True
            self._files[name].lasts = False  # whatever its inode says
        folder = os.stat(self._path)
        if name is None and _inode(folder) == self._inode and time.monotonic() < self._rests_until:
            return False
        self._look(folder)
        return public in self._names

    def _look(self, folder: os.stat_result) -> None:
        """Read the files that are new or have changed."""
        latest = (time.time() - _UNSETTLED_S) * 1e9
        files = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name
                if name.endswith(".key"):
                    known, inode = self._files.get(name), _inode_of(entry)
                    if known is None or not known.lasts or known.inode != inode:
                        key = self._key(name)
                        known = _File(inode, key is not None and inode[-1] < latest, key)
                    files[name] = known
        self._files = files
        self._names = {file.key: name for name, file in files.items() if file.key}
        self._faults = {name: why for name, why in self._faults.items() if name in files}
        self._inode = _inode(folder)
        self._rests_until = time.monotonic() + (_REST_S if len(files) > _SMALL else 0.0)

    def _key(self, name: str) -> bytes | None:
        """The public key in a file: b"" if it is no key file, None if it could not be read."""
        key: bytes | None = None
        try:
            key, _ = _read(os.path.join(self._path, name))
        except OSError as e:
            self._blame(name, e.strerror or str(e))
        except ValueError as e:
            self._blame(name, str(e))
            key = b""
        else:
            self._faults.pop(name, None)
        return key

    def _blame(self, name: str, why: str) -> None:
        if self._faults.get(name) != why:
            self._faults[name] = why
            where = os.path.join(self._path, name) if name else self._path
            log.warning("read the connectors' keys: %s: %s. It lets nobody in.", where, why)


def _inode(found: os.stat_result) -> tuple[int, ...]:
    """What of an inode changes with what it holds."""
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def _inode_of(entry: os.DirEntry[str]) -> tuple[int, ...]:
    try:
        return _inode(entry.stat())
    except OSError:  # gone meanwhile, or a link to nothing: reading it will tell
        return (0,)
