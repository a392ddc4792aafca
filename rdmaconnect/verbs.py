"""Every verb, one short function each: the only file that calls libibverbs.

The functions keep the C names and take and give ctypes pointers; each turns its own failure
convention (``abi.prototypes``) into an exception. What C has as an inline goes through the op tables
here too: an op that the library or the device's provider lacks is :class:`LibraryError` with
``EOPNOTSUPP``, never a call through NULL.

Unless a docstring says otherwise, each raises:

* ``VerbsError`` with the verb's errno,
* ``LibraryError`` if libibverbs, the symbol or the op is missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from _ctypes import FUNCFLAG_CDECL, FUNCFLAG_PYTHONAPI, CFuncPtr
from collections.abc import Callable
from ctypes import POINTER, _Pointer, byref, sizeof
from functools import cache
from typing import Any

from . import abi
from .abi import Fails
from .errors import LibraryError, VerbsError, hint_for
from .shared_library import SharedLibrary

_libibverbs = SharedLibrary(
    "libibverbs.so.1",
    "RDMACONNECT_LIBIBVERBS",
    abi.PROTOTYPES,
    "Debian and Ubuntu `apt install ibverbs-providers`, Fedora and RHEL `dnf install libibverbs`.",
    LibraryError,
)
use, library, _symbol = _libibverbs.use, _libibverbs.load, _libibverbs.symbol


def complaints() -> tuple[str, ...]:
    """What libibverbs says when it looks for devices and their providers, which no verb tells.

    It prints that on stderr, once. Here a process of its own is asked again: what comes on the stderr of this one is
    the application's.

    Returns:
        Its lines; none where it has nothing to say or cannot be asked.

    Source: libibverbs/dynamic_driver.c, libibverbs/init.c (``IBV_SHOW_WARNINGS``).
    """
    if _libibverbs.stand_in is not None or not os.path.basename(sys.executable or "").startswith("python"):
        return ()
    ask = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ibv_get_device_list(None)"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, _libibverbs.name], env={**os.environ, "IBV_SHOW_WARNINGS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = done.stderr.decode(errors="replace").splitlines()
    return tuple(line for line in lines if line.startswith("libibverbs: "))


# ---- how a verb says that it has failed


#: convention -> (result, errno that the call left) -> errno, 0 for success, EIO where there is no reason.
#: A few providers return -errno where an errno is due, and some -1, which is not EPERM.
_ERRNO: dict[Fails, Callable[[Any, int], int]] = {
    Fails.NULL_ERRNO: lambda result, left: 0 if result else left or errno.EIO,
    Fails.ERRNO_RETURNED: lambda result, left: abs(result) if result != -1 else left or errno.EIO,
    Fails.MINUS_ONE: lambda result, left: 0 if result >= 0 else left or errno.EIO,
    Fails.MINUS_ERRNO: lambda result, left: max(-result, 0) if result != -1 else left or errno.EIO,
    Fails.POLL_COUNT: lambda result, left: 0 if result >= 0 else errno.EIO,
    Fails.POLL_ERRNO: lambda result, left: result if result >= 0 else errno.EIO,
    Fails.NEVER: lambda result, left: 0,
}
_FAILS = {o.name: o.fails for o in abi.OPS.values()} | {p.name: p.fails for p in abi.PROTOTYPES.values()}


def errno_of(name: str, result: Any, left: int = 0) -> int:
    """The errno that a verb's result stands for, by the verb's own convention.

    Args:
        name: the verb.
        result: what it returned.
        left: the variable errno after the call, if it was 0 before; it counts only where the convention says so.

    Returns:
        0 if the result is no failure; EIO for a failure without a reason.
    """
    return _ERRNO[_FAILS[name]](result, left)


def failed(name: str, result: Any, doing: str, left: int = 0, hint: str | None = None) -> LibraryError | VerbsError:
    """The exception for a result that is a failure; arguments as :func:`errno_of`, and what was being done."""
    number = errno_of(name, result, left)
    if number == errno.EOPNOTSUPP and name in _OPTIONAL:
        # libibverbs puts a stub in each empty slot of a provider's table (libibverbs/dummy_ops.c)
        return LibraryError(f"{doing}: {_absent(name)}", number)
    if number == errno.EIO and hint is None:
        hint = unexplained(name, result, left) or None
    return VerbsError(name, number, doing, hint)


def unexplained(name: str, result: Any, left: int = 0) -> str:
    """What to say of a failure without a reason, for which EIO stands in; "" if it has one."""
    fails = _FAILS[name]
    if fails in (Fails.POLL_COUNT, Fails.POLL_ERRNO):
        given = result >= 0
    else:
        given = bool(left) or (bool(result) and result != -1)
    what = "NULL and set no errno" if fails is Fails.NULL_ERRNO else result
    return "" if given else f"It gave no reason: {name} answered {what}."


def _call(name: str, *args: Any, doing: str = "", hint: str | None = None) -> Any:
    """Call an exported function and raise by its failure convention."""
    return _checked(name, _symbol(name), args, doing, hint)


def _checked(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], doing: str, hint: str | None = None
) -> Any:
    ctypes.set_errno(0)
    result = function(*args)
    # NULL is the failure of what answers a pointer, and 0 a success of all else: mostly no more is to be looked at
    if bool(result) is not (_FAILS[name] is Fails.NULL_ERRNO) and _FAILS[name] is not Fails.NEVER:
        left = ctypes.get_errno()
        if errno_of(name, result, left):
            raise failed(name, result, doing, left, hint)
    return result


#: verbs that a provider has or has not as a whole: there EOPNOTSUPP says that it lacks them
_OPTIONAL = frozenset(
    {
        "ibv_advise_mr",
        "ibv_alloc_dm",
        "ibv_alloc_mw",
        "ibv_alloc_null_mr",
        "ibv_alloc_parent_domain",
        "ibv_alloc_td",
        "ibv_attach_counters_point_flow",
        "ibv_attach_mcast",
        "ibv_create_ah",
        "ibv_create_counters",
        "ibv_create_flow",
        "ibv_create_rwq_ind_table",
        "ibv_create_srq",
        "ibv_create_wq",
        "ibv_dm_export_dmabuf_fd",
        "ibv_get_srq_num",
        "ibv_import_device",
        "ibv_import_dm",
        "ibv_import_mr",
        "ibv_import_pd",
        "ibv_modify_cq",
        "ibv_modify_qp_rate_limit",
        "ibv_open_qp",
        "ibv_open_xrcd",
        "ibv_post_srq_ops",
        "ibv_query_ece",
        "ibv_query_rt_values_ex",
        "ibv_read_counters",
        "ibv_reg_dm_mr",
        "ibv_reg_dmabuf_mr",
        "ibv_reg_mr_ex",
        "ibv_rereg_mr",
        "ibv_resize_cq",
        "ibv_set_ece",
    }
)


def _absent(name: str) -> str:
    hint = hint_for(name, errno.EOPNOTSUPP)
    return f"{name}: EOPNOTSUPP, the device's provider does not have it. {hint}".rstrip()


# ---- what verbs.h has inline, through tables of function pointers


def op(name: str, holder: Any) -> Callable[..., Any]:
    """The function behind an inline verb: the one way to it, for the functions here and for the hot path.

    Args:
        name: the verb, for example ``ibv_poll_cq``.
        holder: what has the function pointer, or a pointer to it: ``struct ibv_context`` for its op tables,
            or the object itself (``struct ibv_cq_ex``, ``ibv_qp_ex``, ...): see ``abi.OPS``.

    Returns:
        The C function; :func:`errno_of` reads its result. It is good for as long as ``holder``.

    Raises:
        LibraryError: EOPNOTSUPP where library or provider lack it.
    """
    found = abi.OPS[name]
    struct = holder.contents if isinstance(holder, _Pointer) else holder
    if found.table == "context":
        struct = struct.ops
    elif found.table == "verbs_context":
        struct = _verbs_context(name, struct, found.field)
    function: Any = getattr(struct, found.field)
    if not function:
        raise LibraryError(_absent(name), errno.EOPNOTSUPP)
    if found.fails is Fails.NULL_ERRNO:
        kept: Callable[..., Any] = _with_errno(function.__class__)(ctypes.cast(function, ctypes.c_void_p).value)
        return kept
    return function  # type: ignore[no-any-return]


#: what a verb that was shut answers: no errno, and no count
SHUT = -(1 << 31)
_answer_shut = ctypes.PYFUNCTYPE(ctypes.c_int)(lambda: SHUT)
_at_shut = ctypes.cast(_answer_shut, ctypes.c_void_p).value


class Shuttable(CFuncPtr):
    """An inline verb for the hot path, which needs no lock; :func:`shuttable` makes it.

    It keeps the interpreter's lock while it runs: only for what never waits. So :meth:`shut` cannot come amid a call,
    and whoever shuts it before it frees what the verb is given, needs no lock against its callers. Nothing looks at the
    arguments: each is a whole number of 32 bits, or what ``byref`` gives.
    """

    # without _restype_, a result is an int, and costs less than where that is said
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI

    def __init__(self, address: int) -> None:
        self._at = address

    def shut(self) -> None:
        """From now on each call answers :data:`SHUT`, and does nothing."""
        ctypes.c_void_p.from_buffer(self).value = _at_shut

    def reopen(self) -> None:
        """It is the verb again."""
        ctypes.c_void_p.from_buffer(self).value = self._at

    disown = shut


class _Guarded:
    """The same with a lock of its own: where several threads run at once, or a call runs Python."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._open, self._lock = function, True, threading.RLock()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            return self._function(*args) if self._open else SHUT

    def shut(self) -> None:
        """As :meth:`Shuttable.shut`; waits for the calls that are under way."""
        with self._lock:
            self._open = False

    def reopen(self) -> None:
        """As :meth:`Shuttable.reopen`."""
        self._open = True

    def disown(self) -> None:
        """To shut it in a child of ``fork``, where a thread that is not there may hold the lock."""
        self._open, self._lock = False, threading.RLock()


def shuttable(function: Callable[..., Any]) -> Shuttable | _Guarded:
    """An inline verb for the hot path, to be shut before what it is given is freed.

    Args:
        function: as :func:`op` gives it, of a verb that never waits, and whose result is an errno or a count.
    """
    if not isinstance(function, CFuncPtr):
        return _Guarded(function)
    # made from the address: ctypes converts and checks each argument of a function that has a prototype
    found = Shuttable(ctypes.c_void_p.from_buffer(function).value or 0)
    alone = getattr(sys, "_is_gil_enabled", lambda: True)() and _libibverbs.stand_in is None
    return found if alone else _Guarded(found)


@cache
def _with_errno(pointer_type: Any) -> Any:
    """The same function-pointer type, but one that keeps errno."""
    return ctypes.CFUNCTYPE(pointer_type._restype_, *pointer_type._argtypes_, use_errno=True)


def _verbs_context(name: str, context: Any, field: str) -> Any:
    """``verbs_context`` in front of ``context``, if it reaches as far as ``field``.

    Source: infiniband/verbs.h, ``verbs_get_ctx`` and ``verbs_get_ctx_op``.
    """
    extended = abi.verbs_context
    if context.abi_compat != ctypes.c_void_p(-1).value:
        raise LibraryError(f"{name}: the device's provider has no extended verbs.", errno.EOPNOTSUPP)
    address = ctypes.addressof(context) - extended.context.offset
    # the struct grows towards lower addresses: an older library's is shorter in front
    size = ctypes.c_size_t.from_address(address + extended.sz.offset).value
    if size < sizeof(extended) - getattr(extended, field).offset:
        raise LibraryError(f"{name}: this libibverbs is older than it. Install a newer rdma-core.", errno.EOPNOTSUPP)
    return extended.from_address(address)


def _call_op(name: str, holder: Any, *args: Any, doing: str = "") -> Any:
    """Call an inline verb and raise by its failure convention."""
    return _checked(name, op(name, holder), args, doing)


# ---- devices


def ibv_get_device_list() -> tuple[Any, list[Any]]:
    """The RDMA devices that this process can see.

    Returns:
        The array, for ``ibv_free_device_list``, and its pointers to ``struct ibv_device``, which are
        valid until then; a device must be opened before it.

    Raises:
        VerbsError: ENOSYS, EPERM; EMFILE or ENFILE, where libibverbs gives an empty list or ENOSYS.

    Source: ibv_get_device_list(3), ``ibv_get_device_list``.
    """
    count = ctypes.c_int()
    doing = "list RDMA devices"
    try:
        array = _call("ibv_get_device_list", byref(count), doing=doing)
    except VerbsError:
        _check_descriptor("ibv_get_device_list", doing)
        raise
    if not count.value:
        try:
            _check_descriptor("ibv_get_device_list", doing)
        except VerbsError:
            ibv_free_device_list(array)
            raise
    return array, [array[i] for i in range(count.value)]


#: descriptors that libibverbs has open at a time while it looks for devices
_DESCRIPTORS = 4


def _check_descriptor(name: str, doing: str) -> None:
    """Is there a descriptor left? Without one libibverbs finds nothing, and says otherwise or nothing.

    Raises:
        VerbsError: EMFILE, ENFILE.
    """
    held: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - those so far are closed
    except OSError as e:
        raise VerbsError(name, e.errno or errno.EIO, doing) from None
    finally:
        for fd in held:
            os.close(fd)


