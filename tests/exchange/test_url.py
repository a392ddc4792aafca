"""Where a host listens: what a caller may give, and what that means."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.errors import shown
from rdmaconnect.exchange.url import DEFAULT_PORT, Address, addresses, host_of, loopback_of, port_of, tcp_url


@pytest.mark.parametrize(
    ("peer", "url"),
    [
        ("host", f"tcp://host:{DEFAULT_PORT}"),
        ("host:1", "tcp://host:1"),
        ("host:65535", "tcp://host:65535"),
        ("  host:1 ", "tcp://host:1"),
        ("10.0.0.7", f"tcp://10.0.0.7:{DEFAULT_PORT}"),
        ("10.0.0.7:5", "tcp://10.0.0.7:5"),
        ("::1", f"tcp://[::1]:{DEFAULT_PORT}"),
        ("[::1]", f"tcp://[::1]:{DEFAULT_PORT}"),
        ("[::1]:5", "tcp://[::1]:5"),
        ("fe80::1%eth0", f"tcp://[fe80::1%eth0]:{DEFAULT_PORT}"),
        ("[fe80::1%eth0]:5", "tcp://[fe80::1%eth0]:5"),
        ("tcp://host", f"tcp://host:{DEFAULT_PORT}"),
        ("tcp://host:5", "tcp://host:5"),
        ("tcp://[::1]:5", "tcp://[::1]:5"),
    ],
)
def test_a_peer_is_named_in_many_ways(peer: str, url: str) -> None:
    assert tcp_url(peer) == url
    assert tcp_url(url) == url
    assert tcp_url(peer, bind=True) == url
    assert tcp_url(f"tcp://[{host_of(url)}]:{port_of(url)}" if ":" in host_of(url) else url) == url


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("*", f"tcp://*:{DEFAULT_PORT}"),
        ("*:0", "tcp://*:0"),
        ("", f"tcp://*:{DEFAULT_PORT}"),
        (":5", "tcp://*:5"),
        (":0", "tcp://*:0"),
        ("127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("[::1]:0", "tcp://[::1]:0"),
    ],
)
def test_a_listener_may_take_all_addresses_and_any_port(address: str, url: str) -> None:
    assert tcp_url(address, bind=True) == url


@pytest.mark.parametrize(
    "peer",
    [
        "", " ", ":5", "host:", "host:0", "host:65536", "host:-1", "host:+5", "host:5x", "host:1_0",
        "host:\uff11\uff12",
        "[::1", "[::1]:0", "[::1]:x", "tcp://", "tcp://:5", "tcp://tcp://host", "udp://host:5", "http://host", "ipc:///tmp/x",
    ],
)  # fmt: skip
def test_what_names_no_peer_is_refused_as_it_was_given(peer: str) -> None:
    with pytest.raises(ValueError, match="the peer is ") as caught:
        tcp_url(peer)
    assert repr(peer) in str(caught.value)


@pytest.mark.parametrize("peer", [None, 5, b"host", ("host", 5)])
def test_a_peer_is_text(peer: Any) -> None:
    with pytest.raises(TypeError, match=r"the peer is .*: give a text such as 'host' or 'host:port'"):
        tcp_url(peer)


def test_a_port_counts_where_the_peer_names_none() -> None:
    assert tcp_url("host", port=5) == "tcp://host:5"
    assert tcp_url("::1", port=5) == "tcp://[::1]:5"
    assert tcp_url(f"host:{DEFAULT_PORT}", port=5) == f"tcp://host:{DEFAULT_PORT}"
    assert tcp_url("*", bind=True, port=5) == "tcp://*:5"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.1.1", "127.0.1.1"), ("localhost", "127.0.0.1|::1"), ("::1", "::1"), ("::ffff:127.0.0.1", "127.0.0.1"),
        ("192.0.2.1", ""), ("::", ""), ("fe80::1%lo", ""), ("*", ""), ("", ""), ("no.such.name.invalid", ""),
    ],
)  # fmt: skip
def test_an_address_that_means_each_host_itself_is_known(host: str, address: str) -> None:
    assert loopback_of(host) in address.split("|")


# ---- what cannot be a host

#: host -> what its error says
NO_HOSTS = {
    "a b": "has no ' ' in it", "a\tb": r"has no '\\t' in it", "a\0b": r"has no '\\x00' in it",
    "a@b": "has no '@' in it",
    "eth0%1": "has no '%' in it", "b\u00fccher.example": "begins with xn--", "a\uff0eb": "begins with xn--",
    "a..b": "nothing before or between its dots", ".a": "nothing before or between", "..": "nothing before or between",
    "a" * 64: "64 characters, 64 between two dots: a name has at most 253, and 63", "a." * 127 + "a": "it has 255 char",
    "::1::": "Give an IPv6 address, such as", "::1%": "Give an IPv6 address, such as", "12345::": "Give an IPv6",
}  # fmt: skip


@pytest.mark.parametrize(("host", "words"), NO_HOSTS.items(), ids=ascii)
def test_what_cannot_be_a_host_is_told_before_anything_is_looked_up(
    host: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: pytest.fail("it was looked up"))
    for bind in (False, True):
        with pytest.raises(ValueError, match=words) as caught:
            addresses(host, 5, bind=bind)
        assert shown(host) in str(caught.value)
        with pytest.raises(ValueError, match=words):
            tcp_url(f"[{host}]:5" if ":" in host else f"{host}:5", bind=bind)


@pytest.mark.parametrize("host", ["a" * 63, ".".join(["a" * 63] * 3 + ["a" * 61]), "a." * 126 + "a.", "a_b-1.c", "9"])
def test_the_longest_names_and_odd_ones_are_looked_up(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, host, "10.0.0.7")
    assert addresses(host, 5) == [V4]


@pytest.mark.parametrize("host", ["", "*"])
def test_only_who_listens_may_leave_the_host_out(host: str) -> None:
    with pytest.raises(ValueError, match=r"^the host is "):
        addresses(host, 5)
    every = addresses(host, 0, bind=True)
    assert [(a.family, a.sockaddr) for a in every] == [
        (socket.AF_INET6, ("::", 0, 0, 0)), (socket.AF_INET, ("0.0.0.0", 0)),
    ]  # fmt: skip


@given(st.text(max_size=300) | st.text("ab.:[]%*-0159f ", max_size=40))
def test_a_text_is_a_url_that_means_itself_or_a_valueerror_in_words(text: str) -> None:
    for bind in (False, True):
        try:
            url = tcp_url(text, bind=bind)
        except ValueError as e:
            assert str(e).startswith(f"the peer is {shown(text)}: ")  # noqa: PT017
        else:
            assert tcp_url(url, bind=bind) == url
            assert 0 <= port_of(url) <= 65535
            assert host_of(url)


# ---- the addresses of a host

V4 = Address(socket.AF_INET, ("10.0.0.7", 5))
V6 = Address(socket.AF_INET6, ("fd00::2", 5, 0, 0))
LINK = Address(socket.AF_INET6, ("fe80::1", 5, 0, 4), "eth0")


def resolves(monkeypatch: pytest.MonkeyPatch, name: str, *found: str | Exception) -> None:
    """Let a name have these addresses, ``%number`` for a scope, and this host the interfaces lo and eth0."""

    def look_up(host: str, *args: Any, **more: Any) -> list[Any]:
        assert host == name
        infos: list[Any] = []
        for text in found:
            if isinstance(text, Exception):
                raise text
            address, _, scope = text.partition("%")
            if ":" in text:
                infos.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0, 0, int(scope or 0))))
            else:
                infos.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)))
        return infos

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (4, "eth0"), (7, "ib0")])


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", V4), ("::ffff:10.0.0.7", V4), ("fd00::2", V6), ("FD00:0::2", V6),
        ("fe80::1%eth0", LINK), ("fe80::1%4", LINK),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bind", [False, True])
def test_a_number_is_its_own_address(host: str, address: Address, bind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, "not looked up")
    assert addresses(host, 5, bind=bind) == [address]


def test_a_name_has_each_of_its_addresses_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, "node1", "fd00::2", "10.0.0.7", "fe80::1%4", "::ffff:10.0.0.7", "10.0.0.7", "fd00::2", "::1")
    found = addresses("node1", 5)
    assert found == [V6, V4, LINK, Address(socket.AF_INET6, ("::1", 5, 0, 0))]
    assert [str(address) for address in found] == ["[fd00::2]:5", "10.0.0.7:5", "[fe80::1%eth0]:5", "[::1]:5"]


def test_a_link_local_address_needs_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves(monkeypatch, "node1", "fe80::1", "10.0.0.7")
    assert addresses("node1", 5) == [V4], "the address that is whole is used"
    for host, seen in (("fe80::1", "fe80::1 is link-local: every interface has its own"),
                       ("fe80::1%nope", "there is no interface nope here"),
                       ("fe80::1%9", "there is no interface 9 here"),
                       ("fe80::1%" + "9" * 9000, "there is no interface 9")):  # fmt: skip
        for bind, deed in ((False, "connect to"), (True, "listen on")):
            with pytest.raises(ValueError, match=r"link-local|there is no interface") as caught:
                addresses(host, 5, bind=bind)
            assert str(caught.value).startswith(f"{deed} {host}: {seen}")
            assert str(caught.value).endswith(". Say on which one it is: fe80::1%eth0, fe80::1%ib0")
    with pytest.raises(ValueError, match=r"only a link-local address has an interface: leave %eth0 out$"):
        addresses("fd00::2%eth0", 5)
    resolves(monkeypatch, "node1", "fe80::1")
    with pytest.raises(ValueError, match=r"^connect to node1: the name stands for fe80::1, and fe80::1 is link-local"):
        addresses("node1", 5)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    with pytest.raises(ValueError, match="this host has no interface but lo"):
        addresses("fe80::1", 5)


def test_an_interface_is_not_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # the kernel would look for a module of that name, which takes 0.3 s and more
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: pytest.fail("asked by name"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: pytest.fail("asked by name"))
    with pytest.raises(ValueError, match="there is no interface nope here"):
        addresses("fe80::1%nope", 5)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "not known"), ValueError, r"does not resolve \(not known\)\. Check its sp"),
        (socket.gaierror(socket.EAI_AGAIN, "for now"), ValueError, r"the name servers gave no answer \(for now\)"),
        (UnicodeError("label too long"), ValueError, "does not resolve"),
        (OSError(errno.EMFILE, "Too many open files"), OSError, "look up the name: Too many open files"),
    ],
)
def test_a_name_without_an_address_is_told_with_what_was_seen(
    error: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves(monkeypatch, "node1", error)
    for bind, deed in ((False, "connect to"), (True, "listen on")):
        with pytest.raises(kind, match=words) as caught:
            addresses("node1", 5, bind=bind)
        text = str(caught.value)
        assert f"{deed} node1: " in text
        assert type(caught.value) is kind
        assert "an address" in text


def test_names_of_this_host_are_looked_up_for_real() -> None:
    assert {address.sockaddr[0] for address in addresses("localhost", 5)} <= {"127.0.0.1", "::1"}
    with pytest.raises(ValueError, match=r"^connect to no\.such\.name\.invalid: the name"):
        addresses("no.such.name.invalid", 5)
