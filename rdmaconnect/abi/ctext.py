"""Reads the C declarations that `verbs.h` is written in, and gives the ctypes that match them.

The structs and the prototypes of this package are kept as C text, word for word as the header has them, so
that a reader can compare them with the header by eye and the test can hand the same words to a compiler. This
module turns that text into ctypes, and knows no more C than the header needs:

    uint64_t wr_id;                              a scalar, by its C name
    enum ibv_wc_status status;                   an enum is an int
    char name[64];                               an array
    struct ibv_sge *sg_list;                     a pointer; `const` changes nothing
    union { __be32 imm_data; uint32_t rkey; };   an anonymous member: its fields join the struct
    struct { uint64_t tag; } add;                a struct without a tag
    int (*poll_cq)(struct ibv_cq *cq, int n);    a pointer to a function
    int ibv_close_device(struct ibv_context *);  a function

Choices made where ctypes offers several: `void *` is `c_void_p` (an int or None in Python), `char *` is
`c_char_p` (bytes or None), a pointer to an opaque struct is `c_void_p`, every other pointer is
`POINTER(...)`, and a function pointer is a `CFUNCTYPE`, which releases the GIL while C runs. `__be16`,
`__be32` and `__be64` are plain unsigned integers *in network byte order*: convert with `int.from_bytes` or
`socket.ntohl`, ctypes does not.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

OPAQUE = object()
"""Stands in a scope for a struct that is only ever pointed to."""

SCALARS: dict[str, Any] = {
    "void": None,
    "char": c.c_char,
    "int": c.c_int,
    "unsigned int": c.c_uint,
    "long": c.c_long,
    "uint8_t": c.c_uint8,
    "uint16_t": c.c_uint16,
    "uint32_t": c.c_uint32,
    "uint64_t": c.c_uint64,
    "size_t": c.c_size_t,
    "ssize_t": c.c_ssize_t,
    "__be16": c.c_uint16,
    "__be32": c.c_uint32,
    "__be64": c.c_uint64,
}


class Declaration(NamedTuple):
    """One declared name.

    Attributes:
        name: the declared identifier; empty for an anonymous member.
        ctype: the ctypes class of a field, or the return type of a function (None for `void`).
        argtypes: the arguments of a function; None for a field.
        text: the declaration as it was written, without the semicolon.
    """

    name: str
    ctype: Any
    argtypes: tuple[Any, ...] | None
    text: str


def declarations(text: str, scope: Mapping[str, Any], owner: str = "") -> list[Declaration]:
    """Read every declaration in `text`: the members of a struct, or a list of prototypes.

    Args:
        text: C declarations, each ended by a semicolon; no comments, no preprocessor.
        scope: what `"struct x"` and `"union x"` mean, and the typedefs beyond `SCALARS`; a value is a ctypes
            class or `OPAQUE`.
        owner: prefix of the names of the classes made for structs without a tag.

    Raises:
        ValueError: the text is not in the subset above, or names a type that `scope` does not hold.
    """
    reader = _Reader(text, scope, owner)
    found = []
    while reader.more():
        found.append(reader.declaration())
    return found


def layout(members: list[Declaration]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Turn a struct's members into what ctypes calls `_anonymous_` and `_fields_`; set them in that order."""
    fields = [(d.name or f"_anonymous_{i}", d.ctype) for i, d in enumerate(members)]
    return [name for (name, _), d in zip(fields, members, strict=True) if not d.name], fields


#: a type of two words is one token
_TOKEN = re.compile(r"(?:struct|union|enum|unsigned)\s+\w+|\w+|[^\s\w]")


def reader(scope: Mapping[str, Any]) -> Callable[[str], Declaration]:
    """What gives the meaning of one declaration, without its semicolon: each is read when it is first asked for.

    A program calls few of the functions that there are.
    """

    @cache
    def read(text: str) -> Declaration:
        (found,) = declarations(f"{text};", scope)
        return found

    return read