def ibv_free_device_list(array: Any) -> None:
    """Free what ``ibv_get_device_list`` gave; open contexts keep their own device.

    Source: ibv_get_device_list(3), ``ibv_free_device_list``.
    """
    _call("ibv_free_device_list", array)


def ibv_get_device_name(device: Any) -> str:
    """The kernel's name of a device, for example ``mlx5_0``.

    Source: ibv_get_device_name(3), ``ibv_get_device_name``.
    """
    name: bytes = _call("ibv_get_device_name", device)
    return name.decode()


def ibv_get_device_guid(device: Any) -> int:
    """The node GUID of a device, without opening it.

    Returns:
        64 bits in host order; 0 if it cannot be read.

    Source: ibv_get_device_guid(3), ``ibv_get_device_guid``.
    """
    return int.from_bytes(int(_call("ibv_get_device_guid", device)).to_bytes(8, sys.byteorder), "big")


def ibv_get_device_index(device: Any) -> int:
    """The kernel's stable index of a device; -1 if the kernel does not tell.

    Source: ibv_get_device_index(3), ``ibv_get_device_index``.
    """
    return int(_call("ibv_get_device_index", device))


def ibv_open_device(device: Any, doing: str = "") -> Any:
    """Open a device: two descriptors, the commands' and the async events'.

    Its errno is not reliable; ``device.open_device`` opens the node itself to tell ENOENT, EACCES and
    EPERM apart.

    Source: ibv_open_device(3), ``ibv_open_device``.
    """
    return _call("ibv_open_device", device, doing=doing)


def ibv_close_device(context: Any) -> None:
    """Close a context. It frees nothing that was made from it: destroy that first.

    Source: ibv_open_device(3), ``ibv_close_device``.
    """
    _call("ibv_close_device", context)


def ibv_import_device(cmd_fd: int) -> Any:
    """A context on the command descriptor of another one, which may be another process's.

    Both see the same kernel objects: :func:`ibv_import_pd`, :func:`ibv_import_mr` and :func:`ibv_import_dm` make
    them usable here by their handles.

    Args:
        cmd_fd: a duplicate of the other context's ``cmd_fd`` (``dup``, or sent over a UNIX socket with
            SCM_RIGHTS). It is the context's from then on: ``ibv_close_device`` closes it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot (only mlx5 can, up to rdma-core 65), or a libibverbs
            before rdma-core 31.

    Source: ibv_import_device(3), ``ibv_import_device``.
    """
    return _call("ibv_import_device", cmd_fd, doing="import a device")


def ibv_query_device(context: Any) -> abi.ibv_device_attr:
    """The device's limits; the real ones may be lower, as resources are shared.

    Source: ibv_query_device(3), ``ibv_query_device``.
    """
    attr = abi.ibv_device_attr()
    _call("ibv_query_device", context, byref(attr))
    return attr


def ibv_query_device_ex(context: Any, input: abi.ibv_query_device_ex_input | None = None) -> abi.ibv_device_attr_ex:
    """The device's limits and its extended properties.

    The maximum values are upper limits. It may not be possible to reach them: the number of any resource that
    can really be made may be limited by the machine's configuration, the host's memory, the user's permissions,
    and what other users and processes hold already. What kernel, provider or library does not know stays 0,
    which for each of the fields means "not supported".

    Where there is no extended query (no op, or it answers EOPNOTSUPP or ENOSYS), ``ibv_query_device`` fills
    in ``orig_attr`` and all the rest is 0, as in the header's inline.

    Args:
        context: pointer to ``struct ibv_context``.
        input: for future extensions; its ``comp_mask`` must be 0. None stands for NULL.

    Returns:
        ``struct ibv_device_attr_ex``, a copy of the caller's own:

        * ``orig_attr``: all that ``ibv_query_device`` tells.
        * ``comp_mask``: meant to say which of the following are valid; no library sets a bit so far, 0.
        * ``odp_caps``: on-demand paging, memory that is not pinned but faulted in by the device.
          ``general_caps`` (``OdpGeneralCaps``): SUPPORT, it works at all; SUPPORT_IMPLICIT, for a region that
          is the whole address space too. ``per_transport_caps`` has ``rc_odp_caps``, ``uc_odp_caps`` and
          ``ud_odp_caps`` (``OdpTransportCaps``): which operations of RC, UC and UD may touch such memory:
          SEND, RECV, WRITE (RDMA write), READ (RDMA read), ATOMIC, SRQ_RECV (receives of a shared queue),
          FLUSH and ATOMIC_WRITE.
        * ``completion_timestamp_mask``: the bits that a completion's timestamp can have; 0: it has none.
        * ``hca_core_clock``: frequency of the clock of those timestamps, kHz.
        * ``device_cap_flags_ex``: ``DeviceCapFlags``, those of ``orig_attr.device_cap_flags`` and the ones above
          bit 31. PCI_WRITE_END_PADDING: the device can pad what it writes over PCI to a full cache line. That
          takes traffic off the memory controller and puts it on PCI. It helps where the CPU loads the memory much
          and PCI little, and harms where PCI is busy and packets are small: with cache lines of 128 bytes each
          shorter packet takes 128, up to twice the PCI bandwidth and more. A queue pair asks for it by
          ``QpCreateFlags.PCI_WRITE_END_PADDING``, a work queue by ``WqFlags.PCI_WRITE_END_PADDING``.
        * ``tso_caps``: TCP segmentation by the device: ``max_tso``, the longest payload in bytes;
          ``supported_qpts``, the bit ``1 << QpType`` of each type of queue pair that can.
        * ``rss_caps``: receive-side scaling: ``supported_qpts`` as before; ``max_rwq_indirection_tables``, how many
          tables of work queues; ``max_rwq_indirection_table_size``, entries in one; ``rx_hash_fields_mask``
          (``RxHashFields``), what of a packet can enter the hash; ``rx_hash_function`` (``RxHashFunctionFlags``).
        * ``max_wq_type_rq``: how many receive work queues.
        * ``packet_pacing_caps``: ``qp_rate_limit_min`` and ``qp_rate_limit_max``, kbit/s; ``supported_qpts``.
        * ``raw_packet_caps`` (``RawPacketCaps``), for RAW_PACKET: CVLAN_STRIPPING, the customer VLAN tag can be
          taken out of incoming packets; SCATTER_FCS, the checksum at the end of the frame can be handed over;
          IP_CSUM, IP checksums can be computed and checked; DELAY_DROP, packets can wait for a receive.
        * ``tm_caps``: tag matching: ``max_rndv_hdr_size``, the longest header of a rendezvous request, bytes;
          ``max_num_tags``, tagged buffers in the list of one queue; ``flags`` (``TmCaps``): RC, it works on RC;
          ``max_ops``, operations on a list outstanding at once; ``max_sge``, pieces of a tagged buffer.
        * ``cq_mod_caps``: limits of ``ibv_modify_cq``: ``max_cq_count`` completions, ``max_cq_period``
          microseconds.
        * ``max_dm_size``: memory on the device that can be allocated, bytes.
        * ``pci_atomic_caps``: which sizes an atomic that the device does over PCI can have, for ``fetch_add``,
          ``swap`` and ``compare_swap`` (``PciAtomicOpSize``): OPERATION_4_BYTE_SIZE_SUP,
          OPERATION_8_BYTE_SIZE_SUP and OPERATION_16_BYTE_SIZE_SUP, 4, 8 and 16 bytes.
        * ``xrc_odp_caps`` (``OdpTransportCaps``): on-demand paging of XRC, as ``per_transport_caps``.
        * ``phys_port_cnt_ex``: ports, where there can be more than the 255 that ``orig_attr.phys_port_cnt`` holds.

    Raises:
        VerbsError: EINVAL for an ``input`` whose ``comp_mask`` is not 0, or the errno that the device answers.

    Source: ibv_query_device_ex(3), ``ibv_query_device_ex``, ``struct ibv_device_attr_ex``.
    """
    name, doing, attr = "ibv_query_device_ex", "query the device", abi.ibv_device_attr_ex()
    if input is not None and input.comp_mask:
        hint = f"input.comp_mask is {input.comp_mask:#x}, and must be 0."
        raise VerbsError(name, errno.EINVAL, doing, hint)
    pointer = None if input is None else byref(input)
    try:
        _call_op(name, context, context, pointer, byref(attr), sizeof(attr), doing=doing)
    except (LibraryError, VerbsError) as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        attr = abi.ibv_device_attr_ex()
        _call("ibv_query_device", context, byref(attr.orig_attr), doing=doing)
    return attr


def ibv_query_port(context: Any, port_num: int) -> abi.ibv_port_attr:
    """A port's state, MTUs, LID, link layer and flags.

    Args:
        context: pointer to ``struct ibv_context``.
        port_num: 1 to ``phys_port_cnt``.

    Source: ibv_query_port(3), ``ibv_query_port``.
    """
    attr = abi.ibv_port_attr()
    try:
        _call_op("ibv_query_port", context, context, port_num, byref(attr), sizeof(attr))
    except LibraryError:
        # the exported symbol fills a shorter, older struct with the same head
        _call("ibv_query_port", context, port_num, ctypes.cast(byref(attr), _symbol("ibv_query_port").argtypes[2]))
    return attr


def ibv_query_port_speed(context: Any, port_num: int) -> int:
    """A port's effective bandwidth; since rdma-core 62.

    Returns:
        Units of 100 Mbit/s.

    Source: ibv_query_port_speed(3), ``ibv_query_port_speed``.
    """
    speed = ctypes.c_uint64()
    _call("ibv_query_port_speed", context, port_num, byref(speed))
    return speed.value


def ibv_query_gid_table(context: Any, max_entries: int) -> list[abi.ibv_gid_entry]:
    """All GIDs of all ports in one call, empty slots left out.

    Args:
        context: pointer to ``struct ibv_context``.
        max_entries: at least the sum of the ports' ``gid_tbl_len``.

    Source: ibv_query_gid_table(3), ``_ibv_query_gid_table``.
    """
    entries = (abi.ibv_gid_entry * max_entries)()
    found = _call(
        "_ibv_query_gid_table", context, entries, max_entries, 0, sizeof(abi.ibv_gid_entry), doing="read the GID table"
    )
    return list(entries[:found])


def ibv_query_gid_ex(context: Any, port_num: int, gid_index: int) -> abi.ibv_gid_entry:
    """One slot of a port's GID table, with its type and netdev.

    Raises:
        VerbsError: ENODATA for an empty slot, EINVAL outside of the table.

    Source: ibv_query_gid_ex(3), ``_ibv_query_gid_ex``.
    """
    entry = abi.ibv_gid_entry()
    size = sizeof(entry)
    _call("_ibv_query_gid_ex", context, port_num, gid_index, byref(entry), 0, size, doing=f"read GID {gid_index}")
    return entry


def ibv_query_gid(context: Any, port_num: int, index: int) -> bytes:
    """One slot of a port's GID table, the address only.

    Returns:
        16 bytes in network order; all 0 for an empty slot.

    Source: ibv_query_gid(3), ``ibv_query_gid``.
    """
    gid = abi.ibv_gid()
    _call("ibv_query_gid", context, port_num, index, byref(gid), doing=f"read GID {index}")
    return bytes(gid.raw)


def ibv_query_pkey(context: Any, port_num: int, index: int) -> int:
    """One slot of a port's P_Key table.

    Returns:
        The key, 16 bits in host order, the top one for full membership.

    Source: ibv_query_pkey(3), ``ibv_query_pkey``.
    """
    pkey = ctypes.c_uint16()
    _call("ibv_query_pkey", context, port_num, index, byref(pkey))
    return int.from_bytes(bytes(pkey), "big")


def ibv_get_pkey_index(context: Any, port_num: int, pkey: int) -> int:
    """The first slot of a port's P_Key table that holds ``pkey``.

    Args:
        context: pointer to ``struct ibv_context``.
        port_num: 1 to ``phys_port_cnt``.
        pkey: 16 bits in host order; compared whole, the membership bit (the top one) included.

    Raises:
        VerbsError: the table does not hold it (the errno is that of reading past its end).

    Source: ibv_get_pkey_index(3), ``ibv_get_pkey_index``.
    """
    swapped = int.from_bytes(pkey.to_bytes(2, "big"), sys.byteorder)
    return int(_call("ibv_get_pkey_index", context, port_num, swapped, doing=f"look for P_Key {pkey:#06x}"))


def ibv_query_rt_values_ex(context: Any, comp_mask: int = abi.ValuesMask.RAW_CLOCK) -> abi.ibv_values_ex:
    """What the device can say of itself in real time: its raw clock, in ticks (``raw_clock.tv_nsec``).

    Args:
        context: pointer to ``struct ibv_context``.
        comp_mask: ``ValuesMask``: what is asked for.

    Returns:
        The values; ``comp_mask`` in it says what was answered.

    Raises:
        LibraryError: the provider does not have it.

    Source: ibv_query_rt_values_ex(3), ``ibv_query_rt_values_ex``.
    """
    values = abi.ibv_values_ex(comp_mask=int(comp_mask))
    _call_op("ibv_query_rt_values_ex", context, context, byref(values), doing="read the device's clock")
    return values


