"""What both sides do with their queue pairs once they know each other: paths, RTR and RTS, proof, giving up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..agreement.endpoint import Endpoint, Options, PortAddress
from ..agreement.path import Agreement, Path, make_path
from ..errors import PeerRejected, RemoteProtocolError
from ..objects.address import AddressHandle
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure
from .base import BaseConnection
from .prepared import Prepared
from .probe import Prober
from .terms import Terms

__all__ = ["abandon", "bring_up", "close_handles", "make_paths", "prove", "used_ports"]


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


def bring_up(
    prepared: Prepared, paths: Sequence[Path], *, rts: bool, go_on: Callable[[], None]
) -> list[AddressHandle | None]:
    """All queue pairs to RTR and, if ``rts``, to RTS; for UD, an address handle for each. Blocks.

    Args:
        prepared: the queue pairs.
        paths: one for each.
        rts: whether to go on to RTS.
        go_on: called before each queue pair; raises if it is not worth while any more.
    """
    handles: list[AddressHandle | None] = []
    try:
        for transceiver, path in zip(prepared.transceivers, paths, strict=True):
            go_on()
            transceiver.to_rtr(path)
            if rts:
                transceiver.to_rts(path)
            handles.append(AddressHandle(prepared.engine.pd, path.ah_attr) if transceiver.is_ud else None)
    except BaseException:
        close_handles(handles)
        raise
    return handles


def close_handles(handles: Sequence[AddressHandle | None]) -> None:
    """Free what :func:`bring_up` made."""
    for handle in handles:
        if handle is not None:
            handle.close()


def prove(made: Sequence[BaseConnection], terms: Terms, deadline: Deadline, *, again: bool = False) -> Procedure[None]:
    """Prove the data path if the hello asked for it; see :func:`abandon` for when it fails."""
    try:
        if terms.options.probe:
            prober = Prober(made, deadline)
            try:
                yield from prober.procedure()
            finally:
                prober.close()
            made[0]._conversation.trace.mark("proven", "the peer has our probes, and we its")
    except BaseException as e:
        abandon(made, e, again=again)
        raise
    for connection in made:
        connection._known_as = connection._token


def abandon(made: Sequence[BaseConnection], error: BaseException, *, again: bool = False) -> None:
    """Tell the peer why the proof failed, and close everything; what was connected ``again`` can be so once more."""
    conversation = made[0]._conversation
    if not isinstance(error, PeerRejected):
        conversation.give_up(conversation.reject_of(error, "prove the data path"))
    for connection in made:
        if not again:
            connection._close()
