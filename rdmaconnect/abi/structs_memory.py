"""The structs of `verbs.h` for memory: regions, windows, memory on the device. See `cstruct`."""

from __future__ import annotations

from .cstruct import CStruct


class ibv_mr(CStruct):
    """A registered memory region: `length` bytes at `addr`; `lkey` for local, `rkey` for remote use."""

    _c_ = """
        struct ibv_context *context;
        struct ibv_pd *pd;
        void *addr;
        size_t length;
        uint32_t handle;
        uint32_t lkey;
        uint32_t rkey;
    """


class ibv_mr_init_attr(CStruct):
    """What `ibv_reg_mr_ex` registers: `length` bytes for `access`; `comp_mask` (`MrInitAttrMask`) says the rest.

    `addr`, or `fd` and `fd_offset` of a dma-buf; `iova` is the address that work requests and the peer use.
    `dmah` is a DMA handle (`ibv_alloc_dmah`), `buf` a buffer of `ibv_alloc_buf` with `addr` in it, since
    rdma-core 64; neither is made by this package.
    """

    _c_ = """
        size_t length;
        int access;
        uint64_t comp_mask;
        uint64_t iova;
        void *addr;
        int fd;
        uint64_t fd_offset;
        struct ibv_dmah *dmah;
        struct ibv_buf *buf;
    """


class ibv_alloc_dm_attr(CStruct):
    """Memory on the device: `length` bytes, aligned to 2**`log_align_req`; `comp_mask` must be 0."""

    _c_ = """
        size_t length;
        uint32_t log_align_req;
        uint32_t comp_mask;
    """


class ibv_dm(CStruct):
    """A piece of memory on the device, copied to and from by its two functions (0, or the errno value)."""

    _c_ = """
        struct ibv_context *context;
        int (*memcpy_to_dm)(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr, size_t length);
        int (*memcpy_from_dm)(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset, size_t length);
        uint32_t comp_mask;
        uint32_t handle;
    """


class ibv_mw_bind_info(CStruct):
    """The range of a region that a window opens: `length` bytes at `addr`, with `AccessFlags`."""

    _c_ = """
        struct ibv_mr *mr;
        uint64_t addr;
        uint64_t length;
        unsigned int mw_access_flags;
    """


class ibv_mw(CStruct):
    """A memory window; its `rkey` changes with every bind."""

    _c_ = """
        struct ibv_context *context;
        struct ibv_pd *pd;
        uint32_t rkey;
        uint32_t handle;
        enum ibv_mw_type type;
    """


class ibv_mw_bind(CStruct):
    """A work request that binds a type 1 window."""

    _c_ = """
        uint64_t wr_id;
        unsigned int send_flags;
        struct ibv_mw_bind_info bind_info;
    """
