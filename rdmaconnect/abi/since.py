"""What the verbs header has gained since rdma-core 28, the oldest one this package was compared with.

`SINCE` maps a C name to the first rdma-core release whose `verbs.h` has it: an enumerator or a macro by its
name, a struct member as `struct.member`, a struct or a function by its name. A name that is not here has been
there since release 28 or longer. The releases were read from the tags of rdma-core; the test checks them
against the headers that it is given.

The library that runs may be older than the header these structs were copied from, so a name in this table may
be used only after finding out that the library has it:

* `ibv_port_attr.active_speed_ex` was added at the end. `verbs_context.query_port` takes the size of the
  caller's struct: an older library zeroes all of it and fills in what it knows, a newer one fills in what
  fits. It reads as 0 on an older library.
* `ibv_qp_ex.wr_atomic_write` and `wr_flush` were added at the end of a struct that the *library* allocates: on
  an older library the field lies outside it. Touch one only on a queue pair that was created with
  `QpSendOpsFlags.ATOMIC_WRITE` or `FLUSH`, bits that an older library refuses.
* `verbs_context` grows at its front, before the struct that the library allocated. A member exists only if
  `verbs_context.sz` reaches it: see `rdmaconnect.abi.verbs_context`.
* An enumerator is a number that an older library refuses or never returns; a function is absent from the
  shared object.
"""

from __future__ import annotations

OLDEST = 28
"""The oldest rdma-core release whose header this package was compared with."""

SINCE: dict[str, int] = {
    "IBV_CQ_INIT_ATTR_MASK_PD": 29,
    "ibv_cq_init_attr_ex.parent_domain": 29,
    "ibv_get_device_index": 30,
    "ibv_ece": 31,
    "ibv_import_device": 31,
    "ibv_import_pd": 31,
    "ibv_import_mr": 31,
    "ibv_set_ece": 31,
    "ibv_query_ece": 31,
    "ibv_unimport_pd": 31,
    "ibv_unimport_mr": 31,
    "IBV_GID_TYPE_IB": 32,
    "IBV_GID_TYPE_ROCE_V1": 32,
    "IBV_GID_TYPE_ROCE_V2": 32,
    "IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT": 32,
    "ibv_gid_entry": 32,
    "_ibv_query_gid_ex": 32,
    "_ibv_query_gid_table": 32,
    "ibv_reg_dmabuf_mr": 34,
    "IBV_FORK_DISABLED": 35,
    "IBV_FORK_ENABLED": 35,
    "IBV_FORK_UNNEEDED": 35,
    "IBV_DM_MASK_HANDLE": 35,
    "ibv_device_attr_ex.phys_port_cnt_ex": 35,
    "ibv_dm.handle": 35,
    "ibv_import_dm": 35,
    "ibv_unimport_dm": 35,
    "ibv_is_fork_initialized": 35,
    "IBV_WC_DRIVER2": 36,
    "ibv_query_qp_data_in_order": 36,
    "IBV_WC_DRIVER3": 37,
    "IBV_RATE_800_GBPS": 39,
    "IBV_RATE_1200_GBPS": 39,
    "IBV_PORT_LINK_SPEED_NDR_SUP": 39,
    "IBV_QP_EX_WITH_ATOMIC_WRITE": 44,
    "IBV_WR_ATOMIC_WRITE": 44,
    "IBV_WC_ATOMIC_WRITE": 44,
    "ibv_qp_ex.wr_atomic_write": 44,
    # Flush: RDMA FLUSH (IBTA memory placement extensions)
    "IBV_WC_FLUSH": 45,
    "IBV_WR_FLUSH": 45,
    "IBV_QP_EX_WITH_FLUSH": 45,
    "IBV_ACCESS_FLUSH_GLOBAL": 45,
    "IBV_ACCESS_FLUSH_PERSISTENT": 45,
    "IBV_FLUSH_GLOBAL": 45,
    "IBV_FLUSH_PERSISTENT": 45,
    "IBV_FLUSH_RANGE": 45,
    "IBV_FLUSH_MR": 45,
    "ibv_qp_ex.wr_flush": 45,
    # ibv_query_qp_data_in_order
    "IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS": 46,
    "IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG": 46,
    "IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES": 46,
    "IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY": 60,
    # XDR: 200 Gbit/s a lane
    "IBV_PORT_LINK_SPEED_XDR_SUP": 49,
    "ibv_port_attr.active_speed_ex": 49,
    "IBV_ODP_SUPPORT_FLUSH": 58,
    "IBV_ODP_SUPPORT_ATOMIC_WRITE": 58,
    "IBV_REG_MR_MASK_IOVA": 59,
    "IBV_REG_MR_MASK_ADDR": 59,
    "IBV_REG_MR_MASK_FD": 59,
    "IBV_REG_MR_MASK_FD_OFFSET": 59,
    "IBV_REG_MR_MASK_DMAH": 59,
    "ibv_mr_init_attr": 59,
    "ibv_reg_mr_ex": 59,
    "verbs_context.reg_mr_ex": 59,
    "verbs_context.alloc_dmah": 59,
    "verbs_context.dealloc_dmah": 59,
    "IBV_EVENT_DEVICE_SPEED_CHANGE": 62,
    "verbs_context.dm_export_dmabuf_fd": 62,
    "ibv_dm_export_dmabuf_fd": 62,
    "ibv_query_port_speed": 62,
    # Confidential computing: buffers that bypass the encrypted memory
    "IBV_DEVICE_CC_DMA_BOUNCE": 64,
    "IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC": 64,
    "IBV_REG_MR_MASK_BUF": 64,
    "ibv_mr_init_attr.buf": 64,
    "verbs_context.alloc_buf": 64,
    "verbs_context.free_buf": 64,
}

CHANGED: dict[str, int] = {
    "IBV_REREG_MR_FLAGS_SUPPORTED": 32,  # one bit more before: IBV_REREG_MR_KEEP_VALID
    "ibv_context_ops._compat_query_device": 33,  # a pointer that is not to be called had another type
}
"""What older headers have with another value or C type, and the first release that has it as it is here."""
