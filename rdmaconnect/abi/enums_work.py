"""The enums of `verbs.h` for memory, work requests and completions, in the manner of `enums`."""

from __future__ import annotations

from .cenum import CEnum, CFlag, c_enum


@c_enum("ibv_access_flags", "IBV_ACCESS_")
class AccessFlags(CFlag):
    """What may be done to a memory region, and what a queue pair lets its peer do.

    `REMOTE_WRITE` and `REMOTE_ATOMIC` on a region need `LOCAL_WRITE` as well. `RELAXED_ORDERING` is
    optional: the library drops it without a word where the kernel does not know it.
    """

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    FLUSH_GLOBAL = 1 << 8
    FLUSH_PERSISTENT = 1 << 9
    RELAXED_ORDERING = 1 << 20


@c_enum("ibv_wr_opcode", "IBV_WR_")
class WrOpcode(CEnum):
    """What a send work request does (`ibv_send_wr.opcode`)."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    DRIVER1 = 11
    FLUSH = 14
    ATOMIC_WRITE = 15


@c_enum("ibv_send_flags", "IBV_SEND_")
class SendFlags(CFlag):
    """`ibv_send_wr.send_flags` and `ibv_qp_ex.wr_flags`.

    `INLINE` copies the data at posting time, up to `ibv_qp_cap.max_inline_data` bytes; the buffer is free at
    once.
    """

    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


@c_enum("ibv_placement_type", "IBV_FLUSH_")
class PlacementType(CFlag):
    """How far a flush pushes the data: visible to everyone, or persistent."""

    GLOBAL = 1 << 0
    PERSISTENT = 1 << 1


@c_enum("ibv_selectivity_level", "IBV_FLUSH_")
class SelectivityLevel(CEnum):
    """What a flush covers: an address range, or the whole memory region."""

    RANGE = 0
    MR = 1


@c_enum("ibv_mw_type", "IBV_MW_")
class MwType(CEnum):
    """Type 1 windows are bound by `ibv_bind_mw`, type 2 by a `BIND_MW` work request."""

    TYPE_1 = 1
    TYPE_2 = 2


@c_enum("ibv_mr_init_attr_mask", "IBV_REG_MR_MASK_")
class MrInitAttrMask(CFlag):
    """Which fields of `ibv_mr_init_attr` are filled in."""

    IOVA = 1 << 0
    ADDR = 1 << 1
    FD = 1 << 2
    FD_OFFSET = 1 << 3
    DMAH = 1 << 4
    BUF = 1 << 5


@c_enum("ibv_rereg_mr_flags", "IBV_REREG_MR_")
class ReregMrFlags(CFlag):
    """What `ibv_rereg_mr` changes; `FLAGS_SUPPORTED` is all of it."""

    CHANGE_TRANSLATION = 1 << 0
    CHANGE_PD = 1 << 1
    CHANGE_ACCESS = 1 << 2
    FLAGS_SUPPORTED = 7


@c_enum("ibv_rereg_mr_err_code", "IBV_REREG_MR_")
class ReregMrError(CEnum):
    """What `ibv_rereg_mr` returns on failure: whether the old region, the new one or neither is usable."""

    ERR_INPUT = -1
    ERR_DONT_FORK_NEW = -2
    ERR_DO_FORK_OLD = -3
    ERR_CMD = -4
    ERR_CMD_AND_DO_FORK_NEW = -5


@c_enum("ibv_wc_status", "IBV_WC_")
class WcStatus(CEnum):
    """How a work request ended. A failure takes an RC queue pair to ERR, and the rest of its work is flushed.

    With a status other than SUCCESS only `wr_id`, `status`, `qp_num` and `vendor_err` of a completion are valid.
    """

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


@c_enum("ibv_wc_opcode", "IBV_WC_")
class WcOpcode(CEnum):
    """What has completed. A receive has bit 7 set: `opcode & WcOpcode.RECV`."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 1 << 7
    RECV_RDMA_WITH_IMM = 129
    TM_ADD = 130
    TM_DEL = 131
    TM_SYNC = 132
    TM_RECV = 133
    TM_NO_TAG = 134
    DRIVER1 = 135
    DRIVER2 = 136
    DRIVER3 = 137


@c_enum("ibv_wc_flags", "IBV_WC_")
class WcFlags(CFlag):
    """`ibv_wc.wc_flags`. `GRH`: the first 40 bytes of a UD receive hold the global route header."""

    GRH = 1 << 0
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3
    TM_SYNC_REQ = 1 << 4
    TM_MATCH = 1 << 5
    TM_DATA_VALID = 1 << 6


@c_enum("ibv_create_cq_wc_flags", "IBV_WC_EX_WITH_")
class CqWcFlags(CFlag):
    """Which `read_*` calls an extended completion queue must offer (`ibv_cq_init_attr_ex.wc_flags`)."""

    BYTE_LEN = 1 << 0
    IMM = 1 << 1
    QP_NUM = 1 << 2
    SRC_QP = 1 << 3
    SLID = 1 << 4
    SL = 1 << 5
    DLID_PATH_BITS = 1 << 6
    COMPLETION_TIMESTAMP = 1 << 7
    CVLAN = 1 << 8
    FLOW_TAG = 1 << 9
    TM_INFO = 1 << 10
    COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11


@c_enum("ibv_cq_init_attr_mask", "IBV_CQ_INIT_ATTR_MASK_")
class CqInitAttrMask(CFlag):
    """Which fields after `comp_mask` in `ibv_cq_init_attr_ex` are filled in."""

    FLAGS = 1 << 0
    PD = 1 << 1


@c_enum("ibv_create_cq_attr_flags", "IBV_CREATE_CQ_ATTR_")
class CreateCqAttrFlags(CFlag):
    """`ibv_cq_init_attr_ex.flags`: no locking in the provider; no check for an overrun."""

    SINGLE_THREADED = 1 << 0
    IGNORE_OVERRUN = 1 << 1


@c_enum("ibv_cq_attr_mask", "IBV_CQ_ATTR_")
class CqAttrMask(CFlag):
    """What `ibv_modify_cq` changes."""

    MODERATE = 1 << 0
    RESERVED = 1 << 1
