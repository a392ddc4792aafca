"""The proof of the data path: messages both ways, checked, before anybody is handed a connection."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.endpoint import MTU_BYTES
from ..errors import CompletionError, ConnectTimeout, PeerRejected, RemoteProtocolError
from ..objects.memory import MR
from ..protocol.messages import Proof
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure, Wait
from .end import End
from .terms import Terms
from .transfer import Part, Sent

__all__ = ["Prober", "abandon", "contents", "prove"]

#: bytes of the first probe: it tells a dead path from one that only drops what is large
SMALL = 16
#: seconds without a probe of the peer after which the path is held to be dead
PATIENCE_S = 10.0
#: and for each queue pair besides
PATIENCE_EACH_S = 0.1
#: seconds after which probes are sent again over types that lose messages
AGAIN_S = 0.25


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
    """

    def __init__(self, ends: Sequence[End], deadline: Deadline) -> None:
        first = ends[0]
        self._ends, self._conversation = ends, first.conversation
        self._engine = first.engine
        self._sizes = tuple(sorted({min(SMALL, first.max_send_size), self._large(first, first.max_send_size)}))
        self._due = {
            index: {min(SMALL, end.local.recv_size), self._large(end, end.local.recv_size)}
            for index, end in enumerate(ends)
        }
        self._seen: set[int] = set()
        self._answered = self._met = False
        self._call = self._deadline = deadline
        self._began = Deadline(None)
        self._sent: list[Sent] = []
        self._turned = False
        self._sent_at = time.monotonic()
        room = sum(self._sizes)
        memory = mmap.mmap(-1, room * len(ends))
        ident = self._conversation.id
        for index in range(len(ends)):
            memory[index * room : (index + 1) * room] = b"".join(contents(ident, index, n) for n in self._sizes)
        self._mr: MR = first.register(memory, AccessFlags(0))
        self._waiting = self._work()

    def _be_patient(self) -> None:
        """Wait anew: something came, so the path is not dead."""
        patience = PATIENCE_S + PATIENCE_EACH_S * len(self._ends)
        self._met = True
        self._deadline = Deadline(min(self._call.left_s, patience), ConnectTimeout)

    @staticmethod
    def _large(end: End, most: int) -> int:
        mtu = MTU_BYTES[end.path.path_mtu]
        return min(most, mtu if end.local.qp_type is QpType.UD else 2 * mtu + 1)

    def _work(self) -> list[tuple[int, int, int]]:
        """(end, address, size) of each probe that is to be sent."""
        room, work = sum(self._sizes), []
        for index in range(len(self._ends)):
            addr = self._mr.addr + index * room
            for size in self._sizes:
                work.append((index, addr, size))
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
        came = False
        for index, end in enumerate(self._ends):
            if end.transceiver.broken is not None:
                raise self._failed(end)
            if self._due[index] and self._receive(index, end):
                came = True
        if came:
            self._be_patient()
        if not self._answered and not any(self._due.values()):
            self._answered = True
            self._conversation.trace.mark("proof", "sent: the peer's probes are here")
            self._conversation.say(Proof(self._conversation.id, self._conversation.trace.stages()))
        if self._conversation.handshake.met and not self._met:
            self._be_patient()
        if self._answered and self._conversation.handshake.proved and not self._waiting:
            # over RC each probe's own completion has come too: the memory may go
            return all(sent.status is not None for sent in self._sent)
        if self._conversation.left is not None:
            raise self._conversation.failure("prove the data path")
        if self._deadline.left_s <= 0 and self._only_slow():
            self._be_patient()
        if self._deadline.left_s <= 0:
            raise ConnectTimeout("prove the data path", self._began.waited_s, self.explain())
        return False

    def _only_slow(self) -> bool:
        """Whether the peer is known to be there, over a type whose own failures tell of a broken path."""
        return not self._conversation.handshake.lossy and self._conversation.alive and self._call.left_s > 0

    def _post(self) -> None:
        lossy = self._conversation.handshake.lossy
        if (
            lossy
            and not self._waiting
            and time.monotonic() - self._sent_at > AGAIN_S
            and not self._conversation.handshake.proved
        ):
            # each time the other way round: where the peer has one receive posted, the second of the two finds none
            self._turned = not self._turned
            self._waiting = self._work()[:: -1 if self._turned else 1]
        left = []
        for work in self._waiting:
            index, addr, size = work
            end = self._ends[index]
            sent = Sent(WrOpcode.SEND, size)
            if end.transceiver.post(sent, Part(WrOpcode.SEND, (addr, size, self._mr.lkey)), end.to):
                self._sent.append(sent)
            else:
                left.append(work)
        if len(left) < len(self._waiting):
            self._sent_at = time.monotonic()
        self._waiting = left

    def _receive(self, index: int, end: End) -> bool:
        """Take what has come on a queue pair; whether anything has that is due."""
        due, found = self._due[index], False
        while True:
            with self._engine.lock:
                inbox = end.inbox()
                if not inbox:
                    return found
                slot, length = inbox.popleft()
                came = bytes(end.transceiver.payload(slot, length))
                end.transceiver.repost(slot)
            if came != contents(self._conversation.id, index, length):
                raise RemoteProtocolError(
                    f"prove the data path: {length} bytes from {end.peer} are not what was sent. "
                    "Do both ends mean the same queue pair?"
                )
            self._seen.add(length)
            if length != min(due, default=length) and end.local.qp_type is QpType.RC:
                raise RemoteProtocolError(
                    f"prove the data path: {length} bytes from {end.peer} arrived, and those sent before them "
                    f"did not, which RC forbids. The PSNs of the two ends do not fit (the peer's begin with "
                    f"{end.peer.psn:#08x}), or the driver loses messages."
                )
            if length in due:
                due.remove(length)
                found = True

    def _failed(self, end: End) -> CompletionError:
        error = end.transceiver.broken
        assert error is not None
        unanswered = error.status in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)
        small_arrived = unanswered and any(sent.status == WcStatus.SUCCESS for sent in self._sent)
        more = f" {self._mtu_words()}" if small_arrived else ""
        if error.status == WcStatus.WR_FLUSH_ERR and not small_arrived:
            more = " (this host did not send: its firewall drops RoCE, UDP port 4791, or its network device refuses)"
        return CompletionError(
            error.status, vendor_err=error.vendor_err, wr_id=error.wr_id, qp_num=error.qp_num, opcode=error.opcode,
            doing=f"prove the data path from {end.local} to {end.peer}{more}",
            hint="" if small_arrived else None,
        )  # fmt: skip

    def _mtu_words(self) -> str:
        return (
            f"({self._sizes[0]} bytes arrive, {self._sizes[-1]} do not: the network between carries less than "
            f"path_mtu {MTU_BYTES[self._ends[0].path.path_mtu]}; give a smaller path_mtu)"
        )

    def explain(self) -> str:
        """What has arrived and what has not, and what that says of the path, while it is not proven."""
        if not (self._met or self._seen):
            return (
                "The peer has replied and has not gone on since: it is busy, slow or stopped, "
                "or of an older version, whose application is not in accept() now."
            )
        if self._seen and not self._answered:
            return f"Some probes arrived and some did not. {self._mtu_words()}"
        if self._answered:
            text = (
                "The peer's probes arrived, but it has not said that ours did: packets are dropped in one direction, "
                "or the peer expects other PSNs than this side sends."
            )
        elif self._conversation.handshake.proved:
            text = (
                "The peer has our probes, but its own do not arrive here: packets are dropped in one direction. "
                "Does a firewall on this side drop RoCE (UDP port 4791), or are its PSNs others than the peer sends?"
            )
        else:
            text = (
                "No probe arrived: a firewall between drops RoCE (UDP port 4791), "
                "or the two ends do not reach each other."
            )
        ud = self._ends[0].local.qp_type is QpType.UD
        return f"{text} UD also drops in silence what comes with another Q_Key." if ud else text

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
            slice_s = AGAIN_S if self._conversation.handshake.lossy else 1.0
            yield Wait(self._deadline, (self.fileno(),), changes, slice_ms=round(slice_s * 1000))

    def close(self) -> None:
        """Free the probes' memory, when the device is done with it."""
        self._mr.close()


def prove(made: Sequence[End], terms: Terms, deadline: Deadline, *, again: bool = False) -> Procedure[None]:
    """Prove the data path if the hello asked for it; see :func:`abandon` for when it fails."""
    try:
        if terms.options.probe:
            prober = Prober(made, deadline)
            try:
                yield from prober.procedure()
            finally:
                prober.close()
            made[0].conversation.trace.mark("proven", "the peer has our probes, and we its")
    except BaseException as e:
        abandon(made, e, again=again)
        raise
    for end in made:
        end.known_as = end.token


def abandon(made: Sequence[End], error: BaseException, *, again: bool = False) -> None:
    """Tell the peer why the proof failed, and close everything; what was connected ``again`` can be so once more."""
    conversation = made[0].conversation
    if not isinstance(error, PeerRejected):
        conversation.give_up(conversation.reject_of(error, "prove the data path"))
    for end in made:
        if not again:
            end.close()
