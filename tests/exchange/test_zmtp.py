"""What a peer sends, before ZeroMQ sees it: what goes on, in any pieces, and what never does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rdmaconnect.exchange import zmtp
from rdmaconnect.exchange.zmtp import FRAMES_MAX, Fault, Filter, ZmtpError

NULL, CURVE = b"NULL", b"CURVE"


def greeting(mechanism: bytes = NULL, major: int = 3, minor: int = 1, as_server: int = 0) -> bytes:
    """RFC 23: signature, version, mechanism, as-server, filler."""
    signature = b"\xff" + bytes(7) + b"\x01" + b"\x7f"
    return signature + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, body: bytes = b"") -> bytes:
    inner = bytes([len(name)]) + name + body
    return bytes([4, len(inner)]) + inner


def frame(body: bytes, flags: int = 0) -> bytes:
    """RFC 23: a message, or with flag 4 a command; with flag 2 the size has 8 bytes."""
    size = len(body).to_bytes(8 if flags & 2 else 1, "big")
    return bytes([flags]) + size + body


READY = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
assert len(greeting()) == 64
#: mechanism, whether this side listens -> what a sound peer says before its messages
HANDSHAKES = {
    (NULL, True): READY,
    (NULL, False): READY,
    (CURVE, True): command(b"HELLO", bytes(194)) + frame(b"\x08INITIATE" + bytes(300), 6),
    (CURVE, False): command(b"WELCOME", bytes(160)) + command(b"READY", bytes(40)),
}
roles = pytest.mark.parametrize(("mechanism", "listens"), HANDSHAKES)


def made(mechanism: bytes = NULL, listens: bool = True, max_frame: int = 1000) -> Filter:
    """A filter that has not heard anything."""
    return Filter(mechanism, listens, max_frame)


def greeted(mechanism: bytes = NULL, listens: bool = True, max_frame: int = 1000) -> Filter:
    """A filter whose peer's messages are to come."""
    filter_ = made(mechanism, listens, max_frame)
    whole = greeting(mechanism) + HANDSHAKES[mechanism, listens]
    assert filter_.take(whole) == whole
    return filter_


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(at)]


# ---- a sound peer


@given(st.sampled_from(list(HANDSHAKES)), st.lists(st.integers(0, 10_000), max_size=8),
       st.lists(st.binary(max_size=300), max_size=4))  # fmt: skip
def test_all_that_a_sound_peer_says_goes_on_in_its_order_however_it_is_cut(
    role: tuple[bytes, bool], cuts: list[int], bodies: list[bytes]
) -> None:
    whole = greeting(role[0]) + HANDSHAKES[role]
    whole += b"".join(frame(body, 0 if len(body) < 256 else 2) for body in bodies)
    filter_, passed = made(*role), b""
    for piece in pieces(whole, cuts):
        passed += filter_.take(piece)
        assert whole.startswith(passed)
    assert passed == whole
    assert filter_.greeted
    assert filter_.refused == ""
    assert filter_.frames == len(bodies)
    assert filter_.unread == sum(len(body) + (2 if len(body) < 256 else 9) for body in bodies)


@pytest.mark.parametrize("minor", [0, 1, 2, 255])
def test_a_later_minor_and_major_version_goes_on(minor: int) -> None:
    for major in (3, 4, 255):
        assert made().take(greeting(major=major, minor=minor)) == greeting(major=major, minor=minor)


def test_nothing_goes_on_before_it_is_known_to_be_no_old_version() -> None:
    whole = greeting()
    filter_, passed = made(), 0
    for at in range(64):
        passed += len(filter_.take(whole[at : at + 1]))
        have = at + 1
        # the signature alone lets this side's ZeroMQ say its own version; the mechanism is checked before it goes on
        assert passed == (0 if have < 10 else min(have, 11) if have < 32 else have)
        assert filter_.greeted is (have == 64)


# ---- what does not


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 300), max_size=5))
@example(b"GET / HTTP/1.1\r\n\r\n", [])
@example(b"\x16\x03\x01\x02\x00\x01\x00", [3])
@example(b"SSH-2.0-OpenSSH_9.6\r\n", [1])
@example(b"\xff" + bytes(9), [])
@example(b"\x01\x00", [])
def test_of_anything_else_no_byte_goes_on_but_a_signature_and_version(data: bytes, cuts: list[int]) -> None:
    filter_, passed, refused = made(), b"", ZmtpError(Fault.FOREIGN, b"")
    for piece in pieces(data, cuts):
        try:
            passed += filter_.take(piece)
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
            made(mechanism).take(data)
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
    filter_, whole = made(expected), greeting(theirs)
    passed = filter_.take(whole[:cut])
    with pytest.raises(ZmtpError) as caught:
        filter_.take(whole[cut:])
    assert caught.value.fault is fault
    assert passed + caught.value.passed == whole[:11]


# ---- the handshake


