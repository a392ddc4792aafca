"""Objects that nobody holds any more."""

from __future__ import annotations

import gc
from typing import Any


def forget(things: list[Any]) -> None:
    """Let go of all, in order, and have the collector look for circles."""
    while things:
        del things[0]
    gc.collect()


def collect_together(things: list[Any]) -> None:
    """Let the collector find all of the list at once, whatever refers to whom; the caller keeps none of them."""
    circle: list[Any] = [*things]
    circle.append(circle)
    things.clear()
    del circle
    gc.collect()
