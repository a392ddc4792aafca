"""Keys that protect the exchange: how they are made and found, and who can speak with whom under them."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from rdmaconnect.curve import SECRET_VARIABLE, Keys, keygen, keys_for
from rdmaconnect.oob import Channel, Line, Service
from zmq.utils import z85

from rdmaconnect.deadline import Deadline, wait_readable
from rdmaconnect.errors import AuthenticationError

T = TypeVar("T")
MAX = 1000
LOCAL = "tcp://127.0.0.1:0"
SECRET = "a secret of one job, long enough"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def listener(**given: Any) -> Keys:
    found = keys_for(listens=True, **given)
    assert found is not None
    return found


def connector(**given: Any) -> Keys:
    found = keys_for(listens=False, **given)
    assert found is not None
    return found


# ---- one secret


def test_both_sides_derive_the_same_keys_from_one_secret() -> None:
    there, here = listener(secret=SECRET), connector(secret=SECRET)
    assert here.listener == there.public
    assert there.knows is not None
    assert there.knows(here.public)
    assert not there.knows(there.public)
    assert not there.knows(bytes(40))
    for keys in (there, here):
        assert len(z85.decode(keys.secret)) == len(z85.decode(keys.public)) == 32
        assert zmq.curve_public(keys.secret) == keys.public


def test_roles_and_secrets_have_keys_of_their_own() -> None:
    made = [make(secret=secret) for make in (listener, connector) for secret in (SECRET, SECRET + "!")]
    assert len({keys.secret for keys in made}) == len({keys.public for keys in made}) == 4
    other = listener(secret=SECRET + "!")
    assert other.knows is not None
    assert not other.knows(connector(secret=SECRET).public)


def test_the_keys_of_a_secret_never_change() -> None:
    # peers of another release derive them too
    assert connector(secret="0123456789abcdef") == Keys(
        public=b"2)Ern=uj+fCLiChBXzfg^tLXtE:o%FtUV#suVS1H",
        secret=b"lFQaeCzu]xWL[zGf1d*mtf5BK)<.]n^Wgd0cfdAp",
        listener=b"c<rNb-Blwo4Z]%GppIyM+j{}+r=KbqiL6Nuh*{Gq",
    )
    raw = hashlib.scrypt(b"0123456789abcdef", salt=b"rdmaconnect 1 connector", n=2**14, r=8, p=1, dklen=32)
    assert connector(secret="0123456789abcdef").secret == z85.encode(raw)


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode(), bytearray(SECRET.encode())], ids=type)
def test_a_secret_is_text_or_bytes(secret: Any) -> None:
    assert connector(secret=secret).public == connector(secret=SECRET).public


def test_the_secret_of_the_environment_counts_if_nothing_else_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert keys_for(listens=True) is keys_for(listens=False) is None
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert connector().public == connector(secret=SECRET).public
    assert connector(secret=SECRET + "!").public != connector().public
    public, secret = keygen(str(tmp_path), "own")
    assert connector(key=secret, peer=public).secret != connector().secret
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert keys_for(listens=True) is None
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match="the secret has 5 bytes"):
        keys_for(listens=True)


@pytest.mark.parametrize("secret", ["", "fifteen letters", b"", bytes(15)])
def test_a_short_secret_is_refused(secret: Any) -> None:
    with pytest.raises(ValueError, match=rf"^the secret has {len(secret)} bytes: give at least 16") as caught:
        keys_for(listens=True, secret=secret)
    assert not secret or str(secret) not in str(caught.value)
    keys_for(listens=True, secret="é" * 8)


def test_no_secret_is_shown(tmp_path: Path) -> None:
    public, secret = keygen(str(tmp_path), "own")
    for keys in (
        listener(secret=SECRET), connector(secret=SECRET), listener(key=secret, peer=str(tmp_path)),
        connector(key=secret, peer=public),
    ):  # fmt: skip
        for words in (repr(keys), str(keys), f"{keys}"):
            assert keys.secret.decode() not in words
            assert SECRET not in words


# ---- key files


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077, 0o277])
def test_a_pair_of_files_is_made_and_only_the_owner_may_read_the_secret(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "new" / "keys"
    folder.mkdir(parents=True)
    before = os.umask(umask)
    try:
        public, secret = keygen(str(folder), "node1")
        assert os.umask(umask) == umask, "the process's umask was changed"
    finally:
        os.umask(before)
    assert (public, secret) == (str(folder / "node1.key"), str(folder / "node1.key_secret"))
    assert (mode(public), mode(secret)) == (0o644, 0o600)
    found = connector(key=secret, peer=public)
    assert found.listener == found.public
    assert found.secret.decode() not in Path(public).read_text()


def test_the_folder_is_made(tmp_path: Path) -> None:
    public, _ = keygen(str(tmp_path / "a" / "b"), "node1")
    assert os.path.exists(public)


@pytest.mark.parametrize("end", [".key", ".key_secret"])
def test_a_key_that_is_there_is_not_replaced(tmp_path: Path, end: str) -> None:
    (tmp_path / f"node1{end}").write_text("mine")
    with pytest.raises(FileExistsError, match=rf"^make a key: .*node1\{end} is there already\. Take another name\.$"):
        keygen(str(tmp_path), "node1")
    assert os.listdir(tmp_path) == [f"node1{end}"]
    assert (tmp_path / f"node1{end}").read_text() == "mine"


def test_two_pairs_differ(tmp_path: Path) -> None:
    one, two = (keygen(str(tmp_path), name) for name in ("one", "two"))
    assert connector(key=one[1], peer=two[0]).public != connector(key=two[1], peer=one[0]).public


@pytest.mark.parametrize(
    "given",
    [
        {"secret": SECRET, "key": "a"}, {"secret": SECRET, "peer": "a"}, {"secret": SECRET, "key": "a", "peer": "b"},
        {"key": "a"}, {"peer": "a"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("listens", [True, False])
def test_arguments_that_do_not_go_together_are_refused(given: dict[str, str], listens: bool) -> None:
    with pytest.raises(ValueError, match=r"^protect the exchange: give secret alone, or key and peer_key together$"):
        keys_for(listens=listens, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("listens", [True, False])
def test_a_key_file_that_is_none_is_named_with_what_to_do(tmp_path: Path, listens: bool) -> None:
    public, secret = keygen(str(tmp_path / "keys"), "own")
    (tmp_path / "garbage").write_bytes(b"\xff\xfe\x00 no key")
    (tmp_path / "empty").write_text("")
    peer = str(tmp_path / "keys") if listens else public
    for bad in ("missing", "garbage", "empty", "."):
        path = str(tmp_path / bad)
        with pytest.raises(ValueError, match=r"Make one with `rdmaconnect keygen`\.$") as caught:
            keys_for(listens=listens, key=path, peer=peer)
        assert str(caught.value).startswith(f"read key file {path}: ")
        with pytest.raises(ValueError, match=r"^read (key file|the connectors' keys)") as caught:
            keys_for(listens=listens, key=secret, peer=path) if bad != "." or not listens else raises()
    with pytest.raises(ValueError, match=r"it holds no secret key\. Give the one that ends in \.key_secret\.$"):
        keys_for(listens=listens, key=public, peer=peer)


def raises() -> Any:
    raise ValueError("read key file: a folder is right here")


def test_the_folder_of_a_listener_is_read_anew_at_each_question(tmp_path: Path) -> None:
    _, secret = keygen(str(tmp_path / "own"), "listener")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    knows = listener(key=secret, peer=str(allowed)).knows
    assert knows is not None
    path, own = keygen(str(tmp_path / "theirs"), "node1")
    public = connector(key=own, peer=path).public
    assert not knows(public)
    (allowed / "node1.key").write_text(Path(path).read_text())
    assert knows(public)
    (allowed / "a bad one.key").write_bytes(b"\xff\xfe garbage")
    (allowed / "a folder.key").mkdir()
    (allowed / "another.txt").write_text("not looked at")
    assert knows(public), "one bad file must not keep the others out"
    (allowed / "node1.key").unlink()
    assert not knows(public)


# ---- who can speak with whom


def until(look: Callable[[], T | None], end: Any, seconds: float = 5) -> T:
    """What ``look`` gives once it gives something."""
    deadline = Deadline(seconds)
    while (found := look()) is None:
        assert deadline.left_s > 0, "nothing came"
        wait = end.wait(deadline)
        wait_readable(list(wait.fds), wait.deadline, wait.slice_ms)
    return found


@contextmanager
def both(there: Keys | None, here: Keys | None) -> Iterator[tuple[Service, Channel]]:
    service = Service(LOCAL, MAX, there)
    channel = Channel(service.url, MAX, here)
    try:
        yield service, channel
    finally:
        channel.close()
        service.close()


def talks(service: Service, channel: Channel) -> Line:
    """They can say something to each other."""
    channel.send(b"hello")
    line = until(service.accept, service)
    assert until(line.recv, service) == b"hello"
    line.send(b"reply")
    assert until(channel.recv, channel) == b"reply"
    return line


def refused(service: Service, channel: Channel) -> str:
    """The words of the connector's error; the listener gets nothing to see."""
    started = time.monotonic()
    channel.send(b"hello: my QPN is 17")
    with pytest.raises(AuthenticationError) as caught:
        until(channel.recv, channel)
    assert time.monotonic() - started < 5
    for _ in range(20):
        assert service.accept() is None
        time.sleep(0.01)
    assert service.peers == {}
    words = str(caught.value)
    assert words.startswith(f"connect to {service.url}: ")
    assert SECRET not in words
    return words


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
        return listener(key=self.listener[1], peer=str(self.allowed))

    def here(self) -> Keys:
        return connector(key=self.connector[1], peer=self.listener[0])


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_with_the_same_secret_they_talk() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as ends:
        talks(*ends)


