"""Side channels that break, go deaf or fall silent under connections that stand, on a device in software."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from proxy import Proxy
from software import Software, connected
from software.ends import PATIENCE_S

import rdmaconnect
from rdmaconnect.exchange import dial
from rdmaconnect.protocol.health import APART_S, APART_SILENT_S, HealthState
from rdmaconnect.protocol.messages import Resume
from rdmaconnect.runtime.workers import namespace
from rdmaconnect.session import redial

ALIVE, SUSPECT, DEAD = HealthState.ALIVE, HealthState.SUSPECT, HealthState.DEAD
TYPES = pytest.mark.parametrize("qp_type", ["RC", "UC", "UD"])
KEYS = pytest.mark.parametrize("options", [{}, {"secret": "a secret of thirty-two characters"}], ids=["plain", "keys"])


class Seen(list[HealthState]):
    """The states that a connection goes through, in their order."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.words: list[str] = []
        connection.on_change(self.note)

    def note(self, health: rdmaconnect.Health) -> None:
        self.append(health.state)
        self.words.append(health.why)


def until(condition: Any, seconds: float = PATIENCE_S) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def proxied(qp_type: str = "RC", **options: Any) -> Iterator[tuple[Any, Any, Proxy, rdmaconnect.Listener]]:
    """A connection whose side channel goes through a proxy: connector's end, listener's end, proxy, listener."""
    with rdmaconnect.listen("127.0.0.1:0", **options) as listener, ThreadPoolExecutor(1) as threads:
        proxy = Proxy(listener.port)
        there = threads.submit(listener.accept, deadline_s=PATIENCE_S)
        try:
            with (
                rdmaconnect.connect(
                    f"127.0.0.1:{proxy.port}", qp_type=qp_type, deadline_s=PATIENCE_S, **options
                ) as here,
                there.result(PATIENCE_S) as accepted,
            ):
                yield here, accepted, proxy, listener
        finally:
            proxy.close()


def talk(here: Any, there: Any) -> None:
    """Data goes both ways."""
    here.send(b"to")
    assert there.recv(deadline_s=PATIENCE_S) == b"to"
    there.send(b"fro")
    assert here.recv(deadline_s=PATIENCE_S) == b"fro"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of the exchange's clock are short, but for those that something real takes."""
    monkeypatch.setattr("rdmaconnect.exchange.alive.TICK_S", 0.1)
    monkeypatch.setattr("rdmaconnect.protocol.health.DOUBT_S", 7.0)
    monkeypatch.setattr("rdmaconnect.protocol.health.REDIAL_S", 14.0)
    monkeypatch.setattr("rdmaconnect.protocol.health.ANSWER_S", 14.0)


@TYPES
@KEYS
def test_a_reset_side_channel_is_dialled_again_while_the_data_goes_on(
    software: Software, qp_type: str, options: dict[str, Any]
) -> None:
    with proxied(qp_type, **options) as (here, there, proxy, _):
        seen = Seen(here), Seen(there)
        for number in range(1, 6):
            proxy.reset()
            talk(here, there)
            assert until(lambda n=number: proxy.taken > n and here.health.state is there.health.state is ALIVE)
            talk(here, there)
        # each time, but where the next one comes before the last was told
        assert set(seen[0]) == {SUSPECT, ALIVE}
        assert set(seen[1]) <= {SUSPECT, ALIVE}
        assert (here.lost, there.lost) == (None, None)


def test_it_is_dialled_from_the_network_namespace_of_its_connect(
    software: Software, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[str] = []

    def sockets(address: Any, count: int) -> list[Any]:
        makers.append(threading.current_thread().name)
        return dial.sockets(address, count)

    monkeypatch.setattr(redial, "sockets", sockets)
    for where in (lambda: 1, namespace):  # the service thread is in another one, and in the same
        monkeypatch.setattr(redial, "namespace", where)
        with proxied() as (here, there, proxy, _):
            proxy.reset()
            assert until(lambda: proxy.taken > 1 and here.health.state is there.health.state is ALIVE)
    assert [name.partition("-")[2] for name in makers] == ["worker", "exchange"]


@TYPES
def test_a_good_bye_is_heard_over_the_new_side_channel(software: Software, qp_type: str) -> None:
    with proxied(qp_type) as (here, there, proxy, _):
        seen = Seen(here)
        proxy.reset()
        assert until(lambda: seen[-1:] == [ALIVE])
        here.close()
        with pytest.raises(rdmaconnect.PeerClosed, match="the peer closed the connection"):
            there.recv(deadline_s=PATIENCE_S)


@TYPES
@pytest.mark.parametrize("of_connector", [True, False], ids=["connector", "listener"])
def test_a_side_channel_that_is_deaf_one_way_is_made_anew(
    software: Software, quick: None, qp_type: str, of_connector: bool
) -> None:
    with proxied(qp_type) as (here, there, proxy, _):
        seen = Seen(here), Seen(there)
        proxy.cut(of_connector)
        assert until(lambda: proxy.taken > 1), (seen[0].words, seen[1].words, here.health, there.health)
        assert until(lambda: all(one[-1:] in ([], [ALIVE]) for one in seen))
        talk(here, there)
        time.sleep(2)  # 20 s of the exchange
        assert until(lambda: here.health.state is there.health.state is ALIVE), seen
        assert DEAD not in (*seen[0], *seen[1])


def test_where_nobody_listens_any_more_the_data_path_tells(software: Software) -> None:
    """The proxy refuses as a host does whose listener is gone; the device of the peer answers all the same."""
    with proxied() as (here, there, proxy, _):
        seen = Seen(here)
        proxy.close()
        assert until(lambda: any("the data path answers" in words for words in seen.words)), seen.words
        time.sleep(2.5)
        assert here.health.state is there.health.state is SUSPECT
        assert "has refused for 0.5 s" in here.health.why
        assert "is not back within 0.7 s" in there.health.why
        talk(here, there)
        assert (here.lost, there.lost) == (None, None)


@pytest.mark.parametrize("qp_type", ["UC", "UD"])
@pytest.mark.parametrize("in_order", [False, True])
def test_where_the_data_path_cannot_tell_two_refusals_mean_that_it_is_gone(
    software: Software, in_order: bool, qp_type: str
) -> None:
    with proxied(qp_type) as (here, there, proxy, _), ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(end.recv, deadline_s=PATIENCE_S) for end in (here, there)]
        time.sleep(0.1)
        began = time.monotonic()
        if in_order:
            proxy.end()
        else:
            proxy.close()
        errors = [one.exception(PATIENCE_S) for one in waiting]
        assert 0.7 < time.monotonic() - began < 3
        assert [type(error) for error in errors] == [rdmaconnect.PeerClosed] * 2
        assert f"has refused for {APART_SILENT_S if in_order else APART_S:g} s" in str(errors[0])
        assert "is not back within" in str(errors[1])


