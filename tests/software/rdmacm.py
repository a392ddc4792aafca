"""librdmacm in software, beside the device: what the kernel's connection manager does between ids of this process.

with RdmaCm(software) as cm:
    cm.say("rdma_resolve_addr", CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)  # instead of what would follow
    cm.silent("rdma_connect")  # nothing follows
    cm.fail("rdma_listen", errno.EADDRINUSE, after=1)  # not the next call, but the one after it
    cm.play("rdma_connect", ...)  # what a program beside does, which keeps to nothing
    ...
    assert cm.left() == {} and cm.errors == []
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import struct
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rdmaconnect import rdmacm
from rdmaconnect.abi import Fails, QpAttrMask, QpState, ibv_context, ibv_qp_attr
from rdmaconnect.abi.rdma_cma import (
    CM_PROTOTYPES,
    CmEventType,
    rdma_cm_event,
    rdma_cm_id,
    rdma_conn_param,
    rdma_event_channel,
)

from .arena import Refused
from .calls import Exported, failure, raw_type
from .gid import raw_gid

_E = CmEventType
#: bytes of private data that come with each, filled up with zeros
_PADDED = {_E.CONNECT_REQUEST: 56, _E.CONNECT_RESPONSE: 196, _E.REJECTED: 148}
#: what a queue pair of iWARP has from INIT on: its access flags, P_Key index, port
_KEPT_BITS = int(QpAttrMask.ACCESS_FLAGS | QpAttrMask.PKEY_INDEX | QpAttrMask.PORT | QpAttrMask.CUR_STATE)
#: seconds that a destroy waits for events to be acknowledged
PATIENCE_S = 5.0
#: the ctypes functions, which must live as long as the process
_kept: list[Any] = []


class Channel:
    """An event channel."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self.struct = rdma_event_channel(fd=self.fd)
        self.events: deque[Event] = deque()


class Event:
    """An event that nobody has taken, or nobody has acknowledged yet."""

    def __init__(
        self, about: Id, kind: int, status: int, param: rdma_conn_param | None, request: Id | None, padded: bool
    ) -> None:
        self.about, self.request, self.kind, self.status = about, request, CmEventType(kind), status
        self.struct = rdma_cm_event(event=int(kind), status=status)
        self.struct.id = ctypes.pointer((request or about).struct)
        if request is not None:
            self.struct.listen_id = ctypes.pointer(about.struct)
        if param is not None:
            self.struct.param.conn = param
            said = ctypes.string_at(param.private_data, param.private_data_len) if param.private_data_len else b""
            size = max(_PADDED.get(self.kind, 0) if padded else 0, len(said))
            self.data = ctypes.create_string_buffer(said.ljust(size, b"\0"), max(size, 1))
            self.struct.param.conn.private_data = ctypes.addressof(self.data)
            self.struct.param.conn.private_data_len = size


