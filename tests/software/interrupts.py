"""Ctrl-C comes after a verb and never inside of it, as with a real library, which runs no Python."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from .calls import ENTRIES

_AGAIN = signal.SIGRTMIN + 9


class after_verbs:
    """While this is entered, a signal whose handler raises is put off to the end of the verb that it came into.

    Without it an exception that a handler raises inside of a verb is one of the device's errors, and lost. To be
    entered in the main thread. (asyncio.run leaves SIGINT alone while this has it.)

    Args:
        number: the signal.

    Attributes:
        put_off: how often one came inside of a verb.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        self._number, self._pending, self.put_off = number, False, 0

    def __enter__(self) -> after_verbs:
        self._main = threading.get_ident()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._over = False
        # a thread of its own, which is there already: a handler that starts one could wait for itself
        self._ringer = threading.Thread(target=self._ring, name="signals after verbs", daemon=True)
        self._ringer.start()
        self._handlers: tuple[Any, Any] = signal.getsignal(self._number), signal.signal(_AGAIN, self._again)
        signal.signal(self._number, self._came)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(self._number, self._handlers[0])
        self._over = True
        os.eventfd_write(self._bell, 1)
        self._ringer.join()
        signal.signal(_AGAIN, self._handlers[1])
        os.close(self._bell)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if _in_verb(frame):
            self.put_off += 1
            self._pending = True
            os.eventfd_write(self._bell, 1)
        else:
            self._deliver(frame)

    def _again(self, number: int, frame: FrameType | None) -> None:
        if not self._pending:
            return
        if _in_verb(frame):
            os.eventfd_write(self._bell, 1)
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None) -> None:
        self._pending = False
        if callable(self._handlers[0]):
            self._handlers[0](self._number, frame)

    def _ring(self) -> None:
        while True:
            os.eventfd_read(self._bell)
            if self._over:
                return
            time.sleep(0.0005)
            signal.pthread_kill(self._main, _AGAIN)


def _in_verb(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in ENTRIES:
            return True
        frame = frame.f_back
    return False
