"""Protection domains and registered memory in all its kinds, with traffic through each."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator

import pytest
from ends import End, joined
from nodes import Node

from rdmaconnect.abi import AccessFlags, AdviseMrAdvice, AdviseMrFlags, QpType
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import LibraryError, StateError, VerbsError
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.memory import FULL_ACCESS, MR, PD, Dmabuf
from rdmaconnect.objects.queuepair import RecvRequest, SendRequest
from rdmaconnect.objects.srq import SRQ

RC, UD = QpType.RC, QpType.UD
ON_DEMAND = FULL_ACCESS | AccessFlags.ON_DEMAND
RELAXED = FULL_ACCESS | AccessFlags.RELAXED_ORDERING


@pytest.fixture
def pd(node1: Node) -> Iterator[PD]:
    with open_device(node1.device) as context, PD(context) as domain:
        yield domain


@pytest.fixture
def context(pd: PD) -> Context:
    return pd.context


@pytest.fixture
def odp(node1: Node) -> None:
    """For tests of on-demand memory."""
    with open_device(node1.device) as context:
        caps = context.query_device().odp_caps
    if caps is None or not caps.general_caps:
        pytest.skip("this kernel's rxe has no on-demand paging")


def test_alloc_and_dealloc_pd(context: Context) -> None:
    domain = PD(context)
    assert domain.pointer.contents.handle != 0
    domain.close()
    with pytest.raises(StateError, match="PD of rxe1 is closed"):
        _ = domain.pointer


def test_multiple_pd_creation(context: Context) -> None:
    domains = [PD(context) for _ in range(10)]
    assert len({domain.pointer.contents.handle for domain in domains}) == 10
    for domain in domains:
        domain.close()


def test_destroy_pd_twice(context: Context) -> None:
    domain = PD(context)
    domain.close()
    domain.close()


@pytest.mark.parametrize(
    "access",
    [AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC, AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ],
    ids=str,
)
def test_reg_mr_bad_flags(pd: PD, access: AccessFlags) -> None:
    with pytest.raises(VerbsError, match=r"ibv_reg_mr: EINVAL.*need local write access too"):
        MR(pd, bytearray(64), access)


def test_memory_that_is_not_there_is_refused(pd: PD) -> None:
    with pytest.raises(VerbsError, match=r"register 4096 bytes of memory: ibv_reg_mr: EFAULT.*not all mapped"):
        MR(pd, (0x1000, 4096))


def send(here: End, there: End, here_mr: MR, there_mr: MR, data: bytes = b"sixteen bytes...") -> bytes:
    """A message from the start of one region to the start of another: what arrives behind the header."""
    to, head = (here.address_of(there), 40) if here.qp.qp_type == UD else (None, 0)
    post = there.qp.srq.post_recv if there.qp.srq is not None else there.qp.post_recv
    post(RecvRequest.scatter(1, there_mr.sge(0, 40 + len(data))))
    here.memory[: len(data)] = data
    here.qp.post_send(SendRequest().send(2, sge=here_mr.sge(0, len(data)), to=to))
    here.wait()
    assert there.wait()[0].byte_len == len(data) + head
    return there.memory[head : head + len(data)]


# rxe of Linux 7.2 copies to and from the start of an on-demand page, whatever the offset in it (rxe_odp.c,
# __rxe_odp_mr_copy adds none). So what is asked for here begins there, and what UD receives, behind a header, does not.
@pytest.mark.parametrize("qp_type", [RC, UD], ids=str)
@pytest.mark.parametrize("access", [ON_DEMAND, RELAXED], ids=["odp", "ro"])
def test_traffic(
    request: pytest.FixtureRequest, node1: Node, node2: Node, access: AccessFlags, qp_type: QpType
) -> None:
    if access == ON_DEMAND:
        request.getfixturevalue("odp")
    with joined(node1, node2, qp_type, access=access) as (here, there), MR(there.pd, there.memory) as plain:
        into = plain if (access, qp_type) == (ON_DEMAND, UD) else there.mr
        assert send(here, there, here.mr, into) == b"sixteen bytes..."


def test_odp_rc_srq_traffic(odp: None, node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=ON_DEMAND, srq=lambda pd: SRQ(pd, 4)) as (here, there):
        assert send(here, there, here.mr, there.mr) == b"sixteen bytes..."


def test_odp_rc_rdma_write_read_and_atomics(odp: None, node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC, access=ON_DEMAND) as (here, there):
        here.memory[:8] = (7).to_bytes(8, "little")
        region, piece, other = there.region(4096, 8), here.mr.sge(0, 8), here.mr.sge(4096, 8)
        here.qp.post_send(
            SendRequest().rdma_write(1, region, sge=piece),
            SendRequest().rdma_read(2, region, sge=other),
        )
        here.wait(2)
        assert there.memory[4096:4104] == here.memory[4096:4104] == (7).to_bytes(8, "little")
        here.qp.post_send(SendRequest().atomic_fetch_add(3, region, 5, sge=other))
        here.wait()
        assert int.from_bytes(here.memory[4096:4104], "little") == 7
        here.qp.post_send(SendRequest().atomic_cmp_swp(4, region, 12, 99, sge=piece))
        here.wait()
        assert int.from_bytes(here.memory[:8], "little") == 12
        assert int.from_bytes(there.memory[4096:4104], "little") == 99


def test_a_region_can_be_addressed_from_elsewhere(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC) as (here, there):
        base = 0x7000_0000_0000
        with MR(here.pd, here.memory, iova=base) as mine, MR(there.pd, there.memory, iova=2 * base) as theirs:
            assert (mine.addr, theirs.region.addr) == (base, 2 * base)
            assert send(here, there, mine, theirs, b"elsewhere") == b"elsewhere"
            here.qp.post_send(SendRequest().rdma_write(1, theirs.region.slice(100, 4), sge=mine.sge(4, 4)))
            here.wait()
            assert there.memory[100:104] == b"wher"
        with pytest.raises(VerbsError, match=r"bytes of memory at 0x1: ibv_reg_mr_iova: EINVAL"):
            MR(here.pd, here.memory, iova=1)


def test_rereg_is_said_to_be_lacking_and_leaves_the_region_as_it_was(node1: Node, node2: Node) -> None:
    with joined(node1, node2, RC) as (here, there), PD(here.context) as other:
        mr, keys = here.mr, (here.mr.lkey, here.mr.rkey)
        for change in ({"access": AccessFlags.LOCAL_WRITE}, {"buffer": bytearray(64)}, {"pd": other}):
            with pytest.raises(LibraryError, match=r"the old region is valid.*EOPNOTSUPP.*register anew") as caught:
                mr.reregister(**change)
            assert caught.value.errno == errno.EOPNOTSUPP
        assert (mr.lkey, mr.rkey, mr.access, mr.pd, len(mr)) == (*keys, FULL_ACCESS, here.pd, len(here.memory))
        assert send(here, there, mr, there.mr) == b"sixteen bytes..."
        with pytest.raises(ValueError, match=r"move MR of 8192 bytes to PD of rxe2: that is of another device"):
            mr.reregister(pd=there.pd)
        with pytest.raises(ValueError, match="read-only bytes"):
            mr.reregister(buffer=b"abc")


def test_dmabufs_and_advice_are_said_to_be_lacking(pd: PD) -> None:
    fd = os.memfd_create("no dma-buf")
    try:
        with pytest.raises(LibraryError, match=r"4096 bytes of dma-buf \d+: ibv_reg_dmabuf_mr: EOPNOTSUPP.*mlx5"):
            MR(pd, Dmabuf(fd, 4096))
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="0 bytes"):
        MR(pd, Dmabuf(0, 0))
    match = r"advise on memory: ibv_advise_mr: EOPNOTSUPP.*rxe since rdma-core 59"
    with MR(pd, mmap.mmap(-1, 4096)) as mr, pytest.raises(LibraryError, match=match):
        mr.advise(AdviseMrAdvice.PREFETCH_WRITE, AdviseMrFlags.FLUSH)


def test_a_part_of_a_region_is_inside_of_it(pd: PD) -> None:
    with MR(pd, bytearray(100)) as mr:
        piece = mr.sge(10, 20)
        assert (piece.addr, piece.length, piece.lkey) == (mr.addr + 10, 20, mr.lkey)
        assert mr.sge(100).length == 0
        assert mr.region == RemoteRegion(mr.addr, mr.rkey, 100)
        for offset, length in ((0, 101), (-1, 2), (50, 51), (101, None), (5, -1)):
            with pytest.raises(ValueError, match=r"at offset .*: MR of 100 bytes has no more"):
                mr.sge(offset, length)
    with pytest.raises(StateError, match="MR of 100 bytes is closed"):
        mr.sge()
