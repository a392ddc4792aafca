"""The conversation of a connection that stands: good-bye, heartbeat, and a peer that is gone."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from rdmaconnect.talk import Wire
from samples import ID, end
from vectors import VALUES

from rdmaconnect import talk
from rdmaconnect.abi import QpType
from rdmaconnect.errors import PeerClosed, PeerRejected
from rdmaconnect.handshake import Handshake, Role, State
from rdmaconnect.messages import Beat, Bye, Hello, Message, Proof, Ready, Reject
from rdmaconnect.wire import decode, encode


class Link:
    """A channel to a peer that has said what is in the inbox."""

    def __init__(self, *messages: Message) -> None:
        self.inbox = deque(map(encode, messages))
        self.said: list[Message] = []
        self.gone = False
        self.closed = 0

    def filenos(self) -> list[int]:
        return [7, 8]

    def send(self, frame: bytes) -> None:
        if self.gone:
            raise PeerClosed("send: it closed its side.")
        self.said.append(decode(frame))

    def recv(self) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.closed += 1


def wire(*messages: Message, qp_type: QpType = QpType.RC) -> tuple[Wire, Link]:
    """The listener's side, joined."""
    hello = VALUES["hello"]
    assert isinstance(hello, Hello)
    made = Handshake(Role.LISTENER)
    made.receive(replace(hello, ends=(end(qp_type=qp_type),)))
    made.send(VALUES["reply"])
    made.receive(Ready(ID))
    link = Link(*messages)
    return Wire(link, made), link


class Clock:
    """Stands in for the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(talk, "time", made)
    return made


def test_a_good_bye_is_told_and_ends_it() -> None:
    made, link = wire(Proof(ID), Beat(ID), Bye(ID, "close"), Beat(ID))
    made.look()
    assert made.left == "the peer closed the connection (close)."
    assert made.error is None
    assert made.handshake.proved
    assert len(link.inbox) == 1
    made.look()
    assert len(link.inbox) == 1


def test_a_reject_and_garbage_end_it_with_their_error() -> None:
    made, _ = wire(Reject(ID, "prove the data path", 5, "no probe came"))
    made.look()
    assert isinstance(made.error, PeerRejected)
    assert made.left == str(made.error) == "connect: the peer refused at prove the data path: no probe came"
    made, link = wire()
    link.inbox.append(b"garbage")
    made.look()
    assert made.left is not None
    assert "not a message" in made.left


def test_what_belongs_to_another_conversation_is_dropped() -> None:
    made, link = wire(Bye(b"o" * 16, "close"), Ready(ID), Beat(ID))
    made.look()
    assert (made.left, made.error, list(link.inbox)) == (None, None, [])


def test_a_beat_is_said_now_and_then_and_shows_a_peer_that_is_gone(clock: Clock) -> None:
    made, link = wire()
    for clock.now in (100.5, 100.9, 101.0, 101.5, 102.0):
        made.look()
    assert link.said == [Beat(ID)] * 2
    link.gone = True
    clock.now = 102.9
    made.look()
    assert made.left is None
    clock.now = 103.0
    made.look()
    assert made.left == "send: it closed its side."
    assert isinstance(made.error, PeerClosed)


def test_before_it_stands_nothing_is_read() -> None:
    made = Wire(Link(Bye(ID, "close")), Handshake(Role.CONNECTOR, ID))
    made.look()
    assert made.left is None


def test_the_last_of_those_made_together_says_good_bye() -> None:
    made, link = wire()
    for _ in range(3):
        made.lend()
    for _ in range(2):
        made.close()
        assert (link.said, link.closed) == ([], 0)
    made.close()
    assert (link.said, link.closed) == ([Bye(ID, "close")], 1)
    assert made.handshake.state is State.CLOSED


def test_the_good_bye_says_why() -> None:
    made, link = wire()
    made.lend()
    made.close("work completion RNR_RETRY_EXC_ERR")
    assert link.said == [Bye(ID, "work completion RNR_RETRY_EXC_ERR")]


@pytest.mark.parametrize("how", ["bye", "gone", "given up"])
def test_closing_is_silent_where_nobody_listens(how: str) -> None:
    made, link = wire(*[Bye(ID, "close")] * (how == "bye"))
    made.lend()
    link.gone = how == "gone"
    if how == "given up":
        made.give_up(Reject(ID, "stage", 0, "why"))
        assert made.left == "why"
    made.look()
    made.close()
    assert link.closed == 1
    assert [type(message).__name__ for message in link.said] == (["Reject"] if how == "given up" else [])


@pytest.mark.parametrize(("qp_type", "repeats"), [(QpType.RC, False), (QpType.UC, True), (QpType.UD, True)])
def test_a_probe_that_came_again_is_known_by_its_id(qp_type: QpType, repeats: bool) -> None:
    made, _ = wire(qp_type=qp_type)
    assert made.is_probe(memoryview(ID + b"more")) is repeats
    for other in (b"", ID[:15], b"data" * 8):
        assert made.is_probe(memoryview(other)) is False


def test_its_descriptors_are_those_of_the_link() -> None:
    made: Any
    made, _ = wire()
    assert made.filenos() == {7, 8}
    assert made.id == ID
