"""Fetch a file from a peer, with progress: the peer's memory is read, the peer does nothing.

Run `python examples/file_transfer.py --file FILE` to offer it, then `python examples/file_transfer.py HOST` on another
host; `--into` a folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import rdmaconnect


def offer(address: str = "*", device: str | None = None, path: str = __file__) -> None:
    """Let one peer read a file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        about = {"name": Path(path).name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        told = json.dumps(about).encode()
        with rdmaconnect.listen(address, device=device, regions={"file": content}, private_data=told) as listener:
            print(f"listening on {listener.url}", file=sys.stderr, flush=True)
            with listener.accept(deadline_s=None) as conn:
                got = conn.recv(deadline_s=None).decode()
    print(f"{about['name']}: {got}")
    if got != about["sha256"]:
        raise SystemExit("the peer did not get the file whole")


def show(done: int, size: int) -> None:
    """Draw a line of progress."""
    print(f"\r{done * 100 // size:3d} % of {size} bytes", end="\n" if done == size else "", file=sys.stderr, flush=True)


def fetch(
    peer: str,
    device: str | None = None,
    folder: str = ".",
    piece: int = 1 << 20,
    tick: Callable[[int, int], None] = show,
) -> Path:
    """Fetch what a peer offers into a folder."""
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn:
        about = json.loads(conn.private_data)
        size, path = int(about["size"]), Path(folder, Path(about["name"]).name)  # never outside of the folder
        digest, parts = hashlib.sha256(), [bytearray(min(piece, size)) for _ in range(2)]
        lengths = [min(piece, size - offset) for offset in range(0, size, piece)]
        with path.open("wb") as file, conn.register(parts[0]) as even, conn.register(parts[1]) as odd:

            def begin(n: int) -> rdmaconnect.Transfer:
                return conn.post_read(odd if n % 2 else even, "file", lengths[n], offset=n * piece)

            transfer = begin(0)
            for n, length in enumerate(lengths):
                transfer.wait()
                if n + 1 < len(lengths):
                    transfer = begin(n + 1)  # on its way while this one is digested and written
                came = memoryview(parts[n % 2])[:length]
                digest.update(came)
                file.write(came)
                tick(n * piece + length, size)
        conn.send(digest.hexdigest().encode())
    if digest.hexdigest() != about["sha256"]:
        raise SystemExit(f"{path} is not what the peer has")
    print(f"{path}: {size} bytes fetched and verified")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="who offers a file; without it: offer one")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to offer it on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("--file", default=__file__, metavar="FILE", help="what to offer (this program)")
    parser.add_argument("--into", default=".", metavar="FOLDER", help="where to put it (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        offer(args.listen, args.device, args.file)
    else:
        fetch(args.peer, args.device, args.into)
