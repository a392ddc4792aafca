"""The functions of libibverbs, and how each says that it has failed.

`PROTOTYPES` holds what the shared object exports, as C text grouped by failure convention; `OPS` holds what
`verbs.h` does inline, through tables of function pointers. Neither loads nor calls anything.

Conventions were read in the manual pages and the source of rdma-core 65, and are not guessed from names. They
do not tell the whole truth, and the caller should know:

* Where -1 stands for failure, errno says why only if a system call failed: `ibv_query_gid` and
  `ibv_query_pkey` can return it with errno as it was. Set errno to 0 before; if it still is, there is no reason.
* -1 comes also from verbs that should return an errno or -errno: no reason, and not EPERM.
* What a provider answers to polling is its own where it is negative: mlx4, mlx5, mthca and vmw_pvrdma have
  CQ_POLL_ERR, -2, which is not ENOENT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from .cstruct import scope
from .ctext import Declaration, reader
from .structs import STRUCTS


class Fails(Enum):
    """How a function reports failure."""

    NULL_ERRNO = "returns NULL and sets errno"
    ERRNO_RETURNED = "returns the errno value, 0 for success; errno itself means nothing"
    MINUS_ONE = "returns -1, or another negative number, and sets errno"
    MINUS_ERRNO = "returns a negative errno value; 0 or more is success"
    POLL_COUNT = "returns a negative number, the provider's own and no errno; 0 or more is success"
    POLL_ERRNO = "returns the errno value, 0 for success, or a negative number, the provider's own and no errno"
    NEVER = "does not fail, or answers with a value that is no error"


class Prototype(NamedTuple):
    """An exported function.

    Attributes:
        name: the symbol.
        fails: how it reports failure.
        text: the C declaration.
        since: the symbol version it was first exported with, older libraries lack it.
        read: tells what the declaration means, as :func:`ctext.reader` gives it.
    """

    name: str
    fails: Fails
    text: str
    since: str
    read: Callable[[str], Declaration]

    @property
    def restype(self) -> Any:
        """As ctypes wants it."""
        return self.read(self.text).ctype

    @property
    def argtypes(self) -> tuple[Any, ...]:
        """As ctypes wants them."""
        return self.read(self.text).argtypes or ()


def prototypes(
    exported: Mapping[Fails, str], types: Mapping[str, Any], oldest: str, newer: Mapping[str, str]
) -> dict[str, Prototype]:
    """What a library exports, by name.

    Args:
        exported: the C declarations, by how they fail.
        types: what C type names mean in them.
        oldest: the symbol version of all but those in ``newer``, which has names by their version.
    """
    read, since = reader(types), {name: version for version, names in newer.items() for name in names.split()}
    return {
        name: Prototype(name, fails, text, since.get(name, oldest), read)
        for fails, together in exported.items()
        for text, name in re.findall(r"(\w[^;]*?(\w+)\([^;]*);", together)
    }


class Op(NamedTuple):
    """A verb that `verbs.h` calls through a function pointer.

    Attributes:
        name: the inline function.
        table: where the pointer is: `context` (`ibv_context.ops`), `verbs_context` (which tells when it is
            there), or the object itself: `cq_ex`, `qp_ex`, `wq`, `dm`.
        field: the member that holds it.
        fails: how it reports failure; an operation that is not there is EOPNOTSUPP.
    """

    name: str
    table: str
    field: str
    fails: Fails


_EXPORTED = {
    Fails.NULL_ERRNO: """
        struct ibv_device **ibv_get_device_list(int *num_devices);
        struct ibv_context *ibv_open_device(struct ibv_device *device);
        struct ibv_context *ibv_import_device(int cmd_fd);
        struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
        struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t pd_handle);
        struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
        struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                       int access);
        struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                        unsigned int access);
        struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                         int fd, int access);
        struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *mr_init_attr);
        struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t mr_handle);
        struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t dm_handle);
        struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
        struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                     struct ibv_comp_channel *channel, int comp_vector);
        struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *srq_init_attr);
        struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *qp_init_attr);
        struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
        struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
                                             uint8_t port_num);
    """,
    Fails.ERRNO_RETURNED: """
        int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *device_attr);
        int ibv_query_port(struct ibv_context *context, uint8_t port_num,
                           struct _compat_ibv_port_attr *port_attr);
        int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed);
        int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
                              struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size);
        int ibv_dealloc_pd(struct ibv_pd *pd);
        int ibv_dereg_mr(struct ibv_mr *mr);
        int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
        int ibv_resize_cq(struct ibv_cq *cq, int cqe);
        int ibv_destroy_cq(struct ibv_cq *cq);
        int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *srq_attr, int srq_attr_mask);
        int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *srq_attr);
        int ibv_destroy_srq(struct ibv_srq *srq);
        int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);
        int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
                         struct ibv_qp_init_attr *init_attr);
        int ibv_destroy_qp(struct ibv_qp *qp);
        int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece);
        int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece);
        int ibv_destroy_ah(struct ibv_ah *ah);
        int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
        int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
        int ibv_fork_init(void);
    """,
    Fails.MINUS_ONE: """
        int ibv_close_device(struct ibv_context *context);
        int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
        int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
        int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, __be16 *pkey);
        int ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, __be16 pkey);
        int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length,
                         int access);
        int ibv_dm_export_dmabuf_fd(struct ibv_dm *dm);
        int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
        int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                                struct ibv_grh *grh, struct ibv_ah_attr *ah_attr);
    """,
    Fails.MINUS_ERRNO: """
        ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                                     size_t max_entries, uint32_t flags, size_t entry_size);
        int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr,
                                        uint8_t *eth_mac, uint16_t *vid);
    """,
    Fails.NEVER: """
        void ibv_free_device_list(struct ibv_device **list);
        const char *ibv_get_device_name(struct ibv_device *device);
        int ibv_get_device_index(struct ibv_device *device);
        __be64 ibv_get_device_guid(struct ibv_device *device);
        void ibv_unimport_pd(struct ibv_pd *pd);
        void ibv_unimport_mr(struct ibv_mr *mr);
        void ibv_unimport_dm(struct ibv_dm *dm);
        void ibv_ack_async_event(struct ibv_async_event *event);
        void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);
        struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp);
        int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags);
        enum ibv_fork_status ibv_is_fork_initialized(void);
        const char *ibv_node_type_str(enum ibv_node_type node_type);
        const char *ibv_port_state_str(enum ibv_port_state port_state);
        const char *ibv_event_type_str(enum ibv_event_type event);
        const char *ibv_wc_status_str(enum ibv_wc_status status);
        int ibv_rate_to_mult(enum ibv_rate rate);
        enum ibv_rate mult_to_ibv_rate(int mult);
        int ibv_rate_to_mbps(enum ibv_rate rate);
        enum ibv_rate mbps_to_ibv_rate(int mbps);
    """,
}

_SYMBOL_VERSIONS = {
    "IBVERBS_1.0": "ibv_create_comp_channel ibv_destroy_comp_channel ibv_rate_to_mult mult_to_ibv_rate",
    "IBVERBS_1.5": "ibv_get_pkey_index",
    "IBVERBS_1.6": "ibv_qp_to_qp_ex",
    "IBVERBS_1.7": "ibv_reg_mr_iova",
    "IBVERBS_1.8": "ibv_reg_mr_iova2",
    "IBVERBS_1.9": "ibv_get_device_index",
    "IBVERBS_1.10": "ibv_import_device ibv_import_mr ibv_import_pd ibv_query_ece ibv_set_ece ibv_unimport_mr"
    " ibv_unimport_pd",
    "IBVERBS_1.11": "_ibv_query_gid_ex _ibv_query_gid_table",
    "IBVERBS_1.12": "ibv_reg_dmabuf_mr",
    "IBVERBS_1.13": "ibv_import_dm ibv_is_fork_initialized ibv_unimport_dm",
    "IBVERBS_1.14": "ibv_query_qp_data_in_order",
    "IBVERBS_1.15": "ibv_reg_mr_ex",
    "IBVERBS_1.16": "ibv_dm_export_dmabuf_fd ibv_query_port_speed",
}

_INLINE = {
    ("context", Fails.NULL_ERRNO): "ibv_alloc_mw",
    ("context", Fails.ERRNO_RETURNED): """
        ibv_bind_mw ibv_dealloc_mw ibv_req_notify_cq ibv_post_send ibv_post_recv ibv_post_srq_recv
    """,
    ("context", Fails.POLL_COUNT): "ibv_poll_cq",
    ("verbs_context", Fails.NULL_ERRNO): """
        ibv_alloc_dm ibv_reg_dm_mr ibv_alloc_null_mr ibv_alloc_td ibv_alloc_parent_domain ibv_create_cq_ex
        ibv_create_srq_ex ibv_create_qp_ex ibv_open_qp ibv_open_xrcd ibv_create_wq ibv_create_rwq_ind_table
        ibv_create_flow=ibv_create_flow ibv_create_counters
    """,
    ("verbs_context", Fails.ERRNO_RETURNED): """
        ibv_query_device_ex ibv_query_port ibv_query_rt_values_ex=query_rt_values ibv_advise_mr ibv_free_dm
        ibv_dealloc_td ibv_modify_cq ibv_get_srq_num ibv_post_srq_ops ibv_close_xrcd ibv_modify_qp_rate_limit
        ibv_modify_wq ibv_destroy_wq ibv_destroy_rwq_ind_table ibv_destroy_flow=ibv_destroy_flow
        ibv_attach_counters_point_flow ibv_read_counters ibv_destroy_counters
    """,
    ("dm", Fails.ERRNO_RETURNED): "ibv_memcpy_to_dm ibv_memcpy_from_dm",
    ("wq", Fails.ERRNO_RETURNED): "ibv_post_wq_recv=post_recv",
    ("cq_ex", Fails.POLL_ERRNO): "ibv_start_poll ibv_next_poll",
    ("cq_ex", Fails.NEVER): """
        ibv_end_poll
        ibv_wc_read_opcode=read_opcode
        ibv_wc_read_vendor_err=read_vendor_err
        ibv_wc_read_byte_len=read_byte_len
        ibv_wc_read_imm_data=read_imm_data
        ibv_wc_read_invalidated_rkey=read_imm_data
        ibv_wc_read_qp_num=read_qp_num
        ibv_wc_read_src_qp=read_src_qp
        ibv_wc_read_wc_flags=read_wc_flags
        ibv_wc_read_slid=read_slid
        ibv_wc_read_sl=read_sl
        ibv_wc_read_dlid_path_bits=read_dlid_path_bits
        ibv_wc_read_completion_ts=read_completion_ts
        ibv_wc_read_completion_wallclock_ns=read_completion_wallclock_ns
        ibv_wc_read_cvlan=read_cvlan
        ibv_wc_read_flow_tag=read_flow_tag
        ibv_wc_read_tm_info=read_tm_info
    """,
    ("qp_ex", Fails.ERRNO_RETURNED): "ibv_wr_complete",
    ("qp_ex", Fails.NEVER): """
        ibv_wr_start ibv_wr_abort ibv_wr_atomic_cmp_swp ibv_wr_atomic_fetch_add ibv_wr_atomic_write
        ibv_wr_bind_mw ibv_wr_flush ibv_wr_local_inv ibv_wr_rdma_read ibv_wr_rdma_write ibv_wr_rdma_write_imm
        ibv_wr_send ibv_wr_send_imm ibv_wr_send_inv ibv_wr_send_tso ibv_wr_set_inline_data
        ibv_wr_set_inline_data_list ibv_wr_set_sge ibv_wr_set_sge_list ibv_wr_set_ud_addr ibv_wr_set_xrc_srqn
    """,
}
"""`name`, or `name=field` where the field is not the name without `ibv_`."""


def _ops() -> dict[str, Op]:
    found = {}
    for (table, fails), names in _INLINE.items():
        for word in names.split():
            name, _, field = word.partition("=")
            found[name] = Op(name, table, field or name.removeprefix("ibv_"), fails)
    return found


PROTOTYPES: dict[str, Prototype] = prototypes(_EXPORTED, scope(STRUCTS), "IBVERBS_1.1", _SYMBOL_VERSIONS)
"""Every exported function by name."""

OPS: dict[str, Op] = _ops()
"""Every inline verb by name. `ibv_query_port` is in both: the exported one stops before `port_cap_flags2`."""
