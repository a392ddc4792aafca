"""What a frame costs to read, whatever is in it: no more than a little of the time that it took to send."""

from __future__ import annotations

import random
import time

import pytest

from rdmaconnect.errors import RemoteProtocolError
from rdmaconnect.protocol.codec import MAX_FRAME, MAX_PORTS, MAX_QPS, MAX_REGIONS, decode
from rdmaconnect.protocol.messages import Hello, Reply

from . import hostile
from .campaign import Campaign
from .hostile import pack

BEAT = hostile.message("beat", bytes(16))


def padded(value: bytes) -> bytes:
    """A sound message with one key more."""
    return bytes([BEAT[0] + 1]) + BEAT[1:] + b"\xa1z" + value


COSTLY = {
    "empty lists": padded(b"\xdd" + (520_000).to_bytes(4, "big") + b"\x90" * 520_000),
    "empty maps": padded(b"\xdd" + (520_000).to_bytes(4, "big") + b"\x80" * 520_000),
    "lists of one": padded(b"\xdd" + (260_000).to_bytes(4, "big") + b"\x91\xc0" * 260_000),
    "lists of lists": padded(b"\xdc\x01\x00" + (b"\xdc\x08\x00" + b"\x90" * 2048) * 250),
    "numbers": padded(b"\xdd" + (520_000).to_bytes(4, "big") + b"\x01" * 520_000),
    "names": padded(b"\xdf" + (70_000).to_bytes(4, "big") + b"".join(b"\xa5%05x\xc0" % i for i in range(70_000))),
    "a text": hostile.message("bye", bytes(16), why="\x07" * 2048),
    "nested": padded(b"\x91" * 500_000),
    "claims": padded(b"\xdd\xff\xff\xff\xff" + b"\x90" * 500_000),
}


@pytest.mark.parametrize("name", COSTLY)
def test_no_frame_takes_long_to_read(counted: Campaign, name: str) -> None:
    took = []
    for _ in range(5):
        began = time.thread_time()
        try:
            decode(COSTLY[name])
            counted.count("read")
        except RemoteProtocolError:
            counted.count("refused")
        took.append(time.thread_time() - began)
    counted.note(f"{min(took) * 1000:.1f} ms for {len(COSTLY[name])} bytes")
    assert min(took) < 0.2  # of its own processor time, on a machine that others slow down


def test_the_longest_that_honest_peers_send_are_read() -> None:
    chance = random.Random(1)
    port = hostile.port()
    port["gids"] = [[chance.randbytes(16), 2, i, "enp1s0f0np0"] for i in range(256)]
    hello = hostile.hello() | {"port": port, "data": chance.randbytes(4096)}
    hello["qps"] = [
        [chance.randrange(1, 2**24), chance.getrandbits(24), chance.getrandbits(32)] for _ in range(MAX_QPS)
    ]
    hello["mem"] = {
        f"{'漢' * 250}{i}": [chance.getrandbits(64), chance.getrandbits(48), chance.getrandbits(32)]
        for i in range(MAX_REGIONS)
    }
    reply = hostile.reply(hello)
    reply |= {"port": port, "ports": [port | {"num": i + 1} for i in range(MAX_PORTS)], "mem": hello["mem"]}
    assert len(pack(reply)) < MAX_FRAME
    assert isinstance(decode(pack(hello)), Hello)
    assert isinstance(decode(pack(reply)), Reply)
