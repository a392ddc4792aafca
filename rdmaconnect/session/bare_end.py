"""One end of a connection whose receives and completions are the application's."""

from __future__ import annotations

from typing import Any

from ..errors import StateError
from ..objects.queuepair import QueuePair
from .end import End
from .own import Own
from .prepared import Prepared
from .renewing import Established
from .transceiver import Transceiver
from .transfer import Sent

__all__ = ["BareEnd", "make_end"]


class BareEnd(End):
    """The same as :class:`End`, of which a side channel at most tells if the peer is there; nothing moves by it."""

    @property
    def answers(self) -> bool:
        """That the peer's device acknowledges is seen by the application alone."""
        return False

    @property
    def qp(self) -> QueuePair:
        qp: QueuePair = self._own.shown(self.transceiver.qp)
        return qp

    @property
    def _own(self) -> Own:
        assert self.prepared.own is not None
        return self.prepared.own

    def ask(self) -> Sent | None:
        """Nothing is posted here."""
        return None

    def _let_read(self) -> None:
        """What comes is read by the application."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        raise StateError(
            f"send, receive, write or read by {self!r}: its receives and completions are the application's own "
            f"({self._own.name} was given). Post to conn.qp, and poll the completion queue."
        )

    send = write = begin_send = begin_write = posting = piece = writing = _refuse
    recv = try_recv = recv_into = recv_view = recv_imm = _refuse
    read = read_into = reading = fetch_add = compare_swap = _refuse


def make_end(prepared: Prepared, transceiver: Transceiver, established: Established) -> End:
    """The end that a user is to hold."""
    kind = End if prepared.own is None else BareEnd
    return kind(prepared, transceiver, established)
