"""An asyncio server with many clients, all in one event loop each.

Run `python examples/many_clients.py`, then `python examples/many_clients.py HOST` on another host; `-n` clients.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import rdmaconnect


async def answer(conn: rdmaconnect.AsyncConnection) -> int:
    """Answer one client until it leaves; return how many messages it sent."""
    count = 0
    async with conn:
        try:
            while True:
                await conn.send((await conn.recv(deadline_s=None)).upper())
                count += 1
        except rdmaconnect.PeerClosed:
            return count


async def serve(address: str = "*", device: str | None = None, clients: int = 4) -> None:
    """Serve that many clients at the same time."""
    tasks: list[asyncio.Task[int]] = []
    async with await rdmaconnect.alisten(address, device=device, recv_size=4096) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        async for conn in listener:
            tasks.append(asyncio.create_task(answer(conn)))
            if len(tasks) == clients:
                break
        counts = await asyncio.gather(*tasks)
    print(f"{clients} clients sent {sum(counts)} messages")
    if len(set(counts)) != 1:
        raise SystemExit(f"they sent {counts}: some were lost")


async def talk(peer: str, device: str | None, name: int, messages: int) -> bool:
    """Be one client; return whether every answer was its own."""
    async with await rdmaconnect.aconnect(peer, device=device, deadline_s=120, recv_size=4096) as conn:
        for i in range(messages):
            await conn.send(f"client {name}, message {i}".encode())
            if await conn.recv() != f"CLIENT {name}, MESSAGE {i}".encode():
                return False
    return True


async def call(peer: str, device: str | None = None, clients: int = 4, messages: int = 5) -> None:
    """Be all the clients at once."""
    right = await asyncio.gather(*(talk(peer, device, name, messages) for name in range(clients)))
    if not all(right):
        raise SystemExit(f"some got the answers of others: {right}")
    print(f"{clients} clients got {messages} answers each, verified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="whom to call; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("-n", "--clients", type=int, default=4, metavar="N", help="how many (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        asyncio.run(serve(args.listen, args.device, args.clients))
    else:
        asyncio.run(call(args.peer, args.device, args.clients))
