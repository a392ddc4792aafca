"""What the two ends of a fault are told, and how soon: for the recipes of the field."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from nodes import PATIENCE, Node

import rdmaconnect
from rdmaconnect import RdmaConnectError

#: seconds that are given to each call; what is told must be told before
DEADLINE_S = 20.0


@dataclass
class Told:
    """What one end was told, and when."""

    kind: str
    words: str
    errno: int
    took_s: float

    def says(
        self, cls: type[BaseException] | tuple[type[BaseException], ...], words: str, within_s: float = DEADLINE_S
    ) -> None:
        recipe = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].removesuffix(" (call)")
        print(json.dumps([recipe, self.kind, self.words, round(self.took_s, 1)]))
        classes = cls if isinstance(cls, tuple) else (cls,)
        assert self.kind in {one.__name__ for one in classes}, self.words
        assert re.search(words, self.words), self.words
        assert self.took_s < within_s


def told(make: Any, *args: Any, **options: Any) -> Told:
    """Call what must fail."""
    before = time.monotonic()
    try:
        made = make(*args, **options)
    except (RdmaConnectError, OSError) as e:
        words = str(e) if isinstance(e, RdmaConnectError) else str(e.strerror)
        return Told(type(e).__name__, words, getattr(e, "errno", None) or 0, time.monotonic() - before)
    if hasattr(made, "close"):
        made.close()
    raise AssertionError(f"{make} gave {made}")


def both(
    node1: Node, node2: Node, connect: dict[str, Any] | None = None, listen: dict[str, Any] | None = None
) -> tuple[Told, Told]:
    """A connector and a listener who do not come together: what each is told."""
    with node2.listening(**(listen or {})) as listener:
        there = node2.start(told, listener.accept, deadline_s=DEADLINE_S, tolerant=False)
        options = {"deadline_s": DEADLINE_S, **node1.named, **(connect or {})}
        here = node1.start(told, rdmaconnect.connect, listener.url, **options)
        return here.result(PATIENCE), there.result(PATIENCE)