def ibv_fork_init() -> None:
    """Make registered memory safe across fork(2), where the kernel does not do so by itself.

    Must come before the first ``ibv_reg_mr``; slows registration down.

    Source: ibv_fork_init(3), ``ibv_fork_init``.
    """
    _call("ibv_fork_init", doing="prepare for fork")


def ibv_is_fork_initialized() -> abi.ForkStatus:
    """Whether registered memory is safe across fork(2).

    Returns:
        ENABLED after ``ibv_fork_init``; UNNEEDED where the kernel copies such memory at a fork, whether
        ``ibv_fork_init`` was called or not; else DISABLED.

    Raises:
        LibraryError: a libibverbs before rdma-core 35.

    Source: ibv_is_fork_initialized(3), ``ibv_is_fork_initialized``.
    """
    return abi.ForkStatus(_call("ibv_is_fork_initialized"))


# ---- words, and rates as numbers


def _words(name: str, value: int) -> str:
    words: bytes = _call(name, value)
    return words.decode()


def ibv_node_type_str(node_type: int) -> str:
    """A ``NodeType`` in words, for example ``InfiniBand channel adapter``. Source: ``ibv_node_type_str``."""
    return _words("ibv_node_type_str", node_type)


def ibv_port_state_str(port_state: int) -> str:
    """A ``PortState`` in words, for example ``active``. Source: ``ibv_port_state_str``."""
    return _words("ibv_port_state_str", port_state)


def ibv_wc_status_str(status: int) -> str:
    """A ``WcStatus`` in words, for example ``success``; ``unknown`` for one that the library does not know.

    Source: ``ibv_wc_status_str``.
    """
    return _words("ibv_wc_status_str", status)


def ibv_event_type_str(event_type: int) -> str:
    """An ``EventType`` in words, for example ``port active``; ``unknown`` for one that the library does not know.

    Source: ibv_event_type_str(3), ``ibv_event_type_str``.
    """
    return _words("ibv_event_type_str", event_type)


def ibv_rate_to_mult(rate: int) -> int:
    """A ``Rate`` as a multiple of 2.5 Gbit/s: 2 for RATE_5_GBPS; -1 for one that is none, RATE_14_GBPS for example.

    Source: ibv_rate_to_mult(3), ``ibv_rate_to_mult``.
    """
    return int(_call("ibv_rate_to_mult", rate))


def mult_to_ibv_rate(mult: int) -> abi.Rate:
    """The ``Rate`` of a multiple of 2.5 Gbit/s; RATE_MAX, no limit, for one that there is no rate for.

    Source: ibv_rate_to_mult(3), ``mult_to_ibv_rate``.
    """
    return abi.Rate(_call("mult_to_ibv_rate", mult))


def ibv_rate_to_mbps(rate: int) -> int:
    """A ``Rate`` in Mbit/s: 5000 for RATE_5_GBPS; -1 for one that the library does not know.

    Source: ibv_rate_to_mbps(3), ``ibv_rate_to_mbps``.
    """
    return int(_call("ibv_rate_to_mbps", rate))


def mbps_to_ibv_rate(mbps: int) -> abi.Rate:
    """The ``Rate`` of so many Mbit/s; RATE_MAX, no limit, for a number that there is no rate for.

    Source: ibv_rate_to_mbps(3), ``mbps_to_ibv_rate``.
    """
    return abi.Rate(_call("mbps_to_ibv_rate", mbps))


# ---- protection domains and memory


def ibv_alloc_pd(context: Any) -> Any:
    """A protection domain: memory and queue pairs work together only within one.

    Source: ibv_alloc_pd(3), ``ibv_alloc_pd``.
    """
    return _call("ibv_alloc_pd", context, doing="allocate a protection domain")


def ibv_dealloc_pd(pd: Any) -> None:
    """Free a protection domain; EBUSY while anything is still in it.

    Source: ibv_alloc_pd(3), ``ibv_dealloc_pd``.
    """
    _call("ibv_dealloc_pd", pd, doing="free a protection domain")


def ibv_import_pd(context: Any, pd_handle: int) -> Any:
    """A protection domain that another context of the same command descriptor has made.

    Args:
        context: pointer to the ``struct ibv_context`` of :func:`ibv_import_device`, or to the one that it was
            imported from.
        pd_handle: ``handle`` of the ``struct ibv_pd`` there.

    Returns:
        Pointer to ``struct ibv_pd``. ``ibv_dealloc_pd`` ends the domain for all, :func:`ibv_unimport_pd` only
        this use of it; who does which is for the users to agree on.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot, or a libibverbs before rdma-core 31.

    Source: ibv_import_pd(3), ``ibv_import_pd``.
    """
    return _call("ibv_import_pd", context, pd_handle, doing=f"import protection domain {pd_handle}")


def ibv_unimport_pd(pd: Any) -> None:
    """Give an imported protection domain back; the domain itself stays.

    Source: ibv_import_pd(3), ``ibv_unimport_pd``.
    """
    _call("ibv_unimport_pd", pd)


def ibv_alloc_td(context: Any) -> Any:
    """A thread domain: the promise that one thread at a time uses what is made in it, so that nothing is locked.

    It counts through a parent domain. The attr struct is reserved and passed empty.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none; mlx5, efa and hns do.

    Source: ibv_alloc_td(3), ``ibv_alloc_td``.
    """
    attr = abi.ibv_td_init_attr()
    return _call_op("ibv_alloc_td", context, context, byref(attr), doing="allocate a thread domain")


def ibv_dealloc_td(td: Any) -> None:
    """Free a thread domain; EBUSY while a parent domain has it.

    Source: ibv_alloc_td(3), ``ibv_dealloc_td``.
    """
    _call_op("ibv_dealloc_td", td.contents.context, td, doing="free a thread domain")


def ibv_alloc_parent_domain(context: Any, attr: abi.ibv_parent_domain_init_attr) -> Any:
    """A protection domain that also says how what is made in it is locked and where its memory comes from.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``pd``, the protection domain that it stands for; ``td``, a thread domain, or NULL; with ALLOCATORS in
            ``comp_mask`` (``ParentDomainInitAttrMask``) ``alloc`` and ``free``, called with ``pd_context``
            (PD_CONTEXT) for the memory of queues. ``alloc`` answers with zeroed memory that a fork does not copy,
            NULL for an error, or -1 for the provider's own way. Both must live as long as the domain.

    Returns:
        Pointer to ``struct ibv_pd``, good for every verb that takes one; ``ibv_dealloc_pd`` frees it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none; mlx5, efa, hns and mana do.

    Source: ibv_alloc_parent_domain(3), ``ibv_alloc_parent_domain``.
    """
    return _call_op("ibv_alloc_parent_domain", context, context, byref(attr), doing="allocate a parent domain")


def ibv_reg_mr(pd: Any, addr: int, length: int, access: int) -> Any:
    """Register memory, which pins it.

    Args:
        pd: pointer to ``struct ibv_pd``.
        addr: first byte's virtual address.
        length: bytes.
        access: ``AccessFlags``; remote write or atomic needs local write as well. ``ON_DEMAND`` pins
            nothing: the device faults pages in. Bits that a kernel may ignore (``RELAXED_ORDERING``) go
            through ``ibv_reg_mr_iova2``, as the header's macro does.

    Returns:
        Pointer to ``struct ibv_mr`` with ``lkey`` and ``rkey``.

    Source: ibv_reg_mr(3), ``ibv_reg_mr``.
    """
    if access & _ACCESS_OPTIONAL_RANGE:
        return ibv_reg_mr_iova2(pd, addr, length, addr, access)
    return _call("ibv_reg_mr", pd, addr, length, access, doing=f"register {length} bytes of memory")


#: access bits that may be ignored where they are not known: ``IBV_ACCESS_OPTIONAL_RANGE``
_ACCESS_OPTIONAL_RANGE = 0x3FF00000


def ibv_reg_mr_iova(pd: Any, addr: int, length: int, iova: int, access: int) -> Any:
    """Register memory that work requests and the peer address from ``iova`` on instead of ``addr``.

    Args:
        pd, addr, length, access: as ``ibv_reg_mr``, bits that a kernel may ignore included.
        iova: the address of the first byte as the device is told it; the same as ``addr`` within a page.

    Source: ibv_reg_mr(3), ``ibv_reg_mr_iova``.
    """
    if access & _ACCESS_OPTIONAL_RANGE:
        return ibv_reg_mr_iova2(pd, addr, length, iova, access)
    return _call(
        "ibv_reg_mr_iova", pd, addr, length, iova, access, doing=f"register {length} bytes of memory at {iova:#x}"
    )


def ibv_reg_mr_iova2(pd: Any, addr: int, length: int, iova: int, access: int) -> Any:
    """The same, with access bits that are dropped where the kernel does not know them.

    Source: ibv_reg_mr(3), ``ibv_reg_mr_iova2``.
    """
    return _call(
        "ibv_reg_mr_iova2", pd, addr, length, iova, access, doing=f"register {length} bytes of memory at {iova:#x}"
    )


def ibv_reg_dmabuf_mr(pd: Any, offset: int, length: int, iova: int, fd: int, access: int) -> Any:
    """Register memory behind a dma-buf descriptor, a GPU's for example.

    Args:
        pd: pointer to ``struct ibv_pd``.
        offset: bytes into the dma-buf.
        length: bytes.
        iova: the address that work requests and the peer use; its offset in a page is that of ``offset``.
        fd: the dma-buf's descriptor; may be closed after registration.
        access: ``AccessFlags``; not ``ON_DEMAND``.

    Source: ibv_reg_mr(3), ``ibv_reg_dmabuf_mr``.
    """
    doing = f"register {length} bytes of dma-buf {fd}"
    return _call("ibv_reg_dmabuf_mr", pd, offset, length, iova, fd, access, doing=doing)


def ibv_rereg_mr(mr: Any, flags: int, pd: Any, addr: int | None, length: int, access: int) -> None:
    """Change what a region covers, its protection domain or its access, and keep the object.

    Args:
        mr: pointer to ``struct ibv_mr``; its keys may change.
        flags: ``ReregMrFlags``: which of the following count.
        pd, addr, length, access: the new ones; those that do not count are None, None, 0 and 0.

    Raises:
        VerbsError: its ``doing`` says which region is still valid, by ``enum ibv_rereg_mr_err_code``.

    Source: ibv_rereg_mr(3), ``ibv_rereg_mr``.
    """
    ctypes.set_errno(0)
    result = _symbol("ibv_rereg_mr")(mr, flags, pd, addr, length, access)
    if result:
        left = ctypes.get_errno()
        number = errno_of("ibv_rereg_mr", result, left)
        # what a provider lacks it has not begun: libibverbs calls it ERR_CMD all the same
        code = abi.ReregMrError.ERR_INPUT if number == errno.EOPNOTSUPP else abi.ReregMrError(result)
        doing = f"register memory again ({code}: {_AFTER_REREG.get(code, '')})"
        raise failed("ibv_rereg_mr", result, doing, left)


#: what is left after ``ibv_rereg_mr`` failed. Source: ibv_rereg_mr(3)
_AFTER_REREG = {
    abi.ReregMrError.ERR_INPUT: "the old region is valid",
    abi.ReregMrError.ERR_DONT_FORK_NEW: "the old region is valid",
    abi.ReregMrError.ERR_DO_FORK_OLD: "the new region is valid",
    abi.ReregMrError.ERR_CMD: "close the region, do not use it",
    abi.ReregMrError.ERR_CMD_AND_DO_FORK_NEW: "close the region, do not use it",
}


def ibv_advise_mr(pd: Any, advice: int, flags: int, sges: Any, num_sge: int) -> None:
    """Tell the device that ranges of on-demand memory will be used soon.

    Args:
        pd: pointer to ``struct ibv_pd``.
        advice: ``AdviseMrAdvice``.
        flags: ``AdviseMrFlags``; with ``FLUSH`` it returns when it is done.
        sges: array of ``struct ibv_sge``.
        num_sge: how many.

    Source: ibv_advise_mr(3), ``ibv_advise_mr``.
    """
    _call_op("ibv_advise_mr", pd.contents.context, pd, advice, flags, sges, num_sge, doing="advise on memory")


def ibv_dereg_mr(mr: Any) -> None:
    """Unregister memory; EBUSY while a memory window is bound to it.

    Source: ibv_reg_mr(3), ``ibv_dereg_mr``.
    """
    _call("ibv_dereg_mr", mr, doing="unregister memory")


def ibv_reg_mr_ex(pd: Any, attr: abi.ibv_mr_init_attr) -> Any:
    """Register memory of any kind: plain, behind a dma-buf descriptor, or with a DMA handle.

    Args:
        pd: pointer to ``struct ibv_pd``.
        attr: ``length`` in bytes and ``access`` (``AccessFlags``), and as ``comp_mask`` (``MrInitAttrMask``) says
            ``addr``; ``fd`` and ``fd_offset`` of a dma-buf; ``iova``, which a dma-buf needs; ``dmah``; ``buf``.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot (only mlx5 can, up to rdma-core 65), or a libibverbs
            before rdma-core 59.

    Source: ibv_reg_mr_ex(3), ``ibv_reg_mr_ex``.
    """
    return _call("ibv_reg_mr_ex", pd, byref(attr), doing=f"register {attr.length} bytes of memory")


