"""CONTRIBUTING.md and SECURITY.md tell the truth: what they name is there."""

from __future__ import annotations

import importlib
import re

import pytest
import yaml
from places import ROOT
from test_structure import FILES, MAY_IMPORT, room

TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "SECURITY.md")}
GUIDE = TEXTS["CONTRIBUTING.md"]
#: wing.module.Name, or verbs.name
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(MAY_IMPORT)})\.(?!py)[\w.]+)`", GUIDE)))


def test_names_are_found() -> None:
    assert {"session.connect.connect", "agreement.endpoint.Endpoint.psn", "verbs.ibv_modify_qp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_is_there(name: str) -> None:
    parts = name.split(".")
    depth = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in FILES)
    found: object = importlib.import_module(f"rdmaconnect.{'.'.join(parts[:depth])}")
    for part in parts[depth:]:
        found = getattr(found, part)


def test_every_wing_is_on_the_map() -> None:
    table = GUIDE.partition("| wing |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(\w+)(?:\.py)?`", re.sub(r"\|[^|\n]*\|[^|\n]*\|$", "|", table, flags=re.M)))
    assert told == {room(name) for name in FILES} - {"__init__", "__main__"}


def test_the_map_tells_only_of_imports_that_there_may_be() -> None:
    for wings, imports in re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", GUIDE.partition("| wing |")[2], re.M):
        for wing in re.findall(r"`(\w+)(?:\.py)?`", wings):
            assert set(re.findall(r"`(\w+)`", imports)) <= MAY_IMPORT[wing], wing


WALKS = GUIDE.partition("## Four walks")[2].partition("\n## ")[0]


@pytest.mark.parametrize("walk", re.findall(r"^\*\*(.+?)\*\*(.+?)\n\n", WALKS, re.M | re.S), ids=lambda walk: walk[0])
def test_no_wing_is_entered_twice_on_a_walk(walk: tuple[str, str]) -> None:
    title, text = walk
    hosts = re.sub(r"\([^()]*\)", "", text).split("On the other host:")
    for steps in hosts:
        wings = [room(name) for name in re.findall(rf"`((?:{'|'.join(MAY_IMPORT)})\.[\w.]+)`", steps)]
        entered = [wing for before, wing in zip(["", *wings], wings, strict=False) if wing != before]
        assert len(entered) == len(set(entered)), (title, entered)
        assert len(entered) >= 2


@pytest.mark.parametrize("name", TEXTS)
def test_paths_lead_somewhere(name: str) -> None:
    for path in re.findall(r"`((?:docker|docs|examples|tests|rdmaconnect|\.ci)/[\w./]+)`", TEXTS[name]):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:abi|protocol|cli)/\w+\.py)`", TEXTS[name]):
        assert (ROOT / "rdmaconnect" / path).exists(), path


def test_before_a_commit_the_same_is_checked_as_in_ci() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ci = (ROOT / ".ci/run").read_text()
    for hook in repo["hooks"]:
        assert f"-m {hook['entry'].removesuffix(' --force-exclude')}" in ci
