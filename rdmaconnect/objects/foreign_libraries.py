"""The queue pairs of other Python libraries as :class:`QueuePairLike`: pyverbs of rdma-core, and ``ibverbs`` of PyPI.

Neither is imported by this: whoever has a queue pair of theirs has imported it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..abi import QpAttrMask
from ..agreement.path import AhAttr
from ..errors import StateError

__all__ = ["IbverbsQueuePair", "PyverbsQueuePair", "adapter_for"]


class PyverbsQueuePair:
    """``pyverbs.qp.QP``, of Debian's ``python3-pyverbs`` for example.

    Args:
        qp: the queue pair.

    Raises:
        StateError: it is closed.
    """

    def __init__(self, qp: Any) -> None:
        self._qp = qp
        self.device = _text(self._open().name)
        self.qp_num, self.qp_type = int(qp.qp_num), int(qp.qp_type)

    def _open(self) -> Any:
        """The context that it stands on. One that is closed has let go of it, and would end the process if asked."""
        for one in gc.get_referents(self._qp):
            for it in (one, *(gc.get_referents(one) if type(one).__module__ == "pyverbs.pd" else ())):
                if _is_a(it, "pyverbs.device", "Context"):
                    return it
        raise StateError("use a pyverbs QP: it is closed.")

    def query(self, attr_mask: QpAttrMask) -> Any:
        self._open()
        return self._qp.query(int(attr_mask))[0]

    def modify(self, attr: Mapping[str, Any], mask: QpAttrMask) -> None:
        self._open()
        struct = import_module("pyverbs.qp").QPAttr()
        for name, value in attr.items():
            setattr(struct, name, _pyverbs_ah(value) if isinstance(value, AhAttr) else int(value))
        self._qp.modify(struct, int(mask))


def _pyverbs_ah(ah: AhAttr) -> Any:
    addr, route = import_module("pyverbs.addr"), None
    if ah.is_global:
        gid = addr.GID(":".join(ah.dgid[at : at + 2].hex() for at in range(0, 16, 2)))
        route = addr.GlobalRoute(
            dgid=gid, flow_label=ah.flow_label, sgid_index=ah.sgid_index, hop_limit=ah.hop_limit,
            traffic_class=ah.traffic_class,
        )  # fmt: skip
    return addr.AHAttr(
        dlid=ah.dlid, sl=ah.sl, src_path_bits=ah.src_path_bits, static_rate=ah.static_rate, is_global=ah.is_global,
        port_num=ah.port_num, gr=route,
    )  # fmt: skip


class IbverbsQueuePair:
    """``ibverbs.QP`` of PyPI.

    Args:
        qp: the queue pair; its library refuses one that is closed.
    """

    def __init__(self, qp: Any) -> None:
        self._qp = qp
        self.qp_num, self.qp_type = int(qp.qp_num), int(qp.qp_type)
        self.device = _text(qp.pd.context.name)

    def query(self, attr_mask: QpAttrMask) -> Any:
        return SimpleNamespace(**self._qp.query()[0])

    def modify(self, attr: Mapping[str, Any], mask: QpAttrMask) -> None:
        fields = {name: int(value) for name, value in attr.items() if not isinstance(value, AhAttr)}
        ah = attr.get("ah_attr")
        if isinstance(ah, AhAttr):
            names = {name: getattr(ah, name) for name in AhAttr.__dataclass_fields__}
            fields["ah_attr"] = import_module("ibverbs").AHAttr(**names)
        self._qp.modify(int(mask), **fields)


#: module and name of a class -> its adapter
_ADAPTERS: dict[tuple[str, str], type[PyverbsQueuePair] | type[IbverbsQueuePair]] = {
    ("pyverbs.qp", "QP"): PyverbsQueuePair,
    ("ibverbs._ibverbs", "QP"): IbverbsQueuePair,
}


def adapter_for(qp: object) -> PyverbsQueuePair | IbverbsQueuePair | None:
    """A queue pair of a library that is known; None for anything else.

    Raises:
        StateError: it is closed.
    """
    for (module, name), adapter in _ADAPTERS.items():
        if _is_a(qp, module, name):
            try:
                return adapter(qp)
            except StateError:
                raise
            except Exception as e:  # its library's own
                raise StateError(f"use a queue pair of {module.partition('.')[0]}: {e}. Was it destroyed?") from e
    return None


def _is_a(thing: object, module: str, name: str) -> bool:
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(thing).__mro__)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
