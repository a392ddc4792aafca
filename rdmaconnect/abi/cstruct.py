"""C structs as ctypes classes whose members are written in C.

Every class bears the name of its C struct and holds the members, word for word from the newest header, in
`_c_`. Structs point at one another in circles, so they are all declared first and then given their `_fields_`
by `complete()`, which `structs` calls.

Lengths, owners and byte orders, which C does not say, are in the docstrings. All structs are those of a
64-bit Linux. What has changed since rdma-core 28 is in `since`.

Memory: the library allocates and frees `ibv_device`, `ibv_context`, `verbs_context`, `ibv_pd`, `ibv_mr`,
`ibv_cq`, `ibv_qp` and the other objects, and a Python `POINTER` to one is a bare address: it neither keeps
the object alive nor knows when it has died. The `*_attr*`, `*_wr`, `ibv_sge`, `ibv_wc` structs and what they
point to are the caller's.
"""

from __future__ import annotations

import ctypes as c
import platform
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from .ctext import OPAQUE, declarations, layout

OPAQUES = (
    "_compat_ibv_port_attr",
    "ibv_buf",
    "ibv_dmah",
    "ibv_dmah_init_attr",
    "ibv_flow_action",
    "ibv_flow_action_esp_attr",
    "verbs_ex_private",
)
"""Structs that are only pointed to: `c_void_p` in Python."""


class CStruct(c.Structure):
    """A C struct whose members are written in C in `_c_`."""

    _c_: ClassVar[str]


class CUnion(c.Union):
    """A C union whose members are written in C in `_c_`."""

    _c_: ClassVar[str]


def mutex_size(machine: str, libc: str) -> int:
    """Bytes in a pthread_mutex_t on 64-bit Linux.

    Args:
        machine: as `platform.machine()` names it.
        libc: `glibc` or another; `platform.libc_ver()` does not know musl's name.
    """
    return 48 if (machine, libc) == ("aarch64", "glibc") else 40


class pthread_mutex_t(c.Union):
    """A lock inside the library's objects. Never touched from Python: only its size and alignment matter."""

    _fields_ = (("size", c.c_char * mutex_size(platform.machine(), platform.libc_ver()[0])), ("align", c.c_long))


class pthread_cond_t(c.Union):
    """A condition variable inside the library's objects. Never touched from Python."""

    _fields_ = (("size", c.c_char * 48), ("align", c.c_longlong))


def scope(structs: Mapping[str, Any]) -> dict[str, Any]:
    """What C type names mean beyond the scalars, for `ctext.declarations`."""
    types: dict[str, Any] = {"pthread_mutex_t": pthread_mutex_t, "pthread_cond_t": pthread_cond_t}
    types |= {f"struct {name}": OPAQUE for name in OPAQUES}
    return types | {f"{'union' if issubclass(cls, c.Union) else 'struct'} {n}": cls for n, cls in structs.items()}


def complete(*modules: ModuleType) -> dict[str, Any]:
    """Give every struct of `modules` its `_fields_`, from its `_c_`.

    Args:
        modules: in the order in which they embed one another; in each, a struct precedes those it is part of.

    Returns:
        The structs by name.
    """
    structs = {name: cls for module in modules for name, cls in vars(module).items() if hasattr(cls, "_c_")}
    types = scope(structs)
    for name, cls in structs.items():
        cls._anonymous_, cls._fields_ = layout(declarations(cls._c_, types, name))
    return structs
