"""The checks of one host, on hosts that were thought up."""

from __future__ import annotations

import errno
from dataclasses import replace
from ipaddress import IPv4Interface
from typing import Any

import pytest
from samples import V1, gid, port

from rdmaconnect.abi import LinkLayer, Mtu, PortState
from rdmaconnect.doctor import Finding, Host, Verdict, examine
from rdmaconnect.doctor.checks_device import best_gid
from rdmaconnect.doctor.checks_limits import DEVICE_FDS, ZMQ_FDS
from rdmaconnect.doctor.host import Device, Firewall, Library, Limits, Netdev, Node, Trial
from rdmaconnect.doctor.remedies import REMEDIES
from rdmaconnect.doctor.report import WIDTH, as_json, host_lines
from rdmaconnect.objects.port import Port
from rdmaconnect.session.ports import LeftOut

HERE = gid("10.0.0.1", gid_index=1)
LOCAL = gid("fe80::1", gid_index=0)
GOOD = port(LOCAL, HERE)
MB = 2**20


def device(*ports: Port, name: str = "rxe0", trial: Trial | None = None, **fields: Any) -> Device:
    tried = {p.port_num: trial or Trial(fds=3) for p in ports if p.state == PortState.ACTIVE}
    return Device(name, "rxe", ports=ports, trials=tried, **fields)


def host(*devices: Device, **fields: Any) -> Host:
    """A host on which all is well, but for what is given."""
    devices = devices or (device(GOOD),)
    seen = [p for d in devices for p in d.ports]
    given: dict[str, Any] = {
        "kernel": "6.1", "user": "anna", "drivers": ("rdma_rxe",), "devices": devices, "netns": "shared",
        "library": Library("/usr/lib/libibverbs.so.1", "1.14.44.0", ("mlx5", "rxe")),
        "nodes": (Node("/dev/infiniband/uverbs0", "rxe0", 0, 0o666, "root", "root"),),
        "netdevs": {"lo": Netdev("lo", mtu=65536), "eth0": Netdev("eth0", mtu=4200)},
        "here": frozenset(entry.gid.raw for p in seen for entry in p.gids),
        "limits": Limits(None, None, False, 65536, 65536, 10), "copy_on_fork": True,
        "firewall": Firewall(rules=()), "choice": tuple((p.device, p.port_num) for p in seen if p.state == 4),
    }  # fmt: skip
    return Host(**given | fields)


def said(of: Host, name: str | None = None) -> list[Finding]:
    """What is not well, or all that is said of one thing."""
    found = examine(of)
    return [f for f in found if f.name == name] if name else [f for f in found if f.verdict in (FAIL, WARN)]


OK, INFO, WARN, FAIL = Verdict.OK, Verdict.INFO, Verdict.WARN, Verdict.FAIL


def test_a_sound_host_is_said_to_be_so() -> None:
    well = host()
    assert said(well) == []
    assert well.usable == (("rxe0", 1),)
    (chosen,) = said(well, "choice")
    assert chosen.words == "rxe0 port 1 with gid_index 1 (::ffff:10.0.0.1, RoCE v2) on eth0 would be chosen."
    assert list(host_lines(well, examine(well)))[-1] == "A connection can be made from this host."
    assert as_json(well, [])["ok"] is True


# ---- kernel and library

NO_KERNEL = {"core": False, "uverbs": False, "devices": (), "nodes": (), "choice": (), "problem": "none"}


def test_without_rdma_in_the_kernel_it_tells_how_to_load_it() -> None:
    lacking = host(**NO_KERNEL, loadable=("ib_core", "ib_uverbs", "rdma_rxe"))
    (finding,) = said(lacking)
    assert (finding.name, finding.verdict) == ("kernel", FAIL)
    assert "RDMA is not loaded. The modules are on disk: ib_core, ib_uverbs, rdma_rxe." in finding.words
    assert finding.fix.startswith("modprobe ib_uverbs; or modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0")


