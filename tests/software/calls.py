"""Every verb as a C function: what ctypes calls, and how that comes to the Python function which does the work.

A verb's Python function is named as the verb and marked with :func:`verb`. It is called with the world (the
``Software``) and the verb's arguments: objects of :mod:`arena` for pointers to objects, structs for pointers to
structs (None for NULL), addresses for pointers to pointers and for ``void *``, and numbers. It returns an object,
a number or None (0), and raises ``Refused`` with an errno.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from rdmaconnect import abi
from rdmaconnect.abi import Fails

from .arena import ALIVE, KINDS, Misused, Object, Refused, find
from .hooks import Call

Reader = Callable[[Any], Any]


@dataclass
class Verb:
    """One verb.

    Attributes:
        name: its C name.
        body: what does the work.
        locked: whether it does so with the network's lock held; those that may sleep do not.
        idle: whether an object has nothing for it, so that it answers 0: a short way for what is called in a loop.
    """

    name: str
    body: Callable[..., Any]
    locked: bool
    idle: Callable[[Any], bool] | None = None


VERBS: dict[str, Verb] = {}
#: the code of the Python functions that C calls: whatever runs below one of them runs inside of a verb
ENTRIES: set[CodeType] = set()
#: the ctypes functions, which must live as long as the process
_kept: list[Any] = []
_current: Any = None


def current() -> Any:
    """The world that is installed, or None."""
    return _current


def set_current(world: Any) -> None:
    """Install a world, or none."""
    global _current
    _current = world


def verb(function: Any = None, *, locked: bool = True, idle: Callable[[Any], bool] | None = None) -> Any:
    """Mark the Python function that does the work of a verb."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        VERBS[body.__name__] = Verb(body.__name__, body, locked, idle)
        return body

    return register if function is None else register(function)


# ---- from C to Python


def _reader(kind: Any, first: bool) -> Reader | None:
    """How an argument of a C type comes to the body; None: as it is. What a verb is about cannot be NULL."""
    target = getattr(kind, "_type_", None)
    if not (isinstance(target, type) and issubclass(kind, ctypes._Pointer)):  # type: ignore[attr-defined]
        return None
    if _names_object(kind):
        return lambda address, name=target.__name__: find(address, name) if address or first else None
    if issubclass(target, ctypes._Pointer):  # type: ignore[attr-defined]
        return lambda address: address or 0
    return lambda address, struct=target: struct.from_address(address) if address else None


def _names_object(kind: Any) -> bool:
    """Whether it is a pointer to something that a verb made."""
    target = getattr(kind, "_type_", None)
    return isinstance(target, type) and any(target.__name__ in known.typed for known in KINDS)


def raw_type(kind: Any) -> Any:
    """The same argument or result as a callback can have it."""
    pointers = (ctypes._Pointer, ctypes.c_char_p)  # type: ignore[attr-defined]
    return ctypes.c_void_p if isinstance(kind, type) and issubclass(kind, pointers) else kind


def failure(fails: Fails, number: int) -> int | None:
    """What a function answers that fails with an errno; that is left for its caller."""
    if fails is Fails.NULL_ERRNO:
        _left.errno = number
        ctypes.set_errno(number)
        return None
    if fails in (Fails.ERRNO_RETURNED, Fails.POLL_ERRNO):
        return number
    if fails is Fails.POLL_COUNT:
        return -1
    if fails is Fails.MINUS_ERRNO:
        return -number
    if fails is Fails.MINUS_ONE:
        _left.errno = number
        ctypes.set_errno(number)
        return -1
    return 0


