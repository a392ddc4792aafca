"""Every operation of a send queue, its bytes looked at on the other node: the same through both interfaces.

`post` is ibv_post_send on a queue pair of ibv_create_qp, `batch` is ibv_wr_* on one of ibv_create_qp_ex.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ends import KERNEL, End, joined
from nodes import Node

from rdmaconnect.abi import AccessFlags as Access
from rdmaconnect.abi import QpSendOpsFlags, QpType, SendFlags, WcFlags, WcOpcode, WcStatus
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.objects.address import UdAddress
from rdmaconnect.objects.operations import Work
from rdmaconnect.objects.queuepair import RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD
Ops = QpSendOpsFlags
#: what rxe's provider has for each type
OPS = {
    RC: Ops(0x13FF) & ~Ops.TSO,
    UC: Ops.RDMA_WRITE | Ops.RDMA_WRITE_WITH_IMM | Ops.SEND | Ops.SEND_WITH_IMM | Ops.BIND_MW | Ops.SEND_WITH_INV,
    UD: Ops.SEND | Ops.SEND_WITH_IMM,
}
TEXT = b"sixteen bytes..."


@dataclass
class Pair:
    """The sender, the receiver, and where UD sends go."""

    here: End
    there: End
    to: UdAddress | None

    @property
    def head(self) -> int:
        """Bytes in front of a received message."""
        return 40 if self.to else 0

    def do(self, build: Callable[[Work], Any]) -> Any:
        """Post one operation and take its completion."""
        do(self.here, build)
        return self.here.wait()[0]


def do(end: End, build: Callable[[Work], Any]) -> None:
    if isinstance(end.qp, QueuePairEx):
        with end.qp.batch() as wr:
            build(wr)
    else:
        request = SendRequest()
        build(request)
        end.qp.post_send(request)


def options(interface: str, qp_type: QpType) -> dict[str, Any]:
    return {"send_ops_flags": OPS[qp_type]} if interface == "batch" else {}


KINDS = [(interface, qp_type) for interface in ("post", "batch") for qp_type in (RC, UC, UD)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def established(request: pytest.FixtureRequest, node1: Node, node2: Node) -> Iterator[Pair]:
    interface, qp_type = request.param
    with joined(node1, node2, qp_type, **options(interface, qp_type)) as (here, there):
        yield Pair(here, there, here.address_of(there) if qp_type == UD else None)


@pytest.fixture
def pair(established: Pair) -> Pair:
    established.here.reset_memory(1)
    established.there.reset_memory(2)
    established.here.memory[: len(TEXT)] = TEXT
    return established


def only(*types: QpType, interfaces: str = "post batch") -> pytest.MarkDecorator:
    """For operations that not every type has, or not every interface."""
    kinds = [kind for kind in KINDS if kind[1] in types and kind[0] in interfaces]
    return pytest.mark.parametrize("established", kinds, indirect=True, ids=lambda kind: f"{kind[0]}-{kind[1]}")


def remote(pair: Pair, offset: int, length: int) -> RemoteRegion:
    return pair.there.region(offset, length)


def test_send(pair: Pair) -> None:
    pair.there.recv(7, 100)
    sent = pair.do(lambda wr: wr.send(2**64 - 1, sge=pair.here.mr.sge(0, 16), to=pair.to))
    received = pair.there.wait()[0]
    assert (sent.wr_id, sent.opcode) == (2**64 - 1, WcOpcode.SEND)
    assert (received.wr_id, received.opcode, received.byte_len) == (7, WcOpcode.RECV, 16 + pair.head)
    start = 100 + pair.head
    assert pair.there.memory[start : start + 17] == TEXT + b"\2"
    if pair.to:
        assert received.wc_flags & WcFlags.GRH
        assert received.src_qp == pair.here.qp.qp_num


def test_send_imm(pair: Pair) -> None:
    pair.there.recv(0, 0)
    pair.do(lambda wr: wr.send_imm(1, 0x01020304, sge=pair.here.mr.sge(0, 16), to=pair.to))
    received = pair.there.wait()[0]
    assert received.wc_flags & WcFlags.WITH_IMM
    assert socket.ntohl(received.imm_data) == 0x01020304
    assert pair.there.memory[pair.head : pair.head + 16] == TEXT


def test_zero_size(pair: Pair) -> None:
    pair.there.recv(0, 0)
    pair.do(lambda wr: wr.send(1, to=pair.to))
    assert pair.there.wait()[0].byte_len == pair.head
    assert pair.there.memory[pair.head : pair.head + 8] == b"\2" * 8


def test_inline_data_in_pieces_needs_no_region(pair: Pair) -> None:
    pair.there.recv(0, 0)
    pair.do(lambda wr: wr.send(1, inline=[b"one,", bytearray(b"two,"), memoryview(b"three")], to=pair.to))
    assert pair.there.wait()[0].byte_len == 13 + pair.head
    assert pair.there.memory[pair.head : pair.head + 14] == b"one,two,three\2"


def test_pieces_are_gathered_and_scattered(pair: Pair) -> None:
    # as long as one another: rxe's ibv_wr_set_sge_list before rdma-core 64 takes them to be
    pieces = [pair.here.mr.sge(offset, 4) for offset in (8, 0, 4)]
    pair.there.qp.post_recv(_scatter(pair, 2000, 3000))
    pair.do(lambda wr: wr.send(1, sge=pieces, to=pair.to))
    assert pair.there.wait()[0].byte_len == 12 + pair.head
    got = pair.there.memory[2000 : 2000 + pair.head + 5] + pair.there.memory[3000:3007]
    assert got[pair.head :] == TEXT[8:12] + TEXT[0:4] + TEXT[4:8]
    assert pair.there.memory[3007] == 2


def _scatter(pair: Pair, first: int, second: int) -> RecvRequest:
    mr = pair.there.mr
    return RecvRequest.scatter(0, [mr.sge(first, pair.head + 5), mr.sge(second, 100)])


def test_a_fence_and_a_solicited_event_go_along(pair: Pair) -> None:
    pair.there.recv(0, 0)
    flags = SendFlags.SIGNALED | SendFlags.FENCE | SendFlags.SOLICITED
    pair.do(lambda wr: wr.send(1, sge=pair.here.mr.sge(0, 16), to=pair.to, flags=flags))
    assert pair.there.wait()[0].byte_len == 16 + pair.head


def test_unsignaled_work_gives_no_completion(pair: Pair) -> None:
    pair.there.recv(1, 0)
    pair.there.recv(2, 0)
    do(pair.here, lambda wr: wr.send(1, sge=pair.here.mr.sge(0, 16), to=pair.to, flags=0))
    assert pair.do(lambda wr: wr.send(2, sge=pair.here.mr.sge(0, 16), to=pair.to)).wr_id == 2
    assert [wc.wr_id for wc in pair.there.wait(2)] == [1, 2]


@only(RC, UC)
def test_rdma_write(pair: Pair) -> None:
    there, here = pair.there, pair.here
    done = pair.do(lambda wr: wr.rdma_write(1, remote(pair, 500, 16), sge=here.mr.sge(0, 16)))
    assert done.opcode == WcOpcode.RDMA_WRITE
    _settle(pair)
    assert there.memory[499:517] == b"\2" + TEXT + b"\2"


def _settle(pair: Pair) -> None:
    """UC writes complete when they are sent: a message after them arrives after them."""
    pair.there.recv(0, 4000, 1)
    pair.do(lambda wr: wr.send(1, inline=b"x", to=pair.to))
    pair.there.wait()


@only(RC, UC)
def test_rdma_write_zero_length(pair: Pair) -> None:
    pair.do(lambda wr: wr.rdma_write(1, remote(pair, 500, 0)))
    _settle(pair)
    assert pair.there.memory[480:520] == b"\2" * 40


@only(RC, UC)
def test_rdma_write_imm(pair: Pair) -> None:
    pair.there.recv(9, 0)
    pair.do(lambda wr: wr.rdma_write_imm(1, remote(pair, 600, 16), 0xFFFFFFFE, sge=pair.here.mr.sge(0, 16)))
    received = pair.there.wait()[0]
    assert (received.wr_id, received.opcode) == (9, WcOpcode.RECV_RDMA_WITH_IMM)
    assert socket.ntohl(received.imm_data) == 0xFFFFFFFE
    assert pair.there.memory[600:617] == TEXT + b"\2"


@only(RC)
def test_rdma_read(pair: Pair) -> None:
    pair.there.memory[700:716] = TEXT[::-1]
    done = pair.do(lambda wr: wr.rdma_read(1, remote(pair, 700, 16), sge=pair.here.mr.sge(32, 16)))
    assert done.opcode == WcOpcode.RDMA_READ
    assert pair.here.memory[31:49] == b"\1" + TEXT[::-1] + b"\1"


@only(RC)
def test_rdma_read_zero_size(pair: Pair) -> None:
    pair.do(lambda wr: wr.rdma_read(1, remote(pair, 700, 0)))
    assert pair.here.memory[16:100] == b"\1" * 84


@only(RC)
@pytest.mark.parametrize("hit", [True, False], ids=["equal", "unequal"])
def test_atomic_cmp_swp(pair: Pair, hit: bool) -> None:
    pair.there.memory[800:808] = (2**63 + 5).to_bytes(8, "little")
    compare = 2**63 + 5 if hit else 6
    done = pair.do(
        lambda wr: wr.atomic_cmp_swp(1, remote(pair, 800, 8), compare, 2**64 - 1, sge=pair.here.mr.sge(64, 8))
    )
    assert done.opcode == WcOpcode.COMP_SWAP
    assert int.from_bytes(pair.here.memory[64:72], "little") == 2**63 + 5
    assert int.from_bytes(pair.there.memory[800:808], "little") == (2**64 - 1 if hit else 2**63 + 5)
    assert pair.there.memory[808] == 2


@only(RC)
def test_atomic_fetch_add(pair: Pair) -> None:
    pair.there.memory[800:808] = (7).to_bytes(8, "little")
    for add, before in ((5, 7), (-10, 12)):
        done = pair.do(
            lambda wr, add=add: wr.atomic_fetch_add(1, remote(pair, 800, 8), add, sge=pair.here.mr.sge(64, 8))
        )
        assert done.opcode == WcOpcode.FETCH_ADD
        assert int.from_bytes(pair.here.memory[64:72], "little") == before
    assert int.from_bytes(pair.there.memory[800:808], "little") == 2


@only(RC, interfaces="batch")
@pytest.mark.skipif(KERNEL < (6, 2), reason="rxe has ATOMIC_WRITE since Linux 6.2")
def test_atomic_write(pair: Pair) -> None:
    done = pair.do(lambda wr: wr.atomic_write(1, remote(pair, 808, 8), b"8 bytes!"))
    assert done.opcode == WcOpcode.ATOMIC_WRITE
    assert pair.there.memory[807:817] == b"\x028 bytes!\2"


@only(RC, UC)
def test_a_long_message_crosses_in_many_packets(pair: Pair) -> None:
    length = len(pair.here.memory)
    pair.here.memory[:] = bytes(i * 7 % 251 for i in range(length))
    pair.there.recv(0, 0, length)
    pair.do(lambda wr: wr.send(1, sge=pair.here.mr.sge(0, length)))
    assert pair.there.wait()[0].byte_len == length
    assert pair.there.memory[:] == pair.here.memory[:]


# ---- what the peer refuses; each takes its queue pairs to ERR


@pytest.fixture(params=["post", "batch"])
def fresh(request: pytest.FixtureRequest, node1: Node, node2: Node) -> Iterator[Pair]:
    with joined(node1, node2, RC, **options(request.param, RC)) as (here, there):
        there.memory[:8] = (7).to_bytes(8, "little")
        yield Pair(here, there, None)


def add(pair: Pair, region: RemoteRegion, status: WcStatus, sge: Any = None) -> None:
    do(pair.here, lambda wr: wr.atomic_fetch_add(1, region, 1, sge=sge or pair.here.mr.sge(64, 8)))
    pair.here.wait(1, status)
    assert int.from_bytes(pair.there.memory[:8], "little") == 7


def test_atomic_invalid_rkey(fresh: Pair) -> None:
    region = fresh.there.region(0, 8)
    add(fresh, RemoteRegion(region.addr, region.rkey ^ 1, 8), WcStatus.REM_ACCESS_ERR)


def test_atomic_invalid_mr_access(fresh: Pair) -> None:
    with fresh.there.pd.register(fresh.there.memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE) as weak:
        add(fresh, weak.region.slice(0, 8), WcStatus.REM_ACCESS_ERR)


def test_atomic_invalid_qp_access(fresh: Pair) -> None:
    fresh.there.qp.modify({"qp_access_flags": Access.LOCAL_WRITE})
    add(fresh, fresh.there.region(0, 8), WcStatus.REM_INV_REQ_ERR)


def test_a_write_beyond_the_region_is_refused_by_the_peer(fresh: Pair) -> None:
    end = fresh.there.region()
    beyond = RemoteRegion(end.addr + end.length - 8, end.rkey, 16)
    do(fresh.here, lambda wr: wr.rdma_write(1, beyond, sge=fresh.here.mr.sge(0, 16)))
    fresh.here.wait(1, WcStatus.REM_ACCESS_ERR)


def test_a_closed_region_is_refused_by_the_device(fresh: Pair) -> None:
    mr = fresh.here.pd.register(bytearray(100))
    whole = mr.sge(0, 16)
    piece = type(whole)(whole.addr, whole.length, whole.lkey)  # the numbers alone: the object would be refused here
    mr.close()
    do(fresh.here, lambda wr: wr.send(1, sge=piece))
    # the latter two are rxe's words for it, on Linux 7.2 and 6.1
    fresh.here.wait(1, WcStatus.LOC_PROT_ERR, WcStatus.WR_FLUSH_ERR, WcStatus.LOC_QP_OP_ERR)


def test_atomic_invalid_lkey(fresh: Pair) -> None:
    piece = fresh.here.mr.sge(64, 8)
    wrong = type(piece)(piece.addr, 8, piece.lkey ^ 1)
    do(fresh.here, lambda wr: wr.atomic_fetch_add(1, fresh.there.region(0, 8), 1, sge=wrong))
    fresh.here.wait(1, WcStatus.LOC_PROT_ERR)


def test_atomic_non_aligned_addr(fresh: Pair) -> None:
    with pytest.raises(ValueError, match="give a multiple of 8"):
        add(fresh, fresh.there.region(1, 8), WcStatus.REM_INV_REQ_ERR)
