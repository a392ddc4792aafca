"""Tag matching: buffers of a shared receive queue that wait for messages with a certain tag."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import pointer
from typing import Any

from .. import verbs
from ..abi import OpsFlags, OpsWrOpcode, SrqType, ibv_ops_wr, ibv_sge
from ..errors import PostError
from .fields import put
from .memory import Sge
from .operations import check_open, local, regions
from .srq import SRQ
from .work_request import fill_sges

__all__ = ["TagList"]


class TagList:
    """The tagged buffers of a shared receive queue of type TM.

    Each change gives a completion on the queue's CQ (``TM_ADD``, ``TM_DEL``, ``TM_SYNC``) if it is ``signaled``. A
    message with a tag that fits comes as ``TM_RECV``, any other one takes a plain receive (``TM_NO_TAG``): that is
    unexpected, and the device adds no buffer until it is told that all such messages were handled.

    Args:
        srq: the queue.

    Raises:
        ValueError: a queue of another type.

    Source: ibv_post_srq_ops(3).
    """

    def __init__(self, srq: SRQ) -> None:
        if srq.srq_type != SrqType.TM:
            raise ValueError(f"list the tagged buffers of {srq.name}: it has none. Make it of type TM")
        self.srq = srq

    def add(
        self,
        wr_id: int,
        tag: int,
        sge: Sge | Sequence[Sge],
        *,
        mask: int = 2**64 - 1,
        recv_wr_id: int = 0,
        unexpected: int | None = None,
        signaled: bool = True,
    ) -> int:
        """Add a buffer.

        Args:
            wr_id: of the completion of this change, 64 bits.
            tag: what a message's tag must be in the bits of ``mask``; 64 bits each.
            sge: the buffer, a piece or a list of pieces.
            recv_wr_id: of the completion of the message, 64 bits.
            unexpected: how many unexpected messages were handled in all, 32 bits; None leaves that open.
            signaled: whether it gives a completion.

        Returns:
            Its handle, for :meth:`delete`.

        Raises:
            PostError: the list is full, among others.
            LibraryError: EOPNOTSUPP where the provider has no tag matching (mlx5 does).
        """
        pieces = local(sge, None)[0]
        for region in set(regions(pieces)):
            check_open(region, self.srq)
        array = (ibv_sge * len(pieces))()
        fill_sges(array, pieces)
        wr = ibv_ops_wr(opcode=int(OpsWrOpcode.TAG_ADD))
        wr.tm.add.sg_list = array
        put(wr.tm.add, recv_wr_id=recv_wr_id, num_sge=len(pieces), tag=tag, mask=mask)
        self._post(wr, wr_id, unexpected, signaled)
        return int(wr.tm.handle)

    def delete(self, wr_id: int, handle: int, *, unexpected: int | None = None, signaled: bool = True) -> None:
        """Take a buffer out; its completion is ``TM_ERR`` where a message has just taken it.

        Args:
            handle: as :meth:`add` gave it.
            wr_id, unexpected, signaled: as there.
        """
        wr = ibv_ops_wr(opcode=int(OpsWrOpcode.TAG_DEL))
        put(wr.tm, handle=handle)
        self._post(wr, wr_id, unexpected, signaled)

    def sync(self, wr_id: int, unexpected: int, *, signaled: bool = True) -> None:
        """Only say how many unexpected messages were handled, as a completion with ``TM_SYNC_REQ`` asks for.

        Args:
            wr_id, unexpected, signaled: as :meth:`add`.
        """
        self._post(ibv_ops_wr(opcode=int(OpsWrOpcode.TAG_SYNC)), wr_id, unexpected, signaled)

    def _post(self, wr: Any, wr_id: int, unexpected: int | None, signaled: bool) -> None:
        flags = OpsFlags.SIGNALED if signaled else OpsFlags(0)
        if unexpected is not None:
            put(wr.tm, unexpected_cnt=unexpected)
            flags |= OpsFlags.TM_SYNC
        put(wr, wr_id=wr_id, flags=int(flags))
        with self.srq.lock:
            number, _ = verbs.ibv_post_srq_ops(self.srq.pointer, pointer(wr))
        if number:
            doing = f"{OpsWrOpcode(wr.opcode)} (wr_id {wr_id}) in the tag list of {self.srq.name}"
            raise PostError("ibv_post_srq_ops", number, doing, posted=0, wr_id=wr_id)
