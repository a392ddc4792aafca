"""What two ends agree on. Pure: two endpoints and a wish in, one :class:`Agreement` or all differences out.

The listener agrees and tells the connector; both then derive their own :class:`Path` from it. A
``Path`` names its fields exactly as ``struct ibv_qp_attr``, so that ``transitions.step`` reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

from ..abi import AccessFlags, LinkLayer, Mtu, QpType
from ..errors import PeerMismatch, RemoteProtocolError
from .candidates import common_pkey, gid_words, needs_grh, rank_pairs
from .endpoint import MTU_BYTES, Endpoint, GidEntry, PortAddress
from .options import Options, check_fields

__all__ = [
    "Agreement",
    "AhAttr",
    "Path",
    "Wish",
    "agree",
    "make_path",
    "make_paths",
    "used_ports",
]


def _check_mtu(code: Mtu) -> None:
    if code not in MTU_BYTES:
        raise ValueError(f"path_mtu is code {int(code)}: give 1 to 5")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the connector asks of the path; it applies to both ends.

    Args:
        path_mtu: the greatest MTU code wished.
        sl: service level, 0 to 15.
        traffic_class: 0 to 255.
        flow_label: 20 bits.
        pkey: partition key by value, or None for the best common one.
        probe: whether both ends prove the data path before they hand the connection out.
    """

    path_mtu: Mtu = Mtu.MTU_4096
    sl: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    pkey: int | None = None
    probe: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ("sl", "traffic_class", "flow_label", "pkey"))
        _check_mtu(self.path_mtu)

    @classmethod
    def of(cls, options: Options) -> Wish:
        """The part of a caller's options that concerns both ends."""
        return cls(options.mtu, options.sl, options.traffic_class, options.flow_label, options.pkey, options.probe)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both ends do, told from the connector's side.

    Args:
        connector_gid, listener_gid: the GID pair, 16 bytes each; both None where LIDs are used.
        path_mtu: MTU code.
        sl, traffic_class, flow_label: as in :class:`Wish`.
        pkey: partition key by value, 15 bits without the membership bit.
    """

    connector_gid: GidEntry | None
    listener_gid: GidEntry | None
    path_mtu: Mtu
    sl: int
    traffic_class: int
    flow_label: int
    pkey: int

    def __post_init__(self) -> None:
        check_fields(self, ("sl", "traffic_class", "flow_label"))
        _check_mtu(self.path_mtu)


@dataclass(frozen=True, slots=True)
class AhAttr:
    """``struct ibv_ah_attr`` with its ``grh`` flattened; same names, same ranges."""

    port_num: int
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: int = 0
    dgid: bytes = bytes(16)
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 0
    traffic_class: int = 0


@dataclass(frozen=True, slots=True)
class Path:
    """Everything that one end's queue pair needs, named as in ``struct ibv_qp_attr``.

    Besides those fields: the chosen ``local_gid`` and ``remote_gid`` (None where LIDs are used), and
    ``why``, in words, what was chosen and what stood against the rest.
    """

    port_num: int
    pkey_index: int
    qp_access_flags: AccessFlags
    qkey: int = field(repr=False)
    path_mtu: Mtu
    dest_qp_num: int
    rq_psn: int
    sq_psn: int
    ah_attr: AhAttr
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    local_gid: GidEntry | None = None
    remote_gid: GidEntry | None = None
    why: tuple[str, ...] = ()

    def because(self, words: tuple[str, ...]) -> Path:
        """The same path with more said on why."""
        return replace(self, why=self.why + words) if words else self

    def toward(self, local: Endpoint, remote: Endpoint) -> Path:
        """The same path for another pair of queue pairs on the same two ports."""
        path = object.__new__(Path)
        own = (remote.qp_num, remote.psn, local.psn, local.qkey)
        # without the constructor: of thousands of queue pairs this is done for each
        deque(map(object.__setattr__, repeat(path), _OWN + _SHARED, own + _shared(self)), 0)
        return path


#: the fields of a :class:`Path` that are a queue pair's own, in the order of :meth:`Path.toward`; and the others
_OWN = ("dest_qp_num", "rq_psn", "sq_psn", "qkey")
_SHARED = tuple(field.name for field in fields(Path) if field.name not in _OWN)
_shared = attrgetter(*_SHARED)


def agree(connector: Endpoint, listener: Endpoint, wish: Wish) -> Agreement:
    """What both ends will do.

    Args:
        connector: the end that asked.
        listener: the end that was asked.
        wish: the connector's wishes.

    Returns:
        The agreement, the same whichever side works it out.

    Raises:
        PeerMismatch: with all differences at once.
    """
    here, there = connector.port, listener.port
    differences = []
    if connector.qp_type != listener.qp_type:
        differences.append(f"qp_type: connector {connector.qp_type}, listener {listener.qp_type}")
    pkey = common_pkey(here, there, wish.pkey)
    if pkey is None:
        tables = " and ".join(
            f"{role} has {', '.join(f'{p:#06x}' for p in port.pkeys if p) or 'none'}"
            for role, port in (("connector", here), ("listener", there))
        )
        wanted = "" if wish.pkey is None else f" ({wish.pkey:#06x} wished)"
        differences.append(f"P_Key: none in common with a full member{wanted}: {tables}")
    pair: tuple[GidEntry | None, GidEntry | None] = (None, None)
    if here.link_layer != there.link_layer:
        differences.append(f"link layer: connector {here.link_layer}, listener {there.link_layer}")
    elif needs_grh(here, there):
        pairs = rank_pairs(here, there)
        if pairs:
            pair = pairs[0]
        else:
            differences.append(
                f"GIDs: none of the connector's ({gid_words(here.gids)}) matches one of the listener's "
                f"({gid_words(there.gids)}) in type and address family"
            )
    elif not (here.lid and there.lid):
        differences.append(f"LID: connector {here.lid:#x}, listener {there.lid:#x}; 0 means no subnet manager")
    if differences:
        raise PeerMismatch(differences)
    assert pkey is not None
    mtu = min(here.active_mtu, there.active_mtu, wish.path_mtu)
    return Agreement(*pair, Mtu(mtu), wish.sl, wish.traffic_class, wish.flow_label, pkey)


def make_path(local: Endpoint, remote: Endpoint, agreement: Agreement, options: Options, *, connector: bool) -> Path:
    """One end's path from what was agreed.

    Args:
        local: this end.
        remote: the other end.
        agreement: as :func:`agree` made it, or as it came from the listener.
        options: this end's timers and limits.
        connector: whether this end asked.

    Returns:
        The path, with ``why``.

    Raises:
        RemoteProtocolError: if the agreement names a GID, P_Key or MTU that this end does not have.
    """
    mine, theirs = agreement.connector_gid, agreement.listener_gid
    if not connector:
        mine, theirs = theirs, mine
    mine = _own_gid(local.port, mine)
    port = local.port
    if (mine is None) != (theirs is None) or (mine is None and port.link_layer == LinkLayer.ETHERNET):
        raise RemoteProtocolError("agree: the peer's agreement lacks a GID. Both ends need one on Ethernet.")
    if agreement.path_mtu > port.active_mtu:
        raise RemoteProtocolError(
            f"agree: the peer chose MTU {MTU_BYTES[agreement.path_mtu]}, above {port} "
            f"({MTU_BYTES[port.active_mtu]} bytes)."
        )
    slots = [index for index, key in enumerate(port.pkeys) if key & 0x7FFF == agreement.pkey]
    if not slots:
        raise RemoteProtocolError(f"agree: the peer chose P_Key {agreement.pkey:#06x}, which {port} does not have.")
    grh: dict[str, Any] = {}
    if mine is not None and theirs is not None:
        grh = {
            "is_global": 1,
            "dgid": theirs.gid.raw,
            "sgid_index": mine.gid_index,
            "flow_label": agreement.flow_label,
            "hop_limit": options.hop_limit,
            "traffic_class": agreement.traffic_class,
        }
    ah_attr = AhAttr(port_num=port.port_num, dlid=remote.port.lid, sl=agreement.sl, **grh)
    return Path(
        port_num=port.port_num,
        pkey_index=max(slots, key=lambda index: port.pkeys[index]),  # two limited members could not talk
        qp_access_flags=ACCESS[local.qp_type],
        qkey=local.qkey,
        path_mtu=agreement.path_mtu,
        dest_qp_num=remote.qp_num,
        rq_psn=remote.psn,
        sq_psn=local.psn,
        ah_attr=ah_attr,
        max_rd_atomic=min(port.max_rd_atomic, remote.port.max_dest_rd_atomic),
        max_dest_rd_atomic=min(port.max_dest_rd_atomic, remote.port.max_rd_atomic),
        min_rnr_timer=options.min_rnr_timer,
        timeout=options.timeout,
        retry_cnt=options.retry_cnt,
        rnr_retry=options.rnr_retry,
        local_gid=mine,
        remote_gid=theirs,
        why=_why(local, remote, agreement, mine, theirs),
    )


def make_paths(
    local: Sequence[Endpoint],
    remote: Sequence[Endpoint],
    agreement: Agreement,
    options: Options,
    *,
    connector: bool,
    why: tuple[str, ...] = (),
) -> list[Path]:
    """One path for each queue pair of an exchange; they differ in numbers only."""
    if len(local) != len(remote):
        raise RemoteProtocolError(f"agree: {len(local)} queue pairs here, {len(remote)} at the peer.")
    first = make_path(local[0], remote[0], agreement, options, connector=connector)
    first = first.because(why)
    return [first.toward(mine, theirs) for mine, theirs in zip(local, remote, strict=True)]


def used_ports(here: PortAddress, there: PortAddress, path: Path) -> tuple[PortAddress, PortAddress]:
    """The two ports with only the GIDs that a path uses."""
    pair = (path.local_gid, path.remote_gid)
    return tuple(port.only(gid) for port, gid in zip((here, there), pair, strict=True))  # type: ignore[return-value]


#: what a peer may do to registered memory through a queue pair of each type
ACCESS: dict[QpType, AccessFlags] = {
    QpType.RC: AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC,
    QpType.UC: AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE,
    QpType.UD: AccessFlags.LOCAL_WRITE,
}


def _own_gid(port: PortAddress, entry: GidEntry | None) -> GidEntry | None:
    """The slot of this port that holds the value agreed on: the slots of the table may have moved."""
    if entry is None:
        return None
    for own in port.gids:
        if own.gid == entry.gid and own.gid_type == entry.gid_type:
            return own
    raise RemoteProtocolError(
        f"agree: the peer chose {entry.gid}, which {port} does not have. It has {gid_words(port.gids)}."
    )


def _why(
    local: Endpoint, remote: Endpoint, agreement: Agreement, mine: GidEntry | None, theirs: GidEntry | None
) -> tuple[str, ...]:
    lines = []
    if mine is None or theirs is None:
        lines.append(f"by LID {local.port.lid:#x} to {remote.port.lid:#x}: InfiniBand, one subnet, no GRH required")
    else:
        lines.append(f"by GID: {local.port} {mine} to {remote.port} {theirs}")
    mtus = [MTU_BYTES[m] for m in (local.port.active_mtu, remote.port.active_mtu, agreement.path_mtu)]
    if len(set(mtus)) > 1:
        lines.append(f"path_mtu {mtus[2]}: local active {mtus[0]}, remote active {mtus[1]}, or as wished")
    return tuple(lines)
