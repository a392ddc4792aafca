"""A parameter server: workers read the weights and write their gradients, in regions that have names.

Run `python examples/parameter_server.py -n 2`, then on two other hosts `python examples/parameter_server.py HOST`.
The workers fit a line of five coefficients, each with measurements of its own.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

import numpy as np

import rdmaconnect

TRUTH = np.array([3.0, -1.0, 0.5, 8.0, -2.5])


def serve(address: str = "*", device: str | None = None, workers: int = 2, rounds: int = 40, rate: float = 0.5) -> None:
    """Hold the weights; each round, go down the mean of what the workers wrote."""
    weights = np.zeros_like(TRUTH)
    gradients = np.zeros((workers, len(TRUTH)))
    regions = {"weights": weights, **{f"gradient/{i}": gradients[i] for i in range(workers)}}
    with ExitStack() as stack:
        listener = stack.enter_context(rdmaconnect.listen(address, device=device, regions=regions))
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        conns = [stack.enter_context(listener.accept(deadline_s=None)) for _ in range(workers)]
        for i, conn in enumerate(conns):
            conn.send(f"{i} {rounds}".encode())
        for _ in range(rounds):
            for conn in conns:
                conn.recv(deadline_s=120)  # its gradient is there
            weights -= rate * gradients.mean(axis=0)
            for conn in conns:
                conn.send(b"the weights are new")
        for conn in conns:
            conn.recv(deadline_s=120)  # it has read them
    print(f"{rounds} rounds with {workers} workers: weights {weights.round(3)}")
    if not np.allclose(weights, TRUTH, atol=0.01):
        raise SystemExit(f"they should be {TRUTH}")


def work(peer: str, device: str | None = None) -> None:
    """Measure, and tell the server in which direction its weights are wrong."""
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn:
        number, rounds = map(int, conn.recv(deadline_s=120).split())
        inputs = np.random.default_rng(number).normal(size=(200, len(TRUTH)))
        measured = inputs @ TRUTH
        weights = np.empty_like(TRUTH)
        errors = []
        with conn.register(weights) as local:  # once, as it is filled in every round
            for _ in range(rounds):
                conn.read_into(local, "weights")
                off = inputs @ weights - measured
                errors.append(float(abs(off).mean()))
                conn.write(inputs.T @ off / len(off), f"gradient/{number}")
                conn.send(b"written")
                conn.recv(deadline_s=120)
        conn.send(b"done")
        print(f"worker {number}: the mean error went from {errors[0]:.3f} to {errors[-1]:.6f}")
        if errors[-1] > 0.01:
            raise SystemExit("the weights did not come to what was measured")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="the server; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device, args.workers)
    else:
        work(args.peer, args.device)
