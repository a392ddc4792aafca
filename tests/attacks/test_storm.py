"""Many connectors at the same moment, alone and among hostile ones: none is lost."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import threading
import time
from typing import Any

import pytest
from software import Software

import rdmaconnect

from . import hostile, zmtp
from .campaign import SCALE, Campaign, descriptors, scaled, until
from .children import Child
from .zmtp import Peer

#: seconds that each call has: here both ends of all connections share the time of one interpreter
DEADLINE_S = 120
#: descriptors of one connection with both its ends in this process, with room
PER_PAIR = 13


def room_for(wanted: int, each: int = PER_PAIR) -> int:
    """As many of the wanted as there are descriptors for."""
    return min(wanted, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - descriptors() - 300) // each)


class Storm:
    """Connectors that all call at the same moment, each in a thread.

    Attributes:
        made: the connections, by the number that each gave as its private data.
    """

    def __init__(self, counted: Campaign, url: str, number: int, **options: Any) -> None:
        self._counted, self._url, self._options = counted, url, options
        self.made: dict[int, rdmaconnect.Connection] = {}
        self._begun: list[float] = []
        self._go = threading.Event()
        self._threads = [threading.Thread(target=self._connect, args=(i,)) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def _connect(self, number: int) -> None:
        self._go.wait()
        self._begun.append(time.monotonic())
        options = {"private_data": b"%d" % number, "deadline_s": DEADLINE_S, **self._options}
        connection = self._counted.call("connect", rdmaconnect.connect, self._url, **options)
        if connection is not None:
            self.made[number] = connection

    def go(self) -> None:
        """Have them call."""
        self._go.set()

    def end(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join()
        self._counted.note(f"calls began within {1000 * (max(self._begun) - min(self._begun)):.0f} ms")


def accept_all(counted: Campaign, listener: rdmaconnect.Listener, number: int) -> dict[int, rdmaconnect.Connection]:
    """Accept so many, by the number that each gave."""
    accepted: dict[int, rdmaconnect.Connection] = {}
    for _ in range(number):
        connection = counted.call("accept", listener.accept, deadline_s=DEADLINE_S)
        if connection is None:
            break
        accepted[int(connection.private_data)] = connection
    return accepted


def talk(counted: Campaign, here: dict[int, rdmaconnect.Connection], there: dict[int, rdmaconnect.Connection]) -> None:
    """Send over each of the connections, both ways."""
    for number in here.keys() & there.keys():
        here[number].send(b"to %d" % number)
        there[number].send(b"from %d" % number)
        both = there[number].recv(deadline_s=5), here[number].recv(deadline_s=5)
        counted.count("talked", both == (b"to %d" % number, b"from %d" % number))


class Hostile:
    """Peers that connect and are silent, slow or worse, for as long as the context lasts.

    Args:
        port: whose listener.
        number: how many.
    """

    def __init__(self, port: int, number: int) -> None:
        self._port, self._peers = port, [socket.socket() for _ in range(number)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._be)

    def __enter__(self) -> Hostile:
        for peer in self._peers:
            peer.settimeout(5)
            peer.connect(("127.0.0.1", self._port))
            peer.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for peer in self._peers:
            peer.close()

    def _be(self) -> None:
        whole = zmtp.GREETING + zmtp.ready() + zmtp.frame(hostile.pack(hostile.hello()))
        what = [
            [],  # silent
            [whole[i : i + 1] for i in range(len(whole))],  # slow
            [zmtp.GREETING, zmtp.ready()],  # greeted, and then silent
            [zmtp.GREETING, zmtp.ready(), zmtp.frame(b"garbage") * 50],
            [zmtp.GREETING, zmtp.ready(), zmtp.frame(hostile.pack(hostile.hello()))],  # asks, and does not go on
            [zmtp.GREETING, zmtp.ready(), zmtp.frame(hostile.pack(hostile.hello(qps=500)))],
            [b"GET / HTTP/1.1\r\n\r\n"],
            [zmtp.GREETING, zmtp.ready(), b"\x02\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(1000)],
        ]
        scripts = [(peer, list(what[i % len(what)])) for i, peer in enumerate(self._peers)]
        while not self._over.wait(0.02):
            for peer, script in scripts:
                if script:
                    with contextlib.suppress(OSError):
                        peer.send(script.pop(0))
                with contextlib.suppress(OSError):
                    peer.recv(65536)


@pytest.mark.parametrize("hostile_peers", [0, 200], ids=["alone", "among hostile ones"])
@pytest.mark.parametrize("probe", [True, False], ids=["probe", "no probe"])
def test_connectors_at_the_same_moment(software: Software, counted: Campaign, probe: bool, hostile_peers: int) -> None:
    number, runs = room_for(min(100 * SCALE, 1000)), scaled(1, 50)  # 100 of both
    for run in range(runs):
        with rdmaconnect.listen("127.0.0.1:0", probe=probe) as listener:
            storm = Storm(counted, listener.url, number, probe=probe)
            with Hostile(listener.port, hostile_peers * number // 1000):
                storm.go()
                accepted = accept_all(counted, listener, number)
                storm.end()
            talk(counted, storm.made, accepted)
            for connection in (*storm.made.values(), *accepted.values()):
                connection.close()
        assert counted.failures() == {}, counted.said
        assert counted.counts["talked"] == number * (run + 1)


LISTENER = """
listener = rdmaconnect.listen("127.0.0.1:0", probe=False)
say(listener.port)
number = int(listen_for())
accepted = []
held = []
for _ in range(number):
    try:
        held.append(listener.accept(deadline_s=90))
        accepted.append(int(held[-1].private_data))
    except Exception as e:
        say(repr(e))
        break
