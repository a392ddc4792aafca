"""The proof of the data path: messages both ways, checked, before anybody is handed a connection."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.endpoint import MTU_BYTES, PortAddress
from ..agreement.unproven import between, unproven
from ..errors import CompletionError, ConnectTimeout, PeerRejected, RemoteProtocolError
from ..objects.memory import MR
from ..objects.work_request import SendList
from ..protocol.messages import Proof
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, Wait
from .end import End
from .renewing import all_stand
from .transfer import Part, Sent

__all__ = ["STAGE", "Prober", "abandon", "contents", "path_failed", "prove"]

#: what a failure of it is told by
STAGE = "prove the data path"
#: statuses of a probe that another path may not have
PATH_STATUSES = (WcStatus.RETRY_EXC_ERR, WcStatus.RESP_TIMEOUT_ERR, WcStatus.WR_FLUSH_ERR)
#: bytes of the first probe: it tells a dead path from one that only drops what is large
SMALL = 16
#: seconds without a probe of the peer after which the path is held to be dead
PATIENCE_S = 10.0
#: and for each queue pair besides
PATIENCE_EACH_S = 0.1
#: seconds after which probes are sent again over types that lose messages
AGAIN_S = 0.25
_SEND = WrOpcode.SEND
_broken = attrgetter("broken")


def contents(id: bytes, index: int, size: int) -> bytes:
    """What a probe carries: the connection's id and the queue pair's index, repeated, cut to ``size`` bytes."""
    unit = id + index.to_bytes(4, "big")
    return (unit * (size // len(unit) + 1))[:size]


class Prober:
    """Both halves of the proof, for connections that were made together. Never blocks.

    Args:
        ends: in the order of the hello; their conversation is joined.
        deadline: of the call that waits. Until the peer is known to be in RTS that alone counts: one that is
            slow is no sign of a broken path. From then on the path has :data:`PATIENCE_S` for each probe.
        share: gives the seconds that it has instead, where there are other paths; asked once probes are lost; blocks.
    """

    #: whether the probes of a queue pair may go as one list, over RC
    _in_lists = True

    def __init__(self, ends: Sequence[End], deadline: Deadline, share: Callable[[], float] | None = None) -> None:
        first = ends[0]
        self._ends, self._conversation = ends, first.conversation
        self._engine = first.engine
        self._sizes = tuple(sorted({min(SMALL, first.max_send_size), self._large(first, first.max_send_size)}))
        due = {min(SMALL, first.local.recv_size), self._large(first, first.local.recv_size)}
        #: those who have not heard all yet -> the sizes that are to come
        self._due = dict(enumerate(map(set, repeat(due, len(ends)))))
        self._inboxes = [end.inbox() for end in ends]
        self._transceivers = [end.transceiver for end in ends]
        self._seen: set[int] = set()
        self._answered = self._met = False
        self._call = self._deadline = deadline
        self._began = Deadline(None)
        self._share, self._patience_s = share, PATIENCE_S + PATIENCE_EACH_S * len(ends)
        self._sent: list[Sent] = []
        self._turned = False
        self._sent_at = time.monotonic()
        self._id = ident = self._conversation.id
        #: what each queue pair sends, in their order, the small one first; both begin alike
        self._room, large = sum(self._sizes), self._sizes[-1]
        self._mr: MR | None = None
        size = max(1, self._room * len(ends))  # a peer may take messages of no length at all
        spare = first.transceiver.spare(size) if len(ends) == 1 else None
        if spare is None:
            memory = mmap.mmap(-1, size)
            self._mr = first.register(memory, AccessFlags(0))
            spare = memoryview(memory), self._mr.addr, self._mr.lkey
        self._memory, self._addr, self._lkey = spare
        for index in range(len(ends)):
            whole = contents(ident, index, large)
            self._memory[index * self._room : (index + 1) * self._room] = whole[: self._room - large] + whole
        in_lists = self._in_lists and first.local.qp_type is QpType.RC and first.transceiver.sizes.send_depth > 1
        #: the probes of one queue pair, where those of each go as one list
        self._list = SendList(self._sizes, self._lkey) if in_lists else None
        self._waiting = self._work()

    def _be_patient(self) -> None:
        """Wait anew: something came, so the path is not dead."""
        self._met = True
        self._deadline = Deadline(min(self._call.left_s, self._patience_s), ConnectTimeout)

    @staticmethod
    def _large(end: End, most: int) -> int:
        mtu = MTU_BYTES[end.path.path_mtu]
        return min(most, mtu if end.local.qp_type is QpType.UD else 2 * mtu + 1)

    def _work(self) -> list[tuple[End, Part]]:
        """Each probe that is to be sent; of a list, all of each queue pair."""
        addr, work = self._addr, []
        sizes = self._sizes if self._list is None else (self._room,)
        for end in self._ends:
            for size in sizes:
                work.append((end, Part(_SEND, (addr, size, self._lkey))))
                addr += size
        return work

    def advance(self) -> bool:
        """Do what can be done now.

        Returns:
            Whether the data path is proven, both ways.

        Raises:
            CompletionError: a probe failed; with what that says of the path.
            RemoteProtocolError: a probe arrived changed.
            PeerClosed, PeerRejected: the peer gave up.
            ConnectTimeout: probes did not arrive; says which did.
        """
        self._post()
        self._engine.progress()
        if any(map(_broken, self._transceivers)):
            raise self._failed(next(end for end in self._ends if end.transceiver.broken is not None))
        came = [self._receive(index) for index in [index for index in self._due if self._inboxes[index]]]
        if any(came):
            self._be_patient()
        if not self._answered and not self._due:
            self._answered = True
            self._conversation.trace.mark("proof", "sent: the peer's probes are here")
            self._tell()
        if self._conversation.handshake.met and not self._met:
            self._be_patient()
        if self._answered and self._told and not self._waiting:
            # over RC each probe's own completion has come too: the memory may go
            return all(sent.status is not None for sent in self._sent)
        if self._conversation.left is not None:
            raise self._conversation.failure(STAGE)
        if self._deadline.left_s <= 0 and self._only_slow():
            self._be_patient()
        if self._deadline.left_s <= 0:
            raise ConnectTimeout(STAGE, self._began.waited_s, f"{self.explain()} The path: {self._gids}.")
        return False

    def _is_word(self, index: int, came: bytes) -> bool:
        """Whether it is the peer's word that our probes have come, which is said elsewhere here."""
        return False

    def _tell(self) -> None:
        """Tell the peer that its probes are here."""
        self._conversation.say(Proof(self._conversation.id, self._conversation.trace.stages()))

    @property
    def _told(self) -> bool:
        """Whether the peer has told the same."""
        return self._conversation.handshake.proved

    def _only_slow(self) -> bool:
        """Whether the peer is known to be there, over a type whose own failures tell of a broken path."""
        return not self._conversation.handshake.lossy and self._conversation.alive and self._call.left_s > 0

    def _post(self) -> None:
        lossy = self._conversation.handshake.lossy
        if lossy and not self._waiting and time.monotonic() - self._sent_at > AGAIN_S and not self._told:
            # each time the other way round: where the peer has one receive posted, the second of the two finds none
            self._turned = not self._turned
            self._waiting = self._work()[:: -1 if self._turned else 1]
        left = []
        for work in self._waiting:
            end, part = work
            if self._list is None:
                probes = [Sent(_SEND, part.place[1])]
                posted = end.transceiver.post(probes[0], part, end.to, proving=True)
            else:
                probes = [*map(Sent, repeat(_SEND), self._sizes)]
                posted = end.transceiver.post_probes(probes, self._list, part.place[0])
            if posted:
                self._sent += probes
            else:
                left.append(work)
        if len(left) < len(self._waiting):
            self._sent_at = time.monotonic()
        self._waiting = left

    def _receive(self, index: int) -> bool:
        """Take what has come on a queue pair; whether anything has that is due."""
        end, inbox, due, found = self._ends[index], self._inboxes[index], self._due[index], False
        slots: list[int] = []
        with self._engine.lock:
            while inbox and due:
                slot, length = inbox.pop(0)
                slots.append(slot)
                came = bytes(end.transceiver.payload(slot, length))
                if self._is_word(index, came):
                    continue
                self._check(end, index, came, due)
                self._seen.add(length)
                if length in due:
                    due.remove(length)
                    found = True
            end.transceiver.repost_all(slots)
        if not due:
            del self._due[index]
        return found

    def _check(self, end: End, index: int, came: bytes, due: set[int]) -> None:
        """It is what the peer sent, and comes in the order in which that was."""
        length, large = len(came), self._sizes[-1]
        at = (index + 1) * self._room - large  # what this end sends there begins alike
        if came != (self._memory[at : at + length] if length <= large else contents(self._id, index, length)):
            raise RemoteProtocolError(
                f"prove the data path: {length} bytes from {end.peer} are not what was sent. "
                "Do both ends mean the same queue pair?"
            )
        if length != min(due) and end.local.qp_type is QpType.RC:
            raise RemoteProtocolError(
                f"prove the data path: {length} bytes from {end.peer} arrived, and those sent before them "
                f"did not, which RC forbids. The PSNs of the two ends do not fit (the peer's begin with "
                f"{end.peer.psn:#08x}), or the driver loses messages."
            )

    def _failed(self, end: End) -> CompletionError:
        error = end.transceiver.broken
        assert error is not None
        unanswered = error.status in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)
        small_arrived = unanswered and any(sent.status == WcStatus.SUCCESS for sent in self._sent)
        more = f" {self._mtu_words()}" if small_arrived else ""
        if error.status == WcStatus.WR_FLUSH_ERR and not small_arrived:
            more = " (this host did not send: its firewall drops RoCE, UDP port 4791, or its network device refuses)"
        causes = unproven(end.path.local_gid, end.path.remote_gid)
        hint = None if error.status not in PATH_STATUSES else "" if small_arrived else causes
        return CompletionError(
            error.status, vendor_err=error.vendor_err, wr_id=error.wr_id, qp_num=error.qp_num, opcode=error.opcode,
            doing=f"{STAGE} from {end.local} to {end.peer}, by {self._gids}{more}",
            hint=hint,
        )  # fmt: skip

    @property
    def _gids(self) -> str:
        """The two GIDs in words."""
        path = self._ends[0].path
        return between(path.local_gid, path.remote_gid) or "their LIDs"

    def _mtu_words(self) -> str:
        return (
            f"({self._sizes[0]} bytes arrive, {self._sizes[-1]} do not: the network between carries less than "
            f"path_mtu {MTU_BYTES[self._ends[0].path.path_mtu]}; give a smaller path_mtu)"
        )

    def explain(self) -> str:
        """What has arrived and what has not, and what that says of the path, while it is not proven."""
        end = self._ends[0]
        if not (self._met or self._seen):
            return self._why_nothing()
        if self._seen and not self._answered:
            return f"Some probes arrived and some did not. {self._mtu_words()}"
        if self._answered:
            text = "The peer's probes arrived, but it has not said that ours did: packets are dropped in one direction."
        elif self._told:
            text = "The peer has our probes, but its own do not arrive here: packets are dropped in one direction."
        else:
            text = "No probe arrived."
        ud = " UD also drops in silence what comes with another Q_Key." if end.local.qp_type is QpType.UD else ""
        return f"{text} {unproven(end.path.local_gid, end.path.remote_gid)}{ud}"

    def _why_nothing(self) -> str:
        """What it says that nothing at all has come of the peer."""
        return (
            "The peer has replied and has not gone on since: it is busy, slow or stopped, "
            "or of an older version, whose application is not in accept() now."
        )

    @property
    def _slice_s(self) -> float:
        """Seconds after which to look again though nothing has come."""
        return AGAIN_S if self._conversation.handshake.lossy else 1.0

    def arm(self) -> None:
        """Have the device tell of the next completion; call :meth:`advance` after it, then sleep."""
        self._engine.arm()

    def fileno(self) -> int:
        """The descriptor that tells of it."""
        return self._engine.channel.fileno()

    def procedure(self) -> Procedure[None]:
        """Advance until it is proven."""
        while True:
            if self.advance():
                return
            heard, completed = self._conversation.changed, self._engine.changed
            self.arm()
            changes = ((heard, heard.count), (completed, completed.count))
            if self.advance():
                return
            yield Wait(self._deadline, (self.fileno(),), changes, slice_ms=round(self._slice_s * 1000))
            if self._share is not None and self._conversation.handshake.lossy and self._began.waited_s > AGAIN_S:
                share, self._share = self._share, None
                self._patience_s = min(self._patience_s, (yield Call(share)))
                if self._met:
                    self._be_patient()

    def close(self) -> None:
        """Free the probes' memory, when the device is done with it."""
        if self._mr is not None:
            self._mr.close()


