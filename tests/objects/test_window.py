"""The key of a type 2 window: the provider reads the old one while a bind is posted; then it is the new one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from software import Software
from software.ends import joined

from rdmaconnect.abi import AccessFlags, MwType, QpSendOpsFlags, QpState, QpType, WcStatus
from rdmaconnect.errors import PostError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import FULL_ACCESS, PD
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.work_request import SendRequest


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


@pytest.mark.parametrize("way", ["post", "batch"])
def test_the_key_changes_once_the_bind_is_posted(software: Software, context: Context, way: str) -> None:
    ops = QpSendOpsFlags.BIND_MW
    seen: list[int] = []
    with (
        PD(context) as pd,
        CQ(context, 8) as cq,
        pd.register(bytearray(64), FULL_ACCESS | AccessFlags.MW_BIND) as mr,
        QueuePairEx(pd, cq, cq, QpType.RC, max_send_wr=4, send_ops_flags=ops) as qp,
        MW(pd, MwType.TYPE_2) as mw,
    ):
        qp.state = QpState.RTS  # the device knows better: a list is refused
        old, new = mw.rkey, mw.next_rkey
        verb = "ibv_post_send" if way == "post" else "ibv_wr_bind_mw"
        with software.on(verb, before=lambda call: seen.append(mw.pointer.contents.rkey)):
            if way == "post":
                with pytest.raises(PostError):
                    qp.post_send(SendRequest().bind_mw(1, mw, mr))
            else:
                with qp.batch() as batch:
                    batch.bind_mw(1, mw, mr)
                    assert mw.rkey == new
                    batch.abort()
        assert seen == [old]
        assert mw.rkey == old  # what was not posted has changed nothing


def test_a_region_whose_window_was_not_bound_anew_is_freed_with_its_parent(software: Software) -> None:
    """From the moment that a bind is posted the window counts as the new region's; the device may not take it."""
    access = FULL_ACCESS | AccessFlags.MW_BIND
    with joined() as (end, _):
        mw = MW(end.pd, MwType.TYPE_2)
        new, former = end.pd.register(bytearray(64), access), end.pd.register(bytearray(64), access)
        end.qp.post_send(SendRequest().bind_mw(1, mw, former))
        end.wait()
        end.qp.post_send(SendRequest().bind_mw(2, mw, new))  # it would have to be invalidated first
        end.wait(status=WcStatus.MW_BIND_ERR)
        with pytest.raises(VerbsError, match=r"EBUSY .*A memory window may be bound"):
            former.close()
        assert not former.closed
    assert former.closed
    assert mw.closed
