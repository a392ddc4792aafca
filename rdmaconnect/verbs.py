"""Every verb, one short function each: the only file that loads or calls libibverbs.

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
from collections.abc import Callable
from ctypes import POINTER, byref, sizeof
from functools import cache, lru_cache
from typing import Any

from . import abi
from .abi import Fails
from .errors import LibraryError, VerbsError

#: the library's file name; RDMACONNECT_LIBIBVERBS names another one
_SONAME = "libibverbs.so.1"


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libibverbs, loaded once.

    Raises:
        LibraryError: it cannot be loaded.
    """
    name = os.environ.get("RDMACONNECT_LIBIBVERBS", _SONAME)
    try:
        return ctypes.CDLL(name, use_errno=True)
    except OSError as e:
        raise LibraryError(
            f"load {name}: {e}. Install it: Debian and Ubuntu `apt install ibverbs-providers`, "
            "Fedora and RHEL `dnf install libibverbs`."
        ) from None


def _errno_of(fails: Fails, result: Any) -> int:
    """The errno that a result stands for; 0 if it is no failure."""
    if fails is Fails.NULL_ERRNO:
        return 0 if result else ctypes.get_errno() or errno.EIO
    if fails is Fails.ERRNO_RETURNED:
        # a few providers return -errno or -1 here all the same
        return ctypes.get_errno() or errno.EIO if result == -1 else abs(result)
    if fails is Fails.MINUS_ONE:
        return ctypes.get_errno() or errno.EIO if result < 0 else 0
    if fails is Fails.MINUS_ERRNO:
        return -result if result < 0 else 0
    return 0


@cache
def _symbol(name: str) -> Callable[..., Any]:
    """An exported function with its prototype set."""
    prototype = abi.PROTOTYPES[name]
    try:
        function = library()[name]
    except AttributeError:
        raise LibraryError(
            f"{name}: this libibverbs does not export it. Install a newer rdma-core.", errno.EOPNOTSUPP
        ) from None
    function.restype, function.argtypes = prototype.restype, prototype.argtypes
    return function


def _call(name: str, *args: Any, doing: str = "", hint: str | None = None) -> Any:
    """Call an exported function and raise by its failure convention."""
    function = _symbol(name)
    ctypes.set_errno(0)
    result = function(*args)
    number = _errno_of(abi.PROTOTYPES[name].fails, result)
    if number:
        raise VerbsError(name, number, doing, hint)
    return result


@cache
def _with_errno(pointer_type: Any) -> Any:
    """The same function-pointer type, but one that keeps errno."""
    return ctypes.CFUNCTYPE(pointer_type._restype_, *pointer_type._argtypes_, use_errno=True)


def _entry(name: str, holder: Any, field: str) -> Callable[..., Any]:
    """The function behind a field of function-pointer type."""
    pointer = getattr(holder, field)
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    if not address:
        raise LibraryError(f"{name}: the device's provider does not have it.", errno.EOPNOTSUPP)
    kind: Any = type(pointer)
    function: Callable[..., Any] = _with_errno(kind)(address)
    return function


def _verbs_context(name: str, context: Any, field: str) -> Any:
    """``verbs_context`` in front of ``context``, if it reaches as far as ``field``.

    Source: infiniband/verbs.h, ``verbs_get_ctx`` and ``verbs_get_ctx_op``.
    """
    extended = abi.verbs_context
    if context.contents.abi_compat != ctypes.c_void_p(-1).value:
        raise LibraryError(f"{name}: the device's provider has no extended verbs.", errno.EOPNOTSUPP)
    address = ctypes.addressof(context.contents) - extended.context.offset
    # the struct grows towards lower addresses: an older library's is shorter in front
    size = ctypes.c_size_t.from_address(address + extended.sz.offset).value
    if size < sizeof(extended) - getattr(extended, field).offset:
        raise LibraryError(f"{name}: this libibverbs is older than it. Install a newer rdma-core.", errno.EOPNOTSUPP)
    return extended.from_address(address)


def op(name: str, context: Any) -> Callable[..., Any]:
    """The function behind an inline verb that goes through a context's op tables, unchecked.

    Args:
        name: the verb, for example ``ibv_poll_cq``.
        context: pointer to ``struct ibv_context``.

    Returns:
        The C function: for the hot path, which looks at the result itself.
    """
    found = abi.OPS[name]
    if found.table == "verbs_context":
        return _entry(name, _verbs_context(name, context, found.field), found.field)
    return _entry(name, context.contents.ops, found.field)


def _call_op(name: str, context: Any, *args: Any, doing: str = "") -> Any:
    function = op(name, context)
    ctypes.set_errno(0)
    result = function(*args)
    number = _errno_of(abi.OPS[name].fails, result)
    if number:
        raise VerbsError(name, number, doing)
    return result


# ---- devices


def ibv_get_device_list() -> tuple[Any, list[Any]]:
    """The RDMA devices that this process can see.

    Returns:
        The array, for ``ibv_free_device_list``, and its pointers to ``struct ibv_device``, which are
        valid until then; a device must be opened before it.

    Source: ibv_get_device_list(3), ``ibv_get_device_list``.
    """
    count = ctypes.c_int()
    array = _call("ibv_get_device_list", byref(count), doing="list RDMA devices")
    return array, [array[i] for i in range(count.value)]


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


def ibv_query_device(context: Any) -> abi.ibv_device_attr:
    """The device's limits; the real ones may be lower, as resources are shared.

    Source: ibv_query_device(3), ``ibv_query_device``.
    """
    attr = abi.ibv_device_attr()
    _call("ibv_query_device", context, byref(attr))
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
        _call("ibv_query_port", context, port_num, ctypes.cast(byref(attr), _symbol("ibv_query_port").argtypes[2]))  # type: ignore[attr-defined]
    return attr


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


