"""An opened device: what it is and has, and the devices that there are."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache
from typing import Any

from .. import verbs
from ..abi import NodeType, TransportType, ValuesMask, ibv_port_attr
from ..agreement.endpoint import Gid, GidEntry
from ..errors import DeviceError, LibraryError, StateError, VerbsError
from ..runtime.fork import in_child, over_fork
from .async_events import AsyncEvents
from .device_attr import DeviceAttr, RtValues
from .gid_table import LACKING, GidSlot, read_gid_table
from .locks import exclusive
from .no_device import complaints, why_none, why_not_opened
from .owned import Owned
from .port import Port
from .sysfs import device_nodes, gid_attribute

__all__ = ["Context", "GidSlot", "Port", "device_names", "one_list", "open_apart", "open_device"]


class _Device(Owned):
    """A ``struct ibv_context``: one in a process for each device, however many have opened it.

    Its ``lock`` is held while an asynchronous event is taken, and while anything is destroyed that one can be of.
    """

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        super().__init__(make, name)
        self.events: AsyncEvents | None = None
        self.op = cache(lambda name: verbs.op(name, self.pointer))
        self.attr: DeviceAttr | None = None
        self.inode: int | None = None
        #: those who have it open
        self._uses: dict[int, None] = {}

    def use(self, key: int) -> Any:
        """One use more; the pointer. StateError where the last one was just given back."""
        # first put down, then look: so does give_back, the other way round. The collector may be in either, so no lock
        self._uses[key] = None
        if self.due:
            self.give_back(key)
            raise StateError(f"open {self.name}: it is being closed.")
        return self.pointer

    def give_back(self, key: int) -> None:
        """One use less; after the last one the device is due."""
        self._uses.pop(key, None)
        if not self._uses:
            self.due = True
            if self._uses:
                self.due = False
            elif _opened.get(self.name) is self:
                _opened.pop(self.name, None)

    def _release(self, pointer: Any) -> None:
        verbs.ibv_close_device(pointer)


class Context(Owned):
    """One use of an opened device; made by :func:`open_device`.

    Those who open the same device share it in C, and know nothing of one another: closing one use, even twice,
    closes what was made with it, and takes nothing from the others. The last one closes the device.

    Attributes:
        name: the device's name.
    """

    def __init__(self, device: _Device) -> None:
        self._device = device
        super().__init__(lambda: device.use(id(self)), device.name, (device,))

    def _release(self, pointer: Any) -> None:
        """Nothing: it is the device's."""

    def _freed(self, pointer: Any) -> None:
        self._device.give_back(id(self))

    def _answers(self) -> bool:
        try:
            verbs.ibv_query_device(self._device.pointer)
        except VerbsError as e:
            return e.errno not in (errno.EIO, errno.ENODEV)
        return True

    def again(self) -> Context:
        """One more use of the same opened device, to be closed; StateError after its last use was."""
        return Context(self._device)

    def is_same(self, other: Context) -> bool:
        """Whether both are uses of the same opened device: what was made with one works with the other's."""
        return self._device is other._device

    def op(self, name: str) -> Callable[..., Any]:
        """The provider's function behind an inline verb, as :func:`verbs.op` gives it; looked up once."""
        return self._device.op(name)

    def destroying(self, what: Owned) -> Any:
        """The lock to be held while something is destroyed that an asynchronous event can be of.

        Raises:
            StateError: this thread is taking such an event, and destroying would wait for its acknowledgement.
        """
        events = self._device.events
        if events is not None and events.taker == threading.get_ident():
            raise StateError(f"close {what.name}: an event of the device is just being taken.")
        return self._device.lock

    # ---- the device

    @property
    def _struct(self) -> Any:
        return self.pointer.contents

    @property
    @exclusive
    def guid(self) -> int:
        """The node GUID, 64 bits in host order. Source: ibv_get_device_guid(3)."""
        return verbs.ibv_get_device_guid(self._struct.device)

    @property
    @exclusive
    def index(self) -> int:
        """The kernel's index of the device, -1 if it does not tell. Source: ibv_get_device_index(3)."""
        return verbs.ibv_get_device_index(self._struct.device)

    @property
    @exclusive
    def removed(self) -> bool:
        """Whether the kernel takes the device away, and may wait for those who have it open; False without sysfs."""
        inode = device_nodes().get(self._struct.device.contents.dev_name.decode(), 0)
        if self._device.inode is None:
            self._device.inode = inode
        return inode != self._device.inode

    @property
    @exclusive
    def node_type(self) -> NodeType:
        """What kind of node it is."""
        return NodeType(self._struct.device.contents.node_type)

    @property
    @exclusive
    def transport_type(self) -> TransportType:
        """The wire protocol family; RoCE counts as IB."""
        return TransportType(self._struct.device.contents.transport_type)

    @property
    @exclusive
    def num_comp_vectors(self) -> int:
        """Interrupt vectors that completion queues can use."""
        return int(self._struct.num_comp_vectors)

    @property
    def events(self) -> AsyncEvents:
        """The device's asynchronous events; one source for all who have opened it.

        Source: ibv_get_async_event(3).
        """
        self.pointer  # noqa: B018
        device = self._device
        with _lock:
            if device.events is None or device.events.closed:
                device.events = AsyncEvents(device)
            return device.events

    @exclusive
    def query_device(self) -> DeviceAttr:
        """What the device can do, with the extended part where there is one.

        Source: ibv_query_device_ex(3), ibv_query_device(3).
        """
        pointer = self.pointer
        try:
            return DeviceAttr.of_ex(verbs.ibv_query_device_ex(pointer))
        except (LibraryError, VerbsError) as e:
            if e.errno not in LACKING:
                raise
        return DeviceAttr.of(verbs.ibv_query_device(pointer))

    @property
    def attr(self) -> DeviceAttr:
        """What :meth:`query_device` said first: it stays the same for as long as the device is open."""
        self._device.attr = self._device.attr or self.query_device()
        return self._device.attr

    @exclusive
    def query_rt_values(self) -> RtValues:
        """The device's raw clock.

        Raises:
            LibraryError: the provider does not have it.

        Source: ibv_query_rt_values_ex(3).
        """
        values = verbs.ibv_query_rt_values_ex(self.pointer)
        known = values.comp_mask & ValuesMask.RAW_CLOCK
        return RtValues(values.raw_clock.tv_nsec + values.raw_clock.tv_sec * 10**9 if known else None)

    # ---- its ports

    @exclusive
    def ports(self) -> tuple[Port, ...]:
        """All ports as they are now. Source: ibv_query_port(3), ibv_query_gid_table(3)."""
        attrs = self._port_attrs()
        slots = read_gid_table(self.pointer, self.name, attrs)
        return tuple(
            _decoded(
                self.name,
                number,
                bytes(attr),
                tuple(verbs.ibv_query_pkey(self.pointer, number, i) for i in range(attr.pkey_tbl_len)),
                tuple(
                    (slot, gid_attribute(self.name, number, slot.gid_index, "ndevs"))
                    for slot in slots
                    if slot.port_num == number and slot.gid_index <= 255
                ),
            )
            for number, attr in attrs.items()
        )

    def port(self, port_num: int) -> Port:
        """One port as it is now.

        Raises:
            DeviceError: if the device has no such port.
        """
        ports = {port.port_num: port for port in self.ports()}
        if port_num not in ports:
            raise self._no_port(port_num, list(ports))
        return ports[port_num]

    @exclusive
    def port_speed(self, port_num: int) -> float | None:
        """Gbit/s of a port in use, lanes taken together; None of a library or device that does not tell.

        Source: ibv_query_port_speed.
        """
        with suppress(LibraryError, VerbsError):
            return verbs.ibv_query_port_speed(self.pointer, port_num) / 10
        return None

    @exclusive
    def gid_table(self) -> tuple[GidSlot, ...]:
        """The filled slots of all ports' GID tables. Source: ibv_query_gid_table(3), or one slot after the other."""
        return tuple(read_gid_table(self.pointer, self.name, self._port_attrs()))

    @exclusive
    def pkey_index(self, port_num: int, pkey: int) -> int:
        """The first slot of a port's P_Key table that holds ``pkey``.

        Args:
            port_num: from 1.
            pkey: 16 bits in host order; compared with its top bit, the membership.

        Raises:
            DeviceError: no such port, or no slot holds it.
            ValueError: more than 16 bits.

        Source: ibv_get_pkey_index(3).
        """
        if not 0 <= pkey <= 0xFFFF:
            raise ValueError(f"pkey is {pkey:#x}: give 0 to 0xffff")
        ports = self._port_attrs()
        if port_num not in ports:
            raise self._no_port(port_num, list(ports))
        try:
            return verbs.ibv_get_pkey_index(self.pointer, port_num, pkey)
        except VerbsError:
            there = ", ".join(f"{value:#06x}" for value in self.port(port_num).pkeys)
            raise DeviceError(f"use P_Key {pkey:#06x} on {self.name} port {port_num}: the table has {there}.") from None

    def _no_port(self, port_num: int, numbers: list[int]) -> DeviceError:
        return DeviceError(
            f"use port {port_num} of {self.name}: it has port{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}."
        )

    def _port_attrs(self) -> dict[int, Any]:
        """port number -> ``struct ibv_port_attr``."""
        pointer = self.pointer
        numbers = range(1, verbs.ibv_query_device(pointer).phys_port_cnt + 1)
        return {number: verbs.ibv_query_port(pointer, number) for number in numbers}


