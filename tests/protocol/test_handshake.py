"""The conversation: two machines face to face, and each alone against what must not come."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import ID, end
from vectors import VALUES

from rdmaconnect.abi import QpType
from rdmaconnect.errors import LocalProtocolError, PeerRejected, RemoteProtocolError
from rdmaconnect.protocol.codec import decode, encode
from rdmaconnect.protocol.handshake import NO_ID, RECEIVES, SENDS, Handshake, Outcome, Role, State
from rdmaconnect.protocol.messages import Answer, Beat, Hello, Joined, Message, Proof, Question, Ready, Reject, Reply

HELLO, REPLY, READY, JOINED, PROOF, BEAT, REJECT, BYE, QUESTION, ANSWER = (
    VALUES[name]
    for name in ("hello", "reply", "ready", "joined", "proof", "beat", "reject", "bye", "question", "answer")
)
assert isinstance(HELLO, Hello)
assert isinstance(REPLY, Reply)
assert isinstance(REJECT, Reject)
MESSAGES: dict[str, Message] = {
    "hello": HELLO, "reply": REPLY, "ready": READY, "joined": JOINED, "proof": PROOF, "beat": BEAT, "reject": REJECT,
    "bye": BYE, "question": QUESTION, "answer": ANSWER,
}  # fmt: skip
CONNECTOR, LISTENER = Role.CONNECTOR, Role.LISTENER

#: how each role comes to each of its states: what it sends (>) and receives (<)
WALKS: dict[tuple[Role, State], str] = {
    (CONNECTOR, State.IDLE): "",
    (CONNECTOR, State.ASKED): ">hello",
    (CONNECTOR, State.AGREED): ">hello <reply",
    (CONNECTOR, State.JOINED): ">hello <reply >ready",
    (CONNECTOR, State.CLOSED): ">hello <reply >ready >bye",
    (CONNECTOR, State.QUESTIONED): ">question",
    (CONNECTOR, State.TOLD): ">question <answer",
    (LISTENER, State.IDLE): "",
    (LISTENER, State.HEARD): "<hello",
    (LISTENER, State.ANSWERED): "<hello >reply",
    (LISTENER, State.JOINED): "<hello >reply <ready",
    (LISTENER, State.CLOSED): "<hello >reply <ready >bye",
}
#: what may come, and where it leads; everything else is a fault of the peer
MAY_COME = {
    CONNECTOR: {
        (State.AGREED, "beat"): State.AGREED,
        (State.JOINED, "beat"): State.JOINED, (State.JOINED, "joined"): State.JOINED,
        (State.JOINED, "proof"): State.JOINED,
        (State.ASKED, "reply"): State.AGREED, (State.JOINED, "bye"): State.CLOSED, (State.IDLE, "reject"): State.CLOSED,
        (State.ASKED, "reject"): State.CLOSED, (State.AGREED, "reject"): State.CLOSED,
        (State.JOINED, "reject"): State.CLOSED,
        (State.QUESTIONED, "answer"): State.TOLD, (State.QUESTIONED, "reject"): State.CLOSED,
        (State.TOLD, "reject"): State.CLOSED,
    },
    LISTENER: {
        (State.ANSWERED, "beat"): State.ANSWERED,
        (State.JOINED, "beat"): State.JOINED, (State.JOINED, "proof"): State.JOINED,
        (State.IDLE, "hello"): State.HEARD, (State.ANSWERED, "ready"): State.JOINED,
        (State.JOINED, "bye"): State.CLOSED, (State.IDLE, "reject"): State.CLOSED,
        (State.HEARD, "reject"): State.CLOSED, (State.ANSWERED, "reject"): State.CLOSED,
        (State.JOINED, "reject"): State.CLOSED,
    },
}  # fmt: skip
#: what may be sent
MAY_GO = {
    CONNECTOR: {
        (State.AGREED, "beat"): State.AGREED,
        (State.JOINED, "beat"): State.JOINED, (State.JOINED, "proof"): State.JOINED,
        (State.IDLE, "hello"): State.ASKED, (State.AGREED, "ready"): State.JOINED, (State.JOINED, "bye"): State.CLOSED,
        (State.IDLE, "reject"): State.CLOSED, (State.ASKED, "reject"): State.CLOSED,
        (State.AGREED, "reject"): State.CLOSED, (State.JOINED, "reject"): State.CLOSED,
        (State.IDLE, "question"): State.QUESTIONED, (State.QUESTIONED, "reject"): State.CLOSED,
        (State.TOLD, "reject"): State.CLOSED,
    },
    LISTENER: {
        (State.ANSWERED, "beat"): State.ANSWERED,
        (State.JOINED, "beat"): State.JOINED, (State.JOINED, "joined"): State.JOINED,
        (State.JOINED, "proof"): State.JOINED,
        (State.HEARD, "reply"): State.ANSWERED, (State.JOINED, "bye"): State.CLOSED,
        (State.IDLE, "reject"): State.CLOSED, (State.HEARD, "reject"): State.CLOSED,
        (State.ANSWERED, "reject"): State.CLOSED, (State.JOINED, "reject"): State.CLOSED,
    },
}  # fmt: skip
EVERY = [(role, state, name) for role, state in WALKS for name in MESSAGES]
everywhere = pytest.mark.parametrize(
    ("role", "state", "name"), EVERY, ids=[f"{role.value}-{state.value}-{name}" for role, state, name in EVERY]
)


def machine(role: Role, state: State = State.IDLE) -> Handshake:
    """A machine that walked to a state. A listener knows the connection's id from its hello on."""
    made = Handshake(role, ID if role is CONNECTOR else None)
    for step in WALKS[role, state].split():
        way, name = step[0], step[1:]
        if way == ">":
            assert made.send(MESSAGES[name]) is MESSAGES[name]
        else:
            assert made.receive(MESSAGES[name]) is Outcome.MOVED
    assert made.state is state
    return made


