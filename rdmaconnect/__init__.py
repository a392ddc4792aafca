"""Connect RDMA queue pairs in one call.

One side::

    with rdmaconnect.listen() as listener, listener.accept() as conn:
        print(conn.recv())

The other::

    with rdmaconnect.connect("10.0.0.2") as conn:
        conn.send(b"hello")

Importing the package loads next to nothing: each public name is loaded with the module that defines it when it is first
asked for. A program that would rather wait at its start writes ``from rdmaconnect import connect``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .abi import AccessFlags, QpType, WcStatus
    from .agreement.endpoint import Endpoint, Gid, GidEntry, PortAddress, RemoteRegion
    from .agreement.options import Options
    from .agreement.path import Path
    from .errors import (
        AuthenticationError,
        CompletionError,
        ConnectTimeout,
        DeadlineExceeded,
        DeviceError,
        LibraryError,
        LocalProtocolError,
        ModifyError,
        OutcomeUnknown,
        PeerClosed,
        PeerMismatch,
        PeerRejected,
        PostError,
        ProtocolError,
        RdmaConnectError,
        RemoteProtocolError,
        StateError,
        VerbsError,
    )
    from .exchange.curve import keygen
    from .objects.buffer_like import BufferLike
    from .objects.foreign import QueuePairLike
    from .objects.memory import MR, Dmabuf
    from .protocol.health import Health, HealthState
    from .session.async_connection import AsyncConnection
    from .session.bind import AsyncBoundEnd, BoundEnd, abind, bind
    from .session.closing import aclose_many, close_many
    from .session.connect import aconnect, aconnect_many, connect, connect_many
    from .session.connection import Connection
    from .session.listen import AsyncListener, Listener, alisten, listen
    from .session.meet import ameet, meet
    from .session.pool import AsyncPool, Pool
    from .session.posted import AsyncBatch, AsyncTransfer, Batch, Transfer
    from .session.terms import BaseOptions, BindOptions, ConnectOptions, EndOptions, ListenOptions
    from .session.trace import Mark

__version__ = "0.1.0"

__all__ = [
    "MR",
    "AccessFlags",
    "AsyncBatch",
    "AsyncBoundEnd",
    "AsyncConnection",
    "AsyncListener",
    "AsyncPool",
    "AsyncTransfer",
    "AuthenticationError",
    "BaseOptions",
    "Batch",
    "BindOptions",
    "BoundEnd",
    "BufferLike",
    "CompletionError",
    "ConnectOptions",
    "ConnectTimeout",
    "Connection",
    "DeadlineExceeded",
    "DeviceError",
    "Dmabuf",
    "EndOptions",
    "Endpoint",
    "Gid",
    "GidEntry",
    "Health",
    "HealthState",
    "LibraryError",
    "ListenOptions",
    "Listener",
    "LocalProtocolError",
    "Mark",
    "ModifyError",
    "Options",
    "OutcomeUnknown",
    "Path",
    "PeerClosed",
    "PeerMismatch",
    "PeerRejected",
    "Pool",
    "PortAddress",
    "PostError",
    "ProtocolError",
    "QpType",
    "QueuePairLike",
    "RdmaConnectError",
    "RemoteProtocolError",
    "RemoteRegion",
    "StateError",
    "Transfer",
    "VerbsError",
    "WcStatus",
    "__version__",
    "abind",
    "aclose_many",
    "aconnect",
    "aconnect_many",
    "alisten",
    "ameet",
    "bind",
    "close_many",
    "connect",
    "connect_many",
    "keygen",
    "listen",
    "meet",
]

if not TYPE_CHECKING:  # with these in sight, a type checker would take any name for one of the package's
    #: module -> the public names that it defines, as above
    _DEFINED_IN = {
        "abi": "AccessFlags QpType WcStatus",
        "agreement.endpoint": "Endpoint Gid GidEntry PortAddress RemoteRegion",
        "agreement.options": "Options",
        "agreement.path": "Path",
        "errors": """
            AuthenticationError CompletionError ConnectTimeout DeadlineExceeded DeviceError LibraryError
            LocalProtocolError ModifyError OutcomeUnknown PeerClosed PeerMismatch PeerRejected PostError ProtocolError
            RdmaConnectError RemoteProtocolError StateError VerbsError
        """,
        "exchange.curve": "keygen",
        "objects.buffer_like": "BufferLike",
        "objects.foreign": "QueuePairLike",
        "objects.memory": "MR Dmabuf",
        "protocol.health": "Health HealthState",
        "session.bind": "AsyncBoundEnd BoundEnd abind bind",
        "session.closing": "aclose_many close_many",
        "session.connect": "aconnect aconnect_many connect connect_many",
        "session.async_connection": "AsyncConnection",
        "session.connection": "Connection",
        "session.listen": "AsyncListener Listener alisten listen",
        "session.meet": "ameet meet",
        "session.pool": "AsyncPool Pool",
        "session.posted": "AsyncBatch AsyncTransfer Batch Transfer",
        "session.terms": "BaseOptions BindOptions ConnectOptions EndOptions ListenOptions",
        "session.trace": "Mark",
    }

    def __getattr__(name):
        """Load a public name when it is first asked for (PEP 562)."""
        for module, names in _DEFINED_IN.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__():
        return sorted({*globals(), *__all__})
