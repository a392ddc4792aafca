"""How what is sent gets into the send queue: at once where nothing is to be waited for, else as a procedure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from textwrap import shorten

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.endpoint import MTU_BYTES, Endpoint, RemoteRegion
from ..agreement.path import Path
from ..errors import StateError, shown
from ..objects.address import AddressHandle, UdAddress
from ..objects.buffer_like import BufferLike
from ..objects.buffers import Buffer, hold
from ..objects.memory import MR, MemoryLike
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure
from .life import Life, LifeOver
from .outcome import Outcome
from .staging import Staging
from .transceiver import Source
from .transfer import LONGEST, Part, Piece, Sent, parts, words

__all__ = ["NOWHERE", "Posting", "Work"]

#: the arguments of :meth:`DataPath.try_post`: opcode, data, region, offset, imm
Work = tuple[WrOpcode, "BufferLike | MR", "RemoteRegion | None", int, "int | None"]

#: the staging memory has room for so many of the longest messages
_STAGES = 4
#: bytes of those at most, whatever the peer says that it takes: what is longer is registered where it is
_STAGE_MAX = 256 * 1024
NOWHERE = (0, 0, 0)
#: what goes inline if it is short
_PLAIN = frozenset((bytes, bytearray))
_READ = WrOpcode.RDMA_READ


class Posting(Outcome):
    """The sending side of :class:`~rdmaconnect.session.data_path.DataPath`, below what users call.

    Each transfer is begun in the same way: :meth:`try_post` posts what can be posted without any waiting, and
    :meth:`posting` what must be copied, registered or divided first, or finds no room. What is waited for is the
    :class:`~rdmaconnect.session.transfer.Sent` that both give.

    Attributes:
        max_send_size: bytes of the longest message that can be sent.
    """

    local: Endpoint
    peer: Endpoint
    path: Path
    ah: AddressHandle | None
    life: Life
    _source: Source = None
    to: UdAddress | None = None
    _staging: Staging | None = None

    def _begin(self) -> None:
        """There is a peer: how long may messages to it be?"""
        super()._begin()
        #: bytes of the longest message between the two ports, as far as they are told
        self._longest = min(self.local.port.max_msg_sz or LONGEST, self.peer.port.max_msg_sz or LONGEST, LONGEST)
        most = min(self.peer.recv_size, self._longest)
        transceiver = self.transceiver
        self.max_send_size = most = min(most, MTU_BYTES[self.path.path_mtu]) if transceiver.is_ud else most
        self._stage_size, self._inline = min(most, _STAGE_MAX), min(most, transceiver.qp.max_inline_data)
        if self._staging is not None:  # that of the life before
            self._staging = None

    def _end(self) -> None:
        """Free what was for that peer."""
        for memory in self._memory():
            memory.close()

    def _memory(self) -> Sequence[MR]:
        """What was registered for that peer, besides what users did."""
        return () if self._staging is None else (self._staging.mr,)

    # ---- what can be posted now

    def try_post(
        self,
        opcode: WrOpcode,
        data: BufferLike | MR,
        region: RemoteRegion | None = None,
        offset: int = 0,
        imm: int | None = None,
    ) -> Sent | None:
        """Post what is registered, or short and plain, if there is room for it now; None else."""
        if data.__class__ in _PLAIN and self.to is None and imm is None:
            length = len(data)
            if not 0 < length <= self._stage_size:
                return None
            target = None if region is None else _target(region, offset, length)
            if length > self._inline:
                return self._try_staged(Sent(opcode, length), data, target)
            return self.transceiver.post_inline(opcode, data, target)
        piece = self.piece(opcode, data, region, offset, imm)
        if piece is None:
            return None
        with self.engine.lock:  # in which the address is that of the present peer
            posted = self.transceiver.post(piece.sent, piece.part, self.to)
        return piece.sent if posted else None

    def piece(
        self,
        opcode: WrOpcode,
        data: BufferLike | MR,
        region: RemoteRegion | None = None,
        offset: int = 0,
        imm: int | None = None,
    ) -> Piece | None:
        """The one work request of what is registered, or goes inline; None for anything else."""
        if isinstance(data, MR):
            length, inline = data.length, None
            if length > (self.max_send_size if region is None else self._longest):
                return None
            place = (self._mine(data, opcode).addr, length, data.lkey)
        elif data.__class__ in _PLAIN and 0 < len(data) <= self._inline:
            place, length, inline = NOWHERE, len(data), bytes(data)
        else:
            return None
        target = None if region is None else _target(region, offset, length, imm)
        return Piece(Sent(opcode, length), Part(opcode, place, target, imm, inline), True)

    def _try_staged(self, sent: Sent, data: bytes | bytearray, target: RemoteRegion | None) -> Sent | None:
        with self.engine.lock:
            staging = self._staging  # which goes with its life
            place = None if staging is None or not self.transceiver.room() else staging.take(data)
            if place is None or staging is None:
                return None
            sent.release = partial(staging.give_back, place)
            part = Part(sent.opcode, (staging.mr.addr + place.start, sent.length, staging.mr.lkey), target)
            try:
                self.transceiver.post(sent, part)
            finally:
                if not sent.posted:
                    sent.ended()
            return sent

    # ---- what waits

    def posting(
        self,
        deadline: Deadline,
        opcode: WrOpcode,
        data: BufferLike | MR,
        region: RemoteRegion | str | None = None,
        offset: int = 0,
        imm: int | None = None,
        into: list[Piece] | None = None,
        batch: Life | None = None,
    ) -> Procedure[Sent]:
        """Give the data a registered address, wait for room, and post it; or put it ``into`` a list to be posted.

        Args:
            deadline: for the wait.
            opcode, data, region, offset, imm: what to do.
            into: the list of a batch.
            batch: the life that the batch was begun in.
        """
        begin = partial(self._posting, deadline, opcode, data, region, offset, imm, into)
        return (yield from self._in_a_life(begin, deadline, batch))

    def _posting(
        self,
        deadline: Deadline,
        opcode: WrOpcode,
        data: BufferLike | MR,
        region: RemoteRegion | str | None,
        offset: int,
        imm: int | None,
        into: list[Piece] | None,
        life: Life,
    ) -> Procedure[Sent]:
        with _held(data) as source:
            length = source.length
            sent = Sent(opcode, length)
            if region is None and length > self.max_send_size:
                raise ValueError(f"{sent.doing}: {self._why_too_long()}")
            target = None if region is None else _target(self._region(region), offset, length, imm)
            place, inline = NOWHERE, None
            try:
                if isinstance(source, MR):
                    place = (self._mine(source, opcode).addr, length, source.lkey)
                elif source.device is None and 0 < length <= self._inline:
                    inline = bytes(source.view)
                elif source.device is None and 0 < length <= self._stage_size:
                    place = yield from self._staged(sent, source.view, deadline, into, life)
                elif length:
                    make = partial(self._hold, sent, source.owner, AccessFlags(0))
                    mr = yield Call(make, deadline, sent.doing, undo=MR.close)
                    place = (mr.addr, length, mr.lkey)
                yield from self._post(sent, Part(opcode, place, target, imm, inline), deadline, into, life)
            except BaseException:
                self._give_up(sent, into)
                raise
        return sent

    def reading(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None,
        offset: int,
        deadline: Deadline,
        into: list[Piece] | None = None,
        batch: Life | None = None,
    ) -> Procedure[Sent]:
        """Have the peer's memory read into registered memory; or put that ``into`` a list, as :meth:`posting`."""
        self._need("RDMA read", QpType.RC)
        begin = partial(self._reading, buffer, region, length, offset, deadline, into)
        return (yield from self._in_a_life(begin, deadline, batch))

    def _reading(
        self,
        buffer: BufferLike | MR,
        region: RemoteRegion | str,
        length: int | None,
        offset: int,
        deadline: Deadline,
        into: list[Piece] | None,
        life: Life,
    ) -> Procedure[Sent]:
        room = _room(buffer)
        length = room if length is None else length
        source = self._region(region).slice(offset, length)
        if length > room:
            raise ValueError(f"read {length} bytes: the buffer has {room}")
        sent = Sent(_READ, length)
        if not length:
            sent.posted = True
            sent.ended()
            return sent
        try:
            if isinstance(buffer, MR):
                mr = self._mine(buffer, _READ)
            else:
                make = partial(self._hold, sent, buffer, AccessFlags.LOCAL_WRITE)
                mr = yield Call(make, deadline, sent.doing, undo=MR.close)
            yield from self._post(sent, Part(_READ, (mr.addr, length, mr.lkey), source), deadline, into, life)
        except BaseException:
            self._give_up(sent, into)
            raise
        return sent

    def _hold(self, sent: Sent, buffer: MemoryLike, access: AccessFlags) -> MR:
        """Register memory for as long as a transfer takes. In a worker, where Ctrl-C leaves none to nobody."""
        mr = self.register(buffer, access)
        sent.release = mr.close
        return mr

    def _post(
        self, sent: Sent, whole: Part, deadline: Deadline, into: list[Piece] | None, life: Life
    ) -> Procedure[None]:
        """Post it, as several work requests where one may not be so long; or put it into the list."""
        work = [] if into is None else into
        if sent.length <= self._longest:
            work.append(Piece(sent, whole, True))
        else:
            opcode, place, target, imm, *_ = whole
            divided = list(parts(opcode, place, target, imm, self._longest))
            work += [Piece(sent, part, part is divided[-1]) for part in divided]
        if into is None or len(work) >= self.transceiver.sizes.send_depth:
            count = len(work)
            try:
                yield from self.post_list(work, deadline, life)
            except LifeOver:
                if into is None and len(work) < count:  # some of it has been posted: that is not repeated
                    raise self._unknown(sent, life) from None
                raise

    def add(self, piece: Piece, deadline: Deadline, into: list[Piece], life: Life) -> Procedure[None]:
        """Put a transfer of one work request into a list to be posted."""
        into.append(piece)
        if len(into) >= self.transceiver.sizes.send_depth:
            try:
                yield from self.post_list(into, deadline, life)
            except BaseException:
                self._give_up(piece.sent, into)
                raise

    def post_list(self, work: list[Piece], deadline: Deadline, life: Life) -> Procedure[None]:
        """Post all of a list, as there is room, and empty it."""
        if work:
            post = partial(self.transceiver.post_list, work, self.to)
            first = work[0].sent
            doing = first.doing if first is work[-1].sent else f"post {len(work)} work requests"
            yield from self._until(self._in(life, post), deadline, doing)

    def drop(self, work: list[Piece]) -> None:
        """Have nothing of a list posted."""
        for piece in work:
            self._give_up(piece.sent, None)
        work.clear()

    def _give_up(self, sent: Sent, into: list[Piece] | None) -> None:
        """Of what was not posted to its end nothing more is."""
        if into is not None:
            into[:] = [piece for piece in into if piece.sent is not sent]
        with self.engine.lock:
            if not sent.posted:
                sent.posted = True
                sent.ended(WcStatus.WR_FLUSH_ERR)

    def _staged(
        self, sent: Sent, data: memoryview, deadline: Deadline, into: list[Piece] | None, life: Life
    ) -> Procedure[tuple[int, int, int]]:
        """Copy it into the staging memory."""
        if self._staging is None:
            yield Call(self._make_staging, deadline, sent.doing)
        staging = self._staging
        assert staging is not None

        def attempt() -> int | None:
            place = staging.take(data)
            if place is None:
                return None
            sent.release = partial(staging.give_back, place)
            return staging.mr.addr + place.start

        guarded = self._in(life, attempt)
        addr = self._now(guarded)
        if addr is None:
            if into:  # nobody else gives back what is in there
                yield from self.post_list(into, deadline, life)
            addr = yield from self._until(guarded, deadline, sent.doing)
        return addr, len(data), staging.mr.lkey

    def _make_staging(self) -> None:
        with self.engine.lock:
            if self._staging is None:
                self._staging = Staging(self.register, _STAGES * self._stage_size, AccessFlags(0))

    # ---- memory

    def _region(self, region: RemoteRegion | str) -> RemoteRegion:
        if isinstance(region, RemoteRegion):
            if region.life is not None and region.life.ended:
                try:
                    self.life.check(region, "use memory of the peer")
                except LifeOver as e:
                    raise StateError(str(e)) from None  # it is of no use in any life
            return region
        if not isinstance(region, str):
            raise TypeError(f"the region is {shown(region)}: give the name of one of the peer's, or a RemoteRegion")
        if region not in self.life.remote:
            there = shorten(", ".join(sorted(self.life.remote)), 200, placeholder=" ...")
            raise LookupError(f"the peer has no region {shown(region)}; it has {there or 'none'}")
        return self.life.remote[region]

    def register(self, buffer: MemoryLike, access: AccessFlags | None = None) -> MR:
        self.check_open()
        return self.engine.register(buffer, access)

    def _mine(self, mr: MR, opcode: WrOpcode) -> MR:
        """A region of the caller's, which this queue pair can use: else it would fail with words about the peer."""
        mr.pointer  # noqa: B018  it is open
        if mr.pd.base is not self.engine.pd:
            raise ValueError(
                f"{words(opcode, mr.length)}: {mr.name} is registered in another protection domain ({mr.pd.name}) "
                f"than {self!r} has. Register the memory with its register()."
            )
        return mr

    def _why_too_long(self) -> str:
        if self.ah is not None and self.max_send_size == MTU_BYTES[self.path.path_mtu]:
            return f"a datagram carries at most the path MTU, {self.max_send_size} bytes. Use RC."
        if self.max_send_size < self.peer.recv_size:
            ends = f"{self.local.port} and {self.peer.port}"
            return f"{ends} take at most {self.max_send_size} in one message. Use write(), it sends several."
        other_way = "" if self.ah is not None else ", or use write()"
        takes = f"the peer takes at most {self.max_send_size} in one message"
        return f"{takes}. Give the peer a larger recv_size{other_way}."


def _target(region: RemoteRegion, offset: int, length: int, imm: int | None = None) -> RemoteRegion:
    """Where a write goes; it may be longer than that."""
    if imm is not None and not (length and 0 <= imm < 1 << 32):
        raise ValueError(f"write {length} bytes with imm {imm}: give at least one byte, and 32 bits")
    return region if offset == 0 and length <= region.length else region.slice(offset, length)


def _held(data: BufferLike | MR) -> AbstractContextManager[MR | Buffer]:
    """The memory of what is to be sent; who gives an MR goes on to hold it."""
    return nullcontext(data) if isinstance(data, MR) else hold(data)


def _room(into: BufferLike | MR) -> int:
    with _held(into) as target:
        if isinstance(target, Buffer) and target.readonly:
            raise ValueError(f"read into a read-only {type(into).__name__}: give a writable one")
        return target.length