def test_where_modules_cannot_be_loaded_it_says_so() -> None:
    (finding,) = said(host(**NO_KERNEL, modules=False))
    assert finding.words.endswith("This kernel cannot load modules.")
    assert "docker/lab" in finding.fix
    (finding,) = said(host(**NO_KERNEL))
    assert finding.words.endswith("This kernel has no such module on disk.")
    (finding,) = said(host(**NO_KERNEL, container=("/.dockerenv",)))
    assert finding.fix.startswith("on the container's host: modprobe")


def test_uverbs_alone_may_be_lacking() -> None:
    (finding,) = said(host(uverbs=False, devices=(), nodes=(), choice=(), loadable=("ib_uverbs",)))
    assert "ib_uverbs is not loaded" in finding.words


def test_without_libibverbs_it_tells_how_to_install_it() -> None:
    error = "load libibverbs.so.1: cannot open shared object file. Install it: somehow."
    without = host(device(name="rxe0", listed=False), library=Library(error=error), choice=(), problem=error)
    (finding,) = said(without)
    assert (finding.name, finding.verdict) == ("library", FAIL)
    assert finding.words == "load libibverbs.so.1: cannot open shared object file."
    assert "apt install ibverbs-providers" in finding.fix


def test_a_device_without_a_provider_is_named() -> None:
    fields = {"library": Library("/usr/lib/libibverbs.so.1", "1.14", (), "", ("no driver for uverbs0",)), "choice": ()}
    found = said(host(Device("qedr0", listed=False), **fields))
    assert [f.name for f in found] == ["providers", "library", "device"]
    assert "qedr0: libibverbs does not list it" in found[2].words
    assert "ibverbs-providers" in found[2].fix


# ---- device nodes