def test_with_key_files_that_know_each_other_they_talk(files: Folder) -> None:
    files.allow()
    with both(files.there(), files.here()) as ends:
        talks(*ends)


def test_with_another_secret_the_connector_is_told_of_the_key() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET + "!")) as ends:
        assert refused(*ends).endswith(
            "the listener broke the handshake off: it has another key than this side expects, another secret, or none."
        )


def test_a_plain_connector_is_told_that_the_listener_is_protected() -> None:
    with both(listener(secret=SECRET), None) as ends:
        assert refused(*ends).endswith(
            "the listener's exchange is protected, this side's is not. Give both sides the same secret, or keys."
        )


def test_a_protected_connector_is_told_that_the_listener_is_plain() -> None:
    with both(None, connector(secret=SECRET)) as ends:
        assert refused(*ends).endswith(
            "this side's exchange is protected, the listener's is not. Give both sides the same secret, or keys."
        )


def test_a_connector_whose_key_is_not_allowed_is_told_so(files: Folder) -> None:
    with both(files.there(), files.here()) as ends:
        assert refused(*ends).endswith("the listener does not know the key of this side.")


def test_a_connector_that_expects_another_listener_is_told_so(files: Folder, tmp_path: Path) -> None:
    files.allow()
    other, _ = keygen(str(tmp_path / "other"), "other")
    with both(files.there(), connector(key=files.connector[1], peer=other)) as ends:
        assert "it has another key than this side expects" in refused(*ends)


