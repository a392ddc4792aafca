"""Whose a connection is: nobody takes over another's, ends it, or comes in without the right key."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgpack
import pytest
from software import Software

import rdmaconnect
from rdmaconnect.exchange.curve import keygen
from rdmaconnect.protocol.handshake import NO_ID

from . import hostile
from .campaign import Campaign, aside, scaled
from .hostile import pack
from .zmtp import Peer


def test_a_stranger_who_knows_the_id_takes_nothing_over(software: Software, counted: Campaign) -> None:
    # the id travels in every probe, in clear; the token never does
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        victim = Peer.connect(listener.port)
        hello = hostile.hello()
        victim.send(pack(hello))
        reply = msgpack.unpackb(victim.recv())
        victim.send(hostile.message("ready", hello["id"]))
        there = listener.accept(deadline_s=5)
        for _ in range(scaled(5, 200)):
            for prev in (hello["id"], os.urandom(16), bytes(16)):
                stranger = Peer.connect(listener.port)
                stranger.send(pack(hostile.hello(prev=prev)))
                counted.count("takeovers tried")
                stranger.recv()
                for kind, fields in (("bye", {"why": "so"}), ("ready", {}), ("proof", {}), ("beat", {})):
                    stranger.send(hostile.message(kind, hello["id"], **fields))
                stranger.close()
                counted.count("taken over", there.lost is not None)
        # waiting in reconnect, it takes nobody who does not know the token either
        waiting = aside(there.reconnect, deadline_s=2)
        strangers = []
        for prev in (hello["id"], os.urandom(16)):
            strangers.append(Peer.connect(listener.port))
            strangers[-1].send(pack(hostile.hello(prev=prev)))
            strangers[-1].recv()
        again = hostile.hello(prev=reply["token"])
        victim.close()
        victim = Peer.connect(listener.port)
        victim.send(pack(again))
        assert msgpack.unpackb(victim.recv())["t"] == "reply"
        victim.send(hostile.message("ready", again["id"]))
        counted.call("reconnect", waiting.result)
        there.close()
        for peer in (*strangers, victim):
            peer.close()
    assert counted.counts["taken over"] == 0
    assert counted.counts["takeovers tried"] == 3 * scaled(5, 200)
    assert counted.failures() == {}, counted.said


def test_a_stranger_resumes_nothing(software: Software, counted: Campaign, tmp_path: Path) -> None:
    # neither with the id, which is seen on the data path, nor with the token of another one, nor over another key
    known = tmp_path / "known"
    known.mkdir()
    keygen(tmp_path, "listener")
    for name in ("alice", "mallory"):
        keygen(known, name)
    listens = {"key": str(tmp_path / "listener.key_secret"), "peer_keys": str(known)}
    with rdmaconnect.listen("127.0.0.1:0", **listens) as listener, rdmaconnect.listen("127.0.0.1:0") as plain:
        accepted = aside(listener.accept, deadline_s=10)
        theirs = {"key": str(known / "alice.key_secret"), "peer_key": str(tmp_path / "listener.key")}
        alice = rdmaconnect.connect(listener.url, deadline_s=10, **theirs)
        there = accepted.result()
        ident, token = there._end.conversation.id, there._end.token
        accepted = aside(plain.accept, deadline_s=10)
        bob = rdmaconnect.connect(plain.url, deadline_s=10)
        other = accepted.result()
        for _ in range(scaled(3, 100)):
            for its_id, its_token in (
                (ident, token), (ident, os.urandom(16)), (ident, ident), (os.urandom(16), token),
                (other._end.conversation.id, os.urandom(16)), (ident, other._end.token), (NO_ID, NO_ID),
            ):  # fmt: skip
                stranger = Peer.connect(plain.port)
                stranger.send(hostile.message("resume", its_id, token=its_token))
                answer = msgpack.unpackb(stranger.recv())
                counted.count(f"{answer['t']} at {answer.get('stage')}: {answer.get('why')}")
                for kind, fields in (("bye", {"why": "so"}), ("beat", {})):
                    stranger.send(hostile.message(kind, its_id, **fields))
                stranger.close()
        for here, end in ((alice, there), (bob, other)):
            here.send(b"still")
            counted.count("still heard", end.recv(deadline_s=5) == b"still" and end.lost is None)
            here.close()
            end.close()
    tries = 7 * scaled(3, 100)
    assert dict(counted.counts) == {"reject at resume: it is not known here.": tries, "still heard": 2}


def test_another_authorised_key_takes_nothing_over(software: Software, counted: Campaign, tmp_path: Path) -> None:
    # the token too is bound to the key that it was given to
    known = tmp_path / "known"
    known.mkdir()
    keygen(tmp_path, "listener")
    for name in ("alice", "mallory"):
        keygen(known, name)

    def keys(name: str) -> dict[str, str]:
        return {"key": str(known / f"{name}.key_secret"), "peer_key": str(tmp_path / "listener.key")}

    listens = {"key": str(tmp_path / "listener.key_secret"), "peer_keys": str(known)}
    with rdmaconnect.listen("127.0.0.1:0", **listens) as listener:
        for _ in range(scaled(2, 50)):
            accepted = aside(listener.accept, deadline_s=10)
            alice = rdmaconnect.connect(listener.url, private_data=b"alice", deadline_s=10, **keys("alice"))
            there = accepted.result()
            accepted = aside(listener.accept, deadline_s=10)
            mallory = rdmaconnect.connect(listener.url, private_data=b"mallory", deadline_s=10, **keys("mallory"))
            other = accepted.result()
            mallory._end.known_as = alice._end.known_as
            counted.call("mallory with alice's token", mallory.reconnect, deadline_s=1)
            counted.count("alice lost", there.lost is not None or alice.lost is not None)
            alice.send(b"still")
            counted.count("alice heard", there.recv(deadline_s=5) == b"still" and there.private_data == b"alice")
            for end in (alice, there, mallory, other):
                end.close()
    assert counted.counts["alice lost"] == 0
    assert counted.counts["alice heard"] == scaled(2, 50)
    assert counted.counts["mallory with alice's token: ok"] == 0


@pytest.mark.parametrize("thief", ["plain", "another secret"])
def test_who_has_no_key_is_told_so_and_harms_nobody(software: Software, counted: Campaign, thief: str) -> None:
    wrong = {} if thief == "plain" else {"secret": "another secret of thirty-two char"}
    right = {"secret": "a secret of thirty-two characters"}
    with rdmaconnect.listen("127.0.0.1:0", **right) as listener:
        accepted: list[rdmaconnect.Connection] = []
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                try:
                    accepted.append(listener.accept(deadline_s=0.1))
                except rdmaconnect.ConnectTimeout:
                    continue

        accepting = aside(accept)
        for _ in range(scaled(3, 100)):
            counted.call("wrong", rdmaconnect.connect, listener.url, deadline_s=5, within_s=5, **wrong)
            made = counted.call("right", rdmaconnect.connect, listener.url, deadline_s=5, within_s=5, **right)
            made.close()
        over.set()
        accepting.result()
        for connection in accepted:
            connection.close()
    assert set(counted.failures()) == {"wrong: AuthenticationError"}, counted.said
    assert len(accepted) == scaled(3, 100)
