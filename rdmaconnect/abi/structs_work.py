"""The structs of `verbs.h` that work is posted with, and work queues outside queue pairs. See `cstruct`."""

from __future__ import annotations

from .cstruct import CStruct


class ibv_data_buf(CStruct):
    """A piece of memory for `wr_set_inline_data_list`: `length` bytes at `addr`."""

    _c_ = """
        void *addr;
        size_t length;
    """


class ibv_sge(CStruct):
    """One piece of a message: `length` bytes at `addr`, inside the region of `lkey`."""

    _c_ = """
        uint64_t addr;
        uint32_t length;
        uint32_t lkey;
    """


class ibv_send_wr(CStruct):
    """A send work request; `next` chains a list that is posted in one call.

    `wr.rdma` goes with RDMA reads and writes, `wr.atomic` with atomics (8 bytes, 8-aligned), `wr.ud` with UD,
    `qp_type.xrc` with XRC. `imm_data` is in network byte order; `invalidate_rkey` is the same four bytes. The
    library reads all of it, the list and the inline data, before the call returns.
    """

    _c_ = """
        uint64_t wr_id;
        struct ibv_send_wr *next;
        struct ibv_sge *sg_list;
        int num_sge;
        enum ibv_wr_opcode opcode;
        unsigned int send_flags;
        union {
            __be32 imm_data;
            uint32_t invalidate_rkey;
        };
        union {
            struct {
                uint64_t remote_addr;
                uint32_t rkey;
            } rdma;
            struct {
                uint64_t remote_addr;
                uint64_t compare_add;
                uint64_t swap;
                uint32_t rkey;
            } atomic;
            struct {
                struct ibv_ah *ah;
                uint32_t remote_qpn;
                uint32_t remote_qkey;
            } ud;
        } wr;
        union {
            struct {
                uint32_t remote_srqn;
            } xrc;
        } qp_type;
        union {
            struct {
                struct ibv_mw *mw;
                uint32_t rkey;
                struct ibv_mw_bind_info bind_info;
            } bind_mw;
            struct {
                void *hdr;
                uint16_t hdr_sz;
                uint16_t mss;
            } tso;
        };
    """


class ibv_recv_wr(CStruct):
    """A receive work request; a UD receive needs 40 bytes more than the message, for the GRH."""

    _c_ = """
        uint64_t wr_id;
        struct ibv_recv_wr *next;
        struct ibv_sge *sg_list;
        int num_sge;
    """


class ibv_ops_wr(CStruct):
    """A change to the tag-matching list of a shared receive queue (`OpsWrOpcode`, `OpsFlags`)."""

    _c_ = """
        uint64_t wr_id;
        struct ibv_ops_wr *next;
        enum ibv_ops_wr_opcode opcode;
        int flags;
        struct {
            uint32_t unexpected_cnt;
            uint32_t handle;
            struct {
                uint64_t recv_wr_id;
                struct ibv_sge *sg_list;
                int num_sge;
                uint64_t tag;
                uint64_t mask;
            } add;
        } tm;
    """


class ibv_wq_init_attr(CStruct):
    """How to make a receive work queue; `comp_mask` is a `WqInitAttrMask`, `create_flags` a `WqFlags`."""

    _c_ = """
        void *wq_context;
        enum ibv_wq_type wq_type;
        uint32_t max_wr;
        uint32_t max_sge;
        struct ibv_pd *pd;
        struct ibv_cq *cq;
        uint32_t comp_mask;
        uint32_t create_flags;
    """


class ibv_wq_attr(CStruct):
    """What `ibv_modify_wq` sets; `attr_mask` is a `WqAttrMask`."""

    _c_ = """
        uint32_t attr_mask;
        enum ibv_wq_state wq_state;
        enum ibv_wq_state curr_wq_state;
        uint32_t flags;
        uint32_t flags_mask;
    """


class ibv_wq(CStruct):
    """A receive work queue outside a queue pair; the header's `ibv_create_wq` sets up its `mutex` and `cond`."""

    _c_ = """
        struct ibv_context *context;
        void *wq_context;
        struct ibv_pd *pd;
        struct ibv_cq *cq;
        uint32_t wq_num;
        uint32_t handle;
        enum ibv_wq_state state;
        enum ibv_wq_type wq_type;
        int (*post_recv)(struct ibv_wq *current, struct ibv_recv_wr *recv_wr,
                         struct ibv_recv_wr **bad_recv_wr);
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t events_completed;
        uint32_t comp_mask;
    """
