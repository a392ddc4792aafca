"""What the device in software notices that no program may do."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest
from software import Software, end_on, joined

import rdmaconnect
import rdmaconnect.objects.context
from rdmaconnect import verbs
from rdmaconnect.abi import QpState, QpType, ibv_comp_channel, ibv_qp
from rdmaconnect.errors import VerbsError
from rdmaconnect.objects.address import UdAddress
from rdmaconnect.objects.completion import CompChannel
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import SendRequest

RTR = QpState.RTR
#: seconds that are noticed, and do not matter
A_WHILE = 0.05


def send(end: object, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[attr-defined]


def test_use_after_free_is_noticed_and_harmless(software: Software) -> None:
    with end_on() as end:
        qp = end.qp.pointer
    software.expects(r"ibv_destroy_qp use after free: qp 0x.* was freed by ibv_destroy_qp in thread MainThread")
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_destroy_qp(qp)
    assert qp.contents.qp_num == 0x6B6B6B6B
    assert software.calls["ibv_destroy_qp"] == 1
    assert "test_software_misuse.py" in software.errors[0]


def test_a_stale_pointer_answers_to_its_own_device(software: Software) -> None:
    with Software() as other, end_on() as end:
        qp = end.qp.pointer
    software.install()
    assert verbs.ibv_modify_qp(qp, verbs.abi.ibv_qp_attr(), 0) == errno.EINVAL
    assert "use after free" in other.errors[0]


@pytest.mark.parametrize("address", [0, 16, 0x10000])
def test_what_was_never_made_is_noticed(software: Software, address: int) -> None:
    software.expects("ibv_destroy_qp was given (NULL|0x)")
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_destroy_qp(ctypes.cast(address, ctypes.POINTER(ibv_qp)))


def test_one_kind_is_not_taken_for_another(software: Software) -> None:
    software.expects("ibv_destroy_comp_channel was given pd 0x.* for a struct ibv_comp_channel")
    with open_device("soft0") as context, PD(context) as pd, pytest.raises(VerbsError):
        verbs.ibv_destroy_comp_channel(ctypes.cast(pd.pointer, ctypes.POINTER(ibv_comp_channel)))


def test_parents_go_last(software: Software) -> None:
    with joined() as (here, _):
        for verb, thing in (
            (verbs.ibv_dealloc_pd, here.pd),
            (verbs.ibv_destroy_cq, here.cq),
            (verbs.ibv_destroy_comp_channel, here.channel),
        ):
            with pytest.raises(VerbsError, match="EBUSY"):
                verb(thing.pointer)


def test_a_device_that_is_closed_too_early_is_noticed(software: Software) -> None:
    software.expects("ibv_close_device context 0x.*: pd 0x.* were made from it and not destroyed")
    software.expects("ibv_dealloc_pd use after free")
    context = open_device("soft0")
    pd = PD(context)
    verbs.ibv_close_device(context.pointer)
    with pytest.raises(VerbsError):
        pd.close()
    for owner in (pd, context, *rdmaconnect.objects.context._opened.values()):
        owner._pointer = None
    rdmaconnect.objects.context._opened.clear()


def test_what_is_left_is_a_problem() -> None:
    with Software() as software:
        with open_device("soft0") as context:
            pd = PD(context)
            assert software.problems() == [
                "1 context left",
                "1 pd left",
                f"descriptors left: {sorted(software.descriptors)}",
            ]
            software.leaves(context=1, pd=1)
            assert software.problems() == []
            pd.close()
        assert software.problems() == ["no context left, of 1 that should be", "no pd left, of 1 that should be"]
        assert software.left() == {}
        software.expects("nothing of this kind")
        assert "no error 'nothing of this kind'" in software.problems()


def test_a_descriptor_that_is_read_after_it_was_closed_is_noticed() -> None:
    with Software() as software:
        with open_device("soft0") as context, CompChannel(context) as channel:
            fd = channel.fileno()
        assert software.descriptors == set()
        os.eventfd_read(fd)
        assert software.problems() == [f"descriptor {fd} was read, written to or closed after it was given back"]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_an_event_that_is_not_acknowledged_is_noticed(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("software.events.PATIENCE_S", A_WHILE)
    software.expects("ibv_destroy_cq cq .*: 1 events were not acknowledged: it would wait for ever")
    with joined() as (here, there):
        there.recv(1)
        there.cq.arm()
        send(here, 1, b"x")
        pointer, _ = verbs.ibv_get_cq_event(there.channel.pointer)
        there.qp.close()
        with pytest.raises(VerbsError, match="EINVAL"):
            verbs.ibv_destroy_cq(pointer)
        verbs.ibv_ack_cq_events(pointer, 1)


def test_an_error_inside_of_the_device_is_told(software: Software) -> None:
    software.expects("ibv_alloc_pd: ZeroDivisionError.*inside of the device")
    software.on("ibv_alloc_pd", before=lambda call: 1 // 0)
    with open_device("soft0") as context, pytest.raises(VerbsError, match="EIO"):
        PD(context)


def test_a_datagram_without_a_handle_is_noticed(software: Software) -> None:
    software.expects("ibv_post_send use after free: ah")
    with joined(QpType.UD) as (here, there):
        to = here.address_of(there)
        request = SendRequest().send(1, inline=b"x", to=to)
        to.ah.close()
        here.qp.target = None
        request.work = None
        with pytest.raises(VerbsError, match="EINVAL"):
            here.qp.post_send(request)
        assert isinstance(to, UdAddress)