say(sorted(accepted))
listen_for()
for connection in held:
    connection.close()
listener.close()
say(software.problems())
"""


@pytest.mark.parametrize("hostile_peers", [0, 200], ids=["alone", "among hostile ones"])
def test_connectors_that_wait_for_a_process_that_was_stopped(
    software: Software, counted: Campaign, hostile_peers: int
) -> None:
    # what has come while it was stopped comes to it in one moment
    number = room_for(min(100 * SCALE, 1000), 6)
    for _ in range(scaled(1, 100)):
        with Child(LISTENER) as child:
            port = int(child.line())
            child.tell(str(number))
            time.sleep(0.05)
            child.signal(signal.SIGSTOP)
            storm = Storm(counted, f"127.0.0.1:{port}", number, probe=False)
            with Hostile(port, hostile_peers * number // 1000):
                storm.go()
                time.sleep(0.3 + number / 500)
                child.signal(signal.SIGCONT)
                storm.end()
                accepted = eval(child.line())
            counted.count("accepted", len(accepted))
            assert accepted == sorted(storm.made)
            for connection in storm.made.values():
                connection.close()
            child.tell()
            assert child.end() == (0, "[]")
    assert counted.failures() == {}, counted.said
    assert counted.counts["accepted"] == number * scaled(1, 100)


def test_raw_hellos_within_50_ms(counted: Campaign) -> None:
    # all is made before, and sent in one go to another process: nothing here takes turns with who sends
    number = room_for(min(100 * SCALE, 1000), 6)
    for _ in range(scaled(1, 100)):
        with Child(LISTENER) as child:
            port = int(child.line())
            child.tell(str(number))
            peers = [Peer.connect(port) for _ in range(number)]
            hellos = [hostile.hello(data=b"%d" % i) for i in range(number)]
            packed = [hostile.pack(hello) for hello in hellos]
            began = time.monotonic()
            for peer, body in zip(peers, packed, strict=True):
                peer.send(body)
            counted.took("all hellos", time.monotonic() - began)
            for peer, hello in zip(peers, hellos, strict=True):
                peer.sock.settimeout(60)
                reply = peer.recv()
                counted.count("replied", b"reply" in reply and hello["id"] in reply)
                peer.send(hostile.message("ready", hello["id"]))
            accepted = eval(child.line())
            counted.count("accepted", len(accepted))
            assert accepted == list(range(number))
            for peer in peers:
                peer.close()
            child.tell()
            assert child.end() == (0, "[]")
    assert counted.counts["replied"] == counted.counts["accepted"] == number * scaled(1, 100)
    assert counted.median_ms("all hellos") <= 50


def test_connectors_wait_for_a_server_that_is_busy(software: Software, counted: Campaign) -> None:
    number = room_for(min(100 * SCALE, 1000))
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        storm = Storm(counted, listener.url, number)
        storm.go()
        time.sleep(scaled(1, 15))
        accepted = accept_all(counted, listener, number)
        storm.end()
        talk(counted, storm.made, accepted)
        for connection in (*storm.made.values(), *accepted.values()):
            connection.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["talked"] == number


def test_connectors_of_every_type_and_count(software: Software, counted: Campaign) -> None:
    number = room_for(scaled(40, 300))
    made: list[rdmaconnect.Connection] = []
    accepted: list[rdmaconnect.Connection] = []
    over = threading.Event()
    with rdmaconnect.listen("127.0.0.1:0") as listener:

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(rdmaconnect.ConnectTimeout):
                    accepted.append(listener.accept(deadline_s=0.2))
                    counted.count("accepted")

        def connect(i: int) -> None:
            kind = ("RC", "UC", "UD")[i % 3]
            group = counted.call("connect", rdmaconnect.connect_many, listener.url, 1 + i % 4, qp_type=kind)
            made.extend(group or ())

        servers = [threading.Thread(target=accept) for _ in range(4)]
        connectors = [threading.Thread(target=connect, args=(i,)) for i in range(number)]
        for thread in servers + connectors:
            thread.start()
        for thread in connectors:
            thread.join()
        until(lambda: len(accepted) >= len(made))
        over.set()
        for thread in servers:
            thread.join()
        ends = {(end.local.qp_num, end.peer.qp_num): end for end in accepted}
        for connection in made:
            end = ends[connection.peer.qp_num, connection.local.qp_num]
            connection.send(b"%d" % connection.local.qp_num)
            counted.count("talked", end.recv(deadline_s=5) == b"%d" % connection.local.qp_num)
        for connection in made + accepted:
            connection.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["talked"] == len(made) == sum(1 + i % 4 for i in range(number))
