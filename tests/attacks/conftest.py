"""What the campaigns share: enough descriptors, silence in the log, and their lines at the end of the run."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .campaign import LINES, Campaign, campaign


@pytest.fixture(autouse=True, scope="session")
def many_descriptors() -> Iterator[None]:
    """As many as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 65536), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log of what strangers do would be long."""
    log = logging.getLogger("rdmaconnect")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """The test's campaign, named as it."""
    unraisable: list[str] = []
    before = sys.unraisablehook

    def hook(error: Any) -> None:
        words = f"{error.object!r}: {error.exc_value!r}"
        if "WeakSet" not in words:  # Python's own books of its threads: where Ctrl-C comes into these, it loses it
            unraisable.append(words)

    sys.unraisablehook = hook
    try:
        with campaign(request.node.name.removeprefix("test_")) as made:
            yield made
    finally:
        sys.unraisablehook = before
    assert unraisable == []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was counted."""
    if LINES:
        terminalreporter.section("campaigns")
        for line in LINES:
            terminalreporter.write_line(line)
