"""Buffers of all kinds that need no device: where they are, what holds them, what is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rdmaconnect.objects import buffers
from rdmaconnect.objects.buffers import Buffer, as_bytes, hold

#: kind -> an object of 6 bytes "abcdef"
KINDS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"abcdef"),
    "bytes": lambda: b"abcdef",
    "memoryview": lambda: memoryview(bytearray(b"xxabcdefxx"))[2:8],
    "readonly memoryview": lambda: memoryview(b"abcdef"),
    "array": lambda: array.array("H", b"abcdef"),
    "two dimensions": lambda: memoryview(bytearray(b"abcdef")).cast("B", (2, 3)),
    "ctypes array": lambda: (ctypes.c_char * 6)(*b"abcdef"),
    "ctypes struct": lambda: type("S", (ctypes.Structure,), {"_fields_": [("n", ctypes.c_char * 6)]})(b"abcdef"),
    "NumPy": lambda: np.frombuffer(bytearray(b"abcdef"), "u2"),
    "NumPy, read-only": lambda: np.frombuffer(b"abcdef", "u1"),
    "NumPy, other byte order": lambda: np.frombuffer(bytearray(b"abcdef"), ">u2"),
    "NumPy, rows": lambda: np.frombuffer(bytearray(b"abcdef"), "u1").reshape(2, 3),
    "NumPy, a part": lambda: np.frombuffer(bytearray(b"xxabcdefxx"), "u1")[2:8],
    "NumPy records": lambda: np.frombuffer(bytearray(b"abcdef"), [("a", "u1"), ("b", "u2")]),
    "NumPy scalar": lambda: np.frombuffer(bytearray(b"abcdef"), "S6")[0],
}


def content(buffer: Buffer) -> bytes:
    return ctypes.string_at(buffer.addr, buffer.length)


@pytest.mark.parametrize("kind", KINDS)
def test_the_address_is_that_of_the_bytes(kind: str) -> None:
    thing = KINDS[kind]()
    with hold(thing) as buffer:
        assert (content(buffer), bytes(buffer.view), as_bytes(thing)) == (b"abcdef",) * 3
        assert buffer.readonly is buffer.view.readonly is memoryview(thing).readonly
        assert (buffer.length, buffer.device, buffer.owner) == (6, None, thing)
        if not buffer.readonly:
            ctypes.memset(buffer.addr, ord("z"), 2)
            buffer.view[2:3] = b"y"
            assert memoryview(thing).tobytes() == b"zzydef"


def test_times_of_numpy_have_no_letter_in_python_and_are_bytes_all_the_same() -> None:
    times = np.array(["2026-01-01", "1970-01-02"], "M8[D]")
    with pytest.raises(ValueError, match="cannot include dtype 'M'"):
        memoryview(times)  # type: ignore[arg-type]
    with hold(times) as buffer:
        assert content(buffer) == bytes(buffer.view) == times.tobytes()
        assert not buffer.readonly


def test_mmap_is_held_at_the_start_of_a_page() -> None:
    with mmap.mmap(-1, 8192) as memory, hold(memory) as buffer:
        assert (buffer.addr % mmap.PAGESIZE, buffer.length, buffer.readonly) == (0, 8192, False)
        with pytest.raises(BufferError):
            memory.close()
        buffer.release()
    with mmap.mmap(-1, 8192, access=mmap.ACCESS_READ) as memory, hold(memory) as buffer:
        assert buffer.readonly


def test_shared_memory_is_what_it_shares() -> None:
    memory = SharedMemory(create=True, size=64)
    try:
        assert memory.buf is not None
        memory.buf[:3] = b"abc"
        buffer = hold(memory)
        assert (content(buffer)[:3], buffer.length, buffer.readonly) == (b"abc", memory.size, False)
        ctypes.memset(buffer.addr, ord("z"), 2)
        assert bytes(memory.buf[:3]) == b"zzc"
        buffer.release()
    finally:
        memory.close()
        memory.unlink()
    with pytest.raises(TypeError, match="SharedMemory has no buffer"):
        hold(memory)


def test_what_is_held_cannot_be_resized_until_it_is_released() -> None:
    for thing in (bytearray(64), array.array("b", bytes(64))):
        buffer = hold(thing)
        with pytest.raises(BufferError):
            thing.extend(b"x")
        assert buffer.addr
        buffer.release()
        buffer.release()
        thing.extend(b"x")
        assert len(thing) == 65


@pytest.mark.parametrize("addressed", [True, False])
def test_what_is_held_is_kept_alive_and_let_go(addressed: bool) -> None:
    thing = np.zeros(64, "u1")
    before = sys.getrefcount(thing)
    buffer = hold(thing)
    assert not addressed or buffer.addr
    assert sys.getrefcount(thing) > before
    buffer.release()
    assert sys.getrefcount(thing) == before
    buffer = hold(thing)
    assert not addressed or buffer.addr
    del buffer
    gc.collect()
    assert sys.getrefcount(thing) == before


@pytest.mark.parametrize("wrong", ["text", 5, None, [1, 2], object(), (1, 2)], ids=repr)
def test_what_has_no_buffer_is_refused_by_its_type(wrong: Any) -> None:
    for use in (hold, as_bytes):
        with pytest.raises(TypeError, match=f"^{type(wrong).__name__} has no buffer: give bytes-like data, an array"):
            use(wrong)


def closed_map() -> mmap.mmap:
    memory = mmap.mmap(-1, 10)
    memory.close()
    return memory


@pytest.mark.parametrize(
    ("thing", "match"),
    [
        (memoryview(bytearray(8))[::2], r"^use a memoryview as a buffer: .* not in one piece.* Give a copy .*bytes\("),
        (np.zeros((3, 3))[:, 1], r"^use a ndarray as a buffer: .* not in one piece.*numpy\.ascontiguousarray\("),
        (np.zeros((3, 3)).T, "not in one piece"),
        (np.zeros(8, "M8[s]")[::2], "^use a ndarray as a buffer: ndarray is not C-contiguous"),
        (np.array([object()]), "it holds Python objects"),
        (closed_map(), "^use a mmap as a buffer: mmap closed or invalid"),
    ],
    ids=["memoryview", "column", "transposed", "times", "objects", "closed"],
)
def test_what_is_not_in_one_piece_is_refused_and_told_what_to_do(thing: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hold(thing)


def test_an_empty_buffer_has_no_bytes() -> None:
    for thing in (b"", bytearray(), np.zeros((0, 3))):
        with hold(thing) as buffer:
            assert (buffer.length, bytes(buffer.view)) == (0, b"")


# ---- arrays on a GPU


class OnGpu:
    """What CuPy's arrays look like."""

    def __init__(self, **told: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 3), "typestr": "<f4", "data": (0x7F00_0000_0000, False), "version": 3, **told,
        }  # fmt: skip


