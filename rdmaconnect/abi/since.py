"""What the verbs header has gained since rdma-core 44, the oldest one this package is written for.

`SINCE` maps a C name to the first rdma-core release whose `verbs.h` has it: an enumerator or a macro by its
name, a struct member as `struct.member`, a struct or a function by its name. A name that is not here has been
there since release 44 or longer. The releases were read from the tags of rdma-core; the test checks them
against the headers of 44, 56 and 65.

The library that runs may be older than the header these structs were copied from, so a name in this table may
be used only after finding out that the library has it:

* `ibv_port_attr.active_speed_ex` was added at the end. `verbs_context.query_port` takes the size of the
  caller's struct: an older library zeroes all of it and fills in what it knows, a newer one fills in what
  fits. It reads as 0 on an older library.
* `ibv_qp_ex.wr_flush` was added at the end of a struct that the *library* allocates: on an older library the
  field lies outside it. Touch it only on a queue pair that was created with `QpSendOpsFlags.FLUSH`, a bit
  that an older library refuses.
* `verbs_context` grows at its front, before the struct that the library allocated. A member exists only if
  `verbs_context.sz` reaches it: see `rdmaconnect.abi.verbs_context`.
* An enumerator is a number that an older library refuses or never returns; a function is absent from the
  shared object.
"""

from __future__ import annotations

OLDEST = 44
"""The oldest rdma-core release whose header this package was compared with."""

SINCE: dict[str, int] = {
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
    "verbs_context.alloc_buf": 64,
    "verbs_context.free_buf": 64,
}
