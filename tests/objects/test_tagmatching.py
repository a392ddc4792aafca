"""The list of tagged buffers of a shared receive queue, on the device in software."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
from software import Software
from software.arena import ALIVE

from rdmaconnect.abi import SrqType, WcOpcode, WcStatus
from rdmaconnect.errors import LibraryError, PostError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import MR, PD
from rdmaconnect.objects.srq import SRQ
from rdmaconnect.objects.tagmatching import TagList


@pytest.fixture
def made(software: Software) -> Iterator[tuple[SRQ, CQ, MR]]:
    with (
        open_device("soft0") as context,
        PD(context) as pd,
        CQ(context, 16) as cq,
        pd.register(bytearray(64)) as mr,
        SRQ(pd, 4, srq_type=SrqType.TM, cq=cq, max_num_tags=2, max_ops=4) as srq,
    ):
        yield srq, cq, mr


def device(software: Software) -> Any:
    """The queue as the device has it."""
    return next(one for one in ALIVE.values() if one.kind == "srq" and one.world is software)


def completions(cq: CQ) -> list[tuple[int, int, int]]:
    return [(wc.wr_id, wc.opcode, wc.status) for wc in cq.wcs[: cq.poll()]]


def test_buffers_are_added_and_taken_out_by_their_handles(software: Software, made: tuple[SRQ, CQ, MR]) -> None:
    srq, cq, mr = made
    tags = TagList(srq)
    one = tags.add(1, 0x1234, mr.sge(0, 8), mask=0xFFFF, recv_wr_id=2**64 - 1)
    two = tags.add(2, 2**64 - 1, [mr.sge(8, 8), mr.sge(16, 8)], signaled=False)
    assert one != two
    assert device(software).tags[one] == (0x1234, 0xFFFF, 2**64 - 1)
    assert device(software).tags[two] == (2**64 - 1, 2**64 - 1, 0)
    with pytest.raises(PostError, match=r"TAG_ADD \(wr_id 3\) in the tag list of TM SRQ of soft0: .*ENOMEM") as caught:
        tags.add(3, 5, mr.sge(0, 8))
    assert (caught.value.posted, caught.value.wr_id) == (0, 3)
    tags.delete(4, one)
    tags.delete(5, one)
    assert device(software).unexpected == 0
    tags.sync(6, 7)
    assert device(software).unexpected == 7
    assert completions(cq) == [
        (1, WcOpcode.TM_ADD, WcStatus.SUCCESS),
        (4, WcOpcode.TM_DEL, WcStatus.SUCCESS),
        (5, WcOpcode.TM_DEL, WcStatus.TM_ERR),
        (6, WcOpcode.TM_SYNC, WcStatus.SUCCESS),
    ]


def test_what_does_not_fit_is_refused_before_the_device_is_asked(software: Software, made: tuple[SRQ, CQ, MR]) -> None:
    srq, _, mr = made
    tags = TagList(srq)
    for name, wrong in (("wr_id", 2**64), ("tag", -1), ("mask", 2**64), ("recv_wr_id", 2**64), ("unexpected", 2**32)):
        given = {"wr_id": 1, "tag": 1, "sge": mr.sge(), name: wrong}
        with pytest.raises(ValueError, match=f"{name}.* is {wrong}"):
            tags.add(**given)
    assert software.calls["ibv_post_srq_ops"] == 0
    with (
        PD(srq.context) as other,
        other.register(bytearray(8)) as foreign,
        pytest.raises(ValueError, match="another protection domain"),
    ):
        tags.add(1, 1, foreign.sge())
    with SRQ(srq.pd, 4) as plain, pytest.raises(ValueError, match="Make it of type TM"):
        TagList(plain)


def test_what_the_provider_lacks_is_said(software: Software, made: tuple[SRQ, CQ, MR]) -> None:
    with software.on("ibv_post_srq_ops", fail=errno.EOPNOTSUPP), pytest.raises(LibraryError, match="ibv_post_srq_ops"):
        TagList(made[0]).sync(1, 1)
