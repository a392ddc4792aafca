"""What a test does in a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_a_fork(work: Callable[[], object]) -> str:
    """What ``work`` returns in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(work()).encode())
        except BaseException as e:  # noqa: BLE001
            os.write(writer, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(pid, 0)
    return text
