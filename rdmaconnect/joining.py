"""What both sides do with their queue pairs once they know each other: paths, RTR and RTS, proof, giving up."""

from __future__ import annotations

from collections.abc import Sequence

from .address import AddressHandle
from .deadline import Deadline
from .driver import Story
from .endpoint import Endpoint, Options, PortAddress
from .errors import PeerRejected, RemoteProtocolError
from .handshake import NO_ID, Handshake
from .messages import Reject
from .middle import Middle
from .path import Agreement, Path, make_path
from .prepare import Prepared
from .probe import Prober
from .terms import Terms

__all__ = ["abandon", "make_paths", "prove", "raise_lanes", "reject_of", "used_ports"]


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


def raise_lanes(prepared: Prepared, paths: Sequence[Path], *, rts: bool) -> list[AddressHandle | None]:
    """All queue pairs to RTR and, if ``rts``, to RTS; for UD, an address handle for each. Blocks."""
    handles: list[AddressHandle | None] = []
    try:
        for lane, path in zip(prepared.lanes, paths, strict=True):
            lane.to_rtr(path)
            if rts:
                lane.to_rts(path)
            handles.append(AddressHandle(prepared.engine.pd, path.ah_attr) if lane.is_ud else None)
    except BaseException:
        for handle in handles:
            if handle is not None:
                handle.close()
        raise
    return handles


def reject_of(
    handshake: Handshake, error: BaseException, stage: str = "", ports: tuple[PortAddress, ...] = ()
) -> Reject:
    """What the other end is told of an error here."""
    number = getattr(error, "errno", None)
    words = str(error) or type(error).__name__
    stage = stage or handshake.state.value
    return Reject(handshake.id or NO_ID, stage, number if isinstance(number, int) else 0, words, ports)


def prove(made: Sequence[Middle], terms: Terms, deadline: Deadline, *, again: bool = False) -> Story[None]:
    """Prove the data path if the hello asked for it; see :func:`abandon` for when it fails."""
    try:
        if terms.options.probe:
            prober = Prober(made, deadline)
            try:
                yield from prober.story()
            finally:
                prober.close()
            made[0]._wire.trace.mark("proven", "the peer has our probes, and we its")
    except BaseException as e:
        abandon(made, e, again=again)
        raise
    for connection in made:
        connection._known_as = connection._wire.id


def abandon(made: Sequence[Middle], error: BaseException, *, again: bool = False) -> None:
    """Tell the peer why the proof failed, and close everything; what was connected ``again`` can be so once more."""
    wire = made[0]._wire
    if wire.left is None and not isinstance(error, PeerRejected):
        wire.give_up(reject_of(wire.handshake, error, "prove the data path"))
    wire.left = wire.left or str(error)
    for connection in made:
        if not again:
            connection._close()
