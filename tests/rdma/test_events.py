"""Completion events and asynchronous events: waited for in each way, acknowledged, found back to their objects."""

from __future__ import annotations

import asyncio
import ctypes
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodes import PATIENCE, Node
from pairs import DEPTH, End, ends

from rdmaconnect import DeadlineExceeded, LibraryError, StateError, VerbsError, verbs
from rdmaconnect.abi import EventType, PortState, QpAttrMask, QpState, QpType, SendFlags, WcStatus
from rdmaconnect.objects.async_events import AsyncEvent, EventKind
from rdmaconnect.objects.completion import CQ, CompChannel
from rdmaconnect.objects.context import Context, open_device
from rdmaconnect.runtime.deadline import Deadline


@pytest.fixture
def context(node1: Node) -> Iterator[Context]:
    with open_device(node1.device) as opened:
        yield opened


def telling(context: Context, channel: CompChannel) -> CQ:
    """A queue that tells the channel."""
    return CQ(context, 2 * DEPTH, channel)


def silent(cqe: int) -> Callable[[Context, CompChannel], CQ]:
    """A maker of queues that tell nobody."""
    return lambda context, _: CQ(context, cqe)


Pair = tuple[End, End]


@pytest.fixture
def pair(node1: Node, node2: Node) -> Iterator[Pair]:
    """A connected RC pair whose queues tell their channels."""
    with ends(node1, node2, QpType.RC, telling) as made:
        yield made


def polled(cq: CQ) -> list[tuple[int, int]]:
    """(wr_id, status) of all that is in the queue."""
    found = []
    while count := cq.poll():
        found += [(wc.wr_id, wc.status) for wc in cq.wcs[:count]]
    return found


def patience() -> Deadline:
    return Deadline(PATIENCE)


# ---- completion events


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UD], ids=str)
def test_cq_events_rc_and_ud(node1: Node, node2: Node, qp_type: QpType) -> None:
    with ends(node1, node2, qp_type, telling) as (one, other):
        for i in range(100):
            one.cq.arm()
            other.cq.arm()
            other.post_recv(i)
            one.post_send(i, b"%d" % i)
            for end in (one, other):
                assert end.channel.wait(patience()) == [end.cq]
            assert polled(one.cq) == polled(other.cq) == [(i, WcStatus.SUCCESS)]
            assert other.received(i, other.head + len(b"%d" % i)) == b"%d" % i


def test_nothing_comes_unless_it_was_armed(pair: Pair) -> None:
    one, other = pair
    channel = other.channel
    other.post_recv(1)
    one.post_send(1, b"x")
    with pytest.raises(DeadlineExceeded, match=r"wait on completion channel of rxe2: no success within \d"):
        channel.wait(Deadline(0.5))
    assert polled(one.cq) == [(1, WcStatus.SUCCESS)]
    other.cq.arm()  # what is there already gives no event: hence poll once more after arming
    with pytest.raises(DeadlineExceeded):
        channel.wait(Deadline(0))
    assert polled(other.cq) == [(1, WcStatus.SUCCESS)]


def test_solicited_only(pair: Pair) -> None:
    one, other = pair
    channel = other.channel
    other.post_recv(1)
    other.post_recv(2)
    other.cq.arm(solicited_only=True)
    one.post_send(1, b"quiet")
    with pytest.raises(DeadlineExceeded):
        channel.wait(Deadline(1))
    one.post_send(2, b"loud", flags=SendFlags.SIGNALED | SendFlags.SOLICITED)
    assert channel.wait(patience()) == [other.cq]
    assert polled(other.cq) == [(1, WcStatus.SUCCESS), (2, WcStatus.SUCCESS)]


def test_the_descriptor_of_a_channel_suits_poll(pair: Pair) -> None:
    one, other = pair
    channel = other.channel
    other.cq.arm()
    assert channel.drain() == []
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    assert poller.poll(0) == []
    other.post_recv(1)
    one.post_send(1, b"x")
    assert poller.poll(PATIENCE * 1000) == [(channel.fileno(), select.POLLIN)]
    assert channel.drain() == [other.cq]
    assert poller.poll(0) == []