def other(message: Message) -> Message:
    """A message of the same type and conversation that says something else."""
    if isinstance(message, Hello | Reply):
        return replace(message, ends=tuple(replace(e, psn=e.psn ^ 1) for e in message.ends))
    if isinstance(message, Answer):
        return replace(message, host="other")
    return message if isinstance(message, Ready | Joined | Proof | Beat | Question) else replace(message, why="other")


# ---- two machines face to face


class Pair:
    """Both machines and two ordered ways between them, which carry bytes."""

    def __init__(self) -> None:
        self.machines = {CONNECTOR: Handshake(CONNECTOR, ID), LISTENER: Handshake(LISTENER)}
        self.to: dict[Role, deque[bytes]] = {CONNECTOR: deque(), LISTENER: deque()}
        self.said: list[str] = []

    def send(self, role: Role, message: Message) -> None:
        self.put(role, self.machines[role].send(message))

    def put(self, role: Role, message: Message) -> None:
        self.said.append(type(message).__name__)
        self.to[LISTENER if role is CONNECTOR else CONNECTOR].append(encode(message))

    def take(self, role: Role) -> Outcome:
        """One message comes; the answer goes out as connect and accept would give it."""
        made = self.machines[role]
        message = decode(self.to[role].popleft())
        assert message is not None
        outcome = made.receive(message)
        if outcome is Outcome.REPEATED and made.said is not None:
            self.put(role, made.said)
        elif outcome is Outcome.MOVED and made.state is State.HEARD:
            self.send(role, REPLY)
        elif outcome is Outcome.MOVED and made.state is State.AGREED:
            self.send(role, READY)
        return outcome


def test_three_messages_join_two_ends() -> None:
    pair = Pair()
    pair.send(CONNECTOR, HELLO)
    assert pair.take(LISTENER) is Outcome.MOVED
    assert pair.take(CONNECTOR) is Outcome.MOVED
    assert pair.machines[CONNECTOR].state is State.JOINED
    assert pair.machines[LISTENER].state is State.ANSWERED
    assert pair.take(LISTENER) is Outcome.MOVED
    assert pair.machines[LISTENER].state is State.JOINED
    assert pair.said == ["Hello", "Reply", "Ready"]
    assert pair.machines[CONNECTOR].peer == REPLY
    assert pair.machines[LISTENER].peer == HELLO
    assert pair.machines[LISTENER].id == ID


