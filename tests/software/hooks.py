"""What a test hangs on a verb: a delay, a failure, something to do before and after it, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from .gid import raw_gid


@dataclass
class Call:
    """One call of a verb.

    Attributes:
        verb: its C name.
        number: which call of this verb it is since the device was made, from 1.
        args: parameter name -> value: an object, a struct, or a number.
        thread: who calls.
        result: what it returned, once it has.
    """

    verb: str
    number: int
    args: dict[str, Any]
    thread: threading.Thread = field(default_factory=threading.current_thread)
    result: int | None = None

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def dgid(self) -> bytes | None:
        """The peer's GID, for verbs that are given a path; else None."""
        attr = self.args.get("attr")
        ah = getattr(attr, "ah_attr", attr)
        if ah is None or not hasattr(ah, "grh") or not ah.is_global:
            return None
        if attr is not ah and not self.args["attr_mask"] & _AV:
            return None
        return bytes(ah.grh.dgid.raw)

    @property
    def qp_num(self) -> int | None:
        """The queue pair's number, for verbs that are given one; else None."""
        return getattr(self.args.get("qp"), "qp_num", None)

    @property
    def to(self) -> int | None:
        """The state that ``ibv_modify_qp`` is to move to; else None."""
        return self.args["attr"].qp_state if self.verb == "ibv_modify_qp" and self.args["attr_mask"] & 1 else None


_AV = 1 << 7


class Hook:
    """What happens at some calls of a verb. Made by ``Software.on``; a context manager that takes it away again.

    Attributes:
        seen: how many calls it was for.
    """

    def __init__(
        self,
        verb: str,
        *,
        delay: float | Callable[[Call], float] = 0.0,
        fail: int | None = None,
        before: Callable[[Call], Any] | None = None,
        after: Callable[[Call], Any] | None = None,
        nth: int | Container[int] | None = None,
        times: int | None = None,
        dgid: str | bytes | None = None,
        to: int | None = None,
        thread: threading.Thread | None = None,
        where: Callable[[Call], bool] | None = None,
    ) -> None:
        self.verb, self.delay, self.fail, self.before, self.after = verb, delay, fail, before, after
        self._nth = (nth,) if isinstance(nth, int) else nth
        self._times, self._to, self._thread, self._where = times, to, thread, where
        self._dgid = None if dgid is None else raw_gid(dgid)
        self._lock = threading.Lock()
        self._matched = self.seen = 0
        self.removed = False

    def takes(self, call: Call) -> bool:
        """Whether it is for this call; counts it if so."""
        if self.removed or self._thread not in (None, call.thread):
            return False
        if (self._dgid is not None and call.dgid != self._dgid) or (self._to is not None and call.to != self._to):
            return False
        if self._where is not None and not self._where(call):
            return False
        with self._lock:
            self._matched += 1
            if self._nth is not None and self._matched not in self._nth:
                return False
            if self._times is not None and self.seen >= self._times:
                return False
            self.seen += 1
            return True

    def begin(self, call: Call) -> None:
        """What comes before the verb does anything."""
        if self.before is not None:
            self.before(call)
        delay = self.delay(call) if callable(self.delay) else self.delay
        if delay > 0:
            time.sleep(delay)

    def remove(self) -> None:
        """Take it away."""
        self.removed = True

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