def path_failed(error: BaseException) -> bool:
    """Whether it says that the path does not carry, so that another one may."""
    if isinstance(error, ConnectTimeout):
        return error.stage == STAGE
    return isinstance(error, CompletionError) and error.status in PATH_STATUSES


def prove(
    made: Sequence[End],
    deadline: Deadline,
    *,
    again: bool = False,
    share: Callable[[], float] | None = None,
    kind: Callable[[Sequence[End], Deadline, Callable[[], float] | None], Prober] = Prober,
) -> Procedure[None]:
    """Prove the data path if that was agreed on; see :func:`abandon` for when it fails."""
    try:
        if made[0].conversation.proves:
            prober = kind(made, deadline, share)
            try:
                yield from prober.procedure()
            finally:
                prober.close()
            made[0].conversation.trace.mark("proven", "the peer has our probes, and we its")
    except BaseException as e:
        abandon(made, e, again=again)
        raise
    all_stand(made)


def abandon(
    made: Sequence[End], error: BaseException, *, again: bool = False, ports: tuple[PortAddress, ...] = ()
) -> None:
    """Tell the peer why the proof failed, and close everything; what was connected ``again`` can be so once more.

    Args:
        made: the ends.
        error: why.
        again: whether they are to be left open.
        ports: those of this host that a connector may try instead, where it is the path that failed.
    """
    conversation = made[0].conversation
    if not isinstance(error, PeerRejected):
        conversation.give_up(conversation.reject_of(error, STAGE, ports if path_failed(error) else ()))
    for end in made:
        if not again:
            end.close()
