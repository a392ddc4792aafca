"""By which tokens a connector finds its place: none of them may get lost while it is not known which it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rdmaconnect.session.places import Places


class Held:
    """What a listener keeps of a connection here."""

    closed, given_up = False, ""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.conversation = SimpleNamespace(user="", channel=None)


def incoming(prev: bytes, token: bytes) -> Any:
    return SimpleNamespace(hello=SimpleNamespace(prev=prev), token=token, channel=SimpleNamespace(user=""))


def test_a_connector_whose_attempts_come_to_nothing_always_finds_its_place() -> None:
    """It heard of the second token and not of the third, the listener joined by neither."""
    places, held = Places(), Held(b"first")
    places.stands(held, incoming(b"", b"first"))  # type: ignore[arg-type]
    places.expect(held)  # type: ignore[arg-type]
    for prev, token in ((b"first", b"second"), (b"second", b"third")):
        attempt = incoming(prev, token)
        assert places.held(attempt) is held
        assert places.claim(held, attempt)  # type: ignore[arg-type]
        places.unclaim(held, attempt)  # type: ignore[arg-type]
    for known in (b"second", b"third"):
        assert places.held(incoming(known, b"fourth")) is held
    assert places.held(incoming(b"first", b"fourth")) is None, "a hello of an earlier life"
