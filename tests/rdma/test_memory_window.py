"""Memory windows: bound by both types' ways, through both interfaces; what a window allows and when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ends import End, end_on, joined
from nodes import Node
from test_operations import OPS, do, options

from rdmaconnect.abi import AccessFlags, MwType, QpState, QpType, WcFlags, WcOpcode, WcStatus
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import SendRequest

RC = QpType.RC
BINDABLE = FULL_ACCESS | AccessFlags.MW_BIND
T1, T2 = MwType.TYPE_1, MwType.TYPE_2


@pytest.fixture(params=["post", "batch"])
def ends(request: pytest.FixtureRequest, node1: Node, node2: Node) -> Iterator[tuple[End, End]]:
    """The one that writes, and the one that has the window."""
    with joined(node1, node2, RC, access=BINDABLE, **options(request.param, RC)) as both:
        both[0].memory[:8] = b"window.."
        yield both


def write(here: End, region: RemoteRegion, *status: WcStatus) -> None:
    do(here, lambda wr: wr.rdma_write(1, region.slice(0, 8), sge=here.mr.sge(0, 8)))
    here.wait(1, *status)


def bind(end: End, mw: MW, offset: int = 100, length: int = 50, access: AccessFlags | None = None) -> RemoteRegion:
    """Bind in the way of its type, and wait."""
    before = mw.rkey
    if mw.mw_type == T1:
        end.qp.bind_mw(7, mw, end.mr, offset=offset, length=length, access=access)
    else:
        do(end, lambda wr: wr.bind_mw(7, mw, end.mr, offset=offset, length=length, access=access))
    done = end.wait()[0]
    assert (done.wr_id, done.opcode) == (7, WcOpcode.BIND_MW)
    assert mw.rkey == before & ~0xFF | (before + 1) & 0xFF
    assert mw.region == RemoteRegion(end.mr.addr + offset, mw.rkey, length)
    return mw.region


@pytest.mark.parametrize("mw_type", [T1, T2], ids=str)
def test_mw(ends: tuple[End, End], mw_type: MwType) -> None:
    here, there = ends
    with MW(there.pd, mw_type) as mw:
        write(here, bind(there, mw))
        assert there.memory[99:109] == b"\0window..\0"
        # rxe does not look at the window's range, only at the region's (rxe_resp.c, check_rkey): the key it does
        there.reset_memory()
        write(here, RemoteRegion(there.mr.addr + 100, mw.rkey ^ 1, 50), WcStatus.REM_ACCESS_ERR)
        assert there.memory[:] == bytes(len(there.memory))


def test_invalidate_mw_type1(ends: tuple[End, End]) -> None:
    here, there = ends
    with MW(there.pd, T1) as mw:
        region = bind(there, mw)
        write(here, region)
        there.qp.bind_mw(8, mw, there.mr, length=0)
        there.wait()
        with pytest.raises(StateError, match=r"^use MW TYPE_1 of rxe2: it is not bound"):
            _ = mw.region
        write(here, RemoteRegion(region.addr, mw.rkey, 8), WcStatus.REM_ACCESS_ERR)


def test_mw_type2_invalidate_local(ends: tuple[End, End]) -> None:
    here, there = ends
    with MW(there.pd, T2) as mw:
        region = bind(there, mw)
        write(here, region)
        do(there, lambda wr: wr.local_inv(9, mw.rkey))
        done = there.wait()[0]
        assert (done.wr_id, done.opcode) == (9, WcOpcode.LOCAL_INV)
        again = bind(there, mw, 200, 8)
        write(here, again)
        assert there.memory[200:208] == b"window.."
        write(here, region, WcStatus.REM_ACCESS_ERR)


def test_mw_type2_invalidate_remote(ends: tuple[End, End]) -> None:
    here, there = ends
    with MW(there.pd, T2) as mw:
        region = bind(there, mw)
        write(here, region)
        there.recv(3, 1000)
        do(here, lambda wr: wr.send_inv(2, mw.rkey, sge=here.mr.sge(0, 8)))
        here.wait()
        received = there.wait()[0]
        # rxe gives the kernel's number for WITH_INV, which is IP_CSUM_OK here (rxe_resp.c, do_complete)
        assert received.wc_flags & (WcFlags.WITH_INV | WcFlags.IP_CSUM_OK)
        assert received.imm_data == mw.rkey
        assert there.memory[1000:1008] == b"window.."
        write(here, region, WcStatus.REM_ACCESS_ERR)


def test_mw_type2_invalidate_dealloc(ends: tuple[End, End]) -> None:
    here, there = ends
    mw = MW(there.pd, T2)
    region = bind(there, mw)
    write(here, region)
    mw.close()
    write(here, region, WcStatus.REM_ACCESS_ERR)
    with pytest.raises(StateError, match="MW TYPE_2 of rxe2 is closed"):
        _ = mw.rkey


@pytest.mark.parametrize("mw_type", [T1, T2], ids=str)
def test_bind_mw_without_write_access_refuses_writes(ends: tuple[End, End], mw_type: MwType) -> None:
    here, there = ends
    with MW(there.pd, mw_type) as mw:
        region = bind(there, mw, access=AccessFlags.REMOTE_READ)
        there.memory[100:108] = b"readable"
        do(here, lambda wr: wr.rdma_read(1, region.slice(0, 8), sge=here.mr.sge(16, 8)))
        here.wait()
        assert here.memory[16:24] == b"readable"
        write(here, region, WcStatus.REM_ACCESS_ERR)


def test_a_zero_based_window_counts_from_its_start(ends: tuple[End, End]) -> None:
    here, there = ends
    with MW(there.pd, T2) as mw:
        access = AccessFlags.REMOTE_WRITE | AccessFlags.ZERO_BASED
        do(there, lambda wr: wr.bind_mw(7, mw, there.mr, offset=100, length=50, access=access))
        there.wait()
        assert mw.region.addr == 0
        write(here, mw.region)
        assert there.memory[100:108] == b"window.."


def test_reg_mw_wrong_type(node1: Node) -> None:
    match = "allocate a memory window: ibv_alloc_mw: EINVAL"
    with end_on(node1, RC, 1) as end, pytest.raises(VerbsError, match=match):
        MW(end.pd, MwType(3))


def test_each_type_is_bound_in_its_own_way(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=BINDABLE) as (here, there), MW(here.pd, T1) as one, MW(here.pd, T2) as two:
        with pytest.raises(ValueError, match=r"^bind MW TYPE_1 of rxe1: .* QueuePair\.bind_mw\(\) type 1"):
            SendRequest().bind_mw(1, one, here.mr)
        with pytest.raises(ValueError, match=r"^bind MW TYPE_2 of rxe1: a bind_mw\(\) work request binds type 2"):
            here.qp.bind_mw(1, two, here.mr)
        with pytest.raises(ValueError, match=r"8193 bytes at offset 0: MR of 8192 bytes has no more"):
            here.qp.bind_mw(1, one, here.mr, length=len(here.mr) + 1)
        with MR(here.pd, bytearray(8)) as plain, pytest.raises(ValueError, match=r"MR of 8 bytes: .* without MW_BIND"):
            here.qp.bind_mw(1, one, plain)
        with pytest.raises(ValueError, match="MR of 8192 bytes: that is of another protection domain"):
            here.qp.bind_mw(1, one, there.mr)
        with PD(here.context) as pd, MR(pd, bytearray(8), BINDABLE) as far:
            with MW(pd, T1) as mw, pytest.raises(ValueError, match=r"MW TYPE_1 of rxe1 by RC QP .* another protection"):
                here.qp.bind_mw(1, mw, far)
            with MW(pd, T2) as mw, pytest.raises(ValueError, match=r"RC QP .*: MW TYPE_2 of rxe1 is of another"):
                here.qp.post_send(SendRequest().bind_mw(1, mw, far))
        request = SendRequest().bind_mw(1, two, here.mr)
        two.close()
        with pytest.raises(StateError, match="MW TYPE_2 of rxe1 is closed"):
            here.qp.post_send(request)
        here.qp.state = QpState.INIT
        with pytest.raises(StateError, match="it is in INIT and sends from RTS on"):
            here.qp.bind_mw(1, one, here.mr)


def test_a_failed_bind_completes_with_an_error(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=BINDABLE) as (here, _), MW(here.pd, T2) as mw:
        before, bound = mw.rkey, bind(here, mw)
        here.qp.post_send(SendRequest().bind_mw(9, mw, here.mr))  # it is bound already
        assert here.wait(1, WcStatus.MW_BIND_ERR, WcStatus.WR_FLUSH_ERR)[0].wr_id == 9  # the latter on rxe
        mw.rkey = bound.rkey
        assert mw.rkey == before + 1


def test_an_aborted_batch_gives_the_window_its_key_back(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=BINDABLE, send_ops_flags=OPS[RC]) as (here, _), MW(here.pd, T2) as mw:
        before = mw.rkey
        with here.qp.batch() as wr:
            wr.bind_mw(1, mw, here.mr)
            assert mw.rkey == before + 1
            wr.abort()
        assert mw.rkey == before
        with pytest.raises(StateError, match="not bound"):
            _ = mw.region


def test_closing_a_region_closes_the_windows_onto_it_first(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=BINDABLE) as (here, _):
        first, second = MW(here.pd, T1), MW(here.pd, T1)
        mr = here.pd.register(bytearray(64), BINDABLE)
        for mw in (first, second):
            here.qp.bind_mw(1, mw, mr)
        here.wait(2)
        here.qp.bind_mw(2, second, here.mr)  # no longer onto the first region
        here.wait()
        mr.close()
        assert (first.closed, second.closed) == (True, False)
        second.close()
