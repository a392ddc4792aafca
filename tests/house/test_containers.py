"""The files for containers, as far as they can be read without Docker; `docker/lab compose` runs them."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml
from places import ROOT

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MANIFEST: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "docker/kubernetes.yaml").read_text()))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())

NODES, PINGPONGS = {"node1", "node2"}, {"server", "client", "host-server", "host-client"}
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|cc|make|cmake|build-essential|lib\S+-dev|python3-dev)\b")


def instructions(name: str) -> list[str]:
    """The arguments of each such instruction, long lines joined, comments left out."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    return re.findall(rf"(?m)^{name}\s+(.*)$", text)


def pods() -> list[dict[str, Any]]:
    return [thing["spec"]["template"]["spec"] for thing in MANIFEST if thing["kind"] == "Job"]


def test_the_image_runs_as_a_number_that_is_not_root() -> None:
    last = DOCKERFILE.rindex("\nFROM ")
    (user,) = instructions("USER")
    assert DOCKERFILE.index("\nUSER ") > last
    assert int(user.split(":")[0]) > 0


def test_the_image_has_no_compiler_and_its_last_stage_no_pip() -> None:
    assert not COMPILERS.search("\n".join(instructions("RUN")))
    assert "pip" not in DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert all("--no-install-recommends" in line for line in instructions("RUN") if "apt-get install" in line)


def test_what_the_image_copies_is_let_through() -> None:
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in let_through
    assert {"!pyproject.toml", "!README.md", "!LICENSE", "!rdmaconnect"} <= set(let_through)
    assert not any(
        line.startswith("!") and not (ROOT / line[1:]).exists() for line in set(let_through) - {"!docker/wheels"}
    )


def test_the_lab_finds_the_packages_that_the_image_asks_for() -> None:
    """boxes.sh reads them from these lines; another way of writing them would leave its base image without."""
    (base,) = re.findall(r"(?m)^ARG BASE=debian:([a-z]+)\S*$", DOCKERFILE)
    installs = re.findall(r"(?m)^RUN apt-get .*--no-install-recommends ([a-z0-9 -]+)", DOCKERFILE)
    assert base
    assert len(installs) == DOCKERFILE.count("apt-get install") == DOCKERFILE.count("\nFROM ")
    assert {"python3", "ibverbs-providers"} <= set(installs[-1].split())
    assert re.search(r'(?m)^dependencies = \[".*"\]$', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("script", ["boxes.sh", "compose.sh", "inside.sh"])
def test_the_scripts_of_the_lab_are_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", ROOT / "docker" / script], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_has_the_two_profiles_and_builds_this_image() -> None:
    assert set(SERVICES) == NODES | PINGPONGS
    assert {name for name in SERVICES if SERVICES[name]["profiles"] == ["netns"]} == NODES | {"server", "client"}
    assert {name for name in SERVICES if SERVICES[name]["profiles"] == ["host"]} == {"host-server", "host-client"}
    for service in SERVICES.values():
        build = service["build"]
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).samefile(ROOT / "docker/Dockerfile")
        assert set(build["args"]) == {name.partition("=")[0] for name in instructions("ARG")}


@pytest.mark.parametrize("name", sorted(PINGPONGS))
def test_a_ping_pong_has_devices_and_memory_and_no_privilege(name: str) -> None:
    service = SERVICES[name]
    assert service["devices"] == ["/dev/infiniband"]
    assert service["ulimits"] == {"memlock": -1}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"cap_add", "privileged", "user"} & set(service)


def test_each_side_is_in_the_namespace_of_its_own_node() -> None:
    modes = {name: SERVICES[name]["network_mode"] for name in sorted(PINGPONGS)}
    assert modes == {
        "client": "service:node1",
        "server": "service:node2",
        "host-client": "host",
        "host-server": "host",
    }
    for side, node in (("client", "node1"), ("server", "node2")):
        assert SERVICES[side]["depends_on"][node] == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", sorted(NODES))
def test_a_node_may_make_its_device_and_nothing_else(name: str) -> None:
    service = SERVICES[name]
    assert service["hostname"] == name
    assert (service["user"], service["cap_drop"], service["cap_add"]) == ("root", ["ALL"], ["NET_ADMIN"])
    assert "privileged" not in service
    assert service["healthcheck"]["test"]


@pytest.mark.parametrize("kind", ["", "host-"])
def test_both_sides_speak_of_rc_and_ud_at_the_same_ports(kind: str) -> None:
    (server,), (client,) = SERVICES[f"{kind}server"]["command"], SERVICES[f"{kind}client"]["command"]
    assert re.findall(r"-t (\w+) -p (\d+)", client) == [("RC", "18515"), ("UD", "18516")]
    assert re.findall(r"-p (\d+)", server) == ["18515", "18516"]


def test_the_manifest_has_what_the_doctor_refers_to() -> None:
    text = (ROOT / "docker/kubernetes.yaml").read_text()
    for word in (
        "device plugin",
        "hostPath",
        "privileged: true",
        "LimitMEMLOCK",
        "k8s.v1.cni.cncf.io/networks",
        "4791",
    ):
        assert word in text, word
    assert len(pods()) == 2
    for pod in pods():
        assert pod["hostNetwork"] is True
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert [name.split("/")[0] for name in container["resources"]["limits"]] == ["rdma"]


def test_the_client_of_the_manifest_calls_the_service_that_selects_the_server() -> None:
    (service,) = (thing for thing in MANIFEST if thing["kind"] == "Service")
    server, client = (thing for thing in MANIFEST if thing["kind"] == "Job")
    assert service["spec"]["selector"] == server["spec"]["template"]["metadata"]["labels"]
    assert client["spec"]["template"]["spec"]["containers"][0]["args"][-1] == service["metadata"]["name"]


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = WORKFLOW["jobs"].values()
    assert job["container"]["image"] == "debian:12"
    assert job["steps"][-1]["run"] == "bash .ci/run"
    assert "step docker/lab compose\n" in (ROOT / ".ci/run").read_text()
