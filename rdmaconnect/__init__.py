"""Connect RDMA queue pairs in one call.

One side::

    with rdmaconnect.listen() as listener, listener.accept() as conn:
        print(conn.recv())

The other::

    with rdmaconnect.connect("10.0.0.2") as conn:
        conn.send(b"hello")
"""

from .agreement.endpoint import Endpoint, Gid, GidEntry, Options, PortAddress, RemoteRegion
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
    ProtocolError,
    RdmaConnectError,
    RemoteProtocolError,
    StateError,
    VerbsError,
)
from .exchange.curve import keygen
from .objects.memory import MR
from .session.connect import aconnect, connect
from .session.connection import AsyncConnection, Connection
from .session.listen import AsyncListener, Listener, alisten, listen
from .session.meet import ameet, meet

__version__ = "0.1.0"

__all__ = [
    "MR",
    "AsyncConnection",
    "AsyncListener",
    "AuthenticationError",
    "CompletionError",
    "ConnectTimeout",
    "Connection",
    "DeadlineExceeded",
    "DeviceError",
    "Endpoint",
    "Gid",
    "GidEntry",
    "LibraryError",
    "Listener",
    "LocalProtocolError",
    "ModifyError",
    "Options",
    "Path",
    "PeerClosed",
    "PeerMismatch",
    "PeerRejected",
    "PortAddress",
    "ProtocolError",
    "RdmaConnectError",
    "RemoteProtocolError",
    "RemoteRegion",
    "StateError",
    "VerbsError",
    "__version__",
    "aconnect",
    "alisten",
    "ameet",
    "connect",
    "keygen",
    "listen",
    "meet",
]
