"""Send one stream of datagrams to many peers through a single queue pair.

Run `python examples/ud_fanout.py -n 3`, then on three other hosts `python examples/ud_fanout.py HOST`. Datagrams
may get lost: each carries its number, and a subscriber tells which ones it has seen.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

import rdmaconnect

END = b"end"
#: receives that a subscriber keeps posted: what comes when there is none is lost
DEPTH = 64


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes([number % 256]) * 1000


def publish(address: str = "*", device: str | None = None, subscribers: int = 3, count: int = 50) -> None:
    """Wait for all subscribers, then send to each of them."""
    with ExitStack() as stack:
        listener = stack.enter_context(rdmaconnect.listen(address, device=device, qp_types=("UD",), share_ud=True))
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        peers = [stack.enter_context(listener.accept(deadline_s=None)) for _ in range(subscribers)]
        for number in range(count):
            for peer in peers:
                peer.send(content(number))
        for peer in peers:
            peer.send(END)
        seen = [int(peer.recv(deadline_s=60)) for peer in peers]
        queue_pairs = {peer.local.qp_num for peer in peers}
    print(f"{count} datagrams to {subscribers} subscribers, who saw {seen}, by {len(queue_pairs)} queue pair")
    if len(queue_pairs) != 1 or 0 in seen:
        raise SystemExit("a subscriber saw nothing, or had a queue pair of its own")


def subscribe(peer: str, device: str | None = None) -> None:
    """Take what comes until the end, or until nothing came for a while."""
    seen: list[int] = []
    with rdmaconnect.connect(peer, qp_type="UD", device=device, deadline_s=120, recv_depth=DEPTH) as conn:
        patience = 120.0  # for the first: the other subscribers are still to come
        while True:
            try:
                data = conn.recv(deadline_s=patience)
            except rdmaconnect.DeadlineExceeded:
                break  # the end itself was lost
            if data == END:
                break
            number = int.from_bytes(data[:4], "big")
            if data != content(number) or (seen and number <= seen[-1]):
                raise SystemExit(f"datagram {number} after {seen[-1:]} is not what was sent")
            seen.append(number)
            patience = 5.0
        conn.send(b"%d" % len(seen))
    print(f"{len(seen)} datagrams came, each verified; {seen[-1] + 1 - len(seen) if seen else 'all'} were lost")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="the publisher; without it: publish")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to publish on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("-n", "--subscribers", type=int, default=3, metavar="N", help="how many (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        publish(args.listen, args.device, args.subscribers)
    else:
        subscribe(args.peer, args.device)
