"""Peers that are killed or stopped, side channels and data paths that break, and devices and addresses that go, on rxe.

``RDMACONNECT_LAB_TRIALS=100`` has each of them tried more often; how often, and how long it took, is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from fork_server import ForkServer, both_sides
from nodes import PATIENCE, Node, connected
from proxy import Proxy
from test_lab_watch import NAME, NETDEV, add, wait_for
from test_negotiate import ROCE, lost

import rdmaconnect
from rdmaconnect import Connection, DeviceError, PeerClosed, RdmaConnectError
from rdmaconnect.protocol.health import HealthState
from rdmaconnect.session import watch

#: percent of the trials that are to be shown
SHARE = min(max(int(os.environ.get("RDMACONNECT_LAB_TRIALS", "0")), 0), 100)
TYPES = ["RC", "UC", "UD"]
ALIVE, SUSPECT, MOVED, DEAD = HealthState


def trials(least: int, most: int) -> int:
    """How often: ``least`` at 0, ``most`` at 100."""
    return least + (most - least) * SHARE // 100


class Counted:
    """What was counted and how long things took; printed at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}

    def took(self, what: str, seconds: float) -> None:
        self.times.setdefault(what, []).append(seconds)

    def show(self) -> None:
        times = "; ".join(
            f"{what} median {statistics.median(took):.2f} s, max {max(took):.2f} s" for what, took in self.times.items()
        )
        print(f"\n{self.name}: {dict(self.counts)}; {times}")


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    made = Counted(request.node.name)
    yield made
    made.show()


class Load:
    """Data all the time over one connection; what ends it, and what is seen of its peer, with the times."""

    def __init__(self, node: Node, connection: Connection, use: Callable[[Connection], object]) -> None:
        self.connection, self.moved = connection, 0
        self.seen: list[tuple[float, rdmaconnect.Health]] = []
        connection.on_change(lambda health: self.seen.append((time.monotonic(), health)))
        self.ended: Future[tuple[float, RdmaConnectError]] = node.start(self._run, use)

    def _run(self, use: Callable[[Connection], object]) -> tuple[float, RdmaConnectError]:
        while True:
            try:
                use(self.connection)
            except RdmaConnectError as e:
                return time.monotonic(), e
            self.moved += 1

    def first(self, *states: HealthState) -> float:
        """When it was first in one of these states."""
        return next(when for when, health in self.seen if health.state in states)


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# ---- peers that end

PROGRAM = """
    import os, sys, threading
    import rdmaconnect

    def play(side, address, device, qp_type, region):
        options = {} if device == "-" else {"device": device}
        memory = bytearray(4096)
        regions = {"m": memory} if region == "before" else {}
        if side == "connector":
            conn = rdmaconnect.connect(address, deadline_s=120, qp_type=qp_type, regions=regions, **options)
        else:
            conn = rdmaconnect.listen(address, regions=regions, **options).accept(deadline_s=120)
        keep = conn.register(memory) if region == "after" else None
        conn.send(keep.region.to_bytes() if keep else b"up")
        while True:
            conn.recv(deadline_s=None)
            conn.send(b"x" * 64)
"""


@pytest.fixture(scope="module")
def servers(node1: Node, node2: Node) -> Iterator[dict[str, ForkServer]]:
    with both_sides(node1, node2, PROGRAM) as made:
        yield made


@contextlib.contextmanager
def born(
    node1: Node, node2: Node, server: ForkServer, side: str, qp_type: str, region: str, port: int
) -> Iterator[tuple[Connection, int, Node]]:
    """A connection to a peer in another process: this end, the peer's process id, this end's node."""
    with contextlib.ExitStack() as stack:
        if side == "connector":
            node, listener = node2, stack.enter_context(node2.listening())
            pid = server.start(side, listener.url.removeprefix("tcp://"), server.device, qp_type, region)
            connection = node.call(listener.accept, deadline_s=PATIENCE)
        else:
            node, address = node1, f"{node2.address}:{port}"
            pid = server.start(side, address, server.device, qp_type, region)
            connection = node.call(rdmaconnect.connect, address, deadline_s=PATIENCE, qp_type=qp_type, **node1.named)
        try:
            yield stack.enter_context(connection), pid, node
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def echo(connection: Connection) -> None:
    """A message there and back; over UC and UD either may be lost."""
    connection.send(b"y" * 64)
    while True:
        try:
            connection.recv(deadline_s=1 if connection.local.qp_type != rdmaconnect.QpType.RC else PATIENCE)
            return
        except rdmaconnect.DeadlineExceeded:
            connection.send(b"y" * 64)


