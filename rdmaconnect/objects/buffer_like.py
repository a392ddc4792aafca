"""What may be given as a buffer, for type checkers; :mod:`.buffers` finds the memory of each.

No library of arrays is imported: each is known by the protocol that its objects speak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

__all__ = ["BufferLike"]


class SupportsBuffer(Protocol):
    """Python's buffer protocol: bytes, bytearray, memoryview, array, mmap, ctypes, NumPy. Source: PEP 688."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Its memory."""


class SupportsBuf(Protocol):
    """``multiprocessing.shared_memory``."""

    @property
    def buf(self) -> memoryview | None:
        """Its memory."""


class SupportsDLPack(Protocol):
    """Arrays and tensors: torch, JAX and others. Source: DLPack's Python specification."""

    @property
    def __dlpack__(self) -> Callable[..., Any]:
        """Makes a capsule of it."""

    @property
    def __dlpack_device__(self) -> Callable[..., Any]:
        """Where its memory is."""


class SupportsCudaArray(Protocol):
    """Arrays on a GPU: CuPy, Numba. Source: "CUDA Array Interface (Version 3)" of Numba's manual."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """Its memory, shape and type."""


#: anything that holds bytes in one piece
BufferLike: TypeAlias = SupportsBuffer | SupportsBuf | SupportsDLPack | SupportsCudaArray
