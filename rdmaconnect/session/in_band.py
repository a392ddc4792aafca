"""Two ends without a side channel: what they have to say to each other goes over the queue pairs too.

That is the word that the probes have come, and the good-bye. Over RC one of the two, the one who *knocks*, sends first,
and does so anew for as long as the other is not there: a queue pair in INIT drops what comes, and the knocker's fails.
It has received nothing then, so that it can begin again from the same PSN. The other one sends once it has heard it.

All are told from the application's messages by the connection's id, which nobody else knows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

from ..abi import AccessFlags, QpType, WcStatus, WrOpcode
from ..agreement.unproven import unproven
from ..errors import CompletionError, ConnectTimeout, PeerClosed, RemoteProtocolError
from ..exchange import alive, service
from ..protocol.handshake import Handshake, Role
from ..protocol.health import HealthState
from ..protocol.messages import Hello, Reply
from ..runtime.deadline import Deadline
from ..runtime.procedure import Call, Procedure, Wait
from .conversation import Conversation
from .end import End
from .probe import SMALL, STAGE, Prober, contents
from .trace import Trace
from .transfer import Part, Sent

__all__ = ["InBandConversation", "InBandProber"]

_SEND = WrOpcode.SEND
#: between two looks at the data path of a peer that stands, ticks; at least between two knocks, s
_ASK_TICKS, _KNOCK_S = 5, 0.02
#: a knock that waits for ever has had so long, s
_UNANSWERED_S = 0.5
#: what was sent so short a time ago may have come to a peer that is just there, s
_NEW_S = 0.02
#: between two looks whether the word may be said now, s
_UNTOLD_S = 0.05
#: a good-bye has so long to get to the peer, s
_BYE_S = 0.2


def inverted(data: bytes) -> bytes:
    """The same bytes with every bit turned."""
    return bytes(byte ^ 0xFF for byte in data)


def bye_of(ident: bytes) -> bytes:
    """What a connection of that id ends with, 32 bytes."""
    return hashlib.sha256(b"rdmaconnect bye" + ident).digest()


class InBandConversation(Conversation):
    """A conversation of two that have each other's hello already; an :class:`~rdmaconnect.exchange.alive.Alive`.

    Each end takes itself for the connector, whose listener has replied.

    Args:
        hello: what this end has told of itself.
        reply: what the other has, with what both agree on.
        trace: the stages on the way to here.
        knocks: whether this end leads: over RC it sends first, and of several pairs of ports it chooses.
        talks: whether both ends' receives and completions are this library's: else nothing of its own is sent.
    """

    closing = False

    def __init__(self, hello: Hello, reply: Reply, trace: Trace, knocks: bool, talks: bool = True) -> None:
        super().__init__(Handshake(Role.CONNECTOR, hello.id), trace)
        self.knocks, self._talks = knocks, talks
        self.handshake.send(hello)
        self.handshake.receive(reply)
        self._bye, self._probe = bye_of(hello.id), hello.id
        self._proof = inverted(contents(hello.id, 0, SMALL))
        self._ends: list[ref[End]] = []
        self._count = 0
        self._asked: Sent | None = None

    # ---- what comes over the data path

    def takes(self, first: bool, payload: memoryview) -> bool:
        """Whether a message is this library's own, and not the application's; what it says is heeded.

        Args:
            first: whether it has come on the first of the queue pairs.
            payload: the message.
        """
        if len(payload) == len(self._bye) and payload == self._bye:
            self.farewell = True
            self.over(PeerClosed("the peer closed the connection (close)."))
            return True
        if not self.handshake.lossy or len(payload) < SMALL:
            return False
        begin = payload[:SMALL]
        if begin == self._probe:
            if first and len(payload) == SMALL:  # the word that its probes have come was lost
                self._say(self._proof, 0.0)
            return True
        return begin == self._proof

    def is_probe(self, payload: memoryview) -> bool:
        """Whether a message is a probe, or a word, that came a second time."""
        return self.handshake.lossy and payload[:SMALL] in (self._probe, self._proof)

    # ---- once it stands

    def begin(self, ends: Sequence[End]) -> None:
        """Both sides hold the connection: take out what is not the application's, and see to the data path."""
        self.stand(ends, self.id)
        if not self._talks:
            return
        self._ends = [ref(end) for end in ends]
        for end in ends:
            end.heed(partial(self.takes, end is ends[0]))
        service.soon(alive.add, self)

    def tick(self) -> None:
        """A second has passed. In the service thread."""
        ends = [end for end in (there() for there in self._ends) if end is not None and not end.closed]
        if not ends or self.left is not None:
            alive.remove(self)
            return
        ends[0].look()  # which takes what has completed on all
        for end in ends:
            if end.transceiver.broken is not None:
                self.doubt(str(end.transceiver.broken.status))
        self._count += 1
        if self.handshake.lossy or self._count % _ASK_TICKS:
            return
        if self._asked is None or self._asked.status is not None:
            self._asked = ends[0].ask()

    def finish(self) -> None:
        """The process ends."""
        alive.remove(self)

    def doubt(self, words: str) -> None:
        """The data path has failed, and there is nothing else that leads to the peer."""
        self._turn_once(HealthState.DEAD, f"the data path failed ({words}), and nothing else leads to the peer")

    def here(self, state: HealthState, why: str) -> None:
        """This is what the port and the address here have become."""
        self._turn_once(state, why)

    def _turn_once(self, state: HealthState, why: str) -> None:
        with self._lock:
            now = self.health
            if self.left is None and now.state is not HealthState.DEAD and (now.state, now.why) != (state, why):
                self._turn(state, why)

    def _say(self, data: bytes, grace_s: float) -> bool:
        return any(end.say(data, grace_s) for end in (there() for there in self._ends) if end is not None)

    def close(self, why: str = "close", *, lost: bool = False) -> None:
        """Say good-bye over the data path and close, if this was the last user."""
        if self._users == 1:
            if self.left is None and not lost:
                self._say(self._bye, _BYE_S)
            service.soon(alive.remove, self)
        super().close(why, lost=lost)