@pytest.mark.parametrize("qp_type", TYPES)
@pytest.mark.parametrize("side", ["connector", "listener"])
@pytest.mark.parametrize("region", ["before", "after"])
def test_a_killed_peer_is_named(
    node1: Node, node2: Node, servers: dict[str, ForkServer], counted: Counted, side: str, qp_type: str, region: str
) -> None:
    number = trials(1, 9)  # of twelve kinds
    for trial in range(number):
        with born(node1, node2, servers[side], side, qp_type, region, 18800 + trial) as (connection, pid, node):
            there = connection.recv(deadline_s=PATIENCE)
            use: Callable[[Connection], object] = echo
            if qp_type != "UD":
                target = rdmaconnect.RemoteRegion.from_bytes(there) if region == "after" else connection.remote["m"]
                use = lambda conn, target=target: (conn.write(b"z" * 1024, target), echo(conn))  # noqa: E731
            load = Load(node, connection, use)
            assert until(lambda: load.moved > 3)  # noqa: B023 - it is used up at once
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            when, error = load.ended.result(PATIENCE)
            assert servers[side].wait() == -signal.SIGKILL
            counted.took("suspected", load.first(SUSPECT, DEAD) - began)
            counted.took("told", when - began)
            counted.counts["right"] += isinstance(error, PeerClosed) and "the peer is gone: " in str(error)
            counted.counts["within a second"] += when - began <= 1
            counted.counts[str(error).partition(": ")[2]] += 1
            assert until(lambda: connection.health.state is DEAD)
    assert counted.counts["right"] == number
    assert max(counted.times["told"]) < 2


