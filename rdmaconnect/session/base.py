"""What both fronts of a connection share: what they show of their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..abi import AccessFlags
from ..agreement.endpoint import Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import RdmaConnectError, shown
from ..objects.address import AddressHandle
from ..objects.completion import CQ
from ..objects.context import Context
from ..objects.memory import MR, PD, MemoryLike
from ..objects.queuepair import QueuePair
from ..protocol.health import Health
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

    # ---- what it stands on

    @property
    def qp(self) -> QueuePair:
        """The queue pair that it is, in RTS: to be asked (``query``, ``cap``, ``qp_num``).

        It, :attr:`cq`, :attr:`pd` and :attr:`context` are the connection's, and lent: they are the same objects over
        ``reconnect`` and ``auto_reconnect``, which take the queue pair through RESET; they are closed with the
        connection (of those that were made together with the last), or where the device is removed, and are not for
        others to close. What takes completions here knows only work that this connection has posted, so post by its
        methods. Where the queue pair was given (``qp=``) it is that object, and stays the application's; where
        completion queues were (``send_cq=``) it is for the application to post to.
        """
        return self._end.qp

    @property
    def cq(self) -> CQ:
        """The completion queue of its sends and receives; lent, as :attr:`qp`.

        The connection polls it whenever it is used: who polls it besides takes completions away from it. Where it was
        given (``send_cq=``) it is the application's, and nobody else polls it.

        Raises:
            StateError: a queue pair was given, whose queues are not known here.
        """
        return self._end.engine.cq

    @property
    def pd(self) -> PD:
        """The protection domain; lent, as :attr:`qp`. What others make on it is closed with it.

        Where a :class:`QueuePair` was given (``qp=``) it is that one's, and stays.

        Raises:
            StateError: a queue pair of another library was given.
        """
        return self._end.engine.pd

    @property
    def context(self) -> Context:
        """This connection's use of the opened device; lent, as :attr:`qp`: ``conn.context.attr``, ``.port(1)``."""
        return self._end.engine.context

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
        """Why the connection is of no more use, or None as far as is known here. Never blocks.

        None too while it is being connected anew by itself.
        """
        return self._end.lost

    @property
    def health(self) -> Health:
        """What is known of the peer: ``health.state``, ``health.why`` in words, ``health.since``. Never blocks.

        - ``alive``: nothing speaks against it;
        - ``suspect``: one of the two paths to it has failed, or is silent, and it is being asked. A side channel that
          broke is dialled again by the side that called ``connect``; meanwhile the data path goes on;
        - ``moved``: this host's port or address that the connection goes by is gone or has changed;
        - ``dead``: the peer said good-bye, its process is gone, or neither path has brought anything for 15 s. Then
          waiting calls end, and :meth:`reconnect` is what brings it back. With ``auto_reconnect`` it is suspect
          instead, while it is being connected anew.

        Connections that were made together share one peer, and its health.
        """
        return self._end.health

    def on_change(self, function: Callable[[Health], object]) -> Callable[[], None]:
        """Have a function called whenever :attr:`health` changes, this side's ``close`` included.

        Args:
            function: is given the new health, in the thread of the exchange: it must not block, nor wait for anything
                of this connection. What it raises is logged.

        Returns:
            A function that takes it back.
        """
        return self._end.on_change(function)

    @property
    def generation(self) -> int:
        """Which life of the connection this is: 1 at first, and one more each time that it was connected anew.

        What belongs to an earlier life is of no use in this one: its transfers raise :class:`OutcomeUnknown` where they
        were not done, its batches and the peer's ``remote`` of then are refused.
        """
        return self._end.generation

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


def end_of(
    connection: BaseConnection,
    name: str = "via",
    wanted: str = "a UD connection, whose queue pair is to serve this peer too",
) -> End:
    """The end that a user holds.

    Args:
        connection: what was given.
        name: the argument that it was given by.
        wanted: what is to be given there.

    Raises:
        TypeError: it is no connection.
    """
    if not isinstance(connection, BaseConnection):
        raise TypeError(f"{name} is {shown(connection)}: give {wanted}")
    return connection._end
