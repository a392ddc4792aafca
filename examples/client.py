"""Greet a server, write into memory that it lends, check what arrived. See server.py."""

from __future__ import annotations

import socket
import sys

import rdmaconnect


def main(peer: str, device: str | None = None) -> None:
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
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
