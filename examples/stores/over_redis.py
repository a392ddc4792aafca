"""Over Redis: python examples/stores/over_redis.py HOST 0, and with 1."""

import sys
from typing import Any

import rdmaconnect


def swap(store: Any, rank: int, device: str | None = None) -> bytes:
    """Send to the other rank, and give what that sends."""
    with rdmaconnect.bind(device=device) as end:
        store.rpush(f"end{rank}", end.to_bytes())
        _, theirs = store.blpop(f"end{1 - rank}", 120)  # it is taken out: an end is used once
        with end.connect(theirs, deadline_s=120) as conn:
            conn.send(b"from %d" % rank)
            return conn.recv()


if __name__ == "__main__":
    from redis import Redis

    print(swap(Redis(sys.argv[1]), int(sys.argv[2])))
