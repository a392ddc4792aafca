"""Over MPI, by mpi4py: mpirun -n 2 --host HOST,HOST python examples/stores/over_mpi.py."""

from typing import Any

import rdmaconnect


def swap(comm: Any, device: str | None = None) -> bytes:
    """Send to the other rank, and give what that sends."""
    with rdmaconnect.bind(device=device) as end:
        theirs = comm.allgather(end.to_bytes())[1 - comm.rank]
        with end.connect(theirs, deadline_s=120) as conn:
            conn.send(b"from %d" % comm.rank)
            return conn.recv()


if __name__ == "__main__":
    from mpi4py import MPI

    print(swap(MPI.COMM_WORLD))
