"""What every test shares: where the device tests may run, and that a slow machine is no failure."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator

import pytest
from software import RdmaCm, Software

from rdmaconnect.objects import context as device
from rdmaconnect.runtime import peer_log
from rdmaconnect.session import watch

# tests/rdma needs two rxe devices; `docker/lab test` sets this variable where they are.
ON_DEVICES = bool(os.environ.get("RDMACONNECT_LAB"))
collect_ignore = [] if ON_DEVICES else ["rdma"]

if not ON_DEVICES:  # under emulation the import alone takes 20 s, and nothing there uses it
    from hypothesis import HealthCheck, given, settings
    from hypothesis.strategies import none

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What another test had logged, or read of its host, is not held against this one."""
    peer_log.throttle.reset()
    yield
    watch.forget()


@pytest.fixture
def software() -> Iterator[Software]:
    """A device in software in place of libibverbs, ``soft0`` on 127.0.0.1; at the end nothing of it may be left.

    ``software.leaves`` and ``software.expects`` say what a test does on purpose.
    """
    with Software() as made:
        yield made
        problems = made.problems()
        for opened in list(device._opened.values()):  # what is left is not for the next test
            with contextlib.suppress(Exception):
                opened.close()
    assert problems == []


@pytest.fixture
def cm(software: Software) -> Iterator[RdmaCm]:
    """librdmacm beside it, of which nothing is left at the end either, once workers have freed what was closed."""
    with RdmaCm(software) as made:
        yield made
        end = time.monotonic() + 30
        while (made.left() or software.left()) and time.monotonic() < end:
            time.sleep(0.01)


def pytest_collection_finish() -> None:
    """What is there before the first test is not looked through at each collection of garbage in them.

    Hypothesis asks the collector who refers to its generator, and what is frozen is no answer: it has to ask before.
    """
    if not ON_DEVICES:
        given(none())(lambda _: None)()
    gc.collect()
    gc.freeze()
