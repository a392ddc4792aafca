"""A host as it is now, in values: what :mod:`gather` has read and the checks judge. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface

from ..abi import PortState
from ..objects.port import Port
from ..session.ports import LeftOut

__all__ = ["Device", "Firewall", "Host", "Library", "Limits", "Netdev", "Node", "Trial"]


@dataclass(frozen=True, slots=True)
class Library:
    """libibverbs.

    Args:
        path: the file that was loaded, "" if unknown.
        version: of its file name, "" if unknown.
        providers: the providers installed beside it, by name.
        error: why it could not be loaded, or "".
        drivers: ``.driver`` file -> the provider that it names: libibverbs loads those, and no others.
        complaints: what it says on stderr when it looks for devices and their providers.
    """

    path: str = ""
    version: str = ""
    providers: tuple[str, ...] = ()
    error: str = ""
    complaints: tuple[str, ...] = ()
    drivers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A ``/dev/infiniband/uverbsN``, or where it should be.

    Args:
        path: the file.
        device: the RDMA device behind it, "" if this process cannot see it.
        errno: of opening it for reading and writing; 0 if that went well.
        mode: permission bits; None if there is no such file.
        owner, group: by name, or by number where there is no name.
    """

    path: str
    device: str = ""
    errno: int = 0
    mode: int | None = None
    owner: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """Queue pairs were made on a port as ``connect`` makes them, up to INIT.

    Args:
        error: what went wrong, or "".
        errno: of that, or 0.
        pinned: bytes that the kernel locked for it, 0 if it did not count any.
        fds: file descriptors that it took.
    """

    error: str = ""
    errno: int = 0
    pinned: int = 0
    fds: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device that the kernel shows.

    Args:
        name: for example ``mlx5_0``.
        driver: the kernel's driver, "" if unknown.
        listed: whether libibverbs lists it: it does where it has a provider for it.
        error: why it could not be opened, or "".
        ports: its ports, if it could.
        trials: port number -> what came of making queue pairs there; ACTIVE ports only.
    """

    name: str
    driver: str = ""
    listed: bool = True
    error: str = ""
    ports: tuple[Port, ...] = ()
    trials: Mapping[int, Trial] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Netdev:
    """A network device of this network namespace.

    Args:
        name: for example ``eth0``.
        up: whether it was brought up.
        running: whether it has a carrier.
        mtu: bytes.
        addresses: IPv4, with their prefixes.
        arp_ignore, arp_announce, rp_filter: as they hold for it, the greater of its own and ``all``'s; None where the
            kernel does not tell.
    """

    name: str
    up: bool = True
    running: bool = True
    mtu: int = 1500
    addresses: tuple[IPv4Interface, ...] = ()
    arp_ignore: int | None = None
    arp_announce: int | None = None
    rp_filter: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What this process may use; None stands for no limit.

    Args:
        memlock, memlock_max: bytes of locked memory, soft and hard.
        ipc_lock: whether it has CAP_IPC_LOCK, with which the limit does not count.
        nofile, nofile_max: open files, soft and hard.
        open_files: how many are open.
    """

    memlock: int | None = None
    memlock_max: int | None = None
    ipc_lock: bool = False
    nofile: int | None = None
    nofile_max: int | None = None
    open_files: int = 0


@dataclass(frozen=True, slots=True)
class Firewall:
    """What could be seen of packet filters.

    Args:
        managers: those that manage rules and are on: ``firewalld``, ``ufw``.
        rules: the rules as their tool prints them; None if they cannot be read.
        tables: whether the kernel has any, None if it does not tell.
    """

    managers: tuple[str, ...] = ()
    rules: tuple[str, ...] | None = None
    tables: bool | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Args:
        name: the host's.
        kernel: release of the kernel.
        user: the name of the user.
        core, uverbs: whether the kernel has ib_core and ib_uverbs now.
        drivers: RDMA drivers that are in the kernel now.
        loadable: RDMA modules on disk for this kernel.
        modules: whether the kernel can load modules at all.
        library: libibverbs.
        listing: why the devices could not be listed, or "".
        nodes, devices: those seen.
        netdevs: name -> network device.
        here: the GIDs, 16 bytes each, that are addresses of this network namespace.
        limits: of this process.
        netns: the RDMA network-namespace mode, ``shared`` or ``exclusive``, "" if unknown.
        copy_on_fork: whether the kernel copies pinned memory when a process forks; None if unknown.
        fork_asked: whether the environment asks libibverbs to be safe across fork.
        container: what says that this is a container; empty if nothing does.
        kubernetes: whether that container is a pod.
        firewall: packet filters.
        choice: device and port that would be chosen, the best first.
        problem: why none would be, or "".
        left_out: devices that could not be looked at.
        gid_index: the only slot of the GID table to use, or None.
    """

    name: str = "host"
    kernel: str = ""
    user: str = ""
    core: bool = True
    uverbs: bool = True
    drivers: tuple[str, ...] = ()
    loadable: tuple[str, ...] = ()
    modules: bool = True
    library: Library = Library()
    listing: str = ""
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    netdevs: Mapping[str, Netdev] = field(default_factory=dict)
    here: frozenset[bytes] = frozenset()
    limits: Limits = Limits()
    netns: str = ""
    copy_on_fork: bool | None = None
    fork_asked: bool = False
    container: tuple[str, ...] = ()
    kubernetes: bool = False
    firewall: Firewall = Firewall()
    choice: tuple[tuple[str, int], ...] = ()
    problem: str = ""
    left_out: tuple[LeftOut, ...] = ()
    gid_index: int | None = None

    @property
    def usable(self) -> tuple[tuple[str, int], ...]:
        """Of the choice, the ports on which queue pairs could be made."""
        tried = {(d.name, number): trial for d in self.devices for number, trial in d.trials.items()}
        return tuple(key for key in self.choice if key in tried and not tried[key].error)

    def port(self, device: str, port_num: int) -> Port:
        """One port that was seen.

        Raises:
            KeyError: there is none of that name.
        """
        for port in self.ports:
            if (port.device, port.port_num) == (device, port_num):
                return port
        raise KeyError((device, port_num))

    @property
    def ports(self) -> tuple[Port, ...]:
        """All ports seen."""
        return tuple(port for device in self.devices for port in device.ports)

    @property
    def active(self) -> tuple[Port, ...]:
        """The ports that carry data."""
        return tuple(port for port in self.ports if port.state == PortState.ACTIVE)
