"""What a buffer is: the address, the length and the rest of anything that holds bytes in one piece.

No library of arrays is imported: each is known by the protocol that its objects speak.

====================================== ==========================================================
what                                   by which protocol
====================================== ==========================================================
bytes, bytearray, memoryview, array,   Python's buffer protocol, asked for from C, which needs
mmap, ctypes, NumPy                    neither a format nor one dimension
``multiprocessing.shared_memory``      its ``buf``
torch                                  ``data_ptr()`` and what tells its extent
CuPy, Numba, and others on a GPU       ``__cuda_array_interface__``
JAX, and any other array               ``__dlpack__``, versioned or not
====================================== ==========================================================

Sources: PEP 3118, "CUDA Array Interface (Version 3)" of Numba's manual, dlpack.h 1.1 and DLPack's Python
specification.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

__all__ = ["Buffer", "as_bytes", "hold"]


class Buffer:
    """The memory of an object, which stays where it is until :meth:`release`. A context manager.

    Args:
        owner: the object; it is kept alive.
        memory: the address of the first byte, or a memoryview of all bytes.
        length: bytes.
        readonly: whether it may only be read.
        device: what holds it in words, for example ``"cuda:0"``; None for memory that the CPU reaches.
        release: called once, when the memory is needed no more.

    Attributes:
        owner, length, readonly, device: as given; ``owner`` is None after release.
        pinned: whether a device knows the memory: then the collector does not release it, whoever has forgotten it.
    """

    __slots__ = ("_addr", "_release", "_view", "device", "length", "owner", "pinned", "readonly")

    def __init__(
        self,
        owner: Any,
        memory: int | memoryview,
        length: int,
        readonly: bool = False,
        device: str | None = None,
        release: Callable[[], object] | None = None,
    ) -> None:
        self._release, self.pinned = release, False
        self._addr = memory if isinstance(memory, int) else None
        self._view = None if isinstance(memory, int) else memory
        self.owner, self.length, self.readonly, self.device = owner, length, readonly, device

    @property
    def addr(self) -> int:
        """The first byte's address."""
        if self._addr is None:
            # dear, and a message that is copied never needs it
            if self.length and not self.readonly and self._view is not None:
                self._addr = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
            else:
                with _unformatted(self._view) as same:
                    self._addr = same.addr
        return self._addr

    @property
    def view(self) -> memoryview:
        """The bytes; not to be used after :meth:`release`.

        Raises:
            ValueError: they are not where the CPU reaches them.
        """
        if self.device is not None:
            raise ValueError(f"copy bytes of a {_name(self.owner)}: they are on {self.device}. Register them instead")
        if self._view is not None and self._view.ndim == 1 and self._view.format == "B":
            return self._view
        if not self.length:
            return memoryview(b"")
        view: memoryview = _view_of(self.addr, self.length, _READ if self.readonly else _WRITE)
        return view

    def release(self) -> None:
        """Let the memory go. Twice is fine."""
        release, self._release, self.owner = self._release, None, None
        if release is not None:
            release()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # one that Ctrl-C broke into the making of holds nothing yet
        if not getattr(self, "pinned", True):
            self.release()


def hold(thing: Any) -> Buffer:
    """Find the memory of an object, and hold it.

    Args:
        thing: anything of the table above, C-contiguous.

    Returns:
        Where it is; release it when it is needed no more. What the object itself can undo meanwhile,
        such as ``resize_`` of a tensor, is for its owner not to do.

    Raises:
        TypeError: it speaks none of the protocols.
        ValueError: its bytes are not in one piece, or it gives no address; it says what to do.
    """
    for protocol in (_exported, _shared, _tensor, _cuda, _dlpack):
        buffer = protocol(thing)
        if buffer is not None:
            return buffer
    raise TypeError(f"{_name(thing)} has no buffer: give bytes-like data, an array or a tensor")


def as_bytes(thing: Any) -> bytes:
    """A copy of the bytes of an object.

    Raises:
        TypeError, ValueError: as :func:`hold`; or its bytes are not where the CPU reaches them.
    """
    if isinstance(thing, bytes):
        return thing
    with hold(thing) as buffer:
        return bytes(buffer.view)


def _name(thing: Any) -> str:
    return type(thing).__name__


