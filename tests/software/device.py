"""Devices and ports as data, and the verbs that list, open and query them."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rdmaconnect.abi import (
    EventType,
    GidType,
    LinkLayer,
    NodeType,
    PortState,
    TransportType,
    ibv_context,
    ibv_device,
    ibv_device_attr,
    verbs_context,
)
from rdmaconnect.agreement.endpoint import Gid

from .arena import ALIVE, ARENA, Misused, Object, Refused
from .calls import operations, verb
from .gid import raw_gid

#: what a device can do unless told otherwise: fields of ``ibv_device_attr``
LIMITS: dict[str, int] = {
    "max_mr_size": 2**63, "page_size_cap": 0xFFFFF000, "vendor_id": 0x50F7, "max_qp": 65536, "max_qp_wr": 32768,
    "max_sge": 32, "max_sge_rd": 32, "max_cq": 65536, "max_cqe": 1 << 22, "max_mr": 1 << 20, "max_pd": 65536,
    "max_qp_rd_atom": 16, "max_qp_init_rd_atom": 16, "max_res_rd_atom": 1 << 20, "atomic_cap": 1, "max_mw": 65536,
    "max_mcast_grp": 8192, "max_mcast_qp_attach": 56, "max_total_mcast_qp_attach": 458752, "max_ah": 65536,
    "max_srq": 65536, "max_srq_wr": 32768, "max_srq_sge": 32, "max_pkeys": 64, "local_ca_ack_delay": 15,
}  # fmt: skip


@dataclass
class Port:
    """A port; a test may change it at any time.

    Args:
        gids: its GID table: each an address as text (RoCE v2, or IB on InfiniBand), a pair of that and its
            ``GidType``, or None for an empty slot.
        state, link_layer, lid, lmc, flags: as in ``ibv_port_attr``.
        active_mtu, max_mtu: bytes.
        pkeys: its P_Key table, 16 bits each in host order.
        max_msg_sz: bytes.
        gid_tbl_len: slots of the GID table, used or not.
    """

    gids: list[str | tuple[str, GidType] | None] = field(default_factory=lambda: ["127.0.0.1"])
    state: int = PortState.ACTIVE
    link_layer: int = LinkLayer.ETHERNET
    active_mtu: int = 1024
    max_mtu: int = 4096
    pkeys: list[int] = field(default_factory=lambda: [0xFFFF])
    lid: int = 0
    lmc: int = 0
    flags: int = 0
    max_msg_sz: int = 1 << 30
    gid_tbl_len: int = 16

    def slots(self) -> dict[int, tuple[bytes, int]]:
        """index -> (GID, type) of the filled slots."""
        plain = GidType.IB if self.link_layer == LinkLayer.INFINIBAND else GidType.ROCE_V2
        entries = [(entry, plain) if isinstance(entry, (str, Gid, bytes)) else entry for entry in self.gids]
        return {i: (raw_gid(entry[0]), int(entry[1])) for i, entry in enumerate(entries) if entry is not None}

    def has(self, gid: bytes) -> bool:
        """Whether the GID is one of its own."""
        return any(raw == gid for raw, _ in self.slots().values())


@dataclass
class Device:
    """A device; a test may change it at any time.

    Args:
        name: the kernel's name of it.
        ports: port 1 first.
        limits: fields of ``ibv_device_attr`` that are not as in :data:`LIMITS`.
        num_comp_vectors: interrupt vectors.
        node_guid: 64 bits in host order.
        iwarp: whether it is a device of iWARP.
        keeps_completions: whether completions stay in a queue when their queue pair is reset or destroyed, as
            with rxe; mlx5 takes them out.
    """

    name: str = "soft0"
    ports: list[Port] = field(default_factory=lambda: [Port()])
    limits: Mapping[str, int] = field(default_factory=dict)
    num_comp_vectors: int = 2
    node_guid: int = 0x5054_00FF_FE00_0001
    iwarp: bool = False
    keeps_completions: bool = False

    def limit(self, name: str) -> int:
        """A limit, by its name in ``ibv_device_attr``."""
        return self.limits.get(name, LIMITS[name])


class Listed(Object):
    """A device as the list shows it; it is there for as long as its world."""

    kind, struct, typed = "device", ibv_device, ("ibv_device",)

    def __init__(self, world: Any, device: Device) -> None:
        super().__init__(world)
        self.device = device
        kinds = (NodeType.RNIC, TransportType.IWARP) if device.iwarp else (NodeType.CA, TransportType.IB)
        self.c.node_type, self.c.transport_type = kinds
        self.c.name = device.name.encode()
        # a node that no kernel makes: nobody is to look at a real one of the same name
        self.c.dev_name = f"software-{device.name}".encode()


class _Pointers(ctypes.Structure):
    _fields_ = ()


class DeviceList(Object):
    """The array that ``ibv_get_device_list`` gives."""

    kind, struct, typed = "device_list", _Pointers, ()

    def __init__(self, world: Any, listed: Sequence[Listed]) -> None:
        self._length = len(listed) + 1
        super().__init__(world)
        array = (ctypes.c_void_p * self._length).from_address(self.address)
        array[:] = [*(one.address for one in listed), None]

    def _whole(self) -> Any:
        return ctypes.c_void_p * self._length


class Context(Object):
    """An open device."""

    kind, struct, typed = "context", ibv_context, ("ibv_context",)

    def __init__(self, world: Any, listed: Listed) -> None:
        fds = world.opened(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)), world.opened(os.eventfd(0, os.EFD_CLOEXEC))
        super().__init__(world)
        self.device, self.listed = listed.device, listed
        self.events: deque[tuple[int, int]] = deque()
        self._seen = repr(self.device)
        whole = verbs_context.from_address(self.address - verbs_context.context.offset)
        whole.sz = ctypes.sizeof(verbs_context)
        self.c.abi_compat = ctypes.c_void_p(-1).value
        for holder, table in ((whole, "verbs_context"), (self.c.ops, "context")):
            base = ctypes.addressof(holder)
            for name, address in operations(table).items():
                ctypes.c_void_p.from_address(base + getattr(type(holder), name).offset).value = address
        ctypes.c_void_p.from_address(self.address + ibv_context.device.offset).value = listed.address
        self.c.num_comp_vectors = self.device.num_comp_vectors
        self.c.cmd_fd, self.c.async_fd = fds
        self.event_fd = fds[1]

    def _whole(self) -> Any:
        return verbs_context

    def _place(self, address: int) -> int:
        inner = address + verbs_context.context.offset
        ARENA.within[inner] = address
        return inner

    def notice(self) -> None:
        """Tell of it, if a test has changed the device."""
        before, self._seen = self._seen, repr(self.device)
        if self._seen != before:
            self.world.event(self, EventType.GID_CHANGE, 1)

    def port(self, port_num: int) -> Port:
        """A port by its number; EINVAL if there is none."""
        if not 1 <= port_num <= len(self.device.ports):
            raise Refused(errno.EINVAL)
        return self.device.ports[port_num - 1]


# ---- the list


@verb
def ibv_get_device_list(world: Any, num_devices: Any) -> Any:
    for context in world.objects("context"):
        context.notice()
    found = DeviceList(world, world.listed)
    if num_devices is not None:
        num_devices.value = len(world.listed)
    return found


@verb
def ibv_free_device_list(world: Any, array: int) -> None:
    found = ALIVE.get(array)
    if not isinstance(found, DeviceList):
        raise Misused(f"was given {array:#x}, which is no list, or was freed before", world)
    found.free("ibv_free_device_list")


@verb
def ibv_get_device_name(world: Any, device: Listed) -> int:
    return device.address + ibv_device.name.offset


@verb
def ibv_get_device_guid(world: Any, device: Listed) -> int:
    return _be64(device.device.node_guid)


@verb
def ibv_get_device_index(world: Any, device: Listed) -> int:
    return world.listed.index(device)


def _be64(value: int) -> int:
    return int.from_bytes(value.to_bytes(8, "big"), sys.byteorder)


@verb
def ibv_open_device(world: Any, device: Listed) -> Any:
    return Context(world, device)


@verb
def ibv_close_device(world: Any, context: Context) -> None:
    left = world.made_from(context)
    if left:
        # the kernel frees what was made from it, libibverbs does not: what is left can only be misused
        world.error(f"ibv_close_device {context}: {', '.join(map(str, left))} were made from it and not destroyed")
        for one in left:
            one.users = 0
            one.free("ibv_close_device")
        context.users = 0
    for fd in (context.c.cmd_fd, context.c.async_fd):
        world.close_fd(fd)
    context.free("ibv_close_device")


# ---- questions


def _fill(attr: ibv_device_attr, device: Device) -> None:
    for name, value in (LIMITS | dict(device.limits)).items():
        setattr(attr, name, value)
    attr.fw_ver = b"software"
    attr.node_guid = attr.sys_image_guid = _be64(device.node_guid)
    attr.phys_port_cnt = min(len(device.ports), 255)


@verb
def ibv_query_device(world: Any, context: Context, device_attr: Any) -> None:
    _fill(device_attr, context.device)


@verb
def ibv_query_device_ex(world: Any, context: Context, input: Any, attr: Any, attr_size: int) -> None:
    _fill(attr.orig_attr, context.device)
    attr.phys_port_cnt_ex = len(context.device.ports)
    # the clock of completions counts nanoseconds
    attr.completion_timestamp_mask, attr.hca_core_clock = 2**64 - 1, 1_000_000


@verb
def ibv_query_port(world: Any, context: Context, port_num: int, port_attr: Any, port_attr_len: int) -> None:
    port = context.port(port_num)
    port_attr.state, port_attr.link_layer = port.state, port.link_layer
    port_attr.max_mtu, port_attr.active_mtu = mtu_code(port.max_mtu), mtu_code(port.active_mtu)
    port_attr.gid_tbl_len, port_attr.pkey_tbl_len = max(port.gid_tbl_len, len(port.gids)), len(port.pkeys)
    port_attr.max_msg_sz, port_attr.lid, port_attr.lmc = port.max_msg_sz, port.lid, port.lmc
    port_attr.sm_lid = 1 if port.link_layer == LinkLayer.INFINIBAND else 0
    port_attr.flags, port_attr.max_vl_num = port.flags, 1
    port_attr.active_width, port_attr.active_speed = 1, 32
    port_attr.phys_state = 5 if port.state >= PortState.INIT else 3


def mtu_code(size: int) -> int:
    """The ``ibv_mtu`` of a size in bytes."""
    return (size // 128).bit_length() - 1


@verb
def _ibv_query_gid_table(
    world: Any, context: Context, entries: Any, max_entries: int, flags: int, entry_size: int
) -> int:
    found = [(n, i, *slot) for n, port in enumerate(context.device.ports, 1) for i, slot in port.slots().items()]
    if len(found) > max_entries:
        raise Refused(errno.EINVAL)
    for at, (number, index, raw, kind) in enumerate(found):
        _put(type(entries).from_address(ctypes.addressof(entries) + at * entry_size), number, index, raw, kind)
    return len(found)


def _put(entry: Any, port_num: int, index: int, raw: bytes, kind: int) -> None:
    entry.gid.raw[:] = raw
    entry.port_num, entry.gid_index, entry.gid_type, entry.ndev_ifindex = port_num, index, kind, 0


@verb
def _ibv_query_gid_ex(
    world: Any, context: Context, port_num: int, gid_index: int, entry: Any, flags: int, entry_size: int
) -> None:
    port = context.port(port_num)
    if gid_index >= max(port.gid_tbl_len, len(port.gids)):
        raise Refused(errno.EINVAL)
    slot = port.slots().get(gid_index)
    if slot is None:
        raise Refused(errno.ENODATA)
    _put(entry, port_num, gid_index, *slot)


@verb
def ibv_query_gid(world: Any, context: Context, port_num: int, index: int, gid: Any) -> None:
    gid.raw[:] = context.port(port_num).slots().get(index, (bytes(16), 0))[0]


@verb
def ibv_query_pkey(world: Any, context: Context, port_num: int, index: int, pkey: Any) -> None:
    keys = context.port(port_num).pkeys
    if not 0 <= index < len(keys):
        raise Refused(errno.EINVAL)
    pkey.value = int.from_bytes(keys[index].to_bytes(2, "big"), sys.byteorder)


@verb
def ibv_get_pkey_index(world: Any, context: Context, port_num: int, pkey: int) -> int:
    wanted = int.from_bytes(pkey.to_bytes(2, sys.byteorder), "big")
    keys = context.port(port_num).pkeys
    if wanted not in keys:
        raise Refused(errno.EINVAL)
    return keys.index(wanted)


@verb
def ibv_fork_init(world: Any) -> None:
    """Forking needs no preparation here."""


# ---- asynchronous events

_WORDS: dict[int, ctypes.Array[ctypes.c_char]] = {
    int(kind): ctypes.create_string_buffer(kind.name.lower().replace("_", " ").encode()) for kind in EventType
}
_UNKNOWN = ctypes.create_string_buffer(b"unknown")


@verb
def ibv_event_type_str(world: Any, event: int) -> int:
    return ctypes.addressof(_WORDS.get(event, _UNKNOWN))
