"""Many connections from one exchange: they share a completion queue, and cost one round trip.

Run `python examples/connect_many.py` to serve, then `python examples/connect_many.py HOST` on another host; `-n`
connections.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

import rdmaconnect


def serve(address: str = "*", device: str | None = None) -> None:
    """Add up what comes on all the connections of one client."""
    with ExitStack() as stack:
        listener = stack.enter_context(rdmaconnect.listen(address, device=device))
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        first = stack.enter_context(listener.accept(deadline_s=None))
        count = int.from_bytes(first.private_data, "big")  # the client says so while it connects
        conns = [first, *(stack.enter_context(listener.accept(deadline_s=120)) for _ in range(count - 1))]
        total = sum(int(conn.recv(deadline_s=120)) for conn in conns)
        for conn in conns:
            conn.send(b"%d" % total)
        for conn in conns:
            conn.recv(deadline_s=120)
        rdmaconnect.close_many(conns)
    print(f"{count} connections brought {total} together")


def add(peer: str, device: str | None = None, count: int = 100) -> None:
    """Send a number on each connection, get the sum on all."""
    told = count.to_bytes(4, "big")
    conns = rdmaconnect.connect_many(peer, count, device=device, deadline_s=120, private_data=told)
    with ExitStack() as stack:
        for number, conn in enumerate(conns):
            stack.enter_context(conn)
            conn.send(b"%d" % number)
        sums = {int(conn.recv(deadline_s=120)) for conn in conns}
        for conn in conns:
            conn.send(b"bye")
        rdmaconnect.close_many(conns)
    print(f"{count} connections in {conns[0].connect_s * 1000:.0f} ms; the sum is {sums.pop()}")
    if sums:
        raise SystemExit("they got different sums")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="the server; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("-n", "--count", type=int, default=100, metavar="N", help="how many (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device)
    else:
        add(args.peer, args.device, args.count)
