"""A C library that this package calls: the one place that loads one, when somebody first asks for it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .abi import Prototype

__all__ = ["SharedLibrary"]


class SharedLibrary:
    """A shared library of rdma-core, or what stands in for it.

    Args:
        soname: its file name.
        variable: the environment variable that names another one.
        prototypes: what it exports, by name.
        install: what to do where it cannot be loaded.
        missing: makes the error for what is not there, from words and an errno.

    Attributes:
        load: the library as ``ctypes.CDLL``, loaded once; or what :meth:`use` was given. It raises ``missing`` if the
            library cannot be loaded, or this Python is not a 64-bit one.
        symbol: a function of it by its name, with its prototype set, made once; likewise, and if the library lacks it.
        stand_in: what stands in for it, or None.
    """

    def __init__(
        self,
        soname: str,
        variable: str,
        prototypes: Mapping[str, Prototype],
        install: str,
        missing: Callable[..., Exception],
    ) -> None:
        self._soname, self._variable, self._prototypes = soname, variable, prototypes
        self._install, self._missing = install, missing
        self.stand_in: Any = None
        self.load, self.symbol = cache(self._load), cache(self._symbol)

    @property
    def name(self) -> str:
        """What it is loaded by."""
        return os.environ.get(self._variable) or self._soname

    def use(self, stand_in: Any) -> None:
        """Let something stand in for it, for tests: nothing is loaded then.

        Args:
            stand_in: ``stand_in[name]`` is the ctypes function of an exported symbol, or raises AttributeError for
                one that it lacks, as with ``ctypes.CDLL``; None for the library itself.
        """
        self.stand_in = stand_in
        self.load.cache_clear()
        self.symbol.cache_clear()

    def _load(self) -> Any:
        if self.stand_in is not None:
            return self.stand_in
        if sys.maxsize < 1 << 32:
            # abi has the structs of 64-bit Linux: in another library each field would be read in a wrong place
            raise self._missing(
                f"load {self.name}: this Python has 32 bits, and rdmaconnect needs 64. Use a 64-bit Python."
            )
        # read once, with the first list of devices, which librdmacm asks for too: where a device is gone, destroying
        # frees what is this process's, and succeeds. Since rdma-core 20, libibverbs/cmd_write.h, verbs_is_destroy_err;
        # events see ``Context.destroying``
        os.environ.setdefault("RDMAV_ALLOW_DISASSOC_DESTROY", "1")
        try:
            return ctypes.CDLL(self.name, use_errno=True)
        except OSError as e:
            raise self._missing(f"load {self.name}: {e}. Install it: {self._install}") from None

    def _symbol(self, name: str) -> Any:
        prototype = self._prototypes[name]
        try:
            function = self.load()[name]
        except AttributeError:
            library = self._soname.partition(".")[0]
            raise self._missing(
                f"{name}: this {library} does not export it. Install a newer rdma-core.", errno.EOPNOTSUPP
            ) from None
        function.restype, function.argtypes = prototype.restype, prototype.argtypes
        return function
