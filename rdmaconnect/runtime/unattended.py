"""Running a procedure that nobody waits for: its steps in workers, its waits on an event loop, a thread for neither."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from .procedure import Interrupt, Procedure, Wait, do, ready
from .workers import Workers

__all__ = ["run_unattended"]

T = TypeVar("T")


async def run_unattended(procedure: Procedure[T], workers: Workers, interrupt: Interrupt) -> T:
    """Run a procedure, and return what it returns; the running loop is never blocked.

    Args:
        procedure: to be run.
        workers: take its steps: in their network namespace it opens what it opens.
        interrupt: breaks into it.
    """
    answer: Any = None
    error: BaseException | None = None
    while True:
        step = partial(_step, procedure, answer, error, interrupt)
        over, request = await asyncio.wrap_future(workers.submit(step))
        if over:
            value: T = request
            return value
        answer = error = None
        try:
            signal = interrupt.signal
            seen = signal.count
            interrupt.check()
            answer = await ready(replace(request, changes=(*request.changes, (signal, seen))))
            interrupt.check()
        except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
            error = e


def _step(
    procedure: Procedure[Any], answer: Any, error: BaseException | None, interrupt: Interrupt
) -> tuple[bool, Any]:
    """Go on to the next wait, or to the end: whether it is the end, and what the procedure gives."""
    try:
        while True:
            request = procedure.send(answer) if error is None else procedure.throw(error)
            answer = error = None
            if isinstance(request, Wait):
                return False, request
            try:
                answer = do(request, interrupt)
            except BaseException as e:  # noqa: BLE001  it is the procedure's to handle
                error = e
    except StopIteration as end:
        return True, end.value
