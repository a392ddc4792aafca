"""Registered memory: what is refused, and that it stays where it is for as long as a device may use it."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forgetting import collect_together, forget
from places import TESTS
from software import Software, connected

import rdmaconnect
import rdmaconnect.objects.memory
from rdmaconnect.abi import AccessFlags, ReregMrError
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import CompletionError, LibraryError, VerbsError
from rdmaconnect.objects import owned as handle
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import MR, PD, Dmabuf

LOCAL_WRITE = AccessFlags.LOCAL_WRITE
LIBC = ctypes.CDLL(None)


@pytest.fixture
def pd(software: Software) -> Iterator[PD]:
    with open_device("soft0") as context, PD(context) as made:
        yield made


@pytest.mark.parametrize(
    ("buffer", "error", "match"),
    [
        (b"", ValueError, "0 bytes"),
        ((0x1000, 0), ValueError, "0 bytes"),
        ((0x1000, -1), ValueError, "give at least one byte"),
        ((-1, 5), ValueError, "5 bytes at -0x1: addresses have 64 bits, without a sign"),
        ((2**64 - 4, 5), ValueError, "addresses have 64 bits"),
        ((0x1000, 2**64), ValueError, "18446744073709551616 bytes at 0x1000: addresses have 64 bits"),
        (Dmabuf(3, 2**64 + 1), ValueError, "addresses have 64 bits"),
        ("text", TypeError, "str has no buffer"),
        (np.array([object()]), ValueError, "holds Python objects"),
        (np.zeros(4, [("O", "i8"), ("thing", "O")]), ValueError, "holds Python objects"),
        (np.zeros(4, [("number", "i8"), ("deep", [("thing", "O", (2,))])]), ValueError, "holds Python objects"),
        (np.zeros(4, [("no letter for it", "M8[s]"), ("thing", "O")]), ValueError, "holds Python objects"),
        ((ctypes.py_object * 4)(1, 2, 3, 4), ValueError, "holds Python objects"),
    ],
)
def test_a_buffer_that_cannot_be_meant_is_refused_before_the_device_is_asked(
    pd: PD, software: Software, buffer: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        MR(pd, buffer)
    assert not software.made["mr"]


@pytest.mark.parametrize("number", [2**64, -1])
def test_an_iova_has_64_bits(pd: PD, software: Software, number: int) -> None:
    with pytest.raises(ValueError, match=f"iova is {number}: give 64 bits"):
        MR(pd, bytearray(8), iova=number)
    assert not software.made["mr"]


def test_write_access_to_a_read_only_buffer_is_refused(pd: PD, software: Software) -> None:
    for access in (LOCAL_WRITE, AccessFlags.REMOTE_WRITE | LOCAL_WRITE, AccessFlags.REMOTE_ATOMIC):
        with pytest.raises(ValueError, match=r"register a read-only bytes for .*: give a writable one"):
            MR(pd, b"abc", access)
    assert not software.made["mr"]
    MR(pd, b"abc").close()


def test_a_refused_buffer_is_let_go(pd: PD, software: Software) -> None:
    buffer = bytearray(8)
    with software.on("ibv_reg_mr", fail=errno.EINVAL), pytest.raises(VerbsError, match="EINVAL"):
        MR(pd, buffer)
    buffer.extend(b"x")


# ---- the life of memory


def mapped(address: int) -> bool:
    """Whether there is memory at the start of a page."""
    return LIBC.msync(ctypes.c_void_p(address), ctypes.c_size_t(1), 1) == 0


class Owner(bytearray):
    """Of memory, and of the region on it."""

    regions: tuple[MR, MR]


def circle(pd: PD, mr: MR, kind: str) -> MR:
    """A region that the collector alone can find."""
    if kind == "region":
        mr.itself = mr  # type: ignore[attr-defined]
    elif kind == "owner":
        owner = Owner(8)
        owner.regions, mr.owner = (mr, MR(pd, owner)), owner  # type: ignore[attr-defined]
    return mr


@pytest.mark.parametrize("kind", ["", "region", "owner"])
def test_a_forgotten_region_is_deregistered_before_its_memory_is_freed(pd: PD, software: Software, kind: str) -> None:
    forgotten = [circle(pd, MR(pd, mmap.mmap(-1, mmap.PAGESIZE)), kind)]
    addr, still_there = forgotten[0].addr, list[bool]()
    of_it = {"where": lambda call: call["mr"].addr == addr}
    software.on("ibv_dereg_mr", before=lambda call: still_there.append(mapped(addr)), **of_it)
    with pytest.warns(ResourceWarning, match=r"MR of .* bytes was never closed"):
        forget(forgotten)
    assert still_there == [True]
    assert not mapped(addr)
    assert software.alive["mr"] == 0


def test_what_the_collector_takes_together_is_freed_in_order(software: Software) -> None:
    def opened() -> list[Any]:
        context = open_device("soft0")
        domain = PD(context)
        return [context, domain, *(MR(domain, bytearray(64)) for _ in range(3))]

    called: list[str] = []
    for verb in ("ibv_dereg_mr", "ibv_dealloc_pd", "ibv_close_device"):
        software.on(verb, after=lambda call: called.append(call.verb))
    with pytest.warns(ResourceWarning, match="was never closed"):
        collect_together(opened())
    assert called == ["ibv_dereg_mr"] * 3 + ["ibv_dealloc_pd", "ibv_close_device"]
    assert software.left() == {}


def test_memory_that_a_protocol_gives_back_is_given_back_after_the_deregistration(pd: PD, software: Software) -> None:
    happened: list[str] = []

    def registered() -> MR:
        mr = circle(pd, MR(pd, np.arange(8)), "region")
        (held,) = mr._held
        held._release = lambda: happened.append("given back")
        return mr

    software.on("ibv_dereg_mr", after=lambda call: happened.append("deregistered"))
    with pytest.warns(ResourceWarning, match="never closed"):
        forget([registered()])
    assert happened == ["deregistered", "given back"]


def test_a_forgotten_region_that_cannot_be_deregistered_keeps_its_memory_for_good(pd: PD, software: Software) -> None:
    forgotten = [MR(pd, mmap.mmap(-1, mmap.PAGESIZE))]
    addr = forgotten[0].addr
    with software.on("ibv_dereg_mr", fail=errno.EBUSY), pytest.warns(ResourceWarning) as warned:
        forget(forgotten)
    first, second = (str(w.message) for w in warned)
    assert first == "MR of 4096 bytes was never closed"
    assert second.startswith("forgotten, and kept for good: close MR of 4096 bytes: ibv_dereg_mr: EBUSY")
    del warned
    gc.collect()
    assert mapped(addr)
    handle._kept.popitem()[1].close()
    gc.collect()
    assert not mapped(addr)


def test_a_region_left_open_at_the_end_of_the_process_is_deregistered_first(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import mmap, os, sys
        from software import Software, connected
        from rdmaconnect.objects.context import open_device
        from rdmaconnect.objects.memory import PD

        software = Software().install()
        software.on("ibv_dereg_mr", before=lambda call: os.write(1, b"deregistered, and may still be written to. "))
        context = open_device("soft0")
        pd = PD(context)
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        mr = pd.register(memory)
        if sys.argv[1] == "fork" and os.fork():
            os.wait()
            os.write(1, b"The other one is over, ")
        """)
    )
    paths = f"{Path(rdmaconnect.__file__).parents[1]}:{TESTS}"
    once = "deregistered, and may still be written to. "
    for how, out in (("", once), ("fork", f"The other one is over, {once}")):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", program, how], env={"PYTHONPATH": paths}, capture_output=True, timeout=60
        )
        assert (done.stdout.decode(), done.stderr.decode()) == (out, "")


