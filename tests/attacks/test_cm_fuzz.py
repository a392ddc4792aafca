"""Private data by rdma_cm that is almost right, or nothing at all: only errors of the library's own come out."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from itertools import islice

from software import RdmaCm, Software

import rdmaconnect
from rdmaconnect.abi.rdma_cma import CmEventType
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.protocol.cm_message import CmMessage, refusal

from .campaign import SCALE, Campaign, aside, pair, scaled, until
from .mutations import bytewise
from .puppets import Puppet, param

E = CmEventType
URL, PORT = "rdma://127.0.0.1:7174", 7174
SEED = int(os.environ.get("RDMACONNECT_CAMPAIGN_SEED", SCALE))
#: what every message of this library's begins with
OURS = refusal("")[:6]
PEERS = 4
OF_EVERY_LENGTH = 3 * 256
#: besides those
REQUESTS, ANSWERS = scaled(200, 60_000), scaled(100, 30_000)


def sound(chance: random.Random) -> bytes:
    """What one of this library says."""
    region = RemoteRegion(chance.getrandbits(64), 4096, 5)
    regions = dict.fromkeys(chance.choice(("", "a", "bc")), region)
    return CmMessage(chance.randrange(1, 2**31), chance.randbytes(chance.randrange(9)), regions).to_bytes(255)


def private_data(chance: random.Random) -> Iterator[bytes]:
    """Of every length: random, zeros, what begins as one of ours; then sound ones with a few things changed."""
    for length in range(256):
        yield chance.randbytes(length)
        yield bytes(length)
        yield (OURS + chance.randbytes(255))[:length]
    while True:
        how = chance.randrange(6)
        if how == 0:
            yield sound(chance)
        elif how == 1:
            yield refusal("\0\x1b[31m" * chance.randrange(40), again=chance.random() < 0.5)
        elif how == 2:
            yield sound(chance)[: chance.randrange(60)]
        else:
            yield bytewise(chance, refusal("no") if how == 3 else sound(chance))[:255]


def take(counted: Campaign, listener: rdmaconnect.Listener, over: threading.Event) -> None:
    """Accept whoever comes, by turns tolerant and not."""
    turn = 0
    while not over.is_set():
        turn += 1
        try:
            connection = listener.accept(deadline_s=0.2, tolerant=turn % 2 == 0)
        except rdmaconnect.RdmaConnectError as e:
            counted.count(f"accept: {type(e).__name__}")
        except BaseException as e:  # noqa: BLE001  that is what is counted
            counted.raised("accept", e)
        else:
            counted.count("accepted")
            look_at(counted, connection)


def look_at(counted: Campaign, connection: rdmaconnect.Connection) -> None:
    """Everything that a peer could have had a say in."""
    with connection:
        repr((connection, connection.trace, connection.path.why, connection.lost, connection.remote))
        with contextlib.suppress(rdmaconnect.RdmaConnectError, ValueError):
            connection.post_send(b"x")
        for region in connection.remote.values():
            try:
                connection.post_write(b"x", region)
            except (rdmaconnect.RdmaConnectError, ValueError):
                counted.count("regions that take nothing")


def test_private_data_of_requests(software: Software, cm: RdmaCm, counted: Campaign) -> None:
    over = threading.Event()
    with rdmaconnect.listen(URL, regions={"m": bytearray(8)}, private_data=b"x") as listener:

        def ask(seed: int) -> None:
            chance = random.Random(seed)
            for data in islice(private_data(chance), seed % PEERS, OF_EVERY_LENGTH + REQUESTS, PEERS):
                cm.padded = chance.random() < 0.5  # the others' too: which one has it does not matter
                with Puppet(cm) as puppet:
                    puppet.ask(PORT, param(data, chance.getrandbits(24), chance.randrange(256)))
                    counted.count("requests")
                    if chance.random() < 0.1:  # it goes at once
                        continue
                    answer = puppet.take(5)
                    if answer is None:
                        counted.count("requests without an answer")
                    elif answer.kind is E.CONNECT_RESPONSE:
                        counted.count("answers")
                        how = chance.randrange(8)
                        if how == 0:
                            puppet.do("rdma_disconnect")
                        elif how == 1:
                            puppet.do("rdma_reject", None, 0)
                        elif how > 2:
                            puppet.do("rdma_establish")
                    else:
                        counted.count(f"{answer.kind}: {answer.status}")

        accepting = [aside(take, counted, listener, over) for _ in range(2)]
        for asking in [aside(ask, PEERS * SEED + i) for i in range(PEERS)]:
            asking.result()
        over.set()
        for one in accepting:
            one.result()
        for end in pair(listener):
            end.close()
    assert counted.counts["accepted"] > 0
    assert counted.counts["requests without an answer"] == 0


def test_private_data_of_answers_and_refusals(software: Software, cm: RdmaCm, counted: Campaign) -> None:
    over = threading.Event()

    def listen(port: int) -> None:
        chance = random.Random(PEERS * SEED + port)
        said = islice(private_data(chance), port % PEERS, None, PEERS)
        with Puppet(cm, port) as puppet:
            while not over.is_set():
                event = puppet.take(0.2)
                if event is None or event.request is None:
                    continue
                how, data = chance.randrange(20), next(said)
                cm.padded = chance.random() < 0.5
                counted.count("requests")
                if how < 8:
                    status = chance.choice((*[28] * 9, 8, 10, 0, -111, chance.randrange(-200, 200)))
                    puppet.refuse(event.request, status, data)
                elif how < 19:
                    puppet.answer(event.request, param(data, chance.getrandbits(24), chance.randrange(256)))
                    if how < 12:
                        puppet.leave(event.request)

    def connect(port: int) -> None:
        for _ in range((OF_EVERY_LENGTH + ANSWERS) // PEERS):
            made = counted.call(
                "connect", rdmaconnect.connect, f"rdma://127.0.0.1:{port}", deadline_s=0.1, within_s=1.0
            )
            if made is not None:
                look_at(counted, made)

    listening = [aside(listen, PORT + i) for i in range(PEERS)]
    assert until(lambda: len(cm.ids) == PEERS)
    for connecting in [aside(connect, PORT + i) for i in range(PEERS)]:
        connecting.result()
    over.set()
    for one in listening:
        one.result()
    assert counted.counts["connect: ok"] > 0
    allowed = {"ConnectTimeout", "PeerRejected", "RemoteProtocolError", "PeerClosed"}
    assert {what.removeprefix("connect: ") for what in counted.failures()} <= allowed, counted.said