class _Reader:
    """A recursive-descent reader: one method for each thing that C can put next."""

    def __init__(self, text: str, scope: Mapping[str, Any], owner: str) -> None:
        self.text, self.types, self.owner = text, {**SCALARS, **scope}, owner
        self.matches = list(_TOKEN.finditer(text))
        self.tokens: list[str] = [*_TOKEN.findall(text), ""]
        self.at = 0

    def more(self) -> bool:
        return self.at < len(self.matches)

    def where(self) -> int:
        return self.matches[self.at].start() if self.at < len(self.matches) else len(self.text)

    def accept(self, token: str) -> bool:
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.wrong(f"expected {token!r}")

    def identifier(self) -> str:
        name = self.tokens[self.at]
        if not name.isidentifier():
            raise self.wrong("expected a name")
        self.at += 1
        return name

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"C text: {what} at {self.text[self.where() : self.where() + 40].strip()!r}")

    def declaration(self) -> Declaration:
        start = self.where()
        base = self.base()
        name, ctype, argtypes = ("", base, None) if self.tokens[self.at] == ";" else self.declarator(base)
        text = self.text[start : self.where()].strip()
        self.expect(";")
        if argtypes is None:
            self.complete(ctype)
        return Declaration(name, ctype, argtypes, text)

    def base(self) -> Any:
        """The type before the stars and the name."""
        self.accept("const")
        word = self.tokens[self.at]
        if word in self.types:
            self.at += 1
            found = self.types[word]
        elif word.startswith("enum "):
            self.at += 1
            found = c.c_int
        elif word in ("struct", "union"):
            self.at += 1
            return self.untagged(word)
        else:
            self.at += word != ""
            raise self.wrong(f"unknown type {word!r} before")
        self.accept("const")
        return found

    def untagged(self, kind: str) -> Any:
        """The class for a `struct { ... }` or `union { ... }` written in place."""
        self.expect("{")
        found = []
        while not self.accept("}"):
            found.append(self.declaration())
        anonymous, fields = layout(found)
        parent: Any = c.Structure if kind == "struct" else c.Union
        name = f"{self.owner}_{'_'.join(n for n, _ in fields)}"
        return type(parent)(name, (parent,), {"_anonymous_": anonymous, "_fields_": fields})

    def stars(self, ctype: Any) -> Any:
        """The type behind the stars that come now."""
        while self.accept("*"):
            self.accept("const")
            ctype = _pointer(ctype)
        return ctype

    def declarator(self, base: Any) -> tuple[str, Any, tuple[Any, ...] | None]:
        """The stars, the name and what follows it."""
        base = self.stars(base)
        if self.accept("("):
            self.expect("*")
            name = self.identifier()
            self.expect(")")
            return name, c.CFUNCTYPE(self.complete(base, void=True), *self.parameters()), None
        name = self.identifier()
        if self.tokens[self.at] == "(":
            return name, self.complete(base, void=True), self.parameters()
        if self.accept("["):
            size = self.tokens[self.at]
            if not size.isdigit():
                raise self.wrong(f"array size {size!r} is not a number:")
            self.at += 1
            self.expect("]")
            base = self.complete(base) * int(size)
        return name, base, None

    def parameters(self) -> tuple[Any, ...]:
        self.expect("(")
        if self.tokens[self.at : self.at + 2] == ["void", ")"]:
            self.at += 2
            return ()
        found = []
        while True:
            found.append(self.complete(self.stars(self.base())))
            if self.tokens[self.at] not in (",", ")"):
                self.identifier()
            if self.accept(")"):
                return tuple(found)
            self.expect(",")

    def complete(self, ctype: Any, void: bool = False) -> Any:
        """Refuse what cannot be held by value."""
        if ctype is OPAQUE or (ctype is None and not void):
            raise self.wrong(f"{'void' if ctype is None else 'an opaque struct'} by value before")
        return ctype


def _pointer(base: Any) -> Any:
    if base is None or base is OPAQUE:
        return c.c_void_p
    return c.c_char_p if base is c.c_char else c.POINTER(base)
