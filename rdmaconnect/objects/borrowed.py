"""Queue pairs that are only known by their address: a ``struct ibv_qp *`` of whatever library in this process."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, cast
from typing import Any, TypeVar

from .. import verbs
from ..abi import QpAttrMask, QpState, QpType, ibv_context, ibv_device, ibv_qp
from ..errors import StateError, VerbsError
from .context import Context, _Device, device_names
from .memory import PD
from .owned import Owned
from .qp_attr import QpAttr
from .queuepair import QueuePair

__all__ = ["BorrowedQueuePair"]

S = TypeVar("S", bound=ctypes.Structure)


def _copy(address: int, kind: type[S]) -> S | None:
    """A copy of a struct in this process's memory; None where nothing can be read, which would end the process."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            data = memory.read(ctypes.sizeof(kind))
    except (OSError, OverflowError, ValueError):
        return None
    return kind.from_buffer_copy(data) if len(data) == ctypes.sizeof(kind) else None


def _address(pointer: Any) -> int:
    return cast(pointer, ctypes.c_void_p).value or 0


class _Lent(_Device):
    """A ``struct ibv_context`` that somebody else has opened, and closes."""

    def _release(self, pointer: Any) -> None:
        """It is not ours."""


class _LentPD(PD):
    """A protection domain that somebody else has made, and frees."""

    def __init__(self, context: Context, pointer: Any) -> None:
        self.context = context
        Owned.__init__(self, lambda: pointer, f"PD of {context.name}", (context,))

    def _release(self, pointer: Any) -> None:
        """It is not ours."""


class BorrowedQueuePair(QueuePair):
    """A queue pair that somebody else has made and destroys, by its address.

    Closing it, or its ``context``, ends this use of it and nothing else. It must be there until then: what lies at the
    address is looked at before each step, and one that was destroyed is mostly found out by that, but not for certain.

    Args:
        address: of its ``struct ibv_qp``.

    Raises:
        ValueError: no queue pair lies there.
        StateError: it does not answer: it was destroyed, or its device is gone.

    Source: ibv_create_qp(3), ``struct ibv_qp``.
    """

    def __init__(self, address: int) -> None:
        self._at, self._found = address, _copy(address, ibv_qp)
        device = self._device_name()
        if self._found is None or device is None:
            raise ValueError(
                f"qp is {address:#x}: no struct ibv_qp of a device that this process has open lies there. Give the "
                "address of one (in ctypes: addressof(qp.contents))"
            )
        pointer = cast(address, POINTER(ibv_qp))
        context = Context(_Lent(lambda: pointer.contents.context, device))
        try:
            init = verbs.ibv_query_qp(pointer, int(QpAttrMask.CAP))[1]
            pd = _LentPD(context, pointer.contents.pd)
            self._own(lambda: pointer, init, (pd,), QpType(pointer.contents.qp_type), None)
            self.found_in()
        except BaseException as e:
            context.close()
            if isinstance(e, VerbsError):
                raise StateError(f"use the queue pair at {address:#x}: {e} Was it destroyed?") from e
            raise

    def _device_name(self) -> str | None:
        """The device that what was found there says that it is on."""
        context = _copy(_address(self._found.context), ibv_context) if self._found is not None else None
        device = _copy(_address(context.device), ibv_device) if context is not None else None
        name = bytes(device.name).decode(errors="replace") if device is not None else ""
        return name if name in device_names() else None

    def _look(self) -> None:
        if _identity(_copy(self._at, ibv_qp)) != _identity(self._found):
            raise StateError(f"use {self.name}: it was destroyed meanwhile, by who made it.")

    def found_in(self) -> QpState:
        self._look()
        return super().found_in()

    def query(self, attr_mask: QpAttrMask | None = None) -> QpAttr:
        self._look()
        return super().query(attr_mask)

    def _modify(self, *args: Any, **kwargs: Any) -> None:
        self._look()
        super()._modify(*args, **kwargs)

    def _release(self, pointer: Any) -> None:
        """It is not ours."""


def _identity(qp: ibv_qp | None) -> tuple[int, int, int] | None:
    return None if qp is None else (_address(qp.context), _address(qp.pd), qp.qp_num)
