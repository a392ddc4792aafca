"""What the lab needs and a machine may lack: packages, kernels, headers, trees; fetched once, kept in a cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

ROOT = Path(__file__).resolve().parent.parent
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = Path(os.environ.get("RDMACONNECT_LAB_CACHE") or CACHES / "rdmaconnect-lab").absolute()
SUITES = ("forky", "trixie", "bookworm")
#: whose C headers are compared with: older than any kernel here, to see what old libraries have
HEADER_SUITES = (*SUITES, "bullseye")
#: compilers of the machines that the C headers are read for besides this one: tests/abi_header.py
CROSS_PACKAGES = (
    "gcc-aarch64-linux-gnu", "gcc-powerpc64le-linux-gnu", "gcc-riscv64-linux-gnu", "gcc-s390x-linux-gnu",
    "libc6-dev-arm64-cross", "libc6-dev-ppc64el-cross", "libc6-dev-riscv64-cross", "libc6-dev-s390x-cross", "musl-dev",
)  # fmt: skip
PACKAGES = (
    "gcc", "ibverbs-providers", "ibverbs-utils", "iproute2", "kmod", "libc6-dev", "librdmacm1", "rdmacm-utils",
    # of the peer in C: tests/wire
    "libibverbs-dev", "libmsgpack-c-dev|libmsgpack-dev", "libzmq3-dev",
    # redis-server without the service that would be started of it
    "redis-tools",
)  # fmt: skip
QEMU_PACKAGES = ("busybox-static", "qemu-system-x86")
#: of what rdmaconnect is measured against
BENCH_PACKAGES = ("libibverbs-dev", "perftest", "python3-pyverbs")
#: and of PyPI; and what else the tests try it with
PEERS = ("ibverbs==2026.10.22", "mpi4py==4.1.2", "mpich==5.0.2", "redis==8.1.0")
#: that of PyPI takes gigabytes
TORCH = "python3-torch"
#: of a Debian that is a container's, and has another Python
BOX_PACKAGES = ("ibverbs-providers", "python3-venv")
PACKAGES_MB, VENV_MB, KERNEL_MB, HEADERS_MB, BOX_MB, BOXES_MB, TORCH_MB = 900, 400, 900, 100, 400, 1500, 900
FAILED = 125
INIT = (ROOT / "docker/init.sh").read_text()

# Fetch the packages "$@" and unpack them into ./tree.
FETCH = r"""
set -euo pipefail; mkdir debs tree; cd debs; apt-get -qq download "$@"; cd ..
for deb in debs/*; do dpkg-deb -x "$deb" tree; rm "$deb"; done
"""
# Inside, compiling is slow and what it yields is lost.
COMPILE = """
"$PYTHON" -m compileall -qq -j 0 tree/usr/lib/python3/dist-packages || true; mv tree made
"""
# Make ./made of an unpacked kernel: vmlinuz, lib/modules, and an initrd of busybox and the modules for INIT.
MAKE_KERNEL = r"""
mkdir -p made/lib/modules init/{bin,proc,sys,dev,ro,rw,tree,m}; modules=made/lib/modules/$RELEASE
mv tree/{,usr/}lib/modules/"$RELEASE" made/lib/modules/ 2> /dev/null || [ -d "$modules" ]
mv "tree/boot/vmlinuz-$RELEASE" made/vmlinuz 2> /dev/null || mv "$modules/vmlinuz" made/vmlinuz
depmod -b "$PWD/made" "$RELEASE"
for m in virtio_pci 9pnet_virtio 9p overlay; do modprobe -d made -S "$RELEASE" --show-depends $m; done |
awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r path; do
  name=$(basename "$path" .xz); echo "$name" >> init/m/order
  case $path in *.xz) busybox unxz -c "$path";; *) cat "$path";; esac > "init/m/$name"
done
cp "$(command -v busybox)" init/bin/busybox; printf %s "$INIT" > init/init; chmod +x init/init
cd init; find . | busybox cpio -o -H newc 2> /dev/null | gzip -1 > ../made/initrd
"""
# Make apt see one suite alone: its lists are in the cache, and what is installed on this machine does not count.
APT_CONFIG = """
Dir { State "PLACE"; State::status "PLACE/status"; Cache "PLACE"; };
Dir::Etc { SourceList "PLACE/sources.list"; SourceParts "/dev/null"; Preferences "/dev/null"; };
Dir::Etc::PreferencesParts "/dev/null";
APT { Sandbox::User "root"; Update::Error-Mode "any"; }; Acquire { Retries "3"; Languages "none"; };
"""


class LabError(Exception):
    """The lab itself failed: the message says what to do about it, or ends with a console's last words."""

    def __init__(self, message: str, console: Path | None = None, status: int = FAILED) -> None:
        if console and console.exists():
            last = console.read_text(errors="replace").splitlines()[-60:] or ["(empty)"]
            message = "\n".join([f"{message}. The end of its console:", *last])
        super().__init__(message)
        self.status = status


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


def ask(*argv: str | Path, **variables: str) -> str:
    variables = {**os.environ, "LC_ALL": "C.UTF-8", **variables}
    return subprocess.run(argv, env=variables, stdout=PIPE, stderr=DEVNULL, text=True).stdout


def step(what: str, argv: Sequence[str | Path], folder: Path, megabytes: int = 1, **variables: str) -> None:
    """Run what may take a while in `folder`, given that much room; say what it is and how long it took."""
    if (free := shutil.disk_usage(folder).free >> 20) < megabytes:
        have = f"{what} needs {megabytes} MB in {folder}, which has {free} MB"
        raise LabError(f"{have}: make room, or name another place for the cache in RDMACONNECT_LAB_CACHE")
    print(f"lab: {what} ...", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", **variables}
    done = subprocess.run(
        argv, cwd=folder, env=variables, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, close_fds=False
    )
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        fix = "mend what it complains of (network, apt sources, disk), then run the lab again"
        raise LabError(f"{what}: status {done.returncode}: {fix}\n{last}")


@contextlib.contextmanager
def cache_locked() -> Iterator[None]:
    """Keep other labs from preparing meanwhile; clear away what an interrupted one left.

    The steps inherit the lock: should the lab be killed, it is free only when its last step has ended.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another lab is preparing: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        for left in CACHE.glob("making-*"):
            shutil.rmtree(left)
        yield


def missing(packages: Sequence[str]) -> list[str]:
    """Those that are not installed. ``one|other`` is one of them by the names that it has in several Debians."""
    names = [name for package in packages for name in package.split("|")]
    known = ask("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names).splitlines()
    return [package for package in packages if not any(f"{name} installed" in known for name in package.split("|"))]


def install(*packages: str) -> None:
    """Install the Debian packages that are missing."""
    if not shutil.which("apt-get"):
        raise LabError("there is no apt-get: the lab needs a Debian machine (12 or later)")
    if lacks := missing(packages):
        apt, usr = ["apt-get", "-qq", "-oDPkg::Lock::Timeout=300", "-oAcquire::Retries=3"], Path("/usr")
        step("reading the package lists", [*apt, "update"], usr)
        names = [next((n for n in one.split("|") if ask("apt-cache", "show", n)), one.split("|")[0]) for one in lacks]
        argv = [*apt, "install", "--no-install-recommends", *names]
        step(f"installing {' '.join(names)}", argv, usr, PACKAGES_MB)


def lacking(packages: Sequence[str], suites: Sequence[str]) -> int:
    """Megabytes that the packages, the virtual environment and the kernels that are not here yet take, at most."""
    size = PACKAGES_MB if missing(packages) else 0
    size += 0 if (venv()[1] / "complete").exists() else VENV_MB
    return size + sum(KERNEL_MB for suite in set(suites) if not kernel_place(suite).exists())


def venv() -> tuple[Path, Path]:
    """The Python that the virtual environment is made of, and its folder."""
    own = importlib.util.find_spec("ensurepip") is not None
    base = Path(sys.executable if own else "/usr/bin/python3")
    identity = f"{ROOT} {base} {sys.version} ".encode() + (ROOT / "pyproject.toml").read_bytes()
    return base, CACHE / "venv" / hashlib.sha256(identity).hexdigest()[:12]


def environment() -> Path:
    """Return the Python of the project's virtual environment; a changed pyproject.toml has one of its own."""
    base, place = venv()
    python = place / "bin/python"
    if not (place / "complete").exists():
        if importlib.util.find_spec("ensurepip") is None:
            install("python3", "python3-venv")
        step(f"making a virtual environment of {base}", [base, "-m", "venv", "--clear", place], CACHE, VENV_MB)
        step("installing the project in it", [python, "-m", "pip", "install", "-e", f"{ROOT}[test]"], CACHE)
        ask(python, "-m", "compileall", "-qq", place / "lib")
        (place / "complete").touch()
    return python


def peers(python: Path) -> Path:
    """Install what rdmaconnect is measured against; return the Python, like `python`, that has what is PyPI's."""
    place = CACHE / "peers" / hashlib.sha256(f"{python.resolve()} {PEERS}".encode()).hexdigest()[:12]
    with cache_locked():
        install(*BENCH_PACKAGES)
        if not (place / "complete").exists():
            place.parent.mkdir(exist_ok=True)
            step("making a virtual environment for the peers", [python, "-m", "venv", "--clear", place], CACHE, VENV_MB)
            step(f"installing {' '.join(PEERS)} in it", [place / "bin/python", "-m", "pip", "install", *PEERS], CACHE)
            ask(place / "bin/python", "-m", "compileall", "-qq", place / "lib")
            (place / "complete").touch()
    return place / "bin/python"


def torch_tree(python: Path) -> Path | None:
    """Return the tree with Debian's torch and what it needs; None where that is of another Python, or there is none.

    Installed it would be some 170 packages: those that this machine lacks are unpacked.
    """
    version = ("-c", "import sys; print(sys.version_info[:2])")
    if ask(python, *version) != ask("/usr/bin/python3", *version):
        return None
    with cache_locked():
        if not missing([TORCH]):
            return Path("/")
        if not (names := _lacking_for(TORCH)):
            step("reading the package lists", ["apt-get", "-qq", "update"], CACHE)
            names = _lacking_for(TORCH)
        place = CACHE / "torch" / hashlib.sha256(f"{python.resolve()} {names}".encode()).hexdigest()[:12]
        if names and not place.exists():
            what = f"{TORCH} and {len(names) - 1} packages that it needs"
            fetch(what, names, place, TORCH_MB, COMPILE, PYTHON=str(python))
    return place if names else None


def _lacking_for(package: str) -> list[str]:
    """A package, and all that would be installed with it; none where it is not known."""
    return re.findall(r"(?m)^Inst (\S+)", ask("apt-get", "install", "-s", "--no-install-recommends", package))


def archive(suite: str) -> str:
    """Return the APT_CONFIG that makes apt see that suite alone, from the mirror that this machine uses."""
    place, update = CACHE / "apt" / suite, ["apt-get", "-qq", "update"]
    place.mkdir(parents=True, exist_ok=True)
    form = "$(ORIGIN) $(LABEL) $(COMPONENT) $(RELEASE) $(REPO_URI)"
    if "Debian Debian" not in (targets := ask("apt-get", "indextargets", "--format", form)):
        step("reading the package lists", update, place)
        targets = ask("apt-get", "indextargets", "--format", form)
    if not (mirror := re.search(r"(?m)^Debian Debian main [a-z]+ (\S+)$", targets)):
        raise LabError("no Debian archive in /etc/apt: add the debian.sources of a Debian machine there")
    keys = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    (place / "sources.list").write_text(f"deb [{keys}] {mirror[1]} {suite} main\n")
    (place / "status").touch()
    (place / "config").write_text(APT_CONFIG.replace("PLACE", str(place)))
    step(f"reading the package list of {suite}", update, place, APT_CONFIG=f"{place}/config")
    return f"{place}/config"


def fetch(what: str, packages: Sequence[str], place: Path, megabytes: int, more: str = "", **env: str) -> None:
    """Unpack packages to `place`, or what the bash text `more` made of them: all or nothing."""
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as stage:
        argv = ["bash", "-c", FETCH + more, "fetch", *packages]
        step(f"fetching {what}", argv, Path(stage), megabytes, **env)
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        Path(stage, "made" if more else "tree").rename(place)


def kernel_place(suite: str) -> Path:
    """Where that suite's kernel is kept, once it is there."""
    return CACHE / "kernel" / f"{suite}-{hashlib.sha256((MAKE_KERNEL + INIT).encode()).hexdigest()[:8]}"


def kernel(suite: str) -> Path:
    """Return the folder with that suite's vmlinuz, initrd and lib/modules."""
    place = kernel_place(suite)
    if not place.exists():
        apt, depends = {"APT_CONFIG": archive(suite)}, ("apt-cache", "depends")
        release = re.findall(r"Depends: linux-image-(\d\S+)", ask(*depends, "linux-image-amd64", **apt))[0]
        image = f"linux-image-{release}"  # from 7.0 on nearly empty: linux-binary and linux-modules hold it
        parts = re.findall(rf"Depends: (linux-\S+-{re.escape(release)})", ask(*depends, image, **apt))
        env = {**apt, "RELEASE": release, "INIT": INIT}
        fetch(f"kernel {release} of {suite}", [image, *parts], place, KERNEL_MB, MAKE_KERNEL, **env)
    return place


def headers() -> Path:
    """Return the folder with the C headers of several rdma-core versions, each as <major>/usr/include.

    And install the compilers that they are read with.
    """
    place, packages = CACHE / "headers", ("libibverbs-dev", "librdmacm-dev")
    with cache_locked():
        install(*CROSS_PACKAGES)
        for suite in HEADER_SUITES:
            if not (known := CACHE / f"headers-{suite}-{len(packages)}").exists():
                apt = {"APT_CONFIG": archive(suite)}
                major = re.findall(r"(?m)^Version: (\d+)", ask("apt-cache", "show", packages[0], **apt))[0]
                what = f"the C headers of rdma-core {major} ({suite})"
                fetch(what, packages, place / major, HEADERS_MB, **apt)
                known.touch()
    return place


def box(suite: str) -> Path:
    """Return the folder with a container's tree of that suite."""
    place = CACHE / "box" / f"{suite}-{hashlib.sha256(repr(BOX_PACKAGES).encode()).hexdigest()[:8]}"
    with cache_locked():
        if not place.exists():
            install("mmdebstrap")
            archive(suite)
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as stage:
                own = Path(stage, "apt")  # how this machine fetches: proxy, certificates
                own.write_text(ask("apt-config", "dump", "Acquire"))
                argv = ["mmdebstrap", "-q", "--variant=minbase", f"--aptopt={own}"]
                argv += [f"--include={','.join(BOX_PACKAGES)}", suite, f"{stage}/tree"]
                step(f"making a tree of {suite}", [*argv, CACHE / f"apt/{suite}/sources.list"], CACHE, BOX_MB)
                place.parent.mkdir(exist_ok=True)
                Path(stage, "tree").rename(place)
    return place


def boxes(python: Path) -> Path:
    """Return the folder that docker/boxes.sh made, for the packages that the Dockerfile and the project ask for."""
    script, texts = ROOT / "docker/boxes.sh", [ROOT / name for name in ("docker/Dockerfile", "pyproject.toml")]
    lines = re.compile(r"(?m)^(?:ARG BASE=|RUN apt-get |dependencies = ).*")
    recipe = "\n".join(line for text in texts for line in lines.findall(text.read_text()))
    place = CACHE / f"boxes-{hashlib.sha256((script.read_text() + recipe).encode()).hexdigest()[:8]}"
    with cache_locked():
        if not place.exists():
            install("mmdebstrap")
            archive(suite := re.findall("ARG BASE=debian:([a-z]+)", recipe)[0])
            sources = f"{CACHE}/apt/{suite}/sources.list"
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as stage:
                env = {"RECIPE": recipe, "SUITE": suite, "SOURCES": sources, "PYTHON": str(python)}
                step("making Docker's tree and a base image", ["bash", script], Path(stage), BOXES_MB, **env)
                Path(stage, "made").rename(place)
    return place
