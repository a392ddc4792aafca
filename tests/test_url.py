"""Where a host listens: what a caller may give, and what that means."""

from __future__ import annotations

from typing import Any

import pytest

from rdmaconnect.url import DEFAULT_PORT, loopback_of, tcp_url


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