def test_an_array_on_a_gpu_has_an_address_and_no_bytes_for_the_cpu() -> None:
    thing = OnGpu()
    with hold(thing) as buffer:
        assert (buffer.addr, buffer.length, buffer.readonly) == (0x7F00_0000_0000, 48, False)
        assert (buffer.device, buffer.owner) == ("a CUDA device", thing)
        with pytest.raises(ValueError, match=r"copy bytes of a OnGpu: they are on a CUDA device\. Register them"):
            _ = buffer.view
    with pytest.raises(ValueError, match="they are on a CUDA device"):
        as_bytes(thing)


@pytest.mark.parametrize(
    ("told", "length", "readonly"),
    [
        ({"strides": (12, 4)}, 48, False),
        ({"strides": None, "data": (4096, True)}, 48, True),
        ({"shape": (1, 3), "strides": (99, 4)}, 12, False),
        ({"shape": ()}, 4, False),
        ({"shape": (0, 3), "data": (0, False)}, 0, False),
        ({"typestr": "|V12"}, 144, False),
        ({"typestr": "<M8[ns]"}, 96, False),
    ],
)
def test_the_extent_of_an_array_on_a_gpu(told: dict[str, Any], length: int, readonly: bool) -> None:
    with hold(OnGpu(**told)) as buffer:
        assert (buffer.length, buffer.readonly) == (length, readonly)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"strides": (4, 16)}, r"^use a OnGpu as a buffer: .* not in one piece.*cupy\.ascontiguousarray"),
        ({"strides": (24, 4)}, "not in one piece"),
        ({"mask": object()}, "some of it is masked"),
    ],
)
def test_an_array_on_a_gpu_that_is_no_buffer(told: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hold(OnGpu(**told))


# ---- DLPack


class Packed:
    """An array that speaks DLPack and nothing else; NumPy makes the capsule."""

    def __init__(self, array: Any, versioned: bool = True, device: int = 1) -> None:
        self.array, self.versioned, self.device, self.capsules = array, versioned, device, list[Any]()

    def __dlpack__(self, **wishes: Any) -> Any:
        if wishes and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.capsules.append(self.array.__dlpack__(**wishes))
        return self.capsules[-1]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


@pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "of before 1.0"])
def test_a_capsule_is_taken_once_and_given_back(versioned: bool) -> None:
    numbers = np.arange(6, dtype="u2").reshape(2, 3)
    before, thing = sys.getrefcount(numbers), Packed(numbers, versioned)
    buffer = hold(thing)
    assert (content(buffer), buffer.readonly, buffer.device) == (numbers.tobytes(), False, None)
    buffer.view[:2] = b"\xff\0"
    assert numbers[0, 0] == 255
    assert repr(thing.capsules[0]).split('"')[1] == ("used_dltensor_versioned" if versioned else "used_dltensor")
    assert sys.getrefcount(numbers) == before + 2  # NumPy holds it for the capsule, and `thing` does
    buffer.release()
    assert sys.getrefcount(numbers) == before + 1
    buffer.release()
    thing.capsules.clear()
    assert sys.getrefcount(numbers) == before + 1
    with hold(thing) as buffer:
        pass
    assert sys.getrefcount(numbers) == before + 1


