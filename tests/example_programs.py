"""The programs of examples/, each imported as a module, and what their tests hand them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import rdmaconnect

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """One of them."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def key_files(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Keys of a listener and of a connector who know each other, as arguments of each."""
    listener = rdmaconnect.keygen(str(folder), "listener")
    connector = rdmaconnect.keygen(str(folder / "known"), "connector")
    return (
        {"key": listener[1], "peer_keys": str(folder / "known")},
        {"key": connector[1], "peer_key": listener[0]},
    )