def _scattered(thing: Any, fix: str) -> ValueError:
    return ValueError(f"use a {_name(thing)} as a buffer: its bytes are not in one piece, row after row. {fix}")


# ---- the buffer protocol


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _python(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the interpreter; ``ctypes.pythonapi.x`` itself is shared, and so is what is set on it."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_export = _python("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_let_go = _python("PyBuffer_Release", None, ctypes.POINTER(_PyBuffer))
_view_of = _python("PyMemoryView_FromMemory", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
#: the fields' names in a buffer's format, PEP 3118
_NAMES = re.compile(":[^:]*:")
#: ``PyBUF_SIMPLE``; ``PyBUF_READ`` and ``PyBUF_WRITE``
_SIMPLE, _READ, _WRITE = 0, 0x100, 0x200


def _exported(thing: Any) -> Buffer | None:
    try:
        view = memoryview(thing)
    except TypeError:
        return None
    except (BufferError, ValueError):
        return _unformatted(thing)  # NumPy has types that Python has no letter for
    if not view.c_contiguous:
        raise _scattered(thing, "Give a copy that is: bytes(...), or numpy.ascontiguousarray(...)")
    if view.format != "B" and "O" in _NAMES.sub("", view.format):
        raise _of_objects(thing)
    return Buffer(thing, view, view.nbytes, view.readonly, release=view.release)


def _unformatted(thing: Any) -> Buffer:
    """The same by asking for nothing but bytes."""
    if getattr(getattr(thing, "dtype", None), "hasobject", False):
        raise _of_objects(thing)
    view = _PyBuffer()
    try:
        _export(thing, ctypes.byref(view), _SIMPLE)
    except (BufferError, ValueError) as e:
        raise ValueError(f"use a {_name(thing)} as a buffer: {e}") from None
    return Buffer(thing, view.buf or 0, view.len, bool(view.readonly), release=lambda: _let_go(ctypes.byref(view)))


def _of_objects(thing: Any) -> ValueError:
    return ValueError(f"use a {_name(thing)} as a buffer: it holds Python objects. Give numbers or bytes")


def _shared(thing: Any) -> Buffer | None:
    """Of shared memory what its ``buf`` is."""
    buf = getattr(thing, "buf", None)
    return _exported(buf) if isinstance(buf, memoryview) else None


# ---- torch

#: what tells a tensor of torch; other libraries have some of these
_SAYS = ("data_ptr", "element_size", "numel", "is_contiguous", "is_conj", "is_neg", "device")
#: kinds of torch devices whose memory has addresses that an RDMA device may know
_ADDRESSED = {"cuda", "xpu"}


def _tensor(thing: Any) -> Buffer | None:
    if not all(hasattr(thing, name) for name in _SAYS):
        return None
    kind = thing.device.type
    if kind != "cpu" and kind not in _ADDRESSED:
        raise ValueError(f"use a {_name(thing)} on {thing.device} as a buffer: no address there. Give it .cpu()")
    try:
        addr, whole = thing.data_ptr(), thing.is_contiguous()
    except RuntimeError as e:  # a sparse one, for example
        raise ValueError(f"use a {_name(thing)} as a buffer: {e}. Give a dense one: .to_dense()") from None
    if not whole:
        raise _scattered(thing, "Give it .contiguous()")
    if thing.is_conj() or thing.is_neg():
        raise ValueError(
            f"use a {_name(thing)} as a buffer: its memory is yet to be conjugated or negated. "
            "Give it .resolve_conj().resolve_neg()"
        )
    length = thing.numel() * thing.element_size()
    if length and not addr:
        raise ValueError(f"use a {_name(thing)} as a buffer: its {length} bytes are nowhere. Give a real one")
    return Buffer(thing, addr, length, device=None if kind == "cpu" else str(thing.device))


# ---- arrays on a GPU, and DLPack


def _cuda(thing: Any) -> Buffer | None:
    try:
        interface = thing.__cuda_array_interface__
    except AttributeError:
        return None
    addr, readonly = interface["data"]
    size = int("".join(c for c in interface["typestr"][2:] if c.isdigit()))
    if not _compact(interface["shape"], interface.get("strides"), size):
        raise _scattered(thing, "Give a copy that is: cupy.ascontiguousarray(...)")
    if interface.get("mask") is not None:
        raise ValueError(f"use a {_name(thing)} as a buffer: some of it is masked. Give its data without the mask")
    return Buffer(thing, addr or 0, math.prod(interface["shape"]) * size, bool(readonly), "a CUDA device")


def _compact(shape: Sequence[int], strides: Sequence[int] | None, size: int) -> bool:
    """Whether elements of ``size`` follow one another row by row; ``strides`` are in the unit of ``size``."""
    if strides is None or 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


class _Tensor(ctypes.Structure):
    """``DLTensor``, its nested ``DLDevice`` and ``DLDataType`` written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


#: it is C++ or Python that is called, so the interpreter's lock is kept
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned`` of major version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_VERSION = (1, 1)
_READ_ONLY, _COPIED, _PADDED = 1, 2, 4
#: ``DLDeviceType`` of what the CPU reaches: CPU, CUDA's and ROCm's pinned host memory
_HOST = {1, 3, 11}
#: and of what has an address: CUDA, ROCm, CUDA managed, oneAPI
_DEVICES = {2: "cuda", 10: "rocm", 13: "managed cuda", 14: "oneapi"}
_is_capsule = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_in_capsule = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
#: name of a capsule -> what is in it, and the name once it is taken, which the capsule keeps no copy of
_CAPSULES: dict[bytes, tuple[type[_Managed | _Versioned], Any]] = {
    b"dltensor_versioned": (_Versioned, ctypes.create_string_buffer(b"used_dltensor_versioned")),
    b"dltensor": (_Managed, ctypes.create_string_buffer(b"used_dltensor")),
}


def _dlpack(thing: Any) -> Buffer | None:
    if not (hasattr(thing, "__dlpack__") and hasattr(thing, "__dlpack_device__")):
        return None
    kind, number = thing.__dlpack_device__()
    if kind not in _HOST and kind not in _DEVICES:
        raise ValueError(
            f"use a {_name(thing)} as a buffer: its device, DLPack's kind {int(kind)}, gives no address. "
            "Copy it to the CPU"
        )
    try:
        try:
            capsule = thing.__dlpack__(max_version=_VERSION)
        except TypeError:  # of before DLPack 1.0
            capsule = thing.__dlpack__()
    except BufferError as e:
        raise ValueError(f"use a {_name(thing)} as a buffer: {e}") from None
    managed, release = _taken(thing, capsule)
    try:
        readonly = False
        if isinstance(managed, _Versioned):
            if managed.major != _VERSION[0]:
                raise ValueError(f"use a {_name(thing)} as a buffer: DLPack {managed.major} is not known here")
            if managed.flags & _COPIED:
                raise ValueError(f"use a {_name(thing)} as a buffer: it gives a copy. Give that copy itself")
            readonly = bool(managed.flags & _READ_ONLY)
        length = _extent(thing, managed)
    except BaseException:
        release()
        raise
    device = None if kind in _HOST else f"{_DEVICES[kind]}:{number}"
    tensor = managed.tensor
    return Buffer(thing, (tensor.data or 0) + tensor.byte_offset, length, readonly, device, release)


def _taken(thing: Any, capsule: Any) -> tuple[_Managed | _Versioned, Callable[[], object]]:
    """What is in the capsule, from now on ours, and how it is given back."""
    name = next((name for name in _CAPSULES if _is_capsule(capsule, name)), None)
    if name is None:
        raise TypeError(f"use a {_name(thing)} as a buffer: its __dlpack__ gives a {_name(capsule)}, not a new capsule")
    kind, used = _CAPSULES[name]
    address = _in_capsule(capsule, name)
    managed = kind.from_address(address)
    _rename(capsule, ctypes.addressof(used))
    return managed, lambda: managed.deleter and managed.deleter(address)


def _extent(thing: Any, managed: _Managed | _Versioned) -> int:
    """The bytes of a tensor that is in one piece."""
    tensor = managed.tensor
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    strides = tensor.strides[: tensor.ndim] if tensor.ndim and tensor.strides else None
    if not _compact(shape, strides, 1):  # here in elements
        raise _scattered(thing, "Give a copy that is, for example numpy.ascontiguousarray(...)")
    bits = tensor.bits * tensor.lanes
    if isinstance(managed, _Versioned) and managed.flags & _PADDED:
        bits = -(-bits // 8) * 8
    size: int = -(-math.prod(shape) * bits // 8)
    return size
