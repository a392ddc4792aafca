"""Every struct of `verbs.h` that this package knows, by name.

The classes are in the `structs_*` modules; `cstruct` says how they are made. They are usable once this module
is imported, which importing the package does.
"""

from __future__ import annotations

from typing import Any

from . import (
    structs_completion,
    structs_context,
    structs_device,
    structs_memory,
    structs_queue,
    structs_steering,
    structs_work,
)
from .cstruct import complete

STRUCTS: dict[str, Any] = complete(
    structs_device,
    structs_memory,
    structs_steering,
    structs_completion,
    structs_queue,
    structs_work,
    structs_context,
)
"""Every struct and union by its C name, without `struct` or `union`."""
