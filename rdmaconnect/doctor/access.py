"""What the kernel lets this process see: modules, device nodes, and whether it is in a container."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .host import Node
from .reading import entries, text

__all__ = ["container_signs", "kernel_modules", "nodes"]

_DEV = Path("/dev/infiniband")
_VERBS = Path("/sys/class/infiniband_verbs")
#: drivers/infiniband/hw and sw, by module
DRIVERS = (
    "bnxt_re", "efa", "erdma", "hfi1", "hns_roce_hw_v2", "ib_mthca", "ib_qib", "ionic_rdma", "irdma", "iw_cxgb4",
    "mana_ib", "mlx4_ib", "mlx5_ib", "ocrdma", "qedr", "rdma_rxe", "siw", "usnic_verbs", "vmw_pvrdma",
)  # fmt: skip


def kernel_modules() -> tuple[bool, bool, tuple[str, ...], tuple[str, ...], bool]:
    """What of RDMA is in the kernel, and what could be.

    Returns:
        Whether ib_core is there, and ib_uverbs; the drivers that are; RDMA modules on disk; whether this
        kernel can load modules at all.
    """
    there = set(entries("/sys/module"))
    folder = Path("/lib/modules") / os.uname().release
    on_disk = {
        os.path.basename(line.partition(":")[0]).partition(".ko")[0].replace("-", "_")
        for name in ("modules.dep", "modules.builtin")
        for line in text(folder / name).splitlines()
        if "infiniband" in line.partition(":")[0]
    }
    wanted = {"ib_core", "ib_uverbs", *DRIVERS}
    return (
        Path("/sys/class/infiniband").exists() or "ib_core" in there,
        _VERBS.exists() or "ib_uverbs" in there,
        tuple(name for name in DRIVERS if name in there),
        tuple(sorted(on_disk & wanted)),
        Path("/proc/modules").exists(),
    )


def nodes() -> tuple[Node, ...]:
    """The device nodes: those that are there, and those that the kernel's devices should have."""
    names = {name for name in (*entries(_DEV), *entries(_VERBS)) if name.startswith("uverbs")}
    return tuple(_node(name) for name in sorted(names, key=lambda name: (len(name), name)))


def _node(name: str) -> Node:
    path, device = _DEV / name, text(_VERBS / name / "ibdev").strip()
    try:
        found = os.stat(path)
    except OSError as e:
        return Node(str(path), device, e.errno or errno.EIO)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        number = 0
    except OSError as e:
        number = e.errno or errno.EIO
    return Node(str(path), device, number, stat.S_IMODE(found.st_mode), _owner(found.st_uid), _group(found.st_gid))


def _owner(uid: int) -> str:
    import pwd  # Windows has none, and imports this file all the same

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return str(gid)


def container_signs() -> tuple[tuple[str, ...], bool]:
    """What says that this is a container, and whether it is a Kubernetes pod. None of the signs is proof."""
    signs = [path for path in ("/.dockerenv", "/run/.containerenv", "/run/systemd/container") if Path(path).exists()]
    signs += [f"{name}={value}" for name, value in os.environ.items() if name == "container"]
    groups = text("/proc/1/cgroup") + text("/proc/self/cgroup")
    signs += [f"cgroup {word}" for word in ("docker", "kubepods", "containerd", "libpod", "lxc") if word in groups]
    pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) or "kubepods" in groups
    if pod:
        signs.append("Kubernetes")
    return tuple(signs), pod
