"""Whose memory it is: what is of another protection domain, connection or device is refused, and both are named."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from software import Device, Port, Software, connected, end_on, joined
from software.ends import QKEY

from rdmaconnect import verbs
from rdmaconnect.abi import AccessFlags, CqWcFlags, MwType, QpSendOpsFlags, QpState, QpType, WcFlags, WcStatus
from rdmaconnect.errors import DeviceError, StateError
from rdmaconnect.objects import no_device
from rdmaconnect.objects.address import AddressHandle, UdAddress, path_back
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.current_completion import STANDARD_WC_FLAGS
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD, Sge
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.srq import SRQ

RC, UD = QpType.RC, QpType.UD
SIZES = {"max_send_wr": 4, "max_recv_wr": 4}
BINDABLE = FULL_ACCESS | AccessFlags.MW_BIND
OPS = QpSendOpsFlags.SEND | QpSendOpsFlags.BIND_MW


# ---- memory of another connection


@pytest.mark.parametrize("what", ["send", "write", "read into"])
def test_memory_of_another_connection_is_refused_before_it_is_posted(software: Software, what: str) -> None:
    regions = {"listen": {"regions": {"far": bytearray(64)}}}
    with connected(**regions) as (here, there), connected(**regions) as (other, _):
        mr = other.register(bytearray(8))
        posted = software.calls["ibv_post_send"]
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: here.send(mr),
            "write": lambda: here.write(mr, "far"),
            "read into": lambda: here.read_into(mr, "far"),
        }
        with pytest.raises(ValueError, match=r"8 bytes: MR of 8 bytes is registered in another protection domain .*"):
            calls[what]()
        assert software.calls["ibv_post_send"] == posted
        mr.close()
        with pytest.raises(StateError, match="MR of 8 bytes is closed"):
            calls[what]()
        here.send(b"it is none the worse")
        assert there.recv(deadline_s=5) == b"it is none the worse"


def test_what_is_refused_names_both(software: Software) -> None:
    with connected() as (here, _), connected() as (other, _), other.register(bytearray(8)) as mr:
        with pytest.raises(ValueError, match=r"MR of 8 bytes .*PD of soft0.*<Connection RC .*register") as caught:
            here.send(mr)
        assert str(here.local) in str(caught.value)


# ---- work requests


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as opened:
        yield opened


@pytest.fixture
def foreign(context: Context) -> Iterator[PD]:
    """Another protection domain of the same device."""
    with PD(context) as pd:
        yield pd


@pytest.mark.parametrize("way", ["post_send", "list", "batch", "post_recv", "receive list", "shared queue"])
def test_a_region_of_another_domain_is_not_posted(foreign: PD, software: Software, way: str) -> None:
    with joined(kind=QueuePairEx, send_ops_flags=OPS) as (here, _), MR(foreign, bytearray(8)) as mr:
        good, sge = SendRequest().send(1, inline=b"x"), mr.sge()

        def batch() -> None:
            with here.qp.batch() as wr:
                wr.send(1, sge=sge)

        srq = SRQ(here.pd, 4)
        ways: dict[str, Callable[[], Any]] = {
            "post_send": lambda: here.qp.post_send(SendRequest().send(1, sge=sge)),
            "list": lambda: here.qp.post_send(good, SendRequest().send(1, sge=[here.mr.sge(0, 1), sge])),
            "batch": batch,
            "post_recv": lambda: here.qp.post_recv(RecvRequest.scatter(1, sge)),
            "receive list": lambda: here.qp.post_recv(RecvRequest(1), RecvRequest.scatter(1, [here.mr.sge(0, 1), sge])),
            "shared queue": lambda: srq.post_recv(RecvRequest.scatter(1, sge)),
        }
        with pytest.raises(ValueError, match=r"post to .* of soft0: MR of 8 bytes is of another protection domain"):
            ways[way]()
        mr.close()
        with pytest.raises(StateError, match="MR of 8 bytes is closed"):
            ways[way]()
        assert here.cq.poll() == 0, "nothing was posted"


def test_a_piece_keeps_its_region(foreign: PD, software: Software) -> None:
    request = RecvRequest.scatter(1, MR(foreign, bytearray(8)).sge())
    assert software.alive["mr"] == 1
    for region in request.regions:
        region.close()


def test_pieces_are_the_same_whoever_made_them(foreign: PD) -> None:
    with MR(foreign, bytearray(8)) as mr:
        assert mr.sge(2, 4) == Sge(mr.addr + 2, 4, mr.lkey)
        assert "MR" not in repr(mr.sge())


def test_an_address_handle_of_another_domain_is_not_posted(foreign: PD, software: Software) -> None:
    with joined(UD) as (here, there), AddressHandle(foreign, here.path_to(there)) as ah:
        to = UdAddress(ah, there.qp.qp_num, QKEY)
        with pytest.raises(ValueError, match=r"post to UD QP .*: address handle .* is of another protection domain"):
            here.qp.post_send(SendRequest().send(1, inline=b"x", to=to))


@pytest.mark.parametrize("way", ["window", "region"])
def test_a_window_or_region_of_another_domain_is_not_bound(foreign: PD, software: Software, way: str) -> None:
    with joined(kind=QueuePairEx, send_ops_flags=OPS) as (here, _):
        mine, theirs = MW(here.pd, MwType.TYPE_2), MW(foreign, MwType.TYPE_2)
        mr = MR(foreign, bytearray(64), BINDABLE)
        mw, region = (theirs, mr) if way == "window" else (mine, mr)
        with pytest.raises(ValueError, match="of another protection domain"):
            here.qp.post_send(SendRequest().bind_mw(1, mw, region))
        assert not mw.closed
        mr.close()
        theirs.close()
        assert here.cq.poll() == 0


# ---- objects


@pytest.fixture
def two() -> Iterator[tuple[Context, Context]]:
    """Two devices."""
    with Software([Device("soft0"), Device("soft1", [Port(["127.0.0.2"])])]) as software:
        with open_device("soft0") as here, open_device("soft1") as there:
            yield here, there
        assert software.problems() == []


#: what is made of things of two devices
MIXED: dict[str, Callable[[Context, Context, Callable[[Any], Any]], Any]] = {
    "CQ": lambda c, o, k: CQ(c, 4, k(CompChannel(o))),
    "CQEx": lambda c, o, k: CQEx(c, 4, k(CompChannel(o))),
    "queue pair": lambda c, o, k: QueuePair(k(PD(c)), k(CQ(c, 4)), k(CQ(o, 4)), RC, **SIZES),
    "its domain": lambda c, o, k: QueuePair(k(PD(o)), k(CQ(c, 4)), k(CQ(c, 4)), RC, **SIZES),
    "its shared queue": lambda c, o, k: QueuePair(
        k(PD(c)), k(CQ(c, 4)), k(CQ(c, 4)), RC, **SIZES, srq=k(SRQ(k(PD(o)), 4))
    ),
    "region": lambda c, o, k: k(MR(k(PD(c)), bytearray(8))).reregister(pd=k(PD(o))),
}


@pytest.mark.parametrize("what", MIXED)
def test_things_of_two_devices_are_not_mixed(two: tuple[Context, Context], what: str) -> None:
    with ExitStack() as stack, pytest.raises(ValueError, match=r"soft\d.*of another device|give one of soft0"):
        MIXED[what](*two, stack.enter_context)


def test_a_shared_queue_of_another_domain_is_refused(context: Context, foreign: PD) -> None:
    with (
        PD(context) as pd, CQ(context, 4) as cq, SRQ(foreign, 4) as srq,
        pytest.raises(ValueError, match="in PD of soft0: BASIC SRQ of soft0 is of another protection"),
    ):  # fmt: skip
        QueuePair(pd, cq, cq, RC, **SIZES, srq=srq)


# ---- the way back of a datagram


@pytest.mark.parametrize("kind", ["plain", "extended"])
def test_the_sender_of_a_datagram_is_found_by_either_queue(software: Software, kind: str) -> None:
    with end_on(qp_type=UD) as here, end_on(qp_type=UD, cqe=8) as base:
        cq = base.cq if kind == "plain" else CQEx(base.context, 8)
        qp = QueuePair(base.pd, cq, cq, UD, **SIZES)
        there = type(base)(base.context, base.pd, base.channel, cq, qp, base.memory, base.mr, 5)
        here.climb(there)
        there.climb(here)
        there.recv(1)
        here.qp.post_send(SendRequest().send(2, inline=b"x", to=here.address_of(there)))
        if kind == "plain":
            assert cq.poll() == 1
            back = AddressHandle.reply_to(base.pd, 1, cq.wcs[0], base.memory)
            assert WcFlags(cq.wcs[0].wc_flags) & WcFlags.GRH
        else:
            for wc in cq.poll_batch():
                assert wc.read_wc_flags() & WcFlags.GRH
                back = AddressHandle.reply_to(base.pd, 1, wc, base.memory)
                assert path_back(base.context, 1, wc, base.memory) == back.attr
            assert not hasattr(cq, "wc_flags"), "of a completion they mean something else than of a queue"
            assert cq.fields == STANDARD_WC_FLAGS
        assert socket.inet_ntop(socket.AF_INET6, back.attr.dgid) == "::ffff:127.0.0.1"
        with pytest.raises(StateError, match="no completion is current") if kind == "extended" else ExitStack():
            AddressHandle.reply_to(base.pd, 1, cq if kind == "extended" else cq.wcs[0], base.memory).close()


def test_a_queue_without_the_fields_says_which_it_lacks(software: Software) -> None:
    with joined(UD) as (here, there), CQEx(there.context, 8, wc_flags=CqWcFlags.BYTE_LEN) as cq:
        qp = QueuePair(there.pd, cq, cq, UD, **SIZES, max_inline_data=8)
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qkey=1))
        qp.move(QpState.ERR)
        qp.post_send(SendRequest().send(1, inline=b"x", to=there.address_of(here)))
        for wc in cq.poll_batch():
            assert wc.status == WcStatus.WR_FLUSH_ERR
            with pytest.raises(StateError, match=r"made without CqWcFlags\.SLID\. Add it to wc_flags"):
                path_back(there.context, 1, wc, bytes(40))


# ---- what the library itself says

STUB = r"""
#include <stdio.h>
#include <stdlib.h>
void *ibv_get_device_list(int *n) {
    if (n) *n = 0;
    fprintf(stderr, "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': no such file\n");
    if (getenv("IBV_SHOW_WARNINGS"))
        fprintf(stderr, "libibverbs: Warning: no userspace device-specific driver found for uverbs0\n");
    fprintf(stderr, "a line of somebody else\n");
    return calloc(1, sizeof(void *));
}
void ibv_free_device_list(void *list) { free(list); }
"""
COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for a stand-in of libibverbs")
def test_the_library_s_own_words_are_part_of_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stub = tmp_path / "stub.c", tmp_path / "libibverbs.so.1"
    source.write_text(STUB)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(stub), str(source)], check=True, timeout=60)
    monkeypatch.setenv("RDMACONNECT_LIBIBVERBS", str(stub))
    monkeypatch.setattr(no_device, "kernel_devices", lambda: ["mlx5_0"])
    verbs.use(None)
    try:
        assert len(verbs.complaints()) == 2
        with pytest.raises(DeviceError) as caught:
            open_device("mlx5_0")
    finally:
        monkeypatch.undo()
        verbs.use(None)
    assert "The kernel has mlx5_0, but this process cannot use them" in str(caught.value)
    assert "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': no such file." in str(caught.value)
    assert "no userspace device-specific driver found for uverbs0." in str(caught.value)
    assert "somebody else" not in str(caught.value)


def test_no_process_is_started_that_is_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    assert verbs.complaints() == ()


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_the_library_is_told_to_free_what_is_of_a_device_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    seen: list[str | None] = []
    name = "RDMAV_ALLOW_DISASSOC_DESTROY"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p

    def load(*_: Any, **__: Any) -> Any:
        found = libc.getenv(name.encode())  # as the library sees it
        seen.append(found and found.decode())
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    verbs.use(None)
    try:
        verbs.library()
    finally:
        monkeypatch.undo()
        os.environ.pop(name, None)
        verbs.use(None)
    assert seen == [after]