def test_a_part_of_an_array_begins_where_it_begins() -> None:
    numbers = np.arange(12, dtype="i4").reshape(4, 3)
    with hold(Packed(numbers[1:3])) as buffer:
        assert content(buffer) == numbers[1:3].tobytes()


def test_a_read_only_array_says_so_where_dlpack_can() -> None:
    numbers = np.arange(4)
    numbers.flags.writeable = False
    with hold(Packed(numbers)) as buffer:
        assert buffer.readonly
    with pytest.raises(ValueError, match=r"^use a Packed as a buffer: Cannot export readonly array"):
        hold(Packed(numbers, versioned=False))


@pytest.mark.parametrize("versioned", [True, False])
def test_scattered_arrays_are_refused_and_given_back(versioned: bool) -> None:
    numbers = np.arange(12).reshape(3, 4)
    before = sys.getrefcount(numbers)
    for part in (numbers[:, 1], numbers.T, numbers[::2]):
        with pytest.raises(ValueError, match=r"use a Packed as a buffer: .* not in one piece.*ascontiguousarray"):
            hold(Packed(part, versioned))
    del part
    gc.collect()
    assert sys.getrefcount(numbers) == before


@pytest.fixture
def made() -> Any:
    """A producer made by hand, whose tensor can be changed: what NumPy never gives."""
    gone: list[int] = []
    memory = (ctypes.c_ubyte * 64)(*range(64))
    shape = (ctypes.c_int64 * 2)(2, 3)
    deleter = buffers._Deleter(gone.append)
    tensor = buffers._Tensor(
        data=ctypes.addressof(memory), device_type=1, ndim=2, code=1, bits=16, lanes=1, shape=shape, byte_offset=8
    )
    managed = buffers._Versioned(major=1, minor=0, tensor=tensor, deleter=deleter)
    new = buffers._python("PyCapsule_New", ctypes.py_object, *[ctypes.c_void_p] * 3)
    name = ctypes.create_string_buffer(b"dltensor_versioned")
    return SimpleNamespace(
        __dlpack__=lambda max_version: new(ctypes.addressof(managed), ctypes.addressof(name), None),
        __dlpack_device__=lambda: (managed.tensor.device_type, 0),
        managed=managed, gone=gone, shape=shape, keep=(memory, name, deleter),
    )  # fmt: skip


def test_the_offset_counts_and_the_deleter_is_called_once(made: Any) -> None:
    buffer = hold(made)
    assert content(buffer) == bytes(range(8, 20))
    assert made.gone == []
    buffer.release()
    buffer.release()
    assert made.gone == [ctypes.addressof(made.managed)]


@pytest.mark.parametrize(
    ("bits", "lanes", "flags", "length"), [(8, 1, 0, 6), (16, 4, 0, 48), (4, 1, 0, 3), (4, 1, 4, 6), (1, 1, 0, 1)]
)
def test_the_extent_of_every_type(made: Any, bits: int, lanes: int, flags: int, length: int) -> None:
    made.managed.tensor.bits, made.managed.tensor.lanes, made.managed.flags = bits, lanes, flags
    with hold(made) as buffer:
        assert buffer.length == length