@lru_cache(maxsize=64)
def _decoded(
    device: str, port_num: int, attr: bytes, pkeys: tuple[int, ...], slots: tuple[tuple[GidSlot, str], ...]
) -> Port:
    """The port; asked for with every connection, it hardly ever changes, and decoding costs more than asking."""
    gids = tuple(GidEntry(Gid(slot.raw), slot.gid_type, slot.gid_index, netdev) for slot, netdev in slots)
    return Port.of(device, port_num, ibv_port_attr.from_buffer_copy(attr), pkeys, gids)


#: held while devices are listed and opened; and over a fork, so that no thread is amid that in the child
_lock = threading.RLock()
#: name -> what is open in this process
_opened: dict[str, _Device] = {}


def _forked() -> None:
    """In a forked process: nothing is open, and the lock is held by a thread that there is no more."""
    global _lock
    _lock = threading.RLock()
    _opened.clear()


over_fork(lambda: _lock.acquire(), lambda: _lock.release())
in_child(_forked)


#: the list that a thread holds (:func:`one_list`)
_held = threading.local()


@contextmanager
def _device_list() -> Iterator[dict[str, tuple[object, str]]]:
    """name -> (pointer, uverbs node's name), while the list is held."""
    held: dict[str, tuple[object, str]] | None = getattr(_held, "devices", None)
    if held is not None:
        yield held
        return
    array, devices = verbs.ibv_get_device_list()
    try:
        yield {verbs.ibv_get_device_name(d): (d, d.contents.dev_name.decode()) for d in devices}
    finally:
        verbs.ibv_free_device_list(array)


