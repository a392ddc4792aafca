"""What goes wrong on the device in software when a test wants it to, and what it notices that no program may do."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from software import Call, Message, Network, Software, after_verbs, connected, end_on, joined
from software.completion import Channel

import rdmaconnect
from rdmaconnect import verbs
from rdmaconnect.abi import EventType, QpState, QpType, WcStatus, ibv_comp_channel, ibv_qp
from rdmaconnect.address import UdAddress
from rdmaconnect.completion import CQ, CompChannel
from rdmaconnect.device import open_device
from rdmaconnect.errors import ModifyError, RdmaConnectError, VerbsError
from rdmaconnect.memory import PD
from rdmaconnect.queuepair import SendRequest

RTR = QpState.RTR
#: seconds that are noticed, and do not matter
A_WHILE = 0.05


def send(end: object, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[attr-defined]


# ---- hooks


def test_a_verb_is_delayed(software: Software) -> None:
    asked: list[Call] = []

    def how_long(call: Call) -> float:
        asked.append(call)
        return A_WHILE

    with software.on("ibv_alloc_pd", delay=how_long) as hook, open_device("soft0") as context:
        before = time.monotonic()
        PD(context).close()
        assert time.monotonic() - before >= A_WHILE
        assert (hook.seen, asked[0].verb, asked[0].number) == (1, "ibv_alloc_pd", 1)
        assert asked[0]["context"].address == ctypes.addressof(context.pointer.contents)
    before = time.monotonic()
    with open_device("soft0") as context:
        PD(context).close()
    assert time.monotonic() - before < A_WHILE


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("ibv_alloc_pd", errno.ENOMEM),
        ("ibv_create_comp_channel", errno.EMFILE),
        ("ibv_create_cq", errno.EINVAL),
        ("ibv_create_qp", errno.ENOMEM),
        ("ibv_reg_mr", errno.EFAULT),
        ("ibv_modify_qp", errno.ENODEV),
    ],
)
def test_a_verb_fails_and_does_nothing(software: Software, verb: str, number: int) -> None:
    with software.on(verb, fail=number) as hook, pytest.raises(RdmaConnectError) as caught, joined():
        pass
    assert (getattr(caught.value, "errno", None), hook.seen) == (number, 1)
    with joined():
        pass


@pytest.mark.parametrize("verb", ["ibv_post_recv", "ibv_post_send", "ibv_req_notify_cq", "ibv_poll_cq"])
def test_an_inline_verb_fails(software: Software, verb: str) -> None:
    with joined() as (here, there), software.on(verb, fail=errno.EIO):
        calls = {
            "ibv_post_recv": lambda: there.recv(1),
            "ibv_post_send": lambda: send(here, 1, b"x"),
            "ibv_req_notify_cq": here.cq.arm,
            "ibv_poll_cq": here.cq.poll,
        }
        with pytest.raises(VerbsError) as caught:
            calls[verb]()
        assert caught.value.errno == errno.EIO


def test_what_a_hook_is_for(software: Software) -> None:
    seen: list[tuple[object, object]] = []
    hooks = [
        software.on("ibv_modify_qp", to=RTR, after=lambda call: seen.append((call.to, call.result))),
        software.on("ibv_modify_qp", dgid="127.0.0.1", before=lambda call: seen.append((call.dgid, call.qp_num))),
        software.on("ibv_modify_qp", dgid="127.0.0.9", fail=errno.EIO),
        software.on("ibv_modify_qp", nth=[2, 3]),
        software.on("ibv_modify_qp", times=4),
        software.on("ibv_modify_qp", where=lambda call: call["attr_mask"] == 0),
        software.on("ibv_modify_qp", thread=threading.Thread(), fail=errno.EIO),
    ]
    with joined() as (here, there):
        pass
    raw = here.path_to.__self__.mr and rdmaconnect.Gid.parse("127.0.0.1").raw
    assert seen == [(raw, here.qp.qp_num), (RTR, 0), (raw, there.qp.qp_num), (RTR, 0)]
    assert [hook.seen for hook in hooks] == [2, 2, 0, 2, 4, 0, 0]
    assert software.calls["ibv_modify_qp"] == 6
    with pytest.raises(ValueError, match="ibv_modify is no verb"):
        software.on("ibv_modify")


def test_a_hook_for_one_thread(software: Software) -> None:
    software.on("ibv_alloc_pd", thread=threading.current_thread(), fail=errno.ENOMEM)
    with open_device("soft0") as context, ThreadPoolExecutor(1) as threads:
        threads.submit(PD, context).result(5).close()
        with pytest.raises(VerbsError, match="ENOMEM"):
            PD(context)


def test_a_connection_survives_a_slow_verb_and_tells_of_a_failed_one(software: Software) -> None:
    with software.on("ibv_modify_qp", to=RTR, delay=A_WHILE) as hook, connected() as (here, there):
        here.send(b"slow")
        assert there.recv(deadline_s=5) == b"slow"
    assert hook.seen == 2
    with software.on("ibv_reg_mr", fail=errno.ENOMEM), rdmaconnect.listen("127.0.0.1:0") as listener:
        with pytest.raises(VerbsError, match="ENOMEM"):
            rdmaconnect.connect(listener.url, deadline_s=5)


# ---- the network


def test_messages_are_lost(software: Software) -> None:
    with joined(QpType.UC) as (here, there):
        with software.network.lose(lambda message: message.data == b"lost") as loss:
            for wr_id, data in enumerate((b"lost", b"found")):
                there.recv(wr_id)
                send(here, wr_id, data)
            here.wait(2)
            assert there.wait()[0].byte_len == 5
        assert loss.seen == 1
        send(here, 3, b"lost")
        assert there.wait()[0].byte_len == 4
        here.wait()


def test_rc_sends_again_what_was_lost(software: Software) -> None:
    tries: list[Message] = []

    def first_two(message: Message) -> bool:
        tries.append(message)
        return len(tries) <= 2

    with joined() as (here, there), software.network.lose(first_two):
        there.recv(1)
        send(here, 2, b"x")
        here.wait()
        there.wait()
    assert [(message.qp_num, message.opcode, message.data) for message in tries] == [(here.qp.qp_num, 2, b"x")] * 3


def test_rc_gives_up_in_the_end(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined() as (here, there), software.network.cut("127.0.0.1", "127.0.0.1"):
        before = time.monotonic()
        there.recv(1)
        send(here, 2, b"x")
        send(here, 3, b"y")
        (wc,) = here.wait(1, WcStatus.RETRY_EXC_ERR)
        assert wc.wr_id == 2
        assert A_WHILE <= time.monotonic() - before < 5
        here.wait(1, WcStatus.WR_FLUSH_ERR)
        assert here.qp.query().qp_state == QpState.ERR
        assert there.cq.poll() == 0


def test_the_patience_is_that_of_the_queue_pair(software: Software) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, timeout=10, retry_cnt=3)  # 4 times 4.2 ms, and the peer is not in RTR
        before = time.monotonic()
        send(here, 1, b"x")
        here.wait(1, WcStatus.RETRY_EXC_ERR)
        assert 0.016 <= time.monotonic() - before < 5


def test_a_peer_that_comes_late_is_waited_for(software: Software) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, timeout=18)
        there.recv(1)
        send(here, 1, b"x")
        time.sleep(A_WHILE)
        assert here.cq.poll() == 0
        there.climb(here)
        here.wait()
        there.wait()


@pytest.mark.parametrize(("rnr_retry", "status"), [(0, WcStatus.RNR_RETRY_EXC_ERR), (7, WcStatus.SUCCESS)])
def test_a_peer_without_a_receive(software: Software, rnr_retry: int, status: WcStatus) -> None:
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, rnr_retry=rnr_retry)
        there.climb(here)
        send(here, 1, b"x")
        if status:
            here.wait(1, status)
            return
        time.sleep(A_WHILE)
        assert here.cq.poll() == 0
        there.recv(1)
        here.wait()


@pytest.mark.parametrize(("wrong", "status"), [({"dest_qp_num": 5}, 1), ({"rq_psn": 0x222222 + 9}, 1), ({}, 0)])
def test_rc_knows_its_peer(software: Software, wrong: dict[str, int], status: int) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, **wrong)
        there.climb(here)
        here.recv(1)
        send(there, 2, b"x")
        there.wait(1, WcStatus.RETRY_EXC_ERR if status and "dest_qp_num" in wrong else WcStatus.SUCCESS)
        # a PSN that is behind is taken for one that was here before: acknowledged, and not delivered
        assert here.cq.poll() == (0 if status else 1)


def test_a_psn_that_is_ahead_is_not_taken(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined(to=QpState.INIT) as (here, there):
        here.climb(there, rq_psn=there.psn - 1)
        there.climb(here)
        here.recv(1)
        send(there, 2, b"x")
        there.wait(1, WcStatus.RETRY_EXC_ERR)


def test_a_gid_that_nobody_has(software: Software) -> None:
    software.network.unreachable("127.0.0.1", A_WHILE)
    with pytest.raises(ModifyError, match="ETIMEDOUT"), joined():
        pass
    before = time.monotonic()
    with joined(QpType.UD) as (here, there), pytest.raises(VerbsError, match="ETIMEDOUT"):
        here.address_of(there)
    assert time.monotonic() - before >= A_WHILE
    software.network.reachable("127.0.0.1")
    software.devices[0].ports[0].gids.append("127.0.0.2")
    with joined():
        pass


def test_a_blocked_rtr_blocks_nobody_else(software: Software) -> None:
    software.devices[0].ports[0].gids.append("127.0.0.2")
    software.network.unreachable("127.0.0.2", 1.0)
    attr = verbs.abi.ibv_qp_attr
    with joined(to=QpState.INIT) as (here, there), ThreadPoolExecutor(1) as threads:
        path = here.path_to(there)
        far = type(path)(1, is_global=1, dgid=rdmaconnect.Gid.parse("127.0.0.2").raw)
        before = time.monotonic()
        blocked = threads.submit(here.climb, there, ah_attr=far)
        while software.calls["ibv_modify_qp"] < 3:
            time.sleep(0.001)
        with joined() as (a, b):
            b.recv(1)
            send(a, 1, b"x")
            a.wait()
        assert time.monotonic() - before < 0.9
        with pytest.raises(ModifyError, match="ETIMEDOUT"):
            blocked.result(5)
        assert time.monotonic() - before >= 1.0
        assert attr is not None


def test_a_port_that_is_down_carries_nothing(software: Software) -> None:
    software.network.ack_timeout_s = A_WHILE
    with joined() as (here, there):
        there.recv(1)
        software.devices[0].ports[0].state = 1
        software.event("soft0", EventType.PORT_ERR, 1)
        event = here.context.events.take()
        assert event is not None
        assert (event.event_type, event.port_num) == (EventType.PORT_ERR, 1)
        send(here, 2, b"x")
        here.wait(1, WcStatus.RETRY_EXC_ERR)


def test_a_queue_that_is_overrun_is_noticed(software: Software) -> None:
    software.expects("cq .* of 1 entries was overrun")
    with joined(cqe=1) as (here, there):
        for wr_id in (1, 2):
            there.recv(wr_id)
        there.qp.move(QpState.ERR)
        event = here.context.events.take()
        assert event is not None
        assert (event.event_type, event.element) == (EventType.CQ_ERR, there.cq)


# ---- what no program may do


def test_use_after_free_is_noticed_and_harmless(software: Software) -> None:
    with end_on() as end:
        qp = end.qp.pointer
    software.expects(r"ibv_destroy_qp use after free: qp 0x.* was freed by ibv_destroy_qp in thread MainThread")
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_destroy_qp(qp)
    assert qp.contents.qp_num == 0x6B6B6B6B
    assert software.calls["ibv_destroy_qp"] == 1
    assert "test_software_faults.py" in software.errors[0]


def test_a_stale_pointer_answers_to_its_own_device(software: Software) -> None:
    with Software() as other, end_on() as end:
        qp = end.qp.pointer
    software.install()
    assert verbs.ibv_modify_qp(qp, verbs.abi.ibv_qp_attr(), 0) == errno.EINVAL
    assert "use after free" in other.errors[0]


@pytest.mark.parametrize("address", [0, 16, 0x10000])
def test_what_was_never_made_is_noticed(software: Software, address: int) -> None:
    software.expects("ibv_destroy_qp was given (NULL|0x)")
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_destroy_qp(ctypes.cast(address, ctypes.POINTER(ibv_qp)))


def test_one_kind_is_not_taken_for_another(software: Software) -> None:
    software.expects("ibv_destroy_comp_channel was given pd 0x.* for a struct ibv_comp_channel")
    with open_device("soft0") as context, PD(context) as pd, pytest.raises(VerbsError):
        verbs.ibv_destroy_comp_channel(ctypes.cast(pd.pointer, ctypes.POINTER(ibv_comp_channel)))


def test_parents_go_last(software: Software) -> None:
    with joined() as (here, _):
        for verb, thing in (
            (verbs.ibv_dealloc_pd, here.pd),
            (verbs.ibv_destroy_cq, here.cq),
            (verbs.ibv_destroy_comp_channel, here.channel),
        ):
            with pytest.raises(VerbsError, match="EBUSY"):
                verb(thing.pointer)


def test_a_device_that_is_closed_too_early_is_noticed(software: Software) -> None:
    software.expects("ibv_close_device context 0x.*: pd 0x.* were made from it and not destroyed")
    software.expects("ibv_dealloc_pd use after free")
    context = open_device("soft0")
    pd = PD(context)
    verbs.ibv_close_device(context.pointer)
    with pytest.raises(VerbsError):
        pd.close()
    pd._pointer = context._pointer = None
    rdmaconnect.device._opened.clear()


def test_what_is_left_is_a_problem() -> None:
    with Software() as software:
        with open_device("soft0") as context:
            pd = PD(context)
            assert software.problems() == [
                "1 context left",
                "1 pd left",
                f"descriptors left: {sorted(software.descriptors)}",
            ]
            software.leaves(context=1, pd=1)
            assert software.problems() == []
            pd.close()
        assert software.problems() == ["no context left, of 1 that should be", "no pd left, of 1 that should be"]
        assert software.left() == {}
        software.expects("nothing of this kind")
        assert "no error 'nothing of this kind'" in software.problems()


def test_a_descriptor_that_is_read_after_it_was_closed_is_noticed() -> None:
    with Software() as software:
        with open_device("soft0") as context, CompChannel(context) as channel:
            fd = channel.fileno()
        assert software.descriptors == set()
        os.eventfd_read(fd)
        assert software.problems() == [f"descriptor {fd} was read, written to or closed after it was given back"]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_an_event_that_is_not_acknowledged_is_noticed(software: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("software.events.PATIENCE_S", A_WHILE)
    software.expects("ibv_destroy_cq cq .*: 1 events were not acknowledged: it would wait for ever")
    with joined() as (here, there):
        there.recv(1)
        there.cq.arm()
        send(here, 1, b"x")
        pointer = verbs.ibv_get_cq_event(there.channel.pointer)
        there.qp.close()
        with pytest.raises(VerbsError, match="EINVAL"):
            verbs.ibv_destroy_cq(pointer)
        verbs.ibv_ack_cq_events(pointer, 1)


def test_an_error_inside_of_the_device_is_told(software: Software) -> None:
    software.expects("ibv_alloc_pd: ZeroDivisionError.*inside of the device")
    software.on("ibv_alloc_pd", before=lambda call: 1 // 0)
    with open_device("soft0") as context, pytest.raises(VerbsError, match="EIO"):
        PD(context)


def test_a_datagram_without_a_handle_is_noticed(software: Software) -> None:
    software.expects("ibv_post_send use after free: ah")
    with joined(QpType.UD) as (here, there):
        to = here.address_of(there)
        request = SendRequest().send(1, inline=b"x", to=to)
        to.ah.close()
        here.qp.target = None
        request.work = None
        with pytest.raises(VerbsError, match="EINVAL"):
            here.qp.post_send(request)
        assert isinstance(to, UdAddress)


# ---- the world around


def test_ctrl_c_comes_after_the_verb(software: Software) -> None:
    software.on("ibv_alloc_pd", before=lambda call: signal.raise_signal(signal.SIGINT))
    pd = None
    with open_device("soft0") as context:
        with after_verbs() as put_off, pytest.raises(KeyboardInterrupt):
            pd = verbs.ibv_alloc_pd(context.pointer)
            while True:
                time.sleep(0.01)
        assert put_off.put_off == 1
        assert software.alive["pd"] == 1
        verbs.ibv_dealloc_pd(pd)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_outside_of_a_verb_comes_at_once(software: Software) -> None:
    with after_verbs() as put_off, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert put_off.put_off == 0


def test_a_forked_child_has_devices_of_its_own(software: Software) -> None:
    with connected() as (here, there), software.lock:  # nobody lets go of this one in the child
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open_device("soft0") as context, PD(context) as pd, CQ(context, 1):
                    code = 0 if pd.pointer.contents.handle else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        here.send(b"unharmed")
        assert there.recv(deadline_s=5) == b"unharmed"


def test_a_channel_that_blocks_waits_for_an_event(software: Software) -> None:
    with joined() as (here, there), ThreadPoolExecutor(1) as threads:
        os.set_blocking(there.channel.fileno(), True)
        there.recv(1)
        there.cq.arm()
        waiting = threads.submit(verbs.ibv_get_cq_event, there.channel.pointer)
        time.sleep(A_WHILE)
        assert not waiting.done()
        send(here, 1, b"x")
        verbs.ibv_ack_cq_events(waiting.result(5), 1)
        assert isinstance(software.objects("comp_channel")[0], Channel)


def test_nothing_is_left_of_the_clock() -> None:
    with Software(network=Network(ack_timeout_s=30)) as software, joined(to=QpState.INIT) as (here, there):
        here.climb(there)
        send(here, 1, b"x")
        assert "software device's clock" in {thread.name for thread in threading.enumerate()}
    assert "software device's clock" not in {thread.name for thread in threading.enumerate()}
    assert software.problems() == []
