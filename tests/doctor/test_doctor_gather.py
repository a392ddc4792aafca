"""What is gathered of the machine that the tests run on: nothing there may make it fail."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rdmaconnect.agreement.options import Options
from rdmaconnect.doctor import access, examine, gather, reading
from rdmaconnect.objects import netlink

#: by name, the function hides its module
world = sys.modules["rdmaconnect.doctor.gather"]
LOCALHOST = ipaddress.ip_address("127.0.0.1")


def test_this_machine_is_seen_as_it_is() -> None:
    host = gather(Options())
    assert host.kernel == os.uname().release
    assert host.netdevs["lo"].mtu > 1500
    assert host.limits.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert host.limits.open_files >= 3
    assert host.uverbs == Path("/sys/class/infiniband_verbs").exists() or "ib_uverbs" in os.listdir("/sys/module")
    assert host.library.error or host.library.path.startswith("/")


def test_what_cannot_be_read_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object = "", *rest: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(reading.os, "listdir", refuse)
    monkeypatch.setattr(world.subprocess, "run", refuse)
    monkeypatch.setattr(netlink.socket, "socket", refuse)
    before = len(list(os.scandir("/proc/self/fd")))
    host = gather(Options())
    assert len(list(os.scandir("/proc/self/fd"))) == before
    assert (host.nodes, dict(host.netdevs), host.netns, host.firewall.rules) == ((), {}, "", None)
    assert {finding.name for finding in examine(host)} >= {"memlock", "open files", "firewall"}


def test_a_node_is_opened_to_see_who_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uverbs0", "uverbs10"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "rdma_cm").write_bytes(b"")
    monkeypatch.setattr(access, "_DEV", tmp_path)
    monkeypatch.setattr(access, "_VERBS", tmp_path / "sys")
    for name, device in (("uverbs0", "mlx5_0"), ("uverbs2", "mlx5_2")):
        (tmp_path / "sys" / name).mkdir(parents=True)
        (tmp_path / "sys" / name / "ibdev").write_text(device + "\n")
    (tmp_path / "uverbs0").chmod(0o660)
    first, absent, stale = access.nodes()
    assert (first.device, first.errno, first.mode) == ("mlx5_0", 0, 0o660)
    assert (absent.device, absent.errno, absent.mode) == ("mlx5_2", errno.ENOENT, None)
    assert (stale.path, stale.device) == (str(tmp_path / "uverbs10"), "")
    real = os.open
    for number in (errno.EPERM, errno.EACCES, errno.ENXIO):

        def refuse(path: object, flags: int, *rest: int, number: int = number, **more: object) -> int:
            if str(path).startswith(str(tmp_path)):
                raise OSError(number, os.strerror(number))
            return real(path, flags, *rest, **more)  # type: ignore[call-overload]

        monkeypatch.setattr(access.os, "open", refuse)
        assert access.nodes()[0].errno == number
        monkeypatch.setattr(access.os, "open", real)


def test_the_kernel_tells_addresses_and_what_holds_for_arp() -> None:
    assert ipaddress.IPv4Interface("127.0.0.1/8") in netlink.ipv4_addresses()["lo"]
    lo = gather(Options()).netdevs["lo"]
    assert ipaddress.IPv4Interface("127.0.0.1/8") in lo.addresses
    for name in ("arp_ignore", "arp_announce", "rp_filter"):
        values = [Path(f"/proc/sys/net/ipv4/conf/{where}/{name}") for where in ("lo", "all")]
        if all(value.exists() for value in values):
            assert getattr(lo, name) == max(int(value.read_text()) for value in values)


def test_driver_files_are_read_as_libibverbs_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_DRIVERS", tmp_path)
    (tmp_path / "mlx5.driver").write_text("# comment\ndriver mlx5\n")
    (tmp_path / "far.driver").write_text("driver /opt/lib/libfar\n")
    (tmp_path / ".hidden").write_text("driver hidden\n")
    (tmp_path / "empty").write_text("\n")
    found = {os.path.basename(path): provider for path, provider in world._drivers().items()}
    assert found == {"mlx5.driver": "mlx5", "far.driver": "libfar"}


def test_the_kernel_tells_a_route_and_a_neighbour() -> None:
    told = netlink.route(LOCALHOST, LOCALHOST, "lo")
    assert told == netlink.Route("lo")
    assert told.words == "by lo, on the link"
    assert netlink.route(LOCALHOST, LOCALHOST, "no-such-dev") is None
    assert netlink.Route(errno=errno.ENETUNREACH).words == "no route (Network is unreachable)"
    assert netlink.neighbour(ipaddress.ip_address("192.0.2.254"), "lo") == ""
    assert netlink.neighbour(LOCALHOST, "no-such-dev") == ""
    assert netlink.rdma_system()[0] in ("", "shared", "exclusive")


@pytest.mark.parametrize("files", [12, 30])
def test_with_hardly_a_descriptor_left_it_still_speaks(files: int) -> None:
    """R18: it is then that it is needed."""
    words = [sys.executable, "-m", "rdmaconnect", "doctor", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )  # fmt: skip
    told = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert told["open files"]["verdict"] == ("fail" if files == 12 else "warn")
    assert "ulimit -n" in told["open files"]["fix"]
