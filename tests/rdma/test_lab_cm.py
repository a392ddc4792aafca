"""rdma_cm on two nodes: ours with ours, and with the programs of rdma-core that are written with librdmacm.

In one process librdmacm, which keeps each device open that it has used, is used before the first test begins.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from example_programs import example
from nodes import NETNS, PATIENCE, Node

import rdmaconnect
from rdmaconnect import Connection, PeerClosed, PeerRejected, rdmacm
from rdmaconnect.abi.rdma_cma import PortSpace
from rdmaconnect.objects.cm import sockaddr

PROGRAMS = pytest.mark.skipif(shutil.which("rping") is None, reason="needs rping (rdmacm-utils)")
pytestmark = pytest.mark.skipif(
    not NETNS, reason="both devices are in one namespace, where rdma_cm takes the loopback way: kernel before 7.0"
)
MEMORY = bytearray(b"0123456789")


@pytest.fixture(scope="module", autouse=True)
def warm(node1: Node, node2: Node) -> None:
    """Have librdmacm open the devices."""

    def use(address: str) -> None:
        channel = rdmacm.rdma_create_event_channel()
        cm_id = rdmacm.rdma_create_id(channel, PortSpace.TCP)
        rdmacm.rdma_bind_addr(cm_id, sockaddr(2, (address, 0)))
        rdmacm.rdma_destroy_id(cm_id)
        rdmacm.rdma_destroy_event_channel(channel)

    for node in (node1, node2):
        node.call(use, node.address)


@contextmanager
def joined(here: Node, there: Node, **options: Any) -> Iterator[tuple[Connection, Connection]]:
    with there.call(rdmaconnect.listen, f"rdma://{there.address}:0", regions={"m": MEMORY}, private_data=b"hi") as door:
        taken: Future[Connection] = there.start(door.accept, deadline_s=PATIENCE, tolerant=False)
        with here.connect(door.url, **options).result(PATIENCE * 2) as a, taken.result(PATIENCE) as b:
            yield a, b


def test_ours_with_ours_in_both_directions(node1: Node, node2: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for here, there in ((node1, node2), (node2, node1)):
        with joined(here, there, private_data=b"ho", traffic_class=96) as (a, b):
            assert (a.private_data, b.private_data) == (b"hi", b"ho")
            assert (a.local.port.device, b.local.port.device) == (here.device, there.device)
            assert (a.path.dest_qp_num, b.path.dest_qp_num) == (b.local.qp_num, a.local.qp_num)
            assert str(a.path.remote_gid.gid) == f"::ffff:{there.address}"  # type: ignore[union-attr]
            assert a.path.ah_attr.traffic_class == 96
            for size in (1, 5000, 65536):
                a.send(b"a" * size)
                assert b.recv() == b"a" * size
                b.send(b"b" * size)
                assert a.recv() == b"b" * size
            a.write(b"written", "m")
            assert a.read("m") == b"written789"
            MEMORY[:] = b"0123456789"
            with capsys.disabled():
                print(f"\nrdma_cm: connected in {a.connect_s * 1000:.0f} ms; {a.path.why[0]}; MTU {a.path.path_mtu}")
            b.close()
            with pytest.raises(PeerClosed, match="rdma_disconnect"):
                a.recv(deadline_s=PATIENCE)


def test_nobody_listens_and_an_application_refuses(node1: Node, node2: Node) -> None:
    with pytest.raises(rdmaconnect.ConnectTimeout, match="nobody listens there on that port of rdma_cm"):
        node1.call(rdmaconnect.connect, f"rdma://{node2.address}:7999", deadline_s=4)
    # an address that nobody has
    with pytest.raises((rdmaconnect.ConnectTimeout, rdmaconnect.VerbsError)) as seen:
        node1.call(rdmaconnect.connect, "rdma://10.9.77.1:7999", deadline_s=4)
    print(seen.value)
    # a listener that cannot take it refuses with words
    with (
        node2.call(rdmaconnect.listen, f"rdma://{node2.address}:0", device="rxe9") as door,
        pytest.raises(PeerRejected, match="use device rxe9: rdma_cm goes by rxe2 port 1"),
    ):
        node1.call(rdmaconnect.connect, door.url, deadline_s=PATIENCE)


@contextmanager
def program(node: Node, *words: str) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(node.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@PROGRAMS
def test_rping_in_both_roles(node1: Node, node2: Node, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("rping")
    with program(node2, "rping", "-s", "-v", "-C", "5", "-p", "7174", "-a", node2.address) as server:
        node1.call(module.ping, node2.address, None, 5)
        said, _ = server.communicate(timeout=PATIENCE)
    assert said.count("server ping data: rdma-ping-") == 5, said
    served = node2.start(module.serve, f"{node2.address}:7175")
    with program(node1, "rping", "-c", "-v", "-V", "-C", "5", "-p", "7175", "-a", node2.address) as client:
        told, _ = client.communicate(timeout=PATIENCE)
        assert (client.returncode, told.count("ping data: rdma-ping-")) == (0, 5), told
    served.result(PATIENCE)
    out = capsys.readouterr().out
    assert "5 pings of 64 bytes, each verified" in out
    assert "5 pings answered" in out
    with capsys.disabled():
        print(f"\nrping -s: {said.splitlines()[:2]}\nrping -c: {told.splitlines()[:2]}")


@PROGRAMS
def test_rdma_server_and_rdma_client_in_both_roles(node1: Node, node2: Node) -> None:
    def call() -> bytes:
        with rdmaconnect.connect(f"rdma://{node2.address}:7471", deadline_s=PATIENCE) as conn:
            conn.send(b"sixteen bytes...")
            return conn.recv(deadline_s=PATIENCE)

    with program(node2, "rdma_server", "-s", node2.address, "-p", "7471") as server:
        assert node1.call(call) == bytes(16)
        said, _ = server.communicate(timeout=PATIENCE)
        assert (server.returncode, said.split()[-1]) == (0, "0"), said
    with node2.call(rdmaconnect.listen, f"rdma://{node2.address}:7472") as door:
        taken = node2.start(door.accept, deadline_s=PATIENCE)
        with (
            program(node1, "rdma_client", "-s", node2.address, "-p", "7472") as client,
            taken.result(PATIENCE) as conn,
        ):
            assert conn.recv(deadline_s=PATIENCE) == bytes(16)
            conn.send(b"sixteen bytes...")
            said, _ = client.communicate(timeout=PATIENCE)
            assert (client.returncode, said.split()[-1]) == (0, "0"), said
            with pytest.raises(PeerClosed, match="rdma_disconnect"):
                conn.recv(deadline_s=PATIENCE)
