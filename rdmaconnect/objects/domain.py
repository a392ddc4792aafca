"""Thread domains, and the protection domains that have one: less locking for what one thread uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import verbs
from ..abi import ParentDomainInitAttrMask, ibv_parent_domain_init_attr
from .context import Context
from .memory import PD
from .owned import Owned

__all__ = ["TD", "Allocator", "ParentDomain"]

#: ``IBV_ALLOCATOR_USE_DEFAULT``: the provider is to allocate it in its own way
_DEFAULT = 2**64 - 1


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


@dataclass(frozen=True, slots=True)
class Allocator:
    """Where a provider gets the memory of queues from, instead of its own way.

    Both are called by the provider, in the thread that makes or destroys something. What they raise cannot pass
    through C: it counts as no memory, and :attr:`ParentDomain.refusal` has it.

    Args:
        alloc: (size in bytes, alignment in bytes, resource type) -> the address of so much memory, all zeros, that a
            fork does not copy (``MADV_DONTFORK``, or shared); None to leave it to the provider. The resource type is
            the vendor's: the kernel's driver id in its upper 32 bits.
        free: (address, resource type) -> nothing: that memory is needed no more.
    """

    alloc: Callable[[int, int, int], int | None]
    free: Callable[[int, int], None]


class ParentDomain(PD):
    """A protection domain that stands for another one, and brings a thread domain along.

    It goes wherever a :class:`PD` goes, for extended completion queues as ``parent_domain``, and what is made in it
    works together with what is made in the other one.

    Args:
        pd: the protection domain that it stands for.
        td: the thread domain, or None.
        allocator: where the memory of what is made in it comes from; by default the provider's own way.

    Attributes:
        td: as given.
        refusal: what the allocator raised last, or None.

    Raises:
        ValueError: a thread domain of another device.
        LibraryError: EOPNOTSUPP where the provider has none (mlx5, efa, hns and mana do).

    Source: ibv_alloc_parent_domain(3).
    """

    def __init__(self, pd: PD, td: TD | None = None, *, allocator: Allocator | None = None) -> None:
        if td is not None and not td.context.is_same(pd.context):
            raise ValueError(f"make a parent domain of {pd.name}: {td.name} is of another device")
        self.context, self.td, self._of = pd.context, td, pd
        self.refusal: BaseException | None = None

        def make() -> Any:
            attr = ibv_parent_domain_init_attr(pd=pd.pointer)
            if td is not None:
                attr.td = td.pointer
            if allocator is not None:
                # they must live as long as the domain
                self._functions = attr.alloc, attr.free = self._callbacks(attr, allocator)
                attr.comp_mask = int(ParentDomainInitAttrMask.ALLOCATORS)
            return verbs.ibv_alloc_parent_domain(pd.context.pointer, attr)

        parents = (pd, td) if td is not None else (pd,)
        Owned.__init__(self, make, f"parent domain of {pd.context.name}", parents)

    def _callbacks(self, attr: ibv_parent_domain_init_attr, allocator: Allocator) -> tuple[Any, Any]:
        """The allocator as C functions."""

        def alloc(pd: Any, pd_context: Any, size: int, alignment: int, resource_type: int) -> int:
            try:
                address = allocator.alloc(size, alignment, resource_type)
            except BaseException as e:  # noqa: BLE001  C could do nothing with it
                self.refusal = e
                return 0
            return _DEFAULT if address is None else address

        def free(pd: Any, pd_context: Any, address: int, resource_type: int) -> None:
            try:
                allocator.free(address, resource_type)
            except BaseException as e:  # noqa: BLE001  likewise
                self.refusal = e

        return type(attr.alloc)(alloc), type(attr.free)(free)

    @property
    def base(self) -> PD:
        """The protection domain that the kernel knows."""
        return self._of.base
