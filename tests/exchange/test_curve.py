"""Keys that protect the exchange: how they are made and found, and who can speak with whom under them."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from rdmaconnect.exchange import curve
from rdmaconnect.exchange.curve import SECRET_VARIABLE, Keys, keygen, keys_for
from rdmaconnect.runtime.deadline import Deadline

T = TypeVar("T")
MAX = 1000
LOCAL = "tcp://127.0.0.1:0"
SECRET = "a secret of one job, long enough"
TOGETHER = r"^protect the exchange: give secret alone, or key and peer_key together, or key and peer_keys to listen$"


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
    assert connector(key=secret, peer_key=public).secret != connector().secret
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match="the secret has 5 bytes"):
        keys_for(listens=True)


@pytest.mark.parametrize("secret", ["", "fifteen letters", b"", bytes(15)])
def test_a_short_secret_is_refused(secret: Any) -> None:
    with pytest.raises(ValueError, match=rf"^the secret has {len(secret)} bytes: give at least 16") as caught:
        keys_for(listens=True, secret=secret)
    assert not secret or str(secret) not in str(caught.value)
    keys_for(listens=True, secret="é" * 8)


@pytest.mark.parametrize("listens", [True, False])
def test_an_empty_secret_of_the_environment_is_no_exchange_without_protection(
    listens: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with pytest.raises(ValueError, match=r"^RDMACONNECT_SECRET is set, but empty: give it at least 16 bytes.*unset it"):
        keys_for(listens=listens)
    assert keys_for(listens=listens, secret=SECRET) is not None
    public, secret = keygen(str(tmp_path), "own")
    assert keys_for(listens=listens, key=secret, peer_key=public) is not None


@pytest.mark.parametrize("secret", [20, 1.5, ["a"] * 20, object()], ids=type)
def test_a_secret_of_another_type_is_refused(secret: Any) -> None:
    # bytes(20) would be twenty zeros
    with pytest.raises(TypeError, match=r"^the secret is of type \w+: give text or bytes$"):
        keys_for(listens=True, secret=secret)


def test_a_secret_that_is_no_text_is_taken_from_the_environment_as_bytes() -> None:
    code = "from rdmaconnect.exchange.curve import keys_for; print(keys_for(listens=False).public.decode())"
    raw = b"\xff\xfe no text, but long enough"
    environment = {**os.environb, SECRET_VARIABLE.encode(): raw}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == connector(secret=raw).public.decode(), done.stderr


def test_an_error_about_a_secret_does_not_carry_it() -> None:
    odd = "0123456789 my secret \ud83d"
    with pytest.raises(ValueError, match="surrogates") as caught:
        keys_for(listens=True, secret=odd)
    error: BaseException | None = caught.value
    while error is not None:
        assert "my secret" not in f"{error!r} {vars(error)} {getattr(error, 'object', '')}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("odd", [b"", b"x", bytes(32), bytes(40), bytes(10**6), None, "text", 5, bytearray(40), []])
def test_whatever_is_asked_for_the_answer_is_no_and_no_error(
    odd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = keygen(str(tmp_path), "own")
    for keys in (listener(secret=SECRET), listener(key=secret, peer_keys=str(tmp_path))):
        assert keys.knows is not None
        assert keys.knows(odd) is False
    assert caplog.records == []


def test_no_secret_is_shown(tmp_path: Path) -> None:
    public, secret = keygen(str(tmp_path), "own")
    for keys in (
        listener(secret=SECRET), connector(secret=SECRET), listener(key=secret, peer_keys=str(tmp_path)),
        connector(key=secret, peer_key=public),
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
    found = connector(key=secret, peer_key=public)
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
    assert connector(key=one[1], peer_key=two[0]).public != connector(key=two[1], peer_key=one[0]).public


@pytest.mark.parametrize(
    "given",
    [
        {"secret": SECRET, "key": "a"}, {"secret": SECRET, "peer_key": "a"}, {"secret": SECRET, "peer_keys": "a"},
        {"secret": SECRET, "key": "a", "peer_key": "b"}, {"key": "a"}, {"peer_key": "a"}, {"peer_keys": "a"},
        {"key": "a", "peer_key": "b", "peer_keys": "c"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("listens", [True, False])
def test_arguments_that_do_not_go_together_are_refused(given: dict[str, str], listens: bool) -> None:
    with pytest.raises(ValueError, match=TOGETHER):
        keys_for(listens=listens, **given)  # type: ignore[arg-type]


def test_who_connects_has_one_peer() -> None:
    with pytest.raises(ValueError, match=TOGETHER):
        keys_for(listens=False, key="a", peer_keys="b")


def test_who_listens_for_one_peer_knows_it_alone(tmp_path: Path) -> None:
    here, there, other = (keygen(str(tmp_path), name) for name in ("here", "there", "other"))
    called = listener(key=here[1], peer_key=there[0])
    assert called.knows is not None
    assert called.knows(connector(key=there[1], peer_key=here[0]).public)
    assert not called.knows(connector(key=other[1], peer_key=here[0]).public)
    assert not called.knows(called.public)
    assert connector(key=there[1], peer_key=here[0]).listener == called.public


@pytest.mark.parametrize("listens", [True, False])
def test_a_key_file_that_is_none_is_named_with_what_to_do(tmp_path: Path, listens: bool) -> None:
    public, secret = keygen(str(tmp_path / "keys"), "own")
    (tmp_path / "garbage").write_bytes(b"\xff\xfe\x00 no key")
    (tmp_path / "empty").write_text("")
    peer = {"peer_keys": str(tmp_path / "keys")} if listens else {"peer_key": public}
    for bad in ("missing", "garbage", "empty", "."):
        path = str(tmp_path / bad)
        with pytest.raises(ValueError, match=r"Make one with `rdmaconnect keygen`\.$") as caught:
            keys_for(listens=listens, key=path, **peer)
        assert str(caught.value).startswith(f"read key file {path}: ")
        with pytest.raises(ValueError, match=r"^read key file"):
            keys_for(listens=listens, key=secret, peer_key=path)
        if listens and bad != ".":  # a folder is right there
            with pytest.raises(ValueError, match=r"^read the connectors' keys"):
                keys_for(listens=True, key=secret, peer_keys=path)
    with pytest.raises(ValueError, match=r"it holds no secret key\. Give the one that ends in \.key_secret\.$"):
        keys_for(listens=listens, key=public, **peer)


def test_the_folder_of_a_listener_is_read_anew_at_each_question(tmp_path: Path) -> None:
    _, secret = keygen(str(tmp_path / "own"), "listener")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    knows = listener(key=secret, peer_keys=str(allowed)).knows
    assert knows is not None
    path, own = keygen(str(tmp_path / "theirs"), "node1")
    public = connector(key=own, peer_key=path).public
    assert not knows(public)
    (allowed / "node1.key").write_text(Path(path).read_text())
    assert knows(public)
    (allowed / "a bad one.key").write_bytes(b"\xff\xfe garbage")
    (allowed / "a folder.key").mkdir()
    (allowed / "another.txt").write_text("not looked at")
    assert knows(public), "one bad file must not keep the others out"
    (allowed / "node1.key").unlink()
    assert not knows(public)


def test_a_pair_that_is_none_is_refused(tmp_path: Path) -> None:
    one, two = (keygen(str(tmp_path), name) for name in ("one", "two"))
    mixed = tmp_path / "mixed.key_secret"
    mixed.write_text(Path(one[0]).read_text() + Path(two[1]).read_text().rpartition("\n    ")[2])
    with pytest.raises(ValueError, match=r"its two keys do not belong together\. Make a new pair\.$") as caught:
        connector(key=str(mixed), peer_key=one[0])
    assert connector(key=two[1], peer_key=one[0]).secret.decode() not in str(caught.value)


def test_the_files_are_those_of_zeromq(tmp_path: Path) -> None:
    public, secret = keygen(str(tmp_path / "ours"), "own")
    keys = connector(key=secret, peer_key=public)
    assert zmq.auth.load_certificate(secret) == (keys.public, keys.secret)
    assert zmq.auth.load_certificate(public) == (keys.public, None)
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs", {"name": "node1"})
    keys = connector(key=secret, peer_key=public)
    assert zmq.auth.load_certificate(secret) == (keys.public, keys.secret)
    assert keys.listener == keys.public


# ---- a folder of keys


class Connectors:
    """A folder of connectors' keys and who asks about it; and what is logged."""

    def __init__(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.path, self._log = tmp_path / "allowed", caplog
        self.path.mkdir()
        _, self._own = keygen(str(tmp_path / "own"), "listener")
        self.good = self.add("good.key")
        self.knows = self.listen()

    def listen(self) -> Callable[[bytes], bool]:
        knows = listener(key=self._own, peer_keys=str(self.path)).knows
        assert knows is not None
        return knows

    def add(self, name: str) -> bytes:
        """Write a new key into a file; its public part."""
        public, _ = zmq.curve_keypair()
        (self.path / name).write_text(f'metadata\ncurve\n    public-key = "{public.decode()}"\n')
        return public

    @property
    def said(self) -> list[str]:
        """What was logged since the last call."""
        found = [record.getMessage() for record in self._log.records]
        assert all(record.levelname == "WARNING" for record in self._log.records)
        self._log.clear()
        return found


@pytest.fixture
def folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Connectors:
    return Connectors(tmp_path, caplog)


STRANGER = zmq.curve_keypair()[0]
HUGE = 2**40

#: what is no key file: how it comes to be, and what is said of it
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (lambda path: path.mkdir(), "it is not a file"),
    "a FIFO": (os.mkfifo, "it is not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "empty": (lambda path: path.write_bytes(b""), "it holds no public key"),
    "rubbish": (lambda path: path.write_bytes(random.Random(1).randbytes(5000)), "it holds no public key"),
    "UTF-16": (lambda path: path.write_text('public-key = "x"\n', "utf-16"), "it holds no public key"),
    "huge": (lambda path: (path.touch(), os.truncate(path, HUGE)), "it has more than 65536 bytes, and so is no key"),
    "short": (lambda path: path.write_text('public-key = "abc"'), "its public key is not one: that is 40 characters"),
    "no Z85": (lambda path: path.write_text(f'public-key = "{"~" * 40}"'), "its public key is not one"),
    "too large": (lambda path: path.write_text(f'public-key = "{"#" * 40}"'), "its public key is not one"),
    "a bad secret": (lambda path: path.write_text(f'public-key="{"1" * 40}"\nsecret-key="x"'), "its secret key is not"),
}


@pytest.mark.parametrize(("make", "words"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("before", [False, True], ids=["later", "before"])
def test_what_is_no_key_file_keeps_nobody_else_out_and_is_said_once(
    make: Callable[[Path], object], words: str, before: bool, folder: Connectors
) -> None:
    bad = folder.path / "bad.key"
    if before:
        make(bad)
        folder.knows = folder.listen()
    else:
        assert folder.knows(folder.good)
        make(bad)
    late = folder.add("late.key")
    for _ in range(3):
        assert folder.knows(folder.good)
        assert folder.knows(late)
        assert not folder.knows(STRANGER)
    (told,) = folder.said
    assert told.startswith(f"read the connectors' keys: {bad}: {words}")
    assert told.endswith(". It lets nobody in.")
    bad.rmdir() if bad.is_dir() and not bad.is_symlink() else bad.unlink()
    mended = folder.add("bad.key")
    assert folder.knows(mended)
    bad.unlink()
    bad.mkdir()
    assert not folder.knows(mended)
    assert len(folder.said) == 1, "another fault is said again"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE], ids=errno.errorcode.get)
def test_a_read_that_fails_refuses_that_one_peer_and_only_as_long_as_it_does(
    number: int, folder: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "_UNSETTLED_S", -1e6)  # as if the files were of yesterday
    other = folder.add("other.key")
    assert folder.knows(other)
    real = os.open

    def failing(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("good.key"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        for _ in range(5):
            assert not folder.knows(folder.good)
            assert folder.knows(other)
        fresh = folder.listen()
        assert not fresh(folder.good)
        assert fresh(other)
    assert (
        folder.said
        == [f"read the connectors' keys: {folder.path / 'good.key'}: {os.strerror(number)}. It lets nobody in."] * 2
    )  # two listeners
    assert folder.knows(folder.good)
    assert soon(lambda: fresh(folder.good))


def soon(look: Callable[[], bool]) -> bool:
    """Whether it comes true within the second that a folder may be left alone."""
    deadline = Deadline(3)
    while not (found := look()) and deadline.left_s > 0:
        time.sleep(0.01)
    return found


def test_a_folder_that_is_away_lets_nobody_in_until_it_is_back(folder: Connectors) -> None:
    away = folder.path.with_name("away")
    for _ in range(2):
        folder.path.rename(away)
        for _ in range(3):
            assert not folder.knows(folder.good)
            assert not folder.knows(STRANGER)
        assert folder.said == [
            f"read the connectors' keys: {folder.path}: No such file or directory. It lets nobody in."
        ]
        away.rename(folder.path)
        assert folder.knows(folder.good)
        assert folder.said == []
    folder.path.rename(away)
    folder.path.write_text("a file in its place")
    assert not folder.knows(folder.good)
    assert "Not a directory" in folder.said[0]


@pytest.mark.parametrize("bad", ["missing", "a file", "a\0b"])
def test_a_folder_that_cannot_be_read_is_told_to_who_listens(bad: str, tmp_path: Path) -> None:
    _, secret = keygen(str(tmp_path), "own")
    (tmp_path / "a file").write_text("")
    with pytest.raises(ValueError, match=r"^read the connectors' keys: .*\. Give a folder of \.key files\.$") as caught:
        listener(key=secret, peer_keys=str(tmp_path / bad))
    assert repr(str(tmp_path / bad)) in str(caught.value)


def test_a_key_that_takes_anothers_place_counts_and_the_other_does_not(folder: Connectors) -> None:
    for _ in range(20):
        old, new = folder.good, folder.add("new")
        assert folder.knows(old)
        os.replace(folder.path / "new", folder.path / "good.key")
        assert folder.knows(new)
        assert not folder.knows(old)
        folder.good = new


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_not_waited_for(
    folder: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = folder.path / "bad.key"
    os.mkfifo(fifo)
    real = os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path, **more: real(folder.path / "good.key" if path == str(fifo) else path))
        answers: list[bool] = []
        ask = threading.Thread(target=lambda: answers.append(folder.knows(STRANGER)), daemon=True)
        ask.start()
        ask.join(10)
    assert answers == [False]
    assert folder.said == [f"read the connectors' keys: {fifo}: it is not a file. It lets nobody in."]
    assert folder.knows(folder.good)


def test_a_file_that_is_written_over_loses_its_old_key_at_once_and_has_its_new_one_soon(folder: Connectors) -> None:
    for _ in range(20):
        old, new = folder.good, folder.add("good.key")  # the same inode, the same size, perhaps the same time
        assert not folder.knows(old)
        assert soon(lambda new=new: folder.knows(new))  # type: ignore[misc]
        folder.good = new


def test_a_file_system_with_coarse_times_hides_no_new_key(folder: Connectors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_inode", lambda s: (s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns // 10**9 * 10**9))
    for _ in range(5):
        assert not folder.knows(STRANGER)  # all is read
        new = folder.add("good.key")
        assert soon(lambda new=new: folder.knows(new))  # type: ignore[misc]


def test_a_key_in_two_files_is_known_until_both_are_gone(folder: Connectors, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = folder.path / "twin.key"
    for first in ("good.key", "twin.key"):
        twin.write_text((folder.path / "good.key").read_text())
        assert folder.knows(folder.good)
        text = (folder.path / first).read_text()
        (folder.path / first).unlink()
        assert folder.knows(folder.good)
        (folder.path / first).write_text(text)
    monkeypatch.setattr(curve, "_SMALL", 0)
    assert not folder.knows(STRANGER)
    for path in (twin, folder.path / "good.key"):
        text = path.read_text()
        path.write_text("no key")
        assert folder.knows(folder.good)
        path.write_text(text)
    assert len(folder.said) >= 1
    twin.unlink()
    (folder.path / "good.key").unlink()
    assert not folder.knows(folder.good)
    assert folder.said == [], "a key that was taken away is no fault"


def test_a_folder_of_ten_thousand_keys_costs_little_at_each_connect(
    folder: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [folder.add(f"node{i}.key") for i in range(10_000)]
    began = time.perf_counter()
    knows = folder.listen()
    first_s = time.perf_counter() - began
    reads = 0
    real = curve._read

    def counted(path: str) -> tuple[bytes, bytes]:
        nonlocal reads
        reads += 1
        return real(path)

    monkeypatch.setattr(curve, "_read", counted)
    began = time.perf_counter()
    assert all(knows(key) for key in keys[::10])
    hit_s = (time.perf_counter() - began) / 1000
    assert reads == 1000, "one file for each who is known"
    monkeypatch.setattr(curve, "_UNSETTLED_S", -1e6)  # as if all of them were of yesterday
    looks = 0
    real_look = curve._Folder._look

    def look(self: Any, found: os.stat_result) -> None:
        nonlocal looks
        looks += 1
        real_look(self, found)

    monkeypatch.setattr(curve._Folder, "_look", look)
    began = time.perf_counter()
    asked = 0
    while time.perf_counter() - began < 3:
        assert not knows(STRANGER)
        asked += 1
    assert asked > 1000
    assert looks <= 8, "a flood of strangers does not make it look through the folder each time"
    reads = 0
    late = folder.add("late.key")
    began = time.perf_counter()
    assert knows(late), "but a new file is found at once"
    look_s = time.perf_counter() - began
    assert reads == 1
    print(
        f"10,000 keys: read {first_s:.2f} s, known {hit_s * 1e6:.0f} us, strangers {asked / 3:.0f}/s "
        f"with {looks} looks, a new file {look_s * 1e3:.0f} ms"
    )


def test_any_thread_may_ask_while_keys_come_and_go(folder: Connectors) -> None:
    wrong: list[str] = []
    end = threading.Event()

    def ask() -> None:
        while not end.is_set():
            if not folder.knows(folder.good) or folder.knows(STRANGER):
                wrong.append("a wrong answer")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(100):
        key = folder.add(f"n{i % 3}.key")
        assert soon(lambda key=key: folder.knows(key))  # type: ignore[misc]
        (folder.path / f"n{i % 3}.key").unlink()
    end.set()
    for thread in threads:
        thread.join()
    assert wrong == []
