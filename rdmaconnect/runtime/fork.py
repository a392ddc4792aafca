"""What a child of ``fork`` begins anew. Windows has no fork, and the pure parts are of use there too."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["in_child", "over_fork", "process"]


class _Process:
    """Attributes:
    mark: an object that this process alone has: whoever keeps it finds out at no cost that it was forked.
    """

    mark = object()


process = _Process()


def in_child(function: Callable[[], object]) -> None:
    """Have ``function`` called in each child, before anything else of this library is used there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def over_fork(hold: Callable[[], object], let_go: Callable[[], object]) -> None:
    """Have ``hold`` called before each fork, and ``let_go`` after it in the parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=hold, after_in_parent=let_go)


def _forked() -> None:
    process.mark = object()


in_child(_forked)
