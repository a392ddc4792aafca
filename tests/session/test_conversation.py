"""What two ends say about a connection: what a message changes, beats, a peer that is gone, and the good-bye."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import ID, end
from vectors import VALUES

from rdmaconnect.abi import QpType
from rdmaconnect.errors import LocalProtocolError, PeerClosed, PeerRejected, RemoteProtocolError, StateError
from rdmaconnect.exchange.alive import TICK_S
from rdmaconnect.protocol.codec import decode, encode
from rdmaconnect.protocol.handshake import NO_ID, Handshake, Role, State
from rdmaconnect.protocol.messages import Beat, Bye, Hello, Joined, Message, Proof, Ready, Reject, Reply
from rdmaconnect.session.conversation import BEAT_MS, BEAT_TICKS, SILENT_S, Conversation

HELLO, REPLY = VALUES["hello"], VALUES["reply"]
assert isinstance(HELLO, Hello)
assert isinstance(REPLY, Reply)
#: ticks without a word after which a peer that beats is gone
PATIENCE = round(SILENT_S / TICK_S)


class Channel:
    """What carries the frames: it only notes them."""

    ended_in_order = True

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.closed = 0

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        assert message is not None
        self.said.append(message)

    def close(self) -> None:
        self.closed += 1


def listener(
    *messages: Message, qp_type: QpType = QpType.RC, beat_ms: int = BEAT_MS, state: State = State.JOINED
) -> tuple[Conversation, Channel]:
    """The listener's side, joined unless told otherwise, to which the peer has said more."""
    conversation, channel = Conversation(Handshake(Role.LISTENER)), Channel()
    conversation.attach(channel)  # type: ignore[arg-type]
    if state is not State.IDLE:
        conversation.hear(replace(HELLO, ends=(end(qp_type=qp_type),), beat_ms=beat_ms))
    if state in (State.ANSWERED, State.JOINED):
        conversation.say(REPLY)
    if state is State.JOINED:
        conversation.hear(Ready(ID))
    assert conversation.state is state
    channel.said.clear()
    for message in messages:
        conversation.took(encode(message))
    return conversation, channel


def connector(state: State = State.JOINED, beat_ms: int = BEAT_MS) -> tuple[Conversation, Channel]:
    """The connector's side."""
    conversation, channel = Conversation(Handshake(Role.CONNECTOR, ID)), Channel()
    conversation.attach(channel)  # type: ignore[arg-type]
    if state is not State.IDLE:
        conversation.say(HELLO)
    if state in (State.AGREED, State.JOINED):
        conversation.hear(replace(REPLY, beat_ms=beat_ms))
    if state is State.JOINED:
        conversation.say(Ready(ID))
    assert conversation.state is state
    channel.said.clear()
    return conversation, channel


# ---- what comes


def test_a_good_bye_is_told_and_ends_it() -> None:
    made, _ = listener(Proof(ID), Beat(ID), Bye(ID, "close"), Reject(ID, "late", 0, "late"))
    assert made.left == "the peer closed the connection (close)."
    assert made.error is None
    assert made.handshake.proved
    assert made.state is State.CLOSED
    error = made.failure("send 3 bytes")
    assert isinstance(error, PeerClosed)
    assert str(error) == "send 3 bytes: the peer closed the connection (close)."


def test_a_reject_ends_it_with_its_error() -> None:
    made, _ = listener(Reject(ID, "prove the data path", 5, "no probe came"))
    assert isinstance(made.error, PeerRejected)
    assert made.left == str(made.error) == "connect: the peer refused at prove the data path: no probe came"
    assert made.failure("anything") is made.error


def test_bytes_that_are_no_message_end_it() -> None:
    made, _ = listener()
    made.took(b"garbage")
    assert made.left is not None
    assert "not a message" in made.left
    assert isinstance(made.failure("send"), RemoteProtocolError)
    made.took(encode(Bye(ID, "close")))
    assert "not a message" in made.left, "the first reason stays"