class _Unanswered(Exception):
    """A knock was not answered, and the queue pair's ``timeout`` of 0 has it wait for ever."""


class InBandProber(Prober):
    """The proof where the word that the probes have come goes over the first of the queue pairs as well.

    Args:
        ends, deadline, share: as for :class:`Prober`; their conversation is an :class:`InBandConversation`.
        may_tell: asked, once the peer's word is here, whether this end's may be said; None where neither counts.
    """

    _in_lists = False  # one of them may have to go before all others

    def __init__(
        self,
        ends: Sequence[End],
        deadline: Deadline,
        share: Callable[[], float] | None = None,
        may_tell: Callable[[], bool] | None = None,
    ) -> None:
        self._may_tell, self._untold = may_tell, False
        super().__init__(ends, deadline, share)
        first = ends[0]
        assert isinstance(first.conversation, InBandConversation)
        self._knocks, self._peer_told = first.conversation.knocks, False
        ident = first.conversation.id
        self._expected = inverted(contents(ident, 0, min(SMALL, first.local.recv_size)))
        word = inverted(contents(ident, 0, self._sizes[0]))
        self._word_mr = first.register(bytearray(word) or bytearray(1), AccessFlags(0))
        self._word = first, Part(_SEND, (self._word_mr.addr, len(word), self._word_mr.lkey))
        #: whether all is to be sent once more when the peer is there; what is not sent before
        self._again = first.conversation.handshake.lossy
        self._held: list[tuple[End, Part]] = []
        self._knock: list[tuple[End, Part]] = []
        if first.local.qp_type is QpType.RC:
            work = self._work()
            # on the last queue pair: the peer brings them up in their order
            last = len(self._sizes) * (len(ends) - 1)
            self._knock = [work[last]] if self._knocks else []
            self._waiting, self._held = self._knock, [one for one in work if one not in self._knock]

    def close(self) -> None:
        """Free the memory, when the device is done with it."""
        super().close()
        self._word_mr.close()

    # ---- out

    def _work(self) -> list[tuple[End, Part]]:
        return super()._work() + ([self._word] if self._answered and not self._untold else [])

    def _tell(self) -> None:
        self._untold = self._may_tell is not None and not (self._has_word and self._may_tell())
        if not self._untold:
            self._waiting = [*self._waiting, self._word]

    @property
    def _slice_s(self) -> float:
        return _UNTOLD_S if self._untold else super()._slice_s

    def _post(self) -> None:
        if self._untold:
            self._tell()
        if self._again and self._seen:
            self._again = False
            if time.monotonic() - self._sent_at > _NEW_S:  # it has gone before the peer was there
                self._waiting = self._work()
        if self._held and (self._seen or (self._sent and self._sent[0].status == WcStatus.SUCCESS)):
            self._waiting, self._held = self._waiting + self._held, []
        super()._post()

    # ---- in

    @property
    def _told(self) -> bool:
        return self._has_word and not self._untold

    @property
    def _has_word(self) -> bool:
        if not (self._peer_told or self._due):
            self._look_for_word()
        return self._peer_told

    def _is_word(self, index: int, came: bytes) -> bool:
        word = index == 0 and came == self._expected
        self._peer_told = self._peer_told or word
        return word

    def _look_for_word(self) -> None:
        """The peer's probes have come; what comes after its word is the application's."""
        end, lossy = self._ends[0], self._conversation.handshake.lossy
        with self._engine.lock:
            inbox = end.inbox()
            while inbox and not self._peer_told:
                came = bytes(end.transceiver.payload(*inbox[0]))
                word = self._is_word(0, came)
                if not word and not (lossy and came == contents(self._conversation.id, 0, len(came))):
                    if not lossy:
                        raise RemoteProtocolError(
                            f"{STAGE}: {len(came)} bytes from {end.peer} are not what was to be sent. "
                            "Do both ends mean the same queue pair?"
                        )
                    self._peer_told = True  # the word was lost: it goes on, and so has ours
                    return
                end.transceiver.repost(inbox.pop(0)[0])

    # ---- while the peer is not there

    def advance(self) -> bool:
        """As the other one."""
        proven = super().advance()
        late = time.monotonic() - self._sent_at > _UNANSWERED_S
        if late and self._knock and self._held and not self._seen and not self._ends[0].path.timeout:
            raise _Unanswered
        return proven

    def _why_nothing(self) -> str:
        end = self._ends[0]
        return (
            "Nothing has come of the peer: it has not called connect() with the bytes of this end, is gone, or was "
            f"given those of another end. Or else: {unproven(end.path.local_gid, end.path.remote_gid)}"
        )

    def procedure(self) -> Procedure[None]:
        """Advance until it is proven."""
        while True:
            try:
                yield from super().procedure()
                return
            except _Unanswered:
                pass
            except CompletionError as e:
                if not self._held or self._seen or e.status != WcStatus.RETRY_EXC_ERR:
                    raise
                if self._call.left_s <= 0:
                    raise ConnectTimeout(STAGE, self._began.waited_s, self.explain()) from None
            yield Wait(Deadline(_KNOCK_S))
            yield Call(self._knock_again)

    def _knock_again(self) -> None:
        """From the same PSN: the peer knows that already, and has heard nothing yet. Blocks."""
        end = self._ends[-1]
        transceiver = end.transceiver
        transceiver.stop()
        transceiver.restart(psn=end.local.psn)
        transceiver.to_rtr(end.path)
        transceiver.to_rts(end.path)
        self._sent.clear()
        self._waiting = self._knock
        self._inboxes = [end.inbox() for end in self._ends]
