"""Protection domains, memory regions and windows: their verbs, and whether a piece of memory may be touched."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any

from rdmaconnect.abi import AccessFlags, MwType, ReregMrFlags, ibv_mr, ibv_mw, ibv_pd

from .arena import Object, Refused, find
from .calls import verb
from .device import Context

LOCAL_WRITE = int(AccessFlags.LOCAL_WRITE)
REMOTE_WRITE = int(AccessFlags.REMOTE_WRITE)
REMOTE_READ = int(AccessFlags.REMOTE_READ)
REMOTE_ATOMIC = int(AccessFlags.REMOTE_ATOMIC)
_REMOTE = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC
_libc = ctypes.CDLL(None, use_errno=True)
_MS_ASYNC = 1


class NoAccess(Exception):
    """A piece of memory that may not be touched so."""


class Pd(Object):
    """A protection domain."""

    kind, struct, typed = "pd", ibv_pd, ("ibv_pd",)

    def __init__(self, world: Any, context: Context) -> None:
        world.room_for(context, "pd")
        super().__init__(world, context)
        self.context = context
        point(self.c, "context", context)

    @property
    def base(self) -> Pd:
        """The domain that counts: of a parent domain, that which it stands for."""
        return self


def point(struct: Any, field: str, to: Object | None) -> None:
    """Let a field of pointer type point to an object."""
    where = ctypes.addressof(struct) + getattr(type(struct), field).offset
    ctypes.c_void_p.from_address(where).value = to.address if to is not None else None


def pointed(struct: Any, field: str, kind: str) -> Any:
    """The object that a field of pointer type points to; None for NULL."""
    where = ctypes.addressof(struct) + getattr(type(struct), field).offset
    address = ctypes.c_void_p.from_address(where).value
    return find(address, kind) if address else None


class Mr(Object):
    """A memory region.

    Attributes:
        base: the address that work requests name for its first byte; ``addr`` is where that is.
    """

    kind, struct, typed = "mr", ibv_mr, ("ibv_mr",)

    def __init__(self, world: Any, pd: Pd, addr: int, length: int, base: int, access: int) -> None:
        world.room_for(pd.context, "mr")
        _check_range(pd.context, addr, length, access)
        super().__init__(world, pd)
        self.pd, self.context = pd, pd.context
        self.addr, self.length, self.base, self.access = addr, length, base, access
        self.key = world.new_key(self)
        point(self.c, "context", pd.context)
        point(self.c, "pd", pd)
        self.c.addr, self.c.length = addr, length
        self.c.lkey = self.key
        self.c.rkey = self.key if access & _REMOTE else 0

    def place(self, offset: int, length: int) -> int:
        """Where a part of it really is."""
        return self.addr + offset

    def free(self, how: str) -> None:
        super().free(how)
        del self.world.keys[self.key]


def _check_range(context: Context, addr: int, length: int, access: int) -> None:
    if access & (REMOTE_WRITE | REMOTE_ATOMIC) and not access & LOCAL_WRITE:
        raise Refused(errno.EINVAL)
    if not 0 < length <= context.device.limit("max_mr_size"):
        raise Refused(errno.EINVAL)
    start = addr & -mmap.PAGESIZE
    # msync does nothing here, but it knows what is mapped
    if _libc.msync(ctypes.c_void_p(start), ctypes.c_size_t(addr + length - start), _MS_ASYNC):
        raise Refused(errno.EFAULT)


class Mw(Object):
    """A memory window.

    Attributes:
        mr: what it is bound to, or None.
    """

    kind, struct, typed = "mw", ibv_mw, ("ibv_mw",)

    def __init__(self, world: Any, pd: Pd, mw_type: int) -> None:
        world.room_for(pd.context, "mw")
        super().__init__(world, pd)
        self.pd, self.context = pd, pd.context
        self.mr: Mr | None = None
        self.base = self.addr = self.length = self.access = 0
        self.qp_num: int | None = None
        self.key = world.new_key(self)
        point(self.c, "context", pd.context)
        point(self.c, "pd", pd)
        self.c.type, self.c.rkey = mw_type, self.key

    def bind(self, info: Any, mr: Mr | None, key: int, qp_num: int | None) -> bool:
        """Bind it to a part of a region, or with a length of 0 to nothing; whether that may be."""
        if info.length:
            if self.mr is not None and self.c.type == MwType.TYPE_2:
                return False  # it has to be invalidated first
            if mr is None or not mr.access & AccessFlags.MW_BIND or mr.pd is not self.pd:
                return False
            if not mr.base <= info.addr <= info.addr + info.length <= mr.base + mr.length:
                return False
        self.unbind()
        del self.world.keys[self.key]
        self.key = key
        self.world.keys[key] = self
        if info.length and mr is not None:
            mr.users += 1
            self.mr, self.access, self.length = mr, info.mw_access_flags, info.length
            self.addr = mr.addr + info.addr - mr.base
            self.base = 0 if self.access & AccessFlags.ZERO_BASED else info.addr
            self.qp_num = qp_num
        return True

    def unbind(self) -> None:
        """Let go of the region; the key opens nothing any more."""
        if self.mr is not None:
            self.mr.users -= 1
        self.mr, self.length, self.qp_num = None, 0, None

    def free(self, how: str) -> None:
        super().free(how)
        self.unbind()
        del self.world.keys[self.key]


def reach(world: Any, pd: Pd, key: int, addr: int, length: int, need: int, qp_num: int | None = None) -> int:
    """Where the bytes really are that a key and an address name.

    Args:
        world: whose keys they are.
        pd: the queue pair's protection domain.
        key, addr, length: as in a work request.
        need: the access that the region must have been registered for; 0 to read it locally.
        qp_num: the queue pair, where windows count.

    Raises:
        NoAccess: no such key here, outside of the region, or without the access.
    """
    found = world.keys.get(key)
    if found is None or found.pd.base is not pd.base or found.access & need != need:
        raise NoAccess
    if isinstance(found, Mw) and (found.mr is None or found.qp_num not in (None, qp_num) or not need & _REMOTE):
        raise NoAccess
    if need & _REMOTE and not found.c.rkey:
        raise NoAccess
    offset = addr - found.base
    if offset < 0 or offset + length > found.length:
        raise NoAccess
    return found.place(offset, length) if isinstance(found, Mr) else found.addr + offset


# ---- verbs


@verb
def ibv_alloc_pd(world: Any, context: Context) -> Pd:
    return Pd(world, context)


@verb
def ibv_dealloc_pd(world: Any, pd: Pd) -> None:
    pd.free("ibv_dealloc_pd")


@verb
def ibv_reg_mr(world: Any, pd: Pd, addr: int | None, length: int, access: int) -> Mr:
    start = addr or 0
    return Mr(world, pd, start, length, 0 if access & AccessFlags.ZERO_BASED else start, access)


@verb
def ibv_reg_mr_iova(world: Any, pd: Pd, addr: int | None, length: int, iova: int, access: int) -> Mr:
    start = addr or 0
    if (start - iova) % mmap.PAGESIZE:
        raise Refused(errno.EINVAL)
    return Mr(world, pd, start, length, iova, access)


@verb
def ibv_reg_mr_iova2(world: Any, pd: Pd, addr: int | None, length: int, iova: int, access: int) -> Mr:
    return ibv_reg_mr_iova(world, pd, addr, length, iova, access)  # type: ignore[no-any-return]


@verb
def ibv_rereg_mr(world: Any, mr: Mr, flags: int, pd: Pd | None, addr: int | None, length: int, access: int) -> None:
    new = access if flags & ReregMrFlags.CHANGE_ACCESS else mr.access
    where = (addr or 0, length) if flags & ReregMrFlags.CHANGE_TRANSLATION else (mr.addr, mr.length)
    _check_range(mr.context, *where, new)
    if flags & ReregMrFlags.CHANGE_TRANSLATION:
        mr.addr, mr.length = where
        mr.base, mr.c.addr, mr.c.length = mr.addr, mr.addr, mr.length
    if flags & ReregMrFlags.CHANGE_PD and pd is not None:
        pd.users += 1
        mr.pd.users -= 1
        mr.pd, mr.parents = pd, (pd,)
        point(mr.c, "pd", pd)
    mr.access = new
    mr.c.rkey = mr.key if new & _REMOTE else 0


@verb
def ibv_dereg_mr(world: Any, mr: Mr) -> None:
    mr.free("ibv_dereg_mr")


@verb
def ibv_alloc_mw(world: Any, pd: Pd, type: int) -> Mw:
    if type not in (MwType.TYPE_1, MwType.TYPE_2):
        raise Refused(errno.EINVAL)
    return Mw(world, pd, type)


@verb
def ibv_dealloc_mw(world: Any, mw: Mw) -> None:
    mw.free("ibv_dealloc_mw")