def test_a_key_can_be_added_and_taken_away_while_the_listener_runs(files: Folder) -> None:
    with both(files.there(), files.here()) as (service, channel):
        refused(service, channel)
        files.allow()
        channel.close()
        channel = Channel(service.url, MAX, files.here())
        line = talks(service, channel)
        (files.allowed / "node1.key").unlink()
        again = Channel(service.url, MAX, files.here())
        try:
            again.send(b"hello")
            with pytest.raises(AuthenticationError, match="does not know the key of this side"):
                until(again.recv, again)
            assert service.accept() is None
            line.send(b"who is in, stays in")
            assert until(channel.recv, channel) == b"who is in, stays in"
        finally:
            again.close()
            channel.close()


def test_a_refused_connector_disturbs_no_other() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as (service, good):
        line = talks(service, good)
        for keys in (None, connector(secret=SECRET + "!")):
            bad = Channel(service.url, MAX, keys)
            try:
                bad.send(b"x")
                with pytest.raises(AuthenticationError):
                    until(bad.recv, bad)
            finally:
                bad.close()
        assert service.accept() is None
        line.send(b"still here")
        assert until(good.recv, good) == b"still here"


def test_two_listeners_of_one_process_have_their_own_keys() -> None:
    with (
        both(listener(secret=SECRET), connector(secret=SECRET)) as one,
        both(listener(secret=SECRET + "!"), connector(secret=SECRET + "!")) as two,
    ):
        talks(*one)
        talks(*two)


def test_a_kept_line_outlives_a_protected_listener() -> None:
    with both(listener(secret=SECRET), connector(secret=SECRET)) as (service, channel):
        line = talks(service, channel)
        line.keep()
        service.close()
        line.send(b"still")
        assert until(channel.recv, channel) == b"still"
        line.close()
        assert service.closed


def test_no_descriptor_and_no_thread_is_left(files: Folder) -> None:
    def round_trip() -> None:
        with both(listener(secret=SECRET), connector(secret=SECRET)) as ends:
            talks(*ends)
        with both(files.there(), None) as (_, channel):
            channel.send(b"x")
            with pytest.raises(AuthenticationError):
                until(channel.recv, channel)
        with pytest.raises(OSError, match="listen on"):
            Service("tcp://192.0.2.1:0", MAX, listener(secret=SECRET))

    def counts() -> tuple[int, int, int]:
        tasks = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), tasks, threading.active_count()

    round_trip()
    deadline, before = Deadline(5), counts()
    while deadline.left_s > 4.5:
        time.sleep(0.05)
        before = min(before, counts(), key=sum)
    for _ in range(4):
        round_trip()
    deadline = Deadline(10)
    while any(now > then for now, then in zip(counts(), before, strict=True)):
        assert deadline.left_s > 0, f"descriptors, threads, Python threads: {counts()} of {before}"
        time.sleep(0.05)
