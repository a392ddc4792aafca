"""Hosts without a device, on a network without sockets: the stories run as they are, in any order that is asked for."""

from __future__ import annotations

import importlib
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from rdmaconnect.driver import Call, Story, Wait
from rdmaconnect.reception import Reception
from samples import end

from rdmaconnect import deadline, reception, ways
from rdmaconnect.abi import QpType
from rdmaconnect.device import Port
from rdmaconnect.endpoint import Options, RemoteRegion
from rdmaconnect.errors import PeerClosed
from rdmaconnect.handshake import Handshake
from rdmaconnect.messages import Message
from rdmaconnect.path import Path, narrow
from rdmaconnect.terms import Terms, make_terms
from rdmaconnect.wire import decode

#: the package offers functions of the same names
connect, meet = (importlib.import_module(f"rdmaconnect.{name}") for name in ("connect", "meet"))


def terms(qp_type: str = "RC", **options: Any) -> Terms:
    given = {"probe": False} | options
    return make_terms(qp_type, given, None, b"", listens=False, secret=None, key=None, peer_key=None)


# ---- a host


class Lane:
    """A queue pair that only remembers where it was moved."""

    def __init__(self, host: Host, prepared: Prepared, qp_num: int) -> None:
        self.host, self.is_ud, self.state = host, prepared.qp_type is QpType.UD, "INIT"
        psn = host.chance.getrandbits(24)
        self.endpoint = end(prepared.address, qp_type=prepared.qp_type, qp_num=qp_num, psn=psn)

    def to_rtr(self, path: Path) -> None:
        assert self.state == "INIT"
        self.host.to_rtr(path)
        self.state, self.path = "RTR", path

    def to_rts(self, path: Path) -> None:
        assert self.state == "RTR"
        assert path is self.path
        self.state = "RTS"

    def restart(self) -> None:
        self.state = "INIT"


class Prepared:
    """In place of the real one: the same doors, and no device."""

    def __init__(
        self,
        context: Any,
        port: Port,
        qp_type: QpType,
        options: Options,
        regions: Any = None,
        count: int = 1,
        gid: bytes | None = None,
    ) -> None:
        host: Host = context.host
        self.port, self.qp_type, self.options, self.sizes = port, qp_type, options, options.sizes(count)
        self.address = narrow(port.address(context.query_device(), options), gid)
        self.engine = SimpleNamespace(pd=None, lock=threading.RLock(), closed=False)
        self.regions: dict[str, Any] = {}
        self.lanes = [Lane(host, self, len(host.prepared) * 16 + i + 1) for i in range(count)]
        self._users = 0
        host.prepared.append(self)
        host.delay()

    @property
    def ends(self) -> tuple[Any, ...]:
        return tuple(lane.endpoint for lane in self.lanes)

    def offered(self) -> dict[str, RemoteRegion]:
        return {}

    def lend(self) -> None:
        assert not self.engine.closed
        self._users += 1

    def close(self) -> None:
        self._users -= 1
        if self._users <= 0:
            assert not self.engine.closed, "freed twice"
            self.engine.closed = True


class Host:
    """One side's ports, and what happens when it moves a queue pair to RTR."""

    def __init__(self, *ports: Port) -> None:
        self.ports, self.prepared, self.chance = list(ports), list[Prepared](), random.Random(1)
        self.to_rtr: Callable[[Path], None] = lambda path: None
        self.delay: Callable[[], None] = lambda: None

    def context(self, name: str) -> Any:
        """``open_device``: to be used in a with statement, or as it is."""
        assert any(port.device == name for port in self.ports)
        limits = SimpleNamespace(max_qp_rd_atom=16, max_qp_init_rd_atom=16)
        return _Context(host=self, query_device=lambda: limits)

    def rank(self, options: Options, host: str | None = None) -> list[Port]:
        return [port for port in self.ports if options.device in (None, port.device)]

    def all_freed(self) -> bool:
        return all(prepared.engine.closed for prepared in self.prepared)


class _Context(SimpleNamespace):
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Front:
    """In place of a connection."""

    def __init__(self, prepared: Any, lane: Any, joint: Any) -> None:
        prepared.lend()
        joint.wire.lend()
        self._prepared, self._lane, self._wire, self.path, self.peer = (
            prepared, lane, joint.wire, joint.path, joint.peer,
        )  # fmt: skip
        self.closed, self.connect_s, self._again = False, 0.0, None

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._wire.close()
            self._prepared.close()


# ---- the network


class Channel:
    """A connector's side: frames wait until they are carried."""

    def __init__(self, net: Net, url: str) -> None:
        self.net, self.url = net, url
        self.out, self.back, self.inbox = deque[bytes](), deque[bytes](), deque[bytes]()
        self.closed = self.settled = False
        #: what is said again to a listener that started anew
        self.last: bytes | None = None
        net.channels.append(self)

    def filenos(self) -> list[int]:
        return []

    def wait(self, deadline: Any) -> Any:
        return Wait((), deadline, 0)

    def settle(self) -> None:
        self.settled = True

    def seen(self) -> str:
        return f"{self.url}: seen"

    def send(self, frame: bytes) -> None:
        if self.closed:
            return
        self.net.said.append(decode(frame))
        self.out.append(frame)
        self.last = frame

    def recv(self) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.closed = True


