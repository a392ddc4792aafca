"""Write the tensors of a model into a peer's model, by their names.

Run `python examples/torch_tensor.py`, then `python examples/torch_tensor.py HOST` on another host. With `--place
cuda` the tensors are on a GPU, where the RDMA device reaches it (nvidia-peermem).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import rdmaconnect

try:
    import torch
except ImportError:
    raise SystemExit("this example needs torch: pip install torch") from None


def model(seed: int, place: str) -> Any:
    """A small model with weights of its own."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(place)


def serve(address: str = "*", device: str | None = None, place: str = "cpu") -> None:
    """Let a peer write into a model's parameters, then use it."""
    pupil = model(1, place)
    regions = dict(pupil.named_parameters())
    with rdmaconnect.listen(address, device=device, regions=regions) as listener:
        print(f"listening on {listener.url}", file=sys.stderr, flush=True)
        with listener.accept(deadline_s=None) as conn, torch.no_grad():
            conn.recv(deadline_s=120)  # all is written
            inputs = torch.ones(1, 64, device=place)
            conn.send(pupil(inputs).cpu())
            print(f"{len(regions)} tensors came, the model says {pupil(inputs)[0, :3].tolist()} ...")


def write(peer: str, device: str | None = None, place: str = "cpu") -> None:
    """Write a model's parameters into the peer's, and compare what both compute."""
    teacher = model(2, place)
    with rdmaconnect.connect(peer, device=device, deadline_s=120) as conn, torch.no_grad():
        if place != "cpu":
            torch.cuda.synchronize()  # the RDMA device does not wait for what the GPU is still to do
        for name, tensor in teacher.named_parameters():
            conn.write(tensor, name)
        conn.send(b"written")
        answer = torch.empty(1, 10)
        conn.recv_into(answer)
        if not torch.allclose(answer, teacher(torch.ones(1, 64, device=place)).cpu(), atol=1e-6):
            raise SystemExit("the peer's model computes something else")
        size = sum(tensor.nbytes for tensor in teacher.parameters())
        print(f"{size} bytes of tensors written into the peer's model, which now computes the same")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", metavar="HOST", help="where to write; without it: serve")
    parser.add_argument("-l", "--listen", default="*", metavar="ADDRESS", help="the address to serve on")
    parser.add_argument("-d", "--device", metavar="NAME", help="the RDMA device")
    parser.add_argument("--place", default="cpu", help="where the tensors are: cpu or cuda (%(default)s)")
    args = parser.parse_args()
    if args.peer is None:
        serve(args.listen, args.device, args.place)
    else:
        write(args.peer, args.device, args.place)
