"""The life of each object on a device in software, which sees every use after free and every second free."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from forgetting import collect_together, forget
from forking import in_a_fork
from software import Software, connected, end_on, joined
from software.ends import QKEY
from threads import running

from rdmaconnect import verbs
from rdmaconnect.abi import EventType, MwType, QpSendOpsFlags, QpState, QpType
from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.objects import context as device
from rdmaconnect.objects import owned as handle
from rdmaconnect.objects.address import AddressHandle, UdAddress
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.completion_ex import CQEx
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.objects.domain import TD, ParentDomain
from rdmaconnect.objects.memory import MR, PD
from rdmaconnect.objects.memory_window import MW
from rdmaconnect.objects.queuepair import QueuePair, RecvRequest, SendRequest
from rdmaconnect.objects.queuepair_ex import QueuePairEx
from rdmaconnect.objects.regions import DM, DmMR, NullMR
from rdmaconnect.objects.srq import SRQ
from rdmaconnect.objects.steering import Counters, Flow
from rdmaconnect.objects.workqueue import WQ, RwqIndTable

RC, UD = QpType.RC, QpType.UD
SIZES = {"max_send_wr": 4, "max_recv_wr": 4}
ALL_OPS = QpSendOpsFlags(sum(QpSendOpsFlags) & ~QpSendOpsFlags.TSO)


@pytest.fixture
def context(software: Software) -> Iterator[Context]:
    with open_device("soft0") as opened:
        yield opened


@pytest.fixture
def pd(context: Context) -> Iterator[PD]:
    with PD(context) as made:
        yield made


def a_qp(context: Context, stack: ExitStack, kind: Any = QueuePair, **options: Any) -> Any:
    domain, queue = stack.enter_context(PD(context)), stack.enter_context(CQ(context, 4))
    return kind(domain, queue, queue, options.pop("qp_type", RC), **SIZES, **options)


def a_wq(context: Context, stack: ExitStack) -> WQ:
    return WQ(stack.enter_context(PD(context)), stack.enter_context(CQ(context, 4)), max_wr=4)


def an_ah(context: Context, stack: ExitStack) -> AddressHandle:
    with end_on(qp_type=UD) as end:
        path = end.path_to(end)
    return AddressHandle(stack.enter_context(PD(context)), path)


#: every class that frees something: what makes one, and the verb that frees it
KINDS: dict[str, tuple[Callable[[Context, ExitStack], Any], str]] = {
    "PD": (lambda c, s: PD(c), "ibv_dealloc_pd"),
    "MR": (lambda c, s: MR(s.enter_context(PD(c)), bytearray(8)), "ibv_dereg_mr"),
    "MW": (lambda c, s: MW(s.enter_context(PD(c)), MwType.TYPE_1), "ibv_dealloc_mw"),
    "CompChannel": (lambda c, s: CompChannel(c), "ibv_destroy_comp_channel"),
    "CQ": (lambda c, s: CQ(c, 4), "ibv_destroy_cq"),
    "CQ with channel": (lambda c, s: CQ(c, 4, s.enter_context(CompChannel(c))), "ibv_destroy_cq"),
    "CQEx": (lambda c, s: CQEx(c, 4), "ibv_destroy_cq"),
    "SRQ": (lambda c, s: SRQ(s.enter_context(PD(c)), 4), "ibv_destroy_srq"),
    "QueuePair": (a_qp, "ibv_destroy_qp"),
    "QueuePairEx": (lambda c, s: a_qp(c, s, QueuePairEx, send_ops_flags=ALL_OPS), "ibv_destroy_qp"),
    "AddressHandle": (an_ah, "ibv_destroy_ah"),
    "TD": (lambda c, s: TD(c), "ibv_dealloc_td"),
    "ParentDomain": (lambda c, s: ParentDomain(s.enter_context(PD(c))), "ibv_dealloc_pd"),
    "WQ": (lambda c, s: a_wq(c, s), "ibv_destroy_wq"),
    "RwqIndTable": (
        lambda c, s: RwqIndTable(c, [s.enter_context(a_wq(c, s)), s.enter_context(a_wq(c, s))]),
        "ibv_destroy_rwq_ind_table",
    ),
    "DM": (lambda c, s: DM(c, 64), "ibv_free_dm"),
    "NullMR": (lambda c, s: NullMR(s.enter_context(PD(c))), "ibv_dereg_mr"),
    "DmMR": (lambda c, s: DmMR(s.enter_context(PD(c)), s.enter_context(DM(c, 64))), "ibv_dereg_mr"),
    "Counters": (lambda c, s: Counters(c), "ibv_destroy_counters"),
    "Flow": (lambda c, s: Flow(s.enter_context(a_qp(c, s, qp_type=UD))), "ibv_destroy_flow"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def test_every_class_is_tried() -> None:
    known = {cls.__name__ for cls in subclasses(handle.Owned) if cls.__module__.startswith("rdmaconnect.")}
    # bases, those that own nothing, what there is not in software (XRC domains), and what session/test_cm tries
    others = {
        "Owned",
        "CurrentCompletion",
        "OptionalVerbs",
        "Posting",
        "Waitable",
        "Context",
        "_Device",
        "AsyncEvents",
        "XRCD",
        "CmChannel",
        "CmId",
        "Unbuffered",
        "ImportedPD",
        "ImportedMR",
        "ImportedDM",
        "BorrowedQueuePair",
        "_Lent",
        "_LentPD",
    }
    assert known - others <= {name.split()[0] for name in KINDS}


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


# ---- closed once


@kinds
def test_threads_that_close_one_object_free_it_once(context: Context, software: Software, kind: str) -> None:
    make, verb = KINDS[kind]
    software.on(verb, delay=0.002)
    for _ in range(10):
        with ExitStack() as stack:
            made = make(context, stack)
            before = software.calls[verb]
            with running(made.close, made.close):
                made.close()
                assert made.closed
            assert software.calls[verb] == before + 1


def test_two_threads_close_each_of_thousands_of_regions_at_once(pd: PD, software: Software) -> None:
    regions = [MR(pd, bytearray(8)) for _ in range(3000)]
    step = threading.Barrier(2)

    def close_all() -> None:
        for mr in regions:
            step.wait(60)
            mr.close()

    with running(close_all, close_all):
        pass
    assert software.calls["ibv_dereg_mr"] == 3000


def test_parents_and_children_closed_at_once_are_freed_once_each(software: Software) -> None:
    for turn in range(30):
        context = open_device("soft0")
        with ExitStack() as stack:
            domain, channel = PD(context), CompChannel(context)
            queue = CQ(context, 8, channel)
            mr = MR(domain, bytearray(8))
            qp = QueuePair(domain, queue, queue, RC, **SIZES)
            things: list[Any] = [context, domain, channel, queue, mr, qp]
            random.Random(turn).shuffle(things)
            with running(*(thing.close for thing in things)):
                pass
            assert all(thing.closed for thing in things)
            del stack
    assert software.left() == {}


@kinds
def test_a_refusal_leaves_it_open_and_it_can_be_closed_again(context: Context, software: Software, kind: str) -> None:
    make, verb = KINDS[kind]
    with ExitStack() as stack:
        made = make(context, stack)
        with software.on(verb, fail=errno.EBUSY):
            for _ in range(2):
                with pytest.raises(VerbsError, match=rf"^close .*: {verb}: EBUSY"):
                    made.close()
                assert not made.closed
                assert made.pointer
        made.close()
        assert made.closed


def test_closing_goes_through_all_and_one_error_names_those_that_stay(software: Software) -> None:
    context = open_device("soft0")
    with ExitStack():
        domain, queue = PD(context), CQ(context, 4)
        regions = [MR(domain, bytearray(8 + i)) for i in range(3)]
        busy = {regions[0].pointer.contents.lkey, regions[2].pointer.contents.lkey}
        refusal = software.on("ibv_dereg_mr", fail=errno.EBUSY, where=lambda call: call["mr"].key in busy)
        with refusal, pytest.raises(VerbsError) as caught:
            context.close()
    assert str(caught.value).startswith("close soft0: ibv_dereg_mr: EBUSY (16), Device or resource busy. 2 objects sta")
    assert "close MR of 8 bytes: " in str(caught.value)
    assert "close MR of 10 bytes: " in str(caught.value)
    assert [x.closed for x in (context, domain, queue, *regions)] == [False, False, True, False, True, False]
    context.close()


# ---- not freed under a call

#: verb that takes a while -> how it is called
CALLS: dict[str, Callable[[Any], Any]] = {
    "ibv_poll_cq": lambda end: end.cq.poll(),
    "ibv_req_notify_cq": lambda end: end.cq.arm(),
    "ibv_resize_cq": lambda end: end.cq.resize(8),
    "ibv_get_cq_event": lambda end: end.channel.drain(),
    "ibv_post_send": lambda end: end.qp.post_send(SendRequest().fill(1, 2, end.mr.addr, 1, end.mr.lkey)),
    "ibv_post_recv": lambda end: end.qp.post_recv(RecvRequest(1, end.mr.addr, 1, end.mr.lkey)),
    "ibv_modify_qp": lambda end: end.qp.move(QpState.ERR),
    "ibv_query_qp": lambda end: end.qp.query(),
    "ibv_rereg_mr": lambda end: end.mr.reregister(buffer=bytearray(8)),
    "ibv_reg_mr": lambda end: MR(end.pd, bytearray(8)),
    "ibv_alloc_pd": lambda end: PD(end.context),
    "ibv_create_cq": lambda end: CQ(end.context, 4, end.channel),
    "ibv_create_qp": lambda end: QueuePair(end.pd, end.cq, end.cq, RC, **SIZES),
    "ibv_create_srq": lambda end: SRQ(end.pd, 4),
    "ibv_alloc_mw": lambda end: MW(end.pd, MwType.TYPE_1),
    "ibv_create_ah": lambda end: AddressHandle(end.pd, end.path_to(end)),
    "ibv_query_port": lambda end: end.context.ports(),
    "ibv_query_device": lambda end: end.context.pkey_index(1, 0xFFFF),
    "ibv_get_async_event": lambda end: end.context.events.take(),
}


@pytest.mark.parametrize("verb", CALLS)
def test_nothing_is_freed_under_a_call(software: Software, verb: str) -> None:
    inside, made, freed = threading.Event(), list[Any](), list[str]()

    def hold(call: Any) -> None:
        inside.set()
        time.sleep(0.05)
        freed.extend(str(thing) for thing in call.args.values() if getattr(thing, "freed", False))

    with joined() as (here, _), end_on() as end:
        if verb == "ibv_get_async_event":
            end.context.events  # noqa: B018
        thing = here if verb in ("ibv_post_send", "ibv_modify_qp") else end
        if thing is end:
            end.qp.move(QpState.INIT, INIT)
        software.on(verb, before=hold, times=1)

        def call() -> None:
            made.append(CALLS[verb](thing))

        with running(call):
            assert inside.wait(30)
            for parent in (thing.pd, thing.channel, thing.context):
                parent.close()
    assert freed == []
    assert all(getattr(one, "closed", True) for one in made)


#: what INIT needs, of each type
INIT = SimpleNamespace(port_num=1, pkey_index=0, qp_access_flags=0, qkey=0)


def test_an_address_handle_is_not_freed_while_a_send_that_names_it_is_posted(software: Software) -> None:
    inside, alive = threading.Event(), list[int]()

    def hold(call: Any) -> None:
        inside.set()
        time.sleep(0.05)
        alive.append(software.alive["ah"])

    with joined(UD) as (here, there):
        to = here.address_of(there)
        request = SendRequest().send(1, inline=b"x", to=to)
        software.on("ibv_post_send", before=hold, times=1)
        with running(lambda: here.qp.post_send(request)):
            assert inside.wait(30)
            to.ah.close()
        assert alive == [1]
        with pytest.raises(StateError, match=r"address handle .* is closed"):
            here.qp.post_send(request)


def test_lists_that_name_the_same_handles_in_another_order_do_not_wait_for_one_another(software: Software) -> None:
    with joined(UD) as (here, there):
        ways = [here.address_of(there), here.address_of(there)]
        other = QueuePair(here.pd, here.cq, here.cq, UD, **SIZES, max_inline_data=8)
        other.move(QpState.INIT, INIT)
        other.move(QpState.RTR, INIT)
        other.move(QpState.RTS, SimpleNamespace(sq_psn=1))
        software.on("ibv_post_send", delay=0.001)

        def post(qp: QueuePair, order: list[Any]) -> None:
            requests = [SendRequest().send(i, inline=b"x", to=to, flags=0) for i, to in enumerate(order)]
            for _ in range(2):
                qp.post_send(*requests)

        with running(lambda: post(here.qp, ways), lambda: post(other, ways[::-1])):
            pass


def test_no_constructor_works_on_what_is_being_closed(context: Context, software: Software) -> None:
    domain, inside = PD(context), threading.Event()

    def hold(call: Any) -> None:
        inside.set()
        time.sleep(0.05)

    mr = MR(domain, bytearray(8))
    software.on("ibv_dereg_mr", before=hold)
    with running(domain.close):
        assert inside.wait(30)
        with pytest.raises(StateError, match=r"make MR of 16 bytes: PD of soft0 is being closed\."):
            MR(domain, bytearray(16))
    assert mr.closed
    with pytest.raises(StateError, match=r"^PD of soft0 is closed\.$"):
        MR(domain, bytearray(16))


# ---- one device, several users


def test_who_closes_twice_takes_the_device_from_nobody_else(software: Software) -> None:
    one, two = open_device("soft0"), open_device("soft0")
    mine, theirs = PD(one), PD(two)
    one.close()
    one.close()
    assert mine.closed
    assert not theirs.closed
    MR(theirs, bytearray(8)).close()
    assert software.alive["context"] == 1
    two.close()
    assert software.alive["context"] == 0


def test_what_was_made_by_two_users_of_a_device_works_together(software: Software) -> None:
    with open_device("soft0") as one, open_device("soft0") as two:
        domain, channel, queue = PD(one), CompChannel(two), CQ(one, 4)
        armed = CQ(one, 4, channel)
        qp = QueuePair(domain, queue, armed, RC, **SIZES)
        assert one.events is two.events
        software.event("soft0", EventType.QP_FATAL, software.objects("qp")[0].address)
        event = two.events.take()
        assert event is not None
        assert event.element is qp
        two.close()
        assert (channel.closed, armed.closed, qp.closed) == (True, True, True)
        assert not domain.closed
        assert not one.events.closed


def test_threads_open_and_close_one_device_at_random(software: Software) -> None:
    def run(seed: int) -> None:
        chance, open_ones = random.Random(seed), list[Context]()
        for _ in range(60):
            if open_ones and chance.random() < 0.5:
                one = open_ones.pop(chance.randrange(len(open_ones)))
                assert one.query_device().phys_port_cnt == 1
                for _ in range(chance.randrange(1, 3)):
                    one.close()
            else:
                open_ones.append(open_device("soft0"))
        for one in open_ones:
            one.close()

    with running(*(lambda seed=seed: run(seed) for seed in range(8))):
        pass
    assert software.left() == {}
    assert device._opened == {}


# ---- what is forgotten


#: those that their parents keep: a send on its way may name it; the channel's events may be of it
KEPT = {"AddressHandle", "CQ with channel"}


@kinds
def test_what_is_forgotten_is_freed_with_a_warning(context: Context, software: Software, kind: str) -> None:
    make, verb = KINDS[kind]
    noticed = nullcontext() if kind == "CQ with channel" else pytest.warns(ResourceWarning, match="was never closed")
    with ExitStack() as stack:
        with noticed:
            forget([make(context, stack)])
        assert software.calls[verb] == (0 if kind in KEPT else 1)
    assert software.calls[verb] >= 1


def test_a_whole_forgotten_device_is_freed_in_order(software: Software) -> None:
    def made() -> list[Any]:
        context = open_device("soft0")
        domain, channel = PD(context), CompChannel(context)
        queue = CQ(context, 8, channel)
        with end_on(qp_type=UD) as end:
            path = end.path_to(end)
        return [
            context, domain, channel, queue, SRQ(domain, 4), AddressHandle(domain, path), MR(domain, bytearray(8)),
            QueuePair(domain, queue, queue, UD, **SIZES), MW(domain, MwType.TYPE_1), context.events,
        ]  # fmt: skip

    for order in range(5):
        things = made()
        random.Random(order).shuffle(things)
        with pytest.warns(ResourceWarning, match="was never closed"):
            collect_together(things)
        assert software.left() == {}
        assert handle._kept == {}


def test_an_address_handle_is_kept_while_a_send_may_be_on_its_way(software: Software) -> None:
    with joined(UD) as (here, there):
        there.recv(1)

        def post() -> None:
            to = UdAddress(AddressHandle(here.pd, here.path_to(there)), there.qp.qp_num, QKEY)
            here.qp.post_send(SendRequest().send(2, inline=b"x", to=to))

        with pytest.warns(ResourceWarning, match=r"address handle of soft0 to .* was never closed"):
            post()
        assert software.alive["ah"] == 1
        here.wait()
        there.wait()
        here.pd.close()
        assert software.alive["ah"] == 0


def test_a_forgotten_context_gives_its_use_back(software: Software) -> None:
    with open_device("soft0") as other:
        with pytest.warns(ResourceWarning, match="soft0 was never closed"):
            forget([open_device("soft0")])
        assert other.query_device().phys_port_cnt == 1
        assert software.alive["context"] == 1
    assert software.alive["context"] == 0


def test_what_is_forgotten_while_an_event_is_taken_does_not_wait_for_itself(
    context: Context, software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying waits for the acknowledgement of the event, which this very thread is about to give."""
    with ExitStack() as stack:
        forgotten = [a_qp(context, stack)]
        software.event("soft0", EventType.QP_FATAL, software.objects("qp")[0].address)
        take = verbs.ibv_get_async_event

        def collect(pointer: Any) -> Any:
            event = take(pointer)
            forget(forgotten)  # as the collector may at any time
            return event

        monkeypatch.setattr(verbs, "ibv_get_async_event", collect)
        with pytest.warns(ResourceWarning, match="was never closed"):
            assert context.events.take() is not None
        assert software.alive["qp"] == 1
    assert software.alive["qp"] == 0