def test_a_task_waits_while_the_loop_goes_on(pair: Pair) -> None:
    async def main(one: End, other: End) -> int:
        channel = other.channel
        other.cq.arm()
        waiting = asyncio.create_task(channel.wait_async(patience()))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 10:
                other.post_recv(1)
                one.post_send(1, b"x")
        assert await waiting == [other.cq]
        with pytest.raises(DeadlineExceeded):
            await channel.wait_async(Deadline(0.2))
        return ticks

    assert asyncio.run(main(*pair)) >= 10


def test_closing_a_channel_wakes_who_waits(context: Context) -> None:
    channel = CompChannel(context)
    cq = CQ(context, 8, channel)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            channel.wait(patience())
        except StateError as e:
            errors.append(e)

    async def main() -> None:
        task = asyncio.create_task(channel.wait_async(patience()))
        await asyncio.sleep(0.2)
        channel.close()
        errors.extend(await asyncio.gather(task, return_exceptions=True))

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(main())
    thread.join(PATIENCE)
    assert [str(e) for e in errors] == [f"completion channel of {context.name} is closed."] * 2
    assert cq.closed


# ---- acknowledgements


def happen(one: End, other: End, count: int) -> None:
    """So many events for the queue of ``other``."""
    for i in range(count):
        other.cq.arm()
        other.post_recv(i)
        one.post_send(i, b"x")
        assert other.channel.wait(patience()) == [other.cq]
        assert polled(other.cq) == [(i, WcStatus.SUCCESS)]
        one.cq.poll()