@pytest.mark.parametrize(
    ("node", "fields", "words", "fix"),
    [
        (Node("/dev/infiniband/uverbs0", "rxe0", errno.ENOENT), {}, "ENOENT, the kernel has the device, but", "mknod"),
        (Node("/d/uverbs0", "x", errno.ENOENT), {"container": ("x",)}, "was not given", "--device /dev/infiniband"),
        (
            Node("/d/uverbs0", "x", errno.ENOENT), {"container": ("x",), "kubernetes": True},
            "was not given", "docker/kubernetes.yaml",
        ),
        (
            Node("/d/uverbs0", "x", errno.EACCES, 0o660, "root", "rdma"), {},
            "EACCES, anna may not open it: it belongs to root:rdma, mode 660.", "usermod -aG rdma anna",
        ),
        (Node("/d/uverbs0", "x", errno.EACCES, 0o600, "root", "root"), {}, "mode 600", "chmod 666 /d/uverbs0"),
        (Node("/d/uverbs0", "x", errno.EPERM), {"container": ("x",)}, "EPERM, the container's device ru", "--device"),
        (Node("/d/uverbs0", "x", errno.EPERM), {"netns": "exclusive"}, "exclusive mode", "rdma system set netns"),
        (Node("/d/uverbs0", "x", errno.EPERM), {"netns": ""}, "or the RDMA subsystem is in excl", "set netns shared"),
        (Node("/d/uverbs0", "x", errno.ENXIO), {}, "no device stands behind it", "modprobe"),
        (Node("/d/uverbs0", "x", errno.EMFILE), {}, "no file descriptor", "ulimit -n"),
        (Node("/d/uverbs0", "x", errno.EIO), {}, "EIO, Input/output error.", ""),
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_opened(node: Node, fields: dict[str, Any], words: str, fix: str) -> None:
    cannot = host(Device("rxe0", error="open rxe0: no"), nodes=(node,), choice=(), **fields)
    found = said(cannot, "node")
    assert (found[0].verdict, len(found)) == (FAIL, 1)
    assert words in found[0].words
    assert fix in found[0].fix
    # where another device can be used, it is only a warning
    assert said(host(nodes=(node,), **fields), "node")[0].verdict is WARN


def test_in_exclusive_mode_another_namespaces_device_is_told_of() -> None:
    """R19: the list is empty, and the node cannot be opened: EPERM."""
    node = Node("/dev/infiniband/uverbs0", "", errno.EPERM, 0o666, "root", "root")
    hidden = replace(host(nodes=(node,), netns="exclusive"), devices=(), choice=())
    found = {f.name: f for f in said(hidden)}
    assert found.keys() == {"node", "devices", "netns"}
    assert "exclusive mode" in found["devices"].words
    assert "rdma system set netns shared" in found["devices"].fix
    assert "belongs to another network namespace" in found["node"].words


def test_without_a_device_it_names_soft_roce_on_a_network_device_of_this_host() -> None:
    (finding,) = said(replace(host(nodes=()), devices=(), choice=()))
    assert finding.words == "The kernel has RDMA, but no RDMA device."
    assert "rdma link add rxe0 type rxe netdev eth0" in finding.fix


# ---- ports and GIDs


def down(**fields: Any) -> Port:
    return port(LOCAL, HERE, state=PortState.DOWN, **fields)


@pytest.mark.parametrize(
    ("at", "netdev", "words", "fix"),
    [
        (down(), Netdev("eth0", up=False, running=False), "DOWN, Ethernet: eth0 is down.", "ip link set eth0 up"),
        (down(), Netdev("eth0", up=True, running=False), "eth0 has no carrier", "ip link show eth0"),
        (down(), None, "its network device is down", "ip link set eth0 up"),
        (down(gids=()), None, "its network device is down", "ip link set NETDEV up"),
        (
            port(state=PortState.INIT, link_layer=LinkLayer.INFINIBAND), None,
            "INIT, InfiniBand: there is no subnet manager", "opensm",
        ),
    ],
)  # fmt: skip
def test_a_port_that_is_not_active(at: Port, netdev: Netdev | None, words: str, fix: str) -> None:
    netdevs = {} if netdev is None else {netdev.name: netdev}
    found = said(host(device(at), netdevs=netdevs, problem="find an ACTIVE RDMA port: there is none."))
    assert [(f.name, f.verdict) for f in found] == [("port", FAIL), ("choice", FAIL)]
    assert words in found[0].words
    assert fix in found[0].fix


def test_beside_a_port_that_works_one_that_is_down_is_a_warning() -> None:
    (finding,) = said(host(device(GOOD), device(down(name="rxe1"), name="rxe1")))
    assert (finding.name, finding.verdict) == ("port", WARN)


@pytest.mark.parametrize(
    ("gids", "fields", "words", "fix"),
    [
        ((), {}, "the GID table is empty", "ip addr add"),
        ((LOCAL,), {}, "only link-local GIDs", "ip addr add ADDRESS/PREFIX dev eth0"),
        ((gid("10.0.0.1", V1),), {}, "only RoCE v1 GIDs", "RoCE v2"),
        (
            (HERE,),
            {"here": frozenset()},
            "none of its 1 GIDs is an address of this network namespace",
            "--network host",
        ),
        ((HERE,), {"here": frozenset(), "kubernetes": True}, "none of its 1 GIDs", "hostNetwork: true"),
    ],
)
def test_gids_that_do_not_do(gids: tuple[Any, ...], fields: dict[str, Any], words: str, fix: str) -> None:
    found = said(host(device(port(*gids)), **fields), "gids")
    assert len(found) == 1
    assert words in found[0].words
    assert fix in found[0].fix


def test_an_mtu_that_does_not_fit_the_network_device_is_told() -> None:
    large = port(HERE, active_mtu=Mtu.MTU_4096)
    assert said(host(device(large), netdevs={"eth0": Netdev("eth0", mtu=1500)}))[0].name == "mtu"
    assert said(host(device(large), netdevs={"eth0": Netdev("eth0", mtu=4200)})) == []
    (hint,) = said(host(netdevs={"eth0": Netdev("eth0", mtu=1500)}), "mtu")
    assert (hint.verdict, hint.fix[:27]) == (INFO, "ip link set eth0 mtu 4200, ")


def test_the_gid_that_would_be_offered() -> None:
    assert best_gid(port(LOCAL, gid("10.0.0.1", V1, 1), gid("10.0.0.1", gid_index=2))) == gid("10.0.0.1", gid_index=2)
    assert best_gid(GOOD, 0) == LOCAL
    assert best_gid(GOOD, 9) is None
    assert best_gid(port()) is None


# ---- limits and surroundings


def test_the_limit_of_locked_memory_against_the_need() -> None:
    """R15: 1 MiB cannot be registered under a limit of 64 KiB."""
    tight = Limits(64 * 1024, 64 * 1024, False, 65536, 65536, 10)
    failed = Trial("register 1048576 bytes: ibv_reg_mr: ENOMEM (12), Cannot allocate memory.", errno.ENOMEM)
    found = {f.name: f for f in said(host(device(GOOD, trial=failed), limits=tight))}
    assert found["memlock"].verdict is found["queue pair"].verdict is FAIL
    assert "64 KiB at most; one connection takes 1 MiB" in found["memlock"].words
    assert "ulimit -l unlimited" in found["memlock"].fix
    assert "LimitMEMLOCK=infinity" in found["memlock"].fix
    contained = host(device(GOOD, trial=failed), limits=tight, container=("x",))
    assert said(contained, "memlock")[0].fix == REMEDIES["memlock container"]
    assert "ulimit -l" not in said(replace(contained, kubernetes=True), "memlock")[0].fix
    assert said(host(limits=tight))[0].verdict is WARN  # it works, since the device does not lock
    assert said(host(limits=replace(tight, ipc_lock=True))) == []
    assert said(host(limits=replace(tight, memlock=8 * MB)))[0].words.endswith("room for 8, and for no large buffers.")
    assert said(host(limits=replace(tight, memlock=64 * MB))) == []


def test_what_was_measured_counts_where_it_is_more() -> None:
    greedy = host(device(GOOD, trial=Trial(pinned=300 * MB)), limits=Limits(memlock=200 * MB))
    assert "one connection takes 300 MiB" in said(greedy, "memlock")[0].words


def test_the_limit_of_open_files_against_the_need() -> None:
    """R18: with no descriptor left the device list itself comes back empty."""
    wanted = DEVICE_FDS + ZMQ_FDS
    tight = Limits(nofile=10 + wanted - 1, nofile_max=None, open_files=10)
    (finding,) = said(host(limits=tight), "open files")
    assert finding.verdict is FAIL
    assert "Devices seem absent" in finding.words
    assert "ulimit -n" in finding.fix
    assert said(host(limits=replace(tight, nofile=10 + wanted)), "open files")[0].verdict is WARN
    assert said(host(limits=replace(tight, nofile=1024)), "open files")[0].verdict is OK
    assert said(host(limits=Limits()), "open files")[0].words == "Open files: no limit."


RULES = (
    "table inet filter {", "chain input {", "type filter hook input priority filter; policy drop;",
    "tcp dport 22 accept", "}", "}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("firewall", "verdict", "words", "fix"),
    [
        (Firewall(rules=()), OK, "No rule of 0 lines", ""),
        (Firewall(rules=(*RULES[:3], "udp dport 4791 accept")), OK, "No rule of 4 lines", ""),
        (Firewall(rules=RULES), WARN, "no rule names UDP 4791", "nft insert rule"),
        (Firewall(rules=(*RULES[:2], "udp dport 4791 counter drop")), WARN, "4791 counter drop", "nft"),
        (Firewall(rules=("-A INPUT -p udp --dport 4791 -j DROP",)), WARN, "A rule stops RoCE", "iptables -I INPUT"),
        (Firewall(rules=("*filter", ":INPUT DROP [0:0]")), WARN, "no rule names UDP 4791", "iptables -I INPUT"),
        (Firewall(("ufw",), None), WARN, "ufw filters packets", "ufw allow 4791/udp; ufw allow 18515/tcp"),
        (Firewall(("firewalld",), None), WARN, "firewalld filters", "firewall-cmd --add-port=4791/udp"),
        (Firewall(tables=True), INFO, "cannot be read", "iptables"),
        (Firewall(), INFO, "No packet filter was seen", ""),
    ],
)
def test_hints_of_a_firewall(firewall: Firewall, verdict: Verdict, words: str, fix: str) -> None:
    (finding,) = said(host(firewall=firewall), "firewall")
    assert finding.verdict is verdict
    assert words in finding.words
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


def test_fork_namespaces_and_containers() -> None:
    assert said(host(copy_on_fork=None))[0].fix.startswith("export RDMAV_FORK_SAFE=1")
    assert said(host(copy_on_fork=None, fork_asked=True)) == []
    assert said(host(netns="exclusive"), "netns")[0].verdict is INFO  # its device is seen here
    assert said(host(netns=""), "netns")[0].words.endswith("the kernel does not tell.")
    assert "/.dockerenv" in said(host(container=("/.dockerenv",)), "container")[0].words


# ---- in words

SORRY = (
    host(**NO_KERNEL, loadable=("ib_core", "ib_uverbs", "rdma_rxe")),
    host(device(GOOD), Device("mlx5_0", error="open mlx5_0 " + "x" * 100), firewall=Firewall(rules=RULES)),
    host(device(down(), port(port_num=2), port(gid("2001:db8:1111:2222:3333:4444:5555:6666", gid_index=255)))),
    host(device(GOOD, trial=Trial("it is so. " * 30, errno.ENOMEM)), limits=Limits(65536, 65536, False, 30, 30, 20)),
    host(nodes=(Node("/dev/infiniband/uverbs0", "rxe0", errno.EPERM),), netns="exclusive", container=("x" * 90,)),
)


@pytest.mark.parametrize("sorry", [host(), *SORRY])
def test_no_line_is_wider_than_a_terminal_and_nothing_is_left_out(sorry: Host) -> None:
    findings = examine(sorry)
    lines = list(host_lines(sorry, findings))
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [line for line in lines if line != line.rstrip()] == []
    text = "".join("".join(lines).split())
    for finding in findings:
        assert "".join(f"{finding.name}{finding.words}".split()) in text
        assert "".join(finding.fix.split()) in text
    for entry in (entry for p in sorry.ports for entry in p.gids):
        assert str(entry.gid) in text
    told = as_json(sorry, findings)
    assert told["findings"] == [f.asdict() for f in findings]
    assert told["ok"] is bool(sorry.usable)


def test_every_fail_or_warning_that_can_be_mended_says_how() -> None:
    for sorry in SORRY:
        # what an error of the library says has its own next step
        lacking = [f for f in said(sorry) if not f.fix and f.name not in ("choice", "device", "queue pair", "devices")]
        assert lacking == []


# ---- what network devices in one subnet do to RoCE


def nics(**settings: int | None) -> dict[str, Netdev]:
    addresses = {"eth0": "10.0.0.1/24", "eth1": "10.0.0.9/16", "eth2": "10.5.0.1/24", "lo": "127.0.0.1/8"}
    return {name: Netdev(name, addresses=(IPv4Interface(text),), **settings) for name, text in addresses.items()}


def test_two_network_devices_in_one_subnet_are_looked_at() -> None:
    (finding,) = said(host(netdevs=nics(arp_ignore=0, arp_announce=0, rp_filter=1)), "arp")
    assert finding.verdict is WARN
    assert finding.words == (
        "eth0 and eth1 are in one subnet (10.0.0.0/24); arp_ignore 0: each answers ARP for the other's address; "
        "arp_announce 0: each asks with the other's address; rp_filter 1: what comes to the one that the route does "
        "not lead to is dropped."
    )
    assert finding.fix.startswith(
        "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=2"
    )


def test_where_each_answers_for_itself_all_is_well() -> None:
    (finding,) = said(host(netdevs=nics(arp_ignore=1, arp_announce=2, rp_filter=2)), "arp")
    assert finding.verdict is OK
    assert said(host(netdevs=nics(arp_ignore=None, arp_announce=None, rp_filter=None)), "arp")[0].verdict is OK


def test_network_devices_that_carry_no_roce_are_nobodys_business() -> None:
    others = {name: replace(netdev, name=f"x{name}") for name, netdev in nics(arp_ignore=0).items()}
    assert said(host(netdevs=others), "arp") == []


# ---- which provider, which file, which node


@pytest.mark.parametrize(
    ("driver", "library", "words", "fix"),
    [
        ("qede", {}, "its provider qedr is not installed", "apt install ibverbs-providers"),
        (
            "mlx5_core", {"drivers": {"/etc/libibverbs.d/rxe.driver": "rxe"}},
            "no .driver file, as /etc/libibverbs.d/mlx5.driver, names its provider",
            "echo 'driver mlx5' > /etc/libibverbs.d/mlx5.driver",
        ),
        (
            "mlx5_core", {"drivers": {"/etc/libibverbs.d/mlx5.driver": "mlx5"}},
            "its provider mlx5 is there, and named, but does not take it", "apt install ibverbs-providers",
        ),
        ("", {}, "it lacks the provider, or the node", "apt install ibverbs-providers"),
    ],
)  # fmt: skip
def test_a_device_that_is_not_listed_is_told_what_it_lacks(
    driver: str, library: dict[str, Any], words: str, fix: str
) -> None:
    found = Library("/usr/lib/libibverbs.so.1", "1.14", ("mlx5", "rxe"), **library)
    (finding,) = said(host(Device("dev0", driver, listed=False), library=found, choice=(), nodes=()), "device")
    assert words in finding.words
    assert fix in finding.fix


def test_a_device_without_its_node_is_told_that_and_not_that_the_provider_lacks() -> None:
    node = Node("/dev/infiniband/uverbs0", "dev0", errno.ENOENT)
    (finding,) = said(host(Device("dev0", "mlx5_core", listed=False), nodes=(node,), choice=()), "device")
    assert finding.words.endswith("libibverbs does not list it: its node /dev/infiniband/uverbs0 is missing.")


def test_a_driver_file_of_a_provider_that_is_gone_is_stale() -> None:
    files = {"/etc/libibverbs.d/old.driver": "old", "/etc/libibverbs.d/rxe.driver": "rxe"}
    found = Library("/usr/lib/libibverbs.so.1", "1.14", ("rxe",), drivers=files)
    (stale,) = [f for f in said(host(library=found), "providers") if "stale" in f.words]
    assert (stale.verdict, stale.fix.startswith("rm /etc/libibverbs.d/old.driver, or install")) == (INFO, True)
    (stale,) = [f for f in said(host(library=found, choice=()), "providers") if "stale" in f.words]
    assert stale.verdict is WARN


# ---- which address, which device


def test_an_address_of_another_namespace_is_not_chosen_before_ones_own_and_marked_where_it_is() -> None:
    foreign = replace(gid("10.0.0.7", gid_index=0), here=False)
    pod = host(device(port(foreign, HERE)), here=frozenset([HERE.gid.raw]))
    (chosen,) = said(pod, "choice")
    assert "with gid_index 1 (::ffff:10.0.0.1" in chosen.words
    only = host(device(port(foreign)), here=frozenset())
    chosen, warning = said(only, "choice")
    assert (warning.verdict, "is no address of this network namespace" in warning.words) == (WARN, True)


@pytest.mark.parametrize(("address", "verdict"), [("10.0.0.7", FAIL), ("", WARN)])
def test_a_device_that_cannot_be_opened_is_left_out_in_words(address: str, verdict: Verdict) -> None:
    left = LeftOut("rxe1", address, "open rxe1: ibv_open_device: EACCES (13), Permission denied.")
    partly = host(device(GOOD), Device("rxe1", "rxe", error=left.error), left_out=(left,))
    _, finding = said(partly, "choice")
    assert finding.verdict is verdict
    assert finding.words.startswith("Left out: rxe1")
    assert ("which has 10.0.0.7, where the route to the peer starts" in finding.words) is bool(address)
    assert list(host_lines(partly, []))[-1] == "A connection can be made from this host, but not by rxe1."
