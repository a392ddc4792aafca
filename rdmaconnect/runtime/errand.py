"""Calls that block, and the workers that make them for a procedure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .deadline import Deadline
from .wakeup import Signal
from .workers import here

__all__ = ["Call", "Errand"]

log = logging.getLogger("rdmaconnect")


@dataclass(slots=True)
class Call:
    """Call something that may block for seconds; the procedure is sent its result, or its exception is raised there.

    Args:
        function: what to call.
        deadline: if given, the procedure goes on without the call when it has passed, or when the procedure is
            interrupted or cancelled: then the call comes to its end in a worker thread. Without one the
            call is waited for.
        stage: for the error that says that the deadline has passed.
        undo: takes back a result that comes too late for the procedure.
        finally_: called once the call is over or will never begin, whatever became of it.
    """

    function: Callable[[], Any]
    deadline: Deadline | None = None
    stage: str = ""
    undo: Callable[[Any], None] | None = None
    finally_: Callable[[], None] | None = None


class Errand:
    """A call that a worker makes for a procedure, which may go on without it.

    Attributes:
        done: whether the call is over.
        changed: notified then.
    """

    def __init__(self, call: Call) -> None:
        self.changed, self.done = Signal(), False
        self._call, self._lock = call, threading.Lock()
        self._begun = self._given_up = False
        self._value: Any = None
        self._error: BaseException | None = None
        try:
            here().start(self._run)
        except BaseException:
            self._finally()
            raise

    def _run(self) -> None:
        """In a worker: call it."""
        with self._lock:
            if self._given_up:
                return
            self._begun = True
        try:
            self._value = self._call.function()
        except BaseException as e:  # noqa: BLE001  it is for whoever asks for the result
            self._error = e
        with self._lock:
            self.done, late = True, self._given_up
        try:
            try:
                if late:
                    self._take_back()
            finally:
                self._finally()
        except Exception:
            log.exception("%s: it came too late, and could not be taken back", self._call.stage)
        finally:
            self.changed.notify()

    def result(self) -> Any:
        """What the call returned, or raises what it raised; for when it is done."""
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback would keep it, and it keeps the error

    def give_up(self) -> None:
        """The procedure does not want the result any more."""
        with self._lock:
            if self._given_up:
                return
            self._given_up, begun, done = True, self._begun, self.done
        if not begun:
            self._finally()
        elif done:
            self._take_back()

    def _take_back(self) -> None:
        if self._call.undo is not None and self._error is None:
            self._call.undo(self._value)

    def _finally(self) -> None:
        if self._call.finally_ is not None:
            self._call.finally_()
