"""Many transfers on their way at once: handles, batches, what fails, what is closed; and receiving without a copy."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pickle import PickleBuffer
from typing import Any

import pytest
from software import Device, Software, connected

import rdmaconnect
from rdmaconnect.abi import QpState, SendFlags, WcStatus, WrOpcode, ibv_send_wr
from rdmaconnect.agreement.endpoint import RemoteRegion
from rdmaconnect.errors import CompletionError, DeadlineExceeded, PeerClosed, PostError, StateError
from rdmaconnect.objects.work_request import SendRequest
from rdmaconnect.runtime.deadline import Deadline
from rdmaconnect.runtime.procedure import Call

PATIENCE_S = 10
TYPES = pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])


def listed(wr: ibv_send_wr) -> list[ibv_send_wr]:
    """The work requests of one call."""
    found = [wr]
    while found[-1].next:
        found.append(found[-1].next.contents)
    return found


class Posted:
    """What was posted at a device: of each call the flags of its work requests."""

    def __init__(self, software: Software) -> None:
        self.calls: list[list[int]] = []
        software.on(
            "ibv_post_send", before=lambda call: self.calls.append([wr.send_flags for wr in listed(call["wr"])])
        )


def signaled(flags: list[int]) -> list[bool]:
    return [bool(one & SendFlags.SIGNALED) for one in flags]


# ---- posting


@TYPES
@pytest.mark.parametrize("size", [0, 10, 64, 65, 1000])
def test_messages_are_on_their_way_together_and_arrive_in_order(software: Software, qp_type: str, size: int) -> None:
    with connected(qp_type) as (here, there):
        sent = [here.post_send(bytes([n]) * size, deadline_s=PATIENCE_S) for n in range(16)]
        assert [there.recv(deadline_s=PATIENCE_S) for _ in sent] == [bytes([n]) * size for n in range(16)]
        for transfer in sent:
            transfer.wait(deadline_s=PATIENCE_S)
            assert transfer.done()
            assert transfer.length == size


def test_short_messages_go_inline_and_need_no_memory(software: Software) -> None:
    with connected() as (here, there):
        made, posted = software.made["mr"], Posted(software)
        for size in (1, 64):
            here.send(b"x" * size)
            here.send(bytearray(size))
            assert (there.recv(), there.recv()) == (b"x" * size, bytes(size))
        assert all(flags & SendFlags.INLINE for call in posted.calls for flags in call)
        assert software.made["mr"] == made
        here.send(b"x" * 65)
        here.send(memoryview(b"short"))
        assert (len(there.recv()), there.recv()) == (65, b"short")
        assert [bool(call[0] & SendFlags.INLINE) for call in posted.calls[4:]] == [False, True]
        assert software.made["mr"] == made + 1


@pytest.mark.parametrize("work", ["send", "write", "read"])
def test_memory_that_was_registered_when_a_call_was_interrupted_is_given_back(software: Software, work: str) -> None:
    """Ctrl-C comes when a worker has registered it, and before the transfer goes on."""
    memory = bytearray(300_000)
    with connected(listen={"regions": {"m": bytearray(300_000)}, "recv_size": 400_000}) as (here, _):
        before, end = software.objects("mr"), here._end
        procedure = {
            "send": lambda: end.begin_send(memory, PATIENCE_S),
            "write": lambda: end.begin_write(memory, "m", 0, None, PATIENCE_S),
            "read": lambda: end.reading(memory, "m", None, 0, Deadline(PATIENCE_S)),
        }[work]()
        request = next(procedure)
        assert isinstance(request, Call)
        request.function()
        assert len(software.objects("mr")) == len(before) + 1
        procedure.close()
        assert software.objects("mr") == before


def test_more_inline_than_the_queue_pair_takes_is_not_posted(software: Software) -> None:
    with connected(max_inline_data=10) as (here, there):
        qp = here._end.transceiver.qp
        assert qp.max_inline_data == 10
        long = SendRequest().fill_inline(1, WrOpcode.SEND, bytes(11))
        for requests in ([long], [SendRequest().fill_inline(1, WrOpcode.SEND, b"x"), long]):
            with pytest.raises(ValueError, match=r"post 11 bytes inline to RC QP .*: it takes 10"):
                qp.post_send(*requests)
        here.send(bytes(11))
        assert there.recv() == bytes(11)


def test_a_device_that_takes_nothing_inline_is_asked_once() -> None:
    with Software() as software:
        software.on("ibv_create_qp", where=lambda call: call["attr"].cap.max_inline_data > 0, fail=22)
        with connected() as (here, there):
            here.send(b"all the same")
            assert there.recv() == b"all the same"
        assert software.calls["ibv_create_qp"] == 4


def test_what_is_posted_may_be_changed_at_once_if_it_is_copied(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there):
        data, sent = bytearray(500), []
        for n in range(8):
            data[:] = bytes([n]) * 500
            sent.append(here.post_send(data))
        assert not sent[-1].done()
        assert [there.recv() for _ in sent] == [bytes([n]) * 500 for n in range(8)]
        for transfer in sent:
            transfer.wait()


def test_writes_and_reads_are_on_their_way_together(software: Software) -> None:
    far = bytearray(1 << 20)
    with connected(listen={"regions": {"far": far}}) as (here, there), here.register(bytearray(b"m" * 1000)) as mr:
        writes = [here.post_write(bytes([n]) * 1000, "far", offset=n * 1000) for n in range(20)]
        writes += [here.post_write(mr, "far", offset=20_000), here.post_write(b"s" * 9, "far", offset=21_000, imm=3)]
        writes.append(here.post_write(b"l" * 500_000, "far", offset=30_000))
        assert there.recv_imm(deadline_s=PATIENCE_S) == 3
        for transfer in writes:
            transfer.wait(deadline_s=PATIENCE_S)
        assert far[:20_000] == b"".join(bytes([n]) * 1000 for n in range(20))
        assert far[20_000:21_010] == b"m" * 1000 + b"s" * 9 + b"\0"
        assert far[30_000:530_001] == b"l" * 500_000 + b"\0"
        into = [bytearray(1000) for _ in range(20)]
        reads = [here.post_read(buffer, "far", offset=n * 1000) for n, buffer in enumerate(into)]
        reads.append(here.post_read(mr, "far", 3, offset=21_000))
        reads.append(here.post_read(bytearray(), "far"))
        for transfer in reads:
            transfer.wait(deadline_s=PATIENCE_S)
        assert b"".join(into) == far[:20_000]


def test_a_full_queue_is_waited_for_until_the_deadline(software: Software) -> None:
    with connected(listen={"recv_depth": 1}, send_depth=3) as (here, there):
        sent = [here.post_send(bytes([n])) for n in range(4)]
        with pytest.raises(DeadlineExceeded, match=r"send 12 bytes from .* to .*"):
            here.post_send(b"one too many", deadline_s=0.05)
        with pytest.raises(DeadlineExceeded, match="send 1 bytes"):
            sent[3].wait(deadline_s=0)
        assert [one.done() for one in sent] == [True, False, False, False]
        assert repr(sent[3]) == "<Transfer send 1 bytes, on its way>"
        assert [there.recv() for _ in sent] == [bytes([n]) for n in range(4)]
        sent[3].wait(deadline_s=PATIENCE_S)
        assert repr(sent[3]) == "<Transfer send 1 bytes, done>"


def test_threads_post_at_the_same_time(software: Software) -> None:
    far = bytearray(64_000)
    with connected(listen={"regions": {"far": far}}, send_depth=4) as (here, _), ThreadPoolExecutor(8) as threads:

        def work(number: int) -> None:
            for n in range(20):
                at = number * 8000 + n * 400
                sizes = (64, 400, 65, 399)
                here.post_write(bytes([number + 1]) * 400, "far", offset=at).wait(deadline_s=PATIENCE_S)
                with here.batch() as batch:
                    parts = [batch.post_write(bytes([n + 1]) * size, "far", offset=at) for size in sizes]
                for part in parts:
                    part.wait(deadline_s=PATIENCE_S)

        list(threads.map(work, range(8)))
        assert far == b"".join(bytes([n + 1]) * 399 + bytes([n + 1]) for _ in range(8) for n in range(20))


# ---- batches


@TYPES
def test_a_batch_is_one_list_of_which_the_last_is_signalled(software: Software, qp_type: str) -> None:
    with connected(qp_type) as (here, there):
        posted = Posted(software)
        with here.batch() as batch:
            sent = [batch.post_send(bytes([n]) * n) for n in range(8)]
            assert posted.calls == []
            assert not sent[0].done()
        assert [signaled(call) for call in posted.calls] == [[False] * 7 + [True]]
        assert [there.recv(deadline_s=PATIENCE_S) for _ in sent] == [bytes([n]) * n for n in range(8)]
        for transfer in sent:
            transfer.wait(deadline_s=PATIENCE_S)


def test_a_batch_may_be_longer_than_the_queue_and_than_the_memory_for_copies(software: Software) -> None:
    far = bytearray(40 * 60_000)
    with connected(listen={"regions": {"far": far}}, send_depth=16) as (here, _):
        posted = Posted(software)
        with here.batch() as batch:
            sent = [batch.post_write(bytes([n + 1]) * 60_000, "far", offset=n * 60_000) for n in range(40)]
        for transfer in sent:
            transfer.wait(deadline_s=PATIENCE_S)
        assert far == b"".join(bytes([n + 1]) * 60_000 for n in range(40))
        assert sum(map(len, posted.calls)) == 40
        posted.calls.clear()
        with here.batch() as batch:
            reads = [batch.post_read(bytearray(8), "far") for _ in range(40)]
        for transfer in reads:
            transfer.wait(deadline_s=PATIENCE_S)
        assert [len(call) for call in posted.calls] == [16, 16, 8]
        quiet = [one for call in posted.calls for one in signaled(call)]
        assert all(any(quiet[at : at + 9]) for at in range(32))
        assert quiet.count(True) <= 6


def test_what_is_divided_is_told_of_once(software: Software) -> None:
    devices = [Device("soft0")]
    devices[0].ports[0].max_msg_sz = 4096
    far = bytearray(200_000)
    with Software(devices) as small, connected(listen={"regions": {"far": far}}) as (here, there):
        posted = Posted(small)
        with here.register(bytearray(b"d" * 100_000)) as mr, here.batch() as batch:
            whole = batch.post_write(mr, "far", imm=7)
            after = batch.post_write(b"after", "far", offset=100_000)
        whole.wait(deadline_s=PATIENCE_S)
        after.wait(deadline_s=PATIENCE_S)
        assert there.recv_imm(deadline_s=PATIENCE_S) == 7
        assert far[:100_006] == b"d" * 100_000 + b"after\0"
        assert sum(map(len, posted.calls)) == 26
        assert sum(signaled([flags for call in posted.calls for flags in call])) < 10


def test_nothing_of_a_batch_that_raises_is_posted(software: Software) -> None:
    with connected() as (here, there):
        sent: list[rdmaconnect.Transfer] = []

        def fail() -> None:
            with here.batch() as batch:
                sent.extend([batch.post_send(b"x"), batch.post_send(b"y" * 1000)])
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail()
        for transfer in sent:
            assert transfer.done()
            with pytest.raises(CompletionError, match="WR_FLUSH_ERR"):
                transfer.wait()
        with here.batch() as batch:
            batch.post_send(b"z" * 1000)
            with pytest.raises(LookupError):
                batch.post_write(b"x", "nowhere")
        assert there.recv(deadline_s=PATIENCE_S) == b"z" * 1000
        here.send(b"the memory of y is free again")


def test_a_batch_that_has_ended_takes_nothing_more(software: Software) -> None:
    with connected(listen={"regions": {"far": bytearray(8)}}) as (here, _):
        with here.batch() as batch:
            pass
        for post in (lambda: batch.post_send(b"x"), lambda: batch.post_read(bytearray(8), "far")):
            with pytest.raises(StateError, match="it has ended"):
                post()


def test_of_a_list_that_the_device_refuses_the_rest_fails(software: Software) -> None:
    with connected() as (here, there):
        software.on("ibv_post_send", fail=12, times=1)
        with pytest.raises(PostError, match="ENOMEM"), here.batch() as batch:
            sent = [batch.post_send(b"x" * 100) for _ in range(4)]
        assert [transfer.done() for transfer in sent] == [True] * 4
        with pytest.raises(CompletionError, match="WR_FLUSH_ERR"):
            sent[0].wait()
        here.send(b"y" * 100)
        assert there.recv(deadline_s=PATIENCE_S) == b"y" * 100


# ---- what fails


@pytest.mark.parametrize("together", [True, False])
def test_the_failure_of_one_is_told_to_that_one(software: Software, together: bool) -> None:
    far = bytearray(1000)
    with connected(listen={"regions": {"far": far}}) as (here, _):
        good = here.remote["far"]
        bad = RemoteRegion(good.addr, good.rkey ^ 0xFF, good.length)
        work = [(b"1", good), (b"2" * 100, good), (b"3" * 100, bad), (b"4", good), (b"5" * 100, good)]
        if together:
            with here.batch() as batch:
                sent = [batch.post_write(data, region) for data, region in work]
        else:
            sent = [here.post_write(data, region) for data, region in work]
        statuses: list[Any] = []
        for transfer in sent:
            try:
                transfer.wait(deadline_s=PATIENCE_S)
                statuses.append(None)
            except CompletionError as e:
                statuses.append(e.status if f"write {transfer.length} bytes from" in str(e) else e)
        assert statuses == [None, None, WcStatus.REM_ACCESS_ERR, WcStatus.WR_FLUSH_ERR, WcStatus.WR_FLUSH_ERR]
        assert repr(sent[2]) == "<Transfer write 100 bytes, failed>"
        with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):
            sent[2].wait()


def test_what_is_on_its_way_when_another_fails_is_told_its_own_end(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there), ThreadPoolExecutor(1) as threads:
        sent = [here.post_send(b"x") for _ in range(3)]
        here._end.transceiver.broken = CompletionError(WcStatus.REM_ACCESS_ERR, doing="write another")
        receiving = threads.submit(lambda: (time.sleep(0.2), there.recv(), there.recv(), there.recv()))
        sent[2].wait(deadline_s=PATIENCE_S)
        receiving.result(PATIENCE_S)
        never = here.post_send(b"y"), here.post_send(b"y")
        with pytest.raises(CompletionError, match=r"REM_ACCESS_ERR.*The peer is there"):
            never[1].wait(deadline_s=PATIENCE_S)
        with pytest.raises(DeadlineExceeded):
            never[1].wait(deadline_s=0.1)


def test_closing_ends_what_is_on_its_way(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there):
        sent = [here.post_send(b"x" * 1000) for _ in range(6)]
        with here.batch() as batch:
            batch.post_send(b"y" * 1000)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                sent[5].wait(deadline_s=PATIENCE_S)
            except rdmaconnect.RdmaConnectError as e:
                failed.append(e)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        here.close()
        thread.join(PATIENCE_S)
        assert [type(error) for error in failed] == [StateError]
        assert all(transfer.done() for transfer in sent)
        sent[0].wait()
        with pytest.raises(StateError, match="is closed"):
            sent[4].wait()
        with pytest.raises(StateError, match="is closed"):
            here.post_send(b"z")
        there.close()


def test_a_peer_that_closes_ends_what_is_on_its_way(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there):
        sent = [here.post_send(b"x") for _ in range(3)]
        there.close()
        with pytest.raises(PeerClosed, match="send 1 bytes: the peer closed the connection"):
            sent[2].wait(deadline_s=PATIENCE_S)


def test_wrong_arguments_are_refused_before_anything_is_posted(software: Software) -> None:
    with connected(listen={"regions": {"far": bytearray(8)}}) as (here, _):
        posted = Posted(software)
        for call, error, words in (
            (lambda: here.post_send("text"), TypeError, "str has no buffer"),  # type: ignore[arg-type]
            (lambda: here.post_send(b"x", deadline_s=-1), ValueError, "deadline_s is -1"),
            (lambda: here.send(b"x", deadline_s="1"), TypeError, "deadline_s is '1'"),  # type: ignore[arg-type]
            (lambda: here.recv(deadline_s=float("nan")), ValueError, "deadline_s is nan"),
            (lambda: here.post_send(bytes(1 << 17)), ValueError, "send 131072 bytes: the peer takes at most 65536"),
            (lambda: here.post_write(bytes(9), "far"), ValueError, "9 bytes at offset 0"),
            (lambda: here.post_write(b"x", "far", imm=1 << 32), ValueError, "with imm 4294967296"),
            (lambda: here.post_read(bytearray(9), "far"), ValueError, "9 bytes at offset 0"),
            (lambda: here.post_read(bytes(9), "far"), ValueError, "read-only"),  # type: ignore[arg-type]
            (lambda: here.batch(deadline_s=-1), ValueError, "deadline_s is -1"),
        ):
            with pytest.raises(error, match=words):
                call()
        assert posted.calls == []


def test_a_probe_that_comes_late_gives_its_slot_back_to_whoever_waits_for_a_write(software: Software) -> None:
    with connected("UC", listen={"recv_depth": 1, "regions": {"far": bytearray(8)}}) as (here, there):
        here.send(here._end.conversation.id)
        here.write(b"lost", "far", imm=1)
        with pytest.raises(DeadlineExceeded):
            there.recv_imm(deadline_s=0.01)
        here.write(b"seen", "far", imm=2)
        assert there.recv_imm(deadline_s=PATIENCE_S) == 2


# ---- asyncio


def test_the_same_for_asyncio(software: Software) -> None:
    far = bytearray(100_000)

    async def main() -> None:
        async with await rdmaconnect.alisten("127.0.0.1:0", regions={"far": far}, recv_depth=4) as listener:
            here, there = await asyncio.gather(rdmaconnect.aconnect(listener.url), listener.accept())
            async with here, there:
                sent = [await here.post_send(bytes([n]) * 100) for n in range(8)]
                assert not sent[7].done()
                with pytest.raises(DeadlineExceeded):
                    await sent[7].wait(deadline_s=0.01)
                for n in range(8):
                    async with there.recv_view() as view:
                        assert view == bytes([n]) * 100
                await asyncio.gather(*sent)
                async with here.batch() as batch:
                    writes = [await batch.post_write(bytes([n]) * 500, "far", offset=n * 500) for n in range(40)]
                    writes.append(await batch.post_send(b"all of them"))
                for write in writes:
                    await write
                assert await there.recv() == b"all of them"
                into = bytearray(20_000)
                read = await here.post_read(into, "far")
                await read
                assert read.done()
                assert into == b"".join(bytes([n]) * 500 for n in range(40))
                waiting = asyncio.create_task((await here.post_read(into, "far")).wait())
                await waiting

    asyncio.run(main())


# ---- receiving without a copy


@TYPES
def test_a_message_can_be_read_where_it_lies(software: Software, qp_type: str) -> None:
    with connected(qp_type, listen={"recv_depth": 2}) as (here, there):
        for n in range(6):
            here.send(b"message %d" % n)
            with there.recv_view(deadline_s=PATIENCE_S) as view:
                assert view == b"message %d" % n
                assert there._end.transceiver._view.obj is view.obj
            with pytest.raises(ValueError, match="released"):
                view[0]
        with pytest.raises(DeadlineExceeded), there.recv_view(deadline_s=0.01):
            pass


def test_a_view_keeps_its_slot_and_the_others_go_on(software: Software) -> None:
    with connected(listen={"recv_depth": 2}) as (here, there):
        here.send(b"first")
        with there.recv_view() as view:
            for n in range(5):
                here.send(b"%d" % n)
                assert there.recv() == b"%d" % n
            here.send(b"there is one receive")
            late = here.post_send(b"and no other")
            time.sleep(0.02)
            assert not late.done()
            assert view == b"first"
        late.wait(deadline_s=PATIENCE_S)
        assert [there.recv(), there.recv()] == [b"there is one receive", b"and no other"]


def test_what_is_made_of_a_view_must_go_before_it(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there):
        here.send(b"12345678")
        with pytest.raises(BufferError, match="Copy what is to stay"), there.recv_view() as view:
            kept = PickleBuffer(view)
        kept.release()
        here.send(b"the slot is back")
        with pytest.raises(KeyError), there.recv_view() as view:
            raise KeyError
        here.send(b"and again")
        assert there.recv() == b"and again"


@pytest.mark.parametrize("who", ["here", "there"])
def test_a_view_may_outlive_its_connection(software: Software, who: str) -> None:
    with connected() as (here, there):
        here.send(b"still here")
        with there.recv_view() as view:
            {"here": here, "there": there}[who].close()
            assert view == b"still here"
        there.close()


def test_reconnecting_takes_the_slot_back(software: Software) -> None:
    with connected(listen={"recv_depth": 1}) as (here, there), ThreadPoolExecutor(1) as threads:
        here.send(b"old")
        with there.recv_view():
            again = threads.submit(there.reconnect, deadline_s=PATIENCE_S)
            here.reconnect(deadline_s=PATIENCE_S)
            again.result(PATIENCE_S)
        here.send(b"new")
        assert there.recv(deadline_s=PATIENCE_S) == b"new"
        here.send(b"newer")
        assert there.recv(deadline_s=PATIENCE_S) == b"newer"


def test_who_polls_without_end_leaves_others_a_turn(software: Software) -> None:
    """They wait for the lock that it polls with, and that it mostly has again first."""
    with connected(spin=1 << 30) as (here, there), ThreadPoolExecutor(1) as threads:
        received = threads.submit(here.recv)
        for number in range(50):
            here.send(b"%d" % number)
            assert there.recv() == b"%d" % number
        there.send(b"last")
        assert received.result(PATIENCE_S) == b"last"


@TYPES
def test_who_only_posts_is_told_that_the_connection_failed(software: Software, qp_type: str) -> None:
    """A queue pair in ERR ends each work request at once, so that there is always room for another one."""
    with connected(qp_type) as (here, _):
        here._end.transceiver.qp.modify({"qp_state": QpState.ERR})
        with pytest.raises(CompletionError, match="WR_FLUSH_ERR"):
            [here.post_send(b"x", deadline_s=PATIENCE_S) for _ in range(1000)]
