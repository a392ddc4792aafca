"""Peers of the first release: a ROUTER that listens and a DEALER that connects, and messages without the newer keys."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgpack
import pytest
import zmq
from software import Software

import rdmaconnect

from . import hostile
from .campaign import Campaign, aside, scaled
from .hostile import message, pack

#: what the first release does not know
NEWER = {"beat", "patience", "token", "again"}


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def heartbeats(sock: zmq.Socket[bytes]) -> None:
    """The options of the first release's sockets."""
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.HEARTBEAT_IVL, 2000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 8000)
    sock.set(zmq.HEARTBEAT_TTL, 8000)
    sock.set(zmq.RCVTIMEO, 10000)


def test_an_older_connector_connects(
    software: Software, counted: Campaign, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        for _ in range(scaled(5, 200)):
            sock = context.socket(zmq.DEALER)
            heartbeats(sock)
            sock.connect(f"tcp://127.0.0.1:{listener.port}")
            accepted = aside(listener.accept, deadline_s=10)
            hello = hostile.hello()
            sock.send(pack(hello))
            reply = msgpack.unpackb(sock.recv())
            counted.count("replies", (reply["t"], reply["id"]) == ("reply", hello["id"]))
            sock.send(message("ready", hello["id"]))
            connection = accepted.result()
            sock.send(message("beat", hello["id"]))
            # it says no beat of its own, and is not missed: nor is it sent any, or joined, which it does not know
            assert connection._end.conversation.left is None
            again = hostile.hello(prev=hello["id"])
            sock.send(message("bye", hello["id"], why="close"))
            with pytest.raises(rdmaconnect.PeerClosed):
                connection.recv(deadline_s=5)
            counted.count("good-byes heard")
            connection.close()
            said = []
            while sock.poll(50):
                said.append(msgpack.unpackb(sock.recv())["t"])
            counted.count("other messages", len([kind for kind in said if kind != "bye"]))
            # its id as prev names a connection that is none any more: it is a new one
            sock.close()
            sock = context.socket(zmq.DEALER)
            heartbeats(sock)
            sock.connect(f"tcp://127.0.0.1:{listener.port}")
            accepted = aside(listener.accept, deadline_s=10)
            sock.send(pack(again))
            assert msgpack.unpackb(sock.recv())["t"] == "reply"
            sock.send(message("ready", again["id"]))
            accepted.result().close()
            counted.count("connected anew")
            sock.close()
    number = scaled(5, 200)
    assert counted.counts == {
        "replies": number, "good-byes heard": number, "connected anew": number, "other messages": 0,
    }  # fmt: skip


def test_an_older_connector_is_not_missed_though_it_never_beats(
    software: Software, counted: Campaign, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmaconnect.exchange.alive.TICK_S", 0.02)
    with rdmaconnect.listen("127.0.0.1:0", probe=False) as listener:
        sock = context.socket(zmq.DEALER)
        heartbeats(sock)
        sock.connect(f"tcp://127.0.0.1:{listener.port}")
        accepted = aside(listener.accept, deadline_s=10)
        hello = hostile.hello()
        sock.send(pack(hello))
        sock.recv()
        sock.send(message("ready", hello["id"]))
        with accepted.result() as connection:
            time.sleep(1.0)
            counted.count("is there", connection.lost is None)
            counted.count("messages to it", sock.poll(0))
        sock.close()
    assert counted.counts == {"is there": 1, "messages to it": 0}


@pytest.mark.parametrize("reads", ["at once", "after 2 s"])
def test_an_older_listener_takes_a_connector(
    software: Software, counted: Campaign, context: zmq.Context[zmq.Socket[bytes]], reads: str
) -> None:
    router = context.socket(zmq.ROUTER)
    heartbeats(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    for _ in range(scaled(5, 200) if reads == "at once" else 1):
        connecting = aside(
            counted.call, "connect", rdmaconnect.connect, f"127.0.0.1:{port}", probe=False, deadline_s=10, within_s=10
        )
        if reads != "at once":
            time.sleep(2)
        who, frame = router.recv_multipart()
        asked = msgpack.unpackb(frame)
        # what is newer is in keys that it does not read
        assert asked["t"] == "hello"
        older = {key: value for key, value in asked.items() if key not in NEWER}
        assert set(older) == set(hostile.hello())
        router.send_multipart([who, pack(hostile.reply(older))])
        who_says, frame = router.recv_multipart()
        ready = msgpack.unpackb(frame)
        counted.count("ready", (who_says, ready["t"], ready["id"]) == (who, "ready", asked["id"]))
        connection = connecting.result()
        router.send_multipart([who, message("beat", asked["id"])])
        time.sleep(0.05)
        assert connection.lost is None
        # to one that announces no beats none are sent
        assert not router.poll(0)
        # it is known by its id, as the first release knew it
        again = aside(connection.reconnect, deadline_s=10)
        kinds = []
        while not kinds or kinds[-1] != "hello":
            who, frame = router.recv_multipart()
            body = msgpack.unpackb(frame)
            kinds.append(body["t"])
        counted.count("asked anew by its id", body["prev"] == asked["id"])
        router.send_multipart([who, pack(hostile.reply(body))])
        assert msgpack.unpackb(router.recv_multipart()[1])["t"] == "ready"
        again.result()
        router.send_multipart([who, message("bye", body["id"], why="close")])
        with pytest.raises(rdmaconnect.PeerClosed):
            connection.recv(deadline_s=5)
        connection.close()
        while router.poll(20):
            router.recv_multipart()
    router.close()
    assert counted.failures() == {}, counted.said


def test_a_version_that_is_not_spoken_is_named(
    software: Software, counted: Campaign, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        sock = context.socket(zmq.DEALER)
        heartbeats(sock)
        sock.connect(f"tcp://127.0.0.1:{listener.port}")
        sock.send(pack(hostile.hello() | {"v": 2}))
        told = msgpack.unpackb(sock.recv())
        counted.count("told", told["t"] == "reject" and "version 2" in told["why"] and told["id"] == bytes(16))
        sock.close()
    router = context.socket(zmq.ROUTER)
    heartbeats(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connecting = aside(rdmaconnect.connect, f"127.0.0.1:{port}", deadline_s=5)
    who, frame = router.recv_multipart()
    router.send_multipart([who, pack(hostile.reply(msgpack.unpackb(frame)) | {"v": 2})])
    error = connecting.exception()
    counted.count("raised", isinstance(error, rdmaconnect.RemoteProtocolError) and "version 2" in str(error))
    router.close()
    assert counted.counts == {"told": 1, "raised": 1}
