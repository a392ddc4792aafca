"""Regions without a buffer here: device memory, null regions, and what another process has made."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from software import Call, Software

from rdmaconnect.abi import AccessFlags
from rdmaconnect.errors import LibraryError, StateError, VerbsError
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.imported import ImportedDM, ImportedMR, ImportedPD, import_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.regions import DM, DmMR, NullMR


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


# ---- memory on the device


def test_device_memory_is_written_and_read(context: Context) -> None:
    with DM(context, 64, log_align=3) as dm:
        dm.write(b"hello", 10)
        dm.write(memoryview(bytearray(b"HE")), 10)
        assert dm.read(7, 9) == b"\0HEllo\0"
        assert dm.read(0, 64) == b""
        dm.write(b"")
        for call in (lambda: dm.read(1, 64), lambda: dm.write(b"12", 63), lambda: dm.read(1, -1)):
            with pytest.raises(ValueError, match="64 bytes of device memory of soft0 has no more"):
                call()
    with pytest.raises(StateError, match="is closed"):
        dm.read(1)


def test_what_was_asked_for_goes_to_the_provider(software: Software, context: Context) -> None:
    seen: list[Any] = []
    with software.on("ibv_alloc_dm", before=lambda call: seen.append(bytes(call["attr"]))):
        DM(context, 2**10, log_align=6).close()
    assert [int.from_bytes(seen[0][i:j], "little") for i, j in ((0, 8), (8, 12), (12, 16))] == [2**10, 6, 0]


def test_a_region_of_device_memory_counts_from_0(software: Software, context: Context) -> None:
    seen: list[Call] = []
    with PD(context) as pd, DM(context, 64) as dm:
        with software.on("ibv_reg_dm_mr", before=seen.append), DmMR(pd, dm, 16) as mr:
            assert (mr.addr, mr.length, mr.sge(8).addr, mr.sge(8).length) == (0, 48, 8, 40)
            assert mr.region.addr == 0
            assert mr.rkey == mr.pointer.contents.rkey != 0
            assert mr.access & AccessFlags.ZERO_BASED
            assert (seen[0]["dm_offset"], seen[0]["length"], seen[0]["access"]) == (16, 48, int(mr.access))
            with pytest.raises(TypeError, match="Make a new one"):
                mr.reregister(buffer=bytearray(8))
            dm.close()  # the region goes first
            assert mr.closed
        for offset, length in ((60, 8), (65, None), (-1, 1)):
            with pytest.raises(ValueError, match="has no more"):
                DmMR(pd, dm, offset, length)


def test_more_than_there_is_is_refused(context: Context) -> None:
    with pytest.raises(VerbsError, match="allocate 1048576 bytes of device memory: ibv_alloc_dm: ENOMEM"):
        DM(context, 1 << 20)
    with pytest.raises(ValueError, match="length is -1"):
        DM(context, -1)
    with pytest.raises(ValueError, match="log_align_req is 4294967296"):
        DM(context, 8, log_align=2**32)


def test_device_memory_goes_out_as_a_descriptor(context: Context) -> None:
    with DM(context, 64) as dm:
        os.close(dm.export())


# ---- no memory at all


def test_a_null_region_has_a_local_key_alone(context: Context) -> None:
    with PD(context) as pd, NullMR(pd) as mr:
        piece = mr.sge(0, 2**32 - 1)
        assert (piece.lkey, piece.length) == (mr.lkey, 2**32 - 1)
        assert mr.lkey == mr.pointer.contents.lkey
        with pytest.raises(StateError, match="open null MR of soft0 to a peer: a null region has no key"):
            _ = mr.region


@pytest.mark.parametrize(
    ("verb", "make"),
    [
        ("ibv_alloc_dm", lambda pd: DM(pd.context, 8)),
        ("ibv_alloc_null_mr", NullMR),
        ("ibv_import_pd", lambda pd: ImportedPD(pd.context, 1)),
        ("ibv_import_mr", lambda pd: ImportedMR(pd, 1, addr=0, length=1)),
        ("ibv_import_dm", lambda pd: ImportedDM(pd.context, 1, length=1)),
    ],
)
def test_what_the_provider_lacks_is_said(software: Software, context: Context, verb: str, make: Any) -> None:
    with PD(context) as pd, software.on(verb, fail=errno.EOPNOTSUPP):
        with pytest.raises(LibraryError, match=f"{verb}: EOPNOTSUPP, the device's provider does not have it") as caught:
            make(pd)
        assert caught.value.errno == errno.EOPNOTSUPP


# ---- another process's


def test_what_was_made_elsewhere_is_used_here_and_stays_there(software: Software, context: Context) -> None:
    memory = bytearray(64)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there, PD(context) as pd, pd.register(memory) as mr, DM(context, 32) as dm:
        socket.send_fds(there, [b"x"], [context.pointer.contents.cmd_fd])
        _, (fd,), _, _ = socket.recv_fds(here, 1, 1)
        with import_device(fd) as other:
            os.close(fd)  # the context has a duplicate of its own
            assert other.name == "soft0"
            assert not other.is_same(context)
            with (
                ImportedPD(other, pd.pointer.contents.handle) as domain,
                ImportedMR(domain, mr.pointer.contents.handle, addr=mr.addr, length=mr.length) as region,
                ImportedDM(other, dm.pointer.contents.handle, length=dm.length) as device_memory,
            ):
                assert (region.lkey, region.rkey, region.region) == (mr.lkey, mr.rkey, mr.region)
                assert region.sge(4, 8).addr == mr.addr + 4
                device_memory.write(b"shared")
                assert dm.read(6) == b"shared"
                with pytest.raises(TypeError, match="Make a new one"):
                    region.reregister(access=AccessFlags.LOCAL_WRITE)
            assert (
                software.calls["ibv_dereg_mr"] == software.calls["ibv_dealloc_pd"] == software.calls["ibv_free_dm"] == 0
            )
            assert not mr.closed
        with open_device("soft0") as again:
            assert again.is_same(context)


def test_only_a_device_node_is_imported(software: Software, tmp_path: Path) -> None:
    with (tmp_path / "plain").open("wb") as file, pytest.raises(ValueError, match="is no device node"):
        import_device(file.fileno())
    before = set(os.listdir("/proc/self/fd"))
    with (
        open("/dev/null") as null,
        software.on("ibv_import_device", fail=errno.EOPNOTSUPP),
        pytest.raises(LibraryError, match="import a device"),
    ):
        import_device(null.fileno())
    assert set(os.listdir("/proc/self/fd")) == before
