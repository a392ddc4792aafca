"""The vectors in another language: C reads all of them, and writes those that it uses byte for byte alike."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgpack
import pytest
from peer_in_c import compiled, lacking
from samples import ID
from vectors import VALUES, read

LACKING = lacking("msgpack.h")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)

#: of the others it leaves out what it has no use for: ports, stages, wants, differences, more queue pairs than one
ALIKE = {
    "hello", "hello-beats", "reply-lid", "ready", "joined", "proof", "beat", "beat-ask", "resume", "unlisted", "reject",
    "reject-again", "bye", "bye-lost", "question",
}  # fmt: skip
HELLO = msgpack.unpackb(read("hello"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("read", tmp_path_factory.mktemp("wire"))


def run(program: Path, *frames: bytes) -> subprocess.CompletedProcess[str]:
    lines = "".join(f"{frame.hex()}\n" for frame in frames)
    return subprocess.run([program], input=lines, capture_output=True, text=True, timeout=60, check=False)


def test_each_vector_is_read_and_those_in_use_are_written_alike(program: Path) -> None:
    frames = {name: read(name) for name in VALUES}
    done = run(program, *frames.values())
    assert done.stderr == ""
    lines = dict(zip(frames, done.stdout.splitlines(), strict=True))
    assert {name: line.split()[0] for name, line in lines.items()} == {name: name.split("-")[0] for name in frames}
    assert {name for name, line in lines.items() if line.split()[1] == frames[name].hex()} == ALIKE


def test_what_is_not_known_is_passed_over(program: Path) -> None:
    later = {"v": 1, "t": "unheard", "id": ID, "of": [{}]}
    done = run(program, msgpack.packb(HELLO | {"new": 1}), msgpack.packb(later))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"hello {read('hello').hex()}")
    assert done.stdout.splitlines()[1].startswith("unheard ")


@pytest.mark.parametrize(
    "body",
    [
        HELLO | {"v": 2}, HELLO | {"id": ID[1:]}, HELLO | {"qps": []}, HELLO | {"qps": [[0, 1, 2]]}, {"v": 1}, [], 7,
        HELLO | {"port": HELLO["port"] | {"lid": 65536}}, HELLO | {"port": HELLO["port"] | {"dev": "x" * 300}},
        HELLO | {"port": HELLO["port"] | {"gids": [[b"", 0, 0, ""]]}}, HELLO | {"data": bytes(4097)},
        {key: value for key, value in HELLO.items() if key != "rsz"}, HELLO | {"beat": 99},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_not_as_it_should_be_is_refused(program: Path, body: Any) -> None:
    done = run(program, msgpack.packb(body))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1


def test_bytes_that_are_no_message_are_refused(program: Path) -> None:
    for frame in (b"\xc1", b"", read("hello")[:-1], read("bye") + b"\0"):
        assert run(program, frame).returncode == 1, frame
