"""`rdmaconnect explain`: every code that an error can name has cause and remedy."""

from __future__ import annotations

import errno
import io
import json
import sys
import traceback
from typing import Any

import pytest

from rdmaconnect import errors, verbs
from rdmaconnect.abi import EventType, WcStatus
from rdmaconnect.cli import main
from rdmaconnect.cli.pasted import EVENT_WORDS, STATUS_WORDS, codes
from rdmaconnect.cli.themes import CLASSES, THEMES
from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.hints import HINTS

VERBS = {(what, condition) for what, condition in HINTS if what not in ("completion", "event")}
CONDITIONS = sorted({condition for _, condition in VERBS})
STATUSES = [status.name for status in WcStatus if status is not WcStatus.SUCCESS]
EVENTS = [event.name for event in EventType]
EVERYTHING = [*CONDITIONS, *STATUSES, *EVENTS, *CLASSES, *THEMES]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed, on one line as if the screen were wide."""
    assert main(["explain", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


def meanings(capsys: pytest.CaptureFixture[str], *argv: str, code: str | None = None) -> list[dict[str, Any]]:
    assert main(["explain", "--json", "--", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["code"] == (code or " ".join(argv))
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
    assert sorted(told) == sorted(what for what, condition in VERBS if condition == name)


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


#: what people paste -> (kind, name) of what it names
PASTED = {
    "work completion RETRY_EXC_ERR (12)": [("completion status", "RETRY_EXC_ERR")],
    "EHOSTUNREACH (113)": [("errno", "EHOSTUNREACH")],
    "transport retry counter exceeded": [("completion status", "RETRY_EXC_ERR")],
    "errno 110": [("errno", "ETIMEDOUT")],
    "-110": [("errno", "ETIMEDOUT")],
    "roce": [("theme", "roce-version")],
    "port": [("theme", "port-in-use"), ("theme", "port-state")],
    "IBV_EVENT_QP_FATAL": [("event", "QP_FATAL")],
    "qp_fatal": [("event", "QP_FATAL")],
    "local catastrophic error on mlx5_0": [("event", "DEVICE_FATAL")],
    "[Errno 12] Cannot allocate memory": [("errno", "ENOMEM")],
    "OSError: [Errno 12]": [("errno", "ENOMEM")],
    "Failed to modify QP to RTR: Connection timed out": [("errno", "ETIMEDOUT")],
    "mlx5_core: modify failed with -22": [("errno", "EINVAL")],
    "Failed status 12: wr_id 0 syndrom 0x81": [("completion status", "RETRY_EXC_ERR")],
    "NET/IB : Got completion from peer 10.0.0.1<4> with status=5 opcode=0 len=0 vendor err 244": [
        ("completion status", "WR_FLUSH_ERR")
    ],
    "NET/IB : Got completion with error 12, opcode 1, len 32600, vendor err 129": [
        ("completion status", "RETRY_EXC_ERR")
    ],
    "rdmaconnect.errors.PeerMismatch: join the two ends: no P_Key in common.": [("error class", "PeerMismatch")],
    "the P_KEY is -1 of -99999": [("errno", "EPERM")],
    "completions were 12 and errors 0": [],
    "in 12 steps": [],
}


@pytest.mark.parametrize(("text", "found"), PASTED.items(), ids=PASTED)
def test_a_pasted_line_is_understood(text: str, found: list[tuple[str, str]]) -> None:
    assert codes(text) == found


def test_of_a_traceback_the_last_error_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        try:
            raise errors.ConnectTimeout("connect", 1.0)
        except errors.ConnectTimeout:
            raise errors.VerbsError("ibv_reg_mr", errno.ENOMEM, "register 4096 bytes") from None
    except errors.VerbsError:
        text = traceback.format_exc()
    text = f"Traceback (most recent call last):\nOSError: [Errno 5] first\n\n{text}"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    for argv in ((text,), ("-",)):
        kinds = [(meaning["kind"], meaning["name"]) for meaning in meanings(capsys, *argv, code=text)]
        assert kinds == [("error class", "VerbsError"), ("errno", "ENOMEM")]


def test_of_a_line_that_names_the_verb_only_its_hints_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.VerbsError("ibv_modify_qp", errno.EINVAL, "move RC QP 0x000011 of rxe2 port 1 INIT->RTR")
    (meaning,) = meanings(capsys, str(error))
    assert [entry["verbs"] for entry in meaning["hints"]] == [["ibv_modify_qp RTR"]]
    (meaning,) = meanings(capsys, "ibv_create_qp: EINVAL (22)")
    assert {verb for entry in meaning["hints"] for verb in entry["verbs"]} == {"ibv_create_qp"}


@pytest.mark.parametrize(
    ("words", "kind", "function"),
    [(STATUS_WORDS, WcStatus, verbs.ibv_wc_status_str), (EVENT_WORDS, EventType, verbs.ibv_event_type_str)],
)
def test_the_words_are_those_of_the_library(words: dict[str, str], kind: Any, function: Any) -> None:
    verbs.use(None)
    try:
        told = {function(kind[name]): name for name in words.values()}
    except errors.LibraryError as e:
        pytest.skip(f"needs libibverbs: {e}")
    finally:
        verbs.use(None)
    assert told == words


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
        assert words in " ".join(err.split())
        assert max(map(len, err.splitlines())) <= 80
        if not extra:
            assert out == ""
            continue
        error = json.loads(out)
        assert words in " ".join(error["error"].split())
        assert error["class"] == "ValueError"
