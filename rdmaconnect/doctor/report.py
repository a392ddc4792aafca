"""What was found, in words that fit the columns given, and as values for JSON. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..objects.port import Port
from .checks_device import best_gid
from .finding import Finding
from .host import Host
from .matrix import Attempt, Matrix
from .pair import Visit

__all__ = ["WIDTH", "as_json", "host_lines", "visit_lines"]

WIDTH = 80
_INDENT = " " * 16
_COLUMN = 12
_ROW = 5


def as_json(host: Host, findings: Sequence[Finding], visit: Visit | None = None) -> dict[str, Any]:
    """All that the words say, and the ports besides.

    Args:
        host: this host.
        findings: of its checks; what a visit found wrong here comes after them.
        visit: of the other host, if there was one.
    """
    said: dict[str, Any] = {
        "host": host.name,
        "kernel": host.kernel,
        "ok": bool(host.usable) if visit is None else visit.ok,
        "chosen": _chosen(host),
        "findings": [finding.asdict() for finding in (*findings, *(visit.here if visit else ()))],
        "ports": [_port(host, port) for port in host.ports],
    }
    if visit is not None:
        said["peer"] = {"url": visit.url, "findings": [finding.asdict() for finding in visit.findings]}
        said["pairs"] = visit.matrix.asdicts() if visit.matrix else []
    return said


def _chosen(host: Host) -> dict[str, Any] | None:
    if not host.usable:
        return None
    device, port_num = host.usable[0]
    entry = best_gid(host.port(device, port_num), host.gid_index)
    return {"device": device, "port_num": port_num, "gid": str(entry.gid) if entry else None}


def _port(host: Host, port: Port) -> dict[str, Any]:
    fields = port.asdict()
    for shown, entry in zip(fields["gids"], port.gids, strict=True):
        shown["here"] = entry.gid.raw in host.here
    return {"device": port.device, **fields}


def host_lines(host: Host, findings: Iterable[Finding], columns: int = WIDTH) -> Iterator[str]:
    """This host, line by line."""
    yield from _wrapped(f"This host, {host.name}:", "", columns)
    for finding in findings:
        yield from _finding(finding, columns)
    if host.ports:
        yield ""
        yield "GID tables (* would be chosen, - is no address of this network namespace):"
    chosen = host.usable[0] if host.usable else None
    for port in host.ports:
        yield f"  {port.device} port {port.port_num}: {port.gid_words() if not port.gids else ''}".rstrip()
        best = best_gid(port, host.gid_index) if (port.device, port.port_num) == chosen else None
        for entry in port.gids:
            mark = "*" if entry is best else " " if entry.gid.raw in host.here else "-"
            yield f"  {mark} {entry.gid_index:3} {entry.gid!s:39} {entry.type_words:7} {entry.netdev}".rstrip()
    yield ""
    words = "No connection can be made from this host: see what is marked FAIL."
    if host.usable:
        without = ", ".join(left.device for left in host.left_out)
        words = f"A connection can be made from this host{f', but not by {without}' if without else ''}."
    yield from _wrapped(words, "", columns)


def _finding(finding: Finding, columns: int) -> Iterator[str]:
    verdict = finding.verdict.value.upper() if finding.verdict.value in ("fail", "warn") else finding.verdict.value
    yield from _wrapped(f"{verdict:4} {finding.name:10} {finding.words}", _INDENT, columns)
    if finding.fix:
        yield from _wrapped(f"{_INDENT}fix: {finding.fix}", _INDENT + "     ", columns)


def _wrapped(text: str, indent: str, columns: int) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(), columns, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip


# ---- a pair


def visit_lines(visit: Visit, columns: int = WIDTH) -> Iterator[str]:
    """The pair, line by line: what was said, the matrix, the causes."""
    if visit.here:
        yield from _wrapped(f"This host, toward {visit.url}, which was not asked:", "", columns)
    else:
        yield from _wrapped(f"The other host, {visit.url}:", "", columns)
    for finding in (*visit.here, *visit.findings):
        yield from _finding(finding, columns)
    if visit.matrix is not None and visit.matrix.attempts:
        yield ""
        yield from _matrix_lines(visit.matrix, columns)
    yield ""
    yield "A connection can be made." if visit.ok else "No connection can be made."


def _matrix_lines(matrix: Matrix, columns: int) -> Iterator[str]:
    notes = _notes(matrix)
    yield "Rows are ports here, columns ports there:"
    for number, end in enumerate(matrix.here, 1):
        yield from _wrapped(f"{number:3}  {end.words}", " " * _ROW, columns)
    for number, end in enumerate(matrix.there):
        yield from _wrapped(f"{_letter(number):>3}  {end.words}", " " * _ROW, columns)
    fit = (columns - _ROW) // _COLUMN
    for start in range(0, len(matrix.there), fit):
        shown = list(enumerate(matrix.there))[start : start + fit]
        yield ""
        yield (" " * _ROW + "".join(f"{_letter(number):{_COLUMN}}" for number, _ in shown)).rstrip()
        for number, row in enumerate(matrix.here, 1):
            cells = (_cell(matrix, matrix.at(row, column), notes) for _, column in shown)
            yield (f"{number:3}  " + "".join(f"{cell:{_COLUMN}}" for cell in cells)).rstrip()
    yield ""
    yield from _wrapped("* is what connect() uses, with the time of an RDMA read; - cannot go together.", "", columns)
    for (cause, fix), number in notes.items():
        yield from _wrapped(f"{number:3}  {cause}", " " * _ROW, columns)
        if fix:
            yield from _wrapped(f"     fix: {fix}", " " * (_ROW + 5), columns)


def _letter(number: int) -> str:
    """A, B, ... Z, AA, AB ..."""
    high, low = divmod(number, 26)
    return (_letter(high - 1) if high else "") + chr(ord("A") + low)


def _notes(matrix: Matrix) -> dict[tuple[str, str], int]:
    """Cause and fix -> the number of its note."""
    notes: dict[tuple[str, str], int] = {}
    for attempt in matrix.attempts:
        if attempt.error:
            notes.setdefault((attempt.cause, attempt.fix), len(notes) + 1)
    return notes


def _cell(matrix: Matrix, attempt: Attempt | None, notes: dict[tuple[str, str], int]) -> str:
    if attempt is None:
        return "-"
    if attempt.error:
        return f"FAIL {notes[attempt.cause, attempt.fix]}"
    if not attempt.tried:
        return "untried"
    star = "*" if attempt is matrix.chosen else ""
    return f"{star}ok {_time(attempt.latency_us) if attempt.latency_us is not None else attempt.path_mtu}"


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f}us" if microseconds < 10_000 else f"{microseconds / 1000:.0f}ms"
