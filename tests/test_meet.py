"""Both sides call each other: one connection, whatever the order. Without a device and without sockets."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeListener, Front, Host, Net, Teller, connect, install, joined, meet, tell, terms
from hypothesis import given
from samples import IDS, gid, port

from rdmaconnect.deadline import Deadline
from rdmaconnect.errors import ConnectTimeout, ModifyError, PeerRejected
from rdmaconnect.handshake import Role, State, counts
from rdmaconnect.messages import Hello, Ready, Reject, Reply

URLS = ("127.0.0.1:1001", "127.0.0.1:1002")


class Sides:
    """Two processes that meet; both see the same ports."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.net, self.host = Net(), Host(port(gid("10.0.0.1")))
        install(patch, lambda: self.net, self.host, self.host)
        self.made: dict[int, list[Front]] = {}

    def start(self, which: int, deadline_s: float | None = None, **options: Any) -> Teller:
        made = self.made.setdefault(which, [])

        def front(*args: Any) -> Front:
            made.append(Front(*args))
            return made[-1]

        local, peer = URLS[which], URLS[1 - which]
        return Teller(meet._story(front, local, peer, terms(**options), terms(**options), deadline_s))  # type: ignore[type-var]

    def fresh(self, seed: int) -> None:
        self.net = Net(seed)
        self.host.prepared.clear()
        self.made.clear()


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Sides:
    return Sides(monkeypatch)


@given(IDS, IDS)
def test_of_two_calls_at_most_one_counts(a: bytes, b: bytes) -> None:
    assert not counts(a, a)
    assert counts(a, b) is not counts(b, a) or a == b
    assert counts(min(a, b), max(a, b)) or a == b


def test_a_thousand_pairs_in_any_order_are_a_thousand_connections(sides: Sides) -> None:
    callers = {0: 0, 1: 0}
    for seed in range(1000):
        sides.fresh(seed)
        first = sides.net.chance.randrange(2)
        tellers = {first: sides.start(first), 1 - first: sides.start(1 - first)}
        # one may have begun long before the other
        for _ in range(sides.net.chance.choice([0, 0, 1, 5, 40])):
            tellers[first].step()
            sides.net.carry()
        tell(sides.net, *tellers.values())
        assert [teller.error for teller in tellers.values()] == [None, None], seed
        fronts = [tellers[which].value for which in (0, 1)]
        assert [len(made) for made in sides.made.values()] == [1, 1], f"{seed}: more than one connection"
        a, b = map(joined, fronts)
        assert a.state is b.state is State.JOINED
        assert a.id == b.id
        assert {a.role, b.role} == set(Role)
        callers[0 if a.role is Role.CONNECTOR else 1] += 1
        for mine, theirs in (fronts, fronts[::-1]):
            assert mine._lane.state == "RTS"
            assert mine.path.dest_qp_num == theirs._lane.endpoint.qp_num
            assert mine.path.rq_psn == theirs._lane.endpoint.psn == theirs.path.sq_psn
        assert len(sides.net.of(Reply)) == len(sides.net.of(Ready)) == 1
        assert not sides.net.of(Reject)
        for front in fronts:
            front._close()
        assert sides.host.all_freed()
        assert all(channel.closed for channel in sides.net.channels)
        assert all(service.closed for service in sides.net.services.values())
    assert min(callers.values()) > 300, "the rule prefers one side"


def test_the_connection_is_the_one_of_the_smaller_id(sides: Sides) -> None:
    for seed in range(50):
        sides.fresh(seed)
        tellers = [sides.start(which) for which in (0, 1)]
        tell(sides.net, *tellers)
        ids = [hello.id for hello in sides.net.of(Hello)]
        # who started so late that the other's call had come before its own has said two hellos all the same
        assert len(ids) == 2
        assert {joined(teller.value).id for teller in tellers} == {min(ids)}
        assert all(hello.meet for hello in sides.net.of(Hello))


