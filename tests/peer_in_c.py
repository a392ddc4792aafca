"""The peer in C of ``tests/wire``: compiled, and what it was given to compile with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "wire"
CC = shutil.which("cc") or shutil.which("gcc")
#: the name of msgpack-c's library, since version 6 and before
MSGPACK = ("-lmsgpack-c", "-lmsgpackc")
FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-O1")


def lacking(*headers: str) -> str:
    """In words, why a program that includes these cannot be compiled here; "" if it can."""
    if CC is None:
        return "there is no C compiler"
    text = "".join(f"#include <{header}>\n" for header in headers)
    words = [CC, "-E", "-x", "c", "-", "-o", "/dev/null"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"of {', '.join(headers)} something is missing (libmsgpack-dev, libzmq3-dev)"


def compiled(name: str, place: Path, *libraries: str) -> Path:
    """The program ``tests/wire/NAME.c``, made in a folder.

    Args:
        name: of the source, without its end.
        place: the folder.
        libraries: what it is linked with besides msgpack-c.
    """
    assert CC is not None
    program, faults = place / name, []
    for msgpack in MSGPACK:
        words = [CC, *FLAGS, str(SOURCES / f"{name}.c"), "-o", str(program), msgpack, *libraries]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return program
        faults.append(done.stderr)
    raise AssertionError(faults[-1] if "cannot find -lmsgpack-c" in faults[0] else faults[0])