def test_the_collector_waits_for_no_other_thread(context: Context, software: Software) -> None:
    """It may come while this thread holds what the other one waits for."""
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        with context._device.lock:  # as who takes an event, or destroys something
            inside.set()
            go.wait(30)

    with ExitStack() as stack:
        forgotten = [a_qp(context, stack), SRQ(stack.enter_context(PD(context)), 4)]
        with running(hold):
            inside.wait(30)
            with pytest.warns(ResourceWarning, match="was never closed"):
                forget(forgotten)
            assert (software.alive["qp"], software.alive["srq"]) == (1, 1)
            go.set()
        PD(context).close()
        assert (software.alive["qp"], software.alive["srq"]) == (0, 0), "freed when the next object is made"


def test_what_the_collector_left_is_closed_with_its_parents(software: Software) -> None:
    inside, go = threading.Event(), threading.Event()
    context = open_device("soft0")

    def hold() -> None:
        with context._device.lock:
            inside.set()
            go.wait(30)

    with ExitStack() as stack:
        things = [a_qp(context, stack)]
        with running(hold):
            inside.wait(30)
            with pytest.warns(ResourceWarning, match="was never closed"):
                collect_together(things)
            with running(context.close):
                time.sleep(0.05)
                assert not context.closed, "it waits, as closing may"
                go.set()
        assert context.closed
    assert software.left() == {}


