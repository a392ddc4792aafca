"""The faults of the field that lie in the host: limits, rights, containers, peers that are stopped or killed.

Each befalls a process of its own on node 1, which connects to node 2; see ``test_recipes``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from fork_server import ForkServer
from nodes import NETNS, PATIENCE, Node, ours
from outcome import DEADLINE_S, Told, told

from rdmaconnect import ConnectTimeout, DeadlineExceeded, DeviceError, PeerClosed, VerbsError

pytestmark = pytest.mark.skipif(not NETNS, reason="the rig's two devices are in one namespace")


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """The kernel holds nothing of ours when a recipe is over."""
    yield
    assert ours() == []


PROGRAM = """
    import ctypes, json, os, resource, sys, time
    from rdmaconnect import connect  # now: nobody may not read where it is, and without descriptors nothing is loaded

    libc = ctypes.CDLL(None, use_errno=True)

    def nobody():
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)

    def over(path, flags=0):
        '''Hide a folder under an empty one, for this process alone.'''
        if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x44000, None):
            raise OSError(ctypes.get_errno(), "unshare")
        if libc.mount(b"none", path.encode(), b"tmpfs", flags, None):
            raise OSError(ctypes.get_errno(), path)

    def memlock():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        nobody()

    def files(more):
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + int(more),) * 2)

    def several():
        files(40)

    def no_node():
        over("/dev/infiniband")

    def no_right():
        nodes = [(n, os.stat("/dev/infiniband/" + n)) for n in os.listdir("/dev/infiniband")]
        over("/dev/infiniband")
        for name, stat in nodes:
            os.mknod("/dev/infiniband/" + name, 0o20600, stat.st_rdev)
        nobody()

    def elsewhere():
        with open("/run/netns/n2") as file:
            libc.setns(file.fileno(), 0x40000000)

    def connected(url, job, *args):
        if job != "-":
            globals()[job](*args)
        options = {"device": "rxe1"} if job == "elsewhere" else {}
        kept = []
        while job == "several":
            kept.append(connect(url, deadline_s=10, recv_size=4096, recv_depth=2))
        with connect(url, deadline_s=10, **options) as conn:
            print("connected", flush=True)
            conn.recv(deadline_s=60)

    def play(*words):
        before = time.monotonic()
        try:
            connected(*words)
        except BaseException as e:
            took = time.monotonic() - before
            print(json.dumps([type(e).__name__, str(e), getattr(e, "errno", 0) or 0, took]), flush=True)
"""


@pytest.fixture(scope="module")
def server(node1: Node) -> Iterator[ForkServer]:
    made = ForkServer(node1, PROGRAM)
    yield made
    made.close()


def told_by(server: ForkServer) -> Told:
    """What the process was told; it has ended then."""
    server.wait()
    assert server.printed, "it said nothing"
    return Told(*json.loads(server.printed[-1]))


def hindered(node2: Node, server: ForkServer, *job: str) -> tuple[Told, Told]:
    """A connector that is hindered so, and its listener: what each is told."""
    with node2.listening() as listener:
        server.start(listener.url, *job)
        here = told_by(server)
        return here, node2.call(told, listener.accept, deadline_s=0.2)


def test_r15_little_may_be_locked(node2: Node, server: ForkServer) -> None:
    here, there = hindered(node2, server, "memlock")
    words = r"register \d+ bytes of memory: ibv_reg_mr: ENOMEM .*may lock 65536 bytes in all.*ulimit -l.*LimitMEMLOCK"
    here.says(VerbsError, words)
    there.says(ConnectTimeout, "nobody asked|none asked")


@pytest.mark.parametrize("left", ["2", "6"])
def test_r18_no_descriptors_are_left(node2: Node, server: ForkServer, left: str) -> None:
    here, there = hindered(node2, server, "files", left)
    here.says(VerbsError, "EMFILE .*No file descriptor is left: raise the open-file limit .`ulimit -n")
    there.says(ConnectTimeout, "nobody asked|none asked")


def test_r19_a_device_of_another_namespace_works(node2: Node, server: ForkServer) -> None:
    """In the shared mode; the exclusive one cannot be set once there are namespaces."""
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=DEADLINE_S)
        server.start(listener.url, "elsewhere")
        with there.result(PATIENCE) as conn:
            assert conn.peer.port.device == "rxe1"
            assert server.line() == "connected"
        told_by(server)


def test_r28_the_devices_are_hidden(node2: Node, server: ForkServer) -> None:
    here, there = hindered(node2, server, "no_node")
    here.says(DeviceError, "the kernel has .*rxe1.*, but this process .*/dev/infiniband.*--device /dev/infiniband")
    there.says(ConnectTimeout, "nobody asked|none asked")


def test_r28_the_devices_may_not_be_opened(node2: Node, server: ForkServer) -> None:
    here, there = hindered(node2, server, "no_right")
    here.says(DeviceError, "open rxe1 ./dev/infiniband/uverbs\\d.: ibv_open_device: EACCES .*the node's group")
    there.says(ConnectTimeout, "nobody asked|none asked")


def test_r29_few_descriptors_and_many_connections(node2: Node, server: ForkServer) -> None:
    with node2.listening(recv_size=4096, recv_depth=2) as listener:
        server.start(listener.url, "several")
        there, ends = None, []
        try:
            while there is None:
                try:
                    ends.append(node2.call(listener.accept, deadline_s=5))
                except ConnectTimeout as e:
                    there = Told("ConnectTimeout", str(e), 0, 0.0)
            here = told_by(server)
        finally:
            for end in ends:
                end.close()
    assert len(ends) > 1
    here.says(VerbsError, "EMFILE .*(No file descriptor is left|Raise the open-file limit)")
    there.says(ConnectTimeout, "nobody asked|none asked")


def test_r13_a_peer_that_is_killed(node2: Node, server: ForkServer) -> None:
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=DEADLINE_S)
        pid = server.start(listener.url, "-")
        with there.result(PATIENCE) as conn:
            assert server.line() == "connected"
            os.kill(pid, signal.SIGKILL)
            here = node2.call(told, conn.recv, deadline_s=DEADLINE_S)
        assert server.wait() == -signal.SIGKILL
    here.says(PeerClosed, "is gone: .*its process ended")


def test_r29_a_peer_that_is_stopped(node2: Node, server: ForkServer) -> None:
    with node2.listening() as listener:
        there = node2.start(listener.accept, deadline_s=DEADLINE_S)
        pid = server.start(listener.url, "-")
        with there.result(PATIENCE) as conn:
            assert server.line() == "connected"
            os.kill(pid, signal.SIGSTOP)
            try:
                here = node2.call(told, conn.recv, deadline_s=DEADLINE_S)
            finally:
                os.kill(pid, signal.SIGCONT)
        told_by(server)
    # its device answers, which over RC is a sign of life
    here.says(DeadlineExceeded, "The peer is suspect: nothing was heard of it for 15 s, but the data path answers", 25)
