"""A client that outlives its server: when the peer is gone, the same connection is made anew.

Run `python examples/reconnect.py` to serve, then `python examples/reconnect.py HOST` on another host. The server
leaves every client after a few messages; end it with Ctrl-C and start it again, too: the client goes on.
"""

from __future__ import annotations

import argparse
import sys

import rdmaconnect


def serve(address: str = "*", device: str | None = None, each: int = 10, total: int = 30) -> None:
    """Take numbers, some on each connection, until there are enough."""
    came: list[int] = []
    with rdmaconnect.listen(address, device=device) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        while len(came) < total:
            with listener.accept(deadline_s=None) as conn:
                for _ in range(min(each, total - len(came))):
                    came.append(int(conn.recv(deadline_s=120)))
                    conn.send(b"%d" % came[-1])
    print(f"{len(came)} numbers came, the last is {came[-1]}")
    if sorted(set(came)) != list(range(max(came) + 1)):
        raise SystemExit(f"some are missing: {came}")


def count(peer: str, device: str | None = None, total: int = 30) -> None:
    """Send numbers, each until it was answered, whatever becomes of the connection."""
    again = 0
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn:
        number = 0
        while number < total:
            try:
                conn.send(b"%d" % number, deadline_s=120)
                number = int(conn.recv(deadline_s=120)) + 1
            except (rdmaconnect.PeerClosed, rdmaconnect.CompletionError) as e:
                print(f"at {number}: {e}", file=sys.stderr)
                conn.reconnect(deadline_s=120)  # registered memory stays; what was in flight is for us to repeat
                again += 1
    print(f"{total} numbers sent and answered, connected anew {again} times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="the server; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device)
    else:
        count(args.peer, args.device)
