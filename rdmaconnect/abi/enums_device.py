"""The enums of `verbs.h` for what devices and ports can do, and for the rarer objects; see `enums`."""

from __future__ import annotations

from .cenum import CEnum, CFlag, c_enum


@c_enum("ibv_node_type", "IBV_NODE_")
class NodeType(CEnum):
    """What kind of node a device is; `CA` covers InfiniBand and RoCE, `RNIC` is iWARP."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


@c_enum("ibv_transport_type", "IBV_TRANSPORT_")
class TransportType(CEnum):
    """The wire protocol family; RoCE counts as `IB`."""

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


@c_enum("ibv_device_cap_flags", "IBV_DEVICE_")
class DeviceCapFlags(CFlag):
    """`ibv_device_attr.device_cap_flags` (the low 32 bits) and `ibv_device_attr_ex.device_cap_flags_ex`.

    The bits from 34 up are macros in the header, because a C enum is 32 bits wide on some systems.
    """

    RESIZE_MAX_WR = 1 << 0
    BAD_PKEY_CNTR = 1 << 1
    BAD_QKEY_CNTR = 1 << 2
    RAW_MULTI = 1 << 3
    AUTO_PATH_MIG = 1 << 4
    CHANGE_PHY_PORT = 1 << 5
    UD_AV_PORT_ENFORCE = 1 << 6
    CURR_QP_STATE_MOD = 1 << 7
    SHUTDOWN_PORT = 1 << 8
    INIT_TYPE = 1 << 9
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID = 1 << 11
    RC_RNR_NAK_GEN = 1 << 12
    SRQ_RESIZE = 1 << 13
    N_NOTIFY_CQ = 1 << 14
    MEM_WINDOW = 1 << 17
    UD_IP_CSUM = 1 << 18
    XRC = 1 << 20
    MEM_MGT_EXTENSIONS = 1 << 21
    MEM_WINDOW_TYPE_2A = 1 << 23
    MEM_WINDOW_TYPE_2B = 1 << 24
    RC_IP_CSUM = 1 << 25
    RAW_IP_CSUM = 1 << 26
    MANAGED_FLOW_STEERING = 1 << 29
    RAW_SCATTER_FCS = 1 << 34
    PCI_WRITE_END_PADDING = 1 << 36
    CC_DMA_BOUNCE = 1 << 41


@c_enum("ibv_atomic_cap", "IBV_ATOMIC_")
class AtomicCap(CEnum):
    """Atomics: none; atomic among accesses through this device; atomic among all, the CPU's included."""

    NONE = 0
    HCA = 1
    GLOB = 2


@c_enum("ibv_pci_atomic_op_size", "IBV_PCI_ATOMIC_")
class PciAtomicOpSize(CFlag):
    """Operand sizes, in bytes, that a PCI atomic can have (`ibv_pci_atomic_caps`)."""

    OPERATION_4_BYTE_SIZE_SUP = 1 << 0
    OPERATION_8_BYTE_SIZE_SUP = 1 << 1
    OPERATION_16_BYTE_SIZE_SUP = 1 << 2


@c_enum("ibv_odp_general_caps", "IBV_ODP_")
class OdpGeneralCaps(CFlag):
    """On-demand paging: at all; and for a region that is the whole address space."""

    SUPPORT = 1 << 0
    SUPPORT_IMPLICIT = 1 << 1


@c_enum("ibv_odp_transport_cap_bits", "IBV_ODP_SUPPORT_")
class OdpTransportCaps(CFlag):
    """Which operations of a transport may touch a region that is paged on demand."""

    SEND = 1 << 0
    RECV = 1 << 1
    WRITE = 1 << 2
    READ = 1 << 3
    ATOMIC = 1 << 4
    SRQ_RECV = 1 << 5
    FLUSH = 1 << 6
    ATOMIC_WRITE = 1 << 7


@c_enum("ibv_raw_packet_caps", "IBV_RAW_PACKET_CAP_")
class RawPacketCaps(CFlag):
    """What a RAW_PACKET queue pair can be asked for (`ibv_device_attr_ex.raw_packet_caps`)."""

    CVLAN_STRIPPING = 1 << 0
    SCATTER_FCS = 1 << 1
    IP_CSUM = 1 << 2
    DELAY_DROP = 1 << 3


