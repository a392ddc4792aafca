"""Registering memory: what needs no device."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from rdmaconnect.abi import AccessFlags
from rdmaconnect.memory import MR


class NoDomain:
    """Stands in for a PD that must not be asked."""

    @property
    def pointer(self) -> Any:
        raise AssertionError("the device was asked")


@pytest.mark.parametrize(
    ("buffer", "error", "match"),
    [
        (b"", ValueError, "0 bytes"),
        ((0x1000, 0), ValueError, "0 bytes"),
        ((0x1000, -1), ValueError, "give at least one byte"),
        ("text", TypeError, "str has no buffer"),
    ],
)
def test_a_buffer_that_cannot_be_meant_is_refused_before_the_device_is_asked(
    buffer: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        MR(NoDomain(), buffer)  # type: ignore[arg-type]


def test_write_access_to_a_read_only_buffer_is_refused() -> None:
    for access in (
        AccessFlags.LOCAL_WRITE,
        AccessFlags.REMOTE_WRITE | AccessFlags.LOCAL_WRITE,
        AccessFlags.REMOTE_ATOMIC,
    ):
        with pytest.raises(ValueError, match=r"register a read-only bytes for .*: give a writable one"):
            MR(NoDomain(), b"abc", access)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="the device was asked"):
        MR(NoDomain(), b"abc")  # type: ignore[arg-type]


def test_a_refused_buffer_is_let_go() -> None:
    buffer = bytearray(8)
    with pytest.raises(AssertionError):
        MR(NoDomain(), buffer)  # type: ignore[arg-type]
    gc.collect()
    buffer.extend(b"x")
