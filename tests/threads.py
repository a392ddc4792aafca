"""Functions in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def running(*functions: Callable[[], object]) -> Iterator[None]:
    """Each in a thread of its own; at the end all are over, and none has raised."""
    raised: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as e:  # noqa: BLE001  it is told below
            raised.append(e)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if raised:
        raise raised[0]