@c_enum("ibv_rx_hash_function_flags", "IBV_RX_HASH_FUNC_")
class RxHashFunctionFlags(CFlag):
    """Hash functions for receive-side scaling."""

    TOEPLITZ = 1 << 0


@c_enum("ibv_rx_hash_fields", "IBV_RX_HASH_")
class RxHashFields(CFlag):
    """Packet fields that enter the hash; IPv4 excludes IPv6 and TCP excludes UDP."""

    SRC_IPV4 = 1 << 0
    DST_IPV4 = 1 << 1
    SRC_IPV6 = 1 << 2
    DST_IPV6 = 1 << 3
    SRC_PORT_TCP = 1 << 4
    DST_PORT_TCP = 1 << 5
    SRC_PORT_UDP = 1 << 6
    DST_PORT_UDP = 1 << 7
    IPSEC_SPI = 1 << 8
    INNER = 1 << 31


@c_enum("ibv_tm_cap_flags", "IBV_TM_CAP_")
class TmCaps(CFlag):
    """Tag matching (`ibv_tm_caps.flags`)."""

    RC = 1 << 0


@c_enum("ibv_values_mask", "IBV_VALUES_MASK_")
class ValuesMask(CFlag):
    """What `ibv_query_rt_values_ex` is asked for and has answered."""

    RAW_CLOCK = 1 << 0
    RESERVED = 1 << 1


@c_enum("ibv_fork_status", "IBV_FORK_")
class ForkStatus(CEnum):
    """Whether `fork()` is safe: not set up; `ibv_fork_init` was called; the kernel makes it needless."""

    DISABLED = 0
    ENABLED = 1
    UNNEEDED = 2


@c_enum("ibv_port_cap_flags", "IBV_PORT_")
class PortCapFlags(CFlag):
    """`ibv_port_attr.port_cap_flags`: the InfiniBand PortInfo CapabilityMask, and `IP_BASED_GIDS` on RoCE."""

    SM = 1 << 1
    NOTICE_SUP = 1 << 2
    TRAP_SUP = 1 << 3
    OPT_IPD_SUP = 1 << 4
    AUTO_MIGR_SUP = 1 << 5
    SL_MAP_SUP = 1 << 6
    MKEY_NVRAM = 1 << 7
    PKEY_NVRAM = 1 << 8
    LED_INFO_SUP = 1 << 9
    SYS_IMAGE_GUID_SUP = 1 << 11
    PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12
    EXTENDED_SPEEDS_SUP = 1 << 14
    CAP_MASK2_SUP = 1 << 15
    CM_SUP = 1 << 16
    SNMP_TUNNEL_SUP = 1 << 17
    REINIT_SUP = 1 << 18
    DEVICE_MGMT_SUP = 1 << 19
    VENDOR_CLASS_SUP = 1 << 20
    DR_NOTICE_SUP = 1 << 21
    CAP_MASK_NOTICE_SUP = 1 << 22
    BOOT_MGMT_SUP = 1 << 23
    LINK_LATENCY_SUP = 1 << 24
    CLIENT_REG_SUP = 1 << 25
    IP_BASED_GIDS = 1 << 26


@c_enum("ibv_port_cap_flags2", "IBV_PORT_")
class PortCapFlags2(CFlag):
    """`ibv_port_attr.port_cap_flags2`: the CapabilityMask2; valid with `PortCapFlags.CAP_MASK2_SUP`."""

    SET_NODE_DESC_SUP = 1 << 0
    INFO_EXT_SUP = 1 << 1
    VIRT_SUP = 1 << 2
    SWITCH_PORT_STATE_TABLE_SUP = 1 << 3
    LINK_WIDTH_2X_SUP = 1 << 4
    LINK_SPEED_HDR_SUP = 1 << 5
    LINK_SPEED_NDR_SUP = 1 << 10
    LINK_SPEED_XDR_SUP = 1 << 12


@c_enum("ibv_srq_type", "IBV_SRQT_")
class SrqType(CEnum):
    """A shared receive queue: plain, for XRC, or with tag matching."""

    BASIC = 0
    XRC = 1
    TM = 2


