"""Over a folder that both hosts see, empty at first: python examples/stores/over_file.py FOLDER 0, and with 1."""

import sys
import time
from pathlib import Path

import rdmaconnect


def swap(folder: str, rank: int, device: str | None = None) -> bytes:
    """Send to the other rank, and give what that sends."""
    mine, theirs = (Path(folder, f"end{number}") for number in (rank, 1 - rank))
    with rdmaconnect.bind(device=device) as end:
        mine.with_suffix(".part").write_bytes(end.to_bytes())
        mine.with_suffix(".part").rename(mine)  # it is there whole, or not at all
        while not theirs.exists():
            time.sleep(0.05)
        with end.connect(theirs.read_bytes(), deadline_s=120) as conn:
            conn.send(b"from %d" % rank)
            return conn.recv()


if __name__ == "__main__":
    print(swap(sys.argv[1], int(sys.argv[2])))