def test_a_single_number_and_no_number(made: Any) -> None:
    made.managed.tensor.ndim = 0
    with hold(made) as buffer:
        assert buffer.length == 2
    made.managed.tensor.ndim, made.shape[0] = 2, 0
    with hold(made) as buffer:
        assert buffer.length == 0


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [("major", 2, "DLPack 2 is not known here"), ("flags", 2, "it gives a copy. Give that copy itself")],
)
def test_what_cannot_be_used_is_given_back(made: Any, field: str, value: int, match: str) -> None:
    setattr(made.managed, field, value)
    with pytest.raises(ValueError, match=match):
        hold(made)
    assert len(made.gone) == 1


def test_devices_with_addresses_and_without(made: Any) -> None:
    for kind, words in ((1, None), (3, None), (2, "cuda:0"), (10, "rocm:0"), (13, "managed cuda:0")):
        made.managed.tensor.device_type = kind
        with hold(made) as buffer:
            assert buffer.device == words
    made.gone.clear()
    for kind in (4, 7, 8, 15):  # OpenCL, Vulkan, Metal, WebGPU give handles
        made.managed.tensor.device_type = kind
        with pytest.raises(ValueError, match=rf"its device, DLPack's kind {kind}, gives no address\. Copy it"):
            hold(made)
    assert made.gone == []


@pytest.mark.parametrize("gives", [b"bytes", None])
def test_what_is_no_capsule_is_refused(gives: Any) -> None:
    thing = SimpleNamespace(__dlpack__=lambda max_version: gives, __dlpack_device__=lambda: (1, 0))
    with pytest.raises(TypeError, match=r"its __dlpack__ gives a .*, not a new capsule"):
        hold(thing)
    thing = Packed(np.zeros(3))
    capsule = thing.__dlpack__()
    thing.array = SimpleNamespace(__dlpack__=lambda **_: capsule)
    hold(thing).release()
    with pytest.raises(TypeError, match="gives a PyCapsule, not a new capsule"):
        hold(thing)


# ---- torch


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def test_a_tensor_is_held_where_its_numbers_are(torch: Any) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for part in (tensor, tensor[1:], torch.nn.Parameter(tensor), tensor.bfloat16()):
        with hold(part) as buffer:
            assert (buffer.addr, buffer.length) == (part.data_ptr(), part.nbytes)
            assert (buffer.device, buffer.readonly, buffer.owner) == (None, False, part)
    with hold(tensor) as buffer:
        assert content(buffer) == tensor.numpy().tobytes()
        buffer.view[:4] = bytes(4)
        ctypes.memset(buffer.addr + 4, 0, 4)
    assert tensor[0].tolist() == [0, 0, 2, 3]


def test_tensors_that_are_no_buffer(torch: Any) -> None:
    tensor = torch.arange(12).reshape(3, 4)
    for part, match in (
        (tensor.T, r"^use a Tensor as a buffer: .* not in one piece.* Give it \.contiguous\(\)$"),
        (tensor[:, 1], r"\.contiguous\(\)"),
        (torch.eye(3).to_sparse(), r"storage.*Give a dense one: \.to_dense\(\)"),
        (torch.empty(3, device="meta"), r"^use a Tensor on meta as a buffer: no address there\. Give it \.cpu\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"Give it \.resolve_conj\(\)"),
    ):
        with pytest.raises(ValueError, match=match):
            hold(part)


class Tensor:
    """What torch's tensors look like, on a device that is not here."""

    def __init__(self, kind: str, addr: int) -> None:
        self.device, self.addr = SimpleNamespace(type=kind), addr
        self.device_name = kind

    data_ptr = property(lambda self: lambda: self.addr)
    is_contiguous = staticmethod(lambda: True)
    is_conj = is_neg = staticmethod(lambda: False)
    numel, element_size = staticmethod(lambda: 3), staticmethod(lambda: 4)


def test_a_tensor_of_another_device_is_held_where_that_has_addresses() -> None:
    with hold(Tensor("cuda", 0x7000)) as buffer:
        assert (buffer.addr, buffer.length, buffer.device is None) == (0x7000, 12, False)
    with pytest.raises(ValueError, match="no address there"):
        hold(Tensor("mps", 0x7000))
    with pytest.raises(ValueError, match="its 12 bytes are nowhere"):
        hold(Tensor("cpu", 0))
