"""A native device in software, in place of libibverbs itself, so that the whole library runs on it unchanged.

The fixture ``software`` installs one, ``soft0`` on 127.0.0.1, and asserts at the end that nothing of it is left::

    def test_something(software: Software) -> None:
        software.on("ibv_modify_qp", to=QpState.RTR, dgid="127.0.0.1", delay=0.5)  # or fail=errno.ETIMEDOUT, ...
        with software.network.cut("127.0.0.1", "127.0.0.2"):  # or lose(predicate), unreachable(gid, seconds)
            ...
        software.devices[0].ports[0].gids.append("::1")
        assert software.left() == {}  # and software.made, .calls, .descriptors, .errors
        software.leaves(pd=1)  # what a test leaves on purpose,
        software.expects("use after free")  # or does, which no program may

``Software(devices, network)`` makes others. See :class:`Software` for what it counts and for hooks on verbs,
:class:`Network` for what can go wrong between queue pairs (and ``Network.shared`` for one that several processes
are on), :class:`Device` and :class:`Port` for what can be set, :func:`connected` and :func:`joined` for ends to
start from, and :class:`after_verbs` for tests of Ctrl-C.
"""

from .device import Device, Port
from .ends import End, connected, end_on, joined
from .hooks import Call, Hook
from .interrupts import after_verbs
from .network import Message, Network, Trouble
from .rdmacm import RdmaCm
from .world import Software

__all__ = [
    "Call",
    "Device",
    "End",
    "Hook",
    "Message",
    "Network",
    "Port",
    "RdmaCm",
    "Software",
    "Trouble",
    "after_verbs",
    "connected",
    "end_on",
    "joined",
]
