"""What the campaigns share: enough descriptors, silence in the log, and their lines at the end of the run."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from software import Software

from rdmaconnect.objects import context as device

from .campaign import LINES, Campaign, campaign, until


@pytest.fixture(autouse=True, scope="session")
def many_descriptors() -> Iterator[None]:
    """As many as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 65536), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def software() -> Iterator[Software]:
    """As the other tests' one, but that what was closed has its time to be freed: peers here say no good-bye."""
    with Software() as made:
        yield made
        until(lambda: made.left() == {}, 30)
        problems = made.problems()
        for opened in list(device._opened.values()):  # what is left is not for the next test
            with contextlib.suppress(Exception):
                opened.close()
    assert problems == []


class Uncaught(logging.Handler):
    """Notes exceptions that were caught by nobody but the log: of the service thread, of workers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note it."""
        if record.exc_info:
            self.seen.append(self.format(record))


@pytest.fixture(autouse=True)
def uncaught() -> Iterator[None]:
    """The log of what strangers do would be long; what nobody has caught is a fault."""
    handler, loggers = Uncaught(), [logging.getLogger(name) for name in ("rdmaconnect", "asyncio")]
    before = [(log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.setLevel(logging.ERROR)
        log.propagate = False
        log.addHandler(handler)
    yield
    for log, (level, propagates) in zip(loggers, before, strict=True):
        log.setLevel(level)
        log.propagate = propagates
        log.removeHandler(handler)
    assert handler.seen == []


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """The test's campaign, named as it."""
    unraisable: list[str] = []
    before = sys.unraisablehook

    def hook(error: Any) -> None:
        # Ctrl-C that comes into a finaliser is lost: that is Python's way
        if not isinstance(error.exc_value, KeyboardInterrupt):
            unraisable.append(f"{error.object!r}: {error.exc_value!r}")

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