def ibv_alloc_null_mr(pd: Any) -> Any:
    """A region without memory: what is written to it is dropped, what is read is 0, and PCI is not used.

    Returns:
        Pointer to ``struct ibv_mr``. Only its ``lkey`` counts, for pieces of a message that nobody needs or that
        are to be 0, at any address. ``ibv_dereg_mr`` ends it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none; mlx5 does.

    Source: ibv_alloc_null_mr(3), ``ibv_alloc_null_mr``.
    """
    return _call_op("ibv_alloc_null_mr", pd.contents.context, pd, doing="allocate a null memory region")


def ibv_import_mr(pd: Any, mr_handle: int) -> Any:
    """A region that another context of the same command descriptor has registered.

    Args:
        pd: pointer to a ``struct ibv_pd`` of that command descriptor.
        mr_handle: ``handle`` of the ``struct ibv_mr`` there.

    Returns:
        Pointer to ``struct ibv_mr``; its ``addr`` is NULL. ``ibv_dereg_mr`` ends the region for all,
        :func:`ibv_unimport_mr` only this use of it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot, or a libibverbs before rdma-core 31.

    Source: ibv_import_mr(3), ``ibv_import_mr``.
    """
    return _call("ibv_import_mr", pd, mr_handle, doing=f"import memory region {mr_handle}")


def ibv_unimport_mr(mr: Any) -> None:
    """Give an imported region back; the region itself stays. Source: ibv_import_mr(3), ``ibv_unimport_mr``."""
    _call("ibv_unimport_mr", mr)


# ---- memory on the device


def ibv_alloc_dm(context: Any, attr: abi.ibv_alloc_dm_attr) -> Any:
    """Memory on the device itself, which no PCI transfer is needed for.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``length`` in bytes, up to ``max_dm_size`` in all; ``log_align_req``, for a start that is a multiple of
            2 to that, as atomics need it; ``comp_mask`` 0.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none; mlx5 and mana do.
        VerbsError: ENOMEM where no more is free.

    Source: ibv_alloc_dm(3), ``ibv_alloc_dm``.
    """
    doing = f"allocate {attr.length} bytes of device memory"
    return _call_op("ibv_alloc_dm", context, context, byref(attr), doing=doing)


def ibv_free_dm(dm: Any) -> None:
    """Free device memory; EBUSY while a region is registered on it. Source: ibv_alloc_dm(3), ``ibv_free_dm``."""
    _call_op("ibv_free_dm", dm.contents.context, dm, doing="free device memory")


def ibv_memcpy_to_dm(dm: Any, dm_offset: int, host_addr: int, length: int) -> None:
    """Copy from the host to device memory.

    Args:
        dm: pointer to ``struct ibv_dm``.
        dm_offset: bytes from its start.
        host_addr: address of the host's first byte.
        length: bytes.

    Source: ibv_alloc_dm(3), ``ibv_memcpy_to_dm``.
    """
    _call_op("ibv_memcpy_to_dm", dm, dm, dm_offset, host_addr, length, doing="copy to device memory")


def ibv_memcpy_from_dm(host_addr: int, dm: Any, dm_offset: int, length: int) -> None:
    """Copy from device memory to the host. Arguments as ``ibv_memcpy_to_dm``.

    Source: ibv_alloc_dm(3), ``ibv_memcpy_from_dm``.
    """
    _call_op("ibv_memcpy_from_dm", dm, host_addr, dm, dm_offset, length, doing="copy from device memory")


def ibv_reg_dm_mr(pd: Any, dm: Any, dm_offset: int, length: int, access: int) -> Any:
    """Register device memory.

    Args:
        pd: pointer to ``struct ibv_pd``.
        dm: pointer to ``struct ibv_dm``.
        dm_offset: bytes from its start.
        length: bytes.
        access: ``AccessFlags``, ZERO_BASED among them: work requests and the peer count addresses from 0.

    Source: ibv_alloc_dm(3), ``ibv_reg_dm_mr``.
    """
    doing = f"register {length} bytes of device memory"
    return _call_op("ibv_reg_dm_mr", pd.contents.context, pd, dm, dm_offset, length, access, doing=doing)


def ibv_import_dm(context: Any, dm_handle: int) -> Any:
    """Device memory that another context of the same command descriptor has allocated.

    Args:
        context: pointer to ``struct ibv_context``.
        dm_handle: ``handle`` of the ``struct ibv_dm`` there.

    Returns:
        Pointer to ``struct ibv_dm``. ``ibv_free_dm`` frees the memory for all, :func:`ibv_unimport_dm` ends only
        this use of it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot, or a libibverbs before rdma-core 35.

    Source: ibv_import_dm(3), ``ibv_import_dm``.
    """
    return _call("ibv_import_dm", context, dm_handle, doing=f"import device memory {dm_handle}")


def ibv_unimport_dm(dm: Any) -> None:
    """Give imported device memory back; the memory itself stays. Source: ibv_import_dm(3), ``ibv_unimport_dm``."""
    _call("ibv_unimport_dm", dm)


def ibv_dm_export_dmabuf_fd(dm: Any) -> int:
    """A dma-buf descriptor of device memory, for another device to register; the caller closes it.

    Raises:
        LibraryError: EOPNOTSUPP where the provider cannot, or a libibverbs before rdma-core 62.

    Source: ibv_dm_export_dmabuf_fd(3), ``ibv_dm_export_dmabuf_fd``.
    """
    return int(_call("ibv_dm_export_dmabuf_fd", dm, doing="export device memory"))


# ---- completions


def ibv_create_comp_channel(context: Any) -> Any:
    """A descriptor on which completion events can be waited for.

    Source: ibv_create_comp_channel(3), ``ibv_create_comp_channel``.
    """
    return _call("ibv_create_comp_channel", context, doing="create a completion channel")


def ibv_destroy_comp_channel(channel: Any) -> None:
    """Destroy a channel; EBUSY while a CQ uses it.

    Source: ibv_create_comp_channel(3), ``ibv_destroy_comp_channel``.
    """
    _call("ibv_destroy_comp_channel", channel)


def ibv_create_cq(context: Any, cqe: int, channel: Any = None, comp_vector: int = 0, cq_context: int = 0) -> Any:
    """A completion queue.

    Args:
        context: pointer to ``struct ibv_context``.
        cqe: entries wanted, 1 to ``max_cqe``; the real number may be larger.
        channel: pointer to ``struct ibv_comp_channel``, or None.
        comp_vector: 0 to ``num_comp_vectors - 1``.
        cq_context: a number of the caller's, 64 bits, which ``ibv_get_cq_event`` gives back; 0 for none.

    Source: ibv_create_cq(3), ``ibv_create_cq``.
    """
    doing = f"create a completion queue of {cqe} entries"
    return _call("ibv_create_cq", context, cqe, cq_context or None, channel, comp_vector, doing=doing)


def ibv_resize_cq(cq: Any, cqe: int) -> None:
    """Change how many entries a CQ has; ``cq.contents.cqe`` then says how many it got, at least ``cqe``.

    Args:
        cq: pointer to ``struct ibv_cq``.
        cqe: entries wanted, 1 to ``max_cqe`` and not below the completions that wait in it (EINVAL).

    Raises:
        LibraryError: the provider does not have it.

    Source: ibv_resize_cq(3), ``ibv_resize_cq``.
    """
    _call("ibv_resize_cq", cq, cqe, doing=f"resize a completion queue to {cqe} entries")


def ibv_modify_cq(cq: Any, attr: abi.ibv_modify_cq_attr) -> None:
    """Change a CQ's moderation: one event for so many completions, or after so many microseconds.

    Args:
        cq: pointer to ``struct ibv_cq``.
        attr: ``moderate``, with ``CqAttrMask.MODERATE`` in ``attr_mask``; at most the device's ``cq_mod_caps``.

    Raises:
        LibraryError: the provider does not have it.

    Source: ibv_modify_cq(3), ``ibv_modify_cq``.
    """
    _call_op("ibv_modify_cq", cq.contents.context, cq, byref(attr), doing="modify a completion queue")


def ibv_destroy_cq(cq: Any) -> None:
    """Destroy a CQ. It blocks until every event got from it was acknowledged; EBUSY while a QP uses it.

    Source: ibv_create_cq(3), ``ibv_destroy_cq``.
    """
    _call("ibv_destroy_cq", cq)


def ibv_req_notify_cq(cq: Any, solicited_only: bool = False) -> None:
    """Ask for one event at the next completion. Completions that are already there give none: poll after it.

    Source: ibv_req_notify_cq(3), ``ibv_req_notify_cq``.
    """
    _call_op("ibv_req_notify_cq", cq.contents.context, cq, int(solicited_only))


def ibv_get_cq_event(channel: Any, into: tuple[Any, Any] | None = None) -> tuple[Any, int] | None:
    """The next completion event of a channel; waits for it if the channel's descriptor blocks.

    Every event that it returns must be acknowledged with :func:`ibv_ack_cq_events`, one for one: to avoid
    races, destroying a queue waits until all of its events are. An event may come without a completion: one
    that was added between ``ibv_req_notify_cq`` and the polling that empties the queue gives one more event,
    and is polled before that event is read.

    Args:
        channel: pointer to ``struct ibv_comp_channel``. Make its ``fd`` non-blocking and wait for it to be
            readable (poll(2)) to wait with a time limit.
        into: a pointer to ``struct ibv_cq`` and a ``c_void_p``, which get what is returned: there it is still where a
            signal's handler raises just when it has come. None for new ones.

    Returns:
        (pointer to the ``struct ibv_cq`` that got the event, its ``cq_context``, 0 if it has none); None if
        the descriptor does not block and there is no event.

    Source: ibv_get_cq_event(3), ``ibv_get_cq_event``.
    """
    cq, cq_context = into or (POINTER(abi.ibv_cq)(), ctypes.c_void_p())
    there = _taken("ibv_get_cq_event", channel, byref(cq), byref(cq_context), doing="take a completion event")
    return (cq, cq_context.value or 0) if there else None


def _taken(name: str, *args: Any, doing: str) -> bool:
    """Read one event; False if there is none, which is no failure and too frequent for an exception."""
    ctypes.set_errno(0)
    if _symbol(name)(*args) == 0:
        return True
    number = ctypes.get_errno() or errno.EIO
    if number == errno.EAGAIN:
        return False
    raise VerbsError(name, number, doing)


def ibv_ack_cq_events(cq: Any, nevents: int) -> None:
    """Acknowledge completion events that :func:`ibv_get_cq_event` returned.

    Each event is acknowledged, and once: ``ibv_destroy_cq`` waits until as many were as were got, so one too few
    and it never returns. It takes a mutex, which may be dear where data flows: keep a count, and acknowledge
    many events in one call. It returns no value and cannot fail.

    The order of work: make the queue with a channel and ask for the first event (``ibv_req_notify_cq``) before
    a completion can come. Then, again and again: get an event and acknowledge it (now or with later ones), ask
    for the next event, and only then poll until the queue is empty. An event may find it empty.

    Args:
        cq: pointer to the ``struct ibv_cq`` that got them.
        nevents: how many, 32 bits; not more than were got and not yet acknowledged.

    Source: ibv_get_cq_event(3), ``ibv_ack_cq_events``.
    """
    _call("ibv_ack_cq_events", cq, nevents)


def ibv_poll_cq(cq: Any, num_entries: int, wc: Any) -> int:
    """Take completions.

    Args:
        cq: pointer to ``struct ibv_cq``.
        num_entries: the most to take.
        wc: array of at least as many ``struct ibv_wc``.

    Returns:
        How many were taken, 0 if there is none.

    Raises:
        VerbsError: EIO if the provider answers with a negative number: it is its own, and no errno.

    Source: ibv_poll_cq(3), ``ibv_poll_cq``.
    """
    return int(_call_op("ibv_poll_cq", cq.contents.context, cq, num_entries, wc, doing="poll a completion queue"))


# ---- extended completion queues


