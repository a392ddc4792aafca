"""Shared receive queues, and the XRC domains that some of them belong to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .. import verbs
from ..abi import (
    SrqAttrMask,
    SrqInitAttrMask,
    SrqType,
    XrcdInitAttrMask,
    ibv_srq_attr,
    ibv_srq_init_attr,
    ibv_srq_init_attr_ex,
    ibv_xrcd_init_attr,
)
from .completion import CQ
from .context import Context
from .fields import put
from .locks import batch_locks, exclusive
from .memory import PD
from .operations import check_open
from .owned import Owned
from .work_request import RecvRequest, post

__all__ = ["SRQ", "XRCD", "SrqAttr"]


class XRCD(Owned):
    """An XRC domain: what lets queue pairs of several processes receive into one queue.

    Args:
        context: the device.
        fd: an open file that the processes share; -1 for a domain of this process alone.
        oflags: ``os.O_CREAT`` makes it if there is none for the file, ``os.O_EXCL`` refuses one that is there.

    Raises:
        LibraryError: EOPNOTSUPP where the device has no XRC.
        VerbsError: EBADF, EEXIST, among others.

    Source: ibv_open_xrcd(3).
    """

    def __init__(self, context: Context, fd: int = -1, oflags: int = os.O_CREAT) -> None:
        attr = ibv_xrcd_init_attr(comp_mask=XrcdInitAttrMask.FD | XrcdInitAttrMask.OFLAGS)
        put(attr, fd=fd, oflags=oflags)
        self.context = context
        name = f"XRC domain of {context.name}"
        super().__init__(lambda: verbs.ibv_open_xrcd(context.pointer, attr), name, (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_close_xrcd(pointer)


@dataclass(frozen=True, slots=True)
class SrqAttr:
    """``struct ibv_srq_attr`` as a value.

    Args:
        max_wr: receives that fit.
        max_sge: pieces in each.
        srq_limit: an event comes when fewer receives than this are left; 0 if none will.
    """

    max_wr: int
    max_sge: int
    srq_limit: int


class SRQ(Owned):
    """A queue of receives that many queue pairs of its protection domain take from.

    Args:
        pd: its protection domain.
        max_wr: receives wanted.
        max_sge: pieces wanted in each.
        srq_type: BASIC, XRC, or TM with tag matching.
        xrcd, cq: for XRC, its domain and where its completions go; for TM, ``cq`` alone.
        max_num_tags, max_ops: for TM, sizes of the tag list.

    Attributes:
        pd, srq_type: as given.
        max_wr, max_sge: what the device gave, at least what was asked for.

    Raises:
        ValueError: an object of another device.
        VerbsError: EINVAL above the device's limits, EOPNOTSUPP for a type it lacks, among others.
        LibraryError: EOPNOTSUPP where the device has no shared receive queues.

    Source: ibv_create_srq(3), ibv_create_srq_ex(3).
    """

    def __init__(
        self,
        pd: PD,
        max_wr: int,
        max_sge: int = 1,
        *,
        srq_type: SrqType = SrqType.BASIC,
        xrcd: XRCD | None = None,
        cq: CQ | None = None,
        max_num_tags: int = 0,
        max_ops: int = 0,
    ) -> None:
        parents = tuple(thing for thing in (pd, xrcd, cq) if thing is not None)
        for thing in (xrcd, cq):
            if thing is not None and not thing.context.is_same(pd.context):
                raise ValueError(f"share receives in {pd.name}: {thing.name} is of another device")
        attr: Any = ibv_srq_init_attr() if srq_type == SrqType.BASIC else ibv_srq_init_attr_ex()
        put(attr.attr, max_wr=max_wr, max_sge=max_sge)
        if srq_type == SrqType.TM:
            put(attr.tm_cap, max_num_tags=max_num_tags, max_ops=max_ops)

        def make() -> Any:
            if srq_type == SrqType.BASIC:
                made = verbs.ibv_create_srq(pd.pointer, attr)
            else:
                _fill_ex(attr, srq_type, pd, xrcd, cq)
                made = verbs.ibv_create_srq_ex(pd.context.pointer, attr)
            self.max_wr: int = attr.attr.max_wr
            self.max_sge: int = attr.attr.max_sge
            self._post_recv = verbs.op("ibv_post_srq_recv", made.contents.context)
            return made

        self.pd, self.context, self.srq_type, self._cq = pd, pd.context, srq_type, cq
        super().__init__(make, f"{srq_type} SRQ of {pd.context.name}", parents)

    def _locks_before(self) -> list[Any]:
        return batch_locks([self._cq], f"close {self.name}")

    def _locks_after(self) -> list[Any]:
        return [self.context.destroying(self)]

    def _release(self, handle: Any) -> None:
        verbs.ibv_destroy_srq(handle)

    @exclusive
    def post_recv(self, request: RecvRequest, *more: RecvRequest) -> None:
        """Post a receive, or several as one list.

        Raises:
            PostError: ENOMEM when the queue is full, EINVAL for too many pieces; says how many were posted.
            StateError: it or a region is closed.
            ValueError: a request comes twice, or a region of another protection domain.

        Source: ibv_post_srq_recv(3).
        """
        for region in {region for one in (request, *more) for region in one.regions}:
            check_open(region, self)
        post(self._post_recv, self.pointer, (request, *more), "ibv_post_srq_recv", f"to {self.name}")

    @exclusive
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Resize it, or arm its limit.

        Args:
            max_wr: the new size; not every device can.
            srq_limit: one event, ``SRQ_LIMIT_REACHED``, comes when fewer receives are left.

        Source: ibv_modify_srq(3).
        """
        given = ((SrqAttrMask.MAX_WR, max_wr), (SrqAttrMask.LIMIT, srq_limit))
        mask = sum(int(bit) for bit, value in given if value is not None)
        attr = put(ibv_srq_attr(), max_wr=max_wr or 0, srq_limit=srq_limit or 0)
        verbs.ibv_modify_srq(self.pointer, attr, mask)
        if max_wr is not None:
            self.max_wr = self.query().max_wr

    @exclusive
    def query(self) -> SrqAttr:
        """Its sizes and its limit as they are now. Source: ibv_query_srq(3)."""
        attr = verbs.ibv_query_srq(self.pointer)
        return SrqAttr(attr.max_wr, attr.max_sge, attr.srq_limit)

    @exclusive
    def number(self) -> int:
        """The number that an XRC_SEND work request names it by, 24 bits.

        Raises:
            LibraryError: EOPNOTSUPP where the device has no XRC.

        Source: ibv_get_srq_num(3).
        """
        return verbs.ibv_get_srq_num(self.pointer)


def _fill_ex(attr: Any, srq_type: SrqType, pd: PD, xrcd: XRCD | None, cq: CQ | None) -> None:
    """What the extended verb needs besides the sizes."""
    mask = SrqInitAttrMask.TYPE | SrqInitAttrMask.PD
    put(attr, srq_type=int(srq_type), pd=pd.pointer)
    if xrcd is not None:
        attr.xrcd, mask = xrcd.pointer, mask | SrqInitAttrMask.XRCD
    if cq is not None:
        attr.cq, mask = cq.pointer, mask | SrqInitAttrMask.CQ
    if srq_type == SrqType.TM:
        mask |= SrqInitAttrMask.TM
    attr.comp_mask = int(mask)