@TYPES
def test_a_closed_listener_leaves_its_connections_their_data_path(
    software: Software, quick: None, qp_type: str
) -> None:
    with proxied(qp_type) as (here, there, proxy, listener):
        listener.close()
        assert until(lambda: here._end.conversation.liveness.evidence.deaf)
        proxy.reset()
        end = time.monotonic() + 2  # 20 s of the exchange
        while time.monotonic() < end:
            talk(here, there)
        assert here.health.state is there.health.state is SUSPECT
        assert (here.lost, there.lost) == (None, None)


def test_another_listener_of_the_process_on_that_address_takes_it_up(software: Software) -> None:
    with proxied() as (here, there, proxy, listener):
        port = listener.port
        listener.close()
        with rdmaconnect.listen(f"127.0.0.1:{port}"):
            seen = Seen(here), Seen(there)
            proxy.reset()
            # the listener's end may be dialled again before it hears that it has to be
            assert until(lambda: seen[0][-1:] == [ALIVE] and seen[1][-1:] in ([], [ALIVE])), seen
            talk(here, there)


def test_who_listens_there_and_does_not_know_it_ends_it_only_with_the_data_path(software: Software) -> None:
    with proxied("UD") as (here, _, proxy, _):
        here._end.conversation.liveness._redial._resume = Resume(bytes(16), bytes(16))
        proxy.reset()
        with pytest.raises(rdmaconnect.PeerClosed, match="does not know the connection"):
            here.recv(deadline_s=PATIENCE_S)


# ---- what a connection's holder is told


def test_health_is_told_and_shown(software: Software) -> None:
    with connected() as (here, there):
        assert here.health.state is ALIVE
        assert str(here.health) == "alive"
        seen, other = Seen(here), Seen(here)
        failing = here.on_change(lambda health: 1 / 0)
        failing()
        remove = here.on_change(other.note)
        remove()
        there.close()
        assert until(lambda: seen == [DEAD])
        assert other == [DEAD]
        assert here.health.state is DEAD
        assert here.health.why == "the peer closed the connection (close)."
        assert 0 <= time.monotonic() - here.health.since < PATIENCE_S
        here.close()
        assert here.health.why == "this side was closed."
        assert until(lambda: seen.words[-1] == "this side was closed.")


def test_who_is_connected_anew_is_alive_again(software: Software) -> None:
    with connected() as (here, there), ThreadPoolExecutor(1) as threads:
        seen = Seen(here)
        again = threads.submit(there.reconnect, deadline_s=PATIENCE_S)
        here.reconnect(deadline_s=PATIENCE_S)
        again.result(PATIENCE_S)
        assert until(lambda: seen[-1:] == [ALIVE])
        talk(here, there)


def test_changes_are_iterated_over(software: Software) -> None:
    async def watch() -> list[str]:
        async with await rdmaconnect.alisten("127.0.0.1:0") as listener:
            accepted = asyncio.create_task(listener.accept())
            here = await rdmaconnect.aconnect(listener.url)
            there = await accepted
            seen: list[str] = []

            async def note() -> None:
                async for health in here.changes():
                    seen.append(str(health))  # noqa: PERF401 - others look meanwhile

            noting = asyncio.create_task(note())
            await asyncio.sleep(0.05)
            await there.close()
            while not seen:
                await asyncio.sleep(0.01)
            await here.close()
            await asyncio.wait_for(noting, PATIENCE_S)
            return seen

    assert asyncio.run(watch()) == ["dead: the peer closed the connection (close).", "dead: this side was closed."]