def ibv_create_cq_ex(context: Any, attr: abi.ibv_cq_init_attr_ex) -> Any:
    """A completion queue that is polled as an iterator, and gives the fields that it was made for.

    It is also a plain queue: :func:`ibv_cq_ex_to_cq` gives it as such, for ``ibv_destroy_cq``, which destroys
    it, and for every other verb.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``struct ibv_cq_init_attr_ex``:

            * ``cqe``: the least number of entries wanted, 1 to ``max_cqe``.
            * ``cq_context``: a number of the caller's, 64 bits, which ``ibv_get_cq_event`` gives back.
            * ``channel``: pointer to the ``struct ibv_comp_channel`` for its events; NULL if there will be none.
            * ``comp_vector``: which completion vector signals the events, 0 or more and below the context's
              ``num_comp_vectors``.
            * ``wc_flags`` (``CqWcFlags``): what completions must tell: BYTE_LEN, the length in bytes; IMM,
              immediate data or an invalidated rkey; QP_NUM, the local queue pair; SRC_QP, the sender's queue pair;
              SLID, the sender's LID; SL, the service level; DLID_PATH_BITS, the low bits of the LID it was sent to;
              COMPLETION_TIMESTAMP, when, by the device's clock; CVLAN, the VLAN tag; FLOW_TAG, the tag of the
              steering rule; TM_INFO, the header of a tag-matched message; COMPLETION_TIMESTAMP_WALLCLOCK, when, by
              the wall clock.
            * ``comp_mask`` (``CqInitAttrMask``): which of the fields below count: FLAGS and PD.
            * ``flags`` (``CreateCqAttrFlags``), with ``comp_mask`` FLAGS. SINGLE_THREADED: only one thread uses the
              queue, so the provider does not lock it. IGNORE_OVERRUN: the queue does not go to an error state when
              it overruns, each completion is written to the next entry; a program must be made so that it never
              overruns, or completions can be lost.
            * ``parent_domain``: pointer to the ``struct ibv_pd`` of ``ibv_alloc_parent_domain`` to be used by the
              queue, with ``comp_mask`` PD.

    Returns:
        Pointer to ``struct ibv_cq_ex``. Its ``cqe`` is the real number of entries, which can be larger than
        asked for. To poll it: :func:`ibv_start_poll`, :func:`ibv_next_poll` for each further completion, and
        :func:`ibv_end_poll`. After one of the first two answered True a completion is current: ``wr_id`` (64 bits)
        and ``status`` (``WcStatus``) are in the struct, and the ``ibv_wc_read_*`` functions give the rest. Each of
        them needs its bit in ``wc_flags``, but for opcode, vendor_err and wc_flags; without it the function is
        absent (LibraryError), or what it gives is garbage. Some fields mean something only with certain opcodes,
        and with a status other than SUCCESS only ``wr_id``, ``status``, qp_num and vendor_err do. (The manual
        page names ibv_wc_read_pkey_index too; no header has it, ``struct ibv_wc`` of a plain queue has
        ``pkey_index``.)

    Raises:
        LibraryError: EOPNOTSUPP where the library or the provider has no extended queues.
        VerbsError: EOPNOTSUPP if the provider lacks one of the flags; EINVAL outside of the limits.

    Source: ibv_create_cq_ex(3), ``ibv_create_cq_ex``, ``struct ibv_cq_init_attr_ex``.
    """
    doing = f"create an extended completion queue of {attr.cqe} entries with {abi.CqWcFlags(attr.wc_flags)}"
    return _call_op("ibv_create_cq_ex", context, context, byref(attr), doing=doing)


def ibv_cq_ex_to_cq(cq: Any) -> Any:
    """The same queue as ``struct ibv_cq *``, for every verb that takes one. A cast.

    Source: ibv_create_cq_ex(3), ``ibv_cq_ex_to_cq``.
    """
    return ctypes.cast(cq, POINTER(abi.ibv_cq))


def _advance(name: str, doing: str, cq: Any, *args: Any) -> bool:
    result: int = op(name, cq)(cq, *args)
    if result not in (0, errno.ENOENT):
        raise failed(name, result, doing)
    return result == 0


def ibv_start_poll(cq: Any, doing: str = "poll an extended completion queue") -> bool:
    """Begin a batch with the oldest completion; most providers hold the queue's lock until ``ibv_end_poll``.

    Until then the same thread must do nothing that takes that lock, or it waits for itself for ever: another
    ``ibv_start_poll``, ``ibv_poll_cq``, ``ibv_resize_cq``, ``ibv_req_notify_cq``; destroying a queue pair or a work
    queue of this completion queue, or moving one to or from RESET, which takes its completions out. The
    attr struct, there to make the function extensible, is reserved and passed empty.

    Args:
        cq: pointer to ``struct ibv_cq_ex``, or for speed the struct itself; so all that read it.
        doing: what is being done, for the error's message.

    Returns:
        Whether a completion is current. If not (ENOENT: the queue is empty and in order), or on an exception,
        there is no batch, and ``ibv_end_poll`` must not be called.

    Source: ibv_create_cq_ex(3), ``ibv_start_poll``; rdma-core, providers/mlx5/verbs.c, ``mlx5_lock_cqs``.
    """
    return _advance("ibv_start_poll", doing, cq, _POLL_ATTR)


#: reserved: every batch is begun with the same
_POLL_ATTR = abi.ibv_poll_cq_attr()


def ibv_next_poll(cq: Any, doing: str = "poll an extended completion queue") -> bool:
    """Go on to the next completion of the batch: after ``ibv_start_poll`` and before ``ibv_end_poll``.

    Returns:
        Whether a completion is current. If not (ENOENT: the queue is empty and in order), and also on an
        exception, ``ibv_end_poll`` must still be called; but see :func:`next_poll_ends_batch`.

    Source: ibv_create_cq_ex(3), ``ibv_next_poll``.
    """
    return _advance("ibv_next_poll", doing, cq)


def next_poll_ends_batch(cq: Any) -> bool:
    """Whether the provider may end the batch by itself when ``ibv_next_poll`` finds nothing.

    That is a fault of rxe's before rdma-core 60: ``ibv_end_poll``, which is due then, lets go of a lock
    that is not held, and before 55 also goes one past the last completion, after which the queue seems
    full of old ones. Who may not know the library's version does without ``ibv_next_poll`` there, and
    starts a batch for each completion.

    Source: rdma-core, providers/rxe/rxe.c, ``cq_next_poll``, and the commits b78b414e0 and 5e7aa4102.
    """
    address = ctypes.cast(cq.contents.next_poll, ctypes.c_void_p)
    info = _DlInfo()
    found = ctypes.pythonapi.dladdr(address, byref(info))
    return bool(found) and os.path.basename(info.file_name or b"").startswith(b"librxe")


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3): the shared object and the symbol that an address is in."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def ibv_end_poll(cq: Any) -> None:
    """End a batch: its completions are consumed, and the queue's lock is let go. The next one is a new batch.

    Source: ibv_create_cq_ex(3), ``ibv_end_poll``.
    """
    op("ibv_end_poll", cq)(cq)


def _read(name: str, cq: Any) -> int:
    return int(op(name, cq)(cq))


def ibv_wc_read_opcode(cq: Any) -> int:
    """What has completed: a ``WcOpcode``. Always there.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_opcode``.
    """
    return _read("ibv_wc_read_opcode", cq)


def ibv_wc_read_vendor_err(cq: Any) -> int:
    """The vendor's own code for a failure, 32 bits. Always there.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_vendor_err``.
    """
    return _read("ibv_wc_read_vendor_err", cq)


def ibv_wc_read_wc_flags(cq: Any) -> int:
    """``WcFlags``: whether there is immediate data, an invalidated rkey, a GRH. Always there.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_wc_flags``.
    """
    return _read("ibv_wc_read_wc_flags", cq)


def ibv_wc_read_byte_len(cq: Any) -> int:
    """Bytes that came in (on UD with the 40 of the GRH). Needs ``BYTE_LEN``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_byte_len``.
    """
    return _read("ibv_wc_read_byte_len", cq)


def ibv_wc_read_imm_data(cq: Any) -> int:
    """The immediate data, 32 bits, in host order here. Needs ``IMM``; valid with ``WcFlags.WITH_IMM``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_imm_data``.
    """
    return socket.ntohl(_read("ibv_wc_read_imm_data", cq))


def ibv_wc_read_invalidated_rkey(cq: Any) -> int:
    """The rkey that a SEND_WITH_INV invalidated. Needs ``IMM``; valid with ``WcFlags.WITH_INV``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_invalidated_rkey``.
    """
    return _read("ibv_wc_read_invalidated_rkey", cq)


def ibv_wc_read_qp_num(cq: Any) -> int:
    """The local queue pair's number, 24 bits. Needs ``QP_NUM``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_qp_num``.
    """
    return _read("ibv_wc_read_qp_num", cq)


def ibv_wc_read_src_qp(cq: Any) -> int:
    """The sender's queue pair number, 24 bits; UD. Needs ``SRC_QP``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_src_qp``.
    """
    return _read("ibv_wc_read_src_qp", cq)


def ibv_wc_read_slid(cq: Any) -> int:
    """The sender's LID, 16 bits (32 for extended LIDs); UD on InfiniBand. Needs ``SLID``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_slid``.
    """
    return _read("ibv_wc_read_slid", cq)


def ibv_wc_read_sl(cq: Any) -> int:
    """The service level, 0 to 15; UD. Needs ``SL``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_sl``.
    """
    return _read("ibv_wc_read_sl", cq)


def ibv_wc_read_dlid_path_bits(cq: Any) -> int:
    """The low bits of the LID it was sent to, 7 bits; UD unicast. Needs ``DLID_PATH_BITS``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_dlid_path_bits``.
    """
    return _read("ibv_wc_read_dlid_path_bits", cq)


def ibv_wc_read_completion_ts(cq: Any) -> int:
    """When it completed, in ticks of the device's clock (``hca_core_clock`` kHz). Needs ``COMPLETION_TIMESTAMP``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_completion_ts``.
    """
    return _read("ibv_wc_read_completion_ts", cq)


def ibv_wc_read_completion_wallclock_ns(cq: Any) -> int:
    """When it completed, in nanoseconds of the wall clock. Needs ``COMPLETION_TIMESTAMP_WALLCLOCK``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_completion_wallclock_ns``.
    """
    return _read("ibv_wc_read_completion_wallclock_ns", cq)


def ibv_wc_read_cvlan(cq: Any) -> int:
    """The stripped VLAN tag, 16 bits; RAW_PACKET. Needs ``CVLAN``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_cvlan``.
    """
    return _read("ibv_wc_read_cvlan", cq)


def ibv_wc_read_flow_tag(cq: Any) -> int:
    """The tag of the steering rule that the packet met, 24 bits; RAW_PACKET. Needs ``FLOW_TAG``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_flow_tag``.
    """
    return _read("ibv_wc_read_flow_tag", cq)


def ibv_wc_read_tm_info(cq: Any) -> abi.ibv_wc_tm_info:
    """The head of a tag-matched message: ``tag``, 64 bits, and ``priv``, 32 bits of the sender's. Needs ``TM_INFO``.

    Source: ibv_create_cq_ex(3), ``ibv_wc_read_tm_info``.
    """
    info = abi.ibv_wc_tm_info()
    op("ibv_wc_read_tm_info", cq)(cq, byref(info))
    return info


# ---- async events


def ibv_get_async_event(context: Any) -> abi.ibv_async_event | None:
    """The next event of the device, a port, or one of this context's objects; blocks if ``async_fd`` does.

    Each must be acknowledged: destroying its object waits for that.

    Returns:
        The event: ``event_type`` (``EventType``) says which member of ``element`` is valid; None if the
        descriptor does not block and there is no event.

    Source: ibv_get_async_event(3), ``ibv_get_async_event``.
    """
    event = abi.ibv_async_event()
    return event if _taken("ibv_get_async_event", context, byref(event), doing="take an async event") else None


def ibv_ack_async_event(event: abi.ibv_async_event) -> None:
    """Acknowledge one event, once; its object must still exist.

    Source: ibv_get_async_event(3), ``ibv_ack_async_event``.
    """
    _call("ibv_ack_async_event", byref(event))


# ---- queue pairs


def ibv_create_qp(pd: Any, attr: abi.ibv_qp_init_attr) -> Any:
    """A queue pair, in RESET.

    Args:
        pd: pointer to ``struct ibv_pd``.
        attr: what is wanted; ``attr.cap`` is updated to what was given.

    Source: ibv_create_qp(3), ``ibv_create_qp``.
    """
    ctypes.set_errno(0)
    qp = _symbol("ibv_create_qp")(pd, byref(attr))
    if not qp:
        doing = f"create a queue pair of type {abi.QpType(attr.qp_type)}"
        raise failed("ibv_create_qp", qp, doing, ctypes.get_errno())
    return qp