@roles
def test_a_handshake_is_that_of_its_mechanism_and_role(mechanism: bytes, listens: bool) -> None:
    """A client of CURVE takes a READY before it has any key: so none goes on to it."""
    commands = {
        b"READY": READY, b"HELLO": command(b"HELLO", bytes(194)), b"WELCOME": command(b"WELCOME", bytes(160)),
        b"INITIATE": frame(b"\x08INITIATE" + bytes(300), 6), b"PING": command(b"PING", b"\0\x0a"),
        b"SUBSCRIBE": command(b"SUBSCRIBE", b"x"), b"a message": frame(b"hello"),
    }  # fmt: skip
    first = {(NULL, True): b"READY", (NULL, False): b"READY", (CURVE, True): b"HELLO", (CURVE, False): b"WELCOME"}
    for name, data in commands.items():
        filter_ = made(mechanism, listens)
        filter_.take(greeting(mechanism))
        if name == first[mechanism, listens]:
            assert filter_.take(data) == data
        else:
            with pytest.raises(ZmtpError) as caught:
                filter_.take(data)
            assert caught.value.fault is Fault.HANDSHAKE
            assert caught.value.passed == b""


@pytest.mark.parametrize("size", [0, 5, 4096, 65535, 2**40, 2**63, 2**64 - 1])
def test_a_command_of_another_size_than_it_can_have_is_refused_before_it_has_come(size: int) -> None:
    for mechanism, listens, name in [
        (CURVE, True, b"\x05HELLO"), (CURVE, False, b"\x07WELCOME"), (NULL, True, b"\x05READY"),
    ]:  # fmt: skip
        filter_ = made(mechanism, listens)
        filter_.take(greeting(mechanism))
        with pytest.raises(ZmtpError) as caught:
            filter_.take(b"\x06" + size.to_bytes(8, "big") + (name + bytes(50))[: min(size, 50)])
        assert caught.value.fault is Fault.HANDSHAKE


def test_a_command_of_several_frames_is_none() -> None:
    filter_ = made()
    filter_.take(greeting())
    with pytest.raises(ZmtpError):
        filter_.take(bytes([READY[0] | 1]) + READY[1:])


# ---- the traffic


def test_a_message_may_be_as_long_as_it_may_and_no_longer() -> None:
    for mechanism, listens in HANDSHAKES:
        most = 1000 + (33 if mechanism == CURVE else 0)
        filter_ = greeted(mechanism, listens)
        longest = frame(bytes(most), 2)
        assert filter_.take(longest) == longest
        with pytest.raises(ZmtpError) as caught:
            filter_.take(frame(bytes(most + 1), 2)[:9] + bytes(24))
        assert caught.value.fault is Fault.LONG


def test_what_may_come_can_be_lowered_in_the_midst() -> None:
    filter_ = greeted(max_frame=100_000)
    whole = frame(bytes(5000), 2)
    assert filter_.take(whole[:100]) == whole[:100]
    filter_.max_frame = 1000
    assert filter_.take(whole[100:]) == whole[100:], "what was let in already goes on"
    with pytest.raises(ZmtpError, match="more at once"):
        filter_.take(whole)


