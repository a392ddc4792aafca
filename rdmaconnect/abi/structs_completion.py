"""The structs of `verbs.h` for completion queues and what they yield. See `cstruct`."""

from __future__ import annotations

from .cstruct import CStruct


class ibv_comp_channel(CStruct):
    """A completion channel; `fd` becomes readable when a completion queue that was armed has an event."""

    _c_ = """
        struct ibv_context *context;
        int fd;
        int refcnt;
    """


class ibv_cq(CStruct):
    """A completion queue of `cqe` entries, which may be more than were asked for."""

    _c_ = """
        struct ibv_context *context;
        struct ibv_comp_channel *channel;
        void *cq_context;
        uint32_t handle;
        int cqe;
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t comp_events_completed;
        uint32_t async_events_completed;
    """


class ibv_poll_cq_attr(CStruct):
    """Reserved for the future: `comp_mask` must be 0."""

    _c_ = "uint32_t comp_mask;"


class ibv_wc_tm_info(CStruct):
    """The tag and the private data of a tag-matching header."""

    _c_ = """
        uint64_t tag;
        uint32_t priv;
    """


class ibv_cq_ex(CStruct):
    """An extended completion queue: an iterator over its completions; it begins as an `ibv_cq` does.

    `status` and `wr_id` belong to the current completion, between `start_poll` (0, or ENOENT if empty),
    `next_poll` (the same) and `end_poll`; the `read_*` functions give the rest. One that was not asked for in
    `ibv_cq_init_attr_ex.wc_flags` may be a null pointer; `read_opcode`, `read_vendor_err` and `read_wc_flags`
    are always there. `read_imm_data` is in network byte order, or after `WcFlags.WITH_INV` the rkey as it is.
    """

    _c_ = """
        struct ibv_context *context;
        struct ibv_comp_channel *channel;
        void *cq_context;
        uint32_t handle;
        int cqe;
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t comp_events_completed;
        uint32_t async_events_completed;
        uint32_t comp_mask;
        enum ibv_wc_status status;
        uint64_t wr_id;
        int (*start_poll)(struct ibv_cq_ex *current, struct ibv_poll_cq_attr *attr);
        int (*next_poll)(struct ibv_cq_ex *current);
        void (*end_poll)(struct ibv_cq_ex *current);
        enum ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex *current);
        uint32_t (*read_vendor_err)(struct ibv_cq_ex *current);
        uint32_t (*read_byte_len)(struct ibv_cq_ex *current);
        __be32 (*read_imm_data)(struct ibv_cq_ex *current);
        uint32_t (*read_qp_num)(struct ibv_cq_ex *current);
        uint32_t (*read_src_qp)(struct ibv_cq_ex *current);
        unsigned int (*read_wc_flags)(struct ibv_cq_ex *current);
        uint32_t (*read_slid)(struct ibv_cq_ex *current);
        uint8_t (*read_sl)(struct ibv_cq_ex *current);
        uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex *current);
        uint64_t (*read_completion_ts)(struct ibv_cq_ex *current);
        uint16_t (*read_cvlan)(struct ibv_cq_ex *current);
        uint32_t (*read_flow_tag)(struct ibv_cq_ex *current);
        void (*read_tm_info)(struct ibv_cq_ex *current, struct ibv_wc_tm_info *tm_info);
        uint64_t (*read_completion_wallclock_ns)(struct ibv_cq_ex *current);
    """


class ibv_cq_init_attr_ex(CStruct):
    """How to make an extended completion queue: at least `cqe` entries, `CqWcFlags` in `wc_flags`.

    `comp_vector` is below `ibv_context.num_comp_vectors`. `flags` (`CreateCqAttrFlags`) and `parent_domain`
    count if `comp_mask` (`CqInitAttrMask`) says so.
    """

    _c_ = """
        uint32_t cqe;
        void *cq_context;
        struct ibv_comp_channel *channel;
        uint32_t comp_vector;
        uint64_t wc_flags;
        uint32_t comp_mask;
        uint32_t flags;
        struct ibv_pd *parent_domain;
    """


class ibv_moderate_cq(CStruct):
    """One event for `cq_count` completions, or after `cq_period` microseconds."""

    _c_ = """
        uint16_t cq_count;
        uint16_t cq_period;
    """


class ibv_modify_cq_attr(CStruct):
    """What `ibv_modify_cq` sets; `attr_mask` is a `CqAttrMask`."""

    _c_ = """
        uint32_t attr_mask;
        struct ibv_moderate_cq moderate;
    """


class ibv_wc(CStruct):
    """A completion. If `status` is not SUCCESS, only it, `wr_id`, `qp_num` and `vendor_err` are valid.

    `byte_len` is the number of bytes that came in; a UD receive counts the 40 bytes of the GRH.
    `imm_data` (network byte order) counts with `WcFlags.WITH_IMM`, `invalidated_rkey` in its place with
    `WITH_INV`.
    """

    _c_ = """
        uint64_t wr_id;
        enum ibv_wc_status status;
        enum ibv_wc_opcode opcode;
        uint32_t vendor_err;
        uint32_t byte_len;
        union {
            __be32 imm_data;
            uint32_t invalidated_rkey;
        };
        uint32_t qp_num;
        uint32_t src_qp;
        unsigned int wc_flags;
        uint16_t pkey_index;
        uint16_t slid;
        uint8_t sl;
        uint8_t dlid_path_bits;
    """
