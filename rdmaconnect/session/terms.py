"""What a caller asks for: the keywords of all calls that connect or listen, and their check before anything is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ..abi import QpType
from ..agreement.options import Options, OptionsDict
from ..errors import ConnectTimeout, shown
from ..exchange.curve import Keys, keys_for
from ..objects.memory import MemoryLike, check_buffer
from ..protocol.codec import MAX_PRIVATE, MAX_QPS, check_names
from ..runtime.deadline import Deadline

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

__all__ = [
    "CONNECTABLE",
    "BaseOptions",
    "ConnectOptions",
    "ListenOptions",
    "QpTypeName",
    "Terms",
    "Unpack",
    "check_count",
    "make_deadline",
    "make_terms",
    "parse_qp_type",
    "parse_qp_types",
]

#: the types that can be connected
CONNECTABLE = (QpType.RC, QpType.UC, QpType.UD)
#: and their names
QpTypeName: TypeAlias = Literal["RC", "UC", "UD"]


class BaseOptions(OptionsDict, total=False):
    """The keywords of all calls that connect or listen: the fields of :class:`Options`, and these.

    Args:
        options: an :class:`Options` to begin with, by default ``Options()``. A field that is given by keyword
            besides takes the place of its own.
        regions: named memory that every peer may use: name -> anything with a buffer.
        private_data: for the peer's application, at most 4096 bytes.
        secret: the shared secret that protects the exchange, at least 16 bytes; by default RDMACONNECT_SECRET of
            the environment, if set.
        key: instead, this side's own key file, ending in ``.key_secret``.
    """

    options: Options | None
    regions: Mapping[str, MemoryLike] | None
    private_data: bytes
    secret: str | bytes | None
    key: str | os.PathLike[str] | None


class ConnectOptions(BaseOptions, total=False):
    """The keywords of ``connect``, ``connect_many``, ``meet`` and their asyncio twins.

    They are those of :class:`BaseOptions`, the fields of :class:`Options` among them, and these.

    Args:
        qp_type: ``"RC"``, ``"UC"`` or ``"UD"``, or a :class:`QpType`; RC by default.
        deadline_s: seconds for all of it, 30 by default, or None to wait for ever.
        peer_key: with ``key``: the peer's key file, ending in ``.key``.
    """

    qp_type: QpTypeName | QpType
    deadline_s: float | None
    peer_key: str | os.PathLike[str] | None


class ListenOptions(BaseOptions, total=False):
    """The keywords of ``listen`` and ``alisten``.

    They are those of :class:`BaseOptions`, the fields of :class:`Options` among them, and these.

    Args:
        qp_types: the types that a connector may ask for; all three by default.
        share_ud: whether one queue pair serves all UD peers.
        max_half_open: connections that may be under way, or made and not yet accepted, 1024 by default; a
            connector beyond them is told to try again, and does so until its own deadline.
        max_qps: the same for the queue pairs of all of them, 16384 by default.
        peer_keys: with ``key``: the folder of the connectors' ``.key`` files, which may change meanwhile.
    """

    qp_types: Sequence[QpTypeName | QpType]
    share_ud: bool
    max_half_open: int
    max_qps: int
    peer_keys: str | os.PathLike[str] | None


#: what is asked for where nothing is
_DEFAULT = Options()


@dataclass(frozen=True)
class Terms:
    """What a caller asked for, checked."""

    qp_type: QpType
    options: Options
    regions: Mapping[str, MemoryLike] = field(default_factory=dict)
    private_data: bytes = b""
    keys: Keys | None = field(default=None, repr=False)


def make_terms(
    given: Mapping[str, Any],
    known: type[ConnectOptions] | type[ListenOptions] = ConnectOptions,
    *,
    listens: bool = False,
) -> Terms:
    """Check what a caller asked for.

    Args:
        given: the keywords of the call.
        known: those that it takes.
        listens: whether the keys are to be those of the side that listens.

    Raises:
        ValueError, TypeError: naming what cannot be meant.
    """
    names = list(known.__annotations__)
    unknown = [name + _meant(name, names) for name in sorted(set(given) - set(names))]
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: there is no such option. The options are {', '.join(names)}")
    options = given.get("options") or _DEFAULT
    if not isinstance(options, Options):
        raise TypeError(f"options is of type {type(options).__name__}: give an Options")
    fields = {name: given[name] for name in given if name in OptionsDict.__annotations__}
    options = replace(options, **fields) if fields else options
    regions, data = _named(given.get("regions")), _private(given.get("private_data", b""))
    protection = {name: given.get(name) for name in ("secret", "key", "peer_key", "peer_keys")}
    keys = keys_for(listens=listens, **protection)
    return Terms(parse_qp_type(given.get("qp_type", QpType.RC)), options, regions, data, keys)


def _named(regions: Mapping[str, MemoryLike] | None) -> dict[str, MemoryLike]:
    if regions is None:
        return {}
    if not isinstance(regions, Mapping):
        raise TypeError(f"regions is {shown(regions)}: give a dict of names and buffers, {{'name': buffer}}")
    check_names(regions)
    for name, buffer in regions.items():
        try:
            check_buffer(buffer)
        except (TypeError, ValueError) as e:
            raise type(e)(f"regions[{shown(name)}]: {e}") from None
    return dict(regions)


def _private(data: bytes) -> bytes:
    try:
        copy = bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"private_data is {shown(data)}: give bytes, at most {MAX_PRIVATE}") from None
    if len(copy) > MAX_PRIVATE:
        raise ValueError(f"private_data is {len(copy)} bytes long: give at most {MAX_PRIVATE}")
    return copy


def _meant(name: str, names: Collection[str]) -> str:
    """The name that was meant, in words; "" if none is near."""
    import difflib  # seldom needed, and not loaded by who writes no unknown name

    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f" ({near[0]}?)" if near else ""


def make_deadline(given: ConnectOptions) -> Deadline:
    """The patience of a call that connects, counted from now on.

    Raises:
        TypeError, ValueError: no number of seconds, or less than 0.
    """
    return Deadline(given.get("deadline_s", 30), ConnectTimeout)


def parse_qp_type(qp_type: str | QpType) -> QpType:
    """RC, UC or UD, by name or value.

    Raises:
        ValueError: another type.
    """
    try:
        kind = QpType[qp_type.upper()] if isinstance(qp_type, str) else QpType(qp_type)
    except (KeyError, ValueError):
        kind = None
    if kind in (QpType.RAW_PACKET, QpType.XRC_SEND, QpType.XRC_RECV):
        raise ValueError(
            f"qp_type is {kind}: it has no two ends to connect by this exchange; "
            "RAW_PACKET needs a device that lets raw Ethernet through, XRC one with XRC domains. Give RC, UC or UD"
        )
    if kind not in CONNECTABLE:
        raise ValueError(f"qp_type is {shown(qp_type)}: give 'RC', 'UC' or 'UD'")
    return kind


def parse_qp_types(qp_types: Sequence[str | QpType]) -> list[QpType]:
    """The types that a listener takes, each as :func:`parse_qp_type`.

    Raises:
        TypeError: no collection of types.
        ValueError: another type.
    """
    if isinstance(qp_types, str) or not isinstance(qp_types, Collection):
        raise TypeError(f"qp_types is {shown(qp_types)}: give several, such as ('RC', 'UC', 'UD')")
    return [parse_qp_type(name) for name in qp_types]


def check_count(count: int, name: str = "count") -> int:
    """How many queue pairs are made, at once or ahead.

    Args:
        count: what was given.
        name: the argument that it was given by.

    Raises:
        TypeError: not an integer.
        ValueError: not from 1 to 4096.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} is {shown(count)}: give an integer")
    if not 1 <= count <= MAX_QPS:
        raise ValueError(f"{name} is {count}: give 1 to {MAX_QPS}")
    return count
