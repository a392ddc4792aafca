"""Speak with rping of rdma-core, a program written with librdmacm: connections by rdma_cm, messages and remote memory.

Run `python examples/rping.py` and `rping -c -a HOST -C 10 -p 7174` against it, or `rping -s -p 7174` and
`python examples/rping.py HOST`. Two of this program understand each other too. What rping says: 16 bytes with address,
key and length of memory, in network order, which the server reads; then those of other memory, which it writes back.
"""

from __future__ import annotations

import argparse
import struct
import sys

import rdmaconnect

PORT = 7174
#: address, R_Key, bytes
INFO = struct.Struct("!QII")
GO_ON = bytes(INFO.size)


def serve(address: str = f"*:{PORT}", device: str | None = None) -> None:
    """Answer one rping client until it leaves."""
    pings = 0
    with rdmaconnect.listen(f"rdma://{address}", device=device) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        with listener.accept(deadline_s=None) as conn:
            try:
                while True:
                    data = conn.read(region_of(conn.recv(deadline_s=None)))
                    conn.send(GO_ON)
                    conn.write(data, region_of(conn.recv()))
                    conn.send(GO_ON)
                    pings += 1
            except rdmaconnect.PeerClosed:
                print(f"{pings} pings answered")


def region_of(message: bytes) -> rdmaconnect.RemoteRegion:
    """The memory that an rping client tells of."""
    addr, rkey, length = INFO.unpack(message)
    return rdmaconnect.RemoteRegion(addr, rkey, length)


def ping(peer: str, device: str | None = None, count: int = 10, size: int = 64) -> None:
    """Have an rping server read memory and write it back."""
    there = peer if ":" in peer else f"{peer}:{PORT}"
    with rdmaconnect.connect(f"rdma://{there}", device=device, deadline_s=120) as conn:
        start, sink = bytearray(size), bytearray(size)
        with conn.register(start) as source, conn.register(sink) as target:
            for n in range(count):
                # rping takes it for a text of C, and writes back what is before its end, and that
                start[:-1] = (b"rdma-ping-%d: " % n).ljust(size - 1, bytes([65 + n % 26]))
                for memory in (source, target):
                    region = memory.region
                    conn.send(INFO.pack(region.addr, region.rkey, region.length))
                    conn.recv()
                if sink != start:
                    raise SystemExit(f"ping {n} came back otherwise than it went")
    print(f"{count} pings of {size} bytes, each verified")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="whom to ping; without it: serve")
    parser.add_argument("-l", "--listen", default=f"*:{PORT}", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device)
    else:
        ping(args.peer, args.device)
