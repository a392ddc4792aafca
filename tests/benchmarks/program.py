"""What the Python programs here share: told what to do line by line on stdin, each answers with one JSON line.

    PROGRAM listen|connect DEVICE GID_INDEX ADDRESS

Both sides are told the same words and numbers. The listening one says first at which port it waits; the last number is
that port, and 0 for the listening side. ``first WORD NUMBERS...`` does it in a child that has done nothing before,
``timed WORD NUMBERS...`` in a process that takes the time in each verb, from there on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

#: bytes of the messages that prove a queue pair, and of those that go to and fro
MESSAGE = 64
#: receives of a queue pair that plays ping-pong, posted anew as one list when all are used
RECEIVES = 16

now = time.monotonic_ns


def say(**words: Any) -> None:
    """Answer, with one line."""
    print(json.dumps(words), flush=True)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Program:
    """One side; a method for each word that it can be told, with the numbers as arguments."""

    def __init__(self, side: str, device: str, gid_index: str, address: str) -> None:
        self.listens, self.device, self.gid_index, self.address = side == "listen", device, int(gid_index), address
        self.listener: socket.socket | None = None

    @classmethod
    def main(cls) -> None:
        """Do what stdin says until it ends."""
        program = cls(*sys.argv[1:])
        say(started=1, **program.started())
        for line in sys.stdin:
            word, *numbers = line.split()
            if word == "timed":
                program.time_verbs()
                word, *numbers = numbers
            if word != "first":
                say(**program.obey(word, numbers))
            elif pid := os.fork():
                _, status = os.waitpid(pid, 0)
                if status:
                    sys.exit(f"{line.strip()}: the child ended with {os.waitstatus_to_exitcode(status)}")
            else:
                say(**program.obey(numbers[0], numbers[1:]))
                program.obey("close", [])
                sys.stdout.flush()
                os._exit(0)

    def time_verbs(self) -> None:
        """Take the time in each verb from here on, where the program can do that."""
        raise NotImplementedError(f"{type(self).__name__} has no times of its verbs")

    def obey(self, word: str, numbers: list[str]) -> dict[str, Any]:
        """Do one thing."""
        method = getattr(self, word)
        return method(*map(int, numbers)) or {}

    def ready(self, port: int = 0) -> None:
        """Say, on the listening side, that the other one may begin."""
        if self.listens:
            say(ready=1, port=port)

    def started(self) -> dict[str, Any]:
        """What it has to tell at its start."""
        return {}

    def dial(self, port: int) -> socket.socket:
        """A TCP connection to the other side."""
        if self.listens:
            if self.listener is None:
                self.listener = socket.create_server((self.address, 0))
            self.ready(self.listener.getsockname()[1])
            sock, _ = self.listener.accept()
        else:
            sock = socket.create_connection((self.address, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def swap(sock: socket.socket, mine: bytes) -> bytes:
    """Send bytes, and take as many."""
    sock.sendall(mine)
    theirs = bytearray()
    while len(theirs) < len(mine):
        more = sock.recv(len(mine) - len(theirs))
        if not more:
            raise ConnectionError("the other side ended")
        theirs += more
    return bytes(theirs)


def pattern(listens: bool, length: int = MESSAGE) -> bytes:
    """What a side sends."""
    return bytes([0xA5 if listens else 0x5A]) * length


def check(what: bytes, listens: bool) -> None:
    """Is it what the other side sends?"""
    if what != pattern(not listens, len(what)):
        raise ValueError(f"a message came changed: {what.hex()}")
