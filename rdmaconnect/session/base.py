"""What both fronts of a connection share: what they show of their end."""

from __future__ import annotations

from collections.abc import Mapping

from ..abi import AccessFlags
from ..agreement.endpoint import Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import RdmaConnectError, shown
from ..objects.address import AddressHandle
from ..objects.memory import MR, MemoryLike
from .end import End
from .trace import Mark

__all__ = ["BaseConnection", "end_of"]


class BaseConnection:
    """What a user holds of an end, blocking or for asyncio."""

    #: polls before a wait sleeps, at most
    _MOST_SPIN: int | None = None

    def __init__(self, end: End) -> None:
        self._end = end
        end.front = type(self).__name__
        if self._MOST_SPIN is not None:
            end.spin = min(end.spin, self._MOST_SPIN)

    @property
    def local(self) -> Endpoint:
        """This end: its queue pair and port."""
        return self._end.local

    @property
    def peer(self) -> Endpoint:
        """The other end."""
        return self._end.peer

    @property
    def path(self) -> Path:
        """What was agreed on; ``path.why`` says it in words."""
        return self._end.path

    @property
    def remote(self) -> Mapping[str, RemoteRegion]:
        """The peer's named regions."""
        return self._end.remote

    @property
    def regions(self) -> Mapping[str, MR]:
        """This end's named regions."""
        return self._end.regions

    @property
    def private_data(self) -> bytes:
        """What the peer's application gave to ``connect`` or ``listen``, at most 4096 bytes."""
        return self._end.private_data

    @property
    def max_send_size(self) -> int:
        """Bytes of the longest message that can be sent."""
        return self._end.max_send_size

    @property
    def ah(self) -> AddressHandle | None:
        """For UD, the address handle that leads to the peer; None else."""
        return self._end.ah

    @property
    def connect_s(self) -> float:
        """Seconds from the first call until the connection stood."""
        return self._end.connect_s

    @property
    def closed(self) -> bool:
        """Whether this side was closed."""
        return self._end.closed

    @property
    def lost(self) -> RdmaConnectError | None:
        """Why the connection is of no more use, or None as far as is known here. Never blocks."""
        return self._end.lost

    @property
    def trace(self) -> tuple[Mark, ...]:
        """Each stage of the handshake with its time, this end's and the peer's, in the order of time.

        The times are seconds since this end's start: the call of ``connect`` or ``meet``, or the arrival of
        the peer's hello. The two clocks are aligned by halving the round trip, and ``within_s`` says how
        exact that is. The peer's stages are those until its proof (with ``probe=False``, until its last
        message); none if its version does not tell them. Connections that were made together share one
        trace; ``reconnect`` begins a new one.
        """
        return self._end.trace

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None) -> MR:
        """Register memory on this connection's protection domain.

        ``mr.region.to_bytes()`` is what the peer needs to write or read it. It is closed with the last
        of the connections that were made together, or before.

        Args:
            buffer: bytes-like, array, mmap, shared memory, NumPy array, tensor (torch, DLPack, CUDA), in one
                piece; (address, bytes); or a :class:`Dmabuf`.
            access: by default everything, or only remote reads for a read-only buffer.

        Raises:
            TypeError, ValueError, VerbsError: as :class:`MR`.

        Source: ibv_reg_mr(3).
        """
        return self._end.register(buffer, access)

    def __repr__(self) -> str:
        return repr(self._end)


def end_of(connection: BaseConnection) -> End:
    """The end that a user holds.

    Raises:
        TypeError: it is no connection.
    """
    if not isinstance(connection, BaseConnection):
        raise TypeError(f"via is {shown(connection)}: give a UD connection, whose queue pair is to serve this peer too")
    return connection._end
