"""The buffers that people have, registered and written to by the peer."""

from __future__ import annotations

import array
import ctypes
import errno
import mmap
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest

from rdmaconnect import Connection, VerbsError
from rdmaconnect.abi import AccessFlags
from rdmaconnect.objects.buffers import hold

Pair = tuple[Connection, Connection]
SIZE = 48


class Packed:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __dlpack__(self, **wishes: Any) -> Any:
        return self.numbers.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Any:
        return self.numbers.__dlpack_device__()


class OnGpu:
    """What CuPy's arrays look like; nothing is mapped there."""

    __cuda_array_interface__ = {"shape": (64, 64), "typestr": "<f4", "data": (0x1000, False), "version": 3}  # noqa: RUF012


def tensor() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.zeros(SIZE // 4)


KINDS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(SIZE),
    "array": lambda: array.array("d", bytes(SIZE)),
    "mmap": lambda: mmap.mmap(-1, SIZE),
    "shared memory": lambda: SharedMemory(create=True, size=SIZE),
    "ctypes": lambda: (ctypes.c_uint64 * (SIZE // 8))(),
    "NumPy": lambda: np.zeros((SIZE // 8, 2), "f4"),
    "DLPack": lambda: Packed(np.zeros((3, SIZE // 6), "u2")),
    "torch": tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_is_registered_and_written_to_by_the_peer(pair: Pair, kind: str) -> None:
    here, there = pair
    thing, data = KINDS[kind](), bytes(range(1, SIZE + 1))
    with there.register(thing) as mr:
        here.write(data, mr.region.slice(0, SIZE))
        with hold(thing) as buffer:
            assert bytes(buffer.view[:SIZE]) == data
        assert here.read(mr.region, SIZE) == data
        # the same as the source and the target of every other call
        here.send(thing)
        assert there.recv()[:SIZE] == data
        there.send(data[::-1])
        assert here.recv_into(thing) == SIZE
        assert here.read(mr.region, SIZE) == data[::-1]
    with there.register(data) as mr, here.register(thing) as target:
        for into in (thing, target):
            here.read_into(into, mr.region, SIZE)
            here.send(into)
            assert there.recv()[:SIZE] == data
    if isinstance(thing, SharedMemory):
        thing.close()
        thing.unlink()


def test_numbers_go_from_array_to_array(pair: Pair) -> None:
    here, there = pair
    theirs, mine = np.zeros((300, 100)), np.arange(30000.0).reshape(300, 100)  # more than a message: no copy
    with there.register(theirs) as mr:
        here.write(mine, mr.region)
        assert (theirs == mine).all()
        here.read_into(mine[4:6], mr.region, 8 * 200)
        assert (mine[4:6].ravel() == np.arange(200)).all()
    theirs.resize((5,), refcheck=False)  # it is let go


def test_what_may_only_be_read_is_refused_where_the_device_would_write(pair: Pair) -> None:
    here, there = pair
    frozen = np.arange(SIZE, dtype="u1")
    frozen.flags.writeable = False
    for thing in (bytes(frozen), frozen, Packed(frozen)):
        with pytest.raises(ValueError, match=r"register a read-only \w+ for .*LOCAL_WRITE.*: give a writable one"):
            there.register(thing, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
        with there.register(thing) as mr:
            assert here.read(mr.region) == bytes(frozen)
            with pytest.raises(ValueError, match=r"read into a read-only \w+: give a writable one"):
                there.read_into(thing, mr.region)
        with pytest.raises(ValueError, match=r"receive into a read-only \w+: give a writable one"):
            there.recv_into(thing)
    for use in (there.register, there.send, there.recv_into):
        with pytest.raises(ValueError, match=r"not in one piece.*numpy\.ascontiguousarray"):
            use(np.zeros((4, 4))[:, 1])


def test_memory_of_a_gpu_that_the_device_does_not_reach_is_named(pair: Pair) -> None:
    here, there = pair
    match = r"^register 16384 bytes on a CUDA device with rxe1: ibv_reg_mr: EFAULT.*nvidia-peermem.*Dmabuf"
    for use in (here.register, here.send):
        with pytest.raises(VerbsError, match=match) as caught:
            use(OnGpu())
        assert caught.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="they are on a CUDA device"):
        here.recv_into(OnGpu())
    here.send(b"still of use")
    assert there.recv() == b"still of use"
