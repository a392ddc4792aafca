"""Mutated frames through live listeners and connectors, over sockets: only errors of the library's own come out."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading

import msgpack
import pytest
from software import Software

import rdmaconnect

from . import hostile, zmtp
from .campaign import SCALE, Campaign, aside, pair, scaled, until
from .mutations import bytewise, mutated
from .zmtp import Peer

#: frames in all: a million at full scale
TO_LISTENERS, TO_CONNECTORS = scaled(1200, 750_000), scaled(600, 250_000)
#: peers at the same time: most of the time each of them waits
PEERS = 8
SEED = int(os.environ.get("RDMACONNECT_CAMPAIGN_SEED", SCALE))


def conversation(chance: random.Random, ident: bytes) -> list[dict[str, object]]:
    """What a connector says in all."""
    gid = hostile.port()["gids"][0][0]
    kind = chance.choice((2, 2, 3, 4))
    hello = hostile.hello(
        ident, qps=chance.choice((1, 1, 1, 3)), qpt=kind, beat=chance.choice((100, 1000)), patience=1000,
        want=None if chance.random() < 0.8 else ["soft0", 1, gid, gid],
    )  # fmt: skip
    hello["wish"]["probe"] = chance.random() < 0.3
    short = [{"v": 1, "t": kind, "id": ident, "doors": [["x", 1]]} for kind in ("ready", "proof", "beat", "joined")]
    bye = {"v": 1, "t": "bye", "id": ident, "why": "so"}
    reject = {"v": 1, "t": "reject", "id": ident, "stage": "s", "errno": 5, "why": "so", "ports": [hostile.port()]}
    rest = [*short, bye, reject, hello, hostile.reply(hello)]
    if chance.random() < 0.6:
        return [hello, *short[:3], bye]  # joined is the listener's to say
    return [hello, *chance.sample(rest, 4)] if chance.random() < 0.8 else chance.sample(rest, 5)


def frames(chance: random.Random) -> list[bytes]:
    """The same with a few things changed, or none."""
    bodies = conversation(chance, chance.randbytes(16))
    which = chance.randrange(len(bodies))
    packed = []
    for i, body in enumerate(bodies):
        changes = chance.choice((0, 1, 1, 2, 3)) if i == which else 0
        packed.append(mutated(chance, body, changes))
    if chance.random() < 0.2:
        packed[which] = bytewise(chance, packed[which])
    elif chance.random() < 0.03:
        packed[which] = chance.randbytes(chance.choice((0, 1, 5, 100, 70_000)))
    return packed


def visit(chance: random.Random, port: int, packed: list[bytes]) -> bool:
    """Say all of it to a listener: at once, or the rest once it has replied. Whether it has."""
    replied = False
    with contextlib.suppress(OSError):
        if chance.random() < 0.1:
            sock = socket.create_connection(("127.0.0.1", port), timeout=5)
            with sock:
                sock.sendall(bytewise(chance, zmtp.GREETING + zmtp.ready() + b"".join(map(zmtp.frame, packed))))
                sock.settimeout(0.01)
                while sock.recv(65536):
                    pass
            return False
        peer = Peer.connect(port)
        with peer.sock:
            rest = list(packed)
            if chance.random() < 0.7:
                peer.send(rest.pop(0))
                peer.sock.settimeout(0.05)
                with contextlib.suppress(socket.timeout):
                    replied = b"reply" in peer.recv()
            peer.send(*rest)
            if chance.random() < 0.2:  # else it goes at once
                peer.sock.settimeout(0.01)
                while True:
                    peer.recv()
    return replied


@pytest.mark.parametrize("probe", [True, False], ids=["probe", "no probe"])
def test_mutated_frames_to_a_live_listener(software: Software, counted: Campaign, probe: bool) -> None:
    over = threading.Event()
    with rdmaconnect.listen("127.0.0.1:0", probe=probe) as listener:

        def accept() -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                try:
                    connection = listener.accept(deadline_s=0.2, tolerant=turn % 2 == 0)
                except rdmaconnect.StateError:
                    if listener.closed:
                        return
                    counted.count("accept: StateError")
                    continue
                except rdmaconnect.RdmaConnectError as e:
                    counted.count(f"accept: {type(e).__name__}")
                    continue
                except BaseException as e:  # noqa: BLE001  that is what is counted
                    counted.raised("accept", e)
                    continue
                counted.count("accepted")
                with connection:
                    repr((connection, connection.trace, connection.path.why, connection.lost))

        def send(seed: int) -> None:
            chance, sent, connections = random.Random(seed), 0, 0
            while sent < TO_LISTENERS // 2 // PEERS:
                packed = frames(chance)
                counted.count("replies", visit(chance, listener.port, packed))
                sent += len(packed)
                connections += 1
                if connections % 500 == 0:
                    connection = counted.call("an honest connect", rdmaconnect.connect, listener.url, deadline_s=20)
                    connection.close()
            counted.count("frames", sent)
            counted.count("connections", connections)

        accepting = [aside(accept) for _ in range(2)]
        for sending in [aside(send, PEERS * SEED + i) for i in range(PEERS)]:
            sending.result()
        over.set()
        for one in accepting:
            one.result()
        for end in pair(listener):
            end.close()
    assert counted.counts["accepted"] > 0
    assert until(lambda: software.left() == {}, 30)


def answer(chance: random.Random, server: socket.socket) -> int:
    """One connector's listener; how many frames it has sent."""
    try:
        sock = server.accept()[0]
    except OSError:
        return 0
    sock.settimeout(2)
    peer = Peer(sock)
    number = 0
    with sock, contextlib.suppress(OSError):
        peer.shake()
        asked = msgpack.unpackb(peer.recv())
        if asked["t"] == "hello":
            reply = hostile.reply(asked, token=chance.randbytes(16), beat=1000, stages=[["x", 1]])
        else:  # a connection that stands has lost its side channel, and resumes it
            reply = {"v": 1, "t": "beat", "id": asked["id"]}
        reject = {
            "v": 1, "t": "reject", "id": asked["id"], "stage": "x", "errno": chance.choice((0, 110, 22)),
            "why": "no", "ports": [hostile.port()], "again": chance.choice((0, 10)),
        }  # fmt: skip
        first = reject if chance.random() < 0.2 else reply
        number = 1
        peer.send(mutated(chance, first, chance.choice((0, 1, 1, 2, 3))))
        if chance.random() < 0.5:
            peer.recv()
        for kind in chance.choice((("joined", "proof", "bye"), ("proof",), ("beat", "beat", "bye"), ("reply",))):
            body = {"v": 1, "t": kind, "id": asked["id"], "why": "so", "doors": []}
            peer.send(mutated(chance, body, chance.choice((0, 0, 1))))
            number += 1
        peer.recv()
    return number


