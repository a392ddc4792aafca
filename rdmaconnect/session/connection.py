"""What a user holds at the end: a connected queue pair; ``async_connection`` has the same for asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ..agreement.endpoint import RemoteRegion
from ..objects.buffer_like import BufferLike
from ..objects.memory import MR
from ..runtime.deadline import Deadline
from ..runtime.procedure import do_apart, run, run_apart
from .base import BaseConnection
from .posted import Batch, Transfer

__all__ = ["Connection"]


class Connection(BaseConnection):
    """A connected queue pair. Made by ``connect``, ``meet`` and ``Listener.accept``; a context manager.

    Messages keep their boundaries and, over RC and UC, their order. Any thread may use it. Every
    blocking call takes ``deadline_s``: seconds, or None to wait for ever.

    With ``auto_reconnect`` it has several lives: when it is lost it is connected anew, in the background. Calls that
    wait for what the peer sends wait on; those that send wait for the next life; what was posted and not done raises
    :class:`OutcomeUnknown`, which is a CompletionError. Where that comes to nothing they raise :class:`PeerClosed`.
    """

    def send(self, data: BufferLike | MR, *, deadline_s: float | None = 30) -> None:
        """Send one message; over RC, wait until the peer's device has it.

        Over UC and UD it returns when the device has sent it: what the peer has no receive for, or the
        network loses, is lost silently.

        Args:
            data: bytes-like, an array, a tensor, or an :class:`MR` of this connection, which is sent without a
                copy; at most ``max_send_size`` bytes: what the peer's receives take, the ports' longest message,
                and over UD the path MTU.
            deadline_s: seconds.

        Raises:
            ValueError: longer than that, or an :class:`MR` of another connection.
            DeadlineExceeded: the peer posted no receive in time; the message may still arrive.
            CompletionError: the transfer failed.
            PeerClosed, StateError: the connection is closed.

        Source: ibv_post_send(3), ``IBV_WR_SEND``.
        """
        rest = self._end.send(data, deadline_s)
        if rest is not None:
            run(rest)

    def recv(self, *, deadline_s: float | None = 30) -> bytes:
        """The next message.

        Returns:
            Its bytes, 0 to ``local.recv_size`` of them; the GRH of a datagram is left out.

        Raises:
            DeadlineExceeded: none came in time.
            CompletionError: the queue pair failed.
            PeerClosed, StateError: the connection is closed and no message is left.

        Source: ibv_post_recv(3).
        """
        data = self._end.try_recv(deadline_s)
        return run(self._end.recv(deadline_s)) if data is None else data

    def recv_into(self, buffer: BufferLike, *, deadline_s: float | None = 30) -> int:
        """The next message, into a writable buffer.

        Args:
            buffer: bytes-like, an array or a tensor, writable and in this host's memory.
            deadline_s: seconds.

        Returns:
            How many bytes the message has.

        Raises:
            ValueError: the message is longer than the buffer; it stays the next one. Or a read-only buffer,
                or one of a GPU.
            DeadlineExceeded, CompletionError, PeerClosed, StateError: as :meth:`recv`.
        """
        return run(self._end.recv_into(buffer, deadline_s))

    @contextmanager
    def recv_view(self, *, deadline_s: float | None = 30) -> Iterator[memoryview]:
        """The next message where it lies, without a copy: ``with conn.recv_view() as view``.

        Its memory goes back to the device at the end of ``with``; until then the peer has one receive less to send to.

        Args:
            deadline_s: seconds.

        Yields:
            The message's bytes, writable; a reconnect changes nothing about them. After the end of ``with`` the device
            fills them anew: neither they nor what was made of them (a slice, an array) is of use then.

        Raises:
            BufferError: at the end; somebody still holds the view's buffer.
            DeadlineExceeded, CompletionError, PeerClosed, StateError: as :meth:`recv`.

        Source: ibv_post_recv(3).
        """
        with run(self._end.recv_view(deadline_s)) as view:
            yield view

    def write(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str,
        *,
        offset: int = 0,
        imm: int | None = None,
        deadline_s: float | None = 30,
    ) -> None:
        """Write into the peer's memory; over RC, wait until it is there. Without ``imm`` the peer is not told.

        What is longer than the ports' longest message goes in several, one after the other.

        Args:
            data: bytes-like, an array, a tensor, or an :class:`MR` of this connection, which is written without
                a copy.
            region: where to; the name of one of ``remote``, or a region that the peer sent.
            offset: bytes from the region's start.
            imm: 32 bits that the peer's :meth:`recv_imm` gives when all is there; it takes one of the
                peer's receives. With it at least one byte is to be written.
            deadline_s: seconds.

        Raises:
            ValueError: it does not fit into the region, or ``imm`` into 32 bits; or an :class:`MR` of another
                connection.
            LookupError: no region of that name.
            CompletionError: REM_ACCESS_ERR where the region is closed or may not be written; after that
                the connection is of no more use.
            StateError: closed, or UD, which has no RDMA write.
            DeadlineExceeded, PeerClosed: as :meth:`send`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_WRITE``, ``IBV_WR_RDMA_WRITE_WITH_IMM``.
        """
        rest = self._end.write(data, region, offset, imm, deadline_s)
        if rest is not None:
            run(rest)

    def recv_imm(self, *, deadline_s: float | None = 30) -> int:
        """Wait for the peer's next ``write`` with ``imm``: what it wrote is there.

        Such writes keep their order; against messages they are not ordered.

        Returns:
            The 32 bits.

        Raises:
            StateError: closed, or UD, which has no RDMA write.
            DeadlineExceeded, CompletionError, PeerClosed: as :meth:`recv`.

        Source: ibv_poll_cq(3), ``IBV_WC_RECV_RDMA_WITH_IMM``.
        """
        return run(self._end.recv_imm(deadline_s))

    def read(
        self,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> bytes:
        """Read from the peer's memory. The peer is not told.

        Args:
            region: where from; the name of one of ``remote``, or a region that the peer sent.
            length: bytes; by default all from ``offset`` to the region's end.
            offset: bytes from the region's start.
            deadline_s: seconds.

        Returns:
            The bytes.

        Raises:
            ValueError: outside of the region.
            StateError: closed, or not RC, the only type with RDMA read.
            LookupError, CompletionError, DeadlineExceeded, PeerClosed: as :meth:`write`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_READ``.
        """
        return run(self._end.read(region, length, offset, deadline_s))

    def read_into(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> int:
        """Read from the peer's memory into a writable buffer, without a copy. The peer is not told.

        Args:
            buffer: bytes-like, an array or a tensor, writable, or an :class:`MR` of this connection; it is filled
                from its start.
            region: where from, as for :meth:`read`.
            length: bytes; by default as many as the buffer has.
            offset: bytes from the region's start.
            deadline_s: seconds.

        Returns:
            How many bytes were read: ``length``.

        Raises:
            ValueError: outside of the region, or the buffer is read-only, shorter than ``length``, or an :class:`MR`
                of another connection.
            StateError, KeyError, CompletionError, DeadlineExceeded, PeerClosed: as :meth:`read`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_READ``.
        """
        return run(self._end.read_into(buffer, region, length, offset, deadline_s))

    def fetch_add(self, region: RemoteRegion | str, add: int, *, offset: int = 0, deadline_s: float | None = 30) -> int:
        """Add to 8 bytes of the peer's memory in one step, which its device makes. The peer is not told.

        It is atomic against what comes through that device; against the peer's processor only where the device says
        so (``conn.context.attr.atomic_cap``).

        Args:
            region: where; the name of one of ``remote``, or a region that the peer sent. It is open for atomics unless
                it was registered without ``REMOTE_ATOMIC``.
            add: -2**63 to 2**64 - 1; counted modulo 2**64.
            offset: bytes from the region's start; the address is to be a multiple of 8.
            deadline_s: seconds.

        Returns:
            What was there before: 64 bits, unsigned, in the byte order of this host.

        Raises:
            ValueError: outside of the region, an address that is no multiple of 8, or a number of more than 64 bits.
            StateError: closed; not RC, the only type with atomics; a device without them, or ``max_rd_atomic`` 0.
            CompletionError: REM_ACCESS_ERR as of :meth:`write`; REM_INV_REQ_ERR where the peer's device has no
                atomics.
            LookupError, DeadlineExceeded, PeerClosed: as :meth:`write`. After a deadline it may still happen.

        Source: ibv_post_send(3), ``IBV_WR_ATOMIC_FETCH_AND_ADD``.
        """
        return run(self._end.fetch_add(region, add, offset, deadline_s))

    def compare_swap(
        self, region: RemoteRegion | str, compare: int, swap: int, *, offset: int = 0, deadline_s: float | None = 30
    ) -> int:
        """Replace 8 bytes of the peer's memory if they are as expected, in one step, as :meth:`fetch_add`.

        Args:
            region, offset, deadline_s: as for :meth:`fetch_add`.
            compare: what is expected, 0 to 2**64 - 1.
            swap: what takes its place, likewise.

        Returns:
            What was there before: it was replaced if that is ``compare``.

        Raises:
            ValueError, StateError, RdmaConnectError: as :meth:`fetch_add`.

        Source: ibv_post_send(3), ``IBV_WR_ATOMIC_CMP_AND_SWP``.
        """
        return run(self._end.compare_swap(region, compare, swap, offset, deadline_s))

    def post_send(self, data: BufferLike | MR, *, deadline_s: float | None = 30) -> Transfer:
        """Begin to send a message, as :meth:`send`, and do not wait for its end.

        ``send_depth`` work requests can be on their way at once: one for each message, several for what is longer than
        the ports' longest one. Over RC and UC they are done in the order of posting.

        Args:
            data: as for :meth:`send`. What is no longer than the peer's receives, nor than 256 KiB, is copied before
                this returns; anything else, and an :class:`MR`, must stay as it is until the transfer is over.
            deadline_s: seconds to wait for a place in the queue.

        Returns:
            What to wait for.

        Raises:
            DeadlineExceeded: the queue stayed full: nothing was sent.
            ValueError, CompletionError, PeerClosed, StateError: as :meth:`send`.

        Source: ibv_post_send(3), ``IBV_WR_SEND``.
        """
        return Transfer(self._end, run(self._end.begin_send(data, deadline_s)))

    def post_write(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str,
        *,
        offset: int = 0,
        imm: int | None = None,
        deadline_s: float | None = 30,
    ) -> Transfer:
        """Begin to write into the peer's memory, as :meth:`write`, and do not wait for its end.

        Args:
            data, region, offset, imm: as for :meth:`write`; how long ``data`` must stay, as for :meth:`post_send`.
            deadline_s: seconds to wait for a place in the queue.

        Returns:
            What to wait for.

        Raises:
            DeadlineExceeded: the queue stayed full; of what goes in several messages some may have been written.
            ValueError, LookupError, CompletionError, PeerClosed, StateError: as :meth:`write`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_WRITE``, ``IBV_WR_RDMA_WRITE_WITH_IMM``.
        """
        return Transfer(self._end, run(self._end.begin_write(data, region, offset, imm, deadline_s)))

    def post_read(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        deadline_s: float | None = 30,
    ) -> Transfer:
        """Begin to read from the peer's memory, as :meth:`read_into`, and do not wait for its end.

        Args:
            buffer, region, length, offset: as for :meth:`read_into`; the buffer is filled when the transfer is over.
            deadline_s: seconds to wait for a place in the queue.

        Returns:
            What to wait for.

        Raises:
            DeadlineExceeded: the queue stayed full.
            ValueError, LookupError, CompletionError, PeerClosed, StateError: as :meth:`read_into`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_READ``.
        """
        return Transfer(self._end, run(self._end.reading(buffer, region, length, offset, Deadline(deadline_s))))

    def batch(self, *, deadline_s: float | None = 30) -> Batch:
        """Post several transfers as one list: ``with conn.batch() as batch: batch.post_write(...)``.

        Args:
            deadline_s: seconds from here until the last of them has a place in the queue.

        Returns:
            A context manager with ``post_send``, ``post_write`` and ``post_read``; what they give can be waited for
            after the end of ``with``.

        Source: ibv_post_send(3), ``next`` and ``IBV_SEND_SIGNALED``.
        """
        return Batch(self._end, deadline_s)

    def reconnect(self, *, deadline_s: float | None = 30) -> None:
        """Connect this same object anew, after its peer or the network failed.

        The queue pair goes through RESET and gets a fresh PSN; registered memory stays, and so do messages
        that were not read. What was posted and not done raises :class:`OutcomeUnknown`. The side that
        called ``connect`` calls the address again, where a new process may answer; the other side's
        ``reconnect`` waits for that, or, in a new process, ``accept``. Where it is being connected anew by
        itself (``auto_reconnect``), that is waited for.

        Args:
            deadline_s: seconds.

        Raises:
            StateError: closed, or made together with others.
            RdmaConnectError: as ``connect`` and ``accept``; then the connection can be tried again.
        """
        run_apart(self._end.reconnect(deadline_s))

    def close(self) -> None:
        """Tell the peer, free everything; what is outstanding counts as flushed. Twice is fine.

        What ``auto_reconnect`` has under way just then goes a moment later, when its step has come to an end.

        Raises:
            VerbsError: something could not be freed: it names all that stays. Close again later.
        """
        do_apart(self._end.close)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