def ibv_modify_qp(qp: Any, attr: abi.ibv_qp_attr, attr_mask: int) -> int:
    """Change a queue pair's attributes and its state.

    If any attribute or the mask is invalid, none is changed, the state neither. INIT to RTR on RoCE resolves the
    peer's address, which can block for seconds.

    Args:
        qp: pointer to ``struct ibv_qp``.
        attr: ``struct ibv_qp_attr``; each field counts if its bit is in ``attr_mask``:

            * ``qp_state`` (STATE): move to this state, a ``QpState``.
            * ``cur_qp_state`` (CUR_STATE): take it that this is the state now.
            * ``path_mtu`` (PATH_MTU): an ``Mtu`` code; valid only for RC and UC.
            * ``path_mig_state`` (PATH_MIG_STATE): path migration, a ``MigState``; needs AUTO_PATH_MIG, see below.
            * ``qkey`` (QKEY): the Q_Key that incoming messages must have, 32 bits; valid only for UD.
            * ``rq_psn`` (RQ_PSN): the first packet number that comes, 24 bits; valid only for RC and UC.
            * ``sq_psn`` (SQ_PSN): the first packet number that is sent, 24 bits.
            * ``dest_qp_num`` (DEST_QPN): the peer's queue pair, 24 bits; valid only for RC and UC.
            * ``qp_access_flags`` (ACCESS_FLAGS): what the peer may do, ``AccessFlags``; valid only for RC and UC.
            * ``cap`` (CAP): new sizes; needs RESIZE_MAX_WR, see below.
            * ``ah_attr`` (AV): the path to the peer, ``struct ibv_ah_attr``; valid only for RC and UC.
            * ``alt_ah_attr``, ``alt_pkey_index``, ``alt_port_num``, ``alt_timeout`` (ALT_PATH, all four): the
              alternate path, its P_Key index, its port, and its ACK timeout (RC); valid only for RC and UC.
            * ``pkey_index`` (PKEY_INDEX): place in the port's P_Key table, 16 bits.
            * ``en_sqd_async_notify`` (EN_SQD_ASYNC_NOTIFY): 1: an async event, SQ_DRAINED, when the send queue has
              drained; valid only if ``qp_state`` is SQD.
            * ``sq_draining``: no bit: ``ibv_query_qp`` answers with it, and it does not count here.
            * ``max_rd_atomic`` (MAX_QP_RD_ATOMIC): RDMA reads and atomics that it has outstanding at the peer at
              once; valid only for RC.
            * ``max_dest_rd_atomic`` (MAX_DEST_RD_ATOMIC): those of the peer that it answers at once; valid only for
              RC.
            * ``min_rnr_timer`` (MIN_RNR_TIMER): how long the peer is told to wait where no receive is posted, a
              code, 0 to 31; valid only for RC.
            * ``port_num`` (PORT): the device's port, from 1.
            * ``timeout`` (TIMEOUT): how long to wait for an ACK, a code, 0 to 31: 4.096 us x 2^timeout, 0 for ever;
              valid only for RC.
            * ``retry_cnt`` (RETRY_CNT): how often to send again without an ACK, 0 to 7; valid only for RC.
            * ``rnr_retry`` (RNR_RETRY): how often to send again where no receive is posted, 0 to 7, 7 for ever;
              valid only for RC.
            * ``rate_limit`` (RATE_LIMIT): packet pacing, kbit/s; drivers say for which types and moves.

            ``ah_attr`` and ``alt_ah_attr`` must have ``is_global`` 1 and a ``grh`` on a port with the flag
            ``PortFlags.GRH_REQUIRED``.
        attr_mask: ``QpAttrMask``, the bits above, or 0. Required at the least, with STATE:

            * to INIT: PKEY_INDEX, PORT and ACCESS_FLAGS on RC and UC; PKEY_INDEX, PORT and QKEY on UD; PORT on
              RAW_PACKET.
            * to RTR: AV, PATH_MTU, DEST_QPN and RQ_PSN on RC and UC, and on RC MAX_DEST_RD_ATOMIC and MIN_RNR_TIMER;
              nothing more on UD and RAW_PACKET.
            * to RTS: SQ_PSN on RC, UC and UD, and on RC MAX_QP_RD_ATOMIC, RETRY_CNT, RNR_RETRY and TIMEOUT; nothing
              more on RAW_PACKET.

            ``transitions.TABLE`` has all moves, and what is optional.

    Not every device can resize a queue pair, nor has every one alternate paths: ``DeviceCapFlags.RESIZE_MAX_WR``
    and ``AUTO_PATH_MIG`` in its ``device_cap_flags`` tell.

    Returns:
        0, or the errno: the caller knows the states and makes a ``ModifyError`` of it. (The return
        value counts, the variable errno does not.)

    Source: ibv_modify_qp(3), ``ibv_modify_qp``, ``struct ibv_qp_attr``.
    """
    ctypes.set_errno(0)
    result = _symbol("ibv_modify_qp")(qp, byref(attr), attr_mask)
    return errno_of("ibv_modify_qp", result, ctypes.get_errno()) if result else 0


def ibv_query_qp(qp: Any, attr_mask: int) -> tuple[abi.ibv_qp_attr, abi.ibv_qp_init_attr]:
    """A queue pair's attributes as the device has them now.

    Source: ibv_query_qp(3), ``ibv_query_qp``.
    """
    attr, init = abi.ibv_qp_attr(), abi.ibv_qp_init_attr()
    _call("ibv_query_qp", qp, byref(attr), attr_mask, byref(init), doing="query a queue pair")
    return attr, init


def ibv_destroy_qp(qp: Any) -> None:
    """Destroy a queue pair; what is outstanding gives no completion any more.

    It waits until every async event of the queue pair was acknowledged.

    Raises:
        VerbsError: EBUSY while it is attached to a multicast group: ``ibv_detach_mcast`` first; or the errno that
            the device answers.

    Source: ibv_create_qp_ex(3), ``ibv_destroy_qp``.
    """
    ctypes.set_errno(0)
    result = _symbol("ibv_destroy_qp")(qp)
    if result and errno_of("ibv_destroy_qp", result, left := ctypes.get_errno()):
        raise failed("ibv_destroy_qp", result, "destroy a queue pair", left)


def ibv_post_send(qp: Any, wr: Any) -> tuple[int, Any]:
    """Post a list of send work requests. Those before the first bad one are posted, the others are not.

    ``shuttable(op("ibv_post_send", context))`` is the same for the hot path.

    Args:
        qp: pointer to ``struct ibv_qp``, in RTS; in SQD they wait, in ERR they are flushed.
        wr: pointer to the first ``struct ibv_send_wr``; all that it points to is read before the call returns.
            A UD queue pair reads ``wr.ud.ah`` of each, ``BIND_MW`` its ``mw`` and ``mr``: NULL is a crash.

    Returns:
        (0, None), or the errno and a pointer to the first that was not posted, which may be NULL.

    Source: ibv_post_send(3), ``ibv_post_send``.
    """
    return _post("ibv_post_send", qp, wr, abi.ibv_send_wr)


def ibv_post_recv(qp: Any, wr: Any) -> tuple[int, Any]:
    """Post a list of receive work requests. Those before the first bad one are posted, the others are not.

    Args:
        qp: pointer to ``struct ibv_qp``, not in RESET, and without a shared receive queue.
        wr: pointer to the first ``struct ibv_recv_wr``.

    Returns:
        (0, None), or the errno and a pointer to the first that was not posted, which may be NULL.

    Source: ibv_post_recv(3), ``ibv_post_recv``.
    """
    return _post("ibv_post_recv", qp, wr, abi.ibv_recv_wr)


def _post(name: str, queue: Any, wr: Any, kind: Any) -> tuple[int, Any]:
    """Post through the queue's context, or for a work queue through itself."""
    holder = queue if abi.OPS[name].table == "wq" else queue.contents.context
    bad = POINTER(kind)()
    number = errno_of(name, op(name, holder)(queue, wr, byref(bad)))
    if number == errno.EOPNOTSUPP and name in _OPTIONAL:
        raise failed(name, number, "post")
    return number, bad if number else None


def ibv_attach_mcast(qp: Any, gid: abi.ibv_gid, lid: int) -> None:
    """Let a UD queue pair receive what is sent to a multicast group.

    Args:
        qp: pointer to ``struct ibv_qp``; it cannot be destroyed before it is detached.
        gid: the group's GID.
        lid: its LID, 0 on Ethernet.

    Source: ibv_attach_mcast(3), ``ibv_attach_mcast``.
    """
    _call("ibv_attach_mcast", qp, byref(gid), lid, doing="join a multicast group")


def ibv_detach_mcast(qp: Any, gid: abi.ibv_gid, lid: int) -> None:
    """Undo ``ibv_attach_mcast``.

    Source: ibv_attach_mcast(3), ``ibv_detach_mcast``.
    """
    _call("ibv_detach_mcast", qp, byref(gid), lid, doing="leave a multicast group")


def ibv_query_ece(qp: Any) -> abi.ibv_ece:
    """The vendor's connection options that this queue pair would like, for the peer to see.

    Source: ibv_query_ece(3), ``ibv_query_ece``.
    """
    ece = abi.ibv_ece()
    _call("ibv_query_ece", qp, byref(ece), doing="query the vendor options (ECE) of a queue pair")
    return ece


def ibv_set_ece(qp: Any, ece: abi.ibv_ece) -> None:
    """Set the vendor's connection options that both ends agreed on, before RTR.

    Args:
        qp: pointer to ``struct ibv_qp``.
        ece: with a ``vendor_id``; without one it is EOPNOTSUPP.

    Source: ibv_set_ece(3), ``ibv_set_ece``.
    """
    _call("ibv_set_ece", qp, byref(ece), doing="set the vendor options (ECE) of a queue pair")


def ibv_query_qp_data_in_order(qp: Any, opcode: int, flags: int) -> int:
    """Whether the bytes of a message reach memory in order, so that the last one can be polled.

    Args:
        qp: pointer to ``struct ibv_qp``.
        opcode: ``WrOpcode``.
        flags: ``QpDataInOrderFlags``.

    Returns:
        0 for no, 1 for yes; with ``RETURN_CAPS``, which came with rdma-core 46, ``QpDataInOrderCaps``.

    Source: ibv_query_qp_data_in_order(3), ``ibv_query_qp_data_in_order``.
    """
    return int(_call("ibv_query_qp_data_in_order", qp, opcode, flags))


def ibv_modify_qp_rate_limit(qp: Any, attr: abi.ibv_qp_rate_limit_attr) -> None:
    """Pace a queue pair: a rate in kbit/s, a burst and a typical packet in bytes.

    Source: ibv_modify_qp_rate_limit(3), ``ibv_modify_qp_rate_limit``.
    """
    _call_op("ibv_modify_qp_rate_limit", qp.contents.context, qp, byref(attr), doing="pace a queue pair")


# ---- shared receive queues


def ibv_create_srq(pd: Any, attr: abi.ibv_srq_init_attr) -> Any:
    """A queue of receives that many queue pairs take from.

    Args:
        pd: pointer to ``struct ibv_pd``.
        attr: what is wanted; ``attr.attr`` is updated to what was given.

    Source: ibv_create_srq(3), ``ibv_create_srq``.
    """
    return _call("ibv_create_srq", pd, byref(attr), doing="create a shared receive queue")


def ibv_create_srq_ex(context: Any, attr: abi.ibv_srq_init_attr_ex) -> Any:
    """The same with a type: XRC, or with tag matching.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``comp_mask`` says which fields count. A plain one goes to ``ibv_create_srq``.

    Source: ibv_create_srq_ex(3), ``ibv_create_srq_ex``.
    """
    mask, bits = attr.comp_mask, abi.SrqInitAttrMask
    plain = not mask & bits.TYPE or attr.srq_type == abi.SrqType.BASIC
    if mask & bits.PD and not mask & ~int(bits.PD | bits.TYPE) and plain:
        return ibv_create_srq(attr.pd, abi.ibv_srq_init_attr.from_buffer(attr))
    doing = f"create a shared receive queue of type {abi.SrqType(attr.srq_type)}"
    return _call_op("ibv_create_srq_ex", context, context, byref(attr), doing=doing)


def ibv_modify_srq(srq: Any, attr: abi.ibv_srq_attr, mask: int) -> None:
    """Resize a shared receive queue, or arm its limit: one event when fewer receives are left.

    Args:
        srq: pointer to ``struct ibv_srq``.
        attr: the values.
        mask: ``SrqAttrMask``.

    Source: ibv_modify_srq(3), ``ibv_modify_srq``.
    """
    _call("ibv_modify_srq", srq, byref(attr), mask, doing="modify a shared receive queue")


def ibv_query_srq(srq: Any) -> abi.ibv_srq_attr:
    """The sizes of a shared receive queue and its limit, 0 once the event has fired.

    Source: ibv_query_srq(3), ``ibv_query_srq``.
    """
    attr = abi.ibv_srq_attr()
    _call("ibv_query_srq", srq, byref(attr), doing="query a shared receive queue")
    return attr


def ibv_get_srq_num(srq: Any) -> int:
    """The number of an XRC shared receive queue, which the sender names; 24 bits.

    Source: ibv_get_srq_num(3), ``ibv_get_srq_num``.
    """
    number = ctypes.c_uint32()
    doing = "get the number of a shared receive queue"
    _call_op("ibv_get_srq_num", srq.contents.context, srq, byref(number), doing=doing)
    return number.value


def ibv_post_srq_recv(srq: Any, wr: Any) -> tuple[int, Any]:
    """Post a list of receives to a shared receive queue.

    Returns:
        As ``ibv_post_recv``.

    Source: ibv_post_srq_recv(3), ``ibv_post_srq_recv``.
    """
    return _post("ibv_post_srq_recv", srq, wr, abi.ibv_recv_wr)


def ibv_post_srq_ops(srq: Any, op_wr: Any) -> tuple[int, Any]:
    """Change the list of tagged buffers of a shared receive queue of type TM.

    Args:
        srq: pointer to ``struct ibv_srq``.
        op_wr: pointer to the first ``struct ibv_ops_wr``: TAG_ADD gives a buffer, ``tm.add``, and gets its
            ``tm.handle``; TAG_DEL takes out the one with that handle, and completes with TM_ERR if it was
            used meanwhile; TAG_SYNC only tells ``tm.unexpected_cnt``. ``flags`` (``OpsFlags``): SIGNALED, a
            completion on the queue's CQ; TM_SYNC, ``tm.unexpected_cnt`` counts: the unexpected messages handled.

    Returns:
        As ``ibv_post_recv``.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has no tag matching; mlx5 does.

    Source: ibv_post_srq_ops(3), ``ibv_post_srq_ops``.
    """
    return _post("ibv_post_srq_ops", srq, op_wr, abi.ibv_ops_wr)


def ibv_destroy_srq(srq: Any) -> None:
    """Destroy a shared receive queue; EBUSY while a queue pair uses it.

    Source: ibv_create_srq(3), ``ibv_destroy_srq``.
    """
    _call("ibv_destroy_srq", srq, doing="destroy a shared receive queue")