def test_the_peer_does_not_write_to_what_is_in_the_place_of_a_forgotten_region(software: Software) -> None:
    """It changed another object, through nothing but the public API."""
    with connected() as (here, there):
        forgotten = [there.register(bytearray(1 << 20))]
        there.send(forgotten[0].region.to_bytes())
        region = RemoteRegion.from_bytes(here.recv(deadline_s=5))
        here.write(b"while it is there", region)
        with pytest.warns(ResourceWarning, match="MR of 1048576 bytes was never closed"):
            forget(forgotten)
        others = [bytearray(1 << 20) for _ in range(4)]
        with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):
            here.write(b"x" * 100, region)
        assert not any(any(other) for other in others)


# ---- registered anew


def test_a_region_registered_anew_holds_the_new_memory_and_lets_the_old_go(pd: PD) -> None:
    old, new = bytearray(64), bytearray(4096)
    with MR(pd, old) as mr:
        mr.reregister(buffer=new)
        assert (mr.length, mr.name) == (4096, "MR of 4096 bytes")
        old.extend(b"x")
        with pytest.raises(BufferError):
            new.extend(b"x")
    new.extend(b"x")


def test_read_only_memory_stays_read_only_when_the_access_is_changed(pd: PD, software: Software) -> None:
    with MR(pd, b"read-only") as mr:
        for access in (LOCAL_WRITE, LOCAL_WRITE | AccessFlags.REMOTE_WRITE):
            with pytest.raises(ValueError, match=r"register a read-only bytes for .*: give a writable one"):
                mr.reregister(access=access)
        mr.reregister(access=AccessFlags(0))
        assert mr.access == AccessFlags(0)
        with pytest.raises(ValueError, match="read-only bytes"):
            mr.reregister(buffer=b"another", access=LOCAL_WRITE)
    with MR(pd, bytearray(8), AccessFlags(0)) as mr:
        mr.reregister(buffer=b"of its old access")  # which writes nothing
        assert software.calls["ibv_rereg_mr"] == 2


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        (ReregMrError.ERR_INPUT, "old"),
        (ReregMrError.ERR_DONT_FORK_NEW, "old"),
        (ReregMrError.ERR_DO_FORK_OLD, "new"),
        (ReregMrError.ERR_CMD, "neither"),
        (ReregMrError.ERR_CMD_AND_DO_FORK_NEW, "neither"),
    ],
    ids=str,
)
def test_after_an_error_no_memory_is_let_go_that_the_device_may_use(
    pd: PD, software: Software, monkeypatch: pytest.MonkeyPatch, code: ReregMrError, valid: str
) -> None:
    old, new = bytearray(64), bytearray(4096)

    def refuse(mr: Any, flags: int, domain: Any, addr: int, length: int, access: int) -> None:
        if code == ReregMrError.ERR_DO_FORK_OLD:  # all is done but this
            mr.contents.addr, mr.contents.length, mr.contents.lkey = addr, length, 77
        raise VerbsError("ibv_rereg_mr", errno.ENOMEM, str(code))

    mr = MR(pd, old)
    monkeypatch.setattr(rdmaconnect.objects.memory.verbs, "ibv_rereg_mr", refuse)
    with pytest.raises(VerbsError, match=str(code)):
        mr.reregister(buffer=new, access=LOCAL_WRITE)
    assert (len(mr), mr.access == LOCAL_WRITE) == ((4096, True) if valid == "new" else (64, False))
    for block, may_go in ((old, valid == "new"), (new, False)):
        if may_go:
            block.extend(b"x")
        else:
            with pytest.raises(BufferError):
                block.extend(b"x")
    mr.close()
    old.extend(b"x")
    new.extend(b"x")


def test_what_a_device_lacks_leaves_the_region_as_it_was(pd: PD, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> None:
        raise LibraryError("no", errno.EOPNOTSUPP)

    monkeypatch.setattr(rdmaconnect.objects.memory.verbs, "ibv_rereg_mr", lacks)
    new = bytearray(8)
    with PD(pd.context) as other, MR(pd, bytearray(64)) as mr:
        with pytest.raises(LibraryError):
            mr.reregister(buffer=new, pd=other)
        assert (mr.pd, len(mr)) == (pd, 64)
        new.extend(b"x")
        other.close()
        assert not mr.closed


def test_a_region_moved_to_another_domain_is_its_child(pd: PD) -> None:
    other = PD(pd.context)
    mr = MR(pd, mmap.mmap(-1, 4096))
    mr.reregister(pd=other)
    pd.close()
    assert not mr.closed
    other.close()
    assert mr.closed
