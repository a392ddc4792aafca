"""The steps of the state machine as connections take them, each made ready for all queue pairs that take it alike."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

from ..abi import QpAttrMask, QpState, QpType
from ..agreement.endpoint import PortAddress
from ..agreement.path import ACCESS, Path
from ..objects.transition import Transition

__all__ = ["step_to_init", "step_to_rtr", "step_to_rts"]


@lru_cache(maxsize=64)
def step_to_init(qp_type: QpType, port: PortAddress, pkey: int | None) -> Transition:
    """RESET to INIT, before there is a path.

    Args:
        qp_type: RC, UC or UD.
        port: the port it is on.
        pkey: partition key wished, or None.
    """
    wanted = (
        index
        for index, key in enumerate(port.pkeys)
        if key & 0x7FFF and (pkey is None or key & 0x7FFF == pkey & 0x7FFF)
    )
    values = SimpleNamespace(
        port_num=port.port_num, qp_access_flags=ACCESS[qp_type], qkey=0, pkey_index=next(wanted, 0)
    )
    return Transition(qp_type, QpState.RESET, QpState.INIT, values)


def step_to_rtr(path: Path, qp_type: QpType) -> Transition:
    """INIT to RTR, along a path; INIT took the first P_Key that could be, this sets the one agreed on."""
    return Transition.along(qp_type, QpState.INIT, QpState.RTR, path, QpAttrMask.PKEY_INDEX)


def step_to_rts(path: Path, qp_type: QpType) -> Transition:
    """RTR to RTS, along a path."""
    return Transition.along(qp_type, QpState.RTR, QpState.RTS, path)
