"""Address handles: the path that a UD send names; and whom a send is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import verbs
from ..abi import ibv_ah_attr, ibv_grh, ibv_wc
from ..agreement.endpoint import GRH_BYTES, Gid
from ..agreement.path import AhAttr
from ..agreement.transitions import check_ranges
from .buffers import hold
from .completion_ex import CQEx
from .context import Context
from .memory import PD
from .owned import Owned

__all__ = ["AddressHandle", "RemoteSrq", "UdAddress", "ah_struct", "ah_value", "path_back", "route_words"]


def ah_struct(value: AhAttr) -> ibv_ah_attr:
    """``struct ibv_ah_attr`` of a value.

    Raises:
        ValueError: a field outside of its range, by name: C would cut it off silently.
    """
    check_ranges({"ah_attr": value})
    if len(value.dgid) != 16:
        raise ValueError(f"ah_attr.dgid has {len(value.dgid)} bytes: give 16")
    attr = ibv_ah_attr(
        dlid=value.dlid, sl=value.sl, src_path_bits=value.src_path_bits, static_rate=value.static_rate,
        is_global=value.is_global, port_num=value.port_num,
    )  # fmt: skip
    attr.grh.dgid.raw[:] = value.dgid
    attr.grh.flow_label, attr.grh.sgid_index = value.flow_label, value.sgid_index
    attr.grh.hop_limit, attr.grh.traffic_class = value.hop_limit, value.traffic_class
    return attr


def ah_value(attr: ibv_ah_attr) -> AhAttr:
    """The value of a ``struct ibv_ah_attr``, which it no longer needs."""
    grh = attr.grh
    return AhAttr(
        port_num=attr.port_num, dlid=attr.dlid, sl=attr.sl, src_path_bits=attr.src_path_bits,
        static_rate=attr.static_rate, is_global=attr.is_global, dgid=bytes(grh.dgid.raw),
        flow_label=grh.flow_label, sgid_index=grh.sgid_index, hop_limit=grh.hop_limit,
        traffic_class=grh.traffic_class,
    )  # fmt: skip


def route_words(context: Context, path: object, ah: object) -> dict[str, object]:
    """What a hint says of a path: ``gid_index``, ``local_gid``, ``remote_gid``; {} if no GIDs are known.

    Args:
        context: the device.
        path: a ``Path``, or None.
        ah: the ``AhAttr`` where there is no path, or None.
    """
    local, remote = getattr(path, "local_gid", None), getattr(path, "remote_gid", None)
    if local is not None and remote is not None:
        words = f"{local.gid}, {local.type_words}"
        return {"gid_index": local.gid_index, "local_gid": words, "remote_gid": remote.gid}
    if not isinstance(ah, AhAttr) or not ah.is_global:
        return {}
    here = (ah.port_num, ah.sgid_index)
    mine = next((Gid(s.raw) for s in context.gid_table() if (s.port_num, s.gid_index) == here), "an empty slot")
    return {"gid_index": ah.sgid_index, "local_gid": mine, "remote_gid": Gid(ah.dgid)}


def path_back(context: Context, port_num: int, wc: Any, buffer: Any) -> AhAttr:
    """The path back to where a UD message came from.

    Args:
        context: the device.
        port_num: the port that it came in on.
        wc: its completion, whose ``wc_flags``, ``slid``, ``sl`` and ``dlid_path_bits`` are read: one of
            :attr:`CQ.wcs`, or within a batch the :class:`CQEx` itself, made with ``SLID``, ``SL`` and
            ``DLID_PATH_BITS``.
        buffer: what it was received into, at least its first 40 bytes.

    Raises:
        ValueError: fewer than 40 bytes.
        StateError: the queue was made without one of these fields, or no completion of it is current.
        VerbsError: its source address is not reachable from any GID of the port, among others.

    Source: ibv_create_ah_from_wc(3), ``ibv_init_ah_from_wc``.
    """
    return ah_value(verbs.ibv_init_ah_from_wc(context.pointer, port_num, _wc(wc), _grh(buffer)))


def _wc(wc: Any) -> ibv_wc:
    if isinstance(wc, CQEx):
        return ibv_wc(
            wc_flags=wc.read_wc_flags(), slid=wc.read_slid(), sl=wc.read_sl(), dlid_path_bits=wc.read_dlid_path_bits()
        )
    return ibv_wc(wc_flags=wc.wc_flags, slid=wc.slid, sl=wc.sl, dlid_path_bits=wc.dlid_path_bits, src_qp=wc.src_qp)


def _grh(buffer: Any) -> ibv_grh:
    with hold(buffer) as held:
        if held.length < GRH_BYTES:
            what = f"a buffer of {held.length} bytes has no room for a GRH"
            raise ValueError(f"{what}: give the first {GRH_BYTES} received")
        return ibv_grh.from_buffer_copy(held.view[:GRH_BYTES])


class AddressHandle(Owned):
    """A path that UD sends name.

    Args:
        pd: its protection domain, that of the queue pairs that use it.
        attr: the path; on RoCE with ``is_global``, and the peer's address is resolved, which can block.

    Attributes:
        pd, attr: as given.

    Raises:
        ValueError: a field outside of its range.
        VerbsError: EINVAL without a GRH on RoCE, ETIMEDOUT where the peer does not answer, among others.

    Source: ibv_create_ah(3).
    """

    def __init__(self, pd: PD, attr: AhAttr) -> None:
        struct = ah_struct(attr)
        self._own(pd, attr, lambda: verbs.ibv_create_ah(pd.pointer, struct))

    @classmethod
    def reply_to(cls, pd: PD, port_num: int, wc: Any, buffer: Any) -> AddressHandle:
        """The path back to where a UD message came from; arguments and errors as :func:`path_back`.

        Source: ibv_create_ah_from_wc(3).
        """
        attr = path_back(pd.context, port_num, wc, buffer)
        handle, copy, grh = cls.__new__(cls), _wc(wc), _grh(buffer)
        handle._own(pd, attr, lambda: verbs.ibv_create_ah_from_wc(pd.pointer, copy, grh, port_num))
        return handle

    def _own(self, pd: PD, attr: AhAttr, make: Callable[[], Any]) -> None:
        self.pd, self.attr = pd, attr
        where = f"GID {attr.dgid.hex()}" if attr.is_global else f"LID {attr.dlid:#x}"
        super().__init__(make, f"address handle of {pd.context.name} to {where}", (pd,))

    def _must_wait(self) -> bool:
        # sends that name it may be on their way, and would fail: it is kept with the protection domain
        return not any(parent.due for parent in self._parents)

    def _release(self, pointer: Any) -> None:
        verbs.ibv_destroy_ah(pointer)


@dataclass(frozen=True, slots=True)
class UdAddress:
    """Whom a UD send is for.

    Args:
        ah: the path.
        remote_qpn: the queue pair's number, 24 bits; 0xFFFFFF for a multicast group.
        remote_qkey: its Q_Key, 32 bits; with the highest bit the sender's own Q_Key is used.
    """

    ah: AddressHandle
    remote_qpn: int
    remote_qkey: int = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.remote_qpn <= 0xFFFFFF:
            raise ValueError(f"remote_qpn is {self.remote_qpn}: give 24 bits")
        if not 0 <= self.remote_qkey <= 0xFFFFFFFF:
            raise ValueError(f"remote_qkey is {self.remote_qkey}: give 32 bits")


@dataclass(frozen=True, slots=True)
class RemoteSrq:
    """Which shared receive queue an XRC_SEND work request goes to.

    Args:
        srqn: its number, 24 bits, as its owner's :meth:`SRQ.number` gives it.
    """

    srqn: int

    def __post_init__(self) -> None:
        if not 0 <= self.srqn <= 0xFFFFFF:
            raise ValueError(f"srqn is {self.srqn}: give 24 bits")
