"""Waiting for one descriptor; select(2) knows none above 1023."""

from __future__ import annotations

import select

__all__ = ["readable"]


def readable(fd: int, timeout_ms: int) -> bool:
    """Wait until a descriptor can be read; whether it can."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))
