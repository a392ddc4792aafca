"""A signal's handler raises just when an event has come, or has been acknowledged: none is lost or counted twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from software import Software

from rdmaconnect import verbs
from rdmaconnect.abi import QpState, QpType
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.work_request import RecvRequest


class Interrupt(BaseException):
    """What the handler raises."""


def flush_one(pd: PD, cq: CQ) -> None:
    """Have an event come."""
    cq.arm()
    with QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp:
        qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0))
        qp.post_recv(RecvRequest(1))
        qp.move(QpState.ERR)


def interrupted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the handler raise once, when that verb has done its work."""
    verb, left = getattr(verbs, name), [1]

    def raising(*args: Any) -> Any:
        result = verb(*args)
        if left:
            left.pop()
            raise Interrupt
        return result

    monkeypatch.setattr(verbs, name, raising)


@pytest.mark.parametrize("again", [True, False], ids=["drained again", "closed at once"])
def test_an_event_that_has_just_come(software: Software, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    with (
        open_device("soft0") as context,
        CompChannel(context) as channel,
        CQ(context, 8, channel) as cq,
        PD(context) as pd,
    ):
        flush_one(pd, cq)
        interrupted(monkeypatch, "ibv_get_cq_event")
        with pytest.raises(Interrupt):
            channel.drain()
        if again:
            assert channel.drain() == [cq]
            assert (channel.drain(), cq.unacked) == ([], 1)
    assert software.problems() == []


@pytest.mark.parametrize("count", [1, None, 0], ids=["as many", "the rest", "closed at once"])
def test_events_that_have_just_been_acknowledged(
    software: Software, monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    with (
        open_device("soft0") as context,
        CompChannel(context) as channel,
        CQ(context, 8, channel) as cq,
        PD(context) as pd,
    ):
        for _ in range(2):
            flush_one(pd, cq)
            assert channel.drain() == [cq]
        interrupted(monkeypatch, "ibv_ack_cq_events")
        with pytest.raises(Interrupt):
            cq.ack_events(1)
        if count != 0:
            with pytest.raises(ValueError, match="1 are due"):
                cq.ack_events(2)
            cq.ack_events(count)
            assert cq.unacked == 0
    assert software.problems() == []
