"""Two hosts with devices in software, a listener on one of them, and a tap before it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from exchange_ends import channels, until
from software import Call, Device, Hook, Port, Software
from software.gid import raw_gid
from tap import Tap, tapped

import rdmaconnect
from rdmaconnect.abi import QpState
from rdmaconnect.agreement.endpoint import Gid
from rdmaconnect.errors import RdmaConnectError
from rdmaconnect.objects import context as device
from rdmaconnect.protocol.messages import Hello

PATIENCE_S = 10.0
ONE, TWO = ("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.1.2")
CROSS = [("10.0.0.1", "10.0.1.2"), ("10.0.1.1", "10.0.0.2")]


class World:
    """Two hosts' devices in one process, a listener on one of them, and a tap before it."""

    def __init__(self, software: Software, stack: ExitStack) -> None:
        self.software, self._stack = software, stack
        self.threads = stack.enter_context(ThreadPoolExecutor(8))
        self.listener: rdmaconnect.Listener
        self.tap: Tap

    def listen(self, **options: Any) -> None:
        self.listener = self._stack.enter_context(rdmaconnect.listen("127.0.0.1:0", **{"device": "there"} | options))
        self.tap = self._stack.enter_context(tapped(self.listener.url))

    def connect(self, **options: Any) -> Any:
        given = {"device": "here", "probe": False, "deadline_s": PATIENCE_S}
        count = options.pop("count", None)
        if count is not None:
            return rdmaconnect.connect_many(self.tap.url, count, **given | options)
        return rdmaconnect.connect(self.tap.url, **given | options)

    def both(self, theirs: dict[str, Any] | None = None, **mine: Any) -> tuple[Any, Any]:
        """Connect and accept; both ends are closed in the end. With ``count`` the first is a list of so many."""
        self.listen(**theirs or {})
        here = self.connect(**mine)
        there = self.listener.accept(deadline_s=PATIENCE_S)
        for end in (*(here if isinstance(here, list) else [here]), there):
            self._stack.enter_context(end)
        return here, there

    def fails(
        self, error: type[Exception] = RdmaConnectError, theirs: dict[str, Any] | None = None, **mine: Any
    ) -> Any:
        """Connect in vain; the error."""
        self.listen(**theirs or {})
        with pytest.raises(error) as caught:
            self.connect(**mine)
        return caught.value

    def targets(self) -> list[tuple[str, str] | None]:
        """The pair of GIDs that each hello wanted."""
        return [
            None if hello.target is None else tuple(  # type: ignore[misc]
                str(Gid(key.raw).address) for key in (hello.target.connector_gid, hello.target.listener_gid) if key
            )
            for hello in self.hellos
        ]  # fmt: skip

    @property
    def hellos(self) -> list[Any]:
        return self.tap.of(Hello)

    def refuse(self, side: str, *pairs: tuple[str, str], number: int = errno.ETIMEDOUT, delay: float = 0.0) -> Hook:
        """RTR fails on one side from one GID to another; for every pair if none is given."""

        def hits(call: Call) -> bool:
            device = call["qp"].context.device
            if device.name != side:
                return False
            port = device.ports[call["attr"].ah_attr.port_num - 1]
            local = port.slots()[call["attr"].ah_attr.grh.sgid_index][0]
            return not pairs or any((local, call.dgid) == (raw_gid(a), raw_gid(b)) for a, b in pairs)

        return self.software.on("ibv_modify_qp", to=QpState.RTR, where=hits, fail=number, delay=delay)


@pytest.fixture
def world() -> Iterator[World]:
    """``here`` has two addresses that can reach one of ``there`` each, and one that cannot."""
    here = Device("here", [Port(gids=[None, "10.0.0.1", "10.0.1.1", "fe80::1"])])
    there = Device("there", [Port(gids=[None] * 5 + ["10.0.0.2", "10.0.1.2"])])
    with Software([here, there]) as software:
        try:
            with ExitStack() as stack:
                yield World(software, stack)
            until(lambda: channels() == 0 and not software.left())
            assert software.problems() == []
        finally:
            settle(software)


def settle(software: Software) -> None:
    """Wait for what goes on in the background, and close what a failed test left: it must not meet the next device."""
    with suppress(AssertionError):
        until(lambda: channels() == 0 and not software.left(), 5)
    for context in list(device._opened.values()):
        with suppress(Exception):
            context._uses = 1
            context.close()


def pair_of(connection: Any) -> tuple[str, str]:
    path = connection.path
    return str(path.local_gid.gid.address), str(path.remote_gid.gid.address)
