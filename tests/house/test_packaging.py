"""The wheel: built, looked into, installed in an empty virtual environment without the network, and used there."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import rdmaconnect

#: packages that it needs, and where some of pyzmq's own libraries are
NEEDED = ("zmq", "msgpack", "pyzmq.libs", *(() if sys.version_info >= (3, 11) else ("typing_extensions.py",)))
#: strict mypy complains of an ignore that is not needed: so the types must be there, and be right
CLIENT = """
import rdmaconnect
with rdmaconnect.connect("10.0.0.2") as conn:
    conn.send(b"hello")
    first: bytes = conn.recv()
    wrong: int = conn.recv()  # type: ignore[assignment]
    conn.send(b"hello", deadline_s="soon")  # type: ignore[arg-type]
"""


def run(*argv: str | Path, cwd: Path | None = None) -> str:
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=variables, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True, timeout=60
    )
    (made,) = folder.iterdir()
    return made


def test_the_wheel_is_pure_and_holds_the_package_alone(wheel: Path) -> None:
    assert wheel.name == f"rdmaconnect-{rdmaconnect.__version__}-py3-none-any.whl"
    about = f"rdmaconnect-{rdmaconnect.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        tags = email.message_from_bytes(archive.read(f"{about}/WHEEL"))
        metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
        entries = archive.read(f"{about}/entry_points.txt").decode()
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "rdmaconnect").rglob("*.py")}
    assert {name for name in names if not name.startswith(about)} == package | {"rdmaconnect/py.typed"}
    assert f"{about}/licenses/LICENSE" in names
    assert (tags["Root-Is-Purelib"], tags.get_all("Tag")) == ("true", ["py3-none-any"])
    assert metadata["Requires-Python"] == ">=3.10"
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(re.split(r"[ ;<>=]", need)[0] for need in needs) == ["msgpack", "pyzmq", "typing-extensions"]
    assert [need.partition(";")[2].strip() for need in needs if "typing" in need] == ["python_version < '3.11'"]
    assert metadata["License-Expression"] == "MIT"
    said = {text.rpartition(" ")[2] for text in metadata.get_all("Classifier", []) if ":: 3." in text}
    assert said == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert "rdmaconnect = rdmaconnect.cli:main" in entries


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with the wheel and what it needs, and nothing else."""
    pytest.importorskip("pip", reason="pip is not installed")
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    python = place / "bin/python"
    run(
        sys.executable, "-m", "pip", "--isolated", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel
    )
    site = place / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    present = Path(str(importlib.util.find_spec("zmq").origin)).parents[1]  # type: ignore[union-attr]
    for name in NEEDED:
        if (present / name).exists():
            (site / name).symlink_to(present / name)
    return python


def test_the_installed_wheel_is_used_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    code = "import rdmaconnect, sys; print(rdmaconnect.__file__, *{m for m in ('rich', 'shtab') if m in sys.modules})"
    assert Path(run(installed, "-I", "-c", code).strip()).is_relative_to(installed.parents[1])
    command = installed.with_name("rdmaconnect")
    assert run(command, "--version") == f"rdmaconnect {rdmaconnect.__version__}\n"
    states = json.loads(run(installed, "-I", "-m", "rdmaconnect", "states", "RC", "--json"))
    assert "RTR" in json.dumps(states)
    made = json.loads(run(command, "keygen", str(tmp_path / "node1"), "--json"))
    assert {Path(path).name for path in made.values()} == {"node1.key", "node1.key_secret"}
    assert all(Path(path).stat().st_size for path in made.values())


def test_a_type_checker_sees_the_installed_types(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "client.py").write_text(CLIENT)
    argv = ["--strict", "--python-executable", str(installed), "--cache-dir", str(tmp_path / "cache")]
    said = run(sys.executable, "-m", "mypy", *argv, "--config-file", "", "client.py", cwd=tmp_path)
    assert said.startswith("Success")
