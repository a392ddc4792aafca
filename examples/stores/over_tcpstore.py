"""Over torch's TCPStore, which rank 0 serves: python examples/stores/over_tcpstore.py HOST 0, and with 1."""

import sys
from typing import Any

import rdmaconnect


def swap(store: Any, rank: int, device: str | None = None) -> bytes:
    """Send to the other rank, and give what that sends."""
    with rdmaconnect.bind(device=device) as end:
        store.set(f"end{rank}", end.to_bytes())
        theirs = store.get(f"end{1 - rank}")  # which waits for it
        with end.connect(theirs, deadline_s=120) as conn:
            conn.send(b"from %d" % rank)
            return conn.recv()


if __name__ == "__main__":
    from torch.distributed import TCPStore

    host, rank = sys.argv[1], int(sys.argv[2])
    print(swap(TCPStore(host, 29500, 2, rank == 0), rank))
