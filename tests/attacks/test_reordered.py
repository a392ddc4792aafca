"""Old messages, of every earlier attempt and at every moment: the connection that is newer is left alone."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from software import Software

import rdmaconnect

from . import hostile
from .campaign import Campaign, aside, pair, scaled, until
from .zmtp import Peer

#: whose: of the connection that stood first, of an attempt that was given up, or of the generation before
OLDER = st.sampled_from(["first", "abandoned", "last"])
OLD = st.one_of(
    st.tuples(st.just("hello again"), OLDER),  # the very hello of an attempt
    st.tuples(st.just("hello anew"), OLDER),  # another attempt to take that one's place
    # one that was given up never had a reply, and so has said none of the others
    st.tuples(st.just("reject"), OLDER),
    st.tuples(st.sampled_from(["ready", "proof", "beat", "bye", "joined"]), st.sampled_from(["first", "last"])),
)
#: where they come: before the new hello, before its reply is read, before ready, after it
MOMENTS = st.tuples(*[st.lists(OLD, max_size=3) for _ in range(4)])


class Connector:
    """A connector by hand, that can say anything that it ever said once more.

    Attributes:
        ids, tokens: of each attempt, by whose it is.
    """

    def __init__(self, listener: rdmaconnect.Listener) -> None:
        self._port = listener.port
        self.hellos: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, bytes | None] = {}
        self._late: list[Peer] = []

    def ask(self, name: str, prev: bytes | None) -> Peer:
        """Say hello."""
        self.hellos[name] = hostile.hello(prev=prev, beat=60_000, patience=20_000)
        self.tokens[name] = None
        peer = Peer.connect(self._port)
        peer.send(hostile.pack(self.hellos[name]))
        return peer

    def hear(self, name: str, peer: Peer) -> None:
        """Take the reply."""
        reply = msgpack.unpackb(peer.recv())
        assert reply["t"] == "reply", reply
        self.tokens[name] = reply["token"]

    def go_on(self, name: str, peer: Peer) -> None:
        """Say ready."""
        peer.send(hostile.message("ready", self.hellos[name]["id"]))

    def say_late(self, what: str, whose: str) -> None:
        """An old message comes late, and with it the end of the attempt that it was said in."""
        hello = self.hellos.get(whose) or self.hellos["first"]
        with contextlib.suppress(OSError):
            peer = Peer.connect(self._port)
            self._late.append(peer)
            if what == "hello again":
                peer.send(hostile.pack(hello))
            elif what == "hello anew":
                peer.send(hostile.pack(hostile.hello(prev=self.tokens.get(whose) or self.tokens["first"])))
            else:
                fields = {"why": "old", "stage": "old", "errno": 0, "ports": [], "doors": []}
                peer.send(hostile.pack(hello), hostile.message(what, hello["id"], **fields))
            peer.close()


@pytest.mark.parametrize("claimed", ["first", "later"])
def test_old_messages_leave_the_newer_connection_alone(software: Software, counted: Campaign, claimed: str) -> None:
    @settings(max_examples=scaled(15, 1500), deadline=None, database=None)
    @given(st.lists(MOMENTS, min_size=1, max_size=3))
    def run(generations: list[Any]) -> None:
        with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
            connector = Connector(listener)
            peer = connector.ask("first", None)
            connector.hear("first", peer)
            connector.go_on("first", peer)
            there = listener.accept(deadline_s=10)
            connector.ask("abandoned", connector.tokens["first"]).close()
            name = "first"
            for number, moments in enumerate(generations):
                token = connector.tokens[name]
                peer.close()
                if claimed == "first":
                    again = aside(there.reconnect, deadline_s=15)
                for what, whose in moments[0]:
                    connector.say_late(what, whose)
                last, name = name, f"generation {number}"
                connector.hellos["last"], connector.tokens["last"] = connector.hellos[last], token
                peer = connector.ask(name, token)
                if claimed == "later":
                    again = aside(there.reconnect, deadline_s=15)
                for what, whose in moments[1]:
                    connector.say_late(what, whose)
                connector.hear(name, peer)
                for what, whose in moments[2]:
                    connector.say_late(what, whose)
                connector.go_on(name, peer)
                for what, whose in moments[3]:
                    connector.say_late(what, whose)
                again.result()
                assert connector.tokens[name] != token
                counted.count("old messages", sum(map(len, moments)))
            # whatever is under way still has come to its end
            until(lambda: len(listener._incoming) == 0, 0.3)
            assert there.lost is None
            counted.count("newer connections left alone")
            peer.send(hostile.message("bye", connector.hellos[name]["id"], why="the end"))
            with pytest.raises(rdmaconnect.PeerClosed, match="the end"):
                there.recv(deadline_s=5)
            there.close()
            peer.close()
            with contextlib.suppress(rdmaconnect.ConnectTimeout):
                while True:
                    listener.accept(deadline_s=0).close()

    run()
    assert counted.counts["old messages"] > 20


def test_an_old_hello_in_the_midst_of_the_proof_of_a_newer_one(software: Software, counted: Campaign) -> None:
    for _ in range(scaled(3, 50)):
        with rdmaconnect.listen("127.0.0.1:0") as listener:
            here, there = pair(listener)
            token = there._end.token
            assert token == here._end.known_as
            with software.network.lose(lambda message: True) as lost:
                again = [aside(end.reconnect, deadline_s=10) for end in (here, there)]
                end = time.monotonic() + 5
                while there._end.token == token or not lost.seen:
                    assert time.monotonic() < end
                    time.sleep(0.005)
                late = Peer.connect(listener.port)
                late.send(hostile.pack(hostile.hello(prev=token)))
                time.sleep(0.1)
                late.close()
            for one in again:
                counted.call("reconnect", one.result)
            here.send(b"anew")
            counted.count("heard", there.recv(deadline_s=5) == b"anew")
            here.close()
            there.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["heard"] == scaled(3, 50)


def test_a_token_is_of_one_generation(software: Software, counted: Campaign) -> None:
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        connector = Connector(listener)
        peer = connector.ask("first", None)
        connector.hear("first", peer)
        connector.go_on("first", peer)
        there = listener.accept(deadline_s=10)
        tokens = [connector.tokens["first"]]
        for number in range(scaled(3, 50)):
            again = aside(there.reconnect, deadline_s=10)
            peer.close()
            peer = connector.ask(str(number), tokens[-1])
            connector.hear(str(number), peer)
            connector.go_on(str(number), peer)
            again.result()
            tokens.append(connector.tokens[str(number)])
            for token in (*tokens[:-1], os.urandom(16)):
                late = Peer.connect(listener.port)
                late.send(hostile.pack(hostile.hello(prev=token)))
                late.recv()
                late.close()
                counted.count("old tokens tried")
            time.sleep(0.02)
            counted.count("lost", there.lost is not None)
        there.close()
        peer.close()
    assert len(set(tokens)) == len(tokens)
    assert counted.counts["lost"] == 0
