"""Two sides that are alike: each calls the other, in any order, and both get the same connection.

Run `python examples/meet.py HOST` on both hosts, each with the other's address.
"""

from __future__ import annotations

import argparse
import hashlib
import random

import rdmaconnect


def swap(peer: str, address: str = "*", device: str | None = None, size: int = 1 << 20) -> None:
    """Write into each other's memory at the same time, and look at what came."""
    board, mine = bytearray(size), random.randbytes(size)
    with rdmaconnect.meet(address, peer, device=device, deadline_s=120, regions={"board": board}) as conn:
        conn.write(mine, "board")
        conn.send(hashlib.sha256(mine).digest())
        same = conn.recv(deadline_s=120) == hashlib.sha256(board).digest()  # the peer has written too
        conn.send(b"seen")
        conn.recv(deadline_s=120)  # close only when the peer needs nothing any more
        print(f"{size} bytes each way between {conn.local.port} and {conn.peer.port}")
    if not same:
        raise SystemExit("the board does not hold what the peer wrote")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", metavar="HOST", help="the other side")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to be called at")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    args = parser.parse_args()
    swap(args.peer, args.listen, args.device)
