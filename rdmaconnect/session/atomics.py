"""Atomics on the peer's memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from functools import partial

from ..abi import AccessFlags, AtomicCap, QpType, WrOpcode
from ..agreement.endpoint import RemoteRegion
from ..errors import StateError, shown
from ..objects.memory import MR
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure
from .life import Life
from .posting import Posting
from .staging import Staging
from .transfer import Part, Sent

__all__ = ["Atomics"]

#: bytes that an atomic is about
_SIZE = 8


class Atomics(Posting):
    """The part of :class:`~rdmaconnect.session.data_path.DataPath` that asks the peer's device to change memory."""

    #: where what was there before comes to
    _results: Staging | None = None

    def _begin(self) -> None:
        super()._begin()
        if self._results is not None:  # those of the life before
            self._results = None

    def _memory(self) -> Sequence[MR]:
        memory = super()._memory()
        return memory if self._results is None else (*memory, self._results.mr)

    def fetch_add(self, region: RemoteRegion | str, add: int, offset: int, deadline_s: float | None) -> Procedure[int]:
        """Add to 8 bytes of the peer, modulo 2**64; gives what was there before."""
        if not (isinstance(add, int) and -(1 << 63) <= add < 1 << 64):
            raise ValueError(f"add is {shown(add)}: give an integer, -2**63 to 2**64 - 1")
        return self._atomic(WrOpcode.ATOMIC_FETCH_AND_ADD, region, (add % (1 << 64),), offset, deadline_s)

    def compare_swap(
        self, region: RemoteRegion | str, compare: int, swap: int, offset: int, deadline_s: float | None
    ) -> Procedure[int]:
        """Replace 8 bytes of the peer if they are as expected; gives what was there before."""
        for name, value in (("compare", compare), ("swap", swap)):
            if not (isinstance(value, int) and 0 <= value < 1 << 64):
                raise ValueError(f"{name} is {shown(value)}: give an integer, 0 to 2**64 - 1")
        return self._atomic(WrOpcode.ATOMIC_CMP_AND_SWP, region, (compare, swap), offset, deadline_s)

    def _atomic(
        self,
        opcode: WrOpcode,
        region: RemoteRegion | str,
        operands: tuple[int, ...],
        offset: int,
        deadline_s: float | None,
    ) -> Procedure[int]:
        self._need("atomics", QpType.RC)
        if self.engine.context.attr.atomic_cap == AtomicCap.NONE:
            raise StateError(f"atomics over {self.local}: {self.local.port.device} has none (atomic_cap). Use another.")
        if not self.path.max_rd_atomic:
            raise StateError(
                f"atomics from {self.local} to {self.peer}: max_rd_atomic is 0 between them. Ask for 1 on both sides."
            )
        deadline, before = Deadline(deadline_s), list[bytes]()
        begin = partial(self._begin_atomic, opcode, region, operands, offset, deadline, before)
        yield from self.finish((yield from self._in_a_life(begin, deadline, None)), deadline)
        return int.from_bytes(before[0], sys.byteorder)

    def _begin_atomic(
        self,
        opcode: WrOpcode,
        region: RemoteRegion | str,
        operands: tuple[int, ...],
        offset: int,
        deadline: Deadline,
        before: list[bytes],
        life: Life,
    ) -> Procedure[Sent]:
        target, sent = self._region(region).slice(offset, _SIZE), Sent(opcode, _SIZE)
        if target.addr % _SIZE:
            raise ValueError(
                f"{sent.doing}: the peer's address {target.addr:#x} is no multiple of {_SIZE}. Give another offset."
            )
        if self._results is None:
            yield Call(self._make_results, deadline, sent.doing)
        results = self._results
        assert results is not None

        def post() -> bool | None:
            place = results.take(bytes(_SIZE)) if self.transceiver.room() else None
            if place is None:
                return None

            def done() -> None:
                before.append(results.holds(place))
                results.give_back(place)

            sent.release = done
            part = Part(opcode, (results.mr.addr + place.start, _SIZE, results.mr.lkey), target, operands=operands)
            try:
                return self.transceiver.post(sent, part) or None
            finally:
                if not sent.posted:
                    results.give_back(place)

        yield from self._until(self._in(life, post), deadline, sent.doing)
        return sent

    def _make_results(self) -> None:
        with self.engine.lock:
            if self._results is None:
                self._results = Staging(self.register, mmap.PAGESIZE, AccessFlags.LOCAL_WRITE)
