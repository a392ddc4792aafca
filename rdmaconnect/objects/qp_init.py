"""What a queue pair is made with, on its way into C."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..abi import QpType, ibv_qp_init_attr
from .completion import CQ
from .fields import bits, put
from .srq import SRQ

__all__ = ["init_attr", "put_queues"]


def init_attr(
    qp_type: QpType,
    max_send_wr: int,
    max_recv_wr: int,
    max_send_sge: int = 1,
    max_recv_sge: int = 1,
    max_inline_data: int = 0,
    *,
    sq_sig_all: int = False,
    qp_context: int = 0,
) -> ibv_qp_init_attr:
    """``struct ibv_qp_init_attr`` without the queues.

    Args:
        qp_type, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data, sq_sig_all, qp_context: as of
            :class:`~rdmaconnect.objects.queuepair.QueuePair`.

    Raises:
        ValueError: a number that its field cannot hold.
    """
    sizes = (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data)
    return ibv_qp_init_attr.from_buffer_copy(_bytes(int(qp_type), bool(sq_sig_all), qp_context, sizes))


@lru_cache(maxsize=64)
def _bytes(qp_type: int, sq_sig_all: bool, qp_context: int, sizes: tuple[int, ...]) -> bytes:
    """The same, its numbers checked: those of many queue pairs are alike."""
    init = put(ibv_qp_init_attr(), qp_type=qp_type, sq_sig_all=int(sq_sig_all))
    init.qp_context = bits("qp_context", qp_context, 64)
    names = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
    put(init.cap, **dict(zip(names, sizes, strict=True)))
    return bytes(init)


def put_queues(init: Any, send_cq: CQ | None, recv_cq: CQ | None, srq: SRQ | None) -> None:
    """Where completions go and receives come from."""
    if send_cq is not None:
        init.send_cq = send_cq.pointer
    if recv_cq is not None:
        init.recv_cq = recv_cq.pointer
    if srq is not None:
        init.srq = srq.pointer
