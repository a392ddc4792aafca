"""Events of rdma_cm in any order, functions that fail, and a device that goes, at each step of a connection's life."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from software import RdmaCm, Software
from software.rdmacm import Id

import rdmaconnect
from rdmaconnect.abi import Fails
from rdmaconnect.abi.rdma_cma import CM_PROTOTYPES, CmEventType

from .campaign import Campaign, aside, scaled, until
from .puppets import param

E = CmEventType
URL = "rdma://127.0.0.1:7174"
#: seconds that each call of a life has: more than what is asked again in the background takes
PATIENCE_S = 1.0
#: what each function may fail with; those of the rest
ERRNOS = {
    "rdma_create_event_channel": (errno.ENODEV, errno.ENOENT, errno.EACCES, errno.EMFILE),
    "rdma_bind_addr": (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV),
    "rdma_resolve_addr": (errno.ENODEV, errno.ENETUNREACH, errno.EADDRNOTAVAIL),
    "rdma_get_cm_event": (errno.ENOMEM, errno.EINTR, errno.EFAULT),
    "rdma_destroy_id": (errno.EINVAL, errno.EBUSY, errno.EIO),
    "rdma_disconnect": (errno.EINVAL, errno.ENOTCONN),
}
REST = (errno.EINVAL, errno.ENOMEM, errno.ENODEV, errno.EIO)
#: to acknowledge an event fails for no event alone
FUNCTIONS = [
    name for name, one in CM_PROTOTYPES.items() if one.fails is not Fails.NEVER and name != "rdma_ack_cm_event"
]


class Life:
    """A listener, a connector and an acceptor, and some data: each call is counted, whatever comes of it."""

    def __init__(self, counted: Campaign) -> None:
        self.counted = counted

    def call(self, what: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A call that has its time."""
        return self.counted.call(what, function, *args, deadline_s=PATIENCE_S, within_s=PATIENCE_S, **named)

    def close(self, what: str, thing: Any) -> None:
        """Close it, and once more what was refused."""
        if thing is not None:
            self.counted.call(f"close a {what}", thing.close, within_s=0.5)
            self.counted.call(f"close a {what} again", thing.close, within_s=0.5)

    def live(self) -> None:
        """All of it."""
        listener = self.counted.call("listen", rdmaconnect.listen, URL)
        if listener is None:
            return
        accepting = aside(self.call, "accept", listener.accept)
        here = self.call("connect", rdmaconnect.connect, URL, traffic_class=32)
        if here is None:  # and so nobody need be waited for
            self.close("listener", listener)
        there = accepting.result()
        if here is not None and there is not None:
            self.call("send", here.send, b"x")
            self.call("recv", there.recv)
        elif here is not None:
            self.call("recv of nobody", here.recv)
        elif there is not None:
            self.call("recv of nobody", there.recv)
        self.close("connector", here)
        if there is not None:
            self.call("recv the end", there.recv)
        self.close("connection", there)
        self.close("listener", listener)


@pytest.fixture
def life(software: Software, cm: RdmaCm, counted: Campaign) -> Life:
    return Life(counted)


def nothing_is_left(software: Software, cm: RdmaCm) -> bool:
    return until(lambda: cm.left() == {} and software.left() == {}, 10)


def test_each_function_fails_at_each_call(software: Software, cm: RdmaCm, life: Life, counted: Campaign) -> None:
    cm.fail("rdma_accept", errno.EINVAL, after=1)  # so that a request is refused
    for _ in range(2):
        life.live()
    numbers = {name: cm.calls[name] for name in FUNCTIONS}
    assert all(numbers.values()), numbers
    for function, number in numbers.items():
        for nth in range(number):
            for error in ERRNOS.get(function, REST)[: scaled(2, 9)]:
                cm.as_ever()
                cm.fail(function, error, after=nth)
                if function != "rdma_accept":
                    cm.fail("rdma_accept", errno.EINVAL, after=1)
                for _ in range(2):
                    life.live()
                counted.count("lives", 2)
                assert nothing_is_left(software, cm), (function, nth, error, cm.left(), software.left())
    cm.as_ever()
    counted.note(f"calls in two lives: {numbers}")


def where(cm: RdmaCm, told: Id, whom: str) -> list[Id]:
    """Whom an event concerns."""
    return [told] if whom == "one" else [one for one in cm.ids.values() if one.listens is (whom == "listeners")]


@pytest.mark.parametrize("whom", ["one", "listeners", "all others"])
def test_a_device_is_removed_at_every_event(
    software: Software, cm: RdmaCm, life: Life, counted: Campaign, whom: str
) -> None:
    at_events(software, cm, life, counted, lambda told: [(one, E.DEVICE_REMOVAL) for one in where(cm, told, whom)])


@pytest.mark.parametrize("kind", [kind for kind in E if kind is not E.CONNECT_REQUEST])
def test_an_event_comes_besides_at_every_event(
    software: Software, cm: RdmaCm, life: Life, counted: Campaign, kind: CmEventType
) -> None:
    at_events(software, cm, life, counted, lambda told: [(told, kind)] * 2)


def at_events(
    software: Software,
    cm: RdmaCm,
    life: Life,
    counted: Campaign,
    besides: Callable[[Id], list[tuple[Id, CmEventType]]],
) -> None:
    """One life for each event of a life, in which others come just before it; and as many just after it."""
    seen = 0
    at = -1

    def tell(told: Id, kind: CmEventType) -> None:
        nonlocal seen
        seen += 1
        if seen - 1 == at:
            for one, which in besides(told):
                cm.tell(one, which, chance.choice((0, 0, -errno.ETIMEDOUT, -1, 28, 5000)), param())

    chance = random.Random(1)
    cm.on_tell = tell
    life.live()
    number = seen
    assert number >= 7
    for at in range(number + 2):
        seen = 0
        life.live()
        counted.count("lives")
        assert nothing_is_left(software, cm), (at, cm.left(), software.left())
    cm.on_tell = None
    life.live()


def test_any_events_in_any_order(software: Software, cm: RdmaCm, life: Life, counted: Campaign) -> None:
    chance, over = random.Random(2), threading.Event()
    kinds = [*(kind for kind in E if kind is not E.CONNECT_REQUEST), CmEventType(77), CmEventType(2**31)]

    def disturb() -> None:
        while not over.wait(chance.choice((0, 0.001, 0.005))):
            with cm.lock:
                ids = list(cm.ids.values())
                if not ids:
                    continue
                one, kind = chance.choice(ids), chance.choice(kinds)
                status = chance.choice((0, 0, -1, 28, 8, -errno.ENODEV, chance.randrange(-(2**31), 2**31)))
                data = chance.randbytes(chance.randrange(197))
                request = None
                if chance.random() < 0.2:
                    kind, request = E.CONNECT_REQUEST, Id(one.channel)
                    cm.ids[request.address] = request
                for _ in range(chance.choice((1, 1, 2, 5))):
                    cm.tell(one, kind, status, param(data), request)
                    counted.count("events")
                    if request is not None:
                        break

    disturbing = aside(disturb)
    for _ in range(scaled(25, 3000)):
        life.live()
        counted.count("lives")
        assert nothing_is_left(software, cm), (cm.left(), software.left(), cm.errors)
    over.set()
    disturbing.result()
    life.live()
    assert nothing_is_left(software, cm)
