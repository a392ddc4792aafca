"""Receive queues outside of queue pairs, and the tables that spread packets over them (receive-side scaling)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .. import verbs
from ..abi import (
    WqAttrMask,
    WqFlags,
    WqInitAttrMask,
    WqState,
    WqType,
    ibv_rwq_ind_table_init_attr,
    ibv_wq_attr,
    ibv_wq_init_attr,
)
from ..errors import StateError
from .completion import CQ
from .context import Context
from .fields import bits, put
from .locks import apart_from, batch_locks, exclusive
from .memory import PD
from .operations import check_open
from .owned import Owned
from .work_request import RecvRequest, post

__all__ = ["WQ", "RwqIndTable"]


class WQ(Owned):
    """A receive queue of its own, in RESET when made; it receives in RDY, through a queue pair with a table.

    Args:
        pd: its protection domain.
        cq: where its completions go.
        max_wr: receives wanted.
        max_sge: pieces wanted in each.
        flags: ``WqFlags``, where the device has them.
        wq_context: a number of the caller's, 64 bits, which stays in ``struct ibv_wq``.

    Attributes:
        pd, context: as given.
        wq_num: its number, 24 bits.
        state: the state that it was last moved to here.
        max_wr, max_sge: what the device gave, at least what was asked for.

    Raises:
        ValueError: a queue of another device, or a number that does not fit.
        VerbsError: EINVAL above the device's limits, among others.
        LibraryError: EOPNOTSUPP where the provider has none (mlx5, mlx4 and mana do).

    Source: ibv_create_wq(3).
    """

    def __init__(
        self, pd: PD, cq: CQ, max_wr: int, max_sge: int = 1, *, flags: WqFlags | None = None, wq_context: int = 0
    ) -> None:
        if not cq.context.is_same(pd.context):
            raise ValueError(f"make a work queue in {pd.name}: {cq.name} is of another device")
        attr = put(ibv_wq_init_attr(), wq_type=int(WqType.RQ), max_wr=max_wr, max_sge=max_sge)
        attr.wq_context = bits("wq_context", wq_context, 64)
        if flags is not None:
            put(attr, create_flags=int(flags), comp_mask=int(WqInitAttrMask.FLAGS))
        self.pd, self.cq, self.context, self.state = pd, cq, pd.context, WqState.RESET

        def make() -> Any:
            attr.pd, attr.cq = pd.pointer, cq.pointer
            made = verbs.ibv_create_wq(pd.context.pointer, attr)
            self.wq_num: int = made.contents.wq_num
            self.max_wr: int = attr.max_wr
            self.max_sge: int = attr.max_sge
            self._post_recv = verbs.op("ibv_post_wq_recv", made)
            return made

        super().__init__(make, f"work queue of {pd.context.name}", (pd, cq))

    def _locks_before(self) -> list[Any]:
        return batch_locks([self.cq], f"close {self.name}")

    def _locks_after(self) -> list[Any]:
        return [self.context.destroying(self)]

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_wq(pointer)

    def modify(
        self, state: WqState | None = None, *, flags: WqFlags | None = None, flags_mask: WqFlags | None = None
    ) -> None:
        """Move it to another state, or change its flags.

        Args:
            state: RESET, RDY or ERR; from RESET to RDY the provider takes its old completions out of the queue.
            flags: ``WqFlags`` to set, of those in ``flags_mask``; by default those that are given.

        Raises:
            StateError: within a batch of its completion queue in this thread.
            VerbsError: EINVAL for a step that there is not, EOPNOTSUPP for a flag that the device lacks.

        Source: ibv_modify_wq(3).
        """
        attr = ibv_wq_attr()
        mask = WqAttrMask(0)
        if state is not None:
            put(attr, wq_state=int(state), curr_wq_state=int(self.state))
            mask |= WqAttrMask.STATE | WqAttrMask.CURR_STATE
        if flags is not None:
            put(attr, flags=int(flags), flags_mask=int(flags if flags_mask is None else flags_mask))
            mask |= WqAttrMask.FLAGS
        attr.attr_mask = int(mask)
        with apart_from([self.cq], f"move {self.name}"), self.lock:
            verbs.ibv_modify_wq(self.pointer, attr)
            if state is not None:
                self.state = state

    @exclusive
    def post_recv(self, request: RecvRequest, *more: RecvRequest) -> None:
        """Post a receive, or several as one list.

        Raises:
            PostError: ENOMEM when the queue is full, EINVAL for too many pieces; says how many were posted.
            StateError: it is not in RDY, or it or a region is closed.
            ValueError: a request comes twice, or a region of another protection domain.

        Source: ibv_post_wq_recv(3).
        """
        pointer = self.pointer
        if self.state != WqState.RDY:
            raise StateError(f"post a receive to {self.name}: it is in {self.state} and receives in RDY.")
        for region in {region for one in (request, *more) for region in one.regions}:
            check_open(region, self)
        post(self._post_recv, pointer, (request, *more), "ibv_post_wq_recv", f"to {self.name}")


class RwqIndTable(Owned):
    """A table of work queues: a queue pair that is made with it spreads what it receives over them by a hash.

    Args:
        context: the device.
        wqs: the work queues, as many as a power of 2; one may be in it several times.

    Attributes:
        wqs: as given.

    Raises:
        ValueError: no power of 2, or a queue of another device.
        VerbsError: EINVAL above the device's limit (``rss_caps``), among others.
        LibraryError: EOPNOTSUPP where the provider has none.

    Source: ibv_create_rwq_ind_table(3).
    """

    def __init__(self, context: Context, wqs: Sequence[WQ]) -> None:
        count = len(wqs)
        if count == 0 or count & (count - 1):
            raise ValueError(f"make a table of {count} work queues: give a power of 2")
        for wq in wqs:
            if not wq.context.is_same(context):
                raise ValueError(f"make a table of work queues of {context.name}: {wq.name} is of another device")
        self.context, self.wqs = context, tuple(wqs)

        def make() -> Any:
            pointers = [wq.pointer for wq in wqs]
            array = (type(pointers[0]) * count)(*pointers)
            attr = ibv_rwq_ind_table_init_attr(log_ind_tbl_size=count.bit_length() - 1)
            attr.ind_tbl = ctypes.cast(array, type(attr.ind_tbl))
            return verbs.ibv_create_rwq_ind_table(context.pointer, attr)

        super().__init__(make, f"table of {count} work queues of {context.name}", (context, *dict.fromkeys(wqs)))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_rwq_ind_table(pointer)
