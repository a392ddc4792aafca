"""The device's objects on their own: what the device says, states by the table, lifetimes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import SimpleNamespace

import pytest
from nodes import PATIENCE, Node, descriptors

from rdmaconnect import ModifyError, StateError, VerbsError
from rdmaconnect.abi import AccessFlags, LinkLayer, PortState, QpState, QpType, bits
from rdmaconnect.agreement.path import ACCESS, AhAttr
from rdmaconnect.agreement.transitions import FIELDS, TABLE, M
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import Context, device_names, open_device
from rdmaconnect.objects.memory import MR, PD
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest
from rdmaconnect.objects.transition import Change, attr_struct
from rdmaconnect.runtime.deadline import Deadline, wait_readable


@pytest.fixture
def context(node1: Node) -> Iterator[Context]:
    with open_device(node1.device) as opened:
        yield opened


def test_devices_are_those_of_sysfs() -> None:
    assert sorted(device_names()) == sorted(os.listdir("/sys/class/infiniband"))


def test_a_port_says_what_sysfs_says(context: Context) -> None:
    port = context.port(1)
    base = FilePath(f"/sys/class/infiniband/{context.name}/ports/1")
    assert port.state == PortState.ACTIVE
    assert (base / "state").read_text().split()[-1] == "ACTIVE"
    assert port.link_layer == LinkLayer.ETHERNET
    assert [f"{p:#06x}" for p in port.pkeys] == [(base / "pkeys/0").read_text().strip()]
    assert len(port.gids) >= 2
    for entry in port.gids:
        assert entry.gid.raw.hex() == (base / f"gids/{entry.gid_index}").read_text().strip().replace(":", "")
        assert entry.type_words == (base / f"gid_attrs/types/{entry.gid_index}").read_text().strip()
        assert entry.netdev == (base / f"gid_attrs/ndevs/{entry.gid_index}").read_text().strip()


def test_a_device_is_shared_by_its_users_and_closed_by_the_last(node1: Node) -> None:
    before = descriptors()
    first, second = open_device(node1.device), open_device(node1.device)
    assert first.is_same(second)
    mine, theirs = PD(first), PD(second)
    first.close()
    first.close()
    assert (mine.closed, theirs.closed) == (True, False)
    with pytest.raises(StateError, match=f"{node1.device} is closed"):
        first.query_device()
    assert second.query_device().phys_port_cnt == 1
    MR(theirs, bytearray(8)).close()
    second.close()
    assert descriptors() == before


def test_a_parent_closes_its_children_first(context: Context) -> None:
    pd, channel = PD(context), CompChannel(context)
    cq = CQ(context, 8, channel)
    qp = QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1)
    mr = pd.register(bytearray(10))
    pd.close()
    assert (qp.closed, mr.closed, cq.closed) == (True, True, False)
    channel.close()
    assert cq.closed
    pd.close()
    with pytest.raises(StateError, match=r"RC QP .* is closed"):
        qp.move(QpState.INIT, None)


@pytest.fixture
def qps(context: Context, request: pytest.FixtureRequest) -> Iterator[QueuePair]:
    with PD(context) as pd, CQ(context, 8) as cq:
        qp_type: QpType = request.param
        with QueuePair(pd, cq, cq, qp_type, max_send_wr=4, max_recv_wr=4) as qp:
            yield qp


def _values(qp: QueuePair, context: Context) -> SimpleNamespace:
    """What every row of the table may ask for: a queue pair connected to itself."""
    gid = context.port(1).gids[1]
    return SimpleNamespace(
        pkey_index=0, port_num=1, qkey=0x11, qp_access_flags=ACCESS.get(qp.qp_type, AccessFlags(0)), path_mtu=3,
        dest_qp_num=qp.qp_num, rq_psn=5, sq_psn=5, max_rd_atomic=1, max_dest_rd_atomic=1, min_rnr_timer=12,
        timeout=14, retry_cnt=6, rnr_retry=7,
        ah_attr=AhAttr(port_num=1, is_global=1, dgid=gid.gid.raw, sgid_index=gid.gid_index, hop_limit=64),
    )  # fmt: skip


@pytest.mark.parametrize("qps", [QpType.RC, QpType.UC, QpType.UD], indirect=True, ids=str)
def test_the_table_takes_a_queue_pair_to_rts_and_back(qps: QueuePair, context: Context, node1: Node) -> None:
    values = _values(qps, context)
    for state in (QpState.INIT, QpState.RTR, QpState.RTS, QpState.ERR, QpState.RESET):
        node1.call(qps.move, state, values)
        assert qps.query().qp_state == state


@pytest.mark.parametrize("qps", [QpType.RC, QpType.UC, QpType.UD], indirect=True, ids=str)
def test_the_device_refuses_a_mask_without_any_one_required_bit(qps: QueuePair, context: Context, node1: Node) -> None:
    values = _values(qps, context)
    refused = 0
    for to in (QpState.INIT, QpState.RTR, QpState.RTS):
        row = TABLE[qps.qp_type][qps.state, to]
        for bit in bits(row.required & ~M.STATE):
            mask = row.required & ~bit
            attr = {name: getattr(values, name) for b in bits(mask & ~M.STATE) for name in FIELDS[b]}
            attr["qp_state"] = to
            with pytest.raises(ModifyError, match=f"missing: {bit}") as caught:
                node1.call(qps._modify, Change(to, mask, attr), attr_struct(attr), None)
            assert caught.value.missing == bit
            refused += 1
        node1.call(qps.move, to, values)
    assert refused == {QpType.RC: 14, QpType.UC: 8, QpType.UD: 4}[qps.qp_type]


def test_a_step_that_is_not_in_the_table_is_refused_here(context: Context) -> None:
    with (
        PD(context) as pd,
        CQ(context, 8) as cq,
        QueuePair(pd, cq, cq, QpType.RC, max_send_wr=1, max_recv_wr=1) as qp,
        pytest.raises(StateError, match="RC QP RESET->RTR: no such transition"),
    ):
        qp.move(QpState.RTR, None)


def test_what_the_device_lacks_is_named(context: Context) -> None:
    with PD(context) as pd, CQ(context, 8) as cq:
        with pytest.raises(VerbsError, match=r"RAW_PACKET.*EOPNOTSUPP.*does not have this qp_type"):
            QueuePair(pd, cq, cq, QpType.RAW_PACKET, max_send_wr=1, max_recv_wr=1)
        with pytest.raises(VerbsError, match=r"above the device's limit"):
            QueuePair(pd, cq, cq, QpType.RC, max_send_wr=10**6 * 2, max_recv_wr=1)
    with pytest.raises(VerbsError, match=r"max_cqe"):
        CQ(context, 10**9)
    with pytest.raises(ValueError, match="cqe is 0"):
        CQ(context, 0)


def test_running_out_of_descriptors_is_an_error_that_says_so(context: Context) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(VerbsError, match=r"EMFILE.*ulimit -n"):
            CompChannel(context)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    CompChannel(context).close()


def test_events_are_counted_and_acknowledged_before_the_queue_dies(context: Context) -> None:
    with PD(context) as pd, CompChannel(context) as channel:
        cq = CQ(context, 8, channel)
        with QueuePair(pd, cq, cq, QpType.UD, max_send_wr=1, max_recv_wr=4) as qp:
            qp.move(QpState.INIT, SimpleNamespace(pkey_index=0, port_num=1, qkey=1))
            cq.arm()
            mr = pd.register(bytearray(64))
            qp.post_recv(RecvRequest(1, mr.addr, 64, mr.lkey))
            qp.move(QpState.ERR)
            wait_readable([channel.fileno()], Deadline(PATIENCE))
            assert cq.poll() == 1
            channel.drain()
            assert cq._unacked == 1
        cq.close()
        with pytest.raises(StateError, match="without a completion channel"), CQ(context, 1) as deaf:
            deaf.arm()
