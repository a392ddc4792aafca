"""ZeroMQ's end of an exchange: a DEALER behind a local stream that nobody else can reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import pytest
from exchange_ends import PATIENCE_S, until

from rdmaconnect.errors import VerbsError
from rdmaconnect.exchange import link
from rdmaconnect.exchange.link import Link, check_descriptors

T = TypeVar("T")


class Pair:
    """Two links whose streams are joined by hand: what one says comes out of the other."""

    def __init__(self, max_frame: int = 1000) -> None:
        self.links = Link(max_frame, None, False), Link(max_frame, None, True)
        self.ends = [until(made.accept) for made in self.links]
        for made in self.links:
            made.close_ear()
        self.threads = [
            threading.Thread(target=self._carry, args=ends) for ends in (tuple(self.ends), tuple(self.ends[::-1]))
        ]
        for end in self.ends:
            end.setblocking(True)
        for thread in self.threads:
            thread.start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for made in self.links:
            made.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for end in self.ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def take(made: Link) -> bytes:
    found = until(made.recv)
    assert found[1] == ""
    return found[0]


def test_frames_go_there_and_back(pair: Pair) -> None:
    here, there = pair.links
    for frame in (b"one", b"", bytes(1000)):
        assert here.send(frame)
        assert take(there) == frame
    assert there.send(b"back")
    assert take(here) == b"back"
    assert here.recv() is None
    assert not here.waiting


def test_its_descriptor_tells_of_a_frame_and_waiting_where_that_was_swallowed(pair: Pair) -> None:
    here, there = pair.links
    assert here.send(b"x")
    until(lambda: there.waiting)
    assert there.recv() == (b"x", "")
    assert not there.waiting


def test_frames_that_nobody_takes_are_bounded() -> None:
    made = Link(1000, None, False)
    try:
        sent = 0
        while made.send(b"x"):
            sent += 1
            assert sent < 100
        assert 1 <= sent <= 2 * link.SEND_QUEUE
    finally:
        made.close()


def test_only_this_process_may_be_at_the_other_end() -> None:
    """A local stranger that finds the name is turned away, and ZeroMQ's own connection is taken all the same."""
    made = Link(1000, None, False)
    try:
        assert made.ear is not None
        name = made.ear.getsockname()
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(10); "
            f"s.connect({name!r}); print(s.recv(1))"
        )
        stranger = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        accepted: list[socket.socket] = []

        def look() -> bool:
            found = made.accept()
            if found is not None:
                accepted.append(found)
            return stranger.poll() is not None

        until(look)
        assert stranger.communicate()[0].strip() == "b''"
        assert len(accepted) == 1
        accepted[0].close()
    finally:
        made.close()


def test_once_connected_nobody_finds_it() -> None:
    made = Link(1000, None, False)
    try:
        assert made.ear is not None
        name = made.ear.getsockname()
        end = until(made.accept)
        made.close_ear()
        assert made.ear is None
        with socket.socket(socket.AF_UNIX) as other, pytest.raises(ConnectionRefusedError):
            other.connect(name)
        end.close()
    finally:
        made.close()
        made.close()


def test_without_descriptors_there_is_an_error_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.open
    left = [2]

    def few(path: str, flags: int) -> int:
        if not left[0]:
            raise OSError(24, "Too many open files")
        left[0] -= 1
        return real(path, flags)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", few)
    with pytest.raises(VerbsError, match="do this: zmq_socket: EMFILE"):
        check_descriptors(3, "do this")
    assert len(os.listdir("/proc/self/fd")) == before
    left[0] = 2
    check_descriptors(2, "do this")
    assert len(os.listdir("/proc/self/fd")) == before


def test_there_is_one_context_in_a_process_and_another_in_a_child() -> None:
    assert link.context() is link.context()
    inherited = link.context()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if link.context() is not inherited and not link.context().closed else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
