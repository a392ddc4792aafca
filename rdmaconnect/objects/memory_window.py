"""Windows onto registered memory."""

from __future__ import annotations

from typing import Any

from .. import verbs
from ..abi import AccessFlags, MwType, ibv_mw_bind_info
from ..agreement.endpoint import RemoteRegion
from ..errors import StateError
from .fields import put
from .locks import exclusive
from .memory import FULL_ACCESS, MR, PD
from .owned import Owned

__all__ = ["MW"]

#: what a peer may do unless told otherwise
_ACCESS = FULL_ACCESS & ~AccessFlags.LOCAL_WRITE


class MW(Owned):
    """A memory window: a key of its own for a part of a region, bound and unbound by work requests.

    Args:
        pd: its protection domain, that of the regions it is bound to.
        mw_type: ``TYPE_1`` is bound by :meth:`QueuePair.bind_mw`, for every queue pair of the protection
            domain; ``TYPE_2`` by a ``bind_mw`` work request, for the queue pair that it was posted to.

    Attributes:
        pd, mw_type: as given.

    Raises:
        VerbsError: EINVAL for another type, ENOMEM, among others.
        LibraryError: EOPNOTSUPP where the device has no windows.

    Source: ibv_alloc_mw(3).
    """

    def __init__(self, pd: PD, mw_type: MwType) -> None:
        self.pd, self.mw_type = pd, mw_type
        self._region: RemoteRegion | None = None
        self._mr: MR | None = None
        name = f"MW {mw_type} of {pd.context.name}"
        super().__init__(lambda: verbs.ibv_alloc_mw(pd.pointer, int(mw_type)), name, (pd,))

    def _release(self, pointer: Any) -> None:
        verbs.ibv_dealloc_mw(pointer)

    @property
    @exclusive
    def rkey(self) -> int:
        """The key, 32 bits; another one after each bind. Set it back when a bind completes with an error."""
        return int(self.pointer.contents.rkey)

    @rkey.setter
    @exclusive
    def rkey(self, rkey: int) -> None:
        put(self.pointer.contents, rkey=rkey)

    @property
    def next_rkey(self) -> int:
        """The key that the next bind gives: the lowest byte counts up. Source: ``ibv_inc_rkey``."""
        rkey = self.rkey
        return rkey & ~0xFF | (rkey + 1) & 0xFF

    @property
    def region(self) -> RemoteRegion:
        """What a peer needs to reach the memory through the window, once the last bind has completed.

        Raises:
            StateError: it is not bound, or closed.
        """
        rkey = self.rkey
        if self._region is None:
            raise StateError(f"use {self.name}: it is not bound to memory.")
        return RemoteRegion(self._region.addr, rkey, self._region.length)

    def bind_info(self, mr: MR, offset: int, length: int | None, access: AccessFlags | None) -> ibv_mw_bind_info:
        """The C description of a bind, checked; for the queue pairs.

        Raises:
            ValueError: outside of the region, a region without ``MW_BIND`` or of another protection domain.
        """
        size = mr.part_length(offset, length)
        if mr.pd.base is not self.pd.base:
            raise ValueError(f"bind {self.name} to {mr.name}: that is of another protection domain")
        if not mr.access & AccessFlags.MW_BIND:
            raise ValueError(f"bind {self.name} to {mr.name}: that was registered for {mr.access} without MW_BIND")
        chosen = _ACCESS if access is None else access
        info = ibv_mw_bind_info(mr=mr.pointer)
        put(info, addr=mr.addr + offset, length=size, mw_access_flags=int(chosen))
        return info

    def note_bound(self, mr: MR, info: ibv_mw_bind_info, rkey: int) -> tuple[int, RemoteRegion | None, MR | None]:
        """A bind is being posted: from now on the region may not go before the window, the former one may.

        The key in the struct is still the old one, for the provider reads it: :attr:`rkey` is set once it is posted.

        Returns:
            What :meth:`note_unbound` needs if it was not posted after all.
        """
        before = self.rkey, self._region, self._mr
        self._adopt_by(mr, instead_of=self._mr)
        based = 0 if info.mw_access_flags & AccessFlags.ZERO_BASED else info.addr
        self._region = RemoteRegion(based, rkey, info.length) if info.length else None
        self._mr = mr
        return before

    def note_unbound(self, before: tuple[int, RemoteRegion | None, MR | None]) -> None:
        """As it was before a bind that was not posted."""
        rkey, self._region, mr = before
        if not self.closed:
            self.rkey = rkey
        if self._mr is not mr and self._mr is not None:
            self._leave_one(self._mr)
        if mr is not None and self._mr is not mr and not mr.closed:
            self._adopt_by(mr)
        self._mr = mr
