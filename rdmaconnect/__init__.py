"""Connect RDMA queue pairs in one call.

One side::

    with rdmaconnect.listen() as listener, listener.accept() as conn:
        print(conn.recv())

The other::

    with rdmaconnect.connect("10.0.0.2") as conn:
        conn.send(b"hello")
"""

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
from .objects.memory import MR, Dmabuf
from .session.async_connection import AsyncConnection
from .session.connect import aconnect, aconnect_many, connect, connect_many
from .session.connection import Connection
from .session.listen import AsyncListener, Listener, alisten, listen
from .session.meet import ameet, meet
from .session.posted import AsyncBatch, AsyncTransfer, Batch, Transfer
from .session.terms import BaseOptions, ConnectOptions, ListenOptions
from .session.trace import Mark

__version__ = "0.1.0"

__all__ = [
    "MR",
    "AccessFlags",
    "AsyncBatch",
    "AsyncConnection",
    "AsyncListener",
    "AsyncTransfer",
    "AuthenticationError",
    "BaseOptions",
    "Batch",
    "BufferLike",
    "CompletionError",
    "ConnectOptions",
    "ConnectTimeout",
    "Connection",
    "DeadlineExceeded",
    "DeviceError",
    "Dmabuf",
    "Endpoint",
    "Gid",
    "GidEntry",
    "LibraryError",
    "ListenOptions",
    "Listener",
    "LocalProtocolError",
    "Mark",
    "ModifyError",
    "Options",
    "Path",
    "PeerClosed",
    "PeerMismatch",
    "PeerRejected",
    "PortAddress",
    "PostError",
    "ProtocolError",
    "QpType",
    "RdmaConnectError",
    "RemoteProtocolError",
    "RemoteRegion",
    "StateError",
    "Transfer",
    "VerbsError",
    "WcStatus",
    "__version__",
    "aconnect",
    "aconnect_many",
    "alisten",
    "ameet",
    "connect",
    "connect_many",
    "keygen",
    "listen",
    "meet",
]