def test_a_stopped_peer_is_not_gone(node1: Node, node2: Node, servers: dict[str, ForkServer], counted: Counted) -> None:
    with born(node1, node2, servers["connector"], "connector", "RC", "before", 0) as (connection, pid, node):
        connection.recv(deadline_s=PATIENCE)
        load = Load(node, connection, echo)
        for _ in range(trials(1, 20)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(6)
            os.kill(pid, signal.SIGCONT)
            moved = load.moved
            counted.counts["goes on"] += until(lambda: load.moved > moved + 3)  # noqa: B023
        counted.counts["dead"] += connection.health.state is DEAD
        os.kill(pid, signal.SIGKILL)
        load.ended.result(PATIENCE)
        assert servers["connector"].wait() == -signal.SIGKILL
    assert dict(counted.counts) == {"goes on": trials(1, 20), "dead": 0}


# ---- one of the two paths


@pytest.mark.parametrize("qp_type", TYPES)
@pytest.mark.parametrize("trouble", ["reset", "one way"])
def test_a_broken_side_channel_ends_nothing(
    node1: Node, node2: Node, counted: Counted, qp_type: str, trouble: str
) -> None:
    with node2.listening() as listener:
        proxy = node1.call(Proxy, listener.port, node2.address, node1.address)
        accepted = node2.start(listener.accept, deadline_s=PATIENCE)
        address = f"{node1.address}:{proxy.port}"
        options = {"device": node1.device, "qp_type": qp_type, "deadline_s": PATIENCE}
        with node1.call(rdmaconnect.connect, address, **options) as here, accepted.result(PATIENCE) as there:
            number = trials(2, 50) if trouble == "reset" else trials(1, 50)
            for trial in range(number):
                taken = proxy.taken
                if trouble == "reset":
                    node1.call(proxy.reset)
                else:
                    proxy.cut(of_connector=trial % 2 == 0)
                for _ in range(3):
                    node1.call(here.send, b"to")
                    counted.counts["goes on"] += node2.call(there.recv, deadline_s=PATIENCE) == b"to"
                counted.counts["resumed"] += until(lambda: proxy.taken > taken)  # noqa: B023
                alive = until(lambda: here.health.state is there.health.state is ALIVE)
                counted.counts["alive"] += alive
                counted.counts["dead"] += DEAD in (here.health.state, there.health.state)
        node1.call(proxy.close)
    assert dict(counted.counts) == {"goes on": 3 * number, "resumed": number, "alive": number, "dead": 0}


def test_a_cut_data_path_is_named_as_such(node1: Node, node2: Node, counted: Counted) -> None:
    number = trials(1, 20)
    for _ in range(number):
        with (
            connected(node1, node2, connect={"timeout": 14, "retry_cnt": 3}) as (here, there),
            lost(node2, *ROCE),
        ):
            began = time.monotonic()
            with pytest.raises(rdmaconnect.CompletionError) as caught:
                node1.call(here.send, b"lost")
            counted.took("told", time.monotonic() - began)
            words = str(caught.value)
            counted.counts["named"] += "RETRY_EXC_ERR" in words and "The peer is there: it has answered" in words
            counted.counts["dead"] += DEAD in (here.health.state, there.health.state)
    assert dict(counted.counts) == {"named": number, "dead": 0}


# ---- this host


@pytest.fixture
def spare(node1: Node) -> Iterator[Callable[[], None]]:
    """Makes a device of its own on node 1, with one address, whose network may be disturbed."""

    def make() -> None:
        node1.run("ip", "link", "add", NETDEV, "type", "veth", "peer", "name", "w9")
        for netdev in ("w9", NETDEV):
            node1.run("ip", "link", "set", netdev, "up")
        add(node1)
        node1.run("ip", "addr", "add", "10.77.0.1/24", "dev", NETDEV)
        wait_for(node1, "10.77.0.1")

    yield make
    watch.forget()
    node1.run("rdma", "link", "delete", NAME, check=False)
    node1.run("ip", "link", "delete", NETDEV, check=False)


@contextlib.contextmanager
def on_itself(node: Node) -> Iterator[list[Connection]]:
    """Both ends on the spare device, which try a message for as long as a change is there."""
    with node.listening(device=NAME, detect_s=20) as listener:
        accepted = node.start(listener.accept, deadline_s=PATIENCE)
        connecting = node.connect(listener.url, device=NAME, detect_s=20)
        with connecting.result(PATIENCE) as here, accepted.result(PATIENCE) as there:
            yield [here, there]


ADDRESS = ["ip", "addr", "%s", "10.77.0.1/24", "dev", NETDEV]
#: what is done to this host, what undoes it, and what the connection is then
CHANGES: dict[str, tuple[list[str], list[str], HealthState]] = {
    "address": ([*ADDRESS[:2], "del", *ADDRESS[3:]], [*ADDRESS[:2], "add", *ADDRESS[3:]], MOVED),
    "port": (["ip", "link", "set", NETDEV, "down"], ["ip", "link", "set", NETDEV, "up"], SUSPECT),
    "mtu": (["ip", "link", "set", NETDEV, "mtu", "600"], ["ip", "link", "set", NETDEV, "mtu", "1500"], SUSPECT),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_this_host_is_told_before_the_first_error(
    node1: Node, spare: Callable[[], None], counted: Counted, kind: str
) -> None:
    """A message every 50 ms: rxe refuses the first one after address or port have gone, without trying again."""
    spare()
    do, undo, state = CHANGES[kind]
    number = trials(1, 20)
    for _ in range(number):
        with on_itself(node1) as ends:
            loads = [
                Load(node1, ends[0], lambda conn: (time.sleep(0.05), conn.send(b"x"))),
                Load(node1, ends[1], lambda conn: conn.recv()),
            ]
            assert until(lambda: loads[0].moved > 3)  # noqa: B023 - it is used up at once
            began = time.monotonic()
            node1.run(*do)
            assert until(lambda: all(load.seen for load in loads), 10)  # noqa: B023
            first = min(load.seen[0][0] for load in loads)
            counted.took("told", first - began)
            counted.counts["as it is"] += until(lambda: ends[0].health.state is state, 2)
            failed = [load.ended.result() for load in loads if load.ended.done()]
            counted.counts["before the first error"] += all(when > first for when, _ in failed)
            if kind == "address":
                _, error = loads[0].ended.result(PATIENCE)
                counted.counts["named by the error"] += "is not on rxe9 port 1 any more" in str(error)
            node1.run(*undo)
            wait_for(node1, "10.77.0.1")
            if kind == "mtu":
                counted.counts["back"] += until(lambda: ends[0].health.state is not state, 10)
                counted.counts["goes on"] += not loads[0].ended.done()
            for end in ends:
                end.close()
            for load in loads:
                load.ended.result(PATIENCE)
    assert counted.counts["as it is"] == number
    assert counted.counts["back"] == counted.counts["goes on"] == number * (kind == "mtu")


@pytest.mark.parametrize(
    "way", [["rdma", "link", "delete", NAME], ["ip", "link", "delete", NETDEV]], ids=["link", "netdev"]
)
def test_a_device_that_goes_ends_waiting_calls_and_nothing_keeps_it(
    node1: Node, spare: Callable[[], None], counted: Counted, way: list[str]
) -> None:
    number = trials(1, 10)
    for _ in range(number):
        spare()
        with on_itself(node1) as ends:
            waiting = [node1.start(end.recv, deadline_s=PATIENCE) for end in ends]
            times: list[float] = []
            for one in waiting:
                one.add_done_callback(lambda _: times.append(time.monotonic()))  # noqa: B023
            time.sleep(0.5)
            began = time.monotonic()
            node1.run(*way)
            counted.took("deleted", time.monotonic() - began)
            for end, one in zip(ends, waiting, strict=True):
                error = one.exception(PATIENCE)
                # the peer is on the same device, and may have said so first
                counted.counts["right"] += isinstance(error, DeviceError | PeerClosed) and "was removed" in str(error)
                assert until(lambda end=end: isinstance(end.lost, DeviceError), 2)  # type: ignore[misc]
                assert end.health.state is DEAD
            counted.took("told", max(times) - began)
        node1.run("rdma", "link", "delete", NAME, check=False)
        node1.run("ip", "link", "delete", NETDEV, check=False)
    assert counted.counts["right"] == 2 * number
    # both from when the command is started, which takes the emulated lab a second
    assert max(counted.times["told"]) < 3
    assert max(counted.times["deleted"]) < 3


def test_other_devices_carry_on_after_one_was_removed(node1: Node, node2: Node, spare: Callable[[], None]) -> None:
    """One that was kept open while it was removed took the UDP port of the namespace's others with it."""
    with connected(node1, node2) as (here, there):
        spare()
        with on_itself(node1):
            node1.run("rdma", "link", "delete", NAME)
            time.sleep(1)
        node1.call(here.send, b"still")
        assert node2.call(there.recv, deadline_s=PATIENCE) == b"still"
        node2.call(there.send, b"here")
        assert node1.call(here.recv, deadline_s=PATIENCE) == b"here"
