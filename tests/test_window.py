"""The key of a type 2 window: the provider reads the old one while a bind is posted; then it is the new one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from software import Software

from rdmaconnect.abi import AccessFlags, MwType, QpSendOpsFlags, QpState, QpType
from rdmaconnect.errors import PostError
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
