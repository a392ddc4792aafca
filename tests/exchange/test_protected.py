"""Who can speak with whom under keys: both sides over real TCP and ZeroMQ, and what each of them is told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from exchange_ends import MAX, End, Place, calling, channels, place, until

from rdmaconnect.errors import AuthenticationError, PeerClosed
from rdmaconnect.exchange import service, zap
from rdmaconnect.exchange.acceptor import Acceptor
from rdmaconnect.exchange.curve import SECRET_VARIABLE, Keys, keygen, keys_for

SECRET = "a secret of one job, long enough"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def _all_are_closed() -> Iterator[None]:
    yield
    until(lambda: channels() == 0)
    assert zap._listeners == {}


def listener(**given: Any) -> Keys:
    found = keys_for(listens=True, **given)
    assert found is not None
    return found


def connector(**given: Any) -> Keys:
    found = keys_for(listens=False, **given)
    assert found is not None
    return found


@contextmanager
def both(there: Keys | None, here: Keys | None) -> Iterator[tuple[Place, End]]:
    with place(keys=there) as where, calling(where, keys=here) as end:
        yield where, end


def talks(where: Place, here: End) -> End:
    """They can say something to each other."""
    here.send(b"hello")
    there = where.next()
    assert there.take() == [b"hello"]
    there.send(b"reply")
    assert here.take() == [b"reply"]
    where.know(there)
    return there


def refused(where: Place, here: End) -> tuple[str, str]:
    """The words of both sides' errors; the listener gets nothing to see."""
    started = time.monotonic()
    here.send(b"hello: my QPN is 17")
    mine = here.heard.end()
    assert time.monotonic() - started < 5
    there = where.next()
    theirs = there.heard.end()
    assert there.heard.all() == here.heard.all() == []
    for error in (mine, theirs):
        assert SECRET not in str(error)
        assert str(error).isprintable()
    assert isinstance(mine, AuthenticationError | PeerClosed)
    return f"{type(mine).__name__}: {mine}", f"{type(theirs).__name__}: {theirs}"


class Folder:
    """Key files of a listener and a connector."""

    def __init__(self, folder: Path) -> None:
        self.listener = keygen(str(folder / "listener"), "listener")
        self.allowed = folder / "allowed"
        self.connector = keygen(str(folder / "connector"), "node1")
        self.allowed.mkdir()

    def allow(self) -> None:
        (self.allowed / "node1.key").write_text(Path(self.connector[0]).read_text())

    def there(self) -> Keys:
        return listener(key=self.listener[1], peer_keys=str(self.allowed))

    def here(self) -> Keys:
        return connector(key=self.connector[1], peer_key=self.listener[0])


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_with_the_same_secret_they_talk() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as ends:
        there = talks(*ends)
        assert there.channel.user == connector(secret=SECRET).public.decode()
        assert ends[1].channel.user == ""


def test_with_key_files_that_know_each_other_they_talk(files: Folder) -> None:
    files.allow()
    with both(files.there(), files.here()) as ends:
        assert talks(*ends).channel.user == files.here().public.decode()


def test_all_of_a_large_frame_is_carried_under_keys_too() -> None:
    data = os.urandom(300_000)
    with (
        place(max_frame=512 * 1024, keys=listener(secret=SECRET)) as where,
        calling(where, 512 * 1024, connector(secret=SECRET)) as here,
    ):
        here.send(data)
        assert where.next().take() == [data]


def test_a_frame_may_be_as_long_as_without_keys_and_no_longer() -> None:
    with place(keys=listener(secret=SECRET)) as where, calling(where, 2 * MAX, connector(secret=SECRET)) as here:
        here.send(bytes(MAX), bytes(MAX + 1))
        there = where.next()
        assert there.take() == [bytes(MAX)]
        assert "more at once than it may" in str(there.heard.end())


def test_with_another_secret_neither_gets_anything() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET + "!")) as ends:
        mine, theirs = refused(*ends)
        assert theirs.startswith("AuthenticationError: the handshake with the peer at 127.0.0.1 failed: ")
        # a connector that expects another key gets no answer that it could read: it tries again, and then says so
        assert mine.startswith("PeerClosed: the peer at 127.0.0.1 is gone")
        assert ends[1].channel.greeted


def test_a_plain_connector_is_told_that_the_listener_is_protected() -> None:
    both_ways = "Give both sides the same secret, or keys."
    with both(listener(secret=SECRET), None) as ends:
        assert refused(*ends) == (
            f"AuthenticationError: the listener's exchange is protected, this connector's is not. {both_ways}",
            f"AuthenticationError: this listener's exchange is protected, the connector's is not. {both_ways}",
        )


def test_a_protected_connector_is_told_that_the_listener_is_plain() -> None:
    both_ways = "Give both sides the same secret, or keys."
    with both(None, connector(secret=SECRET)) as ends:
        assert refused(*ends) == (
            f"AuthenticationError: this connector's exchange is protected, the listener's is not. {both_ways}",
            f"AuthenticationError: the connector's exchange is protected, this listener's is not. {both_ways}",
        )


def test_a_connector_whose_key_is_not_allowed_is_told_so(files: Folder) -> None:
    with both(files.there(), files.here()) as ends:
        mine, theirs = refused(*ends)
        assert mine == "AuthenticationError: the listener does not know the key of this side (400)."
        # the connector hangs up when it hears so, and ZeroMQ here when it has said so
        assert theirs.startswith(("AuthenticationError: the handshake with the peer at 127.0.0.1 failed", "PeerClosed"))


