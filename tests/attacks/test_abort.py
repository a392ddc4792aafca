"""What once ended the whole process: a full queue and a reset beside ZMTP heartbeats, and claimed identities."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

import msgpack
import pytest

from . import zmtp
from .campaign import Campaign, scaled
from .children import Child
from .hostile import pack, reply
from .zmtp import Peer

LISTENER = """
listener = rdmaconnect.listen("127.0.0.1:0", **options)
held = []
thread = threading.Thread(target=lambda: held.append(listener.accept()))
thread.start()
held.append(rdmaconnect.connect(listener.url, **options))
thread.join()
say(listener.port)
listen_for()
there, here = held
here.send(b"still")
assert there.recv(deadline_s=5) == b"still"
thread = threading.Thread(target=lambda: held.append(listener.accept(deadline_s=10)))
thread.start()
rdmaconnect.connect(listener.url, deadline_s=10, **options).close()
thread.join()
held.pop().close()
say("alive")
os._exit(0)
"""

#: frames, and what follows them before the reset
STREAMS = {
    "1500": zmtp.frame(b"x" * 10) * 1500,
    "20000": zmtp.frame(b"x" * 10) * 20000,
    "pings": zmtp.frame(b"x" * 10) * 1500 + zmtp.ping(b"ping") * 1500,
    "pings-first": zmtp.ping(b"ping", 100) * 3000 + zmtp.frame(b"x" * 10) * 3000,
    "empty": zmtp.frame(b"") * 20000,
    "parts": zmtp.frame(b"x" * 10, more=True) * 20000,
    "commands": zmtp.command(b"\x09SUBSCRIBEx") * 3000 + zmtp.command(b"\x05ERROR\x03abc"),
}


def flood(peer: Peer, stream: bytes) -> None:
    """Send all that is taken within 2 s, wait until it is there, and reset."""
    peer.sock.settimeout(2)
    with contextlib.suppress(OSError):
        peer.sock.sendall(stream)
    time.sleep(0.05)
    peer.reset()


@pytest.mark.parametrize("stream", STREAMS)
def test_frames_and_a_reset_do_not_end_a_listener_that_is_left_alone(counted: Campaign, stream: str) -> None:
    with Child(LISTENER, options={}) as child:
        port = int(child.line())
        for _ in range(scaled(3, 100)):
            minor = 1 if "ping" in stream else 0
            with contextlib.suppress(OSError):
                flood(Peer.connect(port, minor=minor), STREAMS[stream])
                counted.count("floods")
        child.tell()
        status, said = child.end()
    counted.count("aborts", status != 0)
    assert (status, said) == (0, "alive")
    assert counted.counts["floods"] == scaled(3, 100)


CONNECTOR = """
connection = rdmaconnect.connect(url, deadline_s=10, probe=False)
say("connected")
listen_for()
end = time.monotonic() + 10
while connection.lost is None and time.monotonic() < end:
    time.sleep(0.01)
say(type(connection.lost).__name__)
connection.close()
say(software.problems())
"""


@pytest.mark.parametrize("stream", STREAMS)
def test_frames_and_a_reset_do_not_end_a_connector_that_is_left_alone(counted: Campaign, stream: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(scaled(1, 20)):
            with Child(CONNECTOR, url=f"127.0.0.1:{server.getsockname()[1]}") as child:
                peer = Peer(server.accept()[0])
                peer.sock.settimeout(5)
                peer.shake(minor=1)
                peer.send(pack(reply(msgpack.unpackb(peer.recv()))))
                assert child.line() == "connected"
                flood(peer, STREAMS[stream])
                counted.count("floods")
                child.tell()
                status, said = child.end()
            counted.count("aborts", status < 0)
            kind, _, problems = said.partition("\n")
            counted.count(f"lost as {kind}")
            assert status == 0
            assert kind in ("PeerClosed", "RemoteProtocolError")
            assert problems == "[]"


def test_claimed_identities_do_not_end_a_listener(counted: Campaign) -> None:
    names = [b"\0" + struct.pack(">I", 1804289383 + i) for i in range(40)]  # as libzmq numbers anonymous peers
    names += [b"A", b"A", b"x" * 255, b"y" * 300, b"\0", b""]
    with Child(LISTENER, options={}) as child:
        port = int(child.line())
        for _ in range(scaled(1, 20)):
            kept = []
            for name in names + [b""] * 45:
                with contextlib.suppress(OSError):
                    kept.append(Peer.connect(port, identity=name))
                    counted.count("identities claimed", name != b"")
            for peer in kept:
                peer.close()
        child.tell()
        status, said = child.end()
    counted.count("aborts", status != 0)
    assert (status, said) == (0, "alive")
    assert counted.counts["identities claimed"] >= 40