def ibv_open_xrcd(context: Any, attr: abi.ibv_xrcd_init_attr) -> Any:
    """An XRC domain: what lets queue pairs of several processes receive into one queue.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: both bits of ``comp_mask`` must be set.

    Source: ibv_open_xrcd(3), ``ibv_open_xrcd``.
    """
    return _call_op("ibv_open_xrcd", context, context, byref(attr), doing="open an XRC domain")


def ibv_close_xrcd(xrcd: Any) -> None:
    """Close an XRC domain; EBUSY while anything uses it.

    Source: ibv_open_xrcd(3), ``ibv_close_xrcd``.
    """
    _call_op("ibv_close_xrcd", xrcd.contents.context, xrcd, doing="close an XRC domain")


# ---- address handles


def ibv_create_ah(pd: Any, attr: abi.ibv_ah_attr) -> Any:
    """A path that UD sends name. On RoCE it needs a GRH, and resolves the peer's address.

    Source: ibv_create_ah(3), ``ibv_create_ah``.
    """
    return _call("ibv_create_ah", pd, byref(attr), doing="create an address handle")


def ibv_init_ah_from_wc(context: Any, port_num: int, wc: abi.ibv_wc, grh: abi.ibv_grh) -> abi.ibv_ah_attr:
    """The path back to where a UD message came from.

    Args:
        context: pointer to ``struct ibv_context``.
        port_num: the port that it came in on.
        wc: its completion.
        grh: the first 40 bytes of its buffer; they count if ``wc_flags`` has ``GRH``.

    Source: ibv_create_ah_from_wc(3), ``ibv_init_ah_from_wc``.
    """
    attr = abi.ibv_ah_attr()
    doing = "find the path back to a UD message's sender"
    _call("ibv_init_ah_from_wc", context, port_num, byref(wc), byref(grh), byref(attr), doing=doing)
    return attr


def ibv_create_ah_from_wc(pd: Any, wc: abi.ibv_wc, grh: abi.ibv_grh, port_num: int) -> Any:
    """``ibv_init_ah_from_wc`` and ``ibv_create_ah`` in one.

    Source: ibv_create_ah_from_wc(3), ``ibv_create_ah_from_wc``.
    """
    doing = "create an address handle to a UD message's sender"
    return _call("ibv_create_ah_from_wc", pd, byref(wc), byref(grh), port_num, doing=doing)


def ibv_destroy_ah(ah: Any) -> None:
    """Destroy an address handle; not before the sends that name it have completed.

    Source: ibv_create_ah(3), ``ibv_destroy_ah``.
    """
    _call("ibv_destroy_ah", ah, doing="destroy an address handle")


# ---- memory windows


def ibv_alloc_mw(pd: Any, mw_type: int) -> Any:
    """A memory window, unbound: a key of its own for a part of a region, given and taken without the kernel.

    Args:
        pd: pointer to ``struct ibv_pd``.
        mw_type: ``MwType``.

    Source: ibv_alloc_mw(3), ``ibv_alloc_mw``.
    """
    return _call_op("ibv_alloc_mw", pd.contents.context, pd, mw_type, doing="allocate a memory window")


def ibv_bind_mw(qp: Any, mw: Any, bind: abi.ibv_mw_bind) -> None:
    """Post the binding of a type 1 window; ``mw.rkey`` is the new key at once, valid once it has completed.

    Args:
        qp: pointer to ``struct ibv_qp``, RC or UC, in RTS.
        mw: pointer to ``struct ibv_mw`` of type 1; type 2 is bound by a ``BIND_MW`` work request.
        bind: the range, in a region with ``MW_BIND`` access; a length of 0 unbinds, then ``mr`` may be NULL.

    Raises:
        VerbsError: EINVAL for a type 2 window, EPERM for a region of another protection domain.

    Source: ibv_bind_mw(3), ``ibv_bind_mw``.
    """
    doing, info = "bind a memory window", bind.bind_info
    if mw.contents.type != abi.MwType.TYPE_1 or (not info.mr and (info.addr or info.length)):
        raise VerbsError("ibv_bind_mw", errno.EINVAL, doing)
    if info.mr and ctypes.addressof(mw.contents.pd.contents) != ctypes.addressof(info.mr.contents.pd.contents):
        raise VerbsError("ibv_bind_mw", errno.EPERM, doing)
    _call_op("ibv_bind_mw", mw.contents.context, qp, mw, byref(bind), doing=doing)


def ibv_dealloc_mw(mw: Any) -> None:
    """Free a memory window; the peer's access through it ends.

    Source: ibv_alloc_mw(3), ``ibv_dealloc_mw``.
    """
    _call_op("ibv_dealloc_mw", mw.contents.context, mw, doing="free a memory window")


# ---- work queues and their tables, for receive-side scaling


def ibv_create_wq(context: Any, attr: abi.ibv_wq_init_attr) -> Any:
    """A receive queue outside of a queue pair.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: what is wanted; ``max_wr`` and ``max_sge`` are updated to what was given.

    Source: ibv_create_wq(3), ``ibv_create_wq``.
    """
    wq = _call_op("ibv_create_wq", context, context, byref(attr), doing="create a work queue")
    # the rest of the header's inline, which a provider leaves to it
    wq.contents.wq_context, wq.contents.events_completed = attr.wq_context, 0
    threads = ctypes.CDLL(None)
    threads.pthread_mutex_init(byref(wq.contents.mutex), None)
    threads.pthread_cond_init(byref(wq.contents.cond), None)
    return wq


def ibv_modify_wq(wq: Any, attr: abi.ibv_wq_attr) -> None:
    """Move a work queue between RESET, RDY and ERR; it receives in RDY.

    Source: ibv_modify_wq(3), ``ibv_modify_wq``.
    """
    _call_op("ibv_modify_wq", wq.contents.context, wq, byref(attr), doing="modify a work queue")


def ibv_post_wq_recv(wq: Any, wr: Any) -> tuple[int, Any]:
    """Post a list of receives to a work queue, in RDY.

    Args:
        wq: pointer to ``struct ibv_wq``.
        wr: pointer to the first ``struct ibv_recv_wr``.

    Returns:
        As ``ibv_post_recv``.

    Source: ibv_post_wq_recv(3), ``ibv_post_wq_recv``.
    """
    return _post("ibv_post_wq_recv", wq, wr, abi.ibv_recv_wr)


def ibv_destroy_wq(wq: Any) -> None:
    """Destroy a work queue; EBUSY while a table names it.

    Source: ibv_create_wq(3), ``ibv_destroy_wq``.
    """
    _call_op("ibv_destroy_wq", wq.contents.context, wq, doing="destroy a work queue")


def ibv_create_rwq_ind_table(context: Any, attr: abi.ibv_rwq_ind_table_init_attr) -> Any:
    """The table of work queues that a queue pair's hash spreads packets over.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``ind_tbl`` has 2**``log_ind_tbl_size`` entries.

    Returns:
        Pointer to ``struct ibv_rwq_ind_table``, for ``ibv_qp_init_attr_ex.rwq_ind_tbl``.

    Source: ibv_create_rwq_ind_table(3), ``ibv_create_rwq_ind_table``.
    """
    doing = "create a table of work queues"
    return _call_op("ibv_create_rwq_ind_table", context, context, byref(attr), doing=doing)


def ibv_destroy_rwq_ind_table(table: Any) -> None:
    """Destroy a table of work queues; EBUSY while a queue pair uses it.

    Source: ibv_create_rwq_ind_table(3), ``ibv_destroy_rwq_ind_table``.
    """
    _call_op("ibv_destroy_rwq_ind_table", table.contents.context, table, doing="destroy a table of work queues")


# ---- packet steering, and its counters


def ibv_create_flow(qp: Any, attr: Any) -> Any:
    """Steer packets to a queue pair: a rule that the device holds each incoming packet against.

    Args:
        qp: pointer to ``struct ibv_qp``, UD or RAW_PACKET.
        attr: pointer to a ``struct ibv_flow_attr`` that its specs follow in one piece of memory, ``size`` bytes
            in all: see ``abi.structs_steering``.

    Returns:
        Pointer to ``struct ibv_flow``; the rule holds until ``ibv_destroy_flow``.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has no steering; mlx5, mlx4 and bnxt_re do.
        VerbsError: EPERM without CAP_NET_RAW, EINVAL for what the device cannot match.

    Source: ibv_create_flow(3), ``ibv_create_flow``.
    """
    return _call_op("ibv_create_flow", qp.contents.context, qp, attr, doing="create a steering rule")


def ibv_destroy_flow(flow: Any) -> None:
    """Take a steering rule out of the device. Source: ibv_create_flow(3), ``ibv_destroy_flow``."""
    _call_op("ibv_destroy_flow", flow.contents.context, flow, doing="destroy a steering rule")


def ibv_create_counters(context: Any) -> Any:
    """A set of counters for steering rules, all 0. The attr struct is reserved and passed empty.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none; mlx5 does.

    Source: ibv_create_counters(3), ``ibv_create_counters``.
    """
    attr = abi.ibv_counters_init_attr()
    return _call_op("ibv_create_counters", context, context, byref(attr), doing="create counters")


def ibv_destroy_counters(counters: Any) -> None:
    """Destroy a set of counters; EBUSY while a rule counts in it.

    Source: ibv_create_counters(3), ``ibv_destroy_counters``.
    """
    _call_op("ibv_destroy_counters", counters.contents.context, counters, doing="destroy counters")


def ibv_attach_counters_point_flow(counters: Any, attr: abi.ibv_counter_attach_attr, flow: Any = None) -> None:
    """Say what is counted where in a set of counters.

    Args:
        counters: pointer to ``struct ibv_counters``.
        attr: ``counter_desc`` (``CounterDescription``), ``index`` from 0; what several count at one index is added up.
        flow: pointer to the ``struct ibv_flow`` that counts; None before there is one: then those count that
            name the set in a spec of type ACTION_COUNT.

    Raises:
        VerbsError: EBUSY once a rule counts in it, EOPNOTSUPP for what the device cannot count.

    Source: ibv_attach_counters_point_flow(3), ``ibv_attach_counters_point_flow``.
    """
    context, doing = counters.contents.context, "attach a counter"
    _call_op("ibv_attach_counters_point_flow", context, counters, byref(attr), flow, doing=doing)


def ibv_read_counters(counters: Any, ncounters: int, flags: int = 0) -> list[int]:
    """Read a set of counters.

    Args:
        counters: pointer to ``struct ibv_counters``.
        ncounters: how many, from index 0 on.
        flags: ``ReadCountersFlags``.

    Returns:
        The values, 64 bits each.

    Source: ibv_read_counters(3), ``ibv_read_counters``.
    """
    values = (ctypes.c_uint64 * ncounters)()
    context = counters.contents.context
    _call_op("ibv_read_counters", context, counters, values, ncounters, flags, doing="read counters")
    return list(values)


# ---- extended queue pairs and their work requests


