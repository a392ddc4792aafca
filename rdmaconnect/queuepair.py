"""Queue pairs: made, moved from state to state by the table, posted to."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, byref, pointer
from typing import Any

from . import transitions, verbs
from .abi import (
    QpAttrMask,
    QpState,
    QpType,
    SendFlags,
    WrOpcode,
    ibv_ah_attr,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_recv_wr,
    ibv_send_wr,
    ibv_sge,
)
from .completion import CQ
from .endpoint import RemoteRegion
from .errors import ModifyError, VerbsError, hint_for
from .handle import Owned
from .memory import PD
from .path import AhAttr

__all__ = ["QueuePair", "RecvRequest", "SendRequest"]


class QueuePair(Owned):
    """A queue pair, in RESET when made.

    Args:
        pd: its protection domain.
        send_cq, recv_cq: where its completions go; may be the same.
        qp_type: RC, UC, UD, ...
        max_send_wr, max_recv_wr: outstanding work requests wanted on each side.
        max_send_sge, max_recv_sge: scatter/gather entries wanted in each.
        max_inline_data: bytes wanted to be sendable inline.
        sq_sig_all: whether every send gives a completion.

    Attributes:
        qp_num: its number, 24 bits.
        qp_type: as given.
        state: the state that it was last moved to here; the device may have moved it to ERR since.
        cap: what the device gave, at least what was asked for (``struct ibv_qp_cap``).

    Raises:
        VerbsError: EINVAL above the device's limits, EOPNOTSUPP for a type it lacks, among others.

    Source: ibv_create_qp(3).
    """

    def __init__(
        self,
        pd: PD,
        send_cq: CQ,
        recv_cq: CQ,
        qp_type: QpType,
        *,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
        sq_sig_all: bool = False,
    ) -> None:
        init = ibv_qp_init_attr(
            send_cq=send_cq.pointer, recv_cq=recv_cq.pointer, qp_type=qp_type, sq_sig_all=int(sq_sig_all)
        )
        init.cap.max_send_wr, init.cap.max_recv_wr = max_send_wr, max_recv_wr
        init.cap.max_send_sge, init.cap.max_recv_sge = max_send_sge, max_recv_sge
        init.cap.max_inline_data = max_inline_data
        handle = verbs.ibv_create_qp(pd.pointer, init)
        self.qp_num: int = handle.contents.qp_num
        super().__init__(handle, f"{qp_type} QP {self.qp_num:#08x} of {pd.context.name}", (pd, send_cq, recv_cq))
        self.qp_type, self.state, self.cap = qp_type, QpState.RESET, init.cap
        self._init = init
        context = handle.contents.context
        self._post_send = verbs.op("ibv_post_send", context)
        self._post_recv = verbs.op("ibv_post_recv", context)
        self._bad_send = POINTER(ibv_send_wr)()
        self._bad_recv = POINTER(ibv_recv_wr)()

    def _release(self, handle: Any) -> None:
        verbs.ibv_destroy_qp(handle)

    def move(self, to: QpState, path: object = None, optional: QpAttrMask = transitions.NONE) -> None:
        """Take the next step of the state machine.

        The table says which attributes the step needs; they are read from ``path`` by their C names.
        INIT to RTR on RoCE resolves the peer's address and can block for seconds.

        Args:
            to: the state to enter.
            path: an object with the attributes that the step needs, a ``Path`` for example.
            optional: bits of the table's optional column to give as well.

        Raises:
            StateError: no such step.
            ValueError: a value outside of its range.
            ModifyError: the device refused; with all that is known.

        Source: ibv_modify_qp(3).
        """
        self.pointer  # noqa: B018  closed? say so first
        attr, mask = transitions.step(self.qp_type, self.state, to, path, optional)
        self._modify(attr, mask, to, path)

    def _modify(self, attr: Mapping[str, object], mask: QpAttrMask, to: QpState, path: object) -> None:
        struct = ibv_qp_attr()
        for name, value in attr.items():
            setattr(struct, name, _ah_attr(value) if isinstance(value, AhAttr) else value)
        number = verbs.ibv_modify_qp(self.pointer, struct, int(mask))
        if number:
            raise self._refused(number, mask, to, path)
        self.state = to

    def _refused(self, number: int, mask: QpAttrMask, to: QpState, path: object) -> ModifyError:
        wrong = transitions.diagnose(self.qp_type, self.state, to, mask)
        local, remote = getattr(path, "local_gid", None), getattr(path, "remote_gid", None)
        fields = {}
        if local is not None and remote is not None:
            gids = {"local_gid": f"{local.gid}, {local.type_words}", "remote_gid": remote.gid}
            fields = {"gid_index": local.gid_index, **gids}
        hint = hint_for(f"ibv_modify_qp {to}", number, **fields)
        if wrong:
            hint = f"The table says: {wrong}. {hint}".rstrip()
        port = getattr(path, "port_num", None)
        where = f" port {port}" if port is not None else ""
        return ModifyError(
            number,
            f"move {self.name}{where} {self.state}->{to}",
            qp_num=self.qp_num,
            frm=self.state,
            to=to,
            mask=mask,
            missing=wrong.missing,
            not_allowed=wrong.not_allowed,
            path=path,
            hint=hint,
        )

    def query(self, attr_mask: QpAttrMask | None = None) -> ibv_qp_attr:
        """The attributes as the device has them now.

        Args:
            attr_mask: which are wanted, all by default; more may be filled in.

        Source: ibv_query_qp(3).
        """
        every = sum(transitions.FIELDS) & ~QpAttrMask.RATE_LIMIT  # no device gives the rate limit back
        attr, _ = verbs.ibv_query_qp(self.pointer, every if attr_mask is None else int(attr_mask))
        return attr

    def post_send(self, request: SendRequest) -> None:
        """Post a send work request, and those that it is linked to.

        Raises:
            VerbsError: ENOMEM when the queue is full, EINVAL in a wrong state.

        Source: ibv_post_send(3).
        """
        number = self._post_send(self.pointer, request.wr, byref(self._bad_send))
        if number:
            raise VerbsError("ibv_post_send", abs(number), f"post to {self.name} in {self.state}")

    def post_recv(self, request: RecvRequest) -> None:
        """Post a receive work request, and those that it is linked to.

        Raises:
            VerbsError: ENOMEM when the queue is full, EINVAL in RESET.

        Source: ibv_post_recv(3).
        """
        number = self._post_recv(self.pointer, request.wr, byref(self._bad_recv))
        if number:
            raise VerbsError("ibv_post_recv", abs(number), f"post to {self.name} in {self.state}")


def _ah_attr(value: AhAttr) -> ibv_ah_attr:
    attr = ibv_ah_attr(
        dlid=value.dlid, sl=value.sl, src_path_bits=value.src_path_bits, static_rate=value.static_rate,
        is_global=value.is_global, port_num=value.port_num,
    )  # fmt: skip
    attr.grh.dgid.raw[:] = value.dgid
    attr.grh.flow_label, attr.grh.sgid_index = value.flow_label, value.sgid_index
    attr.grh.hop_limit, attr.grh.traffic_class = value.hop_limit, value.traffic_class
    return attr


class SendRequest:
    """A send work request with one scatter/gather entry, built once and posted many times.

    Attributes:
        wr: ``struct ibv_send_wr *`` as ctypes gives it.
    """

    def __init__(self) -> None:
        self._sge = ibv_sge()
        self._wr = ibv_send_wr(sg_list=pointer(self._sge), num_sge=1)
        self.wr = pointer(self._wr)

    def fill(
        self,
        wr_id: int,
        opcode: WrOpcode,
        addr: int,
        length: int,
        lkey: int,
        *,
        remote: RemoteRegion | None = None,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> SendRequest:
        """Set everything for the next post.

        Args:
            wr_id: 64 bits, handed back in the completion.
            opcode: what to do.
            addr, length, lkey: the local bytes; a length of 0 sends an empty message.
            remote: the remote ones, for RDMA.
            flags: ``SendFlags``.
        """
        wr, sge = self._wr, self._sge
        wr.wr_id, wr.opcode, wr.send_flags = wr_id, int(opcode), int(flags)
        sge.addr, sge.length, sge.lkey = addr, length, lkey
        wr.num_sge = 1 if length else 0  # some devices read a length of 0 as 2 GiB
        if remote is not None:
            wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = remote.addr, remote.rkey
        return self


class RecvRequest:
    """A receive work request with one scatter/gather entry, built once and posted many times.

    Args:
        wr_id: 64 bits, handed back in the completion.
        addr, length, lkey: the local bytes.

    Attributes:
        wr: ``struct ibv_recv_wr *`` as ctypes gives it.
    """

    def __init__(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        self._sge = ibv_sge(addr=addr, length=length, lkey=lkey)
        self._wr = ibv_recv_wr(wr_id=wr_id, sg_list=pointer(self._sge), num_sge=1)
        self.wr = pointer(self._wr)
