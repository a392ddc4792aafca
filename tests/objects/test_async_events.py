"""Asynchronous events: each type is of a kind, is acknowledged, and is found back to its object."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from ctypes import pointer
from typing import Any

import pytest

from rdmaconnect import abi, verbs
from rdmaconnect.abi import EventType
from rdmaconnect.errors import StateError, VerbsError
from rdmaconnect.objects.async_events import KINDS, AsyncEvent, AsyncEvents, EventKind
from rdmaconnect.objects.owned import Owned
from rdmaconnect.runtime.deadline import Deadline


class Thing(Owned):
    """Something with a C struct."""

    def __init__(self, pointer: Any, name: str, parents: tuple[Owned, ...] = ()) -> None:
        super().__init__(lambda: pointer, name, parents)

    def _release(self, pointer: Any) -> None:
        pass


class Device:
    """Events that the library will hand out, and those that were acknowledged."""

    def __init__(self) -> None:
        fd, self.writer = os.pipe()
        self.struct = abi.ibv_context(async_fd=fd)
        self.context = Thing(pointer(self.struct), "fake0")
        self.waiting: list[abi.ibv_async_event] = []
        self.acked: list[int] = []
        self.made: list[Thing] = []

    def make(self, struct: Any, name: str, *parents: Owned) -> Thing:
        self.made.append(Thing(pointer(struct), name, parents or (self.context,)))
        return self.made[-1]

    def happens(self, event_type: int, **element: Any) -> None:
        event = abi.ibv_async_event(event_type=event_type)
        for name, value in element.items():
            setattr(event.element, name, value)
        self.waiting.append(event)
        os.write(self.writer, b"x")

    def get(self, _: Any) -> abi.ibv_async_event | None:
        if not self.waiting:
            return None
        os.read(self.struct.async_fd, 1)
        return self.waiting.pop(0)

    def ack(self, event: abi.ibv_async_event) -> None:
        self.acked.append(event.event_type)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(verbs, "ibv_get_async_event", made.get)
    monkeypatch.setattr(verbs, "ibv_ack_async_event", made.ack)
    monkeypatch.setattr(verbs, "ibv_event_type_str", lambda number: f"event {int(number)}")
    yield made
    made.context.close()
    for fd in (made.struct.async_fd, made.writer):
        os.close(fd)


@pytest.fixture
def events(device: Device) -> AsyncEvents:
    return AsyncEvents(device.context)


def test_every_type_has_a_kind_and_its_member_of_the_union() -> None:
    assert set(KINDS) == set(EventType)
    members = {name for name, _ in dict(abi.ibv_async_event._fields_)["element"]._fields_}
    kinds = {kind.name.lower() for kind in EventKind} - {"device", "port", "unknown"}
    assert members == kinds | {"port_num"}


@pytest.mark.parametrize("event_type", EventType, ids=str)
def test_each_type_is_decoded_and_acknowledged(device: Device, events: AsyncEvents, event_type: EventType) -> None:
    kind = KINDS[event_type]
    name = kind.name.lower()
    if kind in (EventKind.DEVICE, EventKind.PORT):
        device.happens(event_type, port_num=3)
        element = None
    else:
        struct = getattr(abi, f"ibv_{name}")()
        element = device.make(struct, f"{kind.value} of fake0")
        device.happens(event_type, **{name: pointer(struct)})
    port_num = 3 if kind is EventKind.PORT else None
    expected = AsyncEvent("fake0", event_type, kind, element, port_num, f"event {int(event_type)}")
    assert events.wait(Deadline(0)) == expected
    assert device.acked == [event_type]
    assert events.take() is None


def test_an_object_below_others_is_found(device: Device, events: AsyncEvents) -> None:
    structs = abi.ibv_pd(), abi.ibv_cq(), abi.ibv_qp()
    pd, cq = device.make(structs[0], "PD"), device.make(structs[1], "CQ")
    qp = device.make(structs[2], "QP", pd, cq)
    device.happens(EventType.QP_FATAL, qp=pointer(structs[2]))
    assert events.wait(Deadline(0)).element is qp
    qp.close()
    device.happens(EventType.QP_FATAL, qp=pointer(structs[2]))
    event = events.wait(Deadline(0))
    assert event.element is None
    assert str(event) == "fake0: QP_FATAL (event 1)"
    assert device.acked == [EventType.QP_FATAL] * 2


def test_a_type_from_the_future_is_kept_and_acknowledged(device: Device, events: AsyncEvents) -> None:
    device.happens(99, port_num=1)
    event = events.wait(Deadline(0))
    assert (event.kind, event.element, event.port_num) == (EventKind.UNKNOWN, None, None)
    assert str(event) == "fake0: unknown (99) (event 99)"
    assert device.acked == [99]


def test_what_fails_meanwhile_is_acknowledged_all_the_same(
    device: Device, events: AsyncEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> str:
        raise VerbsError("ibv_event_type_str", 5)

    monkeypatch.setattr(verbs, "ibv_event_type_str", fail)
    device.happens(EventType.PORT_ERR, port_num=1)
    with pytest.raises(VerbsError):
        events.take()
    assert device.acked == [EventType.PORT_ERR]


def test_a_task_gets_one_and_closing_the_device_ends_the_wait(device: Device, events: AsyncEvents) -> None:
    async def main() -> list[Any]:
        tasks = [asyncio.create_task(events.wait_async(Deadline(10))) for _ in range(2)]
        await asyncio.sleep(0.01)
        device.happens(EventType.PORT_ACTIVE, port_num=1)
        await asyncio.sleep(0.05)
        device.context.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(main())
    assert [event.port_num for event in got if isinstance(event, AsyncEvent)] == [1]
    assert [str(e) for e in got if isinstance(e, StateError)] == ["async events of fake0 is closed."]