@given(st.lists(st.tuples(st.sampled_from(list(Role)), st.integers(0, 2)), max_size=30))
@settings(max_examples=150)
def test_in_any_order_with_any_repeats_both_join_and_fall_silent(schedule: list[tuple[Role, int]]) -> None:
    pair = Pair()
    pair.send(CONNECTOR, HELLO)
    moved = 0
    for role, repeats in [*schedule, *[(CONNECTOR, 0), (LISTENER, 0)] * 20]:
        if pair.to[role]:
            first = pair.to[role][0]
            pair.to[role].extendleft([first] * min(repeats, 60 - len(pair.said)))
            moved += pair.take(role) is Outcome.MOVED
    while any(pair.to.values()):
        assert len(pair.said) < 400, "they answer each other for ever"
        for role in Role:
            if pair.to[role]:
                moved += pair.take(role) is Outcome.MOVED
    assert moved == 3
    assert all(made.state is State.JOINED for made in pair.machines.values())


@pytest.mark.parametrize("closer", list(Role))
def test_either_end_can_say_good_bye(closer: Role) -> None:
    pair = Pair()
    pair.send(CONNECTOR, HELLO)
    for role in (LISTENER, CONNECTOR, LISTENER):
        pair.take(role)
    pair.send(closer, BYE)
    peer = LISTENER if closer is CONNECTOR else CONNECTOR
    assert pair.take(peer) is Outcome.MOVED
    assert all(made.state is State.CLOSED for made in pair.machines.values())


@pytest.mark.parametrize(("role", "state"), [key for key in WALKS if key[1] is not State.CLOSED], ids=str)
@pytest.mark.parametrize("read", [True, False], ids=["with its id", "without an id"])
def test_a_reject_at_any_stage_tells_why(role: Role, state: State, read: bool) -> None:
    made = machine(role, state)
    reject = Reject(ID if read else NO_ID, "asked", 110, "the route did not resolve")
    if made.id is None and read:
        assert made.receive(reject) is Outcome.STALE
        return
    with pytest.raises(PeerRejected, match="the peer refused at asked: the route did not resolve") as caught:
        made.receive(reject)
    assert (caught.value.stage, caught.value.errno, caught.value.reason) == ("asked", 110, "the route did not resolve")
    assert made.state is State.CLOSED
    with pytest.raises(LocalProtocolError):
        made.send(REJECT)


# ---- each alone: what may come and go, and nothing else


@everywhere
def test_what_may_not_come_is_a_fault_of_the_peer(role: Role, state: State, name: str) -> None:
    made = machine(role, state)
    message = other(MESSAGES[name]) if name != "ready" else MESSAGES[name]
    leads_to = MAY_COME[role].get((state, name))
    if made.id is None and name != "hello":
        assert made.receive(message) is Outcome.STALE
        assert made.state is State.IDLE
    elif name == "ready" and role is LISTENER and state in (State.JOINED, State.CLOSED):
        assert made.receive(message) is Outcome.REPEATED
    elif leads_to is None:
        with pytest.raises(RemoteProtocolError, match=f"^{role.value}: the peer sent a {name} while {state.value}\\.$"):
            made.receive(message)
        assert made.state is state
    elif name == "reject":
        with pytest.raises(PeerRejected):
            made.receive(message)
        assert made.state is leads_to
    else:
        assert made.receive(message) is Outcome.MOVED
        assert made.state is leads_to
        assert made.peer == message or not isinstance(message, Hello | Reply)
        assert made.proved is isinstance(message, Proof)
        in_rts = isinstance(message, Ready | Joined | Proof) or (role is LISTENER and state is State.JOINED)
        assert made.met is in_rts


@everywhere
def test_what_may_not_be_sent_is_a_fault_of_this_side(role: Role, state: State, name: str) -> None:
    made = machine(role, state)
    leads_to = MAY_GO[role].get((state, name))
    if leads_to is None or made.id is None:
        with pytest.raises(LocalProtocolError, match=f"a {name} may not be sent while {state.value}"):
            made.send(MESSAGES[name])
        assert made.state is state
    else:
        before = made.said
        assert made.send(MESSAGES[name]) is MESSAGES[name]
        assert made.state is leads_to
        # what nobody answers is not said again for it
        assert made.said is (before if name in ("beat", "joined") else MESSAGES[name])