# ---- fork


def test_a_forked_process_frees_nothing_of_its_parent_and_opens_the_device_anew(software: Software) -> None:
    with joined() as (here, there):

        def child() -> str:
            for thing in (here.qp, here.cq, here.mr, here.pd, here.channel, here.context):
                thing.close()
                with pytest.raises(StateError, match="belongs to the process that forked this one"):
                    _ = thing.pointer
            freed = sum(software.calls[verb] for _, verb in KINDS.values())
            with open_device("soft0") as mine, PD(mine) as domain:
                MR(domain, bytearray(8)).close()
            return f"{freed} freed"

        assert in_a_fork(child) == "0 freed"
        there.recv(1)
        here.qp.post_send(SendRequest().send(2, inline=b"still alive"))
        there.wait()


def test_the_lock_of_the_devices_is_free_in_a_forked_process(software: Software) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold(call: Any) -> None:
        inside.set()
        go.wait(30)

    software.on("ibv_open_device", before=hold, times=1)
    results: list[str] = []

    def fork() -> None:
        results.append(in_a_fork(lambda: open_device("soft0").name))

    with running(lambda: open_device("soft0").close()):
        assert inside.wait(30)
        with running(fork):
            time.sleep(0.1)
            assert results == [], "the fork waits: the library's own lock may be held"
            go.set()
    assert results == ["soft0"]


