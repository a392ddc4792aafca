"""What failures of verbs and completions, and events, mean and what to do about them, as data.

Read by errors while they are raised, and by ``rdmaconnect explain``. Each text tells the cause, then what
to type next; what no number names is in :mod:`rdmaconnect.cli.themes`.

Sources: the manual pages of the verbs, kernel drivers/infiniband/core/addr.c and verbs.c, measurements on
SoftRoCE, and public threads about connections that failed.
"""

from __future__ import annotations

__all__ = ["HINTS"]

_MEMLOCK = (
    "The locked-memory limit is too low (`ulimit -l` tells it, in KiB): in a shell `ulimit -l unlimited`, in a systemd "
    "unit LimitMEMLOCK=infinity, in Docker --ulimit memlock=-1, in Slurm PropagateResourceLimitsExcept=MEMLOCK."
)
_BOUND = "A memory window may be bound to it, or one whose newer binding has not taken place: close that first."
_OR_MEMLOCK = "the locked-memory limit is too low (`ulimit -l`): see `rdmaconnect explain memlock`."
_FILES = (
    "No file descriptor is left: raise the open-file limit (`ulimit -n 65536`, in a systemd unit LimitNOFILE=65536)."
)
_ALL_FILES = "The host has no file descriptor left: see `sysctl fs.file-nr fs.file-max`."
_LIMIT = "is above the device's limit: compare with query_device() (`rdmaconnect devices -v`)."
_EEC = "It belongs to the RD transport, which no device has: take it for a fault of the provider, and update it."

