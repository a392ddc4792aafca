"""Waiting on a descriptor: blocking, by poll(2), with asyncio; and closing under those who wait."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from rdmaconnect.errors import ConnectTimeout, DeadlineExceeded, StateError
from rdmaconnect.objects.waitable import Waitable
from rdmaconnect.runtime.deadline import Deadline


class Pipe(Waitable[bytes]):
    """Announces what was written into a pipe."""

    def __init__(self) -> None:
        fd, self.writer = os.pipe()
        super().__init__(object, "pipe", (), lambda _: fd)

    def _take(self) -> bytes | None:
        with self.lock:
            self.pointer  # noqa: B018
            try:
                return os.read(self._fd, 1)
            except BlockingIOError:
                return None

    def _release(self, pointer: object) -> None:
        os.close(self._fd)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with Pipe() as opened:
        yield opened


def test_what_is_there_is_taken_at_once(pipe: Pipe) -> None:
    os.write(pipe.writer, b"ab")
    assert pipe.wait(Deadline(0)) == b"a"
    assert asyncio.run(pipe.wait_async(Deadline(0))) == b"b"


def test_nothing_in_time_is_an_error_that_names_the_wait(pipe: Pipe) -> None:
    before = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"wait on pipe: no success within \d"):
        pipe.wait(Deadline(0.05))
    with pytest.raises(ConnectTimeout, match="wait on pipe"):
        asyncio.run(pipe.wait_async(Deadline(0.05, ConnectTimeout)))
    assert 0.1 <= time.monotonic() - before < 5


def test_a_waiter_is_woken(pipe: Pipe) -> None:
    threading.Timer(0.05, os.write, (pipe.writer, b"x")).start()
    assert pipe.wait(Deadline(10)) == b"x"
    threading.Timer(0.05, os.write, (pipe.writer, b"y")).start()
    assert asyncio.run(pipe.wait_async(Deadline(None))) == b"y"


def test_the_descriptor_suits_poll(pipe: Pipe) -> None:
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    assert poller.poll(0) == []
    os.write(pipe.writer, b"x")
    assert poller.poll(0) == [(pipe.fileno(), select.POLLIN)]


def test_the_loop_goes_on_while_a_task_waits(pipe: Pipe) -> None:
    async def main() -> tuple[bytes, int]:
        waiting = asyncio.create_task(pipe.wait_async(Deadline(10)))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            ticks += 1
            if ticks == 20:
                os.write(pipe.writer, b"x")
        return await waiting, ticks

    taken, ticks = asyncio.run(main())
    assert taken == b"x"
    assert ticks >= 20


def test_each_thing_goes_to_one_of_many_tasks(pipe: Pipe) -> None:
    async def main() -> list[bytes]:
        tasks = [asyncio.create_task(pipe.wait_async(Deadline(10))) for _ in range(5)]
        await asyncio.sleep(0.01)
        os.write(pipe.writer, b"abcde")
        return sorted(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_cancelled_wait_leaves_nothing_behind_and_loses_nothing(pipe: Pipe) -> None:
    async def main() -> bytes:
        task = asyncio.create_task(pipe.wait_async(Deadline(10)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.write(pipe.writer, b"x")
        return await pipe.wait_async(Deadline(10))

    before = os.listdir("/proc/self/fd")
    assert asyncio.run(main()) == b"x"
    assert os.listdir("/proc/self/fd") == before
    assert not pipe._sleepers


def test_closing_wakes_a_thread_and_a_task() -> None:
    errors: list[BaseException] = []

    def wait(pipe: Pipe) -> None:
        try:
            pipe.wait(Deadline(None))
        except StateError as e:
            errors.append(e)

    async def main() -> None:
        pipe = Pipe()
        thread = threading.Thread(target=wait, args=(pipe,))
        thread.start()
        tasks = [asyncio.create_task(pipe.wait_async(Deadline(None))) for _ in range(2)]
        await asyncio.sleep(0.05)
        threading.Thread(target=pipe.close).start()
        errors.extend(await asyncio.gather(*tasks, return_exceptions=True))
        await asyncio.to_thread(thread.join, 10)

    asyncio.run(main())
    assert [str(e) for e in errors] == ["pipe is closed."] * 3


def test_closing_after_the_loop_is_over(pipe: Pipe) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(pipe.wait_async(Deadline(None)))
    loop.run_until_complete(asyncio.sleep(0.01))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    pipe._sleepers.add((loop, loop.create_future()))
    loop.close()
    pipe.close()
    with pytest.raises(StateError, match="pipe is closed"):
        pipe.fileno()
