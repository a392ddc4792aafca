"""Attackers: a process that does harm to a listener of this host, one kind after the other.

It reads lines ``kind port seconds``, and says after each how often it did what it does.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import zmq

from attacks import hostile, zmtp
from attacks.zmtp import Peer, frame

KINDS: dict[str, Callable[[Attack], None]] = {}
#: an address of which nobody answers, in the network of the device in software
NOWHERE = "10.66.6.6"


class Attack:
    """One attack.

    Attributes:
        port: whose listener.
        kept: what is held open until its end.
        number: how often it was done.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self.port, self._end = port, time.monotonic() + seconds
        self.kept: list[Any] = []
        self.number = 0
        self.chance = random.Random(5)

    @property
    def left_s(self) -> float:
        """Seconds that it still has."""
        return max(0.0, self._end - time.monotonic())

    def tcp(self) -> socket.socket:
        """A connection, and nothing said."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=3)

    def zmtp(self, **what: bytes) -> Peer:
        """A peer that has shaken hands."""
        peer = Peer(self.tcp())
        peer.shake(**what)
        return peer

    def deaf(self, *frames: bytes) -> None:
        """A peer that says all at once and listens no more; the last 200 are kept open."""
        peer = self.zmtp()  # before the handshake is over, ZeroMQ takes no message
        self.kept.append(peer)
        peer.send(*frames)
        if len(self.kept) > 200:
            self.kept.pop(0).close()

    def again(self, once: Callable[[], object], pause_s: float = 0.0) -> None:
        """Do it until the end."""
        while self.left_s:
            try:
                once()
                self.number += 1
            except OSError:
                time.sleep(0.01)
            time.sleep(pause_s)

    def times(self, number: int, once: Callable[[], object]) -> None:
        """Do it so often, and keep what comes of it until the end."""
        for _ in range(number):
            with contextlib.suppress(OSError):
                self.kept.append(once())
                self.number += 1
            if not self.left_s:
                break
        time.sleep(self.left_s)

    def close(self) -> None:
        """Let go of all."""
        for one in self.kept:
            one.close()


def kind(function: Callable[[Attack], None]) -> Callable[[Attack], None]:
    """A kind of attack, by its name."""
    KINDS[function.__name__] = function
    return function


@kind
def none(attack: Attack) -> None:
    time.sleep(attack.left_s)


@kind
def scan(attack: Attack) -> None:
    attack.again(lambda: attack.tcp().close(), 0.002)


@kind
def idle(attack: Attack) -> None:
    attack.times(400, attack.tcp)


@kind
def greeted(attack: Attack) -> None:
    def once() -> socket.socket:
        sock = attack.tcp()
        sock.sendall(zmtp.GREETING)
        return sock

    attack.times(300, once)


@kind
def bytewise(attack: Attack) -> None:
    attack.kept = [attack.tcp() for _ in range(100)]
    whole = zmtp.GREETING + zmtp.ready() + frame(hostile.pack(hostile.hello()))
    each_s = attack.left_s / len(whole)
    for byte in whole:
        for sock in attack.kept:
            with contextlib.suppress(OSError):
                sock.sendall(bytes([byte]))
                attack.number += 1
        time.sleep(max(0.0, min(each_s - 0.002, attack.left_s)))


@kind
def halves(attack: Attack) -> None:
    def once() -> Peer:
        peer = attack.zmtp()
        peer.send(hostile.pack(hostile.hello()))
        return peer

    attack.times(500, once)


@kind
def half_flood(attack: Attack) -> None:
    attack.again(lambda: attack.deaf(hostile.pack(hostile.hello())))


@kind
def unreachable(attack: Attack) -> None:
    attack.again(lambda: attack.deaf(hostile.pack(hostile.hello(address=NOWHERE))), 0.02)


@kind
def bulk(attack: Attack) -> None:
    def once() -> Peer:
        peer = attack.zmtp()
        peer.send(hostile.pack(hostile.hello(qps=4096)))
        return peer

    attack.times(20, once)


@kind
def oversize(attack: Attack) -> None:
    def once() -> None:
        peer = attack.zmtp()
        size = attack.chance.choice((65537, 524289, 2**31, 2**63, 2**64 - 1))
        peer.sock.sendall(b"\x02" + struct.pack(">Q", size) + b"x" * 1000)
        time.sleep(0.003)
        peer.close()

    attack.again(once)


@kind
def endless(attack: Attack) -> None:
    """Frames that are announced short of the limit and do not end, and messages of parts without end."""
    part = frame(b"x" * 200, more=True) * 20

    def once() -> None:
        sock = attack.zmtp().sock
        attack.kept.append(sock)
        sock.settimeout(0.5)
        if attack.number % 2:
            sock.sendall(b"\x02" + struct.pack(">Q", 500_000) + b"x" * 400_000)
        else:
            sock.sendall(part * 200)
        if len(attack.kept) > 40:
            attack.kept.pop(0).close()

    attack.again(once)


@kind
def mechanism(attack: Attack) -> None:
    def once() -> None:
        sock = attack.tcp()
        name = attack.chance.choice((b"CURVE", b"PLAIN", b"GSSAPI", b"X" * 20, b""))
        sock.sendall(zmtp.greeting(name) + os.urandom(attack.chance.choice((0, 100, 5000))))
        time.sleep(0.003)
        sock.close()

    attack.again(once)


@kind
def garbage(attack: Attack) -> None:
    def once() -> None:
        sock = attack.zmtp().sock if attack.chance.random() < 0.5 else attack.tcp()
        sock.sendall(os.urandom(attack.chance.choice((1, 10, 100, 10000))))
        time.sleep(0.002)
        sock.close()

    attack.again(once)


@kind
def broken_zmtp(attack: Attack) -> None:
    """A sound handshake in which a few bytes are others."""
    whole = zmtp.GREETING + zmtp.ready(identity=b"me") + frame(hostile.pack(hostile.hello()))

    def once() -> None:
        data = bytearray(whole)
        for _ in range(attack.chance.choice((1, 1, 2, 8))):
            data[attack.chance.randrange(len(data) if attack.chance.random() < 0.3 else 120)] = attack.chance.randrange(
                256
            )
        sock = attack.tcp()
        sock.sendall(data)
        time.sleep(0.002)
        sock.close()

    attack.again(once)


@kind
def identity(attack: Attack) -> None:
    names = (b"A", b"\0abcd", b"x" * 255, b"\0" + os.urandom(4), b"y" * 70000)
    kinds = (b"DEALER", b"REQ", b"ROUTER", b"PUB", b"XX", b"STREAM", b"")

    def once() -> None:
        peer = attack.zmtp(identity=attack.chance.choice(names), kind=attack.chance.choice(kinds))
        peer.send(hostile.pack(hostile.hello()))
        attack.kept.append(peer)
        if len(attack.kept) > 100:
            attack.kept.pop(0).close()

    attack.again(once)


@kind
def replay(attack: Attack) -> None:
    same = hostile.pack(hostile.hello(b"R" * 16))
    attack.again(lambda: attack.deaf(same), 0.005)


@kind
def again(attack: Attack) -> None:
    """Hellos that repeat, replace and contradict each other."""

    def once() -> None:
        ident = os.urandom(16)
        first = hostile.pack(hostile.hello(ident))
        others = [hostile.pack(hostile.hello()), hostile.pack(hostile.hello(ident)), first]
        attack.deaf(first, first, *others, hostile.pack(hostile.hello(prev=ident)))

    attack.again(once, 0.005)


@kind
def order(attack: Attack) -> None:
    """Messages in any order."""

    def once() -> None:
        ident = os.urandom(16)
        messages = [
            hostile.pack(hostile.hello(ident)),
            hostile.pack(hostile.reply(hostile.hello(ident))),
            hostile.message("ready", ident),
            hostile.message("proof", ident),
            hostile.message("beat", ident),
            hostile.message("joined", ident),
            hostile.message("bye", ident, why="so"),
            hostile.message("reject", ident, stage="s", errno=5, why="so", ports=[]),
            hostile.message("nothing", ident),
        ]
        attack.deaf(*attack.chance.choices(messages, k=6))

    attack.again(once, 0.005)


@kind
def rejects(attack: Attack) -> None:
    flood = [hostile.message("reject", bytes(16), stage="s", errno=0, why="x" * 2000, ports=[])] * 20

    def once() -> None:
        peer = attack.zmtp()
        peer.sock.settimeout(1)
        for _ in range(50):
            peer.send(*flood)

    attack.again(once)


@kind
def beats(attack: Attack) -> None:
    """Half-open peers that flood with beats."""

    def once() -> None:
        peer = attack.zmtp()
        peer.sock.settimeout(1)
        ident = os.urandom(16)
        peer.send(hostile.pack(hostile.hello(ident, beat=1000, patience=100000)))
        attack.kept.append(peer)
        for _ in range(20):
            peer.send(*[hostile.message("beat", ident)] * 100)
        if len(attack.kept) > 100:
            attack.kept.pop(0).close()

    attack.again(once)


@kind
def no_read(attack: Attack) -> None:
    """Peers that ask and ask and read no answer."""
    peers = [attack.zmtp().sock for _ in range(10)]
    attack.kept += peers
    for sock in peers:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2000)
        sock.setblocking(False)

    def once() -> None:
        for sock in peers:
            try:
                sock.send(frame(hostile.pack(hostile.hello())))
            except BlockingIOError:
                time.sleep(0.0005)

    attack.again(once)


@kind
def big_frames(attack: Attack) -> None:
    """Frames that are long to send and longer to read."""
    body = hostile.message("beat", bytes(16))
    whole = frame(bytes([body[0] + 1]) + body[1:] + b"\xa1z\xdd" + struct.pack(">I", 520_000) + b"\x90" * 520_000)
    left: dict[int, tuple[socket.socket, bytes]] = {}

    def once() -> None:
        while len(left) < 4:
            sock = attack.zmtp().sock
            sock.setblocking(False)
            left[id(sock)] = sock, whole
        for key, (sock, data) in list(left.items()):
            try:
                rest = data[sock.send(data) :] or whole
                left[key] = sock, rest
            except BlockingIOError:
                time.sleep(0.0005)
            except OSError:
                sock.close()
                del left[key]

    attack.again(once)
    attack.kept += [sock for sock, _ in left.values()]


@kind
def descriptors(attack: Attack) -> None:
    """As many connections as there can be."""

    def once() -> None:
        attack.kept.append(attack.tcp())
        if len(attack.kept) > 3000:
            time.sleep(0.1)

    attack.again(once)


@kind
def plain(attack: Attack) -> None:
    """ZeroMQ itself, without keys, as fast as it can."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    sock.connect(f"tcp://127.0.0.1:{attack.port}")

    def once() -> None:
        try:
            for _ in range(100):
                sock.send(bytes(10), zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)

    attack.again(once)
    context.destroy(linger=0)


@kind
def wrong_key(attack: Attack) -> None:
    """ZeroMQ with a key that nobody knows."""

    def once() -> None:
        context = zmq.Context()
        public, secret = zmq.curve_keypair()
        sock = context.socket(zmq.DEALER)
        sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = public, secret, zmq.curve_keypair()[0]
        sock.linger = 0
        sock.connect(f"tcp://127.0.0.1:{attack.port}")
        sock.send(b"x", zmq.NOBLOCK)
        time.sleep(0.02)
        context.destroy(linger=0)

    attack.again(once)


def main() -> None:
    for line in sys.stdin:
        name, port, seconds = line.split()
        attack = Attack(int(port), float(seconds))
        try:
            with contextlib.suppress(OSError):
                KINDS[name](attack)
        finally:
            attack.close()
        print(attack.number, flush=True)


if __name__ == "__main__":
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    main()
