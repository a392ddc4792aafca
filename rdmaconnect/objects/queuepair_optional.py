"""What a queue pair can besides, where its type and its device have it: windows, multicast, ECE, order, rates."""

from __future__ import annotations

from .. import verbs
from ..abi import (
    AccessFlags,
    MwType,
    QpDataInOrderCaps,
    QpDataInOrderFlags,
    QpState,
    SendFlags,
    WrOpcode,
    ibv_ece,
    ibv_gid,
    ibv_mw_bind,
    ibv_qp_rate_limit_attr,
)
from ..agreement.endpoint import Gid
from ..errors import StateError
from .fields import bits, put
from .locks import exclusive, holding
from .memory import MR, PD
from .memory_window import MW
from .owned import Owned
from .qp_attr import Ece

__all__ = ["OptionalVerbs", "c_gid"]


class OptionalVerbs(Owned):
    """For :class:`~rdmaconnect.objects.queuepair.QueuePair`."""

    pd: PD | None
    state: QpState
    #: the multicast groups that it is in
    #: multicast groups that it is in
    _groups: tuple[tuple[Gid, int], ...] = ()

    def bind_mw(
        self,
        wr_id: int,
        mw: MW,
        mr: MR,
        *,
        offset: int = 0,
        length: int | None = None,
        access: AccessFlags | None = None,
        flags: int = SendFlags.SIGNALED,
    ) -> None:
        """Post the binding of a type 1 window to a part of a region; ``mw.region`` holds once it has completed.

        Args:
            wr_id: 64 bits, handed back in the completion.
            mw: the window.
            mr: a region with ``MW_BIND`` access, of the same protection domain.
            offset, length: the part, in bytes; by default all. A length of 0 unbinds.
            access: what the peer may do, by default everything remote.
            flags: ``SendFlags``.

        Raises:
            ValueError: a window of type 2, a part outside of the region, ...
            StateError: the queue pair cannot send in its state.
            VerbsError: ENOMEM when the queue is full, among others.

        Source: ibv_bind_mw(3).
        """
        if mw.mw_type != MwType.TYPE_1:
            raise ValueError(f"bind {mw.name}: a bind_mw() work request binds type 2, this one type 1")
        info = mw.bind_info(mr, offset, length, access)
        if self.pd is None or mw.pd.base is not self.pd.base:
            raise ValueError(f"bind {mw.name} by {self.name}: it is of another protection domain")
        bind = put(ibv_mw_bind(bind_info=info), wr_id=wr_id, send_flags=int(flags))
        with self.lock, holding((mw, mr)):
            if self.state < QpState.RTS:
                raise StateError(f"post to {self.name}: it is in {self.state} and sends from RTS on.")
            before = mw.note_bound(mr, info, mw.rkey)
            try:
                verbs.ibv_bind_mw(self.pointer, mw.pointer, bind)
            except BaseException:
                mw.note_unbound(before)
                raise
            mw.note_bound(mr, info, mw.rkey)

    @exclusive
    def attach_mcast(self, gid: Gid, lid: int = 0) -> None:
        """Receive what is sent to a multicast group, until :meth:`detach_mcast` or the end of the queue pair.

        On RoCE the host's IP stack must be in the group too (``IP_ADD_MEMBERSHIP`` on the port's network
        device); on InfiniBand the subnet manager must know the port as a member. librdmacm does either.

        Args:
            gid: the group, a multicast GID (ff00::/8, or ::ffff:224.0.0.0/100 for IPv4).
            lid: its LID on InfiniBand, 0 on Ethernet.

        Raises:
            VerbsError: EINVAL for a queue pair other than UD, or what is no multicast GID.

        Source: ibv_attach_mcast(3).
        """
        verbs.ibv_attach_mcast(self.pointer, c_gid(gid), bits("lid", lid, 16))
        self._groups = (*self._groups, (gid, lid))

    @exclusive
    def detach_mcast(self, gid: Gid, lid: int = 0) -> None:
        """Leave a multicast group. Source: ibv_attach_mcast(3)."""
        verbs.ibv_detach_mcast(self.pointer, c_gid(gid), bits("lid", lid, 16))
        self._groups = tuple(one for one in self._groups if one != (gid, lid))

    @exclusive
    def query_ece(self) -> Ece:
        """The vendor's connection options that it would like; LibraryError where there are none.

        Source: ibv_query_ece(3).
        """
        ece = verbs.ibv_query_ece(self.pointer)
        return Ece(ece.vendor_id, ece.options)

    @exclusive
    def set_ece(self, ece: Ece) -> None:
        """Set the vendor's connection options that both ends agreed on, before RTR. Source: ibv_set_ece(3)."""
        verbs.ibv_set_ece(self.pointer, put(ibv_ece(), vendor_id=ece.vendor_id, options=ece.options))

    @exclusive
    def data_in_order(self, opcode: WrOpcode, flags: QpDataInOrderFlags | None = None) -> QpDataInOrderCaps:
        """How far the bytes of a message reach memory in order; without ``RETURN_CAPS`` all or nothing.

        Source: ibv_query_qp_data_in_order(3).
        """
        return QpDataInOrderCaps(verbs.ibv_query_qp_data_in_order(self.pointer, int(opcode), int(flags or 0)))

    @exclusive
    def limit_rate(self, rate_limit: int, max_burst_sz: int = 0, typical_pkt_sz: int = 0) -> None:
        """Pace what it sends.

        Args:
            rate_limit: kbit/s, 0 for no limit.
            max_burst_sz: the largest burst, bytes.
            typical_pkt_sz: what a packet usually has, bytes.

        Source: ibv_modify_qp_rate_limit(3).
        """
        attr = put(
            ibv_qp_rate_limit_attr(), rate_limit=rate_limit, max_burst_sz=max_burst_sz, typical_pkt_sz=typical_pkt_sz
        )
        verbs.ibv_modify_qp_rate_limit(self.pointer, attr)


def c_gid(gid: Gid) -> ibv_gid:
    """A GID as C has it."""
    struct = ibv_gid()
    struct.raw[:] = gid.raw
    return struct