#: (verb, errno name), ("completion", status) or ("event", type) -> cause and remedy. ``{...}`` fields are filled by
#: the raiser.
HINTS: dict[tuple[str, str], str] = {
    # ---- devices
    ("ibv_get_device_list", "ENOSYS"): (
        "This kernel has no RDMA subsystem: load it (modprobe ib_uverbs and the device's driver, "
        "for SoftRoCE rdma_rxe), or use a kernel that has it."
    ),
    ("ibv_get_device_list", "EPERM"): "Run as a user who may read /sys/class/infiniband_verbs.",
    ("any verb", "EMFILE"): _FILES,
    ("any verb", "ENFILE"): _ALL_FILES,
    ("ibv_open_device", "ENOENT"): "The device node is absent: in a container pass --device /dev/infiniband.",
    ("ibv_open_device", "EACCES"): (
        "The user may not open it: add the user to the node's group, often rdma (`ls -l /dev/infiniband`, "
        "`usermod -aG rdma USER`)."
    ),
    ("ibv_open_device", "EPERM"): (
        "A device cgroup or the RDMA network-namespace mode forbids it: pass the device to the container "
        "(--device), or see `rdma system show` (exclusive mode hides devices of other namespaces)."
    ),
    ("ibv_open_device", "EMFILE"): f"{_FILES} A context takes 2.",
    (
        "ibv_open_device",
        "ENODEV",
    ): "The device went away (its driver was unloaded, or resets it): see `rdma link`.",
    ("rdma link add", "EEXIST"): "The network device carries one already: `rdma link` shows it.",
    ("rdma link add", "ENODEV"): "There is no such network device here: `ip link` lists those of this namespace.",
    ("rdma link add", "EINVAL"): "The type is not known: load the driver first, for SoftRoCE `modprobe rdma_rxe`.",
    # ---- rdma_cm
    ("rdma_create_event_channel", "ENOENT"): (
        "There is no /dev/infiniband/rdma_cm: load the module (`modprobe rdma_ucm`); in a container pass "
        "--device /dev/infiniband."
    ),
    ("rdma_create_event_channel", "EACCES"): (
        "The user may not open /dev/infiniband/rdma_cm: add the user to the node's group."
    ),
    ("rdma_create_event_channel", "EPERM"): (
        "librdmacm found no rdma_cm of its version: load the module (`modprobe rdma_ucm`); in a container pass "
        "--device /dev/infiniband."
    ),
    ("rdma_resolve_addr", "ENODEV"): (
        "The route to the peer leaves by a network device that no RDMA device belongs to: see `ip route get` and "
        "`rdma link`."
    ),
    ("rdma_resolve_addr", "ENETUNREACH"): "There is no route to the peer: see `ip route get`.",
    (
        "rdma_resolve_addr",
        "ETIMEDOUT",
    ): "The peer's address does not answer on that network (`ip neigh`: FAILED if not).",
    ("rdma_bind_addr", "EADDRINUSE"): "Another program listens there by rdma_cm: end it, or take another port.",
    ("rdma_listen", "EADDRINUSE"): "Another program listens there by rdma_cm: end it, or take another port.",
    ("rdma_bind_addr", "EADDRNOTAVAIL"): "It is no address of this host: `ip addr` lists those.",
    ("rdma_bind_addr", "ENODEV"): "No RDMA device has that address: `rdmaconnect devices` lists those that they have.",
    ("rdma_accept", "ETIMEDOUT"): (
        "The peer was answered, and its connection manager did not say that the connection stands: it is gone, or the "
        "network lost the answer."
    ),
    ("rdma_connect", "ETIMEDOUT"): (
        "The peer's connection manager does not answer: the host is down, or a firewall drops RoCE (UDP port 4791)."
    ),
    # ---- memory
    ("ibv_reg_mr", "ENOMEM"): _MEMLOCK,
    # the latter: Linux 6.5 and later, mm/gup.c, check_vma_flags
    ("ibv_reg_mr", "EFAULT"): (
        "The address range is not all mapped, or not writable while write access was asked for, "
        "or a writable mapping of a file on disk: map that with ACCESS_READ, or use memory of its own."
    ),
    ("ibv_reg_mr", "EINVAL"): "Remote write and remote atomic access need local write access too.",
    ("ibv_reg_mr", "EOPNOTSUPP"): "The device cannot register this kind of memory or access: ask for less.",
    ("ibv_reg_mr", "EPERM"): f"The kernel refused to lock so much memory. {_MEMLOCK}",
    ("ibv_reg_dmabuf_mr", "EOPNOTSUPP"): "mlx5, irdma, bnxt_re, efa, ionic and mana can register dma-bufs.",
    ("ibv_rereg_mr", "EOPNOTSUPP"): "mlx4, mlx5, irdma and hns have it: close the region and register anew.",
    ("ibv_dereg_mr", "EINVAL"): _BOUND,
    ("ibv_dereg_mr", "EBUSY"): _BOUND,
    ("ibv_bind_mw", "EINVAL"): "Only a type 1 window is bound so; the region needs MW_BIND, no window ZERO_BASED.",
    ("ibv_bind_mw", "EPERM"): "Window and region are of different protection domains.",
    # ---- completion queues
    ("ibv_create_cq", "EINVAL"): "cqe must be from 1 to the device's max_cqe: see query_device().",
    ("ibv_create_cq", "ENOMEM"): f"The device has no room for so long a queue, or {_OR_MEMLOCK}",
    ("ibv_create_cq_ex", "EINVAL"): "cqe must be from 1 to the device's max_cqe: see query_device().",
    ("ibv_create_cq_ex", "EOPNOTSUPP"): (
        "The provider lacks one of the flags asked for, or extended completion queues at all "
        "(efa, hns, ionic, irdma, mlx4, mlx5 and rxe have them)."
    ),
    ("ibv_resize_cq", "EINVAL"): "cqe must be from 1 to max_cqe, and not below the completions that wait in the queue.",
    ("ibv_resize_cq", "EOPNOTSUPP"): "The providers of bnxt_re, irdma, mlx4, mlx5 and rxe have it.",
    ("ibv_modify_cq", "EOPNOTSUPP"): "The providers of hns, mlx4 and mlx5 have it.",
    ("ibv_query_rt_values_ex", "EOPNOTSUPP"): "The providers of mlx4 and mlx5 have it.",
    ("ibv_wc_read_completion_ts", "EOPNOTSUPP"): "The providers of ionic, irdma, mlx4 and mlx5 have it.",
    ("ibv_create_comp_channel", "EMFILE"): "Raise the open-file limit (ulimit -n): a context takes 2, a channel 1.",
    # ---- queue pairs
    ("ibv_create_qp", "EINVAL"): f"A capability {_LIMIT}",
    ("ibv_create_qp", "ENOMEM"): (
        f"The device has no room for another queue pair (`rdma resource` tells how many there are), or {_OR_MEMLOCK}"
    ),
    ("ibv_create_qp", "EOPNOTSUPP"): "The device does not have this qp_type.",
    ("ibv_create_qp_ex", "EINVAL"): f"A capability {_LIMIT}",
    ("ibv_create_qp_ex", "EOPNOTSUPP"): (
        "The device does not have this qp_type, or not all of the create_flags, send_ops_flags and other "
        "extended attributes: ask for less."
    ),
    ("ibv_create_srq", "EINVAL"): "max_wr or max_sge is 0 or above the device's limit: compare with query_device().",
    ("ibv_create_srq_ex", "EOPNOTSUPP"): "The device does not have this srq_type.",
    ("ibv_modify_srq", "EINVAL"): "srq_limit must be below max_wr, and max_wr not below what is posted.",
    ("ibv_post_send", "ENOMEM"): "The send queue is full: wait for completions, or ask for a larger max_send_wr.",
    ("ibv_post_send", "EINVAL"): (
        "The queue pair must be in RTS, have this operation and so many pieces (max_send_sge), "
        "and no message may be longer than the port's max_msg_sz."
    ),
    ("ibv_post_recv", "ENOMEM"): "The receive queue is full: ask for a larger max_recv_wr.",
    ("ibv_post_recv", "EINVAL"): "The queue pair must have left RESET.",
    ("ibv_post_srq_recv", "ENOMEM"): "The shared receive queue is full: ask for a larger max_wr.",
    ("ibv_post_srq_recv", "EINVAL"): "A receive has more pieces than the queue's max_sge.",
    ("ibv_wr_complete", "ENOSPC"): "The send queue has no room for all of the batch: wait for completions.",
    ("ibv_wr_complete", "ENOMEM"): "The send queue has no room for all of the batch: wait for completions.",
    ("ibv_wr_complete", "EINVAL"): "The queue pair must be in RTS, and have this operation and so many pieces.",
    # ---- what only some devices have: which of rdma-core 65's providers fill the slot
    # (grep -l '\.open_xrcd =' providers/*/*.c)
    ("ibv_advise_mr", "EOPNOTSUPP"): "mlx5 has it, rxe since rdma-core 59.",
    ("ibv_alloc_dm", "EOPNOTSUPP"): "mlx5 and mana have device memory.",
    ("ibv_alloc_mw", "EOPNOTSUPP"): "mlx4, mlx5, irdma, ionic and rxe have memory windows.",
    ("ibv_alloc_null_mr", "EOPNOTSUPP"): "Only mlx5 has it.",
    ("ibv_alloc_parent_domain", "EOPNOTSUPP"): "mlx5, efa, hns and mana have parent domains.",
    ("ibv_alloc_td", "EOPNOTSUPP"): "mlx5, efa and hns have thread domains.",
    ("ibv_attach_mcast", "EOPNOTSUPP"): "mlx4, mlx5, irdma, cxgb4 and rxe have multicast.",
    ("ibv_create_counters", "EOPNOTSUPP"): "Only mlx5 has it.",
    ("ibv_create_flow", "EOPNOTSUPP"): "mlx4, mlx5 and bnxt_re have packet steering.",
    ("ibv_create_srq", "EOPNOTSUPP"): "Most devices have it, EFA has not.",
    ("ibv_create_wq", "EOPNOTSUPP"): "mlx4, mlx5 and mana have receive-side scaling.",
    ("ibv_create_rwq_ind_table", "EOPNOTSUPP"): "mlx4, mlx5 and mana have receive-side scaling.",
    ("ibv_get_srq_num", "EOPNOTSUPP"): "Only XRC queues have a number, and only mlx4, mlx5, hns and qedr have XRC.",
    **dict.fromkeys(
        ((f"ibv_import_{what}", "EOPNOTSUPP") for what in ("device", "pd", "mr", "dm")),
        "Only mlx5 can import what another process has made.",
    ),
    ("ibv_modify_qp_rate_limit", "EOPNOTSUPP"): "mlx5 and bnxt_re have packet pacing.",
    ("ibv_open_qp", "EOPNOTSUPP"): "It is for XRC_RECV, which mlx4, mlx5 and hns have.",
    ("ibv_open_xrcd", "EOPNOTSUPP"): "mlx4, mlx5, hns and qedr have XRC.",
    ("ibv_post_srq_ops", "EOPNOTSUPP"): "Only mlx5 has tag matching.",
    ("ibv_query_ece", "EOPNOTSUPP"): "Only mlx5 has it.",
    ("ibv_reg_mr_ex", "EOPNOTSUPP"): "Only mlx5 has it.",
    ("ibv_set_ece", "EOPNOTSUPP"): "Only mlx5 has it, and it needs a vendor_id.",
    ("ibv_wr_flush", "EOPNOTSUPP"): "rxe has it since rdma-core 45.",
    ("ibv_wr_send_tso", "EOPNOTSUPP"): "mlx5 has it, for UD and RAW_PACKET.",
    ("ibv_wr_set_xrc_srqn", "EOPNOTSUPP"): "mlx5 has it, for XRC_SEND.",
    # ---- address handles: the kernel resolves the route for UD here, as it does at RTR for RC and UC
    ("ibv_create_ah", "EINVAL"): "On Ethernet is_global must be 1, and dgid of the sgid_index entry's address family.",
    ("ibv_create_ah", "ETIMEDOUT"): (
        "The route to dgid did not resolve: check that the peer answers on that network (`ip neigh`: FAILED if not)."
    ),
    ("ibv_create_ah", "ENETUNREACH"): (
        "There is no route to dgid, or the network device of the GID is down: see `ip route get` and `ip link`."
    ),
    ("ibv_create_ah", "ENODATA"): "sgid_index is an empty slot: see `rdmaconnect devices` for the table as it is now.",
    ("ibv_create_ah", "ENODEV"): "The GID's network device is missing, or in another network namespace: see `ip link`.",
    # ---- steps of a queue pair
    ("ibv_modify_qp INIT", "EINVAL"): (
        "A value is not one of the port's (`rdmaconnect devices -v`), or an attribute is missing or too much "
        "(`rdmaconnect states RC`)."
    ),
    ("ibv_modify_qp RTR", "ETIMEDOUT"): (
        "The route to {remote_gid} did not resolve from gid_index {gid_index} ({local_gid}): "
        "check that the peer answers on that network."
    ),
    ("ibv_modify_qp RTR", "ENETUNREACH"): (
        "There is no route to {remote_gid} from gid_index {gid_index} ({local_gid}), or its network device is down: "
        "check `ip -6 route get` and `ip link`."
    ),
    ("ibv_modify_qp RTR", "EHOSTUNREACH"): (
        "The route to {remote_gid} from gid_index {gid_index} ({local_gid}) leads nowhere: "
        "check `ip route get` and `ip neigh`."
    ),
    ("ibv_modify_qp RTR", "ENODATA"): (
        "gid_index {gid_index} is an empty slot: the address was removed or re-added; "
        "see `rdmaconnect devices` for the table as it is now."
    ),
    ("ibv_modify_qp RTR", "ENODEV"): (
        "The network device of gid_index {gid_index} is missing, or in another network namespace."
    ),
    ("ibv_modify_qp RTR", "EINVAL"): (
        "On Ethernet this means no GRH, or GIDs of different address families "
        "({local_gid} to {remote_gid}), or a wrong port or MTU."
    ),
    (
        "ibv_modify_qp RTR",
        "ENOMEM",
    ): f"The device has no room for what the queue pair answers from, or {_OR_MEMLOCK}",
    ("ibv_modify_qp AV", "EINVAL"): (
        "ah_attr.is_global is 0, and Ethernet carries nothing without a GRH: give is_global=1, sgid_index and dgid."
    ),
    ("ibv_modify_qp RTS", "EINVAL"): (
        "timeout is 0 to 31, retry_cnt and rnr_retry 0 to 7, max_rd_atomic at most the device's max_qp_init_rd_atom "
        "(`rdmaconnect devices -v`)."
    ),
    **dict.fromkeys(
        (("ibv_modify_qp RATE_LIMIT", "EINVAL"), ("ibv_modify_qp RATE_LIMIT", "EOPNOTSUPP")),
        "Where a rate limit can be set is the driver's to say, and before Linux 7.2 the kernel's: compare with "
        "packet_pacing_caps of query_device() (`rdmaconnect devices -v`).",
    ),
    ("ibv_modify_qp ALT_PATH", "EINVAL"): (
        "RoCE has no alternate paths: the kernel bans them (drivers/infiniband/core/verbs.c, _ib_modify_qp)."
    ),
    # ---- the exchange
    ("zmq_socket", "EMFILE"): f"{_FILES} An exchange takes up to 12, a device 3.",
    ("bind", "EADDRINUSE"): "Another program listens there (`ss -ltnp` names it): end it, or take another port.",
    ("bind", "EACCES"): "Ports below 1024 need privileges: take another one.",
    ("bind", "ENODEV"): "Give an address of this host, or * for all.",
    ("bind", "EADDRNOTAVAIL"): "Give an address of this host, or * for all.",
    ("bind", "EMFILE"): _FILES,
    # ---- completions; after one with an error an RC queue pair is in ERR. Source: ibv_poll_cq(3)
    ("completion", "LOC_LEN_ERR"): "The message is longer than the receive buffer: ask for a larger recv_size there.",
    ("completion", "LOC_QP_OP_ERR"): (
        "The queue pair cannot do this work request: one that it does not have, or, for UD, a receive without "
        "the 40 bytes that the GRH takes in front of the payload."
    ),
    ("completion", "LOC_EEC_OP_ERR"): f"The end-to-end context had an inner fault. {_EEC}",
    ("completion", "LOC_PROT_ERR"): (
        "The local buffer is outside of its memory region, or that was closed: keep it until the work has completed."
    ),
    ("completion", "WR_FLUSH_ERR"): (
        "The queue pair went to ERR: the failure before this one is the cause. If there was none, the peer asked for "
        "what this end does not allow (rkey, range, access flags), and its own error tells."
    ),
    ("completion", "MW_BIND_ERR"): (
        "The memory window was not bound: its region must allow MW_BIND, be of the same protection domain, and open."
    ),
    ("completion", "BAD_RESP_ERR"): (
        "The peer's answer is not one to what was asked: both ends must have each other's qp_num and psn, "
        "so exchange them anew (`conn.reconnect()`)."
    ),
    ("completion", "LOC_ACCESS_ERR"): (
        "An incoming write found the local region closed, too short or not writable: "
        "keep it registered, with LOCAL_WRITE, while the peer uses it."
    ),
    ("completion", "REM_INV_REQ_ERR"): (
        "The peer refused the request: the message is larger than its receive buffer, "
        "or its queue pair does not allow the operation (qp_access_flags, max_dest_rd_atomic)."
    ),
    ("completion", "REM_ACCESS_ERR"): (
        "The remote region's rkey, range or access flags do not allow this, or it is closed, as where its process "
        "ended: exchange it anew (`mr.region`)."
    ),
    ("completion", "REM_OP_ERR"): (
        "The peer could not complete the request, or its process was just ending: look for its own error there, on its "
        "completion queue and in dmesg."
    ),
    ("completion", "RETRY_EXC_ERR"): (
        "The peer stopped answering: it is gone, its queue pair is not in RTR or expects "
        "another PSN, or a firewall drops RoCE (UDP port 4791: `nft list ruleset` on both hosts)."
    ),
    ("completion", "RNR_RETRY_EXC_ERR"): (
        "The peer has no receive posted: it must recv() in time, or ask for a larger recv_depth."
    ),
    ("completion", "LOC_RDD_VIOL_ERR"): f"The RDD of queue pair and end-to-end context differ. {_EEC}",
    ("completion", "REM_INV_RD_REQ_ERR"): f"The peer refused an RD message. {_EEC}",
    (
        "completion",
        "REM_ABORT_ERR",
    ): "The peer broke the operation off: its queue pair was reset or destroyed; see there.",
    ("completion", "INV_EECN_ERR"): f"There is no such end-to-end context. {_EEC}",
    ("completion", "INV_EEC_STATE_ERR"): f"The end-to-end context is not in a state to do that. {_EEC}",
    ("completion", "FATAL_ERR"): (
        "The device failed: see `dmesg`; close what is open on it and open it again, or reload its driver."
    ),
    ("completion", "RESP_TIMEOUT_ERR"): (
        "The peer's answer did not come in time, though it took the request: see its load, and `timeout`."
    ),
    ("completion", "GENERAL_ERR"): "The provider has no better word: see vendor_err, and `dmesg`.",
    (
        "completion",
        "TM_ERR",
    ): "Matching tags failed: their list is out of step or full; take it down and build it anew.",
    ("completion", "TM_RNDV_INCOMPLETE"): (
        "A rendezvous message matched a tag, but its data did not all come: read it from the sender in software."
    ),
    # ---- asynchronous events. Source: ibv_get_async_event(3)
    ("event", "CQ_ERR"): (
        "A completion queue was overrun or could not be written, and all its queue pairs fail: ask for a larger cqe, "
        "or poll sooner (`rdmaconnect explain cq-overrun`)."
    ),
    ("event", "QP_FATAL"): (
        "The device could not report an error of a queue pair by a completion, and moved it to ERR: see `dmesg`; "
        "`conn.reconnect()` starts anew."
    ),
    ("event", "QP_REQ_ERR"): (
        "The peer sent what this queue pair cannot take (a longer message, an operation that it does not allow), and "
        "it is in ERR: the peer's own completion tells; then `conn.reconnect()`."
    ),
    ("event", "QP_ACCESS_ERR"): (
        "The peer asked for memory that this queue pair does not allow (rkey, range, access flags), and it is in ERR: "
        "see `rdmaconnect explain access`; then `conn.reconnect()`."
    ),
    ("event", "COMM_EST"): (
        "The first message came while the queue pair was still in RTR. It is no error: go on to RTS."
    ),
    ("event", "SQ_DRAINED"): "The send queue has been emptied after SQD was asked for: its attributes may change now.",
    ("event", "PATH_MIG"): "The connection goes on by its alternate path. It is no error: look at the first path.",
    ("event", "PATH_MIG_ERR"): (
        "The connection could not go on by its alternate path: see that path's port, and give it anew."
    ),
    ("event", "DEVICE_FATAL"): (
        "The device failed, and nothing that is open on it works any more: see `dmesg`; close all, open it again."
    ),
    ("event", "PORT_ACTIVE"): "A port came up. It is no error: what waited for the port can connect.",
    ("event", "PORT_ERR"): (
        "A port went down: see the cable, `ip link` and `rdma link`. Connections over it end with RETRY_EXC_ERR."
    ),
    ("event", "LID_CHANGE"): "The subnet manager gave the port another LID: connect anew (`conn.reconnect()`).",
    ("event", "PKEY_CHANGE"): (
        "The partition table of the port changed: see `rdmaconnect explain pkey`; connect anew if a key is gone."
    ),
    ("event", "SM_CHANGE"): "Another subnet manager has the subnet. Nothing need be done unless LIDs change too.",
    ("event", "SRQ_ERR"): "A shared receive queue failed, and takes its queue pairs along: see `dmesg`; make it anew.",
    ("event", "SRQ_LIMIT_REACHED"): (
        "Fewer receives than srq_limit are left in the shared receive queue: post more, then arm the limit again."
    ),
    ("event", "QP_LAST_WQE_REACHED"): (
        "A queue pair in ERR takes nothing more from its shared receive queue. It is no error: it can be closed now."
    ),
    ("event", "CLIENT_REREGISTER"): (
        "The subnet manager asks for subscriptions and multicast groups to be registered anew; RC goes on."
    ),
    ("event", "GID_CHANGE"): (
        "The GID table of the port changed, most often since an address was added or removed: an index may mean "
        "another GID now (`rdmaconnect devices`)."
    ),
    ("event", "WQ_FATAL"): "A work queue failed, and so did what steers packets to it: see `dmesg`; make it anew.",
    ("event", "DEVICE_SPEED_CHANGE"): "The speed of a port changed: see `rdma link` and the cable. It is no error.",
}
