"""Pinned buffers; what needs no device."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rdmaconnect.abi import AccessFlags
from rdmaconnect.memory import MR, Pinned

KINDS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"abcdef"),
    "bytes": lambda: b"abcdef",
    "memoryview": lambda: memoryview(bytearray(b"xxabcdefxx"))[2:8],
    "readonly memoryview": lambda: memoryview(b"abcdef"),
    "array": lambda: array.array("H", b"abcdef"),
    "two dimensions": lambda: memoryview(bytearray(b"abcdef")).cast("B", (2, 3)),
    "ctypes array": lambda: (ctypes.c_char * 6)(*b"abcdef"),
    "ctypes struct": lambda: ctypes.c_uint16.from_buffer(bytearray(b"ab")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_address_is_that_of_the_bytes(kind: str) -> None:
    buffer = KINDS[kind]()
    view = memoryview(buffer)
    pinned = Pinned(buffer)
    assert pinned.length == view.nbytes
    assert ctypes.string_at(pinned.addr, pinned.length) == view.tobytes()
    assert pinned.readonly is view.readonly
    if not view.readonly:
        ctypes.memset(pinned.addr, ord("z"), 2)
        assert view.tobytes()[:2] == b"zz"
    pinned.release()


def test_mmap_is_pinned_at_the_start_of_a_page() -> None:
    with mmap.mmap(-1, 8192) as memory:
        pinned = Pinned(memory)
        assert (pinned.addr % mmap.PAGESIZE, pinned.length, pinned.readonly) == (0, 8192, False)
        with pytest.raises(BufferError):
            memory.close()
        pinned.release()


def test_a_pinned_buffer_cannot_be_resized_until_it_is_released() -> None:
    buffer = bytearray(64)
    pinned = Pinned(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    pinned.release()
    pinned.release()
    buffer.extend(b"x")
    assert len(buffer) == 65


def test_a_pinned_buffer_is_kept_alive_and_let_go() -> None:
    buffer = bytearray(64)
    before = sys.getrefcount(buffer)
    pinned = Pinned(buffer)
    assert sys.getrefcount(buffer) == before + 1
    pinned.release()
    assert sys.getrefcount(buffer) == before
    pinned = Pinned(buffer)
    del pinned
    gc.collect()
    assert sys.getrefcount(buffer) == before
    buffer.extend(b"x")


@pytest.mark.parametrize("wrong", ["text", 5, None, [1, 2], object()], ids=repr)
def test_what_has_no_buffer_is_refused_by_its_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"^{type(wrong).__name__} has no contiguous buffer .*: give bytes-like data$"):
        Pinned(wrong)


def test_every_second_byte_is_not_contiguous() -> None:
    with pytest.raises(TypeError, match="memoryview has no contiguous buffer"):
        Pinned(memoryview(bytearray(8))[::2])


def test_an_empty_buffer_has_no_bytes() -> None:
    pinned = Pinned(bytearray())
    assert pinned.length == 0
    pinned.release()


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
        ("text", TypeError, "str has no contiguous buffer"),
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