def ibv_create_qp_ex(context: Any, attr: abi.ibv_qp_init_attr_ex) -> Any:
    """A queue pair with extended attributes, in RESET. ``ibv_destroy_qp`` destroys it.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: ``struct ibv_qp_init_attr_ex``. With PD alone in ``comp_mask`` it goes to ``ibv_create_qp``, as the
            header's inline does.

            * ``qp_context``: a number of the caller's, 64 bits, which stays in ``struct ibv_qp``.
            * ``send_cq``, ``recv_cq``: pointers to the ``struct ibv_cq`` of its send and of its receive queue.
            * ``srq``: pointer to the ``struct ibv_srq`` that it receives from, or NULL.
            * ``cap``: sizes: ``max_send_wr`` and ``max_recv_wr``, work requests outstanding at once in each queue;
              ``max_send_sge`` and ``max_recv_sge``, scatter/gather elements of one; ``max_inline_data``, bytes that
              can be posted inline, 0 for none. All is updated to what was given, at least what was asked for. With an
              ``srq``, ``max_recv_wr`` and ``max_recv_sge`` are ignored.
            * ``qp_type`` (``QpType``): RC, UC, UD, RAW_PACKET, XRC_SEND, XRC_RECV, or DRIVER, which is no
              service of its own but a vendor's own logic.
            * ``sq_sig_all``: not 0: each send gives a completion, signaled or not.
            * ``comp_mask`` (``QpInitAttrMask``): which of the fields below count: PD, XRCD, CREATE_FLAGS,
              MAX_TSO_HEADER, IND_TABLE, RX_HASH, SEND_OPS_FLAGS.
            * ``pd``: pointer to its ``struct ibv_pd``.
            * ``xrcd``: pointer to the ``struct ibv_xrcd`` of an XRC_RECV, the target's end.
            * ``create_flags`` (``QpCreateFlags``). BLOCK_SELF_MCAST_LB: what it sends to a multicast group does not
              come back to itself. SCATTER_FCS: the frame's checksum is written to memory behind the packet.
              CVLAN_STRIPPING: the customer VLAN tag is taken out of incoming packets. SOURCE_QPN: on the wire it
              uses ``source_qpn`` as its number. PCI_WRITE_END_PADDING: incoming packets are padded to a full
              cache line in memory.
            * ``max_tso_header``: bytes of header that a TSO send can have, 16 bits.
            * ``rwq_ind_tbl``: pointer to the ``struct ibv_rwq_ind_table`` of the work queues that it receives
              to; then it has no receive queue of its own (IND_TABLE).
            * ``rx_hash_conf``: how it spreads what it receives over them (RX_HASH): ``rx_hash_function``
              (``RxHashFunctionFlags``); ``rx_hash_key_len``, bytes of key, 8 bits; ``rx_hash_key``, their address;
              ``rx_hash_fields_mask`` (``RxHashFields``), what of a packet enters the hash: SRC_IPV4, DST_IPV4,
              SRC_IPV6, DST_IPV6, the addresses; SRC_PORT_TCP, DST_PORT_TCP, SRC_PORT_UDP, DST_PORT_UDP, the ports;
              IPSEC_SPI, the security association's index; INNER, for a tunnel as VXLAN, whose packets have a
              header within: with it the other bits mean that inner header, not the outer one.
            * ``source_qpn``: the number that its packets carry, 24 bits, with SOURCE_QPN in ``create_flags``. Only
              on UD; without a steering rule it can receive nothing, for it is not the number that packets are for.
            * ``send_ops_flags`` (``QpSendOpsFlags``): which operations ``struct ibv_qp_ex`` must have, see
              :func:`ibv_qp_to_qp_ex`: RDMA_WRITE, RDMA_WRITE_WITH_IMM, SEND, SEND_WITH_IMM, RDMA_READ,
              ATOMIC_CMP_AND_SWP, ATOMIC_FETCH_AND_ADD, LOCAL_INV, BIND_MW, SEND_WITH_INV, TSO, FLUSH and ATOMIC_WRITE,
              for the ``ibv_wr_*`` functions of these names (SEND_OPS_FLAGS).

    Returns:
        Pointer to ``struct ibv_qp``; ``qp_num`` in it is the number that it got.

    Raises:
        LibraryError: EOPNOTSUPP where the library or the provider has no extended queue pairs.
        VerbsError: EOPNOTSUPP for a type, flag or send operation that the device lacks; EINVAL outside of the limits.

    Source: ibv_create_qp_ex(3), ``ibv_create_qp_ex``, ``struct ibv_qp_init_attr_ex``.
    """
    if attr.comp_mask == abi.QpInitAttrMask.PD:
        return ibv_create_qp(attr.pd, abi.ibv_qp_init_attr.from_buffer(attr))
    doing = f"create an extended queue pair of type {abi.QpType(attr.qp_type)}"
    return _call_op("ibv_create_qp_ex", context, context, byref(attr), doing=doing)


def ibv_open_qp(context: Any, attr: abi.ibv_qp_open_attr) -> Any:
    """Another handle of an XRC_RECV queue pair that some process has made.

    Args:
        context: pointer to ``struct ibv_context``.
        attr: its number, type and XRC domain, said by ``comp_mask``.

    Source: ibv_open_qp(3), ``ibv_open_qp``.
    """
    return _call_op("ibv_open_qp", context, context, byref(attr), doing=f"open queue pair {attr.qp_num:#08x}")


def ibv_qp_to_qp_ex(qp: Any) -> Any:
    """The work-request builder of a queue pair that was created with send operations.

    Returns:
        Pointer to ``struct ibv_qp_ex``, which lives as long as ``qp``.

    Raises:
        LibraryError: the queue pair was created without ``SEND_OPS_FLAGS``.

    Source: ibv_create_qp_ex(3), ``ibv_qp_to_qp_ex``.
    """
    found = _call("ibv_qp_to_qp_ex", qp)
    if not found:
        raise LibraryError(
            "ibv_qp_to_qp_ex: the queue pair was made without send operations: give send_ops_flags.", errno.EOPNOTSUPP
        )
    return found


def ibv_wr_start(qp: Any) -> None:
    """Begin a batch of work requests; it may hold a lock until ``ibv_wr_complete`` or ``ibv_wr_abort``.

    Then for each: set ``qp.wr_id`` and ``qp.wr_flags`` (``SendFlags``), call one ``ibv_wr_<operation>``, then
    its ``ibv_wr_set_*``. A setter without an operation before it is undefined. An operation that was not
    asked for in ``send_ops_flags`` is :class:`LibraryError`.

    Args:
        qp: pointer to ``struct ibv_qp_ex``, not in RESET, INIT or RTR.

    Source: ibv_wr_post(3), ``ibv_wr_start``.
    """
    _call_op("ibv_wr_start", qp, qp)


def ibv_wr_complete(qp: Any) -> None:
    """Post all that was written since ``ibv_wr_start``: all of it or, on an error, nothing.

    Raises:
        VerbsError: what went wrong since ``ibv_wr_start``: ENOSPC or ENOMEM where the queue is full.

    Source: ibv_wr_post(3), ``ibv_wr_complete``.
    """
    _call_op("ibv_wr_complete", qp, qp, doing="post a batch of work requests")


def ibv_wr_abort(qp: Any) -> None:
    """Drop all that was written since ``ibv_wr_start``.

    Source: ibv_wr_post(3), ``ibv_wr_abort``.
    """
    _call_op("ibv_wr_abort", qp, qp)


def ibv_wr_send(qp: Any) -> None:
    """Send a message. Source: ibv_wr_post(3), ``ibv_wr_send``."""
    _call_op("ibv_wr_send", qp, qp)


def ibv_wr_send_imm(qp: Any, imm_data: int) -> None:
    """Send a message with four bytes that the receive's completion shows.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        imm_data: 32 bits in network byte order, as C's ``__be32``.

    Source: ibv_wr_post(3), ``ibv_wr_send_imm``.
    """
    _call_op("ibv_wr_send_imm", qp, qp, imm_data)


def ibv_wr_send_inv(qp: Any, invalidate_rkey: int) -> None:
    """Send a message that also invalidates a key of the receiver. Source: ibv_wr_post(3), ``ibv_wr_send_inv``."""
    _call_op("ibv_wr_send_inv", qp, qp, invalidate_rkey)


def ibv_wr_send_tso(qp: Any, hdr: Any, hdr_sz: int, mss: int) -> None:
    """Send packets that the device cuts out of one message, each with the same header.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        hdr: the header's address.
        hdr_sz: its length, up to the queue pair's ``max_tso_header`` bytes.
        mss: payload bytes in each packet.

    Source: ibv_wr_post(3), ``ibv_wr_send_tso``.
    """
    _call_op("ibv_wr_send_tso", qp, qp, hdr, hdr_sz, mss)


def ibv_wr_rdma_write(qp: Any, rkey: int, remote_addr: int) -> None:
    """Write to the peer's memory. Source: ibv_wr_post(3), ``ibv_wr_rdma_write``."""
    _call_op("ibv_wr_rdma_write", qp, qp, rkey, remote_addr)


def ibv_wr_rdma_write_imm(qp: Any, rkey: int, remote_addr: int, imm_data: int) -> None:
    """The same, and take one of the peer's receives to show it four bytes (network byte order).

    Source: ibv_wr_post(3), ``ibv_wr_rdma_write_imm``.
    """
    _call_op("ibv_wr_rdma_write_imm", qp, qp, rkey, remote_addr, imm_data)


def ibv_wr_rdma_read(qp: Any, rkey: int, remote_addr: int) -> None:
    """Read the peer's memory. Source: ibv_wr_post(3), ``ibv_wr_rdma_read``."""
    _call_op("ibv_wr_rdma_read", qp, qp, rkey, remote_addr)


def ibv_wr_atomic_cmp_swp(qp: Any, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
    """Replace 8 remote bytes by ``swap`` if they are ``compare``; the old ones come to the local 8 bytes.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        rkey: of a region with ``REMOTE_ATOMIC`` access.
        remote_addr: a multiple of 8.
        compare, swap: 64 bits, in the byte order of the host that has the memory.

    Source: ibv_wr_post(3), ``ibv_wr_atomic_cmp_swp``.
    """
    _call_op("ibv_wr_atomic_cmp_swp", qp, qp, rkey, remote_addr, compare, swap)


def ibv_wr_atomic_fetch_add(qp: Any, rkey: int, remote_addr: int, add: int) -> None:
    """Add to 8 remote bytes; the old ones come to the local 8 bytes. Arguments as ``ibv_wr_atomic_cmp_swp``.

    Source: ibv_wr_post(3), ``ibv_wr_atomic_fetch_add``.
    """
    _call_op("ibv_wr_atomic_fetch_add", qp, qp, rkey, remote_addr, add)


def ibv_wr_atomic_write(qp: Any, rkey: int, remote_addr: int, atomic_wr: Any) -> None:
    """Write 8 bytes to the peer's memory at once. It takes no setter.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        rkey: of a region with ``REMOTE_WRITE`` access.
        remote_addr: a multiple of 8.
        atomic_wr: the address of the 8 bytes, read before this returns.

    Source: ibv_wr_post(3), ``ibv_wr_atomic_write``.
    """
    _call_op("ibv_wr_atomic_write", qp, qp, rkey, remote_addr, atomic_wr)


def ibv_wr_flush(qp: Any, rkey: int, remote_addr: int, length: int, placement: int, level: int) -> None:
    """Make earlier writes visible or persistent at the peer; since rdma-core 45. It takes no setter.

    Args:
        qp: pointer to ``struct ibv_qp_ex``, made with ``QpSendOpsFlags.FLUSH``.
        rkey, remote_addr, length: the range, for ``SelectivityLevel.RANGE``.
        placement: ``PlacementType``.
        level: ``SelectivityLevel``.

    Source: ibv_wr_post(3), ``ibv_wr_flush``.
    """
    _call_op("ibv_wr_flush", qp, qp, rkey, remote_addr, length, placement, level)


def ibv_wr_bind_mw(qp: Any, mw: Any, rkey: int, bind_info: abi.ibv_mw_bind_info) -> None:
    """Bind a type 2 window. It takes no setter.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        mw: pointer to ``struct ibv_mw``.
        rkey: the new key: the old one with another lowest byte. ``mw.rkey`` is the caller's to update.
        bind_info: the range and the access; its ``mr`` must not be NULL.

    Source: ibv_wr_post(3), ``ibv_wr_bind_mw``.
    """
    _call_op("ibv_wr_bind_mw", qp, qp, mw, rkey, byref(bind_info))


def ibv_wr_local_inv(qp: Any, invalidate_rkey: int) -> None:
    """Invalidate a key of this side. It takes no setter. Source: ibv_wr_post(3), ``ibv_wr_local_inv``."""
    _call_op("ibv_wr_local_inv", qp, qp, invalidate_rkey)


def ibv_wr_set_sge(qp: Any, lkey: int, addr: int, length: int) -> None:
    """The operation's local bytes, in one piece. Source: ibv_wr_post(3), ``ibv_wr_set_sge``."""
    _call_op("ibv_wr_set_sge", qp, qp, lkey, addr, length)


def ibv_wr_set_sge_list(qp: Any, num_sge: int, sg_list: Any) -> None:
    """The operation's local bytes, in pieces.

    The provider of rxe takes all pieces to be as long as the first before rdma-core 64.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        num_sge: up to the queue pair's ``max_send_sge``.
        sg_list: array of ``struct ibv_sge``, read before this returns.

    Source: ibv_wr_post(3), ``ibv_wr_set_sge_list``; providers/rxe/rxe.c, ``wr_set_sge_list``.
    """
    _call_op("ibv_wr_set_sge_list", qp, qp, num_sge, sg_list)


def ibv_wr_set_inline_data(qp: Any, addr: Any, length: int) -> None:
    """The operation's data itself, copied; no memory region is needed.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        addr: its address; keep it alive until ``ibv_wr_complete``.
        length: up to the queue pair's ``max_inline_data`` bytes.

    Source: ibv_wr_post(3), ``ibv_wr_set_inline_data``.
    """
    _call_op("ibv_wr_set_inline_data", qp, qp, addr, length)


def ibv_wr_set_inline_data_list(qp: Any, num_buf: int, buf_list: Any) -> None:
    """The same, out of pieces.

    The provider of rxe sends none of it before rdma-core 64, and does not stop at ``max_inline_data``.

    Args:
        qp: pointer to ``struct ibv_qp_ex``.
        num_buf: how many.
        buf_list: array of ``struct ibv_data_buf``; ``max_inline_data`` bytes in all.

    Source: ibv_wr_post(3), ``ibv_wr_set_inline_data_list``; providers/rxe/rxe.c, of the same name.
    """
    _call_op("ibv_wr_set_inline_data_list", qp, qp, num_buf, buf_list)


def ibv_wr_set_ud_addr(qp: Any, ah: Any, remote_qpn: int, remote_qkey: int) -> None:
    """Where a UD send goes: path, queue pair number (24 bits) and Q_Key (32 bits).

    Source: ibv_wr_post(3), ``ibv_wr_set_ud_addr``.
    """
    _call_op("ibv_wr_set_ud_addr", qp, qp, ah, remote_qpn, remote_qkey)


def ibv_wr_set_xrc_srqn(qp: Any, remote_srqn: int) -> None:
    """Which shared receive queue an XRC send goes to. Source: ibv_wr_post(3), ``ibv_wr_set_xrc_srqn``."""
    _call_op("ibv_wr_set_xrc_srqn", qp, qp, remote_srqn)
