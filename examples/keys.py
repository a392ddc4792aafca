"""An exchange protected with key files: who has no key that the listener knows is refused.

Make a pair of keys on each host, `rdmaconnect keygen keys/NAME`, and give the other side `keys/NAME.key`; the
listener keeps those of its clients in a folder. Then run
`python examples/keys.py --key keys/listener.key_secret --peer-key known` to serve, and on another host
`python examples/keys.py HOST --key keys/me.key_secret --peer-key keys/listener.key`.
"""

from __future__ import annotations

import argparse
import sys

import rdmaconnect


def serve(address: str = "*", device: str | None = None, key: str = "", peer_keys: str = "") -> None:
    """Serve one client whose key is in the folder ``peer_keys``; keys can be added while it runs."""
    with rdmaconnect.listen(address, device=device, key=key, peer_keys=peer_keys) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        with listener.accept(deadline_s=None) as conn:
            print(f"a client that is known says: {conn.recv(deadline_s=120).decode()}")
            conn.send(b"welcome")
            conn.recv(deadline_s=120)


def call(peer: str, device: str | None = None, key: str = "", peer_key: str = "") -> None:
    """Try without a key, as a stranger would, then with it."""
    try:
        rdmaconnect.connect(peer, device=device, deadline_s=120).close()
    except rdmaconnect.AuthenticationError as e:
        print(f"without a key: {e}")
    else:
        raise SystemExit("the listener takes strangers")
    with rdmaconnect.connect(peer, device=device, deadline_s=120, key=key, peer_key=peer_key) as conn:
        conn.send(b"it is me")
        print(f"with it: {conn.recv().decode()}")
        conn.send(b"bye")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="the listener; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("--key", metavar="FILE", required=True, help="this side's .key_secret file")
    parser.add_argument("--peer-key", metavar="FILE", required=True, help="the listener's .key, or the clients' folder")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device, args.key, args.peer_key)
    else:
        call(args.peer, args.device, args.key, args.peer_key)
