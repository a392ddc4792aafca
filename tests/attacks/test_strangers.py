"""Peers that are none of ours: what they leave behind, and that nobody who stands notices them."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import time
from collections.abc import Callable

import msgpack
import pytest
from software import Software

import rdmaconnect
from rdmaconnect.exchange.alive import open_channels

from . import hostile, zmtp
from .campaign import Campaign, aside, descriptors, pair, scaled, status, until
from .zmtp import Peer


def tls(port: int) -> None:
    """A TLS client."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=0.5)
    with contextlib.suppress(OSError), sock:
        ssl._create_unverified_context().wrap_socket(sock, server_hostname="node17")


def says(data: bytes) -> Callable[[int], None]:
    """A client that says this, and listens a little."""

    def visit(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=0.3) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):
                while sock.recv(65536):
                    pass

    return visit


STRANGERS: dict[str, Callable[[int], None]] = {
    "ZMTP 1.0": says(b"\x01\x00\x02\x00x"),
    "ZMTP 2.0": says(b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x00\x01x"),
    "ZMTP 3.0, a subscriber": says(zmtp.GREETING + zmtp.ready(b"SUB") + zmtp.frame(b"\x01")),
    "ZMTP 3.0, PLAIN": says(zmtp.greeting(b"PLAIN") + zmtp.command(b"\x05HELLO\x01a\x01b")),
    "HTTP": says(b"GET / HTTP/1.1\r\nHost: node17:18515\r\nUser-Agent: Mozilla/5.0\r\nAccept: */*\r\n\r\n" * 5),
    "TLS": tls,
    "SSH": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "zeros": says(bytes(1000)),
    "0xff": says(b"\xff" * 1000),
    "nothing": says(b""),
    "random": says(os.urandom(3000)),
}


@pytest.mark.parametrize("options", [{}, {"secret": "a secret of thirty-two characters"}], ids=["plain", "protected"])
def test_those_who_stand_do_not_notice(software: Software, counted: Campaign, options: dict[str, str]) -> None:
    with rdmaconnect.listen("127.0.0.1:0", **options) as listener:
        here, there = pair(listener, **options)
        for _ in range(scaled(1, 30)):
            for name, visit in STRANGERS.items():
                receiving = aside(counted.call, "recv", there.recv, deadline_s=10)
                accepting = aside(counted.call, "accept", listener.accept, deadline_s=10)
                visit(listener.port)
                counted.count(f"visits of {name}")
                here.send(b"still")
                assert receiving.result() == b"still"
                rdmaconnect.connect(listener.url, deadline_s=10, **options).close()
                accepting.result().close()
        here.close()
        there.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["recv: ok"] == counted.counts["accept: ok"] == len(STRANGERS) * scaled(1, 30)


@pytest.mark.parametrize("size", [10, 2000, 60000])
def test_departed_strangers_are_forgotten(software: Software, counted: Campaign, size: int) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        here, there = pair(listener)

        def come_and_go(number: int) -> None:
            for i in range(number):
                with contextlib.suppress(OSError):
                    peer = Peer.connect(listener.port, identity=b"%d" % i)
                    peer.send(*[os.urandom(size)] * 3)
                    peer.reset() if i % 2 else peer.close()
                    counted.count("strangers")

        come_and_go(30)
        assert until(lambda: open_channels() == 2)
        time.sleep(0.5)
        before = status("VmRSS"), descriptors()
        come_and_go(scaled(60, 3000))
        assert until(lambda: open_channels() == 2)
        until(lambda: descriptors() <= before[1])  # ZeroMQ closes its own a little later
        gc.collect()
        after = status("VmRSS"), descriptors()
        counted.note(f"{after[0] - before[0]} KiB, {after[1] - before[1]} descriptors more than before")
        here.send(b"still")
        assert there.recv(deadline_s=5) == b"still"
        here.close()
        there.close()
    assert after[1] <= before[1]
    # what many had at the same time stays with the allocator; all of them had three times as much and more
    assert (after[0] - before[0]) * 1024 < 12 * 2**20 + 1000 * size


def test_a_peer_cannot_have_memory_registered_that_it_only_claims(software: Software, counted: Campaign) -> None:
    # rsz of a hello: how much its receives take, it says, and so how much could be sent to it at once
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        before = status("VmRSS")
        for size in (0, 1, 2**31, 2**33, 2**63):
            peer = Peer.connect(listener.port)
            hello = hostile.hello(rsz=size)
            peer.send(hostile.pack(hello))
            if b"reply" in peer.recv():
                peer.send(hostile.message("ready", hello["id"]))
                connection = listener.accept(deadline_s=5)
                counted.count("accepted")
                if size:
                    with contextlib.suppress(rdmaconnect.RdmaConnectError):  # nobody is there to take it
                        connection.send(b"x", deadline_s=0.05)
                connection.close()
            else:
                counted.count("refused")
            peer.close()
        more = status("VmRSS") - before
        counted.note(f"{more} KiB more than before")
    assert more < 16 * 1024
    assert sum(counted.counts.values()) == 5


def test_a_full_house_tells_when_to_come_again(software: Software, counted: Campaign) -> None:
    number = scaled(40, 400)
    with rdmaconnect.listen("127.0.0.1:0", probe=False, max_half_open=8) as listener:
        peers = []
        for _ in range(8):
            peers.append(Peer.connect(listener.port))
            peers[-1].send(hostile.pack(hostile.hello()))
            assert b"reply" in peers[-1].recv()
        began = time.monotonic()
        connecting = [
            aside(counted.call, "connect", rdmaconnect.connect, listener.url, probe=False, deadline_s=60)
            for _ in range(number)
        ]
        late = Peer.connect(listener.port)
        hello = hostile.hello()
        late.send(hostile.pack(hello))
        answer = late.recv()
        counted.count("told to come again", b"again" in answer and b"busy" in answer)
        time.sleep(0.5)
        for peer in (*peers, late):
            peer.reset()
        made = [counted.call("accept", listener.accept, deadline_s=30) for _ in range(number)]
        counted.took("all of them", time.monotonic() - began)
        made += [one.result() for one in connecting]
        for connection in made:
            connection.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["told to come again"] == 1
    assert counted.counts["connect: ok"] == counted.counts["accept: ok"] == number


def test_an_abrupt_end_at_every_byte_of_the_conversation(software: Software, counted: Campaign) -> None:
    ident = os.urandom(16)
    shaking = zmtp.GREETING + zmtp.ready()
    asking = zmtp.frame(hostile.pack(hostile.hello(ident))) + zmtp.frame(hostile.message("ready", ident))
    asking += zmtp.frame(hostile.message("bye", ident, why="so"))
    step = max(1, 40 - scaled(0, 39))
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        for whole in (shaking, asking):
            for length in range(0, len(whole) + 1, step):
                for reset in (True, False):
                    if whole is shaking:
                        peer = Peer(socket.create_connection(("127.0.0.1", listener.port)))
                    else:
                        peer = Peer.connect(listener.port)
                    peer.sock.sendall(whole[:length])
                    peer.reset() if reset else peer.close()
                    counted.count("ends")
        assert until(lambda: open_channels() == 0)
        while (connection := counted.call("accept", listener.accept, deadline_s=0.1)) is not None:
            connection.close()
    assert set(counted.failures()) == {"accept: ConnectTimeout"}


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
def test_a_peer_that_takes_messages_of_no_length(software: Software, counted: Campaign, qp_type: str) -> None:
    """The proof has nothing to send to it."""

    def answer(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as sock:
            sock.settimeout(5)
            peer = Peer(sock)
            peer.shake()
            peer.send(hostile.pack(hostile.reply(msgpack.unpackb(peer.recv()), rsz=0)))
            while peer.recv():
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = aside(answer, server)
        url = f"127.0.0.1:{server.getsockname()[1]}"
        counted.call("connect", rdmaconnect.connect, url, qp_type=qp_type, deadline_s=1, within_s=1)
        answering.result()
    assert set(counted.counts) & {"connect: ConnectTimeout", "connect: CompletionError", "connect: PeerClosed"}