def test_acknowledgements_are_given_in_bulk(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    real = verbs.ibv_ack_cq_events

    def acknowledge(cq: Any, count: int) -> None:
        given.append(count)
        real(cq, count)

    monkeypatch.setattr(verbs, "ibv_ack_cq_events", acknowledge)
    one, other = pair
    happen(one, other, CQ.ACK_BATCH + 6)
    assert given == [CQ.ACK_BATCH]
    assert other.cq.unacked == 6
    for wrong in (7, -1):
        with pytest.raises(ValueError, match=f"acknowledge {wrong} events of CQ of rxe2: 6 are due"):
            other.cq.ack_events(wrong)
    other.cq.ack_events(2)
    assert (given, other.cq.unacked) == ([CQ.ACK_BATCH, 2], 4)
    completed = other.cq.pointer.contents.comp_events_completed
    assert completed == CQ.ACK_BATCH + 2
    other.qp.close()
    other.cq.close()
    assert given == [CQ.ACK_BATCH, 2, 4]  # before it was destroyed


def test_events_nobody_took_do_not_delay_the_end(pair: Pair) -> None:
    one, other = pair
    channel = other.channel
    other.cq.arm()
    other.post_recv(1)
    one.post_send(1, b"x")
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    assert ready.poll(PATIENCE * 1000)
    before = time.monotonic()
    other.qp.close()
    other.cq.close()
    assert time.monotonic() - before < PATIENCE / 2
    assert channel.drain() == []


def test_destroying_really_waits_for_acknowledgements(pair: Pair) -> None:
    one, other = pair
    channel = other.channel
    other.cq.arm()
    other.post_recv(1)
    one.post_send(1, b"x")
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    assert ready.poll(PATIENCE * 1000)
    taken, _ = verbs.ibv_get_cq_event(channel.pointer)  # behind the back of the layer
    assert ctypes.addressof(taken.contents) == ctypes.addressof(other.cq.pointer.contents)
    other.qp.close()
    closing = threading.Thread(target=other.cq.close)
    closing.start()
    closing.join(1)
    assert closing.is_alive()
    verbs.ibv_ack_cq_events(taken, 1)
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_queue_without_a_channel_has_no_events(context: Context) -> None:
    with CQ(context, 8) as cq:
        with pytest.raises(StateError, match="without a completion channel"):
            cq.arm()
        cq.ack_events()
        with pytest.raises(ValueError, match="acknowledge 1 events of CQ of rxe1: it has no channel"):
            cq.ack_events(1)
        assert cq.unacked == 0


# ---- plain completion queues


def test_create_cq_of_each_size_on_each_vector(context: Context) -> None:
    most = context.query_device().max_cqe
    for cqe in (1, most // 2, most):
        for comp_vector in range(context.num_comp_vectors):
            with CQ(context, cqe, comp_vector=comp_vector) as cq:
                assert cq.cqe >= cqe


def test_create_cq_with_comp_channel(context: Context) -> None:
    for cqe in (1, 100, context.query_device().max_cqe):
        with CompChannel(context) as channel:
            cq = CQ(context, cqe, channel)
            cq.arm()
        assert cq.closed


def test_create_cq_bad_flow(context: Context, node2: Node) -> None:
    with pytest.raises(VerbsError, match="EINVAL"):
        CQ(context, context.query_device().max_cqe + 1)
    vectors = context.num_comp_vectors
    with pytest.raises(ValueError, match=f"comp_vector is {vectors}: rxe1 has {vectors}"):
        CQ(context, 100, comp_vector=vectors)
    with pytest.raises(VerbsError, match="EINVAL"):
        verbs.ibv_create_cq(context.pointer, 100, None, vectors + 1)
    with (
        open_device(node2.device) as other,
        CompChannel(other) as channel,
        pytest.raises(ValueError, match="channel is the completion channel of rxe2: give one of rxe1"),
    ):
        CQ(context, 1, channel)


def test_resize_cq(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, silent(3)) as (_, other):
        other.cq.resize(1)
        assert other.cq.cqe >= 1
        other.cq.resize(7)
        assert other.cq.cqe >= 7
        for i in range(6):
            other.post_recv(i)
        other.qp.move(QpState.ERR)
        time.sleep(1)  # the device flushes in its own time
        with pytest.raises(VerbsError, match=r"resize a completion queue to 1 entries: ibv_resize_cq: EINVAL"):
            other.cq.resize(1)
        other.cq.resize(20)
        assert [wr_id for wr_id, _ in polled(other.cq)] == list(range(6))
        with pytest.raises(ValueError, match="cqe is 0"):
            other.cq.resize(0)
        with pytest.raises(VerbsError, match="EINVAL"):
            other.cq.resize(other.context.query_device().max_cqe + 1)


def test_what_the_provider_lacks_is_named_with_who_has_it(context: Context) -> None:
    with CQ(context, 8) as cq:
        with pytest.raises(LibraryError, match=r"ibv_modify_cq: .*provider does not have it.*mlx5"):
            cq.moderate(10, 100)
        with pytest.raises(ValueError, match="period_us is 65536"):
            cq.moderate(1, 65536)


def test_after_close_every_call_says_so(context: Context) -> None:
    channel = CompChannel(context)
    cq = CQ(context, 8, channel)
    channel.close()
    calls: tuple[Callable[[], object], ...] = (
        cq.poll, cq.arm, cq.ack_events, lambda: cq.resize(9), lambda: cq.moderate(1, 1), lambda: cq.cqe,
        channel.drain, channel.fileno, lambda: channel.wait(Deadline(1)), lambda: CQ(context, 1, channel),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(StateError, match="is closed"):
            call()


# ---- asynchronous events


def until(context: Context, wanted: EventType) -> AsyncEvent:
    """The next event of that type; others that come meanwhile are the network's."""
    deadline = patience()
    while True:
        event = context.events.wait(deadline)
        if event.event_type == wanted:
            return event


@pytest.fixture
def spare(node1: Node) -> Iterator[Context]:
    """A device of its own, `rxe9` over `v9`, whose network may be disturbed."""
    node1.run("ip", "link", "add", "v9", "type", "veth", "peer", "name", "w9")
    try:
        for netdev in ("w9", "v9"):
            node1.run("ip", "link", "set", netdev, "up")
        node1.run("rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "v9")
        with open_device("rxe9") as opened:
            deadline = patience()
            while opened.port(1).state != PortState.ACTIVE:
                deadline.check("rxe9 to be ACTIVE")
            yield opened
        node1.run("rdma", "link", "delete", "rxe9")
    finally:
        node1.run("ip", "link", "delete", "v9")


def test_a_port_that_goes_down_and_comes_up(node1: Node, spare: Context) -> None:
    events = spare.events
    assert events is spare.events
    node1.run("ip", "link", "set", "v9", "down")
    event = until(spare, EventType.PORT_ERR)
    assert (event.kind, event.port_num, event.element, event.device) == (EventKind.PORT, 1, None, "rxe9")
    assert event.text == "port error"
    assert str(event) == "rxe9 port 1: PORT_ERR (port error)"
    assert spare.port(1).state == PortState.DOWN
    node1.run("ip", "link", "set", "v9", "up")
    event = until(spare, EventType.PORT_ACTIVE)
    assert (event.kind, event.port_num, event.text) == (EventKind.PORT, 1, "port active")


def test_a_task_waits_for_an_event(node1: Node, spare: Context) -> None:
    async def main() -> AsyncEvent:
        while spare.events.take() is not None:
            pass
        deadline = patience()
        waiting = asyncio.create_task(spare.events.wait_async(deadline))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(node1.run, "ip", "addr", "add", "10.77.0.1/32", "dev", "v9")
        event = await waiting
        while event.event_type != EventType.GID_CHANGE:
            event = await spare.events.wait_async(deadline)
        return event

    event = asyncio.run(main())
    assert (event.kind, event.port_num) == (EventKind.PORT, 1)


def test_the_descriptor_of_the_events_suits_poll(node1: Node, spare: Context) -> None:
    events = spare.events
    while events.take() is not None:
        pass
    poller = select.poll()
    poller.register(events, select.POLLIN)
    assert poller.poll(0) == []
    node1.run("ip", "addr", "add", "10.77.0.2/32", "dev", "v9")
    assert poller.poll(PATIENCE * 1000)
    event = events.take()
    assert event is not None
    assert event.kind is EventKind.PORT


def test_no_event_in_time_is_an_error(context: Context) -> None:
    while context.events.take() is not None:
        pass
    with pytest.raises(DeadlineExceeded, match="wait on async events of rxe1"):
        context.events.wait(Deadline(0.3))


def test_a_queue_that_overflows_is_found_back(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, silent(1)) as (_, other):
        for i in range(other.cq.cqe + 2):
            other.post_recv(i)
        other.qp.move(QpState.ERR)
        event = until(other.context, EventType.CQ_ERR)
        assert event.kind is EventKind.CQ
        assert event.element is other.cq
        assert event.port_num is None
        assert str(event) == "CQ of rxe2: CQ_ERR (CQ error)"
        assert other.cq.pointer.contents.async_events_completed >= 1
        # the second one is left where it is: closing does not wait for it


def test_a_queue_pair_whose_sends_have_drained_is_found_back(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, silent(2 * DEPTH)) as (one, other):
        one.post_send(1, b"waits for a receive")
        node1.call(one.qp.move, QpState.SQD, _Drain(), QpAttrMask.EN_SQD_ASYNC_NOTIFY)
        other.post_recv(1)
        event = until(one.context, EventType.SQ_DRAINED)
        assert event.kind is EventKind.QP
        assert event.element is one.qp
        assert "SQ_DRAINED" in str(event)
        assert one.qp.pointer.contents.events_completed == 1


class _Drain:
    en_sqd_async_notify = 1


def test_a_shared_receive_queue_below_its_limit_is_found_back(node1: Node, node2: Node) -> None:
    with ends(node1, node2, QpType.RC, silent(2 * DEPTH), shared=True) as (one, other):
        for i in range(4):
            other.post_recv(i)
        assert other.srq is not None
        other.srq.modify(srq_limit=4)
        one.post_send(1, b"x")
        event = until(other.context, EventType.SRQ_LIMIT_REACHED)
        assert event.kind is EventKind.SRQ
        assert event.element is other.srq


def test_no_destroy_hangs_on_events(node1: Node, node2: Node) -> None:
    """Events not taken, and events that another thread is taking."""
    stop = threading.Event()
    seen: list[AsyncEvent] = []

    def take(context: Context) -> None:
        while not stop.is_set():
            event = context.events.take()
            if event is not None:
                seen.append(event)

    def overflow() -> None:
        for _ in range(5):
            with ends(node1, node2, QpType.RC, silent(1)) as (_, other):
                for i in range(other.cq.cqe + 3):
                    other.post_recv(i)
                other.qp.move(QpState.ERR)

    overflow()
    with open_device(node2.device) as context:
        thread = threading.Thread(target=take, args=(context,))
        thread.start()
        overflow()
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(event.kind in (EventKind.CQ, EventKind.PORT) for event in seen)


def test_closing_the_device_closes_its_events(node1: Node) -> None:
    context = open_device(node1.device)
    events = context.events
    context.close()
    for call in (events.take, events.fileno, lambda: events.wait(Deadline(1)), lambda: context.events):
        with pytest.raises(StateError, match="is closed"):
            call()
