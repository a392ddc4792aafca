"""A step of the state machine made ready once, for any number of queue pairs that take it alike."""

from __future__ import annotations

from collections.abc import Mapping

from ..abi import QpAttrMask, QpState, QpType, ibv_qp_attr
from ..agreement import transitions
from ..agreement.path import AhAttr
from ..agreement.ranges import RANGES
from .address import ah_struct
from .fields import put

__all__ = ["Transition", "attr_struct"]

#: what differs from one queue pair to the next on the same path
_OWN = ("dest_qp_num", "rq_psn", "sq_psn", "qkey")


def attr_struct(attr: Mapping[str, object]) -> ibv_qp_attr:
    """``struct ibv_qp_attr`` of field -> value, ``AhAttr`` for the address vectors.

    Raises:
        ValueError: a number that its field cannot hold.
    """
    given = {name: ah_struct(value) if isinstance(value, AhAttr) else value for name, value in attr.items()}
    struct: ibv_qp_attr = put(ibv_qp_attr(), **given)
    return struct


class Transition:
    """One step, with its attributes looked up in the table, checked and written into C.

    Of all attributes only ``dest_qp_num``, ``rq_psn``, ``sq_psn`` and ``qkey`` are taken anew from the path of each
    queue pair that takes the step: they are its own, all others are those of the two ports.

    Args:
        qp_type: the type of the queue pairs.
        frm: the state that they are in.
        to: the state to enter.
        path: an object with the attributes that the step needs, by their C names.
        optional: bits of the table's optional column to give as well.

    Attributes:
        qp_type, frm, to: as given.
        mask: the bits that are given to the device.
        attr: field of ``ibv_qp_attr`` -> value.

    Raises:
        StateError: no such step.
        ValueError: a value is missing or outside of its range.

    Source: ibv_modify_qp(3).
    """

    __slots__ = ("_bytes", "_own", "attr", "frm", "mask", "qp_type", "to")

    def __init__(
        self,
        qp_type: QpType,
        frm: QpState,
        to: QpState,
        path: object = None,
        optional: QpAttrMask = transitions.NONE,
    ) -> None:
        self.qp_type, self.frm, self.to = qp_type, frm, to
        self.attr, self.mask = transitions.step(qp_type, frm, to, path, optional)
        self._bytes = bytes(attr_struct(self.attr))
        self._own = [(name, *RANGES[name][:2]) for name in _OWN if name in self.attr]

    def struct(self, path: object) -> ibv_qp_attr:
        """``struct ibv_qp_attr`` of one queue pair.

        Raises:
            ValueError: a value of its own is outside of its range.
        """
        struct = ibv_qp_attr.from_buffer_copy(self._bytes)
        for name, least, greatest in self._own:
            value = getattr(path, name)
            if not least <= value <= greatest:
                transitions.check_ranges({name: value})
            setattr(struct, name, value)
        return struct