# ---- the device is gone

DESTROYS = sorted({verb for _, verb in KINDS.values()} - {"ibv_destroy_comp_channel"})
CHANGES = ["ibv_modify_qp", "ibv_query_qp", "ibv_get_cq_event", "ibv_get_async_event"]


def vanish(software: Software, number: int = errno.EIO) -> None:
    """From now on all is answered as it is where the device is gone, and the library frees nothing.

    (With ``RDMAV_ALLOW_DISASSOC_DESTROY`` it does, and destroying succeeds. This is what it does without, where
    somebody else in the process has loaded it before.)
    """

    def close(call: Any) -> None:
        for one in software.made_from(call["context"]):
            one.context = None
        call["context"].users = 0

    for verb in (*DESTROYS, *CHANGES, "ibv_query_device", "ibv_query_device_ex"):
        software.on(verb, fail=number)
    software.on("ibv_destroy_comp_channel", fail=errno.EBUSY)  # it counts the queues, which it did not free
    software.on("ibv_close_device", before=close)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_all_of_a_device_that_is_gone_can_be_closed(software: Software, number: int) -> None:
    memory = bytearray(64)
    with end_on() as end:
        mr, srq, mw = MR(end.pd, memory), SRQ(end.pd, 4), MW(end.pd, MwType.TYPE_1)
        fds = [end.channel.fileno(), end.context.events.fileno()]
        vanish(software, number)
        end.channel.close()
        assert (end.channel.closed, end.cq.closed, end.qp.closed, is_open(fds[0])) == (True, True, True, False)
        end.context.close()
        assert all(x.closed for x in (end.context, end.pd, end.mr, mr, srq, mw))
        memory.extend(b"it is given back")
    assert device._opened == {}
    assert software.alive["context"] == 0
    software.leaves(**software.left())