def test_what_may_not_come_now_ends_it() -> None:
    made, _ = listener(REPLY)
    assert made.left == "listener: the peer sent a reply while joined."
    assert isinstance(made.error, RemoteProtocolError)


def test_what_belongs_to_another_conversation_is_dropped_and_wakes_nobody() -> None:
    made, channel = listener()
    made.on_change = lambda: pytest.fail("it changed")
    seen = made.changed.count
    for message in (Bye(b"o" * 16, "close"), Reject(b"o" * 16, "", 0, ""), Beat(b"o" * 16)):
        made.took(encode(message))
    made.took(encode(Bye(ID, "x")).replace(b"\xa3bye", b"\xa3new"))
    assert (made.left, made.error, channel.said, made.changed.count) == (None, None, [], seen)


def test_what_comes_wakes_those_who_wait_and_is_told_once() -> None:
    made, _ = listener()
    changes: list[State] = []
    made.on_change = lambda: changes.append(made.state)
    seen = made.changed.count
    made.took(encode(Proof(ID)))
    assert (made.changed.count, changes) == (seen + 1, [State.JOINED])
    made.took(encode(Bye(ID, "close")))
    assert (made.changed.count, changes) == (seen + 2, [State.JOINED, State.CLOSED])
    made.took(encode(Bye(ID, "close")))
    assert made.changed.count == seen + 2


def test_a_repeated_message_is_answered_the_same_way_again() -> None:
    made, channel = listener(state=State.ANSWERED)
    hello = made.handshake.peer
    assert hello is not None
    for _ in range(2):
        made.took(encode(hello))
    assert channel.said == [REPLY, REPLY]
    made, channel = connector()
    made.took(encode(replace(REPLY, beat_ms=BEAT_MS)))
    assert channel.said == [Ready(ID)]


def test_the_peers_stages_are_heard() -> None:
    made, _ = listener()
    made.took(encode(Proof(ID, (("port", 5), ("proof", 9)))))
    assert [mark.stage for mark in made.trace.marks() if mark.end == "peer"] == ["port", "proof"]


# ---- whether the peer is there


def test_every_five_seconds_it_says_that_it_is_there() -> None:
    for made, channel in (listener(), listener(state=State.ANSWERED), connector(), connector(State.AGREED)):
        for _ in range(3 * BEAT_TICKS):
            made.tick()
        assert channel.said == [Beat(ID)] * 3
        assert made.left is None


def test_who_was_stopped_makes_up_for_the_beats_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    made, channel = listener()
    monkeypatch.setattr("rdmaconnect.session.conversation.skipped", lambda: BEAT_TICKS)
    for _ in range(3):
        made.tick()
        made.hear(Beat(ID))
    assert channel.said == [Beat(ID)] * 3


def test_a_connector_says_nothing_before_it_has_a_reply() -> None:
    """A listener of an older version takes a beat before the ready for a fault."""
    for state in (State.IDLE, State.ASKED):
        made, channel = connector(state)
        for _ in range(10 * PATIENCE):
            made.tick()
        assert channel.said == []
        assert made.left is None, "that it waits long for a reply is the caller's deadline"


@pytest.mark.parametrize("made", [listener(beat_ms=0), connector(beat_ms=0)], ids=["listener", "connector"])
def test_of_a_peer_that_announced_no_beat_no_word_is_asked(made: tuple[Conversation, Channel]) -> None:
    conversation, channel = made
    for _ in range(10 * PATIENCE):
        conversation.tick()
    assert (channel.said, conversation.left) == ([], None)
    conversation.say_joined()
    assert channel.said == []


def test_a_peer_that_is_silent_for_long_is_gone() -> None:
    for made, _ in (listener(), listener(state=State.ANSWERED), connector(State.AGREED)):
        for _ in range(PATIENCE):
            made.tick()
        assert made.left is None
        seen = made.changed.count
        made.tick()
        assert made.left is not None
        assert made.left.startswith(f"the peer is gone: nothing was heard of it for {PATIENCE + 1} s: its process ")
        assert made.changed.count == seen + 1
        assert isinstance(made.failure("recv"), PeerClosed)
        made.tick()
        assert made.changed.count == seen + 1


