"""Short requests from several threads, each over a connection that was ready before it was asked for.

Run `python examples/pool.py`, then `python examples/pool.py HOST` on another host; `-n` requests, the same on both.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import rdmaconnect


def serve(address: str = "*", device: str | None = None, requests: int = 8) -> None:
    """Answer that many requests, whatever connections they come over."""
    answered = itertools.count(1)

    def answer(conn: rdmaconnect.Connection) -> None:
        with conn:
            try:
                while True:
                    # a pool's connection is here before anybody uses it: the first request may come late
                    conn.send(conn.recv(deadline_s=None).upper())
                    if next(answered) == requests:
                        listener.close()
            except rdmaconnect.PeerClosed:
                return

    with ThreadPoolExecutor(64) as threads, rdmaconnect.listen(address, device=device, recv_size=4096) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        for conn in listener:
            threads.submit(answer, conn)
    print(f"{requests} requests answered")


def ask(peer: str, device: str | None = None, requests: int = 8) -> None:
    """Ask from four threads; each request takes a connection of the pool, and closes it."""
    with rdmaconnect.Pool(peer, spare=4, device=device, recv_size=4096) as pool:

        def request(number: int) -> int:
            with pool.acquire(deadline_s=120) as conn:
                conn.send(f"request {number}".encode())
                if conn.recv(deadline_s=120) != f"REQUEST {number}".encode():
                    raise SystemExit(f"request {number} got the answer of another one")
                return conn.local.qp_num

        pool.warm(deadline_s=120)
        with ThreadPoolExecutor(4) as threads:
            used = set(threads.map(request, range(requests)))
    print(f"{requests} requests over {len(used)} queue pairs, verified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="whom to ask; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("-n", "--requests", type=int, default=8, metavar="N", help="how many (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device, args.requests)
    else:
        ask(args.peer, args.device, args.requests)