def test_eio_of_a_device_that_is_there_is_a_refusal(pd: PD, software: Software) -> None:
    memory = bytearray(64)
    mr = MR(pd, memory)
    with software.on("ibv_dereg_mr", fail=errno.EIO), pytest.raises(VerbsError, match="EIO"):
        mr.close()
    assert not mr.closed
    with pytest.raises(BufferError):
        memory.extend(b"the device may still write here")
    mr.close()


def test_a_device_that_came_back_is_opened_anew(software: Software) -> None:
    old = open_device("soft0")
    domain, left = PD(old), PD(old)
    with software.on("ibv_dealloc_pd", fail=errno.EIO), software.on("ibv_query_device", fail=errno.EIO):
        domain.close()
    with open_device("soft0") as new:
        assert not new.is_same(old)
        PD(new).close()
    left.close()
    software.objects("pd")[0].free("the kernel")
    old.close()


@pytest.mark.parametrize("qp_type", ["RC", "UD"])
def test_a_connection_whose_device_is_gone_can_be_closed(software: Software, qp_type: str) -> None:
    memory = bytearray(64)
    with connected(qp_type, listen={"regions": {"m": memory}}) as (here, there):
        here.send(b"x")
        there.recv()
        vanish(software)
    assert "context" not in software.left()
    assert device._opened == {}
    memory.extend(b"it is given back")
    software.leaves(**software.left())


