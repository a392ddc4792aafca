"""What two ends agree on. Pure: two endpoints and a wish in, one :class:`Agreement` or all differences out.

The listener agrees and tells the connector; both then derive their own :class:`Path` from it. A
``Path`` names its fields exactly as ``struct ibv_qp_attr``, so that ``transitions.step`` reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import repeat
from operator import attrgetter

from ..abi import AccessFlags, LinkLayer, Mtu, QpType
from ..errors import PeerMismatch, RemoteProtocolError
from .candidates import Addresses, common_pkey, find_gid, gid_words, needs_grh, rank_pairs
from .columns import filled
from .endpoint import MTU_BYTES, Endpoint, GidEntry, PortAddress
from .options import Options, check_fields

__all__ = ["Agreement", "AhAttr", "Path", "Wish", "agree", "make_path", "make_paths", "used_ports"]


#: agreements and paths that are remembered, and the GIDs of both ports then, at most: a peer chooses what it says, and
#: could have many that are alike but for little compared with each other
_KEPT, _KEPT_GIDS = 64, 32


def _check_mtu(code: Mtu) -> None:
    if code not in MTU_BYTES:
        raise ValueError(f"path_mtu is code {int(code)}: give 1 to 5")


@dataclass(frozen=True, slots=True)
class Wish:
    """What one end asks of the path; what both agree on applies to both.

    Args:
        path_mtu: the greatest MTU code wished.
        sl: service level, 0 to 15; None here and below for no wish.
        traffic_class: 0 to 255.
        flow_label: 20 bits.
        pkey: partition key by value.
        probe: whether both ends are to prove the data path before they hand the connection out; both must wish it.
    """

    path_mtu: Mtu = Mtu.MTU_4096
    sl: int | None = None
    traffic_class: int | None = None
    flow_label: int | None = None
    pkey: int | None = None
    probe: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ("sl", "traffic_class", "flow_label", "pkey"))
        _check_mtu(self.path_mtu)

    @classmethod
    @lru_cache(maxsize=_KEPT)
    def of(cls, options: Options) -> Wish:
        """The part of a caller's options that concerns both ends."""
        classes = options.sl, options.traffic_class, options.flow_label
        return cls(options.mtu, *classes, options.pkey, options.probe is not False)


