"""The structs of `verbs.h` for addresses, shared receive queues and queue pairs. See `cstruct`."""

from __future__ import annotations

from .cstruct import CStruct


class ibv_global_route(CStruct):
    """The GRH of an address: the peer's GID, and which of this port's GIDs to send from.

    `flow_label` has 20 bits. On RoCE v2 `traffic_class` is the IP DSCP and ECN byte and `hop_limit` the IP
    TTL.
    """

    _c_ = """
        union ibv_gid dgid;
        uint32_t flow_label;
        uint8_t sgid_index;
        uint8_t hop_limit;
        uint8_t traffic_class;
    """


class ibv_grh(CStruct):
    """A received global route header: 40 bytes in network byte order; on RoCE v2 over IPv4 its end is the IP header."""

    _c_ = """
        __be32 version_tclass_flow;
        __be16 paylen;
        uint8_t next_hdr;
        uint8_t hop_limit;
        union ibv_gid sgid;
        union ibv_gid dgid;
    """


class ibv_ah_attr(CStruct):
    """A path to a peer. `grh` counts if `is_global`, `dlid` on InfiniBand; `port_num` is the local port, from 1.

    `sl` is 0 to 15, `src_path_bits` the low bits of the source LID (LMC), `static_rate` a `Rate`.
    """

    _c_ = """
        struct ibv_global_route grh;
        uint16_t dlid;
        uint8_t sl;
        uint8_t src_path_bits;
        uint8_t static_rate;
        uint8_t is_global;
        uint8_t port_num;
    """


class ibv_ah(CStruct):
    """An address handle: a path that a UD send names."""

    _c_ = """
        struct ibv_context *context;
        struct ibv_pd *pd;
        uint32_t handle;
    """


class ibv_xrcd_init_attr(CStruct):
    """An XRC domain, shared among processes through the file behind `fd`, or private with `fd` -1."""

    _c_ = """
        uint32_t comp_mask;
        int fd;
        int oflags;
    """


class ibv_xrcd(CStruct):
    """An XRC domain."""

    _c_ = "struct ibv_context *context;"


class ibv_srq(CStruct):
    """A shared receive queue."""

    _c_ = """
        struct ibv_context *context;
        void *srq_context;
        struct ibv_pd *pd;
        uint32_t handle;
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t events_completed;
    """


class ibv_srq_attr(CStruct):
    """The size of a shared receive queue, and the fill level at which it reports, or 0."""

    _c_ = """
        uint32_t max_wr;
        uint32_t max_sge;
        uint32_t srq_limit;
    """


class ibv_srq_init_attr(CStruct):
    """How to make a shared receive queue; `attr` holds the actual sizes afterwards."""

    _c_ = """
        void *srq_context;
        struct ibv_srq_attr attr;
    """


class ibv_tm_cap(CStruct):
    """Sizes of a tag-matching list."""

    _c_ = """
        uint32_t max_num_tags;
        uint32_t max_ops;
    """


class ibv_srq_init_attr_ex(CStruct):
    """The same with a type; `comp_mask` is a `SrqInitAttrMask`."""

    _c_ = """
        void *srq_context;
        struct ibv_srq_attr attr;
        uint32_t comp_mask;
        enum ibv_srq_type srq_type;
        struct ibv_pd *pd;
        struct ibv_xrcd *xrcd;
        struct ibv_cq *cq;
        struct ibv_tm_cap tm_cap;
    """


class ibv_qp_cap(CStruct):
    """Sizes of a queue pair: work requests, pieces in each, inline bytes; the actual ones afterwards."""

    _c_ = """
        uint32_t max_send_wr;
        uint32_t max_recv_wr;
        uint32_t max_send_sge;
        uint32_t max_recv_sge;
        uint32_t max_inline_data;
    """


class ibv_qp_init_attr(CStruct):
    """How to make a queue pair; `sq_sig_all` not 0 signals every send."""

    _c_ = """
        void *qp_context;
        struct ibv_cq *send_cq;
        struct ibv_cq *recv_cq;
        struct ibv_srq *srq;
        struct ibv_qp_cap cap;
        enum ibv_qp_type qp_type;
        int sq_sig_all;
    """