@pytest.mark.parametrize("verb", ["ibv_destroy_qp", "ibv_dereg_mr", "ibv_destroy_cq", "ibv_dealloc_pd"])
def test_a_connection_that_cannot_be_freed_can_be_closed_again(software: Software, verb: str) -> None:
    with connected() as (here, _):
        with software.on(verb, fail=errno.EBUSY):
            for _ in range(2):
                with pytest.raises(VerbsError, match=f"{verb}: EBUSY"):
                    here.close()
        here.close()


# ---- windows


def windows(end: Any) -> tuple[MW, MR, MR]:
    """A window, bound to the first of two regions, and the second."""
    mw, one, two = MW(end.pd, MwType.TYPE_2), end.mr, MR(end.pd, bytearray(64), end.mr.access)
    with end.qp.batch() as wr:
        wr.bind_mw(1, mw, one)
    end.wait()
    return mw, one, two


@pytest.mark.parametrize("how", ["aborted", "refused", "refused in a list"])
def test_a_bind_that_was_not_posted_leaves_the_window_where_it_was(software: Software, how: str) -> None:
    with joined(kind=QueuePairEx, send_ops_flags=ALL_OPS) as (here, _):
        mw, one, two = windows(here)
        rkey, region = mw.rkey, mw.region
        if how == "aborted":
            with here.qp.batch() as wr:
                wr.local_inv(2, mw.rkey)
                wr.bind_mw(3, mw, two)
                wr.abort()
        else:
            request = SendRequest().bind_mw(3, mw, two)
            first = [SendRequest().send(2, inline=b"x")] if "list" in how else []
            with software.on("ibv_post_send", fail=errno.ENOMEM), pytest.raises(VerbsError, match="ENOMEM"):
                here.qp.post_send(*first, request)
        assert (mw.rkey, mw.region) == (rkey, region)
        two.close()
        assert not mw.closed, "it is not bound to that"
        one.close()
        assert mw.closed, "it is bound to this, which cannot go before it"
