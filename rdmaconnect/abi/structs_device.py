"""The structs of `verbs.h` for devices, ports and protection domains. See `cstruct` for how to read them."""

from __future__ import annotations

from .cstruct import CStruct, CUnion


class ibv_gid(CUnion):
    """A 128-bit port address in network byte order: `bytes(gid.raw)` suits `ipaddress.IPv6Address`."""

    _c_ = """
        uint8_t raw[16];
        struct {
            __be64 subnet_prefix;
            __be64 interface_id;
        } global;
    """


class ibv_gid_entry(CStruct):
    """One entry of a port's GID table. `gid_type` is a `GidType`, `ndev_ifindex` the netdev's index or 0."""

    _c_ = """
        union ibv_gid gid;
        uint32_t gid_index;
        uint32_t port_num;
        uint32_t gid_type;
        uint32_t ndev_ifindex;
    """


class _ibv_device_ops(CStruct):
    """Obsolete; only its size matters."""

    _c_ = """
        struct ibv_context *(*_dummy1)(struct ibv_device *device, int cmd_fd);
        void (*_dummy2)(struct ibv_context *context);
    """


class ibv_device(CStruct):
    """One entry of the device list. The library owns it, until `ibv_free_device_list` if it was not opened.

    `name` is "mlx5_0", `dev_name` "uverbs0", the paths are in sysfs: null-terminated bytes.
    """

    _c_ = """
        struct _ibv_device_ops _ops;
        enum ibv_node_type node_type;
        enum ibv_transport_type transport_type;
        char name[64];
        char dev_name[64];
        char dev_path[256];
        char ibdev_path[256];
    """


class ibv_device_attr(CStruct):
    """What a device can do, filled in by `ibv_query_device`.

    `fw_ver` is text. The GUIDs are in network byte order. `page_size_cap` has bit n set for pages of 2**n
    bytes. `max_qp_rd_atom` and `max_qp_init_rd_atom` bound a queue pair's `max_dest_rd_atomic` and
    `max_rd_atomic`. `local_ca_ack_delay` is a code: 4.096 us * 2**code. `phys_port_cnt` stops at 255, ports
    count from 1.
    """

    _c_ = """
        char fw_ver[64];
        __be64 node_guid;
        __be64 sys_image_guid;
        uint64_t max_mr_size;
        uint64_t page_size_cap;
        uint32_t vendor_id;
        uint32_t vendor_part_id;
        uint32_t hw_ver;
        int max_qp;
        int max_qp_wr;
        unsigned int device_cap_flags;
        int max_sge;
        int max_sge_rd;
        int max_cq;
        int max_cqe;
        int max_mr;
        int max_pd;
        int max_qp_rd_atom;
        int max_ee_rd_atom;
        int max_res_rd_atom;
        int max_qp_init_rd_atom;
        int max_ee_init_rd_atom;
        enum ibv_atomic_cap atomic_cap;
        int max_ee;
        int max_rdd;
        int max_mw;
        int max_raw_ipv6_qp;
        int max_raw_ethy_qp;
        int max_mcast_grp;
        int max_mcast_qp_attach;
        int max_total_mcast_qp_attach;
        int max_ah;
        int max_fmr;
        int max_map_per_fmr;
        int max_srq;
        int max_srq_wr;
        int max_srq_sge;
        uint16_t max_pkeys;
        uint8_t local_ca_ack_delay;
        uint8_t phys_port_cnt;
    """


class ibv_query_device_ex_input(CStruct):
    """Reserved for the future: `comp_mask` must be 0, and NULL may be passed instead."""

    _c_ = "uint32_t comp_mask;"


class ibv_odp_caps(CStruct):
    """On-demand paging: `general_caps` are `OdpGeneralCaps`, the others `OdpTransportCaps`."""

    _c_ = """
        uint64_t general_caps;
        struct {
            uint32_t rc_odp_caps;
            uint32_t uc_odp_caps;
            uint32_t ud_odp_caps;
        } per_transport_caps;
    """


class ibv_tso_caps(CStruct):
    """TCP segmentation: the largest payload in bytes, and a bit `1 << QpType` for each type that can."""

    _c_ = """
        uint32_t max_tso;
        uint32_t supported_qpts;
    """


class ibv_rss_caps(CStruct):
    """Receive-side scaling: bits `1 << QpType`, table limits, `RxHashFields`, `RxHashFunctionFlags`."""

    _c_ = """
        uint32_t supported_qpts;
        uint32_t max_rwq_indirection_tables;
        uint32_t max_rwq_indirection_table_size;
        uint64_t rx_hash_fields_mask;
        uint8_t rx_hash_function;
    """


class ibv_packet_pacing_caps(CStruct):
    """Rate limits of a queue pair, in kbit/s, and a bit `1 << QpType` for each type that can."""

    _c_ = """
        uint32_t qp_rate_limit_min;
        uint32_t qp_rate_limit_max;
        uint32_t supported_qpts;
    """


class ibv_tm_caps(CStruct):
    """Tag matching: limits, and `TmCaps` in `flags`."""

    _c_ = """
        uint32_t max_rndv_hdr_size;
        uint32_t max_num_tags;
        uint32_t flags;
        uint32_t max_ops;
        uint32_t max_sge;
    """