@contextmanager
def one_list() -> Iterator[None]:
    """Whatever this thread does with devices meanwhile, they are listed once: that takes longer than to open one."""
    before = getattr(_held, "devices", None)
    with ExitStack() as stack:
        with suppress(LibraryError, VerbsError):  # who asks for it is told
            _held.devices = stack.enter_context(_device_list())
        try:
            yield
        finally:
            _held.devices = before


def device_names() -> list[str]:
    """The names of the devices that this process can see, in the library's order.

    Raises:
        LibraryError: libibverbs is missing.
        VerbsError: ENOSYS where the kernel has no RDMA.
    """
    with _device_list() as devices:
        return list(devices)


def open_device(name: str) -> Context:
    """Open a device, or take another use of it if it is open in this process already.

    Args:
        name: as :func:`device_names` lists it.

    Returns:
        A use of it, to be closed.

    Raises:
        DeviceError: no such device; lists those there are.
        VerbsError: it cannot be opened; ENOENT, EACCES and EPERM told apart.
    """
    with _lock:
        while True:
            device = _opened.get(name)
            if device is None or device.due or device.gone:  # one that is gone may be back under its name
                device = _opened[name] = _Device(lambda: _open(name), name)
            try:
                return Context(device)
            except StateError:  # its last user has given it back at this very moment
                continue


def open_apart(name: str) -> Context:
    """Open a device once more, for events that nobody else takes; raises as :func:`open_device`."""
    return Context(_Device(lambda: _open(name), name))


def _open(name: str) -> Any:
    with _device_list() as devices:
        if name not in devices:
            seen = f"there is {', '.join(devices)}.{complaints()}" if devices else why_none()
            raise DeviceError(f"use device {name}: there is no such device. {seen[0].upper()}{seen[1:]}")
        pointer, node = devices[name]
        try:
            return verbs.ibv_open_device(pointer, doing=f"open {name}")
        except VerbsError as e:
            raise why_not_opened(name, node, e) from None
