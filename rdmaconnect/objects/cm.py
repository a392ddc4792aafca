"""What librdmacm hands out: a channel of events, and the identifiers whose events come there."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from .. import rdmacm
from ..abi import QpState
from ..abi.rdma_cma import CmEventType, PortSpace, rdma_conn_param
from ..errors import DeviceError, VerbsError
from .locks import exclusive
from .no_device import why_none
from .owned import Owned
from .qp_attr import QpAttr

__all__ = ["CmChannel", "CmEvent", "CmId", "CmParam", "sockaddr"]


@dataclass(frozen=True, slots=True)
class CmParam:
    """``struct rdma_conn_param`` as a value: what two ends tell each other of a connection.

    Args:
        qp_num: the queue pair's number, 24 bits.
        responder_resources, initiator_depth: RDMA reads and atomics that this end answers at once, and that it starts
            at once, 0 to 255; in an event, those that this end may.
        retry_count, rnr_retry_count: 0 to 7.
        private_data: for the other side; what comes may be longer than what was sent, by zeros.
    """

    qp_num: int
    responder_resources: int
    initiator_depth: int
    retry_count: int = 7
    rnr_retry_count: int = 7
    private_data: bytes = b""

    @classmethod
    def of(cls, conn: rdma_conn_param) -> CmParam:
        """The value of a struct that an event has."""
        at, length = conn.private_data, conn.private_data_len
        data = ctypes.string_at(at, length) if at and length else b""
        depths = conn.responder_resources, conn.initiator_depth
        return cls(conn.qp_num, *depths, conn.retry_count, conn.rnr_retry_count, data)

    def struct(self) -> rdma_conn_param:
        """The same in C."""
        data = ctypes.create_string_buffer(self.private_data, len(self.private_data) or 1)
        made = rdma_conn_param(
            private_data=ctypes.addressof(data), private_data_len=len(self.private_data), flow_control=1,
            qp_num=self.qp_num, responder_resources=self.responder_resources, initiator_depth=self.initiator_depth,
            retry_count=self.retry_count, rnr_retry_count=self.rnr_retry_count,
        )  # fmt: skip
        made.kept = data  # for as long as the struct is there
        return made


@dataclass(frozen=True, slots=True)
class CmEvent:
    """One event, acknowledged already.

    Args:
        kind: what has happened.
        cm_id: the identifier that it is about; None if that is being destroyed.
        status: 0, a negative errno, or of REJECTED the other side's reason.
        param: what the other side said, where it has said something.
        request: of CONNECT_REQUEST, the identifier that was made for it, which is the receiver's now.
    """

    kind: CmEventType
    cm_id: CmId | None
    status: int
    param: CmParam
    request: CmId | None = None


class CmChannel(Owned):
    """Where the events of some identifiers come; non-blocking.

    Each event is acknowledged as it is taken, so that no destroy has to wait for it.

    Raises:
        DeviceError: there is no RDMA device.
        LibraryError: librdmacm is missing.
        VerbsError: as ``rdma_create_event_channel``.

    Source: rdma_create_event_channel(3).
    """

    def __init__(self) -> None:
        self._fd = -1
        #: address of an identifier -> the same as an object; those that are being destroyed are not in it
        self.ids: dict[int, CmId] = {}

        def make() -> Any:
            try:
                made = rdmacm.rdma_create_event_channel("open a channel for the events of rdma_cm")
            except VerbsError as e:
                if e.errno == errno.ENODEV:
                    raise DeviceError(f"find an RDMA device: {why_none()}") from None
                raise
            self._fd = made.contents.fd
            os.set_blocking(self._fd, False)
            return made

        super().__init__(make, "the event channel of rdma_cm")

    def _release(self, pointer: Any) -> None:
        rdmacm.rdma_destroy_event_channel(pointer)

    def fileno(self) -> int:
        """The descriptor, for poll(2) and its kin.

        Raises:
            StateError: after close.
        """
        self.pointer  # noqa: B018
        return self._fd

    @exclusive
    def take(self) -> CmEvent | None:
        """The next event; None if there is none. Never blocks.

        Raises:
            StateError: after close.
            VerbsError: as ``rdma_get_cm_event``.
        """
        pointer = rdmacm.rdma_get_cm_event(self.pointer)
        if pointer is None:
            return None
        event = pointer.contents
        kind, made = CmEventType(event.event), None
        try:
            asked = kind is CmEventType.CONNECT_REQUEST
            about = self.ids.get(_address(event.listen_id if asked else event.id))
            status, param = event.status, CmParam.of(event.param.conn)
            if asked:
                made = ctypes.pointer(event.id.contents)
        finally:
            rdmacm.rdma_ack_cm_event(pointer)
        if made is None:
            return CmEvent(kind, about, status, param)
        try:
            return CmEvent(kind, about, status, param, CmId(self, made=made))
        except BaseException:
            with suppress(VerbsError):
                rdmacm.rdma_destroy_id(made)
            raise


class CmId(Owned):
    """An identifier: what a socket is for TCP, it is for a connection by rdma_cm. The queue pair is not its own.

    Args:
        channel: where its events come.
        made: the pointer, of one that came with a request; else it is made.

    Source: rdma_create_id(3).
    """

    def __init__(self, channel: CmChannel, made: Any = None) -> None:
        self._channel = channel

        def make() -> Any:
            pointer = made or rdmacm.rdma_create_id(channel.pointer, PortSpace.TCP, "make an identifier of rdma_cm")
            channel.ids[_address(pointer)] = self
            return pointer

        super().__init__(make, "an identifier of rdma_cm", (channel,))

    def _release(self, pointer: Any) -> None:
        self._channel.ids.pop(_address(pointer), None)  # before: its address may be another one's as soon as it is free
        try:
            rdmacm.rdma_destroy_id(pointer)
        except VerbsError:
            self._channel.ids[_address(pointer)] = self
            raise

    # ---- where

    @property
    @exclusive
    def device(self) -> str:
        """The name of the device that it goes by; "" while none is chosen."""
        context = self.pointer.contents.verbs
        return context.contents.device.contents.name.decode() if context else ""

    @property
    @exclusive
    def port_num(self) -> int:
        """The device's port, from 1; 0 while none is chosen."""
        return int(self.pointer.contents.port_num)

    @property
    @exclusive
    def port(self) -> int:
        """The port of rdma_cm that it is bound to. Source: rdma_get_src_port(3)."""
        return rdmacm.rdma_get_src_port(self.pointer)

    @property
    @exclusive
    def peer(self) -> str:
        """The other side's address, in words; "" if there is none."""
        return _text(bytes(self.pointer.contents.route.addr.dst_storage))

    @exclusive
    def bind(self, address: bytes, backlog: int, doing: str) -> None:
        """Listen at an address. Source: rdma_bind_addr(3), rdma_listen(3).

        Args:
            address: as :func:`sockaddr` gives it.
            backlog: how many requests may wait.
            doing: for the error.
        """
        rdmacm.rdma_bind_addr(self.pointer, address, doing)
        rdmacm.rdma_listen(self.pointer, backlog, doing)

    @exclusive
    def set_traffic_class(self, traffic_class: int) -> None:
        """Have its packets go with a traffic class, 0 to 255. Source: rdma_set_option(3), ``RDMA_OPTION_ID_TOS``."""
        rdmacm.rdma_set_option(self.pointer, 0, 0, bytes([traffic_class]), f"set traffic_class {traffic_class}")

    @exclusive
    def resolve_addr(self, address: bytes, timeout_ms: int, doing: str) -> None:
        """Begin to find the device that leads to an address. Source: rdma_resolve_addr(3)."""
        rdmacm.rdma_resolve_addr(self.pointer, address, timeout_ms, doing)

    @exclusive
    def resolve_route(self, timeout_ms: int, doing: str) -> None:
        """Begin to find the path there. Source: rdma_resolve_route(3)."""
        rdmacm.rdma_resolve_route(self.pointer, timeout_ms, doing)

    # ---- connecting

    @exclusive
    def connect(self, param: CmParam, doing: str) -> None:
        """Ask for a connection. Source: rdma_connect(3)."""
        rdmacm.rdma_connect(self.pointer, param.struct(), doing)

    @exclusive
    def accept(self, param: CmParam, doing: str) -> None:
        """Take a request. Source: rdma_accept(3)."""
        rdmacm.rdma_accept(self.pointer, param.struct(), doing)

    @exclusive
    def establish(self, doing: str) -> None:
        """Say that the queue pair is in RTS. Source: rdma_establish(3)."""
        rdmacm.rdma_establish(self.pointer, doing)

    @exclusive
    def reject(self, private_data: bytes) -> None:
        """Refuse a request. Source: rdma_reject(3)."""
        rdmacm.rdma_reject(self.pointer, private_data)

    @exclusive
    def disconnect(self) -> None:
        """Tell the other side that it is over. Source: rdma_disconnect(3)."""
        rdmacm.rdma_disconnect(self.pointer)

    @exclusive
    def attr(self, state: QpState, doing: str) -> QpAttr:
        """What a queue pair needs to enter a state. Source: rdma_init_qp_attr(3)."""
        return QpAttr.of(rdmacm.rdma_init_qp_attr(self.pointer, int(state), doing))


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def sockaddr(family: int, address: tuple[Any, ...]) -> bytes:
    """``struct sockaddr_in`` or ``sockaddr_in6`` as bytes.

    Args:
        family: ``AF_INET`` or ``AF_INET6``.
        address: what ``connect`` of a socket of that family takes, no name in it.

    Source: ip(7), ipv6(7).
    """
    host, port = address[:2]
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", port) + IPv4Address(host).packed + bytes(8)
    flow, scope = address[2:]
    return (
        struct.pack("=H", family) + struct.pack("!HI", port, flow) + IPv6Address(host).packed + struct.pack("=I", scope)
    )


def _text(raw: bytes) -> str:
    """A socket address in words; "" of a family that is no IP."""
    family, port = struct.unpack_from("=H", raw)[0], struct.unpack_from("!H", raw, 2)[0]
    if family == socket.AF_INET:
        return f"{IPv4Address(raw[4:8])}:{port}"
    return f"[{IPv6Address(raw[8:24])}]:{port}" if family == socket.AF_INET6 else ""
