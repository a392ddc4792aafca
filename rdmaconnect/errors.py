"""What can go wrong, as a tree of classes, one grammar for their messages, and the table of remedies.

::

    RdmaConnectError
    ├── LibraryError          libibverbs missing, too old, or without a symbol or op      (also OSError)
    ├── DeviceError           no device, no ACTIVE port, no usable GID; lists what was seen
    ├── VerbsError            a verb failed: .verb .errno .doing                          (also OSError)
    │   ├── ModifyError       + .qp_num .frm .to .mask .missing .not_allowed .path
    │   └── PostError         some of a list of work requests were not posted: .posted .wr_id
    ├── CompletionError       a work completion failed: .status .vendor_err .wr_id .qp_num .opcode
    ├── StateError            closed, consumed, or a transition that is not in the table
    ├── PeerMismatch          both ends are sound but cannot be joined: .differences
    ├── PeerRejected          the other end refused: .stage .errno .reason
    ├── PeerClosed            the other end closed a connection that stood   (also ConnectionError)
    ├── AuthenticationError   the peer is not who it must be, or does not know us
    ├── ProtocolError
    │   ├── LocalProtocolError    this side asked for something illegal
    │   └── RemoteProtocolError   the peer sent something illegal
    └── DeadlineExceeded      a wait ran out: .stage .waited_s                            (also TimeoutError)
        └── ConnectTimeout    ... before the connection stood

Bad arguments are ``ValueError`` or ``TypeError`` from the value's own constructor. A message reads
*deed: verdict. Next step.*
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Sequence

__all__ = [
    "HINTS",
    "AuthenticationError",
    "CompletionError",
    "ConnectTimeout",
    "DeadlineExceeded",
    "DeviceError",
    "LibraryError",
    "LocalProtocolError",
    "ModifyError",
    "PeerClosed",
    "PeerMismatch",
    "PeerRejected",
    "PostError",
    "ProtocolError",
    "RdmaConnectError",
    "RemoteProtocolError",
    "StateError",
    "VerbsError",
    "errno_name",
    "hint_for",
]

#: (verb, errno name) or (verb, condition) -> the next step. ``{...}`` fields are filled by the raiser.
#: Sources: kernel drivers/infiniband/core/addr.c and verbs.c, and measurements on SoftRoCE.
HINTS: dict[tuple[str, str], str] = {
    ("ibv_get_device_list", "ENOSYS"): (
        "This kernel has no RDMA subsystem: load it (modprobe ib_uverbs and the device's driver, "
        "for SoftRoCE rdma_rxe), or use a kernel that has it."
    ),
    ("ibv_get_device_list", "EPERM"): "Run as a user who may read /sys/class/infiniband_verbs.",
    ("ibv_open_device", "ENOENT"): "The device node is absent: in a container pass --device /dev/infiniband.",
    ("ibv_open_device", "EACCES"): "The user may not open it: add the user to the node's group (often rdma).",
    ("ibv_open_device", "EPERM"): (
        "A device cgroup or the RDMA network-namespace mode forbids it: pass the device to the container "
        "(--device), or see `rdma system show` (exclusive mode hides devices of other namespaces)."
    ),
    ("ibv_reg_mr", "ENOMEM"): "The locked-memory limit is too low: ulimit -l, LimitMEMLOCK=, --ulimit memlock=-1.",
    ("ibv_reg_mr", "EFAULT"): "The address range is not all mapped, or not writable while write access was asked for.",
    ("ibv_reg_mr", "EINVAL"): "Remote write and remote atomic access need local write access too.",
    ("ibv_create_qp", "EINVAL"): "A capability is above the device's limit: compare with query_device().",
    (
        "ibv_create_qp",
        "ENOMEM",
    ): "The device has no room for another queue pair, or the locked-memory limit is too low.",
    ("ibv_create_qp", "EOPNOTSUPP"): "The device does not have this qp_type.",
    ("ibv_create_cq", "EINVAL"): "cqe must be from 1 to the device's max_cqe: see query_device().",
    ("ibv_create_cq_ex", "EINVAL"): "cqe must be from 1 to the device's max_cqe: see query_device().",
    ("ibv_create_cq_ex", "EOPNOTSUPP"): (
        "The provider lacks one of the flags asked for, or extended completion queues at all "
        "(efa, hns, ionic, irdma, mlx4, mlx5 and rxe have them)."
    ),
    ("ibv_resize_cq", "EINVAL"): "cqe must be from 1 to max_cqe, and not below the completions that wait in the queue.",
    ("ibv_resize_cq", "EOPNOTSUPP"): "Those of bnxt_re, irdma, mlx4, mlx5 and rxe do.",
    ("ibv_modify_cq", "EOPNOTSUPP"): "Those of hns, mlx4 and mlx5 do.",
    ("ibv_query_rt_values_ex", "EOPNOTSUPP"): "Those of mlx4 and mlx5 do.",
    ("ibv_wc_read_completion_ts", "EOPNOTSUPP"): "Those of ionic, irdma, mlx4 and mlx5 do.",
    ("ibv_create_comp_channel", "EMFILE"): "Raise the open-file limit (ulimit -n): a context takes 2, a channel 1.",
    ("ibv_post_send", "ENOMEM"): "The send queue is full: wait for completions, or ask for a larger max_send_wr.",
    ("ibv_post_recv", "ENOMEM"): "The receive queue is full: ask for a larger max_recv_wr.",
    ("ibv_post_send", "EINVAL"): (
        "The queue pair must be in RTS, have this operation and so many pieces (max_send_sge), "
        "and no message may be longer than the port's max_msg_sz."
    ),
    ("ibv_post_srq_recv", "ENOMEM"): "The shared receive queue is full: ask for a larger max_wr.",
    ("ibv_post_srq_recv", "EINVAL"): "A receive has more pieces than the queue's max_sge.",
    ("ibv_wr_complete", "ENOSPC"): "The send queue has no room for all of the batch: wait for completions.",
    ("ibv_wr_complete", "ENOMEM"): "The send queue has no room for all of the batch: wait for completions.",
    ("ibv_wr_complete", "EINVAL"): "The queue pair must be in RTS, and have this operation and so many pieces.",
    ("ibv_create_qp_ex", "EINVAL"): "A capability is above the device's limit: compare with query_device().",
    ("ibv_create_qp_ex", "EOPNOTSUPP"): (
        "The device does not have this qp_type, or not all of the create_flags, send_ops_flags and other "
        "extended attributes: ask for less."
    ),
    ("ibv_create_srq", "EINVAL"): "max_wr or max_sge is 0 or above the device's limit: compare with query_device().",
    ("ibv_create_srq_ex", "EOPNOTSUPP"): "The device does not have this srq_type.",
    ("ibv_modify_srq", "EINVAL"): "srq_limit must be below max_wr, and max_wr not below what is posted.",
    ("ibv_create_ah", "EINVAL"): "On Ethernet is_global must be 1, and dgid of the sgid_index entry's address family.",
    ("ibv_bind_mw", "EINVAL"): "Only a type 1 window is bound so; the region needs MW_BIND, no window ZERO_BASED.",
    ("ibv_bind_mw", "EPERM"): "Window and region are of different protection domains.",
    ("ibv_dereg_mr", "EINVAL"): "A memory window may be bound to it: close that first.",
    # which of rdma-core 65's providers fill the slot (grep -l '\.open_xrcd =' providers/*/*.c)
    ("ibv_advise_mr", "EOPNOTSUPP"): "mlx5 has it, rxe since rdma-core 59.",
    ("ibv_alloc_mw", "EOPNOTSUPP"): "mlx4, mlx5, irdma, ionic and rxe have memory windows.",
    ("ibv_attach_mcast", "EOPNOTSUPP"): "mlx4, mlx5, irdma, cxgb4 and rxe have multicast.",
    ("ibv_create_srq", "EOPNOTSUPP"): "Most devices have it, EFA has not.",
    ("ibv_create_wq", "EOPNOTSUPP"): "mlx4, mlx5 and mana have receive-side scaling.",
    ("ibv_create_rwq_ind_table", "EOPNOTSUPP"): "mlx4, mlx5 and mana have receive-side scaling.",
    ("ibv_get_srq_num", "EOPNOTSUPP"): "Only XRC queues have a number, and only mlx4, mlx5, hns and qedr have XRC.",
    ("ibv_modify_qp_rate_limit", "EOPNOTSUPP"): "mlx5 and bnxt_re have packet pacing.",
    ("ibv_open_qp", "EOPNOTSUPP"): "It is for XRC_RECV, which mlx4, mlx5 and hns have.",
    ("ibv_open_xrcd", "EOPNOTSUPP"): "mlx4, mlx5, hns and qedr have XRC.",
    ("ibv_query_ece", "EOPNOTSUPP"): "Only mlx5 has it.",
    ("ibv_set_ece", "EOPNOTSUPP"): "Only mlx5 has it, and it needs a vendor_id.",
    ("ibv_reg_dmabuf_mr", "EOPNOTSUPP"): "mlx5, irdma, bnxt_re, efa, ionic and mana can register dma-bufs.",
    ("ibv_rereg_mr", "EOPNOTSUPP"): "mlx4, mlx5, irdma and hns have it: close the region and register anew.",
    ("ibv_wr_flush", "EOPNOTSUPP"): "rxe has it since rdma-core 45.",
    ("ibv_wr_send_tso", "EOPNOTSUPP"): "mlx5 has it, for UD and RAW_PACKET.",
    ("ibv_wr_set_xrc_srqn", "EOPNOTSUPP"): "mlx5 has it, for XRC_SEND.",
    ("ibv_post_recv", "EINVAL"): "The queue pair must have left RESET.",
    ("ibv_modify_qp RTR", "ETIMEDOUT"): (
        "The route to {remote_gid} did not resolve from gid_index {gid_index} ({local_gid}): "
        "check that the peer answers on that network."
    ),
    ("ibv_modify_qp RTR", "ENETUNREACH"): (
        "There is no route to {remote_gid} from gid_index {gid_index} ({local_gid}), or its network device is down: "
        "check `ip -6 route get` and `ip link`."
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
    ("ibv_modify_qp ALT_PATH", "EINVAL"): (
        "RoCE has no alternate paths: the kernel bans them (drivers/infiniband/core/verbs.c, _ib_modify_qp)."
    ),
    ("bind", "EADDRINUSE"): "Another program listens there (`ss -ltnp` names it): end it, or take another port.",
    ("bind", "EACCES"): "Ports below 1024 need privileges: take another one.",
    ("bind", "ENODEV"): "Give an address of this host, or * for all.",
    ("bind", "EADDRNOTAVAIL"): "Give an address of this host, or * for all.",
    ("completion", "RETRY_EXC_ERR"): (
        "The peer stopped answering: it is gone, its queue pair is not in RTR, "
        "or a firewall drops RoCE (UDP port 4791)."
    ),
    ("completion", "RNR_RETRY_EXC_ERR"): "The peer has no receive posted: it must recv() in time.",
    ("completion", "REM_ACCESS_ERR"): "The remote region's rkey, range or access flags do not allow this.",
    ("completion", "REM_INV_REQ_ERR"): (
        "The peer refused the request: the message is larger than its receive buffer, "
        "or its queue pair does not allow the operation."
    ),
    ("completion", "LOC_PROT_ERR"): "The local buffer is outside of its memory region, or that was closed.",
    ("completion", "LOC_LEN_ERR"): "The message is longer than the receive buffer.",
    ("completion", "WR_FLUSH_ERR"): "The queue pair went to ERR: the failure before this one is the cause.",
}


def errno_name(number: int) -> str:
    """``ETIMEDOUT (110)`` for 110; ``unknown errno (N)`` for what this platform does not know."""
    return f"{_code(number) or 'unknown errno'} ({number})"


def _code(number: int) -> str:
    """``EOPNOTSUPP``, not ``ENOTSUP``, which is the same number on Linux: verbs speak of the former."""
    return "EOPNOTSUPP" if number == _errno.EOPNOTSUPP else _errno.errorcode.get(number, "")


def hint_for(what: str, number: int, **fields: object) -> str:
    """The next step after an errno, or "".

    Args:
        what: the first half of a key of :data:`HINTS`.
        number: the errno.
        **fields: what the hint's ``{...}`` stand for; without one of them the hint is left out.
    """
    try:
        return HINTS.get((what, _code(number)), "").format(**fields)
    except KeyError:
        return ""


def _sentence(deed: str, verdict: str, hint: str) -> str:
    text = f"{deed}: {verdict}" if deed else verdict
    text = text.rstrip(".") + "."
    return f"{text} {hint}" if hint else text


class RdmaConnectError(Exception):
    """The base of every error of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        # multiprocessing carries errors from one process to another; by default it would call
        # the constructor with the finished message
        return _revive, (type(self), self.args, self.__dict__)