def _callback(made: Verb, restype: Any, argtypes: tuple[Any, ...], fails: Fails) -> int:
    """Make the C function; its address."""
    name, body, locked, idle = made.name, made.body, made.locked, made.idle
    readers = [_reader(kind, i == 0) for i, kind in enumerate(argtypes)]
    owned = bool(argtypes) and _names_object(argtypes[0])
    names = list(inspect.signature(body).parameters)[1:] if name in VERBS else [f"arg{i}" for i in range(len(argtypes))]

    def enter(*raw: Any) -> int | None:
        world = None
        if idle is not None:
            thing = ALIVE.get(raw[0])
            if thing is not None and idle(thing) and name not in thing.world.hooks:
                with thing.world.lock:
                    thing.world.calls[name] += 1
                return 0
        try:
            args = [value if read is None else read(value) for read, value in zip(readers, raw, strict=True)]
            world = args[0].world if owned else _current
            if world is None:
                raise Refused(errno.ENOSYS)
            with world.lock:
                world.calls[name] += 1
                hooks = world.hooks.get(name)
                if hooks is None and locked:
                    return _result(body(world, *args))
                number = world.calls[name]
            if hooks is None:
                return _result(body(world, *args))
            call = Call(name, number, dict(zip(names, args, strict=True)))
            return _hooked(world, call, [hook for hook in hooks if hook.takes(call)], made, args)
        except Refused as e:
            return failure(fails, e.errno)
        except OSError as e:  # no descriptor is left, for example
            return failure(fails, e.errno or errno.EIO)
        except Misused as e:
            told = e.world or world or _current
            if told is not None:
                told.error(f"{name} {e}")
            return failure(fails, errno.EINVAL)
        except BaseException as e:  # noqa: BLE001  nothing can be raised through C
            told = world or _current
            if told is not None:
                told.error(f"{name}: {e!r} inside of the device:\n{traceback.format_exc()}", stack=False)
            return failure(fails, errno.EIO)

    kind = ctypes.CFUNCTYPE(raw_type(restype), *map(raw_type, argtypes), use_errno=True)
    function = kind(enter)
    ENTRIES.add(enter.__code__)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _result(value: Any) -> int:
    if value is None:
        return 0
    return value.address if isinstance(value, Object) else value


def _hooked(world: Any, call: Call, hooks: list[Any], made: Verb, args: list[Any]) -> int:
    for hook in hooks:
        hook.begin(call)
    for hook in hooks:
        if hook.fail is not None:
            raise Refused(hook.fail)
    if made.locked:
        with world.lock:
            call.result = _result(made.body(world, *args))
    else:
        call.result = _result(made.body(world, *args))
    for hook in hooks:
        if hook.after is not None:
            hook.after(call)
    return call.result


# ---- from Python to C

_TABLES = {
    "context": abi.ibv_context_ops,
    "verbs_context": abi.verbs_context,
    "cq_ex": abi.ibv_cq_ex,
    "qp_ex": abi.ibv_qp_ex,
    "wq": abi.ibv_wq,
    "dm": abi.ibv_dm,
}


@cache
def operations(table: str) -> dict[str, int]:
    """Field of a table of operations -> the C function's address, of all verbs in it."""
    found: dict[str, int] = {}
    fields = dict(_TABLES[table]._fields_)
    for name, op in abi.OPS.items():
        if op.table == table and not (op.field in found and name not in VERBS):
            kind = fields[op.field]
            made = VERBS.get(name) or Verb(name, _lacking, True)
            found[op.field] = _callback(made, kind._restype_, kind._argtypes_, op.fails)
    return found


def _lacking(world: Any, *args: Any) -> None:
    """What libibverbs puts in the place of a verb that a device does not have."""
    raise Refused(errno.EOPNOTSUPP)


_functions: dict[str, int] = {}


def _exported(name: str) -> int:
    """The address of an exported function."""
    if name not in _functions:
        prototype = abi.PROTOTYPES[name]
        made = VERBS.get(name) if name not in abi.OPS else None
        made = made or Verb(name, _lacking, True)
        _functions[name] = _callback(made, prototype.restype, prototype.argtypes, prototype.fails)
    return _functions[name]


class Library:
    """What stands in for the loaded libibverbs: ``library[name]`` is an exported function.

    Args:
        missing: the symbols that it does not export, as an older one would not.
    """

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing

    def __getitem__(self, name: str) -> Any:
        prototype = abi.PROTOTYPES.get(name)
        if prototype is None or name in self.missing:
            raise AttributeError(f"undefined symbol: {name}")
        kind = ctypes.CFUNCTYPE(prototype.restype, *prototype.argtypes, use_errno=True)
        return Exported(kind(_exported(name)), prototype.restype, prototype.argtypes)


class Exported:
    """A function of the library, as ctypes gives one: called, it leaves the verb's errno to its caller.

    A callback's own errno is lost where another thread gets the interpreter before its caller does.
    """

    def __init__(self, function: Any, restype: Any, argtypes: Any) -> None:
        self._function, self.restype, self.argtypes = function, restype, argtypes

    def __call__(self, *args: Any) -> Any:
        _left.errno = 0
        result = self._function(*args)
        if _left.errno:
            ctypes.set_errno(_left.errno)
        return result


class _Left(threading.local):
    errno = 0


#: this thread's errno of the last verb that failed
_left = _Left()
