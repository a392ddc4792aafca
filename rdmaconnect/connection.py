"""What a user holds at the end: a queue pair in RTS, and what can be done with it."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from .abi import AccessFlags, QpState, WcStatus, WrOpcode
from .deadline import Deadline, wait_readable
from .endpoint import Endpoint, RemoteRegion
from .errors import CompletionError, PeerClosed, RdmaConnectError, StateError, VerbsError
from .handshake import Handshake, Outcome
from .memory import MR
from .path import Path
from .prepare import Prepared
from .queuepair import SendRequest
from .wire import Bye, decode, encode

__all__ = ["Connection"]

#: the longest sleep: another thread may have taken the event, ms
_SLICE_MS = 50
#: work-request ids from here on are sends; below they are receive slots
_SEND = 1 << 32
#: slots of the staging memory, each as large as the peer's receives
_STAGES = 4


class Link(Protocol):
    """The out-of-band channel to one peer."""

    def filenos(self) -> list[int]: ...
    def send(self, frame: bytes) -> None: ...
    def recv(self) -> bytes | None: ...
    def close(self) -> None: ...


class _Sent:
    """A work request on its way, and what must be let go when it is done."""

    __slots__ = ("doing", "opcode", "release", "status", "vendor_err")

    def __init__(self, opcode: WrOpcode, doing: str, release: Callable[[], None]) -> None:
        self.opcode, self.doing, self.release = opcode, doing, release
        self.status: int | None = None
        self.vendor_err = 0


class Connection:
    """A connected queue pair. Made by ``connect`` and ``Listener.accept``.

    Messages keep their boundaries and their order. Any thread may use it. Every blocking call takes
    ``deadline_s``: seconds, or None to wait for ever.

    Attributes:
        local, peer: the two ends.
        path: what was agreed on; ``path.why`` says it in words.
        remote: the peer's named regions, name -> :class:`RemoteRegion`.
        regions: this end's named regions, name -> :class:`MR`.
        connect_s: seconds from the first call to RTS.
    """

    def __init__(
        self,
        prepared: Prepared,
        peer: Endpoint,
        path: Path,
        link: Link,
        handshake: Handshake,
        remote: Mapping[str, RemoteRegion],
        connect_s: float,
    ) -> None:
        self._prepared, self._link, self._handshake = prepared, link, handshake
        self.local, self.peer, self.path, self.connect_s = prepared.endpoint, peer, path, connect_s
        self.remote, self.regions = dict(remote), prepared.regions
        self._qp, self._cq, self._channel = prepared.qp, prepared.cq, prepared.channel
        self._lock = threading.RLock()
        self._request = SendRequest()
        self._sent: dict[int, _Sent] = {}
        self._next_id = _SEND
        self._inbox: deque[tuple[int, int]] = deque()
        self._ring = memoryview(prepared.ring)
        self._broken: RdmaConnectError | None = None
        self._peer_left: str | None = None
        self._closed = False
        self._stage_size = peer.recv_size
        self._stage: memoryview | None = None
        self._stage_mr: MR | None = None
        self._stages: list[int] = []

    # ---- messages

    def send(self, data: Any, *, deadline_s: float | None = 30) -> None:
        """Send one message and wait until the peer's device has it.

        Args:
            data: bytes-like, or an :class:`MR` of this connection, which is sent without a copy; at most
                ``peer.recv_size`` bytes.
            deadline_s: seconds.

        Raises:
            ValueError: longer than what the peer's receives take.
            DeadlineExceeded: the peer posted no receive in time; the message may still arrive.
            CompletionError: the transfer failed.
            PeerClosed, StateError: the connection is closed.

        Source: ibv_post_send(3), ``IBV_WR_SEND``.
        """
        deadline = Deadline(deadline_s)
        length = data.length if isinstance(data, MR) else memoryview(data).nbytes
        if length > self.peer.recv_size:
            raise ValueError(
                f"send {length} bytes: the peer takes at most {self.peer.recv_size} in one message. "
                "Give the peer a larger recv_size, or use write()."
            )
        self._transfer(WrOpcode.SEND, data, length, deadline, f"send {length} bytes")

    def recv(self, *, deadline_s: float | None = 30) -> bytes:
        """The next message.

        Returns:
            Its bytes, 0 to ``local.recv_size`` of them.

        Raises:
            DeadlineExceeded: none came in time.
            CompletionError: the queue pair failed.
            PeerClosed, StateError: the connection is closed and no message is left.

        Source: ibv_post_recv(3).
        """
        slot, length = self._next_message(Deadline(deadline_s))
        start = slot * self.local.recv_size
        try:
            return bytes(self._ring[start : start + length])
        finally:
            self._repost(slot)

    def recv_into(self, buffer: Any, *, deadline_s: float | None = 30) -> int:
        """The next message, into a writable buffer.

        Args:
            buffer: bytes-like and writable.
            deadline_s: seconds.

        Returns:
            How many bytes the message has.

        Raises:
            ValueError: the message is longer than the buffer; it stays the next one.
            DeadlineExceeded, CompletionError, PeerClosed, StateError: as :meth:`recv`.
        """
        target = memoryview(buffer).cast("B")
        slot, length = self._next_message(Deadline(deadline_s))
        if length > len(target):
            with self._lock:
                self._inbox.appendleft((slot, length))
            raise ValueError(f"receive {length} bytes: the buffer has {len(target)}")
        start = slot * self.local.recv_size
        target[:length] = self._ring[start : start + length]
        self._repost(slot)
        return length

    def _next_message(self, deadline: Deadline) -> tuple[int, int]:
        while True:
            self._wait(lambda: bool(self._inbox), deadline, "recv")
            with self._lock:
                if self._inbox:
                    return self._inbox.popleft()

    def _repost(self, slot: int) -> None:
        with self._lock:
            if not self._closed and self._broken is None:
                self._qp.post_recv(self._prepared.requests[slot])

    # ---- remote memory

    def register(self, buffer: Any, access: AccessFlags | None = None) -> MR:
        """Register memory on this connection's protection domain.

        ``mr.region.to_bytes()`` is what the peer needs to write or read it. It is closed with the
        connection, or before.

        Args:
            buffer: anything with a C-contiguous buffer, or (address, bytes).
            access: by default everything, or only remote reads for a read-only buffer.

        Raises:
            TypeError, ValueError, VerbsError: as :class:`MR`.

        Source: ibv_reg_mr(3).
        """
        self._check_open()
        return MR(self._prepared.pd, buffer, access)

    def write(self, data: Any, region: RemoteRegion | str, *, offset: int = 0, deadline_s: float | None = 30) -> None:
        """Write into the peer's memory and wait until it is there. The peer is not told.

        Args:
            data: bytes-like, or an :class:`MR` of this connection, which is written without a copy.
            region: where to; the name of one of :attr:`remote`, or a region that the peer sent.
            offset: bytes from the region's start.
            deadline_s: seconds.

        Raises:
            ValueError: it does not fit into the region.
            KeyError: no region of that name.
            CompletionError: REM_ACCESS_ERR where the region is closed or may not be written; after that
                the connection is of no more use.
            DeadlineExceeded, PeerClosed, StateError: as :meth:`send`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_WRITE``.
        """
        deadline = Deadline(deadline_s)
        length = data.length if isinstance(data, MR) else memoryview(data).nbytes
        target = self._region(region).slice(offset, length)
        self._transfer(WrOpcode.RDMA_WRITE, data, length, deadline, f"write {length} bytes", target)

    def read(
        self,
        region: RemoteRegion | str,
        length: int | None = None,
        *,
        offset: int = 0,
        into: Any = None,
        deadline_s: float | None = 30,
    ) -> bytes | None:
        """Read from the peer's memory. The peer is not told.

        Args:
            region: where from; a name out of :attr:`remote`, or a region that the peer sent.
            length: bytes; by default as many as ``into`` or the region has.
            offset: bytes from the region's start.
            into: a writable buffer or an :class:`MR`, filled without a copy; else bytes are returned.
            deadline_s: seconds.

        Returns:
            The bytes, or None if ``into`` was given.

        Raises:
            ValueError: outside of the region, or ``into`` is shorter than ``length``.
            KeyError, CompletionError, DeadlineExceeded, PeerClosed, StateError: as :meth:`write`.

        Source: ibv_post_send(3), ``IBV_WR_RDMA_READ``.
        """
        deadline = Deadline(deadline_s)
        whole = self._region(region)
        target: Any = bytearray() if into is None else into
        room = target.length if isinstance(target, MR) else memoryview(target).nbytes
        if length is None:
            length = whole.length - offset if into is None else room
        source = whole.slice(offset, length)
        if into is None:
            target = bytearray(length)
        elif length > room:
            raise ValueError(f"read {length} bytes: the buffer has {room}")
        doing = f"read {length} bytes"
        if length:
            mr = target if isinstance(target, MR) else self.register(target, AccessFlags.LOCAL_WRITE)
            release = _nothing if mr is target else mr.close
            self._submit(WrOpcode.RDMA_READ, (mr.addr, length, mr.lkey), release, deadline, doing, source)
        return bytes(target) if into is None else None

    def _region(self, region: RemoteRegion | str) -> RemoteRegion:
        if isinstance(region, RemoteRegion):
            return region
        if region not in self.remote:
            raise KeyError(f"the peer has no region {region!r}; it has {', '.join(sorted(self.remote)) or 'none'}")
        return self.remote[region]

    # ---- the engine

    def _transfer(
        self,
        opcode: WrOpcode,
        data: Any,
        length: int,
        deadline: Deadline,
        doing: str,
        target: RemoteRegion | None = None,
    ) -> None:
        """Give ``data`` a registered address and send it from there."""
        release: Callable[[], None] = _nothing
        if isinstance(data, MR):
            place = (data.region.addr, length, data.lkey)
        elif length == 0:
            place = (0, 0, 0)
        elif length <= self._stage_size:
            slot, place = self._staged(data, length, deadline, doing)
            release = lambda: self._stages.append(slot)  # noqa: E731
        else:
            self._check_open()
            mr = MR(self._prepared.pd, data, AccessFlags(0))
            place, release = (mr.addr, length, mr.lkey), mr.close
        self._submit(opcode, place, release, deadline, doing, target)

    def _staged(self, data: Any, length: int, deadline: Deadline, doing: str) -> tuple[int, tuple[int, int, int]]:
        """Copy into a free slot of the staging memory."""
        with self._lock:
            self._check_open()
            if self._stage is None:
                memory = mmap.mmap(-1, _STAGES * self._stage_size)
                self._stage_mr = MR(self._prepared.pd, memory, AccessFlags(0))
                self._stage, self._stages = memoryview(memory), list(range(_STAGES))
        while True:
            self._wait(lambda: bool(self._stages), deadline, doing)
            with self._lock:
                if self._stages:
                    slot = self._stages.pop()
                    break
        start = slot * self._stage_size
        assert self._stage is not None
        assert self._stage_mr is not None
        self._stage[start : start + length] = memoryview(data).cast("B")
        return slot, (self._stage_mr.addr + start, length, self._stage_mr.lkey)

    def _submit(
        self,
        opcode: WrOpcode,
        place: tuple[int, int, int],
        release: Callable[[], None],
        deadline: Deadline,
        doing: str,
        target: RemoteRegion | None = None,
    ) -> None:
        """Post one work request and wait for its completion."""
        sent = _Sent(opcode, doing, release)
        try:
            while True:
                self._wait(lambda: len(self._sent) < self._prepared.options.send_depth, deadline, doing)
                with self._lock:
                    if len(self._sent) < self._prepared.options.send_depth:
                        self._check_open()
                        self._next_id += 1
                        wr_id = self._next_id
                        self._qp.post_send(self._request.fill(wr_id, opcode, *place, remote=target))
                        self._sent[wr_id] = sent
                        break
        except BaseException:
            release()
            raise
        self._wait(lambda: sent.status is not None, deadline, doing)
        if sent.status != WcStatus.SUCCESS:
            raise self._failure(sent, wr_id)

    def _failure(self, sent: _Sent, wr_id: int) -> RdmaConnectError:
        error = CompletionError(
            WcStatus(sent.status or 0), vendor_err=sent.vendor_err, wr_id=wr_id, qp_num=self._qp.qp_num,
            opcode=str(sent.opcode), doing=f"{sent.doing} from QP {self._qp.qp_num:#08x} to {self.peer}",
        )  # fmt: skip
        return self._over(sent.doing, error)

    def _over(self, doing: str, error: RdmaConnectError | None) -> RdmaConnectError:
        """Why nothing more will come: the peer's good-bye if it said one, else ``error``."""
        self._look_at_link()
        if self._peer_left is not None or error is None:
            return PeerClosed(f"{doing}: {self._peer_left}")
        return error

    def _progress(self) -> None:
        """Take what has completed and put it where it belongs."""
        with self._lock:
            self._check_open()
            while True:
                count = self._cq.poll()
                for wc in self._cq.wcs[:count]:
                    self._complete(wc)
                if count < len(self._cq.wcs):
                    return

    def _complete(self, wc: Any) -> None:
        wr_id, status = wc.wr_id, wc.status
        if wr_id >= _SEND:
            sent = self._sent.pop(wr_id)
            sent.status, sent.vendor_err = status, wc.vendor_err
            sent.release()
        elif status == WcStatus.SUCCESS:
            self._inbox.append((wr_id, wc.byte_len))
        if status != WcStatus.SUCCESS and self._broken is None:
            self._broken = CompletionError(
                WcStatus(status), vendor_err=wc.vendor_err, wr_id=wr_id, qp_num=wc.qp_num,
                opcode="receive" if wr_id < _SEND else str(sent.opcode),
                doing=f"use QP {self._qp.qp_num:#08x} connected to {self.peer}",
            )  # fmt: skip

    def _wait(self, ready: Callable[[], bool], deadline: Deadline, doing: str) -> None:
        """Make progress until ``ready``: first by polling, then asleep on the channel."""
        self._check_open()
        if ready():
            return
        for _ in range(self._prepared.options.spin):
            self._progress()
            if ready():
                return
        fds, link = [self._channel.fileno(), *self._link.filenos()], set(self._link.filenos())
        while True:
            with self._lock:
                self._check_open()
                self._channel.drain()
                self._cq.arm()
            self._progress()
            if ready():
                return
            if self._broken is not None or self._peer_left is not None:
                raise self._over(doing, self._broken)
            deadline.check(f"{doing} from QP {self._qp.qp_num:#08x} to {self.peer}", _DATA_HINT)
            readable = wait_readable(fds, deadline, _SLICE_MS)
            if not readable or readable & link:
                self._look_at_link()

    def _look_at_link(self) -> None:
        """Has the peer said good-bye?"""
        try:
            while self._peer_left is None and (frame := self._link.recv()) is not None:
                message = decode(frame)
                if self._handshake.receive(message) is Outcome.MOVED and isinstance(message, Bye):
                    self._peer_left = f"the peer closed the connection ({message.why})."
        except RdmaConnectError as e:
            self._peer_left = f"the peer gave up: {e}"

    # ---- the end

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the connection from {self.local} to {self.peer} is closed.")

    @property
    def closed(self) -> bool:
        """Whether this side was closed."""
        return self._closed

    def close(self) -> None:
        """Tell the peer, flush what is outstanding, free everything. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._say_bye()
                with contextlib.suppress(VerbsError):
                    self._qp.move(QpState.ERR)
            finally:
                self._ring.release()
                if self._stage is not None:
                    self._stage.release()
                self._prepared.close()
                self._link.close()

    def _say_bye(self) -> None:
        assert self._handshake.id is not None
        if self._peer_left is None:
            with contextlib.suppress(RdmaConnectError):  # it may be gone already
                self._link.send(encode(self._handshake.send(Bye(self._handshake.id, "close"))))

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connection {self.local.qp_type} {self.local} to {self.peer}{' closed' if self._closed else ''}>"


_DATA_HINT = "Is the peer alive, and does it take part (recv() for each send())?"


def _nothing() -> None:
    pass
