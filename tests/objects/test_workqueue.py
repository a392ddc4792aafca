"""Work queues and their tables, on the device in software."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
from software import Call, Software

from rdmaconnect.abi import QpInitAttrMask, QpType, RxHashFields, WcStatus, WqFlags, WqState
from rdmaconnect.errors import LibraryError, PostError, StateError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair_ex import QueuePairEx, RxHash
from rdmaconnect.objects.work_request import RecvRequest
from rdmaconnect.objects.workqueue import WQ, RwqIndTable


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as made:
        yield made


def test_a_work_queue_receives_in_rdy(context: Context) -> None:
    with PD(context) as pd, CQ(context, 8) as cq, WQ(pd, cq, 2, wq_context=2**63 + 5) as wq:
        assert (wq.state, wq.max_wr, wq.max_sge) == (WqState.RESET, 2, 1)
        assert wq.pointer.contents.wq_num == wq.wq_num
        assert wq.pointer.contents.wq_context == 2**63 + 5
        with pytest.raises(StateError, match="it is in RESET and receives in RDY"):
            wq.post_recv(RecvRequest(1))
        wq.modify(WqState.RDY)
        with pd.register(bytearray(100)) as mr:
            wq.post_recv(RecvRequest.scatter(1, mr.sge()), RecvRequest.scatter(2, mr.sge()))
            with pytest.raises(PostError, match="ibv_post_wq_recv: ENOMEM") as caught:
                wq.post_recv(RecvRequest.scatter(3, mr.sge()))
            assert (caught.value.posted, caught.value.wr_id) == (0, 3)
        wq.modify(WqState.ERR)
        assert cq.poll() == 2
        assert [(wc.wr_id, wc.status) for wc in cq.wcs[:2]] == [(1, WcStatus.WR_FLUSH_ERR), (2, WcStatus.WR_FLUSH_ERR)]
        with pytest.raises(VerbsError, match="modify a work queue: ibv_modify_wq: EINVAL"):
            wq.modify(WqState.RDY)
        assert wq.state == WqState.ERR


def test_flags_are_set_at_first_and_changed_by_their_mask(software: Software, context: Context) -> None:
    seen: list[tuple[int, ...]] = []

    def look(call: Call) -> None:
        attr: Any = call["wq_attr"]
        seen.append((attr.attr_mask, attr.flags, attr.flags_mask))

    with PD(context) as pd, CQ(context, 8) as cq, WQ(pd, cq, 2, flags=WqFlags.DELAY_DROP) as wq:
        with software.on("ibv_modify_wq", before=look):
            wq.modify(flags=WqFlags.CVLAN_STRIPPING)
            wq.modify(flags=WqFlags(0), flags_mask=WqFlags.DELAY_DROP)
        assert seen == [(4, 1, 1), (4, 0, 4)]


def test_within_a_batch_a_work_queue_is_neither_moved_nor_closed(context: Context) -> None:
    with PD(context) as pd, CQEx(context, 8) as cq, WQ(pd, cq, 4) as wq:
        wq.modify(WqState.RDY)
        wq.post_recv(RecvRequest(1))
        wq.modify(WqState.ERR)
        for _ in cq.poll_batch():
            for call in (lambda: wq.modify(WqState.RESET), wq.close):
                with pytest.raises(StateError, match="this thread is within a batch of it"):
                    call()
        assert not wq.closed


def test_a_table_spreads_over_queues_and_outlives_none_of_them(software: Software, context: Context) -> None:
    seen: list[Any] = []

    def look(call: Call) -> None:
        init: Any = call["qp_init_attr_ex"]
        conf = init.rx_hash_conf
        key = bytes(conf.rx_hash_key[i] for i in range(conf.rx_hash_key_len))
        seen.append((init.comp_mask, conf.rx_hash_function, conf.rx_hash_fields_mask, key, bool(init.rwq_ind_tbl)))

    with PD(context) as pd, CQ(context, 8) as cq, WQ(pd, cq, 4) as one, WQ(pd, cq, 4) as two:
        table = RwqIndTable(context, [one, two, one, one])
        assert table.pointer.contents.ind_tbl_num == 4
        fields = RxHashFields.SRC_IPV4 | RxHashFields.INNER
        with software.on("ibv_create_qp_ex", before=look, fail=errno.EOPNOTSUPP), pytest.raises(VerbsError):
            QueuePairEx(pd, None, None, QpType.RAW_PACKET, rwq_ind_tbl=table, rx_hash_conf=RxHash(b"k" * 40, fields))
        mask = QpInitAttrMask.PD | QpInitAttrMask.IND_TABLE | QpInitAttrMask.RX_HASH
        assert seen == [(mask, 1, fields, b"k" * 40, True)]
        two.close()
        assert table.closed


@pytest.mark.parametrize("count", [0, 3])
def test_a_table_has_a_power_of_two(context: Context, count: int) -> None:
    with (
        PD(context) as pd,
        CQ(context, 8) as cq,
        WQ(pd, cq, 4) as wq,
        pytest.raises(ValueError, match=f"make a table of {count} work queues: give a power of 2"),
    ):
        RwqIndTable(context, [wq] * count)


def test_numbers_that_do_not_fit_are_refused(context: Context) -> None:
    with PD(context) as pd, CQ(context, 8) as cq:
        for name, wrong in (("max_wr", 2**32 + 1), ("max_sge", -1), ("wq_context", 2**64)):
            with pytest.raises(ValueError, match=f"{name} is {wrong}"):
                WQ(pd, cq, **{"max_wr": 1, name: wrong})


def test_what_the_provider_lacks_is_said(software: Software, context: Context) -> None:
    with (
        PD(context) as pd,
        CQ(context, 8) as cq,
        software.on("ibv_create_wq", fail=errno.EOPNOTSUPP),
        pytest.raises(LibraryError, match="ibv_create_wq"),
    ):
        WQ(pd, cq, 4)