class ibv_cq_moderation_caps(CStruct):
    """Limits of `ibv_moderate_cq`; the period is in microseconds."""

    _c_ = """
        uint16_t max_cq_count;
        uint16_t max_cq_period;
    """


class ibv_pci_atomic_caps(CStruct):
    """Operand sizes of PCI atomics, each a `PciAtomicOpSize`."""

    _c_ = """
        uint16_t fetch_add;
        uint16_t swap;
        uint16_t compare_swap;
    """


class ibv_device_attr_ex(CStruct):
    """`ibv_device_attr` and what came later; a field that the library or the device does not know stays 0.

    `completion_timestamp_mask` has the bits that a timestamp can use, `hca_core_clock` is in kHz,
    `max_dm_size` in bytes, `raw_packet_caps` is a `RawPacketCaps`, `xrc_odp_caps` an `OdpTransportCaps`,
    `phys_port_cnt_ex` the port count without the limit of 255.
    """

    _c_ = """
        struct ibv_device_attr orig_attr;
        uint32_t comp_mask;
        struct ibv_odp_caps odp_caps;
        uint64_t completion_timestamp_mask;
        uint64_t hca_core_clock;
        uint64_t device_cap_flags_ex;
        struct ibv_tso_caps tso_caps;
        struct ibv_rss_caps rss_caps;
        uint32_t max_wq_type_rq;
        struct ibv_packet_pacing_caps packet_pacing_caps;
        uint32_t raw_packet_caps;
        struct ibv_tm_caps tm_caps;
        struct ibv_cq_moderation_caps cq_mod_caps;
        uint64_t max_dm_size;
        struct ibv_pci_atomic_caps pci_atomic_caps;
        uint32_t xrc_odp_caps;
        uint32_t phys_port_cnt_ex;
    """


class ibv_port_attr(CStruct):
    """The state of a port, filled in by `verbs_context.query_port` (pass `sizeof`).

    `max_mtu` and `active_mtu` are `Mtu` codes, `max_msg_sz` is in bytes, `lid` counts on InfiniBand only,
    `subnet_timeout` is a code, `active_width` (1: 1x, 2: 4x, 4: 8x, 8: 12x, 16: 2x) and `active_speed` are
    PortInfo codes, `phys_state` 5 is LinkUp, `link_layer` is a `LinkLayer`, `flags` a `PortFlags`.

    `active_speed_ex` came with rdma-core 49 and reads as 0 on an older library; where it is not 0 it replaces
    `active_speed`, which is too narrow for 256 (XDR).
    """

    _c_ = """
        enum ibv_port_state state;
        enum ibv_mtu max_mtu;
        enum ibv_mtu active_mtu;
        int gid_tbl_len;
        uint32_t port_cap_flags;
        uint32_t max_msg_sz;
        uint32_t bad_pkey_cntr;
        uint32_t qkey_viol_cntr;
        uint16_t pkey_tbl_len;
        uint16_t lid;
        uint16_t sm_lid;
        uint8_t lmc;
        uint8_t max_vl_num;
        uint8_t sm_sl;
        uint8_t subnet_timeout;
        uint8_t init_type_reply;
        uint8_t active_width;
        uint8_t active_speed;
        uint8_t phys_state;
        uint8_t link_layer;
        uint8_t flags;
        uint16_t port_cap_flags2;
        uint32_t active_speed_ex;
    """


class ibv_async_event(CStruct):
    """An event on a device's `async_fd`; `event_type` (an `EventType`) says which of `element` is meant."""

    _c_ = """
        union {
            struct ibv_cq *cq;
            struct ibv_qp *qp;
            struct ibv_srq *srq;
            struct ibv_wq *wq;
            int port_num;
        } element;
        enum ibv_event_type event_type;
    """


class timespec(CStruct):
    """Seconds and nanoseconds; a device's raw clock puts its ticks into `tv_nsec` and 0 into `tv_sec`."""

    _c_ = """
        long tv_sec;
        long tv_nsec;
    """


class ibv_values_ex(CStruct):
    """What `ibv_query_rt_values_ex` answers; `comp_mask` (a `ValuesMask`) goes in and comes out."""

    _c_ = """
        uint32_t comp_mask;
        struct timespec raw_clock;
    """


class ibv_pd(CStruct):
    """A protection domain."""

    _c_ = """
        struct ibv_context *context;
        uint32_t handle;
    """


class ibv_td_init_attr(CStruct):
    """Reserved for the future: `comp_mask` must be 0."""

    _c_ = "uint32_t comp_mask;"


class ibv_td(CStruct):
    """A thread domain: the promise that one thread at a time uses what is made in it."""

    _c_ = "struct ibv_context *context;"


class ibv_parent_domain_init_attr(CStruct):
    """A protection domain with a thread domain, or with allocators of its own (`ParentDomainInitAttrMask`).

    Keep the Python function objects of `alloc` and `free` alive for as long as the domain.
    """

    _c_ = """
        struct ibv_pd *pd;
        struct ibv_td *td;
        uint32_t comp_mask;
        void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
                       uint64_t resource_type);
        void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
        void *pd_context;
    """