@pytest.mark.parametrize(("role", "state"), list(WALKS), ids=str)
def test_a_message_of_another_conversation_is_neither_sent_nor_taken(role: Role, state: State) -> None:
    for message in MESSAGES.values():
        stale = replace(message, id=bytes(15) + b"\x07")
        made = machine(role, state)
        if made.id is not None or not isinstance(stale, Hello):
            assert made.receive(stale) is Outcome.STALE
            assert made.state is state
        with pytest.raises(LocalProtocolError):
            machine(role, state).send(stale)


# ---- repeats


@pytest.mark.parametrize(
    ("role", "state", "name", "answer"),
    [
        (LISTENER, State.HEARD, "hello", None),
        (LISTENER, State.ANSWERED, "hello", REPLY),
        (CONNECTOR, State.AGREED, "reply", None),
        (CONNECTOR, State.JOINED, "reply", READY),
        (LISTENER, State.JOINED, "ready", None),
    ],
)
def test_a_repeated_message_is_answered_the_same_way_again(
    role: Role, state: State, name: str, answer: Message | None
) -> None:
    made = machine(role, state)
    for _ in range(3):
        assert made.receive(MESSAGES[name]) is Outcome.REPEATED
        assert made.said == answer
        assert made.state is state


def test_a_reject_of_unread_bytes_can_itself_be_read() -> None:
    reject = Reject(NO_ID, "idle", 0, "not a message")
    assert decode(encode(reject)) == reject


def test_a_second_hello_that_says_something_else_is_a_fault() -> None:
    made = machine(LISTENER, State.ANSWERED)
    with pytest.raises(RemoteProtocolError):
        made.receive(other(HELLO))
    assert made.peer == HELLO


@pytest.mark.parametrize("role", list(Role))
def test_a_proof_is_kept_whatever_follows(role: Role) -> None:
    made = machine(role, State.JOINED)
    assert made.proved is False
    assert made.receive(PROOF) is Outcome.MOVED
    assert made.receive(PROOF) is Outcome.REPEATED
    for _ in range(3):
        assert made.receive(BEAT) is Outcome.MOVED
    assert made.receive(BYE) is Outcome.MOVED
    assert made.proved is True


@pytest.mark.parametrize("role", list(Role))
def test_a_proof_that_was_sent_proves_nothing_here(role: Role) -> None:
    made = machine(role, State.JOINED)
    made.send(PROOF)
    made.send(BEAT)
    assert (made.proved, made.state) == (False, State.JOINED)


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD])
def test_all_types_but_rc_may_lose_messages(qp_type: QpType) -> None:
    made = Handshake(LISTENER)
    assert not made.lossy
    made.receive(replace(HELLO, ends=ends_of(qp_type, 1)))
    assert made.lossy is (qp_type is not QpType.RC)


def test_a_reject_brings_the_ports_that_could_be_tried() -> None:
    made = machine(CONNECTOR, State.ASKED)
    ports = (HELLO.ends[0].port, REPLY.ends[0].port)
    with pytest.raises(PeerRejected) as caught:
        made.receive(replace(REJECT, ports=ports))
    assert caught.value.ports == ports


def test_a_good_bye_is_heard_once() -> None:
    made = machine(CONNECTOR, State.JOINED)
    assert made.receive(BYE) is Outcome.MOVED
    with pytest.raises(RemoteProtocolError, match="sent a bye while closed"):
        made.receive(BYE)


# ---- beats, and who is in RTS


@pytest.mark.parametrize(
    ("role", "state", "name", "answer"),
    [
        (LISTENER, State.ANSWERED, "hello", REPLY),
        (CONNECTOR, State.JOINED, "reply", READY),
        (LISTENER, State.JOINED, "ready", None),
    ],
)
def test_beats_in_between_do_not_change_what_is_answered(
    role: Role, state: State, name: str, answer: Message | None
) -> None:
    made = machine(role, state)
    made.send(BEAT)
    for _ in range(3):
        assert made.receive(BEAT) is Outcome.MOVED
    assert made.receive(MESSAGES[name]) is Outcome.REPEATED
    assert (made.said, made.state) == (answer, state)


def test_joined_may_come_before_and_after_anything_else_of_a_connection_that_stands() -> None:
    made = machine(CONNECTOR, State.JOINED)
    assert made.met is False
    for _ in range(2):
        assert made.receive(JOINED) is Outcome.MOVED
        assert made.met is True
        assert made.said is READY, "the ready may still have to be said again"
    assert made.receive(REPLY) is Outcome.REPEATED
    assert made.receive(PROOF) is Outcome.MOVED
    assert made.receive(JOINED) is Outcome.MOVED
    assert made.receive(PROOF) is Outcome.REPEATED


