"""Stores that two programs may have in common: real ones where they are installed, else what is used of them."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: the server, which redis-tools has by another name; None where it is not installed
REDIS = shutil.which("redis-server") or shutil.which("redis-check-rdb")


class FewOfTcpStore:
    """``set``, and ``get`` that waits, as ``torch.distributed.TCPStore`` has them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 30)
            return self._values[key]


class FewOfRedis(FewOfTcpStore):
    """``rpush`` and ``blpop``, as ``redis.Redis`` has them."""

    def rpush(self, key: str, value: bytes) -> int:
        self.set(key, value)
        return 1

    def blpop(self, key: str, timeout: float) -> tuple[bytes, bytes]:
        value = self.get(key)
        del self._values[key]
        return key.encode(), value


class Comms:
    """``rank`` and ``allgather``, as ``mpi4py.MPI.COMM_WORLD`` has them."""

    def __init__(self, rank: int, store: FewOfTcpStore, size: int) -> None:
        self.rank, self._store, self._size = rank, store, size

    @classmethod
    def of(cls, size: int) -> list[Comms]:
        """Those of all ranks."""
        store = FewOfTcpStore()
        return [cls(rank, store, size) for rank in range(size)]

    def allgather(self, value: bytes) -> list[bytes]:
        self._store.set(str(self.rank), value)
        return [self._store.get(str(rank)) for rank in range(self._size)]


@contextmanager
def redis_server(folder: Path, on: Sequence[str] = (), address: str = "") -> Iterator[str]:
    """A Redis of its own.

    Args:
        folder: for what it leaves.
        on: what its command line begins with.
        address: at which it listens, with the port that it mostly has; "" for its socket alone.

    Yields:
        The path of its socket.
    """
    assert REDIS is not None
    program, path = folder / "redis-server", folder / "redis.sock"
    program.symlink_to(REDIS)  # it is that by its name
    where = ["--bind", address, "--protected-mode", "no"] if address else ["--port", "0"]
    words = [*on, str(program), *where, "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < end
            assert server.poll() is None
            time.sleep(0.05)
        yield str(path)
    finally:
        server.terminate()
        server.wait(60)