@pytest.mark.parametrize("word", [Beat(ID), Proof(ID), Joined(ID)], ids=type)
def test_any_word_of_it_counts(word: Message) -> None:
    made, _ = connector()
    for _ in range(5):
        for _ in range(PATIENCE):
            made.tick()
        made.hear(word)
        assert made.left is None


def test_words_of_another_conversation_do_not_count() -> None:
    made, _ = listener()
    for _ in range(PATIENCE + 1):
        made.hear(Beat(b"o" * 16))
        made.tick()
    assert made.left is not None


def test_not_all_beat_at_the_same_time() -> None:
    all_of_them = [listener() for _ in range(BEAT_TICKS)]
    for _ in range(BEAT_TICKS):
        before = [len(channel.said) for _, channel in all_of_them]
        for made, _ in all_of_them:
            made.tick()
        assert sum(len(channel.said) for _, channel in all_of_them) == sum(before) + 1


def test_a_peer_that_beats_seldom_has_three_of_its_beats() -> None:
    made, _ = listener(beat_ms=10000)
    for _ in range(30):
        made.tick()
    assert made.left is None
    made.tick()
    assert made.left is not None
    made, _ = listener(beat_ms=100)
    for _ in range(PATIENCE):
        made.tick()
    assert made.left is None, "fifteen seconds at least"


def test_a_peer_that_beats_is_alive_until_it_is_gone() -> None:
    made, _ = listener()
    assert made.alive
    for _ in range(PATIENCE):
        made.tick()
    assert made.alive
    made.hear(Beat(ID))
    for _ in range(PATIENCE):
        made.tick()
    assert made.alive, "it was heard in between"
    made.tick()
    assert not made.alive
    made, _ = listener()
    made.hear(Bye(ID, "close"))
    assert not made.alive
    assert not listener(beat_ms=0)[0].alive


def test_after_the_end_nothing_is_said() -> None:
    made, channel = listener(Bye(ID, "close"))
    made.tick()
    assert channel.said == []
    with pytest.raises(PeerClosed, match=r"say proof: the peer closed the connection \(close\)\."):
        made.say(Proof(ID))


def test_joined_is_said_to_who_understands_it() -> None:
    made, channel = listener()
    made.say_joined()
    assert channel.said == [Joined(ID)]


# ---- the end


def test_the_channels_end_is_its_end() -> None:
    made, _ = listener()
    gone = PeerClosed("the peer at 10.0.0.1 is gone.")
    seen = made.changed.count
    made.over(gone)
    assert (made.left, made.error, made.changed.count) == (str(gone), gone, seen + 1)
    made.over(PeerClosed("another reason"))
    assert made.error is gone
    assert str(made.failure("recv")) == "recv: the peer at 10.0.0.1 is gone."


def test_the_last_of_those_made_together_says_good_bye() -> None:
    made, channel = listener()
    for _ in range(3):
        made.lend()
    for _ in range(2):
        made.close()
        assert (channel.said, channel.closed, made.left) == ([], 0, None)
    made.close()
    assert (channel.said, channel.closed) == ([Bye(ID, "close")], 1)
    assert made.state is State.CLOSED
    assert isinstance(made.failure("send"), StateError)


def test_the_good_bye_says_why_and_no_more_than_fits() -> None:
    made, channel = listener()
    made.lend()
    made.close("work completion RNR_RETRY_EXC_ERR " + "x" * 5000)
    (bye,) = channel.said
    assert isinstance(bye, Bye)
    assert bye.why.startswith("work completion RNR_RETRY_EXC_ERR")
    assert len(bye.why) == 2048


@pytest.mark.parametrize("how", ["bye", "gone", "given up", "not joined"])
def test_closing_is_silent_where_nobody_listens(how: str) -> None:
    made, channel = listener(
        *[Bye(ID, "close")] * (how == "bye"), state=State.ANSWERED if how == "not joined" else State.JOINED
    )
    made.lend()
    if how == "gone":
        made.over(PeerClosed("gone"))
    if how == "given up":
        made.give_up(Reject(ID, "stage", 0, "why"))
        assert made.left == "why"
    made.close()
    assert channel.closed == 1
    assert [type(message).__name__ for message in channel.said] == (["Reject"] if how == "given up" else [])


