"""Hooks on the verbs of the device in software; Ctrl-C, fork, and its clock."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from software import Call, Network, Software, after_verbs, connected, joined

import rdmaconnect
from rdmaconnect import verbs
from rdmaconnect.abi import QpState, QpType
from rdmaconnect.errors import RdmaConnectError, VerbsError
from rdmaconnect.objects.completion import CQ
from rdmaconnect.objects.context import open_device
from rdmaconnect.objects.memory import PD
from rdmaconnect.objects.queuepair import SendRequest

RTR = QpState.RTR
#: seconds that are noticed, and do not matter
A_WHILE = 0.05


def send(end: object, wr_id: int, data: bytes, **more: object) -> None:
    end.qp.post_send(SendRequest().send(wr_id, inline=data, **more))  # type: ignore[attr-defined]


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
    raw = rdmaconnect.Gid.parse("127.0.0.1").raw
    assert seen == [(raw, here.qp.qp_num), (RTR, 0), (raw, there.qp.qp_num), (RTR, 0)]
    assert [hook.seen for hook in hooks] == [2, 2, 0, 2, 4, 0, 0]
    assert software.calls["ibv_modify_qp"] == 6
    with pytest.raises(ValueError, match="ibv_modify is no verb"):
        software.on("ibv_modify")


def test_address_handles_have_a_path_too(software: Software) -> None:
    software.on("ibv_create_ah", dgid="127.0.0.1", fail=errno.EHOSTUNREACH)
    with joined(QpType.UD) as (here, there), pytest.raises(VerbsError, match="EHOSTUNREACH"):
        here.address_of(there)


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
    software.on("ibv_reg_mr", fail=errno.ENOMEM)
    with rdmaconnect.listen("127.0.0.1:0") as listener, pytest.raises(VerbsError, match="ENOMEM"):
        rdmaconnect.connect(listener.url, deadline_s=5)


# ---- the world around


def test_ctrl_c_comes_after_the_verb(software: Software) -> None:
    software.on("ibv_alloc_pd", before=lambda call: signal.raise_signal(signal.SIGINT))
    made: list[object] = []

    def interrupted() -> None:
        made.append(verbs.ibv_alloc_pd(context.pointer))
        time.sleep(5)

    with open_device("soft0") as context:
        with after_verbs() as put_off, pytest.raises(KeyboardInterrupt):
            interrupted()
        assert put_off.put_off == 1
        verbs.ibv_dealloc_pd(made[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_outside_of_a_verb_comes_at_once(software: Software) -> None:
    with after_verbs() as put_off, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert put_off.put_off == 0


def test_a_forked_child_has_devices_of_its_own(software: Software) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with software.lock:  # nobody lets go of this one in the child
            held.set()
            over.wait(10)

    with connected() as (here, there):
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(10)
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(10)
            try:
                with open_device("soft0") as context, PD(context) as pd, CQ(context, 1):
                    code = 0 if pd.pointer.contents.handle else 2
            finally:
                os._exit(code)
        over.set()
        holder.join(10)
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
        verbs.ibv_ack_cq_events(waiting.result(5)[0], 1)
        os.set_blocking(there.channel.fileno(), False)


def test_nothing_is_left_of_the_clock() -> None:
    with Software(network=Network(ack_timeout_s=30)) as software, joined(to=QpState.INIT) as (here, there):
        here.climb(there)
        send(here, 1, b"x")
        assert software.network.clock.runs
    assert not software.network.clock.runs
    assert software.problems() == []
