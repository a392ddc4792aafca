"""What a caller asks for: the keywords of all calls that connect or listen, and their check before anything is done."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ..abi import QpType
from ..agreement.options import Options, OptionsDict
from ..errors import ConnectTimeout, shown
from ..exchange.curve import Keys, keys_for
from ..objects.completion import CQ
from ..objects.foreign import QueuePairLike
from ..objects.memory import MemoryLike, check_buffer
from ..objects.queuepair import QueuePair
from ..protocol.codec import MAX_PRIVATE, MAX_QPS, check_names
from ..runtime.deadline import Deadline
from .own import Own, OwnQueuePair, own_of

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

__all__ = [
    "CONNECTABLE",
    "BaseOptions",
    "BindOptions",
    "ConnectOptions",
    "EndOptions",
    "ListenOptions",
    "QpTypeName",
    "Terms",
    "Unpack",
    "check_alone",
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


class EndOptions(OptionsDict, total=False):
    """The keywords of all calls that connect, listen or bind: the fields of :class:`Options`, and these.

    Args:
        options: an :class:`Options` to begin with, by default ``Options()``. A field that is given by keyword
            besides takes the place of its own.
        send_cq, recv_cq: completion queues of the application's, of one device; where one is given it is both. The
            connection's queue pairs are made on them, and receives and completions are the application's own: nothing
            here posts or polls. Post to ``conn.qp``, with memory of ``conn.register()``, receives of ``recv_size``
            bytes at least (40 more over UD, for the GRH), and see that the queues are large enough for the
            ``send_depth`` and ``recv_depth`` of all that use them. What the peer sends before there is a receive waits
            over RC (``rnr_retry``), and is lost over UC and UD. There is no proof of the data path, and ``health``
            goes by the side channel alone. ``reconnect()`` takes the queue pair through RESET: what was posted
            is gone then, without completions. ``close()`` destroys the queue pair; the completion queues stay.
        qp: instead, a queue pair of the application's, in RESET or INIT (then with the receives that it may have), to
            be connected: a :class:`~rdmaconnect.objects.queuepair.QueuePair`, one of pyverbs or of PyPI's ``ibverbs``,
            the address of a ``struct ibv_qp``, or a :class:`~rdmaconnect.QueuePairLike`. It is moved and asked, and
            nothing else; all that ``send_cq`` says of receives, completions, proof and ``reconnect()`` is so here.
            It must be there until the connection is closed. ``close()`` leaves it in RTS; where connecting fails it is
            as it came, or, once it had left INIT, in RESET without what was posted. Over UD ``conn.ah`` is there where
            the protection domain is known, else ``conn.path.ah_attr`` is what to make one of. A listener connects it
            to one peer at a time.
        regions: named memory that every peer may use: name -> anything with a buffer.
        private_data: for the peer's application, at most 4096 bytes.
        secret: the shared secret that protects the exchange, or authenticates the bytes of ``bind``, at least 16 bytes;
            by default RDMACONNECT_SECRET of the environment, if set.
    """

    options: Options | None
    send_cq: CQ | None
    recv_cq: CQ | None
    qp: QueuePair | QueuePairLike | int | Any
    regions: Mapping[str, MemoryLike] | None
    private_data: bytes
    secret: str | bytes | None


class BaseOptions(EndOptions, total=False):
    """The keywords of all calls that connect or listen: those of :class:`EndOptions`, and these.

    Args:
        key: instead of ``secret``, this side's own key file, ending in ``.key_secret``.
        auto_reconnect: whether a connection that is lost is connected anew by itself, the same as by ``reconnect()``:
            False, the default, for not; seconds for how long that is tried after each loss; True for 60 s. Both sides
            are to say so. What its peer's application, or this one, has closed stays closed.
    """

    key: str | os.PathLike[str] | None
    auto_reconnect: bool | float


class ConnectOptions(BaseOptions, total=False):
    """The keywords of ``connect``, ``connect_many``, ``meet`` and their asyncio twins.

    They are those of :class:`BaseOptions`, the fields of :class:`Options` among them, and these.

    Args:
        qp_type: ``"RC"``, ``"UC"`` or ``"UD"``, or a :class:`QpType`; RC by default.
        deadline_s: seconds for all of it, 30 by default, or None to wait for ever.
        peer_key: with ``key``: the peer's key file, ending in ``.key``.
        plain: with an ``rdma://`` url: whether ``private_data`` goes as it is, and nothing of this library's with it.
    """

    qp_type: QpTypeName | QpType
    deadline_s: float | None
    peer_key: str | os.PathLike[str] | None
    plain: bool


class BindOptions(EndOptions, total=False):
    """The keywords of ``bind`` and ``abind``.

    They are those of :class:`EndOptions`, the fields of :class:`Options` among them, and this.

    Args:
        qp_type: ``"RC"``, ``"UC"`` or ``"UD"``, or a :class:`QpType`; RC by default.
    """

    qp_type: QpTypeName | QpType


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


#: seconds for which a connection is connected anew where no number is given
RECONNECT_S = 60.0
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
    #: seconds for which a connection that is lost is connected anew, 0 for not at all
    reconnect_s: float = 0.0
    #: what the application brings
    own: Own | None = None
    #: whether a peer by rdma_cm is told nothing of this library's
    plain: bool = False


def make_terms(
    given: Mapping[str, Any],
    known: type[ConnectOptions] | type[ListenOptions] | type[BindOptions] = ConnectOptions,
    *,
    listens: bool = False,
) -> Terms:
    """Check what a caller asked for.

    Args:
        given: the keywords of the call.
        known: those that it takes.
        listens: whether the keys are to be those of the side that listens; where nobody does (``bind``) there are none.

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
    options = _changed(options, fields) if fields else options
    regions, data = _named(given.get("regions")), _private(given.get("private_data", b""))
    protection = {name: given.get(name) for name in ("secret", "key", "peer_key", "peer_keys")}
    keys = None if known is BindOptions else keys_for(listens=listens, **protection)
    reconnect_s = _reconnect_s(given.get("auto_reconnect", False))
    own = own_of(given)
    if own is not None:
        options = _on(own, options, reconnect_s)
    qp_type = parse_qp_type(given.get("qp_type", (own and own.qp_type) or QpType.RC))
    if own is not None and own.qp_type not in (None, qp_type):
        raise ValueError(f"qp_type is {qp_type}, and qp of type {own.qp_type}: give no qp_type besides")
    plain = given.get("plain", False)
    if not isinstance(plain, bool):
        raise TypeError(f"plain is {shown(plain)}: give True or False")
    return Terms(qp_type, options, regions, data, keys, reconnect_s, own, plain)


