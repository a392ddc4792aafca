"""The log of what peers give reason for: no peer can fill a disk with it."""

from __future__ import annotations

import logging
import threading

__all__ = ["BURST", "PERIOD_S", "Throttle", "log", "throttle"]

#: as many lines of a kind are logged in so many seconds
BURST, PERIOD_S = 10, 10.0


class Throttle(logging.Filter):
    """Let :data:`BURST` lines of each kind pass in :data:`PERIOD_S`; the next one says how many were left out.

    A kind is a format string. Lines below INFO pass, for whoever asks for those wants them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        #: format -> when its period began, lines since then, lines left out
        self._kinds: dict[str, tuple[float, int, int]] = {}

    def reset(self) -> None:
        """Forget what was logged."""
        with self._lock:
            self._kinds.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        kind, now = str(record.msg), record.created
        with self._lock:
            began, count, left_out = self._kinds.get(kind, (now, 0, 0))
            if not 0 <= now - began < PERIOD_S:
                began, count = now, 0
            passes = count < BURST
            self._kinds[kind] = (began, count + 1, 0 if passes else left_out + 1)
        if passes and left_out:
            record.msg = f"{kind} (and {left_out} more like it before)"
        return passes


log = logging.getLogger("rdmaconnect.peers")
throttle = Throttle()
log.addFilter(throttle)
