"""A connection from one life to the next: what was unread, what was on its way, and what belongs to another life."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from exchange_ends import until
from hosts import World, world
from software import Device, Software, connected
from software.ends import PATIENCE_S

import rdmaconnect
from rdmaconnect import OutcomeUnknown, PeerClosed, StateError
from rdmaconnect.abi import QpState
from rdmaconnect.errors import ConnectTimeout, DeadlineExceeded
from rdmaconnect.protocol.health import HealthState
from rdmaconnect.protocol.messages import Bye, Hello, Message, Proof, Ready, Reply

__all__ = ["world"]  # a fixture of hosts

TYPES = pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
AUTO = {"auto_reconnect": PATIENCE_S}


@pytest.fixture(autouse=True)
def settled(software: Software) -> Iterator[None]:
    """Connecting anew in the background lets go when it has noticed that the connection was closed."""
    yield
    until(lambda: software.problems() == [])


@contextmanager
def lasting(qp_type: str = "RC", listen: dict[str, Any] | None = None, **connect: Any) -> Iterator[tuple[Any, Any]]:
    """A connection that both sides connect anew by themselves: (the connector's end, the listener's end)."""
    with connected(qp_type, {**AUTO, **(listen or {})}, **AUTO, **connect) as ends:
        yield ends


def lose(connection: Any) -> None:
    """As if its peer were known to be gone."""
    connection._end.conversation.turn(HealthState.DEAD, "the test ends this life.")


def fail(connection: Any) -> None:
    """As if a transfer had failed."""
    with connection._end.engine.lock:
        connection._end.transceiver.qp.move(QpState.ERR)
    assert connection.lost is None  # which looks


class _Slow(logging.Handler):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.seen = source, 0

    def handle(self, record: logging.LogRecord) -> bool:  # without its lock, which the other side would wait for
        if record.filename == self.source and record.msg.startswith("%s: %s") and record.args[0] == "proven":  # type: ignore[index]
            self.seen += 1
            time.sleep(0.2)
        return True


@contextmanager
def slow_to_stand(source: str) -> Iterator[_Slow]:
    """Between its proof and its first use the side that logs from this file takes its time."""
    log, slow = logging.getLogger("rdmaconnect"), _Slow(source)
    level = log.level
    log.addHandler(slow)
    log.setLevel(logging.DEBUG)
    try:
        yield slow
    finally:
        log.removeHandler(slow)
        log.setLevel(level)


def live(generation: int, *connections: Any) -> None:
    """Until all have come so far."""
    until(lambda: all(one.generation >= generation for one in connections), PATIENCE_S)


def again(*connections: Any) -> None:
    """Connect both anew, as their application asks for it."""
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(one.reconnect, deadline_s=PATIENCE_S) for one in connections]:
            one.result(PATIENCE_S)


# ---- coming back


@TYPES
@pytest.mark.parametrize("way", [lose, fail])
@pytest.mark.parametrize("who", [0, 1])
def test_it_comes_back_by_itself(software: Software, qp_type: str, way: Callable[[Any], None], who: int) -> None:
    with lasting(qp_type) as ends:
        here, there = ends
        assert (here.generation, there.generation) == (1, 1)
        for generation in (2, 3):
            way(ends[who])
            live(generation, here, there)
            assert (here.generation, there.generation, here.lost, there.lost) == (generation, generation, None, None)
            here.send(b"there")
            there.send(b"here")
            assert (there.recv(), here.recv()) == (b"there", b"here")


def test_asked_to_it_is_another_life_too(software: Software) -> None:
    with connected() as (here, there):
        again(here, there)
        again(there, here)
        assert (here.generation, there.generation) == (3, 3)


def test_who_is_lost_once_more_when_it_has_just_come_back_comes_back_again(software: Software) -> None:
    with lasting() as (here, there):
        for one in (here, there):
            stand, one._end.stand = one._end.stand, None

            def stand_and_fall(stand: Any = stand, one: Any = one) -> None:
                stand()
                if one.generation < 4:
                    lose(one)

            one._end.stand = stand_and_fall
        lose(here)
        live(4, here, there)
        until(lambda: here.lost is None and there.lost is None and here._end.life.stands and there._end.life.stands)
        here.send(b"x")
        assert there.recv() == b"x"


def test_a_new_process_at_the_same_address_is_the_next_peer(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as first, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(first.accept, deadline_s=PATIENCE_S)
        here = rdmaconnect.connect(first.url, **AUTO)
        there = accepted.result()
        # as of a process that was killed: nothing is said any more
        first._acceptor.close()
        there._end.conversation.channel.close()
        there._end.conversation.over(PeerClosed("it was killed."))
        there._end.transceiver.close()
        with here, there, rdmaconnect.listen(first.url) as second, second.accept(deadline_s=PATIENCE_S) as successor:
            here.send(b"and you?")
            assert successor.recv() == b"and you?"
            assert (here.generation, successor.generation) == (2, 1)


@pytest.mark.parametrize("who", [0, 1])
def test_what_an_application_has_closed_stays_closed(software: Software, who: int) -> None:
    with lasting() as ends:
        ends[1 - who].send(b"last")
        ends[who].close()
        other = ends[1 - who]
        with pytest.raises(PeerClosed, match=r"the peer closed the connection \(close\)"):
            other.recv()
        assert isinstance(other.lost, PeerClosed)
        time.sleep(0.1)
        assert other.generation == 1
        with pytest.raises(StateError):
            ends[who].recv()


@TYPES
@pytest.mark.parametrize(("who", "source"), [(0, "probe.py"), (1, "incoming.py")])
def test_a_peer_that_connects_anew_sends_and_closes_at_once(
    software: Software, qp_type: str, who: int, source: str
) -> None:
    with lasting(qp_type) as ends, ThreadPoolExecutor(1) as threads, slow_to_stand(source) as slow:
        waits, quick = ends[who], ends[1 - who]
        waiting = threads.submit(waits.recv, deadline_s=PATIENCE_S)
        quick.reconnect()
        quick.send(b"last")
        quick.close()
        until(lambda: waits._end.conversation.farewell)
        seen = waits._end.life.stands
        assert waiting.result(PATIENCE_S) == b"last"
        assert (slow.seen, seen) == (1, False)
        with pytest.raises(PeerClosed, match=r"the peer closed the connection \(close\)"):
            waits.recv()
        assert waits.generation == 2


def test_where_it_does_not_succeed_everybody_is_told_both_reasons(software: Software) -> None:
    with rdmaconnect.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(4) as threads:
        accepted = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        here = rdmaconnect.connect(listener.url, auto_reconnect=0.5)
        there = accepted.result()
    with here, there:
        waiting = [threads.submit(here.recv, deadline_s=PATIENCE_S) for threads in [ThreadPoolExecutor(2)] * 2]
        time.sleep(0.05)
        began = time.monotonic()
        lose(here)
        assert here.lost is None
        until(lambda: here._end.life.ended)
        with pytest.raises(PeerClosed) as caught:
            here.send(b"x", deadline_s=PATIENCE_S)
        assert 0.3 < time.monotonic() - began < 5
        words = r"wait for the connection: the test ends this life\. Connecting anew, tried for 0\.5 s, "
        assert re.match(words + r"has failed: connect: reach the listener.*refused", str(caught.value))
        for one in waiting:
            with pytest.raises(PeerClosed, match="Connecting anew, tried for"):
                one.result(PATIENCE_S)
        assert isinstance(here.lost, PeerClosed)
        assert here.health.state is HealthState.DEAD
        assert "Connecting anew, tried for" in here.health.why
        with pytest.raises(ConnectTimeout):  # it can still be asked for
            here.reconnect(deadline_s=0.1)


def test_what_was_given_up_can_still_be_asked_for(software: Software) -> None:
    with connected("RC", {"auto_reconnect": 0.1}) as (here, there), ThreadPoolExecutor(1) as threads:
        lose(there)
        until(lambda: there._end.given_up)
        waiting = threads.submit(there.reconnect, deadline_s=PATIENCE_S)
        until(lambda: not there._end.given_up)  # before that a hello is taken for a new connection
        here.reconnect(deadline_s=PATIENCE_S)
        waiting.result(PATIENCE_S)
        here.send(b"x")
        assert there.recv() == b"x"
        assert (here.generation, there.generation) == (2, 2)
        assert there.lost is None


def test_a_listener_that_was_closed_takes_nobody_back(software: Software) -> None:
    with connected("RC", AUTO) as (here, there):
        there._end.again.__self__.close()
        lose(there)
        with pytest.raises(PeerClosed, match=r"the listener on .* is closed"):
            there.recv(deadline_s=PATIENCE_S)
        assert here.generation == 1


def test_who_watches_it_sees_it_come_back(software: Software) -> None:
    with lasting() as (here, there):
        seen: list[rdmaconnect.Health] = []
        here.on_change(seen.append)
        with software.on("ibv_modify_qp", to=QpState.RTR, delay=0.05):
            lose(here)
            until(lambda: seen)
            assert here.health.state is HealthState.SUSPECT
            assert here.health.why == "the test ends this life: it is being connected anew"
            live(2, here, there)
        until(lambda: here.health.state is HealthState.ALIVE and len(seen) == 2)
        assert [health.state for health in seen] == [HealthState.SUSPECT, HealthState.ALIVE]
        there.close()
        until(lambda: len(seen) == 3)
        assert (seen[2].state, here.health.state) == (HealthState.DEAD, HealthState.DEAD)


# ---- messages that nobody has read


@TYPES
def test_what_was_not_read_is_read_first(software: Software, qp_type: str) -> None:
    with lasting(qp_type) as (here, there):
        for generation in range(2, 6):
            for number in range(3):
                here.send(b"%d of %d" % (number, generation))
            lose(here)
            live(generation, here, there)
        here.send(b"last")
        expected = [b"%d of %d" % (number, generation) for generation in range(2, 6) for number in range(3)]
        assert [there.recv() for _ in range(13)] == [*expected, b"last"]
        with pytest.raises(DeadlineExceeded):
            there.recv(deadline_s=0.05)


@TYPES
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_comes_back_though_there_is_no_room_for_another_message(
    software: Software, qp_type: str, depth: int
) -> None:
    """What loses messages may lose those that find a probe in their place."""
    with lasting(qp_type, {"recv_depth": depth}) as (here, there):
        for generation in range(2, 5):
            for number in range(depth):
                here.send(b"%d" % number)
            lose(there)
            live(generation, here, there)  # though nobody reads
            there.send(b"here")
            assert here.recv() == b"here"
            expected, came = [b"%d" % number for number in range(depth)], read_all(there)
            assert came == (expected if qp_type == "RC" else [one for one in expected if one in came])
        for number in range(3 * depth):
            here.send(b"%d" % number)
            assert qp_type != "RC" or there.recv() == b"%d" % number


def read_all(connection: Any) -> list[bytes]:
    """What has come."""
    came = []
    with suppress(DeadlineExceeded):
        while True:
            came.append(connection.recv(deadline_s=0.05))
    return came


@pytest.mark.parametrize("qp_type", ["RC", "UC"])
def test_word_of_writes_is_not_lost(software: Software, qp_type: str) -> None:
    board = bytearray(8)
    with lasting(qp_type, {"regions": {"board": board}}) as (here, there):
        here.write(b"1", "board", imm=1)
        here.send(b"a message")
        lose(there)
        live(2, here, there)
        here.write(b"2", "board", imm=2)
        assert [there.recv_imm(), there.recv_imm(), there.recv()] == [1, 2, b"a message"]


def test_a_view_stays_what_it_is(software: Software) -> None:
    with lasting(listen={"recv_depth": 2}) as (here, there):
        here.send(b"in view")
        with there.recv_view() as view:
            lose(there)
            live(2, here, there)
            for _ in range(5):
                here.send(b"another")
                assert there.recv() == b"another"
            assert view == b"in view"
        for _ in range(5):
            here.send(b"one more")
            assert there.recv() == b"one more"


def test_completions_that_a_device_keeps_over_a_reset_belong_to_nobody() -> None:
    with Software([Device(keeps_completions=True)]) as software:
        with lasting() as (here, there):
            for generation in range(2, 6):
                here.send(b"%d" % generation)
                fail(here)
                live(generation, here, there)
            assert [there.recv() for _ in range(4)] == [b"2", b"3", b"4", b"5"]
        until(lambda: not software.left())
        assert software.problems() == []


# ---- what was on its way


def test_what_was_on_its_way_is_unknown_and_not_repeated(software: Software) -> None:
    with lasting(send_depth=4) as (here, there):
        with software.network.cut("127.0.0.1", "127.0.0.1"):
            transfers = [here.post_send(b"%d" % number) for number in range(3)]
            assert not any(one.done() for one in transfers)
            lose(here)
            for one in transfers:
                with pytest.raises(OutcomeUnknown) as caught:
                    one.wait(deadline_s=PATIENCE_S)
                assert caught.value.generation == 1
                assert caught.value.wr_id
                assert str(caught.value).startswith("send 1 bytes from QP")
                assert f"in generation 1 while wr_id {caught.value.wr_id} was on its way" in str(caught.value)
                assert "the test ends this life." in str(caught.value)
                assert one.done()
        live(2, here, there)
        here.send(b"next")
        assert there.recv() == b"next"
        with pytest.raises(OutcomeUnknown):
            transfers[0].wait()


def test_both_causes_are_told(software: Software) -> None:
    software.network.ack_timeout_s = 0.05
    with lasting() as (here, there):
        with software.network.cut("127.0.0.1", "127.0.0.1"), pytest.raises(OutcomeUnknown) as caught:
            here.send(b"x", deadline_s=PATIENCE_S)
        assert "RETRY_EXC_ERR" in str(caught.value)
        live(2, here, there)


def test_what_is_read_while_it_is_lost_is_unknown_too(software: Software) -> None:
    board = bytearray(b"12345678")
    with lasting(listen={"regions": {"board": board}}) as (here, there):
        with software.network.cut("127.0.0.1", "127.0.0.1"), ThreadPoolExecutor(1) as threads:
            reading = threads.submit(here.read, "board", deadline_s=PATIENCE_S)
            until(lambda: here._end.transceiver.sent)
            lose(there)
            with pytest.raises(OutcomeUnknown, match="read 8 bytes"):
                reading.result(PATIENCE_S)
        live(2, here, there)
        assert here.read("board") == b"12345678"


def test_what_is_begun_while_there_is_no_peer_waits_for_one(software: Software) -> None:
    board = bytearray(8)
    with lasting(listen={"regions": {"board": board}}) as (here, there), ThreadPoolExecutor(8) as threads:
        with software.on("ibv_modify_qp", to=QpState.RTR, delay=0.3):
            lose(here)
            until(lambda: here._end.life.ended)
            with pytest.raises(DeadlineExceeded):
                here.send(b"late", deadline_s=0.05)
            began = [
                threads.submit(here.send, b"a message"), threads.submit(here.write, b"1234", "board"),
                threads.submit(here.read, "board"), threads.submit(there.recv), threads.submit(there.send, b"back"),
                threads.submit(here.recv),
            ]  # fmt: skip
            results = [one.result(PATIENCE_S) for one in began]
        assert (results[3], results[5]) == (b"a message", b"back")
        assert results[2] in (b"1234" + bytes(4), bytes(8))
        assert board[:4] == b"1234"
        assert (here.generation, there.generation) == (2, 2)


def test_a_write_of_which_a_part_was_posted_is_not_begun_anew(software: Software) -> None:
    board = bytearray(64)
    with lasting(listen={"regions": {"board": board}}, send_depth=2) as (here, there):
        here._end._longest = 8
        with software.network.cut("127.0.0.1", "127.0.0.1"), ThreadPoolExecutor(1) as threads:
            writing = threads.submit(here.write, here.register(bytearray(64)), "board", deadline_s=PATIENCE_S)
            until(lambda: len(here._end.transceiver.sent) == 2)
            lose(here)
            with pytest.raises(OutcomeUnknown, match="write 64 bytes"):
                writing.result(PATIENCE_S)
        live(2, here, there)
        here.write(b"whole" * 12, "board")
        assert board[:60] == b"whole" * 12


# ---- what is of an earlier life


def test_memory_of_an_earlier_peer_is_refused_and_the_same_memory_is_not(software: Software) -> None:
    boards = {"board": bytearray(16)}
    with rdmaconnect.listen("127.0.0.1:0", regions=boards, **AUTO) as listener, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        with rdmaconnect.connect(listener.url, **AUTO) as here, accepted.result(PATIENCE_S) as there:
            old = here.remote["board"]
            part = old.slice(8, 4)
            lose(here)
            live(2, here, there)
            here.write(b"same", part)  # its peer named the same once more
            assert boards["board"][8:12] == b"same"
            assert here.remote["board"] == old
            there.close()  # as if a new process came
            here.reconnect(deadline_s=PATIENCE_S)
            with listener.accept(deadline_s=PATIENCE_S) as successor:
                assert here.generation == 3
                for region in (old, part):
                    for use in (here.read, lambda region: here.write(b"x", region)):
                        with pytest.raises(
                            StateError, match=r"is of generation 1 of the connection, this is 3: its key"
                        ):
                            use(region)
                here.write(b"by name", "board")
                known = rdmaconnect.RemoteRegion.from_bytes(here.remote["board"].to_bytes())
                assert here.read(known, 7) == b"by name"
                assert successor.lost is None


def test_a_batch_is_of_one_life(software: Software) -> None:
    with lasting() as (here, there):
        batch = here.batch()
        one = batch.post_send(b"never")
        lose(here)
        live(2, here, there)
        with pytest.raises(StateError, match=r"begun in generation 1 of the connection, this is 2"):
            batch.__exit__(None, None, None)
        with pytest.raises(rdmaconnect.CompletionError):
            one.wait()
        with here.batch() as batch:
            batch.post_send(b"of this")
        assert there.recv() == b"of this"
        with pytest.raises(DeadlineExceeded):
            there.recv(deadline_s=0.05)


# ---- who takes whose place


@pytest.mark.parametrize("kind", [Hello, Reply, Ready, Proof])
def test_whichever_message_was_the_last_the_two_find_each_other(world: World, kind: type) -> None:
    here, there = world.both(AUTO, probe=True, **AUTO)
    for generation in range(2, 5):
        left = [2]

        def lose_it(message: Message, connector: bool, left: list[int] = left) -> list[Message]:
            if isinstance(message, kind) and left[0]:
                left[0] -= 1
                world.tap.hang_up()
                return []
            return [message]

        world.tap.change = lose_it
        lose(here)
        live(generation, here, there)
        until(lambda: here._end.life.stands and there._end.life.stands)
        here.send(b"%d" % generation)
        assert there.recv() == b"%d" % generation
        assert left == [0]
    assert not world.listener._ready  # no third one has appeared
    assert len(world.listener._places.live) <= 2


# ---- all at once


def test_a_connection_that_is_closed_while_it_comes_back_leaves_nothing(software: Software) -> None:
    for delay in (0.0, 0.002, 0.01, 0.05):
        for who in (0, 1):
            with lasting() as ends:
                lose(ends[who])
                time.sleep(delay)
                ends[who].close()
                assert ends[who].closed
                until(lambda one=ends[who]._end: not one._renewing)
    until(lambda: not software.left())


def test_asked_to_and_by_itself_at_the_same_time(software: Software) -> None:
    with lasting() as (here, there):
        for number in range(5):
            lose(here)
            again(here, there)
            here.send(b"%d" % number)
            assert there.recv() == b"%d" % number


def test_for_asyncio_it_is_the_same(software: Software) -> None:
    async def main() -> None:
        async with await rdmaconnect.alisten("127.0.0.1:0", **AUTO) as listener:
            accepting = asyncio.create_task(listener.accept())
            async with await rdmaconnect.aconnect(listener.url, **AUTO) as here, await accepting as there:
                for generation in range(2, 5):
                    coming = asyncio.create_task(there.recv(deadline_s=PATIENCE_S))
                    with software.network.cut("127.0.0.1", "127.0.0.1"):
                        transfer = await here.post_send(b"lost")
                        lose(here)
                        with pytest.raises(OutcomeUnknown):
                            await transfer
                    await here.send(b"%d" % generation, deadline_s=PATIENCE_S)
                    assert await coming == b"%d" % generation
                    assert here.generation == generation

    asyncio.run(main())


# ---- what is asked for


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("yes", TypeError, "auto_reconnect is 'yes': give True, False or seconds"),
        (None, TypeError, "auto_reconnect is None"),
        (0, ValueError, "auto_reconnect is 0: give a number of seconds above 0"),
        (-1, ValueError, "above 0"),
        (float("inf"), ValueError, "above 0"),
        (float("nan"), ValueError, "above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(value: Any, error: type[Exception], words: str) -> None:
    for call in (rdmaconnect.connect, rdmaconnect.listen):
        with pytest.raises(error, match=re.escape(words)):
            call("127.0.0.1:1", auto_reconnect=value)


def test_what_does_not_stand_by_itself_is_not_brought_back_by_itself(software: Software) -> None:
    for call in (
        lambda: rdmaconnect.connect_many("127.0.0.1:1", 2, auto_reconnect=True),
        lambda: rdmaconnect.meet("127.0.0.1:0", "127.0.0.1:1", auto_reconnect=True),
        lambda: rdmaconnect.Pool("127.0.0.1:1", auto_reconnect=True),
        lambda: rdmaconnect.listen("127.0.0.1:0", share_ud=True, auto_reconnect=True),
    ):
        with pytest.raises(ValueError, match=r"auto_reconnect with .*: give it to connect\(\) and listen\(\)"):
            call()
    with connected("UD") as (here, _), pytest.raises(ValueError, match="auto_reconnect with connect_many or via="):
        rdmaconnect.connect("127.0.0.1:1", via=here, qp_type="UD", auto_reconnect=True)


def test_a_good_bye_says_whether_it_is_one(software: Software) -> None:
    assert Bye(bytes(16), "close") != Bye(bytes(16), "close", lost=True)