def test_alone_it_waits_until_its_deadline(sides: Sides) -> None:
    teller = sides.start(0, 30)
    tell(sides.net, teller)
    assert isinstance(teller.error, ConnectTimeout)
    assert "meet the peer at tcp://127.0.0.1:1002" in str(teller.error)
    assert sides.host.all_freed()


def test_whoever_answers_and_fails_calls_anew(sides: Sides) -> None:
    """RTR fails once on the side that is called; the caller is told, its meet fails, and a new one succeeds."""
    failed = []

    def fail_once(path: Any) -> None:
        if not failed:
            failed.append(path)
            raise ModifyError(110, "move QP INIT->RTR", qp_num=1, frm=1, to=2, mask=0)

    for seed in range(30):
        sides.fresh(seed)
        failed.clear()
        sides.host.to_rtr = fail_once
        tellers = [sides.start(which) for which in (0, 1)]
        while not any(teller.done for teller in tellers):
            sides.net.chance.choice([tellers[0].step, tellers[1].step, sides.net.carry])()
        (lost,) = (which for which in (0, 1) if tellers[which].done)
        assert isinstance(tellers[lost].error, PeerRejected)
        assert "move QP INIT->RTR" in str(tellers[lost].error)
        url = f"tcp://{URLS[lost]}"
        del sides.net.services[url]
        sides.net.reconnect(url)
        again = sides.start(lost)
        tell(sides.net, again, tellers[1 - lost])
        assert again.error is tellers[1 - lost].error is None, seed
        assert joined(again.value).id == joined(tellers[1 - lost].value).id
        for teller in (again, tellers[1 - lost]):
            teller.value._close()
        assert sides.host.all_freed()


def test_a_side_that_is_killed_and_started_again_meets_all_the_same(sides: Sides) -> None:
    again_met = 0
    for seed in range(150):
        sides.fresh(seed)
        first, lasting = sides.start(0), sides.start(1)
        for _ in range(sides.net.chance.randrange(3, 20)):
            sides.net.chance.choice([first.step, lasting.step, sides.net.carry])()
            if first.done or lasting.done:
                break
        else:
            before = {hello.id for hello in sides.net.of(Hello)}
            sides.net.kill(f"tcp://{URLS[0]}", f"tcp://{URLS[1]}")
            first.story.close()
            again = sides.start(0, 60)
            tell(sides.net, again, lasting)
            if lasting.error is not None or joined(lasting.value).id in before:
                # the one that lasted had the reply of the dead one already: only a probe could tell
                assert lasting.error is not None or joined(lasting.value).role is Role.CONNECTOR
                continue
            assert again.error is None, seed
            assert joined(again.value).id == joined(lasting.value).id
            again_met += 1
    assert again_met > 50


def test_who_connects_to_one_that_meets_is_turned_away_in_words(sides: Sides) -> None:
    meeting = sides.start(0)
    story = connect.connect_story(Front, URLS[0], terms(), 1, Deadline(None, ConnectTimeout))
    connecting = Teller(story)
    while not connecting.done:
        sides.net.chance.choice([meeting.step, connecting.step, sides.net.carry])()
    assert isinstance(connecting.error, PeerRejected)
    assert "this side meets one peer, it does not listen: call meet()." in str(connecting.error)
    assert not meeting.done
    other = sides.start(1)
    tell(sides.net, meeting, other)
    assert meeting.error is other.error is None


def test_who_meets_one_that_listens_is_turned_away_in_words(sides: Sides) -> None:
    listening = FakeListener(f"tcp://{URLS[1]}", terms(), [terms().qp_type], share_ud=False)
    accepting = Teller(listening._accept(None, tolerant=False))
    meeting = sides.start(0)
    tell(sides.net, meeting, accepting)
    assert isinstance(meeting.error, PeerRejected)
    assert "this side listens, it does not meet(): call connect()." in str(meeting.error)
    assert str(accepting.error) == "this side listens, it does not meet(): call connect()."
    listening._close()
    assert sides.host.all_freed()
