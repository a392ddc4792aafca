"""Asks C compilers whether `rdmaconnect.abi` says what a real `infiniband/verbs.h` says.

Every statement about the ABI becomes one line of C: a `_Static_assert` that holds if the statement is true. The
compiler reads the header and the lines; a line that it complains about is a statement that is false.

A header may be older than the structs of `rdmaconnect.abi`. What it lacks must be listed in `abi.SINCE`, and is left
out of the structs before they are compared, so that an old header proves the layout an old library has.

The compiler may be one for another machine or another C library: nothing is run, so the layout there is proven here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rdmaconnect import abi
from rdmaconnect.abi.cstruct import mutex_size, scope
from rdmaconnect.abi.ctext import Declaration, declarations, layout

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
#: the lab gives all headers and all compilers, and nothing may be missing there
IN_LAB = bool(os.environ.get("RDMACONNECT_HEADERS"))
SCOPE = scope(abi.STRUCTS)
CONSTANTS = {"IBV_SYSFS_NAME_MAX": "64", "IBV_SYSFS_PATH_MAX": "256"}


class Target(NamedTuple):
    """A machine and a C library that a compiler compiles for.

    Attributes:
        name: the machine.
        libc: `glibc` or `musl`.
        command: the compiler and how it finds the rest of the system's headers.
        package: the Debian package that has it.
    """

    name: str
    libc: str
    command: tuple[str, ...]
    package: str

    def __repr__(self) -> str:
        return self.name if self.libc == "glibc" else f"{self.name}-{self.libc}"

    @property
    def mutex(self) -> int:
        """Bytes in a `pthread_mutex_t` there."""
        return mutex_size(self.name, self.libc)

    @property
    def there(self) -> bool:
        return shutil.which(self.command[0]) is not None


SYSTEM = Path("/usr/include")
#: the kernel's headers, which musl's compiler does not look for
_KERNEL = ("-idirafter", "/usr/include", "-idirafter", f"/usr/include/{platform.machine()}-linux-gnu")
HERE = Target(platform.machine(), platform.libc_ver()[0], (CC or "cc",), "gcc")
TARGETS = [
    HERE,
    *(
        Target(machine, "glibc", (f"{prefix}-linux-gnu-gcc",), f"gcc-{prefix}-linux-gnu")
        for machine, prefix in {
            "aarch64": "aarch64", "s390x": "s390x", "riscv64": "riscv64", "ppc64le": "powerpc64le"
        }.items()
    ),
    Target(platform.machine(), "musl", (f"{platform.machine()}-linux-musl-gcc", *_KERNEL), "musl-dev"),
]  # fmt: skip


class Check(NamedTuple):
    """A statement and the line of C that compiles if it is true."""

    what: str
    code: str


class Header:
    """One `infiniband/verbs.h`.

    Args:
        label: what to call it; a number is the rdma-core release it is from.
        include: the directory that holds `infiniband`.
    """

    #: the header that is read
    first = "infiniband/verbs.h"

    def __init__(self, label: str, include: Path) -> None:
        self.label, self.include = label, include

    def __repr__(self) -> str:
        return self.label

    @property
    def release(self) -> int | None:
        return int(self.label) if self.label.isdigit() else None

    def compiler(self, *args: str, code: str = "", target: Target = HERE) -> subprocess.CompletedProcess[str]:
        """Run a compiler over `code`, with this header included first, on line 1."""
        # the system's place comes last by itself, behind the headers of the target
        place = [] if self.include == SYSTEM else [f"-I{self.include}"]
        with tempfile.TemporaryDirectory() as where:
            source = Path(where, "abi.c")
            source.write_text(f"#include <{self.first}>\n" + code)
            command = [target.command[0], "-std=gnu11", "-w", *place, *target.command[1:], *args, source.name]
            return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)

    @functools.cached_property
    def text(self) -> str:
        """The header after the preprocessor: no comments, no macros."""
        done = self.compiler("-E", "-P")
        assert done.returncode == 0, done.stderr
        for name, value in CONSTANTS.items():
            done.stdout = re.sub(rf"\b{name}\]", f"{value}]", done.stdout)
        return done.stdout

    @functools.cached_property
    def words(self) -> set[str]:
        """Every identifier of the header, macros included."""
        return set(re.findall(r"[A-Za-z_]\w*", self.text + self.compiler("-E", "-dM").stdout))

    @functools.cached_property
    def enums(self) -> dict[str, list[str]]:
        """Enumerators of each enum with a tag."""
        found = re.findall(r"\benum\s+(\w+)\s*\{([^}]*)\}", self.text)
        return {tag: re.findall(r"(?:^|,)\s*(\w+)", body) for tag, body in found}

    @functools.cached_property
    def structs(self) -> dict[str, str]:
        """The text between the braces of each struct and union with a tag."""
        found = {}
        for match in re.finditer(r"\b(?:struct|union)\s+(\w+)\s*\{", self.text):
            found[match[1]] = self.text[match.end() : _closing(self.text, match.end())]
        return found

    @functools.cached_property
    def inlines(self) -> dict[str, str]:
        """The bodies of the inline functions."""
        found = {}
        for match in re.finditer(r"\bstatic inline\b[^{};]*?\b(\w+)\s*\([^{};]*\)\s*\{", self.text):
            found[match[1]] = self.text[match.end() : _closing(self.text, match.end())]
        return found

    @functools.cached_property
    def functions(self) -> set[str]:
        """The exported functions of libibverbs that the header declares."""
        flat = re.sub(r"\{[^{}]*\}", ";", re.sub(r"__attribute__\s*\(\(.*?\)\)", "", self.text))
        names = re.findall(r"\b(_?ibv_\w+|mult_to_ibv_rate|mbps_to_ibv_rate)\s*\([^();]*\)\s*;", flat)
        return set(names) - set(self.inlines)

    def has(self, name: str) -> bool:
        """Whether the header has a name as `abi.SINCE` writes it."""
        struct, _, member = name.rpartition(".")
        return member in re.findall(r"\w+", self.structs.get(struct, "")) if struct else name in self.words

    def should_have(self, name: str) -> bool:
        """Whether a name must be in the header: all but those that `abi.SINCE` lists and that are indeed absent."""
        return name not in abi.SINCE or self.has(name)


def _closing(text: str, at: int) -> int:
    """Where the brace that was opened just before `at` is closed."""
    depth = 1
    while depth:
        brace = re.compile(r"[{}]").search(text, at)
        assert brace
        depth, at = depth + (1 if brace[0] == "{" else -1), brace.end()
    return at - 1


def headers() -> list[Header]:
    """The headers to compare with: `$RDMACONNECT_HEADERS/<release>/usr/include`, or else the system's."""
    if CC is None:
        return []
    root = os.environ.get("RDMACONNECT_HEADERS")
    if root:
        found = sorted(Path(root).glob("*/usr/include/infiniband/verbs.h"), key=lambda p: p.parts[-5].zfill(4))
        assert found, f"RDMACONNECT_HEADERS={root} holds no <release>/usr/include/infiniband/verbs.h"
        return [Header(path.parts[-5], path.parents[1]) for path in found]
    return [Header("system", SYSTEM)] if (SYSTEM / "infiniband/verbs.h").exists() else []


