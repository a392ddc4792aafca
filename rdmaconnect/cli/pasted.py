"""Which codes a pasted line names: an error's own words, a line of a log, a traceback. Pure.

Names count before the words that programs print for them, and those before numbers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping

from .. import errors
from ..abi import EventType, WcStatus
from .themes import CLASSES, THEMES

__all__ = ["ERRNOS", "EVENTS", "STATUSES", "codes"]

#: (kind, name) of what a line names: ``("errno", "ETIMEDOUT")``
Code = tuple[str, str]

ERRNOS: dict[str, int] = {name: number for name, number in vars(errno).items() if name.startswith("E")}
STATUSES: dict[str, int] = {name: int(status) for name, status in WcStatus.__members__.items() if status}
EVENTS: dict[str, int] = {name: int(event) for name, event in EventType.__members__.items()}

#: what libibverbs prints. Source: ibv_wc_status_str(3), ibv_event_type_str(3); tests compare with the library
STATUS_WORDS: dict[str, str] = {
    "local length error": "LOC_LEN_ERR",
    "local QP operation error": "LOC_QP_OP_ERR",
    "local EE context operation error": "LOC_EEC_OP_ERR",
    "local protection error": "LOC_PROT_ERR",
    "Work Request Flushed Error": "WR_FLUSH_ERR",
    "memory management operation error": "MW_BIND_ERR",
    "bad response error": "BAD_RESP_ERR",
    "local access error": "LOC_ACCESS_ERR",
    "remote invalid request error": "REM_INV_REQ_ERR",
    "remote access error": "REM_ACCESS_ERR",
    "remote operation error": "REM_OP_ERR",
    "transport retry counter exceeded": "RETRY_EXC_ERR",
    "RNR retry counter exceeded": "RNR_RETRY_EXC_ERR",
    "local RDD violation error": "LOC_RDD_VIOL_ERR",
    "remote invalid RD request": "REM_INV_RD_REQ_ERR",
    "aborted error": "REM_ABORT_ERR",
    "invalid EE context number": "INV_EECN_ERR",
    "invalid EE context state": "INV_EEC_STATE_ERR",
    "fatal error": "FATAL_ERR",
    "response timeout error": "RESP_TIMEOUT_ERR",
    "general error": "GENERAL_ERR",
    "TM error": "TM_ERR",
    "TM software rendezvous": "TM_RNDV_INCOMPLETE",
}
EVENT_WORDS: dict[str, str] = {
    "CQ error": "CQ_ERR",
    "local work queue catastrophic error": "QP_FATAL",
    "invalid request local work queue error": "QP_REQ_ERR",
    "local access violation work queue error": "QP_ACCESS_ERR",
    "communication established": "COMM_EST",
    "send queue drained": "SQ_DRAINED",
    "path migrated": "PATH_MIG",
    "path migration request error": "PATH_MIG_ERR",
    "local catastrophic error": "DEVICE_FATAL",
    "port active": "PORT_ACTIVE",
    "port error": "PORT_ERR",
    "LID change": "LID_CHANGE",
    "P_Key change": "PKEY_CHANGE",
    "SM change": "SM_CHANGE",
    "SRQ catastrophic error": "SRQ_ERR",
    "SRQ limit reached": "SRQ_LIMIT_REACHED",
    "last WQE reached": "QP_LAST_WQE_REACHED",
    "client reregistration": "CLIENT_REREGISTER",
    "GID table change": "GID_CHANGE",
    "WQ fatal": "WQ_FATAL",
}

#: names in a line -> what they are; C has prefixes for two of them
_NAMES: dict[str, Code] = {
    **{name: ("errno", name) for name in ERRNOS},
    **{prefix + name: ("completion status", name) for name in STATUSES for prefix in ("", "IBV_WC_")},
    **{prefix + name: ("event", name) for name in EVENTS for prefix in ("", "IBV_EVENT_")},
    **{name: ("error class", name) for name in CLASSES},
}
_WORDS: dict[str, Code] = {
    **{os.strerror(number).lower(): ("errno", name) for name, number in ERRNOS.items() if " " in os.strerror(number)},
    **{words.lower(): ("completion status", name) for words, name in STATUS_WORDS.items()},
    **{words.lower(): ("event", name) for words, name in EVENT_WORDS.items()},
}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """The longest of them, where it stands as words of its own."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")


_NAME, _PHRASE = _any_of(_NAMES), _any_of(_WORDS)
#: numbers, with what makes them one of a kind: as perftest, NCCL, UCX, Python and the kernel write them
_NUMBERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("completion status", re.compile(r"\bstatus[ =:]+(?:\w+ )?\(?(\d+)\b|\bcompletion\b.*?\berror[ =:]+(\d+)\b", re.I)),
    ("errno", re.compile(r"\berrno[ =:]*-?(\d+)\b|\b(?:error|failed with|ret\w*|rc)[ =:]+-?(\d+)\b", re.I)),
    ("errno", re.compile(r"(?:^|[\s=:(])-(\d+)\b")),
)


def codes(text: str) -> list[Code]:
    """What a text names, in the order in which it does.

    Args:
        text: a code alone, or any text that has some; of a traceback its last error counts.

    Returns:
        (kind, name), each once; none if nothing in it is known.
    """
    alone = _alone(text.strip())
    if alone:
        return alone
    text = _last_error(text)
    for found in (
        [_NAMES[match[0]] for match in _NAME.finditer(text)],
        [_WORDS[match[0]] for match in _PHRASE.finditer(text.lower())],
        *([code for match in pattern.finditer(text) for code in _numbered(kind, match)] for kind, pattern in _NUMBERS),
    ):
        if found:
            return list(dict.fromkeys(found))
    return []


def _alone(word: str) -> list[Code]:
    """A code that is all there is: in any case, and a number is an errno as well as a status."""
    if re.fullmatch(r"-?\d{1,9}", word):
        kinds = ("errno", "completion status") if word.isdecimal() else ("errno",)
        return [code for kind in kinds for code in _by_number(kind, abs(int(word)))]
    found = [code for name, code in _NAMES.items() if name.lower() == word.lower()]
    lower = word.lower()
    themes = [name for name in THEMES if name == lower] or [name for name in THEMES if name.startswith(f"{lower}-")]
    return [*dict.fromkeys(found), *(("theme", name) for name in themes)]


def _by_number(kind: str, number: int) -> list[Code]:
    table: Mapping[str, int] = ERRNOS if kind == "errno" else STATUSES
    if kind == "errno" and number not in errno.errorcode:
        return []
    names = [name for name, value in table.items() if value == number]
    return [(kind, errors.errno_name(number).partition(" ")[0] if kind == "errno" else names[0])] if names else []


def _numbered(kind: str, match: re.Match[str]) -> list[Code]:
    return _by_number(kind, int(next(group for group in match.groups() if group is not None)))


def _last_error(text: str) -> str:
    """Of a traceback what stands after its last frame: the lines of code in it name errors too."""
    _, mark, rest = text.rpartition("Traceback (most recent call last):")
    if not mark:
        return text
    said = "\n".join(line for line in rest.splitlines() if line.strip() and not line.startswith(" "))
    return said or rest
