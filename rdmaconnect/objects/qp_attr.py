"""What a queue pair has: the answers of ``ibv_query_qp`` as frozen values, named as in C."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..abi import AccessFlags, MigState, Mtu, QpState, QpType, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr
from ..agreement.path import AhAttr
from .address import ah_value

__all__ = ["Ece", "QpAttr", "QpCap", "QpInitAttr"]


@dataclass(frozen=True, slots=True)
class Ece:
    """A vendor's connection options (enhanced connection establishment), exchanged with the peer.

    Args:
        vendor_id: the vendor's IEEE OUI, 24 bits.
        options: its options, 32 bits.
    """

    vendor_id: int
    options: int


@dataclass(frozen=True, slots=True)
class QpCap:
    """Sizes of a queue pair.

    Args:
        max_send_wr, max_recv_wr: outstanding work requests on each side.
        max_send_sge, max_recv_sge: pieces in each.
        max_inline_data: bytes that can be sent inline.
    """

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int

    @classmethod
    def of(cls, cap: ibv_qp_cap) -> QpCap:
        """The value of a ``struct ibv_qp_cap``."""
        return cls(*(getattr(cap, field.name) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class QpAttr:
    """``struct ibv_qp_attr`` as a value; its units and ranges are told there.

    ``sq_psn`` and ``rq_psn`` move on with the traffic. Of fields that the queue pair's type or the device
    does not know the value means nothing.
    """

    qp_state: QpState
    cur_qp_state: QpState
    path_mtu: Mtu
    path_mig_state: MigState
    qkey: int = field(repr=False)
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: AccessFlags
    cap: QpCap
    ah_attr: AhAttr
    alt_ah_attr: AhAttr
    pkey_index: int
    alt_pkey_index: int
    en_sqd_async_notify: int
    sq_draining: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    alt_port_num: int
    alt_timeout: int
    rate_limit: int

    @classmethod
    def of(cls, attr: ibv_qp_attr) -> QpAttr:
        """The value of a ``struct ibv_qp_attr``."""
        return cls(*(_KINDS.get(field.name, int)(getattr(attr, field.name)) for field in fields(cls)))


_KINDS: dict[str, Any] = {
    "qp_state": QpState,
    "cur_qp_state": QpState,
    "path_mtu": Mtu,
    "path_mig_state": MigState,
    "qp_access_flags": AccessFlags,
    "cap": QpCap.of,
    "ah_attr": ah_value,
    "alt_ah_attr": ah_value,
}


@dataclass(frozen=True, slots=True)
class QpInitAttr:
    """What of ``struct ibv_qp_init_attr`` can be asked of a queue pair.

    Args:
        qp_type: its type.
        cap: its sizes.
        sq_sig_all: whether every send gives a completion.
        has_srq: whether it receives from a shared queue.
    """

    qp_type: QpType
    cap: QpCap
    sq_sig_all: bool
    has_srq: bool

    @classmethod
    def of(cls, attr: ibv_qp_init_attr) -> QpInitAttr:
        """The value of a ``struct ibv_qp_init_attr``."""
        return cls(QpType(attr.qp_type), QpCap.of(attr.cap), bool(attr.sq_sig_all), bool(attr.srq))