@c_enum("ibv_srq_attr_mask", "IBV_SRQ_")
class SrqAttrMask(CFlag):
    """What `ibv_modify_srq` changes: the size, or the fill level at which `SRQ_LIMIT_REACHED` fires, once."""

    MAX_WR = 1 << 0
    LIMIT = 1 << 1


@c_enum("ibv_srq_init_attr_mask", "IBV_SRQ_INIT_ATTR_")
class SrqInitAttrMask(CFlag):
    """Which fields after `comp_mask` in `ibv_srq_init_attr_ex` are filled in."""

    TYPE = 1 << 0
    PD = 1 << 1
    XRCD = 1 << 2
    CQ = 1 << 3
    TM = 1 << 4
    RESERVED = 1 << 5


@c_enum("ibv_ops_wr_opcode", "IBV_WR_")
class OpsWrOpcode(CEnum):
    """What `ibv_post_srq_ops` does to the tag-matching list."""

    TAG_ADD = 0
    TAG_DEL = 1
    TAG_SYNC = 2


@c_enum("ibv_ops_flags", "IBV_OPS_")
class OpsFlags(CFlag):
    """`ibv_ops_wr.flags`."""

    SIGNALED = 1 << 0
    TM_SYNC = 1 << 1


@c_enum("ibv_xrcd_init_attr_mask", "IBV_XRCD_INIT_ATTR_")
class XrcdInitAttrMask(CFlag):
    """Which fields of `ibv_xrcd_init_attr` are filled in."""

    FD = 1 << 0
    OFLAGS = 1 << 1
    RESERVED = 1 << 2


@c_enum("ibv_parent_domain_init_attr_mask", "IBV_PARENT_DOMAIN_INIT_ATTR_")
class ParentDomainInitAttrMask(CFlag):
    """Which fields of `ibv_parent_domain_init_attr` are filled in."""

    ALLOCATORS = 1 << 0
    PD_CONTEXT = 1 << 1
    ALLOW_CC_UNPROTECTED_ALLOC = 1 << 2


@c_enum("ib_uverbs_advise_mr_advice", "IBV_ADVISE_MR_ADVICE_")
class AdviseMrAdvice(CEnum):
    """What `ibv_advise_mr` is told about a range of a region that is paged on demand."""

    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2


@c_enum("ib_uverbs_advise_mr_flag", "IBV_ADVISE_MR_FLAG_")
class AdviseMrFlags(CFlag):
    """`FLUSH`: return only after the advice was carried out."""

    FLUSH = 1 << 0


@c_enum("ibv_dm_mask", "IBV_DM_MASK_")
class DmMask(CFlag):
    """Which fields after `comp_mask` in `ibv_dm` are valid."""

    HANDLE = 1 << 0


@c_enum("ibv_wq_type", "IBV_WQT_")
class WqType(CEnum):
    """A work queue outside a queue pair is always a receive queue."""

    RQ = 0


@c_enum("ibv_wq_state", "IBV_WQS_")
class WqState(CEnum):
    """Where such a work queue is in its life."""

    RESET = 0
    RDY = 1
    ERR = 2
    UNKNOWN = 3


@c_enum("ibv_wq_init_attr_mask", "IBV_WQ_INIT_ATTR_")
class WqInitAttrMask(CFlag):
    """Which fields after `comp_mask` in `ibv_wq_init_attr` are filled in."""

    FLAGS = 1 << 0
    RESERVED = 1 << 1


@c_enum("ibv_wq_attr_mask", "IBV_WQ_ATTR_")
class WqAttrMask(CFlag):
    """What `ibv_modify_wq` changes."""

    STATE = 1 << 0
    CURR_STATE = 1 << 1
    FLAGS = 1 << 2
    RESERVED = 1 << 3


@c_enum("ibv_wq_flags", "IBV_WQ_FLAGS_")
class WqFlags(CFlag):
    """`ibv_wq_init_attr.create_flags`."""

    CVLAN_STRIPPING = 1 << 0
    SCATTER_FCS = 1 << 1
    DELAY_DROP = 1 << 2
    PCI_WRITE_END_PADDING = 1 << 3
    RESERVED = 1 << 4
