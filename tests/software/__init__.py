"""A native device in software, in place of libibverbs itself, so that the whole library runs on it unchanged.

::

    with Software() as software:
        software.on("ibv_modify_qp", to=QpState.RTR, dgid="127.0.0.1", delay=0.5)
        ...
        assert software.left() == {}

See :class:`Software` for what it counts and for hooks on verbs, :class:`Network` for what can be lost, cut or
unreachable, :class:`Device` and :class:`Port` for what can be set of a device.
"""

from .device import Device, Port
from .hooks import Call, Hook
from .network import Message, Network, Trouble
from .world import Software

__all__ = ["Call", "Device", "Hook", "Message", "Network", "Port", "Software", "Trouble"]
