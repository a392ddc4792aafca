"""What a peer sends: what goes on to ZeroMQ, in any pieces, and what never does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rdmaconnect.exchange.zmtp import FRAMES_MAX, Fault, Filter, ZmtpError

NULL, CURVE = b"NULL", b"CURVE"
MAX = 64 * 1024


def filter_of(mechanism: bytes, listens: bool = False) -> Filter:
    return Filter(mechanism, listens, MAX)


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


#: (mechanism, whether this side listens) -> what a peer says before the traffic
SHAKES = {
    (NULL, False): READY,
    (NULL, True): READY,
    (CURVE, False): command(b"WELCOME", bytes(160)) + command(b"READY", bytes(24)),
    (CURVE, True): command(b"HELLO", bytes(194)) + b"\x06" + (257).to_bytes(8, "big") + b"\x08INITIATE" + bytes(248),
}


def message(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256 and not flags & 2:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


@given(st.sampled_from(sorted(SHAKES)), st.lists(st.integers(0, 10_000), max_size=8), st.lists(st.binary(max_size=300)))
def test_a_peer_of_this_protocol_goes_on_in_its_order_however_it_is_cut(
    ends: tuple[bytes, bool], cuts: list[int], bodies: list[bytes]
) -> None:
    whole = greeting(ends[0]) + SHAKES[ends] + b"".join(map(message, bodies))
    made, passed = filter_of(*ends), b""
    for piece in pieces(whole, cuts):
        passed += made.take(piece)
        assert whole.startswith(passed)
    assert passed == whole
    assert made.greeted
    assert made.refused == ""
    assert made.frames == len(bodies)
    assert made.unread == sum(len(message(body)) for body in bodies)


@pytest.mark.parametrize("minor", [0, 1, 2, 255])
def test_a_later_minor_and_major_version_goes_on(minor: int) -> None:
    for major in (3, 4, 255):
        made = filter_of(NULL)
        assert made.take(greeting(major=major, minor=minor)) == greeting(major=major, minor=minor)


def test_nothing_goes_on_before_it_is_known_to_be_no_old_version() -> None:
    whole = greeting()
    made, passed = filter_of(NULL), 0
    for at in range(64):
        passed += len(made.take(whole[at : at + 1]))
        have = at + 1
        # the signature alone lets this side's ZeroMQ say its own version; the mechanism is checked before it goes on
        assert passed == (0 if have < 10 else min(have, 11) if have < 32 else have)
        assert made.greeted is (have == 64)


# ---- what does not


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 300), max_size=5))
@example(b"GET / HTTP/1.1\r\n\r\n", [])
@example(b"\x16\x03\x01\x02\x00\x01\x00", [3])
@example(b"SSH-2.0-OpenSSH_9.6\r\n", [1])
@example(b"\xff" + bytes(9), [])
@example(b"\x01\x00", [])
def test_of_anything_else_no_byte_goes_on_but_a_signature_and_version(data: bytes, cuts: list[int]) -> None:
    made, passed, refused = filter_of(NULL), b"", ZmtpError(Fault.FOREIGN, b"")
    for piece in pieces(data, cuts):
        try:
            passed += made.take(piece)
        except ZmtpError as e:
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
        with pytest.raises(ZmtpError) as caught:
            filter_of(mechanism).take(data)
        assert caught.value.fault is fault
        assert caught.value.passed == b""
        assert str(caught.value).startswith(fault.value + " (")


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
    made, whole = filter_of(expected), greeting(theirs)
    passed = made.take(whole[:cut])
    with pytest.raises(ZmtpError) as caught:
        made.take(whole[cut:])
    assert caught.value.fault is fault
    assert passed + caught.value.passed == whole[:11]


# ---- a refusal in clear


@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("before", [b"", command(b"WELCOME", bytes(160))], ids=["at once", "after the welcome"])
def test_an_error_command_is_read_and_goes_on(as_one: bool, before: bytes) -> None:
    made = filter_of(CURVE)
    whole = greeting(CURVE) + before + command(b"ERROR", b"\x03400")
    if as_one:
        assert made.take(whole) == whole
    else:
        assert b"".join(made.take(whole[at : at + 1]) for at in range(len(whole))) == whole
    assert made.refused == "400"


def test_a_reason_can_be_printed() -> None:
    made = filter_of(CURVE)
    made.take(greeting(CURVE) + command(b"ERROR", b"\x08\x1b[31m\r\n\xff"))
    assert made.refused == "?[31m??\ufffd"


def test_an_error_without_a_reason_is_one() -> None:
    made = filter_of(CURVE)
    made.take(greeting(CURVE) + command(b"ERROR", b"\0"))
    assert made.refused == "no reason given"


# ---- the handshake and the traffic


@pytest.mark.parametrize("ends", sorted(SHAKES), ids=str)
@pytest.mark.parametrize(
    "said",
    [
        message(b"a message before any key"),
        message(b"\x07MESSAGE" + bytes(40)),
        command(b"READY", bytes(24)) * 2,
        command(b"WELCOME", bytes(159)),
        command(b"HELLO", bytes(193)),
        command(b"INITIATE"),
        command(b"PING", b"\0\0"),
        b"\x05\x06\x05READY",  # one that goes on in another frame
        b"\x06" + (5000).to_bytes(8, "big") + b"\x05READY" + bytes(4994),
        b"\x06" + (2**63).to_bytes(8, "big") + b"\x05READY",
        b"\x04\x00",
    ],
)
def test_only_the_commands_of_the_handshake_are_let_in_each_once(ends: tuple[bytes, bool], said: bytes) -> None:
    """In particular no READY before the WELCOME, which libzmq's client takes without having a key."""
    made = filter_of(*ends)
    whole = greeting(ends[0]) + said + message(b"later" * 10)
    with pytest.raises(ZmtpError) as caught:
        made.take(whole)
    assert caught.value.fault in (Fault.HANDSHAKE, Fault.TRAFFIC)


