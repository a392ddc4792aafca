"""Work requests without a device: what the C structs hold, how lists are posted, what is refused."""

from __future__ import annotations

import ctypes
import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaconnect.abi import AccessFlags, MwType, SendFlags, WrOpcode, ibv_ah, ibv_mr, ibv_mw, ibv_pd
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import PostError, StateError
from rdmaconnect.objects.address import RemoteSrq, UdAddress
from rdmaconnect.objects.memory import MR, PD, Sge
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.operations import check_fits
from rdmaconnect.objects.owned import Owned
from rdmaconnect.objects.work_request import RecvRequest, SendRequest, post

REMOTE = RemoteRegion(0x1000, 77, 64)
PIECE = Sge(0x2000, 8, 5)


def made(kind: type[Owned], pointer: Any, **fields: Any) -> Any:
    """An object of ours that no library knows."""
    thing = kind.__new__(kind)
    thing._release = lambda _: None  # type: ignore[method-assign]
    for name, value in fields.items():
        setattr(thing, name, value)
    Owned.__init__(thing, lambda: pointer, f"the {kind.__name__}")
    return thing


@pytest.fixture
def pd() -> Any:
    with made(PD, ctypes.pointer(ibv_pd())) as domain:
        yield domain


def sges(request: Any) -> list[tuple[int, int, int]]:
    wr = request.wr.contents
    return [(wr.sg_list[i].addr, wr.sg_list[i].length, wr.sg_list[i].lkey) for i in range(wr.num_sge)]


def test_a_plain_request_holds_what_it_was_filled_with() -> None:
    request = SendRequest().fill(9, WrOpcode.RDMA_READ, 0x10, 20, 3, remote=REMOTE, flags=SendFlags.FENCE)
    wr = request.wr.contents
    assert (wr.wr_id, wr.opcode, wr.send_flags, sges(request)) == (9, 4, 1, [(0x10, 20, 3)])
    assert (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) == (0x1000, 77)
    assert request.fill(1, WrOpcode.SEND, 0x10, 0, 3).wr.contents.num_sge == 0
    assert not wr.next