def test_a_listener_that_says_joined_can_still_be_told_ready_again() -> None:
    made = machine(LISTENER, State.JOINED)
    made.send(JOINED)
    assert made.receive(READY) is Outcome.REPEATED
    assert made.said is None


@pytest.mark.parametrize(("role", "state"), list(WALKS), ids=str)
def test_a_peer_is_met_when_it_has_said_that_it_is_in_rts(role: Role, state: State) -> None:
    assert machine(role, state).met is (role is LISTENER and state in (State.JOINED, State.CLOSED))


# ---- messages of another generation


ANY_MESSAGE = st.sampled_from([*MESSAGES.values(), VALUES["hello-beats"], VALUES["reply-beats"]])
OLD_IDS = st.binary(min_size=16, max_size=16).filter(lambda id: id not in (ID, NO_ID))


@given(st.sampled_from([key for key in WALKS if key != (LISTENER, State.IDLE)]), st.lists(
    st.tuples(ANY_MESSAGE, OLD_IDS), max_size=20
))  # fmt: skip
@settings(max_examples=200)
def test_no_message_of_an_older_generation_changes_a_newer_conversation(
    key: tuple[Role, State], late: list[tuple[Message, bytes]]
) -> None:
    made, alike = machine(*key), machine(*key)
    for message, old in late:
        assert made.receive(replace(message, id=old)) is Outcome.STALE
    assert vars(made) == vars(alike)


@given(st.sampled_from(list(Role)), st.data())
@settings(max_examples=200)
def test_old_messages_in_any_order_among_those_of_now_are_as_if_they_had_not_come(
    role: Role, data: st.DataObject
) -> None:
    """A whole conversation, of which some messages are repeated, with those of older ones between any two of them."""
    steps = [*WALKS[role, State.JOINED].split(), "<proof", "<beat", ">proof", "<bye"]
    made, alone = (Handshake(role, ID if role is CONNECTOR else None) for _ in range(2))
    for step in steps:
        for message, old in data.draw(st.lists(st.tuples(ANY_MESSAGE, OLD_IDS), max_size=3)):
            if made.id is not None or not isinstance(message, Hello):
                before = dict(vars(made))
                assert made.receive(replace(message, id=old)) is Outcome.STALE
                assert vars(made) == before
        for machine_ in (made, alone):
            if step[0] == ">":
                machine_.send(MESSAGES[step[1:]])
            else:
                assert machine_.receive(MESSAGES[step[1:]]) is Outcome.MOVED
    assert vars(made) == vars(alone)
    assert made.state is State.CLOSED


# ---- a reply must fit its hello


def ends_of(qp_type: QpType, count: int) -> Any:
    return tuple(end(qp_type=qp_type, qp_num=number + 1) for number in range(count))


@pytest.mark.parametrize(
    ("asked", "given", "match"),
    [
        ((QpType.RC, 2), (QpType.RC, 1), "asked for 2 queue pairs of type RC, the peer replied with 1 of type RC"),
        ((QpType.RC, 1), (QpType.RC, 3), "asked for 1 queue pairs of type RC, the peer replied with 3 of type RC"),
        ((QpType.RC, 1), (QpType.UD, 1), "replied with 1 of type UD"),
    ],
)
def test_a_reply_with_other_ends_than_asked_for_is_a_fault(
    asked: tuple[QpType, int], given: tuple[QpType, int], match: str
) -> None:
    made = Handshake(CONNECTOR, ID)
    made.send(replace(HELLO, ends=ends_of(*asked)))
    with pytest.raises(RemoteProtocolError, match=match):
        made.receive(replace(REPLY, ends=ends_of(*given)))
    assert made.state is State.ASKED
    assert made.peer is None
    assert made.receive(replace(REPLY, ends=ends_of(*asked))) is Outcome.MOVED


def test_the_tables_lead_only_where_the_roles_can_be() -> None:
    for tables in (SENDS, RECEIVES):
        for role, table in tables.items():
            reachable = {state for r, state in WALKS if r is role}
            assert {to for (frm, _), to in table.items() if frm in reachable} <= reachable
