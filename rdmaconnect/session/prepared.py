"""One side made ready to be connected: everything that exists before the peer is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..abi import QpType
from ..agreement.candidates import narrow
from ..agreement.endpoint import GRH_BYTES, MTU_BYTES, Endpoint, RemoteRegion
from ..agreement.options import Options
from ..agreement.path import Path
from ..errors import DeviceError
from ..objects.address import AddressHandle
from ..objects.context import Context, Port
from ..objects.memory import MR
from .engine import Engine, Ring
from .transceiver import Transceiver, step_to_init, step_to_rtr, step_to_rts

__all__ = ["Prepared", "bring_up", "close_handles"]


class Prepared:
    """Queue pairs in INIT with their receives posted, and all that they stand on.

    Several connections may stand on it; it is freed when the last of them is.

    Args:
        context: the opened device; its use is given back in the end.
        port: the port to use.
        qp_type: RC, UC or UD.
        options: sizes, depths, limits.
        regions: named memory to register at once: name -> anything with a buffer.
        count: how many queue pairs.
        gid: the value of the only GID to offer, 16 bytes, or None for all.

    Attributes:
        engine: what they share.
        transceivers: the queue pairs.
        regions: name -> MR.

    Raises:
        DeviceError: the device has no room for so much, or no usable GID.
        VerbsError: the device refused something.
    """

    def __init__(
        self,
        context: Context,
        port: Port,
        qp_type: QpType,
        options: Options,
        regions: Mapping[str, Any] | None = None,
        count: int = 1,
        gid: bytes | None = None,
    ) -> None:
        self.port, self.qp_type = port, qp_type
        self.options, self.sizes = options, options.sizes(count)
        self._users = 0
        try:
            attr = context.attr
            self.address = narrow(port.address(attr, options), gid)
            cqe = count * (self.sizes.send_depth + self.sizes.recv_depth)
            if cqe > attr.max_cqe or count > attr.max_qp:
                raise DeviceError(
                    f"prepare {count} queue pairs on {port}: that takes {cqe} completion-queue entries, "
                    f"the device has {attr.max_cqe} (and {attr.max_qp} queue pairs). "
                    "Ask for fewer, or lower recv_depth and send_depth."
                )
        except BaseException:
            context.close()
            raise
        self.engine = Engine(context, cqe)
        try:
            self.regions: dict[str, MR] = {
                name: self.engine.pd.register(buffer) for name, buffer in (regions or {}).items()
            }
            size, depth, *_ = self.sizes
            if qp_type == QpType.UD:
                size = min(size, MTU_BYTES[port.active_mtu]) + GRH_BYTES
            ring = Ring(self.engine.pd, count * depth, size, depth)
            to_init = step_to_init(qp_type, self.address, options.pkey)
            self.transceivers = [
                Transceiver(self.engine, qp, self.address, self.sizes, ring, i * depth, to_init)
                for i, qp in enumerate(self.engine.queue_pairs(qp_type, count, self.sizes))
            ]
        except BaseException:
            self.engine.close()
            raise

    @property
    def ends(self) -> tuple[Endpoint, ...]:
        """What the peer is told of the queue pairs."""
        return tuple(transceiver.endpoint for transceiver in self.transceivers)

    def offered(self) -> dict[str, RemoteRegion]:
        """What the peer is told of the named regions."""
        return {name: mr.region for name, mr in self.regions.items()}

    def lend(self) -> None:
        """One user more; each :meth:`close` takes one back."""
        with self.engine.lock:
            self._users += 1

    def close(self) -> None:
        """Free everything, if this was the last user."""
        with self.engine.lock:
            self._users -= 1
            if self._users <= 0:
                self.engine.close()


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
    rtr = step_to_rtr(paths[0], prepared.qp_type)
    to_rts = step_to_rts(paths[0], prepared.qp_type) if rts else None
    try:
        for transceiver, path in zip(prepared.transceivers, paths, strict=True):
            go_on()
            transceiver.to_rtr(path, rtr)
            if rts:
                transceiver.to_rts(path, to_rts)
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
