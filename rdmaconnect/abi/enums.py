"""The enums of `verbs.h` that a queue pair, its port and its path are described with.

Those of work and its completion are in `enums_work`, those of devices and rarer objects in `enums_device`.
Members are named as in C without the prefix that the enum's members share: `IBV_QPS_RTR` is `QpState.RTR`.
See `cenum` for values that the header does not know.
"""

from __future__ import annotations

from .cenum import CEnum, CFlag, c_enum


@c_enum("ibv_qp_type", "IBV_QPT_")
class QpType(CEnum):
    """The transport service of a queue pair. `DRIVER` is a provider's own, reached through its `dv` calls."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


@c_enum("ibv_qp_state", "IBV_QPS_")
class QpState(CEnum):
    """Where a queue pair is in its life.

    RESET, INIT, RTR (ready to receive), RTS (ready to send). SQD: the send queue drains. SQE: a send failed on UC
    or UD, and receiving goes on. ERR: all that is posted is flushed.
    """

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7


@c_enum("ibv_qp_attr_mask", "IBV_QP_")
class QpAttrMask(CFlag):
    """Which fields of `ibv_qp_attr` a call to `ibv_modify_qp` or `ibv_query_qp` is about.

    Bits 21 to 24 (SMAC, ALT_SMAC, VID, ALT_VID) were the kernel's once and were never part of libibverbs.
    """

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


@c_enum("ibv_mig_state", "IBV_MIG_")
class MigState(CEnum):
    """The state of automatic path migration: `ARMED` needs an alternate path and takes over by itself."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2


@c_enum("ibv_qp_init_attr_mask", "IBV_QP_INIT_ATTR_")
class QpInitAttrMask(CFlag):
    """Which fields after `comp_mask` in `ibv_qp_init_attr_ex` are filled in."""

    PD = 1 << 0
    XRCD = 1 << 1
    CREATE_FLAGS = 1 << 2
    MAX_TSO_HEADER = 1 << 3
    IND_TABLE = 1 << 4
    RX_HASH = 1 << 5
    SEND_OPS_FLAGS = 1 << 6


@c_enum("ibv_qp_create_flags", "IBV_QP_CREATE_")
class QpCreateFlags(CFlag):
    """`ibv_qp_init_attr_ex.create_flags`."""

    BLOCK_SELF_MCAST_LB = 1 << 1
    SCATTER_FCS = 1 << 8
    CVLAN_STRIPPING = 1 << 9
    SOURCE_QPN = 1 << 10
    PCI_WRITE_END_PADDING = 1 << 11


@c_enum("ibv_qp_create_send_ops_flags", "IBV_QP_EX_WITH_")
class QpSendOpsFlags(CFlag):
    """Which `wr_*` calls an extended queue pair must offer (`ibv_qp_init_attr_ex.send_ops_flags`).

    A call that was not asked for here may be a null pointer. Creation fails with EOPNOTSUPP if one cannot be
    had.
    """

    RDMA_WRITE = 1 << 0
    RDMA_WRITE_WITH_IMM = 1 << 1
    SEND = 1 << 2
    SEND_WITH_IMM = 1 << 3
    RDMA_READ = 1 << 4
    ATOMIC_CMP_AND_SWP = 1 << 5
    ATOMIC_FETCH_AND_ADD = 1 << 6
    LOCAL_INV = 1 << 7
    BIND_MW = 1 << 8
    SEND_WITH_INV = 1 << 9
    TSO = 1 << 10
    FLUSH = 1 << 11
    ATOMIC_WRITE = 1 << 12


@c_enum("ibv_qp_open_attr_mask", "IBV_QP_OPEN_ATTR_")
class QpOpenAttrMask(CFlag):
    """Which fields of `ibv_qp_open_attr` are filled in."""

    NUM = 1 << 0
    XRCD = 1 << 1
    CONTEXT = 1 << 2
    TYPE = 1 << 3
    RESERVED = 1 << 4


@c_enum("ibv_query_qp_data_in_order_flags", "IBV_QUERY_QP_DATA_IN_ORDER_")
class QpDataInOrderFlags(CFlag):
    """What `ibv_query_qp_data_in_order` is asked: a yes or no (0), or `QpDataInOrderCaps` (`RETURN_CAPS`)."""

    RETURN_CAPS = 1 << 0
    DEVICE_ONLY = 1 << 1


@c_enum("ibv_query_qp_data_in_order_caps", "IBV_QUERY_QP_DATA_IN_ORDER_")
class QpDataInOrderCaps(CFlag):
    """Whether a whole message, or each aligned 128 bytes of it, reaches memory in order."""

    WHOLE_MSG = 1 << 0
    ALIGNED_128_BYTES = 1 << 1


@c_enum("ibv_mtu", "IBV_")
class Mtu(CEnum):
    """A path MTU as its code. The payload in bytes is `128 << code`."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5


@c_enum("ibv_port_state", "IBV_PORT_")
class PortState(CEnum):
    """The logical state of a port; work needs `ACTIVE`. On InfiniBand a subnet manager takes it there."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


@c_enum(None, "IBV_LINK_LAYER_")
class LinkLayer(CEnum):
    """`ibv_port_attr.link_layer`; `UNSPECIFIED` comes from old kernels and means InfiniBand."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


@c_enum(None, "IBV_QPF_")
class PortFlags(CFlag):
    """`ibv_port_attr.flags`. With `GRH_REQUIRED` every address needs a GRH (`ibv_ah_attr.is_global`)."""

    GRH_REQUIRED = 1 << 0


@c_enum("ibv_gid_type", "IBV_GID_TYPE_")
class GidType(CEnum):
    """What a GID table entry can be used for. A RoCE v1 and a RoCE v2 GID cannot talk to one another."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


@c_enum("ibv_rate", "IBV_")
class Rate(CEnum):
    """A static rate limit of a path (`ibv_ah_attr.static_rate`); `RATE_MAX` is no limit."""

    RATE_MAX = 0
    RATE_2_5_GBPS = 2
    RATE_5_GBPS = 5
    RATE_10_GBPS = 3
    RATE_20_GBPS = 6
    RATE_30_GBPS = 4
    RATE_40_GBPS = 7
    RATE_60_GBPS = 8
    RATE_80_GBPS = 9
    RATE_120_GBPS = 10
    RATE_14_GBPS = 11
    RATE_56_GBPS = 12
    RATE_112_GBPS = 13
    RATE_168_GBPS = 14
    RATE_25_GBPS = 15
    RATE_100_GBPS = 16
    RATE_200_GBPS = 17
    RATE_300_GBPS = 18
    RATE_28_GBPS = 19
    RATE_50_GBPS = 20
    RATE_400_GBPS = 21
    RATE_600_GBPS = 22
    RATE_800_GBPS = 23
    RATE_1200_GBPS = 24


@c_enum("ibv_event_type", "IBV_EVENT_")
class EventType(CEnum):
    """An asynchronous event; it says which member of `ibv_async_event.element` is valid.

    `CQ_ERR`: cq. `SRQ_ERR`, `SRQ_LIMIT_REACHED`: srq. `WQ_FATAL`: wq. `QP_*`, `COMM_EST`, `SQ_DRAINED`,
    `PATH_MIG*`: qp. The others: port_num, and for `DEVICE_FATAL` nothing.
    """

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19
    DEVICE_SPEED_CHANGE = 20
