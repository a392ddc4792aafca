"""Write a NumPy array into a peer's memory.

Run `python examples/numpy_array.py` to lend an array, then `python examples/numpy_array.py HOST` on another host.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import rdmaconnect

SHAPE = (256, 1024)


def serve(address: str = "*", device: str | None = None) -> None:
    """Lend an array, and look at what was written into it."""
    board = np.zeros(SHAPE, "f4")
    with rdmaconnect.listen(address, device=device, regions={"board": board}) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        with listener.accept(deadline_s=None) as conn:
            # The client writes by itself and then tells each row's sum.
            sums = np.frombuffer(conn.recv(deadline_s=120), "f4")
            same = bool((board.sum(axis=1) == sums).all())
            conn.send(b"same" if same else b"other")
            print(f"{board.nbytes} bytes came into an array of {board.shape}, the last row's sum is {sums[-1]}")
    if not same:
        raise SystemExit("the array does not hold what the client wrote")


def write(peer: str, device: str | None = None) -> None:
    """Write an array into the server's."""
    numbers = np.random.default_rng(1).integers(0, 100, SHAPE).astype("f4")
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn:
        conn.write(numbers, "board")  # no copy on either side
        row = np.empty(SHAPE[1], "f4")
        conn.read_into(row, "board", offset=7 * row.nbytes)
        conn.send(numbers.sum(axis=1))
        if conn.recv() != b"same" or (row != numbers[7]).any():
            raise SystemExit("the server's array does not hold what was written")
        print(f"{numbers.nbytes} bytes written into the server's array and verified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="where to write; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device)
    else:
        write(args.peer, args.device)