def _revive(cls: type[RdmaConnectError], args: tuple[object, ...], attributes: dict[str, object]) -> RdmaConnectError:
    error = cls.__new__(cls, *args)
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(attributes)
    return error


class LibraryError(RdmaConnectError, OSError):
    """libibverbs is missing or too old, or it or the device's provider lacks a function.

    Attributes:
        errno: ``EOPNOTSUPP`` for a function that is absent, ``ENOENT`` for the library itself.
    """

    def __init__(self, message: str, errno: int = _errno.ENOENT) -> None:
        OSError.__init__(self, errno, message)

    def __str__(self) -> str:
        return str(self.strerror)


class DeviceError(RdmaConnectError):
    """No device, no ACTIVE port or no usable GID; the message lists what was seen."""


class VerbsError(RdmaConnectError, OSError):
    """A verb failed.

    Attributes:
        verb: the C identifier, for example ``ibv_reg_mr``.
        errno: the error number, by the verb's own failure convention.
        doing: what was being done, in words.
    """

    def __init__(self, verb: str, errno: int, doing: str = "", hint: str | None = None) -> None:
        if hint is None:
            hint = hint_for(verb, errno)
        verdict = f"{verb}: {errno_name(errno)}, {os.strerror(errno)}"
        OSError.__init__(self, errno, _sentence(doing, verdict, hint))
        self.verb = verb
        self.doing = doing

    def __str__(self) -> str:
        return str(self.strerror)


