"""What has become of the device, the port and the address of this host that a connection goes by."""

from __future__ import annotations

from ..abi import PortState
from ..agreement.endpoint import MTU_BYTES, PortAddress
from ..agreement.path import Path
from ..objects.context import Port
from ..protocol.health import HealthState

__all__ = ["compare"]

_S = HealthState


def compare(then: PortAddress, path: Path, now: Port) -> tuple[HealthState, str]:
    """What a port has become, to a connection that was made over it. Pure.

    Args:
        then: the port when it was made.
        path: which way the connection goes.
        now: the same port now.

    Returns:
        Alive and "" where nothing speaks against it; suspect where it may come back by itself, moved where the
        connection has to be made anew; and why, in words.
    """
    name = f"{now.device} port {now.port_num}"
    if now.state is not PortState.ACTIVE:
        return _S.SUSPECT, f"{name} is {now.state}"
    gid = path.local_gid
    if gid is not None:
        same = [one for one in now.gids if (one.gid, one.gid_type) == (gid.gid, gid.gid_type)]
        if all(one.gid_index != gid.gid_index for one in same):
            where = f", it is {', '.join(f'gid_index {one.gid_index}' for one in same)} now" if same else ""
            return _S.MOVED, f"{gid} is not on {name} any more{where}"
    elif now.lid != then.lid:
        return _S.MOVED, f"the LID of {name} was {then.lid} and is {now.lid}"
    if then.pkeys[path.pkey_index : path.pkey_index + 1] != now.pkeys[path.pkey_index : path.pkey_index + 1]:
        return _S.MOVED, f"the P_Key at index {path.pkey_index} of {name} has changed"
    if now.active_mtu < path.path_mtu:
        return _S.SUSPECT, f"{name} carries {MTU_BYTES[now.active_mtu]} bytes now, the path {MTU_BYTES[path.path_mtu]}"
    return _S.ALIVE, ""