def ibv_query_pkey(context: Any, port_num: int, index: int) -> int:
    """One slot of a port's P_Key table.

    Returns:
        The key, 16 bits in host order, the top one for full membership.

    Source: ibv_query_pkey(3), ``ibv_query_pkey``.
    """
    pkey = ctypes.c_uint16()
    _call("ibv_query_pkey", context, port_num, index, byref(pkey))
    return int.from_bytes(bytes(pkey), "big")


def ibv_fork_init() -> None:
    """Make registered memory safe across fork(2), where the kernel does not do so by itself.

    Must come before the first ``ibv_reg_mr``; slows registration down.

    Source: ibv_fork_init(3), ``ibv_fork_init``.
    """
    _call("ibv_fork_init", doing="prepare for fork")


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


def ibv_reg_mr(pd: Any, addr: int, length: int, access: int) -> Any:
    """Register memory, which pins it.

    Args:
        pd: pointer to ``struct ibv_pd``.
        addr: first byte's virtual address.
        length: bytes.
        access: ``AccessFlags``; remote write or atomic needs local write as well.

    Returns:
        Pointer to ``struct ibv_mr`` with ``lkey`` and ``rkey``.

    Source: ibv_reg_mr(3), ``ibv_reg_mr``.
    """
    return _call("ibv_reg_mr", pd, addr, length, access, doing=f"register {length} bytes of memory")


def ibv_dereg_mr(mr: Any) -> None:
    """Unregister memory; EBUSY while a memory window is bound to it.

    Source: ibv_reg_mr(3), ``ibv_dereg_mr``.
    """
    _call("ibv_dereg_mr", mr, doing="unregister memory")


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


def ibv_create_cq(context: Any, cqe: int, channel: Any = None, comp_vector: int = 0) -> Any:
    """A completion queue.

    Args:
        context: pointer to ``struct ibv_context``.
        cqe: entries wanted, 1 to ``max_cqe``; the real number may be larger.
        channel: pointer to ``struct ibv_comp_channel``, or None.
        comp_vector: 0 to ``num_comp_vectors - 1``.

    Source: ibv_create_cq(3), ``ibv_create_cq``.
    """
    return _call(
        "ibv_create_cq", context, cqe, None, channel, comp_vector, doing=f"create a completion queue of {cqe} entries"
    )


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


def ibv_get_cq_event(channel: Any) -> Any:
    """The next completion event; blocks if the channel's descriptor does.

    Each must be acknowledged before its CQ can be destroyed.

    Returns:
        Pointer to the ``struct ibv_cq`` that it is for.

    Source: ibv_get_cq_event(3), ``ibv_get_cq_event``.
    """
    cq, cq_context = POINTER(abi.ibv_cq)(), ctypes.c_void_p()
    _call("ibv_get_cq_event", channel, byref(cq), byref(cq_context), doing="take a completion event")
    return cq


def ibv_ack_cq_events(cq: Any, nevents: int) -> None:
    """Acknowledge events got with ``ibv_get_cq_event``. It takes a mutex: acknowledge many at once.

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

    Source: ibv_poll_cq(3), ``ibv_poll_cq``.
    """
    return int(_call_op("ibv_poll_cq", cq.contents.context, cq, num_entries, wc))


# ---- queue pairs


def ibv_create_qp(pd: Any, attr: abi.ibv_qp_init_attr) -> Any:
    """A queue pair, in RESET.

    Args:
        pd: pointer to ``struct ibv_pd``.
        attr: what is wanted; ``attr.cap`` is updated to what was given.

    Source: ibv_create_qp(3), ``ibv_create_qp``.
    """
    kind = abi.QpType(attr.qp_type)
    return _call("ibv_create_qp", pd, byref(attr), doing=f"create a queue pair of type {kind}")


def ibv_modify_qp(qp: Any, attr: abi.ibv_qp_attr, attr_mask: int) -> int:
    """Change a queue pair's attributes and state.

    If anything is invalid nothing is changed. INIT to RTR on RoCE resolves the peer's address and can
    block for seconds.

    Args:
        qp: pointer to ``struct ibv_qp``.
        attr: the values.
        attr_mask: ``QpAttrMask``: which of them are meant; ``transitions.TABLE`` says which must be.

    Returns:
        0, or the errno: the caller knows the states and makes a ``ModifyError`` of it. (The return
        value counts, the variable errno does not.)

    Source: ibv_modify_qp(3), ``ibv_modify_qp``.
    """
    return _errno_of(Fails.ERRNO_RETURNED, _symbol("ibv_modify_qp")(qp, byref(attr), attr_mask))


def ibv_query_qp(qp: Any, attr_mask: int) -> tuple[abi.ibv_qp_attr, abi.ibv_qp_init_attr]:
    """A queue pair's attributes as the device has them now.

    Source: ibv_query_qp(3), ``ibv_query_qp``.
    """
    attr, init = abi.ibv_qp_attr(), abi.ibv_qp_init_attr()
    _call("ibv_query_qp", qp, byref(attr), attr_mask, byref(init), doing="query a queue pair")
    return attr, init


def ibv_destroy_qp(qp: Any) -> None:
    """Destroy a queue pair; what is outstanding gives no completion any more.

    Source: ibv_create_qp(3), ``ibv_destroy_qp``.
    """
    _call("ibv_destroy_qp", qp, doing="destroy a queue pair")
