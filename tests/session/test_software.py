"""The device in software that other tests run on: what it does when all is well, and what it refuses."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time

import pytest
from software import Device, End, Port, Software, connected, joined

import rdmaconnect
from rdmaconnect import verbs
from rdmaconnect.abi import AccessFlags, EventType, GidType, LinkLayer, PortState, QpState, QpType, SendFlags, WcStatus
from rdmaconnect.agreement.endpoint import Gid, GidEntry, RemoteRegion
from rdmaconnect.agreement.options import Options
from rdmaconnect.errors import LibraryError, ModifyError, PostError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import device_names, open_device
from rdmaconnect.objects.memory import MR, PD, Sge
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.session.ports import gid_is_here, rank_ports

RC, UC, UD = QpType.RC, QpType.UC, QpType.UD


def send(end: End, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[arg-type]


# ---- whole connections


@pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
@pytest.mark.parametrize("probe", [True, False])
def test_connections_run_on_it(software: Software, qp_type: str, probe: bool) -> None:
    with connected(qp_type, probe=probe) as (here, there):
        for size in (0, 1, 1000):
            here.send(b"t" * size)
            assert there.recv(deadline_s=5) == b"t" * size
            there.send(b"h" * size)
            assert here.recv(deadline_s=5) == b"h" * size
    assert software.made["qp"] == 2


def test_memory_of_the_peer(software: Software) -> None:
    memory = bytearray(1 << 20)
    with connected(listen={"regions": {"m": memory}}) as (here, there):
        here.write(b"written", "m", offset=5)
        assert memory[5:12] == b"written"
        here.write(b"told", "m", imm=77)
        assert there.recv_imm(deadline_s=5) == 77
        memory[:] = bytes(range(256)) * 4096
        assert here.read("m", 1000, offset=256) == bytes(memory[256:1256])
        assert here.read("m") == memory


def test_many_queue_pairs_at_once(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener:
        made: list[rdmaconnect.Connection] = []
        thread = threading.Thread(target=lambda: made.extend(listener.accept(deadline_s=10) for _ in range(40)))
        thread.start()
        here = rdmaconnect.connect_many(listener.url, 40, deadline_s=10)
        thread.join(10)
        for number, connection in enumerate(here):
            connection.send(str(number).encode())
        assert [int(connection.recv(deadline_s=5)) for connection in made] == list(range(40))
        for connection in (*here, *made):
            connection.close()


def test_a_pair_costs_milliseconds(software: Software) -> None:
    with connected():
        pass
    before = time.process_time()
    for _ in range(10):
        with connected():
            pass
    # about 10 ms; the bound is for the slowest machine that this may ever run on
    assert (time.process_time() - before) / 10 < 0.2


# ---- devices and ports


def test_devices_ports_and_tables_are_data() -> None:
    port = Port(gids=["127.0.0.1", None, "::1", ("fe80::1", GidType.ROCE_V1)], active_mtu=2048, pkeys=[0x7FFF, 0xFFFF])
    devices = [Device("a0", [port, Port(state=PortState.DOWN)]), Device("b0", limits={"max_qp": 3})]
    with Software(devices) as software:
        assert device_names() == ["a0", "b0"]
        with open_device("a0") as context:
            found = context.port(1)
            assert [(g.gid_index, str(g.gid)) for g in found.gids] == [
                (0, "::ffff:127.0.0.1"),
                (2, "::1"),
                (3, "fe80::1"),
            ]
            assert found.gids[2].gid_type == GidType.ROCE_V1
            assert (found.active_mtu, found.pkeys, found.link_layer) == (4, (0x7FFF, 0xFFFF), LinkLayer.ETHERNET)
            assert context.port(2).state == PortState.DOWN
            assert context.pkey_index(1, 0xFFFF) == 1
            with pytest.raises(VerbsError, match="ENODATA"):
                verbs.ibv_query_gid_ex(context.pointer, 1, 1)
            assert verbs.ibv_query_gid(context.pointer, 1, 1) == bytes(16)
            port.state = PortState.INIT
            assert context.port(1).state == PortState.INIT
            port.state = PortState.ACTIVE
            assert verbs.ibv_get_device_guid(context.pointer.contents.device) == devices[0].node_guid
        with open_device("b0") as context:
            assert context.query_device().max_qp == 3
        assert software.problems() == []


def test_the_port_of_the_address_is_found(software: Software) -> None:
    port = rank_ports(Options(), "127.0.0.1")[0]
    assert (port.device, port.port_num, port.state) == ("soft0", 1, PortState.ACTIVE)
    assert port.gids[0].gid == Gid.parse("127.0.0.1")
    assert gid_is_here(port.gids[0])


def test_the_best_of_several_devices_is_taken() -> None:
    devices = [Device("far0", [Port(gids=["192.0.2.1"])]), Device("near0", [Port(gids=["127.0.0.1"])])]
    with Software(devices) as software:
        with connected() as (here, there):
            assert {here.local.port.device, there.local.port.device} == {"near0"}
        assert software.problems() == []


def test_infiniband_needs_no_gids() -> None:
    devices = [
        Device(f"ib{n}", [Port(["fe80::1"], link_layer=LinkLayer.INFINIBAND, lid=n, pkeys=[0xFFFF])]) for n in (1, 2)
    ]
    with Software(devices) as software:
        with connected(listen={"device": "ib2"}, device="ib1") as (here, there):
            assert here.path.ah_attr.dlid == 2
            here.send(b"by its LID")
            assert there.recv(deadline_s=5) == b"by its LID"
        assert software.problems() == []


def test_limits_are_limits() -> None:
    with Software([Device(limits={"max_qp": 1, "max_cqe": 16, "max_qp_wr": 8})]) as software:
        with open_device("soft0") as context, PD(context) as pd, CQ(context, 16) as cq:
            with pytest.raises(VerbsError, match="EINVAL"):
                CQ(context, 17)
            with pytest.raises(VerbsError, match="EINVAL"):
                QueuePair(pd, cq, cq, RC, max_send_wr=9, max_recv_wr=1)
            with (
                QueuePair(pd, cq, cq, RC, max_send_wr=8, max_recv_wr=1),
                pytest.raises(VerbsError, match="ENOMEM"),
            ):
                QueuePair(pd, cq, cq, RC, max_send_wr=8, max_recv_wr=1)
        assert software.problems() == []


def test_an_older_library_lacks_symbols() -> None:
    with Software(missing=["_ibv_query_gid_table", "_ibv_query_gid_ex"]), open_device("soft0") as context:
        assert [slot.raw for slot in context.gid_table()] == [Gid.parse("127.0.0.1").raw]
        with pytest.raises(LibraryError, match="does not export it"):
            verbs.ibv_query_gid_table(context.pointer, 1)
        with pytest.raises(LibraryError, match=r"EOPNOTSUPP.*mlx5"):
            verbs.ibv_open_xrcd(context.pointer, verbs.abi.ibv_xrcd_init_attr())


# ---- states, events, refusals


def test_the_state_machine_is_the_kernels(software: Software) -> None:
    with joined(to=QpState.INIT) as (here, there):
        attr = verbs.abi.ibv_qp_attr(qp_state=QpState.RTS)
        assert verbs.ibv_modify_qp(here.qp.pointer, attr, 1) == errno.EINVAL
        with pytest.raises(ModifyError, match="EINVAL"):
            here.climb(there, max_dest_rd_atomic=17)
        with pytest.raises(ModifyError, match="EINVAL"):
            here.climb(there, path_mtu=4)
        here.climb(there)
        asked = here.qp.query()
        assert (asked.qp_state, asked.dest_qp_num, asked.sq_psn) == (QpState.RTS, there.qp.qp_num, here.psn)
        assert here.qp.query_init().cap.max_send_wr == 16


def test_err_flushes_and_reset_empties(software: Software) -> None:
    with joined() as (here, there):
        there.recv(1)
        there.qp.move(QpState.ERR)
        there.recv(2)
        send(there, 3, b"x")
        there.wait(3, WcStatus.WR_FLUSH_ERR)
        there.recv(4)
        there.qp.move(QpState.RESET)
        assert there.cq.poll() == 0
        there.climb(here)
        for wr_id in range(16):
            there.recv(wr_id)
        with pytest.raises(PostError, match="ENOMEM"):
            there.recv(16)


def test_sqd_drains(software: Software) -> None:
    class Drain:
        en_sqd_async_notify = 1

    with joined() as (here, there):
        send(here, 1, b"waits for a receive")
        here.qp.move(QpState.SQD, Drain(), verbs.abi.QpAttrMask.EN_SQD_ASYNC_NOTIFY)
        send(here, 2, b"waits for RTS")
        assert here.context.events.take() is None
        there.recv(1)
        there.recv(2)
        event = here.context.events.take()
        assert event is not None
        assert (event.event_type, event.element) == (EventType.SQ_DRAINED, here.qp)
        assert [wc.wr_id for wc in here.wait()] == [1]
        here.qp.move(QpState.RTS)
        assert [wc.wr_id for wc in here.wait()] == [2]


def test_an_armed_queue_tells_once(software: Software) -> None:
    with joined() as (here, there):
        fds = [there.channel.fileno()]
        for solicited, flags, events in ((False, 0, 1), (True, 0, 0), (True, SendFlags.SOLICITED, 1)):
            there.cq.arm(solicited)
            for wr_id in (1, 2):
                there.recv(wr_id)
                send(here, wr_id, b"x", flags=SendFlags.SIGNALED | flags)
            assert bool(select.select(fds, [], [], 0)[0]) is bool(events)
            assert there.channel.drain() == [there.cq] * events
            assert not select.select(fds, [], [], 0)[0]
            there.wait(2)
            here.wait(2)
        assert there.cq.unacked == 2


def test_unsignaled_sends_give_no_completion(software: Software) -> None:
    with joined() as (here, there):
        there.recv(1)
        send(here, 2, b"x", flags=0)
        there.wait()
        assert here.cq.poll() == 0


@pytest.mark.parametrize(
    ("access", "qp_access", "length", "status"),
    [
        (AccessFlags.LOCAL_WRITE, None, 8, WcStatus.REM_ACCESS_ERR),
        (AccessFlags.REMOTE_READ, None, 8, WcStatus.REM_ACCESS_ERR),
        (None, AccessFlags.REMOTE_READ, 8, WcStatus.REM_ACCESS_ERR),
        (None, None, 1 << 16, WcStatus.REM_ACCESS_ERR),
        (None, None, 8, WcStatus.SUCCESS),
    ],
)
def test_remote_access_is_what_was_granted(
    software: Software, access: AccessFlags | None, qp_access: AccessFlags | None, length: int, status: WcStatus
) -> None:
    with joined(to=QpState.RESET) as (here, there):
        mr = there.mr if access is None else there.pd.register(there.memory, access)
        here.climb(there)
        there.climb(here, **({} if qp_access is None else {"qp_access_flags": qp_access}))
        target = RemoteRegion(mr.addr, mr.rkey, 1 << 20)
        with here.pd.register(bytearray(1 << 16), AccessFlags(0)) as mine:
            here.qp.post_send(SendRequest().rdma_write(1, target, sge=mine.sge(0, length)))
            here.wait(1, status)
        assert there.qp.query().qp_state == (QpState.RTS if status == WcStatus.SUCCESS else QpState.ERR)


def test_local_memory_must_be_registered(software: Software) -> None:
    with joined() as (here, there), PD(here.context) as other, other.register(bytearray(8)) as foreign:
        gone = here.pd.register(bytearray(8))
        sge = Sge(gone.addr, 8, gone.lkey)
        gone.close()
        here.qp.post_send(SendRequest().send(1, sge=Sge(foreign.addr, 8, foreign.lkey)))
        here.wait(1, WcStatus.LOC_PROT_ERR)
        there.qp.post_recv(RecvRequest.scatter(2, sge))
        here.qp.move(QpState.RESET)
        here.climb(there)
        send(here, 3, b"x")
        here.wait(1, WcStatus.REM_OP_ERR)
        there.wait(1, WcStatus.LOC_PROT_ERR)


def test_a_message_longer_than_its_receive(software: Software) -> None:
    with joined() as (here, there):
        there.recv(1, length=2)
        send(here, 2, b"abc")
        here.wait(1, WcStatus.REM_INV_REQ_ERR)
        there.wait(1, WcStatus.LOC_LEN_ERR)


def test_memory_that_is_not_there_is_not_registered(software: Software) -> None:
    with open_device("soft0") as context, PD(context) as pd:
        with pytest.raises(VerbsError, match="EFAULT"):
            MR(pd, (4096, 8))
        with pytest.raises(VerbsError, match="EINVAL"):
            MR(pd, bytearray(8), AccessFlags.REMOTE_WRITE)
        mr = MR(pd, bytearray(8))
        mr.reregister(buffer=bytearray(16), access=AccessFlags.LOCAL_WRITE)
        assert len(mr) == 16


def test_no_interface_is_asked_for_by_name(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    # where it is not in this namespace, as that of another container's device, the kernel looks for a module: 0.3 s
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: pytest.fail("asked by name"))
    there = GidEntry(Gid.parse("fe80::1"), GidType.ROCE_V2, 0, "elsewhere0")
    assert not gid_is_here(there)
    assert rank_ports(Options(), "127.0.0.1")


def test_the_last_message_is_given_out_though_the_good_bye_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with Software(), connected() as (here, there):
        there.send(b"last")
        there.close()
        end = time.monotonic() + 10
        while here._end.conversation.left is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        real, looks = here._end.engine.take, list[int]()

        def late(tries: int) -> bool:
            looks.append(tries)
            # both looks before the good-bye is seen find nothing: one that polls, and one without
            return sum(looks) > here._end.spin + 1 and real(tries)

        monkeypatch.setattr(here._end.engine, "take", late)
        assert here.recv(deadline_s=5) == b"last"
        assert sum(looks) > here._end.spin + 1
        monkeypatch.undo()
        here.close()
