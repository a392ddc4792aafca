"""Who came to a listener in vain, and what an error says of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..errors import RdmaConnectError

__all__ = ["InVain"]

#: as many are kept, and as many an error names
_KEPT, _NAMED = 16, 3


class InVain:
    """Connectors that failed, and strangers who asked for nothing. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: deque[tuple[str, RdmaConnectError]] = deque(maxlen=_KEPT)
        self._strangers: deque[str] = deque(maxlen=_KEPT)
        #: how many there were since an error has named them
        self._failed = self._strange = 0

    def failed(self, words: str, error: RdmaConnectError) -> None:
        """One that asked for a connection did not get it."""
        with self._lock:
            self._failed += 1
            self._failures.append((words, error))

    def strange(self, words: str) -> None:
        """One went without asking for a connection."""
        with self._lock:
            self._strange += 1
            self._strangers.append(words)

    @property
    def failures(self) -> bool:
        """Whether there is one that :meth:`next_failure` would give."""
        return bool(self._failures)

    def next_failure(self) -> RdmaConnectError:
        """The oldest failure, which is forgotten then.

        Raises:
            IndexError: there is none.
        """
        with self._lock:
            return self._failures.popleft()[1]

    def explain(self, under_way: Sequence[str]) -> str:
        """Whom an accept in vain, and nobody before it, has seen, in words; "" if nobody.

        Args:
            under_way: in words, those who have not come to an end yet.
        """
        failures, strangers = self.seen()
        if failures:
            return f"Failed with {'; '.join(failures)}"
        if under_way:
            return f"Not finished with {', '.join(under_way)}"
        return f"Of those who connected none asked for a connection: {'; '.join(strangers)}" if strangers else ""

    def seen(self) -> tuple[list[str], list[str]]:
        """In words, the last of those that failed and of the strangers, and none of those that were named before."""
        with self._lock:
            failed, strange = min(self._failed, _NAMED), min(self._strange, _NAMED)
            self._failed = self._strange = 0
            failures = [words for words, _ in self._failures][-failed:] if failed else []
            strangers = list(self._strangers)[-strange:] if strange else []
        return failures, list(dict.fromkeys(strangers))
