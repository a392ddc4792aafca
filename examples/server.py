"""Serve one client: take its greeting, lend it memory, look at what it wrote.

Run `python examples/server.py`, then `python examples/client.py HOST` on another host. Optional arguments: the
address to listen on, and the RDMA device to use.
"""

from __future__ import annotations

import sys

import rdmaconnect


def main(address: str = "*", device: str | None = None) -> None:
    board = bytearray(1 << 20)
    with rdmaconnect.listen(address, device=device, regions={"board": board}) as listener:
        print(f"listening on {listener.url}", file=sys.stderr)
        with listener.accept(deadline_s=None) as conn:
            print(conn.recv().decode(), f"(path: {conn.path.why[0]})")
            conn.send(b"welcome")
            # The client writes into the board by itself and says so when it is done.
            length = int.from_bytes(conn.recv(), "big")
            conn.send(sum(board[:length]).to_bytes(8, "big"))


if __name__ == "__main__":
    main(*sys.argv[1:])