def members(text: str, path: str = "", types: dict[str, Any] = SCOPE) -> Iterator[tuple[str, Declaration]]:
    """Every member in the text of a struct, those of structs without a tag included, with its path."""
    for found in declarations(text, types):
        inner = f"{path}{found.name}"
        yield inner, found
        if "{" in found.text:
            body = found.text[found.text.index("{") + 1 : found.text.rindex("}")]
            yield from members(body, f"{inner}." if found.name else path, types)


@functools.cache
def structs(header: Header, mutex: int) -> dict[str, Any]:
    """Every struct as a header has it, without the members that came later, where a lock has `mutex` bytes."""
    types, found = dict(SCOPE), dict[str, Any]()
    types["pthread_mutex_t"] = lock(mutex)
    for name, cls in abi.STRUCTS.items():
        if header.should_have(name):
            found[name] = as_of(header, name, cls, types)
            types[f"{_kind(cls)[0]} {name}"] = found[name]
    return found


def as_of(header: Header, name: str, cls: Any, types: dict[str, Any] = SCOPE) -> Any:
    """A struct as `header` has it: without the members that came later."""
    kept = [d for d in declarations(cls._c_, types, name) if header.should_have(f"{name}.{d.name}")]
    _, parent = _kind(cls)
    anonymous, fields = layout(kept)
    text = "".join(f"{d.text};" for d in kept)
    return type(parent)(name, (parent,), {"_anonymous_": anonymous, "_fields_": fields, "_c_": text})


def lock(mutex: int) -> Any:
    """A `pthread_mutex_t` of so many bytes."""
    fields = [("size", ctypes.c_char * mutex), ("align", ctypes.c_long)]
    return type(ctypes.Union)("pthread_mutex_t", (ctypes.Union,), {"_fields_": fields})


def _kind(cls: Any) -> tuple[str, Any]:
    """C's word for a class, and ctypes' class for that."""
    return ("union", ctypes.Union) if issubclass(cls, ctypes.Union) else ("struct", ctypes.Structure)