def test_what_is_given_up_is_told_once_and_wakes_those_who_wait() -> None:
    made, channel = listener(state=State.HEARD)
    seen = made.changed.count
    for why in ("first", "second"):
        made.give_up(made.reject_of(ValueError(why), "a stage"))
    assert channel.said == [Reject(ID, "a stage", 0, "first")]
    assert made.left == "first"
    assert made.changed.count > seen


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(110, "timed out"), Reject(ID, "heard", 110, "[Errno 110] timed out")),
        (KeyboardInterrupt(), Reject(ID, "heard", 0, "KeyboardInterrupt")),
        (StateError("words."), Reject(ID, "heard", 0, "words.")),
    ],
    ids=type,
)
def test_a_reject_says_where_it_failed_and_why(error: BaseException, expected: Reject) -> None:
    made, _ = listener(state=State.HEARD)
    assert made.reject_of(error) == expected
    assert made.reject_of(error, "another stage").stage == "another stage"
    port = HELLO.ends[0].port
    assert made.reject_of(error, ports=(port,)).ports == (port,)
    assert listener(state=State.IDLE)[0].reject_of(error).id == NO_ID


def test_what_may_not_be_sent_now_is_not_sent() -> None:
    made, channel = listener(state=State.HEARD)
    with pytest.raises(LocalProtocolError):
        made.say(Proof(ID))
    assert channel.said == []


@pytest.mark.parametrize(("qp_type", "repeats"), [(QpType.RC, False), (QpType.UC, True), (QpType.UD, True)])
def test_a_probe_that_came_again_is_known_by_its_id(qp_type: QpType, repeats: bool) -> None:
    made, _ = listener(qp_type=qp_type)
    assert made.is_probe(memoryview(ID + b"more")) is repeats
    for other in (b"", ID[:15], b"data" * 8):
        assert made.is_probe(memoryview(other)) is False


def test_threads_that_say_and_hear_at_once_agree_on_one_end() -> None:
    for _ in range(50):
        made, channel = listener()
        made.lend()
        barrier = threading.Barrier(3)
        jobs = (
            made.close,
            partial(made.took, encode(Bye(ID, "peer"))),
            partial(made.over, PeerClosed("gone")),
        )
        threads = [threading.Thread(target=lambda b=barrier, job=job: (b.wait(), job())) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = made.left
        assert first in ("this side was closed.", "the peer closed the connection (peer).", "gone")
        assert channel.closed == 1
        assert len(channel.said) <= 1
        if first != "this side was closed.":
            assert channel.said == [] or made.error is None or first == "gone"


# ---- messages of another generation

OLD = st.binary(min_size=16, max_size=16).filter(lambda id: id not in (ID, NO_ID))
LATE = st.lists(st.tuples(st.sampled_from([*VALUES.values()]), OLD), min_size=1, max_size=8)
EVERY_STATE = [
    *((listener, {"state": state}) for state in (State.HEARD, State.ANSWERED, State.JOINED)),
    *((connector, {"state": state}) for state in (State.IDLE, State.ASKED, State.AGREED, State.JOINED)),
]


@given(st.sampled_from(EVERY_STATE), LATE)
@settings(max_examples=200)
def test_no_message_of_an_older_id_changes_a_newer_conversation_at_any_state(make: object, late: object) -> None:
    start, options = make  # type: ignore[misc]
    made, channel = start(**options)
    made.on_change = lambda: pytest.fail("it changed")
    before = (dict(vars(made.handshake)), made.changed.count, made.left, made.error, made._ticks_silent, made._beats)
    for message, old in late:  # type: ignore[attr-defined]
        made.took(encode(replace(message, id=old)))
    assert channel.said == []
    assert before == (
        dict(vars(made.handshake)), made.changed.count, made.left, made.error, made._ticks_silent, made._beats,
    )  # fmt: skip