class ibv_rwq_ind_table(CStruct):
    """A table of receive work queues that a hash spreads packets over."""

    _c_ = """
        struct ibv_context *context;
        int ind_tbl_handle;
        int ind_tbl_num;
        uint32_t comp_mask;
    """


class ibv_rwq_ind_table_init_attr(CStruct):
    """How to make one: `ind_tbl` points to 2**`log_ind_tbl_size` work queues."""

    _c_ = """
        uint32_t log_ind_tbl_size;
        struct ibv_wq **ind_tbl;
        uint32_t comp_mask;
    """


class ibv_rx_hash_conf(CStruct):
    """The hash for receive-side scaling: `rx_hash_key_len` bytes of key, the `RxHashFields` that enter it."""

    _c_ = """
        uint8_t rx_hash_function;
        uint8_t rx_hash_key_len;
        uint8_t *rx_hash_key;
        uint64_t rx_hash_fields_mask;
    """


class ibv_qp_init_attr_ex(CStruct):
    """The same and more; `comp_mask` (`QpInitAttrMask`) says which of the later fields count.

    With `QpInitAttrMask.PD` alone it is used as an `ibv_qp_init_attr`, which it begins as.
    """

    _c_ = """
        void *qp_context;
        struct ibv_cq *send_cq;
        struct ibv_cq *recv_cq;
        struct ibv_srq *srq;
        struct ibv_qp_cap cap;
        enum ibv_qp_type qp_type;
        int sq_sig_all;
        uint32_t comp_mask;
        struct ibv_pd *pd;
        struct ibv_xrcd *xrcd;
        uint32_t create_flags;
        uint16_t max_tso_header;
        struct ibv_rwq_ind_table *rwq_ind_tbl;
        struct ibv_rx_hash_conf rx_hash_conf;
        uint32_t source_qpn;
        uint64_t send_ops_flags;
    """


class ibv_qp_open_attr(CStruct):
    """Which XRC receive queue pair to open; `comp_mask` is a `QpOpenAttrMask`."""

    _c_ = """
        uint32_t comp_mask;
        uint32_t qp_num;
        struct ibv_xrcd *xrcd;
        void *qp_context;
        enum ibv_qp_type qp_type;
    """


class ibv_qp_attr(CStruct):
    """What `ibv_modify_qp` sets and `ibv_query_qp` answers; each `QpAttrMask` bit covers one or a few fields.

    `rq_psn` and `sq_psn` have 24 bits, `dest_qp_num` 24. `timeout` is a code, 0 to 31: 4.096 us * 2**timeout,
    0 waits for ever. `retry_cnt` and `rnr_retry` are 0 to 7, an `rnr_retry` of 7 repeats for ever.
    `min_rnr_timer` is a code, 0 to 31, from 655.36 ms (0) and 0.01 ms (1) to 491.52 ms (31). `max_rd_atomic`
    is what this end starts at once, `max_dest_rd_atomic` what it answers at once. `rate_limit` is in kbit/s.
    """

    _c_ = """
        enum ibv_qp_state qp_state;
        enum ibv_qp_state cur_qp_state;
        enum ibv_mtu path_mtu;
        enum ibv_mig_state path_mig_state;
        uint32_t qkey;
        uint32_t rq_psn;
        uint32_t sq_psn;
        uint32_t dest_qp_num;
        unsigned int qp_access_flags;
        struct ibv_qp_cap cap;
        struct ibv_ah_attr ah_attr;
        struct ibv_ah_attr alt_ah_attr;
        uint16_t pkey_index;
        uint16_t alt_pkey_index;
        uint8_t en_sqd_async_notify;
        uint8_t sq_draining;
        uint8_t max_rd_atomic;
        uint8_t max_dest_rd_atomic;
        uint8_t min_rnr_timer;
        uint8_t port_num;
        uint8_t timeout;
        uint8_t retry_cnt;
        uint8_t rnr_retry;
        uint8_t alt_port_num;
        uint8_t alt_timeout;
        uint32_t rate_limit;
    """


