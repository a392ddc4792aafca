"""An argument that cannot be meant is refused before anything is done, in a line that says what was wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from software import Software

import rdmaconnect
from rdmaconnect.errors import shown


def _connect(**arguments: Any) -> Any:
    return rdmaconnect.connect("127.0.0.1:1", **arguments)


def _connect_many(**arguments: Any) -> Any:
    return rdmaconnect.connect_many("127.0.0.1:1", **arguments)


def _listen(**arguments: Any) -> Any:
    return rdmaconnect.listen("127.0.0.1:0", **arguments)


def _meet(**arguments: Any) -> Any:
    return rdmaconnect.meet("127.0.0.1:0", "127.0.0.1:1", **arguments)


LARGE = bytearray(1 << 20)
#: a wrong argument, the class of the error, and words of it
WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    *(
        (call, {name: value}, error, words)
        for call in (_connect, _listen, _meet)
        for name, value, error, words in (
            ("regions", 5, TypeError, "regions is 5: give a dict of names and buffers"),
            ("regions", ["board"], TypeError, "regions is ['board']: give a dict"),
            ("regions", LARGE, TypeError, "regions is bytearray("),
            ("regions", [LARGE], TypeError, "regions is [bytearray("),
            ("regions", {1: LARGE}, ValueError, "a region's name is 1: give printable text"),
            ("regions", {bytes(LARGE): LARGE}, ValueError, "a region's name is b'"),
            ("regions", {"a" * 300_000: LARGE}, ValueError, "at most 256 characters"),
            ("regions", {"board": 5}, TypeError, "regions['board']: int has no buffer: give bytes-like data"),
            ("regions", {"board": b""}, ValueError, "regions['board']: register a buffer of 0 bytes"),
            ("regions", {"board": (1, 2, 3)}, TypeError, "regions['board']: register (1, 2, 3): as a pair, give"),
            ("private_data", "rank 3", TypeError, "private_data is 'rank 3': give bytes, at most 4096"),
            ("private_data", 5, TypeError, "private_data is 5: give bytes"),
            ("private_data", None, TypeError, "private_data is None: give bytes"),
            ("private_data", LARGE, ValueError, "private_data is 1048576 bytes long: give at most 4096"),
            ("device", 5, TypeError, "device is 5: give its name"),
            ("probe", 1, TypeError, "probe is 1: give True or False"),
            ("gid_index", "x" * 100_000, TypeError, "give an integer"),
            ("path_mtu", LARGE, ValueError, "give 256, 512, 1024, 2048, 4096 bytes"),
        )
    ),
    *(
        (call, {name: value}, error, words)
        for call in (_connect, _meet)
        for name, value, error, words in (
            ("deadline_s", "5", TypeError, "deadline_s is '5': give seconds, 0 or more, or None to wait for ever"),
            ("deadline_s", [], TypeError, "deadline_s is []: give seconds"),
            ("deadline_s", -1, ValueError, "deadline_s is -1: give seconds"),
            ("deadline_s", float("nan"), ValueError, "deadline_s is nan: give seconds"),
            ("qp_type", bytes(LARGE), ValueError, "give 'RC', 'UC' or 'UD'"),
        )
    ),
    (_connect, {"via": "conn"}, TypeError, "via is 'conn': give a UD connection"),
    (_connect_many, {"count": "3"}, TypeError, "count is '3': give an integer"),
    (_connect_many, {"count": 0}, ValueError, "count is 0: give 1 to 4096"),
    (_connect_many, {"count": 2.5}, TypeError, "count is 2.5: give an integer"),
    (_listen, {"qp_types": "RC"}, TypeError, "qp_types is 'RC': give several"),
    (_listen, {"qp_types": 5}, TypeError, "qp_types is 5: give several"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"),
    WRONG,
    ids=[f"{call.__name__[1:]} {shown(arguments)}" for call, arguments, _, _ in WRONG],
)
def test_the_error_is_a_line_that_says_what_was_wanted(
    call: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with Software() as software:
        with pytest.raises((ValueError, TypeError)) as caught:
            call(**arguments)
        assert software.problems() == []
    said = str(caught.value)
    assert type(caught.value) is error
    assert words in said
    assert "give" in said
    assert len(said) < 200
    assert "\n" not in said


def test_a_value_is_shown_short() -> None:
    assert shown("as it is") == "'as it is'"
    for value in (LARGE, bytes(LARGE), "x" * 100_000, [LARGE] * 1000, {"a": LARGE}, ["name"] * 100):
        assert 20 < len(shown(value)) <= 80