#: what no end asks for
_NO_WISH = Wish()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both ends do, told from the connector's side.

    Args:
        connector_gid, listener_gid: the GID pair, 16 bytes each; both None where LIDs are used.
        path_mtu: MTU code.
        sl, traffic_class, flow_label: as in :class:`Wish`; 0 where nobody wishes.
        pkey: partition key by value, 15 bits without the membership bit.
        probe: whether both ends prove the data path.
    """

    connector_gid: GidEntry | None
    listener_gid: GidEntry | None
    path_mtu: Mtu
    sl: int
    traffic_class: int
    flow_label: int
    pkey: int
    probe: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ("sl", "traffic_class", "flow_label"))
        _check_mtu(self.path_mtu)
        if any(entry is not None and entry.gid.is_zero for entry in (self.connector_gid, self.listener_gid)):
            raise ValueError("one of the two GIDs is all zero, which is an empty slot")


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
        # without the constructor: all of it has been checked
        deque(map(object.__setattr__, repeat(path), _OWN + _SHARED, own + _shared(self)), 0)
        return path


#: the fields of a :class:`Path` that are a queue pair's own, in the order of :meth:`Path.toward`; and the others
_OWN = ("dest_qp_num", "rq_psn", "sq_psn", "qkey")
_SHARED = tuple(field.name for field in fields(Path) if field.name not in _OWN)
_shared = attrgetter(*_SHARED)
_qp_num, _psn, _qkey = map(attrgetter, ("qp_num", "psn", "qkey"))


#: wishes that cannot be met both where they differ, with how many of their bits tell
_EXCLUSIVE = {"sl": 0xF, "traffic_class": 0xFF, "flow_label": 0xFFFFF, "pkey": 0x7FFF}


def _both(connector: Wish, listener: Wish) -> tuple[Wish, list[str]]:
    """What both ends wish together, and where that cannot be."""
    if listener == _NO_WISH:
        return connector, []
    common: dict[str, int | None] = {}
    differences = []
    for name, mask in _EXCLUSIVE.items():
        mine, theirs = getattr(connector, name), getattr(listener, name)
        common[name] = theirs if mine is None else mine
        if None not in (mine, theirs) and (mine ^ theirs) & mask:
            differences.append(f"{name}: the connector wishes {mine:#x}, the listener {theirs:#x}")
    mtu, probe = min(connector.path_mtu, listener.path_mtu), connector.probe and listener.probe
    return replace(connector, path_mtu=mtu, probe=probe, **common), differences


def agree(
    connector: Endpoint, listener: Endpoint, wish: Wish, exchange: Addresses = ("", ""), own: Wish | None = None
) -> Agreement:
    """What both ends will do.

    Args:
        connector: the end that asked.
        listener: the end that was asked.
        wish: the connector's wishes.
        exchange: the addresses that the exchange goes over.
        own: the listener's wishes.

    Returns:
        The agreement, the same whichever side works it out.

    Raises:
        PeerMismatch: with all differences at once.
    """
    here, there = connector.port, listener.port
    work_out = _agreed if len(here.gids) + len(there.gids) <= _KEPT_GIDS else _agreed.__wrapped__
    return work_out((connector.qp_type, listener.qp_type), here, there, wish, exchange, own or _NO_WISH)


@lru_cache(maxsize=_KEPT)
def _agreed(
    qp_types: tuple[QpType, QpType],
    here: PortAddress,
    there: PortAddress,
    wish: Wish,
    exchange: Addresses,
    own: Wish,
) -> Agreement:
    """The same, of which only this counts: it is worked out once for each two ports."""
    wish, conflicts = _both(wish, own)
    differences = [*conflicts]
    if qp_types[0] != qp_types[1]:
        differences.append(f"qp_type: connector {qp_types[0]}, listener {qp_types[1]}")
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
        pairs = rank_pairs(here, there, exchange)
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
        raise PeerMismatch(differences, () if conflicts else None)  # other ports do not reconcile wishes
    assert pkey is not None
    mtu = min(here.active_mtu, there.active_mtu, wish.path_mtu)
    classes = wish.sl or 0, wish.traffic_class or 0, wish.flow_label or 0
    return Agreement(*pair, Mtu(mtu), *classes, pkey, wish.probe)


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
    return _shared_path(local, remote, agreement, options, connector).toward(local, remote)


def _shared_path(local: Endpoint, remote: Endpoint, agreement: Agreement, options: Options, connector: bool) -> Path:
    here, there = local.port, remote.port
    work_out = _between if len(here.gids) + len(there.gids) <= _KEPT_GIDS else _between.__wrapped__
    return work_out(local.qp_type, here, there, agreement, options, connector)


@lru_cache(maxsize=_KEPT)
def _between(
    qp_type: QpType, port: PortAddress, there: PortAddress, agreement: Agreement, options: Options, connector: bool
) -> Path:
    """What the paths of all queue pairs between two ports have in common: it is worked out once."""
    mine, theirs = agreement.connector_gid, agreement.listener_gid
    if not connector:
        mine, theirs = theirs, mine
    mine = _own_gid(port, mine)
    if theirs is not None:  # what its owner said of it besides
        theirs = find_gid(there.gids, theirs.key, theirs.gid_index) or theirs
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
    if mine is None or theirs is None:
        ah_attr = AhAttr(port_num=port.port_num, dlid=there.lid, sl=agreement.sl)
    else:
        ah_attr = AhAttr(
            port_num=port.port_num,
            dlid=there.lid,
            sl=agreement.sl,
            is_global=1,
            dgid=theirs.gid.raw,
            sgid_index=mine.gid_index,
            flow_label=agreement.flow_label,
            hop_limit=options.hop_limit,
            traffic_class=agreement.traffic_class,
        )
    timeout, retry_cnt = options.timers
    return Path(
        port_num=port.port_num,
        pkey_index=max(slots, key=lambda index: port.pkeys[index]),  # two limited members could not talk
        qp_access_flags=ACCESS[qp_type],
        qkey=0,
        path_mtu=agreement.path_mtu,
        dest_qp_num=0,
        rq_psn=0,
        sq_psn=0,
        ah_attr=ah_attr,
        max_rd_atomic=min(port.max_rd_atomic, there.max_dest_rd_atomic),
        max_dest_rd_atomic=min(port.max_dest_rd_atomic, there.max_rd_atomic),
        min_rnr_timer=options.min_rnr_timer,
        timeout=timeout,
        retry_cnt=retry_cnt,
        rnr_retry=options.rnr_retry,
        local_gid=mine,
        remote_gid=theirs,
        why=_why(port, there, agreement, mine, theirs),
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
    first = _shared_path(local[0], remote[0], agreement, options, connector).because(why)
    if len(local) == 1:
        return [first.toward(local[0], remote[0])]
    own = zip(_OWN, (map(_qp_num, remote), map(_psn, remote), map(_psn, local), map(_qkey, local)), strict=True)
    return list(filled(Path, len(local), (*own, *zip(_SHARED, map(repeat, _shared(first)), strict=True))))


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
    """The slot of this port that holds the GID agreed on: the slots of the table may have moved."""
    if entry is None:
        return None
    own = find_gid(port.gids, entry.key, entry.gid_index)
    if own is not None:
        return own
    raise RemoteProtocolError(
        f"agree: the peer chose {entry.gid}, which {port} does not have. It has {gid_words(port.gids)}."
    )


def _why(
    here: PortAddress, there: PortAddress, agreement: Agreement, mine: GidEntry | None, theirs: GidEntry | None
) -> tuple[str, ...]:
    lines = []
    if mine is None or theirs is None:
        lines.append(f"by LID {here.lid:#x} to {there.lid:#x}: InfiniBand, one subnet, no GRH required")
    else:
        lines.append(f"by GID: {here} {mine} to {there} {theirs}")
    mtus = [MTU_BYTES[m] for m in (here.active_mtu, there.active_mtu, agreement.path_mtu)]
    if len(set(mtus)) > 1:
        lines.append(f"path_mtu {mtus[2]}: local active {mtus[0]}, remote active {mtus[1]}, or as wished")
    classes = {name: getattr(agreement, name) for name in ("sl", "traffic_class", "flow_label")}
    if any(classes.values()):
        lines.append(", ".join(f"{name} {value}" for name, value in classes.items() if value) + ": as wished")
    if not agreement.probe:
        lines.append("not proven: one end does without a proof, or leaves its completions to its application")
    return tuple(lines)