def test_a_connector_that_expects_another_listener_gets_nothing(files: Folder, tmp_path: Path) -> None:
    files.allow()
    other, _ = keygen(str(tmp_path / "other"), "other")
    with both(files.there(), connector(key=files.connector[1], peer_key=other)) as ends:
        mine, theirs = refused(*ends)
        assert mine.startswith("PeerClosed")
        assert "it has another key than this side expects" in theirs


def test_a_key_can_be_added_and_taken_away_while_the_listener_runs(files: Folder) -> None:
    with both(files.there(), files.here()) as (where, here):
        refused(where, here)
        files.allow()
        with calling(where, keys=files.here()) as later:
            there = talks(where, later)
            (files.allowed / "node1.key").unlink()
            with calling(where, keys=files.here()) as again:
                refused(where, again)
            there.send(b"who is in, stays in")
            assert later.take() == [b"who is in, stays in"]


def test_a_refused_connector_disturbs_no_other() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as (where, good):
        there = talks(where, good)
        for keys in (None, connector(secret=SECRET + "!")):
            with calling(where, keys=keys) as bad:
                refused(where, bad)
        there.send(b"still here")
        assert good.take() == [b"still here"]


def test_two_listeners_of_one_process_have_their_own_keys() -> None:
    with (
        both(listener(secret=SECRET), connector(secret=SECRET)) as one,
        both(listener(secret=SECRET + "!"), connector(secret=SECRET + "!")) as two,
    ):
        talks(*one)
        talks(*two)
        with calling(one[0], keys=connector(secret=SECRET + "!")) as lost:
            refused(one[0], lost)


def test_an_answer_that_fails_refuses_that_one_peer_and_no_other(files: Folder, caplog: Any) -> None:
    files.allow()
    keys, answers = files.there(), [True, OSError(24, "Too many open files"), True]

    def knows(public: bytes) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with place(keys=Keys(keys.public, keys.secret, knows=knows)) as where:
        for expected in (None, "(500)", None):
            with calling(where, keys=files.here()) as here:
                if expected is None:
                    talks(where, here)
                else:
                    assert expected in refused(where, here)[0]
    assert "could not be looked up: [Errno 24] Too many open files" in caplog.text


def test_a_listener_with_keys_but_without_any_that_it_knows_lets_nobody_in(files: Folder) -> None:
    keys = files.there()
    with both(Keys(keys.public, keys.secret), files.here()) as ends:
        assert "does not know the key" in refused(*ends)[0]


def test_a_channel_outlives_its_protected_listener() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as (where, here):
        there = talks(where, here)
        where.acceptor.close()
        there.send(b"still")
        assert here.take() == [b"still"]
        here.send(b"and back")
        assert there.take() == [b"and back"]
        there.channel.close()
        assert isinstance(here.heard.end(), PeerClosed)


def test_once_closed_nobody_is_let_in_any_more() -> None:
    with place(keys=listener(secret=SECRET)) as where, calling(where, keys=connector(secret=SECRET)) as here:
        there = where.next()
        domain = where.acceptor._domain
        assert domain in zap._listeners
        where.acceptor.close()
        assert zap._listeners == {}
        here.send(b"hello")
        assert isinstance(here.heard.end(), PeerClosed | AuthenticationError)
        assert there.heard.all() == []


def test_no_descriptor_and_no_thread_is_left(files: Folder) -> None:
    def round_trip() -> None:
        with both(listener(secret=SECRET), connector(secret=SECRET)) as ends:
            talks(*ends)
        with both(files.there(), None) as (where, here):
            refused(where, here)
        with pytest.raises(OSError, match="listen on"):
            Acceptor("tcp://192.0.2.1:0", lambda channel: pytest.fail("who?"), MAX, listener(secret=SECRET))
        until(lambda: channels() == 0)

    def counts() -> tuple[int, int, int]:
        tasks = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), tasks, threading.active_count()

    round_trip()
    time.sleep(0.3)
    before = counts()
    for _ in range(4):
        round_trip()
    until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))


@pytest.mark.parametrize(
    "request_",
    [
        [], [b"1.0"], [b"1.0", b"1", b"d", b"", b"", b"CURVE"], [b"1.0", b"1", b"d", b"", b"", b"PLAIN", bytes(32)],
        [b"2.0", b"1", b"d", b"", b"", b"CURVE", bytes(32)], [b"1.0", b"1", b"d", b"", b"", b"CURVE", bytes(31)],
        [b"1.0", b"1", b"\xff", b"", b"", b"CURVE", bytes(32)],
    ],
)  # fmt: skip
def test_a_question_about_no_key_or_no_listener_is_answered_with_no(request_: list[bytes]) -> None:
    domain = service.do(lambda: zap.admit(lambda key: True))
    try:
        good = [b"1.0", b"1", domain.encode(), b"", b"", b"CURVE", bytes(32)]
        assert zap._decide(good)[0] == b"200"
        assert zap._decide([domain.encode() if part == b"d" else part for part in request_])[0] == b"400"
    finally:
        service.do(lambda: zap.forget(domain))
    assert zap._decide(good)[0] == b"400"