@given(st.lists(st.tuples(st.sampled_from(["inline", "plain", "own"]), st.integers(1, 3), st.booleans()), max_size=12))
def test_what_is_filled_in_inline_is_what_the_operation_itself_writes(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever the request did before: what stays the same is not written again."""
    request = SendRequest()
    for wr_id, (how, length, write) in enumerate(steps, 1 << 40):
        data, remote = bytes([wr_id % 256]) * length, REMOTE if write else None
        opcode = WrOpcode.RDMA_WRITE if write else WrOpcode.SEND
        if how == "plain":
            request.fill(wr_id, opcode, 0x10, length, 3, remote=remote)
            assert (sges(request), request.inline) == ([(0x10, length, 3)], 0)
            continue
        if how == "inline":
            request.fill_inline(wr_id, opcode, data, remote=remote)
        elif remote is not None:
            request.rdma_write(wr_id, remote, inline=data)
        else:
            request.send(wr_id, inline=data)
        wr = request.wr.contents
        assert (wr.wr_id, wr.opcode) == (wr_id, int(opcode))
        assert wr.send_flags == SendFlags.SIGNALED | SendFlags.INLINE
        ((addr, size, _),) = sges(request)
        assert ctypes.string_at(addr, size) == data
        assert (request.inline == length) is (how == "inline")
        if remote is not None:
            assert (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) == (remote.addr, remote.rkey)


def test_what_cannot_go_inline_is_refused() -> None:
    request = SendRequest()
    for _ in range(2):
        with pytest.raises(ValueError, match="use the operation's own method"):
            request.fill_inline(1 << 64, WrOpcode.SEND, b"x")
        with pytest.raises(ValueError, match="use the operation's own method"):
            request.fill_inline(1, WrOpcode.RDMA_WRITE_WITH_IMM, b"x", remote=REMOTE)
        request.fill_inline(1, WrOpcode.SEND, b"x")


def test_each_operation_goes_to_its_fields() -> None:
    request = SendRequest()
    wr = request.wr.contents
    request.send_imm(1, 0x01020304, sge=PIECE)
    assert (wr.opcode, wr.imm_data, sges(request)) == (
        WrOpcode.SEND_WITH_IMM,
        socket.htonl(0x01020304),
        [(0x2000, 8, 5)],
    )
    request.send_inv(2, 0x55, sge=[PIECE, Sge(1, 0, 1), PIECE])
    assert (wr.opcode, wr.invalidate_rkey, len(sges(request))) == (WrOpcode.SEND_WITH_INV, 0x55, 2)
    request.rdma_write_imm(3, REMOTE, 7, sge=PIECE)
    assert (wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, wr.imm_data) == (77, 0x1000, socket.htonl(7))
    request.atomic_cmp_swp(4, REMOTE, 5, 6, sge=PIECE)
    atomic = wr.wr.atomic
    assert (atomic.rkey, atomic.remote_addr, atomic.compare_add, atomic.swap) == (77, 0x1000, 5, 6)
    request.atomic_fetch_add(5, REMOTE, -1, sge=PIECE)
    assert (wr.opcode, atomic.compare_add) == (WrOpcode.ATOMIC_FETCH_AND_ADD, 2**64 - 1)
    request.local_inv(6, 9, flags=0)
    assert (wr.opcode, wr.invalidate_rkey, wr.send_flags, wr.num_sge) == (WrOpcode.LOCAL_INV, 9, 0, 0)
    request.send_tso(7, b"header", 99, sge=PIECE)
    assert (ctypes.string_at(wr.tso.hdr, wr.tso.hdr_sz), wr.tso.mss) == (b"header", 99)
    request.send(8, to=RemoteSrq(3))
    assert (wr.qp_type.xrc.remote_srqn, wr.imm_data) == (3, 0)


def test_inline_data_is_copied_at_once() -> None:
    data = bytearray(b"before")
    request = SendRequest().send(1, inline=[data, b"!"])
    data[:] = b"after!"
    [(addr, length, _)] = sges(request)
    assert ctypes.string_at(addr, length) == b"before!"
    assert request.wr.contents.send_flags == SendFlags.INLINE | SendFlags.SIGNALED
    assert sges(request.send(1, inline=b"")) == []


def test_a_window_is_bound_with_its_next_key(pd: Any) -> None:
    mw_struct, mr_struct = ibv_mw(rkey=0x12FF), ibv_mr(lkey=4)
    with (
        made(MW, ctypes.pointer(mw_struct), pd=pd, mw_type=MwType.TYPE_2, _region=None, _mr=None) as mw,
        made(MR, ctypes.pointer(mr_struct), pd=pd, addr=0x100, length=50, access=AccessFlags.MW_BIND, _held=[]) as mr,
    ):
        wr = SendRequest().bind_mw(1, mw, mr, offset=10, length=20).wr.contents
        assert (wr.bind_mw.rkey, wr.bind_mw.mw.contents.rkey) == (0x1200, 0x12FF)
        info = wr.bind_mw.bind_info
        assert (info.addr, info.length, info.mr.contents.lkey) == (0x10A, 20, 4)
        assert AccessFlags(info.mw_access_flags) == AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | (
            AccessFlags.REMOTE_ATOMIC
        )


def test_receives_have_their_pieces() -> None:
    request = RecvRequest.scatter(7, [PIECE, Sge(1, 2, 3)])
    assert (request.wr.contents.wr_id, sges(request)) == (7, [(0x2000, 8, 5), (1, 2, 3)])
    assert sges(RecvRequest(7, 1, 2, 3)) == [(1, 2, 3)]
    assert sges(RecvRequest(7)) == []


class Provider:
    """Takes a list as a provider does, up to a request that it does not like."""

    def __init__(self, dislikes: int | None = None, tells: bool = True) -> None:
        self.dislikes, self.tells, self.lists = dislikes, tells, list[list[int]]()

    def __call__(self, _: Any, wr: Any, bad: Any) -> int:
        seen: list[int] = []
        self.lists.append(seen)
        while wr:
            if wr.contents.wr_id == self.dislikes:
                if self.tells:
                    ctypes.cast(bad, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(wr.contents)
                return errno.ENOMEM
            seen.append(wr.contents.wr_id)
            wr = wr.contents.next
        return 0


def test_a_list_is_linked_only_while_it_is_posted() -> None:
    requests, provider = [SendRequest().send(n) for n in range(4)], Provider()
    post(provider, None, requests, "ibv_post_send", "to the QP")
    post(provider, None, requests[:1], "ibv_post_send", "to the QP")
    post(provider, None, [RecvRequest(n) for n in (8, 9)], "ibv_post_recv", "to the QP")
    assert provider.lists == [[0, 1, 2, 3], [0], [8, 9]]


def test_the_first_bad_one_is_found() -> None:
    requests = [SendRequest().send(n) for n in (5, 6, 7)]
    with pytest.raises(PostError, match=r"^post work request 2 of 3 \(wr_id 6\) to the QP: ibv_post_send: ENOMEM") as e:
        post(Provider(6), None, requests, "ibv_post_send", "to the QP")
    assert (e.value.posted, e.value.wr_id, e.value.errno) == (1, 6, errno.ENOMEM)
    assert not any(request.wr.contents.next for request in requests)
    with pytest.raises(PostError, match=r"^post 3 work requests to the QP") as e:
        post(Provider(6, tells=False), None, requests, "ibv_post_send", "to the QP")
    assert (e.value.posted, e.value.wr_id) == (None, None)


def test_a_request_can_be_in_a_list_only_once() -> None:
    request, provider = SendRequest().send(1), Provider()
    with pytest.raises(ValueError, match=r"^post a list to the QP: a request is in it twice"):
        post(provider, None, [request, SendRequest(), request], "ibv_post_send", "to the QP")
    assert provider.lists == []


def handle() -> Any:
    return ctypes.pointer(ibv_ah())


def queue(pd: Any, **fields: Any) -> Any:
    cap = SimpleNamespace(max_send_sge=2, max_inline_data=4)
    return SimpleNamespace(**{"name": "the QP", "pd": pd, "cap": cap, "target": None, "max_tso_header": 0, **fields})


def test_what_a_queue_pair_cannot_carry_is_refused(pd: Any) -> None:
    with made(PD, 1) as other, made(Owned, handle(), pd=pd) as ah, made(Owned, handle(), pd=other) as foreign:
        to, ud = UdAddress(ah, 1, 1), queue(pd, target=UdAddress)
        check_fits(None, queue(pd))
        check_fits(SendRequest().send(1, sge=[PIECE] * 2).work, queue(pd))
        check_fits(SendRequest().send(1, inline=b"1234", to=to).work, ud)
        for match, request, qp in (
            ("only UD and XRC_SEND have a target", SendRequest().send(1, to=to), queue(pd)),
            (r"say whom it is for \(to=UdAddress", SendRequest().send(1), ud),
            (r"say whom it is for \(to=UdAddress", SendRequest().send(1, to=RemoteSrq(1)), ud),
            (r"say whom it is for \(to=RemoteSrq", SendRequest().send(1), queue(pd, target=RemoteSrq)),
            ("the Owned is of another protection domain", SendRequest().send(1, to=UdAddress(foreign, 1, 1)), ud),
            ("post 3 pieces to the QP: it takes 2", SendRequest().send(1, sge=[PIECE] * 3), queue(pd)),
            ("post 5 bytes inline to the QP: it takes 4", SendRequest().send(1, inline=b"12345"), queue(pd)),
            ("TSO header of 1 bytes to the QP: it takes 0", SendRequest().send_tso(1, b"h", 9), queue(pd)),
        ):
            with pytest.raises(ValueError, match=match):
                check_fits(request.work, qp)
        work = SendRequest().send(1, to=to).work
        ah.close()
        with pytest.raises(StateError, match="the Owned is closed"):
            check_fits(work, ud)
