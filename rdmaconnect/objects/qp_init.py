"""What a queue pair is made with, on its way into C."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..abi import ibv_qp_init_attr
from .completion import CQ
from .fields import bits, put
from .srq import SRQ

__all__ = ["init_bytes", "put_queues"]


@lru_cache(maxsize=64)
def init_bytes(qp_type: int, sq_sig_all: bool, qp_context: int, sizes: tuple[int, ...]) -> bytes:
    """``struct ibv_qp_init_attr`` without the queues, its numbers checked: those of many queue pairs are alike."""
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
