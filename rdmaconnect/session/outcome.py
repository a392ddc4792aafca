"""What becomes of what is sent: in which life of the connection it is begun, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..abi import WcStatus
from ..errors import CompletionError, OutcomeUnknown, RdmaConnectError, StateError
from ..runtime.deadline import Deadline
from ..runtime.procedure import Procedure
from .life import Life, LifeOver
from .receiving import Receiving
from .transfer import Sent

__all__ = ["Outcome"]

T = TypeVar("T")


class Outcome(Receiving):
    """Beginning and end of a transfer; what is between is of :class:`~rdmaconnect.session.posting.Posting`."""

    life: Life

    def loss(self) -> str:
        """In words, why the connection is lost, as far as either path has shown it; "" if it is not."""
        if self.life.ended:
            return self.life.ended
        causes = (self.transceiver.broken, self.conversation.left)
        return " ".join(dict.fromkeys(str(cause) for cause in causes if cause))

    # ---- in which life

    def standing(self, deadline: Deadline, doing: str) -> Procedure[Life]:
        """Wait until it is connected, and give its life."""
        if not self.life.stands:
            yield from self._until(lambda: self.life.stands or None, deadline, doing)
        return self.life

    def _in_a_life(
        self, begin: Callable[[Life], Procedure[Sent]], deadline: Deadline, batch: Life | None
    ) -> Procedure[Sent]:
        """Begin a transfer, once more where the life is over before any of it is posted; but a batch is of one life."""
        while True:
            life = batch or (yield from self.standing(deadline, "wait for the connection"))
            try:
                return (yield from begin(life))
            except LifeOver:
                if batch is not None:
                    raise

    def _in(self, life: Life, attempt: Callable[[], T]) -> Callable[[], T]:
        """The same attempt, which is made in one life only."""

        def guarded() -> T:
            if self.life is not life or life.ended:
                raise LifeOver(
                    f"post: it was begun in generation {life.generation} of the connection, this is "
                    f"{self.life.generation}. Begin anew."
                )
            return attempt()

        return guarded

    # ---- how it ends

    def finished(self, sent: Sent) -> bool:
        """Whether it is done; never waits.

        Raises:
            CompletionError, PeerClosed: it failed.
        """
        if sent.status is None:
            self.engine.progress()
            if sent.status is None:
                return False
        if sent.status:
            if sent.status == WcStatus.WR_FLUSH_ERR:
                self.check_open()
            raise self._verdict(sent)
        return True

    def is_over(self, sent: Sent) -> bool:
        """Whether nothing more comes of it; never waits."""
        if sent.status is None:
            with suppress(StateError):  # it is being closed
                self.engine.progress()
        return sent.status is not None

    def finish(self, sent: Sent, deadline: Deadline, *, polled: bool = False) -> Procedure[None]:
        """Wait until it is done; ``polled``: it has been polled for."""
        if sent.status is None:
            yield from self._until(sent.over, deadline, sent.doing, flushed=True, polled=polled)
        if sent.status and not self._is_unknown(sent):
            yield from self._ask_peer(self._failure(sent), deadline)
        self.finished(sent)

    def _verdict(self, sent: Sent) -> RdmaConnectError:
        """Why it failed."""
        if sent.life is not None and self._is_unknown(sent):
            return self._unknown(sent, sent.life)
        return self._over(sent.doing, self._failure(sent))

    def _is_unknown(self, sent: Sent) -> bool:
        """Whether it failed with the life that it was posted in, and the connection goes on, or might have."""
        return sent.life is not None and (bool(sent.life.ended) or self.comes_back())

    def _unknown(self, sent: Sent, life: Life) -> OutcomeUnknown:
        return OutcomeUnknown(
            WcStatus(sent.failed or WcStatus.WR_FLUSH_ERR), generation=life.generation, why=life.ended or self.loss(),
            vendor_err=sent.vendor_err, wr_id=sent.wr_id, qp_num=self.local.qp_num, opcode=str(sent.opcode),
            doing=f"{sent.doing} from {self.local} to {self.peer}",
        )  # fmt: skip

    def _failure(self, sent: Sent) -> CompletionError:
        return CompletionError(
            WcStatus(sent.status or 0), vendor_err=sent.vendor_err, wr_id=sent.wr_id, qp_num=self.local.qp_num,
            opcode=str(sent.opcode), doing=f"{sent.doing} from {self.local} to {self.peer}",
        )  # fmt: skip
