"""`rdmaconnect explain`: every code that an error can name has cause and remedy."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from rdmaconnect import errors
from rdmaconnect.abi import WcStatus
from rdmaconnect.cli import main
from rdmaconnect.cli.themes import CLASSES, THEMES
from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.hints import HINTS

CONDITIONS = sorted({condition for what, condition in HINTS if what != "completion"})
STATUSES = [status.name for status in WcStatus if status is not WcStatus.SUCCESS]
EVERYTHING = [*CONDITIONS, *STATUSES, *CLASSES, *THEMES]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed, on one line as if the screen were wide."""
    assert main(["explain", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


def meanings(capsys: pytest.CaptureFixture[str], code: str) -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads(said(capsys, "--json", code))
    assert found["code"] == code
    return list(found["meanings"])


@pytest.mark.parametrize("code", EVERYTHING)
def test_every_code_is_explained_in_80_columns(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert lines[0].startswith(code)
    assert [line for line in lines if len(line) > 80 or "{" in line] == []


@pytest.mark.parametrize("name", CONDITIONS)
def test_an_errno_lists_each_verb_that_has_a_hint_for_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (meaning,) = meanings(capsys, name)
    told = [verb for entry in meaning["hints"] for verb in entry["verbs"]]
    assert sorted(told) == sorted(what for what, condition in HINTS if what != "completion" and condition == name)


def test_an_errno_is_known_by_name_and_number_and_its_alias(capsys: pytest.CaptureFixture[str]) -> None:
    by_name = said(capsys, "etimedout")
    assert by_name == said(capsys, str(errno.ETIMEDOUT))
    assert by_name.startswith("ETIMEDOUT (110), errno: Connection timed out. ")
    assert (
        "ibv_modify_qp RTR: The route to the peer's GID did not resolve from gid_index N (the local GID): "
        "check that the peer answers on that network." in by_name
    )
    assert said(capsys, "ENOTSUP").startswith("EOPNOTSUPP (95), errno: Operation not supported. ")


def test_a_status_is_known_by_name_and_by_its_name_in_c(capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("RNR_RETRY_EXC_ERR", "rnr_retry_exc_err", "IBV_WC_RNR_RETRY_EXC_ERR"):
        assert said(capsys, code) == (
            f"RNR_RETRY_EXC_ERR (13), completion status {HINTS['completion', 'RNR_RETRY_EXC_ERR']}"
        )


def test_a_number_that_is_both_is_explained_as_both(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [(meaning["kind"], meaning["name"]) for meaning in meanings(capsys, "12")]
    assert kinds == [("errno", "ENOMEM"), ("completion status", "RETRY_EXC_ERR")]


def test_an_errno_without_a_hint_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No verb has a hint of its own for it" in said(capsys, "EDOM")
    assert meanings(capsys, "EDOM")[0]["hints"] == []


def test_every_class_of_error_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert {name for name in kinds if issubclass(getattr(errors, name), RdmaConnectError)} == set(CLASSES)
    for name, (when, todo) in CLASSES.items():
        words = said(capsys, name.lower())
        assert words.startswith(f"{name}, error class: ")
        assert words.endswith(f"{when} {todo}")
    first = "A work request completed with a status other than SUCCESS."
    assert said(capsys, "CompletionError").startswith(f"CompletionError, error class: {first} After work was posted")


def test_a_theme_gives_the_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    words = said(capsys, "memlock")
    for remedy in ("ulimit -l unlimited", "LimitMEMLOCK=infinity", "--ulimit memlock=-1", "PropagateResourceLimits"):
        assert remedy in words


#: what public threads about failed connections were about
FIELD = """
access address containers cq-overrun data-path deadline fork gid grh hop-limit limits many memlock mtu netns pkey
port-in-use port-state provider psn ready restart rnr roce-version route timers ud version
"""


def test_every_theme_of_the_field_is_there() -> None:
    assert set(FIELD.split()) - set(THEMES) == set()
    assert list(THEMES) == sorted(THEMES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("RETRY_EXEC", "Did you mean RETRY_EXC_ERR"),
        ("IBV_WC_RETRY_EXC", "Did you mean RETRY_EXC_ERR"),
        ("ETIMEOUT", "Did you mean ETIMEDOUT"),
        ("peermissmatch", "Did you mean PeerMismatch"),
        ("memlok", "Did you mean memlock"),
        ("4095", "See `rdmaconnect explain --help`."),
        ("0", "See `rdmaconnect explain --help`."),
        ("?" * 99, "See `rdmaconnect explain --help`."),
    ],
)
def test_an_unknown_code_is_said_to_be_one_with_those_that_are_close(
    code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ([], ["--json"]):
        assert main(["explain", *extra, code]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert words in " ".join(err.split())
        assert max(map(len, err.splitlines())) <= 80