class ibv_qp_rate_limit_attr(CStruct):
    """Packet pacing: kbit/s, a burst and a typical packet in bytes."""

    _c_ = """
        uint32_t rate_limit;
        uint32_t max_burst_sz;
        uint16_t typical_pkt_sz;
        uint32_t comp_mask;
    """


class ibv_ece(CStruct):
    """Enhanced connection establishment: the vendor's IEEE OUI and its options, exchanged with the peer."""

    _c_ = """
        uint32_t vendor_id;
        uint32_t options;
        uint32_t comp_mask;
    """


class ibv_qp(CStruct):
    """A queue pair. `state` is what the library last set or was told, not what the device is in."""

    _c_ = """
        struct ibv_context *context;
        void *qp_context;
        struct ibv_pd *pd;
        struct ibv_cq *send_cq;
        struct ibv_cq *recv_cq;
        struct ibv_srq *srq;
        uint32_t handle;
        uint32_t qp_num;
        enum ibv_qp_state state;
        enum ibv_qp_type qp_type;
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t events_completed;
    """


class ibv_qp_ex(CStruct):
    """An extended queue pair: work is written between `wr_start` and `wr_complete` (0, or the errno value).

    Set `wr_id` and `wr_flags` (`SendFlags`), call one `wr_<deed>`, then its setters, and so on; `wr_abort`
    drops everything since `wr_start`. A call that was not asked for in `ibv_qp_init_attr_ex.send_ops_flags`
    may be a null pointer. `imm_data` is in network byte order.

    `wr_flush` came with rdma-core 45: it lies beyond the object of an older library. Read it only on a queue
    pair created with `QpSendOpsFlags.FLUSH`, which an older library refuses.
    """

    _c_ = """
        struct ibv_qp qp_base;
        uint64_t comp_mask;
        uint64_t wr_id;
        unsigned int wr_flags;
        void (*wr_atomic_cmp_swp)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, uint64_t compare,
                                  uint64_t swap);
        void (*wr_atomic_fetch_add)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, uint64_t add);
        void (*wr_bind_mw)(struct ibv_qp_ex *qp, struct ibv_mw *mw, uint32_t rkey,
                           const struct ibv_mw_bind_info *bind_info);
        void (*wr_local_inv)(struct ibv_qp_ex *qp, uint32_t invalidate_rkey);
        void (*wr_rdma_read)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr);
        void (*wr_rdma_write)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr);
        void (*wr_rdma_write_imm)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, __be32 imm_data);
        void (*wr_send)(struct ibv_qp_ex *qp);
        void (*wr_send_imm)(struct ibv_qp_ex *qp, __be32 imm_data);
        void (*wr_send_inv)(struct ibv_qp_ex *qp, uint32_t invalidate_rkey);
        void (*wr_send_tso)(struct ibv_qp_ex *qp, void *hdr, uint16_t hdr_sz, uint16_t mss);
        void (*wr_set_ud_addr)(struct ibv_qp_ex *qp, struct ibv_ah *ah, uint32_t remote_qpn,
                               uint32_t remote_qkey);
        void (*wr_set_xrc_srqn)(struct ibv_qp_ex *qp, uint32_t remote_srqn);
        void (*wr_set_inline_data)(struct ibv_qp_ex *qp, void *addr, size_t length);
        void (*wr_set_inline_data_list)(struct ibv_qp_ex *qp, size_t num_buf,
                                        const struct ibv_data_buf *buf_list);
        void (*wr_set_sge)(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr, uint32_t length);
        void (*wr_set_sge_list)(struct ibv_qp_ex *qp, size_t num_sge, const struct ibv_sge *sg_list);
        void (*wr_start)(struct ibv_qp_ex *qp);
        int (*wr_complete)(struct ibv_qp_ex *qp);
        void (*wr_abort)(struct ibv_qp_ex *qp);
        void (*wr_atomic_write)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
                                const void *atomic_wr);
        void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len, uint8_t type,
                         uint8_t level);
    """