class ModifyError(VerbsError):
    """``ibv_modify_qp`` failed, or was refused here because it could only fail.

    Attributes:
        qp_num: the queue pair's number, 24 bits.
        frm, to: the states (``QpState``).
        mask: the ``QpAttrMask`` that was given.
        missing: bits of the table's row that were not given.
        not_allowed: bits given that the row does not have.
        path: the ``Path`` in use, or None.
    """

    def __init__(
        self,
        errno: int,
        doing: str,
        *,
        qp_num: int,
        frm: object,
        to: object,
        mask: int,
        missing: int = 0,
        not_allowed: int = 0,
        path: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__("ibv_modify_qp", errno, doing, hint)
        self.qp_num, self.frm, self.to = qp_num, frm, to
        self.mask, self.missing, self.not_allowed, self.path = mask, missing, not_allowed, path


class PostError(VerbsError):
    """Posting a list of work requests failed in the middle of it.

    Attributes:
        posted: how many were posted, those before the first bad one; None if the provider does not tell.
        wr_id: the first bad one's id, or None.
    """

    def __init__(
        self,
        verb: str,
        errno: int,
        doing: str = "",
        *,
        posted: int | None = None,
        wr_id: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(verb, errno, doing, hint)
        self.posted, self.wr_id = posted, wr_id


class CompletionError(RdmaConnectError):
    """A work request completed with a status other than SUCCESS.

    Attributes:
        status: ``WcStatus``; never an errno.
        vendor_err: the vendor's own code, as ``ibv_wc.vendor_err``.
        wr_id: the work request's id.
        qp_num: the local queue pair.
        opcode: what was asked for, in words (``ibv_wc.opcode`` is not valid on failure).
    """

    def __init__(
        self, status: int, *, vendor_err: int = 0, wr_id: int = 0, qp_num: int = 0, opcode: str = "", doing: str = ""
    ) -> None:
        name = str(status)
        deed = doing or f"{opcode or 'work request'} on QP {qp_num:#08x}"
        verdict = f"work completion {name} ({int(status)}), vendor_err {vendor_err:#x}"
        super().__init__(_sentence(deed, verdict, HINTS.get(("completion", name), "")))
        self.status, self.vendor_err, self.wr_id = status, vendor_err, wr_id
        self.qp_num, self.opcode = qp_num, opcode


class StateError(RdmaConnectError):
    """The object is closed or consumed, or the transition is not in the table."""


class PeerMismatch(RdmaConnectError):
    """Both ends are sound but cannot be joined.

    Attributes:
        differences: every difference found, not only the first.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("join the two ends: " + "; ".join(differences) + ".")
        self.differences = tuple(differences)


class PeerRejected(RdmaConnectError):
    """The other end refused, and said why.

    Attributes:
        stage: the door at which it refused.
        errno: its error number, or 0.
        reason: its own words.
        ports: other ports of it that could be tried (``PortAddress``).
    """

    def __init__(self, stage: str, errno: int, reason: str, ports: Sequence[object] = ()) -> None:
        super().__init__(f"connect: the peer refused at {stage}: {reason}")
        self.stage, self.errno, self.reason, self.ports = stage, errno, reason, tuple(ports)


class PeerClosed(RdmaConnectError, ConnectionError):
    """The other end closed the connection."""


class AuthenticationError(RdmaConnectError):
    """The peer is not who it must be, or does not know us."""


class ProtocolError(RdmaConnectError):
    """The conversation broke its rules."""


class LocalProtocolError(ProtocolError):
    """This side asked for something that the conversation does not allow now."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the conversation does not allow."""


class DeadlineExceeded(RdmaConnectError, TimeoutError):
    """A wait ran out.

    Attributes:
        stage: the door at which it ran out.
        waited_s: seconds waited in all.
    """

    def __init__(self, stage: str, waited_s: float, hint: str = "") -> None:
        TimeoutError.__init__(self, _errno.ETIMEDOUT, _sentence(stage, f"no success within {waited_s:.3g} s", hint))
        self.stage, self.waited_s = stage, waited_s

    def __str__(self) -> str:
        return str(self.strerror)


class ConnectTimeout(DeadlineExceeded):
    """The connection did not stand by the deadline."""
