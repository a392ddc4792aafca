"""Two nodes with real SoftRoCE devices, as `docker/lab test` lays them out.

A node is a network namespace (`n1`, `n2`); a thread that has entered it plays the program there, since
starting a Python for each would cost seconds under emulation. On kernels before 7 both devices are in one
namespace, and are named.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import rdmaconnect
from rdmaconnect import Connection, Listener
from rdmaconnect.session import watch

NETNS = os.environ.get("RDMACONNECT_LAB_LAYOUT", "netns") == "netns"
CLONE_NEWNET = 0x40000000
#: emulation is slow: what a wait may take at most where nothing is wrong
PATIENCE = 60
#: and two interpreters that start at once
LONG = PATIENCE * 4
ROOT = Path(__file__).parents[2]


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"enter network namespace {namespace}")


class Node:
    """One host of the lab.

    Args:
        number: of its address and its devices.
        threads: calls that can be under way on it.
        namespace: its network namespace, where that is not one of the lab's own.

    Attributes:
        address: its IPv4 address.
        device: its RDMA device.
        netdev: the network device under it.
        named: the options that name the device where both are in one namespace, else none.
    """

    def __init__(self, number: int, threads: int = 8, namespace: str = "") -> None:
        self.number, self._namespace = number, namespace
        self.address = f"10.9.0.{number}"
        self.device = f"rxe{number}"
        self.netdev = f"e{number}"
        self.named: dict[str, Any] = {} if NETNS else {"device": self.device}
        where = (namespace or f"n{number}",) if NETNS else ()
        self._threads = ThreadPoolExecutor(
            threads, f"node{number}", initializer=enter if NETNS else None, initargs=where
        )

    def close(self) -> None:
        """End its threads, which would keep its namespace."""
        self._threads.shutdown()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on this node, in a thread of its own."""
        return self._threads.submit(function, *args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it on this node and wait."""
        return self.start(function, *args, **kwargs).result(PATIENCE * 2)

    def command(self, *words: str) -> list[str]:
        """The command line that runs something on this node."""
        return [*(["ip", "netns", "exec", self._namespace] if self._namespace else ["on", str(self.number)]), *words]

    def run(self, *words: str, check: bool = True) -> str:
        """Run a program on this node; its output."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
        if check and done.returncode:
            raise AssertionError(f"{words}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def setting(self, name: str, value: object) -> None:
        """Set what sysctl(8) would: ``name`` below /proc/sys, of this node's network."""
        self.run("sh", "-c", f"echo {value} > /proc/sys/{name}")

    def connect(self, peer: str, **options: Any) -> Future[Connection]:
        """Start to connect from here."""
        options = {"deadline_s": PATIENCE, **self.named, **options}
        return self.start(rdmaconnect.connect, peer, **options)

    def connect_many(self, peer: str, count: int, **options: Any) -> Future[list[Connection]]:
        """The same for many in one exchange."""
        options = {"deadline_s": PATIENCE, **self.named, **options}
        return self.start(rdmaconnect.connect_many, peer, count, **options)

    @contextmanager
    def listening(self, **options: Any) -> Iterator[Listener]:
        """A listener here, on a free port; `url_of` gives its address as the other node needs it."""
        listener = self.call(rdmaconnect.listen, f"{self.address}:0", **{**self.named, **options})
        try:
            yield listener
        finally:
            self.call(listener.close)


@contextmanager
def connected(
    connector: Node, listener: Node, connect: dict[str, Any] | None = None, listen: dict[str, Any] | None = None
) -> Iterator[tuple[Connection, Connection]]:
    """A connection: (the connector's end, the listener's end)."""
    with ExitStack() as stack:
        service = stack.enter_context(listener.listening(**(listen or {})))
        there = listener.start(service.accept, deadline_s=PATIENCE, tolerant=False)
        here = connector.connect(service.url, **(connect or {}))
        wait([here, there], PATIENCE * 2)
        failed = next((end.exception() for end in (there, here) if end.done() and end.exception()), None)
        if failed is not None:
            raise failed
        ends = [stack.enter_context(end.result(0)) for end in (here, there)]
        yield ends[0], ends[1]


def both(server: list[str], client: list[str]) -> tuple[str, str]:
    """Run two programs that talk to each other, both of which must succeed; what they print."""
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for words in (server, client)
    ]
    try:
        (out1, err1), (out2, err2) = (program.communicate(timeout=LONG) for program in reversed(running))
    finally:
        for program in running:
            program.kill()
    assert [program.returncode for program in running] == [0, 0], (out1, err1, out2, err2)
    return out2, out1


def ours() -> list[str]:
    """The queue pairs, completion queues, memory regions and protection domains that are not the kernel's own."""
    watch.forget()
    lines = []
    for kind in ("qp", "cq", "mr", "pd"):
        shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True, check=True).stdout
        lines += [f"{kind} {line}" for line in shown.splitlines() if "[ib_core]" not in line]
    return lines


def descriptors() -> set[str]:
    """What this process has open of RDMA. What is kept for the next connection goes at once."""
    watch.forget()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "infiniband" in target:
            found.add(f"{fd} {target}")
    return found
