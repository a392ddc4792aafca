"""Gather what is to be known of this host, in one place: /proc, /sys, /dev, limits, libibverbs.

Nothing here judges, and nothing fails: what cannot be read stays empty.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

from ..abi import QpType
from ..agreement.options import Options
from ..errors import LibraryError, RdmaConnectError
from ..objects.context import device_names, open_device
from ..objects.netlink import ipv4_addresses, rdma_system
from ..objects.port import Port
from ..session.ports import LeftOut, choose_ports, mark_here
from ..session.prepared import Prepared
from ..verbs import complaints
from .access import container_signs, kernel_modules, nodes
from .host import Device, Firewall, Host, Library, Limits, Netdev, Trial
from .reading import entries, text

__all__ = ["gather"]

_SYS = Path("/sys/class/infiniband")
#: where libibverbs of the distributions reads which providers to load
_DRIVERS = Path("/etc/libibverbs.d")
_CONF = Path("/proc/sys/net/ipv4/conf")
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_CAP_IPC_LOCK = 14
_FILTERS = (("nft", "list", "ruleset"), ("iptables-save",))


def gather(options: Options, toward: str | None = None) -> Host:
    """Look at this host.

    Args:
        options: ``device``, ``port_num`` and ``gid_index`` narrow the choice of a port.
        toward: a peer's name or address: the choice is the one for it.

    Returns:
        What was seen.
    """
    limits = _limits()  # before anything of ours is open
    names, listing, missing = _names()
    devices = tuple(_device(name, name in names) for name in sorted({*names, *entries(_SYS)}))
    ports = [port for device in devices for port in device.ports]
    choice, problem, left_out = _choice(options, toward)
    netns, copies = rdma_system()
    core, uverbs, drivers, loadable, can_load = kernel_modules()
    signs, pod = container_signs()
    return Host(
        name=socket.gethostname(),
        kernel=os.uname().release,
        user=_user(),
        core=core,
        uverbs=uverbs,
        drivers=drivers,
        loadable=loadable,
        modules=can_load,
        library=_library(missing),
        listing=listing,
        nodes=nodes(),
        devices=devices,
        netdevs=_netdevs(),
        here=frozenset(entry.gid.raw for port in ports for entry in port.gids if entry.here),
        limits=limits,
        netns=netns,
        copy_on_fork=copies,
        fork_asked=bool({"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"} & os.environ.keys()),
        container=signs,
        kubernetes=pod,
        firewall=_firewall(),
        choice=choice,
        problem=problem,
        left_out=left_out,
        gid_index=options.gid_index,
    )


def _names() -> tuple[list[str], str, str]:
    """The devices that libibverbs lists, why it cannot, and why there is no libibverbs."""
    try:
        return device_names(), "", ""
    except LibraryError as e:
        return ([], "", str(e)) if e.errno == errno.ENOENT else ([], str(e), "")
    except RdmaConnectError as e:
        return [], str(e), ""


def _mapped() -> list[str]:
    """The libraries of rdma-core that are in this process."""
    paths = {line.split()[-1] for line in text("/proc/self/maps").splitlines() if "ibverbs" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith("libibverbs.so"))


def _library(error: str) -> Library:
    path = next(iter(_mapped()), "")
    version = os.path.basename(os.path.realpath(path)).partition(".so.")[2] if path else ""
    folder = Path(path).parent / "libibverbs"
    providers = tuple(name[3:].partition("-rdmav")[0] for name in entries(folder) if "-rdmav" in name) if path else ()
    return Library(path, version, providers, error, complaints(), _drivers())


def _drivers() -> dict[str, str]:
    """Source: ``read_config_file`` of libibverbs/dynamic_driver.c in rdma-core."""
    found = {}
    for name in entries(_DRIVERS):
        for line in text(_DRIVERS / name).splitlines():
            kind, _, provider = line.strip().partition(" ")
            if kind == "driver" and not name.startswith("."):
                found[str(_DRIVERS / name)] = os.path.basename(provider.strip())
    return found


def _device(name: str, listed: bool) -> Device:
    driver = os.path.basename(os.path.realpath(_SYS / name / "device" / "driver"))
    if driver == "driver":  # there is none; rxe says on which network device it stands
        driver = "rxe" if (_SYS / name / "parent").exists() else ""
    if not listed:
        return Device(name, driver, listed=False)
    try:
        with open_device(name) as context:
            ports = tuple(map(mark_here, context.ports()))
    except (RdmaConnectError, OSError) as e:
        return Device(name, driver, error=str(e))
    return Device(name, driver, ports=ports, trials={p.port_num: _try(p) for p in ports if str(p.state) == "ACTIVE"})


def _try(port: Port) -> Trial:
    """Make queue pairs as ``connect`` does, and see what they take."""
    fds, pinned = _open_files(), _pinned()
    try:
        prepared = Prepared(open_device(port.device), port, QpType.RC, Options())
    except (RdmaConnectError, OSError) as e:
        return Trial(str(e), getattr(e, "errno", 0) or 0)
    try:
        return Trial("", 0, max(0, _pinned() - pinned), max(0, _open_files() - fds))
    finally:
        prepared.lend()
        prepared.close()


def _choice(options: Options, toward: str | None) -> tuple[tuple[tuple[str, int], ...], str, tuple[LeftOut, ...]]:
    try:
        choice = choose_ports(options, toward)
        for port in choice.ports[:1]:
            with open_device(port.device) as context:
                port.address(context.query_device(), options)
    except (RdmaConnectError, OSError) as e:
        return (), str(e), ()
    return tuple((port.device, port.port_num) for port in choice.ports), "", choice.left_out


def _netdevs() -> dict[str, Netdev]:
    """By ioctl: /sys may show another namespace's."""
    import fcntl  # as resource below: Windows has none, and this file is imported there too

    found, addresses = {}, ipv4_addresses()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                request = struct.pack("16s16x", name.encode())
                flags = struct.unpack_from("H", fcntl.ioctl(s, _SIOCGIFFLAGS, request), 16)[0]
                mtu = struct.unpack_from("i", fcntl.ioctl(s, _SIOCGIFMTU, request), 16)[0]
                settings = (_setting(name, kind) for kind in ("arp_ignore", "arp_announce", "rp_filter"))
                up, running = bool(flags & _IFF_UP), bool(flags & _IFF_RUNNING)
                found[name] = Netdev(name, up, running, mtu, tuple(addresses.get(name, ())), *settings)
    except OSError:
        pass
    return found


