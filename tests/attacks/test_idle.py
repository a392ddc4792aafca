"""Peers that are left alone, for as long as it takes: time runs faster here."""

from __future__ import annotations

import contextlib
import os
import time

import msgpack
import pytest
from software import Software

import rdmaconnect
from rdmaconnect.exchange import alive, budget
from rdmaconnect.session import conversation, incoming

from . import hostile
from .campaign import Campaign, aside, pair, scaled, status, until
from .zmtp import Peer


@pytest.mark.parametrize("options", [{}, {"secret": "a secret of thirty-two characters"}], ids=["plain", "protected"])
def test_idle_peers_each_left_alone_in_turn(
    software: Software, counted: Campaign, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    # as many beats as an hour and more has: what nobody reads must not pile up, on either side
    tick_s = 0.005
    with rdmaconnect.listen("127.0.0.1:0", probe=False, **options) as listener:
        here, there = pair(listener, **options)
        monkeypatch.setattr(alive, "TICK_S", tick_s)
        monkeypatch.setattr(conversation, "BEAT_TICKS", 1)
        monkeypatch.setattr(budget, "EARNED", budget.EARNED / tick_s)
        for end in (here, there):  # 10 ticks are 20 ms here: a busy machine is silent for longer
            monkeypatch.setattr(end._end.conversation, "_silent_max", 5 / tick_s)
        seen = {"here": 0, "there": 0}

        def count(name: str, end: rdmaconnect.Connection) -> None:
            talk = end._end.conversation
            took_beat = talk.took_beat

            def counting(frame: bytes) -> bool:
                seen[name] += 1
                return took_beat(frame)

            monkeypatch.setattr(talk, "took_beat", counting)

        count("here", here)
        count("there", there)
        before = status("VmRSS")
        few, many = scaled(200, 5000), scaled(200 if options else 1200, 5000)
        for waits, name, beats in ((None, "nobody", many), (here, "here", few), (there, "there", few)):
            target = {side: number + beats for side, number in seen.items()}
            waiting = aside(waits.recv, deadline_s=600) if waits is not None else None
            end_by = time.monotonic() + 300
            while any(seen[side] < target[side] for side in seen):
                assert here.lost is None
                assert there.lost is None
                assert time.monotonic() < end_by
                time.sleep(0.01)
            counted.count(f"beats while {name} waited", beats)
            counted.count("lost", (here.lost is not None) + (there.lost is not None))
            if waiting is not None:
                (there if waits is here else here).send(b"still here")
                counted.count("heard", waiting.result() == b"still here")
        counted.note(f"{status('VmRSS') - before} KiB more than before")
        assert status("VmRSS") - before < 8 * 1024
        monkeypatch.undo()
        here.close()
        there.close()
    assert counted.counts["lost"] == 0
    assert counted.counts["heard"] == 2


def test_a_peer_that_is_silent_is_gone_and_one_that_beats_is_not(
    software: Software, counted: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "TICK_S", 0.05)
    monkeypatch.setattr(budget, "EARNED", budget.EARNED / 0.05)
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        peers, tokens = [], []
        for _ in range(2):
            peer = Peer.connect(listener.port)
            hello = hostile.hello(beat=1000, patience=60_000)
            peer.send(hostile.pack(hello))
            reply = msgpack.unpackb(peer.recv())
            assert reply["beat"] == conversation.BEAT_MS
            tokens.append(reply["token"])
            peer.send(hostile.message("ready", hello["id"]))
            peers.append((peer, hello["id"], listener.accept(deadline_s=5)))
        (beating, ident, stands), (silent, other, lost) = peers
        for _ in range(40):
            beating.send(hostile.message("beat", ident))
            time.sleep(0.05)
        counted.count("the one that beats is there", stands.lost is None)
        gone = until(lambda: isinstance(lost.lost, rdmaconnect.PeerClosed))
        counted.count("the silent one is gone", gone)
        with contextlib.suppress(OSError):  # it is hung up on, so that one that was only stopped dials again
            while True:
                silent.recv()
        silent.close()
        silent = Peer.connect(listener.port)
        silent.send(hostile.message("resume", other, token=tokens[1]))
        last = msgpack.unpackb(silent.recv())
        counted.count("and is told", (last["t"], last["id"]) == ("reject", other) and "not known" in last["why"])
        for peer in (beating, silent):
            peer.close()
        for connection in (stands, lost):
            connection.close()
    assert set(counted.counts.values()) == {1}


def test_a_connector_that_is_slow_but_says_that_it_is_there_is_waited_for(
    software: Software, counted: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    # half an hour of its own RTR is no reason to give it up; to be silent is
    monkeypatch.setattr(alive, "TICK_S", 0.05)
    monkeypatch.setattr(budget, "EARNED", budget.EARNED / 0.05)
    monkeypatch.setattr(incoming, "HALF_OPEN_S", 0.5)
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        accepted = aside(listener.accept, deadline_s=20)
        slow, silent = Peer.connect(listener.port), Peer.connect(listener.port)
        ident, other = os.urandom(16), os.urandom(16)
        for peer, name in ((slow, ident), (silent, other)):
            peer.send(hostile.pack(hostile.hello(name, beat=1000, patience=60_000)))
            assert msgpack.unpackb(peer.recv())["t"] == "reply"
        for _ in range(40):
            slow.send(hostile.message("beat", ident))
            time.sleep(0.05)
        slow.send(hostile.message("ready", ident))
        connection = accepted.result()
        counted.count("the slow one is accepted", connection.lost is None)
        refusal = next(m for m in iter(lambda: msgpack.unpackb(silent.recv()), None) if m["t"] == "reject")
        counted.count("the silent one is told", refusal["id"] == other)
        counted.note(refusal["why"])
        connection.close()
        slow.close()
        silent.close()
    assert set(counted.counts.values()) == {1}


def test_a_connector_in_the_queue_of_a_reconnect_is_waited_for(
    software: Software, counted: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it has said hello and says no more before the reply: that its TCP stands is enough
    monkeypatch.setattr(alive, "TICK_S", 0.05)
    monkeypatch.setattr(budget, "EARNED", budget.EARNED / 0.05)
    monkeypatch.setattr(incoming, "HALF_OPEN_S", 0.5)
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        here, there = pair(listener)
        again = aside(here.reconnect, deadline_s=20)
        time.sleep(2)
        counted.call("reconnect there", there.reconnect, deadline_s=10)
        counted.call("reconnect here", again.result)
        here.send(b"again")
        counted.count("heard", there.recv(deadline_s=5) == b"again")
        here.close()
        there.close()
    assert counted.failures() == {}, counted.said
    assert counted.counts["heard"] == 1


def test_nothing_costs_processor_time_while_nothing_happens(software: Software, counted: Campaign) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        ends = [end for _ in range(scaled(5, 50)) for end in pair(listener)]
        accepted = aside(listener.accept, deadline_s=30)
        waiting = aside(ends[0].recv, deadline_s=30)
        time.sleep(0.5)
        before, began = time.process_time(), time.monotonic()
        time.sleep(scaled(2, 20))
        share = (time.process_time() - before) / (time.monotonic() - began)
        counted.note(f"{share * 100:.1f} % of a processor with {len(ends)} ends")
        ends[1].send(b"end")
        waiting.result()
        for end in ends:
            end.close()
    assert isinstance(accepted.exception(), rdmaconnect.StateError)
    # a beat of each end every 5 s, some 0.1 ms each on a slow machine, and a look of each waiter every 50 ms
    assert share < 0.02 + 0.0005 * len(ends)