class Id:
    """An identifier."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.struct = rdma_cm_id(channel=ctypes.pointer(channel.struct), ps=0x106, qp_type=2)
        self.port = self.unacknowledged = self.backlog = 0
        #: of one that listens: requests for which its backlog has no room yet, which who asks repeats
        self.repeated: deque[tuple[Id, rdma_conn_param]] = deque()
        self.listens = self.joined = self.asked = False
        self.peer: Id | None = None
        self.param: rdma_conn_param | None = None
        self.psn = 0
        self.options: dict[int, bytes] = {}

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class RdmaCm:
    """librdmacm, from ``__enter__`` to ``__exit__``, which asserts that nothing is left of it.

    Attributes:
        calls: how often each function was called.
        errors: what no program may do and one did.
        ids: address -> what is alive.
        padded: whether private data is filled up with zeros, as on a wire; else a test says of how many bytes it is.
        on_tell: called with each event's identifier and kind just before it goes into its channel, if it is set.
    """

    def __init__(self, software: Any) -> None:
        self.software = software
        self.lock = threading.RLock()
        self.acknowledged = threading.Condition(self.lock)
        self.calls: Counter[str] = Counter()
        self.errors: list[str] = []
        self.ids: dict[int, Id] = {}
        self.channels: dict[int, Channel] = {}
        self.taken: dict[int, Event] = {}
        self.padded = True
        self.on_tell: Callable[[Id, CmEventType], None] | None = None
        self._script: dict[str, deque[Callable[[Id | None], None]]] = {}
        self._contexts: dict[str, ibv_context] = {}
        self._functions: dict[str, Any] = {}

    # ---- what a test does

    def say(self, function: str, kind: CmEventType, status: int, data: bytes = b"", times: int = 1) -> None:
        """Let an event follow, instead of what would, the next times that a function is called."""

        def act(cm_id: Id | None) -> None:
            assert cm_id is not None
            held = ctypes.create_string_buffer(data, len(data) or 1)
            param = rdma_conn_param(private_data=ctypes.addressof(held), private_data_len=len(data))
            self.tell(cm_id, kind, status, param)

        self._script.setdefault(function, deque()).extend([act] * times)

    def silent(self, function: str, times: int = 1) -> None:
        """Let nothing follow."""
        self._script.setdefault(function, deque()).extend([lambda cm_id: None] * times)

    def fail(
        self,
        function: str,
        number: int,
        times: int = 1,
        after: int = 0,
        do: Callable[[Id | None], object] = lambda cm_id: None,
    ) -> None:
        """Let it fail with an errno, after so many calls that go as ever; and have something done where it does."""

        def act(cm_id: Id | None) -> None:
            do(cm_id)
            raise Refused(number)

        for _ in range(after):
            self.before(function, lambda cm_id: None)
        self._script.setdefault(function, deque()).extend([act] * times)

    def as_ever(self) -> None:
        """Let each function do what it does: nothing that was scripted is due any more."""
        self._script.clear()

    def before(self, function: str, do: Callable[[Id | None], None]) -> None:
        """Have something done before the next call, which then does what it does."""

        def act(cm_id: Id | None) -> bool:
            do(cm_id)
            return True

        self._script.setdefault(function, deque()).append(act)  # type: ignore[arg-type]

    def tell(
        self,
        about: Id,
        kind: CmEventType,
        status: int = 0,
        param: rdma_conn_param | None = None,
        request: Id | None = None,
    ) -> None:
        """Put an event into the channel of an identifier."""
        with self.lock:
            if self.on_tell is not None:
                self.on_tell(about, kind)
            about.channel.events.append(Event(about, kind, status, param, request, self.padded))
            os.eventfd_write(about.channel.fd, 1)

    def play(self, function: str, *args: Any) -> bool:
        """Do what a function does, for a program that is none of ours: not counted or scripted. Whether it did."""
        with self.lock:
            try:
                getattr(self, f"_{function}")(*args)
            except Refused:
                return False
        return True

    def left(self) -> dict[str, int]:
        """What is alive."""
        found = {"ids": len(self.ids), "channels": len(self.channels), "events": len(self.taken)}
        return {kind: number for kind, number in found.items() if number}

    # ---- in place of librdmacm

    def __enter__(self) -> RdmaCm:
        rdmacm.use(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        rdmacm.use(None)
        if kind is None:
            assert (self.left(), self.errors) == ({}, [])

    def __getitem__(self, name: str) -> Any:
        if name not in self._functions:
            prototype = CM_PROTOTYPES[name]
            raw = ctypes.CFUNCTYPE(raw_type(prototype.restype), *map(raw_type, prototype.argtypes), use_errno=True)(
                partial(self._enter, name, prototype.fails)
            )
            _kept.append(raw)
            kind = ctypes.CFUNCTYPE(prototype.restype, *prototype.argtypes, use_errno=True)
            function = kind(ctypes.cast(raw, ctypes.c_void_p).value or 0)
            self._functions[name] = Exported(function, prototype.restype, prototype.argtypes)
        return self._functions[name]

    def _enter(self, name: str, fails: Fails, *args: Any) -> Any:
        try:
            with self.lock:
                self.calls[name] += 1
                script = self._script.get(name)
                if script:
                    about = self._find(args[0]) if args and args[0] in self.ids else None
                    if script.popleft()(about) is not True:  # type: ignore[func-returns-value]
                        return 0
                return getattr(self, f"_{name}")(*args) or 0
        except Refused as e:
            return failure(fails, e.errno)
        except BaseException as e:  # noqa: BLE001  nothing can be raised through C
            self.errors.append(f"{name}: {e!r}\n{traceback.format_exc()}")
            return failure(fails, errno.EIO)

    def _find(self, address: int) -> Id:
        found = self.ids.get(address)
        if found is None:
            self.errors.append(f"an identifier that is none: {address:#x}")
            raise Refused(errno.EINVAL)
        return found

    # ---- the functions

    def _rdma_create_event_channel(self) -> int:
        channel = Channel()
        self.channels[ctypes.addressof(channel.struct)] = channel
        return ctypes.addressof(channel.struct)

    def _rdma_destroy_event_channel(self, address: int) -> None:
        channel = self.channels.pop(address)
        if any(one.channel is channel for one in self.ids.values()):
            self.errors.append("a channel was destroyed that has identifiers")
        os.close(channel.fd)

    def _rdma_create_id(self, channel: int, where: int, context: int, ps: int) -> None:
        made = Id(self.channels[channel])
        self.ids[made.address] = made
        ctypes.c_void_p.from_address(where).value = made.address

    def _rdma_destroy_id(self, address: int) -> None:
        gone = self._find(address)
        self.drop(gone)
        end = self.acknowledged.wait_for(lambda: not gone.unacknowledged, PATIENCE_S)
        if not end:
            self.errors.append("an identifier was destroyed whose events are not acknowledged: that waits for ever")
        del self.ids[address]

    def drop(self, gone: Id) -> None:
        """The kernel's part: its events that nobody has taken go, and its peer hears of it."""
        for event in list(gone.channel.events):
            if event.about is gone and event.request is not None:  # nobody will take it
                self.ids.pop(event.request.address, None)
                self.drop(event.request)
        kept = [event for event in gone.channel.events if event.about is not gone and event.request is not gone]
        while len(gone.channel.events) > len(kept):
            gone.channel.events.popleft()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(gone.channel.fd)
        gone.channel.events.clear()
        gone.channel.events.extend(kept)
        gone.listens = False
        peer, gone.peer = gone.peer, None
        if peer is not None:
            peer.peer = None
            if gone.joined:
                self.tell(peer, _E.DISCONNECTED)
            elif gone.asked or peer.asked:
                self.tell(peer, _E.REJECTED, 28, rdma_conn_param())

    def _rdma_set_option(self, address: int, level: int, optname: int, value: bytes | int, length: int) -> None:
        self._find(address).options[optname] = ctypes.string_at(value, length)

    def _rdma_bind_addr(self, address: int, where: int) -> None:
        cm_id = self._find(address)
        family = ctypes.c_uint16.from_address(where).value
        raw = ctypes.string_at(where, 16 if family == socket.AF_INET else 28)
        port = struct.unpack_from("!H", raw, 2)[0]
        ports = {one.port for one in self.ids.values() if one.listens}
        cm_id.port = port or next(number for number in range(40000, 65536) if number not in ports)
        if cm_id.port in ports:
            raise Refused(errno.EADDRINUSE)
        _put(cm_id.struct.route.addr.src_storage, raw)

    def _rdma_get_src_port(self, address: int) -> int:
        return socket.htons(self._find(address).port)

    def _rdma_listen(self, address: int, backlog: int) -> None:
        cm_id = self._find(address)
        cm_id.listens, cm_id.backlog = True, backlog

    def _rdma_resolve_addr(self, address: int, source: int | None, where: int, timeout_ms: int) -> None:
        cm_id = self._find(address)
        family = ctypes.c_uint16.from_address(where).value
        raw = ctypes.string_at(where, 16 if family == socket.AF_INET else 28)
        _put(cm_id.struct.route.addr.dst_storage, raw)
        self._choose(cm_id)
        self.tell(cm_id, _E.ADDR_RESOLVED)

    def _choose(self, cm_id: Id) -> None:
        """The first device, as the route leads there."""
        listed = self.software.listed[0]
        name = listed.device.name
        if name not in self._contexts:
            self._contexts[name] = ibv_context(device=ctypes.pointer(listed.c))
        cm_id.struct.verbs = ctypes.pointer(self._contexts[name])
        cm_id.struct.port_num = 1

    def _rdma_resolve_route(self, address: int, timeout_ms: int) -> None:
        self.tell(self._find(address), _E.ROUTE_RESOLVED)

    def _rdma_connect(self, address: int, param: int) -> None:
        cm_id, said = self._find(address), _copy(param)
        raw = bytes(cm_id.struct.route.addr.dst_storage)
        port = struct.unpack_from("!H", raw, 2)[0]
        listener = next((one for one in self.ids.values() if one.listens and one.port == port), None)
        if listener is None:
            self.tell(cm_id, _E.REJECTED, 8, rdma_conn_param())
            return
        listener.repeated.append((cm_id, said))
        self._request(listener)

    def _request(self, listener: Id) -> None:
        """Tell of requests as its backlog has room: the kernel drops the others, and does not say so."""
        waiting = sum(event.kind is _E.CONNECT_REQUEST for event in listener.channel.events)
        while listener.repeated and (waiting < listener.backlog or not listener.backlog):
            cm_id, said = listener.repeated.popleft()
            if cm_id.address in self.ids:
                self._tell_of(listener, cm_id, said)
                waiting += 1

    def _tell_of(self, listener: Id, cm_id: Id, said: rdma_conn_param) -> None:
        child = Id(listener.channel)
        self.ids[child.address] = child
        child.peer, cm_id.peer, cm_id.asked = cm_id, child, True
        child.psn = cm_id.psn = secrets.randbits(24)
        child.param = said
        self._choose(child)
        _put(child.struct.route.addr.dst_storage, struct.pack("=H", socket.AF_INET) + b"\x9c\x40\x7f\x00\x00\x01")
        self.tell(listener, _E.CONNECT_REQUEST, 0, _mirrored(said), child)

    def _rdma_accept(self, address: int, param: int) -> None:
        child, said = self._find(address), _copy(param)
        peer = child.peer
        if peer is None:
            raise Refused(errno.EINVAL)
        peer.param = said
        if self.software.devices[0].iwarp:
            child.joined = peer.joined = True
            for one in (child, peer):
                self._raise(one)
                self.tell(one, _E.ESTABLISHED, 0, _mirrored(said) if one is peer else rdma_conn_param())
            return
        self.tell(peer, _E.CONNECT_RESPONSE, 0, _mirrored(said))

    def _raise(self, cm_id: Id) -> None:
        """Over iWARP the kernel takes the queue pair to RTS."""
        assert cm_id.peer is not None
        assert cm_id.peer.param is not None
        (qp,) = (one for one in self.software.objects("qp") if one.qp_num == cm_id.peer.param.qp_num)
        for state in (QpState.RTR, QpState.RTS):
            attr = ibv_qp_attr(qp_state=state, timeout=14, retry_cnt=7, rnr_retry=7)
            self._rdma_init_qp_attr(cm_id.address, ctypes.addressof(attr), 0)
            qp.modify(attr, (1 << 21) - 1 & ~_KEPT_BITS)

    def _rdma_establish(self, address: int) -> None:
        cm_id = self._find(address)
        if cm_id.peer is None:
            raise Refused(errno.EINVAL)
        cm_id.joined = cm_id.peer.joined = True
        self.tell(cm_id.peer, _E.ESTABLISHED, 0, rdma_conn_param())

    def _rdma_reject(self, address: int, data: bytes | int | None, length: int) -> None:
        child = self._find(address)
        peer, child.peer = child.peer, None
        if peer is None:
            raise Refused(errno.EINVAL)
        peer.peer = None
        raw = ctypes.create_string_buffer(ctypes.string_at(data, length) if data else b"", max(length, 1))
        self.tell(peer, _E.REJECTED, 28, rdma_conn_param(private_data=ctypes.addressof(raw), private_data_len=length))

    def _rdma_disconnect(self, address: int) -> None:
        cm_id = self._find(address)
        if cm_id.peer is None:
            raise Refused(errno.EINVAL)
        for one in (cm_id, cm_id.peer):
            self.tell(one, _E.DISCONNECTED)
        cm_id.peer.peer = None
        cm_id.peer = None

    def _rdma_init_qp_attr(self, address: int, where: int, mask: int) -> None:
        cm_id = self._find(address)
        attr = ibv_qp_attr.from_address(where)
        port = self.software.devices[0].ports[0]
        attr.port_num, attr.pkey_index = 1, 0
        if attr.qp_state == QpState.INIT:
            return
        if cm_id.param is None:
            raise Refused(errno.EINVAL)
        index, gid = next((i, raw) for i, (raw, _) in port.slots().items() if raw == raw_gid("127.0.0.1"))
        attr.path_mtu, attr.dest_qp_num, attr.rq_psn = 3, cm_id.param.qp_num, cm_id.psn
        attr.ah_attr.is_global, attr.ah_attr.port_num = 1, 1
        attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit = index, 64
        ctypes.memmove(ctypes.addressof(attr.ah_attr.grh.dgid), gid, 16)
        attr.sq_psn = cm_id.psn
        attr.max_dest_rd_atomic, attr.max_rd_atomic = cm_id.param.initiator_depth, cm_id.param.responder_resources

    def _rdma_get_cm_event(self, channel: int, where: int) -> None:
        events = self.channels[channel].events
        if not events:
            raise Refused(errno.EAGAIN)
        os.eventfd_read(self.channels[channel].fd)
        event = events.popleft()
        event.about.unacknowledged += 1
        self.taken[ctypes.addressof(event.struct)] = event
        if event.kind is _E.CONNECT_REQUEST and event.about.listens:
            self._request(event.about)
        ctypes.c_void_p.from_address(where).value = ctypes.addressof(event.struct)

    def _rdma_ack_cm_event(self, address: int) -> None:
        event = self.taken.pop(address)
        ctypes.memset(address, 0x5A, ctypes.sizeof(event.struct))  # who reads it after that finds nonsense
        event.about.unacknowledged -= 1
        self.acknowledged.notify_all()


def _copy(address: int) -> rdma_conn_param:
    made = rdma_conn_param.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(rdma_conn_param)))
    data = ctypes.string_at(made.private_data, made.private_data_len) if made.private_data_len else b""
    made.kept = ctypes.create_string_buffer(data, max(len(data), 1))
    made.private_data = ctypes.addressof(made.kept)
    return made


def _mirrored(said: rdma_conn_param) -> rdma_conn_param:
    """What one side said, as the other sees it."""
    made = rdma_conn_param.from_buffer_copy(bytes(said))
    made.responder_resources, made.initiator_depth = said.initiator_depth, said.responder_resources
    return made


def _put(storage: Any, raw: bytes) -> None:
    ctypes.memmove(ctypes.addressof(storage), raw, len(raw))
