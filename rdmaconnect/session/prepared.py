"""One side made ready to be connected: everything that exists before the peer is known."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ..abi import QpAttrMask, QpState, QpType
from ..agreement.candidates import find_gid, narrow
from ..agreement.endpoint import GRH_BYTES, MTU_BYTES, Endpoint, GidKey, RemoteRegion
from ..agreement.options import Options
from ..agreement.path import Path, Wish
from ..errors import DeviceError
from ..objects.address import AddressHandle
from ..objects.context import Context, Port, open_device
from ..objects.memory import MR
from ..objects.transition import Transition
from .bare import Bare
from .engine import Engine, Ring, spare_receives
from .own import Own, OwnEngine
from .ports import mark_here
from .steps import step_to_init, step_to_rtr, step_to_rts
from .terms import Terms
from .transceiver import Transceiver

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
        gid: the only GID to offer, or None for all.
        qkey: for UD, the Q_Key of each, 32 bits; random if it is None.
        own: what the application brings, whose receives and completions are its own then; or None.

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
        gid: GidKey | None = None,
        qkey: int | None = None,
        own: Own | None = None,
    ) -> None:
        self.port, self.qp_type, self._gid, self._qkey, self.own = port, qp_type, gid, qkey, own
        self.options, self.sizes = options, options.sizes(count)
        self._users = 0
        try:
            attr = context.attr
            self.address = narrow(port.address(attr, options), gid)
            spare = spare_receives(count)
            cqe = count * (self.sizes.send_depth + self.sizes.recv_depth + spare)
            if own is None and (cqe > attr.max_cqe or count > attr.max_qp):
                raise DeviceError(
                    f"prepare {count} queue pairs on {port}: that takes {cqe} completion-queue entries, "
                    f"the device has {attr.max_cqe} (and {attr.max_qp} queue pairs). "
                    "Ask for fewer, or lower recv_depth and send_depth."
                )
        except BaseException:
            context.close()
            raise
        self.engine = Engine(context, cqe) if own is None else OwnEngine(context, own)
        try:
            self.regions: dict[str, MR] = {
                name: self.engine.register(buffer) for name, buffer in (regions or {}).items()
            }
            self.transceivers = self._transceivers(count, spare) if own is None else self._bare(own, count)
        except BaseException:
            self.engine.close()
            raise

    @classmethod
    def on(cls, port: Port, qp_type: QpType, terms: Terms, count: int = 1, gid: GidKey | None = None) -> Prepared:
        """The same by what a caller asked for, on the device of a port. Blocks."""
        context = open_device(port.device) if terms.own is None else terms.own.open()
        return cls(context, port, qp_type, terms.options, terms.regions, count, gid, own=terms.own)

    def _transceivers(self, count: int, spare: int) -> list[Transceiver]:
        """Queue pairs whose receives are posted here."""
        size, depth, *_ = self.sizes
        grh = GRH_BYTES if self.qp_type == QpType.UD else 0
        size = self._recv_size(size) + grh
        ring = Ring(self.engine.pd, count * depth, size, depth, spare)
        to_init = self._to_init()
        qps = self.engine.queue_pairs(self.qp_type, count, self.sizes)
        ends = self._endpoints([qp.qp_num for qp in qps], size - grh)
        return [
            Transceiver(self.engine, qp, end, self.sizes, ring, slot, to_init)
            for qp, end, slot in zip(qps, ends, range(0, count * depth, depth), strict=True)
        ]

    def _bare(self, own: Own, count: int) -> list[Transceiver]:
        """Those that are the application's."""
        qps = own.queue_pairs(self.engine, self.qp_type, count, self.sizes, self.port.port_num)
        ends = self._endpoints([qp.qp_num for qp in qps], self._recv_size(self.sizes.recv_size))
        if self.qp_type == QpType.UD and qps[0].state == QpState.INIT:  # it has its Q_Key already
            ends = (replace(ends[0], qkey=qps[0].query(QpAttrMask.QKEY).qkey),)
        step = self._to_init()
        return [Bare(self.engine, qp, end, self.sizes, step, own) for qp, end in zip(qps, ends, strict=True)]

    def _recv_size(self, size: int) -> int:
        return min(size, MTU_BYTES[self.port.active_mtu]) if self.qp_type == QpType.UD else size

    def wish(self, options: Options) -> Wish:
        """What this end asks of the path: no proof where its completions are the application's."""
        wish = Wish.of(options)
        return wish if self.own is None else replace(wish, probe=False)

    def _endpoints(self, qp_nums: list[int], recv_size: int) -> tuple[Endpoint, ...]:
        """What a peer is told of queue pairs that are not used yet: PSN and Q_Key are random."""
        numbers = memoryview(secrets.token_bytes(8 * len(qp_nums))).cast("I").tolist()
        psns = [number & 0xFFFFFF for number in numbers[::2]]
        # one with its highest bit stands for the queue pair's own
        qkeys = [number & 0x7FFFFFFF if self.qp_type == QpType.UD else 0 for number in numbers[1::2]]
        if self._qkey is not None:
            qkeys = [self._qkey] * len(qp_nums)
        return Endpoint.several(self.qp_type, self.address, recv_size, qp_nums, psns, qkeys)

    @property
    def ends(self) -> tuple[Endpoint, ...]:
        """What the peer is told of the queue pairs."""
        return tuple(map(attrgetter("endpoint"), self.transceivers))

    def _to_init(self) -> Transition:
        return step_to_init(self.qp_type, self.address, self.options.pkey)

    def renew(self, port_num: int | None = None, gid: GidKey | None = None) -> None:
        """Back to INIT, to be connected anew, from a port of its device as it is now: GIDs may have moved. Blocks.

        Args:
            port_num: the port, from 1; None for the one that it is on.
            gid: the only GID to offer, if the port has it; None for the one before, if it has that, or all.

        Raises:
            DeviceError: the port has no usable GID.
            VerbsError: the device refused something.
        """
        context = self.engine.context
        self.port = mark_here(context.port(port_num or self.port.port_num))
        address = self.port.address(context.attr, self.options)
        self._gid = gid or self._gid
        only = self._gid if self._gid is not None and find_gid(address.gids, self._gid) else None
        self.address = narrow(address, only)
        to_init = self._to_init()
        for transceiver in self.transceivers:
            transceiver.restart(self.address, to_init)

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
    with_handles = prepared.qp_type == QpType.UD and prepared.engine.knows_pd
    rtr, to_rts = step_to_rtr(paths[0], prepared.qp_type), step_to_rts(paths[0], prepared.qp_type)
    for_all = to_rts.structs(paths) if rts else [None] * len(paths)
    ready = zip(prepared.transceivers, paths, rtr.structs(paths), for_all, strict=True)
    try:
        for transceiver, path, for_rtr, for_rts in ready:
            go_on()
            transceiver.to_rtr(path, rtr, for_rtr)
            if rts:
                transceiver.to_rts(path, to_rts, for_rts)
            if with_handles:
                handles.append(AddressHandle(prepared.engine.pd, path.ah_attr))
    except BaseException:
        close_handles(handles)
        raise
    return handles or [None] * len(paths)


def close_handles(handles: Sequence[AddressHandle | None]) -> None:
    """Free what :func:`bring_up` made."""
    for handle in handles:
        if handle is not None:
            handle.close()
