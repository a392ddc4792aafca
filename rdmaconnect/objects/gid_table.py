"""The GID tables of a device, by the best verb that the library has."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import verbs
from ..abi import GidType, LinkLayer
from ..errors import LibraryError, VerbsError
from .sysfs import gid_attribute

__all__ = ["LACKING", "GidSlot", "read_gid_table"]

#: how libraries and kernels say that they lack a verb as a whole
LACKING = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT)


class GidSlot(NamedTuple):
    """A filled slot of a GID table, at any index: ``raw`` is the GID, 16 bytes in network order."""

    port_num: int
    gid_index: int
    raw: bytes
    gid_type: GidType


def read_gid_table(context: Any, device: str, attrs: Mapping[int, Any]) -> list[GidSlot]:
    """The filled slots of all ports: in one call where the library can, else slot by slot.

    Args:
        context: pointer to ``struct ibv_context``.
        device: the device's name.
        attrs: port number -> ``struct ibv_port_attr``.

    Raises:
        VerbsError: they cannot be read.

    Source: ibv_query_gid_table(3), ibv_query_gid_ex(3), ibv_query_gid(3).
    """
    try:
        entries = verbs.ibv_query_gid_table(context, max(1, sum(attr.gid_tbl_len for attr in attrs.values())))
    except (LibraryError, VerbsError) as e:
        if e.errno not in LACKING:
            raise
        slots = [_slot(context, device, n, attr, i) for n, attr in attrs.items() for i in range(attr.gid_tbl_len)]
    else:
        slots = [GidSlot(e.port_num, e.gid_index, bytes(e.gid.raw), GidType(e.gid_type)) for e in entries]
    return [slot for slot in slots if any(slot.raw)]


def _slot(context: Any, device: str, port_num: int, attr: Any, index: int) -> GidSlot:
    """One slot, all 0 if it is empty, by what an older library has."""
    try:
        entry = verbs.ibv_query_gid_ex(context, port_num, index)
    except (LibraryError, VerbsError) as e:
        if e.errno == errno.ENODATA:
            return GidSlot(port_num, index, bytes(16), GidType.IB)
        if e.errno not in LACKING:
            raise
    else:
        return GidSlot(port_num, index, bytes(entry.gid.raw), GidType(entry.gid_type))
    slot = GidSlot(port_num, index, verbs.ibv_query_gid(context, port_num, index), GidType.IB)
    if attr.link_layer != LinkLayer.ETHERNET or not any(slot.raw):
        return slot
    v2 = gid_attribute(device, port_num, index, "types") == "RoCE v2"
    return slot._replace(gid_type=GidType.ROCE_V2 if v2 else GidType.ROCE_V1)