def test_a_ready_before_the_welcome_is_refused() -> None:
    made = filter_of(CURVE)
    with pytest.raises(ZmtpError) as caught:
        made.take(greeting(CURVE) + command(b"READY", bytes(24)))
    assert caught.value.fault is Fault.HANDSHAKE


@pytest.mark.parametrize("size", [0, 1, 2, 10, 16])
def test_older_peers_may_ask_whether_this_side_is_there(size: int) -> None:
    made = filter_of(NULL)
    whole = greeting() + READY + command(b"PING", b"\0\x64" + bytes(size)) * 10_000 + command(b"PONG", bytes(size))
    assert made.take(whole) == whole
    assert made.unread == 0


@pytest.mark.parametrize(
    "said",
    [
        message(b"part", flags=1),
        message(b"x" * 300, flags=1),
        command(b"PING"),  # too short for its TTL
        command(b"PING", bytes(19)),
        command(b"PONG", bytes(17)),
        command(b"SUBSCRIBE", b"all"),
        command(b"CANCEL", b"all"),
        command(b"JOIN", b"group"),
        b"\x04\x00",
        b"\x08\x01x",
        b"\x80\x01x",
        b"\xff" + bytes(20),
    ],
)
def test_what_is_no_message_of_this_exchange_is_refused(said: bytes) -> None:
    for at_once in (True, False):
        made = filter_of(NULL)
        made.take(greeting() + READY + message(b"first"))
        pieces_of_it = [said] if at_once else [said[at : at + 1] for at in range(len(said))]
        with pytest.raises(ZmtpError) as caught:
            list(map(made.take, pieces_of_it))
        assert caught.value.fault is Fault.TRAFFIC


@pytest.mark.parametrize("size", [MAX + 1, 2**31, 2**63, 2**64 - 1])
def test_a_longer_message_is_refused_by_its_head(size: int) -> None:
    made = filter_of(NULL)
    made.take(greeting() + READY)
    assert made.take(message(bytes(MAX))) == message(bytes(MAX))
    with pytest.raises(ZmtpError) as caught:
        made.take(b"\x02" + size.to_bytes(8, "big") + b"x" * 30)
    assert caught.value.fault is Fault.LONG


def test_the_limit_can_be_lowered() -> None:
    made = filter_of(NULL)
    made.take(greeting() + READY)
    made.max_frame = 100
    with pytest.raises(ZmtpError):
        made.take(message(bytes(101)))


def test_there_is_a_limit_to_messages_that_nobody_has_taken() -> None:
    made = filter_of(NULL)
    made.take(greeting() + READY)
    made.take(message(b"") * FRAMES_MAX)
    made.frames = 0
    made.take(message(b"") * FRAMES_MAX)
    with pytest.raises(ZmtpError) as caught:
        made.take(message(b""))
    assert caught.value.fault is Fault.LONG


def test_nothing_that_has_gone_on_is_kept() -> None:
    made = filter_of(NULL)
    made.take(greeting() + READY)
    for _ in range(1000):
        whole = message(b"x" * 1000)
        assert made.take(whole) == whole
        made.frames = made.unread = 0
    assert len(made._head) == 0


@given(st.sampled_from(sorted(SHAKES)), st.binary(max_size=400), st.lists(st.integers(0, 600), max_size=6))
def test_whatever_follows_goes_on_unchanged_or_is_refused_however_it_is_cut(
    ends: tuple[bytes, bool], more: bytes, cuts: list[int]
) -> None:
    whole = greeting(ends[0]) + SHAKES[ends] + more
    outcomes = []
    for cut in (cuts, []):
        made, passed, fault = filter_of(*ends), b"", None
        for piece in pieces(whole, cut):
            try:
                passed += made.take(piece)
            except ZmtpError as e:
                fault = e.fault
                break
        assert whole.startswith(passed)
        outcomes.append(fault)
    assert outcomes[0] == outcomes[1]
