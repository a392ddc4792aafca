"""The first bytes of a peer: what goes on to ZeroMQ, in any pieces, and what never does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rdmaconnect.exchange.greeting import Fault, Greeting, GreetingError

NULL, CURVE = b"NULL", b"CURVE"


def greeting(mechanism: bytes = NULL, major: int = 3, minor: int = 1, as_server: int = 0) -> bytes:
    """RFC 23: signature, version, mechanism, as-server, filler."""
    signature = b"\xff" + bytes(7) + b"\x01" + b"\x7f"
    return signature + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, body: bytes = b"") -> bytes:
    inner = bytes([len(name)]) + name + body
    return bytes([4, len(inner)]) + inner


READY = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
assert len(greeting()) == 64


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(at)]


# ---- what goes on


@given(st.sampled_from([NULL, CURVE]), st.lists(st.integers(0, 10_000), max_size=8), st.binary(max_size=300))
def test_all_of_a_greeting_that_fits_goes_on_in_its_order_however_it_is_cut(
    mechanism: bytes, cuts: list[int], more: bytes
) -> None:
    whole = greeting(mechanism) + READY + more
    made, passed = Greeting(mechanism), b""
    for piece in pieces(whole, cuts):
        passed += made.take(piece)
        assert whole.startswith(passed)
    assert passed == whole
    assert made.complete
    assert made.refused == ""


@pytest.mark.parametrize("minor", [0, 1, 2, 255])
def test_a_later_minor_and_major_version_goes_on(minor: int) -> None:
    for major in (3, 4, 255):
        made = Greeting(NULL)
        assert made.take(greeting(major=major, minor=minor)) == greeting(major=major, minor=minor)


def test_nothing_goes_on_before_it_is_known_to_be_no_old_version() -> None:
    whole = greeting()
    made, passed = Greeting(NULL), 0
    for at in range(64):
        passed += len(made.take(whole[at : at + 1]))
        have = at + 1
        # the signature alone lets this side's ZeroMQ say its own version; the mechanism is checked before it goes on
        assert passed == (0 if have < 10 else min(have, 11) if have < 32 else have)
        assert made.complete is (have == 64)


# ---- what does not


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 300), max_size=5))
@example(b"GET / HTTP/1.1\r\n\r\n", [])
@example(b"\x16\x03\x01\x02\x00\x01\x00", [3])
@example(b"SSH-2.0-OpenSSH_9.6\r\n", [1])
@example(b"\xff" + bytes(9), [])
@example(b"\x01\x00", [])
def test_of_anything_else_no_byte_goes_on_but_a_signature_and_version(data: bytes, cuts: list[int]) -> None:
    made, passed, refused = Greeting(NULL), b"", GreetingError(Fault.FOREIGN, b"")
    for piece in pieces(data, cuts):
        try:
            passed += made.take(piece)
        except GreetingError as e:
            passed, refused = passed + e.passed, e
            break
    assert str(refused).isprintable()
    assert data.startswith(refused.seen)
    assert data.startswith(passed)
    if data[:12] != greeting()[:12]:
        assert passed in (b"", data[:10], data[:11])
    if data[0] != 0xFF:
        assert passed == b""


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Fault.FOREIGN),
        (b"\x16\x03\x01", Fault.FOREIGN),
        (b"x", Fault.FOREIGN),
        (b"\xff" + bytes(9), Fault.FOREIGN),  # a signature without its last byte
        (b"\xff" + bytes(7) + b"\x01\x7f\x00", Fault.OLD),  # ZMTP 1.0 of a later library
        (greeting(major=1), Fault.OLD),
        (greeting(major=2), Fault.OLD),
        (b"\x01\x00", Fault.FOREIGN),  # ZMTP 1.0 without a signature
    ],
)
def test_what_speaks_no_zmtp_3_is_told_apart(data: bytes, fault: Fault) -> None:
    for mechanism in (NULL, CURVE):
        with pytest.raises(GreetingError) as caught:
            Greeting(mechanism).take(data)
        assert caught.value.fault is fault
        assert caught.value.passed == b""
        assert str(caught.value).startswith(fault.value + " (it began with ")


@pytest.mark.parametrize(
    ("expected", "theirs", "fault"),
    [
        (CURVE, NULL, Fault.UNPROTECTED),
        (NULL, CURVE, Fault.PROTECTED),
        (NULL, b"PLAIN", Fault.MECHANISM),
        (CURVE, b"GSSAPI", Fault.MECHANISM),
        (CURVE, b"CURVEX", Fault.MECHANISM),
        (CURVE, b"", Fault.MECHANISM),
        (NULL, b"NULL\0x", Fault.MECHANISM),
    ],
)
@pytest.mark.parametrize("cut", [0, 10, 11, 31])
def test_another_mechanism_is_told_by_name_and_lets_no_more_than_the_version_through(
    expected: bytes, theirs: bytes, fault: Fault, cut: int
) -> None:
    made, whole = Greeting(expected), greeting(theirs)
    passed = made.take(whole[:cut])
    with pytest.raises(GreetingError) as caught:
        made.take(whole[cut:])
    assert caught.value.fault is fault
    assert passed + caught.value.passed == whole[:11]


# ---- a refusal in clear


@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("before", [b"", command(b"WELCOME", bytes(100))], ids=["at once", "after the welcome"])
def test_an_error_command_is_read_and_goes_on(as_one: bool, before: bytes) -> None:
    made = Greeting(CURVE)
    whole = greeting(CURVE) + before + command(b"ERROR", b"\x03400")
    if as_one:
        assert made.take(whole) == whole
    else:
        assert b"".join(made.take(whole[at : at + 1]) for at in range(len(whole))) == whole
    assert made.refused == "400"


def test_a_reason_can_be_printed() -> None:
    made = Greeting(CURVE)
    made.take(greeting(CURVE) + command(b"ERROR", b"\x08\x1b[31m\r\n\xff"))
    assert made.refused == "?[31m??\ufffd"


def test_an_error_without_a_reason_is_one() -> None:
    made = Greeting(CURVE)
    made.take(greeting(CURVE) + command(b"ERROR", b"\0"))
    assert made.refused == "no reason given"


@pytest.mark.parametrize(
    "more",
    [
        command(b"READY") + command(b"READY") + command(b"READY") + command(b"ERROR", b"\x03400"),
        b"\x00\x09\x05ERROR\x03400",  # a message
        b"\x06" + (11).to_bytes(8, "big") + b"\x05ERROR\x03400",  # a long command
        bytes([4, 200]) + b"\x05READY" + bytes(194) + b"\x00" * 3000,
    ],
)
def test_what_comes_later_or_otherwise_is_no_refusal(more: bytes) -> None:
    made = Greeting(CURVE)
    made.take(greeting(CURVE) + more)
    assert made.refused == ""


def test_what_comes_after_the_handshake_is_not_kept() -> None:
    made = Greeting(NULL)
    made.take(greeting() + READY)
    for _ in range(1000):
        assert made.take(b"x" * 1000) == b"x" * 1000
    assert len(made._head) == 0


@given(st.binary(max_size=400), st.lists(st.integers(0, 600), max_size=6))
def test_whatever_follows_a_greeting_goes_on_unchanged(more: bytes, cuts: list[int]) -> None:
    made, whole = Greeting(CURVE), greeting(CURVE) + more
    assert b"".join(made.take(piece) for piece in pieces(whole, cuts)) == whole
    assert made.refused.isprintable()