def _setting(netdev: str, kind: str) -> int | None:
    """What holds is the greater of the network device's own and that of ``all``."""
    values = [text(_CONF / name / kind).strip() for name in (netdev, "all")]
    return max(map(int, values)) if all(value.isdecimal() for value in values) else None


def _limits() -> Limits:
    import resource

    def pair(which: int) -> tuple[int | None, int | None]:
        soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(which))
        return soft, hard

    capable = int(_status("CapEff") or "0", 16) >> _CAP_IPC_LOCK & 1
    # the kernel asks for the capability of the first user namespace, so root in a container of its own has not got it
    first = text("/proc/self/uid_map").split() == ["0", "0", "4294967295"]
    return Limits(*pair(resource.RLIMIT_MEMLOCK), bool(capable and first), *pair(resource.RLIMIT_NOFILE), _open_files())


def _status(key: str) -> str:
    lines = text("/proc/self/status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def _pinned() -> int:
    return int((_status("VmPin") or "0").split()[0]) * 1024


def _open_files() -> int:
    return len(entries(Path("/proc/self/fd")))


def _user() -> str:
    import pwd

    with suppress(KeyError, OSError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def _firewall() -> Firewall:
    managers = []
    if Path("/run/firewalld").exists():
        managers.append("firewalld")
    if "ENABLED=yes" in text("/etc/ufw/ufw.conf").splitlines():
        managers.append("ufw")
    rules: tuple[str, ...] | None = None
    for command in _FILTERS:
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=5, check=True
            )
            rules = tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
            break
    tables = Path("/proc/thread-self/net/ip_tables_names")
    return Firewall(tuple(managers), rules, bool(text(tables).strip()) if tables.exists() else None)