def enum_checks(header: Header, cls: Any, c_name: str | None, prefix: str) -> Iterator[Check]:
    """Each enumerator's value; and that an enum is as wide as an int."""
    if c_name and c_name in header.enums:
        yield Check(f"enum {c_name}", f'_Static_assert(sizeof(enum {c_name}) == sizeof(int), "");')
    for short, member in cls.__members__.items():
        name = prefix + short
        if header.should_have(name):
            yield Check(name, f'_Static_assert((long long)({name}) == {int(member)}LL, "");')


def struct_checks(name: str, cls: Any, types: dict[str, Any] = SCOPE) -> Iterator[Check]:
    """Size and alignment of a struct; offset, size and exact C type of every member."""
    kind = f"{_kind(cls)[0]} {name}"
    yield Check(f"sizeof {name}", f'_Static_assert(sizeof({kind}) == {ctypes.sizeof(cls)}, "");')
    yield Check(f"alignof {name}", f'_Static_assert(_Alignof({kind}) == {ctypes.alignment(cls)}, "");')
    for path, found in members(cls._c_, types=types):
        if found.name:
            where = f"{name}.{path}"
            offset, size = place(cls, path)
            it = f"(({kind} *)0)->{path}"
            yield Check(f"offset {where}", f'_Static_assert(__builtin_offsetof({kind}, {path}) == {offset}, "");')
            yield Check(f"size {where}", f'_Static_assert(sizeof({it}) == {size}, "");')
            if "{" not in found.text:
                yield same_type(f"type {where}", found.name, found.text, it)


def place(cls: Any, path: str) -> tuple[int, int]:
    """Offset and size of a member, by a path such as `wr.rdma.rkey`."""
    offset = size = 0
    for name in path.split("."):
        field = getattr(cls, name)
        offset, size = offset + field.offset, field.size
        cls = type_of(cls, name)
    return offset, size


def type_of(cls: Any, name: str) -> Any:
    """The class of a member, which may belong to an anonymous member."""
    for field, ctype, *_ in cls._fields_:
        found = ctype if field == name else type_of(ctype, name) if field in cls._anonymous_ else None
        if found:
            return found
    return None


def prototype_check(prototype: abi.Prototype) -> Check:
    """That the header declares a function of exactly this type."""
    name = prototype.name
    return same_type(f"prototype {name}", name, prototype.text, name)


def same_type(what: str, name: str, text: str, expression: str) -> Check:
    """That `expression` has the C type that the declaration `text` gives to `name`."""
    ours = "ours_" + re.sub(r"\W", "_", what)
    text = re.sub(rf"\b{name}\b(?=\)\(|\(|\[|$)", ours, " ".join(text.split()))
    types = f"__typeof__({ours}), __typeof__({expression})"
    return Check(what, f'extern {text}; _Static_assert(__builtin_types_compatible_p({types}), "");')


def checks(header: Header, target: Target = HERE) -> list[Check]:
    """Everything that `rdmaconnect.abi` says, as far as this header can know it."""
    found: list[Check] = []
    for cls, (c_name, prefix) in abi.ENUMS.items():
        found += enum_checks(header, cls, c_name, prefix)
    for name, cls in structs(header, target.mutex).items():
        found += struct_checks(name, cls)
    for type_ in (lock(target.mutex), abi.pthread_cond_t):
        name, size, alignment = type_.__name__, ctypes.sizeof(type_), ctypes.alignment(type_)
        found.append(Check(f"sizeof {name}", f'_Static_assert(sizeof({name}) == {size}, "");'))
        found.append(Check(f"alignof {name}", f'_Static_assert(_Alignof({name}) == {alignment}, "");'))
    for name, prototype in abi.PROTOTYPES.items():
        if header.should_have(name):
            found.append(prototype_check(prototype))
    return [check for check in found if not changed(header, check)]


def changed(header: Header, check: Check) -> bool:
    """Whether a statement is about what older headers such as this one have otherwise."""
    name = check.what.removeprefix("type ")
    return header.release is not None and header.release < abi.CHANGED.get(name, 0)


def refuted(header: Header, statements: Iterable[Check], target: Target = HERE) -> list[str]:
    """Compile the statements against a header; return those that the compiler refuses."""
    statements = list(statements)
    macros = "".join(f"#undef {name}\n" for name in abi.PROTOTYPES)
    first = macros.count("\n") + 2
    code = macros + "\n".join(check.code for check in statements) + "\n"
    done = header.compiler("-fsyntax-only", code=code, target=target)
    lines = sorted({int(n) for n in re.findall(r"^abi\.c:(\d+):\d+: error", done.stderr, re.M)})
    assert bool(lines) == bool(done.returncode), done.stderr
    assert all(line >= first for line in lines), done.stderr
    return [statements[line - first].what for line in lines]


every_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            id=repr(target),
            marks=[] if target.there or IN_LAB else pytest.mark.skip(f"needs {target.command[0]} ({target.package})"),
        )
        for target in TARGETS
    ],
)
