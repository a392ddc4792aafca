"""`rdmaconnect.abi.rdma_cma` against real headers of librdmacm, as `test_abi` does it for those of libibverbs."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from abi_header import (
    CC,
    HERE,
    IN_LAB,
    SYSTEM,
    Check,
    Header,
    Target,
    enum_checks,
    every_target,
    prototype_check,
    refuted,
    struct_checks,
)

from rdmaconnect import rdmacm
from rdmaconnect.abi import Fails
from rdmaconnect.abi.cstruct import CStruct
from rdmaconnect.abi.rdma_cma import (
    CM_ENUMS,
    CM_PROTOTYPES,
    CM_SCOPE,
    CM_STRUCTS,
    CmEventType,
    sockaddr_storage,
)

#: enumerators that came later, which this package has no use for
NEWER = {"ADDRINFO_RESOLVED", "ADDRINFO_ERROR", "USER", "INTERNAL"}
MISSING = "a C compiler" if CC is None else "rdma/rdma_cma.h: install librdmacm-dev or set RDMACONNECT_HEADERS"


class CmHeader(Header):
    """One ``rdma/rdma_cma.h``."""

    first = "rdma/rdma_cma.h"


def headers() -> list[CmHeader]:
    root = os.environ.get("RDMACONNECT_HEADERS")
    if CC is None:
        return []
    if root:
        found = sorted(Path(root).glob(f"*/usr/include/{CmHeader.first}"), key=lambda path: path.parts[-5].zfill(4))
        assert found or not IN_LAB, f"RDMACONNECT_HEADERS={root} holds no <release>/usr/include/{CmHeader.first}"
        return [CmHeader(path.parts[-5], path.parents[1]) for path in found]
    return [CmHeader("system", SYSTEM)] if (SYSTEM / CmHeader.first).exists() else []


HEADERS = headers()
every_header = pytest.mark.parametrize(
    "header", HEADERS or [pytest.param(None, marks=pytest.mark.skip(f"needs {MISSING}"), id="none")], ids=repr
)


def checks(header: CmHeader) -> Iterator[Check]:
    """Everything that ``rdma_cma`` says."""
    for cls, (name, prefix) in CM_ENUMS.items():
        yield from enum_checks(header, cls, name, prefix)
    for name, struct in CM_STRUCTS.items():
        yield from struct_checks(name, struct, CM_SCOPE)
    kind, size, alignment = (
        "struct sockaddr_storage",
        ctypes.sizeof(sockaddr_storage),
        ctypes.alignment(sockaddr_storage),
    )
    yield Check(f"sizeof {kind}", f'_Static_assert(sizeof({kind}) == {size}, "");')
    yield Check(f"alignof {kind}", f'_Static_assert(_Alignof({kind}) == {alignment}, "");')
    yield from map(prototype_check, CM_PROTOTYPES.values())


@every_header
@every_target
def test_the_compiler_agrees(target: Target, header: CmHeader, capsys: pytest.CaptureFixture[str]) -> None:
    assert target.there, f"install {target.package}: in the lab no compiler may be missing"
    statements = list(checks(header))
    with capsys.disabled():
        print(f"\nABI of librdmacm of rdma-core {header.label} on {target}: {len(statements)} assertions")
    assert refuted(header, statements, target) == []
    assert len(statements) > 150


@every_header
def test_no_enumerator_of_the_header_is_missing(header: CmHeader) -> None:
    for cls, (name, prefix) in CM_ENUMS.items():
        theirs = {word.removeprefix(prefix) for word in header.enums[name]}
        assert theirs - NEWER == set(cls.__members__)


@every_header
def test_a_planted_error_is_caught(header: CmHeader) -> None:
    class rdma_conn_param(CStruct):
        _c_ = CM_STRUCTS["rdma_conn_param"]._c_.replace("uint8_t responder_resources", "uint16_t responder_resources")
        _anonymous_ = ()
        _fields_ = CM_STRUCTS["rdma_conn_param"]._fields_

    prototype = CM_PROTOTYPES["rdma_listen"]._replace(text="int rdma_listen(struct rdma_cm_id *id, long backlog)")
    wrong: list[Any] = [*struct_checks("rdma_conn_param", rdma_conn_param, CM_SCOPE), prototype_check(prototype)]
    assert refuted(header, wrong, HERE) == ["type rdma_conn_param.responder_resources", "prototype rdma_listen"]


def test_the_library_of_this_machine_has_each_function() -> None:
    try:
        library = rdmacm.library()
    except rdmacm.LibraryError as e:
        pytest.skip(str(e))
    for name in CM_PROTOTYPES:
        assert library[name]


def test_how_each_fails_is_what_the_manual_says() -> None:
    """rdma_create_event_channel(3): NULL; all others that give an int: -1."""
    for name, prototype in CM_PROTOTYPES.items():
        gives = re.match(r"[\w ]+?(?=\*?\w+\()", prototype.text)
        assert gives
        wanted = (
            Fails.MINUS_ONE if gives[0].strip() == "int" else Fails.NULL_ERRNO if "*rdma" in prototype.text else None
        )
        assert prototype.fails is (wanted or Fails.NEVER), name


def test_an_event_that_the_header_does_not_know_is_no_crash() -> None:
    assert str(CmEventType(77)) == "unknown (77)"