def test_mutated_replies_to_connectors(software: Software, counted: Campaign) -> None:
    def be_called(seed: int) -> None:
        chance, sent = random.Random(seed), 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            while sent < TO_CONNECTORS // PEERS:
                answering = aside(answer, chance, server)
                call(chance, f"127.0.0.1:{server.getsockname()[1]}")
                sent += answering.result()
        counted.count("frames", sent)

    def call(chance: random.Random, url: str) -> None:
        made = counted.call(
            "connect", rdmaconnect.connect_many, url, chance.choice((1, 1, 2)), deadline_s=0.1, within_s=1.0,
            probe=chance.random() < 0.3, qp_type=chance.choice(("RC", "UC", "UD")),
        )  # fmt: skip
        counted.count("connects")
        for connection in made or ():
            with connection:
                repr((connection, connection.trace, connection.path.why, connection.lost, connection.max_send_size))
                # a peer may have said that it takes messages of no length at all
                with contextlib.suppress(rdmaconnect.RdmaConnectError, ValueError):
                    connection.send(b"x", deadline_s=0)

    for being in [aside(be_called, PEERS * SEED + i) for i in range(PEERS)]:
        being.result()
    assert counted.counts["connect: ok"] > 0
    assert counted.counts["frames"] >= TO_CONNECTORS // PEERS * PEERS
    assert until(lambda: software.left() == {}, 30)