class Line:
    """A listener's side of one channel; the same rules as the real one's."""

    def __init__(self, service: Service, channel: Channel) -> None:
        self.service, self.channel, self.address = service, channel, "127.0.0.1"
        self.inbox = deque[bytes]()
        self.kept = False
        service.lines[channel] = self
        service.strangers.append(self)

    def filenos(self) -> list[int]:
        return []

    def send(self, frame: bytes) -> None:
        if self.service.killed:
            return
        if self.channel.closed:
            raise PeerClosed("send: it closed its side.")
        self.service.net.said.append(decode(frame))
        self.channel.back.append(frame)

    def recv(self) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def keep(self) -> None:
        self.kept = True

    def close(self) -> None:
        if self.service.lines.get(self.channel) is self:
            del self.service.lines[self.channel]
            if self.inbox:
                Line(self.service, self.channel).inbox.extend(self.inbox)
                self.inbox.clear()


class Service:
    """A listener's socket."""

    def __init__(self, net: Net, url: str) -> None:
        assert url not in net.services
        self.net, self.url = net, url
        self.lines: dict[Channel, Line] = {}
        self.strangers: deque[Line] = deque()
        self.closed = self.killed = False
        net.services[url] = self

    def filenos(self) -> list[int]:
        return []

    def accept(self) -> Line | None:
        return self.strangers.popleft() if self.strangers else None

    def close(self) -> None:
        self.closed = True


class Net:
    """All channels and services, and what was said, in order."""

    def __init__(self, seed: int = 0) -> None:
        self.channels, self.services, self.said = list[Channel](), dict[str, Service](), list[Message]()
        self.chance, self.now = random.Random(seed), 0.0

    def carry(self) -> bool:
        """Carry one frame of one channel, chosen by chance; whether there was one. Each costs 10 ms."""
        self.now += 0.01
        ways = [(c, True) for c in self.channels if c.out and c.url in self.services]
        ways += [(c, False) for c in self.channels if c.back and not c.closed]
        if not ways:
            return False
        channel, there = self.chance.choice(ways)
        if there:
            service = self.services[channel.url]
            line = service.lines.get(channel) or Line(service, channel)
            line.inbox.append(channel.out.popleft())
        else:
            channel.inbox.append(channel.back.popleft())
        return True

    def kill(self, url: str, peer: str) -> None:
        """The process that listens on ``url`` and calls ``peer`` is gone: what it had not sent is lost."""
        for channel in self.channels:
            if channel.url == peer:
                channel.closed = True
                channel.out.clear()
        service = self.services.pop(url, None)
        if service is not None:
            service.killed = True
        self.reconnect(url)

    def reconnect(self, url: str) -> None:
        """ZeroMQ comes back to a listener that starts anew, and says what it said last."""
        for channel in self.channels:
            if channel.url == url and not channel.closed and not channel.settled:
                channel.back.clear()
                channel.out.clear()
                channel.out.extend([] if channel.last is None else [channel.last])

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if type(message) is kind]


class Teller:
    """Tells one story, a step at a time."""

    def __init__(self, story: Story[Any]) -> None:
        self.story, self.done = story, False
        self.value: Any = None
        self.error: BaseException | None = None
        self._request: Any = None

    def step(self) -> None:
        try:
            if self._request is None:
                self._request = next(self.story)
            elif isinstance(self._request, Call):
                try:
                    answer = self._request.function()
                except Exception as e:  # noqa: BLE001  it is the story's
                    self._request = self.story.throw(e)
                else:
                    self._request = self.story.send(answer)
            else:
                self._request = self.story.send(set())
        except StopIteration as end:
            self.done, self.value = True, end.value
        except Exception as e:  # noqa: BLE001  it is what came out
            self.done, self.error = True, e


def tell(net: Net, *tellers: Teller, most: int = 50_000) -> None:
    """Take all stories to their ends, in an order of chance."""
    for _ in range(most):
        waiting = [teller for teller in tellers if not teller.done]
        if not waiting:
            return
        at = net.chance.randrange(len(waiting) + 2)
        if at < len(waiting):
            waiting[at].step()
        else:
            net.carry()
    raise AssertionError(f"no end after {most} steps: {[type(m).__name__ for m in net.said][-20:]}")


def install(patch: pytest.MonkeyPatch, net: Callable[[], Net], here: Host, there: Host) -> None:
    """Put hosts and network in the place of the real ones: ``here`` connects, ``there`` listens."""
    patch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: net().now))
    for module in (ways, reception, meet):
        host = there if module is reception else here
        patch.setattr(module, "Prepared", Prepared)
        if module is not meet:
            patch.setattr(module, "rank_ports", host.rank)
        patch.setattr(module, "open_device", host.context)
    patch.setattr(connect, "Prepared", Prepared)
    for module in (connect, meet):
        patch.setattr(module, "Channel", lambda url, max_frame, keys=None: Channel(net(), url))
        # ids that are the same in every run
        patch.setattr(module, "secrets", SimpleNamespace(token_bytes=lambda size: net().chance.randbytes(size)))
    for module in (reception, meet):
        patch.setattr(module, "Service", lambda url, max_frame, keys=None: Service(net(), url))


def joined(front: Front) -> Handshake:
    """The conversation of a connection."""
    made: Handshake = front._wire.handshake
    return made


class _Later(Future[None]):
    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__()
        self._job: Callable[[], None] | None = job
        self._looks = 0

    def done(self) -> bool:
        self._looks += 1
        if self._job is not None and self._looks > 2:
            job, self._job = self._job, None
            try:
                job()
            except BaseException as e:  # noqa: BLE001  it is for whoever asks for the result
                self.set_exception(e)
            else:
                self.set_result(None)
        return self._job is None


class FakeListener(Reception[Any]):
    """A listener that makes fronts without a device."""

    _front = Front  # type: ignore[assignment]

    def _begin(self, job: Callable[[], None]) -> Future[None]:
        """It is done when somebody looks a second time."""
        return _Later(job)
