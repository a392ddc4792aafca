"""What moves over a connection: messages, RDMA writes and reads, and the memory that they pass through."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from textwrap import shorten
from typing import Any

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.endpoint import MTU_BYTES, Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import CompletionError, PeerClosed, RdmaConnectError, StateError, shown
from ..objects.address import AddressHandle, UdAddress
from ..objects.buffer_like import BufferLike
from ..objects.buffers import Buffer, hold
from ..objects.memory import MR, MemoryLike
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, Wait
from .conversation import Conversation
from .engine import Engine
from .transceiver import Sent, Source, Transceiver
from .transfer import LONGEST, Last, parts

__all__ = ["DataPath"]

#: the longest sleep: another thread may have taken the event, ms
_SLICE_MS = 1000
#: slots of the staging memory, each as large as the peer's receives
_STAGES = 4
#: bytes of a slot at most, whatever the peer says that it takes: what is longer is registered where it is
_STAGE_MAX = 256 * 1024
_DATA_HINT = "Is the peer alive, and does it take part (recv() for each send())?"


class DataPath:
    """One queue pair in RTS toward one peer; :class:`~rdmaconnect.session.base.BaseConnection` gives it both.

    Attributes:
        max_send_size: bytes of the longest message that can be sent.
    """

    local: Endpoint
    peer: Endpoint
    path: Path
    ah: AddressHandle | None
    remote: Mapping[str, RemoteRegion]
    conversation: Conversation
    engine: Engine
    transceiver: Transceiver
    _source: Source
    to: UdAddress | None
    spin: int

    def check_open(self) -> None:
        """Raise if it was closed, or belongs to another process."""
        raise NotImplementedError

    def _begin(self) -> None:
        """There is a peer: how long may messages to it be?"""
        #: bytes of the longest message between the two ports, as far as they are told
        self._longest = min(LONGEST, *(end.port.max_msg_sz or LONGEST for end in (self.local, self.peer)))
        most = min(self.peer.recv_size, self._longest)
        self.max_send_size = most if self.ah is None else min(most, MTU_BYTES[self.path.path_mtu])
        self._stage_size = min(self.max_send_size, _STAGE_MAX)
        self._stage: memoryview | None = None
        self._stage_mr: MR | None = None
        self._stages: list[int] = []

    def _end(self) -> None:
        """Free what was for that peer."""
        if self._stage_mr is not None:
            self._stage_mr.close()

    # ---- procedures

    def send(self, data: BufferLike | MR, deadline_s: float | None) -> Procedure[None]:
        deadline = Deadline(deadline_s)
        with _held(data) as source:
            length = source.length
            if length > self.max_send_size:
                raise ValueError(f"send {length} bytes: {self._why_too_long()}")
            yield from self._transfer(WrOpcode.SEND, source, deadline, f"send {length} bytes")

    def _why_too_long(self) -> str:
        if self.ah is not None and self.max_send_size == MTU_BYTES[self.path.path_mtu]:
            return f"a datagram carries at most the path MTU, {self.max_send_size} bytes. Use RC."
        if self.max_send_size < self.peer.recv_size:
            ends = f"{self.local.port} and {self.peer.port}"
            return f"{ends} take at most {self.max_send_size} in one message. Use write(), it sends several."
        other_way = "" if self.ah is not None else ", or use write()"
        takes = f"the peer takes at most {self.max_send_size} in one message"
        return f"{takes}. Give the peer a larger recv_size{other_way}."

    def recv(self, deadline_s: float | None) -> Procedure[bytes]:
        slot, length = yield from self._next_message(Deadline(deadline_s))
        try:
            return bytes(self.transceiver.payload(slot, length))
        finally:
            self.transceiver.repost(slot)

    def recv_into(self, buffer: BufferLike, deadline_s: float | None) -> Procedure[int]:
        with hold(buffer) as target:
            if target.readonly:
                raise ValueError(f"receive into a read-only {type(buffer).__name__}: give a writable one")
            view = target.view
            slot, length = yield from self._next_message(Deadline(deadline_s))
            if length > target.length:
                with self.engine.lock:
                    self.inbox().appendleft((slot, length))
                raise ValueError(f"receive {length} bytes: the buffer has {target.length}")
            view[:length] = self.transceiver.payload(slot, length)
            self.transceiver.repost(slot)
            return length

    def write(
        self,
        data: BufferLike | MR,
        region: RemoteRegion | str,
        offset: int,
        deadline_s: float | None,
        imm: int | None = None,
    ) -> Procedure[None]:
        deadline = Deadline(deadline_s)
        self._need("RDMA write", QpType.RC, QpType.UC)
        with _held(data) as source:
            target = self._region(region).slice(offset, source.length)
            doing = f"write {source.length} bytes"
            if imm is not None and not (source.length and 0 <= imm < 1 << 32):
                raise ValueError(f"{doing} with imm {imm}: give at least one byte, and 32 bits")
            opcode = WrOpcode.RDMA_WRITE if imm is None else WrOpcode.RDMA_WRITE_WITH_IMM
            yield from self._transfer(opcode, source, deadline, doing, target, imm)

    def recv_imm(self, deadline_s: float | None) -> Procedure[int]:
        deadline, immediates = Deadline(deadline_s), self.transceiver.immediates
        self._need("a write that is told", QpType.RC, QpType.UC)
        while True:
            yield from self._wait(lambda: bool(immediates), deadline, "recv_imm")
            with self.engine.lock:
                if immediates:
                    slot, imm = immediates.popleft()
                    break
        self.transceiver.repost(slot)
        return imm

    def read(
        self, region: RemoteRegion | str, length: int | None, offset: int, deadline_s: float | None
    ) -> Procedure[bytes]:
        self._need("RDMA read", QpType.RC)
        whole = self._region(region)
        source = whole.slice(offset, whole.length - offset if length is None else length)
        target = bytearray(source.length)
        yield from self.read_into(target, source, source.length, 0, deadline_s)
        return bytes(target)

    def read_into(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None,
        offset: int,
        deadline_s: float | None,
    ) -> Procedure[int]:
        deadline = Deadline(deadline_s)
        self._need("RDMA read", QpType.RC)
        room = _room(buffer)
        length = room if length is None else length
        source = self._region(region).slice(offset, length)
        if length > room:
            raise ValueError(f"read {length} bytes: the buffer has {room}")
        if length:
            doing = f"read {length} bytes"
            if isinstance(buffer, MR):
                mr, release = self._mine(buffer, doing), _nothing
            else:
                mr = self.register(buffer, AccessFlags.LOCAL_WRITE)
                release = mr.close
            place = (mr.addr, length, mr.lkey)
            yield from self._submit(WrOpcode.RDMA_READ, place, release, deadline, doing, source)
        return length

    def _need(self, what: str, *types: QpType) -> None:
        self.check_open()
        if self.local.qp_type not in types:
            words = " or ".join(map(str, types))
            raise StateError(f"{what} over {self.local.qp_type}: this type does not have it. Connect with {words}.")

    def _region(self, region: RemoteRegion | str) -> RemoteRegion:
        if isinstance(region, RemoteRegion):
            return region
        if not isinstance(region, str):
            raise TypeError(f"the region is {shown(region)}: give the name of one of the peer's, or a RemoteRegion")
        if region not in self.remote:
            there = shorten(", ".join(sorted(self.remote)), 200, placeholder=" ...")
            raise LookupError(f"the peer has no region {shown(region)}; it has {there or 'none'}")
        return self.remote[region]

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None) -> MR:
        self.check_open()
        return MR(self.engine.pd, buffer, access)

    def _mine(self, mr: MR, doing: str) -> MR:
        """A region of the caller's, which this queue pair can use: else it would fail with words about the peer."""
        mr.pointer  # noqa: B018  it is open
        if mr.pd.base is not self.engine.pd:
            raise ValueError(
                f"{doing}: {mr.name} is registered in another protection domain ({mr.pd.name}) than {self!r} has. "
                "Register the memory with its register()."
            )
        return mr

    # ---- the engine's side

    def inbox(self) -> Any:
        return self.transceiver.inboxes[self._source]

    def _next_message(self, deadline: Deadline) -> Procedure[tuple[int, int]]:
        while True:
            self.check_open()
            yield from self._wait(lambda: bool(self.inbox()), deadline, "recv")
            with self.engine.lock:
                inbox = self.inbox()
                if inbox:
                    message: tuple[int, int] = inbox.popleft()
                    if not self.conversation.is_probe(self.transceiver.payload(*message)):
                        return message
                    self.transceiver.repost(message[0])

    def _transfer(
        self,
        opcode: WrOpcode,
        source: MR | Buffer,
        deadline: Deadline,
        doing: str,
        target: RemoteRegion | None = None,
        imm: int | None = None,
    ) -> Procedure[None]:
        """Give the data a registered address and send it from there."""
        release: Callable[[], None] = _nothing
        length = source.length
        if isinstance(source, MR):
            place = (self._mine(source, doing).addr, length, source.lkey)
        elif length == 0:
            place = (0, 0, 0)
        elif length <= self._stage_size and source.device is None:
            slot, place = yield from self._staged(source, deadline, doing)
            release = lambda: self._stages.append(slot)  # noqa: E731
        else:
            # it holds the buffer for itself, as long as the device; in a worker, where Ctrl-C leaves none to nobody
            make = partial(self.register, source.owner, AccessFlags(0))
            mr = yield Call(make, deadline, doing, undo=MR.close)
            place, release = (mr.addr, length, mr.lkey), mr.close
        yield from self._submit(opcode, place, release, deadline, doing, target, imm)

    def _staged(self, source: Buffer, deadline: Deadline, doing: str) -> Procedure[tuple[int, tuple[int, int, int]]]:
        """Copy into a free slot of the staging memory."""
        if self._stage is None:
            yield Call(self._make_stage, deadline, doing)
        stage, mr = self._stage, self._stage_mr
        assert stage is not None
        assert mr is not None
        while True:
            yield from self._wait(lambda: bool(self._stages), deadline, doing)
            with self.engine.lock:
                if self._stages:
                    slot = self._stages.pop()
                    break
        start = slot * self._stage_size
        stage[start : start + source.length] = source.view
        return slot, (mr.addr + start, source.length, mr.lkey)

    def _make_stage(self) -> None:
        with self.engine.lock:
            if self._stage is None:
                memory = mmap.mmap(-1, _STAGES * self._stage_size)
                self._stage_mr = self.register(memory, AccessFlags(0))
                self._stages = list(range(_STAGES))
                self._stage = memoryview(memory)

    def _submit(
        self,
        opcode: WrOpcode,
        place: tuple[int, int, int],
        release: Callable[[], None],
        deadline: Deadline,
        doing: str,
        target: RemoteRegion | None = None,
        imm: int | None = None,
    ) -> Procedure[None]:
        """Post it, as several work requests where one may not be so long, and wait until all have completed."""
        on_the_way: deque[Sent] = deque()
        last = Last(release, self.engine.lock)
        try:
            for part in parts(opcode, place, target, imm, self._longest):
                sent = Sent(part.opcode, doing, last.one_less)
                last.one_more()
                try:
                    post = partial(self.transceiver.post, sent, part.place, part.target, self.to, part.imm)
                    yield from self._wait(post, deadline, doing)
                except BaseException:
                    if not sent.wr_id:
                        last.one_less()
                    raise
                on_the_way.append(sent)
                while on_the_way and on_the_way[0].status is not None:
                    self._check_done(on_the_way.popleft())
            while on_the_way:
                yield from self._wait(lambda: on_the_way[0].status is not None, deadline, doing)
                self._check_done(on_the_way.popleft())
        finally:
            last.one_less()

    def _check_done(self, sent: Sent) -> None:
        if sent.status != WcStatus.SUCCESS:
            raise self._over(sent.doing, self._failure(sent))

    def _failure(self, sent: Sent) -> CompletionError:
        return CompletionError(
            WcStatus(sent.status or 0), vendor_err=sent.vendor_err, wr_id=sent.wr_id, qp_num=self.local.qp_num,
            opcode=str(sent.opcode), doing=f"{sent.doing} from {self.local} to {self.peer}",
        )  # fmt: skip

    def _wait(self, ready: Callable[[], bool], deadline: Deadline, doing: str) -> Procedure[None]:
        """Make progress until ``ready``: first by polling, then asleep on the channel."""
        self.check_open()
        if ready():
            return
        for _ in range(max(self.spin, 1)):  # what is there already needs no event
            self.engine.progress()
            if ready():
                return
        while True:
            heard, completed = self.conversation.changed, self.engine.changed
            seen = heard.count
            self.check_open()
            self.engine.arm()
            self.engine.progress()
            count = completed.count
            self.check_open()
            if ready():
                return
            if self.transceiver.broken is not None or self.conversation.left is not None:
                self.engine.progress()  # what a peer sent before it went is there by now
                if ready():
                    return
                raise self._over(doing, self.transceiver.broken)
            if deadline.left_s <= 0:
                raise deadline.exceeded(f"{doing} from {self.local} to {self.peer}", _DATA_HINT)
            changes = ((heard, seen), (completed, count))
            yield Wait(deadline, (self.engine.channel.fileno(),), changes, slice_ms=_SLICE_MS)

    def _over(self, doing: str, error: RdmaConnectError | None) -> RdmaConnectError:
        """Why nothing more will come: the peer's good-bye if it said one, else ``error``."""
        if self.conversation.left is not None or error is None:
            return PeerClosed(f"{doing}: {self.conversation.left}")
        return error


def _held(data: BufferLike | MR) -> AbstractContextManager[MR | Buffer]:
    """The memory of what is to be sent; who gives an MR goes on to hold it."""
    return nullcontext(data) if isinstance(data, MR) else hold(data)


def _room(into: BufferLike | MR) -> int:
    with _held(into) as target:
        if isinstance(target, Buffer) and target.readonly:
            raise ValueError(f"read into a read-only {type(into).__name__}: give a writable one")
        return target.length


def _nothing() -> None:
    pass
