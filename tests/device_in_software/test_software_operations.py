"""The device in software: every operation of a queue pair, over each transport."""

from __future__ import annotations

import socket

import pytest
from software import End, Software, end_on, joined

from rdmaconnect import verbs
from rdmaconnect.abi import CqWcFlags, EventType, MwType, QpSendOpsFlags, QpType, WcFlags, WcOpcode, WcStatus
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.errors import LibraryError, VerbsError
from rdmaconnect.objects.address import AddressHandle, UdAddress, path_back
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.memory import Sge
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.srq import SRQ

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD


def send(end: End, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("qp_type", [RC, UC])
def test_operations(software: Software, qp_type: QpType) -> None:
    with joined(qp_type) as (here, there):
        there.recv(1)
        here.qp.post_send(SendRequest().send_imm(2, 0xABCD, inline=b"imm"))
        assert here.wait()[0].opcode == WcOpcode.SEND
        (wc,) = there.wait()
        assert (wc.wr_id, wc.opcode, wc.byte_len, socket.ntohl(wc.imm_data)) == (1, WcOpcode.RECV, 3, 0xABCD)
        assert wc.wc_flags & WcFlags.WITH_IMM
        here.memory[:8] = b"gathered"
        pieces = [here.mr.sge(0, 3), here.mr.sge(3, 5)]
        here.qp.post_send(SendRequest().rdma_write(3, there.mr.region.slice(100, 8), sge=pieces))
        here.wait()
        assert there.memory[100:108] == b"gathered"
        there.recv(4)
        here.qp.post_send(SendRequest().rdma_write_imm(5, there.mr.region.slice(0, 2), 9, inline=b"ww"))
        assert (there.wait()[0].opcode, there.memory[:2]) == (WcOpcode.RECV_RDMA_WITH_IMM, b"ww")
        here.wait()


def test_reads_and_atomics(software: Software) -> None:
    with joined() as (here, there):
        there.memory[64:68] = b"read"
        here.qp.post_send(SendRequest().rdma_read(1, there.mr.region.slice(64, 4), sge=here.mr.sge(8, 4)))
        assert (here.wait()[0].opcode, here.memory[8:12]) == (WcOpcode.RDMA_READ, b"read")
        word = there.mr.region.slice(0, 8)
        here.qp.post_send(SendRequest().atomic_fetch_add(2, word, 5, sge=here.mr.sge(0, 8)))
        here.qp.post_send(SendRequest().atomic_cmp_swp(3, word, 5, 77, sge=here.mr.sge(16, 8)))
        assert [wc.opcode for wc in here.wait(2)] == [WcOpcode.FETCH_ADD, WcOpcode.COMP_SWAP]
        assert int.from_bytes(here.memory[0:8], "little") == 0
        assert int.from_bytes(here.memory[16:24], "little") == 5
        assert int.from_bytes(there.memory[0:8], "little") == 77


def test_datagrams_carry_their_header_and_need_the_key(software: Software) -> None:
    with joined(UD) as (here, there):
        to = here.address_of(there)
        there.recv(1, 0, 100)
        send(here, 2, b"lost", to=UdAddress(to.ah, to.remote_qpn, 99))
        send(here, 3, b"ask", to=to)
        here.wait(2)
        (wc,) = there.wait()
        assert (wc.byte_len, wc.src_qp, bool(wc.wc_flags & WcFlags.GRH)) == (43, here.qp.qp_num, True)
        assert there.memory[40:43] == b"ask"
        assert there.memory[20] == 0x45
        assert there.memory[32:40] == socket.inet_aton("127.0.0.1") * 2
        assert path_back(there.context, 1, wc, there.memory).dgid == Gid.parse("127.0.0.1").raw
        with AddressHandle.reply_to(there.pd, 1, wc, there.memory) as back:
            here.recv(4)
            send(there, 5, b"answer", to=UdAddress(back, wc.src_qp, to.remote_qkey))
            assert here.wait()[0].byte_len == 46
            there.wait()


def test_a_datagram_is_no_longer_than_the_mtu(software: Software) -> None:
    with joined(UD, max_inline_data=1024) as (here, there):
        request = SendRequest().send(1, sge=here.mr.sge(0, 1025), to=here.address_of(there))
        here.qp.post_send(request)
        here.wait(1, WcStatus.LOC_LEN_ERR)


def test_ipv6_headers(software: Software) -> None:
    software.devices[0].ports[0].gids = ["::1"]
    with joined(UD) as (here, there):
        there.recv(1)
        send(here, 2, b"six", to=here.address_of(there))
        there.wait()
        assert there.memory[0] >> 4 == 6
        assert there.memory[8:40] == Gid.parse("::1").raw * 2


def test_a_multicast_group(software: Software) -> None:
    group = Gid.parse("239.1.2.3")
    with joined(UD) as (here, there):
        there.qp.attach_mcast(group)
        there.recv(1)
        path = here.path_to(there)
        with AddressHandle(here.pd, type(path)(1, is_global=1, dgid=group.raw)) as handle:
            send(here, 2, b"all", to=UdAddress(handle, 0xFFFFFF, here.address_of(there).remote_qkey))
            assert there.wait()[0].byte_len == 43
        with pytest.raises(VerbsError, match="EBUSY"):
            verbs.ibv_destroy_qp(there.qp.pointer)
        there.qp.detach_mcast(group)


def test_shared_receive_queues(software: Software) -> None:
    with end_on(psn=6) as sender, SRQ(sender.pd, 4) as srq:
        sizes = {"max_send_wr": 1, "max_recv_wr": 1}
        with QueuePair(sender.pd, sender.cq, sender.cq, RC, **sizes, srq=srq) as qp:
            end = End(sender.context, sender.pd, sender.channel, sender.cq, qp, sender.memory, sender.mr, 5)
            srq.modify(srq_limit=1)
            with pytest.raises(VerbsError, match="EBUSY"):
                verbs.ibv_destroy_srq(srq.pointer)
            sender.climb(end)
            end.climb(sender)
            srq.post_recv(RecvRequest.scatter(7, sender.mr.sge()))
            send(sender, 8, b"shared")
            assert sorted(wc.wr_id for wc in sender.wait(2)) == [7, 8]
            event = sender.context.events.take()
            assert event is not None
            assert (event.event_type, event.element) == (EventType.SRQ_LIMIT_REACHED, srq)


def test_memory_windows(software: Software) -> None:
    with joined() as (here, there), MW(there.pd, MwType.TYPE_2) as mw:
        there.qp.post_send(SendRequest().bind_mw(1, mw, there.mr, offset=8, length=8))
        there.wait()
        region = mw.region
        here.qp.post_send(SendRequest().rdma_write(2, region, inline=b"window"))
        here.wait()
        assert there.memory[8:14] == b"window"
        with pytest.raises(VerbsError, match="EBUSY"):
            verbs.ibv_dereg_mr(there.mr.pointer)
        there.recv(3)
        here.qp.post_send(SendRequest().send_inv(4, region.rkey, inline=b"x"))
        here.wait()
        assert there.wait()[0].wc_flags & WcFlags.WITH_INV
        here.qp.post_send(SendRequest().rdma_write(5, region, inline=b"window"))
        here.wait(1, WcStatus.REM_ACCESS_ERR)


def test_batches_and_iterators(software: Software) -> None:
    wanted = QpSendOpsFlags.SEND | QpSendOpsFlags.RDMA_WRITE
    with joined(kind=QueuePairEx, send_ops_flags=wanted) as (here, there):
        there.recv(1)
        with here.qp.batch() as batch:
            batch.rdma_write(2, there.mr.region.slice(0, 3), inline=b"abc")
            batch.send(3, inline=b"batch")
        assert [wc.wr_id for wc in here.wait(2)] == [2, 3]
        assert there.wait()[0].byte_len == 5
    with end_on(psn=6) as sender, CQEx(sender.context, 8, wc_flags=CqWcFlags.BYTE_LEN) as cq:
        sizes = {"max_send_wr": 1, "max_recv_wr": 2}
        with QueuePair(sender.pd, cq, cq, RC, **sizes) as qp:
            other = End(sender.context, sender.pd, sender.channel, cq, qp, sender.memory, sender.mr, 5)
            other.climb(sender)
            sender.climb(other)
            for wr_id in (1, 2):
                other.recv(wr_id)
                send(sender, 9, b"it" * wr_id)
            assert [(wc.wr_id, wc.read_byte_len()) for wc in cq.poll_batch()] == [(1, 2), (2, 4)]
            with pytest.raises(LibraryError, match="EOPNOTSUPP"):
                verbs.ibv_wc_read_src_qp(cq._ex)
            sender.wait(2)


def test_a_region_that_was_deregistered_opens_nothing(software: Software) -> None:
    with joined() as (here, there):
        region = there.mr.region.slice(0, 2)
        sge = here.mr.sge(0, 2)
        there.mr.close()
        here.qp.post_send(SendRequest().rdma_write(1, region, sge=sge))
        here.wait(1, WcStatus.REM_ACCESS_ERR)
    with joined() as (here, _):
        whole = here.mr.sge(0, 2)
        sge = Sge(whole.addr, whole.length, whole.lkey)  # the numbers alone: the object would be refused here
        here.mr.close()
        here.qp.post_send(SendRequest().send(1, sge=sge))
        here.wait(1, WcStatus.LOC_PROT_ERR)
