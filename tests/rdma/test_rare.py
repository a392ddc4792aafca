"""What rxe has of the rarer verbs, which is what the library itself does, and what it lacks, by name."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nodes import PATIENCE, Node

from rdmaconnect import abi, verbs
from rdmaconnect.abi import ForkStatus, QpState, QpType, Rate, SrqType
from rdmaconnect.errors import LibraryError, VerbsError
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.domain import TD, ParentDomain
from rdmaconnect.objects.imported import ImportedDM, ImportedMR, ImportedPD, import_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import QueuePair
from rdmaconnect.objects.regions import DM, NullMR
from rdmaconnect.objects.srq import SRQ
from rdmaconnect.objects.steering import Counters, Flow, drop
from rdmaconnect.objects.work_request import RecvRequest
from rdmaconnect.objects.workqueue import WQ, RwqIndTable


@pytest.fixture
def context(node1: Node) -> Iterator[Context]:
    with open_device(node1.device) as made:
        yield made


#: verb -> what makes something of it
LACKING: dict[str, Callable[[Context, PD, CQ], Any]] = {
    "ibv_alloc_td": lambda context, pd, cq: TD(context),
    "ibv_alloc_parent_domain": lambda context, pd, cq: ParentDomain(pd),
    "ibv_create_wq": lambda context, pd, cq: WQ(pd, cq, 1),
    "ibv_alloc_dm": lambda context, pd, cq: DM(context, 64),
    "ibv_alloc_null_mr": lambda context, pd, cq: NullMR(pd),
    "ibv_create_counters": lambda context, pd, cq: Counters(context),
    "ibv_import_device": lambda context, pd, cq: import_device(context.pointer.contents.cmd_fd),
    "ibv_import_pd": lambda context, pd, cq: ImportedPD(context, pd.pointer.contents.handle),
    "ibv_import_mr": lambda context, pd, cq: ImportedMR(pd, 1, addr=0, length=1),
    "ibv_import_dm": lambda context, pd, cq: ImportedDM(context, 1, length=1),
}


@pytest.mark.parametrize("verb", LACKING)
def test_what_rxe_lacks_is_named(context: Context, verb: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with PD(context) as pd, CQ(context, 4) as cq:
        with pytest.raises(LibraryError, match=f"{verb}: (EOPNOTSUPP|this libibverbs does not export it)") as caught:
            LACKING[verb](context, pd, cq)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert set(os.listdir("/proc/self/fd")) == before


def test_steering_and_tags_are_lacking_too(node1: Node, context: Context) -> None:
    with PD(context) as pd, CQ(context, 4) as cq:
        with (
            QueuePair(pd, cq, cq, QpType.UD, max_send_wr=1, max_recv_wr=1) as qp,
            pytest.raises((LibraryError, VerbsError), match="ibv_create_flow"),
        ):
            Flow(qp, [drop()])
        with pytest.raises((LibraryError, VerbsError), match="create a shared receive queue of type TM"):
            SRQ(pd, 4, srq_type=SrqType.TM, cq=cq, max_num_tags=1, max_ops=1)
        with SRQ(pd, 4) as srq, pytest.raises(LibraryError, match="ibv_post_srq_ops"):
            verbs.ibv_post_srq_ops(srq.pointer, ctypes.pointer(abi.ibv_ops_wr()))
        with pytest.raises((LibraryError, VerbsError), match="ibv_reg_mr_ex"):
            verbs.ibv_reg_mr_ex(pd.pointer, abi.ibv_mr_init_attr(length=1))
    with pytest.raises(ValueError, match="give a power of 2"):
        RwqIndTable(context, [])


def test_what_the_library_does_itself_is_there() -> None:
    assert verbs.ibv_rate_to_mbps(Rate.RATE_5_GBPS) == 5000
    assert verbs.ibv_wc_status_str(0) == "success"
    try:
        assert verbs.ibv_is_fork_initialized() in list(ForkStatus)
    except LibraryError as e:
        assert "does not export it" in str(e)  # noqa: PT017


def test_contexts_of_queue_and_queue_pair_come_back(context: Context) -> None:
    with (
        CompChannel(context) as channel,
        PD(context) as pd,
        CQ(context, 4, channel, cq_context=2**64 - 2) as cq,
        QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1, qp_context=77) as qp,
    ):
        assert qp.pointer.contents.qp_context == 77
        assert cq.pointer.contents.cq_context == 2**64 - 2


def test_an_event_brings_the_context_of_its_queue(context: Context) -> None:
    with CompChannel(context) as channel, PD(context) as pd, CQ(context, 4, channel, cq_context=0xFEED) as cq:
        cq.arm()
        with QueuePair(pd, cq, cq, QpType.UD, max_send_wr=1, max_recv_wr=1) as qp:
            qp.move(QpState.INIT, SimpleNamespace(port_num=1, pkey_index=0, qkey=5))
            qp.post_recv(RecvRequest(1))
            qp.move(QpState.ERR)
            ready = select.poll()
            ready.register(channel, select.POLLIN)
            assert ready.poll(PATIENCE * 1000)
            pointer, given = verbs.ibv_get_cq_event(channel.pointer)  # type: ignore[misc]
            assert (ctypes.addressof(pointer.contents), given) == (ctypes.addressof(cq.pointer.contents), 0xFEED)
            verbs.ibv_ack_cq_events(pointer, 1)


def test_the_input_of_the_extended_query(context: Context) -> None:
    plain = verbs.ibv_query_device_ex(context.pointer)
    assert bytes(verbs.ibv_query_device_ex(context.pointer, abi.ibv_query_device_ex_input())) == bytes(plain)
    assert bytes(plain.orig_attr) == bytes(verbs.ibv_query_device(context.pointer))
    with pytest.raises(VerbsError, match=r"input\.comp_mask is 0x1"):
        verbs.ibv_query_device_ex(context.pointer, abi.ibv_query_device_ex_input(comp_mask=1))
