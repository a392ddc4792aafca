"""Thread domains, and the protection domains that have one: less locking for what one thread uses."""

from __future__ import annotations

from typing import Any

from . import verbs
from .abi import ibv_parent_domain_init_attr
from .device import Context
from .handle import Owned
from .memory import PD

__all__ = ["TD", "ParentDomain"]


class TD(Owned):
    """A thread domain: what is made in it is used by one thread at a time, so the provider locks none of it.

    That is the caller's promise. It counts through a :class:`ParentDomain`.

    Args:
        context: the device.

    Raises:
        LibraryError: EOPNOTSUPP where the provider has none (mlx5, efa and hns do).

    Source: ibv_alloc_td(3).
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        super().__init__(lambda: verbs.ibv_alloc_td(context.pointer), f"thread domain of {context.name}", (context,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dealloc_td(pointer)


class ParentDomain(PD):
    """A protection domain that stands for another one, and brings a thread domain along.

    It goes wherever a :class:`PD` goes, for extended completion queues as ``parent_domain``, and what is made in it
    works together with what is made in the other one.

    Args:
        pd: the protection domain that it stands for.
        td: the thread domain, or None.

    Attributes:
        td: as given.

    Raises:
        ValueError: a thread domain of another device.
        LibraryError: EOPNOTSUPP where the provider has none (mlx5, efa, hns and mana do).

    Source: ibv_alloc_parent_domain(3).
    """

    def __init__(self, pd: PD, td: TD | None = None) -> None:
        if td is not None and not td.context.is_same(pd.context):
            raise ValueError(f"make a parent domain of {pd.name}: {td.name} is of another device")
        self.context, self.td, self._of = pd.context, td, pd

        def make() -> Any:
            attr = ibv_parent_domain_init_attr(pd=pd.pointer)
            if td is not None:
                attr.td = td.pointer
            return verbs.ibv_alloc_parent_domain(pd.context.pointer, attr)

        parents = (pd, td) if td is not None else (pd,)
        Owned.__init__(self, make, f"parent domain of {pd.context.name}", parents)

    @property
    def base(self) -> PD:
        """The protection domain that the kernel knows."""
        return self._of.base
