"""50 threads on one device in software: ``RDMACONNECT_STRESS_S`` says how many seconds."""

from __future__ import annotations

import os

import stress
from software import Software

from rdmaconnect.objects import context as device
from rdmaconnect.objects import owned as handle


def test_threads_that_do_everything_at_random_leave_nothing(software: Software) -> None:
    before = set(os.listdir("/proc/self/fd"))
    pool = stress.Pool("soft0")
    pool.run(stress.SECONDS, stress.THREADS, seed=1)
    print(f"done {dict(pool.done)}, refused {dict(pool.refused)}")
    assert software.left() == {}
    assert handle._kept == {}
    assert device._opened == {}
    assert software.errors == []
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 40, "guards of the device in software"
