"""TCP sockets of the exchange: what the one that listens takes, and how soon its port is free again."""

from __future__ import annotations

import errno
import re
import select
import socket
import time
from typing import Any

import pytest

from rdmaconnect.errors import VerbsError
from rdmaconnect.exchange.tcp import has_unread, listen, set_options, silent_s
from rdmaconnect.exchange.url import Address, addresses

LOCAL = addresses("127.0.0.1", 0, bind=True)


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=5)


def accept(listener: socket.socket) -> socket.socket:
    listener.settimeout(5)
    sock, _ = listener.accept()
    return sock


def test_all_addresses_are_those_of_ipv6_and_ipv4() -> None:
    with listen(addresses("*", 0, bind=True)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert listener.getblocking() is False
        assert listener.family == socket.AF_INET6
        for host in ("127.0.0.1", "::1"):
            with connect(port, host), accept(listener):
                pass


def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def no_ipv6(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_ipv6)
        listener = listen(addresses("*", 0, bind=True))
    with listener, connect(listener.getsockname()[1]), accept(listener):
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_first_address_that_is_here_is_taken() -> None:
    elsewhere = Address(socket.AF_INET, ("192.0.2.1", 0))
    with listen([elsewhere, *LOCAL]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match=r"^\[Errno 99\] listen on 192\.0\.2\.1:0: Cannot assign .* Give an address of"):
        listen([elsewhere])
    with pytest.raises(ValueError, match="there is no address"):
        listen([])


def test_a_port_that_is_taken_is_said_to_be_so_and_no_other_address_is_tried() -> None:
    with listen(LOCAL) as listener:
        port = listener.getsockname()[1]
        there = addresses("127.0.0.1", port, bind=True)
        told = re.escape(f"listen on 127.0.0.1:{port}: Address already in use. Another program listens there")
        with pytest.raises(OSError, match=told) as caught:
            listen([*there, *LOCAL])
        assert caught.value.errno == errno.EADDRINUSE


def test_a_port_is_free_at_once_though_connections_of_it_live() -> None:
    listener = listen(LOCAL)
    port = listener.getsockname()[1]
    with connect(port) as near, accept(listener) as far:
        far.sendall(b"x")
        listener.close()
        with listen(addresses("127.0.0.1", port, bind=True)) as again, connect(port), accept(again):
            assert near.recv(1) == b"x"
        far.close()  # this side closes first, and so is left in TIME_WAIT
    with listen(addresses("127.0.0.1", port, bind=True)):
        pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_want_of_descriptors_is_told_with_what_to_do(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> socket.socket:
        raise OSError(number, "no descriptor")

    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(VerbsError, match=r"^listen on 127\.0\.0\.1:0: socket: E[MN]FILE .*\. \w+") as caught:
        listen(LOCAL)
    assert caught.value.errno == number


def test_nothing_is_left_open_when_the_address_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    real = socket.socket
    monkeypatch.setattr(socket, "socket", lambda *args: made.append(real(*args)) or made[-1])
    with pytest.raises(OSError, match="Cannot assign"):
        listen([Address(socket.AF_INET, ("192.0.2.1", 0))])
    assert [sock.fileno() for sock in made] == [-1]


def test_a_connection_asks_after_its_peer() -> None:
    with listen(LOCAL) as listener, connect(listener.getsockname()[1]) as sock:
        set_options(sock)
        tcp = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in OPTIONS}
        assert tcp == OPTIONS
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


OPTIONS = {"NODELAY": 1, "KEEPIDLE": 5, "KEEPINTVL": 1, "KEEPCNT": 5, "USER_TIMEOUT": 10000}


def test_how_long_the_other_end_has_been_silent_also_where_it_waited_to_be_accepted() -> None:
    with listen(LOCAL) as listener, connect(listener.getsockname()[1]) as there:
        time.sleep(0.3)
        with accept(listener) as here:
            assert 0.2 < silent_s(here) < 5
            assert not has_unread(here)
            there.sendall(b"x")
            select.select([here], [], [], 5)
            assert silent_s(here) < 0.2
            assert has_unread(here)
            assert here.recv(1) == b"x"
            time.sleep(0.3)
            assert silent_s(here) > 0.2
    here.close()
    assert (silent_s(here), has_unread(here)) == (0.0, False), "one that is gone tells when it is read"
