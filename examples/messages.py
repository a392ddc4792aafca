"""Messages, and memory by its name: greet a server, write into what it lends, check what arrived.

Run `python examples/messages.py` to serve, then `python examples/messages.py HOST` on another host.
"""

from __future__ import annotations

import argparse
import socket
import sys

import rdmaconnect


def serve(address: str = "*", device: str | None = None) -> None:
    """Serve one client: take its greeting, lend it memory, look at what it wrote."""
    board = bytearray(1 << 20)
    with rdmaconnect.listen(address, device=device, regions={"board": board}) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        with listener.accept(deadline_s=None) as conn:
            print(conn.recv(deadline_s=120).decode(), f"(path: {conn.path.why[0]})")
            conn.send(b"welcome")
            # The client writes into the board by itself and says so when it is done.
            length = int.from_bytes(conn.recv(deadline_s=120), "big")
            conn.send(sum(board[:length]).to_bytes(8, "big"))


def greet(peer: str, device: str | None = None) -> None:
    """Greet a server, write into its memory, read it back."""
    data = bytes(range(256)) * 512
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn:
        conn.send(f"hello from {socket.gethostname()}".encode())
        print(conn.recv().decode())
        conn.write(data, "board")
        back = conn.read("board", len(data))
        conn.send(len(data).to_bytes(8, "big"))
        total = int.from_bytes(conn.recv(), "big")
        if back != data or total != sum(data):
            raise SystemExit("the server's memory does not hold what was written")
        print(f"{len(data)} bytes written into the server's memory and verified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="whom to greet; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device)
    else:
        greet(args.peer, args.device)
