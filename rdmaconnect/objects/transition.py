"""A step of the state machine made ready once, for any number of queue pairs that take it alike."""

from __future__ import annotations

from array import array as numbers
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from ..abi import QpAttrMask, QpState, QpType, ibv_qp_attr
from ..agreement import transitions
from ..agreement.path import AhAttr
from ..agreement.ranges import RANGES
from .address import ah_struct
from .fields import put

__all__ = ["Change", "Transition", "attr_struct"]

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


class Change:
    """What a queue pair is asked to change: its attributes, checked.

    Args:
        to: the state to be in after it.
        mask: the bits that are given to the device.
        attr: field of ``ibv_qp_attr`` -> value.

    Attributes:
        to, mask, attr: as given.
        port_num: the port that it sets, 0 for none.
        names_pkey: whether it sets an index of a P_Key other than 0, which must be in the port's table.
    """

    __slots__ = ("attr", "mask", "names_pkey", "port_num", "to")

    def __init__(self, to: QpState, mask: QpAttrMask, attr: Mapping[str, Any]) -> None:
        self.to, self.mask, self.attr = to, mask, attr
        self.port_num: int = attr.get("port_num", 0)
        self.names_pkey = bool(attr.get("pkey_index") or attr.get("alt_pkey_index"))


class Transition(Change):
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
        qp_type, frm: as given.

    Raises:
        StateError: no such step.
        ValueError: a value is missing or outside of its range.

    Source: ibv_modify_qp(3).
    """

    __slots__ = ("_bytes", "_own", "frm", "qp_type")

    def __init__(
        self,
        qp_type: QpType,
        frm: QpState,
        to: QpState,
        path: object = None,
        optional: QpAttrMask = transitions.NONE,
    ) -> None:
        self.qp_type, self.frm = qp_type, frm
        attr, mask = transitions.step(qp_type, frm, to, path, optional)
        super().__init__(to, mask, attr)
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

    def values(self, path: object) -> dict[str, object]:
        """The same as field -> value, for who writes another struct.

        Raises:
            ValueError: as :meth:`struct`.
        """
        own = {name: getattr(path, name) for name, *_ in self._own}
        transitions.check_ranges(own)
        return {**self.attr, **own}

    def structs(self, paths: Sequence[object]) -> Iterable[ibv_qp_attr]:
        """Those of many queue pairs, at least one; their own values are written column by column.

        Raises:
            ValueError: as :meth:`struct`.
        """
        count = len(paths)
        if count == 1:
            return (self.struct(paths[0]),)
        array = (ibv_qp_attr * count).from_buffer_copy(self._bytes * count)
        words = memoryview(array).cast("B").cast("I")
        for name, least, greatest in self._own:
            column = [*map(attrgetter(name), paths)]
            if min(column) < least or max(column) > greatest:
                for value in column:
                    transitions.check_ranges({name: value})
            first = getattr(ibv_qp_attr, name).offset // words.itemsize
            words[first :: len(words) // count] = memoryview(numbers("I", column))
        return array

    @classmethod
    def along(
        cls,
        qp_type: QpType,
        frm: QpState,
        to: QpState,
        path: object,
        optional: QpAttrMask = transitions.NONE,
    ) -> Transition:
        """The same, remembered from the last path of whose attributes all but those four are as this one's."""
        names = _shared(qp_type, frm, to, optional)
        return _made(qp_type, frm, to, optional, names, tuple(map(getattr, repeat(path), names)))


@lru_cache(maxsize=64)
def _shared(qp_type: QpType, frm: QpState, to: QpState, optional: QpAttrMask) -> tuple[str, ...]:
    return tuple(name for name in transitions.due(qp_type, frm, to, optional)[0] if name not in _OWN)


@lru_cache(maxsize=64)
def _made(
    qp_type: QpType, frm: QpState, to: QpState, optional: QpAttrMask, names: tuple[str, ...], values: tuple[object, ...]
) -> Transition:
    own = {name: RANGES[name][0] for name in _OWN}
    path = SimpleNamespace(**own, **dict(zip(names, values, strict=True)))
    return Transition(qp_type, frm, to, path, optional)