@pytest.mark.parametrize(
    "data",
    [
        frame(b"a", 1),  # a message of several frames
        frame(b"a" * 300, 3),
        frame(b"x", 8), frame(b"x", 0x80), frame(b"x", 0xFF),  # flags that there are not
        READY, command(b"HELLO", bytes(194)), command(b"SUBSCRIBE", b"x"), command(b"CANCEL", b"x"),
        command(b"ERROR", b"\x03400"), command(b"JOIN", b"x"), command(b"PING"), command(b"PING", bytes(30)),
        frame(b"", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mechanism", [NULL, CURVE])
def test_what_is_no_message_of_one_frame_does_not_go_on(data: bytes, mechanism: bytes) -> None:
    for listens in (True, False):
        filter_ = greeted(mechanism, listens)
        with pytest.raises(ZmtpError) as caught:
            filter_.take(data)
        assert caught.value.fault is Fault.TRAFFIC
        assert caught.value.passed == b""
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [command(b"PING", b"\0\x0a"), command(b"PING", b"\0\x0a" + b"c" * 16),
                                  command(b"PONG", b""), command(b"PONG", b"c" * 16)])  # fmt: skip
def test_an_older_peer_may_ask_whether_this_side_is_there(data: bytes) -> None:
    assert greeted().take(data) == data
    with pytest.raises(ZmtpError):
        greeted(CURVE).take(data)  # there it is within the protected messages


def test_what_came_before_a_bad_frame_goes_on_though_both_came_at_once() -> None:
    good = frame(b"good") + frame(b"too")
    with pytest.raises(ZmtpError) as caught:
        greeted().take(good + frame(b"a", 1) + frame(b"late"))
    assert caught.value.passed == good
    with pytest.raises(ZmtpError) as caught:
        made().take(greeting() + READY + good + frame(bytes(2000), 2))
    assert (caught.value.fault, caught.value.passed) == (Fault.LONG, greeting() + READY + good)


@roles
def test_it_is_over_when_the_handshake_has_come(mechanism: bytes, listens: bool) -> None:
    filter_ = made(mechanism, listens)
    whole = greeting(mechanism) + HANDSHAKES[mechanism, listens]
    ready = []
    for at in range(len(whole)):
        filter_.take(whole[at : at + 1])
        ready.append(filter_.shaken)
    assert ready[-1]
    assert not any(ready[: len(greeting())])


def test_so_many_messages_may_be_on_their_way_at_the_same_time() -> None:
    filter_, empty = greeted(), frame(b"")
    assert filter_.take(empty * FRAMES_MAX) == empty * FRAMES_MAX
    with pytest.raises(ZmtpError) as caught:
        filter_.take(empty)
    assert caught.value.fault is Fault.LONG
    filter_ = greeted()
    for _ in range(3):
        filter_.take(empty * FRAMES_MAX)
        filter_.frames = filter_.unread = 0  # its owner has seen one come out


@given(st.sampled_from(list(HANDSHAKES)), st.binary(max_size=600), st.lists(st.integers(0, 700), max_size=6))
def test_whatever_comes_instead_of_messages_the_same_bytes_go_on_however_they_are_cut(
    role: tuple[bytes, bool], data: bytes, cuts: list[int]
) -> None:
    def let_through(parts: list[bytes]) -> tuple[bytes, Fault | None]:
        filter_, passed = greeted(*role), b""
        for part in parts:
            try:
                passed += filter_.take(part)
            except ZmtpError as e:
                return passed + e.passed, e.fault
            assert filter_.max_frame == 1000
        return passed, None

    (whole, fault), (cut, same) = let_through([data]), let_through(pieces(data, cuts))
    assert fault is same
    assert data.startswith(cut)
    if fault is None:
        assert whole == cut
        assert len(data) - len(cut) < 40, "no more than a frame's beginning is kept"


# ---- a refusal in clear


def refusal(*after: bytes) -> bytes:
    return b"".join(after) + command(b"ERROR", b"\x03400")


@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("before", [b"", command(b"WELCOME", bytes(160))], ids=["at once", "after the welcome"])
def test_an_error_command_is_read_and_goes_on(as_one: bool, before: bytes) -> None:
    filter_ = made(CURVE, False)
    whole = greeting(CURVE) + refusal(before)
    if as_one:
        assert filter_.take(whole) == whole
    else:
        assert b"".join(filter_.take(whole[at : at + 1]) for at in range(len(whole))) == whole
    assert filter_.refused == "400"


def test_a_reason_can_be_printed_and_may_be_missing() -> None:
    filter_ = made(CURVE, False)
    filter_.take(greeting(CURVE) + command(b"ERROR", b"\x08\x1b[31m\r\n\xff"))
    assert filter_.refused == "?[31m??\ufffd"
    filter_ = made(CURVE, False)
    filter_.take(greeting(CURVE) + command(b"ERROR", b"\0"))
    assert filter_.refused == "no reason given"


def test_after_the_handshake_there_is_no_refusal_any_more() -> None:
    filter_ = greeted(CURVE, False)
    with pytest.raises(ZmtpError):
        filter_.take(command(b"ERROR", b"\x03400"))
    assert filter_.refused == ""


# ---- what is not for ZeroMQ


@pytest.mark.parametrize("size", [0, 1, 23, 24, 25, 255, 256, 70_000])
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_without_keys_the_messages_come_out_whole_however_they_come(size: int, step: int) -> None:
    if size > 1000 and step == 1:
        step = 50
    messages = [bytes([n]) * size for n in range(3)]
    data = zmtp.HANDSHAKE + b"".join(map(zmtp.framed, messages))
    made, found = Filter(b"NULL", True, 100_000), []
    passed = b"".join(made.take(data[at : at + step]) for at in range(0, len(data), step))
    found = list(made.messages)
    assert found == messages
    assert passed == data
    assert made.shaken


def test_with_keys_no_message_is_kept() -> None:
    assert not Filter(b"CURVE", True, 1000).messages


def test_pings_are_told_with_their_contexts() -> None:
    made = Filter(b"NULL", True, 1000)
    pings = [bytes([4, 7 + len(c)]) + b"\x04PING\0\x0a" + c for c in (b"", b"context", bytes(16))]
    made.take(zmtp.HANDSHAKE + b"".join(pings))
    assert list(made.pings) == [b"", b"context", bytes(16)]
    assert zmtp.pong(b"context") == b"\x04\x0c\x04PONGcontext"
    peer = Filter(b"NULL", True, 1000)
    peer.take(zmtp.HANDSHAKE + b"".join(map(zmtp.pong, made.pings)))
    assert not peer.pings
