"""A queue pair whose receives and completions are the application's: it is connected, and else left alone."""

from __future__ import annotations

from typing import Any

from ..abi import QpState
from ..agreement.endpoint import Endpoint
from ..agreement.options import Sizes
from ..agreement.path import Path
from ..objects.transition import Transition
from .engine import Engine
from .own import Own
from .transceiver import Transceiver

__all__ = ["Bare"]


class Bare(Transceiver):
    """The same as :class:`Transceiver` without anything posted, and so without anything that completes.

    Args:
        engine, qp, endpoint, sizes, to_init: as of :class:`Transceiver`; one in INIT stays there, with what was posted.
        own: what the application brought, which ``qp`` is of.
    """

    def __init__(
        self, engine: Engine, qp: Any, endpoint: Endpoint, sizes: Sizes, to_init: Transition, own: Own
    ) -> None:
        self._begin(engine, qp, endpoint, sizes, to_init)
        self._most_sent = 0
        self._own, self._came, self._stood, self._parted = own, qp.state, False, False
        if qp.state == QpState.RESET:
            self._init(to_init)

    def _init(self, step: Transition) -> None:
        self.qp.take(step, self.endpoint)

    def to_rtr(self, path: Path, *step: Any) -> None:
        """The same where it is still as it was made ready.

        Raises:
            StateError: it is not: it was moved, or destroyed.
        """
        if not self._stood:
            self._own.check(self.qp, path.port_num)
        super().to_rtr(path, *step)

    def stop(self) -> None:
        """What was posted is the application's: it goes with RESET."""

    def go_on(self) -> None:
        """It is a connection's."""
        self._stood = True

    def close(self) -> None:
        """Leave the queue pair to its owner; one that was made here is destroyed."""
        with self.engine.lock:
            if not self._parted:
                self._own.part(self.qp, self._came, self._stood)
                self._parted = True
            self.engine.transceivers.pop(self.qp.qp_num, None)