def _on(own: Own, options: Options, reconnect_s: float) -> Options:
    """The options as they are for what the application brings."""
    if options.probe:
        raise ValueError(f"probe=True with {own.name}: a proof takes receives and completions, which are yours then")
    if reconnect_s:
        raise ValueError(f"auto_reconnect with {own.name}: it would drop what you have posted. Call reconnect()")
    if options.device not in (None, own.device):
        raise ValueError(f"device is {options.device!r}, and {own.name} of {own.device}: give no device besides")
    if own.port_num is not None and options.port_num not in (None, own.port_num):
        raise ValueError(f"port_num is {options.port_num}, and {own.name} in INIT on port {own.port_num}")
    return _changed(options, {"device": own.device, "port_num": own.port_num or options.port_num})


def _reconnect_s(given: object) -> float:
    if isinstance(given, bool):
        return RECONNECT_S if given else 0.0
    if not isinstance(given, int | float):
        raise TypeError(f"auto_reconnect is {shown(given)}: give True, False or seconds")
    if not 0 < given < math.inf:
        raise ValueError(f"auto_reconnect is {given}: give a number of seconds above 0")
    return float(given)


def check_alone(terms: Terms, what: str) -> None:
    """Refuse ``auto_reconnect``, and a queue pair of the application's, where a connection does not stand by itself.

    Raises:
        ValueError: says so.
    """
    if isinstance(terms.own, OwnQueuePair):
        raise ValueError(f"qp with {what}: give it to connect(), listen() or bind(), for one connection.")
    if terms.reconnect_s:
        raise ValueError(f"auto_reconnect with {what}: give it to connect() and listen(), for one connection each.")


def _changed(options: Options, fields: Mapping[str, Any]) -> Options:
    """Options with some fields changed: a caller mostly changes the same as the last time, and to check costs most."""
    try:
        changed: Options = _remembered(options, **fields)
    except TypeError:  # a value that cannot be remembered, or cannot be meant
        changed = replace(options, **fields)
    return changed


_remembered = lru_cache(maxsize=64, typed=True)(replace)


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
